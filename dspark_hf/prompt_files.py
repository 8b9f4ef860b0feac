"""Files of prompts: JSON lines, each with what a model is asked."""

import gzip
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

PROMPTS_FILE = Path(__file__).parent / "prompts.jsonl"
COPY_PROMPTS_FILE = Path(__file__).parent / "copy_heavy_prompts.jsonl"

_Item = TypeVar("_Item")


@dataclass(frozen=True)
class Prompt:
    """One line of a prompts file."""

    dataset: str
    index: int
    prompt: str


def read_prompts(path: Path) -> list[Prompt]:
    """Reads a prompts file: a JSON object a line, with `prompt`, or `turns` of which the first counts.

    Without `dataset` it is named after the file, without `index` after its line.

    Raises:
        ValueError: a line is something else, or there is none.
    """
    prompts = []
    for number, line in numbered_lines(path):
        try:
            fields = json.loads(line)
            prompts.append(Prompt(fields.get("dataset", file_stem(path)), fields.get("index", number), ask_of(fields)))
        except (json.JSONDecodeError, LookupError, TypeError, AttributeError) as error:
            raise ValueError(f"{path}, line {number}: expected a JSON object with `prompt` (or `turns`)") from error
    if not prompts:
        raise ValueError(f"{path} holds no prompt")
    return prompts


def ask_of(fields: dict[str, Any]) -> str:
    """The user's message in a row: its `prompt`, or the first of its `turns`.

    Raises:
        LookupError: it has neither.
        TypeError: it is no text.
    """
    if "prompt" not in fields and not isinstance(fields["turns"], list):
        raise TypeError(f"`turns` is {type(fields['turns']).__name__}, expected a list of texts")
    text = fields["prompt"] if "prompt" in fields else fields["turns"][0]
    if not isinstance(text, str):
        raise TypeError(f"a prompt is {type(text).__name__}, expected text")
    return text


def numbered_lines(path: Path) -> Iterator[tuple[int, str]]:
    """The lines of a text file, plain or gzipped (`.gz`), numbered from 1 on, without empty ones.

    Raises:
        ValueError: it is not UTF-8, or its compressed data are cut off.
    """
    # Some editors put a mark before the first line, which is no part of it.
    opened = gzip.open if path.suffix == ".gz" else open
    number = 0
    try:
        with opened(path, "rt", encoding="utf-8-sig") as file:
            # A line ends at a newline only: texts hold other separators.
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, line.removesuffix("\n")
    except EOFError as error:
        raise ValueError(f"{path} ends after line {number} in the midst of compressed data: copy it again") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}, after line {number}: not UTF-8 ({error.reason})") from error


def file_stem(path: Path) -> str:
    """What rows of a file are named after: `mine` for `mine.jsonl` and `mine.jsonl.gz`."""
    return path.name.removesuffix(".gz").rsplit(".", 1)[0]


def evenly_spread(items: Sequence[_Item], number: int | None) -> list[_Item]:
    """So many of the items, evenly over their order; all of them where there are no more, or for `None`."""
    if number is None or number >= len(items):
        return list(items)
    return [items[i * len(items) // number] for i in range(number)]
