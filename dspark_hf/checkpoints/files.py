"""Where the files of a checkpoint are and what their headers say. Knows nothing about formats."""

import json
import math
import os
import uuid
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import list_repo_files
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedConfig
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file

from .refusals import refuse_files


def refuse_missing_folder(source: str) -> None:
    """Raise `OSError` for what can only be meant as a folder and is none: the Hub would complain of its spelling."""
    looks_local = os.path.isabs(source) or source.startswith((".", "~")) or source.count("/") > 1 or "\\" in source
    if looks_local and not os.path.isdir(source):
        raise OSError(f"{source} is no folder on this machine. Check the path (and write `~` out).")


def read_config_dict(source: str, hub_kwargs: dict[str, Any]) -> dict[str, Any]:
    """The content of `config.json`, untouched by any config class.

    Raises:
        OSError: there is no such folder or repository, or it has no readable `config.json`.
        UnsupportedCheckpointError: there is no `config.json`, but GGUF files or pickles.
    """
    refuse_missing_folder(source)
    config_dict, _ = PreTrainedConfig.get_config_dict(source, **hub_kwargs)
    if not config_dict:
        refuse_files(source, _list_files(source, hub_kwargs))
        raise OSError(f"{_place(source, hub_kwargs)} does not appear to have a file named {CONFIG_NAME}.")
    config_dict.pop("_commit_hash", None)
    return config_dict


def optional_file(source: str | os.PathLike, name: str, **location: Any) -> str | None:
    """Where a file lies that a drafter may come with; `None` where there is none, or no way to ask.

    Args:
        location: as for `from_pretrained`: `revision`, `token`, `cache_dir`, ...
    """
    return cached_file(
        source,
        name,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
        _raise_exceptions_for_gated_repo=False,
        **location,
    )


def finite(content: Any) -> Any:
    """The same with `None` for what is not a number, which JSON does not know."""
    if isinstance(content, Mapping):
        return {name: finite(value) for name, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content


def write_whole(path: Path, content: Mapping[str, Any]) -> None:
    """Writes a JSON file, by a rename at the end: whoever reads meanwhile finds the old file or the new one, whole."""
    # Several processes may write it at once, of several machines too.
    staged = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
    text = json.dumps(finite(content), indent=2, ensure_ascii=False, allow_nan=False)
    staged.write_text(text + "\n", encoding="utf-8")
    os.replace(staged, path)


def read_shapes(source: str, hub_kwargs: dict[str, Any], variant: str | None = None) -> dict[str, list[int]]:
    """Shape of each stored tensor by name, from the safetensors headers alone.

    Raises:
        OSError: there are no safetensors weights, a shard is missing, or a file is damaged.
        UnsupportedCheckpointError: the weights are GGUF files or pickles.
    """
    return {name: shape for name, (shape, _) in read_headers(source, hub_kwargs, variant).items()}


def read_headers(
    source: str, hub_kwargs: dict[str, Any], variant: str | None = None
) -> dict[str, tuple[list[int], str]]:
    """Shape and dtype, as safetensors names it (`"BF16"`), of each stored tensor; raises as `read_shapes`."""
    headers: dict[str, tuple[list[int], str]] = {}
    for path in weight_files(source, hub_kwargs, variant):
        headers.update(_read_header(path))
    return headers


def load_tensors(
    source: str, hub_kwargs: dict[str, Any], names: Collection[str] | None = None
) -> dict[str, torch.Tensor]:
    """The stored tensors by name, on the CPU, each in the dtype that it is stored in.

    Args:
        names: of those to load; `None`: all.

    Raises:
        As [`read_shapes`].
    """
    tensors: dict[str, torch.Tensor] = {}
    for path in weight_files(source, hub_kwargs):
        with safe_open(path, framework="pt") as file:
            stored = file.keys()
            tensors |= {name: file.get_tensor(name) for name in stored if names is None or name in names}
    return tensors


def weight_files(source: str, hub_kwargs: dict[str, Any], variant: str | None = None) -> list[str]:
    """The safetensors files of a checkpoint, fetched where they are on the Hub; raises as `read_shapes`."""
    weights, index_name = (with_variant(name, variant) for name in (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME))
    single = cached_file(source, weights, _raise_exceptions_for_missing_entries=False, **hub_kwargs)
    if single is not None:
        return [single]
    index = cached_file(source, index_name, _raise_exceptions_for_missing_entries=False, **hub_kwargs)
    if index is None:
        refuse_files(source, _list_files(source, hub_kwargs))
        # The host raises here, and says in its own words what is missing.
        return [str(cached_file(source, weights, **hub_kwargs))]
    return [str(cached_file(source, shard, **hub_kwargs)) for shard in _shard_names(index)]


def with_variant(name: str, variant: str | None) -> str:
    """`model.safetensors` to `model.fp16.safetensors`, and the index to `model.safetensors.index.fp16.json`."""
    head, _, extension = name.rpartition(".")
    return name if variant is None else f"{head}.{variant}.{extension}"


def _shard_names(index_path: str) -> list[str]:
    try:
        with open(index_path, encoding="utf-8") as file:
            return sorted(set(json.load(file)["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise OSError(
            f"{index_path} is not an index of weights: expected a JSON object with `weight_map`. Fetch it again."
        ) from error


def _read_header(path: str) -> dict[str, tuple[list[int], str]]:
    try:
        with safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
            return {name: (list(one.get_shape()), str(one.get_dtype())) for name, one in slices.items()}
    except SafetensorError as error:
        raise OSError(
            f"{path} is not a readable safetensors file ({error}). The download may be incomplete, or the file a Git "
            "LFS pointer: fetch it again."
        ) from error


def _list_files(source: str, hub_kwargs: dict[str, Any]) -> list[str]:
    """Names of the files beside the config; none where the Hub cannot be asked."""
    folder = _place(source, hub_kwargs)
    if os.path.isdir(source):
        return sorted(os.listdir(folder)) if os.path.isdir(folder) else []
    if hub_kwargs.get("local_files_only"):
        return []
    try:
        names = list_repo_files(source, revision=hub_kwargs["revision"], token=hub_kwargs["token"])
    except OSError:
        return []
    return [name for name in names if os.path.dirname(name) == hub_kwargs["subfolder"].strip("/")]


def _place(source: str, hub_kwargs: dict[str, Any]) -> str:
    return os.path.join(source, hub_kwargs["subfolder"]) if hub_kwargs["subfolder"] else source
