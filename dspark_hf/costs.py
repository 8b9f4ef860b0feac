"""What a round costs: seconds measured while decoding, and guesses for what was not measured. Pure numbers.

A [`CostTable`] outlives a call: the seconds of the target's pass by rows and size (the draft tokens of all rows,
padding included, beside the anchors), the seconds of a draft, and the record: of accepted draft tokens, of what they
saved batches, of tries, of how texts end. Real pass times are jagged in the size, so a measured size stands for itself
alone; one not measured is guessed from its neighbours. For a batch, whose passes have many sizes, neighbouring ones
share a price.

[`RoundCosts`] is the table as one call sees it. All passes of a call share a factor, its *level*: a longer context, a
busy machine. The level is learned from whichever pass runs, and the table keeps what remains of a pass time without
it. So a price that was measured long ago stays comparable with one of just now.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable
from itertools import pairwise
from math import inf
from statistics import median
from threading import Lock

from .trust import Trust

# Before anything else is known, a pass costs so much more for a draft token in each row than a plain one, times the
# root of the number of rows, and a draft so much of a plain pass, at no token and per token.
_PASS_SLOPE = 0.05
_DRAFT_BASE, _DRAFT_SLOPE = 0.1, 0.01
# A size not measured yet looks this much cheaper than its guess, so that a promising one is tried.
_CURIOSITY = 0.95
# A price this many times its guess may be a hiccup (the first pass of a shape pays for warm-up): it is checked.
_HICCUP = 1.5
# A pass measured so often counts as known; a known one moves by at most this factor with a measurement, and remembers
# so many rounds.
_SETTLED, _STEP, _MEMORY = 4, 1.2, 256
# The level is a median over so many rounds, more than twice as many as bursts of noise take in a row; a call starts as
# if half of them were seen.
# Where the last round was off by this factor, a burst has begun or ended. Known prices wait until that is over; others
# are taken for dear rather than cheap, which is corrected sooner.
_LEVEL_WINDOW, _LEVEL_START, _TURMOIL = 63, 32, 1.3
# Measurements of a size in a batch that count at most, and those that the line through all sizes counts for.
_FIRM, _PULL = 16, 6
# Prices of another number of rows stand in for missing ones up to this ratio.
_NEAR = 2.0
# Tokens of an answer, as long as none was seen.
_USUAL_LENGTH = 256
# Before a batch has shown it: the share of the promised rounds that accepted tokens save, and for how many promised
# rounds it counts. What is left of such a record after one more of them.
_LEAD, _LEAD_WEIGHT, _LEAD_FADE = 0.85, 6.0, 0.98


class CostTable:
    """Measurements of one (target, drafter) pair on one device, shared by its calls. Safe to use from threads.

    Attributes:
        is_fixed: whether prices and record stand still.
        trust: in the confidences of the drafter, learned from all calls that read them.
    """

    def __init__(self) -> None:
        self.is_fixed = False
        self.trust = Trust()
        self._lock = Lock()
        self._num_rounds = 0
        self._passes: dict[int, dict[int, _Price]] = {}  # by rows, by size
        self._drafts: dict[int, _DraftLine] = {}  # by rows
        self._accepted: dict[tuple[str, int], tuple[float, float]] = {}
        self._num_ends, self._num_tokens = 1.0, float(_USUAL_LENGTH)
        self._leads: dict[int, tuple[float, float]] = {}  # rounds saved and promised, by the length of rows in bits
        self._tries: dict[int, float] = {}  # by rows

    @classmethod
    def of(
        cls, passes: dict[int, dict[int, float]], drafts: dict[int, dict[int, float]], is_fixed: bool = False
    ) -> "CostTable":
        """A table that starts with prices measured before.

        Args:
            passes: seconds of the target's pass, by rows and by size.
            drafts: seconds of a draft, by rows and by draft tokens.
            is_fixed: nothing is learned into it, so that no decision by it depends on the clock.
        """
        table = cls()
        table.is_fixed = is_fixed
        for num_rows, by_size in passes.items():
            curve = table._passes.setdefault(num_rows, {})
            for size, seconds in by_size.items():
                curve[_class_of(size, num_rows)] = _Price(seconds, 0, True, count=_FIRM)
        for num_rows, by_length in drafts.items():
            line = table._drafts.setdefault(num_rows, _DraftLine())
            for num_tokens, seconds in list(by_length.items()) * _SETTLED:
                line.add(num_tokens, seconds)
        return table

    def count_acceptance(self, source: str, outcomes: Iterable[tuple[int, float]]) -> None:
        """Adds draft tokens to the record: their place, as the source counts it, and their acceptance, 0 to 1."""
        if self.is_fixed:
            return
        with self._lock:
            for place, hit in outcomes:
                hits, tries = self._accepted.get((source, place), (0.0, 0.0))
                self._accepted[source, place] = 0.995 * hits + hit, 0.995 * tries + 1

    def acceptance(self, source: str, place: int) -> tuple[float, float]:
        """Accepted and tried draft tokens of a place in all calls so far; old ones fade."""
        with self._lock:
            return self._accepted.get((source, place), (0.0, 0.0))

    def count_ends(self, num_ends: int, num_tokens: int) -> None:
        """Adds to the record how many rows ended by themselves, and the tokens of all rows meanwhile."""
        if self.is_fixed:
            return
        with self._lock:
            fading = 0.9998**num_tokens
            self._num_ends = fading * self._num_ends + num_ends
            self._num_tokens = fading * self._num_tokens + num_tokens

    def count_lead(self, num_rows: int, saved: float, promised: float) -> None:
        """Adds to the record by how many rounds the row of a batch that lies most behind came nearer to its end, and
        by how many it should have by the tokens that all rows gained, if all rows were alike."""
        if self.is_fixed:
            return
        with self._lock:
            before = self._leads.get(num_rows.bit_length(), (0.0, 0.0))
            fading = _LEAD_FADE**promised
            self._leads[num_rows.bit_length()] = fading * before[0] + saved, fading * before[1] + promised

    def lead(self, num_rows: int) -> float:
        """Rounds saved per round promised, of batches of about this size; 1 for a single row."""
        if num_rows == 1:
            return 1.0
        with self._lock:
            saved, promised = self._leads.get(num_rows.bit_length(), (0.0, 0.0))
        return min(1.0, (_LEAD * _LEAD_WEIGHT + saved) / (_LEAD_WEIGHT + promised))

    def keep_share_of_tries(self, num_rows: int, share: float) -> None:
        """Notes the share of the time that tries of the drafter were worth in the end, for the calls to come."""
        if self.is_fixed:
            return
        with self._lock:
            self._tries[num_rows] = share

    def share_of_tries(self, num_rows: int) -> float | None:
        """What was noted last; `None` before the first one."""
        with self._lock:
            return self._tries.get(num_rows)

    @property
    def end_rate(self) -> float:
        """The chance that a token is a row's last."""
        with self._lock:
            return self._num_ends / self._num_tokens


