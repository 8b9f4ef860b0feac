"""Faster passes on CPU: linear layers read a copy of their weights in the block layout of oneDNN's kernels.

With few rows, a pass on CPU waits for weights. `F.linear` reads them in the row layout of the checkpoint, in bfloat16
rearranging them on every call; in float32 it calls a matrix product that is slow for 2 to 16 rows on some machines.
Packed once, both dtypes run close to the speed of memory at every width of a verification pass, so that verifying a
block costs about as much as one token. In bfloat16 the results are the same bits as before, in float32 they differ
by rounding.

Nothing is traced or compiled: any cache, hook, shape and attention implementation works as before, and plain
generation profits too. `torch.compile` on CPU packs weights only where it freezes them into one graph per width.
"""

from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import nn

# The layout is chosen for about this many rows; any other number of rows gives the same result.
_TYPICAL_NUM_ROWS = 8


def pack_weights(model: nn.Module) -> int:
    """Makes the linear layers of a model on CPU faster, at the price of a second copy of their weights in memory.

    In place and for every user of the model, until `unpack_weights`. Layers that this cannot serve stay as they are:
    other devices, other dtypes than bfloat16 and float32, subclasses of `nn.Linear` (quantized, adapted ones).
    A packed layer returns to its own weights by itself under autograd, autocast and tracing, and once its weights
    have changed. A change through `.data`, as merging adapters makes it, cannot be seen: pack again after it. Layers
    may be packed while other threads use them.

    Args:
        model: a target, a drafter, or any other module. Its parameters and its state dict stay as they are.

    Returns:
        The number of layers that are packed now.
    """
    for layer in model.modules():
        if isinstance(layer, nn.Linear) and type(layer) in (nn.Linear, PackedLinear) and _is_packable(layer.weight):
            _packed[layer] = _Packed(layer.weight)
            layer.__class__ = PackedLinear
    return sum(layer in _packed for layer in model.modules() if isinstance(layer, PackedLinear))


def unpack_weights(model: nn.Module) -> None:
    """Undoes `pack_weights` and frees the copies. Passes that are under way in other threads finish unharmed."""
    for layer in model.modules():
        if type(layer) is PackedLinear:
            layer.__class__ = nn.Linear  # type: ignore[assignment]
            _packed.pop(layer, None)


class PackedLinear(nn.Linear):
    """An `nn.Linear` that reads its packed copy wherever that gives the same result. Made by `pack_weights`.

    The copy lives outside of the module, so that copying, pickling and saving a model never meet it.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """`[..., in_features]` to `[..., out_features]`."""
        if not torch.compiler.is_compiling():
            packed = _packed.get(self)
            if packed is not None and packed.serves(self.weight, input):
                return torch.ops.mkldnn._linear_pointwise(input, packed.weight, self.bias, "none", [], "")
        return F.linear(input, self.weight, self.bias)


class _Packed:
    """A packed copy, and what tells whether the weight is still the one that was copied."""

    def __init__(self, weight: torch.Tensor):
        with torch.no_grad():
            self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _TYPICAL_NUM_ROWS)
        self._origin = weight_identity(weight)

    def serves(self, weight: torch.Tensor, input: torch.Tensor) -> bool:
        return (
            not torch.is_grad_enabled()
            and input.dtype is weight.dtype
            and input.is_cpu
            and not torch.is_autocast_enabled("cpu")
            and self._origin == weight_identity(weight)
        )


_packed: WeakKeyDictionary[nn.Module, _Packed] = WeakKeyDictionary()


def weight_identity(weight: torch.Tensor) -> tuple[Any, ...]:
    """Tells whether a weight is still the one that was copied."""
    # Tensors made in inference mode count no versions; they cannot be changed outside of it either.
    return weight.data_ptr(), None if weight.is_inference() else weight._version


def _is_packable(weight: torch.Tensor) -> bool:
    if type(weight) is not nn.Parameter or weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype is torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return weight.dtype is torch.float32
