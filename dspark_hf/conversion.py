"""`dspark-hf convert`: a drafter from one format to another, file to file. Nothing is rounded, or lost in silence.

All formats name their tensors alike; they differ in the config, in who stores the embedding and the head, and in the
tables of a reduced vocabulary.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub import save_torch_state_dict
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import CONFIG_NAME, GENERATION_CONFIG_NAME, cached_file

from .calibration import CALIBRATION_NAME
from .checkpoints import FORMATS, Checkpoint, read_checkpoint, render_config
from .checkpoints.files import load_tensors, read_shapes
from .comparison import check_folders, check_given
from .configuration_dspark import DSparkConfig
from .errors import CheckpointFieldError
from .modeling_dspark import DSparkDrafter
from .reports import console_for, json_field, write_json
from .serving import launch_lines

# What may lie beside a drafter, and means the same in every format.
_COMPANIONS = (
    GENERATION_CONFIG_NAME,
    CALIBRATION_NAME,
    "LICENSE",
    "added_tokens.json",
    "chat_template.jinja",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
)
# The parts that a drafter may borrow from its target: the field of the config, and the tensor.
_PARTS = {"own_embed_tokens": "embed_tokens.weight", "own_lm_head": "lm_head.weight"}


@dataclass
class ConvertSettings:
    """Convert a drafter to another format: DeepSpec's, speculators', z-lab's or our own."""

    source: str | None = field(
        default=None, metadata={"positional": True, "help": "drafter: hub id or folder, in any of the formats"}
    )
    output: str | None = field(
        default=None, metadata={"positional": True, "help": "folder to write, which must not exist yet"}
    )
    format: Literal["dspark_hf", "deepspec", "speculators", "zlab"] = field(
        default="speculators", metadata={"help": "format to write"}
    )
    target: str | None = field(
        default=None,
        metadata={
            "help": "target: hub id or folder; gives the embedding and head that the format stores and the drafter "
            "borrows; where the format need not store them, copies of the target's are left out"
        },
    )
    revision: str | None = field(default=None, metadata={"help": "branch, tag or commit of a source on the Hub"})
    max_shard_size: str = field(default="5GB", metadata={"help": "largest size of one weight file"})
    launch: bool = field(default=False, metadata={"help": "print how engines serve the converted drafter"})
    json: str | None = json_field()

    def __post_init__(self) -> None:
        check_folders(self, "json")
        check_given(self, source="a folder or hub id", output="the folder to write")


@dataclass(frozen=True)
class Conversion:
    """What a conversion did.

    Attributes:
        output: the folder that was written.
        config: the drafter's config, in our terms.
        added: names of the tensors that the source lacks.
        left_out: names of the tensors that only the source has.
    """

    output: Path
    config: DSparkConfig
    added: list[str]
    left_out: list[str]


@dataclass(frozen=True)
class _Target:
    """What a conversion may need of a target: its own two tables, and how its embedding scales."""

    name: str
    architectures: list[str]
    embedding_scale: float
    tensors: dict[str, torch.Tensor]


def run_conversion(settings: ConvertSettings, report: Callable[[str], None] | None = None) -> Conversion:
    """Converts, and says what was done."""
    if report is None:
        report = partial(console_for(settings.json).print, markup=False, highlight=False, soft_wrap=True)
    conversion = convert_drafter(
        str(settings.source),
        str(settings.output),
        settings.format,
        target=settings.target,
        revision=settings.revision,
        max_shard_size=settings.max_shard_size,
    )
    report(f"wrote {conversion.output}, a drafter in the {settings.format} format")
    for what, names in (("added", conversion.added), ("left out", conversion.left_out)):
        if names:
            report(f"{what}: {', '.join(names)}")
    launches = []
    if settings.launch:
        launches = launch_lines(conversion.config, settings.format, str(conversion.output), settings.target)
        for launch in launches:
            report(str(launch))
    tensors = {"added": conversion.added, "left_out": conversion.left_out}
    lines = [str(launch) for launch in launches]
    write_json(
        {"output": str(conversion.output), "format": settings.format, **tensors, "launch": lines}, settings.json
    )
    return conversion


