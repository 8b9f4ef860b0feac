"""`dspark-hf data` from settings to rows."""

import platform
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .. import __version__
from ..comparison import GREEDY, check_target_source, load_target, target_name
from ..packed_weights import pack_weights
from .answering import Decoding, answer
from .encoding import Encoder
from .rows import LineFile, check_provenance, fingerprint
from .self_prompts import Sieve, normalized, starts
from .settings import DataSettings
from .sources import BadRow, Source, read_sources

# Prompts whose answers are written before any of the next: enough that batches of similar length can be found, few
# enough that a run that is stopped early has answered prompts of every length.
_BATCHES_OF_A_WINDOW = 8

_MAX_SELF_PROMPT_TOKENS = 128


@dataclass
class _Run:
    settings: DataSettings
    target: PreTrainedModel
    encoder: Encoder
    output: LineFile
    report: Callable[[str], None]
    console: Console

    def __post_init__(self) -> None:
        self.done = {(row["dataset"], row["index"]): row for row in self.output.rows}


def run_data(settings: DataSettings, console: Console | None = None) -> Path:
    """Runs `dspark-hf data`. Returns the file of rows.

    Raises:
        ValueError, OSError, ImportError: a row, a file or a setting cannot be used; nothing was written then.
    """
    console = console or Console(stderr=True)

    def report(line: str) -> None:
        console.print(line, style="dim", markup=False, highlight=False)

    check_target_source(settings)
    bad: list[BadRow] = []
    sources = _read(settings, bad)
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    target, tokenizer = load_target(settings, report)
    pack_weights(target)
    encoder = _encoder(settings, target, tokenizer)
    header = encoder.user_header() if settings.self_prompts else []
    prompts = _encode(sources, encoder, settings, bad)
    _report_bad(bad, report)
    check_provenance(settings.output_file, _provenance(settings, target, encoder))
    run = _Run(settings, target, encoder, LineFile(settings.output_file), report, console)
    torch.manual_seed(settings.seed + len(run.output.rows))  # a run that goes on does not draw the same again
    _answer_all(run, prompts)
    if settings.self_prompts:
        _answer_all(run, _encode(_write_self_prompts(run, header, sources), encoder, settings, bad))
    report(f"{len(run.output.rows):,} rows in {settings.output_file}")
    return settings.output_file


def _read(settings: DataSettings, bad: list[BadRow]) -> list[Source]:
    sources = read_sources(
        settings.prompts or (),
        split=settings.split,
        num_prompts=settings.num_prompts,
        on_bad_row=_bad_row_handler(settings, bad),
    )
    excluded = _excluded(settings)
    return [source for source in sources if tuple(normalized(source.prompt)) not in excluded]


def _excluded(settings: DataSettings) -> set[tuple[str, ...]]:
    return {tuple(normalized(prompt)) for prompt in _excluded_prompts(settings)}


def _excluded_prompts(settings: DataSettings) -> list[str]:
    def refuse(bad: BadRow) -> None:
        raise bad

    # No row is skipped here: a held-out prompt that cannot be read would be trained on.
    found = read_sources(settings.exclude or (), split="", num_prompts=None, on_bad_row=refuse)
    return [source.prompt for source in found]


def _bad_row_handler(settings: DataSettings, bad: list[BadRow]) -> Callable[[BadRow], None]:
    def handle(row: BadRow) -> None:
        if not settings.skip_bad_rows:
            raise ValueError(f"{row}. Mend the row, or pass --skip-bad-rows.") from row
        bad.append(row)

    return handle


def _report_bad(bad: list[BadRow], report: Callable[[str], None]) -> None:
    for row in bad:
        report(f"skipped {row}")


