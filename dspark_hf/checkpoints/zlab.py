"""z-lab's DFlash drafters: no heads, no embedding of their own; only mask positions predict.

Sliding layers follow the dflash 0.1.0 package: a window per query, causal unless `is_causal` is false.
"""

from collections.abc import Sequence
from typing import Any

from ..configuration_dspark import DSparkConfig
from .fields import (
    NO_HEADS,
    Fields,
    read_block,
    read_special_tokens,
    read_taps,
    read_target,
    render_block,
    render_common,
)
from .qwen3 import read_backbone, read_window, render_backbone

ARCHITECTURES = ("DFlashDraftModel",)
SPARE_TENSORS = ()
OWN_PARTS = "never"


def translate(source: str, config_dict: dict[str, Any]) -> dict[str, Any]:
    """Our settings for a z-lab `config.json`.

    Raises:
        CheckpointFieldError: a field is missing, contradictory or out of range.
    """
    fields = Fields(source, config_dict, home="dflash_config")
    backbone = read_backbone(fields)
    return {
        **backbone,
        **read_block(fields, backbone["vocab_size"], sample_from_anchor=False),
        **read_special_tokens(fields),
        **read_taps(fields),
        **NO_HEADS,
        **read_target(fields),
        **_read_windows(fields, backbone),
        "embedding_scale": fields.number("input_embedding_scale"),
        "logits_multiplier": fields.number("output_multiplier", default=1.0),
        "final_logit_softcapping": fields.number("final_logit_softcapping"),
        "dtype": config_dict.get("dtype") or config_dict.get("torch_dtype"),
        "source_format": "z-lab dflash",
    }


def _read_windows(fields: Fields, backbone: dict[str, Any]) -> dict[str, Any]:
    window = read_window(fields, backbone)
    is_causal = fields.flag("is_causal", default=window is not None)
    if is_causal and "full_attention" in backbone["layer_types"] and fields.get("is_causal") is not None:
        raise fields.error(
            "is_causal",
            f"is true, but `layer_types` is {backbone['layer_types']}: a causal layer with full attention cannot be "
            "built. Remove it if only the sliding layers were trained causally.",
        )
    if window is None:
        return {}
    return {"sliding_window": window, "sliding_window_origin": "query", "sliding_block_causal": is_causal}


def render(config: DSparkConfig, target_architectures: Sequence[str]) -> dict[str, Any]:
    """The `config.json` of a drafter in this format, as far as it goes: see `checkpoints.render_config`."""
    block = render_block(config)
    optional = {
        "input_embedding_scale": config.embedding_scale,
        "output_multiplier": None if config.logits_multiplier == 1.0 else config.logits_multiplier,
        "final_logit_softcapping": config.final_logit_softcapping,
        "is_causal": None if config.sliding_block_causal else False,
    }
    return {
        **render_common(config),
        **render_backbone(config),
        "architectures": [*ARCHITECTURES],
        "block_size": block["block_size"],
        "dflash_config": {"mask_token_id": block["mask_token_id"], "target_layer_ids": config.target_layer_ids},
        **{name: value for name, value in optional.items() if value is not None},
    }
