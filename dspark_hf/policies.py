"""All schedules by name, and the settings that choose among them.

    constant             `num_assistant_tokens` of the drafter's tokens, always
    heuristic            two more after a draft that was accepted in full, one less after any other: transformers' rule
    confidence           up to the first position whose confidence is below `assistant_confidence_threshold`
    entropy              up to the first position where the drafter itself is unsure, by the same threshold
    acceptance           as many as pay by each row's own acceptance so far and the measured prices
    hardware             as many as pay by the confidences of this very draft and the measured prices (Algorithm 1)
    hardware-decoupled   the same, but their number comes from the confidences of two rounds before, searched freely:
                         for prices with jumps, where the first token that does not pay may hide one that does
    auto                 the default: as many as pay by acceptance and prices, of the drafter or of the context, and
                         none where plain decoding is faster

Those with prices depend on the clock of the machine. The others give the same text for the same seed every time.
"""

from abc import abstractmethod
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import replace
from numbers import Integral, Real
from typing import Any

from transformers import GenerationConfig

from .acceptance import DRAFTER, LOOKUP, DraftAcceptance, DraftOutcome
from .admission import ConfidenceGate, EntropyGate, PassCosts, SurvivalGate, admit, budget
from .auto_schedule import AutoSchedule
from .costs import CostTable, RoundCosts
from .errors import UnsupportedGenerationError
from .scheduling import (
    DraftLength,
    Plan,
    RowOutcome,
    RowPlan,
    RowState,
    Schedule,
    observe_costs,
    pass_size,
    plain_plan,
    row_plan,
)


class ConstantSchedule(Schedule):
    """As many draft tokens as allowed in every round, for measurements and comparisons.

    Where lookups are on, a continuation whose match is long takes the place of the draft.
    """

    LOOKUP_TOKENS = 0
    LONG_MATCH = 8

    def __init__(self, settings: DraftLength, table: CostTable, pads_rows: bool = False):
        self._settings = settings

    def plan(self, rows: Sequence[RowState]) -> Plan:
        return Plan([self._row_plan(row) for row in rows], "constant")

    def _num_tokens(self, row: RowState) -> int:
        """Tokens of the drafter that the row gets."""
        return self._settings.num_assistant_tokens

    def _row_plan(self, row: RowState) -> RowPlan:
        if row.offer is not None and row.offer.match_length >= self.LONG_MATCH:
            return row_plan(LOOKUP, min(len(row.offer.token_ids), self._settings.lookup_tokens, row.room))
        return row_plan(DRAFTER, min(self._num_tokens(row), row.room) if row.can_draft else 0)


class HeuristicSchedule(ConstantSchedule):
    """transformers' own rule for the length of a draft, for each row: start with all tokens that a block gives."""

    def __init__(self, settings: DraftLength, table: CostTable, pads_rows: bool = False):
        super().__init__(settings, table, pads_rows)
        self._lengths: defaultdict[int, int] = defaultdict(lambda: settings.num_assistant_tokens)

    def _num_tokens(self, row: RowState) -> int:
        return self._lengths[row.row]

    def observe(self, plan: Plan, outcomes: Sequence[RowOutcome], seconds: float, draft_seconds: float | None) -> None:
        for planned, outcome in zip(plan.rows, outcomes, strict=True):
            if planned.source == DRAFTER:
                change = 2 if outcome.accepted == planned.num_tokens else -1
                length = self._lengths[outcome.row] + change
                self._lengths[outcome.row] = min(max(1, length), self._settings.num_assistant_tokens)


class ConfidenceSchedule(ConstantSchedule):
    """The static threshold of the settings, which ends drafts under every schedule; here it has a default."""


class EntropySchedule(ConstantSchedule):
    """The threshold, applied to what the entropy of the draft says about its acceptance: needs no confidence head."""

    def plan(self, rows: Sequence[RowState]) -> Plan:
        plan, threshold = super().plan(rows), self._settings.entropy_threshold
        return replace(plan, gate=EntropyGate(len(rows), threshold)) if threshold > 0 else plan