class RoundCosts:
    """The prices of one call's rounds."""

    def __init__(self, table: CostTable):
        self._table = table
        self._level = 1.0
        self._levels = deque([1.0] * _LEVEL_START, maxlen=_LEVEL_WINDOW)

    def num_plain(self, num_rows: int) -> int:
        """How often the pass over one token a row was measured, for this number of rows or one near it."""
        with self._table._lock:
            nearest = self._nearest_curve(num_rows)
            curves = [self._table._passes.get(rows, {}) for rows in (num_rows, nearest or num_rows)]
            return max(curve[0].count if 0 in curve else 0 for curve in curves)

    def is_measured(self, num_rows: int, size: int) -> bool:
        """Whether the price of this very pass is more than a guess: measured, and not only once."""
        with self._table._lock:
            price = self._table._passes.get(num_rows, {}).get(_class_of(size, num_rows))
            return price is not None and price.count > 1

    def horizon(self, num_rows: int) -> int:
        """The largest size of a batch's pass whose price may be guessed: four times the largest one measured, and a
        token in each row at least. A pass beyond that could cost more than it teaches."""
        with self._table._lock:
            return max(num_rows, 4 * max(self._known_prices(num_rows), default=0))

    def pass_seconds(self, num_rows: int, max_size: int) -> list[float]:
        """Seconds of the target's pass, measured or guessed; index = size, the pass's draft tokens, up to `max_size`.

        Needs a plain pass to have been measured (`num_plain`).
        """
        with self._table._lock:
            known, now = self._known_prices(num_rows), self._table._num_rounds
        firm = sorted((size, price.seconds) for size, price in known.items() if size == 0 or price.is_settled)
        seconds = {size: price.seconds for size, price in known.items()}
        for size, price in known.items():
            if size > 0 and price.is_doubtful(now):
                guess = _guess(firm, size, num_rows)
                seconds[size] = guess if price.seconds > _HICCUP * guess else price.seconds
        if num_rows > 1:
            seconds = _smoothed(seconds, {size: price.count for size, price in known.items()})
        seconds[0] = min(seconds.values())  # no pass is cheaper than the plain one
        points = sorted(seconds.items())
        classes = _classes(num_rows, max_size)
        prices = [seconds[size] if size in seconds else _lured(points, size, num_rows) for size in classes]
        curve = [self._level * prices[0]]
        for (below, low), (above, high) in pairwise(zip(classes, prices, strict=True)):
            step = self._level * (high - low) / (above - below)
            curve += [self._level * low + step * n for n in range(1, above - below + 1)]
        return curve[: 1 + max_size]

    def draft_seconds(self, num_rows: int) -> tuple[float, float]:
        """Seconds of a draft for this many rows, affine in its length: base and slope."""
        with self._table._lock:
            lines = self._table._drafts
            if lines:
                nearest = min(lines, key=lambda rows: _ratio(rows, num_rows))
                base, slope = lines[nearest].fit()
                # Between what reads its weights and what computes.
                scale = (1 + num_rows / nearest) / 2
                return scale * base, scale * slope
            plain = min((curve[0].seconds for curve in self._table._passes.values() if 0 in curve), default=0.0)
        return _DRAFT_BASE * plain * self._level, _DRAFT_SLOPE * plain * self._level

    def observe(
        self,
        num_rows: int,
        size: int,
        num_draft_rows: int,
        num_draft_tokens: int,
        seconds: float,
        draft_seconds: float | None,
    ) -> None:
        """Learns from a finished round.

        Args:
            num_rows, size: of the target's pass.
            num_draft_rows: rows that the drafter ran for; 0 where it did not run.
            num_draft_tokens: the longest of its drafts.
            seconds: wall time of the round.
            draft_seconds: the drafter's part of it; `None` where it is not known.
        """
        if self._table.is_fixed:
            return
        is_pure = draft_seconds is not None or num_draft_rows == 0
        if num_draft_rows == 0:
            draft_seconds = 0.0
        elif draft_seconds is None:
            draft_seconds = self._share_of_draft(num_rows, size, num_draft_rows, num_draft_tokens, seconds)
        rest = max(seconds - draft_seconds, 1e-9)
        with self._table._lock:
            self._table._num_rounds += 1
            if num_draft_rows:
                self._table._drafts.setdefault(num_draft_rows, _DraftLine()).add(num_draft_tokens, draft_seconds)
            curve = self._table._passes.setdefault(num_rows, {})
            size = _class_of(size, num_rows)
            price = curve.get(size)
            deviation = self._levels[-1] / self._level
            if price is not None and price.is_settled:
                self._levels.append(rest / price.seconds)
                if 1 / _TURMOIL < deviation < _TURMOIL:
                    price.add(rest / self._level, self._table._num_rounds, is_pure)
                self._level = median(self._levels)
                return
            at_level_one = rest / (self._level if deviation > 1 / _TURMOIL else self._levels[-1])
            if price is None:
                curve[size] = _Price(at_level_one, self._table._num_rounds, is_pure)
            else:
                price.add(at_level_one, self._table._num_rounds, is_pure)

    def _share_of_draft(
        self, num_rows: int, size: int, num_draft_rows: int, num_draft_tokens: int, seconds: float
    ) -> float:
        """Splits a round whose parts are not timed: what was measured alone keeps its price, the other one gets the
        rest. What counts, the sum, comes out right either way."""
        base, slope = self.draft_seconds(num_draft_rows)
        guess = min(base + slope * num_draft_tokens, 0.5 * seconds)
        with self._table._lock:
            price = self._table._passes.get(num_rows, {}).get(_class_of(size, num_rows))
            if price is None or not price.is_pure:
                return guess
            return min(max(seconds - price.seconds * self._level, 0.5 * guess), 2 * guess)

    def _nearest_curve(self, num_rows: int) -> int | None:
        """The nearest other number of rows whose plain pass was measured, if it is near enough. A table that learns
        nothing has to do with the one it has."""
        farthest = inf if self._table.is_fixed else _NEAR
        near = [
            rows
            for rows, curve in self._table._passes.items()
            if rows != num_rows and 0 in curve and _ratio(rows, num_rows) <= farthest
        ]
        return min(near, key=lambda rows: _ratio(rows, num_rows), default=None)

    def _known_prices(self, num_rows: int) -> "dict[int, _Price]":
        """By size: measured for these rows, else borrowed from the nearest curve, to scale."""
        own = self._table._passes.get(num_rows, {})
        nearest = self._nearest_curve(num_rows)
        if nearest is None:
            return dict(own)
        other = self._table._passes[nearest]
        shared = own.keys() & other.keys()
        scale = sum(own[size].seconds / other[size].seconds for size in shared) / len(shared) if shared else 1.0
        return {size: price.scaled(scale) for size, price in other.items()} | own


