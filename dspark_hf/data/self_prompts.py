"""Prompts that the target writes itself: it goes on after the header of a user's message, and a sieve keeps the good.

What a chat model was tuned on is what it likes to say in a user's place. So these prompts cover what it is used for,
without any data set.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any

from .._compat import TargetModel
from ..comparison import GREEDY
from .answering import Decoding, answer
from .encoding import Encoder
from .progress import Progress
from .rows import LineFile
from .sieve import Sieve

DATASET = "self"

# Of all prompts, those that may begin with the same words; but a few at least.
_PART_PER_OPENING = 0.005
_FEW_PER_OPENING = 3

# Messages that end late wait for others of their kind.
_BATCHES_OF_A_WINDOW = 4

# After so many attempts in a row without anything new, the target has no more to ask.
_PATIENCE = 640


@dataclass(frozen=True)
class Writer:
    """The target in the user's place.

    Attributes:
        temperature, top_p: of sampling.
        max_tokens: of a message; longer ones are refused.
        openings: beginnings to go on from, in turn; without any, the target begins as it likes.
    """

    target: TargetModel
    encoder: Encoder
    temperature: float
    top_p: float
    max_tokens: int = 128
    openings: Sequence[str] = ()
    batch_size: int = 32

    def write(self, file: LineFile, num_prompts: int, known: Sequence[str], progress: Progress) -> Sieve:
        """Adds prompts to a file until it holds so many.

        Args:
            file: receives rows of `dataset`, `index` and `prompt`.
            known: prompts that are not to come again, nor nearly.

        Returns:
            The sieve, with what it refused.

        Raises:
            ValueError: the chat template shows no place for a user's words, or hardly anything new comes any more.
        """
        header, stop_ids = self.encoder.user_frame()
        sieve = Sieve(known, max(_FEW_PER_OPENING, int(_PART_PER_OPENING * num_prompts)))
        for row in file.rows:
            sieve.add(row["prompt"])
        fruitless = 0
        attempts = self._attempts(header, stop_ids, sieve)
        while len(file.rows) < num_prompts:
            prompt, num_tokens = next(attempts)
            is_kept = prompt is not None and sieve.take(prompt)
            if is_kept:
                file.append([{"dataset": DATASET, "index": len(file.rows), "prompt": prompt}])
            progress.advance(int(is_kept), num_tokens)
            fruitless = 0 if is_kept else fruitless + 1
            if fruitless == _PATIENCE:
                raise ValueError(
                    f"The target has written {len(file.rows)} of {num_prompts} prompts, and nothing new in its last "
                    f"{_PATIENCE} attempts: ask for fewer, give it --self-openings, or raise --self-temperature. "
                    "The prompts so far are kept."
                )
        return sieve

    def _attempts(self, header: list[int], stop_ids: frozenset[int], sieve: Sieve) -> Iterator[tuple[str | None, int]]:
        """What the target says in the user's place, without end, as it comes; and how many tokens that took."""
        decoding = Decoding(self.max_tokens, stop_ids, self._sampling)
        starts = (header + opening for opening in cycle(self._opening_ids() or [[]]))
        while True:
            window = [*islice(starts, self.batch_size * _BATCHES_OF_A_WINDOW)]
            for number, ids in answer(self.target, window, decoding, self.batch_size):
                yield self._message(window[number][len(header) :] + ids, stop_ids, sieve), len(ids)

    @property
    def _sampling(self) -> dict[str, Any]:
        return {**GREEDY, "do_sample": True, "temperature": self.temperature, "top_p": self.top_p, "top_k": 0}

    def _opening_ids(self) -> list[list[int]]:
        return [self.encoder.tokenizer(text, add_special_tokens=False)["input_ids"] for text in self.openings]

    def _message(self, ids: list[int], stop_ids: frozenset[int], sieve: Sieve) -> str | None:
        """The words of the user, or `None` where the message did not end, or holds marks of the template."""
        *body, last = ids
        if last not in stop_ids:
            sieve.refused["too long"] += 1
        elif any(self.encoder.is_special(token) for token in body):
            sieve.refused["special tokens inside"] += 1
        else:
            return self.encoder.text_of(body).strip()
        return None
