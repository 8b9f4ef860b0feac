"""`dspark-hf inspect`: what a checkpoint is, from its config and the headers of its files; no weight is read."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from huggingface_hub import get_safetensors_metadata, is_offline_mode
from huggingface_hub.errors import NotASafetensorsRepoError
from rich.table import Table

from .calibration import CALIBRATION_NAME
from .checkpoints import Checkpoint, read_checkpoint, refuse_missing_folder
from .checkpoints.files import optional_file, read_headers
from .comparison import check_folders, check_given
from .configuration_dspark import DSparkConfig
from .modeling_dspark import DSparkDrafter
from .reports import console_for, json_field, write_json

_WIDTH = 140
_LAYER = re.compile(r"^layers\.(\d+)\.")


@dataclass
class InspectSettings:
    """Show a drafter's format, config, tensors and size, and what it shares with its target, without loading it."""

    drafter: str | None = field(default=None, metadata={"positional": True, "help": "folder or hub id"})
    revision: str | None = field(default=None, metadata={"help": "branch, tag or commit on the hub"})
    json: str | None = json_field()

    def __post_init__(self) -> None:
        check_given(self, drafter="a folder or a hub id")
        check_folders(self, "json")


@dataclass(frozen=True)
class Tensor:
    """One tensor as a file's header describes it.

    Attributes:
        dtype: as safetensors names it (`"BF16"`).
    """

    shape: list[int]
    dtype: str

    @property
    def num_bytes(self) -> int:
        # Every name but BOOL says how many bits a value has.
        bits = re.search(r"\d+", self.dtype)
        return prod(self.shape) * (int(bits[0]) if bits else 8) // 8


def run_inspect(settings: InspectSettings) -> dict[str, Any]:
    """Runs `dspark-hf inspect`.

    Returns:
        `source`, `format`, `target`, `block` (what a block gives), `heads`, `shared_with_target`, `calibrated`,
        `num_parameters`, `num_bytes`, `config` (every field, in our terms) and `tensors` (shape and dtype by name).

    Raises:
        OSError, UnsupportedCheckpointError, CheckpointFieldError, IncompleteCheckpointError: as `from_pretrained`.
    """
    report = inspect_checkpoint(str(settings.drafter), settings.revision)
    console = console_for(settings.json, _WIDTH)
    console.print(_summary(report))
    console.print(_tensor_table(report["tensors"]))
    console.print(_config_table(report["config"]))
    write_json(report, settings.json)
    return report


def inspect_checkpoint(source: str, revision: str | None = None) -> dict[str, Any]:
    """What [`run_inspect`] shows."""
    tensors: dict[str, Tensor] = {}

    def shapes() -> Mapping[str, list[int]]:
        tensors.update(read_tensors(source, revision))
        return {name: tensor.shape for name, tensor in tensors.items()}

    checkpoint = read_checkpoint(source, revision=revision, shapes=shapes)
    checkpoint.require(DSparkDrafter.tensor_shapes(checkpoint.config))
    return _report(checkpoint, tensors, revision)


def read_tensors(source: str, revision: str | None = None) -> dict[str, Tensor]:
    """Shapes and dtypes of a checkpoint's tensors: of a folder from its files, of a repository by requests for the
    headers alone, or, offline, from the files in the cache.

    Raises:
        OSError: there are no such weights.
        UnsupportedCheckpointError: the weights are of a kind that is never opened.
    """
    refuse_missing_folder(source)
    is_offline = is_offline_mode()
    if not Path(source).is_dir() and not is_offline:
        try:
            metadata = get_safetensors_metadata(source, revision=revision)
        except NotASafetensorsRepoError:
            # What it holds instead is said below.
            pass
        else:
            infos = [file.tensors for file in metadata.files_metadata.values()]
            return {name: Tensor(list(info.shape), str(info.dtype)) for file in infos for name, info in file.items()}
    location = {"subfolder": "", "revision": revision, "token": None, "local_files_only": is_offline}
    headers = read_headers(source, location)
    return {name: Tensor(*header) for name, header in headers.items()}


def _report(checkpoint: Checkpoint, tensors: dict[str, Tensor], revision: str | None) -> dict[str, Any]:
    config = checkpoint.config
    calibration = optional_file(checkpoint.source, CALIBRATION_NAME, revision=revision)
    return {
        "source": checkpoint.source,
        "format": config.source_format or "ours",
        "target": config.target_model_name_or_path,
        "block": {
            "block_size": config.block_size,
            "sample_from_anchor": config.sample_from_anchor,
            "num_draft_tokens": config.num_draft_tokens,
        },
        "heads": {
            "markov": config.markov_head_type,
            "markov_rank": config.markov_rank,
            "confidence": config.enable_confidence_head,
        },
        "shared_with_target": config.borrowed_parts,
        "calibrated": calibration is not None,
        "num_parameters": sum(prod(tensors[name].shape) for name in tensors if name not in checkpoint.ignored),
        "num_bytes": sum(tensor.num_bytes for tensor in tensors.values()),
        "config": {name: value for name, value in config.to_dict().items() if name in DSparkConfig.__annotations__},
        "tensors": {name: {"shape": tensor.shape, "dtype": tensor.dtype} for name, tensor in tensors.items()},
        "not_needed": sorted(checkpoint.ignored),
    }


def _summary(report: dict[str, Any]) -> Table:
    block, heads = report["block"], report["heads"]
    anchor = "the anchor predicts" if block["sample_from_anchor"] else "the anchor does not predict"
    markov = "none" if not heads["markov_rank"] else f"{heads['markov']}, rank {heads['markov_rank']}"
    confidence = "no" if not heads["confidence"] else f"yes, {'' if report['calibrated'] else 'not '}calibrated"
    rows = {
        "format": report["format"],
        "target": report["target"] or "not named",
        "draft tokens": f"{block['num_draft_tokens']} of a block of {block['block_size']} ({anchor})",
        "Markov head": markov,
        "confidence head": confidence,
        "taken from the target": " and ".join(report["shared_with_target"]) or "nothing but hidden states",
        "parameters": f"{report['num_parameters']:,}",
        "size": f"{report['num_bytes'] / 1e6:,.1f} MB",
    }
    table = Table(title=report["source"], show_header=False)
    for name, value in rows.items():
        table.add_row(name, str(value))
    return table


def _tensor_table(tensors: dict[str, dict[str, Any]]) -> Table:
    """Tensors by name; those that every layer has stand once."""
    grouped: dict[tuple[str, str, str], list[int]] = {}
    for name, tensor in tensors.items():
        layer = _LAYER.match(name)
        key = (_LAYER.sub("layers.*.", name), str(tensor["shape"]), tensor["dtype"])
        grouped.setdefault(key, []).append(int(layer[1]) if layer else -1)
    table = Table()
    for column in ("tensor", "shape", "dtype", "layers"):
        table.add_column(column)
    for key, layers in grouped.items():
        table.add_row(*key, "" if layers == [-1] else ", ".join(map(str, sorted(layers))))
    return table


def _config_table(config: dict[str, Any]) -> Table:
    table = Table()
    for column in ("config", "value"):
        table.add_column(column, overflow="fold")
    for name, value in config.items():
        table.add_row(name, str(value))
    return table