class _Price:
    """Seconds of one kind of pass at level 1.

    The least of the first measurements, because what disturbs a measurement makes it longer. Once known, a mean that
    hardly moves while the pass is in use, so that changes go into the level, and moves the more the longer it was not.
    """

    __slots__ = ("count", "is_pure", "last", "seconds")

    def __init__(self, seconds: float, now: int, is_pure: bool, count: int = 1):
        self.seconds, self.last, self.is_pure, self.count = seconds, now, is_pure, count

    @property
    def is_settled(self) -> bool:
        return self.count >= _SETTLED

    def is_doubtful(self, now: int) -> bool:
        """Whether another look is due, should it be much dearer than expected: at once, then ever later."""
        return self.count == 1 or (not self.is_settled and now - self.last > 8 * 2**self.count)

    def add(self, seconds: float, now: int, is_pure: bool) -> None:
        if self.is_settled:
            pause = now - self.last
            weight = 1 / self.count if self.count < 2 * _SETTLED else pause / (pause + _MEMORY)
            self.seconds *= 1 + weight * (min(max(seconds / self.seconds, 1 / _STEP), _STEP) - 1)
        else:
            self.seconds = min(self.seconds, seconds)
        self.count, self.last, self.is_pure = self.count + 1, now, self.is_pure or is_pure

    def scaled(self, scale: float) -> "_Price":
        return _Price(scale * self.seconds, self.last, self.is_pure, self.count)


