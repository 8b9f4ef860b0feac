"""A drafter to start training from: its shape, its draft vocabulary, its first weights."""

import copy
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..comparison import id_list
from ..configuration_dspark import DSparkConfig
from ..modeling_dspark import DSparkDrafter
from ..target_taps import decoder_layers
from .responses import Response

# Of a decoder layer, what a draft layer has under the same name.
_COPIED: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
_COPIED += ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "input_layernorm", "post_attention_layernorm")
# Where a decoder layer has these, its residual stream is another one.
_FOREIGN = ("pre_feedforward_layernorm", "post_feedforward_layernorm", "block_sparse_moe")


def choose_draft_vocabulary(
    rows: Iterable[Response], size: int, vocab_size: int, always: Iterable[int] = ()
) -> torch.Tensor:
    """The most frequent ids of the responses: `[size]`, ascending.

    Where the responses have fewer, the lowest other ids follow: tokenizers number frequent tokens first.

    Args:
        rows: responses of the target; those that are trained on, not the held-out ones.
        size: ids to choose.
        vocab_size: of the target.
        always: ids that must be among them (end of sequence).

    Raises:
        ValueError: `size` is not between 1 and `vocab_size`, or smaller than the number of ids in `always`.
    """
    counts = Counter(token for row in rows for token in row.response_ids)
    chosen = dict.fromkeys(always)
    if not max(1, len(chosen)) <= size <= vocab_size:
        raise ValueError(
            f"`size` is {size}, expected at least {max(1, len(chosen))} and at most the target's {vocab_size} ids."
        )
    ranked = sorted(counts, key=lambda token: (-counts[token], token))
    for token in (*ranked, *range(vocab_size)):
        if len(chosen) >= size:
            break
        chosen.setdefault(token)
    return torch.tensor(sorted(chosen))


def choose_mask_token(rows: Iterable[Response], target: Any, special_ids: Iterable[int] = ()) -> int:
    """An id for the mask that no row uses: a special token if there is one, else the highest id.

    Raises:
        ValueError: every id of the target's vocabulary is in use.
    """
    used = {token for row in rows for token in (*row.prompt_ids, *row.response_ids)}
    config = target.config.get_text_config(decoder=True)
    for ends in (config.bos_token_id, config.pad_token_id, target.generation_config.eos_token_id):
        used |= set(id_list(ends))
    for token in (*sorted(special_ids), *reversed(range(config.vocab_size))):
        if token not in used and token < config.vocab_size:
            return token
    raise ValueError(f"All {config.vocab_size} ids are in use: name one for the mask with `mask_token_id`.")


def default_target_layer_ids(num_target_layers: int, num_taps: int = 5) -> list[int]:
    """Layers evenly over the depth, from the second to the third last, as the published drafters have them."""
    last = max(0, num_target_layers - 3)
    first = min(1, last)
    return sorted({round(i) for i in torch.linspace(first, last, num_taps).tolist()})


def drafter_config(
    target: Any, *, num_hidden_layers: int = 5, target_layer_ids: Sequence[int] | None = None, **fields: Any
) -> DSparkConfig:
    """A config with the target's width, heads and rotation.

    Args:
        target: the model to draft for.
        num_hidden_layers: draft layers.
        target_layer_ids: the tapped layers; `None`: five, evenly over the depth.
        fields: of `DSparkConfig`, in place of what follows from the target; `mask_token_id` is one that must be given.
    """
    config = target.config.get_text_config(decoder=True)
    heads = config.num_attention_heads
    rope = dict(getattr(config, "rope_parameters", None) or {})
    # Layer-wise rotation (Gemma): the full layers' one.
    rope = rope.get("full_attention", rope)
    settings = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        # OPT and MPT name their sizes otherwise, Falcon and MPT have a fixed multiple here.
        "intermediate_size": getattr(config, "intermediate_size", None)
        or getattr(config, "ffn_dim", None)
        or 4 * config.hidden_size,
        "num_hidden_layers": num_hidden_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": getattr(config, "num_key_value_heads", None) or heads,
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // heads,
        "hidden_act": "silu",
        "rms_norm_eps": getattr(config, "rms_norm_eps", 1e-6),
        "rope_parameters": rope or {"rope_type": "default", "rope_theta": 10000.0},
        "max_position_embeddings": getattr(config, "max_position_embeddings", None) or config.max_seq_len,
        "target_layer_ids": list(target_layer_ids or default_target_layer_ids(config.num_hidden_layers)),
        "num_target_layers": config.num_hidden_layers,
        "final_logit_softcapping": getattr(config, "final_logit_softcapping", None),
        "logits_multiplier": getattr(config, "logit_scale", None)
        or 1 / (getattr(config, "logits_scaling", None) or 1.0),
        "bos_token_id": config.bos_token_id,
        "eos_token_id": target.generation_config.eos_token_id,
        "pad_token_id": config.pad_token_id,
        # A folder on this machine is nobody's name.
        "target_model_name_or_path": None if Path(config._name_or_path).is_dir() else config._name_or_path or None,
    }
    if fields.get("markov_head_type") == "none":
        settings["confidence_head_with_markov"] = False
    return DSparkConfig(**{**settings, **fields})


