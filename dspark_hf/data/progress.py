"""How far a long run is: a bar on a terminal, a line now and then elsewhere."""

import time
from types import TracebackType

from rich import progress
from rich.console import Console

_SECONDS_BETWEEN_LINES = 60.0


class Progress:
    """Counts rows and tokens of one part of a run; use it as a context.

    Args:
        description: what is counted, a plural.
        total: rows to come.
    """

    def __init__(self, console: Console, description: str, total: int):
        self.console, self.description, self.total = console, description, total
        self.num_rows = self.num_tokens = 0
        self._start = self._last_line = time.monotonic()
        columns = (
            "{task.description}",
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            "{task.fields[speed]}",
            progress.TimeElapsedColumn(),
            progress.TimeRemainingColumn(),
        )
        self._bar = progress.Progress(*columns, console=console, disable=not console.is_terminal)
        self._task = self._bar.add_task(description, total=total, speed="")

    def __enter__(self) -> "Progress":
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bar.stop()
        if self.num_rows:
            self._print_line()

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / max(1e-9, time.monotonic() - self._start)

    def advance(self, num_rows: int, num_tokens: int) -> None:
        """Counts rows that are finished and tokens that were written, for those rows or for ones that were refused."""
        self.num_rows += num_rows
        self.num_tokens += num_tokens
        self._bar.update(self._task, advance=num_rows, speed=f"{self.tokens_per_second:.0f} tokens/s")
        if not self.console.is_terminal and time.monotonic() - self._last_line > _SECONDS_BETWEEN_LINES:
            self._print_line()

    def _print_line(self) -> None:
        self._last_line = time.monotonic()
        self.console.print(
            f"{self.description}: {self.num_rows:,} of {self.total:,}, {self.tokens_per_second:.0f} tokens/s",
            style="dim",
            markup=False,
            highlight=False,
        )
