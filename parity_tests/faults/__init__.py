"""Porting mistakes, planted: each a small transformation of something correct.

``forward`` and ``learning`` hold the mistakes, ``sources`` says where they were seen in public, ``planting`` runs the ladder
on one of them, and ``kill_matrix.json`` says for every mistake and case where the ladder must catch it: the lowest rung
that can tell, and the module. ``python -m parity_tests.faults`` prints what is caught where; ``documents`` makes docs of it.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import optax
from flax import nnx

from flax_transformer.config import TransformerConfig

ENCODER_DECODER = "encoder_decoder_odd"
DECODER_ONLY = "decoder_only_odd"
POST_NORM = "torch_transformer_post_norm"
PRE_NORM = "torch_transformer_pre_norm"
GPT = "torch_gpt"
PAIRS = (ENCODER_DECODER, POST_NORM, PRE_NORM)
ALL = (DECODER_ONLY, GPT, *PAIRS)


def _nothing(model: nnx.Module) -> None:
    del model


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fault:
    """One mistake, of one kind.

    Attributes:
        name: what was done wrong, as a phrase; unique.
        cases: the names of the cases on which it is planted.
        config: the mistake in the configuration.
        model: the mistake in the model, made after the reference's weights were loaded.
        patch: the mistake in a function of the library, as a context in which the model is built and run.
        call: the mistake in how the model is called, from the right call to the wrong one.
        masks: the mistake in the masks, from the right ones to the wrong ones.
        backward: whether the mistake shows in gradients alone.
        dropout: whether the mistake shows with dropout only.
    """

    name: str
    cases: tuple[str, ...]
    config: Callable[[Any], TransformerConfig] = lambda config: config
    model: Callable[[Any], None] = _nothing
    patch: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext
    call: Callable[[Callable], Callable] = lambda call: call
    masks: Callable[[dict], dict] = lambda masks: masks
    backward: bool = False
    dropout: bool = False

    def __str__(self) -> str:
        return self.name


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossFault:
    """A wrong loss: from the case, its logits and its labels (NumPy, float64) to a number."""

    name: str
    cases: tuple[str, ...]
    loss: Callable[[Any, Any, Any], float]

    def __str__(self) -> str:
        return self.name


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerFault:
    """A wrong optimizer, which makes something else of the right gradients. The right one is ``recipes.RECIPE``."""

    name: str
    optimizer: optax.GradientTransformation
    cases: tuple[str, ...] = (DECODER_ONLY, ENCODER_DECODER, GPT)

    def __str__(self) -> str:
        return self.name


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingFault:
    """A run that goes wrong after its first step: options of ``record_flax`` that differ from the right ones."""

    name: str
    options: Mapping[str, Any]
    cases: tuple[str, ...] = (DECODER_ONLY,)

    def __str__(self) -> str:
        return self.name


AnyFault = Fault | LossFault | OptimizerFault | TrainingFault
