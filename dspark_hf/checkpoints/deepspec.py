"""DeepSpec's DSpark drafters, and the DFlash ones that it trains (a Markov rank of 0).

The file has its own embedding and head; the anchor predicts; every draft layer is full attention, whatever
`layer_types` says.
"""

import math
from collections.abc import Sequence
from typing import Any

from ..configuration_dspark import DSparkConfig
from ..errors import UnsupportedCheckpointError
from .fields import (
    Fields,
    read_block,
    read_heads,
    read_special_tokens,
    read_taps,
    read_target,
    render_block,
    render_common,
    render_heads,
)
from .qwen3 import read_backbone, render_backbone

ARCHITECTURES = ("Qwen3DSparkModel", "Gemma4DSparkModel")
SPARE_TENSORS = ()
OWN_PARTS = "always"

_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


def translate(source: str, config_dict: dict[str, Any]) -> dict[str, Any]:
    """Our settings for a DeepSpec `config.json`.

    Raises:
        CheckpointFieldError: a field is missing, contradictory or out of range.
        UnsupportedCheckpointError: a Gemma4 variant that DeepSpec itself rejects.
    """
    fields = Fields(source, config_dict)
    is_gemma4 = "Gemma4DSparkModel" in config_dict["architectures"]
    backbone = _read_gemma4_backbone(fields) if is_gemma4 else {**read_backbone(fields), "embedding_scale": 1.0}
    return {
        **backbone,
        **read_block(fields, backbone["vocab_size"], sample_from_anchor=True),
        **read_special_tokens(fields),
        **read_taps(fields),
        **read_heads(fields),
        **read_target(fields),
        "layer_types": ["full_attention"] * backbone["num_hidden_layers"],
        "final_logit_softcapping": fields.number("final_logit_softcapping"),
        "dtype": config_dict.get("dtype"),
        "source_format": "deepspec dspark",
    }


def _read_gemma4_backbone(fields: Fields) -> dict[str, Any]:
    # From the raw keys: the host's Gemma4 config folds the global ones away in newer versions.
    _refuse_gemma4_variants(fields)
    shares_kv = fields.flag("attention_k_eq_v")
    sizes = {name: fields.whole(name) for name in _SIZES}
    return {
        **sizes,
        "backbone": "gemma4",
        "head_dim": fields.whole("global_head_dim"),
        "num_key_value_heads": fields.whole("num_global_key_value_heads" if shares_kv else "num_key_value_heads"),
        "attention_k_eq_v": shares_kv,
        "attention_bias": fields.flag("attention_bias", default=False),
        "attention_dropout": fields.number("attention_dropout", default=0.0),
        "hidden_act": fields.require("hidden_activation"),
        "rms_norm_eps": fields.number("rms_norm_eps", default=1e-6),
        "rope_parameters": _read_gemma4_rope(fields),
        "max_position_embeddings": fields.whole("max_position_embeddings"),
        "initializer_range": fields.number("initializer_range", default=0.02),
        "embedding_scale": math.sqrt(sizes["hidden_size"]),
    }


def _refuse_gemma4_variants(fields: Fields) -> None:
    for name in ("enable_moe_block", "hidden_size_per_layer_input", "num_kv_shared_layers"):
        if fields.get(name):
            raise UnsupportedCheckpointError(
                fields.source,
                f"a Gemma4 variant with `{name}` {fields.get(name)}",
                "Only the dense Gemma4 draft layers can be built: use a drafter trained with them.",
            )


def _read_gemma4_rope(fields: Fields) -> dict[str, Any]:
    # Beside the dicts per layer type, transformers writes a pair `rope_type`, `rope_theta` that means nothing.
    rope = fields.require("rope_parameters")
    full = rope.get("full_attention") if isinstance(rope, dict) else None
    if not isinstance(full, dict) or full.get("rope_theta") is None:
        raise fields.error(
            "rope_parameters",
            f"must have an object `full_attention` with `rope_type` and `rope_theta`, got {rope!r}.",
        )
    return dict(full)


def render(config: DSparkConfig, target_architectures: Sequence[str]) -> dict[str, Any]:
    """The `config.json` of a drafter in this format, as far as it goes: see `checkpoints.render_config`."""
    is_gemma4 = config.backbone == "gemma4"
    return {
        **render_common(config),
        **(_render_gemma4_backbone(config) if is_gemma4 else render_backbone(config)),
        **render_block(config),
        **render_heads(config),
        "architectures": [ARCHITECTURES[1] if is_gemma4 else ARCHITECTURES[0]],
        "target_layer_ids": config.target_layer_ids,
        "layer_types": ["full_attention"] * config.num_hidden_layers,
    }


def _render_gemma4_backbone(config: DSparkConfig) -> dict[str, Any]:
    # The names without "global" are those of sliding layers, of which a drafter has none.
    return {
        **{name: getattr(config, name) for name in (*_SIZES, "attention_bias", "attention_dropout", "rms_norm_eps")},
        "model_type": "gemma4_text",
        "head_dim": config.head_dim,
        "global_head_dim": config.head_dim,
        "num_key_value_heads": config.num_key_value_heads,
        "num_global_key_value_heads": config.num_key_value_heads,
        "attention_k_eq_v": config.attention_k_eq_v,
        "hidden_activation": config.hidden_act,
        "rope_parameters": {
            "full_attention": config.rope_parameters,
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
        "max_position_embeddings": config.max_position_embeddings,
        "initializer_range": config.initializer_range,
        "final_logit_softcapping": config.final_logit_softcapping,
        "enable_moe_block": False,
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
    }
