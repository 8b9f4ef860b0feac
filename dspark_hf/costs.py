"""What a round costs and what its draft tokens are worth. Both are measured while decoding; pure numbers, no tensor.

A [`CostTable`] outlives a call: the seconds of the target's pass by rows and width (tokens of a row: one more than the
longest draft), the seconds of a draft, and how often draft tokens were accepted. Real pass times are jagged in the
width, so a measured width stands for itself alone; a width not met yet is guessed from its neighbours.

[`RoundCosts`] is the table seen from one call. Pass times of a call share a factor, its *level*: a longer context, a
busy machine. The level follows the last few rounds, the table keeps what remains of a pass time without it. So a
change that hits all widths alike is learned from whichever width runs, and passing noise cancels out of comparisons.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence
from statistics import median
from threading import Lock

# What to assume before anything is known, in units of the plain pass. Passes: more per token with more rows, where the
# arithmetic shows earlier. Drafts: a few layers against many.
_PASS_SLOPE = 0.05
_DRAFT_BASE, _DRAFT_SLOPE = 0.1, 0.01
# A width not measured yet looks this much cheaper than its guess, so that a promising one is tried.
_CURIOSITY = 0.92
# A first measurement that exceeds its guess by more counts as a hiccup (first passes of a shape pay for warm-up) until
# a second one confirms it.
_HICCUP = 1.5
# Measurements after which a cell counts as known, and how many rounds it then remembers.
_SETTLED, _MEMORY = 4, 128
# The level is the median over this many rounds, the first of them made up: longer than a burst of noise.
_LEVEL_WINDOW, _LEVEL_START = 31, 7
# Curves of other row counts help up to this ratio.
_NEAR = 2.0

DRAFTER, LOOKUP = "drafter", "lookup"
# Chances before anything is known, as so many tries; those of a lookup by the length of the match.
_START_CHANCE, _START_WEIGHT = 0.55, 3.0
_LOOKUP_CHANCES = (0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
_LOOKUP_PLACES = (0, 0, 0, 1, 2, 3, 3, 4, 4, 4, 4, 4, 4, 4, 4, 4, 5)
# What the pair's record weighs at the start of a call, a position's predecessor, all rows against one, and what was
# known before a long pause.
_RECORD_WEIGHT, _CHAIN_WEIGHT, _ROW_WEIGHT, _STALE_WEIGHT = 6.0, 2.0, 6.0, 2.0
_FADE, _LOOKUP_FADE = 0.94, 0.97


class _Cell:
    """Pass time of one number of rows and one width, at level 1.

    The least of the first measurements, because what disturbs a measurement makes it longer; then a mean that hardly
    moves while the cell is in use, so that a change goes into the level, and moves the more the longer it was not.
    """

    __slots__ = ("count", "is_pure", "last", "seconds")

    def __init__(self, seconds: float, now: int, is_pure: bool):
        self.seconds, self.count, self.last, self.is_pure = seconds, 1, now, is_pure

    @property
    def is_settled(self) -> bool:
        return self.count >= _SETTLED

    def add(self, seconds: float, now: int) -> None:
        if self.is_settled:
            pause = now - self.last
            weight = max(1 / self.count, pause / (pause + _MEMORY))
            self.seconds *= 1 + weight * (min(max(seconds / self.seconds, 1 / _HICCUP), _HICCUP) - 1)
        else:
            self.seconds = min(self.seconds, seconds)
        self.count += 1
        self.last = now


class _DraftLine:
    """Seconds of a draft, affine in its length: a fading least-squares fit, drawn to a slope of a tenth of the base."""

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
        """Base and slope."""
        usual = self.mean_seconds / (10 + self.mean_tokens)
        slope = max(0.0, (self.covariance + usual) / (self.variance + 1))
        slope = min(slope, self.mean_seconds / (1 + self.mean_tokens))
        return self.mean_seconds - slope * self.mean_tokens, slope


class CostTable:
    """Measurements of one (target, drafter) pair on one device, shared by its calls. Safe to use from threads."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._now = 0  # rounds seen
        self._passes: dict[int, dict[int, _Cell]] = {}
        self._drafts: dict[int, _DraftLine] = {}
        self._accepted: dict[tuple[str, int], list[float]] = {}

    def count_acceptance(self, source: str, outcomes: Iterable[tuple[int, bool]]) -> None:
        """Adds draft tokens: their place (see [`Acceptance`]) and whether they were accepted."""
        with self._lock:
            for place, is_hit in outcomes:
                counts = self._accepted.setdefault((source, place), [0.0, 0.0])
                counts[0] = 0.995 * counts[0] + is_hit
                counts[1] = 0.995 * counts[1] + 1

    def acceptance(self, source: str, place: int) -> tuple[float, float]:
        """Accepted and tried draft tokens of this place, in all calls; older ones count less."""
        with self._lock:
            hits, tries = self._accepted.get((source, place), (0.0, 0.0))
            return hits, tries


