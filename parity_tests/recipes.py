"""Optimizers, each as PyTorch builds it and as we do."""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import optax

from flax_transformer import optimizers

if TYPE_CHECKING:
    import torch


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """One way to train: PyTorch's optimizer, scheduler and clipping, and our chain of all three."""

    name: str
    optimizer: "Callable[[torch.nn.Module], torch.optim.Optimizer]"
    schedule: Callable[[Any], Any]
    transformation: optax.GradientTransformation
    max_norm: float | None = None

    def __str__(self) -> str:
        return self.name


def _matrices_decay(module: "torch.nn.Module") -> "torch.optim.Optimizer":
    """AdamW that leaves biases and norms alone, as PyTorch programs write it: two groups of parameters."""
    import torch

    matrices = [parameter for parameter in module.parameters() if parameter.ndim >= 2]
    others = [parameter for parameter in module.parameters() if parameter.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.3}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1.0, betas=(0.9, 0.98), eps=1e-9)


def _noam(optimizer: Any) -> Any:
    import torch

    return torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda count: 20**-0.5 * min((count + 1) ** -0.5, (count + 1) * 40**-1.5)
    )


# The rung of the first update: everything that is easily got wrong at once.
RECIPE = Recipe(
    name="AdamW with a mask, clipping and Noam",
    optimizer=_matrices_decay,
    schedule=_noam,
    max_norm=0.5,
    transformation=optimizers.adamw(
        optimizers.noam(20, warmup_steps=40), b1=0.9, b2=0.98, eps=1e-9, weight_decay=0.3, max_norm=0.5
    ),
)
