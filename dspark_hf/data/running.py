"""`dspark-hf data` from settings to rows."""

import platform
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from transformers import PreTrainedModel

from .. import __version__
from ..comparison import GREEDY, check_target_source, load_target, target_name
from ..packed_weights import pack_weights
from .answering import Decoding, answer
from .encoding import Encoder
from .progress import Progress
from .rows import LineFile, fingerprint, record_provenance, self_prompts_file
from .self_prompts import Writer
from .settings import DataSettings
from .sieve import words_of
from .sources import BadRow, Source, read_excluded, read_sources, said_by_user

# Prompts whose answers are all written before the next ones': enough to find batches of similar length, few enough
# that a run that is stopped early has answered prompts of every length.
_BATCHES_OF_A_WINDOW = 8


def run_data(settings: DataSettings, console: Console | None = None) -> Path:
    """Runs `dspark-hf data`.

    Returns:
        The file of rows.

    Raises:
        ValueError, OSError, ImportError: a row, a file or a setting cannot be used. Nothing has been written then,
            and no target was loaded where that could be seen without it.
    """
    run = _Run(settings, console or Console(stderr=True))
    check_target_source(settings)
    sources = run.read()
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    target, tokenizer = load_target(settings, run.report)
    # Calls go on from each other's cache, which has to be one that grows.
    target.generation_config.cache_implementation = None
    pack_weights(target)
    encoder = Encoder.of(target, tokenizer, enable_thinking=settings.enable_thinking, text_tokens=settings.text_tokens)
    if settings.self_prompts:
        encoder.user_frame()
    encoded = run.encode(sources, encoder)
    record_provenance(settings.output_file, provenance(settings, target, encoder), _environment(settings, target))
    rows = LineFile(settings.output_file)
    run.refuse_excluded(rows)
    torch.manual_seed(settings.seed + len(rows.rows))  # a run that goes on does not draw the same numbers again
    run.answer(target, encoder, encoded, rows)
    if settings.self_prompts:
        own = run.write_self_prompts(target, encoder, sources, rows)
        run.answer(target, encoder, run.encode(own, encoder), rows)
    run.report(f"{len(rows.rows):,} rows in {settings.output_file}")
    return settings.output_file


@dataclass
class _Run:
    """The steps of a run, and what they say to the user.

    Attributes:
        excluded: prompts that are never taken.
    """

    settings: DataSettings
    console: Console
    excluded: list[str] = field(init=False)

    def __post_init__(self) -> None:
        self.excluded = read_excluded(self.settings.exclude or ())
        self._excluded_words = {words_of(text) for text in self.excluded}

    def report(self, line: str) -> None:
        self.console.print(line, style="dim", markup=False, highlight=False)

    def on_bad_row(self, row: BadRow) -> None:
        if not self.settings.skip_bad_rows:
            raise ValueError(f"{row}. Mend the row, or pass --skip-bad-rows.") from row
        self.report(f"skipped {row}")

    def read(self) -> list[Source]:
        """The prompts of files and datasets, without excluded ones."""
        sources = read_sources(
            self.settings.prompts or (),
            split=self.settings.split,
            num_prompts=self.settings.num_prompts,
            keep_responses=self.settings.keep_responses,
            on_bad_row=self.on_bad_row,
        )
        taken = [source for source in sources if not self._is_excluded(source.asked)]
        if len(taken) < len(sources):
            self.report(f"left out {len(sources) - len(taken):,} excluded prompts")
        return taken

    def encode(self, sources: Iterable[Source], encoder: Encoder) -> list[Source]:
        """The prompts with their token ids, without those that are too long; given responses are checked."""
        encoded, num_too_long = [], 0
        for source in sources:
            try:
                ids = encoder.prompt_ids(source)
                if source.is_given:
                    source = replace(source, response_ids=encoder.given_response_ids(source))
            except BadRow as row:
                self.on_bad_row(row)
                continue
            if len(ids) > self.settings.max_prompt_tokens:
                num_too_long += 1
                continue
            encoded.append(replace(source, prompt_ids=ids))
        if num_too_long:
            limit = f"--max-prompt-tokens {self.settings.max_prompt_tokens}"
            self.report(f"left out {num_too_long:,} prompts longer than {limit}")
        return encoded

    def refuse_excluded(self, rows: LineFile) -> None:
        """Raises `ValueError` where an earlier run, without `--exclude`, answered what is excluded now."""
        for number, row in enumerate(rows.rows, 1):
            if self._is_excluded([row["prompt"], *said_by_user(row.get("messages", ()))]):
                raise ValueError(
                    f"{rows.path}, line {number}: its prompt is excluded. Take the line out, or choose another "
                    "--output."
                )

    def answer(self, target: PreTrainedModel, encoder: Encoder, prompts: list[Source], rows: LineFile) -> None:
        """Adds a row for each prompt that has none yet."""
        there = {(row["dataset"], row["index"]): row["prompt_ids"] for row in rows.rows}
        for source in prompts:
            if there.get(source.key, source.prompt_ids) != source.prompt_ids:
                raise ValueError(
                    f"{rows.path} has another prompt for {source.dataset} {source.index} than {source.where}: give "
                    "one of them another `dataset`, or choose another --output"
                )
        waiting = [source for source in prompts if source.key not in there]
        given = [source for source in waiting if source.is_given]
        rows.append(make_row(source, source.response_ids or [], encoder) for source in given)
        waiting = [source for source in waiting if not source.is_given]
        decoding = Decoding(self.settings.max_new_tokens, encoder.stop_ids, decoding_arguments(self.settings))
        size = self.settings.batch_size * _BATCHES_OF_A_WINDOW
        with Progress(self.console, "answers", len(waiting)) as progress:
            for start in range(0, len(waiting), size):
                window = waiting[start : start + size]
                prompt_ids = [source.prompt_ids or [] for source in window]
                for number, response_ids in answer(target, prompt_ids, decoding, self.settings.batch_size):
                    rows.append([make_row(window[number], response_ids, encoder)])
                    progress.advance(1, len(response_ids))

    def write_self_prompts(
        self, target: PreTrainedModel, encoder: Encoder, sources: list[Source], rows: LineFile
    ) -> list[Source]:
        """The target's own prompts, out of a file of their own, which is filled up first."""
        settings = self.settings
        path = self_prompts_file(settings.output_file)
        file = LineFile(path)
        writer = Writer(
            target,
            encoder,
            settings.self_temperature,
            settings.self_top_p,
            settings.self_max_tokens,
            read_openings(settings),
            settings.batch_size,
        )
        # Here too: the rows did not grow while prompts were written.
        torch.manual_seed(settings.seed + len(rows.rows) + len(file.rows))
        known = [*self.excluded, *(source.prompt for source in sources if source.messages is not None)]
        with Progress(self.console, "prompts", max(0, settings.self_prompts - len(file.rows))) as progress:
            sieve = writer.write(file, settings.self_prompts, known, progress)
        for reason, count in sieve.refused.most_common():
            self.report(f"refused {count:,} prompts of the target's own: {reason}")
        own = [
            Source(row["dataset"], row["index"], f"{path}, line {n}", [{"role": "user", "content": row["prompt"]}])
            for n, row in enumerate(file.rows[: settings.self_prompts], 1)
        ]
        return [source for source in own if not self._is_excluded(source.asked)]

    def _is_excluded(self, texts: Iterable[str]) -> bool:
        """Whether one of them has the words of a prompt that is never taken."""
        return bool(self._excluded_words) and any(words_of(text) in self._excluded_words for text in texts)


