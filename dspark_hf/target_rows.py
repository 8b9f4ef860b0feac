"""The target's keys and values while a call decodes: rows of different lengths, and rejected tokens that cost nothing.

transformers' dynamic cache copies all keys and values in every pass, knows one length for all rows, and is cropped
layer by layer. Here each layer is a buffer that grows by doubling; a pass writes behind the committed part of each
row, and a rollback is a smaller number. The layers stand in the caller's own cache object during the call, so that
any model of transformers finds them, and `restore` puts the cache back as plain generation would have left it.

Caches of other kinds (static, offloaded) keep their own layers, for a batch of one, and are cropped.
"""

from typing import Any

import torch
from transformers import Cache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, StaticLayer, StaticSlidingWindowLayer

from ._compat import DUMMY_LAYER, TargetModel, is_croppable, stop_recording_past
from .target_attention import Unpadded

_DYNAMIC = (DynamicLayer, DynamicSlidingWindowLayer)
_STATIC = (StaticLayer, StaticSlidingWindowLayer)
# Draft tokens behind the longest row that a buffer has room for without growing.
_SLACK = 16


def open_rows(
    cache: Cache,
    num_rows: int,
    max_length: int,
    prompt_mask: torch.Tensor | None,
    has_spare_tokens: bool = False,
    keeps_finished: bool = False,
) -> "BufferedRows | CroppedRows":
    """What a call decodes with, from a cache that holds the prompt.

    Args:
        cache: after the prefill.
        num_rows: rows of the batch.
        max_length: no row will be longer.
        prompt_mask: `[B, P]`, 0 at padding; `None` without padding.
        has_spare_tokens: passes may go beyond `max_length`, where a static cache has no room.
        keeps_finished: rows that have left may be recalled, so what they still see is kept.
    """
    if _is_bufferable(cache, num_rows > 1 or has_spare_tokens):
        return BufferedRows(cache, num_rows, max_length, prompt_mask, keeps_finished)
    return CroppedRows(cache)


def can_roll_back(layer: Any) -> bool:
    """Whether rejected positions can be taken back out of a layer of a cache, by cropping it or by taking it over."""
    return is_croppable(layer) or type(layer) in _STATIC


def _is_bufferable(cache: Cache, leaves_static_layers: bool) -> bool:
    kinds: tuple[type, ...] = _DYNAMIC
    if leaves_static_layers or not all(map(is_croppable, cache.layers)):
        # A static cache cannot hold rows of different lengths: it waits outside and is filled at the end.
        kinds += _STATIC
    return not cache.offloading and all(type(layer) in kinds for layer in cache.layers if _holds_states(layer))


def takes_batches(cache: Cache) -> bool:
    """Whether rows of different lengths can be kept for this cache."""
    kinds = (*_DYNAMIC, *_STATIC)
    return not cache.offloading and all(
        type(layer) in kinds or isinstance(layer, DUMMY_LAYER) for layer in cache.layers
    )


def _holds_states(layer: Any) -> bool:
    # A layer of a convolution alone has neither of these, and always a state.
    return getattr(layer, "is_initialized", True) and getattr(layer, "keys", layer) is not None


def layer_windows(model: TargetModel) -> dict[str, int | None]:
    """The types of attention layers of a model, and the window of each; `None` for full attention."""
    config = model.config.get_text_config(decoder=True)
    window = getattr(config, "sliding_window", None)
    layer_types = getattr(config, "layer_types", None)
    if layer_types is None:
        layer_types = ["full_attention" if window is None else "sliding_attention"]
    return {name: window if name == "sliding_attention" else None for name in dict.fromkeys(layer_types)}


class CroppedRows:
    """One row in a cache of the caller's, cropped after each pass."""

    is_ragged = False

    def __init__(self, cache: Cache):
        self._cache = cache
        self.lengths = [int(cache.get_seq_length())]
        layers: Any = cache.layers
        self.static_length = layers[0].max_cache_len if cache.is_compileable else None
        self.width = 0
        # Only now: while it records, a sliding-window cache would hold a long prompt in full.
        cache.activate_past_recording()

    def begin(self, widths: list[int], unpadded: Unpadded | None = None) -> None:
        """Before a pass over so many tokens."""
        (self.width,) = widths

    def commit(self, counts: list[int]) -> None:
        """Keeps the first tokens of the last pass."""
        self._cache.crop(-(self.width - counts[0]))
        self.lengths[0] += counts[0]

    def select(self, slots: list[int]) -> None:
        """A batch of one has nothing to select."""

    def restore(self, is_visible: bool) -> None:
        """Takes uncommitted positions out of the cache, and stops it from recording."""
        surplus = int(self._cache.get_seq_length()) - self.lengths[0]
        if surplus > 0:
            self._cache.crop(-surplus)
        stop_recording_past(self._cache)


