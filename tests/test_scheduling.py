"""Schedules: their rules one by one, then what they cost and gain in simulated time (`simulator`)."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import mean

import pytest
from simulator import (
    CURVES,
    NUM_DRAFT_TOKENS,
    PROFILES,
    TEXTS,
    Text,
    auto,
    best_fixed,
    best_lookup,
    machine,
    novel_text,
    num_rows,
    plain_seconds,
    simulate,
)
from transformers import GenerationConfig

from dspark_hf import UnsupportedGenerationError
from dspark_hf.acceptance import DraftAcceptance, DraftOutcome, LookupAcceptance
from dspark_hf.admission import SurvivalGate
from dspark_hf.auto_schedule import AutoSchedule
from dspark_hf.costs import CostTable
from dspark_hf.lookup import LookupOffer
from dspark_hf.policies import (
    SCHEDULES,
    AcceptanceSchedule,
    ConstantSchedule,
    new_schedule,
    resolve_draft_length,
)
from dspark_hf.scheduling import DraftLength, Plan, RowOutcome, RowPlan, RowState, Schedule

NONE = RowPlan("none", 0)


def settings(schedule: str = "auto", num_tokens: int = NUM_DRAFT_TOKENS, lookup_tokens: int = 16) -> DraftLength:
    return DraftLength(num_tokens, 0.0, schedule, lookup_tokens)


def row(number: int = 0, room: int = 100, can_draft: bool = True, offer: LookupOffer | None = None) -> RowState:
    return RowState(number, 100, room, offer, can_draft)


def offer(match_length: int, num_tokens: int = 16) -> LookupOffer:
    return LookupOffer([7] * num_tokens, match_length)


def drafter(num_tokens: int) -> RowPlan:
    return RowPlan("drafter", num_tokens)


def lookup(num_tokens: int) -> RowPlan:
    return RowPlan("lookup", num_tokens)


def play(
    schedule: Schedule,
    accepted: Sequence[int] | int,
    times: int = 1,
    states: Sequence[RowState] = (row(),),
    seconds_per_width: Sequence[float] = (0, 50, 51, 52, 53, 54, 55, 56, 57),
    draft_seconds: float = 5.0,
) -> list[Plan]:
    """Rounds in which each row accepts so many draft tokens, if it has as many."""
    plans = []
    accepted = [accepted] * len(states) if isinstance(accepted, int) else accepted
    for _ in range(times):
        plan = schedule.plan(states)
        outcomes = [
            RowOutcome(state.row, planned.source, planned.num_tokens, min(count, planned.num_tokens))
            for state, planned, count in zip(states, plan.rows, accepted, strict=True)
        ]
        width = 1 + max(outcome.proposed for outcome in outcomes)
        draft = draft_seconds if any(planned.source == "drafter" for planned in plan.rows) else 0.0
        schedule.observe(plan, outcomes, seconds_per_width[width] + draft, draft)
        plans.append(plan)
    return plans


class TestSettings:
    def resolve(self, config: GenerationConfig | None = None, **given: object) -> DraftLength:
        return resolve_draft_length(config or GenerationConfig(), 7, True, **given)  # type: ignore[arg-type]

    def test_without_a_word_drafts_adapt_and_lookups_are_on(self):
        assert self.resolve() == DraftLength(7, 0.0, "auto", AutoSchedule.LOOKUP_TOKENS, has_confidence=True)
        assert self.resolve(lookup_tokens=0).lookup_tokens == 0

    def test_a_constant_draft_is_never_replaced_unless_asked_for(self):
        assert self.resolve(schedule="constant") == DraftLength(7, 0.0, "constant", 0, has_confidence=True)
        assert self.resolve(schedule="constant", lookup_tokens=4).lookup_tokens == 4

    def test_the_call_goes_before_the_drafters_settings(self):
        config = GenerationConfig(num_assistant_tokens_schedule="constant", num_assistant_tokens=3)
        assert self.resolve(config) == DraftLength(3, 0.0, "constant", 0, has_confidence=True)
        adapting = self.resolve(config, schedule="auto", num_assistant_tokens=2)
        assert adapting == DraftLength(2, 0.0, "auto", 16, has_confidence=True)

    @pytest.mark.parametrize("schedule", ["heuristic_transient", "dynamic", "", 3, ["auto"], int, CostTable])
    def test_other_schedules_are_refused(self, schedule):
        with pytest.raises(UnsupportedGenerationError) as caught:
            self.resolve(schedule=schedule)
        assert str(caught.value).startswith(
            f"`num_assistant_tokens_schedule` is {schedule!r}, but a DSpark drafter follows 'auto', 'constant', "
            "'heuristic', 'confidence', 'entropy', 'acceptance', 'hardware', 'hardware-decoupled' or a subclass of "
            "`Schedule`. Set one of them in the call or in `drafter.generation_config`"
        )

    @pytest.mark.parametrize("schedule", ["confidence", "hardware", "hardware-decoupled"])
    def test_what_goes_by_confidence_needs_the_head(self, schedule):
        with pytest.raises(UnsupportedGenerationError, match="no confidence head"):
            resolve_draft_length(GenerationConfig(), 7, False, schedule=schedule)

    @pytest.mark.parametrize("schedule", ["constant", "heuristic", "entropy", "acceptance", "auto"])
    def test_everything_else_does_not(self, schedule):
        assert resolve_draft_length(GenerationConfig(), 7, False, schedule=schedule).schedule == schedule

    def test_thresholds_go_to_what_they_are_for(self):
        assert self.resolve(schedule="confidence").confidence_threshold == 0.4
        assert self.resolve(schedule="confidence", confidence_threshold=0.7).confidence_threshold == 0.7
        by_entropy = self.resolve(schedule="entropy", confidence_threshold=0.7)
        assert (by_entropy.confidence_threshold, by_entropy.entropy_threshold) == (0.0, 0.7)
        assert self.resolve(schedule="entropy").entropy_threshold == 0.4
        assert self.resolve(schedule="hardware").confidence_threshold == 0.0

    def test_a_schedule_of_ones_own(self):
        class Mine(ConstantSchedule):
            LOOKUP_TOKENS = 3

        settings = self.resolve(schedule=Mine)
        assert settings.lookup_tokens == 3
        assert type(new_schedule(settings, CostTable())) is Mine

    @pytest.mark.parametrize("lookup_tokens", [-1, 2.5, True, "3"])
    def test_lookup_tokens_out_of_range_are_refused(self, lookup_tokens):
        with pytest.raises(UnsupportedGenerationError, match=r"^`prompt_lookup_num_tokens` is .*at least 0 \(off\)"):
            self.resolve(lookup_tokens=lookup_tokens)

    def test_each_name_makes_its_schedule(self):
        for name, kind in SCHEDULES.items():
            assert type(new_schedule(settings(name), CostTable())) is kind


class TestConstant:
    def test_it_never_narrows(self):
        schedule = new_schedule(settings("constant", 5), CostTable())
        plans = play(schedule, accepted=0, times=50, seconds_per_width=[0, 1] + [99] * 8)
        assert plans == [Plan([drafter(5)], "constant")] * 50
        assert schedule.mismatch() is None

    def test_only_room_and_a_drafter_that_cannot_run_shorten_it(self):
        schedule = new_schedule(settings("constant", 5), CostTable())
        plan = schedule.plan([row(0, room=3), row(1, room=0), row(2, can_draft=False)])
        assert plan.rows == [drafter(3), NONE, NONE]

    @pytest.mark.parametrize(("match_length", "expected"), [(7, drafter(5)), (8, lookup(6)), (16, lookup(6))])
    def test_a_long_match_takes_the_place_of_the_draft(self, match_length, expected):
        schedule = new_schedule(settings("constant", 5, lookup_tokens=6), CostTable())
        assert schedule.plan([row(offer=offer(match_length))]).rows == [expected]


class TestHeuristic:
    def test_two_more_after_a_full_draft_one_less_after_any_other(self):
        schedule = new_schedule(settings("heuristic", 5), CostTable())
        lengths = [play(schedule, accepted)[0].rows[0].num_tokens for accepted in (0, 0, 0, 9, 1, 9, 9, 0)]
        assert lengths == [5, 4, 3, 2, 4, 3, 5, 5]

    def test_it_never_ends_and_rows_are_apart(self):
        schedule = new_schedule(settings("heuristic", 3), CostTable())
        *_, last = play(schedule, [0, 9], times=9, states=[row(0), row(1)])
        assert last.rows == [drafter(1), drafter(3)]


class TestPriced:
    """Schedules that ask what a pass costs."""

    STEEP = (0, 50, 70, 90, 110, 130, 150, 170, 190)
    FLAT = (0, 50, 51, 52, 53, 54, 55, 56, 57)

    @pytest.mark.parametrize("name", ["acceptance", "hardware", "hardware-decoupled"])
    def test_the_first_round_is_a_plain_one_which_is_measured(self, name):
        schedule = new_schedule(settings(name), CostTable())
        first, second = play(schedule, 3, times=2)
        assert first == Plan([NONE], "measuring")
        assert second.rows != [NONE]

    def test_acceptance_makes_long_drafts_where_they_are_cheap_and_short_ones_where_not(self):
        def last(seconds_per_width: Sequence[float], accepted: int) -> int:
            schedule = new_schedule(settings("acceptance"), CostTable())
            return play(schedule, accepted, 60, seconds_per_width=seconds_per_width)[-1].rows[0].num_tokens

        assert last(self.FLAT, 7) == 7
        assert last(self.STEEP, 2) in (1, 2)

    def test_no_row_starves(self):
        schedule = new_schedule(settings("acceptance"), CostTable())
        plans = play(schedule, [7, 0], times=120, states=[row(0), row(1)], seconds_per_width=[0, *range(50, 200, 12)])
        lengths = [plan.rows[1].num_tokens for plan in plans[20:]]
        assert lengths.count(0) > 60
        assert all(any(lengths[i : i + AcceptanceSchedule.PATIENCE + 1]) for i in range(60))
        assert sum(plan.rows[0].num_tokens for plan in plans[20:]) > sum(lengths)

    def test_hardware_drafts_what_it_can_and_lets_its_gate_decide(self):
        schedule = new_schedule(settings("hardware"), CostTable())
        plan = play(schedule, 3, times=9, states=[row(0), row(1, room=2)], seconds_per_width=self.STEEP)[-1]
        assert plan.rows == [drafter(7), drafter(2)]
        assert isinstance(plan.gate, SurvivalGate)
        assert plan.gate.costs.num_rows == 2

    def test_the_decoupled_budget_is_that_of_two_rounds_before(self):
        schedule = new_schedule(settings("hardware-decoupled"), CostTable())
        play(schedule, 3, times=2)
        confidences = ([0.9] * 7, [0.01] * 7, [0.5] * 7)
        budgets = []
        for confidence in confidences:
            plan = play(schedule, 3)[0]
            for position, c in enumerate(confidence):
                plan.gate.opens(position, [c])
            budgets.append(sum(plan.gate.admitted([7])))
        # The gate of the round before the first one has seen nothing.
        assert budgets[2] > budgets[1]


class TestAuto:
    def test_the_first_round_measures_what_everything_is_compared_with(self):
        assert AutoSchedule(settings(), CostTable()).plan([row()]) == Plan([NONE], "measuring")

    def test_the_second_tries_a_short_draft(self):
        _, second = play(AutoSchedule(settings(), CostTable()), accepted=9, times=2)
        assert second.reason == "exploring"
        assert 2 <= second.rows[0].num_tokens <= 4

    def test_a_good_drafter_and_flat_passes_bring_the_full_block(self):
        plans = play(AutoSchedule(settings(), CostTable()), accepted=9, times=12)
        assert plans[-1] == Plan([drafter(7)], "best")

    def test_the_next_call_starts_with_what_this_one_found(self):
        table = CostTable()
        play(AutoSchedule(settings(), table), accepted=9, times=30)
        assert AutoSchedule(settings(), table).plan([row()]) == Plan([drafter(7)], "best")

    def test_steep_passes_make_short_drafts(self):
        steep = [0, 50, 60, 80, 110, 150, 190, 230, 270]
        plans = play(AutoSchedule(settings(), CostTable()), accepted=2, times=60, seconds_per_width=steep)
        assert plans[-1].rows in ([drafter(1)], [drafter(2)])

    def test_a_drafter_that_is_always_wrong_is_set_aside(self):
        plans = play(AutoSchedule(settings(), CostTable()), accepted=0, times=100)
        assert [plan.reason for plan in plans[-30:]].count("aside") >= 25

    def test_tries_come_at_growing_intervals_with_a_bound(self):
        plans = play(AutoSchedule(settings(), CostTable()), accepted=0, times=600)
        tries = [i for i, plan in enumerate(plans) if plan.reason == "probing"]
        pauses = [later - earlier for earlier, later in pairwise(tries)]
        assert pauses[0] < pauses[-1]
        assert all(AutoSchedule.MIN_PAUSE <= pause <= AutoSchedule.MAX_PAUSE + 1 for pause in pauses)
        assert sum(any(planned.source == "drafter" for planned in plan.rows) for plan in plans[300:]) <= 20

    def test_the_dearer_a_try_the_rarer_it_is(self):
        def num_tries(seconds_per_width: list[float]) -> int:
            plans = play(AutoSchedule(settings(), CostTable()), 0, 300, seconds_per_width=seconds_per_width)
            return sum(plan.reason == "probing" for plan in plans)

        assert num_tries([0, 50] + [51] * 7) > 1.5 * num_tries([0, 50] + [100] * 7) > 0

    def test_a_drafter_that_becomes_good_is_used_again(self):
        schedule = AutoSchedule(settings(), CostTable())
        play(schedule, accepted=0, times=300)
        plans = play(schedule, accepted=7, times=AutoSchedule.MAX_PAUSE + 12)
        assert plans[-1] == Plan([drafter(7)], "best")

    def test_one_try_that_pays_is_enough(self):
        schedule = AutoSchedule(settings(), CostTable())
        play(schedule, accepted=0, times=300)
        plans = play(schedule, accepted=7, times=AutoSchedule.MAX_PAUSE + 2)
        tried = next(i for i, plan in enumerate(plans) if plan.reason == "probing")
        assert plans[tried + 1].rows[0].source == "drafter"

    def test_a_plain_pass_is_measured_from_time_to_time(self):
        plans = play(AutoSchedule(settings(), CostTable()), accepted=2, times=600)
        measured = [i for i, plan in enumerate(plans) if plan.reason == "measuring"]
        assert measured[0] == 0
        assert 2 <= len(measured) <= 10

    def test_nothing_is_drafted_without_room_or_drafter(self):
        schedule = AutoSchedule(settings(), CostTable())
        play(schedule, accepted=7, times=5)
        for state in (row(room=0), row(can_draft=False), row(room=0, offer=offer(16))):
            assert schedule.plan([state]) == Plan([NONE], "nothing")

    def test_room_cuts_both_sources(self):
        schedule = AutoSchedule(settings(), CostTable())
        play(schedule, accepted=7, times=12)
        assert schedule.plan([row(room=2)]).rows == [drafter(2)]
        assert schedule.plan([row(room=3, can_draft=False, offer=offer(16))]).rows == [lookup(3)]

    def test_a_draft_that_ended_early_is_one_that_did_not_bring_the_rest(self):
        """A confidence threshold that cuts every draft at once leaves a drafter that costs and brings nothing."""
        schedule = AutoSchedule(settings(), CostTable())
        for _ in range(40):
            plan = schedule.plan([row()])
            schedule.observe(plan, [RowOutcome(0, plan.rows[0].source, 0, 0)], 55, 5 if plan.rows != [NONE] else 0)
        assert plan.reason in ("aside", "probing")
        assert schedule.mismatch() is None  # nothing was proposed, so nothing was rejected

    def test_the_same_past_gives_the_same_plan(self):
        one, other = AutoSchedule(settings(), CostTable()), AutoSchedule(settings(), CostTable())
        for accepted in (3, 0, 7, 1, 0, 2, 5):
            assert play(one, accepted) == play(other, accepted)


class TestLookups:
    def warm(self) -> AutoSchedule:
        """The price of every width is known, and one token of each draft stands."""
        schedule = AutoSchedule(settings(), CostTable())
        for size in range(17):
            for _ in range(4):
                schedule._costs.observe(1, size, 0, 0, 50 + size / 2, None)
        for _ in range(10):
            schedule._drafts.observe([DraftOutcome(0, 7, 1)])
        return schedule

    def test_a_long_match_goes_before_the_drafter(self):
        plan = self.warm().plan([row(offer=offer(16))])
        assert plan.rows[0].source == "lookup"
        assert plan.rows[0].num_tokens >= 8

    def test_the_drafter_goes_before_an_offer_that_was_mostly_wrong(self):
        wrong = LookupOffer([7] * 16, 2, ((2, False),) * 30)
        assert self.warm().plan([row(offer=wrong)]).rows[0].source == "drafter"

    def test_offers_that_were_not_drafted_count_too(self):
        schedule = self.warm()
        bad = LookupOffer([7] * 16, 2, ((2, False),) * 30)
        good = LookupOffer([7] * 16, 2, tuple((length, True) for length in range(2, 17)) * 30)
        assert schedule.plan([row(can_draft=False, offer=bad)]).rows == [NONE]
        assert schedule.plan([row(can_draft=False, offer=good)]).rows[0].source == "lookup"

    def test_they_need_no_drafter(self):
        assert self.warm().plan([row(can_draft=False, offer=offer(16))]).rows[0].source == "lookup"

    def test_no_more_than_the_settings_allow(self):
        schedule = AutoSchedule(settings(lookup_tokens=3), CostTable())
        play(schedule, accepted=0)
        assert schedule.plan([row(can_draft=False, offer=offer(16))]).rows == [lookup(3)]


class TestBatches:
    @pytest.mark.parametrize("pads_rows", [False, True])
    def test_each_row_drafts_what_it_can(self, pads_rows):
        schedule = AutoSchedule(settings(), CostTable(), pads_rows)
        states = [row(0), row(1), row(2, room=99), row(3, can_draft=False)]
        *_, last = play(schedule, accepted=[7, 1, 7, 0], times=12, states=states)
        assert last.rows[0].num_tokens > 1
        assert last.rows[2].source == "drafter" and last.rows[3] == NONE

    def test_a_padded_pass_costs_what_its_longest_draft_costs_so_the_others_fill_it(self):
        schedule = AutoSchedule(settings(), CostTable(), pads_rows=True)
        *_, last = play(schedule, accepted=[7, 1], times=12, states=[row(0), row(1)])
        assert last.rows[0].num_tokens == last.rows[1].num_tokens > 1

    def test_without_padding_tokens_go_where_they_are_accepted(self):
        schedule = AutoSchedule(settings(), CostTable())
        for _ in range(30):
            plan = schedule.plan([row(0), row(1, room=40)])  # row 0 will be the last one
            proposed = [planned.num_tokens for planned in plan.rows]
            outcomes = [
                RowOutcome(number, planned.source, n, (n, 0)[number])
                for number, (planned, n) in enumerate(zip(plan.rows, proposed, strict=True))
            ]
            drafts = any(planned.source == "drafter" for planned in plan.rows)
            schedule.observe(plan, outcomes, 50 + 6 * sum(proposed) + 2 * drafts, 2.0 * drafts)
        assert plan.rows[0].num_tokens > 2
        assert plan.rows[1].num_tokens == 0

    def values(
        self, table: CostTable, rooms: list[int], accepted: list[int], per_token: float = 1, times: int = 20
    ) -> list[float]:
        """After some rounds in which the rows accepted so many tokens each."""
        schedule, drafts = AutoSchedule(settings(), table), [drafter(7)] * len(rooms)
        for size in (*range(9), 14):
            for _ in range(8):
                schedule._costs.observe(2, size, 0, 0, 50 + per_token * size, None)
        schedule._values = [1.0] * len(rooms)
        for _ in range(times):
            outcomes = [RowOutcome(number, "drafter", 7, n) for number, n in enumerate(accepted)]
            schedule.observe(Plan(drafts, "best"), outcomes, 55 + 14 * per_token, 5)
        return schedule._values_of([row(number, room) for number, room in enumerate(rooms)])

    def long_texts(self) -> CostTable:
        table = CostTable()
        table.count_ends(0, 100_000)
        return table

    def test_rows_that_are_even_are_worth_the_same(self):
        assert self.values(self.long_texts(), [100, 100], [1, 1]) == pytest.approx([1, 1])

    def test_a_row_that_will_be_last_goes_first_where_texts_fill_their_room(self):
        behind, ahead = self.values(self.long_texts(), [100, 40], [1, 1])
        assert behind > 1.7
        assert behind + ahead == pytest.approx(2)

    def test_a_row_that_accepts_little_goes_first(self):
        slow, fast = self.values(self.long_texts(), [80, 80], [0, 3])
        assert slow > 1.7
        assert slow + fast == pytest.approx(2)
        # Ahead of one that is as fast, it is not the last one.
        assert self.values(self.long_texts(), [60, 100], [3, 3])[0] < 0.5

    def test_paces_are_not_believed_before_they_were_seen(self):
        early, late = (self.values(self.long_texts(), [80, 80], [1, 2], times=times) for times in (2, 60))
        assert 1 < early[0] < 1.25 < late[0]

    def test_nobody_knows_which_row_is_last_where_texts_end_before_their_room_does(self):
        table = CostTable()
        table.count_ends(500, 10_000)
        assert self.values(table, [1000, 900], [1, 1]) == pytest.approx([1, 1], abs=0.05)

    def test_a_row_that_ends_early_saves_as_much_as_one_that_ends_late_where_every_token_costs_the_same(self):
        assert self.values(self.long_texts(), [100, 40], [1, 1], per_token=25) == pytest.approx([1, 1], abs=0.2)

    def test_each_row_takes_its_better_source(self):
        schedule = AutoSchedule(settings(), CostTable())
        play(schedule, accepted=1, times=12, states=[row(0), row(1)])
        plan = schedule.plan([row(0), row(1, offer=offer(16))])
        assert [planned.source for planned in plan.rows] == ["drafter", "lookup"]

    def test_the_drafter_does_not_run_for_a_batch_of_lookups(self):
        schedule = AutoSchedule(settings(), CostTable())
        play(schedule, accepted=0, times=8, states=[row(0), row(1)])
        plan = schedule.plan([row(0, offer=offer(16)), row(1, offer=offer(16))])
        assert [planned.source for planned in plan.rows] == ["lookup", "lookup"]


class TestAcceptance:
    def test_chances_are_found(self):
        acceptance = DraftAcceptance(CostTable(), 3)
        for accepted in (3, 3, 1, 0) * 50:
            acceptance.observe([DraftOutcome(0, 3, accepted)])
        assert acceptance.gains(0, 3) == pytest.approx([0, 0.75, 1.25, 1.75], abs=0.12)

    def test_a_position_without_tries_is_like_the_one_before(self):
        acceptance = DraftAcceptance(CostTable(), 7)
        for _ in range(100):
            acceptance.observe([DraftOutcome(0, 2, 2), DraftOutcome(1, 2, 2)])
        gains = acceptance.gains(0, 7)
        assert gains[7] - gains[6] > 0.9

    def test_rows_differ_as_far_as_they_have_shown(self):
        acceptance = DraftAcceptance(CostTable(), 7)
        for _ in range(20):
            acceptance.observe([DraftOutcome(0, 7, 7), DraftOutcome(1, 7, 0)])
        good, bad, new = (acceptance.gains(number, 7)[-1] for number in range(3))
        assert good > 1.5 * new
        assert bad < new / 3

    def test_they_follow_the_text(self):
        acceptance = DraftAcceptance(CostTable(), 1)
        for accepted in [1] * 200 + [0] * 40:
            acceptance.observe([DraftOutcome(0, 1, accepted)])
        assert acceptance.gains(0, 1)[1] < 0.3

    def test_old_knowledge_yields_to_new(self):
        def after_three_hits(forgets: bool) -> float:
            acceptance = DraftAcceptance(CostTable(), 1)
            for _ in range(100):
                acceptance.observe([DraftOutcome(0, 1, 0)])
            if forgets:
                acceptance.forget()
            for _ in range(3):
                acceptance.observe([DraftOutcome(0, 1, 1)])
            return acceptance.gains(0, 1)[1]

        assert after_three_hits(True) > 0.5 > 0.2 > after_three_hits(False)

    @pytest.mark.parametrize(("accepted", "low", "high"), [(0, 0.0, 0.3), (7, 5.0, 7.0)])
    def test_a_call_starts_from_the_pairs_record(self, accepted, low, high):
        table = CostTable()
        assert 0.5 < DraftAcceptance(table, 7).gains(0, 7)[-1] < 2
        for _ in range(50):
            DraftAcceptance(table, 7).observe([DraftOutcome(0, 7, accepted)])
        assert low < DraftAcceptance(table, 7).gains(0, 7)[-1] < high

    def test_lookups_are_worth_more_the_longer_the_match(self):
        gains = [LookupAcceptance(CostTable()).gains(0, length, 8)[-1] for length in (2, 3, 4, 6, 9, 16, 20)]
        assert gains[:-1] == sorted(set(gains))
        assert gains[-1] == gains[-2]

    def test_a_lookup_token_is_valued_by_the_match_up_to_it(self):
        acceptance = LookupAcceptance(CostTable())
        acceptance.observe(0, [(2, True)] * 200 + [(3, False)] * 200)
        assert acceptance.gains(0, 2, 8) == pytest.approx([0] + [1] * 8, abs=0.05)


class TestKept:
    """What accepted tokens are worth to a batch, whose call lasts as long as its slowest row."""

    def kept(self, num_rows: int, room: int, gain: float, table: CostTable | None = None) -> float:
        table = CostTable() if table is None else table
        table.count_ends(0, 100_000)  # texts fill their room
        schedule = AutoSchedule(settings(), table)
        states = [row(number, room) for number in range(num_rows)]
        schedule._values = [1.0] * num_rows
        schedule.observe(
            Plan([NONE] * num_rows, "measuring"), [RowOutcome(n, "none", 0, 0) for n in range(num_rows)], 1.0, 0.0
        )
        schedule._paces.clear()
        schedule._values_of(states)
        schedule._usual_gain = 0.0
        return schedule._kept(num_rows, gain * num_rows)

    def test_all_for_one_row(self):
        assert self.kept(1, 50, 0.01) == 1

    def test_a_few_lucky_rows_of_many_save_nothing(self):
        assert self.kept(16, 50, 0.02) < 0.35

    def test_many_tokens_of_all_rows_do(self):
        assert self.kept(16, 2000, 1.0) > 0.8
        by_gain = [self.kept(16, 60, gain) for gain in (0.02, 0.1, 0.3, 1.0)]
        by_rows = [self.kept(num_rows, 60, 0.3) for num_rows in (16, 8, 4, 2)]
        assert by_gain == sorted(set(by_gain)) and by_rows == sorted(set(by_rows))

    def test_what_was_measured_counts(self):
        table = CostTable()
        table.count_lead(16, 0.0, 40.0)
        assert self.kept(16, 2000, 1.0, table) < 0.4 < self.kept(2, 2000, 1.0, table)

    def test_the_lead_of_the_row_most_behind_is_what_counts(self):
        table = CostTable()
        table.count_ends(0, 100_000)
        schedule = AutoSchedule(settings(), table)
        rooms = [50, 50, 50, 50]
        for accepted in ([0, 0, 0, 0], [2, 2, 2, 0], [2, 2, 2, 2]):
            schedule.plan([row(number, room) for number, room in enumerate(rooms)])
            plan = Plan([drafter(2) if sum(accepted) else NONE] * 4, "best")
            before = table._leads.get(3, (0.0, 0.0))
            outcomes = [
                RowOutcome(n, of.source, of.num_tokens, a)
                for n, (of, a) in enumerate(zip(plan.rows, accepted, strict=True))
            ]
            schedule.observe(plan, outcomes, 1.0, 0.1)
            rooms = [room - 1 - a for room, a in zip(rooms, accepted, strict=True)]
            assert table._leads.get(3, (0.0, 0.0))[0] - before[0] == pytest.approx(min(accepted), abs=0.1)

    def test_a_row_that_ends_by_itself_is_no_lead(self):
        table = CostTable()
        table.count_ends(0, 100_000)
        schedule = AutoSchedule(settings(), table)
        states = [row(0, 80), row(1, 20)]
        for has_ended in (False, True):
            schedule.plan(states)
            outcomes = [RowOutcome(0, "none", 0, 0, has_ended), RowOutcome(1, "none", 0, 0)]
            schedule.observe(Plan([NONE] * 2, "aside"), outcomes, 1.0, 0.0)
        assert table._leads[2][0] == 0

    def test_a_fixed_table_learns_nothing(self):
        table = CostTable.of({4: {0: 1.0, 4: 1.2}}, {4: {1: 0.1}}, is_fixed=True)
        before = table.lead(4)
        table.count_lead(4, 0.0, 50.0)
        table.keep_share_of_tries(4, 0.01)
        assert table.lead(4) == before and table.share_of_tries(4) is None


def test_a_batch_goes_into_unknown_sizes_step_by_step():
    states = [row(number) for number in range(8)]
    schedule = AutoSchedule(settings(), CostTable())
    plans = play(schedule, 7, times=12, states=states)
    sizes = [sum(of.num_tokens for of in plan.rows) for plan in plans]
    for n, size in enumerate(sizes):
        assert size <= max(8, 4 * max(sizes[:n], default=0))
    assert max(sizes) == 8 * NUM_DRAFT_TOKENS  # and in the end to where it pays


def test_a_call_tries_as_seldom_as_the_one_before_it_ended_with():
    table = CostTable()
    counts = []
    for _ in range(3):
        plans = play(AutoSchedule(settings(), table), 0, times=150)
        counts.append(sum(plan.reason == "probing" for plan in plans))
    assert counts[0] > counts[1] == counts[2] > 0


class TestMismatch:
    def mismatch(self, accepted: int, times: int, table: CostTable | None = None) -> str | None:
        schedule = AutoSchedule(settings(), table or CostTable())
        play(schedule, accepted, times)
        return schedule.mismatch()

    def test_a_drafter_that_is_never_right_is_named_with_the_numbers(self):
        schedule = AutoSchedule(settings(), CostTable())
        while (message := schedule.mismatch()) is None:
            play(schedule, accepted=0)
        assert message.startswith(
            "The drafter does not seem to fit its target: of 24 first tokens of a draft, the target accepted 0,"
        )

    def test_not_before_there_is_evidence(self):
        assert self.mismatch(0, times=10) is None

    def test_earlier_calls_count(self):
        table = CostTable()
        found = [self.mismatch(0, times=60, table=table) for _ in range(6)]
        assert found[0] is None
        assert found[-1] is not None

    def test_not_if_this_call_has_hardly_tried(self):
        table = CostTable()
        table.count_acceptance("drafter", [(0, False)] * 100)
        assert self.mismatch(0, times=3, table=table) is None

    def test_a_drafter_that_is_right_now_and_then_is_not_named(self):
        table = CostTable()
        table.count_acceptance("drafter", [(0, False)] * 100)
        assert self.mismatch(1, times=200, table=table) is None

    @pytest.mark.parametrize("profile", ["good", "demo", "chat"])
    def test_a_fitting_drafter_is_not_named(self, profile):
        table = CostTable()
        for seed in range(4):
            schedule = auto("gpu", table)
            simulate(schedule, machine("gpu", seed), texts("gpu", profile, 400, seed), 0)
            assert schedule.mismatch() is None


def texts(name: str, profile: str, num_tokens: int, seed: int) -> list[Text]:
    return [novel_text(PROFILES[profile], num_tokens, 100 * seed + i) for i in range(num_rows(name))]


class TestInSimulatedTime:
    """Bounds on means over seeds: of first calls, where nothing is known, and of later ones of the same pair."""

    @pytest.mark.parametrize("profile", ["good", "demo"])
    @pytest.mark.parametrize("name", CURVES)
    def test_a_drafter_that_pays_is_used_nearly_as_well_as_in_hindsight(self, name, profile):
        first, later = self.regrets(name, profile)
        assert first < 0.10
        assert later < 0.06

    @pytest.mark.parametrize("name", CURVES)
    def test_where_there_is_little_to_gain_little_is_lost(self, name):
        first, later = self.regrets(name, "chat")
        assert first < 0.12
        assert later < 0.08

    @pytest.mark.parametrize("profile", ["random", "weak"])
    @pytest.mark.parametrize("name", CURVES)
    def test_never_slower(self, name, profile):
        """256 tokens with a drafter that is right never, or one time in ten, against plain decoding."""
        first, later = self.losses(name, profile, 256, plain_seconds)
        assert mean(first) < 0.04
        assert mean(later) < 0.025
        assert max(first + later) < 0.07

    @pytest.mark.parametrize("name", CURVES)
    def test_a_drafter_that_turns_good_is_used_again(self, name):
        run = simulate(auto(name), machine(name), texts(name, "turns good", 500, 0), 0)
        turned = next(i for i, num_new in enumerate(run.num_new) if num_new >= 200 * num_rows(name))
        used = run.used_drafter()[turned:]
        assert next(i for i in range(len(used)) if all(used[i : i + 5])) <= AutoSchedule.MAX_PAUSE + 30

    @pytest.mark.parametrize("name", CURVES)
    def test_a_drafter_that_turns_bad_is_set_aside(self, name):
        rows = texts(name, "turns bad", 400, 0)
        run = simulate(auto(name), machine(name), rows, 0)
        assert run.seconds < plain_seconds(name, rows)
        assert sum(plan.reason == "aside" for plan in run.plans[-100:]) > 75

    @pytest.mark.parametrize("profile", ["good", "random"])
    @pytest.mark.parametrize("name", ["bf16", "float32", "gpu"])
    def test_a_context_that_triples_the_price_of_a_pass(self, name, profile):
        rows = texts(name, profile, 2000, 0)
        run = simulate(auto(name), machine(name, growth=0.001), rows, 0)
        assert run.seconds < 1.04 * best_fixed(name, rows, growth=0.001)[0]

    def test_first_passes_that_pay_for_warm_up(self):
        rows = texts("bf16", "good", 256, 0)
        assert (
            simulate(auto("bf16"), machine("bf16", warm_up=10), rows, 0).seconds < 1.12 * best_fixed("bf16", rows)[0]
        )

    @pytest.mark.parametrize("profile", ["demo", "random"])
    @pytest.mark.parametrize("kind", TEXTS)
    @pytest.mark.parametrize(
        "name", [pytest.param(name, marks=[pytest.mark.slow] if num_rows(name) > 1 else []) for name in CURVES]
    )
    def test_close_to_the_better_of_drafter_and_lookup_or_ahead_of_both(self, name, kind, profile):
        """Each of the two alone at its best length. First calls are short of rounds: a dozen where all is copied."""
        first, later = [], []
        for seed in range(3):
            table = CostTable()
            for call in range(2):
                rows = [TEXTS[kind](PROFILES[profile], 160, 100 * seed + 17 * call + i) for i in range(num_rows(name))]
                run = simulate(auto(name, table, 16), machine(name, 10 * seed + call), rows)
                better = min(best_fixed(name, rows)[0], best_lookup(name, rows))
                (later if call else first).append(run.seconds / better - 1)
        assert mean(first) < 0.20
        assert mean(later) < 0.09

    def regrets(self, name: str, profile: str) -> tuple[float, float]:
        """Mean losses against the best constant draft length in hindsight."""
        first, later = self.losses(name, profile, 128, lambda name, rows: best_fixed(name, rows)[0])
        return mean(first), mean(later)

    def losses(
        self, name: str, profile: str, num_tokens: int, seconds_of: Callable[[str, list[Text]], float]
    ) -> tuple[list[float], list[float]]:
        """Seconds over those of something else, less 1: of first calls, and of later ones."""
        first, later = [], []
        for seed in range(5):
            table = CostTable()
            for call in range(3):
                rows = texts(name, profile, num_tokens, 10 * seed + call)
                run = simulate(auto(name, table), machine(name, 10 * seed + call), rows, 0)
                (later if call else first).append(run.seconds / seconds_of(name, rows) - 1)
        return first, later
