"""Schedules against one that knows the true survival of every token before it is drafted, in simulated time.

Prices stand still and are known, the confidence head is right, and the texts' tokens differ in how likely they are
guessed. What a schedule that may not look ahead loses against the one that does is its regret.
"""

from statistics import mean

import pytest
from simulator import NUM_DRAFT_TOKENS, PROFILES, Fixed, Head, Machine, Text, novel_text, simulate

from dspark_hf.costs import CostTable
from dspark_hf.policies import new_schedule
from dspark_hf.scheduling import DraftLength, Plan, RowPlan, Schedule

# Milliseconds of a pass by the draft tokens of a row.
CURVES = {
    "flat": [20 + 0.2 * n for n in range(1 + NUM_DRAFT_TOKENS)],
    "steep": [20 + 4.0 * n for n in range(1 + NUM_DRAFT_TOKENS)],
    "jagged": [20, 27, 28, 28.5, 29, 38, 39, 39.5],
}
LENGTH = 200


class Knowing(Schedule):
    """Verifies what pays at a given rate, by the true survivals of the coming draft."""

    def __init__(self, on: Machine, texts: list[Text], rate: float):
        self.on, self.texts, self.rate = on, texts, rate

    def plan(self, rows):
        tokens = []
        for slot, row in enumerate(rows):
            text, survival = self.texts[row.row], 1.0
            new = row.context_length - len(text.prompt)
            for position in range(min(NUM_DRAFT_TOKENS, row.room)):
                survival *= text.chance(position, new + position)
                tokens.append((survival, position, slot))
        tokens.sort(key=lambda token: (-token[0], token[1]))
        plain, best, num_best, worth, drafts = self.on.pass_seconds(len(rows), 0, 0), 0.0, 0, 0.0, {}
        for number, (survival, position, slot) in enumerate(tokens, 1):
            worth += survival
            drafts[slot] = 1 + position
            seconds = self.on.pass_seconds(len(rows), number, 0) - plain
            seconds += self.on.draft_seconds(len(drafts), max(drafts.values()))
            if worth - self.rate * seconds > best:
                best, num_best = worth - self.rate * seconds, number
        counts = [0] * len(rows)
        for _, position, slot in tokens[:num_best]:
            counts[slot] = 1 + position
        return Plan([RowPlan("drafter", n) if n else RowPlan("none", 0) for n in counts], "knowing")


def machine(curve: str, num_rows: int) -> Machine:
    passes = {1 + n: ms for n, ms in enumerate(CURVES[curve])}
    return Machine(curve, num_rows, passes, draft_base=2.0, draft_slope=0.3, noise=0.0)


def prices(on: Machine, num_rows: int) -> CostTable:
    every = range(1, 1 + num_rows)
    passes = {r: {n: on.pass_seconds(r, n, 0) for n in range(1 + r * NUM_DRAFT_TOKENS)} for r in every}
    drafts = {r: {n: on.draft_seconds(r, n) for n in range(1, 1 + NUM_DRAFT_TOKENS)} for r in every}
    return CostTable.of(passes, drafts, is_fixed=True)


def seconds_of(policy: str, on: Machine, texts: list[Text], head: Head) -> float:
    settings = DraftLength(NUM_DRAFT_TOKENS, 0.0, policy, 0, has_confidence=True)
    return simulate(new_schedule(settings, prices(on, len(texts))), on, texts, 0, head).seconds


def regrets(curve: str, num_rows: int, profile: str, head: Head, policies: tuple[str, ...]) -> dict[str, float]:
    """Of schedules, and of the best constant length in hindsight."""
    results: dict[str, list[float]] = {}
    for seed in range(3):
        texts = [novel_text(PROFILES[profile], LENGTH, 100 * seed + i, spread=1.5) for i in range(num_rows)]
        on, num_tokens = machine(curve, num_rows), num_rows * (LENGTH - 1)
        best = min(simulate(Fixed("drafter", n), on, texts, 0).seconds for n in range(1 + NUM_DRAFT_TOKENS))
        known = best
        for _ in range(3):  # the rate that pays is the one that results
            known = min(known, simulate(Knowing(on, texts, num_tokens / known), on, texts, 0).seconds)
        results.setdefault("best constant", []).append(1 - known / best)
        for policy in policies:
            results.setdefault(policy, []).append(1 - known / seconds_of(policy, on, texts, head))
    return {name: mean(values) for name, values in results.items()}


CELLS = [(curve, num_rows, profile) for curve in CURVES for num_rows in (1, 4) for profile in ("good", "demo")]


@pytest.mark.parametrize("head", [Head(), Head(0.7, -0.8), Head(1.3, 0.8)], ids=["right", "low", "high"])
def test_the_regret_of_schedules_that_read_confidences_is_at_most_3_percent(head):
    """Also where the head is wrong in the same way everywhere, which is found out on the way."""
    of_cells = [regrets(*cell, head, ("auto", "hardware")) for cell in CELLS]
    for policy in ("auto", "hardware"):
        assert mean(cell[policy] for cell in of_cells) < 0.03
        assert max(cell[policy] for cell in of_cells) < 0.08
    # No constant length, chosen afterwards, does as well.
    assert mean(cell["auto"] for cell in of_cells) < mean(cell["best constant"] for cell in of_cells) - 0.01
