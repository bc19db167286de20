"""Cases: pairs of a PyTorch module and a model of ours that must compute the same.

A case is one file here with a tuple ``CASES``; it is found by itself, and every rung runs on it. PyTorch is imported inside
the functions that need it, so that a machine without it can check recordings made elsewhere (``references.py``).
"""

import dataclasses
import functools
import importlib
import pkgutil
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from flax import nnx

from flax_transformer import weights
from flax_transformer.config import Dtype, TransformerConfig
from flax_transformer.losses import cross_entropy
from flax_transformer.parity import Recording, Rules

if TYPE_CHECKING:
    import torch

Inputs = Mapping[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One pair.

    Attributes:
        name: unique; names the tests.
        size: ``small`` cases pool 16 seeds; ``document`` cases have the document's own sizes, and fewer seeds.
        reference: builds the PyTorch module; called under a seed, and its weights are then drawn anew.
        config: the configuration of ours, in a dtype.
        model: builds ours from the configuration.
        inputs: token ids by name, from a generator.
        call_reference, call_model: what is compared, with the inputs as keywords; both return a dict of "logits" and,
            where the reference makes them, "probabilities". The model's also takes ``dropout``.
        logits: the reference's module whose output is the logits.
        label_smoothing, padding_id: of the loss on the input named "labels"; padding is left out of it.
        drops: whether there is dropout in train mode.
        structural_zeros: parameters whose gradient is zero whatever the weights.
        table: the weight table that fills a model from the reference.
        decode_reference, decode_model: greedy decoding from the inputs, token ids as an array; None where the reference
            has none.
        reference_masks, model_masks: the masks that each side's own functions build from the inputs.
    """

    name: str
    size: Literal["small", "document"]
    reference: Callable[[], "torch.nn.Module"]
    config: Callable[[Dtype], TransformerConfig]
    model: Callable[[Any], nnx.Module]
    inputs: Callable[[np.random.Generator], dict[str, np.ndarray]]
    call_reference: Callable[..., Any]
    call_model: Callable[..., Any]
    logits: str
    reference_masks: Callable[[Inputs], Inputs]
    model_masks: Callable[[Inputs], Inputs]
    label_smoothing: float = 0.0
    padding_id: int | None = None
    drops: bool = True
    structural_zeros: tuple[str, ...] = ()
    table: Callable[[Any], weights.Table] = weights.table_for
    decode_reference: Callable[..., Any] | None = None
    decode_model: Callable[..., Any] | None = None

    def __str__(self) -> str:
        return self.name


def reference_loss(case: Case) -> Callable[[Any, Any], Any]:
    """PyTorch's cross entropy on the logits."""
    import torch

    ignored = -100 if case.padding_id is None else case.padding_id
    return lambda output, batch: torch.nn.functional.cross_entropy(
        output["logits"].flatten(0, -2),
        batch["labels"].flatten(),
        label_smoothing=case.label_smoothing,
        ignore_index=ignored,
    )


@functools.cache  # one function a case, so that recordings of it can share a trace
def model_loss(case: Case) -> Callable[[Any, Any], Any]:
    """Ours on the logits."""

    def loss(output: Any, batch: Any) -> Any:
        labels = batch["labels"]
        weights = None if case.padding_id is None else labels != case.padding_id
        return cross_entropy(output["logits"], labels, weights=weights, label_smoothing=case.label_smoothing).mean

    return loss


def with_logits(module: "torch.nn.Module", path: str, call: Callable[[], Any]) -> dict[str, Any]:
    """The probabilities that a document's model returns, and the logits that its last projection gave."""
    seen = []
    handle = module.get_submodule(path).register_forward_hook(lambda module, args, output: seen.append(output))
    try:
        return {"probabilities": call(), "logits": seen[0]}
    finally:
        handle.remove()


def all_cases() -> list[Case]:
    """Every case of every file in this folder, in the order of their names."""
    files = sorted(module.name for module in pkgutil.iter_modules(__path__))
    return [case for name in files for case in importlib.import_module(f"{__name__}.{name}").CASES]


def load_reference(case: Case, model: nnx.Module, reference: Recording) -> None:
    """Fill ``model`` with the reference's parameters and buffers, under all the names of its ``state_dict()``."""
    arrays = {**reference.parameters, **reference.buffers}
    state = {alias: arrays[name] for name, aliases in reference.tensor_names.items() for alias in aliases}
    weights.load_torch(model, state, table=case.table(model))


def rules_for(case: Case, model: nnx.Module) -> Rules:
    """What is compared with what, from the weight table that loads the model.

    The root is exempt: a document's root returns probabilities, ours logits; the final output compares both on both sides.
    """
    table = case.table(model)
    targets = {rule.sources[0]: rule.targets for rule in table.rules if rule.alias_of is None}
    exports = {rule.sources[0]: rule.export for rule in table.rules if rule.alias_of is None}
    for rule in table.rules:
        if rule.alias_of is not None:
            targets[rule.sources[0]], exports[rule.sources[0]] = targets[rule.alias_of], exports[rule.alias_of]
    return Rules(
        parameters=targets,
        modules={**table.modules, "": None},
        transforms={source: _joined(export) for source, export in exports.items()},
    )


def _joined(export: Callable[[list[np.ndarray]], list[np.ndarray]]) -> Callable[..., np.ndarray]:
    return lambda *arrays: export(list(arrays))[0]
