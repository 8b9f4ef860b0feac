"""Prices of rounds: measured ones stand, missing ones are guessed, noise and drift do not fool the comparison."""

import random
import threading

import pytest

from dspark_hf.costs import CostTable, RoundCosts

FLOAT32 = {1: 57.0, 2: 94.0, 3: 116.0, 4: 84.0, 5: 76.0, 6: 80.0, 7: 100.0, 8: 82.0}


def measure(costs: RoundCosts, width: int, seconds: float, times: int = 1, rows: int = 1) -> None:
    """Passes without the drafter, over `width` tokens of each row."""
    for _ in range(times):
        costs.observe(rows, rows * (width - 1), 0, 0, seconds, None)


def curve(costs: RoundCosts, max_width: int = 8, rows: int = 1) -> list[float]:
    """Of each width up to `max_width`."""
    return costs.pass_seconds(rows, rows * (max_width - 1))[::rows]


class TestPasses:
    def test_a_jagged_curve_is_kept_as_it_was_measured(self):
        costs = RoundCosts(CostTable())
        for width, seconds in FLOAT32.items():
            measure(costs, width, seconds, times=5)
        assert curve(costs) == pytest.approx(list(FLOAT32.values()))

    def test_a_missing_width_lies_a_little_below_the_line_between_its_neighbours(self):
        costs = RoundCosts(CostTable())
        measure(costs, 1, 50, times=4)
        measure(costs, 5, 90, times=4)
        assert curve(costs, 5) == pytest.approx([50, 0.95 * 60, 0.95 * 70, 0.95 * 80, 90])

    def test_beyond_the_widest_the_slope_halves(self):
        costs = RoundCosts(CostTable())
        measure(costs, 1, 50, times=4)
        measure(costs, 5, 90, times=4)
        assert curve(costs)[5:] == pytest.approx([0.95 * 95, 0.95 * 100, 0.95 * 105])

    def test_a_flat_curve_is_guessed_flat(self):
        costs = RoundCosts(CostTable())
        measure(costs, 1, 12, times=4)
        measure(costs, 4, 12, times=4)
        assert curve(costs, 16)[4:] == pytest.approx([0.95 * 12] * 12)

    def test_with_a_plain_pass_alone_wider_ones_are_dearer_and_the_more_so_with_more_rows(self):
        costs = RoundCosts(CostTable())
        measure(costs, 1, 100, rows=1)
        measure(costs, 1, 100, rows=9)
        assert curve(costs, 3, rows=1)[1:] == pytest.approx([0.95 * 105, 0.95 * 110])
        assert curve(costs, 3, rows=9)[1:] == pytest.approx([0.95 * 115, 0.95 * 130])

    def test_no_pass_is_cheaper_than_the_plain_one(self):
        costs = RoundCosts(CostTable())
        measure(costs, 1, 500)
        measure(costs, 4, 60, times=4)
        assert curve(costs, 4)[0] == 60

    def test_it_says_what_was_measured(self):
        costs = RoundCosts(CostTable())
        assert costs.num_plain(1) == 0
        measure(costs, 1, 50, times=3)
        measure(costs, 4, 60)
        assert costs.num_plain(1) == 3
        assert [costs.is_measured(1, size) for size in (0, 1, 3)] == [True, False, False]
        measure(costs, 4, 60)
        assert costs.is_measured(1, 3)


class TestNoise:
    def known(self) -> RoundCosts:
        costs = RoundCosts(CostTable())
        measure(costs, 1, 50, times=10)
        measure(costs, 4, 60, times=10)
        return costs

    def test_a_dear_first_measurement_is_believed_when_a_second_one_confirms_it(self):
        costs = self.known()
        measure(costs, 8, 600)
        assert curve(costs)[7] == pytest.approx(60 + 10 / 3 / 2 * 4)  # the guess, which invites another look
        measure(costs, 8, 600)
        assert curve(costs)[7] == 600

    def test_a_hiccup_of_the_first_pass_is_forgotten(self):
        costs = self.known()
        measure(costs, 8, 600)
        measure(costs, 8, 65)
        assert curve(costs)[7] == 65

    def test_a_price_that_was_dear_twice_is_looked_at_again_much_later(self):
        costs = self.known()
        measure(costs, 8, 600, times=2)
        measure(costs, 4, 60, times=32)
        assert curve(costs)[7] == pytest.approx(600)
        measure(costs, 4, 60)
        assert curve(costs)[7] < 70

    def test_single_outliers_do_not_count(self):
        costs = self.known()
        for _ in range(10):
            measure(costs, 4, 120)
            measure(costs, 4, 60, times=9)
        assert curve(costs, 4)[3] / curve(costs, 4)[0] == pytest.approx(60 / 50, rel=0.05)

    @pytest.mark.parametrize("length", [3, 9])
    def test_a_burst_of_slow_rounds_leaves_no_trace(self, length):
        costs = self.known()
        measure(costs, 4, 120, times=length)
        measure(costs, 4, 60, times=3)
        prices = curve(costs, 4)
        assert prices[3] / prices[0] == pytest.approx(60 / 50, rel=0.03)

    def test_what_is_first_measured_right_after_a_long_burst_is_not_taken_for_cheap(self):
        costs = self.known()
        measure(costs, 4, 120, times=20)  # long enough to pass for the new level
        measure(costs, 4, 60)
        measure(costs, 8, 65, times=2)
        measure(costs, 4, 60, times=40)
        measure(costs, 8, 65, times=3)
        assert curve(costs)[7] / curve(costs)[3] > 0.9

    def test_a_noisy_curve_is_found(self):
        costs, rng = RoundCosts(CostTable()), random.Random(0)
        widths = list(FLOAT32)
        for _ in range(400):
            width = rng.choice(widths)
            measure(costs, width, FLOAT32[width] * rng.lognormvariate(0, 0.05) * (2 if rng.random() < 0.03 else 1))
        assert curve(costs) == pytest.approx(list(FLOAT32.values()), rel=0.06)


