"""How many draft tokens of a round does the target verify, and who proposes them? Pure numbers: no model, no tensor.

Before each round a [`Schedule`] gets the state of every row and returns a plan: the drafter's tokens, a continuation
looked up in the context, or none, and how many. Afterwards it learns what was accepted and how long the round took.

    constant    `num_assistant_tokens` of the drafter's tokens, always
    auto        whatever promises the most new tokens per second by the prices and chances measured so far; with no
                draft where none pays, and a try from time to time

A plan depends on past rounds and on committed tokens only, never on the draft it is about. The confidence threshold
cuts drafts besides: whether position k is drawn is decided by its confidence, known before the token in question is.
So the output keeps the target's distribution under every schedule (paper, section 4).
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Literal

from transformers import GenerationConfig

from .costs import DRAFTER, LOOKUP, CostTable, DraftAcceptance, LookupAcceptance, RoundCosts
from .errors import UnsupportedGenerationError
from .lookup import LookupOffer


@dataclass(frozen=True)
class DraftLength:
    """What decides the draft lengths of one call.

    Attributes:
        num_assistant_tokens: draft tokens of the drafter in a round at most.
        confidence_threshold: a position with a confidence below it ends the draft; 0 is off.
        schedule: the name of a schedule, a key of `SCHEDULES`.
        lookup_tokens: tokens of a lookup continuation in a round at most; 0 is off.
    """

    num_assistant_tokens: int
    confidence_threshold: float
    schedule: str = "auto"
    lookup_tokens: int = 0

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


@dataclass(frozen=True)
class Plan:
    """A plan for each row, in their order, and a word for the trace that says what made this width.

    `reason` is one of "constant"; "best" (most tokens per second), "exploring" (the same, but by a guessed price),
    "aside" (no draft pays), "probing" (a try after some rounds aside), "measuring" (the price of a plain pass), "full"
    (nothing can be drafted).
    """

    rows: list[RowPlan]
    reason: str

    @property
    def is_plain(self) -> bool:
        return not any(row.num_tokens for row in self.rows)


@dataclass(frozen=True)
class RowOutcome:
    """One row after a round.

    Attributes:
        row: its number in the call.
        source: who proposed.
        proposed: tokens verified; less than planned where the draft ended early.
        accepted: how many of them stand.
    """

    row: int
    source: str
    proposed: int
    accepted: int


class Schedule(ABC):
    """Decides the rounds of one call."""

    @abstractmethod
    def plan(self, rows: Sequence[RowState]) -> Plan:
        """What each row shall draft in the coming round. Called once per round."""

    def observe(
        self, plan: Plan, outcomes: Sequence[RowOutcome], seconds: float, draft_seconds: float | None
    ) -> None:
        """Learns from the round that `plan` was for.

        Args:
            outcomes: one per row of the plan, in the same order.
            seconds: wall time of the whole round.
            draft_seconds: the drafter's part of it; `None` where it is not known.
        """

    def mismatch(self) -> str | None:
        """A sentence for the user if the drafter does not seem to fit its target at all."""
        return None


class ConstantSchedule(Schedule):
    """As many draft tokens as allowed in every round, for measurements and comparisons.

    Where lookups are on, a continuation whose match is long takes the place of the draft.
    """

    LOOKUP_TOKENS = 0
    LONG_MATCH = 8

    def __init__(self, settings: DraftLength, table: CostTable):
        self._settings = settings

    def plan(self, rows: Sequence[RowState]) -> Plan:
        return Plan([self._row_plan(row) for row in rows], "constant")

    def _row_plan(self, row: RowState) -> RowPlan:
        if row.offer is not None and row.offer.match_length >= self.LONG_MATCH:
            return _row_plan(LOOKUP, min(len(row.offer.token_ids), self._settings.lookup_tokens, row.room))
        return _row_plan(DRAFTER, min(self._settings.num_assistant_tokens, row.room) if row.can_draft else 0)


class AutoSchedule(Schedule):
    """The most expected new tokens per second, plain decoding among the choices.

    A round costs what its longest draft costs: the other rows are padded to that width. So the choice is one width,
    with or without the drafter; then every row fills the width from the source that promises it more. Where plain
    decoding wins, the drafter is tried again after a number of rounds that doubles with each try in vain.
    """

    LOOKUP_TOKENS = 16
    MIN_PAUSE, MAX_PAUSE = 8, 64
    # A draft must promise this much more than plain decoding: estimates are noisy, and the choice flatters the winner.
    MARGIN = 1.02
    # What a drafter worth trying again would reach at each position.
    HOPE = 0.6

    def __init__(self, settings: DraftLength, table: CostTable):
        self._settings = settings
        self._table = table
        self._costs = RoundCosts(table)
        self._drafts = DraftAcceptance(table, settings.num_assistant_tokens)
        self._lookups = LookupAcceptance(table)
        self._pause, self._rounds_aside, self._rounds_since_plain = self.MIN_PAUSE, 0, 0
        self._first_tries = self._first_hits = 0

    def plan(self, rows: Sequence[RowState]) -> Plan:
        self._check_lookups(rows)
        num_draft = [min(self._settings.num_assistant_tokens, row.room) if row.can_draft else 0 for row in rows]
        num_lookup = [0 if row.offer is None else min(len(row.offer.token_ids), row.room) for row in rows]
        if not any(num_draft) and not any(num_lookup):
            return _plain(rows, "full")
        if self._is_plain_due(len(rows)):
            return _plain(rows, "measuring")
        lookups = [
            self._lookups.gains(row.row, row.offer.match_length, n) if row.offer is not None else [0.0]
            for row, n in zip(rows, num_lookup, strict=True)
        ]
        drafts = [self._drafts.gains(row.row, n) for row, n in zip(rows, num_draft, strict=True)]
        width, plan = self._best(lookups, drafts)
        if any(num_draft) and not any(row.source == DRAFTER for row in plan):
            if self._rounds_aside >= self._pause:
                hopes = [[sum(self.HOPE**k for k in range(1, n + 1)) for n in range(len(gains))] for gains in drafts]
                _, probe = self._best(lookups, hopes, must_draft=True)
                if any(row.source == DRAFTER for row in probe):
                    self._drafts.forget()
                    return Plan(probe, "probing")
            if width == 1:
                return Plan(plan, "aside")
        return Plan(plan, "best" if self._costs.is_measured(len(rows), width) else "exploring")

    def observe(
        self, plan: Plan, outcomes: Sequence[RowOutcome], seconds: float, draft_seconds: float | None
    ) -> None:
        drafted = [
            (outcome, row.num_tokens)
            for row, outcome in zip(plan.rows, outcomes, strict=True)
            if row.source == DRAFTER
        ]
        self._costs.observe(
            num_rows=len(outcomes),
            width=1 + max(outcome.proposed for outcome in outcomes),
            num_draft_rows=len(drafted),
            num_draft_tokens=max((outcome.proposed for outcome, _ in drafted), default=0),
            seconds=seconds,
            draft_seconds=draft_seconds,
        )
        self._rounds_since_plain = 0 if plan.is_plain else self._rounds_since_plain + 1
        if not drafted:
            self._rounds_aside += 1
            return
        self._rounds_aside = 0
        self._drafts.observe([(outcome.row, planned, outcome.accepted) for outcome, planned in drafted])
        self._first_tries += sum(outcome.proposed > 0 for outcome, _ in drafted)
        num_hits = sum(outcome.accepted > 0 for outcome, _ in drafted)
        self._first_hits += num_hits
        if plan.reason == "probing":
            self._pause = self.MIN_PAUSE if num_hits else min(2 * self._pause, self.MAX_PAUSE)

    def mismatch(self) -> str | None:
        return None

    def _is_plain_due(self, num_rows: int) -> bool:
        """Whether it is time to measure a plain pass: everything is compared with it."""
        if not self._costs.knows_plain(num_rows):
            return True
        return self._rounds_since_plain >= min(2 * 4 ** self._costs.num_plain(num_rows), 128)

    def _check_lookups(self, rows: Sequence[RowState]) -> None:
        for row in rows:
            if row.offer is not None and row.offer.checks:
                self._lookups.observe(row.row, row.offer.checks)

    def _best(
        self, lookups: list[list[float]], drafts: list[list[float]], must_draft: bool = False
    ) -> tuple[int, list[RowPlan]]:
        """The width with the most expected new tokens per second, and what the rows do with it.

        `lookups` and `drafts` hold, for each row, the expected accepted tokens of 0, 1, 2, ... tokens of that source.
        """
        num_rows = len(drafts)
        longest_lookup, longest_draft = max(map(len, lookups)), max(map(len, drafts))
        seconds = self._costs.pass_seconds(num_rows, max(longest_lookup, longest_draft))
        best_rate, width, with_drafter = 0.0, 1, False
        if not must_draft:
            best_rate = self.MARGIN * num_rows / seconds[1]
            for n in range(1, longest_lookup):
                tokens = num_rows + sum(_at(gains, n) for gains in lookups)
                if tokens > best_rate * seconds[n + 1]:
                    best_rate, width = tokens / seconds[n + 1], n + 1
        base, slope = self._costs.draft_seconds(sum(len(gains) > 1 for gains in drafts) or 1)
        for n in range(1, max(longest_draft, longest_lookup) if longest_draft > 1 else 1):
            tokens = num_rows + sum(
                max(_at(lookup, n), _at(draft, n)) for lookup, draft in zip(lookups, drafts, strict=True)
            )
            total = seconds[n + 1] + base + slope * min(n, longest_draft - 1)
            if tokens > best_rate * total:
                best_rate, width, with_drafter = tokens / total, n + 1, True
        n = width - 1
        plan = []
        for lookup, draft in zip(lookups, drafts, strict=True):
            if with_drafter and _at(draft, n) > _at(lookup, n):
                plan.append(_row_plan(DRAFTER, min(n, len(draft) - 1)))
            else:
                plan.append(_row_plan(LOOKUP, min(n, len(lookup) - 1)))
        return width, plan


SCHEDULES: dict[str, type[ConstantSchedule] | type[AutoSchedule]] = {
    "auto": AutoSchedule,
    "constant": ConstantSchedule,
}


def new_schedule(settings: DraftLength, table: CostTable) -> Schedule:
    """The schedule of one call, by its name in the settings. `table` holds the pair's measurements."""
    return SCHEDULES[settings.schedule](settings, table)


