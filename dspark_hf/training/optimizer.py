"""Muon for the matrices of a drafter, AdamW for everything else, as one optimizer.

Muon (Jordan et al. 2024) makes each step of a matrix orthogonal: all of its directions move alike, also those that the
gradient hardly shows. Steps are scaled to the size of AdamW's (Liu et al. 2025, arXiv 2502.16982), so that one
learning rate serves both.
"""

from collections.abc import Callable
from typing import Any

import torch

from ..modeling_dspark import DSparkDrafter

_MOMENTUM = 0.95


class MuonAndAdamW(torch.optim.Optimizer):
    """Both, under one learning rate.

    Args:
        drafter: of which what requires a gradient is trained: matrices of draft layers and of `fc` by Muon; norms and
            biases, whose directions are single numbers, and tables that are read by row (Markov head, embedding,
            heads) by AdamW.
        lr: of both.
        weight_decay: of matrices and tables; not of norms and biases, as in transformers.
        betas, eps: of AdamW.
    """

    def __init__(self, drafter: DSparkDrafter, lr: float, betas: tuple[float, float], eps: float, weight_decay: float):
        matrices: list[torch.Tensor] = []
        others: list[torch.Tensor] = []
        for name, parameter in drafter.named_parameters():
            if parameter.requires_grad:
                is_matrix = parameter.ndim == 2 and name.startswith(("layers.", "fc."))
                (matrices if is_matrix else others).append(parameter)
        super().__init__([{"params": matrices}, {"params": others}], {"lr": lr})
        self._parts: tuple[torch.optim.Optimizer, ...] = (
            torch.optim.Muon(
                matrices, lr=lr, weight_decay=weight_decay, momentum=_MOMENTUM, adjust_lr_fn="match_rms_adamw"
            ),
            torch.optim.AdamW(
                [
                    {"params": [p for p in others if p.ndim > 1], "weight_decay": weight_decay},
                    {"params": [p for p in others if p.ndim <= 1], "weight_decay": 0.0},
                ],
                lr=lr,
                betas=betas,
                eps=eps,
            ),
        )
        self._share_groups()

    def _share_groups(self) -> None:
        # The groups are the parts' own: a schedule that changes a learning rate here changes it there.
        self.param_groups = [group for part in self._parts for group in part.param_groups]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = closure() if closure is not None else None
        for part in self._parts:
            part.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        return {"parts": [part.state_dict() for part in self._parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """
        Raises:
            KeyError: it is that of another optimizer.
        """
        for part, state in zip(self._parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)
        self._share_groups()
