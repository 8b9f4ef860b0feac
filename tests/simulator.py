"""Decoding in simulated time: machines with known prices, drafters with known chances, texts that repeat or do not.

Measured seconds are noisy, as a schedule sees them; a run is scored at the true prices, so that luck with the noise
plays no part. Draft tokens are accepted by a tape of random numbers, one per row and token of the text: every schedule
meets the same easy and hard tokens.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import exp, log, nan

from dspark_hf.auto_schedule import AutoSchedule
from dspark_hf.costs import CostTable
from dspark_hf.lookup import ContextLookup
from dspark_hf.scheduling import DraftLength, Plan, RowOutcome, RowPlan, RowState, Schedule

NUM_DRAFT_TOKENS = 7

# Milliseconds of a target's pass by width, measured on two cores with a target of 135M parameters, and the base and
# slope of a draft. Widths between are interpolated, wider ones extrapolated.
_BF16 = {1: 37.5, 2: 37, 3: 39, 4: 40, 5: 41, 6: 42, 7: 44, 8: 43, 11: 47, 16: 51}
_FLOAT32 = {1: 57, 2: 94, 3: 116, 4: 84, 5: 76, 6: 80, 7: 100, 8: 82, 11: 100, 16: 94}
CURVES: dict[str, tuple[int, dict[int, float], float, float]] = {
    "bf16": (1, _BF16, 3.4, 0.4),
    "float32": (1, _FLOAT32, 3.4, 0.4),
    "bf16 x 8": (8, {1: 73, 2: 78, 3: 92, 4: 94, 5: 103, 7: 125}, 7, 1.2),
    "float32 x 8": (8, {1: 82, 2: 105, 3: 123, 4: 137, 5: 152, 7: 178}, 7, 1.2),
    "gpu": (1, {1: 12, 16: 12}, 1.5, 0.1),
    "gpu x 8": (8, {1: 13, 16: 14}, 1.6, 0.1),
}


@dataclass
class Machine:
    """True prices, and the noise of a busy machine.

    Attributes:
        rows: rows for which the curve holds; a pass over fewer is scaled down part of the way.
        growth: how much a pass gains per committed token, as a share of its price at an empty context.
        times_drafts: whether the drafter's seconds are known (on a GPU they are not).
        pads_rows: whether a pass pads every row to the longest draft (on a GPU it does).
        warm_up: factor on the first pass of each shape.
    """

    name: str
    rows: int
    passes: dict[int, float]
    draft_base: float
    draft_slope: float
    growth: float = 0.0
    times_drafts: bool = True
    pads_rows: bool = False
    warm_up: float = 1.0
    noise: float = 0.04
    seed: int = 0
    _seen: set[tuple[int, int]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._burst = 0

    def size(self, lengths: Sequence[int]) -> int:
        """Draft tokens of a pass."""
        return len(lengths) * max(lengths) if self.pads_rows else sum(lengths)

    def pass_seconds(self, rows: int, size: int, context: float) -> float:
        width = 1 + size / rows
        widths = sorted(self.passes)
        above = next((w for w in widths if w >= width), widths[-1])
        below = max((w for w in widths if w <= width), default=widths[0])
        if below == above != width:  # beyond the widest
            below = widths[-2]
        at = 0.0 if above == below else (width - below) / (above - below)
        cost = self.passes[below] + at * (self.passes[above] - self.passes[below])
        share = 0.3 + 0.7 * rows / self.rows
        return 1e-3 * cost * share * (1 + self.growth * context)

    def draft_seconds(self, rows: int, num_tokens: int) -> float:
        return 1e-3 * (self.draft_base + self.draft_slope * num_tokens) * (0.3 + 0.7 * rows / self.rows)

    def disturbance(self, rows: int, size: int) -> float:
        """Factor on what a clock shows: jitter, single outliers, bursts of half a dozen rounds."""
        factor = self._random.lognormvariate(0, self.noise)
        if self._burst == 0 and self._random.random() < 0.01:
            self._burst = self._random.randint(3, 9)
        if self._burst:
            self._burst -= 1
            factor *= 2
        elif self._random.random() < 0.02:
            factor *= 2
        if (rows, size) not in self._seen:
            self._seen.add((rows, size))
            factor *= self.warm_up
        return factor


def machine(name: str, seed: int = 0, **settings: float) -> Machine:
    is_gpu = name.startswith("gpu")
    return Machine(name, *CURVES[name], seed=seed, times_drafts=not is_gpu, pads_rows=is_gpu, **settings)


# Chance of acceptance by position in the block and number of new tokens so far.
Profile = Callable[[int, int], float]


def _by_position(*chances: float) -> Profile:
    return lambda position, _: chances[min(position, len(chances) - 1)]


PROFILES: dict[str, Profile] = {
    "good": _by_position(0.75),
    "demo": _by_position(0.55, 0.5, 0.45),
    "chat": _by_position(0.35),
    "weak": _by_position(0.1),
    "random": _by_position(0.0),
    "turns good": lambda position, new: 0.75 if new >= 200 else 0.0,
    "turns bad": lambda position, new: 0.75 if new < 100 else 0.0,
}


@dataclass
class Text:
    """One row: prompt, true continuation, and what the drafter knows of it.

    Attributes:
        ease: by how much the log-odds of each token are above what the profile says; empty: all alike.
    """

    prompt: list[int]
    continuation: list[int]
    profile: Profile
    tape: list[float]
    ease: list[float] = field(default_factory=list)

    def chance(self, position: int, new: int) -> float:
        """Of the drafter's token at a position of its block, as the `new`-th of the text."""
        chance = self.profile(position, new)
        if not self.ease or chance in (0.0, 1.0):
            return chance
        return 1 / (1 + (1 / chance - 1) * exp(-self.ease[new]))


