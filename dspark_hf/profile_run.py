"""The command that measures prices: opens the pair, decodes with drafts of every length, says what pays."""

from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

from rich.table import Table

from .comparison import PairSettings, check_folders, load_pair
from .cost_model import CostModel, profile_costs
from .figures import plot_costs, require_matplotlib
from .reports import console_for, json_field, write_json


@dataclass
class ProfileSettings(PairSettings):
    """Measure what passes and drafts cost here, keep it, and say which drafts pay."""

    batch_size: list[int] = field(
        default_factory=lambda: [1], metadata={"help": "rows of a pass, one or more numbers"}
    )
    context_length: list[int] = field(
        default_factory=lambda: [256], metadata={"help": "tokens before the draft, one or more numbers"}
    )
    repeats: int = field(default=7, metadata={"help": "measurements of each length; the median counts"})
    acceptance: list[float] = field(
        default_factory=lambda: [0.3, 0.5, 0.7, 0.9],
        metadata={"help": "chances that a draft token is accepted, to say what pays at each"},
    )
    output: str | None = field(
        default=None, metadata={"help": "file for the prices (JSON); default: the user's cache"}
    )
    plot: str | None = field(default=None, metadata={"help": "file for the cost curve (PNG); needs matplotlib"})
    json: str | None = json_field()

    def __post_init__(self) -> None:
        super().__post_init__()
        check_folders(self, "plot", "json")
        if self.output is not None and Path(self.output).is_dir():
            raise ValueError(f"--output is {self.output}, which is a folder: name a file")
        numbers = {"batch_size": self.batch_size, "context_length": self.context_length, "repeats": [self.repeats]}
        for name, values in numbers.items():
            if not values or min(values) < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be 1 or more")
        if not all(0 <= chance <= 1 for chance in self.acceptance):
            raise ValueError("--acceptance takes chances from 0 to 1")


def run_profile(settings: ProfileSettings) -> CostModel:
    """Runs `dspark-hf profile`."""
    console = console_for(settings.json)
    say = partial(console.print, markup=False, highlight=False, soft_wrap=True)
    if settings.plot is not None:
        require_matplotlib()
    pair = load_pair(settings, say)
    model = profile_costs(
        pair.target,
        pair.drafter,
        batch_sizes=settings.batch_size,
        context_lengths=settings.context_length,
        repeats=settings.repeats,
    )
    for context_length in model.contexts:
        for num_rows in sorted(set(settings.batch_size)):
            console.print(_table(model, num_rows, context_length, settings))
            for acceptance in settings.acceptance:
                say(advice(model, num_rows, acceptance, context_length))
    path = model.save(settings.output)
    say(f"wrote {path}")
    if settings.plot is not None:
        plot_costs({n: (prices.passes, prices.drafts) for n, prices in model.contexts.items()}, settings.plot)
        say(f"wrote {settings.plot}")
    write_json({"file": str(path), **asdict(model)}, settings.json)
    return model


def advice(model: CostModel, num_rows: int, acceptance: float, context_length: int | None = None) -> str:
    """The best length of all drafts at an acceptance, and what it brings."""
    speeds = model.speed_ups(num_rows, acceptance, context_length)
    best = max(range(len(speeds)), key=speeds.__getitem__)
    if best == 0:
        return f"acceptance {acceptance:g}: no draft pays, decode plainly"
    return f"acceptance {acceptance:g}: drafts of {best}, expected speed x {speeds[best]:.2f} of plain decoding"


def _table(model: CostModel, num_rows: int, context_length: int, settings: ProfileSettings) -> Table:
    rows = "1 row" if num_rows == 1 else f"{num_rows} rows"
    table = Table(title=f"{rows}, {context_length} tokens of context: milliseconds, and speed by acceptance")
    for name in ("draft tokens", "pass", "draft", *(f"x at {chance:g}" for chance in settings.acceptance)):
        table.add_column(name, justify="right")
    prices = model.prices(context_length)
    speeds = [model.speed_ups(num_rows, chance, context_length) for chance in settings.acceptance]
    for n, size in enumerate(sorted(prices.passes[num_rows])):
        draft = f"{1e3 * prices.drafts[num_rows][n]:.1f}" if n else ""
        pass_ms = f"{1e3 * prices.passes[num_rows][size]:.1f}"
        table.add_row(str(n), pass_ms, draft, *(f"{of_chance[n]:.2f}" for of_chance in speeds))
    return table
