"""Drafters of vLLM speculators: `dspark`, and `dflash`, which is the same without heads and without anchor sampling.

Layer ids index `hidden_states`, so they are one higher than ours. The target is called the verifier. A sliding layer
counts its window from the anchor.
"""

from collections.abc import Sequence
from typing import Any

from ..configuration_dspark import DSparkConfig
from ..errors import UnsupportedCheckpointError
from .fields import (
    NO_HEADS,
    SPECIAL_TOKENS,
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
from .qwen3 import read_backbone, read_window, render_backbone

KINDS = ("dspark", "dflash")
# The names of version 0.9.0, which is the one written.
ARCHITECTURES = {"dspark": "DSparkDraftModel", "dflash": "DFlashDraftModel"}
VERSION = "0.9.0"
OWN_PARTS = "optional"
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
        **read_target(fields),
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


def render(config: DSparkConfig, target_architectures: Sequence[str]) -> dict[str, Any]:
    """The `config.json` of a drafter in this format, as far as it goes: see `checkpoints.render_config`."""
    kind = kind_of(config)
    common = render_common(config)
    special_tokens = {name: common.pop(name) for name in SPECIAL_TOKENS}
    verifier = {"name_or_path": common.pop("target_model_name_or_path", None)}
    is_wider = config.target_hidden_size != config.hidden_size
    heads = {"markov_head_type": "vanilla", "confidence_head_with_markov": False, **render_heads(config)}
    return {
        **common,
        **render_block(config),
        **(heads if kind == "dspark" else {}),
        "architectures": [ARCHITECTURES[kind]],
        "speculators_model_type": kind,
        "speculators_version": VERSION,
        "sample_from_anchor": config.sample_from_anchor,
        "aux_hidden_state_layer_ids": [layer_id + 1 for layer_id in config.target_layer_ids],
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size if is_wider else None,
        "sliding_window_non_causal": not config.sliding_block_causal,
        "transformer_layer_config": {**render_backbone(config), **special_tokens},
        "speculators_config": _render_proposal(config, kind, {**verifier, "architectures": [*target_architectures]}),
    }


def kind_of(config: DSparkConfig) -> str:
    """Which of `KINDS` a drafter is: `dflash` has no heads, and its anchor predicts nothing."""
    has_heads = config.has_markov_head or config.enable_confidence_head
    return "dspark" if has_heads or config.sample_from_anchor else "dflash"


def _render_proposal(config: DSparkConfig, kind: str, verifier: dict[str, Any]) -> dict[str, Any]:
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": config.num_draft_tokens,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "algorithm": kind,
        "default_proposal_method": "greedy",
        "proposal_methods": [proposal],
        "verifier": verifier,
    }
