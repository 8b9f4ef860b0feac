"""The tables of a benchmark, in 100 columns."""

from collections.abc import Iterator, Sequence
from typing import Any

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from ..comparison import sampling_words
from .measuring import CaseResult
from .settings import BenchmarkSettings
from .summary import growth_against_context

WIDTH = 100

_SOURCES = ("drafter", "lookup", "none")
_PARTS = ("round", "drafter", "markov", "target", "overhead")

Summary = dict[str, dict[str, dict[str, Any]]]


def make_tables(summary: Summary, settings: BenchmarkSettings) -> list[Group]:
    """Speed, the parts of a round (where our loop took part), and costs; each with a title and a note."""
    tables = [_speed_table(summary, settings)]
    if any(numbers["round_parts"] for methods in summary.values() for numbers in methods.values()):
        tables.append(_round_table(summary, settings))
    return [*tables, _cost_table(summary, settings)]


def _speed_table(summary: Summary, settings: BenchmarkSettings) -> Group:
    table = _table(["tok/s", "to\nplain", "middle\nhalf", "worst", "τ", "same\ntext", "beyond\nrounding"])
    for _, heads, numbers in _lines(summary, table):
        quartiles, is_plain = numbers["ratio_spread"], heads[1] == "plain"
        table.add_row(
            *heads,
            f"{numbers['tokens_per_second']:.1f}",
            f"× {numbers['ratio_to_plain']:.2f}",
            "" if is_plain else f"{quartiles['q1']:.2f}–{quartiles['q3']:.2f}",
            "" if is_plain else f"{numbers['worst']['ratio_to_plain']:.2f}",
            _number(numbers["acceptance_length"], ".2f"),
            "" if numbers["num_identical"] is None else f"{numbers['num_identical']} of {numbers['num_prompts']}",
            _number(numbers["num_beyond_rounding"], "d"),
        )
    note = "geometric means over prompts, their middle half, the worst one. τ: tokens per pass of the target"
    return _titled("Speed", settings, table, note)


def _round_table(summary: Summary, settings: BenchmarkSettings) -> Group:
    table = _table(["round", "drafter", "Markov", "target", "rest", "rest\n%", "drafter/lookup\n/none, %"])
    traced = {
        group: {method: numbers for method, numbers in methods.items() if numbers["round_parts"] is not None}
        for group, methods in summary.items()
    }
    for _, heads, numbers in _lines(traced, table):
        parts = numbers["round_parts"]
        counts = [parts["sources"].get(name, 0) for name in _SOURCES]
        table.add_row(
            *heads,
            *(f"{parts['median_ms'][name]:.2f}" for name in _PARTS),
            f"{100 * parts['overhead_share']:.1f}",
            "/".join(f"{100 * count / sum(counts):.0f}" for count in counts),
        )
    note = "medians. rest: all but the forward passes and the Markov loop; its share is that of the sums"
    return _titled("A round, in ms", settings, table, note)


def _cost_table(summary: Summary, settings: BenchmarkSettings) -> Group:
    by_context = len(settings.context_length or ()) > 1
    columns = ["first token\nms", "pass\nms", "token\nms", "memory\nMB"]
    table = _table(columns + ["growth\nof a pass", "against\nplain"] * by_context)
    growth = growth_against_context(summary) if by_context else {}
    for group, heads, numbers in _lines(summary, table):
        memory = numbers["memory_growth"]
        cells = [_number(numbers[name], ",.2f") for name in ("first_token_ms", "pass_ms", "token_ms")]
        cells.append(_number(None if memory is None else memory / 1e6, ",.0f"))
        if by_context:
            factors = growth[group].get(heads[1])
            names = ("factor", "relative_to_plain")
            cells += ["", ""] if factors is None else [f"× {factors[name]:.2f}" for name in names]
        table.add_row(*heads, *cells)
    note = "medians. pass: the target's, and all around it but the prefill. memory: growth in a call"
    return _titled("Costs", settings, table, note)


def _titled(what: str, settings: BenchmarkSettings, table: Table, note: str) -> Group:
    """A table with the conditions under which its numbers hold."""
    how = f"sampling, {sampling_words(settings)}" if settings.do_sample else "greedy"
    parts = [settings.dtype, how, f"batch {settings.batch_size}", f"{settings.max_new_tokens} new tokens"]
    if settings.simulate_acceptance is not None:
        parts.append(f"SIMULATED acceptance {settings.simulate_acceptance:g}")
    return Group("", Text(f"{what}: {', '.join(parts)}", style="bold"), table, Text(note, style="dim"))


def _table(columns: Sequence[str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for name in ("prompts", "method"):
        table.add_column(name, no_wrap=True)
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _lines(summary: Summary, table: Table) -> Iterator[tuple[str, tuple[str, str], dict[str, Any]]]:
    """For each line the group, the first two cells (the group at its first line only), and the numbers."""
    for group, methods in summary.items():
        table.add_section()
        shown = group
        for method, numbers in methods.items():
            yield group, (shown, method), numbers
            shown = ""


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def remarks(summary: Summary, comparisons: Sequence[dict[str, Any]]) -> list[str]:
    """The worst prompt of each method, and how our loop does against its rivals."""
    overall = summary.get("all") or {}
    lines = [
        f"worst prompt of {method}: {_named(numbers['worst']['names'])}, × {numbers['worst']['ratio_to_plain']:.2f}"
        for method, numbers in overall.items()
        if method != "plain"
    ]
    for comparison in comparisons:
        rivals = " and ".join(comparison["rivals"])
        rivals = rivals if len(comparison["rivals"]) == 1 else f"the better of {rivals}"
        worst = comparison["worst"]
        lines.append(
            f"{comparison['method']} against {rivals}: × {comparison['ratio']:.2f}, "
            f"worst × {worst['ratio']:.2f} ({_named(worst['names'])})"
        )
    return lines


def differences(results: Sequence[CaseResult]) -> list[str]:
    """A line for each text that is not plain generation's: where they part, and the margin there."""
    return [
        f"{name}, {method}: {verdict}"
        for result in results
        for method, measurement in result.measurements.items()
        if measurement.verdicts
        for name, verdict, same in zip(result.names, measurement.verdicts, measurement.identical, strict=True)
        if not same
    ]


def _named(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and its batch"
