"""Admission by survivals and prices: Algorithm 1 and its gates as pure functions, against exhaustive search."""

import random
from itertools import pairwise, product
from math import nan
from statistics import mean

import pytest

from dspark_hf.acceptance import DraftOutcome
from dspark_hf.admission import EntropyGate, ForesightGate, PassCosts, SurvivalGate, admit, budget, spend
from dspark_hf.scheduling import RowOutcome
from dspark_hf.trust import Trust

# Seconds of a pass by its draft tokens, one row: steps at multiples of eight, a steep line, nearly flat.
JAGGED = [20.0 + 0.2 * n + 9.0 * ((n + 1) // 8) for n in range(65)]
STEEP = [20.0 + 6.0 * n for n in range(65)]
FLAT = [20.0 + 0.05 * n for n in range(65)]
CURVES = {"jagged": JAGGED, "steep": STEEP, "flat": FLAT}


def rate(survivals, lengths, costs):
    expected = costs.num_rows + sum(sum(values[:n]) for values, n in zip(survivals, lengths, strict=True))
    return expected / costs.of(max(lengths, default=0) if costs.pads_rows else sum(lengths))


def falling(rng, num_tokens, low=0.0):
    """Survivals of a row: products of random confidences."""
    survival, values = 1.0, []
    for _ in range(num_tokens):
        survival *= rng.uniform(low, 1)
        values.append(survival)
    return values


class TestAdmit:
    # The counterexample of the paper's appendix A: steps per second 1, 0.5, 0.45.
    APPENDIX = PassCosts([1.0, 2.0, 1 / 0.45], num_rows=1)

    @pytest.mark.parametrize("second", [0.9, 0.0])
    def test_the_first_token_that_does_not_pay_ends_it_whatever_follows(self, second):
        assert admit([[0.8, 0.8 * second]], self.APPENDIX) == [0]

    def test_a_search_over_all_numbers_would_look_at_what_follows(self):
        assert budget([[0.8, 0.72]], self.APPENDIX) == 2
        assert budget([[0.8, 0.0]], self.APPENDIX) == 0

    @pytest.mark.parametrize("pads_rows", [False, True])
    @pytest.mark.parametrize("curve", ["steep", "flat"])
    def test_it_is_the_best_of_all_lengths_where_prices_grow_evenly(self, curve, pads_rows):
        rng = random.Random(0)
        for _ in range(60):
            num_rows = rng.randint(1, 3)
            survivals = [falling(rng, rng.randint(0, 3)) for _ in range(num_rows)]
            costs = PassCosts(CURVES[curve], num_rows, draft_seconds=3.0, pads_rows=pads_rows)
            lengths = admit(survivals, costs)
            every = product(*(range(1 + len(values)) for values in survivals))
            best = max(rate(survivals, each, costs) for each in every)
            assert rate(survivals, lengths, costs) == pytest.approx(best)

    def test_a_better_row_gets_more(self):
        costs = PassCosts(STEEP, num_rows=2)
        good, bad = admit([[0.95, 0.9, 0.85], [0.3, 0.1, 0.0]], costs)
        assert good > 0 == bad

    def test_padding_is_filled(self):
        costs = PassCosts(FLAT, num_rows=2, pads_rows=True)
        assert admit([[0.9, 0.8, 0.7], [0.001, 0.0005]], costs) == [3, 2]

    def test_tokens_that_are_copied_count_among_the_size(self):
        steps = PassCosts([10, 10, 10, 30, 30], num_rows=1)
        assert admit([[0.9, 0.8]], steps) == [2]
        assert admit([[0.9, 0.8]], PassCosts([10, 10, 10, 30, 30], num_rows=1, num_copied=1)) == [1]

    def test_certain_tokens_are_admitted_in_their_order(self):
        assert admit([[1.0] * 5], PassCosts([10.0] * 3 + [100.0] * 9, num_rows=1)) == [2]
        assert admit([[1.0] * 5, [1.0] * 5], PassCosts([10.0] * 4 + [100.0] * 9, num_rows=2)) == [2, 1]

    @pytest.mark.parametrize("values", [[], [0.0], [nan], [0.0, 0.0], [nan, 0.5]])
    def test_tokens_without_a_chance_are_left_out(self, values):
        assert admit([values], PassCosts(STEEP, num_rows=1)) == [0]

    def test_beyond_the_last_price_passes_cost_the_last_one(self):
        assert admit([[0.5] * 4], PassCosts([10.0, 10.0], num_rows=1)) == [4]

    def test_a_draft_that_has_been_paid_for_makes_more_tokens_pay(self):
        survivals = [[0.5, 0.45, 0.4, 0.35]]
        alone, with_draft = (admit(survivals, PassCosts(STEEP, 1, draft_seconds=s)) for s in (0.0, 40.0))
        assert alone < with_draft

    def test_a_decision_never_depends_on_what_stands_behind(self):
        """Whether a token is admitted is the same whatever survivals follow in its row."""
        rng = random.Random(1)
        for _ in range(300):
            costs = PassCosts(CURVES[rng.choice(list(CURVES))], num_rows=3)
            survivals = [falling(rng, 4) for _ in range(3)]
            lengths = admit(survivals, costs)
            row, position = rng.randrange(3), rng.randrange(4)
            changed = [list(values) for values in survivals]
            rest = falling(rng, 3 - position)
            changed[row][position + 1 :] = [survivals[row][position] * value for value in rest]
            assert (admit(changed, costs)[row] > position) == (lengths[row] > position)

    def test_it_costs_little_against_the_best_number_in_hindsight(self):
        """Regret of each curve with eight rows, true survivals known, against a free search: at most 3 % where prices
        have no jumps. With jumps, the budget of two rounds before takes its place."""
        rng = random.Random(2)
        for name, curve in CURVES.items():
            costs, early, late, rounds = PassCosts(curve, 8, draft_seconds=2.0), [], [], []
            chances = [rng.uniform(0.4, 0.95) for _ in range(8)]
            for _ in range(200):
                # The text of a row is now easier, now harder.
                survivals = [falling(rng, 7, low=2 * chance - 1 if chance > 0.5 else 0.0) for chance in chances]
                best = rate(survivals, spend(survivals, budget(survivals, costs)), costs)
                early.append(1 - rate(survivals, admit(survivals, costs), costs) / best)
                if len(rounds) >= 2:
                    num_tokens = budget(rounds[-2], costs)
                    late.append(1 - rate(survivals, spend(survivals, num_tokens), costs) / best)
                rounds.append(survivals)
            assert mean(late) < 0.03
            assert mean(early) < (0.25 if name == "jagged" else 1e-9)


class TestSpend:
    def test_the_most_likely_tokens_come_first(self):
        assert spend([[0.9, 0.2], [0.8, 0.7]], 3) == [1, 2]
        assert spend([[0.9, 0.2], [0.8, 0.7]], 0) == [0, 0]
        assert spend([[0.9, 0.2], [0.8, 0.7]], 9) == [2, 2]

    def test_falling_survivals_never_skip_a_token(self):
        rng = random.Random(3)
        for _ in range(100):
            survivals = [falling(rng, 5) for _ in range(4)]
            for fewer, more in pairwise(spend(survivals, n) for n in range(21)):
                assert sum(more) == sum(fewer) + 1
                assert all(a <= b for a, b in zip(fewer, more, strict=True))


class TestSurvivalGate:
    def test_it_multiplies_confidences_and_admits(self):
        gate = SurvivalGate(2, PassCosts(FLAT, num_rows=2))
        assert gate.opens(0, [0.9, nan]) == [True, False]
        assert gate.opens(1, [0.5, 0.9]) == [True, False]
        assert gate.survivals == [pytest.approx([0.9, 0.45]), []]
        assert gate.admitted([2, 0]) == [2, 0]

    @pytest.mark.parametrize("confidence", [0.0, nan, -1.0, 1.5])
    def test_what_is_no_chance_ends_the_row(self, confidence):
        gate = SurvivalGate(1, PassCosts(FLAT, num_rows=1))
        assert gate.opens(0, [confidence]) == [False]
        assert gate.opens(1, [0.9]) == [False]
        assert gate.admitted([0]) == [0]

    def test_a_row_stops_drawing_where_no_order_could_make_its_token_pay(self):
        # Each token costs 0.3 plain rounds of one row.
        gate = SurvivalGate(1, PassCosts([20.0, 26.0, 32.0], num_rows=1))
        assert gate.opens(0, [0.31]) == [True]
        assert gate.opens(1, [0.9]) == [False]
        # Two rows: a token must bring twice as much in the same time.
        gate = SurvivalGate(2, PassCosts([20.0, 26.0, 32.0], num_rows=2))
        assert gate.opens(0, [0.59, 0.61]) == [False, True]

    def test_what_it_stops_would_never_have_been_admitted(self):
        rng = random.Random(4)
        for _ in range(200):
            costs = PassCosts(CURVES[rng.choice(list(CURVES))], num_rows=3, draft_seconds=rng.choice([0.0, 3.0]))
            confidences = [[rng.random() for _ in range(5)] for _ in range(3)]
            gate, lengths = SurvivalGate(3, costs), [5, 5, 5]
            for position in range(5):
                signals = [row[position] if lengths[i] > position else nan for i, row in enumerate(confidences)]
                for i, is_open in enumerate(gate.opens(position, signals)):
                    lengths[i] = lengths[i] if is_open else min(lengths[i], position)
            survivals = []
            for row in confidences:
                survival, values = 1.0, []
                for confidence in row:
                    survival *= confidence
                    values.append(survival)
                survivals.append(values)
            assert gate.admitted(lengths) == admit(survivals, costs)

    def test_a_budget_goes_to_the_most_likely_tokens(self):
        gate = SurvivalGate(2, PassCosts(STEEP, num_rows=2), num_tokens=3)
        for position, signals in enumerate([[0.9, 0.8], [0.2, 0.9]]):
            assert gate.opens(position, signals) == [True, True]
        assert gate.admitted([2, 2]) == [1, 2]


class Blind(Trust):
    """Takes every confidence at its word."""

    def chance(self, confidence, hope=0.0):
        return super().chance(confidence)


class TestForesightGate:
    def gate(self, usual, seconds, rate, values=None, draft_slope=0.0, num_copied=0, trust=None):
        values = values or [1.0] * len(usual)
        return ForesightGate(usual, values, seconds, draft_slope, rate, num_copied, trust or Blind())

    def drawn(self, gate, confidences):
        """Draft lengths, where the head says this at each position of each row."""
        lengths = [len(row) for row in confidences]
        for position in range(max(lengths)):
            signals = [row[position] if n > position else nan for row, n in zip(confidences, lengths, strict=True)]
            for slot, is_open in enumerate(gate.opens(position, signals)):
                lengths[slot] = lengths[slot] if is_open else min(lengths[slot], position)
        assert gate.admitted(lengths) == lengths
        return lengths

    def test_a_dear_token_is_drawn_for_the_cheap_ones_behind_it(self):
        seconds, rate = [20.0, 35.0, 35.2, 35.4], 1 / 20
        assert self.drawn(self.gate([[0.7, 0.7, 0.7]], seconds, rate), [[0.7, 0.7, 0.7]]) == [3]
        # By itself, none of them would do.
        assert self.drawn(self.gate([[0.7]], seconds, rate), [[0.7]]) == [0]
        assert admit([[0.7, 0.49, 0.343]], PassCosts(seconds, num_rows=1)) == [0]

    def test_a_disappointment_ends_it(self):
        gate = self.gate([[0.9] * 5], [20.0 + 2 * n for n in range(6)], rate=1 / 10)
        assert self.drawn(gate, [[0.9, 0.9, 0.1, 0.9, 0.9]]) == [2]

    def test_with_confidences_as_usual_it_finds_the_best_length(self):
        rng = random.Random(5)
        for _ in range(300):
            usual, seconds = [rng.random() for _ in range(6)], [20.0]
            for _ in range(6):
                seconds.append(seconds[-1] + rng.choice([0.1, 1.0, 6.0]))
            rate, slope, copied = rng.uniform(0.02, 0.2), rng.choice([0.0, 0.5]), rng.randint(0, 2)
            (length,) = self.drawn(self.gate([usual], seconds, rate, None, slope, copied), [usual])
            worth, net = 0.0, [0.0]
            for n in range(1, 7):
                survival = 1.0
                for chance in usual[:n]:
                    survival *= chance
                worth += survival
                at = min(copied + n, 6)
                net.append(worth - rate * (seconds[at] - seconds[copied] + slope * n))
            assert net[length] == pytest.approx(max(net))

    def test_rows_share_what_pays(self):
        gate = self.gate([[0.5] * 3] * 3, [20.0 + 3 * n for n in range(10)], rate=1 / 10, values=[1.0, 1.0, 0.2])
        assert self.drawn(gate, [[0.9, 0.8, 0.7], [0.4, 0.5, 0.9], [0.9, 0.9, 0.9]]) == [3, 1, 0]

    def test_a_row_without_a_draft_gets_none(self):
        gate = self.gate([[0.9, 0.9], []], [20.0] * 5, rate=1 / 10)
        assert gate.opens(0, [0.9, nan]) == [True, False]

    @pytest.mark.parametrize("confidence", [0.0, nan, -1.0, 1.5])
    def test_what_is_no_chance_ends_the_row(self, confidence):
        gate = self.gate([[0.9, 0.9]], [20.0, 21.0, 22.0], rate=1 / 10)
        assert gate.opens(0, [confidence]) == [False]
        assert gate.opens(1, [0.9]) == [False]

    def test_what_was_refused_is_told_apart_from_what_ended_otherwise(self):
        gate = self.gate([[0.9, 0.9]] * 3, [20.0 + 2 * n for n in range(7)], rate=1 / 10)
        gate.opens(0, [0.9, 0.05, 0.9])
        gate.opens(1, [0.9, nan, nan])
        assert [gate.refused_chance(slot) for slot in range(3)] == [None, pytest.approx(0.05), None]

    def test_the_trust_learns_what_was_verified(self):
        trust = Trust()
        for _ in range(100):
            gate = self.gate([[0.9, 0.9]], [20.0, 20.0, 20.0], rate=1 / 10, trust=trust)
            gate.opens(0, [0.8])
            gate.opens(1, [0.6])
            gate.learn([RowOutcome(0, "drafter", proposed=2, accepted=1)])
        assert trust.chance(0.8) > 0.8
        assert trust.chance(0.6) < 0.3

    def test_a_text_that_ends_says_nothing_of_what_lies_behind(self):
        trust = Trust()
        before = trust.chance(0.6)
        for _ in range(100):
            gate = self.gate([[0.9, 0.9]], [20.0, 20.0, 20.0], rate=1 / 10, trust=trust)
            gate.opens(0, [0.8])
            gate.opens(1, [0.6])
            gate.learn([RowOutcome(0, "drafter", proposed=2, accepted=1, next_was_seen=False)])
        assert trust.chance(0.8) > 0.8
        assert trust.chance(0.6) >= before
        assert DraftOutcome(0, 4, 2, next_was_seen=False).tried() == [(0, 1.0), (1, 1.0)]
        assert DraftOutcome(0, 4, 2).tried() == [(0, 1.0), (1, 1.0), (2, 0.0)]

    def test_low_confidences_get_the_benefit_of_the_doubt_or_nothing_would_ever_be_learned(self):
        seconds = [20.0, 27.0, 28.0, 28.5]
        assert self.drawn(self.gate([[0.7] * 3], seconds, 1 / 10), [[0.38, 0.7, 0.7]]) == [0]
        assert self.drawn(self.gate([[0.7] * 3], seconds, 1 / 10, trust=Trust()), [[0.38, 0.7, 0.7]]) == [3]


class TestEntropyGate:
    def test_an_unsure_draft_ends_for_good(self):
        gate = EntropyGate(2, threshold=0.4)
        assert gate.opens(0, [0.0, 1.7]) == [True, True]
        assert gate.opens(1, [1.9, 1.0]) == [False, True]
        assert gate.opens(2, [0.0, nan]) == [False, False]

    @pytest.mark.parametrize(
        ("threshold", "entropy", "expected"), [(1.0, 0.0, True), (1.0, 0.01, False), (0.0, 4.9, True)]
    )
    def test_the_ends_of_the_threshold(self, threshold, entropy, expected):
        assert EntropyGate(1, threshold).opens(0, [entropy]) == [expected]
