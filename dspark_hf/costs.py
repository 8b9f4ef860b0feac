"""What a round costs: seconds measured while decoding, and guesses for what was not measured. Pure numbers.

A [`CostTable`] outlives a call: the seconds of the target's pass by rows and width (the tokens of a row: one more than
the longest draft), the seconds of a draft, and the record of accepted draft tokens. Real pass times are jagged in the
width, so a measured width stands for itself alone; one not measured is guessed from its neighbours.

[`RoundCosts`] is the table as one call sees it. All passes of a call share a factor, its *level*: a longer context, a
busy machine. The level is learned from whichever width runs, and the table keeps what remains of a pass time without
it. So a price that was measured long ago stays comparable with one of just now.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable
from statistics import median
from threading import Lock

# Before anything else is known, a pass costs so much more per token of width than a plain one, times the root of the
# number of rows, and a draft so much of a plain pass, at no token and per token.
_PASS_SLOPE = 0.05
_DRAFT_BASE, _DRAFT_SLOPE = 0.1, 0.01
# A width not measured yet looks this much cheaper than its guess, so that a promising one is tried.
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
# Prices of another number of rows stand in for missing ones up to this ratio.
_NEAR = 2.0


class CostTable:
    """Measurements of one (target, drafter) pair on one device, shared by its calls. Safe to use from threads."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._num_rounds = 0
        self._passes: dict[int, dict[int, _Price]] = {}  # by rows, by width
        self._drafts: dict[int, _DraftLine] = {}  # by rows
        self._accepted: dict[tuple[str, int], tuple[float, float]] = {}

    def count_acceptance(self, source: str, outcomes: Iterable[tuple[int, bool]]) -> None:
        """Adds draft tokens to the record: their place, as the source counts it, and whether they were accepted."""
        with self._lock:
            for place, is_hit in outcomes:
                hits, tries = self._accepted.get((source, place), (0.0, 0.0))
                self._accepted[source, place] = 0.995 * hits + is_hit, 0.995 * tries + 1

    def acceptance(self, source: str, place: int) -> tuple[float, float]:
        """Accepted and tried draft tokens of a place in all calls so far; old ones fade."""
        with self._lock:
            return self._accepted.get((source, place), (0.0, 0.0))


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
            return max(curve[1].count if 1 in curve else 0 for curve in curves)

    def is_measured(self, num_rows: int, width: int) -> bool:
        """Whether the price of this very pass is more than a guess: measured, and not only once."""
        with self._table._lock:
            price = self._table._passes.get(num_rows, {}).get(width)
            return price is not None and price.count > 1

    def pass_seconds(self, num_rows: int, max_width: int) -> list[float]:
        """Seconds of the target's pass, measured or guessed; index = width, up to `max_width`, and 0 a filler.

        Needs a plain pass to have been measured (`num_plain`).
        """
        with self._table._lock:
            known, now = self._known_prices(num_rows), self._table._num_rounds
        firm = sorted((width, price.seconds) for width, price in known.items() if width == 1 or price.is_settled)
        seconds = {width: price.seconds for width, price in known.items()}
        for width, price in known.items():
            if width > 1 and price.is_doubtful(now):
                guess = _guess(firm, width, num_rows)
                seconds[width] = guess if price.seconds > _HICCUP * guess else price.seconds
        seconds[1] = min(seconds.values())  # no pass is cheaper than the plain one
        points = sorted(seconds.items())
        curve = [
            seconds[width] if width in seconds else _CURIOSITY * _guess(points, width, num_rows)
            for width in range(1, max_width + 1)
        ]
        return [0.0] + [self._level * price for price in curve]

    def draft_seconds(self, num_rows: int) -> tuple[float, float]:
        """Seconds of a draft for this many rows, affine in its length: base and slope."""
        with self._table._lock:
            lines = self._table._drafts
            if lines:
                return lines[min(lines, key=lambda rows: _ratio(rows, num_rows))].fit()
            plain = min((curve[1].seconds for curve in self._table._passes.values() if 1 in curve), default=0.0)
        return _DRAFT_BASE * plain * self._level, _DRAFT_SLOPE * plain * self._level

    def observe(
        self,
        num_rows: int,
        width: int,
        num_draft_rows: int,
        num_draft_tokens: int,
        seconds: float,
        draft_seconds: float | None,
    ) -> None:
        """Learns from a finished round.

        Args:
            num_rows, width: of the target's pass.
            num_draft_rows: rows that the drafter ran for; 0 where it did not run.
            num_draft_tokens: the longest of its drafts.
            seconds: wall time of the round.
            draft_seconds: the drafter's part of it; `None` where it is not known.
        """
        is_pure = draft_seconds is not None or num_draft_rows == 0
        if num_draft_rows == 0:
            draft_seconds = 0.0
        elif draft_seconds is None:
            draft_seconds = self._share_of_draft(num_rows, width, num_draft_rows, num_draft_tokens, seconds)
        rest = max(seconds - draft_seconds, 1e-9)
        with self._table._lock:
            self._table._num_rounds += 1
            if num_draft_rows:
                self._table._drafts.setdefault(num_draft_rows, _DraftLine()).add(num_draft_tokens, draft_seconds)
            curve = self._table._passes.setdefault(num_rows, {})
            price = curve.get(width)
            deviation = self._levels[-1] / self._level
            if price is not None and price.is_settled:
                self._levels.append(rest / price.seconds)
                if 1 / _TURMOIL < deviation < _TURMOIL:
                    price.add(rest / self._level, self._table._num_rounds, is_pure)
                self._level = median(self._levels)
                return
            at_level_one = rest / (self._level if deviation > 1 / _TURMOIL else self._levels[-1])
            if price is None:
                curve[width] = _Price(at_level_one, self._table._num_rounds, is_pure)
            else:
                price.add(at_level_one, self._table._num_rounds, is_pure)

    def _share_of_draft(
        self, num_rows: int, width: int, num_draft_rows: int, num_draft_tokens: int, seconds: float
    ) -> float:
        """Splits a round whose parts are not timed: what was measured alone keeps its price, the other one gets the
        rest. What counts, the sum, comes out right either way."""
        base, slope = self.draft_seconds(num_draft_rows)
        guess = min(base + slope * num_draft_tokens, 0.5 * seconds)
        with self._table._lock:
            price = self._table._passes.get(num_rows, {}).get(width)
            if price is None or not price.is_pure:
                return guess
            return min(max(seconds - price.seconds * self._level, 0.5 * guess), 2 * guess)

    def _nearest_curve(self, num_rows: int) -> int | None:
        """The nearest other number of rows whose plain pass was measured, if it is near enough."""
        near = [
            rows
            for rows, curve in self._table._passes.items()
            if rows != num_rows and 1 in curve and _ratio(rows, num_rows) <= _NEAR
        ]
        return min(near, key=lambda rows: _ratio(rows, num_rows), default=None)

    def _known_prices(self, num_rows: int) -> "dict[int, _Price]":
        """By width: measured for these rows, else borrowed from the nearest curve, to scale."""
        own = self._table._passes.get(num_rows, {})
        nearest = self._nearest_curve(num_rows)
        if nearest is None:
            return dict(own)
        other = self._table._passes[nearest]
        shared = own.keys() & other.keys()
        scale = sum(own[width].seconds / other[width].seconds for width in shared) / len(shared) if shared else 1.0
        return {width: price.scaled(scale) for width, price in other.items()} | own


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


def _guess(points: list[tuple[int, float]], width: int, num_rows: int) -> float:
    """Seconds of a width from those of others, sorted, the first of width 1: on the line between its neighbours.

    Beyond the widest, half the mean slope up to there: on the side of trying.
    """
    at = bisect_left(points, (width, 0.0))
    below, seconds = points[at - 1]
    if at < len(points):
        above, more = points[at]
        return seconds + (more - seconds) * (width - below) / (above - below)
    if below == 1:
        return seconds * (1 + _PASS_SLOPE * num_rows**0.5 * (width - 1))
    return seconds + max(0.0, seconds - points[0][1]) / (below - 1) / 2 * (width - below)


def _ratio(a: int, b: int) -> float:
    return max(a, b) / min(a, b)
