"""Porting mistakes, planted: each a small transformation of a correct model, and where the ladder must catch it."""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

from flax import nnx

from flax_transformer.config import TransformerConfig


def _nothing(model: nnx.Module) -> None:
    del model


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fault:
    """One mistake.

    Attributes:
        name: what was done wrong, as a phrase.
        case: the name of the case on which it is planted.
        rung: the lowest rung that can tell, on which it must be caught.
        module: the reference's path of the module that must be named.
        config: the mistake in the configuration.
        model: the mistake in the model, made after the reference's weights were loaded.
        patch: the mistake in a function of the library, as a context in which the model is built and run.
        call: the mistake in how the model is called, from the right call to the wrong one.
        masks: the mistake in the masks, from the right ones to the wrong ones.
    """

    name: str
    case: str
    rung: str
    module: str
    config: Callable[[Any], TransformerConfig] = lambda config: config
    model: Callable[[Any], None] = _nothing
    patch: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext
    call: Callable[[Callable], Callable] = lambda call: call
    masks: Callable[[dict], dict] = lambda masks: masks

    def __str__(self) -> str:
        return f"{self.name} ({self.case})"
