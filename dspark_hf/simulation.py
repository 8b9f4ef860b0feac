"""Simulated acceptance: what a drafter of a given quality would bring, without training one.

The drafter runs in full, so that its cost is the true one, and then its proposals are replaced: at each position by
the target's own next token with a given probability, else by another token. Whether a position is right depends on
the position in the text alone, so that every loop is offered the same proposals. For measurements: the texts must be
known beforehand.
"""

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from .candidate_generator import Draft, DSparkCandidateGenerator
from .generation import SpeculativeDecoding
from .modeling_dspark import DSparkDrafter
from .scheduling import Gate


class SimulatedProposals:
    """What the target says after each prompt of one call, and which positions of it are proposed rightly.

    In half precision a block pass and a one-token pass may choose different tokens at a near tie, and the text leaves
    the one that is known; from there on every proposal is wrong. `learn` the new text, and the next call follows it.

    Args:
        prompt_length: tokens of a prompt, padding included.
        acceptance: probability that a position is right, given that all before it in its draft are.
        vocab_size: ids of the target.
        seed: two objects with the same seed are right at the same positions.
    """

    def __init__(self, prompt_length: int, acceptance: float, vocab_size: int, seed: int = 0):
        self.acceptance = acceptance
        self._prompt_length = prompt_length
        self._vocab_size = vocab_size
        self._seed = seed
        self._texts: list[list[list[int]]] = []
        self._proposals: list[list[torch.Tensor]] = []

    def learn(self, texts: Sequence[Sequence[int]], device: torch.device) -> bool:
        """Takes note of what a call wrote after each prompt.

        Returns:
            Whether one of the texts was new.
        """
        rows = [[*text] for text in texts]
        if not self._texts:
            self._texts, self._proposals = [[] for _ in rows], [[] for _ in rows]
        is_new = False
        for row, text in enumerate(rows):
            if text not in self._texts[row]:
                is_new = True
                self._texts[row].append(text)
                self._proposals[row].append(torch.tensor(self._proposals_for(row, text), device=device))
        return is_new

    def _proposals_for(self, row: int, text: list[int]) -> list[int]:
        chance = random.Random(f"{self._seed} {row}")
        is_right = [chance.random() < self.acceptance for _ in text]
        return [t if right else (t + 1) % self._vocab_size for t, right in zip(text, is_right, strict=True)]

    def after(self, row: int, prefix: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """`[num_tokens]` proposals after a row's committed tokens `[1, L]`; zeros behind the end of the text."""
        start = prefix.shape[1] - self._prompt_length
        proposals = self._proposals[row][self._followed(row, prefix)][start : start + num_tokens]
        return torch.nn.functional.pad(proposals, (0, num_tokens - len(proposals)))

    def _followed(self, row: int, prefix: torch.Tensor) -> int:
        """Which of the known texts the row has followed so far. Reads the tokens only where there is a choice."""
        texts = self._texts[row]
        if len(texts) > 1:
            written = prefix[0, self._prompt_length :].tolist()
            for index, text in enumerate(texts):
                if text[: len(written)] == written:
                    return index
        return len(texts) - 1


class SimulatedCandidateGenerator(DSparkCandidateGenerator):
    """A candidate generator whose drafts are simulated; the arguments are those of its base class.

    Args:
        proposals: the texts, learnt already.
    """

    def __init__(self, *args: Any, proposals: SimulatedProposals, **kwargs: Any):
        super().__init__(*args, **kwargs)
        if self.do_sample:
            raise ValueError("Simulated acceptance knows the greedy text only: leave out `do_sample`.")
        self._proposals = proposals

    def draft(self, prefixes: Sequence[torch.Tensor], limits: int | Sequence[int], gate: Gate | None = None) -> Draft:
        draft = super().draft(prefixes, limits, gate)
        if draft.length == 0:
            return draft
        rows = zip(self.rows, prefixes, strict=True)
        token_ids = torch.stack([self._proposals.after(row, prefix.view(1, -1), draft.length) for row, prefix in rows])
        confidence = draft.confidence and [[self._proposals.acceptance] * len(row) for row in draft.confidence]
        return replace(draft, token_ids=token_ids.to(draft.token_ids.device), confidence=confidence)


class SimulatedDecoding(SpeculativeDecoding):
    """The decoding loop with simulated drafts; the arguments are those of its base class.

    Args:
        proposals: the texts, learnt already.
    """

    generator_class: Any

    def __init__(self, drafter: DSparkDrafter, *, proposals: SimulatedProposals, **settings: Any):
        super().__init__(drafter, **settings)
        self.generator_class = partial(SimulatedCandidateGenerator, proposals=proposals)
