"""What test_devices runs in processes of its own: how many devices there are is settled when JAX starts.

    python -m parity_tests.devices_worker PLAN.json

PLAN.json: {"output": FILE.npz, "runs": [a `Run` as an object, ...]} and in one of several processes "coordinator",
"num_processes" and "process_id". Each run takes two steps of SGD on two batches, twice over. The file holds for each run,
time and step the reduced gradients, the updates, the metrics, and how many programs were compiled meanwhile.
"""

import contextlib
import dataclasses
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from flax_transformer import data, distributed, layers, masks, parallel, training
from flax_transformer.config import DecoderOnlyConfig, EncoderDecoderConfig
from flax_transformer.losses import LossSums, cross_entropy
from flax_transformer.sharding import DATA, MeshShape
from parity_tests.unit.small_models import build

B, S, T = 24, 9, 7  # divisible by 1, 2, 3, 6 and 8 devices
V_SOURCE, V_TARGET = 15, 14  # so that 3 and 5, or 2 and 7, devices split a vocabulary; 2 and 3 the width; 2 and 5 F
SIZES: dict[str, Any] = dict(d_model=6, d_ff=10, num_heads=3, num_layers=1, max_length=10, dropout=0.3)
# Rows without a token that counts: with 2, 3 and 8 devices the first ones, and the last ones, have no other.
EMPTY_ROWS = (slice(0, 12), slice(12, 24))
# Of weights and dropout. Some draws of models this small amplify float32 rounding up to the tolerance and beyond (up to
# 4e-6 in 48 draws; none in float64); of this one 8 devices leave 6e-7.
SEED = 17

Model = Literal["decoder_only", "encoder_decoder"]


@dataclasses.dataclass(frozen=True)
class Run:
    """One model, in one dtype, in one layout.

    Attributes:
        kind: "plain" is `jax.jit` of the step on one device, without any layout.
        devices: how many.
        mesh: as `MeshShape.parse` reads it; none: all along `data`.
        accumulate: in how many microbatches a step is taken.
        fault: a mistake that is planted for this run, by its name in `FAULTS`; or none.
    """

    model: Model
    dtype: str
    kind: Literal["plain", "jit", "pmap"]
    devices: int = 1
    mesh: str = "data=-1"
    accumulate: int = 1
    fault: str = "none"

    @property
    def name(self) -> str:
        return f"{self.model} {self.dtype} {self.kind} {self.devices} {self.mesh} {self.accumulate} {self.fault}"

    @property
    def shape(self) -> MeshShape:
        return MeshShape.parse(self.mesh).of_devices(self.devices)


@contextlib.contextmanager
def _mean_of_device_means(mesh: MeshShape) -> Iterator[None]:
    """Every device divides by its own number of tokens, and the gradients are averaged."""
    del mesh

    def reduce(self: parallel.PmapLayout, tree: Any) -> Any:
        gradients = isinstance(tree, dict)  # and otherwise the sums of losses and weights
        return jax.lax.pmean(tree, DATA) if gradients else tree

    with mock.patch.object(parallel.PmapLayout, "_reduce", reduce):
        yield


@contextlib.contextmanager
def _devices_times_the_gradient(mesh: MeshShape) -> Iterator[None]:
    """What a sum over devices of gradients that were summed already gives."""

    def reduce(self: parallel.PmapLayout, tree: Any) -> Any:
        summed = jax.lax.psum(tree, DATA)
        return {name: leaf * mesh.data for name, leaf in summed.items()} if isinstance(tree, dict) else summed

    with mock.patch.object(parallel.PmapLayout, "_reduce", reduce):
        yield