class _DraftLine:
    """Seconds of a draft, affine in its length: least squares that fade, drawn to a slope of a tenth of the base."""

    __slots__ = ("covariance", "mean_seconds", "mean_tokens", "variance", "weight")

    def __init__(self) -> None:
        self.weight = self.mean_tokens = self.mean_seconds = self.variance = self.covariance = 0.0

    def add(self, num_tokens: int, seconds: float) -> None:
        if self.weight > 2:
            base, slope = self.fit()
            seconds = min(seconds, _HICCUP * (base + slope * num_tokens))
        self.weight = 0.95 * self.weight + 1
        step = 1 / self.weight
        off_tokens, off_seconds = num_tokens - self.mean_tokens, seconds - self.mean_seconds
        self.variance = (1 - step) * (self.variance + step * off_tokens * off_tokens)
        self.covariance = (1 - step) * (self.covariance + step * off_tokens * off_seconds)
        self.mean_tokens += step * off_tokens
        self.mean_seconds += step * off_seconds

    def fit(self) -> tuple[float, float]:
        """Base and slope, neither of them negative."""
        usual = self.mean_seconds / (10 + self.mean_tokens)
        slope = (self.covariance + usual) / (self.variance + 1)
        slope = min(max(slope, 0.0), self.mean_seconds / (1 + self.mean_tokens))
        return self.mean_seconds - slope * self.mean_tokens, slope


