"""Which draft tokens are worth verifying, given how likely each survives: the prefix scheduler, and gates that use it.

The survival of a draft token is the chance that it and all before it in its row are accepted; a_k = c_1 ... c_k. A
round over some of them brings one token per row and the sum of their survivals, and lasts as long as the target's pass
over that many tokens, and the draft. Algorithm 1 of the paper ranks the tokens of all rows by survival and admits one
after the other as long as each raises the tokens per second. Where a pass pads its rows, it admits columns instead,
one token of every row at a time.

Nothing here sees a token before it is decided whether that token is verified. A row's survivals only fall, so the
ranking puts every token behind those that its confidence depends on, and where the ranking is cut depends on what
stands before the cut alone: that is why the first token that does not pay ends it, although one behind it might pay
again. A search over the whole ranking may look behind the token that it decides about, so it is made on the survivals
of another round, and gives a number only (`budget`).
"""

from abc import abstractmethod
from collections.abc import Sequence
from itertools import accumulate, zip_longest
from math import isfinite

from .scheduling import Gate, RowOutcome
from .trust import Trust


class PassCosts:
    """Seconds of a round by the number of draft tokens that are verified in it.

    Args:
        seconds: of the target's pass; index = draft tokens, from 0.
        num_rows: rows of the pass.
        draft_seconds: of the draft, whatever becomes of it.
        pads_rows: whether every row is padded to the longest: tokens then come by columns, one for each row.
        num_copied: draft tokens of the pass that are decided already.
    """

    def __init__(
        self,
        seconds: Sequence[float],
        num_rows: int,
        draft_seconds: float = 0.0,
        pads_rows: bool = False,
        num_copied: int = 0,
    ):
        self.num_rows, self.pads_rows = num_rows, pads_rows
        self._seconds, self._draft_seconds, self._num_copied = seconds, draft_seconds, num_copied

    def of(self, num_steps: int) -> float:
        """Seconds of a round with so many draft tokens, or so many columns of them where rows are padded."""
        size = num_steps * self.num_rows if self.pads_rows else self._num_copied + num_steps
        return self._draft_seconds + self._seconds[min(size, len(self._seconds) - 1)]

    @property
    def least_step(self) -> float:
        """The least that one more token may cost; 0 where one may be free."""
        if self.pads_rows:
            return 0.0
        steps = [after - before for before, after in zip(self._seconds, self._seconds[1:], strict=False)]
        return max(0.0, min(steps, default=0.0))


def admit(survivals: Sequence[Sequence[float]], costs: PassCosts) -> list[int]:
    """Algorithm 1: how many of its draft tokens each row verifies.

    Args:
        survivals: of each row, of its first, second, ... draft token; falling. NaN counts as 0.
    """
    return spend(survivals, _cut(survivals, costs, stops_early=True), costs.pads_rows)


def budget(survivals: Sequence[Sequence[float]], costs: PassCosts) -> int:
    """How many of these tokens (or columns) would be best, found by a search over all numbers. For survivals of
    another round."""
    return _cut(survivals, costs, stops_early=False)


def spend(survivals: Sequence[Sequence[float]], num_steps: int, pads_rows: bool = False) -> list[int]:
    """A number of tokens spent on those most likely to survive, or of columns: how many of each row."""
    if pads_rows:
        return [min(num_steps, len(values)) for values in survivals]
    lengths = [0] * len(survivals)
    for _, position, row in _ranked(survivals)[:num_steps]:
        lengths[row] = 1 + position
    return lengths


def _cut(survivals: Sequence[Sequence[float]], costs: PassCosts, stops_early: bool) -> int:
    """Steps of the ranking that bring the most new tokens per second, of those that may be looked at."""
    expected = float(costs.num_rows)
    best_rate, best = expected / costs.of(0), 0
    gains = _columns(survivals) if costs.pads_rows else [survival for survival, _, _ in _ranked(survivals)]
    for num_steps, gain in enumerate(gains, 1):
        expected += gain
        rate = expected / costs.of(num_steps)
        if rate > best_rate:
            best_rate, best = rate, num_steps
        elif stops_early:
            break
    return best