class RoundCosts:
    """The prices of one call's rounds."""

    def __init__(self, table: CostTable):
        self._table = table
        self._level = 1.0
        self._levels: deque[float] = deque([1.0] * _LEVEL_START, maxlen=_LEVEL_WINDOW)

    def knows_plain(self, num_rows: int) -> bool:
        """Whether a pass over one token a row was measured, for this number of rows or one near it."""
        with self._table._lock:
            return self._nearest_curve(num_rows) is not None or 1 in self._table._passes.get(num_rows, {})

    def num_plain(self, num_rows: int) -> int:
        """How often the pass over one token a row was measured, for exactly this number of rows."""
        with self._table._lock:
            cell = self._table._passes.get(num_rows, {}).get(1)
            return 0 if cell is None else cell.count

    def is_measured(self, num_rows: int, width: int) -> bool:
        """Whether this very pass was measured, and a first measurement confirmed."""
        with self._table._lock:
            cell = self._table._passes.get(num_rows, {}).get(width)
            return cell is not None and cell.count > 1

    def pass_seconds(self, num_rows: int, max_width: int) -> list[float]:
        """Seconds of the target's pass for widths 0 (a filler) to `max_width`, measured or guessed."""
        with self._table._lock:
            known, now = self._known_cells(num_rows), self._table._now
        points = sorted((width, seconds) for width, (seconds, _, _) in known.items())
        firm = [(width, s) for width, s in points if width == 1 or known[width][1] >= _SETTLED]
        curve = [0.0, points[0][1] if len(points) == 1 else min(seconds for _, seconds in points)]
        for width in range(2, max_width + 1):
            seconds, count, last = known.get(width, (0.0, 0, 0))
            if count == 0:
                seconds = _CURIOSITY * _guess(points, width, num_rows)
            elif count < _SETTLED and (count == 1 or now - last > 8 * 2**count):
                guess = _guess(firm, width, num_rows)
                seconds = guess if seconds > _HICCUP * guess else seconds
            curve.append(seconds * self._level)
        curve[1] *= self._level
        return curve

    def draft_seconds(self, num_rows: int) -> tuple[float, float]:
        """Base and slope of a draft's seconds, affine in its length, for this many drafting rows."""
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
            num_draft_rows: rows for which the drafter ran; 0 where it did not.
            num_draft_tokens: the longest of its drafts.
            seconds: wall time of the round.
            draft_seconds: the drafter's part of it; `None` where nobody knows.
        """
        if num_draft_rows == 0:
            draft_seconds = 0.0
        is_pure = draft_seconds is not None
        if draft_seconds is None:
            draft_seconds = self._share_of_draft(num_rows, width, num_draft_rows, num_draft_tokens, seconds)
        rest = max(seconds - draft_seconds, 1e-9)
        with self._table._lock:
            if num_draft_rows:
                line = self._table._drafts.setdefault(num_draft_rows, _DraftLine())
                line.add(num_draft_tokens, draft_seconds)
            cells = self._table._passes.setdefault(num_rows, {})
            cell = cells.get(width)
            self._table._now += 1
            if cell is None:
                cells[width] = _Cell(rest / self._level, self._table._now, is_pure)
                return
            if cell.is_settled:
                self._levels.append(rest / cell.seconds)
                self._level = median(self._levels)
            cell.add(rest / self._level, self._table._now)
            cell.is_pure |= is_pure

    def _share_of_draft(
        self, num_rows: int, width: int, num_draft_rows: int, num_draft_tokens: int, seconds: float
    ) -> float:
        """Splits a round whose parts are not timed: what is known better keeps its value, the other gets the rest."""
        base, slope = self.draft_seconds(num_draft_rows)
        guess = base + slope * num_draft_tokens
        with self._table._lock:
            cell = self._table._passes.get(num_rows, {}).get(width)
        if cell is not None and cell.is_pure:
            return min(max(seconds - cell.seconds * self._level, 0.5 * guess), 2 * guess)
        return min(guess, 0.5 * seconds)

    def _nearest_curve(self, num_rows: int) -> int | None:
        """The nearest other number of rows whose plain pass was measured."""
        others = [rows for rows, cells in self._table._passes.items() if rows != num_rows and 1 in cells]
        nearest = min(others, key=lambda rows: _ratio(rows, num_rows), default=None)
        return nearest if nearest is not None and _ratio(nearest, num_rows) <= _NEAR else None

    def _known_cells(self, num_rows: int) -> dict[int, tuple[float, int, int]]:
        """Width to seconds, count, last: measured for these rows, else borrowed from the nearest curve, to scale."""
        own = {w: (cell.seconds, cell.count, cell.last) for w, cell in self._table._passes.get(num_rows, {}).items()}
        nearest = self._nearest_curve(num_rows)
        if nearest is None:
            return own
        other = self._table._passes[nearest]
        shared = own.keys() & other.keys()
        scale = sum(own[w][0] / other[w].seconds for w in shared) / len(shared) if shared else 1.0
        borrowed = {w: (scale * cell.seconds, cell.count, cell.last) for w, cell in other.items()}
        return {**borrowed, **own}


class DraftAcceptance:
    """How often the drafter's tokens are accepted in this call: by position in the block and by row.

    Counts fade from round to round of drafting, so that they follow the text. Position k leans on position k - 1
    (known to no more than it), a row on all rows together, and the start of a call on the pair's record.

    Args:
        table: where the record is read and kept.
        num_positions: tokens of a block.
    """

    def __init__(self, table: CostTable, num_positions: int):
        self._table = table
        record = [table.acceptance(DRAFTER, position) for position in range(num_positions)]
        self._all = _Counts(num_positions)
        self._all.start_from(record)
        if record[0][1] == 0:
            self._all.hits[0], self._all.tries[0] = _START_CHANCE * _START_WEIGHT, _START_WEIGHT
        self._rows: dict[int, _Counts] = {}

    def gains(self, row: int, num_tokens: int) -> list[float]:
        """Expected accepted tokens of drafts of 0 to `num_tokens` tokens."""
        counts = self._rows.get(row)
        chance, survival, gains = _START_CHANCE, 1.0, [0.0]
        for position in range(num_tokens):
            chance = self._all.chance(position, chance, _CHAIN_WEIGHT)
            survival *= chance if counts is None else counts.chance(position, chance, _ROW_WEIGHT)
            gains.append(gains[-1] + survival)
        return gains

    def observe(self, outcomes: Sequence[tuple[int, int, int]]) -> None:
        """Learns from a round: row, planned draft tokens and accepted ones, for each row that the drafter ran for.

        A draft that ended early by itself counts like a rejection there: neither brings the token that was planned.
        """
        self._all.fade(_FADE)
        for row, planned, accepted in outcomes:
            counts = self._rows.setdefault(row, _Counts(len(self._all.hits)))
            counts.fade(_FADE)
            tried = [(position, position < accepted) for position in range(min(planned, accepted + 1))]
            for position, is_hit in tried:
                self._all.add(position, is_hit)
                counts.add(position, is_hit)
            self._table.count_acceptance(DRAFTER, tried)

    def forget(self) -> None:
        """Makes what is known weigh little against what comes: it is old."""
        for counts in (self._all, *self._rows.values()):
            counts.cap(_STALE_WEIGHT)


class LookupAcceptance:
    """How often lookup tokens are accepted in this call: by the length of the match up to the token, and by row.

    After j accepted tokens of an offer the match is j tokens longer, so one chance per match length is all there is to
    know. Every offer is checked against the text that came, drafted or not, so the counts never grow old.
    """

    def __init__(self, table: CostTable):
        self._table = table
        self._all = _Counts(len(_LOOKUP_CHANCES))
        for place, chance in enumerate(_LOOKUP_CHANCES):
            self._all.hits[place], self._all.tries[place] = chance * _START_WEIGHT, _START_WEIGHT
        self._all.start_from([table.acceptance(LOOKUP, place) for place in range(len(_LOOKUP_CHANCES))])
        self._rows: dict[int, _Counts] = {}

    def gains(self, row: int, match_length: int, num_tokens: int) -> list[float]:
        """Expected accepted tokens of an offer cut to 0 to `num_tokens` tokens."""
        counts = self._rows.get(row)
        survival, gains = 1.0, [0.0]
        for length in range(match_length, match_length + num_tokens):
            place = _lookup_place(length)
            chance = self._all.chance(place)
            survival *= chance if counts is None else counts.chance(place, chance, _ROW_WEIGHT)
            gains.append(gains[-1] + survival)
        return gains

    def observe(self, row: int, checks: Sequence[tuple[int, bool]]) -> None:
        """Learns from [`LookupOffer.checks`]."""
        counts = self._rows.setdefault(row, _Counts(len(_LOOKUP_CHANCES)))
        places = [(_lookup_place(length), is_hit) for length, is_hit in checks]
        for place, is_hit in places:
            for each in (self._all, counts):
                each.fade_one(place, _LOOKUP_FADE)
                each.add(place, is_hit)
        self._table.count_acceptance(LOOKUP, places)


class _Counts:
    """Fading numbers of accepted and tried tokens, by place."""

    __slots__ = ("hits", "tries")

    def __init__(self, num_places: int):
        self.hits, self.tries = [0.0] * num_places, [0.0] * num_places

    def start_from(self, record: Sequence[tuple[float, float]]) -> None:
        for place, (hits, tries) in enumerate(record):
            if tries:
                weight = min(tries, _RECORD_WEIGHT)
                self.hits[place], self.tries[place] = weight * hits / tries, weight

    def chance(self, place: int, otherwise: float = 0.0, weight: float = 0.0) -> float:
        """Accepted over tried, with `weight` more tries at the rate `otherwise`."""
        return (self.hits[place] + weight * otherwise) / (self.tries[place] + weight)

    def add(self, place: int, is_hit: bool) -> None:
        self.hits[place] += is_hit
        self.tries[place] += 1

    def fade(self, factor: float) -> None:
        self.hits = [factor * hits for hits in self.hits]
        self.tries = [factor * tries for tries in self.tries]

    def fade_one(self, place: int, factor: float) -> None:
        self.hits[place] *= factor
        self.tries[place] *= factor

    def cap(self, weight: float) -> None:
        for place, tries in enumerate(self.tries):
            if tries > weight:
                self.hits[place] *= weight / tries
                self.tries[place] = weight


def _guess(points: Sequence[tuple[int, float]], width: int, num_rows: int) -> float:
    """Seconds of a width from measured ones: on the line between its neighbours; beyond the widest, at half the mean
    slope up to there, which errs to the side of trying."""
    at = bisect_left(points, (width, 0.0))
    if at == 0:
        return points[0][1]
    below, seconds = points[at - 1]
    if at < len(points):
        above, more = points[at]
        return seconds + (more - seconds) * (width - below) / (above - below)
    first, least = points[0]
    if below == first:
        return seconds * (1 + _PASS_SLOPE * num_rows**0.5 * (width - below))
    return seconds + max(0.0, seconds - least) / (below - first) / 2 * (width - below)


def _lookup_place(match_length: int) -> int:
    return _LOOKUP_PLACES[min(match_length, len(_LOOKUP_PLACES) - 1)]


def _ratio(a: int, b: int) -> float:
    return max(a, b) / min(a, b)