def convert_drafter(
    source: str | os.PathLike,
    output: str | os.PathLike,
    format_name: str,
    *,
    target: str | os.PathLike | None = None,
    revision: str | None = None,
    max_shard_size: int | str = "5GB",
) -> Conversion:
    """Writes a drafter in another format: the same tensors, bit by bit, and a config that means the same.

    A conversion back gives the first `config.json` again, word for word, as long as the drafter has not changed.

    Args:
        source: folder or repository id of a drafter in any format.
        output: folder to write. Nothing is left of it after an error.
        format_name: `"dspark_hf"`, `"deepspec"`, `"speculators"` or `"zlab"`.
        target: folder or repository id of the drafter's target. DeepSpec stores the embedding and the head: a drafter
            that borrows them needs it. In the other formats, copies of the target's are left out.
        revision: of `source`, on the Hub.
        max_shard_size: largest size of one weight file.

    Raises:
        FileExistsError: there is something at `output`.
        CheckpointFieldError: the format cannot hold the value of a field (the message names it).
        OSError, UnsupportedCheckpointError, IncompleteCheckpointError: as `DSparkDrafter.from_pretrained`.
        ValueError: the target has no tables that fit this drafter.
    """
    source, output = str(source), Path(output)
    if output.exists():
        raise FileExistsError(f"{output} exists, and nothing is overwritten: name another folder.")
    if format_name not in FORMATS:
        raise ValueError(f"`format_name` must be one of {', '.join(FORMATS)}, got {format_name!r}.")
    checkpoint = read_checkpoint(source, revision=revision)
    checkpoint.require(DSparkDrafter.tensor_shapes(checkpoint.config))
    opened = None if target is None else _open_target(str(target))
    config, tensors = _settle(checkpoint, load_tensors(source, _location(revision)), format_name, opened)
    config_dict = render_config(
        checkpoint,
        config,
        format_name,
        target_architectures=() if opened is None else opened.architectures,
        target_embedding_scale=None if opened is None else opened.embedding_scale,
    )
    # Not by `optional_file`: what cannot be asked for now would be lost in silence.
    companions = [
        cached_file(source, name, revision=revision, _raise_exceptions_for_missing_entries=False)
        for name in _COMPANIONS
    ]
    _write(output, config_dict, tensors, [path for path in companions if path is not None], max_shard_size)
    added, left_out = sorted(tensors.keys() - checkpoint.tensors), sorted(checkpoint.tensors.keys() - tensors)
    return Conversion(output, config, added, left_out)


def _location(revision: str | None = None) -> dict[str, Any]:
    return {"subfolder": "", "revision": revision, "token": None, "local_files_only": False}


def _settle(
    checkpoint: Checkpoint, stored: dict[str, torch.Tensor], format_name: str, target: _Target | None
) -> tuple[DSparkConfig, dict[str, torch.Tensor]]:
    """Who has which tensors in the format, and the config that says so."""
    tensors = {name: tensor for name, tensor in stored.items() if name not in checkpoint.ignored}
    settings = checkpoint.config.to_dict()
    had_embedding = "embed_tokens.weight" in tensors
    for part, name in _PARTS.items():
        rule, copy = FORMATS[format_name].OWN_PARTS, None if target is None else target.tensors[name]
        if part == "own_lm_head" and checkpoint.config.has_reduced_vocabulary:
            # A head of these ids alone: speculators knows no other place for it than the file.
            rule = "always" if format_name == "speculators" else rule
            copy = None if copy is None else _rows_of(copy, stored["d2t"])
        if name not in tensors and rule == "always":
            tensors[name] = _borrowed(checkpoint, part, format_name, copy)
        elif name in tensors and rule != "always" and copy is not None and _same(tensors[name], copy):
            del tensors[name]
        if name in tensors and rule == "never":
            raise CheckpointFieldError(
                checkpoint.source,
                part,
                f"is true, but the {format_name} format has the target's. If it is a copy of those, name the target.",
            )
        settings[part] = name in tensors
    if settings["own_embed_tokens"] != had_embedding and settings["embedding_scale"] is None and target is not None:
        # A table of its own is not scaled, the target's is as the target does.
        settings["embedding_scale"] = 1.0 if had_embedding else target.embedding_scale
    if format_name == "speculators" and checkpoint.config.has_reduced_vocabulary:
        tensors["t2d"] = _readable_by(tensors["d2t"], checkpoint.config.vocab_size)
    if target is not None and settings["target_model_name_or_path"] is None:
        settings["target_model_name_or_path"] = target.name
    return DSparkConfig.from_dict(settings), tensors


