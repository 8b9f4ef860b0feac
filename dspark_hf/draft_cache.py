"""The drafter's key/value cache: the committed context, and nothing else that lasts."""

import torch


class DraftCache:
    """Keys and values of the committed context positions, for each draft layer.

    A forward pass writes the new context positions and the block behind what is committed; `commit` then moves the
    end of the committed part past the new context. The block stays behind that end and is overwritten by the next
    round, so that a rollback costs nothing and no block key can persist.

    Args:
        num_layers: draft layers.

    Attributes:
        length: committed context positions.
    """

    def __init__(self, num_layers: int):
        self.length = 0
        self._keys: list[torch.Tensor | None] = [None] * num_layers
        self._values: list[torch.Tensor | None] = [None] * num_layers

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes `[B, kv_heads, new, head_dim]` behind the committed context; returns committed and new, as views."""
        end = self.length + key_states.shape[-2]
        keys = _with_room(self._keys[layer_idx], key_states, end, self.length)
        values = _with_room(self._values[layer_idx], value_states, end, self.length)
        keys[:, :, self.length : end] = key_states
        values[:, :, self.length : end] = value_states
        self._keys[layer_idx], self._values[layer_idx] = keys, values
        return keys[:, :, :end], values[:, :, :end]

    def commit(self, num_positions: int) -> None:
        """Keeps the first `num_positions` of what the last pass wrote: they are context from now on."""
        self.length += num_positions

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.length

    def layer(self, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Committed keys and values of a layer, each `[batch, kv_heads, length, head_dim]`."""
        keys, values = self._keys[layer_idx], self._values[layer_idx]
        if keys is None or values is None:
            raise IndexError(f"Layer {layer_idx} of this cache has not seen a forward pass yet.")
        return keys[:, :, : self.length], values[:, :, : self.length]


def _with_room(buffer: torch.Tensor | None, states: torch.Tensor, end: int, kept: int) -> torch.Tensor:
    """`buffer`, or one twice as large with its first `kept` positions where `end` positions do not fit."""
    if buffer is not None and buffer.shape[-2] >= end:
        return buffer
    batch, heads, _, head_dim = states.shape
    grown = states.new_empty((batch, heads, max(64, 2 * end), head_dim))
    if buffer is not None:
        grown[:, :, :kept] = buffer[:, :, :kept]
    return grown