def novel_text(profile: Profile, num_tokens: int, seed: int, prompt_length: int = 40, spread: float = 0.0) -> Text:
    """A text without a repetition.

    `spread`: how much tokens differ in their chance, as a deviation of log-odds.
    """
    rng = random.Random(seed)
    prompt, rest = list(range(prompt_length)), list(range(prompt_length, prompt_length + num_tokens))
    text = Text(prompt, rest, profile, [rng.random() for _ in range(num_tokens)])
    text.ease = [rng.gauss(0, spread) for _ in range(num_tokens)] if spread else []
    return text


@dataclass
class Run:
    """Seconds at the true prices; the plan of each round, and the new tokens of all rows before it."""

    seconds: float = 0.0
    plans: list[Plan] = field(default_factory=list)
    num_new: list[int] = field(default_factory=list)

    def used_drafter(self) -> list[bool]:
        return [any(row.source == "drafter" for row in plan.rows) for plan in self.plans]


@dataclass
class _Row:
    number: int
    text: Text
    lookup: ContextLookup | None
    num_new: int = 1  # the prefill gives the first token

    @property
    def rest(self) -> int:
        return len(self.text.continuation) - self.num_new

    def state(self, lookup_tokens: int) -> RowState:
        offer = None if self.lookup is None else self.lookup.offer(min(lookup_tokens, max(self.rest - 1, 0)))
        return RowState(self.number, len(self.text.prompt) + self.num_new, max(self.rest - 1, 0), offer)

    def accepted(self, plan: RowPlan, state: RowState) -> int:
        position = 0
        while position < plan.num_tokens:
            new = self.num_new + position
            if plan.source == "lookup":
                assert state.offer is not None
                stands = state.offer.token_ids[position] == self.text.continuation[new]
            else:
                stands = self.text.tape[new] < self.text.chance(position, new)
            if not stands:
                break
            position += 1
        return position

    def commit(self, num_tokens: int) -> None:
        if self.lookup is not None:
            self.lookup.extend(self.text.continuation[self.num_new : self.num_new + num_tokens])
        self.num_new += num_tokens


@dataclass
class Head:
    """A confidence head: log-odds of the true chance, times a slope plus a shift."""

    slope: float = 1.0
    shift: float = 0.0

    def confidence(self, chance: float) -> float:
        if chance in (0.0, 1.0):
            return chance
        return 1 / (1 + exp(-self.slope * log(chance / (1 - chance)) - self.shift))


def gated(plan: Plan, rows: "Sequence[_Row]", head: Head) -> Plan:
    """What is left of a plan when its gate has seen the confidences of the drafts."""
    assert plan.gate is not None
    lengths = [p.num_tokens if p.source == "drafter" else 0 for p in plan.rows]
    for position in range(max(lengths)):
        signals = [
            head.confidence(row.text.chance(position, row.num_new + position)) if length > position else nan
            for row, length in zip(rows, lengths, strict=True)
        ]
        is_open = plan.gate.opens(position, signals)
        lengths = [length if is_on else min(length, position) for length, is_on in zip(lengths, is_open, strict=True)]
    admitted = plan.gate.admitted(lengths)
    return Plan(
        [
            RowPlan("drafter", min(length, n)) if p.source == "drafter" else p
            for p, length, n in zip(plan.rows, lengths, admitted, strict=True)
        ],
        plan.reason,
    )


