"""`dspark-hf bench` from settings to report."""

from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.progress import track

from ..comparison import public_settings
from ..reports import console_for, write_json
from .measuring import CaseMeasurer
from .models import environment, load_models
from .prompts import make_cases
from .settings import BenchmarkSettings
from .summary import compare_rivals, growth_against_context, summarize
from .tables import WIDTH, differences, make_tables, remarks


def run_benchmark(settings: BenchmarkSettings, console: Console | None = None) -> dict[str, Any]:
    """Runs the benchmark, prints its tables, and returns (and, where asked, writes) all numbers."""
    console = console or console_for(settings.json, WIDTH)
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    models = load_models(settings, report=partial(console.print, style="dim", markup=False, highlight=False))
    cases = make_cases(settings, models)
    measurer = CaseMeasurer(settings, models)
    measurer.warm_up(cases[0])
    results = [measurer.measure(case) for case in track(cases, "Measuring", console=console, transient=True)]
    by_context = models.tokenizer is None or settings.context_length is not None
    summary = summarize(results, by_context)
    comparisons = compare_rivals(results)
    for table in make_tables(summary, settings):
        console.print(table)
    for line in [*remarks(summary, comparisons), *differences(results)]:
        console.print(line, style="dim", markup=False, highlight=False)
    report = {
        "simulated_acceptance": settings.simulate_acceptance,
        "settings": public_settings(settings),
        "environment": environment(models),
        "summary": summary,
        "comparisons": comparisons,
        "growth_against_context": growth_against_context(summary) if by_context else None,
        "prompts": [asdict(result) for result in results],
    }
    write_json(report, settings.json)
    return report
