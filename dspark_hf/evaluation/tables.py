"""The tables of an evaluation: what stands in them, and two ways to write them, for a terminal and in Markdown."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from rich import box
from rich.console import Group
from rich.table import Table as RichTable
from rich.text import Text

from ..comparison import sampling_words
from .measuring import Difference
from .prompts import ALL
from .settings import EvaluationSettings

Report = Mapping[str, Any]

_NUM_TEXT_COLUMNS = 2  # dataset and drafter


@dataclass(frozen=True)
class Table:
    """Cells as text, with a title and a line that explains."""

    title: str
    columns: list[str]
    note: str
    rows: list[list[str]] = field(default_factory=list)

    def rich(self) -> Group:
        """For a terminal; a dataset stands at the first of its lines only."""
        table = RichTable(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
        for number, name in enumerate(self.columns):
            is_text = number < _NUM_TEXT_COLUMNS or name == "schedule"
            # Names may be long: they break into lines before a number is cut.
            table.add_column(name, justify="left" if is_text else "right", no_wrap=not is_text, overflow="fold")
        before = ""
        for dataset, *cells in self.rows:
            if dataset != before:
                table.add_section()
            table.add_row("" if dataset == before else dataset, *cells)
            before = dataset
        return Group("", Text(self.title, style="bold"), table, Text(self.note, style="dim"))

    def markdown(self) -> str:
        """As Markdown, the dataset in every row."""
        rules = ["---" if name in ("dataset", "drafter", "schedule") else "---:" for name in self.columns]
        lines = [_row(self.columns), _row(rules), *(_row(row) for row in self.rows)]
        return f"### {self.title}\n\n" + "\n".join(lines) + f"\n\n{self.note}\n"


def make_tables(report: Report) -> list[Table]:
    """Acceptance, speed, confidences (where a drafter has any), and equality of texts (where any were compared)."""
    tables = [_acceptance(report), _speed(report)]
    if any(numbers["drafts"]["confidence"] for _, _, numbers in _lines(report)):
        tables.append(_confidence(report))
    if any(numbers["audit"] for _, _, numbers in _lines(report)):
        tables.append(_audit(report))
    return tables


def conditions(settings: EvaluationSettings) -> str:
    """Under which the numbers hold."""
    how = f"sampled, {sampling_words(settings)}" if settings.temperature else "greedy"
    parts = [settings.dtype, how, f"batch {settings.batch_size}", f"at most {settings.max_new_tokens} new tokens"]
    if settings.held_out is not None:
        parts.append(f"held-out prompts (index divisible by {settings.held_out})")
    return ", ".join(parts)


def difference_line(difference: Difference) -> str:
    """A text that is not plain generation's, in a line."""
    where = f"{difference.dataset} {difference.index}, {difference.drafter}, {difference.schedule}"
    found = f"differs from token {difference.position + 1} on"
    if difference.margin is None:
        return f"{where}: {found}, where one text ends: BEYOND ROUNDING, please report"
    verdict = "within rounding" if difference.within_rounding else "BEYOND ROUNDING, please report"
    return f"{where}: {found}, margin {difference.margin:.3g} there: {verdict} (up to {difference.rounding:.2g})"


def audit_remark(report: Report, settings: EvaluationSettings) -> str:
    """What became of the comparison of texts."""
    if settings.temperature:
        return "Sampled texts are not compared: drafted and plain ones share a distribution, not the draws."
    numbers = [datasets[ALL]["audit"] for datasets in report["drafters"].values()]
    total, identical, beyond = (
        sum(each[name] for each in numbers) for name in ("num_texts", "num_identical", "num_beyond_rounding")
    )
    return f"Lossless audit: {identical} of {total} texts identical, {beyond} beyond rounding."


def as_markdown(report: Report, settings: EvaluationSettings, differences: list[Difference]) -> str:
    """All of it, to be put into a model card."""
    environment = report["environment"]
    versions = ", ".join(f"{name} {environment[name]}" for name in ("dspark_hf", "transformers", "torch"))
    place = f"{environment['device']}, {environment['machine']}, threads: {environment['threads']}"
    parts = [
        f"## Evaluation for {environment['target']}\n",
        f"Measured in {conditions(settings)}; {versions}; {place}.\n",
        *(table.markdown() for table in make_tables(report)),
        f"{audit_remark(report, settings)}\n",
    ]
    if differences:
        parts.append("".join(f"- {difference_line(difference)}\n" for difference in differences))
    return "\n".join(parts)