def new_drafter(
    target: Any,
    *,
    draft_ids: torch.Tensor | None = None,
    init_layer_ids: Sequence[int] | None = None,
    seed: int = 0,
    **fields: Any,
) -> DSparkDrafter:
    """A drafter in float32 that is ready to be trained.

    Embedding and head are the target's. With `own_lm_head` the head is the drafter's own, and starts as the target's
    rows.

    Args:
        target: the model to draft for.
        draft_ids: ascending ids that it proposes (see `choose_draft_vocabulary`); `None`: all.
        init_layer_ids: for each draft layer the decoder layer of the target that it starts as; `None`: at random.
        seed: of the random weights.
        fields: as for `drafter_config`.

    Raises:
        ValueError: the target's layers cannot be taken over, or there are more or fewer of them than draft layers.
    """
    if init_layer_ids is not None:
        fields.setdefault("num_hidden_layers", len(init_layer_ids))
        # Qwen2 has biases and does not say so in a field of this name.
        bias = decoder_layers(target)[0].self_attn
        fields.setdefault("attention_bias", getattr(getattr(bias, "q_proj", None), "bias", None) is not None)
    if draft_ids is not None:
        fields["draft_vocab_size"] = len(draft_ids)
    config = drafter_config(target, **fields)
    devices = [] if target.device.type == "cpu" else [target.device]
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed)
        drafter = DSparkDrafter(config).float()
    with torch.no_grad():
        _initialise_heads(drafter, target, draft_ids)
        if init_layer_ids is not None:
            _copy_layers(drafter, target, init_layer_ids)
    return drafter.to(target.device)


@torch.no_grad()
def with_draft_vocabulary(drafter: DSparkDrafter, target: Any, draft_ids: torch.Tensor) -> DSparkDrafter:
    """The same drafter with other ids to propose, in the dtype of its weights.

    What it has learned of an id stays; an id that it could not propose starts with the target's row of the head, and
    without a Markov bias. A head of its own that is the target's in every row is borrowed from then on.

    Args:
        drafter: with the ids of its target (no vocabulary map between them).
        target: the model that it drafts for.
        draft_ids: ascending ids (see `choose_draft_vocabulary`).

    Raises:
        ValueError: the target's head has other sizes than the drafter's.
    """
    old = drafter.config
    rows = target.get_output_embeddings().weight
    if rows.shape[1] != old.hidden_size or int(draft_ids.max()) >= min(len(rows), old.vocab_size):
        raise ValueError(
            f"The target's head is {list(rows.shape)}, but the drafter is {old.hidden_size} wide and reads "
            f"{old.vocab_size} ids: its draft vocabulary cannot come from this target."
        )
    ids = drafter.proposed_ids
    is_own = drafter.lm_head is not None and not torch.equal(
        drafter.lm_head.weight, rows[ids.to(rows.device).clamp(max=len(rows) - 1)].to(drafter.lm_head.weight)
    )
    new = _reshaped(drafter, draft_vocab_size=len(draft_ids), own_lm_head=is_own)
    _initialise_heads(new, target, draft_ids)
    old_row = torch.full((old.vocab_size,), -1)
    old_row[ids.cpu()] = torch.arange(len(ids))
    there = old_row[draft_ids]
    known = there >= 0
    ours, theirs = new.state_dict(), drafter.state_dict()
    by_row = {"lm_head.weight", "markov_head.markov_w2.weight"} & ours.keys()
    for name in ours.keys() - by_row - {"d2t"}:
        ours[name].copy_(theirs[name])
    for name in by_row:
        ours[name][known] = theirs[name][there[known]]
    return new