def _ranked(survivals: Sequence[Sequence[float]]) -> list[tuple[float, int, int]]:
    """Survival, position and row of every token, most likely first; among equal ones, earlier positions first."""
    tokens = [
        (value, position, row)
        for row, values in enumerate(survivals)
        for position, value in enumerate(accumulate(map(_chance, values), min))
    ]
    return sorted(tokens, key=lambda token: (-token[0], token[1], token[2]))


def _columns(survivals: Sequence[Sequence[float]]) -> list[float]:
    """What each column of a padded pass brings: the survivals of its position, of all rows that have a token there."""
    falling = [list(accumulate(map(_chance, values), min)) for values in survivals]
    return [sum(of_position) for of_position in zip_longest(*falling, fillvalue=0.0)]


def _chance(value: float) -> float:
    return value if isfinite(value) else 0.0


class ConfidenceGate(Gate):
    """What gates that read confidences have in common: the survivals of each row, as far as its draft got.

    Args:
        num_rows: rows of the plan.
        trust: makes chances of confidences; `None`: they are taken at their word.

    Attributes:
        survivals: of each row, of the draft tokens that were drawn.
    """

    signal = "confidence"

    def __init__(self, num_rows: int, trust: Trust | None = None):
        self.survivals: list[list[float]] = [[] for _ in range(num_rows)]
        self._confidences: list[list[float]] = [[] for _ in range(num_rows)]
        self._trust = trust

    def opens(self, position: int, signals: Sequence[float]) -> list[bool]:
        survivals: list[float | None] = []
        for values, confidences, confidence in zip(self.survivals, self._confidences, signals, strict=True):
            if len(values) == position and 0.0 <= confidence <= 1.0:
                confidences.append(confidence)
                survivals.append(self._chance(confidence) * (values[-1] if values else 1.0))
            else:
                survivals.append(None)
        goes_on = self.choose(position, survivals)
        for values, survival, is_open in zip(self.survivals, survivals, goes_on, strict=True):
            if is_open and survival is not None:
                values.append(survival)
        return goes_on

    @abstractmethod
    def choose(self, position: int, survivals: Sequence[float | None]) -> list[bool]:
        """Which rows draw a token at this position.

        Args:
            survivals: of every row at this position; `None` where its draft is over.
        """

    def learn(self, outcomes: Sequence[RowOutcome]) -> None:
        """Tells the trust which of the tokens that were verified stood, of every row of the plan."""
        if self._trust is not None:
            for confidences, outcome in zip(self._confidences, outcomes, strict=True):
                num_seen = outcome.accepted + outcome.next_was_seen
                for position, confidence in enumerate(confidences[: min(outcome.proposed, num_seen)]):
                    self._trust.observe(confidence, position < outcome.accepted)

    def refused_chance(self, slot: int) -> float | None:
        """The chance of the token before which the gate ended the draft of a row, if it did."""
        values, confidences = self.survivals[slot], self._confidences[slot]
        if len(confidences) == len(values):
            return None
        return self._chance(confidences[-1])

    def _chance(self, confidence: float) -> float:
        """With the benefit of the doubt: what is never verified never shows that its confidence is too low."""
        return confidence if self._trust is None else self._trust.chance(confidence, hope=1.0)


class SurvivalGate(ConfidenceGate):
    """Admits by Algorithm 1, or spends a budget, by the confidences of the draft.

    A row stops drawing where its survival is below what any token must bring. That depends on the row alone, so which
    tokens of other rows stand in the ranking never depends on a token that is still to be decided about.

    Args:
        num_rows: rows of the plan.
        costs: of the round.
        num_tokens: the budget, in columns where rows are padded; `None`: by Algorithm 1.
        trust: as for every such gate.

    Attributes:
        costs: of the round.
    """

    def __init__(self, num_rows: int, costs: PassCosts, num_tokens: int | None = None, trust: Trust | None = None):
        super().__init__(num_rows, trust)
        self.costs, self._num_tokens = costs, num_tokens
        # Tokens per second only grow from here on, and a token has to keep up with them.
        self._toll = 0.0 if num_tokens is not None else costs.num_rows / costs.of(0) * costs.least_step

    def choose(self, position: int, survivals: Sequence[float | None]) -> list[bool]:
        return [survival is not None and survival > self._toll for survival in survivals]

    def admitted(self, lengths: Sequence[int]) -> list[int]:
        drawn = [values[:length] for values, length in zip(self.survivals, lengths, strict=True)]
        if self._num_tokens is None:
            return admit(drawn, self.costs)
        return spend(drawn, self._num_tokens, self.costs.pads_rows)


