"""Where the report of a command goes: tables for people, JSON for programs.

`--json FILE` writes both; `--json` alone gives JSON on standard output, and all else on standard error.
"""

import io
import json
import sys
from dataclasses import field
from pathlib import Path
from typing import Any

from rich.console import Console

from .checkpoints.files import finite

STANDARD_OUTPUT = "-"


def json_field() -> Any:
    """The field `json` of a command's settings."""
    text = "also write the report to this file; alone: to standard output, and all else to standard error"
    return field(default=None, metadata={"help": text, "nargs": "?", "const": STANDARD_OUTPUT})


def console_for(path: str | None, width: int | None = None) -> Console:
    """Where tables and progress go.

    Args:
        path: the value of `--json`.
        width: for a file or a pipe, where nobody says how wide it is.
    """
    stream = sys.stderr if path == STANDARD_OUTPUT else sys.stdout
    if isinstance(stream, io.TextIOWrapper):
        # Not every encoding has a τ, and no report is lost for want of one.
        stream.reconfigure(errors="replace")
    return Console(file=stream, width=None if stream.isatty() else width)


def write_json(report: Any, path: str | None) -> None:
    """Writes a report where `--json` says; what is not a number, which JSON does not know, as `null`."""
    if path is None:
        return
    text = json.dumps(finite(report), indent=2, allow_nan=False) + "\n"
    if path == STANDARD_OUTPUT:
        sys.stdout.write(text)
    else:
        Path(path).write_text(text, encoding="utf-8")
