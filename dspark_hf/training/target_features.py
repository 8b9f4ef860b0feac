"""What training reads of the target: tapped hidden states, final hidden states, and its distributions from those.

The target is frozen. Logits are made only where a draft token is supervised, never for a whole sequence.
"""

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..checkpoints.files import write_whole
from ..data.rows import fingerprint
from ..errors import UnsupportedGenerationError
from ..target_taps import TargetTaps
from .responses import ResponseDataset

# How far logits that are made here may differ from the target's own, relative to the largest one.
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 5e-3}
# Positions whose full-vocabulary logits exist at once.
_CHUNK = 128


@dataclass
class TargetFeatures:
    """Of one batch of sequences, without gradients.

    Attributes:
        context: `[B, L, m * Ht]` tapped hidden states, in the order of `target_layer_ids`.
        final: `[B, L, Ht]` hidden states that the target's head reads.
        log_normalizer: `[B, L]` float32, log of the sum of exp(logit) over the target's vocabulary, where it is known
            already (at response positions); `None`: it is not.
    """

    context: torch.Tensor
    final: torch.Tensor
    log_normalizer: torch.Tensor | None = None


class TargetHead:
    """From final hidden states to the target's logits, at chosen positions and for chosen ids.

    Args:
        target: any causal language model whose logits are its head's, scaled or softcapped as its config says.
        temperature: the logits are divided by it, as in sampling.

    Raises:
        UnsupportedGenerationError: the logits come out otherwise than the target's own.
    """

    def __init__(self, target: Any, temperature: float = 1.0):
        config = target.config.get_text_config(decoder=True)
        self._head = target.get_output_embeddings()
        self.vocab_size: int = config.vocab_size
        self._cap = getattr(config, "final_logit_softcapping", None)
        # Cohere multiplies, Granite divides.
        self._scale = getattr(config, "logit_scale", None) or 1 / (getattr(config, "logits_scaling", None) or 1.0)
        self.temperature = 1.0
        self._check(target)
        self.temperature = temperature

    @torch.no_grad()
    def _check(self, target: Any) -> None:
        probe = torch.arange(1, 5, device=target.device)[None] % self.vocab_size
        expected = target(input_ids=probe, use_cache=False).logits.float()
        found = self.logits(final_hidden_states(target, probe))
        error = (found[..., : self.vocab_size] - expected[..., : self.vocab_size]).abs().max()
        if not error <= _TOLERANCE.get(target.dtype, 3e-2) * expected.abs().max().clamp(min=1.0):
            raise UnsupportedGenerationError(
                f"The logits of {type(target).__name__} are not its head's alone: they differ by {float(error):.3g} "
                "from what head, `final_logit_softcapping`, `logit_scale` and `logits_scaling` give. Training a "
                "drafter for this kind of model is not supported."
            )

    def logits(self, states: torch.Tensor, ids: torch.Tensor | None = None) -> torch.Tensor:
        """`[..., Ht]` final hidden states to `[..., V]` float32 logits, or `[..., n]` of `[n]` token ids."""
        weight = getattr(self._head, "weight", None)
        if ids is not None and type(self._head) is nn.Linear and weight is not None:
            bias = None if self._head.bias is None else self._head.bias[ids]
            logits = nn.functional.linear(states.to(weight.dtype), self._rows(ids), bias)
        else:
            logits = self._head(states if weight is None else states.to(weight.dtype))
            logits = logits if ids is None else logits[..., ids]
        logits = logits.float() if self._scale == 1.0 else logits.float() * self._scale
        if self._cap is not None:
            logits = torch.tanh(logits / self._cap) * self._cap
        return logits if self.temperature == 1.0 else logits / self.temperature

    def _rows(self, ids: torch.Tensor) -> torch.Tensor:
        """The head's rows of some ids: copied once for as long as the same ids are asked for."""
        known = getattr(self, "_known", None)
        if known is None or known[0] is not ids:
            weight = self._head.weight.detach()
            self._known = known = (ids, weight[ids.to(weight.device)].contiguous())
        return known[1]

    @torch.no_grad()
    def log_normalizer(self, states: torch.Tensor) -> torch.Tensor:
        """`[n, Ht]` final hidden states to `[n]` log-sum-exp of the logits, float32."""
        return torch.cat([self.logits(part)[:, : self.vocab_size].logsumexp(-1) for part in states.split(_CHUNK)])


def final_hidden_states(target: Any, input_ids: torch.Tensor) -> torch.Tensor:
    """`[B, L]` ids (any padding behind the end: attention is causal) to `[B, L, Ht]` states behind the final norm."""
    # The decoder alone: with the head, the logits of every position would be made.
    return target.get_decoder()(input_ids=input_ids, use_cache=False).last_hidden_state


