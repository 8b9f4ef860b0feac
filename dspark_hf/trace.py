"""What happened in a run: one record per round, and their summary. Costs nothing where nobody listens."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field


@dataclass
class Round:
    """One draft and its verification.

    Attributes:
        proposed: ids that the target verified, in order.
        accepted: how many of them stand in the output.
        confidence: survival probability of each position that the drafter looked at, the one that ended the draft
            included; `None` in a round without a draft, and without a confidence head.
        num_new_tokens: tokens that the round added: `accepted + 1`, less where a stop came first.
        draft_seconds, verify_seconds: wall time of drafting, and of the target's pass up to the commit.
    """

    proposed: list[int]
    accepted: int
    confidence: list[float] | None
    num_new_tokens: int
    draft_seconds: float
    verify_seconds: float


@dataclass(frozen=True)
class TraceSummary:
    """Totals of a [`Trace`].

    Attributes:
        num_rounds: verification passes of the target, the prefill not counted.
        num_new_tokens: generated tokens, the first one (which the prefill gives) included.
        acceptance_length: τ, tokens per round, bonus included; 0 without a round.
        acceptance_rate_per_position: for each draft position, accepted over verified.
        tokens_per_second: new tokens over the wall time of the calls, prefill included.
        seconds, prefill_seconds, draft_seconds, verify_seconds: wall time, in total and by part.
    """

    num_rounds: int
    num_new_tokens: int
    acceptance_length: float
    acceptance_rate_per_position: list[float]
    tokens_per_second: float
    seconds: float
    prefill_seconds: float
    draft_seconds: float
    verify_seconds: float


@dataclass
class Trace:
    """Records of the `generate` calls made inside `with drafter.trace() as trace:`, in the order of their rounds."""

    rounds: list[Round] = field(default_factory=list)
    num_new_tokens: int = 0
    seconds: float = 0.0
    prefill_seconds: float = 0.0

    def summary(self) -> TraceSummary:
        rounds = self.rounds
        longest = max((len(r.proposed) for r in rounds), default=0)
        rates = []
        for position in range(longest):
            verified = [r for r in rounds if len(r.proposed) > position]
            rates.append(sum(r.accepted > position for r in verified) / len(verified))
        return TraceSummary(
            num_rounds=len(rounds),
            num_new_tokens=self.num_new_tokens,
            acceptance_length=sum(r.num_new_tokens for r in rounds) / len(rounds) if rounds else 0.0,
            acceptance_rate_per_position=rates,
            tokens_per_second=self.num_new_tokens / self.seconds if self.seconds else 0.0,
            seconds=self.seconds,
            prefill_seconds=self.prefill_seconds,
            draft_seconds=sum(r.draft_seconds for r in rounds),
            verify_seconds=sum(r.verify_seconds for r in rounds),
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
