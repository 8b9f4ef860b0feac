"""`dspark-hf sweep`: every schedule in every situation, batch sizes and temperatures, in one table.

Less is noted of each call than `dspark-hf bench` does: speed over all prompts of a cell, what was verified, and what
of it stood.
"""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from ..comparison import PairSettings, check_folders, public_settings
from ..figures import plot_thresholds, require_matplotlib
from ..reports import console_for, json_field, write_json
from .measuring import CaseMeasurer
from .methods import Call, find_method
from .models import Models, environment, load_models
from .prompts import Case, make_mixed_cases
from .settings import BenchmarkSettings
from .tables import WIDTH

_CONSTANT, _THRESHOLD = "dspark-constant:", "dspark-confidence:"


@dataclass
class SweepSettings(PairSettings):
    """Measure all schedules against plain generation, for several batch sizes and temperatures, in one table."""

    methods: list[str] | None = field(
        default=None,
        metadata={
            "help": "as for bench; default: every constant length, confidence thresholds, and the other schedules"
        },
    )
    batch_size: list[int] = field(default_factory=lambda: [1, 4, 16], metadata={"help": "one or more batch sizes"})
    temperature: list[float] = field(
        default_factory=lambda: [0.0, 1.0], metadata={"help": "one or more temperatures; 0: greedy"}
    )
    thresholds: list[float] = field(
        default_factory=lambda: [0.2, 0.4, 0.6, 0.8], metadata={"help": "confidence thresholds of the default methods"}
    )
    num_prompts: int = field(default=24, metadata={"help": "how many prompts, from the start of the file"})
    max_new_tokens: int = field(default=64, metadata={"help": "maximum number of new tokens per answer"})
    prompts: str | None = field(
        default=None, metadata={"help": "JSON lines with prompt, or turns; default: the built-in ones"}
    )
    repeats: int = field(
        default=1, metadata={"help": "go over the prompts this many times; sampled texts differ each time"}
    )
    seed: int = field(default=0, metadata={"help": "of sampling"})
    json: str | None = json_field()
    plot: str | None = field(
        default=None, metadata={"help": "file for a figure of the thresholds (PNG); needs matplotlib"}
    )
    threads: int | None = field(default=None, metadata={"help": "CPU threads of torch; default: its own choice"})

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.batch_size or not self.temperature or min(self.temperature) < 0:
            raise ValueError("--batch-size and --temperature need a value each, and no temperature is below 0")
        if not all(0.0 <= threshold <= 1.0 for threshold in self.thresholds):
            raise ValueError(f"--thresholds is {self.thresholds}, they must lie between 0 and 1")
        self.cells()  # what is wrong with the others is said before anything is loaded
        check_folders(self, "json", "plot")
        if self.plot is not None and not any(name.startswith(_THRESHOLD) for name in self.cells()[0].method_names):
            raise ValueError(f"--plot draws thresholds, but none is measured: --methods needs a {_THRESHOLD}0.N")

    def cells(self, num_draft_tokens: int = 1, has_confidences: bool = True) -> list[BenchmarkSettings]:
        """The settings of each cell.

        Args:
            num_draft_tokens, has_confidences: of the drafter: the default methods are those that it can follow.
        """
        read_confidences = [
            *(f"{_THRESHOLD}{float(threshold)}" for threshold in self.thresholds),
            "dspark-hardware",
            "dspark-hardware-decoupled",
        ]
        methods = self.methods or [
            *(f"{_CONSTANT}{n}" for n in range(1, 1 + num_draft_tokens)),
            *(read_confidences if has_confidences else []),
            *(f"dspark-{name}" for name in ("heuristic", "entropy", "acceptance")),
            "dspark",
        ]
        shared = ["target", "gguf_file", "drafter", "dtype", "device"]
        shared += ["num_prompts", "max_new_tokens", "prompts", "repeats", "seed", "threads"]
        return [
            BenchmarkSettings(
                methods=methods,
                batch_size=batch_size,
                do_sample=temperature > 0,
                temperature=temperature or 1.0,
                **{name: getattr(self, name) for name in shared},
            )
            for batch_size in self.batch_size
            for temperature in self.temperature
        ]


@dataclass
class MethodTotals:
    """What one method did in one cell.

    Attributes:
        num_new_tokens, seconds: of all calls.
        num_rounds: rounds of all rows.
        verified, accepted: draft tokens.
    """

    num_new_tokens: int = 0
    seconds: float = 0.0
    num_rounds: int = 0
    verified: int = 0
    accepted: int = 0

    @property
    def tokens_per_second(self) -> float:
        return self.num_new_tokens / self.seconds

    @property
    def acceptance_length(self) -> float | None:
        return 1 + self.accepted / self.num_rounds if self.num_rounds else None

    @property
    def acceptance_rate(self) -> float | None:
        return self.accepted / self.verified if self.verified else None


@dataclass(frozen=True)
class Cell:
    """One batch size at one temperature (0: greedy), and the totals of each method."""

    batch_size: int
    temperature: float
    methods: dict[str, MethodTotals]

    def ratio(self, method: str) -> float:
        return self.methods[method].tokens_per_second / self.methods["plain"].tokens_per_second

    @property
    def best_constant(self) -> str | None:
        constants = [name for name in self.methods if name.startswith(_CONSTANT)]
        return max(constants, key=self.ratio, default=None)


