"""The lookup index against a search from scratch, and the bookkeeping of its offers."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark_hf.lookup import ContextLookup, LookupOffer, _Node

# Few different tokens: then texts repeat themselves, in every possible way.
texts = st.integers(1, 4).flatmap(lambda size: st.lists(st.integers(0, size - 1), max_size=60))


def search(tokens: list[int], min_match: int, max_match: int, max_tokens: int) -> tuple[list[int], int] | None:
    """Continuation and match length, by trying every length and every place."""
    end = len(tokens)
    for length in range(min(max_match, end - 1), min_match - 1, -1):
        for place in range(end - 1, length - 1, -1):
            if tokens[place - length : place] == tokens[end - length :]:
                text = list(tokens)
                for _ in range(max_tokens):
                    text.append(text[len(text) - (end - place)])
                return text[end:], length
    return None


def num_nodes(children: dict[int, _Node] | None) -> int:
    return sum(1 + num_nodes(node.children) for node in (children or {}).values())


class TestOffer:
    @settings(max_examples=300, deadline=None, derandomize=True)
    @given(texts, st.integers(1, 4), st.integers(0, 4), st.integers(1, 20))
    def test_it_is_what_a_search_from_scratch_finds(self, tokens, min_match, more, max_tokens):
        offer = ContextLookup(tokens, min_match, min_match + more).offer(max_tokens)
        expected = search(tokens, min_match, min_match + more, max_tokens)
        assert (offer and (offer.token_ids, offer.match_length)) == expected

    @settings(max_examples=100, deadline=None, derandomize=True)
    @given(texts, st.lists(st.integers(1, 5), max_size=20))
    def test_it_does_not_depend_on_how_the_text_came(self, tokens, pieces):
        lookup, start = ContextLookup([]), 0
        for piece in pieces:
            lookup.extend(tokens[start : start + piece])
            lookup.offer(3)
            start += piece
        lookup.extend(tokens[start:])
        found, expected = lookup.offer(9), ContextLookup(tokens).offer(9)
        assert (found and found.token_ids) == (expected and expected.token_ids)

    def test_the_longest_match_wins_over_a_later_one(self):
        assert ContextLookup([1, 2, 3, 7, 2, 3, 8, 1, 2, 3]).offer(1) == LookupOffer([7], 3)

    def test_the_latest_of_equally_long_matches_wins(self):
        assert ContextLookup([2, 3, 7, 2, 3, 8, 2, 3]).offer(1) == LookupOffer([8], 2)

    def test_matches_beyond_the_longest_length_count_as_equal(self):
        assert ContextLookup([1, 2, 3, 7, 9, 2, 3, 8, 1, 2, 3], max_match=2).offer(1) == LookupOffer([8], 2)

    def test_a_continuation_that_reaches_the_end_goes_on_into_itself(self):
        assert ContextLookup([9, 1, 2, 3, 1, 2]).offer(8) == LookupOffer([3, 1, 2, 3, 1, 2, 3, 1], 2)

    @pytest.mark.parametrize("tokens", [[], [5], [5, 6, 7, 8], [5, 6, 7, 6]])
    def test_there_is_none_without_a_match_that_is_long_enough(self, tokens):
        assert ContextLookup(tokens).offer(4) is None

    def test_there_is_none_without_room(self):
        lookup = ContextLookup([1, 2, 1, 2])
        assert lookup.offer(0) is None
        assert lookup.offer(1) is not None

    def test_it_is_the_callers_own(self):
        lookup = ContextLookup([1, 2, 3, 1, 2])
        lookup.offer(2).token_ids.clear()
        assert lookup.offer(2).token_ids == [3, 1]

    @pytest.mark.parametrize(("min_match", "max_match"), [(0, 16), (4, 3)])
    def test_lengths_that_make_no_sense_are_refused(self, min_match, max_match):
        with pytest.raises(ValueError, match=f"`min_match` is {min_match}, expected an integer from 1 to"):
            ContextLookup([], min_match, max_match)


class TestChecks:
    """Each offer carries how the ones before it fared: one entry per committed token up to the first difference."""

    def test_the_match_grows_with_each_token_that_came_as_offered(self):
        lookup = ContextLookup([1, 2, 3, 4, 5, 1, 2])
        assert lookup.offer(3) == LookupOffer([3, 4, 5], 2)
        lookup.extend([3, 4, 9])
        assert lookup.offer(3) is None
        lookup.extend([1, 2])
        assert lookup.offer(1).checks == ((2, True), (3, True), (4, False))

    def test_they_are_told_once(self):
        lookup = ContextLookup([1, 2, 1, 2])
        lookup.offer(1)
        lookup.extend([1])
        assert lookup.offer(1).checks == ((2, True),)
        assert lookup.offer(1).checks == ()

    def test_tokens_after_a_difference_or_after_the_offer_say_nothing(self):
        lookup = ContextLookup([1, 2, 3, 1, 2])
        lookup.offer(1)
        lookup.extend([3, 1, 2])
        assert lookup.offer(2).checks == ((2, True),)
        lookup.extend([7, 1, 2])
        assert lookup.offer(2).checks == ((5, False),)

    def test_the_match_length_is_capped(self):
        lookup = ContextLookup([1, 2, 1, 2, 1, 2], max_match=3)
        lookup.offer(2)
        lookup.extend([1, 2])
        assert lookup.offer(1).checks == ((3, True), (3, True))

    @settings(max_examples=100, deadline=None, derandomize=True)
    @given(texts, st.lists(st.integers(1, 4), min_size=20, max_size=20), st.integers(1, 6))
    def test_they_compare_every_offer_with_the_text_that_came(self, tokens, pieces, max_tokens):
        lookup, start, expected, found = ContextLookup([]), 0, [], []
        for piece in pieces:
            offer, came = lookup.offer(max_tokens), tokens[start : start + piece]
            if offer is not None:
                found += offer.checks
                for position, (offered, token) in enumerate(zip(offer.token_ids, came, strict=False)):
                    expected.append((min(offer.match_length + position, 16), offered == token))
                    if offered != token:
                        break
            lookup.extend(came)
            start += piece
        assert found == expected[: len(found)]
        assert expected[len(found) :] == lookup._checks


class TestCost:
    def test_a_text_without_repetition_takes_one_node_per_token(self):
        assert num_nodes(ContextLookup(list(range(1000)))._root) == 1000

    @pytest.mark.parametrize("period", [1, 2, 7])
    def test_a_periodic_text_takes_a_node_per_length_and_place_in_the_period(self, period):
        lookup = ContextLookup([i % period for i in range(2000)])
        assert num_nodes(lookup._root) <= period * 16 + 16
