"""The train state, one pure train step and one pure eval step.

A model is split once, into its structure and named arrays; the steps are pure functions of arrays, to be laid over
devices by whoever compiles them; the model is merged again at the end:

    structure, parameters, buffers = split_model(model)
    state = init_state(parameters, buffers, optimizer, seed=0)
    step = jax.jit(make_train_step(structure, next_token_loss, optimizer), donate_argnums=0)
    for batch in batches:
        state, metrics = step(state, batch, jnp.arange(batch_size))
    model = structure.merge(state.parameters, state.buffers)
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Num, UInt

from flax_transformer.dropout import DropoutSource, RandomDropout
from flax_transformer.losses import LossSums, cross_entropy, reciprocal_or_zero
from flax_transformer.masks import causal_mask, combine_masks, padding_mask
from flax_transformer.vocabulary_loss import fused_cross_entropy

Named = dict[str, Num[Array, "..."]]
VocabularyLoss = Literal["plain", "fused"]


class LossFunction(Protocol):
    """How a model is called on a batch, and what is made of its result. It says nothing about devices or gradients."""

    def __call__(self, model: Any, batch: Any, *, dropout: DropoutSource | None) -> LossSums:
        """The summed loss and weight of the batch; a `dropout` of None is deterministic."""
        ...


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Everything that the next step depends on, besides its batch. A pytree of arrays and nothing else.

    Attributes:
        step: int32, how many steps have been taken, skipped ones included: the next batch is another one.
        seed: uint32, what dropout is drawn from, together with `step` and the example.
        parameters: what is trained, by name ("blocks.0.attention.query.kernel"). A module that is shared stands here
            once, under the first of its names.
        buffers: what a model keeps besides, such as position tables; by name, never changed.
        optimizer_state: whatever the optimizer needs.
        skipped: int32, how many steps were skipped, since their loss, gradient or update was not finite.
        skipped_in_a_row: int32, how many of them were the last ones.
    """

    step: Int[Array, ""]
    seed: UInt[Array, ""]
    parameters: Named
    buffers: Named
    optimizer_state: Any
    skipped: Int[Array, ""]
    skipped_in_a_row: Int[Array, ""]


class Metrics(NamedTuple):
    """What one train step has to tell; scalars on the device.

    Attributes:
        loss: mean over all weighted tokens of the global batch, before the update, in nats.
        grad_norm: joint norm of all gradients, before clipping.
        weight: the number of tokens that counted.
        skipped, skipped_in_a_row: those of the state after the step.
    """

    loss: Float[Array, ""]
    grad_norm: Float[Array, ""]
    weight: Float[Array, ""]
    skipped: Int[Array, ""]
    skipped_in_a_row: Int[Array, ""]


@dataclasses.dataclass(frozen=True)
class ModelStructure:
    """A model without its arrays: static, hashable, and the same for two models of one configuration."""

    graph: nnx.GraphDef
    parameters: Any  # a PyTreeDef, which jax exports as a value and not as a type
    buffers: Any
    parameter_names: tuple[str, ...]
    buffer_names: tuple[str, ...]

    def merge(self, parameters: Named, buffers: Named) -> Any:
        """The model with these arrays: the inverse of `split_model`, sharing included."""
        return nnx.merge(
            self.graph,
            self.parameters.unflatten([parameters[name] for name in self.parameter_names]),
            self.buffers.unflatten([buffers[name] for name in self.buffer_names]),
        )


def split_model(model: nnx.Module) -> tuple[ModelStructure, Named, Named]:
    """The structure of a model, its parameters (`nnx.Param`) and its buffers (all other variables), by name.

    The arrays are the model's own: see `init_state` about donation.
    """
    graph, parameters, buffers = nnx.split(model, nnx.Param, ...)
    parameters, buffers = nnx.as_pure(parameters), nnx.as_pure(buffers)
    named_parameters, named_buffers = _by_name(parameters), _by_name(buffers)
    structure = ModelStructure(
        graph=graph,
        parameters=jax.tree.structure(parameters),
        buffers=jax.tree.structure(buffers),
        parameter_names=tuple(named_parameters),
        buffer_names=tuple(named_buffers),
    )
    return structure, named_parameters, named_buffers


