"""How far a confidence is to be trusted: a logistic fit that goes on while decoding. Pure numbers, no tensor.

A confidence head says how likely a draft token is accepted if the tokens before it were. It learned that for one
decoding (sampling, mostly) on some texts; greedy decoding accepts otherwise. What was accepted so far mends it, as a
calibration file does beforehand: log-odds times a slope plus a shift. A head that says nothing gets the slope 0, and
the mean acceptance remains.
"""

from math import exp, log
from threading import Lock

# The fit starts at slope 1 and shift 0, as sure of them as after some draft tokens of an even chance.
_SLOPE_DOUBT, _SHIFT_DOUBT = 8.0, 4.0
# What is left of the weight of a draft token after the next one, and the largest log-odds that count.
_FADE, _MOST = 0.998, 8.0
_MOST_SLOPE = 3.0


class Trust:
    """Log-odds of acceptance, linear in those of the confidence; a Newton step for each draft token. Thread-safe."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._slope, self._shift = 1.0, 0.0
        # The curvature: of slope, of both, of shift.
        self._curvature = (_SLOPE_DOUBT, 0.0, _SHIFT_DOUBT)

    def chance(self, confidence: float, hope: float = 0.0) -> float:
        """The chance of a draft token with this confidence, 0 to 1; 0 for what is no probability.

        Args:
            hope: by how many deviations of what is not known yet the log-odds are raised.
        """
        if not 0.0 <= confidence <= 1.0:
            return 0.0
        x = _log_odds(confidence)
        with self._lock:
            a, b, c = self._curvature
            doubt = ((c * x * x - 2 * b * x + a) / (a * c - b * b)) ** 0.5
            return _sigmoid(self._slope * x + self._shift + hope * doubt)

    def observe(self, confidence: float, is_hit: bool) -> None:
        """Learns from a draft token whose predecessors were accepted."""
        if not 0.0 <= confidence <= 1.0:
            return
        x = _log_odds(confidence)
        with self._lock:
            chance = _sigmoid(self._slope * x + self._shift)
            weight = chance * (1 - chance)
            a, b, c = (_FADE * value for value in self._curvature)
            a, b, c = max(a, _SLOPE_DOUBT) + weight * x * x, b + weight * x, max(c, _SHIFT_DOUBT) + weight
            self._curvature = (a, b, c)
            step = (is_hit - chance) / (a * c - b * b)
            self._slope = min(max(self._slope + step * (c * x - b), 0.0), _MOST_SLOPE)
            self._shift += step * (a - b * x)


def _log_odds(chance: float) -> float:
    if chance in (0.0, 1.0):
        return _MOST if chance else -_MOST
    return min(max(log(chance / (1 - chance)), -_MOST), _MOST)


def _sigmoid(log_odds: float) -> float:
    return 1 / (1 + exp(-log_odds))