def resolve_draft_length(
    drafter_config: GenerationConfig,
    num_draft_tokens: int,
    has_confidence_head: bool,
    num_assistant_tokens: int | None = None,
    confidence_threshold: float | None = None,
    schedule: str | None = None,
    lookup_tokens: int | None = None,
) -> DraftLength:
    """The settings from the per-call arguments (they win), the drafter's settings, and the defaults.

    Args:
        drafter_config: `drafter.generation_config`.
        num_draft_tokens: tokens that one block gives.
        has_confidence_head: whether a threshold has anything to read.
        num_assistant_tokens, confidence_threshold, schedule, lookup_tokens: of this call; `None` where it says
            nothing.

    Raises:
        UnsupportedGenerationError: a value out of range, or a setting that this drafter cannot follow.
    """
    schedule = _first_given(schedule, drafter_config.num_assistant_tokens_schedule, "auto")
    if schedule not in SCHEDULES:
        raise UnsupportedGenerationError(
            f"`num_assistant_tokens_schedule` is {schedule!r}, but a DSpark drafter follows 'auto' (drafts as long as "
            "they pay) or 'constant' only. Set one of them in the call or in `drafter.generation_config`; "
            "`assistant_confidence_threshold` shortens drafts round by round besides."
        )
    tokens = _first_given(num_assistant_tokens, drafter_config.num_assistant_tokens, num_draft_tokens)
    if not _is_integer(tokens) or not 1 <= tokens <= num_draft_tokens:
        raise UnsupportedGenerationError(
            f"`num_assistant_tokens` is {tokens!r}, but it must be an integer from 1 to {num_draft_tokens}, what a "
            "block of this drafter gives. Leave it out to use all of them."
        )
    threshold = _first_given(confidence_threshold, drafter_config.assistant_confidence_threshold, 0.0)
    if not _is_probability(threshold):
        raise UnsupportedGenerationError(
            f"`assistant_confidence_threshold` is {threshold!r}, expected a probability from 0 (off) to 1."
        )
    if threshold > 0 and not has_confidence_head:
        raise UnsupportedGenerationError(
            f"`assistant_confidence_threshold` is {threshold}, but this drafter has no confidence head. "
            "Set it to 0 or leave it out."
        )
    lookup = _first_given(lookup_tokens, SCHEDULES[schedule].LOOKUP_TOKENS)
    if not _is_integer(lookup) or lookup < 0:
        raise UnsupportedGenerationError(f"`lookup_tokens` is {lookup!r}, expected an integer of at least 0 (off).")
    return DraftLength(int(tokens), float(threshold), schedule, int(lookup))


def _row_plan(source: Literal["drafter", "lookup"], num_tokens: int) -> RowPlan:
    return RowPlan(source, num_tokens) if num_tokens > 0 else RowPlan("none", 0)


def _plain(rows: Sequence[RowState], reason: str) -> Plan:
    return Plan([RowPlan("none", 0)] * len(rows), reason)


def _at(gains: list[float], num_tokens: int) -> float:
    """Gain of so many tokens, or of all there are."""
    return gains[num_tokens] if num_tokens < len(gains) else gains[-1]


def _is_integer(value: object) -> bool:
    """True for every integer type (NumPy's too), but not for booleans."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_probability(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and 0.0 <= float(value) <= 1.0


def _first_given(*values: Any) -> Any:
    return next(value for value in values if value is not None)