def run_sweep(settings: SweepSettings, console: Console | None = None) -> list[Cell]:
    """Runs `dspark-hf sweep`: prints the table, and writes numbers and figure where asked."""
    console = console or console_for(settings.json, WIDTH)
    if settings.plot is not None:
        require_matplotlib()
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    report = partial(console.print, style="dim", markup=False, highlight=False)
    models = load_models(settings.cells()[0], report=report)
    measured = []
    with Progress(console=console, transient=True) as progress:
        config = models.drafter.config
        for each in settings.cells(config.num_draft_tokens, config.enable_confidence_head):
            measured.append(_measure(each, models, progress))
    console.print(make_table(measured, settings))
    for cell in measured:
        if cell.best_constant is not None and "dspark" in cell.methods:
            against = cell.methods["dspark"].tokens_per_second / cell.methods[cell.best_constant].tokens_per_second
            report(f"{_name(cell)}: dspark against the best constant ({cell.best_constant}): x {against:.2f}")
    numbers: dict[str, Any] = {
        "settings": public_settings(settings) | {"plot": None},
        "environment": environment(models),
        "cells": [_numbers(cell) for cell in measured],
    }
    write_json(numbers, settings.json)
    if settings.plot is not None:
        plot_thresholds(_threshold_curves(measured), settings.plot)
        report(f"wrote {settings.plot}")
    return measured


def _measure(settings: BenchmarkSettings, models: Models, progress: Progress) -> Cell:
    cases, names = make_mixed_cases(settings, models), settings.method_names
    measurer = CaseMeasurer(settings, models)
    measurer.warm_up(cases[0])
    totals = {name: MethodTotals() for name in names}
    cell = Cell(settings.batch_size, settings.temperature if settings.do_sample else 0.0, totals)
    task = progress.add_task(_name(cell), total=settings.repeats * len(cases) * len(names))
    for number, case in enumerate(settings.repeats * cases):
        shift = number * 5 % len(names)
        for name in [*names[shift:], *names[:shift]]:
            _add_call(totals[name], name, case, measurer, models, seed=settings.seed + number)
            progress.advance(task)
    progress.remove_task(task)
    return cell


def _add_call(totals: MethodTotals, name: str, case: Case, measurer: CaseMeasurer, models: Models, seed: int) -> None:
    inputs = case.inputs(models.pad_token_id, models.target.device)
    with models.drafter.trace() as trace:
        started = time.perf_counter()
        texts = measurer.generate(find_method(name), inputs, Call(models.drafter), seed)
        totals.seconds += time.perf_counter() - started
    totals.num_new_tokens += sum(map(len, texts))
    for proposed, accepted, _ in (row for one in trace.rounds for row in one.per_row()):
        totals.num_rounds += 1
        totals.verified += len(proposed)
        totals.accepted += accepted


def make_table(cells: Sequence[Cell], settings: SweepSettings) -> Table:
    """A line for each method, for each cell tokens per second and the ratio to plain generation."""
    title = f"tokens/s, and to plain: {settings.dtype}, {settings.max_new_tokens} new tokens"
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    table.add_column("method", no_wrap=True)
    for cell in cells:
        table.add_column(_name(cell).replace(", ", "\n"), justify="right", no_wrap=True)
    for method in cells[0].methods:
        numbers = [f"{cell.methods[method].tokens_per_second:.1f} ×{cell.ratio(method):.2f}" for cell in cells]
        table.add_row(method, *numbers)
    return table


def _name(cell: Cell) -> str:
    return f"batch {cell.batch_size}, " + (f"T = {cell.temperature:g}" if cell.temperature else "greedy")


def _numbers(cell: Cell) -> dict[str, Any]:
    derived = ("tokens_per_second", "acceptance_length", "acceptance_rate")
    return {
        "batch_size": cell.batch_size,
        "temperature": cell.temperature,
        "best_constant": cell.best_constant,
        "methods": {
            name: asdict(totals)
            | {key: getattr(totals, key) for key in derived}
            | {"ratio_to_plain": cell.ratio(name)}
            for name, totals in cell.methods.items()
        },
    }


def _threshold_curves(cells: Sequence[Cell]) -> dict[str, list[tuple[float, float, float]]]:
    """For each cell, threshold, acceptance rate and tokens per round, thresholds ascending; 0: every full draft."""
    curves = {}
    for cell in cells:
        points = [
            (float(name.removeprefix(_THRESHOLD)), totals)
            for name, totals in cell.methods.items()
            if name.startswith(_THRESHOLD)
        ]
        constants = [name for name in cell.methods if name.startswith(_CONSTANT)]
        if constants and 0.0 not in [threshold for threshold, _ in points]:
            longest = max(constants, key=lambda name: int(name.removeprefix(_CONSTANT)))
            points.append((0.0, cell.methods[longest]))
        curves[_name(cell)] = [
            (threshold, totals.acceptance_rate, totals.acceptance_length or 1.0)
            for threshold, totals in sorted(points, key=lambda point: point[0])
            if totals.acceptance_rate is not None
        ]
    return curves
