"""`dspark-hf drafters`: the known pairs as a table, or the one for a target."""

from dataclasses import asdict, dataclass, field
from typing import Any

from rich.table import Table

from .comparison import check_folders
from .registry import NOT_YET, SUPPORTED, TESTED, KnownPair, find_drafter, known_pairs
from .reports import console_for, json_field, write_json

_STYLES = {TESTED: "green", SUPPORTED: "", NOT_YET: "dim"}
_WIDTH = 160


@dataclass
class DraftersSettings:
    """List the known drafters, or find the one for a target."""

    target: str | None = field(
        default=None, metadata={"positional": True, "help": "hub id or folder; default: list all that are known"}
    )
    json: str | None = json_field()

    def __post_init__(self) -> None:
        check_folders(self, "json")


def run_drafters(settings: DraftersSettings) -> list[dict[str, Any]]:
    """Runs `dspark-hf drafters`. Returns the pairs that it shows.

    Raises:
        UnknownTargetError: no drafter is known for the target, or none that can be used.
    """
    console = console_for(settings.json, _WIDTH)
    if settings.target is None:
        pairs: tuple[KnownPair, ...] = known_pairs()
    else:
        match = find_drafter(settings.target)
        pairs = (match.pair,)
        if match.remark is not None:
            console.print(match.remark, markup=False)
    console.print(_table(pairs))
    report = [asdict(pair) for pair in pairs]
    write_json(report, settings.json)
    return report


def _table(pairs: tuple[KnownPair, ...]) -> Table:
    table = Table()
    for name in ("target", "drafter", "algorithm", "format"):
        table.add_column(name, no_wrap=True, overflow="fold")
    table.add_column("status")
    for pair in pairs:
        status = pair.status if pair.reason is None else f"{pair.status}: {pair.reason}"
        table.add_row(pair.target, pair.drafter, pair.algorithm, pair.format, status, style=_STYLES[pair.status])
    return table
