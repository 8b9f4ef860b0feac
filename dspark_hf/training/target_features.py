"""What training reads of the target: tapped hidden states, final hidden states, and its distributions from those.

The target is frozen. Logits are made only where a draft token is supervised, never for a whole sequence.
"""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..data.rows import fingerprint
from ..errors import UnsupportedGenerationError
from ..target_taps import TargetTaps
from .feature_store import FeatureStore, MemoryStore, ShardStore, States, in_8_bits, num_bytes_of, of_8_bits, row_key
from .responses import ResponseDataset

# How far logits that are made here may differ from the target's own, relative to the largest one.
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 5e-3}
# Dtype of states that are kept.
_KEPT = torch.bfloat16
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
    """Runs the target for a row once and keeps the states: from the second epoch on the target rests.

    Rows are known by their `row_ids`.

    Args:
        online: runs the target.
        head: the target's, for the normalizers.
        datasets: the rows; ids go on from one to the next.
        folder: where the states are kept, for other runs as well, of these and of other rows; `None`: in memory.
        bits: of a value of the tapped states. 16: bfloat16. 8: half the size, and an error of up to 0.6 % of the
            largest of 64 neighbours. Final states, which the target's distributions are made of, are in bfloat16.

    Attributes:
        num_bytes: size of the states of all rows.
        num_missing_bytes: of those that are not kept yet.

    Raises:
        ValueError: the folder holds states of another target, of other layers or in other bits, or there is no room.
    """

    def __init__(
        self,
        online: OnlineFeatures,
        head: TargetHead,
        datasets: Sequence[ResponseDataset],
        folder: Path | None = None,
        bits: int = 16,
    ):
        self._online, self._head, self._bits = online, head, bits
        rows = [pair for dataset in datasets for pair in zip(dataset.rows, dataset.lengths, strict=True)]
        self._response_starts = [len(row.prompt_ids) for row, _ in rows]
        self._keys = [row_key(row, length) for row, length in rows]
        lengths = {key: length for key, (_, length) in zip(self._keys, rows, strict=True)}
        # The normalizer is in float32.
        per_token = num_bytes_of(online.context_width, bits) + num_bytes_of(online.final_width, 16) + 4
        self.num_bytes = self.num_missing_bytes = per_token * sum(lengths.values())
        self._store: FeatureStore = MemoryStore()
        if folder is not None:
            store = ShardStore(folder, {**online.identity, "temperature": head.temperature, "bits": bits})
            self.num_missing_bytes = per_token * sum(n for key, n in lengths.items() if key not in store)
            free = shutil.disk_usage(folder).free
            if free < self.num_missing_bytes:
                raise ValueError(
                    f"The states of these rows take {self.num_missing_bytes / 1e9:.2f} GB more, but {folder} has room "
                    f"for {free / 1e9:.2f} GB. Name another folder, take 8 bits, or fewer rows."
                )
            self._store = store

    def flush(self) -> None:
        """Puts down what a kill would lose."""
        self._store.flush()

    def __call__(self, batch: dict[str, torch.Tensor]) -> TargetFeatures:
        """The features of a batch as `responses.collate` makes it."""
        rows, longest, device = batch["row_ids"].tolist(), batch["input_ids"].shape[1], batch["input_ids"].device
        kept = [self._store.get(self._keys[row]) for row in rows]
        missing = [i for i, states in enumerate(kept) if states is None]
        if missing:
            some = torch.tensor(missing, device=device)
            found = self._states_of({name: values[some.to(values.device)] for name, values in batch.items()})
            for i, states in zip(missing, found, strict=True):
                kept[i] = states
            self._store.put({self._keys[rows[i]]: states for i, states in zip(missing, found, strict=True)})
        columns = zip(*(self._unpacked(states) for states in kept if states is not None), strict=True)
        return TargetFeatures(*(_padded(column, longest).to(device) for column in columns))

    def _states_of(self, batch: dict[str, torch.Tensor]) -> list[States]:
        """The target's states of some rows, as they are kept."""
        lengths = batch["lengths"].tolist()
        found = self._online({**batch, "input_ids": batch["input_ids"][:, : max(lengths)]})
        packed: list[States] = []
        for i, (row, length) in enumerate(zip(batch["row_ids"].tolist(), lengths, strict=True)):
            # Copies: a view would keep the whole batch.
            context, final = (
                states[i, :length].to("cpu", _KEPT, copy=True) for states in (found.context, found.final)
            )
            # Nothing before the response is supervised.
            first = self._response_starts[row]
            normalizer = torch.zeros(length)
            normalizer[first:] = self._head.log_normalizer(final[first:].to(found.final.device)).cpu()
            states = {"final": final, "log_normalizer": normalizer}
            if self._bits == 8:
                states["context"], states["context_scales"] = in_8_bits(context)
            else:
                states["context"] = context
            packed.append(states)
        return packed

    def _unpacked(self, states: States) -> tuple[torch.Tensor, ...]:
        context = states["context"]
        if self._bits == 8:
            context = of_8_bits(context, states["context_scales"])
        return context, states["final"], states["log_normalizer"]


def _padded(rows: Sequence[torch.Tensor], length: int) -> torch.Tensor:
    """`[l, ...]` of each row to `[B, length, ...]`, with zeros behind."""
    padded = rows[0].new_zeros((len(rows), length, *rows[0].shape[1:]))
    for i, row in enumerate(rows):
        padded[i, : len(row)] = row
    return padded


FeatureSource = Callable[[dict[str, torch.Tensor]], TargetFeatures]
