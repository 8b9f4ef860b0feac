"""One training step as a module: a batch and the target's features to the terms of the objective."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..borrowing import embedding_of, head_of
from ..modeling_dspark import DSparkDrafter
from .blocks import DraftPositions, draft_positions, markov_latents, run_blocks
from .objective import ObjectiveWeights, Supervision, distribution_loss
from .target_features import TargetFeatures, TargetHead

# Of a position that is drawn: a confidence that is too low must not keep it from being learned.
_LEAST_CHANCE = 0.1


@dataclass
class StepTotals:
    """Sums over the supervised positions of a batch.

    Attributes:
        loss: weighted sum of all terms, with its gradient.
        weight: the summed weights.
        by_position: `[6, n]` float32, sums at each draft position: positions, cross entropy, acceptance (1 - half the
            distance), true tokens that are the drafter's first choice, |confidence - acceptance|, BCE. Positions that
            were drawn count for those that were not.
        tau: `[3]` float32: blocks with all of their positions, and over them the sum of expected acceptance lengths
            when tokens are drawn, and when they are the first choice. 0 where positions were drawn.
    """

    loss: torch.Tensor
    weight: torch.Tensor
    by_position: torch.Tensor
    tau: torch.Tensor


class TrainingStep(nn.Module):
    """Drafter and objective; the target's embedding and head are borrowed, and no part of this module.

    Args:
        drafter: what is trained.
        target: what it drafts for; frozen.
        coefficients: of the objective.
        attn_implementation: of the draft blocks, as for `run_blocks`.

    Raises:
        ValueError: the drafter proposes ids that the target lacks.
    """

    _draft_ids: torch.Tensor | None
    _row_of_id: torch.Tensor

    def __init__(
        self,
        drafter: DSparkDrafter,
        target: Any,
        coefficients: ObjectiveWeights,
        attn_implementation: str = "sdpa",
    ):
        super().__init__()
        self.drafter, self.coefficients = drafter, coefficients
        self._attn_implementation = attn_implementation
        config = drafter.config
        self._target_head = TargetHead(target, coefficients.temperature)
        embed = embedding_of(drafter, target)
        # The target's table is not trained, whether or not somebody froze it.
        self._embed = embed if drafter.embed_tokens is not None else torch.no_grad()(embed)
        # In a tuple: a module here would become part of what is trained, saved and moved.
        self._borrowed_head = (head_of(drafter, target),)
        ids = drafter.proposed_ids
        if int(ids.max()) >= self._target_head.vocab_size or config.vocab_size < self._target_head.vocab_size:
            raise ValueError(
                f"The drafter knows {config.vocab_size} ids and proposes up to {int(ids.max())}, but the target has "
                f"{self._target_head.vocab_size}. Training needs one vocabulary for both."
            )
        self.register_buffer("_draft_ids", ids if config.has_reduced_vocabulary else None, persistent=False)
        rows = torch.full((config.vocab_size,), -1, device=ids.device)
        rows[ids] = torch.arange(len(ids), device=ids.device)
        self.register_buffer("_row_of_id", rows, persistent=False)

    def forward(self, batch: dict[str, torch.Tensor], features: TargetFeatures) -> StepTotals:
        """A batch as `responses.collate` makes it, and the target's features of it.

        With `draws` in it, a position goes on with the chance that a draft is accepted up to it, and weighs 1: most
        positions cost no logits, and those of blocks that decoding would leave early cost the fewest.
        """
        drafter, device = self.drafter, batch["input_ids"].device
        input_ids, anchors = batch["input_ids"], batch["anchors"]
        positions = draft_positions(drafter.config, input_ids, batch["lengths"], anchors)
        hidden = run_blocks(drafter, self._embed, input_ids, anchors, features.context, self._attn_implementation)
        first, num_draft = drafter.config.first_draft_slot, drafter.config.num_draft_tokens
        is_used, chances = positions.is_supervised, None
        if self.training and "draws" in batch:
            chances = self._chances(hidden, positions)
            # A number near 1 may have been rounded to it.
            is_used = is_used & ((batch["draws"] < chances) | (chances == 1))
        # Only these positions go on, in the order of what they are compared with: it is made once for all.
        batch_index, _, draft_index = at = is_used.nonzero(as_tuple=True)
        sources = batch_index * input_ids.shape[1] + positions.source_positions[at]
        order = sources.argsort(stable=True)
        at = tuple(index[order] for index in at)
        batch_index, _, draft_index = at
        states = hidden[at[0], at[1], first + draft_index]
        weights = self.coefficients.by_position(num_draft, device, are_drawn=chances is not None)[draft_index]
        supervision = self._supervision(positions, at, sources[order], weights, features)
        result = self._distribution_loss(hidden, states, positions, anchors, input_ids, at, supervision)
        acceptance = 1 - 0.5 * result.distance
        loss, bce, error = result.loss, torch.zeros_like(acceptance), torch.zeros_like(acceptance)
        if drafter.confidence_head is not None and self.coefficients.confidence > 0:
            logits = drafter.confidence_logits(states, positions.previous_ids[at])
            with torch.autocast(device.type, enabled=False):
                bce = nn.functional.binary_cross_entropy_with_logits(logits, acceptance.clamp(0, 1), reduction="none")
            loss = loss + self.coefficients.confidence * (weights * bce).sum()
            error = (logits.detach().sigmoid() - acceptance).abs()
        hits = torch.zeros_like(acceptance) if result.is_hit is None else result.is_hit.float()
        columns = torch.stack(
            (torch.ones_like(acceptance), result.cross_entropy, acceptance, hits, error, bce.detach())
        )
        if chances is None:
            tau = _tau(is_used, at, acceptance, hits)
        else:
            tau, columns = columns.new_zeros(3), columns / chances[at]
        by_position = columns.new_zeros(len(columns), num_draft).index_add_(1, draft_index, columns)
        return StepTotals(loss, weights.sum(), by_position, tau)

    @torch.no_grad()
    def _chances(self, hidden: torch.Tensor, positions: DraftPositions) -> torch.Tensor:
        """`[B, N, n]` float32: that a draft is accepted up to each position, as the confidence head has it."""
        first, num_draft = self.drafter.config.first_draft_slot, self.drafter.config.num_draft_tokens
        states = hidden[:, :, first : first + num_draft]
        # Not in autocast: before torch 2.10 it keeps the head's weights as they are cast here, without a gradient.
        with torch.autocast(hidden.device.type, enabled=False):
            confidences = self.drafter.confidence_logits(states.float(), positions.previous_ids).sigmoid()
        chances = torch.ones_like(confidences)
        chances[..., 1:] = confidences.cumprod(dim=-1)[..., :-1]
        return chances.clamp(min=_LEAST_CHANCE)

    def _supervision(
        self,
        positions: DraftPositions,
        at: tuple[torch.Tensor, ...],
        sources: torch.Tensor,
        weights: torch.Tensor,
        features: TargetFeatures,
    ) -> Supervision:
        distinct, inverse = torch.unique_consecutive(sources, return_inverse=True)
        states = features.final.flatten(0, 1)[distinct.to(features.final.device)]
        normalizer = None
        if features.log_normalizer is not None:
            normalizer = features.log_normalizer.flatten()[distinct.to(features.final.device)]

        @torch.no_grad()
        def target(part: slice) -> tuple[torch.Tensor, torch.Tensor]:
            if normalizer is not None:
                logits = self._target_head.logits(states[part], self._draft_ids)
                # Rows of the head behind the vocabulary belong to no id.
                logits = logits[:, : self._target_head.vocab_size]
                probs = (logits - normalizer[part, None]).exp()
            else:
                logits = self._target_head.logits(states[part])
                logits = logits[:, : self._target_head.vocab_size]
                total = logits.logsumexp(dim=-1, keepdim=True)
                probs = ((logits if self._draft_ids is None else logits[:, self._draft_ids]) - total).exp()
            probs = probs.to(weights.device)
            outside = (
                (1 - probs.sum(dim=-1)).clamp(min=0) if self._draft_ids is not None else probs.new_zeros(len(probs))
            )
            return probs, outside

        return Supervision(self._row_of_id[positions.label_ids[at]], weights, inverse, target)

    def _distribution_loss(
        self,
        hidden: torch.Tensor,
        states: torch.Tensor,
        positions: DraftPositions,
        anchors: torch.Tensor,
        input_ids: torch.Tensor,
        at: tuple[torch.Tensor, ...],
        supervision: Supervision,
    ) -> Any:
        drafter = self.drafter
        head = drafter.lm_head if drafter.lm_head is not None else self._borrowed_head[0]
        inputs: tuple[torch.Tensor, ...] = (states,)
        parameters = (*drafter.lm_head.parameters(),) if drafter.lm_head is not None else ()
        markov = drafter.markov_head
        if markov is not None:
            anchor_ids = input_ids.gather(1, anchors.clamp(min=0)).flatten()
            latents = markov_latents(drafter, hidden.flatten(0, 1), anchor_ids, positions.previous_ids.flatten(0, 1))
            inputs = (states, latents.view(*anchors.shape, *latents.shape[1:])[at])
            parameters = (*parameters, *markov.markov_w2.parameters())

        def logits_of(states: torch.Tensor, latent: torch.Tensor | None = None) -> torch.Tensor:
            logits = drafter.base_logits(states, head)[..., : drafter.config.draft_vocab_size].to(states.device)
            return logits if markov is None or latent is None else logits + markov.markov_w2(latent)

        return distribution_loss(
            logits_of, inputs, parameters, supervision, self.coefficients, drafter.config.draft_vocab_size
        )


@torch.no_grad()
def _tau(
    is_supervised: torch.Tensor, at: tuple[torch.Tensor, ...], acceptance: torch.Tensor, hits: torch.Tensor
) -> torch.Tensor:
    """Expected acceptance lengths: one, and what survives up to each position (paper, section 3.3)."""
    is_whole = is_supervised.all(dim=-1)
    lengths = [is_whole.sum().float()]
    for chance in (acceptance, hits):
        table = chance.new_zeros(is_supervised.shape)
        table[at] = chance
        lengths.append(((1 + table.cumprod(dim=-1).sum(dim=-1)) * is_whole).sum())
    return torch.stack(lengths)