class TestDrift:
    def test_prices_of_widths_that_no_longer_run_follow_those_that_do(self):
        costs = RoundCosts(CostTable())
        measure(costs, 1, 50, times=10)
        measure(costs, 8, 60, times=10)
        for step in range(1000):
            measure(costs, 8, 60 * (1 + 2 * step / 1000))
        plain, *_, wide = curve(costs)
        assert wide == pytest.approx(180, rel=0.05)
        assert plain == pytest.approx(150, rel=0.15)

    def test_a_lasting_change_of_load_does_not_change_the_comparison(self):
        costs = RoundCosts(CostTable())
        measure(costs, 1, 50, times=10)
        measure(costs, 8, 60, times=10)
        measure(costs, 8, 120, times=60)
        plain, *_, wide = curve(costs)
        assert wide / plain == pytest.approx(60 / 50, rel=0.05)
        assert wide == pytest.approx(120, rel=0.05)

    def test_a_price_that_changes_by_itself_is_learned_anew(self):
        costs = RoundCosts(CostTable())
        measure(costs, 1, 50, times=20)
        measure(costs, 8, 60, times=20)
        for _ in range(600):
            measure(costs, 1, 50)
            measure(costs, 8, 75)
        plain, *_, wide = curve(costs)
        assert wide / plain == pytest.approx(75 / 50, rel=0.05)

    def test_each_call_has_its_own_level(self):
        table = CostTable()
        short, long = RoundCosts(table), RoundCosts(table)
        for width, seconds in ((1, 50), (8, 60)):
            measure(short, width, seconds, times=20)
        for _ in range(40):
            measure(long, 8, 180)
            measure(short, 8, 60)
        assert curve(short)[0] == pytest.approx(50, rel=0.05)
        assert curve(long)[0] == pytest.approx(150, rel=0.05)


class TestRows:
    def lender(self) -> RoundCosts:
        costs = RoundCosts(CostTable())
        for size, seconds in ((0, 80), (24, 120)):
            for _ in range(4):
                costs.observe(8, size, 0, 0, seconds, None)
        return costs

    def test_a_near_number_of_rows_lends_its_curve(self):
        costs = self.lender()
        assert costs.num_plain(7) == costs.num_plain(4) == 4
        assert costs.num_plain(3) == 0
        assert costs.pass_seconds(7, 40) == costs.pass_seconds(8, 40)

    def test_it_is_scaled_to_what_was_measured(self):
        costs = self.lender()
        costs.observe(6, 24, 0, 0, 90, None)
        assert costs.pass_seconds(6, 24)[::24] == pytest.approx([60, 90])

    def test_what_was_measured_for_these_rows_goes_before(self):
        costs = self.lender()
        for _ in range(4):
            costs.observe(6, 0, 0, 0, 70, None)
            costs.observe(6, 24, 0, 0, 140, None)
        assert costs.pass_seconds(6, 24)[::24] == pytest.approx([70, 140])

    def test_sizes_of_a_batch_that_are_nearly_the_same_have_one_price(self):
        costs = self.lender()
        for size in (39, 40, 41, 43):
            costs.observe(8, size, 0, 0, 140, None)
        assert costs.is_measured(8, 42)
        assert not costs.is_measured(8, 48)
        assert costs.pass_seconds(8, 40)[24:41:8] == pytest.approx([120, 130, 140], rel=0.02)

    def test_luck_with_one_size_of_a_batch_hardly_counts(self):
        costs = RoundCosts(CostTable())
        for size, seconds in ((0, 50), (8, 58), (16, 55), (24, 74), (32, 82)):
            costs.observe(8, size, 0, 0, seconds, None)
        assert costs.pass_seconds(8, 32)[16] == pytest.approx(64.5, rel=0.05)


