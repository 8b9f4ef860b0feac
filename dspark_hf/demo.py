"""`dspark-hf demo`: three prompts, each answered twice, plain and with the drafter, and what the drafter gained."""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

from rich.console import Console
from rich.table import Table
from transformers import BatchEncoding, TextStreamer

from .comparison import (
    Answer,
    Pair,
    PairSettings,
    Verdict,
    check_folders,
    check_positive,
    drafter_name,
    encode_prompt,
    geometric_mean,
    judge,
    load_pair,
    target_name,
    timed_answer,
    warm_up,
)
from .reports import STANDARD_OUTPUT, console_for, json_field, write_json

PROMPTS = {
    "chat": "What are three good habits for learning a new language? Explain each one in a sentence or two.",
    "code": "Write a Python function that returns the n-th Fibonacci number, with a docstring and an example.",
    "arithmetic": "A baker sells 12 loaves in the morning and twice as many in the afternoon, at 3 dollars each. "
    "How much money does she make in a day? Please reason step by step.",
}


@dataclass
class DemoSettings(PairSettings):
    """Answer three prompts twice, plain and with the drafter, and compare speed and text."""

    max_new_tokens: int = field(default=128, metadata={"help": "maximum number of new tokens per answer"})
    prompt: list[str] | None = field(default=None, metadata={"help": "your own prompts instead of the three"})
    stream: bool = field(default=True, metadata={"help": "print the answers as they come"})
    json: str | None = json_field()

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "max_new_tokens")
        check_folders(self, "json")
        # A streamer writes to standard output.
        self.stream = self.stream and self.json != STANDARD_OUTPUT


@dataclass(frozen=True)
class Comparison:
    """One prompt, answered plain and with the drafter."""

    name: str
    plain: Answer
    drafted: Answer
    verdict: Verdict

    @property
    def speed_ratio(self) -> float:
        return self.drafted.tokens_per_second / self.plain.tokens_per_second


def run_demo(settings: DemoSettings, console: Console | None = None) -> bool:
    """Runs the demo and prints its table. Returns whether every text was equal up to rounding."""
    console = console or console_for(settings.json)
    pair = load_pair(settings, report=partial(console.print, style="dim", markup=False, highlight=False))
    prompts = PROMPTS if settings.prompt is None else {f"prompt {i}": p for i, p in enumerate(settings.prompt, 1)}
    names = {"target": target_name(pair.target, settings), "drafter": drafter_name(settings)}
    console.print("target {target}, drafter {drafter}".format(**names), style="dim")
    warm_up(pair, encode_prompt(pair, "Hello!"))
    comparisons = [_compare(pair, name, prompt, settings, console) for name, prompt in prompts.items()]
    console.print(_table(comparisons, settings))
    write_json({**names, "prompts": list(map(_numbers, comparisons))}, settings.json)
    return all(comparison.verdict.explained for comparison in comparisons)


def _compare(pair: Pair, name: str, prompt: str, settings: DemoSettings, console: Console) -> Comparison:
    inputs = encode_prompt(pair, prompt)
    if settings.stream:
        console.rule(f"[bold]{name}")
        console.print(prompt, style="italic", markup=False, highlight=False)
    plain, drafted = (_answer(pair, inputs, with_drafter, settings, console) for with_drafter in (False, True))
    verdict = judge(pair.target, inputs["input_ids"][0].tolist(), plain.token_ids, drafted.token_ids)
    return Comparison(name, plain, drafted, verdict)


def _answer(pair: Pair, inputs: BatchEncoding, with_drafter: bool, settings: DemoSettings, console: Console) -> Answer:
    streamer = None
    if settings.stream:
        console.rule("with the drafter" if with_drafter else "plain", align="left", style="dim")
        streamer = TextStreamer(pair.tokenizer, skip_prompt=True, skip_special_tokens=True)
    return timed_answer(
        pair, inputs, max_new_tokens=settings.max_new_tokens, with_drafter=with_drafter, streamer=streamer
    )


def _table(comparisons: list[Comparison], settings: DemoSettings) -> Table:
    table = Table(title=f"Plain and with the drafter, {settings.dtype}, greedy", show_footer=True)
    table.caption = "τ: tokens per pass of the target"
    mean = f"× {geometric_mean([comparison.speed_ratio for comparison in comparisons]):.2f}"
    table.add_column("prompt", footer="geometric mean", no_wrap=True)
    for name, footer in (("tokens", ""), ("plain\ntok/s", ""), ("drafter\ntok/s", ""), ("speed", mean), ("τ", "")):
        table.add_column(name, footer=footer, justify="right", no_wrap=True)
    table.add_column("text")
    for comparison in comparisons:
        table.add_row(*_row(comparison))
    return table


def _numbers(comparison: Comparison) -> dict[str, Any]:
    drafted = comparison.drafted
    return {
        "name": comparison.name,
        "num_new_tokens": len(drafted.token_ids),
        "tokens_per_second": {
            "plain": comparison.plain.tokens_per_second,
            "drafter": drafted.tokens_per_second,
        },
        "acceptance_length": drafted.summary.acceptance_length if drafted.summary else None,
        "identical": comparison.verdict.identical,
        "within_rounding": comparison.verdict.explained,
        "verdict": str(comparison.verdict),
    }


def _row(comparison: Comparison) -> list[str]:
    drafted = comparison.drafted
    return [
        comparison.name,
        str(len(drafted.token_ids)),
        f"{comparison.plain.tokens_per_second:.1f}",
        f"{drafted.tokens_per_second:.1f}",
        f"× {comparison.speed_ratio:.2f}",
        f"{drafted.summary.acceptance_length:.2f}" if drafted.summary else "",
        str(comparison.verdict),
    ]