class BufferedRows:
    """Rows in buffers of our own.

    Attributes:
        prompt_length: positions that the cache held at the start, of each row.
        lengths: committed positions of each active row, padding of the prompt included.
        width: tokens of the widest row in the pass; all others are padded to it, if the pass pads.
        unpadded: how the rows part where the pass does not pad.
        end: where the longest row ends after the pass.
        is_level: whether all rows have one length.
    """

    def __init__(
        self,
        cache: Cache,
        num_rows: int,
        max_length: int,
        prompt_mask: torch.Tensor | None,
        keeps_finished: bool = False,
    ):
        self._cache = cache
        self._keeps_finished = keeps_finished
        self._originals = list(cache.layers)
        prompt_length = int(cache.get_seq_length())
        self.lengths = [prompt_length] * num_rows
        self._is_batch = num_rows > 1
        self.prompt_length = prompt_length
        self._finished: dict[int, int] = {}
        self._order = list(range(num_rows))
        self._max_positions = max_length + _SLACK
        self._real = None
        if prompt_mask is not None and not bool((prompt_mask != 0).all()):
            self._real = prompt_mask != 0
        self._all_real = self._real
        self.width, self.end, self.is_level = 0, prompt_length, True
        self.unpadded: Unpadded | None = None
        self._columns: dict[torch.device, torch.Tensor] = {}
        self._tokens: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}
        self._stores: dict[int | None, _Store] = {}
        for index, layer in enumerate(self._originals):
            if _holds_states(layer):
                cache.layers[index] = self._take_over(layer)

    def _take_over(self, layer: Any) -> "_BufferedLayer":
        window = layer.sliding_window if layer.is_sliding and hasattr(layer, "sliding_window") else None
        if layer.is_sliding and window is None:
            window = layer.max_cache_len  # a static layer
        length = self.prompt_length
        keys, values = layer.keys, layer.values
        if isinstance(layer, StaticLayer):
            keys, values = (states[:, :, : min(length, states.shape[2])] for states in (keys, values))
        else:
            layer.keys = layer.values = None
            layer.is_initialized = False
        if window not in self._stores:
            start = length - keys.shape[2]
            self._stores[window] = _Store(start, capacity=self._capacity(window, keys.shape[2] + _SLACK))
        store = self._stores[window]
        taken = _BufferedLayer(self, store, window, keys, values)
        store.layers.append(taken)
        return taken

    def _capacity(self, window: int | None, needed: int) -> int:
        """Columns of a buffer that must hold `needed` ones: at least as many, at most twice as many."""
        most = self._max_positions if window is None else min(self._max_positions, 2 * (window + _SLACK))
        return max(needed, min(2 * max(needed, 64), most))

    @property
    def static_length(self) -> int | None:
        """Keys of the static cache that waits outside, if one does."""
        return next((o.max_cache_len for o in self._originals if type(o) is StaticLayer), None)

    @property
    def num_rows(self) -> int:
        return len(self.lengths)

    @property
    def is_ragged(self) -> bool:
        """Whether rows must be told apart in the pass: by their lengths or by their padding.

        A call with one row needs nothing from here: the model gets the mask of the call itself.
        """
        return self._is_batch and not (self.is_level and self._real is None and self.unpadded is None)

    def begin(self, widths: list[int], unpadded: Unpadded | None = None) -> None:
        """Before a pass over so many tokens of each active row: makes room for them.

        Args:
            unpadded: of these widths, where the pass does not pad.
        """
        width = max(widths)
        shortest, longest = min(self.lengths), max(self.lengths)
        is_level = shortest == longest
        # Rows that have left still own what they hold.
        num_held = max(longest, *self._finished.values()) if self._finished else longest
        if self._keeps_finished:
            shortest = min([shortest, *self._finished.values()])
        self.width, self.end, self.is_level, self.unpadded = width, longest + width, is_level, unpadded
        self._columns.clear()
        self._tokens.clear()
        for window, store in self._stores.items():
            if self.end - store.start > store.capacity:
                # What no row can see any more makes room first.
                start = store.start if window is None else max(store.start, shortest - window + 1)
                capacity = self._capacity(window, max(self.end, num_held) - start + _SLACK)
                for layer in store.layers:
                    layer.move(start - store.start, num_held - start, capacity)
                store.start, store.capacity = start, capacity

    def columns(self, device: torch.device) -> torch.Tensor:
        """`[R, width]`, where in a sequence each row's tokens of this pass belong."""
        if device not in self._columns:
            starts = torch.tensor(self.lengths, device=device)[:, None]
            self._columns[device] = starts + torch.arange(self.width, device=device)
        return self._columns[device]

    def tokens(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """`[N]` each, the active row of each token of an unpadded pass, and where in its sequence it belongs."""
        assert self.unpadded is not None
        if device not in self._tokens:
            places = self.unpadded.places.to(device)
            self._tokens[device] = places // self.width, self.columns(device).flatten()[places]
        return self._tokens[device]

    def masks(self, windows: dict[str, int | None], device: torch.device, dtype: torch.dtype | None) -> Any:
        """What each token of the pass sees: `[R, 1, width, keys]`, one for each type of layer where there are several.

        Args:
            windows: of each type of layer of the model; `None` for full attention.
            dtype: of an additive mask; `None`: a boolean one.
        """
        made = {
            # A cache that knows nothing of windows keeps everything.
            name: self._mask(window, self._store_of(window), device, dtype)
            for name, window in windows.items()
        }
        return made if len(made) > 1 else next(iter(made.values()))

    def _store_of(self, window: int | None) -> "_Store":
        # A static cache that is shorter than the window counts as a window of its own length.
        return self._stores.get(window) or self._stores.get(None) or next(iter(self._stores.values()))

    def _mask(self, window: int | None, store: "_Store", device: torch.device, dtype: torch.dtype | None) -> Any:
        keys = torch.arange(store.start, self.end, device=device)
        queries = self.columns(device)[:, :, None]
        visible = keys <= queries
        if window is not None:
            visible &= keys > queries - window
        num_prompt = self.prompt_length - store.start
        if self._real is not None and num_prompt > 0:
            real = self._real.to(device)[:, -num_prompt:]
            visible[:, :, :num_prompt] &= real[:, None]
        visible = visible[:, None]
        if dtype is None:
            return visible
        mask = torch.zeros(visible.shape, dtype=dtype, device=device)
        return mask.masked_fill_(~visible, torch.finfo(dtype).min)

    def commit(self, counts: list[int]) -> None:
        """Keeps the first tokens of the last pass, of each active row as many as it says; the rest is overwritten."""
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]

    def select(self, slots: list[int]) -> None:
        """Keeps only some of the active rows in the batch; the others rest behind them."""
        gone = [slot for slot in range(self.num_rows) if slot not in slots]
        for slot in gone:
            self._finished[self._order[slot]] = self.lengths[slot]
        order = torch.tensor([*slots, *gone])
        for store in self._stores.values():
            for layer in store.layers:
                layer.reorder(order)
        if self._real is not None:
            self._real = self._real[torch.tensor(slots, device=self._real.device)]
        self._order = [self._order[slot] for slot in order.tolist()] + self._order[self.num_rows :]
        self.lengths = [self.lengths[slot] for slot in slots]

    def early_rows(self) -> list[int]:
        """Rows that hold less than the longest one."""
        lengths = {**dict(zip(self._order, self.lengths, strict=False)), **self._finished}
        return sorted(row for row, length in lengths.items() if length < max(lengths.values()))

    def recall(self, rows: list[int]) -> None:
        """Makes these rows the active ones, whether they have left or not."""
        self._finished |= dict(zip(self._order, self.lengths, strict=False))
        slots = [self._order.index(row) for row in rows]
        order = slots + [slot for slot in range(len(self._order)) if slot not in slots]
        for store in self._stores.values():
            for layer in store.layers:
                layer.reorder(torch.tensor(order))
        self._order = [self._order[slot] for slot in order]
        self.lengths = [self._finished.pop(row) for row in rows]
        if self._all_real is not None:
            self._real = self._all_real[torch.tensor(rows, device=self._all_real.device)]

    def restore(self, is_visible: bool) -> None:
        """Puts the cache's own layers back; where somebody sees the cache, with what plain generation leaves in it.

        Behind the end of a row that is shorter than others stand zeros, or states of the round in which it ended, in
        place of the states of padding: masked both.
        """
        lengths = {**dict(zip(self._order, self.lengths, strict=False)), **self._finished}
        by_row = [lengths[row] for row in range(len(self._order))]
        slots = torch.tensor([self._order.index(row) for row in range(len(self._order))])
        for index, original in enumerate(self._originals):
            layer = self._cache.layers[index]
            if not isinstance(layer, _BufferedLayer):
                continue
            self._cache.layers[index] = original
            if is_visible:
                layer.pour_into(original, slots, by_row)
            else:
                original.reset()
        # Layers, stores and rows point at each other: without this, keys and values would wait for the collector.
        for store in self._stores.values():
            store.layers.clear()
        self._stores.clear()