class TestDrafts:
    def test_before_any_draft_it_is_a_small_part_of_a_plain_pass(self):
        costs = RoundCosts(CostTable())
        measure(costs, 1, 50)
        assert costs.draft_seconds(1) == pytest.approx((5.0, 0.5))

    def test_base_and_slope_are_found(self):
        costs, rng = RoundCosts(CostTable()), random.Random(0)
        for _ in range(100):
            n = rng.randint(1, 7)
            costs.observe(1, n, 1, n, 40 + 3.4 + 0.4 * n, 3.4 + 0.4 * n)
        assert costs.draft_seconds(1) == pytest.approx((3.4, 0.4), rel=0.05)
        assert curve_of_pass(costs, 4) == pytest.approx(40)

    @pytest.mark.parametrize("num_tokens", [0, 1, 7])
    def test_one_length_alone_gives_its_own_price_and_a_likely_slope(self, num_tokens):
        costs = RoundCosts(CostTable())
        for _ in range(20):
            costs.observe(1, num_tokens, 1, num_tokens, 46, 6)
        base, slope = costs.draft_seconds(1)
        assert base + slope * num_tokens == pytest.approx(6)
        assert 0.2 < slope < 0.8 and base > 0

    def test_an_outlier_hardly_moves_it(self):
        costs = RoundCosts(CostTable())
        for _ in range(20):
            costs.observe(1, 4, 1, 4, 46, 6)
        costs.observe(1, 4, 1, 4, 640, 600)
        base, slope = costs.draft_seconds(1)
        assert base + slope * 4 < 6.5

    def test_another_number_of_rows_borrows_from_the_nearest(self):
        costs = RoundCosts(CostTable())
        for rows, seconds in ((1, 5), (8, 16)):
            for _ in range(5):
                costs.observe(rows, 4 * rows, rows, 4, 100, seconds)
        assert costs.draft_seconds(2) == pytest.approx([1.5 * part for part in costs.draft_seconds(1)])
        assert costs.draft_seconds(7) == pytest.approx([0.9375 * part for part in costs.draft_seconds(8)])


def curve_of_pass(costs: RoundCosts, width: int) -> float:
    return costs.pass_seconds(1, width - 1)[-1]


class TestUnknownParts:
    """On a GPU only the round is timed. The sum is right from the start, the parts once a pass was seen alone."""

    def test_the_sum_is_right(self):
        costs = RoundCosts(CostTable())
        measure(costs, 1, 12, times=4)
        for _ in range(10):
            costs.observe(1, 7, 1, 7, 12 + 4, None)
        base, slope = costs.draft_seconds(1)
        assert curve_of_pass(costs, 8) + base + slope * 7 == pytest.approx(16, rel=0.01)

    def test_passes_without_a_draft_tell_the_parts_apart(self):
        costs = RoundCosts(CostTable())
        measure(costs, 1, 12, times=4)
        for _ in range(60):
            costs.observe(1, 7, 1, 7, 12 + 4, None)
            measure(costs, 8, 12)
        base, slope = costs.draft_seconds(1)
        assert curve_of_pass(costs, 8) == pytest.approx(12, rel=0.02)
        assert base + slope * 7 == pytest.approx(4, rel=0.1)


class TestSharing:
    def test_the_record_of_acceptance_fades(self):
        table = CostTable()
        assert table.acceptance("drafter", 0) == (0, 0)
        table.count_acceptance("drafter", [(0, True)] * 2000)
        table.count_acceptance("drafter", [(0, False)] * 1000)
        hits, tries = table.acceptance("drafter", 0)
        assert tries == pytest.approx(200, rel=0.01)
        assert hits / tries < 0.01
        assert table.acceptance("lookup", 0) == (0, 0)

    def test_threads_may_use_one_table(self):
        table, failures, num_threads, num_rounds = CostTable(), [], 6, 200

        def call(seed: int) -> None:
            costs, rng = RoundCosts(table), random.Random(seed)
            try:
                for _ in range(num_rounds):
                    rows, width = rng.randint(1, 8), rng.randint(1, 8)
                    measure(costs, 1, 50, rows=rows)
                    costs.observe(rows, rows * (width - 1), rows, width - 1, 60, 5)
                    costs.pass_seconds(rows, 16 * rows)
                    table.count_acceptance("lookup", [(0, True)])
            except Exception as failure:
                failures.append(failure)

        threads = [threading.Thread(target=call, args=(seed,)) for seed in range(num_threads)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
        assert table._num_rounds == 2 * num_threads * num_rounds
        assert table.acceptance("lookup", 0)[1] == pytest.approx(200, rel=0.01)