def _by_name(tree: Any) -> Named:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def init_state(parameters: Named, buffers: Named, optimizer: optax.GradientTransformation, *, seed: int) -> TrainState:
    """The state before the first step.

    Arrays are copied: a step that donates its state deletes the arrays of the state it was given, and those must not be
    the ones that a model, or a `device_put` of it, still holds.
    """
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed must be at least 0 and below 2^32, got {seed}.")
    parameters, buffers = jax.tree.map(jnp.copy, (parameters, buffers))
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        seed=jnp.asarray(seed, jnp.uint32),
        parameters=parameters,
        buffers=buffers,
        optimizer_state=optimizer.init(parameters),
        skipped=jnp.zeros((), jnp.int32),
        skipped_in_a_row=jnp.zeros((), jnp.int32),
    )


def dropout_keys(state: TrainState, example_indices: Int[Array, "B"]) -> Any:
    """One key per example, a function of the seed, the step and the example's place in the *global* batch alone.

    So the same example has the same dropout however the batch is laid over devices, and after a run was resumed.
    """
    step_key = jax.random.fold_in(jax.random.key(state.seed), state.step)
    return jax.vmap(functools.partial(jax.random.fold_in, step_key))(example_indices)


def apply_if_finite(
    state: TrainState, gradients: Named, optimizer: optax.GradientTransformation, *, finite: Bool[Array, ""]
) -> TrainState:
    """The state after a step: updated, or where the step's numbers are not `finite` with parameters and optimizer as before.

    A skipped step counts as taken, and so the next batch and its dropout are others. The optimizer's own count of updates,
    and with it a schedule, stands still.
    """

    def update(gradients: Named, parameters: Named, optimizer_state: Any) -> tuple[Named, Any]:
        updates, optimizer_state = optimizer.update(gradients, optimizer_state, parameters)
        return jax.tree.map(jnp.add, parameters, updates), optimizer_state

    def skip(gradients: Named, parameters: Named, optimizer_state: Any) -> tuple[Named, Any]:
        return parameters, optimizer_state

    # Not `jnp.where` on every array, which keeps the compiler from updating them in place: half as long again, for a small
    # batch on a CPU, and half as much memory again for parameters and optimizer.
    operands = (gradients, state.parameters, state.optimizer_state)
    parameters, optimizer_state = jax.lax.cond(finite, update, skip, *operands)
    return dataclasses.replace(
        state,
        step=state.step + 1,
        parameters=parameters,
        optimizer_state=optimizer_state,
        skipped=state.skipped + jnp.where(finite, 0, 1),
        skipped_in_a_row=jnp.where(finite, 0, state.skipped_in_a_row + 1),
    )