class _Store:
    """What the layers of one kind have in common: which positions their columns stand for."""

    def __init__(self, start: int, capacity: int):
        self.start = start
        self.capacity = capacity
        self.layers: list[_BufferedLayer] = []


class _BufferedLayer(DynamicLayer):
    """Keys and values of one layer, `[B, kv_heads, capacity, head_dim]`; the active rows come first."""

    keys: Any
    values: Any

    def __init__(
        self, rows: BufferedRows, store: _Store, window: int | None, keys: torch.Tensor, values: torch.Tensor
    ):
        super().__init__()
        self._rows = rows
        self._store = store
        self.device = keys.device
        self.is_initialized = True
        self.is_sliding = window is not None
        self.sliding_window = window
        self.keys, self.values = _grown(keys, store.capacity), _grown(values, store.capacity)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes `[R, kv_heads, width, head_dim]` behind each row; returns what the pass attends to, as views.

        Of an unpadded pass, the states are `[1, kv_heads, N, head_dim]`; what it attends to has its rows all the same.
        """
        rows, start = self._rows, self._store.start
        keys, values = self.keys[: rows.num_rows], self.values[: rows.num_rows]
        end = rows.end - start
        if rows.unpadded is not None:
            at = rows.tokens(keys.device)
            index = (at[0], at[1] - start)
            keys.transpose(1, 2)[index] = key_states[0].transpose(0, 1)
            values.transpose(1, 2)[index] = value_states[0].transpose(0, 1)
        elif rows.is_level:
            keys[:, :, end - rows.width : end] = key_states
            values[:, :, end - rows.width : end] = value_states
        else:
            columns = rows.columns(keys.device) - start
            index = (torch.arange(rows.num_rows, device=keys.device)[:, None], columns)
            keys.transpose(1, 2)[index] = key_states.transpose(1, 2)
            values.transpose(1, 2)[index] = value_states.transpose(1, 2)
        first = 0 if rows.is_ragged else self._first_visible()
        return keys[:, :, first:end], values[:, :, first:end]

    def _first_visible(self) -> int:
        if self.sliding_window is None:
            return 0
        oldest = self._rows.end - self._rows.width - self.sliding_window + 1
        return max(oldest - self._store.start, 0)

    def get_seq_length(self) -> int:
        return self._rows.end - self._rows.width

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        offset = self._first_visible() + self._store.start
        return self.get_seq_length() + query_length - offset, offset

    def move(self, dropped: int, num_kept: int, capacity: int) -> None:
        """Moves to buffers of another size, without the first `dropped` columns."""
        kept = slice(dropped, dropped + num_kept)
        self.keys = _grown(self.keys[:, :, kept], capacity)
        self.values = _grown(self.values[:, :, kept], capacity)

    def reorder(self, order: torch.Tensor) -> None:
        """Changes the order of the first rows."""
        for states in (self.keys, self.values):
            states[: len(order)] = states[order.to(states.device)]

    def pour_into(self, layer: Any, slots: torch.Tensor, lengths: list[int]) -> None:
        """Fills a layer of transformers with the committed states, rows in their first order."""
        start, longest = self._store.start, max(lengths)
        keys, values = (
            states[slots.to(states.device), :, : longest - start]
            if len(lengths) > 1
            else states[:, :, : longest - start]
            for states in (self.keys, self.values)
        )
        for row, length in enumerate(lengths):
            if length < longest:
                keys[row, :, max(0, length - start) :] = 0
                values[row, :, max(0, length - start) :] = 0
        if isinstance(layer, StaticLayer):
            _fill_static(layer, keys, values, longest)
            return
        if self.sliding_window is not None:
            keys, values = (states[:, :, -(self.sliding_window - 1) :] for states in (keys, values))
            layer.cumulative_length = longest
        layer.keys, layer.values = keys.clone(), values.clone()
        layer.is_initialized = True


def _fill_static(layer: Any, keys: torch.Tensor, values: torch.Tensor, length: int) -> None:
    newest = slice(max(0, keys.shape[2] - layer.max_cache_len), None)
    kept = keys[:, :, newest].shape[2]
    layer.keys[:, :, :kept] = keys[:, :, newest]
    layer.values[:, :, :kept] = values[:, :, newest]
    layer.cumulative_length.fill_(min(length, layer.max_cache_len))
    if hasattr(layer, "cumulative_length_int"):
        layer.cumulative_length_int = length


def _grown(states: torch.Tensor, capacity: int) -> torch.Tensor:
    """`[B, heads, n, head_dim]` states at the start of a buffer of zeros (what is masked must be finite)."""
    batch, heads, length, head_dim = states.shape
    buffer = states.new_zeros((batch, heads, capacity, head_dim))
    buffer[:, :, :length] = states
    return buffer
