"""Where the states of rows are kept between epochs: in memory, or in safetensors files that later runs read as well.

A row is known by a digest of its tokens, so that a folder serves any set of rows: responses may be added to it, and
several runs may share it. Its states are named tensors.
"""

import contextlib
import hashlib
import json
import math
import os
import time
import uuid
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ..checkpoints.files import write_whole
from .responses import Response

States = Mapping[str, torch.Tensor]

# A file holds about as much; what is not in one yet is computed again after a kill.
_BYTES_OF_A_SHARD = 256 * 2**20
# Files that are open at once.
_OPEN_SHARDS = 64
# What a killed run was writing can go after so many seconds.
_OLD = 3600.0
_IDENTITY = "cache.json"
# Values that share a scale, at most.
_GROUP = 64


def row_key(row: Response, length: int) -> str:
    """What a row is known by, cut to `length` tokens: where its response begins counts too."""
    content = json.dumps((row.prompt_ids, row.response_ids[: max(0, length - len(row.prompt_ids))], length))
    return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()


def in_8_bits(states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`[n, W]` to int8 of the same shape and float32 scales `[n, W / g]`, one for g <= 64 neighbours: hidden states
    have a few channels that are far larger than all others."""
    groups = states.float().unflatten(-1, (-1, math.gcd(states.shape[-1], _GROUP)))
    scales = groups.abs().amax(dim=-1) / 127
    quantized = (groups / scales.clamp(min=torch.finfo(torch.float32).tiny)[..., None]).round()
    return quantized.to(torch.int8).flatten(-2), scales


def num_bytes_of(width: int, bits: int) -> int:
    """Of `width` values in bfloat16, or in 8 bits with their scales."""
    return 2 * width if bits == 16 else width + 4 * width // math.gcd(width, _GROUP)


def of_8_bits(quantized: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Back to bfloat16."""
    groups = quantized.unflatten(-1, (scales.shape[-1], -1)).float()
    return (groups * scales[..., None]).flatten(-2).to(torch.bfloat16)


class FeatureStore(Protocol):
    """Keeps states by key."""

    def get(self, key: str) -> States | None:
        """The states of a row; `None` where it has none yet."""

    def put(self, rows: Mapping[str, States]) -> None:
        """Keeps the states of the rows of a batch, tensors on the CPU."""

    def flush(self) -> None:
        """Puts down what a kill would lose."""


class MemoryStore:
    """Keeps them as long as it lives."""

    def __init__(self) -> None:
        self._rows: dict[str, States] = {}

    def get(self, key: str) -> States | None:
        return self._rows.get(key)

    def put(self, rows: Mapping[str, States]) -> None:
        self._rows.update(rows)

    def flush(self) -> None:
        pass


class ShardStore:
    """Keeps them in a folder of safetensors files, each written once, by a rename at its end. Processes may share the
    folder: each finds what the others have written when it lacks a row.

    Args:
        folder: made if it is missing.
        identity: what the states are of; JSON.

    Raises:
        ValueError: the folder holds states of something else.
    """

    def __init__(self, folder: Path, identity: dict[str, Any]):
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        _claim(folder / _IDENTITY, identity)
        # What a kill left unfinished.
        for path in (*folder.glob("states-*.tmp"), *folder.glob(f"{_IDENTITY}.*.tmp")):
            # Another process may be faster.
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_mtime < time.time() - _OLD:
                    path.unlink()
        self._shard_of: dict[str, Path] = {}
        self._known_shards: set[Path] = set()
        self._last_change: int | None = None
        self._open: OrderedDict[Path, Any] = OrderedDict()
        self._waiting: dict[str, States] = {}
        self._num_waiting_bytes = 0
        self._name = uuid.uuid4().hex[:8]
        self._num_written = 0
        self._find_shards()

    def __contains__(self, key: str) -> bool:
        return key in self._waiting or key in self._shard_of

    def get(self, key: str) -> States | None:
        if key in self._waiting:
            return self._waiting[key]
        if key not in self._shard_of:
            self._find_shards()
        path = self._shard_of.get(key)
        if path is None:
            return None
        shard = self._opened(path)
        return {name: shard.get_tensor(f"{key}.{name}") for name in shard.metadata()["names"].split()}

    def put(self, rows: Mapping[str, States]) -> None:
        self._waiting.update(rows)
        self._num_waiting_bytes += sum(t.nbytes for states in rows.values() for t in states.values())
        # All rows of a batch or none: what a kill loses is computed again in the same batches, which decide rounding.
        if self._num_waiting_bytes >= _BYTES_OF_A_SHARD:
            self.flush()

    def flush(self) -> None:
        if not self._waiting:
            return
        names = " ".join(next(iter(self._waiting.values())))
        tensors = {f"{key}.{name}": t for key, states in self._waiting.items() for name, t in states.items()}
        path = self._folder / f"states-{self._name}-{self._num_written:05}.safetensors"
        staged = path.with_suffix(".tmp")
        try:
            save_file(tensors, staged, metadata={"names": names})
        except SafetensorError as error:
            raise OSError(f"{staged} cannot be written ({error}). Is there room in {self._folder}?") from error
        os.replace(staged, path)
        self._num_written += 1
        self._waiting, self._num_waiting_bytes = {}, 0
        self._last_change = None
        self._find_shards()

    def _find_shards(self) -> None:
        # Listing a large folder for each row that is missing would take longer than the target does.
        change = self._folder.stat().st_mtime_ns
        if change == self._last_change:
            return
        self._last_change = change
        for path in sorted(self._folder.glob("states-*.safetensors")):
            if path not in self._known_shards:
                self._known_shards.add(path)
                for name in self._opened(path).keys():  # noqa: SIM118
                    self._shard_of.setdefault(name.partition(".")[0], path)

    def _opened(self, path: Path) -> Any:
        if path in self._open:
            self._open.move_to_end(path)
            return self._open[path]
        try:
            # Mapped, not read: only the rows that are asked for take memory.
            self._open[path] = safe_open(path, framework="pt")
        except (SafetensorError, OSError) as error:
            raise OSError(f"{path} cannot be read ({error}). Delete it: its rows are computed anew.") from error
        while len(self._open) > _OPEN_SHARDS:
            self._open.popitem(last=False)
        return self._open[path]


def _claim(path: Path, identity: dict[str, Any]) -> None:
    """Marks a folder as the cache of these states, or refuses one that is of others."""
    if path.exists():
        found = json.loads(path.read_text(encoding="utf-8"))
        differing = [name for name in identity if found.get(name) != identity[name]]
        if differing:
            name = differing[0]
            raise ValueError(
                f"{path.parent} holds hidden states of another run: `{name}` is {found.get(name)} there and "
                f"{identity[name]} here. Use another folder, or delete this one."
            )
    else:
        write_whole(path, identity)
