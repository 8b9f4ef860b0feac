"""Published drafters, whatever wrote them, read as our config plus an account of their tensors; and written.

All formats use our tensor names, so nothing is renamed: only the config is translated (one module per format, both
ways) and the tensors are counted. No remote code and no pickle is ever opened; what cannot be read for certain is
refused by name, and so is what a format to be written cannot hold.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from huggingface_hub.errors import StrictDataclassError

from ..configuration_dspark import DSparkConfig
from ..errors import CheckpointFieldError, IncompleteCheckpointError
from . import deepspec, native, speculators, zlab
from .files import read_config_dict, read_shapes, refuse_missing_folder
from .refusals import names_a_drafter, refuse_unsupported, unknown_kind

FORMATS: dict[str, ModuleType] = {"dspark_hf": native, "deepspec": deepspec, "speculators": speculators, "zlab": zlab}
"""By the names that users give them."""

ORIGINALS = "converted_from"
"""The field of every format that holds the `config.json` of formats that a drafter was converted from."""

# What says how a config came about, and nothing about the drafter.
_HISTORY = (ORIGINALS, "source_format", "architectures", "transformers_version", "_name_or_path")
_SLIDING = ("sliding_window", "sliding_window_origin", "sliding_block_causal")


@dataclass(frozen=True)
class Checkpoint:
    """A drafter on disk or on the Hub: what it is and which tensors it has.

    Attributes:
        source: the folder or repository id, as given.
        config: its settings in our terms, checked.
        tensors: shape of each tensor in the file, by name.
        ignored: names that this format is known to carry and a drafter does not need.
        format_name: the format, one of `FORMATS`.
        config_dict: the `config.json`, as it is.
    """

    source: str
    config: DSparkConfig
    tensors: Mapping[str, list[int] | None]
    ignored: frozenset[str]
    format_name: str = "dspark_hf"
    config_dict: Mapping[str, Any] = field(default_factory=dict)

    def require(self, expected: Mapping[str, Sequence[int]]) -> None:
        """Check that the file holds exactly these tensors.

        Args:
            expected: shape of each tensor of the model, by name.

        Raises:
            IncompleteCheckpointError: a tensor is missing, has no place in the model, or has another shape.
        """
        found = {name: shape for name, shape in self.tensors.items() if name not in self.ignored}
        missing = sorted(set(expected) - set(found))
        unexpected = sorted(set(found) - set(expected))
        mismatched = [
            (name, list(shape), list(expected[name]))
            for name, shape in sorted(found.items())
            if name in expected and shape is not None and list(shape) != list(expected[name])
        ]
        if missing or unexpected or mismatched:
            raise IncompleteCheckpointError(self.source, missing, unexpected, mismatched)


def read_checkpoint(
    pretrained_model_name_or_path: str | os.PathLike,
    *,
    subfolder: str = "",
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | os.PathLike | None = None,
    local_files_only: bool = False,
    force_download: bool = False,
    proxies: dict[str, str] | None = None,
    variant: str | None = None,
    shapes: Callable[[], Mapping[str, list[int]]] | None = None,
) -> Checkpoint:
    """Open a drafter of any supported format: our own, DeepSpec, z-lab DFlash, vLLM speculators.

    Args:
        pretrained_model_name_or_path: a local folder or a repository id on the Hub.
        subfolder: the folder inside it that holds `config.json`.
        revision, token, cache_dir, local_files_only, force_download, proxies, variant: as in
            [`~transformers.PreTrainedModel.from_pretrained`].
        shapes: gives the shape of each tensor, in place of the files, which would be fetched for that.

    Raises:
        OSError: the folder, the repository or one of its files cannot be found or read.
        UnsupportedCheckpointError: it holds something else than a drafter that can be opened.
        CheckpointFieldError: a field of its config is missing, contradictory or out of range.
    """
    source = str(pretrained_model_name_or_path)
    hub_kwargs = {
        "subfolder": subfolder,
        "revision": revision,
        "token": token,
        "cache_dir": cache_dir,
        "local_files_only": local_files_only,
        "force_download": force_download,
        "proxies": proxies,
    }
    config_dict = read_config_dict(source, hub_kwargs)
    checkpoint_format, settings = _read_settings(source, config_dict)
    # Only now, so that a drafter that is refused is not downloaded first.
    tensors = read_shapes(source, hub_kwargs, variant) if shapes is None else shapes()
    config = _build_config(source, {**_owned_parts(checkpoint_format, tensors), **settings})
    ignored = frozenset(name for name in tensors if name.startswith(checkpoint_format.SPARE_TENSORS))
    format_name = next(name for name, module in FORMATS.items() if module is checkpoint_format)
    return Checkpoint(source, config, tensors, ignored, format_name, config_dict)


def read_config(
    pretrained_model_name_or_path: str | os.PathLike, checkpoint_config: DSparkConfig, **hub_kwargs: Any
) -> DSparkConfig:
    """The config of a folder or repository that need not hold weights.

    Args:
        checkpoint_config: config of the weights that it is for: says which parts they own.
        hub_kwargs: as for [`read_checkpoint`].

    Raises:
        As [`read_checkpoint`].
    """
    source = str(pretrained_model_name_or_path)
    config_dict = read_config_dict(source, {"subfolder": "", **hub_kwargs})
    return _as_config(source, config_dict, checkpoint_config)


def render_config(
    checkpoint: Checkpoint,
    config: DSparkConfig,
    format_name: str,
    *,
    target_architectures: Sequence[str] = (),
    target_embedding_scale: float | None = None,
) -> dict[str, Any]:
    """The `config.json` of a drafter in another format, without loss: read again, it means the same.

    Where the drafter was converted from that format, and still is what it was, the file of then comes back.

    Args:
        checkpoint: where the drafter is from.
        config: its config, with what became of it since.
        format_name: one of `FORMATS`.
        target_architectures: those of the target, where they are known.
        target_embedding_scale: what an `embedding_scale` of `None` means with this target; `None`: not known.

    Raises:
        CheckpointFieldError: the format cannot hold the value of a field.
    """

    def losses(config_dict: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
        """The fields that would make another drafter of it, each with its values now and then."""
        read = _as_config(f"{checkpoint.source} as {format_name}", config_dict, config)
        now, then = _meaning(config, target_embedding_scale), _meaning(read, target_embedding_scale)
        return {
            name: (now.get(name), then.get(name)) for name in sorted({*now, *then}) if now.get(name) != then.get(name)
        }

    earlier = _earlier(checkpoint.format_name, checkpoint.config_dict).get(format_name)
    if earlier is not None and not losses(earlier):
        return dict(earlier)
    rendered = FORMATS[format_name].render(config, target_architectures)
    lost = losses(rendered)
    if lost:
        name, (now, then) = next(iter(lost.items()))
        others = f" So it is with {', '.join(f'`{other}`' for other in list(lost)[1:])}." if len(lost) > 1 else ""
        raise CheckpointFieldError(
            checkpoint.source,
            name,
            f"is {now!r}, which the {format_name} format cannot hold: read from there, it would be {then!r}.{others} "
            f"{_advice(lost)}",
        )
    return {**rendered, ORIGINALS: {checkpoint.format_name: dict(checkpoint.config_dict)}}


def _earlier(format_name: str, config_dict: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The `config.json` of each format that a drafter has been in, this one included; the latest of each."""
    found: dict[str, dict[str, Any]] = {}
    originals = config_dict.get(ORIGINALS)
    # Another writer may mean something else by this name.
    for name, earlier in originals.items() if isinstance(originals, dict) else ():
        if isinstance(earlier, dict):
            found |= _earlier(name, earlier)
    return {**found, format_name: dict(config_dict)}


