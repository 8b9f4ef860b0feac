"""Which of the prompts that a target wrote for itself are kept: those that ask something that was not asked before."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence

# Scripts that put no spaces between words: each letter counts as one.
_NO_SPACES = "\u0e00-\u0eff\u3040-\u30ff\u3400-\u9fff"
_WORD = re.compile(rf"[{_NO_SPACES}]|[^\W{_NO_SPACES}]+")

# Two prompts are the same where they share so many runs of so many words, and that part of the shorter one's.
_RUN = 4
_FEW_RUNS = 3
_SAME = 0.5

_MIN_WORDS = 3
_OPENING = 5
_BROKEN_ENDS = (",", ":", ";", "(", "-", "…", "...")

# A text that says less than this part of its words for the first time goes round in circles.
_MIN_FRESH = 0.4
_LONG_ENOUGH_TO_TELL = 12


def words_of(text: str) -> tuple[str, ...]:
    """The words of a text in lower case, without punctuation: what two prompts are compared by."""
    return tuple(_WORD.findall(text.lower()))


class Sieve:
    """Keeps prompts that can be used and that were not there before; counts why the others went.

    Args:
        known: prompts that are not to come again, nor nearly.
        max_per_opening: how many kept prompts may begin with the same five words.

    Attributes:
        refused: how many prompts went, by reason.
        openings: how many were kept, by their first five words.
    """

    def __init__(self, known: Iterable[str] = (), max_per_opening: int = 3):
        self.max_per_opening = max_per_opening
        self.refused: Counter[str] = Counter()
        self.openings: Counter[tuple[str, ...]] = Counter()
        self._texts: set[tuple[str, ...]] = set()
        self._runs: list[set[tuple[str, ...]]] = []
        self._by_run: dict[tuple[str, ...], list[int]] = {}
        for prompt in known:
            self._note(words_of(prompt))

    def take(self, prompt: str) -> bool:
        """Whether a prompt is kept."""
        words = words_of(prompt)
        reason = self._objection(prompt, words)
        if reason is not None:
            self.refused[reason] += 1
            return False
        self.add(prompt)
        return True

    def add(self, prompt: str) -> None:
        """Notes a prompt as kept."""
        words = words_of(prompt)
        self.openings[words[:_OPENING]] += 1
        self._note(words)

    def _note(self, words: tuple[str, ...]) -> None:
        self._texts.add(words)
        runs = _runs(words)
        for run in runs:
            self._by_run.setdefault(run, []).append(len(self._runs))
        self._runs.append(runs)

    def _objection(self, prompt: str, words: tuple[str, ...]) -> str | None:
        if len(words) < _MIN_WORDS:
            return "too short"
        if prompt.rstrip().endswith(_BROKEN_ENDS):
            return "breaks off"
        if len(words) >= _LONG_ENOUGH_TO_TELL and len(set(words)) < _MIN_FRESH * len(words):
            return "repeats itself"
        if self.openings[words[:_OPENING]] >= self.max_per_opening:
            return "begins like others"
        if self._is_known(words):
            return "there before"
        return None

    def _is_known(self, words: tuple[str, ...]) -> bool:
        if words in self._texts:
            return True
        runs = _runs(words)
        common = Counter(number for run in runs for number in self._by_run.get(run, ()))
        return any(
            count >= max(_FEW_RUNS, _SAME * min(len(runs), len(self._runs[number])))
            for number, count in common.items()
        )


def _runs(words: Sequence[str]) -> set[tuple[str, ...]]:
    """All runs of a few words."""
    return {tuple(words[i : i + _RUN]) for i in range(len(words) - _RUN + 1)}