class OnlineFeatures:
    """Runs the target for each batch. Use it as a context manager, or `close` it: it holds hooks on the target.

    Args:
        target: frozen, in evaluation mode.
        target_layer_ids: the tapped layers.
    """

    def __init__(self, target: Any, target_layer_ids: list[int]):
        self._target = target
        self._taps = TargetTaps(target, target_layer_ids)
        config = target.config.get_text_config(decoder=True)
        self.final_width: int = config.hidden_size
        self.context_width: int = len(target_layer_ids) * config.hidden_size
        self._layer_ids = target_layer_ids

    @property
    def identity(self) -> dict[str, Any]:
        """What the states are of: layers, dtype, and a digest of the target's weights."""
        return {
            "target_layer_ids": list(self._layer_ids),
            "dtype": str(self._target.dtype),
            "weights": fingerprint(self._target),
        }

    def __enter__(self) -> "OnlineFeatures":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Takes the hooks off the target."""
        self._taps.close()

    @torch.no_grad()
    def __call__(self, batch: dict[str, torch.Tensor]) -> TargetFeatures:
        """The features of a batch as `responses.collate` makes it."""
        with self._taps.listening():
            final = final_hidden_states(self._target, batch["input_ids"].to(self._target.device))
        (context,) = self._taps.take()
        return TargetFeatures(context, final)


class CachedFeatures:
    """Runs the target for a row once and keeps the states, in bfloat16: from the second epoch on the target rests.

    Rows are known by their `row_ids`.

    Args:
        online: runs the target.
        head: the target's, for the normalizers.
        datasets: the rows; ids go on from one to the next.
        folder: where the states are kept, for a restart as well; `None`: in memory. Several processes of one machine
            may share it.

    Raises:
        ValueError: the folder holds states of another target, of other layers or of other rows.
    """

    def __init__(
        self,
        online: OnlineFeatures,
        head: TargetHead,
        datasets: Sequence[ResponseDataset],
        folder: Path | None = None,
    ):
        self._online, self._head = online, head
        self._lengths = [length for dataset in datasets for length in dataset.lengths]
        self._response_starts = [len(row.prompt_ids) for dataset in datasets for row in dataset.rows]
        self._offsets = [0, *accumulate(self._lengths)]
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            _claim(
                folder / "cache.json", {**online.identity, "temperature": head.temperature, "rows": _digest(datasets)}
            )
        total = self._offsets[-1]
        self._context = _store(folder, "context", (total, online.context_width), torch.bfloat16)
        self._final = _store(folder, "final", (total, online.final_width), torch.bfloat16)
        self._normalizer = _store(folder, "normalizer", (total,), torch.float32)
        # Set last: a row that a kill cut short counts as missing.
        self._is_known = _store(folder, "is_known", (len(self._lengths),), torch.bool)

    @property
    def num_bytes(self) -> int:
        """Size of the cache when every row is in it."""
        return sum(t.numel() * t.element_size() for t in (self._context, self._final, self._normalizer))

    def __call__(self, batch: dict[str, torch.Tensor]) -> TargetFeatures:
        """The features of a batch as `responses.collate` makes it."""
        missing = (~self._is_known[batch["row_ids"].cpu()]).nonzero()[:, 0]
        if len(missing):
            self._fill({name: values[missing.to(values.device)] for name, values in batch.items()})
        rows, longest, device = batch["row_ids"].tolist(), batch["input_ids"].shape[1], batch["input_ids"].device
        parts = []
        for store in (self._context, self._final, self._normalizer):
            padded = store.new_zeros((len(rows), longest, *store.shape[1:]))
            for i, row in enumerate(rows):
                padded[i, : self._lengths[row]] = store[self._offsets[row] : self._offsets[row + 1]]
            parts.append(padded.to(device))
        return TargetFeatures(*parts)

    def _fill(self, batch: dict[str, torch.Tensor]) -> None:
        lengths = batch["lengths"].tolist()
        found = self._online({**batch, "input_ids": batch["input_ids"][:, : max(lengths)]})
        for i, (row, length) in enumerate(zip(batch["row_ids"].tolist(), lengths, strict=True)):
            start, end = self._offsets[row], self._offsets[row + 1]
            self._context[start:end] = found.context[i, :length].to(self._context)
            self._final[start:end] = found.final[i, :length].to(self._final)
            # Nothing before the response is supervised.
            first = self._response_starts[row]
            states = self._final[start + first : end].to(found.final.device)
            self._normalizer[start + first : end] = self._head.log_normalizer(states).cpu()
            self._is_known[row] = True


def _store(folder: Path | None, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor of zeros in memory, which is taken as it fills, or in a file, as it was left."""
    if folder is None:
        return torch.zeros(shape, dtype=dtype)
    path, size = folder / f"{name}.bin", math.prod(shape)
    num_bytes = size * dtype.itemsize
    if path.exists() and path.stat().st_size != num_bytes:
        raise ValueError(f"{path} has {path.stat().st_size} bytes, expected {num_bytes}. Delete the folder.")
    return torch.from_file(str(path), shared=True, size=size, dtype=dtype).view(shape)


def _claim(path: Path, identity: dict[str, Any]) -> None:
    """Marks a folder as the cache of these states, or refuses one that is of others."""
    if path.exists():
        found = json.loads(path.read_text(encoding="utf-8"))
        differing = [name for name in identity if found.get(name) != identity[name]]
        if differing:
            name = differing[0]
            raise ValueError(
                f"{path.parent} holds hidden states of another run: `{name}` is {found.get(name)} there and "
                f"{identity[name]} here. Use another folder, or delete this one."
            )
    else:
        write_whole(path, identity)


def _digest(datasets: Sequence[ResponseDataset]) -> str:
    digest = hashlib.sha256()
    for dataset in datasets:
        for row, length in zip(dataset.rows, dataset.lengths, strict=True):
            digest.update(json.dumps((row.prompt_ids, row.response_ids, length)).encode())
    return digest.hexdigest()


FeatureSource = Callable[[dict[str, torch.Tensor]], TargetFeatures]
