"""How many draft tokens of a round does the target verify, and who proposes them? Pure numbers: no model, no tensor.

Before each round a [`Schedule`] gets the state of every row and returns a plan: the drafter's tokens, a continuation
looked up in the context, or none, and how many. A plan may come with a [`Gate`], which ends drafts while they are
drawn. Afterwards the schedule learns what was accepted and how long the round took. `policies` lists all schedules.

Whether position k of a draft is verified may depend on what is known before its token is drawn, and on nothing else:
on past rounds, on committed tokens, on the draft tokens before k, on the drafter's own numbers at k. A decision that
knew the token itself would favour some tokens over others, and the output would no longer have the target's
distribution (paper, appendix A). A plan is made before anything is drawn; a gate is asked about position k before k
is drawn, and what it admits at the end follows the same rule (`admission`).
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from .acceptance import DRAFTER
from .costs import CostTable, RoundCosts
from .lookup import LookupOffer


@dataclass(frozen=True)
class DraftLength:
    """What decides the draft lengths of one call.

    Attributes:
        num_assistant_tokens: draft tokens of the drafter in a round at most.
        confidence_threshold: a position with a confidence below it ends the draft; 0 is off.
        schedule: the name of a schedule, a key of `policies.SCHEDULES`, or a subclass of [`Schedule`].
        lookup_tokens: tokens of a lookup continuation in a round at most; 0 is off.
        entropy_threshold: the same as `confidence_threshold`, of the acceptance that entropy promises; where the
            schedule goes by entropy.
        has_confidence: whether the drafter has a confidence head.
    """

    num_assistant_tokens: int
    confidence_threshold: float
    schedule: "str | type[Schedule]" = "auto"
    lookup_tokens: int = 0
    entropy_threshold: float = 0.0
    has_confidence: bool = False

    def ends_before(self, confidence: float) -> bool:
        """Whether a position of this confidence is left out, and all after it. NaN ends the draft."""
        return self.confidence_threshold > 0 and not confidence >= self.confidence_threshold


@dataclass(frozen=True)
class RowState:
    """One row before a round.

    Attributes:
        row: its number in the call, the same in every round.
        context_length: committed tokens.
        room: draft tokens that make sense at most, at least 0.
        offer: a continuation found in the context.
        can_draft: whether the drafter can run for it.
    """

    row: int
    context_length: int
    room: int
    offer: LookupOffer | None = None
    can_draft: bool = True


@dataclass(frozen=True)
class RowPlan:
    """Who proposes for a row, and how many tokens; `"none"` goes with 0."""

    source: Literal["drafter", "lookup", "none"]
    num_tokens: int


class Gate(ABC):
    """Ends the drafts of the rows of one plan while they are drawn.

    Attributes:
        signal: what it decides by, at each position: the drafter's "confidence" c_k, or the "entropy" of the
            distribution that the token will be drawn from, in nats. Both are known before the token is.
    """

    signal: ClassVar[Literal["confidence", "entropy"]]

    @abstractmethod
    def opens(self, position: int, signals: Sequence[float]) -> list[bool]:
        """Which rows draw a token at this position, from 0.

        Args:
            signals: of every row; NaN where it has no draft, or none any more.
        """

    def admitted(self, lengths: Sequence[int]) -> list[int]:
        """How many of the tokens that each row has drawn are verified; the others are dropped."""
        return list(lengths)


@dataclass(frozen=True)
class Plan:
    """A plan for each row, in their order, and a word for the trace that says what made this choice.

    `reason` is one of "constant"; "best" (most tokens per second), "exploring" (the same, but by a guessed price),
    "aside" (no draft pays), "probing" (a try after some rounds aside), "measuring" (the price of a plain pass),
    "nothing" (that could be drafted).
    """

    rows: list[RowPlan]
    reason: str
    gate: Gate | None = field(default=None, compare=False)


@dataclass(frozen=True)
class RowOutcome:
    """One row after a round.

    Attributes:
        row: its number in the call.
        source: who proposed.
        proposed: draft tokens that the target's pass covered, rejected ones included; fewer than planned where the
            draft ended by itself.
        accepted: how many of them stand.
        has_ended: whether the row is finished, before its length made it so.
        next_was_seen: whether the target said what comes behind the accepted tokens: a row that ends with one of them,
            or whose round another row ended, says nothing of the position behind.
    """

    row: int
    source: str
    proposed: int
    accepted: int
    has_ended: bool = False
    next_was_seen: bool = True


class Schedule(ABC):
    """Decides the rounds of one call.

    A subclass with a line in `SCHEDULES` can be named in `num_assistant_tokens_schedule`. It is made from the settings
    of the call, the pair's measurements, and whether the target's pass pads every row to the longest draft.
    `LOOKUP_TOKENS` is its number of lookup tokens where the user gives none.
    """

    LOOKUP_TOKENS: ClassVar[int]

    @abstractmethod
    def __init__(self, settings: DraftLength, table: CostTable, pads_rows: bool = False): ...

    @abstractmethod
    def plan(self, rows: Sequence[RowState]) -> Plan:
        """What each row shall draft in the coming round. Called once per round."""

    def observe(self, plan: Plan, outcomes: Sequence[RowOutcome], seconds: float, draft_seconds: float | None) -> None:
        """Learns from the round that `plan` was for.

        Args:
            outcomes: one per row of the plan, in the same order.
            seconds: wall time of the whole round.
            draft_seconds: the drafter's part of it; `None` where it is not known.
        """
        return  # a schedule may have nothing to learn

    def mismatch(self) -> str | None:
        """A sentence for the user if the drafter does not seem to fit its target at all."""
        return None


def row_plan(source: Literal["drafter", "lookup"], num_tokens: int) -> RowPlan:
    """So many tokens of a source, or none."""
    return RowPlan(source, num_tokens) if num_tokens > 0 else RowPlan("none", 0)


def plain_plan(rows: Sequence[RowState], reason: str) -> Plan:
    """No draft for any row."""
    return Plan([RowPlan("none", 0)] * len(rows), reason)


def pass_size(lengths: Sequence[int], pads_rows: bool) -> int:
    """Draft tokens of a pass over drafts of such lengths, padding included."""
    return len(lengths) * max(lengths) if pads_rows else sum(lengths)


def observe_costs(
    costs: RoundCosts,
    plan: Plan,
    outcomes: Sequence[RowOutcome],
    seconds: float,
    draft_seconds: float | None,
    pads_rows: bool,
) -> None:
    """Learns from the round that `plan` was for what it cost; arguments as for `Schedule.observe`."""
    drafted = [outcome.proposed for row, outcome in zip(plan.rows, outcomes, strict=True) if row.source == DRAFTER]
    costs.observe(
        num_rows=len(outcomes),
        size=pass_size([outcome.proposed for outcome in outcomes], pads_rows),
        num_draft_rows=len(drafted),
        num_draft_tokens=max(drafted, default=0),
        seconds=seconds,
        draft_seconds=draft_seconds,
    )
