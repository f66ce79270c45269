"""A running average of the weights, which often drafts better than the last ones."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn


class WeightAverage:
    """Exponential moving average of a model's trainable parameters, in float32.

    Args:
        model (`nn.Module`): Its trainable parameters now are the first average.
        decay (`float`): Share of the old average that an update keeps, between 0 and 1.
    """

    def __init__(self, model: nn.Module, decay: float):
        self.decay = decay
        self.average = {name: parameter.detach().float().clone() for name, parameter in _trainable(model)}

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Moves the average towards the model's weights; call it after every optimizer step."""
        averages, parameters = [], []
        for name, parameter in _trainable(model):
            averages.append(self.average[name])
            parameters.append(parameter.detach().float())
        torch._foreach_lerp_(averages, parameters, 1.0 - self.decay)

    @contextmanager
    def applied_to(self, model: nn.Module) -> Iterator[None]:
        """The model has the averaged weights inside, and its own again afterwards."""
        own = {name: parameter.detach().clone() for name, parameter in _trainable(model)}
        self.copy_to(model)
        try:
            yield
        finally:
            _copy(own, model)

    def copy_to(self, model: nn.Module) -> None:
        """Gives the model the averaged weights for good."""
        _copy(self.average, model)

    def save(self, path: str | Path) -> None:
        """Writes the average under a temporary name and renames it to `path`."""
        temporary = Path(path).with_name(f"{Path(path).name}.tmp")
        save_file(self.average, temporary)
        os.replace(temporary, path)

    def load(self, path: str | Path) -> None:
        """Takes the average from a safetensors file that was saved with it.

        Raises:
            ValueError: If the file is missing or lacks a weight.
        """
        if not Path(path).is_file():
            raise ValueError(
                f"{path} is missing, so the average of the weights cannot go on. Leave `ema_decay` out, or begin anew."
            )
        saved = load_file(path)
        missing = sorted(set(self.average) - set(saved))
        if missing:
            raise ValueError(f"{path} lacks {missing[:3]} ({len(missing)} weights); it belongs to another drafter.")
        for name, value in self.average.items():
            value.copy_(saved[name])


@torch.no_grad()
def _copy(values: dict[str, torch.Tensor], model: nn.Module) -> None:
    for name, parameter in _trainable(model):
        parameter.copy_(values[name])


def _trainable(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    # torch.compile puts a prefix before the names of the module that it wraps.
    return (
        (name.removeprefix("_orig_mod."), parameter)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    )
