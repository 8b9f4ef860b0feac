"""Many blocks of each sequence in one pass of the drafter, as inference would draft each of them alone.

A block starts at an *anchor*, a position of the sequence. It sees the context positions before the anchor and
itself, nothing else (DFlash, section 3; DSpark, section 3.2); its Markov head is fed the true tokens (teacher
forcing).

Shapes: B sequences of L positions, N blocks of each, S positions of a block, n draft positions of a block, H width.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from ..configuration_dspark import DSparkConfig
from ..modeling_dspark import BlockMasks, DraftAttention, DSparkDrafter


@dataclass
class DraftPositions:
    """What the draft positions of all blocks are supervised by; those behind the end of a sequence are not.

    Attributes:
        is_supervised: `[B, N, n]`.
        previous_ids: `[B, N, n]` the true token before each, which the Markov head reads.
        label_ids: `[B, N, n]` the true token there.
        source_positions: `[B, N, n]` the position whose target logits say what comes there.
    """

    is_supervised: torch.Tensor
    previous_ids: torch.Tensor
    label_ids: torch.Tensor
    source_positions: torch.Tensor


def draft_positions(
    config: DSparkConfig, input_ids: torch.Tensor, lengths: torch.Tensor, anchors: torch.Tensor
) -> DraftPositions:
    """From `[B, L]` ids, `[B]` lengths and `[B, N]` anchors (-1: none).

    Draft position d of anchor a proposes the token at a + 1 + d, under both anchor conventions; the token before it
    stands at a + d, and so do the logits of the target that it is compared with.
    """
    steps = torch.arange(config.num_draft_tokens, device=anchors.device)
    sources = anchors[..., None] + steps
    is_supervised = (anchors[..., None] >= 0) & (sources + 1 < lengths[:, None, None])
    sources = sources.clamp(0, input_ids.shape[1] - 2)
    previous = input_ids.gather(1, sources.flatten(1)).view_as(sources)
    labels = input_ids.gather(1, (sources + 1).flatten(1)).view_as(sources)
    return DraftPositions(is_supervised, previous, labels, sources)


# Blocks that attend together: more of them look at more keys that are not theirs, fewer make more calls.
_BLOCKS_TOGETHER = 8


class ManyBlockMasks(BlockMasks):
    """Attention of the blocks side by side; the keys are the context of a sequence, then all of its blocks.

    A few blocks at a time attend, to the context before the last of their anchors and to their own keys: against all
    at once, most of the work on masked keys is saved.

    Args:
        anchors: `[B, N]`, ascending, none of them negative.
        num_context: L.
    """

    def __init__(self, config: DSparkConfig, anchors: torch.Tensor, num_context: int, dtype: torch.dtype):
        super().__init__(config, None, config.block_size, dtype)
        self.anchors, self.num_context = anchors, num_context
        # Known to the host once for all layers.
        self._ends = anchors.amax(dim=0).tolist()
        self._kept: dict[tuple[str, int], torch.Tensor] = {}

    def attend(
        self, attention: DraftAttention, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        size, outputs = self.block_length, []
        for first in range(0, len(self._ends), _BLOCKS_TOGETHER):
            last = min(first + _BLOCKS_TOGETHER, len(self._ends))
            num_context = max(self._ends[first:last])
            own = slice(self.num_context + first * size, self.num_context + last * size)
            if (attention.layer_type, first) not in self._kept:
                self._kept[attention.layer_type, first] = self._mask(attention.layer_type, first, last, num_context)
            outputs.append(
                attention.attend(
                    query[:, :, first * size : last * size],
                    torch.cat((keys[:, :, :num_context], keys[:, :, own]), dim=2),
                    torch.cat((values[:, :, :num_context], values[:, :, own]), dim=2),
                    self._kept[attention.layer_type, first],
                )
            )
        return torch.cat(outputs, dim=1)

    def _mask(self, layer_type: str, first: int, last: int, num_context: int) -> torch.Tensor:
        """`[B, 1, n * S, num_context + n * S]`, additive, of n blocks."""
        anchors, size, device = self.anchors[:, first:last], self.block_length, self.anchors.device
        batch, num_blocks = anchors.shape
        num_queries = num_blocks * size
        visible = torch.zeros((batch, num_queries, num_context + num_queries), dtype=torch.bool, device=device)
        # As for a block right behind its anchor's context; its own keys stand elsewhere here.
        rows = BlockMasks(self.config, None, size, self.dtype, key_lengths=anchors.flatten() + size)
        context = rows._visible(layer_type, num_context, device, 0)
        context = context & (torch.arange(num_context, device=device) < anchors.reshape(-1, 1, 1))
        visible[..., :num_context] = context.reshape(batch, num_queries, num_context)
        block = self._visible(layer_type, size, device, 0)[0]
        visible[..., num_context:] = torch.block_diag(*[block] * num_blocks)
        mask = torch.zeros(visible.shape, dtype=self.dtype, device=device)
        return mask.masked_fill_(~visible, torch.finfo(self.dtype).min)[:, None]


class FlexBlockMasks(BlockMasks):
    """The same by `torch.nn.attention.flex_attention`, in one call: its kernel passes over what no query of a tile
    sees, and on a GPU no mask is written out. Experimental: compared with the other one on a CPU only, forward."""

    def __init__(self, config: DSparkConfig, anchors: torch.Tensor, num_context: int, dtype: torch.dtype):
        super().__init__(config, None, config.block_size, dtype)
        self.anchors, self.num_context = anchors, num_context
        self._kept: dict[str, BlockMask] = {}

    def attend(
        self, attention: DraftAttention, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        heads = query.shape[1]
        # Under autocast, norms give float32; older kernels want one dtype.
        query, keys, values = (x.to(self.dtype) for x in (query, keys, values))
        is_grouped = heads & (heads - 1) == 0
        if not is_grouped:
            # Its kernel shares keys among a power of 2 of heads only.
            keys, values = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (keys, values))
        output = _flex_attention(query.device.type)(
            query,
            keys,
            values,
            block_mask=self._block_mask(attention.layer_type, query.shape[2], keys.shape[2]),
            scale=attention.scaling,
            enable_gqa=is_grouped,
        )
        return output.transpose(1, 2)

    def _block_mask(self, layer_type: str, num_queries: int, num_keys: int) -> BlockMask:
        if layer_type not in self._kept:
            anchors, size, num_context = self.anchors, self.block_length, self.num_context

            def sees(row: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
                block, own = query // size, key - num_context
                anchor = anchors[row, block]
                is_there = torch.where(own < 0, key < anchor, own // size == block)
                place = torch.where(own < 0, key - anchor, own % size)
                return is_there & self._sees(layer_type, query % size, place)

            self._kept[layer_type] = create_block_mask(
                sees,
                len(anchors),
                None,
                num_queries,
                num_keys,
                device=anchors.device,
                # Otherwise it makes the mask of every pair of positions first.
                _compile=anchors.device.type != "cpu",
            )
        return self._kept[layer_type]


@cache
def _flex_attention(device_type: str) -> Any:
    # A CPU has no gradient of it, and for a forward pass need not wait for a compiler.
    return flex_attention if device_type == "cpu" else torch.compile(flex_attention)


BLOCK_ATTENTION = {"sdpa": ManyBlockMasks, "flex_attention": FlexBlockMasks}


def run_blocks(
    drafter: DSparkDrafter,
    embed: Callable[[torch.Tensor], torch.Tensor],
    input_ids: torch.Tensor,
    anchors: torch.Tensor,
    context_hidden_states: torch.Tensor,
    attn_implementation: str = "sdpa",
) -> torch.Tensor:
    """`[B, N, S, H]` states of all blocks, after the final norm.

    Args:
        embed: ids to block embeddings.
        input_ids: `[B, L]`.
        anchors: `[B, N]` positions; -1, where a sequence has fewer, gives a block of no meaning.
        context_hidden_states: `[B, L, m * Ht]` tapped hidden states.
        attn_implementation: one of `BLOCK_ATTENTION`.
    """
    config, device = drafter.config, anchors.device
    (batch, num_blocks), size = anchors.shape, config.block_size
    anchors = anchors.clamp(min=0)
    # Nothing looks at context behind the last anchor.
    num_context = max(1, int(anchors.max()))
    block_ids = torch.full((batch, num_blocks, size), config.mask_token_id, device=device)
    block_ids[..., 0] = input_ids.gather(1, anchors)
    context_positions = torch.arange(num_context, device=device).expand(batch, -1)
    block_positions = (anchors[..., None] + torch.arange(size, device=device)).flatten(1)
    parameter = drafter.hidden_norm.weight
    assert parameter is not None
    dtype = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else parameter.dtype
    output = drafter(
        noise_embeds=embed(block_ids.flatten(1)).to(device, parameter.dtype),
        context_hidden_states=context_hidden_states[:, :num_context].to(device, parameter.dtype),
        position_ids=torch.cat((context_positions, block_positions), dim=1),
        masks=BLOCK_ATTENTION[attn_implementation](config, anchors, num_context, dtype),
    )
    return output.last_hidden_state.view(batch, num_blocks, size, -1)


def markov_latents(
    drafter: DSparkDrafter, hidden_states: torch.Tensor, anchor_ids: torch.Tensor, previous_ids: torch.Tensor
) -> torch.Tensor:
    """What the Markov head's W2 is applied to at each draft position, `[K, n, r]`, with the true tokens before.

    Args:
        hidden_states: `[K, S, H]` of K blocks.
        anchor_ids: `[K]`.
        previous_ids: `[K, n]`.
    """
    head, first = drafter.markov_head, drafter.config.first_draft_slot
    assert head is not None
    state, latents = head.initial_state(len(anchor_ids)), []
    for slot in range(first):
        # Without a prediction at the anchor, the recurrence steps on that position all the same.
        _, state = head.latent(anchor_ids, hidden_states[:, slot], state)
    for position in range(previous_ids.shape[1]):
        latent, state = head.latent(previous_ids[:, position], hidden_states[:, first + position], state)
        latents.append(latent)
    return torch.stack(latents, dim=1)