def simulate(
    schedule: Schedule, on: Machine, texts: Sequence[Text], lookup_tokens: int = 16, head: Head | None = None
) -> Run:
    """One call: a round after the other until every row has its continuation. Finished rows leave the batch."""
    head = head or Head()
    run = Run()
    rows = [
        _Row(i, text, ContextLookup([*text.prompt, text.continuation[0]]) if lookup_tokens else None)
        for i, text in enumerate(texts)
    ]
    while rows := [row for row in rows if row.rest > 0]:
        states = [row.state(lookup_tokens) for row in rows]
        plan = schedule.plan(states)
        sent = plan if plan.gate is None else gated(plan, rows, head)
        accepted = [row.accepted(p, s) for row, p, s in zip(rows, sent.rows, states, strict=True)]
        size = on.size([p.num_tokens for p in sent.rows])
        drafting = [p.num_tokens for p in sent.rows if p.source == "drafter"]
        context = sum(s.context_length for s in states) / len(states)
        draft = on.draft_seconds(len(drafting), max(drafting)) if drafting else 0.0
        seconds = draft + on.pass_seconds(len(rows), size, context)
        factor = on.disturbance(len(rows), size)
        outcomes = [
            RowOutcome(row.number, p.source, p.num_tokens, a)
            for row, p, a in zip(rows, sent.rows, accepted, strict=True)
        ]
        schedule.observe(plan, outcomes, factor * seconds, factor * draft if on.times_drafts else None)
        run.seconds += seconds
        run.plans.append(plan)
        run.num_new.append(sum(row.num_new for row in rows))
        for row, count in zip(rows, accepted, strict=True):
            row.commit(count + 1)
    return run


class Fixed(Schedule):
    """The same in every round: so many tokens of one source, as far as it has them."""

    def __init__(self, source: str, num_tokens: int):
        self.source, self.num_tokens = source, num_tokens

    def plan(self, rows: Sequence[RowState]) -> Plan:
        return Plan([self._row(row) for row in rows], "fixed")

    def _row(self, row: RowState) -> RowPlan:
        n = min(self.num_tokens, row.room)
        if self.source == "lookup":
            n = min(n, len(row.offer.token_ids)) if row.offer is not None else 0
        return RowPlan(self.source, n) if n else RowPlan("none", 0)


def auto(
    name: str, table: CostTable | None = None, lookup_tokens: int = 0, has_confidence: bool = False
) -> AutoSchedule:
    """The schedule as a call on this machine makes it."""
    settings = DraftLength(NUM_DRAFT_TOKENS, 0.0, "auto", lookup_tokens, has_confidence=has_confidence)
    return AutoSchedule(settings, CostTable() if table is None else table, machine(name).pads_rows)


def best_fixed(name: str, texts: Sequence[Text], **settings: float) -> tuple[float, int]:
    """Seconds of the best constant number of draft tokens in hindsight, and the number."""
    return min(
        (simulate(Fixed("drafter", n), machine(name, **settings), texts, 0).seconds, n)
        for n in range(NUM_DRAFT_TOKENS + 1)
    )


def plain_seconds(name: str, texts: Sequence[Text], **settings: float) -> float:
    return simulate(Fixed("drafter", 0), machine(name, **settings), texts, 0).seconds


def best_lookup(name: str, texts: Sequence[Text]) -> float:
    """Seconds of the best constant number of lookup tokens in hindsight, without the drafter."""
    return min(simulate(Fixed("lookup", n), machine(name), texts).seconds for n in (1, 2, 3, 5, 7, 10, 16))


def copying_text(profile: Profile, num_tokens: int, seed: int) -> Text:
    """Long pieces of the prompt with a few new tokens between them, as in "edit this code"."""
    rng = random.Random(seed)
    prompt = [rng.randrange(1000) for _ in range(200)]
    rest: list[int] = []
    while len(rest) < num_tokens:
        start = rng.randrange(200)
        rest += prompt[start : start + rng.randint(10, 40)]
        rest += [rng.randrange(1000, 50000) for _ in range(rng.randint(1, 6))]
    return Text(prompt, rest[:num_tokens], profile, [rng.random() for _ in range(num_tokens)])


def repeating_text(profile: Profile, num_tokens: int, seed: int) -> Text:
    """The same dozen tokens over and over, one in sixteen of them changed, as in "repeat this list"."""
    rng = random.Random(seed)
    items = [rng.randrange(50000) for _ in range(12)]
    rest = [rng.randrange(50000) if rng.random() < 0.06 else items[i % 12] for i in range(num_tokens)]
    return Text(list(range(40)), rest, profile, [rng.random() for _ in range(num_tokens)])


def common_text(profile: Profile, num_tokens: int, seed: int) -> Text:
    """Frequent and rare tokens at random: short matches abound, and their continuations are worth little."""
    rng = random.Random(seed)
    tokens = [int(rng.paretovariate(0.6)) % 50000 for _ in range(300 + num_tokens)]
    return Text(tokens[:300], tokens[300:], profile, [rng.random() for _ in range(num_tokens)])


def changing_text(profile: Profile, num_tokens: int, seed: int) -> Text:
    """Common text first, then a copying one."""
    half = num_tokens // 2
    common, copying = common_text(profile, half, seed), copying_text(profile, num_tokens - half, seed + 1)
    return Text(
        common.prompt + copying.prompt,
        common.continuation + copying.continuation,
        profile,
        common.tape + copying.tape,
    )


TEXTS = {
    "copying": copying_text,
    "repeating": repeating_text,
    "common": common_text,
    "changing": changing_text,
}


def num_rows(name: str) -> int:
    return CURVES[name][0]
