"""How the target's attention runs inside the passes that verify a draft.

With grouped queries, transformers copies every key and value once per query head as soon as a pass has a mask, so as
soon as it has several tokens: at long context a verification pass spends most of its time there. Folding the query
heads of a group into the query length (`[B, H, W, D]` to `[B, Hkv, H / Hkv * W, D]`) gives the same result without a
copy. On CPU, it also keeps half precision away from the slow kernel for a single query row.

Rows of a batch that verify drafts of different lengths need no padding outside of attention: the tokens of all of them
go through the model as one row, and only here, where each must see the keys of its own row, they part (`Unpadded`).

The models ask `ALL_ATTENTION_FUNCTIONS` for their "sdpa" function, which is shared by all of them, so the override
that stands there while a block of `attending` is open hands every other caller on to the function of transformers.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import accumulate
from math import gcd
from threading import Lock
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from .errors import UnsupportedGenerationError

AttentionMode = Literal["packed", "invariant"]

# Longer chunks are bound by arithmetic, and their mask, tiled over a group, would outgrow the copies that it saves.
_MAX_PACKED_QUERIES = 128
# Full and sliding attention, with room for another; where devices differ, every layer is given a copy of its own.
_MAX_SHARED_MASKS = 4
# What one more call of attention costs, in queries.
_CALL = 8

# PyTorch's CPU kernel works through 32 rows and 512 keys at a time, two matrix products for each such block. The bits
# of a product's row depend on the number of keys (where a sum over them is cut in two), and on whether there are at
# least four rows; those of a softmax on whether its last keys fill a vector.
INVARIANT_KEYS = 512
_INVARIANT_ROWS = 4

_lock = Lock()
_num_open = 0


@dataclass(frozen=True)
class Unpadded:
    """A pass over rows of different widths that the model sees as one row of all their tokens.

    Attributes:
        num_rows: R, rows of the batch.
        width: W, tokens of the longest one.
        places: `[N]`, where each token stands among the R * W of a padded pass: row after row.
        parts: the calls of attention that the pass falls into: their rows, and `[R, W]` which of the N tokens each of
            their queries is. First all rows, of which a short one has its first token in the place of padding; then
            what few rows have beyond that, each in a call of its own.
        returns: `[N]`, where each token stands among the queries of all parts.
    """

    num_rows: int
    width: int
    places: torch.Tensor
    parts: tuple[tuple[slice, torch.Tensor], ...]
    returns: torch.Tensor

    @classmethod
    def of(cls, widths: list[int], device: torch.device) -> "Unpadded":
        """The pass over `widths[row]` tokens of each row."""
        num_rows, width = len(widths), max(widths)
        common = min(range(1, width + 1), key=lambda w: num_rows * w + sum(n - w + _CALL for n in widths if n > w))
        starts = [*accumulate(widths, initial=0)]
        shared = [
            [start + (k if k < n else 0) for k in range(common)] for start, n in zip(starts[:-1], widths, strict=True)
        ]
        parts = [(slice(None), torch.tensor(shared, device=device))]
        places: list[int] = []
        returns: list[int] = []
        end = num_rows * common
        for row, n in enumerate(widths):
            places += range(row * width, row * width + n)
            returns += range(row * common, row * common + min(n, common))
            if n > common:
                beyond = torch.arange(starts[row] + common, starts[row] + n, device=device)
                parts.append((slice(row, row + 1), beyond[None]))
                returns += range(end, end + n - common)
                end += n - common
        return cls(
            num_rows,
            width,
            torch.tensor(places, device=device),
            tuple(parts),
            torch.tensor(returns, device=device),
        )

    def padded(self, states: torch.Tensor) -> torch.Tensor:
        """`[1, N, ...]` to `[R, W, ...]`, zeros where there is no token."""
        places = self.places.to(states.device)
        padded = states.new_zeros((self.num_rows * self.width, *states.shape[2:])).index_copy_(0, places, states[0])
        return padded.unflatten(0, (self.num_rows, self.width))

    def flat(self, states: torch.Tensor) -> torch.Tensor:
        """`[R, W, ...]` to `[1, N, ...]`."""
        return states.flatten(0, 1).index_select(0, self.places.to(states.device))[None]


def takes_unpadded(target: PreTrainedModel) -> bool:
    """Whether passes over this model can be `Unpadded`, and gain by it.

    All that looks beyond its own token has to come by here. A GPU reads the weights for as long as it computes a few
    tokens more, so padding costs it less than the detour.
    """
    return (
        target.device.type == "cpu"
        and bool(getattr(target, "_supports_attention_backend", False))
        and target.config.get_text_config(decoder=True)._attn_implementation == "sdpa"
        and ALL_ATTENTION_FUNCTIONS["sdpa"] in (sdpa_attention_forward, _sdpa)
        and _stock() is sdpa_attention_forward
    )


class _Attention:
    """One block of `attending`: its mode, and the masks that its passes share between their layers."""

    def __init__(self, mode: AttentionMode, unpadded: Unpadded | None):
        self.mode, self.unpadded = mode, unpadded
        self._max_masks = _MAX_SHARED_MASKS * (1 if unpadded is None else len(unpadded.parts))
        self._mask_parts: dict[int, tuple[torch.Tensor, list[torch.Tensor]]] = {}
        self.row_multiple, self.key_multiple = (_INVARIANT_ROWS, INVARIANT_KEYS) if mode == "invariant" else (1, 1)
        self._packed_masks: dict[tuple, tuple[torch.Tensor | None, torch.Tensor]] = {}

    def serves(self, query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None) -> bool:
        """Whether ours is the way for these plain states: always in a decoding step if it must be invariant."""
        if not _is_decoding(query, mask):
            return False
        if self.mode == "invariant":
            return True
        if query.shape[1] == key.shape[1]:
            return False
        # The flash kernels of CUDA know grouped queries, if there is no mask. On CPU, a single row takes a slow matrix
        # product in half precision, and a fast one in float32.
        return mask is not None or (query.device.type == "cpu" and query.dtype != torch.float32)

    def mask_parts(self, mask: torch.Tensor) -> list[torch.Tensor]:
        """Of a mask for an unpadded pass, `[R, H or 1, W, L]`, what belongs to each of its parts."""
        assert self.unpadded is not None
        if id(mask) not in self._mask_parts:
            if len(self._mask_parts) >= _MAX_SHARED_MASKS:
                self._mask_parts.clear()
            (_, shared), *others = self.unpadded.parts
            common = shared.shape[1]
            parts = [mask[:, :, :common]]
            parts += [mask[rows, :, common : common + tokens.shape[1]] for rows, tokens in others]
            self._mask_parts[id(mask)] = mask, parts
        return self._mask_parts[id(mask)][1]

    def packed_mask(self, mask: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor | None:
        """`_packed_mask`, made once for all the layers that were given the same mask."""
        if mask is None and self.mode == "packed":
            return None
        identity = id(mask), query.shape[:3], query.dtype, key.shape[1:3]
        if identity not in self._packed_masks:
            if len(self._packed_masks) >= self._max_masks:
                self._packed_masks.clear()
            packed = _packed_mask(mask, query, key, self.row_multiple, self.key_multiple)
            # The mask is kept beside its packed form, or another one could come to stand at its address.
            self._packed_masks[identity] = mask, packed
        return self._packed_masks[identity][1]


_attending: ContextVar[_Attention | None] = ContextVar("dspark_hf_target_attention", default=None)


@contextmanager
def attending(mode: AttentionMode, unpadded: Unpadded | None = None) -> Iterator[None]:
    """Runs the "sdpa" attention of every pass made inside, in this thread or task only, in our way.

    Results equal those of transformers up to rounding. Whatever we have no better way for (training, prefill, flash
    and eager attention, position biases, other devices than CPU and CUDA, `torch.compile`) runs as it always does,
    and so does everything if somebody else has put a function of his own in the place of "sdpa".

    Open one block per pass: masks must not change inside.

    Args:
        mode: "packed" attends without copying keys and values for grouped queries. "invariant" also gives every row of
            a decoding pass the same bits whatever the other rows are and whatever keys follow its own (on CPU). For
            that, the first key has to stand at a position that is a multiple of `INVARIANT_KEYS`, also where a window
            slides; where the number of keys is another multiple, they are not copied; what lies behind the end has
            to be masked, and finite. The pass has to be as wide as `invariant_width` says.
        unpadded: how the tokens of the pass, which the model sees as one row, belong to the rows of the cache.

    Raises:
        UnsupportedGenerationError: "invariant" or an `unpadded` pass is asked for, and somebody's own function stands
            in the place of "sdpa", or the model attends in a way that we have no invariant form of.
    """
    with _overriding() as is_in_place:
        if not is_in_place and (mode == "invariant" or unpadded is not None):
            raise UnsupportedGenerationError(
                "Another function stands in the place of transformers' own for the attention implementation 'sdpa', "
                "so its rounding may depend on the draft, and it may not know the rows of a batch. Take it out of "
                "`ALL_ATTENTION_FUNCTIONS` (and of what `AttentionInterface.register` was given), or leave out the "
                "draft-invariant mode."
            )
        token = _attending.set(_Attention(mode, unpadded))
        try:
            yield
        finally:
            _attending.reset(token)


def invariant_width(width: int, batch_size: int, dtype: torch.dtype) -> int:
    """Tokens per row that a pass must have, dummies at the end included, to give each row of it invariant bits.

    In half precision, linear layers have a kernel of its own for a single token; in float32, kernels for the tokens
    behind the last multiple of four. A dummy may be any token: what it writes into the cache is to be dropped.

    Args:
        width: tokens per row that the pass is for.
        batch_size: rows of the pass.
        dtype: of the target.
    """
    if dtype in (torch.float16, torch.bfloat16):
        return max(width, 2 if batch_size == 1 else 1)
    return _round_up(width, _INVARIANT_ROWS // gcd(_INVARIANT_ROWS, batch_size))


@contextmanager
def _overriding() -> Iterator[bool]:
    """Puts `_sdpa` in the place of transformers' function while any such block is open; gives whether it is there."""
    global _num_open
    with _lock:
        _num_open += 1
        if ALL_ATTENTION_FUNCTIONS["sdpa"] is sdpa_attention_forward:
            ALL_ATTENTION_FUNCTIONS["sdpa"] = _sdpa
        is_in_place = ALL_ATTENTION_FUNCTIONS["sdpa"] is _sdpa and _stock() is sdpa_attention_forward
    try:
        yield is_in_place
    finally:
        with _lock:
            _num_open -= 1
            # Who put something else there meanwhile keeps it.
            if _num_open == 0 and ALL_ATTENTION_FUNCTIONS["sdpa"] is _sdpa:
                del ALL_ATTENTION_FUNCTIONS["sdpa"]