class ForesightGate(ConfidenceGate):
    """Draws on as long as that promises more than the time is worth elsewhere.

    A token is worth drawing for its own chance and for those that may follow it: behind the tokens whose confidences
    are known, the gate expects what is usual at each position. So a token that does not pay by itself is drawn where a
    dear step of the prices leads to a cheap one. Whether a position is drawn depends on confidences up to it, of all
    rows, and never on its token; and every token drawn is verified.

    Args:
        usual: for each row, the usual chance of each draft token given those before it; empty without a draft.
        values: what a new token of each row is worth.
        seconds: of the pass by its draft tokens.
        draft_slope: seconds of one more position of the draft.
        rate: worth per second of what would be done otherwise.
        num_copied: draft tokens of the pass that are decided already.
        trust: as for every such gate.
    """

    def __init__(
        self,
        usual: Sequence[Sequence[float]],
        values: Sequence[float],
        seconds: Sequence[float],
        draft_slope: float,
        rate: float,
        num_copied: int,
        trust: Trust,
    ):
        super().__init__(len(usual), trust)
        self._usual, self._values, self._seconds, self._draft_slope = usual, values, seconds, draft_slope
        self._rate, self._num_copied, self._num_drawn = rate, num_copied, 0

    def price(self, num_tokens: int, longest: int) -> float:
        """What else could be had in the time for so many draft tokens of all rows, the longest draft so long."""
        size = min(self._num_copied + num_tokens, len(self._seconds) - 1)
        return self._rate * (self._seconds[size] - self._seconds[self._num_copied] + self._draft_slope * longest)

    def choose(self, position: int, survivals: Sequence[float | None]) -> list[bool]:
        tokens = []
        for slot, (survival, usual) in enumerate(zip(survivals, self._usual, strict=True)):
            if survival is None:
                continue
            value = self._values[slot]
            tokens.append((value * survival, position, slot))
            for later in range(position + 1, len(usual)):
                survival *= usual[later]
                tokens.append((value * survival, later, slot))
        tokens.sort(key=lambda token: (-token[0], token[1]))
        so_far = self.price(self._num_drawn, position)
        best, worth, longest, num_best = 0.0, 0.0, position, 0
        for number, (gain, of_position, _) in enumerate(tokens, 1):
            worth, longest = worth + gain, max(longest, 1 + of_position)
            net = worth - (self.price(self._num_drawn + number, longest) - so_far)
            if net > best:
                best, num_best = net, number
        drawn = {slot for _, _, slot in tokens[:num_best]}
        self._num_drawn += len(drawn)
        return [slot in drawn for slot in range(len(survivals))]


class EntropyGate(Gate):
    """Ends a row's draft where the drafter itself is unsure: at the first position whose acceptance, as far as the
    entropy H of the draft's distribution bounds it, 1 - sqrt(0.2 H), is below a threshold (AdaEDL, arXiv 2410.18351).
    """

    signal = "entropy"

    def __init__(self, num_rows: int, threshold: float):
        self._is_open = [True] * num_rows
        self._threshold = threshold

    def opens(self, position: int, signals: Sequence[float]) -> list[bool]:
        self._is_open = [
            was_open and 1 - (0.2 * max(entropy, 0.0)) ** 0.5 >= self._threshold
            for was_open, entropy in zip(self._is_open, signals, strict=True)
        ]
        return list(self._is_open)
