"""The context as a drafter that costs nothing: what followed the last time that the text ended like this?

Prompt lookup decoding with an exact index: one walk of at most `max_match` dictionary steps per token finds the
longest earlier occurrence of the text's end, the most recent one on ties. Pure Python, no tensor.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class LookupOffer:
    """A continuation taken from the context. A function of the committed tokens alone.

    Attributes:
        token_ids: the tokens after the earlier occurrence, at least one.
        match_length: how many of the last tokens stand there too, capped at the index's `max_match`.
        checks: how earlier offers fared, whether or not they were drafted: for each token committed since, up to the
            first one that differs, the match length at that point and whether the offer had that token.
    """

    token_ids: list[int]
    match_length: int
    checks: tuple[tuple[int, bool], ...] = ()


class _Node:
    """A context of some length: where it ended last, and the one token longer contexts by the token before it."""

    __slots__ = ("children", "last")

    def __init__(self, last: int):
        self.last = last
        self.children: dict[int, _Node] | None = None


class ContextLookup:
    """The index over one sequence's committed tokens.

    Contexts are the nodes of a tree that is read backwards from the text's end. A context met once is a leaf; it gets
    children, the first of them for its earlier occurrence, when it is met again. So a new token costs one step more
    than the length of its match, and memory is a few hundred bytes per token.

    Args:
        token_ids: the prompt, without padding.
        min_match: fewest tokens that must match for an offer.
        max_match: the length from which on all matches count as equally long, and the most recent one is taken.
    """

    def __init__(self, token_ids: Sequence[int], min_match: int = 2, max_match: int = 16):
        if not 1 <= min_match <= max_match:
            raise ValueError(f"`min_match` is {min_match}, expected an integer from 1 to `max_match` ({max_match}).")
        self._min_match, self._max_match = min_match, max_match
        self._tokens: list[int] = []
        self._root: dict[int, _Node] = {}
        self._source, self._match_length = -1, 0
        self._offered: list[int] = []
        self._offered_match, self._num_confirmed = 0, 0
        self._checks: list[tuple[int, bool]] = []
        self.extend(token_ids)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Appends newly committed tokens."""
        for token in token_ids:
            if self._offered:
                self._check(token)
            self._tokens.append(token)
            self._index()

    def offer(self, max_tokens: int) -> LookupOffer | None:
        """The continuation of the longest earlier occurrence of the last tokens; `None` without one.

        A continuation that reaches the end of the text goes on into itself: where the occurrence stands p tokens back,
        it repeats the last p tokens, as text with that period would.

        Args:
            max_tokens: the most tokens to offer, of which there are always that many.
        """
        self._offered = []
        if self._match_length < self._min_match or max_tokens < 1:
            return None
        start = self._source + 1
        token_ids = self._tokens[start : start + max_tokens]
        period = len(token_ids)
        while len(token_ids) < max_tokens:
            token_ids.append(token_ids[-period])
        self._offered, self._offered_match, self._num_confirmed = token_ids, self._match_length, 0
        checks, self._checks = tuple(self._checks), []
        return LookupOffer(list(token_ids), self._match_length, checks)

    def _check(self, token: int) -> None:
        """Compares a committed token with what the last offer had in its place."""
        is_hit = self._offered[self._num_confirmed] == token
        match_length = min(self._offered_match + self._num_confirmed, self._max_match)
        self._checks.append((match_length, is_hit))
        self._num_confirmed += 1
        if not is_hit or self._num_confirmed == len(self._offered):
            self._offered = []

    def _index(self) -> None:
        """Enters the contexts that end at the newest token, and finds the longest that stands there already."""
        tokens, children = self._tokens, self._root
        end = len(tokens) - 1
        self._source, self._match_length = -1, 0
        for depth in range(1, min(self._max_match, end + 1) + 1):
            token = tokens[end - depth + 1]
            node = children.get(token)
            if node is None:
                children[token] = _Node(end)
                return
            earlier, node.last = node.last, end
            self._source, self._match_length = earlier, depth
            if depth == self._max_match:
                return
            if node.children is None:
                node.children = {}
                if earlier >= depth:
                    node.children[tokens[earlier - depth]] = _Node(earlier)
            children = node.children