def _acceptance(report: Report) -> Table:
    lines = [*_lines(report)]
    depth = max(len(numbers["drafts"]["acceptance_rate_per_position"]) for _, _, numbers in lines)
    table = Table(
        "Acceptance of full drafts",
        ["dataset", "drafter", "prompts", "rounds", "τ", "verify rate %", *map(str, range(1, depth + 1))],
        "τ: tokens per round, bonus included. verify rate: accepted of verified draft tokens. "
        "1, 2, …: accepted at that position, in % of the drafts that came so far",
    )
    for dataset, drafter, numbers in lines:
        drafts = numbers["drafts"]
        rates = [_percent(rate, ".0f") for rate in drafts["acceptance_rate_per_position"]]
        table.rows.append(
            [
                dataset,
                drafter,
                str(numbers["num_prompts"]),
                str(drafts["num_rounds"]),
                _number(drafts["acceptance_length"], ".2f"),
                _percent(drafts["verify_rate"]),
                *rates,
                *[""] * (depth - len(rates)),
            ]
        )
    return table


def _speed(report: Report) -> Table:
    table = Table(
        "Speed",
        ["dataset", "drafter", "schedule", "tok/s", "to plain", "middle half", "worst prompt", "its ratio"],
        "geometric means over calls, prefill included, against plain generation in the same turn",
    )
    for dataset, plain in report["plain"].items():
        table.rows.append([dataset, "none", "plain", f"{plain:.1f}", "× 1.00", "", "", ""])
        for drafter, datasets in report["drafters"].items():
            for schedule, speed in datasets[dataset]["speed"].items():
                spread, worst = speed["ratio_spread"], speed["worst"]
                table.rows.append(
                    [
                        dataset,
                        drafter,
                        schedule,
                        f"{speed['tokens_per_second']:.1f}",
                        f"× {speed['ratio_to_plain']:.2f}",
                        f"{spread['q1']:.2f}–{spread['q3']:.2f}",
                        worst["names"][0] + (" …" if len(worst["names"]) > 1 else ""),
                        f"× {worst['ratio_to_plain']:.2f}",
                    ]
                )
    return table


def _confidence(report: Report) -> Table:
    found = [(*heads, numbers["drafts"]["confidence"]) for *heads, numbers in _lines(report)]
    depth = max(len(numbers["positions"]) for _, _, numbers in found if numbers)
    table = Table(
        "Confidence",
        ["dataset", "drafter", "drafts", "Brier", "AUC", "ECE %", *map(str, range(1, depth + 1))],
        "of the survival of full drafts up to a position: mean squared error, area under the ROC curve, expected "
        "calibration error; means over the positions, and the last one at each, in %",
    )
    for dataset, drafter, numbers in found:
        if numbers is None:
            table.rows.append([dataset, drafter, *[""] * (4 + depth)])
            continue
        errors = [_percent(position["ece"]) for position in numbers["positions"]]
        heads = [dataset, drafter, str(numbers["num_drafts"]), f"{numbers['brier']:.3f}"]
        heads += [_number(numbers["auc"], ".3f"), _percent(numbers["ece"])]
        table.rows.append([*heads, *errors, *[""] * (depth - len(errors))])
    return table


def _audit(report: Report) -> Table:
    table = Table(
        "Greedy texts against plain generation",
        ["dataset", "drafter", "texts", "identical", "within rounding", "beyond"],
        "texts of full drafts and of every schedule",
    )
    for dataset, drafter, numbers in _lines(report):
        counts = ("num_texts", "num_identical", "num_within_rounding", "num_beyond_rounding")
        table.rows.append([dataset, drafter, *(str(numbers["audit"][name]) for name in counts)])
    return table


def _lines(report: Report) -> Iterator[tuple[str, str, Any]]:
    """Dataset, drafter and numbers: the drafters of a dataset side by side."""
    for dataset in report["plain"]:
        for drafter, datasets in report["drafters"].items():
            yield dataset, drafter, datasets[dataset]


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _percent(value: float | None, form: str = ".1f") -> str:
    return "" if value is None else format(100 * value, form)


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