@torch.no_grad()
def with_more_layers(drafter: DSparkDrafter, num_hidden_layers: int) -> DSparkDrafter:
    """The same drafter with more draft layers, in the dtype of its weights: it drafts as before until it is trained.

    The new layers follow the old ones. Each starts as a copy of the last, but adds nothing to the stream yet: the
    projections by which it would are 0.

    Args:
        drafter: not changed.
        num_hidden_layers: draft layers of the new one.

    Raises:
        ValueError: the drafter has more layers than that.
    """
    old = drafter.config
    if num_hidden_layers < old.num_hidden_layers:
        raise ValueError(
            f"The drafter has {old.num_hidden_layers} layers and is to have {num_hidden_layers}: layers can be added, "
            "not taken away."
        )
    added = num_hidden_layers - old.num_hidden_layers
    layer_types = [*old.layer_types, *added * [old.layer_types[-1]]]
    new = _reshaped(drafter, num_hidden_layers=num_hidden_layers, layer_types=layer_types)
    new.load_state_dict(drafter.state_dict(), strict=False)
    for layer in new.layers[old.num_hidden_layers :]:
        layer.load_state_dict(drafter.layers[-1].state_dict())
        for name, tensor in layer.state_dict().items():
            if name.startswith(("self_attn.o_proj.", "mlp.down_proj.")):
                tensor.zero_()
            elif name == "layer_scalar":
                tensor.fill_(1.0)
    return new


@torch.no_grad()
def with_block_size(drafter: DSparkDrafter, block_size: int) -> DSparkDrafter:
    """The same drafter with longer or shorter blocks, in the dtype of its weights, to be trained on: no weight belongs
    to one position, but all positions of a block see each other, so that its drafts change a little at once.

    Args:
        drafter: not changed.
        block_size: of the new one.

    Raises:
        ValueError: a block cannot have this size.
    """
    new = _reshaped(drafter, block_size=block_size)
    new.load_state_dict(drafter.state_dict())
    return new


@torch.no_grad()
def with_markov_head(drafter: DSparkDrafter, kind: str) -> DSparkDrafter:
    """The same drafter with another kind of Markov head, in the dtype of its weights: it drafts as before until it is
    trained.

    A vanilla head becomes a gated one whose gates are all half open, behind a bias that is twice as large.

    Args:
        drafter: not changed.
        kind: `markov_head_type` of the new one.

    Raises:
        ValueError: a head of this kind cannot start as the drafter's.
    """
    old = drafter.config
    if kind == old.markov_head_type:
        return drafter
    if (old.markov_head_type, kind) != ("vanilla", "gated"):
        raise ValueError(
            f"The drafter's Markov head is {old.markov_head_type} and is to be {kind}: a vanilla head can become a "
            "gated one, no other can be changed."
        )
    new = _reshaped(drafter, markov_head_type=kind)
    new.load_state_dict(drafter.state_dict(), strict=False)
    head: Any = new.markov_head
    head.gate_proj.weight.zero_()
    head.gate_proj.bias.zero_()
    head.markov_w2.weight.mul_(2)
    return new


def _reshaped(drafter: DSparkDrafter, **fields: Any) -> DSparkDrafter:
    """One with other fields in its config, and the same settings around its weights; those are to be filled in."""
    new: Any = DSparkDrafter(DSparkConfig.from_dict({**drafter.config.to_dict(), **fields}))
    new.to(drafter.device, drafter.dtype)
    new.generation_config = copy.deepcopy(drafter.generation_config)
    return new


