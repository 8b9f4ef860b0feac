"""The default schedule: whatever promises the most new tokens per second by the prices and chances measured so far."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, inf, isfinite
from statistics import NormalDist
from typing import Literal

from .acceptance import DRAFTER, LOOKUP, DraftAcceptance, DraftOutcome, LookupAcceptance
from .admission import ForesightGate
from .costs import CostTable, RoundCosts
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


class AutoSchedule(Schedule):
    """The most expected new tokens per second, plain decoding among the choices.

    Every row's most likely draft tokens come first, those of all rows in one order, and as many of them are verified
    as pay, with or without the drafter. Where a pass pads its rows, it costs what its longest draft costs, so the
    choice is one length for all. Where plain decoding wins, the drafter is tried again from time to time, as often as
    a small share of the time pays for.

    A call lasts as long as its slowest row, so new tokens of rows that lie behind are worth more (`_values`), and of
    all of them together only what makes that row faster counts: how much that is, is measured (`_kept`). A few lucky
    rows of many save nothing.

    Where the drafter has a confidence head and the price of a pass grows with its tokens, the plan says only who
    drafts: how far each draft goes is decided while it is drawn ([`ForesightGate`]), by its own confidences, as far as
    they have shown that they are to be trusted. What that is worth counts when the drafter is weighed against plain
    decoding.
    """

    LOOKUP_TOKENS = 16
    # Rounds until another try of a drafter that was set aside, and the share of the time that tries may cost; it
    # halves with each one that does not pay, and the next call starts with twice of what is left.
    MIN_PAUSE, MAX_PAUSE = 4, 64
    MAX_SHARE, MIN_SHARE = 0.06, 0.01
    # What a drafter worth another try would reach at each position.
    HOPE = 0.6
    # What the best of many possible choices for a batch must promise, because it is the best in part by luck.
    MARGIN = 1.04
    # Below this advantage of a draft over plain decoding, the price of a plain pass should be known well.
    CLEAR = 1.5
    # Confidences are asked for where the longest draft makes a pass dearer by this share: each one makes the host wait
    # for the device.
    RISE = 0.05
    # First draft tokens that must have been tried before a drafter is said to guess, in all and in this call, and the
    # share of them that a guess may hit.
    ENOUGH_TRIES, ENOUGH_NOW, CHANCE = 24, 2, 0.025

    def __init__(self, settings: DraftLength, table: CostTable, pads_rows: bool = False):
        self._settings = settings
        self._pads_rows = pads_rows
        self._table = table
        self._costs = RoundCosts(table)
        self._drafts = DraftAcceptance(table, settings.num_assistant_tokens)
        self._lookups = LookupAcceptance(table)
        self._rounds_since_draft = self._rounds_since_plain = 0
        self._share: float | None = None  # known at the first try
        self._pause: float = self.MIN_PAUSE
        self._break_even = 0.0
        self._values: list[float] = []  # of a new token of each row of the plan
        self._rooms: dict[int, int] = {}  # of the rows of the plan
        # Of a batch: the part of the worth of new tokens that depends on which row will be the last one, rounds until
        # it is done, by how many standard deviations luck sets it back, and accepted tokens of a row, on average, in
        # a round of late and in all so far.
        self._at_stake = 0.0
        self._num_rounds, self._luck, self._usual_gain, self._gained = 1.0, 0.0, 0.0, 0.0
        self._num_observed = 0  # rounds
        self._paces: defaultdict[int, _Pace] = defaultdict(_Pace)
        self._first_tries = self._first_hits = 0
        # What reading confidences brings, in tokens of a row that drafts; and what a plan promises without them.
        self._lift = self._planned_net = 0.0
        self._num_gated = 0

    def plan(self, rows: Sequence[RowState]) -> Plan:
        self._rooms = {row.row: row.room for row in rows}
        self._values = self._values_of(rows)
        lookups, drafts = self._lookup_gains(rows), self._draft_gains(rows)
        if not any(len(gains) > 1 for gains in lookups + drafts):
            return plain_plan(rows, "nothing")
        if self._costs.num_plain(len(rows)) == 0:
            return plain_plan(rows, "measuring")
        best = self._best(lookups, drafts)
        if best.advantage < self.MARGIN and len(rows) > 1:
            best = _Choice([RowPlan("none", 0)] * len(rows), 0, len(rows), len(rows))
        if best.size > 0 and self._is_plain_due(len(rows), best.advantage):
            return plain_plan(rows, "measuring")
        if not best.uses_drafter and self._rounds_since_draft >= self._pause and max(map(len, drafts)) > 1:
            probe = self._probe(lookups, drafts, best.advantage)
            if probe is not None:
                return self._gated(probe, rows, drafts, "probing", best.advantage)
        if best.size == 0:
            return Plan(best.rows, "aside")
        reason = "best" if self._costs.is_measured(len(rows), best.size) else "exploring"
        return self._gated(best, rows, drafts, reason, best.advantage)

    def _gated(
        self, choice: "_Choice", rows: Sequence[RowState], gains: list[list[float]], reason: str, advantage: float
    ) -> Plan:
        """The plan of a choice; with a gate where it pays to read confidences.

        Args:
            gains: of the drafter's tokens, for each row.
            advantage: over plain decoding, of what the time would be used for otherwise.
        """
        num_rows = len(rows)
        if not choice.uses_drafter or not self._can_end_drafts(num_rows):
            return Plan(choice.rows, reason)
        most = self._settings.num_assistant_tokens
        plans = [
            row_plan(DRAFTER, min(most, row.room)) if plan.source == DRAFTER else plan
            for plan, row in zip(choice.rows, rows, strict=True)
        ]
        seconds = self._prices(num_rows, sum(plan.num_tokens for plan in plans))
        if not self._reads_confidence(num_rows, seconds):
            return Plan(choice.rows, reason)
        copied = sum(plan.num_tokens for plan in plans if plan.source == LOOKUP)
        usual = [
            self._drafts.chances(row.row, plan.num_tokens) if plan.source == DRAFTER else []
            for plan, row in zip(plans, rows, strict=True)
        ]
        planned = {slot: plan.num_tokens for slot, plan in enumerate(choice.rows) if plan.source == DRAFTER}
        slope = self._costs.draft_seconds(len(planned))[1]
        rate = advantage * num_rows / seconds[0]
        gained = sum(_at(gains[slot], num_tokens) for slot, num_tokens in planned.items())
        kept = self._kept(num_rows, gained)
        # One more token is worth more than the mean of all: what luck takes grows with the root of their number.
        values = [(1 + kept) / 2 * value for value in self._values]
        gate = ForesightGate(usual, values, seconds, slope, rate, copied, self._table.trust)
        self._planned_net = kept * gained - gate.price(sum(planned.values()), max(planned.values()))
        return Plan(plans, reason, gate)

    def _can_end_drafts(self, num_rows: int) -> bool:
        """Whether a draft may end by its confidences. Rows that are padded to the longest one have one length for all,
        which is in the plan."""
        return self._settings.has_confidence and not (self._pads_rows and num_rows > 1)

    def _reads_confidence(self, num_rows: int, seconds: list[float]) -> bool:
        """Whether drafts do where the pass has these prices."""
        return self._can_end_drafts(num_rows) and seconds[-1] >= (1 + self.RISE) * seconds[0]

    def observe(self, plan: Plan, outcomes: Sequence[RowOutcome], seconds: float, draft_seconds: float | None) -> None:
        gate = plan.gate if isinstance(plan.gate, ForesightGate) else None
        if gate is not None:
            self._learn_confidences(gate, outcomes)
        drafted = [
            _draft_outcome(row.num_tokens, outcome, None if gate is None else gate.refused_chance(slot))
            for slot, (row, outcome) in enumerate(zip(plan.rows, outcomes, strict=True))
            if row.source == DRAFTER
        ]
        observe_costs(self._costs, plan, outcomes, seconds, draft_seconds, self._pads_rows)
        self._table.count_ends(
            sum(outcome.has_ended for outcome in outcomes), sum(1 + outcome.accepted for outcome in outcomes)
        )
        self._observe_lead(outcomes)
        for outcome in outcomes:
            self._paces[outcome.row].add(1 + outcome.accepted)
        self._num_observed += 1
        is_plain = not any(row.num_tokens for row in plan.rows)
        self._rounds_since_plain = 0 if is_plain else self._rounds_since_plain + 1
        self._rounds_since_draft = 0 if drafted else self._rounds_since_draft + 1
        if not drafted:
            return
        self._pause = self.MIN_PAUSE
        self._drafts.observe(drafted)
        self._first_tries += sum(outcome.proposed > 0 for outcome in outcomes if outcome.source == DRAFTER)
        self._first_hits += sum(outcome.accepted > 0 for outcome in outcomes if outcome.source == DRAFTER)
        if plan.reason == "probing":
            gained = self._gained_by(outcomes)
            pays = len(outcomes) + self._kept(len(outcomes), gained) * gained >= self._break_even
            assert self._share is not None  # the plan of a try has set it
            self._share = self.MAX_SHARE if pays else max(self._share / 2, self.MIN_SHARE)
            self._table.keep_share_of_tries(len(outcomes), self._share)

    def _gained_by(self, outcomes: Sequence[RowOutcome]) -> float:
        """The values of the accepted tokens of a round."""
        return sum(value * outcome.accepted for value, outcome in zip(self._values, outcomes, strict=True))

    def _observe_lead(self, outcomes: Sequence[RowOutcome]) -> None:
        """Learns how much faster the round made the row that lies most behind. One that has ended by itself says
        nothing about that."""
        going_on = [outcome for outcome in outcomes if not outcome.has_ended]
        if len(outcomes) == 1 or not going_on or self._at_stake == 0:
            return
        before = max(self._rooms[outcome.row] for outcome in going_on)
        after = max(self._rooms[outcome.row] - 1 - outcome.accepted for outcome in going_on)
        lead_before = self._expected_lead(self._gained)
        self._gained += self._gained_by(outcomes) / len(outcomes)
        self._table.count_lead(len(outcomes), before - 1 - after, self._expected_lead(self._gained) - lead_before)

    def _learn_confidences(self, gate: ForesightGate, outcomes: Sequence[RowOutcome]) -> None:
        """Learns from a round whose drafts went as far as their confidences promised: whether they are to be trusted,
        and what it brought to read them."""
        gate.learn(outcomes)
        survivals = [values[: outcome.proposed] for values, outcome in zip(gate.survivals, outcomes, strict=True)]
        num_drafts = sum(outcome.source == DRAFTER for outcome in outcomes)
        gained = sum(value * sum(of_row) for value, of_row in zip(self._values, survivals, strict=True))
        price = gate.price(sum(map(len, survivals)), max(map(len, survivals)))
        net = self._kept(len(outcomes), gained) * gained - price
        self._num_gated += 1
        self._lift += max(1 / (3 + self._num_gated), 0.03) * ((net - self._planned_net) / num_drafts - self._lift)

    def mismatch(self) -> str | None:
        """A drafter that guesses is soon set aside, so the tries of earlier calls count where this one has few."""
        hits, tries = float(self._first_hits), float(self._first_tries)
        if tries < self.ENOUGH_NOW or hits > self.CHANCE * tries:
            return None
        if tries < self.ENOUGH_TRIES:
            hits, tries = self._table.acceptance(DRAFTER, 0)
        if tries < self.ENOUGH_TRIES or hits > self.CHANCE * tries:
            return None
        return (
            f"The drafter does not seem to fit its target: of {round(tries)} first tokens of a draft, the target "
            f"accepted {round(hits)}, no more than guessing would give. The text is right all the same, but not "
            "faster. Check that the drafter was trained for this very target and for this chat template."
        )

    def _values_of(self, rows: Sequence[RowState]) -> list[float]:
        """What a new token of each row is worth, where one more token of every row is worth their number.

        Most of a pass costs the same for one row as for many, and has to be paid until the last row is done: that part
        of the worth goes to the rows that look like the last ones. Where texts fill their room, these are the ones
        that lie behind or accept little; where texts end before, nobody knows.
        """
        num_rows, self._at_stake = len(rows), 0.0
        if num_rows == 1 or self._costs.num_plain(num_rows) == 0:
            return [1.0] * num_rows
        fills_its_room = exp(-self._table.end_rate * sum(row.room for row in rows) / num_rows)
        decided_by_room = 1 - (1 - fills_its_room) ** num_rows
        # Rounds until each row is done. Half of what sets its pace apart from the others' is taken for luck: rows that
        # differ less than they seem to would all wait for drafts in turn.
        paces = [self._paces[row.row].mean for row in rows]
        mean_pace = sum(paces) / num_rows
        num_rounds = [row.room / ((mean_pace + pace) / 2) for row, pace in zip(rows, paces, strict=True)]
        longest = self._num_rounds = max(num_rounds)
        # Give or take so many: luck of the rounds to come, and what the rounds so far do not tell of the paces.
        spread = 1 + 0.5 * longest**0.5 + 0.25 * longest / (5 + self._num_observed) ** 0.5
        weights = [exp((rounds - longest) / spread) for rounds in num_rounds]
        seconds = self._costs.pass_seconds(num_rows, 2 * num_rows)
        shared = max(0.0, 1.0 - 0.5 * (seconds[-1] / seconds[0] - 1))
        total = sum(weights)
        contenders = total**2 / sum(weight * weight for weight in weights)
        # The largest of so many normal variables (Blom's approximation).
        self._luck = max(0.0, NormalDist().inv_cdf((contenders - 0.375) / (contenders + 0.25)))
        self._usual_gain = mean_pace - 1
        share = self._at_stake = shared * decided_by_room
        return [1 - share + share * num_rows * weight / total for weight in weights]

    def _kept(self, num_rows: int, gained: float) -> float:
        """The part of their values that accepted tokens are worth, where a round gains so many of all rows together:
        it is lost as far as the row most behind has no share in it."""
        if self._at_stake == 0:
            return 1.0
        more = self._num_rounds * max(gained / num_rows, self._usual_gain, 1e-3)
        lead = self._expected_lead(self._gained + more) - self._expected_lead(self._gained)
        return 1 - self._at_stake * (1 - self._table.lead(num_rows) * lead / more)

    def _expected_lead(self, gained: float) -> float:
        """Rounds that the row most behind is spared where rows that are alike gain so many tokens on average: luck
        leaves one of them behind the others."""
        return max(0.0, gained - self._luck * gained**0.5)

    def _lookup_gains(self, rows: Sequence[RowState]) -> list[list[float]]:
        """For each row, the worth of the accepted tokens to expect of the first 0, 1, 2, ... tokens of its offer."""
        gains = []
        for row, value in zip(rows, self._values, strict=True):
            if row.offer is None:
                gains.append([0.0])
                continue
            if row.offer.checks:
                self._lookups.observe(row.row, row.offer.checks)
            num_tokens = min(len(row.offer.token_ids), self._settings.lookup_tokens, row.room)
            gains.append(_times(value, self._lookups.gains(row.row, row.offer.match_length, num_tokens)))
        return gains

    def _draft_gains(self, rows: Sequence[RowState]) -> list[list[float]]:
        """The same for 0, 1, 2, ... tokens of the drafter."""
        most = self._settings.num_assistant_tokens
        return [
            _times(value, self._drafts.gains(row.row, min(most, row.room) if row.can_draft else 0))
            for row, value in zip(rows, self._values, strict=True)
        ]

    def _best(self, lookups: list[list[float]], drafts: list[list[float]], must_draft: bool = False) -> "_Choice":
        """The draft tokens with the most expected new tokens per second."""
        num_rows = len(drafts)
        longest = [max(len(a), len(b)) - 1 for a, b in zip(lookups, drafts, strict=True)]
        seconds = self._prices(num_rows, pass_size(longest, self._pads_rows))
        choices = []
        if not must_draft:
            choices.append(self._filled([(LOOKUP, gains) for gains in lookups], seconds))
        if any(len(gains) > 1 for gains in drafts):
            # What a draft token must bring to pay for its place in the pass.
            last = max(size for size, price in enumerate(seconds) if isfinite(price))
            toll = num_rows * (seconds[last] / seconds[0] - 1) / max(last, 1)
            offers: list[tuple[Literal["drafter", "lookup"], list[float]]] = [
                (DRAFTER, draft) if num_rows == 1 or _worth(draft, toll) > _worth(lookup, toll) else (LOOKUP, lookup)
                for lookup, draft in zip(lookups, drafts, strict=True)
            ]
            lines = [self._costs.draft_seconds(1 + n) for n in range(num_rows)]
            choices.append(self._filled(offers, seconds, lines))
        return max(choices, key=lambda choice: choice.advantage)

    def _prices(self, num_rows: int, max_size: int) -> list[float]:
        """Seconds of a pass by size. A batch goes into unknown sizes step by step: what lies too far out counts as
        endless."""
        seconds = self._costs.pass_seconds(num_rows, max_size)
        if num_rows == 1:
            return seconds
        known = self._costs.horizon(num_rows) + 1
        return seconds[:known] + [inf] * (len(seconds) - known)

    def _filled(
        self,
        offers: list[tuple[Literal["drafter", "lookup"], list[float]]],
        seconds: list[float],
        draft_lines: list[tuple[float, float]] | None = None,
    ) -> "_Choice":
        """As many tokens of these offers as pay: the source and the gains of each row.

        Args:
            seconds: of the pass by size.
            draft_lines: base and slope of the seconds of a draft for 1, 2, ... rows; `None`: without the drafter.
        """
        num_rows = len(offers)
        counts, drafting, longest, tokens = [0] * num_rows, 0, 0, float(num_rows)
        lift = max(self._lift, 0.0) if self._reads_confidence(num_rows, seconds) else 0.0
        best = (list(counts), tokens, seconds[0])
        best_rate = tokens / seconds[0] if draft_lines is None else 0.0
        for rows, gain in self._steps([gains for _, gains in offers]):
            for row in rows:
                counts[row] += 1
                if offers[row][0] == DRAFTER:
                    drafting += counts[row] == 1
                    longest = max(longest, counts[row])
            tokens += gain
            cost = seconds[pass_size(counts, self._pads_rows)]
            if draft_lines is not None and drafting:
                base, slope = draft_lines[drafting - 1]
                cost += base + slope * longest
            gained = tokens - num_rows
            promised = num_rows + self._kept(num_rows, gained) * gained + lift * drafting
            if promised / cost > best_rate:
                best, best_rate = (list(counts), promised, cost), promised / cost
        counts, tokens, cost = best
        plans = [row_plan(source, n) for (source, _), n in zip(offers, counts, strict=True)]
        return _Choice(plans, pass_size(counts, self._pads_rows), tokens, num_rows * cost / seconds[0])

    def _steps(self, gains: list[list[float]]) -> list[tuple[list[int], float]]:
        """In the order in which drafts grow: the rows that gain a token, and what it promises.

        Of a row, each token promises at most as much as the one before, so the order never skips one.
        """
        tokens = [(row[n] - row[n - 1], n, slot) for slot, row in enumerate(gains) for n in range(1, len(row))]
        if not self._pads_rows:
            tokens.sort(key=lambda token: -token[0])
            return [([slot], gain) for gain, _, slot in tokens]
        by_length: dict[int, list[tuple[float, int]]] = {}
        for gain, n, slot in tokens:
            by_length.setdefault(n, []).append((gain, slot))
        return [([slot for _, slot in of], sum(gain for gain, _ in of)) for _, of in sorted(by_length.items())]

    def _is_plain_due(self, num_rows: int, advantage: float) -> bool:
        """Whether to measure a plain pass again, with which everything is compared: often at first."""
        pause = min(2 * 4 ** self._costs.num_plain(num_rows), 128)
        return self._rounds_since_plain >= (pause if advantage < self.CLEAR else 4 * pause)

    def _probe(self, lookups: list[list[float]], drafts: list[list[float]], advantage: float) -> "_Choice | None":
        """A round of a drafter that is hoped to be good again, once the share of the time for tries pays for it.

        `advantage`: of what would be done instead, over plain decoding.
        """
        hopes = [
            [value * sum(self.HOPE**k for k in range(1, n + 1)) for n in range(len(gains))]
            for value, gains in zip(self._values, drafts, strict=True)
        ]
        probe = self._best(lookups, hopes, must_draft=True)
        if not probe.uses_drafter:  # the lookups are better even so
            return None
        gained = sum(
            _at(draft if row.source == DRAFTER else lookup, row.num_tokens)
            for row, lookup, draft in zip(probe.rows, lookups, drafts, strict=True)
        )
        tokens = len(drafts) + self._kept(len(drafts), gained) * gained
        break_even = advantage * probe.break_even
        loss = (1 - tokens / break_even) * probe.break_even / len(drafts)  # in plain rounds
        if self._share is None:
            noted = self._table.share_of_tries(len(drafts))
            self._share = self.MAX_SHARE if noted is None else min(2 * noted, self.MAX_SHARE)
        self._pause = min(loss / self._share, self.MAX_PAUSE)
        if self._rounds_since_draft < self._pause:
            return None
        self._drafts.forget()
        self._break_even = break_even
        return probe


class _Pace:
    """New tokens of a row in a round: a mean that fades."""

    def __init__(self) -> None:
        self._tokens, self._rounds = 5.0, 4.0

    def add(self, num_tokens: int) -> None:
        self._tokens, self._rounds = 0.95 * self._tokens + num_tokens, 0.95 * self._rounds + 1

    @property
    def mean(self) -> float:
        return self._tokens / self._rounds


@dataclass(frozen=True)
class _Choice:
    """What the rows do, the size of the pass, expected new tokens, and how many plain decoding has in that time."""

    rows: list[RowPlan]
    size: int
    tokens: float
    break_even: float

    @property
    def advantage(self) -> float:
        return self.tokens / self.break_even

    @property
    def uses_drafter(self) -> bool:
        return any(row.source == DRAFTER for row in self.rows)


def _draft_outcome(planned: int, outcome: RowOutcome, refused_chance: float | None) -> DraftOutcome:
    """What became of a draft; one that its gate ended was planned only so far."""
    length = planned if refused_chance is None else outcome.proposed
    return DraftOutcome(outcome.row, length, outcome.accepted, refused_chance, outcome.next_was_seen)


def _times(value: float, gains: list[float]) -> list[float]:
    return gains if value == 1 else [value * gain for gain in gains]


def _worth(gains: list[float], toll: float) -> float:
    """What the best length brings where each token costs `toll`."""
    return max(gain - toll * n for n, gain in enumerate(gains))


def _at(gains: list[float], num_tokens: int) -> float:
    """The gain of so many tokens, or of all there are."""
    return gains[num_tokens] if num_tokens < len(gains) else gains[-1]