def _guess(points: list[tuple[int, float]], size: int, num_rows: int) -> float:
    """Seconds of a size from those of others, sorted, the first of size 0: on the line between its neighbours.

    Beyond the largest, half the mean slope up to there: on the side of trying.
    """
    at = bisect_left(points, (size, 0.0))
    below, seconds = points[at - 1]
    if at < len(points):
        above, more = points[at]
        return seconds + (more - seconds) * (size - below) / (above - below)
    if below == 0:
        return seconds * (1 + _PASS_SLOPE * num_rows**-0.5 * size)
    return seconds + max(0.0, seconds - points[0][1]) / below / 2 * (size - below)


def _smoothed(seconds: dict[int, float], counts: dict[int, int]) -> dict[int, float]:
    """Prices of a batch drawn to the line through them: each size is seldom met, and luck with one would decide."""
    if len(seconds) < 3:
        return seconds
    weights = {size: min(count, _FIRM) for size, count in counts.items()}
    total = sum(weights.values())
    mean_size = sum(weight * size for size, weight in weights.items()) / total
    mean_seconds = sum(weight * seconds[size] for size, weight in weights.items()) / total
    covariance = sum(w * (size - mean_size) * (seconds[size] - mean_seconds) for size, w in weights.items())
    variance = sum(weight * (size - mean_size) ** 2 for size, weight in weights.items())
    slope = max(0.0, covariance / variance)
    return {
        size: (weight * seconds[size] + _PULL * (mean_seconds + slope * (size - mean_size))) / (weight + _PULL)
        for size, weight in weights.items()
    }


def _lured(points: list[tuple[int, float]], size: int, num_rows: int) -> float:
    """The guess, a little lower where a measurement is worth something: a batch has a smooth curve between sizes."""
    is_between = num_rows > 1 and size <= points[-1][0]
    return _guess(points, size, num_rows) * (1.0 if is_between else _CURIOSITY)


def _class_of(size: int, num_rows: int) -> int:
    """The size whose price stands for it. One row has few sizes, each with a price; of a batch, three bits count."""
    if num_rows == 1 or size < 8:
        return size
    step = 1 << (size.bit_length() - 3)
    return (size + step // 2) // step * step


def _classes(num_rows: int, max_size: int) -> list[int]:
    """All sizes with a price of their own from 0 up to the first one that is not below `max_size`."""
    sizes = [0]
    while sizes[-1] < max_size:
        last = sizes[-1]
        sizes.append(last + (1 if num_rows == 1 or last < 8 else 1 << (last.bit_length() - 3)))
    return sizes


def _ratio(a: int, b: int) -> float:
    return max(a, b) / min(a, b)
