"""`dspark-hf bench`: tokens per second of plain generation, prompt lookup and the drafter, on held-out prompts.

The three methods take turns on each prompt, in one process, in an order that rotates from prompt to prompt: what slows
the machine for a while slows all three.

The built-in prompts (`prompts.jsonl`, one JSON object a line: `dataset`, `index`, `prompt`) are held out from the
training of the built-in drafter:

- `gsm8k`: GSM8K, test part, every 20th problem (Cobbe et al. 2021, MIT licence), with the usual request to reason
  step by step;
- `humaneval`: HumanEval, every 20th problem (Chen et al. 2021, MIT licence), with a request to solve it;
- `mt-bench`: MT-Bench, first turns, one of each of its eight categories (Zheng et al. 2023, Apache 2.0 licence).
"""

import json
import os
import platform
import statistics
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.progress import track
from rich.table import Table

from . import __version__
from .comparison import (
    Answer,
    Pair,
    PairSettings,
    drafter_name,
    encode_prompt,
    geometric_mean,
    judge,
    load_pair,
    target_name,
    timed_answer,
    warm_up,
)

PROMPTS_FILE = Path(__file__).parent / "prompts.jsonl"
METHODS: dict[str, dict[str, Any]] = {
    "plain": {},
    "prompt lookup": {"prompt_lookup_num_tokens": 10},
    "drafter": {"with_drafter": True},
}


