"""Keyword arguments of the target's verification passes, made by its own `prepare_inputs_for_generation`."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers.generation.candidate_generator import (
    _prepare_attention_mask,
    _prepare_position_ids,
    _prepare_token_type_ids,
)

from ._compat import TargetModel
from .target_rows import BufferedRows, CroppedRows, layer_windows

# What a batch makes for itself, because each row has its own length.
_PER_ROW = ("attention_mask", "position_ids", "token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids")


class TargetInputs:
    """The inputs of each pass of one call.

    Args:
        model: the target.
        model_kwargs: what `generate` prepared, as it is before the prefill.
    """

    def __init__(self, model: TargetModel, model_kwargs: dict[str, Any]):
        self.model = model
        self.model_kwargs = model_kwargs
        self._next_positions: torch.Tensor | None = None
        self._num_prompt = 0

    def open_batch(self, prompt_mask: torch.Tensor | None, num_prompt: int, num_rows: int) -> None:
        """After the prefill of a batch: from here on each row has its own positions.

        Args:
            prompt_mask: `[B, P]`, 0 at padding; `None` without padding.
            num_prompt: P, positions in the cache.
        """
        kwargs, device = self.model_kwargs, self.model.device
        if kwargs.get("position_ids") is not None:
            self._next_positions = kwargs["position_ids"][..., -1:] + 1
        elif prompt_mask is not None:
            self._next_positions = prompt_mask.sum(dim=-1, keepdim=True)
        else:
            self._next_positions = torch.full((num_rows, 1), num_prompt, device=device)
        self._num_prompt = num_prompt
        self.model_kwargs = {name: value for name, value in kwargs.items() if name not in _PER_ROW}
        self._of_all = self._next_positions, self.model_kwargs, num_rows

    def recall(self, rows: list[int]) -> None:
        """Makes these rows of the call the active ones."""
        self._next_positions, self.model_kwargs, num_rows = self._of_all
        self.select(rows, num_rows)

    def select(self, slots: list[int], num_rows: int) -> None:
        """Keeps some of the `num_rows` active rows, in whatever else is given by row."""
        if self._next_positions is None:
            return

        def of_rows(value: Any, dim: int = 0) -> Any:
            if not isinstance(value, torch.Tensor) or value.dim() == 0 or value.shape[dim] != num_rows:
                return value
            return value.index_select(dim, torch.tensor(slots, device=value.device))

        self._next_positions = of_rows(self._next_positions, dim=-2)
        self.model_kwargs = {name: of_rows(value) for name, value in self.model_kwargs.items()}

    def of_pass(self, rows: "BufferedRows | CroppedRows", input_ids: torch.Tensor, width: int) -> dict[str, Any]:
        """Arguments of a pass over the last `width` of `[R, L]` ids, of which all but one are not committed.

        Of an unpadded pass, the ids are `[1, N]`, and `width` is N.
        """
        if self._next_positions is None:
            kwargs = _extended(self.model_kwargs, width - 1)
        else:
            assert isinstance(rows, BufferedRows)
            kwargs = {**self.model_kwargs, "position_ids": self._positions(rows)}
        inputs = self.model.prepare_inputs_for_generation(
            input_ids, next_sequence_length=width, is_first_iteration=False, **kwargs
        )
        if rows.is_ragged:
            assert isinstance(rows, BufferedRows)
            is_eager = self.model.config._attn_implementation == "eager"
            dtype = self.model.dtype if is_eager else None
            inputs["attention_mask"] = rows.masks(layer_windows(self.model), self.model.device, dtype)
        if "logits_to_keep" in inputs:
            inputs["logits_to_keep"] = width
        return inputs

    def _positions(self, rows: BufferedRows) -> torch.Tensor:
        assert self._next_positions is not None
        positions = self._next_positions + rows.columns(self._next_positions.device) - self._num_prompt
        if rows.unpadded is None:
            return positions
        return positions.flatten(-2)[..., None, rows.unpadded.places.to(positions.device)]

    def commit(self, outputs: Any, num_new: int) -> None:
        """After a pass of a single row: its arguments grow by the committed tokens."""
        if self._next_positions is None:
            self.model_kwargs = self.model._update_model_kwargs_for_generation(
                outputs, self.model_kwargs, is_encoder_decoder=False, num_new_tokens=num_new
            )


def differ_by_row(model_kwargs: dict[str, Any], num_rows: int) -> bool:
    """Whether a call has arguments, besides those that a batch makes for itself, with something for each row."""
    return any(
        isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape[0] == num_rows
        for name, value in model_kwargs.items()
        if name not in _PER_ROW
    )


def _extended(model_kwargs: dict[str, Any], num_tokens: int) -> dict[str, Any]:
    """The keyword arguments of a pass, as long as they are now plus a draft of `num_tokens`.

    Each is extended from its own length: with a part-filled cache, masks span more than the ids that were passed.
    """
    kwargs = dict(model_kwargs)
    for name, extend in _EXTENSIONS.items():
        if kwargs.get(name) is not None:
            kwargs = extend(kwargs, kwargs[name].shape[-1] + num_tokens)
    if (token_types := kwargs.get("mm_token_type_ids")) is not None:
        # Drafted tokens are text.
        text = token_types.new_zeros((token_types.shape[0], num_tokens))
        kwargs["mm_token_type_ids"] = torch.cat((token_types, text), dim=-1)
    return kwargs


_EXTENSIONS: dict[str, Callable[[dict[str, Any], int], dict[str, Any]]] = {
    "attention_mask": partial(_prepare_attention_mask, is_encoder_decoder=False),
    "position_ids": partial(_prepare_position_ids, is_encoder_decoder=False),
    "token_type_ids": _prepare_token_type_ids,
}
