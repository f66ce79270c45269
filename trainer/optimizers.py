"""Muon for the matrices of a drafter and AdamW for the rest, as one optimizer."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class MuonWithAdamW(torch.optim.Optimizer):
    """`torch.optim.Muon` for 2-D parameters, `torch.optim.AdamW` for all others.

    Muon's update is scaled to the size of AdamW's (`adjust_lr_fn="match_rms_adamw"`): one learning rate serves both.

    Args:
        model (`nn.Module`): Its trainable parameters are optimised.
        lr (`float`): Learning rate of both.
        weight_decay (`float`): Decoupled weight decay of the matrices; the others have none.
        betas (`tuple[float, float]`), eps (`float`): Of AdamW.
    Source: Muon as in arXiv 2502.16982, which also has the scaling.
    """

    def __init__(self, model: nn.Module, *, lr: float, weight_decay: float, betas: tuple[float, float], eps: float):
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        matrices = [parameter for parameter in parameters if parameter.ndim == 2]
        others = [parameter for parameter in parameters if parameter.ndim != 2]
        self._parts = [
            torch.optim.Muon(matrices, lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(others, lr=lr, weight_decay=0.0, betas=betas, eps=eps),
        ]
        groups = [group for part in self._parts for group in part.param_groups]
        super().__init__(groups, defaults={"lr": lr})
        self._share()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """One update of all parameters.

        Raises:
            ValueError: If a closure is given; neither part calls one twice.
        """
        if closure is not None:
            raise ValueError("`MuonWithAdamW` takes no closure.")
        for part in self._parts:
            part.step()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._share()

    def _share(self) -> None:
        # Groups and states are this optimizer's, so that schedulers, checkpoints and the parts see the same ones.
        for part, group in zip(self._parts, self.param_groups, strict=True):
            part.param_groups = [group]
            part.state = self.state