def _borrowed(checkpoint: Checkpoint, part: str, format_name: str, copy: torch.Tensor | None) -> torch.Tensor:
    """The target's table, for a format that stores it."""
    config = checkpoint.config
    if copy is None:
        raise CheckpointFieldError(
            checkpoint.source,
            part,
            f"is false, but the {format_name} format stores `{_PARTS[part]}`. Name the target, to take it from there.",
        )
    rows = config.vocab_size if part == "own_embed_tokens" else config.draft_vocab_size
    if list(copy.shape) != [rows, config.hidden_size]:
        raise ValueError(
            f"`{_PARTS[part]}` of the target is {list(copy.shape)}, and {checkpoint.source} needs "
            f"{[rows, config.hidden_size]}. Name the target that it was trained for."
        )
    return copy


def _ids_of(d2t: torch.Tensor) -> torch.Tensor:
    """The ids that the offsets `d2t` lead to."""
    return torch.arange(len(d2t)) + d2t


def _rows_of(table: torch.Tensor, d2t: torch.Tensor) -> torch.Tensor | None:
    """The rows of the ids that the offsets `d2t` lead to; `None` if there are fewer."""
    ids = _ids_of(d2t)
    return table[ids] if int(ids.max()) < len(table) else None


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)


def _readable_by(d2t: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """`t2d`, `[vocab_size]` booleans: the ids that the offsets `d2t` lead to."""
    table = torch.zeros(vocab_size, dtype=torch.bool)
    table[_ids_of(d2t)] = True
    return table


def _open_target(source: str) -> _Target:
    """Reads a target's embedding and head, and no other tensor."""
    config = AutoConfig.from_pretrained(source)
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    is_tied = config.get_text_config().tie_word_embeddings
    stored = read_shapes(source, _location())
    names = {
        name: _stored_name(source, model, embedding if is_tied or name == "embed_tokens.weight" else head, stored)
        for name in _PARTS.values()
    }
    tensors = load_tensors(source, _location(), set(names.values()))
    # Tied tables are two in a drafter: each is a tensor of its own.
    return _Target(
        name=source,
        architectures=list(config.architectures or []),
        embedding_scale=float(getattr(embedding, "scalar_embed_scale", 1.0)),
        tensors={name: tensors[stored_as].clone() for name, stored_as in names.items()},
    )


def _stored_name(source: str, model: torch.nn.Module, module: torch.nn.Module, stored: dict[str, Any]) -> str:
    """The name of a table in the target's files, which may hold the language model below another prefix."""
    own_name = next(name for name, other in model.named_modules() if other is module).rpartition(".")[2] + ".weight"
    found = [name for name in stored if f".{name}".endswith(f".{own_name}")]
    if len(found) != 1:
        raise ValueError(
            f"The files of {source} hold {len(found) or 'no'} tensors called `{own_name}`, expected one. Name an "
            "unquantized checkpoint of the target in safetensors."
        )
    return found[0]


def _write(
    output: Path,
    config_dict: dict[str, Any],
    tensors: dict[str, torch.Tensor],
    companions: list[str],
    max_shard_size: int | str,
) -> None:
    """Writes the folder, all of it or nothing."""
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{output.name}-", dir=output.parent) as unfinished:
        folder = Path(unfinished) / output.name
        folder.mkdir()
        save_torch_state_dict(tensors, folder, max_shard_size=max_shard_size)
        for path in companions:
            shutil.copyfile(path, folder / Path(path).name)
        text = json.dumps(config_dict, indent=2, sort_keys=True)
        (folder / CONFIG_NAME).write_text(text + "\n", encoding="utf-8")
        folder.rename(output)


__all__ = ["Conversion", "ConvertSettings", "convert_drafter", "run_conversion"]
