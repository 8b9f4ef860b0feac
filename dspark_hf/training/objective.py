"""The training objective (DSpark, section 3; DFlash's is the special case of cross entropy alone).

At each supervised draft position k, with the drafter's distribution p_d and the target's p_t:

    w_k (a CE(p_d, true token) + b ||p_d - p_t||_1 + c BCE(c_k, 1 - 1/2 ||p_d - p_t||_1)),  w_k = exp(-(k - 1) / decay)

The last argument is the exact chance that a token drawn from p_d survives. Outside a reduced draft vocabulary p_d is
0: the target's mass there counts in full in the distance, and a true token there has no cross entropy. In place of
being weighted, positions can be drawn (`TrainingStep`).

Logits exist for a few positions at a time: each chunk's gradient is taken at once, so that memory does not grow with
the number of anchors. Shapes: D supervised positions, U positions of sequences that they are compared with, Vd ids.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

# Positions whose logits exist at once, for a vocabulary of 8,192; fewer where it is larger.
_CHUNK_LOGITS = 256 * 8192


@dataclass(frozen=True)
class ObjectiveWeights:
    """The coefficients.

    Attributes:
        cross_entropy, distance, confidence: of the three terms.
        decay: draft positions over which the weight of a position falls by e.
        temperature: both distributions are those of sampling at it; a low one trains for greedy decoding.
    """

    cross_entropy: float = 0.1
    distance: float = 0.9
    confidence: float = 1.0
    decay: float = 4.0
    temperature: float = 1.0

    def by_position(
        self, num_positions: int, device: torch.device | None = None, are_drawn: bool = False
    ) -> torch.Tensor:
        """`[n]` weights w_k, float32; 1 of positions that are drawn."""
        if are_drawn:
            return torch.ones(num_positions, device=device)
        return torch.exp(-torch.arange(num_positions, dtype=torch.float32, device=device) / self.decay)


def distribution_terms(
    logits: torch.Tensor, label_rows: torch.Tensor, target_probs: torch.Tensor, outside: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cross entropy and L1 distance of each position.

    Args:
        logits: `[C, Vd]` float32, the drafter's.
        label_rows: `[C]`, the draft vocabulary's row of the true token; -1 where it is not in it.
        target_probs: `[C, Vd]` float32, the target's probabilities of the draft vocabulary.
        outside: `[C]`, its mass on everything else.

    Returns:
        `[C]` and `[C]`.
    """
    cross_entropy, distance = _Terms.apply(logits, label_rows, target_probs)
    return cross_entropy.masked_fill(label_rows < 0, 0.0), distance + outside