class PricedSchedule(ConstantSchedule):
    """What schedules that ask for prices have in common: they measure a plain pass first, and every round after it."""

    def __init__(self, settings: DraftLength, table: CostTable, pads_rows: bool = False):
        super().__init__(settings, table, pads_rows)
        self._pads_rows = pads_rows
        self._costs = RoundCosts(table)
        self._trust = table.trust

    def plan(self, rows: Sequence[RowState]) -> Plan:
        if self._costs.num_plain(len(rows)) == 0:
            return plain_plan(rows, "measuring")
        return self.plan_priced(super().plan(rows), rows)

    @abstractmethod
    def plan_priced(self, longest: Plan, rows: Sequence[RowState]) -> Plan:
        """The plan, where prices are known.

        Args:
            longest: what would be drafted if everything was free.
        """

    def observe(self, plan: Plan, outcomes: Sequence[RowOutcome], seconds: float, draft_seconds: float | None) -> None:
        observe_costs(self._costs, plan, outcomes, seconds, draft_seconds, self._pads_rows)
        if isinstance(plan.gate, ConfidenceGate):
            plan.gate.learn(outcomes)

    def pass_costs(self, longest: Plan) -> PassCosts:
        """Prices of a round in which the drafter runs as long as it can."""
        drafts = [row.num_tokens for row in longest.rows if row.source == DRAFTER]
        copies = sum(row.num_tokens for row in longest.rows if row.source == LOOKUP)
        size = pass_size([row.num_tokens for row in longest.rows], self._pads_rows)
        base, slope = self._costs.draft_seconds(max(1, len(drafts)))
        return PassCosts(
            self._costs.pass_seconds(len(longest.rows), size),
            len(longest.rows),
            draft_seconds=base + slope * max([0, *drafts]),
            pads_rows=self._pads_rows,
            num_copied=0 if self._pads_rows else copies,
        )


class HardwareSchedule(PricedSchedule):
    """Algorithm 1: the confidences of the draft against the prices of this machine, over all rows together."""

    def plan_priced(self, longest: Plan, rows: Sequence[RowState]) -> Plan:
        return Plan(longest.rows, "hardware", SurvivalGate(len(rows), self.pass_costs(longest), trust=self._trust))


class DecoupledHardwareSchedule(PricedSchedule):
    """How many tokens are verified comes from the confidences of two rounds before; which, from those of this draft.

    A search for the number over all of them may not see the tokens that it decides about: those of two rounds before
    are committed or dropped by now. In the first two rounds everything is verified.
    """

    def __init__(self, settings: DraftLength, table: CostTable, pads_rows: bool = False):
        super().__init__(settings, table, pads_rows)
        self._gates: deque[SurvivalGate] = deque(maxlen=2)

    def plan_priced(self, longest: Plan, rows: Sequence[RowState]) -> Plan:
        costs, num_tokens = self.pass_costs(longest), sum(row.num_tokens for row in longest.rows)
        if len(self._gates) == 2:
            before = self._gates[0]
            num_tokens = budget(before.survivals, before.costs)
            if not self._pads_rows:
                # Rows may have left since: the budget goes with their number.
                num_tokens = round(num_tokens * len(rows) / len(before.survivals))
        gate = SurvivalGate(len(rows), costs, num_tokens, self._trust)
        self._gates.append(gate)
        return Plan(longest.rows, "hardware", gate)


class AcceptanceSchedule(PricedSchedule):
    """Algorithm 1 with a running estimate of each row's acceptance in place of confidences: works for every drafter.

    Where rows share what pays, those with the highest acceptance come first; a row that got nothing for a while gets
    a token all the same, or its estimate would never change.
    """

    # Rounds without a draft after which a row gets one token.
    PATIENCE = 16

    def __init__(self, settings: DraftLength, table: CostTable, pads_rows: bool = False):
        super().__init__(settings, table, pads_rows)
        self._acceptance = DraftAcceptance(table, settings.num_assistant_tokens)
        self._idle: defaultdict[int, int] = defaultdict(int)

    def plan_priced(self, longest: Plan, rows: Sequence[RowState]) -> Plan:
        survivals = [
            self._acceptance.survivals(row.row, planned.num_tokens) if planned.source == DRAFTER else []
            for row, planned in zip(rows, longest.rows, strict=True)
        ]
        plans = []
        for row, planned, length in zip(rows, longest.rows, admit(survivals, self.pass_costs(longest)), strict=True):
            if planned.source == DRAFTER:
                is_starved = length == 0 and self._idle[row.row] >= self.PATIENCE
                planned = row_plan(DRAFTER, 1 if is_starved else length)
            self._idle[row.row] = 0 if planned.num_tokens else self._idle[row.row] + 1
            plans.append(planned)
        return Plan(plans, "acceptance")

    def observe(self, plan: Plan, outcomes: Sequence[RowOutcome], seconds: float, draft_seconds: float | None) -> None:
        super().observe(plan, outcomes, seconds, draft_seconds)
        self._acceptance.observe(
            DraftOutcome(outcome.row, row.num_tokens, outcome.accepted, next_was_seen=outcome.next_was_seen)
            for row, outcome in zip(plan.rows, outcomes, strict=True)
            if row.source == DRAFTER
        )