def _meaning(config: DSparkConfig, target_embedding_scale: float | None) -> dict[str, Any]:
    """What a config says of the drafter: fields that others make idle have one value here."""
    meaning = {name: value for name, value in config.to_dict().items() if name not in _HISTORY}
    if not config.has_markov_head:
        meaning["markov_rank"] = 0
    if not config.enable_confidence_head:
        meaning["confidence_head_with_markov"] = False
    if "sliding_attention" not in config.layer_types:
        meaning |= dict.fromkeys(_SLIDING)
    if config.embedding_scale is None:
        meaning["embedding_scale"] = 1.0 if config.own_embed_tokens else target_embedding_scale
    return meaning


def _advice(lost: Mapping[str, tuple[Any, Any]]) -> str:
    if "embedding_scale" in lost and lost["embedding_scale"][0] is None:
        return "Name the target: its embedding says which scale that is."
    return "Keep it in the dspark_hf format, which holds everything."


def _as_config(source: str, config_dict: dict[str, Any], like: DSparkConfig) -> DSparkConfig:
    """A `config.json` in our terms, for weights that own the parts that those of `like` own."""
    owned = {name: getattr(like, name) for name in ("own_embed_tokens", "own_lm_head")}
    _, settings = _read_settings(source, config_dict)
    return _build_config(source, {**owned, **settings})


def _read_settings(source: str, config_dict: dict[str, Any]) -> tuple[ModuleType, dict[str, Any]]:
    """The format of a `config.json` and what it says, in our terms."""
    checkpoint_format = _format_of(source, config_dict)
    return checkpoint_format, checkpoint_format.translate(source, config_dict)


def _format_of(source: str, config_dict: dict[str, Any]) -> ModuleType:
    """The module that translates this `config.json`, or a refusal."""
    refuse_unsupported(source, config_dict)
    architectures = set(config_dict.get("architectures") or ())
    if "speculators_model_type" in config_dict:
        return speculators
    if config_dict.get("model_type") == native.MODEL_TYPE:
        return native
    if architectures & set(deepspec.ARCHITECTURES):
        return deepspec
    if architectures & set(zlab.ARCHITECTURES):
        return zlab
    raise unknown_kind(source, config_dict)


def _owned_parts(checkpoint_format: ModuleType, tensors: Mapping[str, Any]) -> dict[str, bool]:
    """Whether the drafter has its own embedding and head: it has what its file holds."""
    owned = {
        "own_embed_tokens": "embed_tokens.weight" in tensors,
        "own_lm_head": "lm_head.weight" in tensors,
    }
    if checkpoint_format is deepspec and any(owned.values()):
        # DeepSpec saves both. One alone is a lost tensor, which the accounting must report: borrowing the target's
        # would change the drafter in silence.
        owned = dict.fromkeys(owned, True)
    return owned


def _build_config(source: str, settings: dict[str, Any]) -> DSparkConfig:
    try:
        return DSparkConfig.from_dict(settings)
    except (ValueError, TypeError, StrictDataclassError) as error:
        raise CheckpointFieldError(source, "config.json", f"contradicts itself: {error}") from error


__all__ = [
    "FORMATS",
    "ORIGINALS",
    "Checkpoint",
    "names_a_drafter",
    "read_checkpoint",
    "read_config",
    "refuse_missing_folder",
    "render_config",
]