def make_train_step(
    structure: ModelStructure,
    loss: LossFunction,
    optimizer: optax.GradientTransformation,
    *,
    accumulate: int = 1,
    parts: int = 1,
    gather: Callable[[Named], Named] = lambda parameters: parameters,
    reduce: Callable[[Any], Any] = lambda tree: tree,
) -> Callable[[TrainState, Any, Int[Array, "B"]], tuple[TrainState, Metrics]]:
    """A pure function `(state, batch, example_indices) -> (state, metrics)` that takes one optimizer step.

    The gradient is that of the mean over all tokens of the global batch: the sum of losses over the sum of weights.

    A step whose loss, or joint norm of gradients, is not finite is skipped, see `apply_if_finite`. With a finite norm no
    square in the optimizer overflows; only an enormous learning rate makes an update overflow, which is not looked for.

    Args:
        structure: of the model, see `split_model`.
        loss: see `LossFunction`.
        optimizer: an optax transformation, called with the parameters.
        accumulate: K: the batch is taken in K microbatches, one after the other, in the memory that one needs. Their sums
            are added up and divided once, so it is the same step up to the order in which numbers are added.
        parts: over how many devices the rows of a batch are spread, where it is whole: see `microbatches`.
        gather: from the parameters as the state keeps them to those that are computed with, equal but for where they lie.
        reduce: sums a pytree over the parts of the global batch, where each part runs a step of its own: for `pmap`,
            `lambda tree: jax.lax.psum(tree, axis_name)`. Under `jit` a batch is whole, and nothing is left to sum. It is
            given the sums of a batch, then its gradients.

    The function's `example_indices` are the places of the examples in the global batch, see `dropout_keys`.
    """

    def sums(parameters: Named, state: TrainState, batch: Any, example_indices: Array) -> tuple[Array, Array]:
        dropout = RandomDropout(dropout_keys(state, example_indices))
        found = loss(structure.merge(parameters, state.buffers), batch, dropout=dropout)
        return found.loss, found.weight

    def at_once(state: TrainState, batch: Any, example_indices: Array) -> tuple[Array, Array, Named]:
        local_loss, pullback, local_weight = jax.vjp(
            lambda parameters: sums(parameters, state, batch, example_indices), gather(state.parameters), has_aux=True
        )
        total_loss, total_weight = reduce((local_loss, local_weight))
        # The division enters where the gradient starts, as in the backward pass of a mean, and not into every gradient.
        (gradients,) = pullback(reciprocal_or_zero(total_weight))
        return total_loss, total_weight, reduce(gradients)

    def part_by_part(state: TrainState, batch: Any, example_indices: Array) -> tuple[Array, Array, Named]:
        parameters = gather(state.parameters)

        def of_part(part: Any) -> tuple[Array, Array, Named]:
            (loss, weight), gradients = jax.value_and_grad(sums, has_aux=True)(parameters, state, *part)
            return loss, weight, gradients

        split = microbatches((batch, example_indices), accumulate, parts=parts)
        first = jax.eval_shape(of_part, jax.tree.map(lambda leaf: leaf[0], split))
        total, _ = jax.lax.scan(
            lambda total, part: (jax.tree.map(jnp.add, total, of_part(part)), None),
            jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), first),
            split,
        )
        # The weight of the whole batch is known last, so here every gradient is divided.
        (total_loss, total_weight), gradients = reduce(total[:2]), reduce(total[2])
        divide = lambda gradient: gradient * reciprocal_or_zero(total_weight).astype(gradient.dtype)  # noqa: E731
        return total_loss, total_weight, jax.tree.map(divide, gradients)

    take_gradients = at_once if accumulate == 1 else part_by_part

    def train_step(state: TrainState, batch: Any, example_indices: Int[Array, "B"]) -> tuple[TrainState, Metrics]:
        total_loss, total_weight, gradients = take_gradients(state, batch, example_indices)
        mean_loss, grad_norm = total_loss * reciprocal_or_zero(total_weight), optax.tree.norm(gradients)
        new_state = apply_if_finite(
            state, gradients, optimizer, finite=jnp.isfinite(mean_loss) & jnp.isfinite(grad_norm)
        )
        metrics = Metrics(mean_loss, grad_norm, total_weight, new_state.skipped, new_state.skipped_in_a_row)
        return new_state, metrics

    return train_step