SCHEDULES: dict[str, type[Schedule]] = {
    "auto": AutoSchedule,
    "constant": ConstantSchedule,
    "heuristic": HeuristicSchedule,
    "confidence": ConfidenceSchedule,
    "entropy": EntropySchedule,
    "acceptance": AcceptanceSchedule,
    "hardware": HardwareSchedule,
    "hardware-decoupled": DecoupledHardwareSchedule,
}
_NEED_CONFIDENCE = ("confidence", "hardware", "hardware-decoupled")
# Where a schedule goes by a threshold and the user gives none: transformers' own default, as an acceptance.
_DEFAULT_THRESHOLD = 0.4


def new_schedule(settings: DraftLength, table: CostTable, pads_rows: bool = False) -> Schedule:
    """The schedule of one call, by its name in the settings; the arguments are those of a [`Schedule`]."""
    return _kind(settings.schedule)(settings, table, pads_rows)


def _kind(schedule: str | type[Schedule]) -> type[Schedule]:
    return SCHEDULES[schedule] if isinstance(schedule, str) else schedule


def resolve_draft_length(
    drafter_config: GenerationConfig,
    num_draft_tokens: int,
    has_confidence_head: bool,
    num_assistant_tokens: int | None = None,
    confidence_threshold: float | None = None,
    schedule: str | type[Schedule] | None = None,
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
    is_own = isinstance(schedule, type) and issubclass(schedule, Schedule)
    if not is_own and not (isinstance(schedule, str) and schedule in SCHEDULES):
        raise UnsupportedGenerationError(
            f"`num_assistant_tokens_schedule` is {schedule!r}, but a DSpark drafter follows "
            f"{', '.join(map(repr, SCHEDULES))} or a subclass of `Schedule`. Set one of them in the call or in "
            "`drafter.generation_config`; without a word, it is 'auto', which drafts as long as drafts pay."
        )
    if schedule in _NEED_CONFIDENCE and not has_confidence_head:
        raise UnsupportedGenerationError(
            f"`num_assistant_tokens_schedule` is {schedule!r}, but this drafter has no confidence head. 'entropy' and "
            "'acceptance' need none."
        )
    tokens = _first_given(num_assistant_tokens, drafter_config.num_assistant_tokens, num_draft_tokens)
    if not _is_integer(tokens) or not 1 <= tokens <= num_draft_tokens:
        raise UnsupportedGenerationError(
            f"`num_assistant_tokens` is {tokens!r}, but it must be an integer from 1 to {num_draft_tokens}, what a "
            "block of this drafter gives. Leave it out to use all of them."
        )
    default = _DEFAULT_THRESHOLD if schedule in ("confidence", "entropy") else 0.0
    threshold = _first_given(confidence_threshold, drafter_config.assistant_confidence_threshold, default)
    if not _is_probability(threshold):
        raise UnsupportedGenerationError(
            f"`assistant_confidence_threshold` is {threshold!r}, expected a probability from 0 (off) to 1."
        )
    if threshold > 0 and not has_confidence_head and schedule != "entropy":
        raise UnsupportedGenerationError(
            f"`assistant_confidence_threshold` is {threshold}, but this drafter has no confidence head. "
            "Set it to 0 or leave it out."
        )
    lookup = _first_given(lookup_tokens, _kind(schedule).LOOKUP_TOKENS)
    if not _is_integer(lookup) or lookup < 0:
        raise UnsupportedGenerationError(
            f"`prompt_lookup_num_tokens` is {lookup!r}, expected an integer of at least 0 (off)."
        )
    of_entropy = float(threshold) if schedule == "entropy" else 0.0
    return DraftLength(
        int(tokens), float(threshold) - of_entropy, schedule, int(lookup), of_entropy, has_confidence_head
    )


def _is_integer(value: object) -> bool:
    """True for every integer type (NumPy's too), but not for booleans."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_probability(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and 0.0 <= float(value) <= 1.0


def _first_given(*values: Any) -> Any:
    return next(value for value in values if value is not None)
