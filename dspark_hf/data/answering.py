"""The target answers many prompts: batches of similar length, which rows leave as they end.

A call of `generate` runs until its longest row ends. So it is called for a few tokens at a time, on the cache of the
call before; rows that have ended are taken out of the cache. When few are left, they wait for others of their length
and go on with those: their prefill is cheaper than passes over a nearly empty batch.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .._compat import CACHE_NAME, TargetModel, get_cache
from ..target_attention import attending

# Tokens of one call: at most this many are computed in vain for a row that has ended.
_TOKENS_OF_A_CALL = 16

# Settings of a target that count from the first new token of a call, or to its last, or take its input for the prompt.
_FROM_THE_START: tuple[str, ...] = ("min_new_tokens", "begin_suppress_tokens", "exponential_decay_length_penalty")
_FROM_THE_START += ("forced_bos_token_id", "forced_eos_token_id", "encoder_repetition_penalty")
_FROM_THE_START += ("encoder_no_repeat_ngram_size", "guidance_scale")

# Below this part of a full batch, rows wait for others.
_FEW = 0.25


@dataclass(frozen=True)
class Decoding:
    """How responses are written.

    Attributes:
        max_new_tokens: of a response.
        stop_ids: what ends one; the stop is its last token.
        arguments: of `generate`, the way of choosing tokens.
    """

    max_new_tokens: int
    stop_ids: frozenset[int]
    arguments: dict[str, Any]


@dataclass
class _Row:
    number: int
    ids: list[int]
    prompt_length: int
    is_ended: bool = False

    @property
    def num_new(self) -> int:
        return len(self.ids) - self.prompt_length


def answer(
    target: TargetModel, prompts: Sequence[Sequence[int]], decoding: Decoding, batch_size: int
) -> Iterator[tuple[int, list[int]]]:
    """Responses to prompts, as they end.

    In float32, greedy, each is what the prompt alone would get; in half precision up to rounding, which depends on
    the batch.

    Args:
        prompts: token ids of each.

    Yields:
        The number of a prompt, and the token ids of its response.
    """
    waiting = [_Row(number, [*ids], len(ids)) for number, ids in enumerate(prompts)]
    while waiting:
        waiting.sort(key=lambda row: len(row.ids))
        batch, waiting = waiting[:batch_size], waiting[batch_size:]
        fewest = int(batch_size * _FEW) if waiting else 0
        for row in _decode(target, batch, decoding, fewest):
            if row.is_ended:
                yield row.number, row.ids[row.prompt_length :]
            else:
                waiting.append(row)


def _decode(target: TargetModel, rows: list[_Row], decoding: Decoding, fewest: int) -> Iterator[_Row]:
    """Decodes a batch until all rows have ended, or no more than `fewest` go on; yields those that leave."""
    inputs = _inputs(rows, pad_id=min(decoding.stop_ids, default=0), device=target.device)
    while len(rows) > fewest:
        inputs = _extend(target, rows, inputs, decoding)
        yield from (row for row in rows if row.is_ended)
        kept = [slot for slot, row in enumerate(rows) if not row.is_ended]
        if len(kept) < len(rows):
            rows, inputs = [rows[slot] for slot in kept], _select(inputs, kept)
    yield from rows


def _inputs(rows: list[_Row], pad_id: int, device: torch.device) -> dict[str, Any]:
    """`input_ids` and `attention_mask`, both `[B, longest]`, padded on the left."""
    longest = max(len(row.ids) for row in rows)
    missing = [longest - len(row.ids) for row in rows]
    ids = [[pad_id] * n + row.ids for n, row in zip(missing, rows, strict=True)]
    mask = [[0] * n + [1] * (longest - n) for n in missing]
    return {"input_ids": torch.tensor(ids, device=device), "attention_mask": torch.tensor(mask, device=device)}


def _extend(target: TargetModel, rows: list[_Row], inputs: dict[str, Any], decoding: Decoding) -> dict[str, Any]:
    """One call of `generate`. Notes the new tokens in the rows; returns the inputs of the next call."""
    room = min(decoding.max_new_tokens - row.num_new for row in rows)
    # With one of those, a response is one call; all of its rows end in it.
    is_one_call = any(getattr(target.generation_config, name, None) is not None for name in _FROM_THE_START)
    # With padding there is a mask, and with a mask transformers copies keys and values once per query head: in a batch
    # of many rows that takes several times as long as everything else.
    with attending("packed"):
        output = target.generate(
            **inputs,
            **decoding.arguments,
            max_new_tokens=room if is_one_call else min(room, _TOKENS_OF_A_CALL),
            eos_token_id=sorted(decoding.stop_ids) or None,
            pad_token_id=min(decoding.stop_ids, default=0),
            return_dict_in_generate=True,
        )
    new = output.sequences[:, inputs["input_ids"].shape[1] :]
    for row, tokens in zip(rows, new.tolist(), strict=True):
        stop = next((i for i, token in enumerate(tokens) if token in decoding.stop_ids), None)
        row.ids += tokens if stop is None else tokens[: stop + 1]
        row.is_ended = stop is not None or row.num_new == decoding.max_new_tokens
    mask = torch.cat([inputs["attention_mask"], torch.ones_like(new)], dim=1)
    return {"input_ids": output.sequences, "attention_mask": mask, CACHE_NAME: get_cache(output)}


def _select(inputs: dict[str, Any], kept: list[int]) -> dict[str, Any]:
    """The inputs of some rows only."""
    if kept:
        inputs[CACHE_NAME].batch_select_indices(torch.tensor(kept, device=inputs["input_ids"].device))
    return inputs | {name: inputs[name][kept] for name in ("input_ids", "attention_mask")}
