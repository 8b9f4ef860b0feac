"""The schedules, in simulated time (`simulator`): exact where rules are, within bounds where prices are learned."""

import pytest
from simulator import (
    CURVES,
    NUM_DRAFT_TOKENS,
    PROFILES,
    auto,
    best_fixed,
    best_lookup,
    copying_text,
    machine,
    novel_text,
    num_rows,
    plain_seconds,
    simulate,
)
from transformers import GenerationConfig

from dspark_hf import UnsupportedGenerationError
from dspark_hf.costs import CostTable
from dspark_hf.lookup import LookupOffer
from dspark_hf.scheduling import (
    AutoSchedule,
    ConstantSchedule,
    DraftLength,
    RowOutcome,
    RowPlan,
    RowState,
    new_schedule,
    resolve_draft_length,
)

OFFER = LookupOffer([1, 2, 3, 4], match_length=9)
SHORT = LookupOffer([1, 2, 3, 4], match_length=2)


def texts(name: str, profile: str, num_tokens: int, seed: int = 0) -> list:
    return [novel_text(PROFILES[profile], num_tokens, seed + row) for row in range(num_rows(name))]


class TestConstant:
    def schedule(self, lookup_tokens: int = 0) -> ConstantSchedule:
        return ConstantSchedule(DraftLength(5, 0.0, "constant", lookup_tokens), CostTable())

    def test_always_as_many_as_allowed(self):
        schedule = self.schedule()
        rows = [RowState(0, 10, 30), RowState(1, 10, 3), RowState(2, 10, 0), RowState(3, 10, 30, can_draft=False)]
        for _ in range(40):
            plan = schedule.plan(rows)
            assert plan.reason == "constant"
            assert plan.rows == [RowPlan("drafter", 5), RowPlan("drafter", 3), RowPlan("none", 0), RowPlan("none", 0)]
            schedule.observe(
                plan, [RowOutcome(i, r.source, r.num_tokens, 0) for i, r in enumerate(plan.rows)], 9.0, 8.0
            )

    def test_a_lookup_takes_over_only_where_its_match_is_long(self):
        plan = self.schedule(lookup_tokens=3).plan([RowState(0, 10, 30, OFFER), RowState(1, 10, 30, SHORT)])
        assert plan.rows == [RowPlan("lookup", 3), RowPlan("drafter", 5)]


class TestSettings:
    def resolve(self, config: GenerationConfig | None = None, **settings) -> DraftLength:
        return resolve_draft_length(config or GenerationConfig(), 7, True, **settings)

    def test_auto_is_the_default_and_looks_up(self):
        assert self.resolve() == DraftLength(7, 0.0, "auto", AutoSchedule.LOOKUP_TOKENS)
        assert self.resolve(schedule="constant") == DraftLength(7, 0.0, "constant", 0)
        assert self.resolve(lookup_tokens=0).lookup_tokens == 0

    def test_the_call_wins_over_the_drafter(self):
        config = GenerationConfig(num_assistant_tokens=4, num_assistant_tokens_schedule="constant")
        assert self.resolve(config).num_assistant_tokens == 4
        assert self.resolve(config, schedule="auto", num_assistant_tokens=2) == DraftLength(2, 0.0, "auto", 16)

    @pytest.mark.parametrize("value", [-1, 2.5, True, "3"])
    def test_a_wrong_number_of_lookup_tokens(self, value):
        with pytest.raises(UnsupportedGenerationError, match="`prompt_lookup_num_tokens` is"):
            self.resolve(lookup_tokens=value)

    @pytest.mark.parametrize("name", ["auto", "constant"])
    def test_each_name_makes_its_schedule(self, name: str):
        made = new_schedule(DraftLength(7, 0.0, name), CostTable())
        assert type(made).__name__.lower().startswith(name)


class TestAuto:
    """Bounds in simulated time, at true prices, with noisy clocks."""

    @pytest.mark.parametrize("name", CURVES)
    def test_a_drafter_that_guesses_costs_little(self, name: str):
        rows = texts(name, "random", 256)
        first = simulate(auto(), machine(name), rows, 0).seconds
        assert first <= 1.06 * plain_seconds(name, rows)
        table = CostTable()
        for seed in range(3):
            last = simulate(auto(table), machine(name, seed), texts(name, "random", 256, 10 * seed), 0)
        assert last.seconds <= 1.04 * plain_seconds(name, rows)

    @pytest.mark.parametrize("profile", ["good", "demo"])
    @pytest.mark.parametrize("name", CURVES)
    def test_little_is_lost_against_the_best_constant_length(self, name: str, profile: str):
        table, lost = CostTable(), []
        for seed in range(6):
            rows = texts(name, profile, 128, 10 * seed)
            best, _ = best_fixed(name, rows)
            lost.append(simulate(auto(table), machine(name, seed), rows, 0).seconds / best)
        assert sum(lost[2:]) / 4 <= 1.10
        assert lost[0] <= 1.25

    @pytest.mark.parametrize("name", ["bf16", "float32"])
    def test_a_drafter_that_turns_good_is_found(self, name: str):
        rows = texts(name, "turns good", 500)
        run = simulate(auto(), machine(name), rows, 0)
        assert run.seconds < 0.97 * plain_seconds(name, rows)

    @pytest.mark.parametrize("name", ["bf16", "float32"])
    def test_copied_text_is_copied(self, name: str):
        rows = [copying_text(PROFILES["chat"], 256, seed) for seed in range(num_rows(name))]
        run = simulate(auto(lookup_tokens=16), machine(name), rows)
        assert run.seconds <= 1.10 * best_lookup(name, rows)
        assert run.seconds < 0.7 * plain_seconds(name, rows)

    def test_nothing_to_draft(self):
        assert auto().plan([RowState(0, 10, 0)]).reason == "nothing"

    def test_the_first_round_of_a_pair_measures_a_plain_pass(self):
        assert auto().plan([RowState(0, 10, 50)]).rows == [RowPlan("none", 0)]

    def test_it_never_asks_for_more_than_there_is(self):
        rows = texts("gpu", "good", 60)
        for plan in simulate(auto(), machine("gpu"), rows, 0).plans:
            assert all(row.num_tokens <= NUM_DRAFT_TOKENS for row in plan.rows)


class TestMismatch:
    def mismatch_after(self, profile: str, num_tokens: int = 400) -> str | None:
        schedule, table = None, CostTable()
        for seed in range(4):
            schedule = auto(table)
            simulate(schedule, machine("gpu", seed), texts("gpu", profile, num_tokens, seed), 0)
        return schedule.mismatch()

    def test_a_guessing_drafter_is_named(self):
        assert "does not seem to fit its target" in self.mismatch_after("random")

    @pytest.mark.parametrize("profile", ["good", "demo", "chat"])
    def test_a_fitting_one_is_not(self, profile: str):
        assert self.mismatch_after(profile) is None
