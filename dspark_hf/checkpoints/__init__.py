"""Published drafters, whatever wrote them, read as our config plus an account of their tensors.

All formats use our tensor names, so nothing is renamed: only the config is translated (one module per format) and the
tensors are counted. No remote code and no pickle is ever opened; what cannot be read for certain is refused by name.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from huggingface_hub.errors import StrictDataclassError

from ..configuration_dspark import DSparkConfig
from ..errors import CheckpointFieldError, IncompleteCheckpointError
from . import deepspec, native, speculators, zlab
from .files import read_config_dict, read_shapes, refuse_missing_folder
from .refusals import names_a_drafter, refuse_unsupported, unknown_kind


@dataclass(frozen=True)
class Checkpoint:
    """A drafter on disk or on the Hub: what it is and which tensors it has.

    Attributes:
        source: the folder or repository id, as given.
        config: its settings in our terms, checked.
        tensors: shape of each tensor in the file, by name.
        ignored: names that this format is known to carry and a drafter does not need.
    """

    source: str
    config: DSparkConfig
    tensors: Mapping[str, list[int] | None]
    ignored: frozenset[str]

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
    checkpoint_format, settings = _read_settings(source, hub_kwargs)
    # Only now, so that a drafter that is refused is not downloaded first.
    tensors = read_shapes(source, hub_kwargs, variant) if shapes is None else shapes()
    config = _build_config(source, {**_owned_parts(checkpoint_format, tensors), **settings})
    ignored = frozenset(name for name in tensors if name.startswith(checkpoint_format.SPARE_TENSORS))
    return Checkpoint(source, config, tensors, ignored)


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
    _, settings = _read_settings(source, {"subfolder": "", **hub_kwargs})
    owned = {name: getattr(checkpoint_config, name) for name in ("own_embed_tokens", "own_lm_head")}
    return _build_config(source, {**owned, **settings})


def _read_settings(source: str, hub_kwargs: dict[str, Any]) -> tuple[ModuleType, dict[str, Any]]:
    """The format of a `config.json` and what it says, in our terms."""
    config_dict = read_config_dict(source, hub_kwargs)
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


__all__ = ["Checkpoint", "names_a_drafter", "read_checkpoint", "read_config", "refuse_missing_folder"]
