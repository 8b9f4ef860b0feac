"""The draft layers that DeepSpec, z-lab and speculators share: those of Qwen3."""

from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import Qwen3Config

from ..configuration_dspark import LAYER_TYPES, DSparkConfig
from ..errors import CheckpointFieldError
from .fields import Fields

_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)
_COPIED = (*_SIZES, "hidden_act", "rms_norm_eps", "attention_bias", "attention_dropout", "initializer_range")
_WINDOWS = ("layer_types", "use_sliding_window", "sliding_window", "max_window_layers")


def read_backbone(fields: Fields) -> dict[str, Any]:
    """Sizes, activation, rotary embedding and layer types, the host's Qwen3 defaults filling what is not written.

    The references load these keys with `Qwen3Config`, so its defaults are part of the formats.
    """
    for name in _SIZES:
        fields.optional_whole(name)
    given = {name: fields.get(name) for name in (*_COPIED, *_WINDOWS) if fields.mentions(name)}
    given.update(_read_rope(fields))
    try:
        host = Qwen3Config(**given)
    except (StrictDataclassError, ValueError, TypeError, KeyError) as error:
        reason = " ".join(str(error).split())
        raise CheckpointFieldError(fields.source, "config.json", f"is no Qwen3 backbone: {reason}") from error
    return {
        **{name: getattr(host, name) for name in _COPIED},
        "backbone": "qwen3",
        "rope_parameters": host.rope_parameters,
        "layer_types": host.layer_types,
        "sliding_window": None,
    }


def read_window(fields: Fields, backbone: dict[str, Any]) -> int | None:
    """Width of the sliding window, or `None` where all layers are full."""
    layer_types = backbone["layer_types"]
    if set(layer_types) - set(LAYER_TYPES) or len(layer_types) != backbone["num_hidden_layers"]:
        raise fields.error(
            "layer_types",
            f"must name {' or '.join(LAYER_TYPES)} for each of the {backbone['num_hidden_layers']} draft layers, "
            f"got {layer_types}.",
        )
    if "sliding_attention" not in layer_types:
        return None
    if not fields.flag("use_sliding_window", default=False):
        raise fields.error(
            "use_sliding_window",
            f"is not true, but `layer_types` is {layer_types}: whether these layers slide cannot be guessed. Set it "
            "to true, or the layer types to full_attention, as the drafter was trained.",
        )
    return fields.whole("sliding_window")


def render_backbone(config: DSparkConfig) -> dict[str, Any]:
    """The inverse of `read_backbone` and `read_window`, in the keys of `Qwen3Config`."""
    slides = "sliding_attention" in config.layer_types
    return {
        **{name: getattr(config, name) for name in _COPIED},
        "model_type": "qwen3",
        "layer_types": config.layer_types,
        "max_window_layers": config.num_hidden_layers,
        "rope_parameters": config.rope_parameters,
        "sliding_window": config.sliding_window if slides else None,
        "use_sliding_window": slides,
        "tie_word_embeddings": False,
        "use_cache": True,
    }


def _read_rope(fields: Fields) -> dict[str, Any]:
    """`rope_parameters` as transformers 5 writes it, or the `rope_theta` and `rope_scaling` of version 4."""
    given = {name: fields.get(name) for name in ("rope_parameters", "rope_theta", "rope_scaling")}
    rope = given["rope_parameters"]
    if rope is None:
        return {name: value for name, value in given.items() if value is not None}
    if not isinstance(rope, dict):
        raise fields.error("rope_parameters", f"must be a JSON object, got {rope!r}.")
    theta = given["rope_theta"]
    if theta is not None and rope.get("rope_theta", theta) != theta:
        raise fields.error(
            "rope_theta",
            f"is {theta}, but `rope_parameters.rope_theta` is {rope['rope_theta']}. Keep the one that the drafter was "
            "trained with.",
        )
    return {"rope_parameters": {**rope, **({} if theta is None else {"rope_theta": theta})}}
