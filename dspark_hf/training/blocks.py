"""Many blocks of each sequence in one pass of the drafter, as inference would draft each of them alone.

A block starts at an *anchor*, a position of the sequence. It sees the context positions before the anchor and
itself, nothing else (DFlash, section 3; DSpark, section 3.2); its Markov head is fed the true tokens (teacher
forcing).

Shapes: B sequences of L positions, N blocks of each, S positions of a block, n draft positions of a block, H width.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..configuration_dspark import DSparkConfig
from ..modeling_dspark import BlockMasks, DSparkDrafter


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


class ManyBlockMasks(BlockMasks):
    """Additive masks `[B, 1, N * S, L + N * S]`: context of a sequence first, then all of its blocks.

    Args:
        anchors: `[B, N]`, none of them negative.
        num_context: L.
    """

    def __init__(self, config: DSparkConfig, anchors: torch.Tensor, num_context: int, dtype: torch.dtype):
        super().__init__(config, None, config.block_size, dtype, key_lengths=anchors.flatten() + config.block_size)
        self.anchors, self.num_context = anchors, num_context
        self._alone = BlockMasks(config, None, config.block_size, dtype)

    def first_key(self, num_keys: int) -> int:
        return 0

    def _make(self, layer_type: str, num_keys: int, device: torch.device, first: int) -> torch.Tensor:
        batch, num_blocks = self.anchors.shape
        size, num_queries = self.block_length, num_blocks * self.block_length
        visible = torch.zeros((batch, num_queries, num_keys), dtype=torch.bool, device=device)
        # As for a block right behind its anchor's context; its own keys stand elsewhere here.
        context = self._visible(layer_type, self.num_context, device, 0)
        context = context & (torch.arange(self.num_context, device=device) < self.anchors.view(-1, 1, 1))
        visible[..., : self.num_context] = context.reshape(batch, num_queries, self.num_context)
        block = self._alone._visible(layer_type, size, device, 0)[0]
        visible[..., self.num_context :] = torch.block_diag(*[block] * num_blocks)
        mask = torch.zeros(visible.shape, dtype=self.dtype, device=device)
        return mask.masked_fill_(~visible, torch.finfo(self.dtype).min)[:, None]


def run_blocks(
    drafter: DSparkDrafter,
    embed: Callable[[torch.Tensor], torch.Tensor],
    input_ids: torch.Tensor,
    anchors: torch.Tensor,
    context_hidden_states: torch.Tensor,
) -> torch.Tensor:
    """`[B, N, S, H]` states of all blocks, after the final norm.

    Args:
        embed: ids to block embeddings.
        input_ids: `[B, L]`.
        anchors: `[B, N]` positions; -1, where a sequence has fewer, gives a block of no meaning.
        context_hidden_states: `[B, L, m * Ht]` tapped hidden states.
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
        masks=ManyBlockMasks(config, anchors, num_context, dtype),
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
