"""What a drafter borrows from its target: the embedding, and the head or its rows for the ids that are drafted."""

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import PreTrainedModel

from .modeling_dspark import DSparkDrafter
from .packed_weights import PackedLinear, pack_weights, weight_identity


def embedding_of(drafter: DSparkDrafter, target: PreTrainedModel) -> Callable[[torch.Tensor], torch.Tensor]:
    """Ids to block embeddings: the drafter's own table or the target's, scaled as the drafter was trained."""
    module: Any = drafter.embed_tokens if drafter.embed_tokens is not None else target.get_input_embeddings()
    scale = drafter.config.embedding_scale
    weight = module.weight
    # Raw rows where there are some to read: a weight may be packed, or be fetched only for the call (offloaded).
    is_readable = isinstance(module, nn.Embedding) and weight.is_floating_point() and not weight.is_meta

    def embed(ids: torch.Tensor) -> torch.Tensor:
        ids = ids if weight.is_meta else ids.to(weight.device)
        if scale is None:
            return module(ids)
        if is_readable:
            rows = nn.functional.embedding(ids, weight)
        else:
            # Gemma's module scales by itself, which must not happen twice.
            rows = module(ids) / getattr(module, "scalar_embed_scale", 1.0)
        # The factor is rounded to the table's dtype first, as Gemma does.
        return rows if scale == 1.0 else rows * torch.tensor(scale, dtype=rows.dtype)

    return embed


def head_of(drafter: DSparkDrafter, target: PreTrainedModel) -> nn.Module:
    """States to logits of the `draft_vocab_size` ids that are drafted: the drafter's own head or the target's.

    Of a borrowed head, a drafter with fewer ids reads its rows alone. They are copied once for a pair, and anew when
    the target's weights are other ones; a head that has no rows to read (quantized, adapted, offloaded) runs whole.
    """
    head: Any = drafter.lm_head if drafter.lm_head is not None else target.get_output_embeddings()
    if drafter.lm_head is not None or not drafter.config.has_reduced_vocabulary:
        return head
    if type(head) not in (nn.Linear, PackedLinear) or head.weight.is_meta:
        return _Columns(head, drafter.proposed_ids)
    is_packed = isinstance(drafter.fc, PackedLinear)
    origin = (
        weight_identity(head.weight),
        head.weight.dtype,
        head.weight.device,
        weight_identity(drafter.d2t),
        is_packed,
    )
    of_drafter = _rows.setdefault(drafter, WeakKeyDictionary())
    known = of_drafter.get(head)
    if known is None or known[0] != origin:
        known = of_drafter[head] = origin, _head_of_rows(head, drafter.proposed_ids, is_packed)
    return known[1]


_rows: WeakKeyDictionary[DSparkDrafter, WeakKeyDictionary[nn.Module, tuple[tuple, nn.Linear]]] = WeakKeyDictionary()


@torch.no_grad()
def _head_of_rows(head: nn.Linear, ids: torch.Tensor, is_packed: bool) -> nn.Linear:
    # An id that this target lacks gets some row: it is never proposed.
    ids = ids.to(head.weight.device).clamp(max=len(head.weight) - 1)
    rows = nn.utils.skip_init(nn.Linear, head.in_features, len(ids), bias=head.bias is not None, device="cpu")
    rows.weight = nn.Parameter(head.weight[ids], requires_grad=False)
    if head.bias is not None:
        rows.bias = nn.Parameter(head.bias[ids], requires_grad=False)
    if is_packed:
        pack_weights(rows)
    return rows


class _Columns(nn.Module):
    """A whole head, of whose logits some are taken."""

    def __init__(self, head: nn.Module, ids: torch.Tensor):
        super().__init__()
        # In a tuple: no part of this module.
        self._head, self._ids = (head,), ids

    @property
    def weight(self) -> Any:
        return getattr(self._head[0], "weight", None)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        logits = self._head[0](states)
        return logits[..., self._ids.to(logits.device).clamp(max=logits.shape[-1] - 1)]