@contextlib.contextmanager
def _dropout_by_place_on_the_device(mesh: MeshShape) -> Iterator[None]:
    """The first example of every device has the dropout of the first example."""
    place_batch = parallel.Layout.place_batch

    def place(self: parallel.Layout, batch: Any) -> parallel.PlacedBatch:
        local = np.arange(B, dtype=np.int32) % (B // mesh.parts)
        return place_batch(self, batch)._replace(examples=self._put_rows(local))

    with mock.patch.object(parallel.Layout, "place_batch", place):
        yield


@contextlib.contextmanager
def _bias_on_every_shard(mesh: MeshShape) -> Iterator[None]:
    """Each device along `tensor` adds the bias to its part of a sum, before they add up."""
    add_bias = layers._add_bias

    def add(y: jax.Array, bias: Any) -> jax.Array:
        return add_bias(y, None if bias is None else bias[...] * mesh.tensor)

    with mock.patch.object(layers, "_add_bias", add):
        yield


@contextlib.contextmanager
def _batch_spread_over_data_alone(mesh: MeshShape) -> Iterator[None]:
    """The devices along `fsdp` all compute the same: right, and so many times slower."""
    del mesh
    initialise = parallel.JitLayout.__init__

    def init(self: parallel.JitLayout, *arguments: Any) -> None:
        initialise(self, *arguments)
        self._rows = NamedSharding(self._mesh, PartitionSpec(DATA))

    with mock.patch.object(parallel.JitLayout, "__init__", init):
        yield


FAULTS: dict[str, Callable[[MeshShape], contextlib.AbstractContextManager[None]]] = {
    "none": contextlib.nullcontext,
    "mean of device means": _mean_of_device_means,
    "devices times the gradient": _devices_times_the_gradient,
    "dropout by place on the device": _dropout_by_place_on_the_device,
    "bias on every shard": _bias_on_every_shard,
    "batch spread over data alone": _batch_spread_over_data_alone,
}


def translation_loss(model: Any, batch: Any, *, dropout: Any = None) -> LossSums:
    source_mask = masks.padding_mask(batch.source)
    target_mask = masks.combine_masks(masks.padding_mask(batch.target_input), masks.causal_mask(T))
    logits = model(batch.source, batch.target_input, source_mask, target_mask, dropout=dropout)
    return cross_entropy(logits, batch.labels, weights=batch.weights, label_smoothing=0.1)


def config_of(model: Model, dtype: str) -> DecoderOnlyConfig | EncoderDecoderConfig:
    """One config with a tied embedding, one whose layers share their projection."""
    dtypes: dict[str, Any] = dict(param_dtype=dtype, compute_dtype=dtype)
    if model == "decoder_only":
        return DecoderOnlyConfig.small(vocab_size=V_TARGET, **SIZES, **dtypes)
    return EncoderDecoderConfig.document(source_vocab_size=V_SOURCE, target_vocab_size=V_TARGET, **SIZES, **dtypes)


def batch_of(model: Model, step: int) -> Any:
    """Every row has another number of tokens that count, and half of the rows have none."""
    rng = np.random.default_rng(step)
    lengths = rng.integers(1, T + 1, B)
    lengths[EMPTY_ROWS[step]] = 0
    real = np.arange(T) < lengths[:, None]
    labels = np.where(real, rng.integers(1, V_TARGET, (B, T)), 0).astype(np.int32)
    inputs = np.where(real, rng.integers(1, V_TARGET, (B, T)), 0).astype(np.int32)
    weights = real.astype(np.float32)
    if model == "decoder_only":
        return data.Batch(inputs, labels, weights)
    source = rng.integers(1, V_SOURCE, (B, S)) * (np.arange(S) < rng.integers(1, S + 1, (B, 1)))
    return data.PairBatch(source.astype(np.int32), inputs, labels, weights)


def recording(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """The same optimizer, whose state holds the gradients that it was given last and the updates that it made of them."""

    def init(params: Any) -> Any:
        nothing = jax.tree.map(jnp.zeros_like, params)
        return {"inner": optimizer.init(params), "gradients": nothing, "updates": nothing}

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        made, inner = optimizer.update(updates, state["inner"], params)
        return made, {"inner": inner, "gradients": updates, "updates": made}

    return optax.GradientTransformation(init, update)


def evaluates(run: Run) -> bool:
    """Whether a run evaluates too, which is another program to compile."""
    return run.model == "decoder_only" and run.dtype == "float64" and run.devices in (1, 3, 6)


def lists_collectives(run: Run) -> bool:
    """Whether a run is compiled once more, to read what its devices exchange."""
    return run.kind == "jit" and run.dtype == "float64" and run.shape.parts == run.shape.data in (2, 3)


class Plain:
    """One device and nothing laid out, with the methods of a layout."""

    place_state = staticmethod(lambda state: state)
    unplace_state = staticmethod(jax.device_get)
    place_batch = staticmethod(lambda batch: parallel.PlacedBatch(batch, jnp.arange(B, dtype=jnp.int32)))

    def compile_train_step(self, *arguments: Any, accumulate: int) -> parallel.TrainStep:
        assert accumulate == 1
        step = jax.jit(training.make_train_step(*arguments))
        return lambda state, placed: step(state, *placed)

    def compile_eval_step(self, *arguments: Any) -> parallel.EvalStep:
        step = jax.jit(training.make_eval_step(*arguments))
        return lambda state, placed: step(state.parameters, state.buffers, placed.batch)


def execute(run: Run, compilations: list[str]) -> dict[str, np.ndarray]:
    """The results of a run by name: "TIME/STEP/gradients/PARAMETER" and so on."""
    loss = training.next_token_loss if run.model == "decoder_only" else translation_loss
    structure, parameters, buffers = training.split_model(build(config_of(run.model, run.dtype), seed=SEED))
    optimizer = recording(optax.sgd(0.1, momentum=0.9))
    start = training.init_state(parameters, buffers, optimizer, seed=SEED)
    batches = [batch_of(run.model, step) for step in range(2)]
    layout = Plain() if run.kind == "plain" else parallel.layout(run.kind, devices=run.devices, mesh=run.shape)
    step = layout.compile_train_step(structure, loss, optimizer, accumulate=run.accumulate)

    results: dict[str, np.ndarray] = {}
    for time in range(2):
        state = layout.place_state(start)
        for number, batch in enumerate(batches):
            compilations.clear()
            placed = layout.place_batch(batch)
            results[f"{time}/{number}/rows"] = np.asarray(placed.examples.addressable_shards[0].data.size)
            state, metrics = step(state, placed)
            results[f"{time}/{number}/compilations"] = np.asarray(len(compilations))
            results[f"{time}/{number}/ready"] = np.asarray(all(leaf.is_ready() for leaf in jax.tree.leaves(state)))
            recorded = layout.unplace_state(state).optimizer_state
            for what in ("gradients", "updates"):
                for name, leaf in recorded[what].items():
                    results[f"{time}/{number}/{what}/{name}"] = leaf
            if run.kind == "jit":
                for name, leaf in state.optimizer_state["updates"].items():
                    results[f"{time}/{number}/held/{name}"] = np.asarray(leaf.addressable_shards[0].data.shape)
            for name, value in jax.device_get(metrics)._asdict().items():
                results[f"{time}/{number}/metrics/{name}"] = np.asarray(value)
    if evaluates(run):
        evaluate = layout.compile_eval_step(structure, loss)
        state = layout.place_state(start)
        for number, batch in enumerate(batches):
            compilations.clear()
            sums = jax.device_get(evaluate(state, layout.place_batch(batch)))
            results[f"0/{number}/evaluation/sums"] = np.asarray(sums)
            results[f"0/{number}/evaluation_compilations"] = np.asarray(len(compilations))
    if lists_collectives(run):
        placed = layout.place_state(start), layout.place_batch(batches[0])
        program = step.__wrapped__.lower(*placed).compile().as_text()
        results["collectives"] = np.asarray(re.findall(r" (all-[a-z]+|collective-[a-z]+|reduce-scatter)\(", program))
    return results


def main(plan_file: str) -> None:
    plan = json.loads(Path(plan_file).read_text())
    if "coordinator" in plan:
        distributed.initialise_distributed(
            coordinator=plan["coordinator"],
            num_processes=plan["num_processes"],
            process_id=plan["process_id"],
            timeout_seconds=60,
        )
    compilations: list[str] = []

    def count(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event.endswith("backend_compile_duration"):
            compilations.append(event)

    jax.monitoring.register_event_duration_secs_listener(count)
    results = {}
    for run in (Run(**fields) for fields in plan["runs"]):
        with jax.enable_x64(run.dtype == "float64"), FAULTS[run.fault](run.shape):
            for name, array in execute(run, compilations).items():
                results[f"{run.name}/{name}"] = array
    if distributed.is_main_process():
        np.savez(plan["output"], **results)


if __name__ == "__main__":
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    main(sys.argv[1])
