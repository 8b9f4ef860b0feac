"""Confidences mended while decoding: pairs of a confidence and what became of its token, against the true chances."""

import random
from math import exp, log, nan

import pytest

from dspark_hf.trust import Trust


def log_odds(chance: float) -> float:
    return log(chance / (1 - chance))


def sigmoid(x: float) -> float:
    return 1 / (1 + exp(-x))


def taught(slope: float, shift: float, num_tokens: int = 1500, seed: int = 0) -> Trust:
    """By a head whose true log-odds are its own times `slope` plus `shift`."""
    rng, trust = random.Random(seed), Trust()
    for _ in range(num_tokens):
        confidence = sigmoid(rng.gauss(0, 1.5))
        trust.observe(confidence, rng.random() < sigmoid(slope * log_odds(confidence) + shift))
    return trust


def test_at_first_a_confidence_is_taken_at_its_word():
    assert [Trust().chance(c) for c in (0.1, 0.5, 0.9)] == pytest.approx([0.1, 0.5, 0.9])


@pytest.mark.parametrize(("slope", "shift"), [(1.0, 0.0), (1.0, 1.0), (0.5, -1.0), (1.6, 0.5), (0.0, -0.8)])
def test_the_true_chances_are_found(slope, shift):
    trust = taught(slope, shift)
    for confidence in (0.1, 0.3, 0.5, 0.7, 0.9):
        assert trust.chance(confidence) == pytest.approx(sigmoid(slope * log_odds(confidence) + shift), abs=0.1)


def test_a_few_dozen_tokens_are_enough_to_see_that_all_are_too_high():
    trust = taught(1.0, -2.0, num_tokens=40)
    assert trust.chance(0.7) < 0.5


def test_a_head_that_is_always_wrong_is_not_turned_round():
    trust = taught(-2.0, 0.0)
    assert trust.chance(0.1) == pytest.approx(trust.chance(0.9), abs=0.01)


def test_it_follows_a_change():
    rng, trust = random.Random(1), taught(1.0, 2.0)
    for _ in range(1500):
        trust.observe(0.5, rng.random() < 0.2)
    assert trust.chance(0.5) == pytest.approx(0.2, abs=0.08)


def test_doubt_wanes():
    early, late = Trust(), taught(1.0, 0.0)
    assert early.chance(0.2, hope=1.0) > early.chance(0.2) + 0.1
    assert late.chance(0.2) < late.chance(0.2, hope=1.0) < late.chance(0.2) + 0.05


@pytest.mark.parametrize("confidence", [nan, -0.1, 1.1])
def test_what_is_no_probability_has_no_chance_and_teaches_nothing(confidence):
    trust = Trust()
    trust.observe(confidence, True)
    assert trust.chance(confidence) == 0.0
    assert trust.chance(0.3) == pytest.approx(0.3)


def test_certainty_can_be_wrong():
    trust = Trust()
    for _ in range(200):
        trust.observe(1.0, False)
        trust.observe(0.0, True)
    assert 0.0 < trust.chance(1.0) < 0.9
    assert 0.1 < trust.chance(0.0) < 1.0