@dataclass
class BenchmarkSettings(PairSettings):
    """Measure plain generation, prompt lookup and the drafter on held-out prompts."""

    max_new_tokens: int = field(default=128, metadata={"help": "maximum number of new tokens per answer"})
    num_prompts: int = field(default=24, metadata={"help": "how many prompts, from the start of the file"})
    prompts: str | None = field(
        default=None, metadata={"help": "JSON lines with dataset, index, prompt; default: the built-in ones"}
    )
    repeats: int = field(default=1, metadata={"help": "measure each prompt this many times and take the median"})
    json: str | None = field(default=None, metadata={"help": "also write all numbers to this file"})
    threads: int | None = field(default=None, metadata={"help": "CPU threads of torch; default: its own choice"})

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("max_new_tokens", "num_prompts", "repeats", "threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"--{name.replace('_', '-')} is {value}, it must be 1 or more")
        if self.json is not None and not Path(self.json).absolute().parent.is_dir():
            raise ValueError(f"--json is {self.json}, whose folder does not exist")
        if self.prompts is not None and not Path(self.prompts).is_file():
            raise ValueError(f"--prompts is {self.prompts}, which is no file")


@dataclass(frozen=True)
class Prompt:
    """One line of a prompts file."""

    dataset: str
    index: int
    prompt: str


@dataclass(frozen=True)
class Measurement:
    """One prompt answered by one method: the median of its repeats."""

    num_new_tokens: int
    tokens_per_second: float
    ratio_to_plain: float
    identical: bool
    explained: bool
    verdict: str
    num_rounds: int = 0
    acceptance_length: float | None = None
    acceptance_rate_per_position: list[float] | None = None


@dataclass(frozen=True)
class PromptResult:
    """One prompt, and what each method did with it."""

    dataset: str
    index: int
    measurements: dict[str, Measurement]


def run_benchmark(settings: BenchmarkSettings, console: Console | None = None) -> dict[str, Any]:
    """Runs the benchmark, prints its table, and returns (and, where asked, writes) all numbers."""
    console = console or Console()
    prompts = read_prompts(Path(settings.prompts or PROMPTS_FILE))[: settings.num_prompts]
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    pair = load_pair(settings, report=partial(console.print, style="dim", markup=False, highlight=False))
    warm_up(pair, encode_prompt(pair, "Hello!"))
    results = [
        measure_prompt(pair, prompt, settings, first_method=number)
        for number, prompt in enumerate(track(prompts, "Measuring", console=console, transient=True))
    ]
    summary = summarize(results)
    console.print(_table(summary, settings))
    for line in _differences(results):
        console.print(line, style="dim", markup=False, highlight=False)
    report = {
        "settings": asdict(settings),
        "environment": environment(pair, settings),
        "summary": summary,
        "prompts": [asdict(result) for result in results],
    }
    if settings.json is not None:
        Path(settings.json).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return report


def read_prompts(path: Path) -> list[Prompt]:
    """Reads a prompts file.

    Raises:
        ValueError: a line is no JSON object with `dataset`, `index` and `prompt`, or there is none.
    """
    prompts = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            fields = json.loads(line)
            prompts.append(Prompt(fields["dataset"], fields["index"], fields["prompt"]))
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(f"{path}, line {number}: expected a JSON object with dataset, index, prompt") from error
    if not prompts:
        raise ValueError(f"{path} holds no prompt")
    return prompts


def measure_prompt(pair: Pair, prompt: Prompt, settings: BenchmarkSettings, first_method: int = 0) -> PromptResult:
    """Answers one prompt by every method, `settings.repeats` times in turn."""
    inputs = encode_prompt(pair, prompt.prompt)
    shift = first_method % len(METHODS)
    order = [*METHODS][shift:] + [*METHODS][:shift]
    answers: dict[str, list[Answer]] = {method: [] for method in METHODS}
    for _ in range(settings.repeats):
        for method in order:
            answers[method].append(
                timed_answer(pair, inputs, max_new_tokens=settings.max_new_tokens, **METHODS[method])
            )
    measured = _measurements(pair, inputs["input_ids"][0].tolist(), answers)
    return PromptResult(prompt.dataset, prompt.index, measured)


def _measurements(pair: Pair, prompt_ids: list[int], answers: dict[str, list[Answer]]) -> dict[str, Measurement]:
    speeds = {
        method: statistics.median(answer.tokens_per_second for answer in repeats)
        for method, repeats in answers.items()
    }
    plain_ids = answers["plain"][0].token_ids
    measured = {}
    for method, repeats in answers.items():
        answer = repeats[0]
        verdict = judge(pair.target, prompt_ids, plain_ids, answer.token_ids)
        measured[method] = Measurement(
            num_new_tokens=len(answer.token_ids),
            tokens_per_second=speeds[method],
            ratio_to_plain=speeds[method] / speeds["plain"],
            identical=verdict.identical,
            explained=verdict.explained,
            verdict=str(verdict),
            **_rounds_of(answer),
        )
    return measured


def _rounds_of(answer: Answer) -> dict[str, Any]:
    if answer.summary is None:
        return {}
    names = ("num_rounds", "acceptance_length", "acceptance_rate_per_position")
    return {name: getattr(answer.summary, name) for name in names}


def summarize(results: list[PromptResult]) -> dict[str, dict[str, dict[str, Any]]]:
    """The numbers of each dataset, and of all prompts together (`"all"`), for each method."""
    groups: dict[str, list[PromptResult]] = {}
    for result in results:
        groups.setdefault(result.dataset, []).append(result)
    groups["all"] = results
    return {
        group: {method: _summarize_method([result.measurements[method] for result in members]) for method in METHODS}
        for group, members in groups.items()
    }


def _summarize_method(measurements: list[Measurement]) -> dict[str, Any]:
    num_rounds = sum(m.num_rounds for m in measurements)
    committed = sum(m.num_rounds * (m.acceptance_length or 0.0) for m in measurements)
    return {
        "num_prompts": len(measurements),
        "tokens_per_second": geometric_mean([m.tokens_per_second for m in measurements]),
        "ratio_to_plain": geometric_mean([m.ratio_to_plain for m in measurements]),
        "num_identical": sum(m.identical for m in measurements),
        "num_beyond_rounding": sum(not m.explained for m in measurements),
        "acceptance_length": committed / num_rounds if num_rounds else None,
    }


def _table(summary: dict[str, dict[str, dict[str, Any]]], settings: BenchmarkSettings) -> Table:
    table = Table(
        title=f"{settings.dtype}, greedy, {settings.max_new_tokens} new tokens; geometric means",
        caption="τ: tokens per pass of the target",
    )
    for name in ("dataset", "method"):
        table.add_column(name, no_wrap=True)
    for name in ("tok/s", "to plain", "τ", "identical", "beyond rounding"):
        table.add_column(name, justify="right")
    for group, methods in summary.items():
        table.add_section()
        for method, numbers in methods.items():
            table.add_row(group, method, *_cells(numbers))
    return table


def _differences(results: list[PromptResult]) -> list[str]:
    """A line for each text that is not plain generation's: where they part, and the margin there."""
    return [
        f"{result.dataset} {result.index}, {method}: {measurement.verdict}"
        for result in results
        for method, measurement in result.measurements.items()
        if not measurement.identical
    ]


def _cells(numbers: dict[str, Any]) -> list[str]:
    tau = numbers["acceptance_length"]
    return [
        f"{numbers['tokens_per_second']:.1f}",
        f"× {numbers['ratio_to_plain']:.2f}",
        "" if tau is None else f"{tau:.2f}",
        f"{numbers['num_identical']} of {numbers['num_prompts']}",
        str(numbers["num_beyond_rounding"]),
    ]


def environment(pair: Pair, settings: PairSettings) -> dict[str, Any]:
    """What the numbers depend on: versions, machine, threads, models. No paths: results are published."""
    on_cuda = pair.target.device.type == "cuda"
    return {
        "dspark_hf": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
        "device": torch.cuda.get_device_name(pair.target.device) if on_cuda else str(pair.target.device),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cpu_count": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "target": target_name(pair, settings),
        "drafter": drafter_name(settings),
    }