class _Terms(torch.autograd.Function):
    """Both terms and their gradient, in few passes over the vocabulary: they take as long as the head does.

    With s = sign(p_d - p_t), the distance is `s . (p_d - p_t)`, and its gradient `p_d * (s - s . p_d)`.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, label_rows: torch.Tensor, target_probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows = label_rows.clamp(min=0)[:, None]
        probs = logits.softmax(dim=-1)
        # By the most likely token: the probability of the true one may round to 0.
        normalizer = logits.amax(dim=-1) - probs.amax(dim=-1).log()
        cross_entropy = normalizer - logits.gather(1, rows)[:, 0]
        difference = probs - target_probs
        distance = difference.abs().sum(dim=-1)
        ctx.save_for_backward(probs, difference.sign_(), rows)
        return cross_entropy, distance

    @staticmethod
    def backward(
        ctx: Any, of_cross_entropy: torch.Tensor, of_distance: torch.Tensor
    ) -> tuple[torch.Tensor, None, None]:
        probs, signs, rows = ctx.saved_tensors
        balance = torch.linalg.vecdot(signs, probs)
        slope = signs.mul_(of_distance[:, None]).add_((of_cross_entropy - of_distance * balance)[:, None])
        grad = slope.mul_(probs).scatter_add_(1, rows, -of_cross_entropy[:, None])
        return grad, None, None


@dataclass
class Supervision:
    """What the D supervised positions, in the order of `sources`, are compared with.

    Attributes:
        label_rows: `[D]`, as in `distribution_terms`.
        weights: `[D]`, w_k.
        sources: `[D]`, ascending: which of the U positions each is compared with.
        target: makes `[u, Vd]` probabilities and `[u]` mass outside for a slice of the U positions.
    """

    label_rows: torch.Tensor
    weights: torch.Tensor
    sources: torch.Tensor
    target: Callable[[slice], tuple[torch.Tensor, torch.Tensor]]


@dataclass
class DistributionLoss:
    """What the chunks gave.

    Attributes:
        loss: the weighted sum of cross entropy and distance, with its gradient.
        cross_entropy, distance: `[D]`, without.
        is_hit: `[D]`, whether the most likely token is the true one; `None` where gradients were taken.
    """

    loss: torch.Tensor
    cross_entropy: torch.Tensor
    distance: torch.Tensor
    is_hit: torch.Tensor | None


def distribution_loss(
    logits_of: Callable[..., torch.Tensor],
    inputs: tuple[torch.Tensor, ...],
    parameters: tuple[torch.Tensor, ...],
    supervision: Supervision,
    coefficients: ObjectiveWeights,
    vocab_size: int,
) -> DistributionLoss:
    """Both terms over all positions, chunk by chunk.

    Args:
        logits_of: makes `[C, Vd]` logits of slices of `inputs`; of what else it reads, `parameters` alone get
            gradients.
        inputs: `[D, ...]` each.
        parameters: that `logits_of` reads and that may be trained.
        vocab_size: Vd.
    """
    if not len(supervision.sources):
        # Rows that another process counts: a loss of nothing, with a gradient of zeros.
        none = inputs[0].new_zeros(0, dtype=torch.float32)
        loss = 0.0 * torch.stack([x.float().sum() for x in inputs]).sum()
        return DistributionLoss(loss, none, none, none.bool())
    chunk = max(1, _CHUNK_LOGITS // vocab_size)
    trained = tuple(p for p in parameters if p.requires_grad)
    run = _Chunks(logits_of, supervision, coefficients, chunk, len(inputs))
    if torch.is_grad_enabled() and (trained or any(x.requires_grad for x in inputs)):
        loss, cross_entropy, distance = _ChunkedLoss.apply(run, *inputs, *trained)
        return DistributionLoss(loss, cross_entropy, distance, None)
    # Not for a borrowed head either, which nobody may have frozen.
    with torch.no_grad():
        terms = [run.terms(part, [x[part] for x in inputs], with_hits=True) for part in run.slices()]
    cross_entropy, distance, hits = (torch.cat(parts) for parts in zip(*terms, strict=True))
    return DistributionLoss(run.weigh(slice(None), cross_entropy, distance), cross_entropy, distance, hits)


@dataclass
class _Chunks:
    logits_of: Callable[..., torch.Tensor]
    supervision: Supervision
    coefficients: ObjectiveWeights
    size: int
    num_inputs: int

    def slices(self) -> list[slice]:
        total = len(self.supervision.sources)
        return [slice(start, min(start + self.size, total)) for start in range(0, total, self.size)]

    def terms(self, part: slice, inputs: list[torch.Tensor], with_hits: bool = False) -> tuple[torch.Tensor, ...]:
        sources = self.supervision.sources[part]
        first, last = int(sources[0]), int(sources[-1])
        probs, outside = self.supervision.target(slice(first, last + 1))
        logits, labels = self.logits_of(*inputs).float(), self.supervision.label_rows[part]
        logits = logits if self.coefficients.temperature == 1.0 else logits / self.coefficients.temperature
        terms = distribution_terms(logits, labels, probs[sources - first], outside[sources - first])
        return (*terms, logits.argmax(dim=-1) == labels) if with_hits else terms

    def weigh(self, part: slice, cross_entropy: torch.Tensor, distance: torch.Tensor) -> torch.Tensor:
        mixed = self.coefficients.cross_entropy * cross_entropy + self.coefficients.distance * distance
        return (self.supervision.weights[part] * mixed).sum()


class _ChunkedLoss(torch.autograd.Function):
    """Takes the gradient on the way forward, where a chunk's logits exist, and hands it out on the way back."""

    @staticmethod
    def forward(ctx: Any, run: _Chunks, *tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        inputs, parameters = tensors[: run.num_inputs], tensors[run.num_inputs :]
        grads = [torch.zeros_like(x) if x.requires_grad else None for x in tensors]
        losses, cross_entropies, distances = [], [], []
        for part in run.slices():
            with torch.enable_grad():
                leaves = [x[part].detach().requires_grad_(x.requires_grad) for x in inputs]
                cross_entropy, distance = run.terms(part, leaves)
                loss = run.weigh(part, cross_entropy, distance)
                wanted = [x for x in (*leaves, *parameters) if x.requires_grad]
                found = iter(torch.autograd.grad(loss, wanted))
            for i, grad in enumerate(grads):
                if grad is None:
                    continue
                if i < run.num_inputs:
                    grad[part] = next(found)
                else:
                    grad += next(found)
            losses.append(loss.detach())
            cross_entropies.append(cross_entropy.detach())
            distances.append(distance.detach())
        ctx.grads = grads
        result = torch.stack(losses).sum(), torch.cat(cross_entropies), torch.cat(distances)
        ctx.mark_non_differentiable(*result[1:])
        return result

    @staticmethod
    def backward(ctx: Any, grad_loss: torch.Tensor, *ignored: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return (None, *(None if grad is None else grad * grad_loss for grad in ctx.grads))