def _encoder(settings: DataSettings, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Encoder:
    config: Any = target.generation_config
    ids = config.eos_token_id if config.eos_token_id is not None else tokenizer.eos_token_id
    return Encoder(
        tokenizer,
        vocab_size=target.config.get_text_config(decoder=True).vocab_size,
        stop_ids=frozenset([] if ids is None else [ids] if isinstance(ids, int) else ids),
        enable_thinking=settings.enable_thinking,
        text_tokens=settings.text_tokens,
    )


def _encode(
    sources: Iterable[Source], encoder: Encoder, settings: DataSettings, bad: list[BadRow]
) -> list[tuple[Source, list[int]]]:
    """Token ids of all prompts that are not too long; given responses are checked, and become ids."""
    handle = _bad_row_handler(settings, bad)
    encoded = []
    for source in sources:
        try:
            ids = encoder.prompt_ids(source)
            if source.is_given:
                source = replace(source, response_ids=encoder.given_response_ids(source))
        except BadRow as row:
            handle(row)
            continue
        if len(ids) <= settings.max_prompt_tokens:
            encoded.append((source, ids))
    return encoded


def _answer_all(run: _Run, prompts: list[tuple[Source, list[int]]]) -> None:
    """Writes a row for each prompt that has none yet."""
    waiting = [(source, ids) for source, ids in prompts if not _is_done(run, source)]
    run.output.append(
        _row(run, source, ids, source.response_ids or [], given=True) for source, ids in waiting if source.is_given
    )
    waiting = [(source, ids) for source, ids in waiting if not source.is_given]
    decoding = _decoding(run.settings, run.encoder)
    with _progress(run.console) as progress:
        bar = _Bar(progress, "answers", len(waiting))
        for window in _windows(waiting, run.settings.batch_size * _BATCHES_OF_A_WINDOW):
            answers = answer(run.target, [ids for _, ids in window], decoding, run.settings.batch_size)
            for number, response_ids in answers:
                source, ids = window[number]
                run.output.append([_row(run, source, ids, response_ids)])
                bar.advance(1, len(response_ids))


def _is_done(run: _Run, source: Source) -> bool:
    row = run.done.get(source.key)
    if row is not None and row["prompt"] != source.prompt:
        raise ValueError(
            f"{run.settings.output_file} has another prompt for {source.dataset} {source.index} than {source.where}: "
            "name the dataset of one of them differently, or choose another --output"
        )
    return row is not None


def _row(run: _Run, source: Source, ids: list[int], response_ids: list[int], given: bool = False) -> dict[str, Any]:
    is_long = source.messages is not None and len(source.messages) > 1
    return {
        "dataset": source.dataset,
        "index": source.index,
        "prompt": source.prompt,
        **({"messages": source.messages} if is_long else {}),
        "prompt_ids": ids,
        "response_ids": response_ids,
        "response": run.encoder.text_of(response_ids),
        **({"given": True} if given else {}),
    }


def _decoding(settings: DataSettings, encoder: Encoder) -> Decoding:
    return Decoding(settings.max_new_tokens, encoder.stop_ids, _arguments(settings))


def _arguments(settings: DataSettings) -> dict[str, Any]:
    if not settings.do_sample:
        return GREEDY
    names = ("do_sample", "temperature", "top_p", "top_k")
    return {**GREEDY, **{name: getattr(settings, name) for name in names}}


def _write_self_prompts(run: _Run, header: list[int], sources: list[Source]) -> list[Source]:
    """The target's own prompts, kept in a file of their own, which a run that was interrupted goes on with."""
    settings = run.settings
    file = LineFile(settings.output_file.with_name(f"{settings.output_file.stem}.self-prompts.jsonl"))
    written = [row["prompt"] for row in file.rows]
    sieve = Sieve([*_excluded_prompts(settings), *(source.prompt for source in sources), *written])
    decoding = Decoding(
        _MAX_SELF_PROMPT_TOKENS,
        run.encoder.stop_ids,
        {**GREEDY, "do_sample": True, "temperature": settings.self_temperature, "top_p": 1.0, "top_k": 0},
    )
    from_where = starts(header, _openings(settings, run.encoder))
    with _progress(run.console) as progress:
        bar = _Bar(progress, "prompts", settings.self_prompts - len(file.rows))
        while len(file.rows) < settings.self_prompts:
            batch = [*islice(from_where, settings.batch_size)]
            for number, ids in answer(run.target, batch, decoding, settings.batch_size):
                prompt = _text_of_turn(run.encoder, batch[number][len(header) :] + ids)
                if len(file.rows) < settings.self_prompts and sieve.take(prompt):
                    file.append([{"dataset": "self", "index": len(file.rows), "prompt": prompt}])
                    bar.advance(1, len(ids))
    for reason, count in sieve.refused.most_common():
        run.report(f"{count:,} prompts of the target's own refused: {reason}")
    rows = file.rows[: settings.self_prompts]
    return [
        Source(row["dataset"], row["index"], str(file.path), [{"role": "user", "content": row["prompt"]}])
        for row in rows
    ]


def _text_of_turn(encoder: Encoder, ids: list[int]) -> str | None:
    if ids[-1] not in encoder.stop_ids:
        return None
    return encoder.text_of(ids).strip()


def _openings(settings: DataSettings, encoder: Encoder) -> list[list[int]]:
    if settings.self_openings is None:
        return []
    lines = Path(settings.self_openings).read_text(encoding="utf-8").splitlines()
    return [encoder.tokenizer(line, add_special_tokens=False)["input_ids"] for line in map(str.strip, lines) if line]


def _windows(prompts: list[Any], size: int) -> Iterator[list[Any]]:
    for start in range(0, len(prompts), size):
        yield prompts[start : start + size]


def _provenance(settings: DataSettings, target: PreTrainedModel, encoder: Encoder) -> dict[str, Any]:
    names = ("dtype", "max_new_tokens", "text_tokens", "enable_thinking", "seed")
    template = encoder.tokenizer.chat_template
    decoding = {
        name: value for name, value in _arguments(settings).items() if name not in ("num_beams", "repetition_penalty")
    }
    return {
        "target": target_name(target, settings),
        "weights": fingerprint(target),
        **{name: getattr(settings, name) for name in names},
        "decoding": decoding,
        "stop_ids": sorted(encoder.stop_ids),
        "chat_template": None if template is None else sha256(str(template).encode()).hexdigest()[:16],
        "self_temperature": settings.self_temperature,
        "environment": {
            "dspark_hf": __version__,
            "transformers": transformers.__version__,
            "torch": torch.__version__,
            "device": str(target.device),
            "machine": f"{platform.system()} {platform.machine()}",
            "batch_size": settings.batch_size,
        },
    }


def _progress(console: Console) -> Progress:
    columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[speed]}"))
    return Progress(
        *columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console, disable=not sys.stderr.isatty()
    )


class _Bar:
    """A line of the progress display that also says how many tokens come in a second."""

    def __init__(self, progress: Progress, description: str, total: int):
        self.progress, self.num_tokens = progress, 0
        self.task = progress.add_task(description, total=total, speed="")

    def advance(self, num_rows: int, num_tokens: int) -> None:
        self.num_tokens += num_tokens
        seconds = self.progress.tasks[self.task].elapsed or 0.0
        speed = f"{self.num_tokens / seconds:.0f} tokens/s" if seconds else ""
        self.progress.update(self.task, advance=num_rows, speed=speed)
