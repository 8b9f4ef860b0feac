"""`dspark-hf generate`: answers to a prompt, to a file of prompts, or in a chat; how fast, and with which τ."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import TextStreamer

from .comparison import (
    Answer,
    Pair,
    PairSettings,
    check_folders,
    check_positive,
    drafter_name,
    encode_messages,
    load_pair,
    target_name,
    timed_generate,
)
from .policies import SCHEDULES
from .prompt_files import read_prompts
from .reports import STANDARD_OUTPUT, console_for, json_field, write_json

_LEAVE, _START_OVER = "/exit", "/new"
# What is handed to `generate` where it is given; the model's own settings otherwise.
_OPTIONS = ("do_sample", "temperature", "top_p", "top_k", "repetition_penalty", "num_assistant_tokens_schedule")


@dataclass
class GenerateSettings(PairSettings):
    """Answer a prompt, a file of prompts, or what is typed, with the drafter that is known for the model."""

    target: str | None = field(
        default=None,
        metadata={"aliases": ["--model"], "help": "the model: hub id or folder; default: the demo's small one"},
    )
    prompt: str | None = field(
        default=None, metadata={"positional": True, "help": "what to answer; default: a chat, line by line"}
    )
    file: str | None = field(
        default=None, metadata={"help": "a text file that is the prompt, or JSON lines (.jsonl) with one each"}
    )
    system: str | None = field(default=None, metadata={"help": "system message, for chat templates that know it"})
    enable_thinking: bool | None = field(
        default=None, metadata={"help": "for chat templates that know it; default: what the template does"}
    )
    max_new_tokens: int = field(default=512, metadata={"help": "maximum number of new tokens per answer"})
    do_sample: bool | None = field(
        default=None, metadata={"nargs": "?", "const": True, "help": "sample; default: as the model's settings say"}
    )
    temperature: float | None = field(default=None, metadata={"help": "of sampling; default: the model's"})
    top_p: float | None = field(default=None, metadata={"help": "of sampling; default: the model's"})
    top_k: int | None = field(default=None, metadata={"help": "of sampling; default: the model's"})
    repetition_penalty: float | None = field(default=None, metadata={"help": "default: the model's"})
    seed: int | None = field(
        default=None,
        metadata={"help": "of sampling; gives the same text again with a schedule without a clock (constant)"},
    )
    num_assistant_tokens_schedule: str | None = field(
        default=None, metadata={"help": f"any of {', '.join(SCHEDULES)}; default: the drafter's own, or auto"}
    )
    stream: bool = field(default=True, metadata={"help": "print the text as it comes"})
    json: str | None = json_field()

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "max_new_tokens")
        check_folders(self, "json")
        # A streamer writes to standard output.
        self.stream = self.stream and self.json != STANDARD_OUTPUT
        if self.num_assistant_tokens_schedule not in (None, *SCHEDULES):
            name = self.num_assistant_tokens_schedule
            raise ValueError(f"--num-assistant-tokens-schedule is {name}, expected one of {', '.join(SCHEDULES)}")
        if self.prompt is not None and self.file is not None:
            raise ValueError("--file and a prompt exclude each other")
        if self.file is not None and not Path(self.file).is_file():
            raise ValueError(f"--file is {self.file}, which is no file")

    @property
    def is_chat(self) -> bool:
        return self.prompt is None and self.file is None

    @property
    def options(self) -> dict[str, Any]:
        """What goes to `generate`."""
        given = {name: getattr(self, name) for name in _OPTIONS if getattr(self, name) is not None}
        return {**given, "max_new_tokens": self.max_new_tokens}


class Chat:
    """Answers with a pair, and what was said before, where it is a chat."""

    def __init__(self, pair: Pair, settings: GenerateSettings, console: Console):
        self.pair, self.settings, self.console = pair, settings, console
        self.start_over()

    def start_over(self) -> None:
        """Forgets what was said."""
        system = self.settings.system
        self.messages = [] if system is None else [{"role": "system", "content": system}]

    def answer(self, prompt: str) -> dict[str, Any]:
        """Answers, printing the text and a line about it.

        Returns:
            `prompt`, `text`, `num_new_tokens`, `seconds`, `tokens_per_second`, `acceptance_length` (`None` without a
            round).
        """
        messages = [*self.messages, {"role": "user", "content": prompt}]
        thinking = self.settings.enable_thinking
        inputs = encode_messages(self.pair, messages, **({} if thinking is None else {"enable_thinking": thinking}))
        streamer = None
        if self.settings.stream:
            streamer = TextStreamer(self.pair.tokenizer, skip_prompt=True, skip_special_tokens=True)
        answer = timed_generate(self.pair, inputs, with_drafter=True, streamer=streamer, **self.settings.options)
        text = str(self.pair.tokenizer.decode(answer.token_ids, skip_special_tokens=True))
        if not self.settings.stream:
            self.console.print(text, markup=False, highlight=False, soft_wrap=True)
        if self.settings.is_chat:
            self.messages = [*messages, {"role": "assistant", "content": text}]
        result = {"prompt": prompt, "text": text, **_numbers(answer)}
        self.console.print(_line(result), style="dim", highlight=False)
        return result


def run_generate(settings: GenerateSettings, console: Console | None = None) -> dict[str, Any]:
    """Runs `dspark-hf generate`.

    Returns:
        `target`, `drafter`, `answers` (as [`Chat.answer`]) and `total` of all answers.
    """
    console = console or console_for(settings.json)
    pair = load_pair(settings, report=lambda line: console.print(line, style="dim", markup=False, highlight=False))
    names = {"target": target_name(pair.target, settings), "drafter": drafter_name(settings)}
    console.print("target {target}, drafter {drafter}".format(**names), style="dim", markup=False, highlight=False)
    if settings.seed is not None:
        torch.manual_seed(settings.seed)
    chat = Chat(pair, settings, console)
    answers = [chat.answer(prompt) for prompt in _prompts(settings, chat)]
    total = _total(answers)
    if len(answers) > 1:
        console.print("all answers:", _line(total), style="dim", highlight=False)
    report = {**names, "answers": answers, "total": total}
    write_json(report, settings.json)
    return report


def _prompts(settings: GenerateSettings, chat: Chat) -> Iterator[str]:
    if settings.prompt is not None:
        yield settings.prompt
    elif settings.file is None:
        yield from _typed(chat)
    elif settings.file.endswith((".jsonl", ".jsonl.gz")):
        yield from (prompt.prompt for prompt in read_prompts(Path(settings.file)))
    else:
        yield Path(settings.file).read_text(encoding="utf-8")


def _typed(chat: Chat) -> Iterator[str]:
    """Lines of standard input, until it ends."""
    sign = "> " if sys.stdin.isatty() else ""
    if sign:
        chat.console.print(f"{_START_OVER} starts over, {_LEAVE} or the end of input leaves.", style="dim")
    while True:
        try:
            line = chat.console.input(sign).strip()
        except EOFError:
            return
        if line == _LEAVE:
            return
        if line == _START_OVER:
            chat.start_over()
        elif line:
            yield line


def _numbers(answer: Answer) -> dict[str, Any]:
    summary = answer.summary
    return {
        "num_new_tokens": len(answer.token_ids),
        "seconds": answer.seconds,
        "tokens_per_second": answer.tokens_per_second,
        "num_rounds": summary.num_rounds if summary else 0,
        "acceptance_length": summary.acceptance_length if summary and summary.num_rounds else None,
    }


def _total(answers: list[dict[str, Any]]) -> dict[str, Any]:
    tokens, seconds, rounds = (
        sum(answer[name] for answer in answers) for name in ("num_new_tokens", "seconds", "num_rounds")
    )
    in_rounds = sum(answer["num_rounds"] * (answer["acceptance_length"] or 0.0) for answer in answers)
    return {
        "num_new_tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds if seconds else None,
        "num_rounds": rounds,
        "acceptance_length": in_rounds / rounds if rounds else None,
    }


def _line(numbers: dict[str, Any]) -> str:
    length = numbers["acceptance_length"]
    tau = "" if length is None else f", τ {length:.2f}"
    return f"{numbers['num_new_tokens']} tokens, {numbers['tokens_per_second']:.1f} tokens/s{tau}"
