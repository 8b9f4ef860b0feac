"""Drafters of vLLM speculators: `dspark`, and `dflash`, which is the same without heads and without anchor sampling.

Layer ids index `hidden_states`, so they are one higher than ours. The target is called the verifier. A sliding layer
counts its window from the anchor.
"""

from typing import Any

from ..errors import UnsupportedCheckpointError
from .fields import NO_HEADS, Fields, read_block, read_heads, read_special_tokens, read_taps
from .qwen3 import read_backbone, read_window

KINDS = ("dspark", "dflash")
# The map from target to draft ids is the inverse of `d2t`; the others are copies of the verifier's weights.
SPARE_TENSORS = ("t2d", "verifier_lm_head.", "verifier_norm.")


def translate(source: str, config_dict: dict[str, Any]) -> dict[str, Any]:
    """Our settings for a speculators `config.json`.

    Raises:
        CheckpointFieldError: a field is missing, contradictory or out of range.
        UnsupportedCheckpointError: another kind of speculator, or layers other than those of Qwen3.
    """
    kind = config_dict["speculators_model_type"]
    fields = Fields(source, config_dict)
    _refuse_other_kinds(fields, kind)
    backbone = read_backbone(fields)
    return {
        **backbone,
        **read_block(fields, backbone["vocab_size"], fields.flag("sample_from_anchor", default=kind == "dspark")),
        **read_special_tokens(fields),
        **read_taps(fields, "aux_hidden_state_layer_ids", shift=1),
        **(read_heads(fields) if kind == "dspark" else NO_HEADS),
        **_read_windows(fields, backbone),
        **_read_vocabulary(fields, backbone["vocab_size"]),
        "target_hidden_size": fields.optional_whole("target_hidden_size"),
        "embedding_scale": 1.0,
        "dtype": config_dict.get("dtype"),
        "target_model_name_or_path": _verifier_name(config_dict),
        "source_format": " ".join(filter(None, ("speculators", kind, config_dict.get("speculators_version")))),
    }


def _refuse_other_kinds(fields: Fields, kind: str) -> None:
    if kind not in KINDS:
        raise UnsupportedCheckpointError(
            fields.source,
            f"a speculator of the type {kind!r}",
            f"Of the speculators types, {' and '.join(KINDS)} can be opened.",
        )
    layer_type = (fields.sections["transformer_layer_config"] or {}).get("model_type", "qwen3")
    if layer_type != "qwen3":
        raise UnsupportedCheckpointError(
            fields.source,
            f"a speculators {kind} drafter with {layer_type} layers",
            "Only draft layers of the Qwen3 kind can be built: use a drafter trained with them.",
        )


def _read_vocabulary(fields: Fields, vocab_size: int) -> dict[str, Any]:
    draft_vocab_size = fields.whole("draft_vocab_size")
    if draft_vocab_size == vocab_size:
        return {"draft_vocab_size": draft_vocab_size}
    # No target has a head of that size, so one that is not in the file is a lost tensor.
    return {"draft_vocab_size": draft_vocab_size, "own_lm_head": True}


def _read_windows(fields: Fields, backbone: dict[str, Any]) -> dict[str, Any]:
    window = read_window(fields, backbone)
    if window is None:
        return {}
    return {
        "sliding_window": window,
        "sliding_window_origin": "anchor",
        "sliding_block_causal": not fields.flag("sliding_window_non_causal", default=False),
    }


def _verifier_name(config_dict: dict[str, Any]) -> str | None:
    verifier = (config_dict.get("speculators_config") or {}).get("verifier") or {}
    return verifier.get("name_or_path")
