"""The prompts of a batch, where they differ in length: in passes over rows of about one length.

A CPU computes padding as slowly as anything else, and a batch of prompts as people write them is half padding. So rows
of about one length go through the target together, without the columns that are padding in all of them, and the cache
of the call gets their states where one pass over everything would have put them.
"""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import DynamicCache, GenerationConfig
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from ._compat import CACHE_NAME, TargetModel, get_cache

# What one more pass costs, in tokens: the target's weights are read again.
_PASS = 32
# The share of the work of one pass that must be saved.
_WORTHWHILE = 0.1
# Of these, each row has its part; whatever else a call has, nobody here knows how it parts.
_BY_ROW = ("attention_mask", "position_ids")
_OF_ALL = ("use_cache", "logits_to_keep")


def group_by_length(lengths: Sequence[int]) -> list[list[int]]:
    """Rows that go together, such that the passes over all groups cost the least: a group's longest row for each of
    its rows, and `_PASS`. One group of all, where that is not clearly cheaper."""
    order = sorted(range(len(lengths)), key=lambda row: lengths[row])
    # Of the shortest n rows: the least cost, and where the last group begins.
    best: list[tuple[float, int]] = [(0, 0)]
    for end in range(1, len(order) + 1):
        longest = lengths[order[end - 1]]
        best.append(min((best[start][0] + _PASS + longest * (end - start), start) for start in range(end)))
    if best[-1][0] > (1 - _WORTHWHILE) * (_PASS + max(lengths) * len(lengths)):
        return [list(range(len(lengths)))]
    groups, end = [], len(order)
    while end:
        start = best[end][1]
        groups.append(sorted(order[start:end]))
        end = start
    return groups


def rows_to_part(model: TargetModel, model_kwargs: dict[str, Any], config: GenerationConfig) -> list[list[int]] | None:
    """The groups of rows whose prompts should be run apart; `None`: run all in one pass, or it must be so.

    Args:
        model_kwargs: what `generate` prepared for the prefill.
    """
    cache, mask = get_cache(model_kwargs), model_kwargs.get("attention_mask")
    positions = model_kwargs.get("position_ids")
    others = model_kwargs.keys() - {*_BY_ROW, *_OF_ALL, CACHE_NAME}
    if (
        mask is None
        or mask.dim() != 2
        or (positions is not None and positions.shape != mask.shape)
        or any(model_kwargs[name] is not None for name in others)
        or config.prefill_chunk_size
        or type(cache) is not DynamicCache
        or int(cache.get_seq_length()) > 0
        or cache.offloading
        or any(type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer) for layer in cache.layers)
        or getattr(model.config.get_text_config(decoder=True), "num_kv_shared_layers", None)
    ):
        return None
    real = mask != 0
    if not bool((real[:, 1:] >= real[:, :-1]).all()) or not bool(real[:, -1].all()):
        return None  # padding stands elsewhere than before a prompt
    groups = group_by_length(real.sum(dim=1).tolist())
    return groups if len(groups) > 1 else None


def prefill_apart(
    model: TargetModel,
    input_ids: torch.Tensor,
    config: GenerationConfig,
    model_kwargs: dict[str, Any],
    groups: list[list[int]],
) -> Any:
    """Runs the prompts, a pass for each group, in their order.

    Args:
        input_ids: `[B, P]`, padding before the prompts.
        model_kwargs: what `generate` prepared; its cache is filled.
        groups: of the rows, each row in one.

    Returns:
        The output of one pass over all, with the logits `[B, 1, V]` of the last positions; what it holds besides is
        that of the last pass.
    """
    num_rows, num_prompt = input_ids.shape
    mask, cache = model_kwargs["attention_mask"], get_cache(model_kwargs)
    outputs: Any = None
    logits: Any = None
    states: list[tuple[torch.Tensor, torch.Tensor]] = []
    for rows in groups:
        at = torch.tensor(rows, device=input_ids.device)
        first = num_prompt - int((mask[at] != 0).sum(dim=1).max())
        kwargs = {name: value for name, value in model_kwargs.items() if name in _OF_ALL}
        for name in _BY_ROW:
            if model_kwargs.get(name) is not None:
                kwargs[name] = model_kwargs[name][at, first:]
        # Keeps everything, also where the layers of the call's cache keep a window.
        kwargs[CACHE_NAME] = DynamicCache()
        outputs = model._prefill(input_ids[at, first:], config, kwargs)
        last = outputs.logits[:, -1:]
        logits = last.new_empty((num_rows, *last.shape[1:])) if logits is None else logits
        logits[at] = last
        layers: Any = kwargs[CACHE_NAME].layers
        if not states:
            states = [
                (_of_all(layer.keys, num_rows, num_prompt), _of_all(layer.values, num_rows, num_prompt))
                for layer in layers
            ]
        for layer, (keys, values) in zip(layers, states, strict=True):
            keys[at, :, first:], values[at, :, first:] = layer.keys, layer.values
    for index, (keys, values) in enumerate(states):
        cache.update(keys, values, index)
    outputs.logits, outputs[CACHE_NAME] = logits, cache
    return outputs


def _of_all(states: torch.Tensor, num_rows: int, num_prompt: int) -> torch.Tensor:
    """Zeros for what the rows of `[R, heads, T, head_dim]` have in one pass over all: what is masked is finite."""
    return states.new_zeros((num_rows, states.shape[1], num_prompt, states.shape[3]))
