"""Reads the hidden states of chosen decoder layers out of the target's own forward passes.

Only the tapped layers are kept, so a long prompt costs `len(target_layer_ids)` states a position, never all of them.
The hooks live as long as one call of `generate`; they are deaf to passes of other threads, to other calls, and to
passes that a logits processor makes with the target (classifier-free guidance does).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from .errors import UnsupportedGenerationError

_listening: ContextVar["TargetTaps | None"] = ContextVar("dspark_hf_listening_taps", default=None)


class TargetTaps:
    """Hooks on a target's decoder layers.

    Args:
        target: the model to listen to.
        target_layer_ids: ascending; `k` is the output of decoder layer `k`, `-1` the input of layer 0.
        device: where the states are collected; `None`: where the last tapped layer lives.

    Raises:
        UnsupportedGenerationError: the target has no list of decoder layers, or too few of them.
    """

    def __init__(self, target: PreTrainedModel, target_layer_ids: list[int], device: torch.device | None = None):
        layers = decoder_layers(target)
        if target_layer_ids[-1] >= len(layers):
            raise UnsupportedGenerationError(
                f"The drafter taps decoder layer {target_layer_ids[-1]}, but {type(target).__name__} has "
                f"{len(layers)} layers. Use a drafter that was trained for this model."
            )
        self._ids = target_layer_ids
        self._device = device
        self._states: dict[int, torch.Tensor] = {}
        self._passes: list[torch.Tensor] = []
        self._sink: Callable[[torch.Tensor], None] | None = None
        self._handles = [self._hook(layers, layer_id) for layer_id in target_layer_ids]

    def _hook(self, layers: nn.ModuleList, layer_id: int) -> RemovableHandle:
        if layer_id == -1:

            def before(module: nn.Module, args: tuple, kwargs: dict | None = None) -> None:
                # torch removes such a hook in two steps: in between, another thread's pass calls it without `kwargs`.
                if kwargs is not None:
                    self._receive(layer_id, args[0] if args else kwargs["hidden_states"])

            return layers[0].register_forward_pre_hook(before, with_kwargs=True)

        def after(module: nn.Module, args: tuple, output: Any) -> None:
            self._receive(layer_id, output[0] if isinstance(output, tuple) else output)

        return layers[layer_id].register_forward_hook(after)

    def _receive(self, layer_id: int, hidden_states: torch.Tensor) -> None:
        if _listening.get() is not self:
            return
        if hidden_states.dim() != 3:
            raise UnsupportedGenerationError(
                f"Decoder layer {layer_id} of the target gives a tensor of shape {list(hidden_states.shape)}, but "
                "drafters read one state per position ([batch, length, hidden_size]). Leave out `assistant_model` for "
                "this model."
            )
        self._states[layer_id] = hidden_states
        if layer_id != self._ids[-1]:
            return
        device = self._device or hidden_states.device
        features = torch.cat([self._states[i].to(device) for i in self._ids], dim=-1)
        self._states.clear()
        if self._sink is not None:
            self._sink(features)
        else:
            self._passes.append(features)

    @contextmanager
    def listening(self, sink: Callable[[torch.Tensor], None] | None = None) -> Iterator[None]:
        """Records the passes made inside; each one is handed to `sink` at once, where given, or kept for `take`."""
        token = _listening.set(self)
        self._sink = sink
        try:
            yield
        finally:
            self._sink = None
            self._states.clear()
            _listening.reset(token)

    @property
    def has_passes(self) -> bool:
        return bool(self._passes)

    def take(self) -> list[torch.Tensor]:
        """The passes since the last call: `[B, T, m * Ht]` each, taps side by side in the order of their ids."""
        passes, self._passes = self._passes, []
        return passes

    def close(self) -> None:
        """Takes every hook off the target."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._passes = [], []
        self._states.clear()


def skips_prompt_positions(target: PreTrainedModel, target_layer_ids: list[int]) -> bool:
    """Whether a tapped layer sees only those positions of a prompt whose logits are asked for.

    From the first layer on that shares its keys with earlier ones (Gemma 3n, Gemma 4), nothing looks back at the
    prompt, so transformers drops it there.
    """
    config = target.config.get_text_config(decoder=True)
    num_shared = getattr(config, "num_kv_shared_layers", None) or 0
    return num_shared > 0 and target_layer_ids[-1] >= config.num_hidden_layers - num_shared


def decoder_layers(target: PreTrainedModel) -> nn.ModuleList:
    """The list of decoder layers of a causal language model, also inside a multimodal one."""
    decoder = target.get_decoder()
    layers = getattr(decoder, "layers", None)
    if layers is None:
        # Multimodal models keep their text decoder one level down.
        layers = getattr(getattr(decoder, "language_model", None), "layers", None)
    if layers is None:
        raise UnsupportedGenerationError(
            f"Cannot find the decoder layers of {type(target).__name__}: neither `get_decoder().layers` nor "
            "`get_decoder().language_model.layers` exists. Drafters work with decoder-only language models."
        )
    return layers
