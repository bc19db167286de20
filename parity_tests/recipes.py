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


def _torch(name: str, **options: Any) -> "Callable[[torch.nn.Module], torch.optim.Optimizer]":
    def build(module: "torch.nn.Module") -> "torch.optim.Optimizer":
        import torch

        return getattr(torch.optim, name)(module.parameters(), **options)

    return build


def _scheduler(name: str, *arguments: Any, **options: Any) -> Callable[[Any], Any]:
    def build(optimizer: Any) -> Any:
        import torch

        return getattr(torch.optim.lr_scheduler, name)(optimizer, *arguments, **options)

    return build


STEPS = 200
_NOAM = _scheduler("LambdaLR", lambda count: 20**-0.5 * min((count + 1) ** -0.5, (count + 1) * 40**-1.5))

# The rung of the first update: everything that is easily got wrong at once.
RECIPE = Recipe(
    name="AdamW with a mask, clipping, Noam",
    optimizer=_matrices_decay,
    schedule=_NOAM,
    max_norm=0.5,
    transformation=optimizers.adamw(
        optimizers.noam(20, warmup_steps=40), b1=0.9, b2=0.98, eps=1e-9, weight_decay=0.3, max_norm=0.5
    ),
)


def _gentle(count: int) -> float:
    return 0.1 * 20**-0.5 * min((count + 1) ** -0.5, (count + 1) * 40**-1.5)


# The same for 200 steps. With RECIPE's rates, up to 0.035, training is chaotic: PyTorch against itself, on the same batch in
# another order, goes from 2e-15 to 8e-10 in the loss of the GPT within 200 steps, and a port's difference would say nothing.
GENTLE = Recipe(
    name="AdamW with a mask, clipping, gentle Noam",
    optimizer=_matrices_decay,
    schedule=_scheduler("LambdaLR", _gentle),
    max_norm=0.5,
    transformation=optimizers.adamw(
        optimizers.noam(20, warmup_steps=40, factor=0.1), b1=0.9, b2=0.98, eps=1e-9, weight_decay=0.3, max_norm=0.5
    ),
)

# The rung of training.
RECIPES = (
    GENTLE,
    Recipe(
        name="SGD, linear",
        optimizer=_torch("SGD", lr=0.05, weight_decay=0.01),
        schedule=_scheduler("LinearLR", start_factor=0.25, end_factor=1.0, total_iters=50),
        transformation=optimizers.sgd(
            optimizers.linear(0.05, start_factor=0.25, end_factor=1.0, total_steps=50), weight_decay=0.01
        ),
    ),
    Recipe(
        name="momentum with clipping, constant",
        optimizer=_torch("SGD", lr=0.02, momentum=0.9, nesterov=True),
        schedule=_scheduler("LambdaLR", lambda count: 1.0),
        max_norm=0.7,
        transformation=optimizers.momentum(0.02, momentum=0.9, form="nesterov", max_norm=0.7),
    ),
    Recipe(
        name="Adam, cosine",
        optimizer=_torch("Adam", lr=2e-3),
        schedule=_scheduler("CosineAnnealingLR", T_max=STEPS, eta_min=1e-4),
        transformation=optimizers.adam(optimizers.cosine(2e-3, total_steps=STEPS, final=1e-4)),
    ),
    Recipe(
        name="Adam with L2, Noam",
        optimizer=_torch("Adam", lr=1.0, weight_decay=0.1, betas=(0.9, 0.98), eps=1e-9),
        schedule=_NOAM,
        transformation=optimizers.adam(
            optimizers.noam(20, warmup_steps=40), b1=0.9, b2=0.98, eps=1e-9, weight_decay=0.1
        ),
    ),
)