def _initialise_heads(drafter: DSparkDrafter, target: Any, draft_ids: torch.Tensor | None) -> None:
    if draft_ids is not None:
        drafter.d2t.copy_(draft_ids - torch.arange(len(draft_ids)))
    if drafter.lm_head is not None:
        rows = target.get_output_embeddings().weight
        drafter.lm_head.weight.copy_(rows if draft_ids is None else rows[draft_ids.to(rows.device)])
    if drafter.embed_tokens is not None:
        drafter.embed_tokens.weight.copy_(target.get_input_embeddings().weight)
    if drafter.markov_head is not None:
        # No bias at first: U alone is a sensible start.
        drafter.markov_head.markov_w2.weight.zero_()
    final_norm = getattr(target.get_decoder(), "norm", None)
    weight, ours = getattr(final_norm, "weight", None), drafter.norm.weight
    if drafter.config.backbone == "qwen3" and weight is not None and ours is not None and weight.shape == ours.shape:
        ours.copy_(weight)


def _copy_layers(drafter: DSparkDrafter, target: Any, layer_ids: Sequence[int]) -> None:
    layers: Any = decoder_layers(target)
    config, context_norm = drafter.config, drafter.hidden_norm.weight
    assert context_norm is not None
    if len(layer_ids) != config.num_hidden_layers:
        raise ValueError(
            f"`init_layer_ids` names {len(layer_ids)} layers of the target, but the drafter has "
            f"{config.num_hidden_layers}: one each."
        )
    for layer_id in layer_ids:
        if not 0 <= layer_id < len(layers):
            raise ValueError(
                f"`init_layer_ids` names layer {layer_id}, but the target has layers 0 to {len(layers) - 1}."
            )
    for draft_layer, layer_id in zip(drafter.layers, layer_ids, strict=True):
        _copy_layer(draft_layer, layers[layer_id], type(target).__name__)
    # What the context's keys were made from in the target: its normed stream. The last tap is the nearest to it.
    width = config.target_hidden_size
    if width == config.hidden_size:
        drafter.fc.weight[:, -width:] += torch.eye(width)
        norms = torch.stack([layers[layer_id].input_layernorm.weight.float() for layer_id in layer_ids])
        context_norm.copy_(norms.mean(dim=0))


def _copy_layer(draft_layer: nn.Module, layer: Any, name: str) -> None:
    found = dict(layer.named_modules())
    missing = [part for part in _COPIED if part not in found]
    if missing or any(part in found for part in _FOREIGN) or not hasattr(draft_layer, "post_attention_layernorm"):
        raise ValueError(
            f"The layers of {name} are built otherwise than draft layers ({', '.join(missing) or 'more norms'}), so "
            "that they cannot start one. Leave out `init_layer_ids`: draft layers then start at random."
        )
    ours: dict[str, Any] = dict(draft_layer.named_modules())
    for part in _COPIED:
        if ours[part].weight.shape != found[part].weight.shape:
            raise ValueError(
                f"{part} of {name} is {list(found[part].weight.shape)}, of the draft layer "
                f"{list(ours[part].weight.shape)}. Leave out the sizes that differ, or `init_layer_ids`."
            )
        ours[part].weight.copy_(found[part].weight)
        if getattr(ours[part], "bias", None) is not None:
            bias = found[part].bias
            ours[part].bias.zero_() if bias is None else ours[part].bias.copy_(bias)
    for norm, projection in (("q_norm", "q_proj"), ("k_norm", "k_proj")):
        _start_norm(ours[f"self_attn.{norm}"], found.get(f"self_attn.{norm}"), found[f"self_attn.{projection}"], layer)


def _start_norm(norm: Any, found: Any, projection: Any, layer: Any) -> None:
    """The norm of queries or keys: the layer's own, or else the size that they have without one."""
    if found is not None and found.weight.shape == norm.weight.shape:
        norm.weight.copy_(found.weight)
        return
    scaled = projection.weight.float() * layer.input_layernorm.weight.float()
    norm.weight.fill_(float(scaled.pow(2).sum(dim=1).mean().sqrt()))