def microbatches(rows: Any, count: int, *, parts: int = 1) -> Any:
    """The rows of a batch as K microbatches of B / K rows: leaves of shape K, B / K, ... .

    Every microbatch takes equally many rows of each of the `parts`, the first of B / parts rows and so on, so that where
    every part lies on a device of its own no row has to move.

    Raises:
        ValueError: B is not a multiple of K * parts.
    """

    def split(leaf: Array) -> Array:
        size, *rest = leaf.shape
        if size % (count * parts):
            raise ValueError(
                f"a batch is taken in microbatches of one size: it must be a multiple of {count} microbatches x {parts} "
                f"parts = {count * parts}, got {size} rows."
            )
        by_part = leaf.reshape(parts, count, size // (count * parts), *rest)
        return by_part.swapaxes(0, 1).reshape(count, size // count, *rest)

    return jax.tree.map(split, rows)


def make_eval_step(structure: ModelStructure, loss: LossFunction) -> Callable[[Named, Named, Any], LossSums]:
    """A pure function `(parameters, buffers, batch) -> LossSums`, deterministic. Add its sums up over all batches."""

    def eval_step(parameters: Named, buffers: Named, batch: Any) -> LossSums:
        return loss(structure.merge(parameters, buffers), batch, dropout=None)

    return eval_step


def next_token_loss(
    model: Any,
    batch: Any,
    *,
    dropout: DropoutSource | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    vocabulary_loss: VocabularyLoss = "plain",
    vocabulary_shards: int = 1,
) -> LossSums:
    """The loss of a decoder-only model: cross entropy of `model(batch.inputs)` against `batch.labels`.

    Args:
        model: from ids B T to logits B T V; for "fused", with `features` B T D and their projection `output`.
        batch: `data.Batch`, that is `inputs` and `labels` of shape B T and `weights` of shape B T.
        dropout: None in evaluation.
        label_smoothing, z_loss: see `losses.cross_entropy`; 0 in evaluation.
        vocabulary_loss: "fused" is `vocabulary_loss.fused_cross_entropy`, which never holds the logits.
        vocabulary_shards: of "fused": how many devices share the rows of the output projection.
    """
    forward = functools.partial(_VOCABULARY_LOSSES[vocabulary_loss], shards=vocabulary_shards, dropout=dropout)
    return forward(model, (batch.inputs,), batch, label_smoothing=label_smoothing, z_loss=z_loss)


def translation_loss(
    model: Any,
    batch: Any,
    *,
    dropout: DropoutSource | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    vocabulary_loss: VocabularyLoss = "plain",
    vocabulary_shards: int = 1,
) -> LossSums:
    """The loss of an encoder-decoder model by teacher forcing: every label is predicted from the true ones before it.

    The source is masked where it is padding (id 0), the target also where the future is.

    Args:
        model: from source B S, target B T and their masks to logits B T V; for "fused" as there.
        batch: `data.PairBatch`, that is `source` of shape B S, and `target_input`, `labels` and `weights` of shape B T.
        dropout, label_smoothing, z_loss, vocabulary_loss, vocabulary_shards: see `next_token_loss`.
    """
    source_mask = padding_mask(batch.source)
    target_mask = combine_masks(padding_mask(batch.target_input), causal_mask(batch.target_input.shape[1]))
    inputs = (batch.source, batch.target_input, source_mask, target_mask)
    forward = functools.partial(_VOCABULARY_LOSSES[vocabulary_loss], shards=vocabulary_shards, dropout=dropout)
    return forward(model, inputs, batch, label_smoothing=label_smoothing, z_loss=z_loss)


def _plain_loss(
    model: Any, inputs: tuple[Any, ...], batch: Any, *, dropout: DropoutSource | None, shards: int, **options: Any
) -> LossSums:
    del shards  # the compiler's affair
    return cross_entropy(model(*inputs, dropout=dropout), batch.labels, weights=batch.weights, **options)


def _fused_loss(
    model: Any, inputs: tuple[Any, ...], batch: Any, *, dropout: DropoutSource | None, shards: int, **options: Any
) -> LossSums:
    output = model.output
    return fused_cross_entropy(
        model.features(*inputs, dropout=dropout),
        output.kernel[...],
        bias=None if output.bias is None else output.bias[...],
        labels=batch.labels,
        weights=batch.weights,
        numerics=output.numerics,
        shards=shards,
        **options,
    )


_VOCABULARY_LOSSES = {"plain": _plain_loss, "fused": _fused_loss}
