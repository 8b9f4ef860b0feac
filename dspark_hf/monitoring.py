"""Acceptance over many calls, for a service: does the drafter still fit what users ask?"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from math import isnan, nan
from statistics import median
from threading import Lock

from .modeling_dspark import DSparkDrafter
from .trace import Round, Trace


@dataclass(frozen=True)
class Acceptance:
    """What an [`AcceptanceMonitor`] sees in its window.

    Attributes:
        num_rounds: rounds in the window.
        num_new_tokens: tokens that they added, of all rows.
        acceptance_length: τ, tokens per round and row, bonus included.
        acceptance_rate: draft tokens accepted over verified; NaN without a draft.
        verified_per_round: draft tokens verified, per round and row.
        rounds_without_draft: share of the rounds without any draft.
        tokens_per_second: new tokens over the time of the rounds, prefill not counted.
        speed: tokens per second over those of plain decoding, by the plain rounds of as many rows in the window; NaN
            where there are none to compare with.
    """

    num_rounds: int
    num_new_tokens: int
    acceptance_length: float
    acceptance_rate: float
    verified_per_round: float
    rounds_without_draft: float
    tokens_per_second: float
    speed: float


_HELP = {
    "num_rounds": "Rounds in the window.",
    "num_new_tokens": "Tokens that these rounds added.",
    "acceptance_length": "Tokens per round and row, bonus included.",
    "acceptance_rate": "Draft tokens accepted over verified.",
    "verified_per_round": "Draft tokens verified per round and row.",
    "rounds_without_draft": "Share of the rounds without any draft.",
    "tokens_per_second": "New tokens per second of the rounds.",
    "speed": "Tokens per second over those of plain decoding.",
}


class AcceptanceMonitor:
    """Keeps the last rounds of any number of calls and threads.

    >>> monitor = AcceptanceMonitor(alarm_below=1.5, on_alarm=lambda now: log.warning("drafter: %s", now))
    >>> with monitor.watching(drafter):
    ...     model.generate(**inputs, assistant_model=drafter)
    >>> monitor.now().acceptance_length

    Args:
        window: rounds to look back on.
        alarm_below: τ below which the drafter is no longer worth its cost; `None`: no alarm.
        patience: rounds in a row for which the window's τ must have been below that.
        on_alarm: called once when it has, with what the window shows, in the thread that brought the last round; and
            again only after τ has recovered.
    """

    def __init__(
        self,
        window: int = 1000,
        *,
        alarm_below: float | None = None,
        patience: int = 200,
        on_alarm: Callable[[Acceptance], None] | None = None,
    ):
        if window < 1 or patience < 1:
            raise ValueError(f"`window` is {window} and `patience` {patience}, expected numbers of rounds from 1 on.")
        self._rounds: deque[_Seen] = deque(maxlen=window)
        self._num_rows = self._num_new = 0
        self._alarm_below, self._patience, self._on_alarm = alarm_below, patience, on_alarm
        self._num_below, self._has_rung = 0, False
        self._lock = Lock()

    @contextmanager
    def watching(self, drafter: DSparkDrafter) -> Iterator[Trace]:
        """Sees every call with this drafter that is made inside, in this thread or task. Yields their trace."""
        with drafter.trace() as trace:
            try:
                yield trace
            finally:
                self.add(trace)

    def add(self, trace: Trace) -> None:
        """Takes over the rounds of a trace."""
        for one in trace.rounds:
            alarm = None
            with self._lock:
                self._append(_Seen.of(one))
                if self._alarm_below is not None:
                    is_below = self._num_new < self._alarm_below * self._num_rows
                    self._num_below = self._num_below + 1 if is_below else 0
                    self._has_rung &= is_below
                    if self._num_below >= self._patience and not self._has_rung:
                        self._has_rung, alarm = True, self._now()
            if alarm is not None and self._on_alarm is not None:
                self._on_alarm(alarm)

    def now(self) -> Acceptance:
        """What the window shows."""
        with self._lock:
            return self._now()

    def prometheus(self, **labels: str) -> str:
        """The window in the text format of Prometheus, one gauge for each field of [`Acceptance`].

        Args:
            labels: put on every gauge, such as `model="..."`.
        """
        pairs = ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items())
        now, lines = self.now(), []
        for one in fields(Acceptance):
            name, value = f"dspark_hf_{one.name}", float(getattr(now, one.name))
            lines += [f"# HELP {name} {_HELP[one.name]}", f"# TYPE {name} gauge"]
            lines.append(f"{name}{{{pairs}}} {_number(value)}" if pairs else f"{name} {_number(value)}")
        return "\n".join(lines) + "\n"

    def _append(self, seen: "_Seen") -> None:
        if len(self._rounds) == self._rounds.maxlen:
            oldest = self._rounds.popleft()
            self._num_rows, self._num_new = self._num_rows - oldest.num_rows, self._num_new - oldest.num_new
        self._rounds.append(seen)
        self._num_rows, self._num_new = self._num_rows + seen.num_rows, self._num_new + seen.num_new

    def _now(self) -> Acceptance:
        seen, num_rows, num_new = self._rounds, self._num_rows, self._num_new
        verified, seconds = sum(s.num_verified for s in seen), sum(s.seconds for s in seen)
        plain: dict[int, list[float]] = {}
        for s in seen:
            if s.num_verified == 0:
                plain.setdefault(s.num_rows, []).append(s.seconds)
        compared = [s for s in seen if s.num_rows in plain]
        # What plain decoding would have needed for the same tokens: a plain round of as many rows for each one a row.
        prices = {rows: median(of_rows) for rows, of_rows in plain.items()}
        as_plain = sum(prices[s.num_rows] * s.num_new / s.num_rows for s in compared)
        return Acceptance(
            num_rounds=len(seen),
            num_new_tokens=num_new,
            acceptance_length=num_new / num_rows if num_rows else nan,
            acceptance_rate=sum(s.num_accepted for s in seen) / verified if verified else nan,
            verified_per_round=verified / num_rows if num_rows else nan,
            rounds_without_draft=sum(s.num_verified == 0 for s in seen) / len(seen) if seen else nan,
            tokens_per_second=num_new / seconds if seconds else nan,
            speed=as_plain / sum(s.seconds for s in compared) if compared else nan,
        )


@dataclass(frozen=True)
class _Seen:
    """What counts of a round."""

    num_rows: int
    num_verified: int
    num_accepted: int
    num_new: int
    seconds: float

    @classmethod
    def of(cls, one: Round) -> "_Seen":
        rows = list(one.per_row())
        return cls(
            num_rows=len(rows),
            num_verified=sum(len(proposed) for proposed, _, _ in rows),
            num_accepted=sum(accepted for _, accepted, _ in rows),
            num_new=sum(num_new for _, _, num_new in rows),
            seconds=one.seconds,
        )


def _number(value: float) -> str:
    return "NaN" if isnan(value) else f"{value:.10g}"


def _escaped(value: str) -> str:
    return str(value).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