def _sdpa(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *args: Any,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The function that stands for "sdpa" while a block is open; the arguments are those of transformers' own.

    Args:
        query: `[B, H, W, D]`.
        key: `[B, Hkv, L, D]`, a view of a larger buffer or not.
        value: `[B, Hkv, L, D]`.
        attention_mask: `None`, or `[B or 1, H or 1, W or 1, L]`: boolean (true: attend) or added to the scores.

    Returns `[B, W, H, D]` and `None`.
    """
    # The compiler cannot read a context variable.
    attention = None if torch.compiler.is_compiling() else _attending.get()
    stock = _stock()
    if attention is None or stock is not sdpa_attention_forward:
        return stock(module, query, key, value, attention_mask, *args, **kwargs)
    if attention.unpadded is None:
        return _attend(attention, module, query, key, value, attention_mask, *args, **kwargs)
    return _attend_unpadded(attention, module, query, key, value, attention_mask, *args, **kwargs), None


def _attend_unpadded(
    attention: _Attention,
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *args: Any,
    **kwargs: Any,
) -> torch.Tensor:
    """`_sdpa` of queries `[1, H, N, D]` that see keys `[R, Hkv, L, D]`: `[1, N, H, D]`."""
    unpadded = attention.unpadded
    assert unpadded is not None and attention_mask is not None, "rows of different lengths come with a mask"
    queries, outputs = query[0].transpose(0, 1), []
    for (rows, tokens), mask in zip(unpadded.parts, attention.mask_parts(attention_mask), strict=True):
        of_rows = queries.index_select(0, tokens.flatten()).unflatten(0, tokens.shape).transpose(1, 2)
        output, _ = _attend(attention, module, of_rows, key[rows], value[rows], mask, *args, **kwargs)
        outputs.append(output.flatten(0, 1))
    of_all = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return of_all.index_select(0, unpadded.returns)[None]


def _attend(
    attention: _Attention,
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *args: Any,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`_sdpa` of rows that are all equally wide."""
    stock = _stock()
    is_known = not args and _is_plain(module, query, key, value, attention_mask, kwargs)
    if is_known and attention.serves(query, key, attention_mask):
        return _packed(attention, query, key, value, attention_mask, kwargs.get("scaling")), None
    if attention.mode == "invariant" and not is_known and _is_decoding(query, attention_mask):
        raise UnsupportedGenerationError(
            f"{type(module).__name__} attends in a way whose rounding would depend on the draft (a bias on positions, "
            "gradients, unequal sizes of keys and values, another device than CPU or CUDA). Leave out the "
            "draft-invariant mode for this model."
        )
    return stock(module, query, key, value, attention_mask, *args, **kwargs)


def _stock() -> Callable[..., tuple[torch.Tensor, torch.Tensor | None]]:
    # A new interface knows what is registered for everybody, without the overrides of the shared one.
    return AttentionInterface()["sdpa"]


def _is_decoding(query: torch.Tensor, mask: torch.Tensor | None) -> bool:
    # Several queries without a mask are causal from the first key on: a prefill, as chunks of a prompt are.
    return query.shape[2] == 1 or (mask is not None and query.shape[2] <= _MAX_PACKED_QUERIES)


def _is_plain(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    kwargs: dict[str, Any],
) -> bool:
    """Whether the call is the causal grouped-query attention of a decoder, with nothing that we do not know."""
    num_groups = getattr(module, "num_key_value_groups", None)
    return (
        isinstance(num_groups, int)
        and query.device.type in ("cpu", "cuda")
        and not (torch.is_grad_enabled() and query.requires_grad)
        and query.shape[1] == num_groups * key.shape[1]
        and query.shape[-1] == key.shape[-1]
        and key.shape == value.shape
        and query.shape[0] == key.shape[0]
        and kwargs.get("is_causal") in (None, True)
        and getattr(module, "is_causal", True) is True
        and not kwargs.get("dropout")
        and not kwargs.get("output_attentions")
        and all(kwargs.get(name) is None for name in ("position_bias", "softcap", "s_aux"))
        and (mask is None or _is_plain_mask(mask, query, key))
    )


def _is_plain_mask(mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> bool:
    batch_size, num_heads, num_queries, _ = query.shape
    return (
        mask.dim() == 4
        and mask.shape[0] in (1, batch_size)
        and mask.shape[1] in (1, num_heads)
        and mask.shape[2] in (1, num_queries)
        and mask.shape[3] == key.shape[2]
        and (mask.dtype == torch.bool or mask.is_floating_point())
    )


def _packed(
    attention: _Attention,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float | None,
) -> torch.Tensor:
    """Attention with the query heads of a group as rows of one head: `[B, W, H, D]`."""
    batch_size, num_heads, num_queries, head_dim = query.shape
    num_key_heads, num_keys = key.shape[1:3]
    num_groups = num_heads // num_key_heads
    num_rows = num_groups * num_queries
    rows = query.reshape(batch_size, num_key_heads, num_rows, head_dim)
    rows = _padded(rows, _round_up(num_rows, attention.row_multiple))
    num_keys = _round_up(num_keys, attention.key_multiple)
    mask = attention.packed_mask(mask, query, key)
    key, value = _padded(key, num_keys), _padded(value, num_keys)
    output = scaled_dot_product_attention(rows, key, value, attn_mask=mask, scale=scaling)[:, :, :num_rows]
    by_query = output.unflatten(2, (num_groups, num_queries)).permute(0, 3, 1, 2, 4)
    return by_query.reshape(batch_size, num_queries, num_heads, head_dim).contiguous()


def _padded(states: torch.Tensor, length: int) -> torch.Tensor:
    """`[B, Hkv, length, D]`: the states and zeros behind them, a copy only where there is something to add."""
    missing = length - states.shape[2]
    return pad(states, (0, 0, 0, missing)) if missing else states


def _packed_mask(
    mask: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor, row_multiple: int, key_multiple: int
) -> torch.Tensor:
    """The mask of the packed rows, `[B or 1, Hkv or 1, R, L]`, to be added to the scores; `None` masks nothing.

    `R` is `H / Hkv * W` and `L` the number of keys, each rounded up to its multiple: rows behind the end see the keys
    that the others see, nobody sees the keys behind the end.

    PyTorch turns a boolean mask into such a one in every call, and pads it to an even number of bytes for CUDA's
    kernels: both are done here, once for all layers.
    """
    num_queries, num_keys, num_groups = query.shape[2], key.shape[2], query.shape[1] // key.shape[1]
    if mask is None:
        mask = torch.ones(1, 1, 1, num_keys, dtype=torch.bool, device=query.device)
    batch_size, num_heads = mask.shape[:2]
    # Heads by group: one group of one head where all heads share the mask.
    by_group = (1, 1) if num_heads == 1 else (key.shape[1], num_groups)
    given = mask.expand(-1, -1, num_queries, -1).unflatten(1, by_group)
    num_rows, padded_length = _round_up(num_groups * num_queries, row_multiple), _round_up(num_keys, key_multiple)
    shape = (batch_size, by_group[0], num_rows, _round_up(padded_length, 16))
    packed = torch.zeros(shape, dtype=query.dtype if mask.dtype == torch.bool else mask.dtype, device=mask.device)
    packed = packed[..., :padded_length]
    packed[..., num_keys:] = -torch.inf
    inside = packed[:, :, : num_groups * num_queries, :num_keys].unflatten(2, (num_groups, num_queries))
    if mask.dtype == torch.bool:
        inside.masked_fill_(~given, -torch.inf)
    else:
        inside.copy_(given)
    return packed


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
