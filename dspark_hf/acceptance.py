"""How likely is a draft token accepted? Counts that fade, from the drafts of this call and the pair's record.

One class per source, because the chance depends on different things: for the drafter on the position in the block,
for a lookup in the context on the length of the match up to the token. Both keep a row apart from the others as far as
it has shown that it is. Pure numbers, no tensor.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import Literal

from .costs import CostTable

DRAFTER: Literal["drafter"] = "drafter"
LOOKUP: Literal["lookup"] = "lookup"

# Where there is no record, a call starts as if so many tokens had been tried; for lookups by place (see below).
_START_CHANCE, _START_WEIGHT = 0.55, 4.0
_LOOKUP_CHANCES = (0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
# The place of a match length: up to 2, 3, 4, 5 and 6, 7 to 15, 16.
_LOOKUP_PLACES = (0, 0, 0, 1, 2, 3, 3, 4, 4, 4, 4, 4, 4, 4, 4, 4, 5)
# How many tries these count for: the record at the start of a call, the position before for the next one, all rows
# for one of them, what was learned before a long pause, and the doubt that keeps a first position above zero.
_RECORD_WEIGHT, _CHAIN_WEIGHT, _ROW_WEIGHT, _STALE_WEIGHT, _DOUBT_WEIGHT = 6.0, 2.0, 6.0, 2.0, 0.5
# What is left of a count after one round of drafting, and after one more lookup token of its place.
_FADE, _LOOKUP_FADE = 0.96, 0.97


@dataclass(frozen=True)
class DraftOutcome:
    """What became of a row's draft.

    Attributes:
        row: its number in the call.
        planned: draft tokens that were to be verified.
        accepted: those that stand.
        refused_chance: of the next one, where the plan itself ended the draft there because of this chance.
        next_was_seen: as of a `RowOutcome`.
    """

    row: int
    planned: int
    accepted: int
    refused_chance: float | None = None
    next_was_seen: bool = True

    def tried(self) -> list[tuple[int, float]]:
        """Positions that the draft says something about, with the acceptance there.

        A draft that ended by itself before the plan did counts as a rejection there: neither brings that token. One
        that the plan ended early would have gone on with the known chance; without it, only the likely tokens would
        count.
        """
        num_seen = self.accepted + self.next_was_seen
        tried = [(position, float(position < self.accepted)) for position in range(min(self.planned, num_seen))]
        if self.refused_chance is not None and self.accepted == self.planned:
            tried.append((self.planned, self.refused_chance))
        return tried


class DraftAcceptance:
    """The drafter's chances by position in the block, each given that the positions before it were accepted.

    Args:
        table: where the record is read and kept.
        num_positions: tokens of a draft at most.
    """

    def __init__(self, table: CostTable, num_positions: int):
        self._table = table
        self._all = _Counts(num_positions)
        self._all.start(0, _START_CHANCE, _START_WEIGHT)
        self._all.start_from(table, DRAFTER)
        self._rows: dict[int, _Counts] = {}

    def chances(self, row: int, num_tokens: int) -> list[float]:
        """The chance of each draft token, if those before it were accepted."""
        counts = self._rows.get(row, self._all)
        chance, weight, chances = _START_CHANCE, _DOUBT_WEIGHT, []
        for position in range(num_tokens):
            chance = self._all.chance(position, chance, weight)
            chances.append(counts.chance(position, chance, _ROW_WEIGHT))
            weight = _CHAIN_WEIGHT
        return chances

    def survivals(self, row: int, num_tokens: int) -> list[float]:
        """The chance that each draft token and all before it are accepted."""
        return list(accumulate(self.chances(row, num_tokens), mul))

    def gains(self, row: int, num_tokens: int) -> list[float]:
        """Expected accepted tokens of drafts of 0, 1, ... `num_tokens` tokens."""
        return list(accumulate(self.survivals(row, num_tokens), initial=0.0))

    def observe(self, outcomes: Iterable[DraftOutcome]) -> None:
        """Learns from a round, of each row that the drafter ran for."""
        self._all.fade(_FADE)
        for outcome in outcomes:
            counts = self._rows.setdefault(outcome.row, _Counts(len(self._all.tries)))
            counts.fade(_FADE)
            tried = outcome.tried()
            for position, hit in tried:
                self._all.add(position, hit)
                counts.add(position, hit)
            self._table.count_acceptance(DRAFTER, tried)

    def forget(self) -> None:
        """Makes what is known weigh little against what comes: it is old."""
        for counts in (self._all, *self._rows.values()):
            counts.cap(_STALE_WEIGHT)


class LookupAcceptance:
    """A lookup's chances by the length of the match.

    After j accepted tokens the match is j tokens longer, so a chance per match length is all that an offer needs.
    Every offer is checked against the text that came, drafted or not, so these chances never grow old.
    """

    def __init__(self, table: CostTable):
        self._table = table
        self._all = _Counts(len(_LOOKUP_CHANCES))
        for place, chance in enumerate(_LOOKUP_CHANCES):
            self._all.start(place, chance, _START_WEIGHT)
        self._all.start_from(table, LOOKUP)
        self._rows: dict[int, _Counts] = {}

    def gains(self, row: int, match_length: int, num_tokens: int) -> list[float]:
        """Expected accepted tokens of an offer cut to 0, 1, ... `num_tokens` tokens."""
        counts = self._rows.get(row, self._all)
        survival, gains = 1.0, [0.0]
        for length in range(match_length, match_length + num_tokens):
            place = _lookup_place(length)
            survival *= counts.chance(place, self._all.chance(place), _ROW_WEIGHT)
            gains.append(gains[-1] + survival)
        return gains

    def observe(self, row: int, checks: Sequence[tuple[int, bool]]) -> None:
        """Learns from the `checks` of a [`LookupOffer`]."""
        counts = self._rows.setdefault(row, _Counts(len(_LOOKUP_CHANCES)))
        tried = [(_lookup_place(length), is_hit) for length, is_hit in checks]
        for place, is_hit in tried:
            for each in (self._all, counts):
                each.fade_one(place, _LOOKUP_FADE)
                each.add(place, is_hit)
        self._table.count_acceptance(LOOKUP, tried)


class _Counts:
    """Fading numbers of accepted and of tried tokens, by place."""

    __slots__ = ("hits", "tries")

    def __init__(self, num_places: int):
        self.hits, self.tries = [0.0] * num_places, [0.0] * num_places

    def start(self, place: int, chance: float, weight: float) -> None:
        self.hits[place], self.tries[place] = chance * weight, weight

    def start_from(self, table: CostTable, source: str) -> None:
        for place in range(len(self.tries)):
            hits, tries = table.acceptance(source, place)
            if tries:
                self.start(place, hits / tries, min(tries, _RECORD_WEIGHT))

    def chance(self, place: int, otherwise: float = 0.0, weight: float = 0.0) -> float:
        """Accepted over tried, with `weight` more tries of chance `otherwise`."""
        return (self.hits[place] + weight * otherwise) / (self.tries[place] + weight)

    def add(self, place: int, hit: float) -> None:
        self.hits[place] += hit
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
                self.start(place, self.hits[place] / tries, weight)


def _lookup_place(match_length: int) -> int:
    return _LOOKUP_PLACES[min(match_length, len(_LOOKUP_PLACES) - 1)]
