"""The file of rows: append-only, so that a run that was killed goes on where it was; and what all its rows share."""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from ..checkpoints.files import write_whole

_VALUES_OF_A_PARAMETER = 64


class LineFile:
    """JSON lines that only grow.

    Args:
        path: opened for appending. A last line that a kill cut off is taken back.

    Attributes:
        rows: what the file holds.

    Raises:
        ValueError: a line is no JSON object.
    """

    def __init__(self, path: Path):
        self.path = path
        _repair(path)
        self.rows = [_parse(path, number, line) for number, line in enumerate(_lines(path), 1)]

    def append(self, rows: Iterable[dict[str, Any]]) -> None:
        """Writes whole lines."""
        rows = [*rows]
        with self.path.open("a", encoding="utf-8", newline="\n") as file:
            file.write("".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows))
        self.rows += rows


def _lines(path: Path) -> list[str]:
    # By newlines only: a text may hold other separators of lines.
    return path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []


def _parse(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}, line {number}: no JSON ({error.msg}). Take the line out, and run again.") from error
    if not isinstance(row, dict):
        raise ValueError(f"{path}, line {number}: a {type(row).__name__}, expected a JSON object")
    return row


def _repair(path: Path) -> None:
    """Cuts off a last line that was not written to its end."""
    if not path.exists():
        return
    with path.open("rb+") as file:
        content = file.read()
        end = content.rfind(b"\n") + 1
        if end < len(content):
            file.truncate(end)


def record_provenance(output: Path, provenance: dict[str, Any], environment: dict[str, Any]) -> None:
    """Writes what all rows share, or compares it with what stands there.

    Args:
        output: the file of rows, which need not exist yet.
        provenance: what must be the same for all rows. What an earlier run did not need to say is added.
        environment: what may differ from run to run: a list of all of them is kept.

    Raises:
        ValueError: there are rows that were made in another way, or that nobody knows how they were made.
    """
    path = provenance_file(output)
    has_rows = output.exists() and output.stat().st_size > 0
    has_any = has_rows or (self_prompts_file(output).exists() and self_prompts_file(output).stat().st_size > 0)
    # Of a run that was interrupted before its first row, nothing has to be repeated.
    there: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() and has_any else {}
    if not there and has_rows:
        raise ValueError(f"{output} exists, but no {path.name} that says how it was made: choose another --output")
    here = json.loads(json.dumps(provenance))
    for name, value in here.items():
        if name in there and there[name] != value:
            raise ValueError(
                f"{output} was made with another {name}: {there[name]} there, {value} now. "
                "Repeat what was given then, or choose another --output."
            )
    environments = there.get("environments", [])
    if environment not in environments:
        environments.append(environment)
    write_whole(path, {**there, **here, "environments": environments})


def provenance_file(output: Path) -> Path:
    """`NAME.provenance.json` beside `NAME.jsonl`."""
    return output.with_name(f"{output.stem}.provenance.json")


def self_prompts_file(output: Path) -> Path:
    """`NAME.self-prompts.jsonl` beside `NAME.jsonl`: the target's own prompts."""
    return output.with_name(f"{output.stem}.self-prompts.jsonl")


def fingerprint(target: PreTrainedModel) -> str:
    """Tells models of one shape apart by some values of every parameter: a digest, equal wherever it is loaded."""
    digest = hashlib.sha256()
    for _, parameter in sorted(target.named_parameters()):
        if parameter.is_meta:  # kept on disk by accelerate
            continue
        values = parameter.detach().flatten()
        some = values[:: max(1, len(values) // _VALUES_OF_A_PARAMETER)].to("cpu", torch.float32)
        digest.update(some.numpy().tobytes())
    return digest.hexdigest()[:16]
