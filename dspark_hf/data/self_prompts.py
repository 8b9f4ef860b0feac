"""Prompts that the target writes itself: it goes on after the header of a user's message, and a sieve keeps the good.

What a model was tuned on is the likeliest thing that it says in a user's place. So these prompts cover what it is used
for, without any data set.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import cycle

# Words of the runs that two texts are compared by, and the share of common runs that makes them the same.
_RUN = 4
_SAME = 0.5

_MIN_WORDS = 3
_OPENING = 5


def normalized(text: str) -> list[str]:
    """The words of a text in lower case, without punctuation: what two prompts are compared by."""
    return re.findall(r"\w+", text.lower())


class Sieve:
    """Keeps prompts that can be used and that were not there before; counts why the others went.

    Args:
        known: prompts that are not to come again, in other words either.
        max_per_opening: how many prompts may begin with the same five words.
    """

    def __init__(self, known: Iterable[str] = (), max_per_opening: int = 3):
        self.max_per_opening = max_per_opening
        self.refused: Counter[str] = Counter()
        self._openings: Counter[tuple[str, ...]] = Counter()
        self._texts: list[set[tuple[str, ...]]] = []
        self._by_run: dict[tuple[str, ...], list[int]] = {}
        for prompt in known:
            self.add(prompt)

    def add(self, prompt: str) -> None:
        """Takes note of a prompt."""
        words = normalized(prompt)
        self._openings[tuple(words[:_OPENING])] += 1
        runs = _runs(words)
        for run in runs:
            self._by_run.setdefault(run, []).append(len(self._texts))
        self._texts.append(runs)

    def take(self, prompt: str | None) -> bool:
        """Whether a prompt is kept; if so, takes note of it. `None` stands for one that did not end in time."""
        reason = "too long" if prompt is None else self._objection(prompt)
        if reason is not None:
            self.refused[reason] += 1
            return False
        self.add(str(prompt))
        return True

    def _objection(self, prompt: str) -> str | None:
        words = normalized(prompt)
        if len(words) < _MIN_WORDS:
            return "too short"
        if prompt.rstrip()[-1] in ",:;(-":
            return "breaks off"
        if len(words) > 12 and len(set(words)) < len(words) / 3:
            return "repeats itself"
        if self._openings[tuple(words[:_OPENING])] >= self.max_per_opening:
            return "opening too frequent"
        if self._is_known(_runs(words)):
            return "there before"
        return None

    def _is_known(self, runs: set[tuple[str, ...]]) -> bool:
        common = Counter(number for run in runs for number in self._by_run.get(run, ()))
        return any(count >= _SAME * min(len(runs), len(self._texts[number])) for number, count in common.items())


def _runs(words: Sequence[str]) -> set[tuple[str, ...]]:
    """All runs of a few words; a shorter text is one run."""
    return {tuple(words[i : i + _RUN]) for i in range(max(1, len(words) - _RUN + 1))}


def starts(header: list[int], openings: Sequence[list[int]]) -> Iterator[list[int]]:
    """What the target goes on from, again and again: the header with each opening in turn, or alone."""
    return (header + opening for opening in cycle(openings or [[]]))
