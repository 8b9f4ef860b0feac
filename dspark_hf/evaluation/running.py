"""`dspark-hf eval` from settings to report."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track

from ..benchmark.models import Models, environment
from ..benchmark.tables import WIDTH
from ..comparison import (
    check_sources,
    drafter_name,
    load_drafter,
    load_target,
    public_name,
    public_settings,
    target_name,
)
from ..data.encoding import Encoder
from ..figures import plot_acceptance_by_position, plot_acceptance_lengths, require_matplotlib
from ..modeling_dspark import DSparkDrafter
from ..reports import STANDARD_OUTPUT, console_for, write_json
from .counting import count_drafts, count_speed, count_texts
from .measuring import FULL, CaseResult, Difference, Evaluator
from .prompts import ALL, make_cases, read_datasets
from .settings import EvaluationSettings
from .tables import Report, as_markdown, audit_remark, conditions, difference_line, make_tables


def run_evaluation(settings: EvaluationSettings, console: Console | None = None) -> dict[str, Any]:
    """Runs the evaluation, prints its tables, writes what was asked for, and returns all numbers.

    Returns:
        `settings`, `environment`, `plain` (tokens per second by dataset), `drafters` (by name and dataset: `drafts`,
        `speed`, `audit`), `differences` and `calls`; `"all"` is all datasets together, every prompt once.

    Raises:
        OSError, ValueError: before anything is loaded, where sources or prompts cannot be what they are meant to be.
        ImportError: figures are asked for, and matplotlib is missing.
    """
    console = console or console_for(settings.json, WIDTH)
    say = partial(console.print, style="dim", markup=False, highlight=False)
    if settings.plot is not None:
        require_matplotlib()
    datasets = read_datasets(settings)
    models, drafters = _load(settings, say)
    encoder = Encoder.of(models.target, models.tokenizer, enable_thinking=settings.enable_thinking)  # type: ignore[arg-type]
    cases = make_cases(datasets, encoder, settings.batch_size)
    evaluator = Evaluator(settings, models, drafters)
    evaluator.warm_up(cases[0])
    results = [evaluator.answer(case) for case in track(cases, "Evaluating", console=console, transient=True)]
    report = make_report(settings, results, {name: d.config.num_draft_tokens for name, d in drafters.items()})
    report = {"settings": _public(settings), "environment": environment(models), **report}
    differences = [difference for result in results for difference in result.differences]
    console.print(conditions(settings), style="bold", highlight=False)
    for table in make_tables(report):
        console.print(table.rich())
    for line in [*map(difference_line, differences), audit_remark(report, settings)]:
        say(line)
    for path in _write(settings, report, differences):
        say(f"wrote {path}")
    return report


def make_report(
    settings: EvaluationSettings, results: Sequence[CaseResult], num_draft_tokens: Mapping[str, int]
) -> dict[str, Any]:
    """The numbers of each drafter and dataset, and of all together.

    Args:
        num_draft_tokens: of each drafter.
    """
    groups: dict[str, list[CaseResult]] = {}
    for result in results:
        groups.setdefault(result.case.group, []).append(result)
    groups[ALL] = list(results)
    return {
        "plain": {
            name: count_speed(*_speeds(members, [result.plain for result in members])).tokens_per_second
            for name, members in groups.items()
        },
        "drafters": {
            drafter: {name: _numbers(settings, members, drafter, tokens) for name, members in groups.items()}
            for drafter, tokens in num_draft_tokens.items()
        },
        "differences": [asdict(difference) for result in results for difference in result.differences],
        "calls": [_call(result) for result in results],
    }


def _numbers(
    settings: EvaluationSettings, results: Sequence[CaseResult], drafter: str, num_draft_tokens: int
) -> dict[str, Any]:
    rounds = [one for result in results for one in result.turns[drafter][FULL].rounds]
    verdicts = [verdict for result in results for verdict in result.verdicts.get(drafter, ())]
    speeds = {
        schedule: count_speed(*_speeds(results, [result.turns[drafter][schedule] for result in results]))
        for schedule in settings.schedules
    }
    return {
        "num_prompts": sum(len(result.case.indices) for result in results),
        "drafts": asdict(count_drafts(rounds, num_draft_tokens)),
        "speed": {schedule: asdict(speed) for schedule, speed in speeds.items()},
        "audit": asdict(count_texts(verdicts)) if verdicts else None,
    }


def _speeds(results: Sequence[CaseResult], turns: Sequence[Any]) -> tuple[list[list[str]], list[float], list[float]]:
    """The arguments of `count_speed`."""
    names, plain = [result.case.names for result in results], [result.plain.tokens_per_second for result in results]
    return names, [turn.tokens_per_second for turn in turns], plain


def _call(result: CaseResult) -> dict[str, Any]:
    """What each turn of a case gave, without the texts."""

    def numbers(turn: Any) -> dict[str, Any]:
        return {"num_new_tokens": turn.num_new_tokens, "seconds": turn.seconds}

    turns = {
        drafter: {name: numbers(turn) for name, turn in of_drafter.items()}
        for drafter, of_drafter in result.turns.items()
    }
    for drafter, of_drafter in result.turns.items():
        rows = [row for one in of_drafter[FULL].rounds for row in one.per_row()]
        verified, accepted = sum(len(proposed) for proposed, _, _ in rows), sum(count for _, count, _ in rows)
        turns[drafter][FULL] |= {"num_rounds": len(rows), "verified": verified, "accepted": accepted}
    case = result.case
    return {"dataset": case.group, "indices": case.indices, "plain": numbers(result.plain), "drafters": turns}


def _load(settings: EvaluationSettings, say: Any) -> tuple[Models, dict[str, DSparkDrafter]]:
    pairs = settings.pairs
    for pair in pairs:
        check_sources(pair)
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    target, tokenizer = load_target(settings, say)
    names = _names([pair.drafter or drafter_name(pair) for pair in pairs])
    drafters = {name: load_drafter(pair) for name, pair in zip(names, pairs, strict=True)}
    models = Models(
        target,
        next(iter(drafters.values())),
        tokenizer,
        assistant=None,
        target_name=target_name(target, settings),
        drafter_name=", ".join(names),
    )
    return models, drafters


def _names(sources: list[str]) -> list[str]:
    """What results call the drafters: of folders as many of their last parts as tell them apart."""
    depth = 1
    while True:
        short = [public_name(source, depth) for source in sources]
        if len(set(short)) == len(short) or depth > max(len(Path(source).resolve().parts) for source in sources):
            return short
        depth += 1


def _public(settings: EvaluationSettings) -> dict[str, Any]:
    """The settings without folders of this machine: results are published."""
    drafters = {"drafter": settings.drafter and _names(settings.drafter)}
    return public_settings(settings) | drafters


def _write(settings: EvaluationSettings, report: Report, differences: list[Difference]) -> list[Path]:
    """Writes the files that were asked for, and names them."""
    written = []
    if settings.json is not None:
        write_json(report, settings.json)
        written += [Path(settings.json)] if settings.json != STANDARD_OUTPUT else []
    if settings.markdown is not None:
        written.append(Path(settings.markdown))
        written[-1].write_text(as_markdown(report, settings, differences), encoding="utf-8")
    if settings.plot is not None:
        folder = Path(settings.plot)
        folder.mkdir(exist_ok=True)
        by_position, by_dataset = folder / "acceptance_by_position.png", folder / "acceptance_length.png"
        drafters = report["drafters"]
        rates = {n: datasets[ALL]["drafts"]["acceptance_rate_per_position"] for n, datasets in drafters.items()}
        lengths = {
            name: {dataset: numbers["drafts"]["acceptance_length"] for dataset, numbers in datasets.items()}
            for name, datasets in drafters.items()
        }
        plot_acceptance_by_position(rates, by_position)
        plot_acceptance_lengths(lengths, by_dataset)
        written += [by_position, by_dataset]
    return written
