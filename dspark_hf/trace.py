"""What happened in a run: one record per round, and their summary. Costs nothing where nobody listens."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul
from typing import Any


@dataclass
class Round:
    """One draft and its verification.

    In a batch the fields of rows (`proposed` to `source`) are lists with one entry per row of the round.

    Attributes:
        proposed: ids that the target verified, in order.
        accepted: how many of them stand in the output.
        confidence: c_k of each position that the drafter looked at (the chance that its token is accepted if those
            before it are), the one that ended the draft included; `None` in a round without a draft, and without a
            confidence head.
        num_new_tokens: tokens that the round added: `accepted + 1`, less where a stop came first.
        source: `"drafter"`, `"lookup"` (the context itself) or `"none"`.
        reason: why the schedule chose so.
        rows: which rows of the call took part: those that had not finished.
        draft_seconds: wall time of drafting; `chain_seconds` of it went into the sequential part (the Markov loop).
        verify_seconds: wall time of the target's forward pass.
        seconds: wall time of the whole round.
    """

    proposed: list[Any]
    accepted: Any
    confidence: list[Any] | None
    num_new_tokens: Any
    source: Any = "drafter"
    reason: str = ""
    rows: list[int] = field(default_factory=lambda: [0])
    draft_seconds: float = 0.0
    chain_seconds: float = 0.0
    verify_seconds: float = 0.0
    seconds: float = 0.0
    is_batch: bool = False

    def per_row(self) -> Iterator[tuple[list[int], int, int]]:
        """`(proposed, accepted, num_new_tokens)` of each row."""
        if self.is_batch:
            return zip(self.proposed, self.accepted, self.num_new_tokens, strict=True)
        return iter([(self.proposed, self.accepted, self.num_new_tokens)])

    def drafts_with_confidence(self) -> Iterator[tuple[list[float], int]]:
        """The confidences of the tokens that were verified, and how many of them were accepted, of each row whose
        draft has them and was not cut short by a stop."""
        of_rows = (self.confidence if self.is_batch else [self.confidence]) if self.confidence else []
        for confidence, (proposed, accepted, num_new) in zip(of_rows, self.per_row(), strict=bool(of_rows)):
            if proposed and len(confidence or []) >= len(proposed) and num_new == accepted + 1:
                yield confidence[: len(proposed)], accepted


@dataclass(frozen=True)
class TraceSummary:
    """Totals of a [`Trace`].

    Attributes:
        num_rounds: verification passes of the target, the prefill not counted.
        num_new_tokens: generated tokens of all rows, the first ones (which the prefill gives) included.
        acceptance_length: τ, tokens per round and row, bonus included; 0 without a round.
        acceptance_rate_per_position: for each draft position, accepted over verified.
        verified_per_round: draft tokens that the target verified, per round and row.
        rounds_without_draft: share of the rounds and rows in which nothing was verified.
        accepted_per_draft: draft tokens accepted, per round and row in which the confidences are known.
        predicted_per_draft: what the confidences of these drafts promised; NaN where none are known.
        tokens_per_second: new tokens over the wall time of the calls, prefill included.
        seconds: wall time of the calls.
        prefill_seconds, round_seconds: its parts.
        draft_seconds, chain_seconds, verify_seconds: parts of the rounds, as in [`Round`].
    """

    num_rounds: int
    num_new_tokens: int
    acceptance_length: float
    acceptance_rate_per_position: list[float]
    verified_per_round: float
    rounds_without_draft: float
    accepted_per_draft: float
    predicted_per_draft: float
    tokens_per_second: float
    seconds: float
    prefill_seconds: float
    draft_seconds: float
    chain_seconds: float
    verify_seconds: float
    round_seconds: float


@dataclass
class Trace:
    """Records of the `generate` calls made inside `with drafter.trace() as trace:`, in the order of their rounds."""

    rounds: list[Round] = field(default_factory=list)
    num_new_tokens: int = 0
    seconds: float = 0.0
    prefill_seconds: float = 0.0

    def summary(self) -> TraceSummary:
        rounds = self.rounds
        rows = [row for r in rounds for row in r.per_row()]
        rates, known = [], [draft for r in rounds for draft in r.drafts_with_confidence()]
        for position in range(max((len(proposed) for proposed, _, _ in rows), default=0)):
            verified = [accepted for proposed, accepted, _ in rows if len(proposed) > position]
            rates.append(sum(accepted > position for accepted in verified) / len(verified))
        return TraceSummary(
            num_rounds=len(rounds),
            num_new_tokens=self.num_new_tokens,
            acceptance_length=sum(num_new for _, _, num_new in rows) / len(rows) if rows else 0.0,
            acceptance_rate_per_position=rates,
            verified_per_round=sum(len(proposed) for proposed, _, _ in rows) / len(rows) if rows else 0.0,
            rounds_without_draft=sum(not proposed for proposed, _, _ in rows) / len(rows) if rows else 0.0,
            accepted_per_draft=sum(accepted for _, accepted in known) / len(known) if known else math.nan,
            predicted_per_draft=(
                sum(sum(accumulate(draft, mul)) for draft, _ in known) / len(known) if known else math.nan
            ),
            tokens_per_second=self.num_new_tokens / self.seconds if self.seconds else 0.0,
            seconds=self.seconds,
            prefill_seconds=self.prefill_seconds,
            draft_seconds=sum(r.draft_seconds for r in rounds),
            chain_seconds=sum(r.chain_seconds for r in rounds),
            verify_seconds=sum(r.verify_seconds for r in rounds),
            round_seconds=sum(r.seconds for r in rounds),
        )


_active: ContextVar[tuple[tuple[object, Trace], ...]] = ContextVar("dspark_hf_active_traces", default=())


@contextmanager
def recording(drafter: object) -> Iterator[Trace]:
    """Makes a trace the listener of `drafter` in the current context (thread or task), until the block ends."""
    trace = Trace()
    token = _active.set((*_active.get(), (drafter, trace)))
    try:
        yield trace
    finally:
        _active.reset(token)


def active_traces(drafter: object) -> list[Trace]:
    """The traces that listen to `drafter` in the current context."""
    return [trace for owner, trace in _active.get() if owner is drafter]