def make_row(source: Source, response_ids: list[int], encoder: Encoder) -> dict[str, Any]:
    """A row of the output: the fields are described in `dspark_hf.data`."""
    prompt_ids = source.prompt_ids or []
    has_history = source.messages is not None and len(source.messages) > 1
    return {
        "dataset": source.dataset,
        "index": source.index,
        "prompt": encoder.text_of(prompt_ids) if source.messages is None else source.prompt,
        **({"messages": source.messages} if has_history else {}),
        "prompt_ids": prompt_ids,
        "response_ids": response_ids,
        "response": encoder.text_of(response_ids),
        **({"given": True} if source.is_given else {}),
    }


def read_openings(settings: DataSettings) -> list[str]:
    """The lines of `--self-openings`."""
    if settings.self_openings is None:
        return []
    lines = Path(settings.self_openings).read_text(encoding="utf-8").splitlines()
    return [line.strip() for line in lines if line.strip()]


def decoding_arguments(settings: DataSettings) -> dict[str, Any]:
    """How `generate` chooses the tokens of responses."""
    if not settings.do_sample:
        return GREEDY
    names = ("do_sample", "temperature", "top_p", "top_k")
    return {**GREEDY, **{name: getattr(settings, name) for name in names}}


def provenance(settings: DataSettings, target: PreTrainedModel, encoder: Encoder) -> dict[str, Any]:
    """What all rows of a file share, and what a run that goes on has to repeat."""
    sampling = ("temperature", "top_p", "top_k", "seed")
    template = encoder.tokenizer.chat_template
    shared: dict[str, Any] = {
        "target": target_name(target, settings),
        "dtype": settings.dtype,
        "weights": fingerprint(target),
        "chat_template": None if template is None else sha256(str(template).encode()).hexdigest()[:16],
        "enable_thinking": settings.enable_thinking,
        "stop_ids": sorted(encoder.stop_ids),
        "max_new_tokens": settings.max_new_tokens,
        "text_tokens": settings.text_tokens,
        "decoding": {name: getattr(settings, name) for name in sampling} if settings.do_sample else "greedy",
    }
    if settings.self_prompts:
        shared["self_prompts"] = {
            **{name: getattr(settings, f"self_{name}") for name in ("temperature", "top_p", "max_tokens")},
            "seed": settings.seed,
            "openings": read_openings(settings),
        }
    return shared


def _environment(settings: DataSettings, target: PreTrainedModel) -> dict[str, Any]:
    # In half precision the batch counts as well: the last bit of a sum depends on its shape.
    return {
        "dspark_hf": __version__,
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "device": str(target.device),
        "machine": f"{platform.system()} {platform.machine()}",
        "batch_size": settings.batch_size,
    }
