"""Speculative sampling (arXiv 2211.17192, 2302.01318) as pure functions of two distributions.

A draft token x, drawn from `draft_probs`, is accepted with probability min(1, target_probs[x] / draft_probs[x]); at
the first rejection the next token comes from the residual max(target_probs - draft_probs, 0), normalised. The result
has exactly the target's distribution, whatever the draft distribution was.
"""

import torch


def probabilities(scores: torch.Tensor) -> torch.Tensor:
    """`[..., V]` processed scores to float32 probabilities, as plain sampling computes them."""
    return scores.softmax(dim=-1, dtype=torch.float32)


def one_hot(token_ids: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """`[...]` ids that were proposed without chance to the `[..., V]` float32 probabilities of their distribution."""
    probs = torch.zeros((*token_ids.shape, vocab_size), device=token_ids.device)
    return probs.scatter_(-1, token_ids.unsqueeze(-1), 1.0)


def one_hot_scores(token_ids: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """The same as `[..., V]` float32 scores."""
    return one_hot(token_ids, vocab_size).log()


def spread_columns(values: torch.Tensor, columns: torch.Tensor | None, vocab_size: int, fill: float) -> torch.Tensor:
    """`[..., C]` values of some ids to `[..., V]`, `fill` for all others; `columns`: those `[C]` ids, `None`: all."""
    if columns is None:
        return values
    spread = values.new_full((*values.shape[:-1], vocab_size), fill)
    spread[..., columns] = values
    return spread


def is_accepted(
    target_probs: torch.Tensor, draft_probs: torch.Tensor, token_id: torch.Tensor, uniform: torch.Tensor
) -> torch.Tensor:
    """Whether a draft token stands.

    Args:
        target_probs, draft_probs: `[..., V]`, float32.
        token_id: `[...]`, drawn from `draft_probs`.
        uniform: `[...]`, uniform in [0, 1).

    Returns:
        `[...]` booleans, true with probability min(1, p/q). A token that the target cannot produce never stands.
    """
    index = token_id.unsqueeze(-1)
    target = target_probs.gather(-1, index).squeeze(-1)
    draft = draft_probs.gather(-1, index).squeeze(-1)
    return uniform * draft < target


def residual(target_probs: torch.Tensor, draft_probs: torch.Tensor) -> torch.Tensor:
    """The distribution after a rejection, `[..., V]`; the target's own where nothing but rounding is left of it."""
    remaining = (target_probs - draft_probs).clamp_min(0.0)
    mass = remaining.sum(dim=-1, keepdim=True)
    return torch.where(mass > 0, remaining / mass.clamp_min(torch.finfo(mass.dtype).tiny), target_probs)


def draw(probs: torch.Tensor) -> torch.Tensor:
    """One id from each row of `[B, V]` probabilities: `[B]`."""
    return torch.multinomial(probs, num_samples=1).squeeze(-1)
