"""The drafter's key/value cache: the committed context of each row, and nothing else that lasts."""

import torch


class DraftCache:
    """Keys and values of the committed context positions, for each draft layer.

    A forward pass writes the new context positions and the block behind what is committed; `commit` then moves the
    end of the committed part past the new context. The block stays behind that end and is overwritten by the next
    round, so that a rollback costs nothing and no block key can persist. Rows may have different lengths; padding is
    never stored, so that column j of a row is its j-th context position.

    Args:
        num_layers: draft layers.
        num_rows: rows of the batch.

    Attributes:
        lengths: committed context positions of each row.
    """

    def __init__(self, num_layers: int, num_rows: int = 1):
        self.lengths = [0] * num_rows
        self._keys: list[torch.Tensor | None] = [None] * num_layers
        self._values: list[torch.Tensor | None] = [None] * num_layers
        self._place: _Place | None = None
        self._slots: list[int] | None = None

    @property
    def length(self) -> int:
        """Committed context positions of the longest row."""
        return max(self.lengths)

    def expect(
        self,
        counts: list[int],
        num_context: int,
        num_block: int,
        device: torch.device,
        slots: list[int] | None = None,
    ) -> None:
        """Says what the next pass writes, where rows differ in it; without a word, as much for each of even rows.

        Args:
            counts: new context positions of each row of the pass; the rest of `num_context` is padding at the end.
            num_context: context positions of the pass.
            num_block: block positions of the pass.
            device: of the keys.
            slots: the rows of the pass, by their places here; `None`: all.
        """
        self._slots = slots
        lengths = self.lengths if slots is None else [self.lengths[slot] for slot in slots]
        ends = [length + count for length, count in zip(lengths, counts, strict=True)]
        if slots is None and len(set(lengths)) == 1 and counts == [num_context] * len(counts):
            self._place = None
        else:
            self._place = _Place(lengths, counts, ends, num_context, num_block, device, slots)

    @property
    def key_lengths(self) -> torch.Tensor | None:
        """`[B]`, keys of each row in the expected pass, block included; `None` where all rows have all of them."""
        return None if self._place is None else self._place.key_lengths

    @property
    def fewest_keys(self) -> int:
        """Keys of the shortest row in the expected pass, where `key_lengths` tells rows apart."""
        return 0 if self._place is None else self._place.fewest_keys

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes `[B, kv_heads, new, head_dim]` behind the committed context; returns committed and new, as views of
        the buffers where all rows take part."""
        place, num_rows = self._place, len(self.lengths)
        num_kept, num_new = self.length, key_states.shape[-2]
        # One more column for the padding of uneven rows.
        needed = num_kept + num_new if place is None else place.end + 1
        keys = _with_room(self._keys[layer_idx], key_states, num_rows, needed, num_kept)
        values = _with_room(self._values[layer_idx], value_states, num_rows, needed, num_kept)
        self._keys[layer_idx], self._values[layer_idx] = keys, values
        if place is None:
            end = num_kept + num_new
            keys[:, :, num_kept:end] = key_states
            values[:, :, num_kept:end] = value_states
        else:
            end = place.end
            keys.transpose(1, 2)[place.index] = key_states.transpose(1, 2)
            values.transpose(1, 2)[place.index] = value_states.transpose(1, 2)
            if self._slots is not None:
                return keys[place.index[0][:, 0], :, :end], values[place.index[0][:, 0], :, :end]
        return keys[:, :, :end], values[:, :, :end]

    def commit(self, counts: int | list[int]) -> None:
        """Keeps the first positions of what the last pass wrote (one number: for all its rows): they are context
        now."""
        slots = range(len(self.lengths)) if self._slots is None else self._slots
        counts = [counts] * len(slots) if isinstance(counts, int) else counts
        for slot, count in zip(slots, counts, strict=True):
            self.lengths[slot] += count
        self._place = self._slots = None

    def select(self, slots: list[int]) -> None:
        """Keeps some of the rows."""
        self.lengths = [self.lengths[slot] for slot in slots]
        for buffers in (self._keys, self._values):
            for layer_idx, states in enumerate(buffers):
                if states is not None:
                    buffers[layer_idx] = states[torch.tensor(slots, device=states.device)]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.length

    def layer(self, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer, each `[batch, kv_heads, length, head_dim]`; short rows end earlier."""
        keys, values = self._keys[layer_idx], self._values[layer_idx]
        if keys is None or values is None:
            raise IndexError(f"Layer {layer_idx} of this cache has not seen a forward pass yet.")
        return keys[:, :, : self.length], values[:, :, : self.length]


class _Place:
    """Where an uneven pass writes: context behind each row's end, its block right behind that.

    The padding of the context goes to one column behind everything, where nobody looks.
    """

    def __init__(
        self,
        lengths: list[int],
        counts: list[int],
        ends: list[int],
        num_context: int,
        num_block: int,
        device: torch.device,
        slots: list[int] | None,
    ):
        self.end = max(ends) + num_block
        self.key_lengths = torch.tensor(ends, device=device) + num_block
        self.fewest_keys = min(ends) + num_block
        context = torch.arange(num_context, device=device)
        columns = torch.tensor(lengths, device=device)[:, None] + context
        columns = columns.masked_fill(context >= torch.tensor(counts, device=device)[:, None], self.end)
        block = torch.tensor(ends, device=device)[:, None] + torch.arange(num_block, device=device)
        rows = torch.tensor(slots or list(range(len(lengths))), device=device)[:, None]
        self.index = (rows, torch.cat((columns, block), dim=1))


def _with_room(buffer: torch.Tensor | None, states: torch.Tensor, batch: int, end: int, kept: int) -> torch.Tensor:
    """`buffer`, or one of `batch` rows and twice as large with its first `kept` positions where `end` do not fit."""
    if buffer is not None and buffer.shape[-2] >= end:
        return buffer
    _, heads, _, head_dim = states.shape
    # Zeros: what is masked must be finite.
    grown = states.new_zeros((batch, heads, max(64, 2 * end), head_dim))
    if buffer is not None:
        grown[:, :, :kept] = buffer[:, :, :kept]
    return grown
