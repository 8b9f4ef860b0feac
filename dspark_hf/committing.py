"""Which tokens of a verified block join the text, and what stops a row.

Two paces. *Row by row*: each row commits what stands of its own draft; for processors and criteria that look at one
row at a time (transformers' own, nearly all). *In step*: all rows commit position by position together, and the first
draft token that falls ends the round for all; for everything else (a user's own processor or criterion, a streamer or
scores of a batch), which then sees the whole batch, each prefix once and in order, exactly as plain generation shows
it. Both are exact: how far a row's draft is looked at never depends on the tokens behind that point.
"""

import time
from itertools import accumulate
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList, StopStringCriteria
from transformers.generation import EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria
from transformers.generation.streamers import BaseStreamer

from .candidate_generator import Draft
from .outputs import StepOutputs
from .processors import are_memoryless, by_row, read_scores_only
from .sampling import draw, is_accepted, probabilities, residual
from .sequences import Sequences

_ROW_CRITERIA = (EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria, StopStringCriteria)

# Without an end token there is no padding: rows that these stop must end together, as in plain generation.
_UNEVEN = (MaxTimeCriteria, StopStringCriteria)


class Committer:
    """The text of a call, and everything that decides about its next tokens.

    Args:
        config: of the call.
        logits_processor: of the call.
        stopping_criteria: of the call.
        input_ids: `[B, P]`, the prompts.
        streamer: receives every new token.

    Attributes:
        max_length: no row becomes longer.
        sequences: the text.
        outputs: scores and the like, where asked for.
        active: rows that go on.
        slots: of the rows that were active in the last commit, those (by their place in it) that go on.
        num_new_tokens: tokens of all rows so far, padding not counted.
        num_new: of each row of the last commit, the tokens that it gained, padding not counted.
        new_tokens: these tokens.
        num_accepted: of each row of the last commit, the draft tokens that joined the text.
        has_overflown: what the draft of the last commit says, where it was fetched with the rest.
    """

    def __init__(
        self,
        config: GenerationConfig,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        input_ids: torch.Tensor,
        streamer: BaseStreamer | None = None,
    ):
        # A user's own criterion stands in the place of the one that would come of the config.
        limits = [c.max_length for c in stopping_criteria if type(c) is MaxLengthCriteria]
        self.max_length: int = min(limits, default=config.max_length)
        self.sequences = Sequences(input_ids, self.max_length)
        self.outputs = StepOutputs(config, input_ids.shape[0])
        self.streamer = streamer
        self.active = list(range(input_ids.shape[0]))
        self.slots = list(self.active)
        self.num_new_tokens = 0
        self.num_new: list[int] = []
        self.num_accepted: list[int] = []
        self.new_tokens: list[list[int]] = []
        self.has_overflown: bool | None = None
        self._starts: list[int] | None = None  # of each active row in logits without padding
        self._config = config
        self._processors: Any = logits_processor
        self._of_row = by_row(logits_processor, input_ids.shape[0])
        self._criteria: Any = stopping_criteria
        pad: Any = getattr(config, "_pad_token_tensor", None)
        self._pad_token_id = None if pad is None else int(pad)
        self._finished = [False] * input_ids.shape[0]
        # Plain generation pads finished rows where there is an end token, and lets them run on where there is none.
        self._pads = any(hasattr(criterion, "eos_token_id") for criterion in stopping_criteria)
        self._eos_ids = {
            int(token) for c in stopping_criteria if type(c) is EosTokenCriteria for token in c.eos_token_id.view(-1)
        }
        self._is_in_step = not self._may_go_row_by_row(input_ids.shape[0])
        self._at_once = (
            not self._is_in_step and decides_at_once(input_ids.device) and read_scores_only(logits_processor)
        )

    def _may_go_row_by_row(self, num_rows: int) -> bool:
        return (
            are_memoryless(self._processors)
            and all(type(c) in _ROW_CRITERIA for c in self._criteria)
            and (num_rows == 1 or self._pads or not any(type(c) in _UNEVEN for c in self._criteria))
            and (num_rows == 1 or self.streamer is None)
            and not self.outputs.are_wanted
        )

    @torch.no_grad()
    def commit(self, logits: torch.Tensor, draft: Draft, is_padded: bool = True) -> list[int]:
        """Commits draft tokens while they stand, then one token of the target, unless a criterion stops a row first.

        Args:
            logits: `[R, 1 + n, V]` over anchor and draft of the active rows, or, without padding, `[1, N, V]`.
            draft: of the same rows.
            is_padded: whether each row has logits for the longest draft.

        Returns:
            How many positions of each of them are committed: the tokens that it gained, and in step the padding of
            a row that ended before others.
        """
        num_rows = len(self.active)
        self._starts = None if is_padded else [0, *accumulate(1 + length for length in draft.row_lengths[:-1])]
        self.num_accepted, self.new_tokens = [0] * num_rows, [[] for _ in range(num_rows)]
        if self._is_in_step:
            counts = self._commit_in_step(logits, draft)
        elif self._at_once:
            counts = self._commit_at_once(logits, draft)
        else:
            counts = self._commit_row_by_row(logits, draft)
        if not self._is_in_step:
            self.num_new = counts
        self.num_new_tokens += sum(self.num_new)
        self._stop_at_time_limit()
        if self._pads or not self._is_in_step or all(self._finished):
            self.slots = [slot for slot, row in enumerate(self.active) if not self._finished[row]]
        else:
            self.slots = list(range(num_rows))
        self.active = [self.active[slot] for slot in self.slots]
        return counts

    def result(self, cache: Any) -> Any:
        """What plain decoding returns."""
        ids = self.sequences.padded(self._pad_token_id)
        return self.outputs.to_output(ids, cache) if self._config.return_dict_in_generate else ids

    # Row by row

    def _commit_row_by_row(self, logits: torch.Tensor, draft: Draft) -> list[int]:
        counts = [0] * len(self.active)
        drafted, lengths = draft.token_ids.tolist(), draft.row_lengths
        standing, position = list(range(len(self.active))), 0
        while standing:
            raw = self._raw(logits, standing, position)
            scores = self._process_rows(raw, standing)
            tokens, stand = self._decide(scores, draft, drafted, lengths, standing, position)
            going_on = []
            for slot, token, stands in zip(standing, tokens, stand, strict=True):
                row = self.active[slot]
                self.sequences.append(row, [token])
                self.new_tokens[slot].append(token)
                counts[slot] += 1
                self.num_accepted[slot] += stands
                self._finished[row] = self._stops(row, token)
                if self.streamer is not None:
                    self.streamer.put(torch.tensor([token]))
                if stands and not self._finished[row]:
                    going_on.append(slot)
            standing, position = going_on, position + 1
        return counts

    def _raw(self, logits: torch.Tensor, slots: list[int], position: int) -> torch.Tensor:
        """`[S, V]` float32 logits, a copy, where the text is."""
        if self._starts is not None:
            # In step, rows go on behind their drafts as well; nobody reads what they get there.
            rows = logits[0, [min(self._starts[slot] + position, logits.shape[1] - 1) for slot in slots]]
        else:
            rows = logits[:, position] if len(slots) == logits.shape[0] else logits[slots, position]
        return rows.to(copy=True, dtype=torch.float32, device=self.sequences.device)

    def _process_rows(self, raw: torch.Tensor, slots: list[int]) -> torch.Tensor:
        if not self._processors:
            return raw
        if read_scores_only(self._processors):
            return self._processors(self.sequences.prefix(self.active[slots[0]]), raw)
        rows = [self.active[slot] for slot in slots]
        return torch.cat([self._of_row[row](self.sequences.prefix(row), raw[i : i + 1]) for i, row in enumerate(rows)])

    def _decide(
        self,
        scores: torch.Tensor,
        draft: Draft,
        drafted: list[list[int]],
        lengths: list[int],
        slots: list[int],
        position: int,
    ) -> tuple[list[int], list[bool]]:
        """The tokens at a position from `[S, V]` processed scores, and whether each is the draft's, so that the next
        position of its row counts as well."""
        if not self._config.do_sample:
            tokens = scores.argmax(dim=-1).tolist()
            return tokens, [
                position < lengths[slot] and drafted[slot][position] == token
                for slot, token in zip(slots, tokens, strict=True)
            ]
        target = probabilities(scores)
        on_draft = [i for i, slot in enumerate(slots) if position < lengths[slot]]
        stand = [False] * len(slots)
        if not on_draft:
            return draw(target).tolist(), stand
        ids = draft.token_ids[[slots[i] for i in on_draft], position]
        target_there = target if len(on_draft) == len(slots) else target[on_draft]
        proposed = draft.probabilities(([slots[i] for i in on_draft], position), target.shape[-1])
        accepted = is_accepted(target_there, proposed, ids, torch.rand_like(target_there[:, 0])).tolist()
        tokens = [0] * len(slots)
        for i, token, is_kept in zip(on_draft, ids.tolist(), accepted, strict=True):
            tokens[i], stand[i] = token, is_kept
        if all(stand):
            return tokens, stand
        # What did not stand is drawn from the residual, what lies behind the draft from the target's distribution.
        rest = target
        if not all(accepted):
            leftover = residual(target_there, proposed)
            if len(on_draft) == len(slots):
                rest = leftover
            else:
                rest = target.clone()
                rest[on_draft] = leftover
        open_slots = [i for i, stands in enumerate(stand) if not stands]
        drawn = draw(rest if len(open_slots) == len(slots) else rest[open_slots]).tolist()
        for i, token in zip(open_slots, drawn, strict=True):
            tokens[i] = token
        return tokens, stand

    def _stops(self, row: int, token: int) -> bool:
        """Whether a row ends with its newest token."""
        stops = token in self._eos_ids
        for criterion in self._criteria:
            if type(criterion) is MaxLengthCriteria:
                stops |= self.sequences.lengths[row] >= criterion.max_length
            elif type(criterion) is StopStringCriteria:
                stops |= bool(criterion(self.sequences.prefix(row), None).all())
        return stops

    def _stop_at_time_limit(self) -> None:
        # In step, it has been asked with the other criteria.
        for criterion in self._criteria:
            if type(criterion) is MaxTimeCriteria and not self._is_in_step:
                is_over = time.time() - criterion.initial_timestamp > criterion.max_time
                self._finished = [finished or is_over for finished in self._finished]

    # Row by row, all positions at once

    def _commit_at_once(self, logits: torch.Tensor, draft: Draft) -> list[int]:
        """One wait for the device in the whole round: for accelerators."""
        counts = [0] * len(self.active)
        if self._starts is not None:
            columns = torch.arange(1 + draft.length, device=logits.device)
            index = torch.tensor(self._starts, device=logits.device)[:, None] + columns
            logits = logits[0, index.clamp_max(logits.shape[1] - 1)]
        scores = logits.to(dtype=torch.float32, device=self.sequences.device)
        if self._processors:
            flat = scores.reshape(-1, scores.shape[-1])
            scores = self._processors(self.sequences.prefix(self.active[0]), flat).view(scores.shape)
        block, num_accepted = self._decide_at_once(scores, draft)
        overflow = draft.has_overflown if draft.has_overflown is not None else block.new_zeros((), dtype=torch.bool)
        on_host = torch.cat((num_accepted, overflow.to(block)[None], block.flatten())).tolist()
        num_rows, width = block.shape
        self.has_overflown = bool(on_host[num_rows])
        rows = [on_host[num_rows + 1 + slot * width :][:width] for slot in range(num_rows)]
        for slot, (accepted, tokens) in enumerate(zip(on_host[:num_rows], rows, strict=True)):
            row, kept = self.active[slot], 0
            start = self.sequences.lengths[row]
            self.sequences.append(row, block[slot, : accepted + 1])
            while kept <= accepted and not self._finished[row]:
                kept += 1
                # A criterion sees each prefix, and nothing behind it.
                self.sequences.lengths[row] = start + kept
                self._finished[row] = self._stops(row, tokens[kept - 1])
            counts[slot] = kept
            self.new_tokens[slot] = tokens[:kept]
            self.num_accepted[slot] = min(accepted, kept)
            if self.streamer is not None:
                for token in tokens[:kept]:
                    self.streamer.put(torch.tensor([token]))
        return counts

    def _decide_at_once(self, scores: torch.Tensor, draft: Draft) -> tuple[torch.Tensor, torch.Tensor]:
        """`[R, 1 + n]` tokens, good up to the first one behind the accepted draft, and `[R]` accepted draft tokens."""
        ids, num_drafted = draft.token_ids, draft.length
        lengths = torch.tensor(draft.row_lengths, device=ids.device)
        on_draft = torch.arange(num_drafted, device=ids.device) < lengths[:, None]
        if not self._config.do_sample:
            block = scores.argmax(dim=-1)
            stands = (block[:, :-1] == ids) & on_draft
            return block, stands.long().cumprod(dim=-1).sum(dim=-1)
        target = probabilities(scores)
        proposed = draft.probabilities((), target.shape[-1])
        uniform = torch.rand(ids.shape, device=ids.device)
        stands = is_accepted(target[:, :-1], proposed, ids, uniform) & on_draft
        num_accepted = stands.long().cumprod(dim=-1).sum(dim=-1)
        rows = torch.arange(len(ids), device=ids.device)
        last = target[rows, num_accepted]
        if num_drafted:
            leftover = residual(last, proposed[rows, num_accepted.clamp_max(num_drafted - 1)])
            last = torch.where((num_accepted < lengths)[:, None], leftover, last)
        block = torch.nn.functional.pad(ids, (0, 1))
        block[rows, num_accepted] = draw(last)
        return block, num_accepted

    # In step

    def _commit_in_step(self, logits: torch.Tensor, draft: Draft) -> list[int]:
        drafted, lengths, slots = draft.token_ids.tolist(), draft.row_lengths, list(range(len(self.active)))
        self.num_new, position = [0] * len(slots), 0
        while True:
            open_slots = [slot for slot in slots if not (self._pads and self._finished[self.active[slot]])]
            raw = self._widened(self._raw(logits, slots, position))
            scores = self._processors(self.sequences.level_ids(), raw)
            own = scores if len(slots) == len(self.sequences) else scores[self.active]
            tokens, stand = self._decide(own, draft, drafted, lengths, slots, position)
            self._append_in_step(tokens, scores, raw)
            goes_on = [not self._finished[row] or not self._pads for row in self.active]
            for slot in open_slots:
                self.num_new[slot] += 1
                self.new_tokens[slot].append(tokens[slot])
                self.num_accepted[slot] += stand[slot]
            position += 1
            if all(self._finished) or not all(s for s, goes in zip(stand, goes_on, strict=True) if goes):
                return [position] * len(slots)

    def _append_in_step(self, tokens: list[int], scores: torch.Tensor, raw: torch.Tensor) -> None:
        by_row = dict(zip(self.active, tokens, strict=True))
        column = []
        for row, finished in enumerate(self._finished):
            is_padded = self._pads and finished
            column.append((self._pad_token_id or 0) if is_padded else by_row[row])
            self.sequences.append(row, [column[-1]])
        self.outputs.add_token(scores, raw)
        stops = self._criteria(self.sequences.level_ids(), self.outputs.scores).tolist()
        self._finished = [finished or stop for finished, stop in zip(self._finished, stops, strict=True)]
        if self.streamer is not None:
            self.streamer.put(torch.tensor(column))

    def _widened(self, raw: torch.Tensor) -> torch.Tensor:
        """`[R, V]` logits of active rows to `[B, V]`; zeros for finished ones."""
        if len(raw) == len(self.sequences):
            return raw
        full = raw.new_zeros((len(self.sequences), raw.shape[1]))
        full[self.active] = raw
        return full


def decides_at_once(device: torch.device) -> bool:
    """Whether a round looks at all positions together: it waits for the device once, but a CPU would compute more."""
    return device.type != "cpu"
