"""A plan says what the compiler says, in parts that add up. Here it compiles for the CPU, and for TPUs where libtpu is."""

import importlib.util

import jax
import numpy as np
import pytest
from flax import nnx

from flax_transformer import data, optimizers, parallel, planning, training
from flax_transformer.commands.plan import _largest
from flax_transformer.config import DecoderOnlyConfig
from flax_transformer.decoder_only import DecoderOnly
from flax_transformer.flops import Flops

B, T, V, D, F, L = 6, 7, 13, 10, 22, 2
CONFIG = DecoderOnlyConfig.small(vocab_size=V, d_model=D, d_ff=F, num_heads=2, num_layers=L, max_length=T)


def make_plan(layout: parallel.Layout, *, batch_size: int = B) -> planning.Plan:
    optimizer = optimizers.adam(1e-3)
    structure, parameters, buffers = training.split_model(nnx.eval_shape(lambda: DecoderOnly(CONFIG, rngs=nnx.Rngs(0))))
    state = jax.eval_shape(
        lambda parameters, buffers: training.init_state(parameters, buffers, optimizer, seed=0), parameters, buffers
    )
    shape = (batch_size, T)
    batch = data.Batch(*(jax.ShapeDtypeStruct(shape, dtype) for dtype in (np.int32, np.int32, np.float32)))  # type: ignore[arg-type]
    return planning.plan(layout, structure, training.next_token_loss, optimizer, state, batch)


@pytest.mark.parametrize("kind", ["jit", "pmap"])
def test_a_plan_adds_up_and_counts_the_operations_of_the_model(kind):
    plan = make_plan(parallel.layout(kind, devices=1))
    norms, biases = 2 * D * (2 * L + 1), L * (4 * D + F + D)
    parameters = V * D + T * D + L * (4 * D * D + 2 * D * F) + norms + biases
    assert plan.fits
    assert plan.parameters == 4 * parameters
    assert plan.optimizer == 2 * plan.parameters + 8, "two moments and two counts"
    assert plan.batch == 4 * (3 * B * T + B)
    assert plan.activations > 0
    assert plan.needed == plan.parameters + plan.optimizer + plan.batch + plan.activations
    forward = 2 * B * T * (L * (4 * D * D + 2 * D * F + 2 * T * D) + D * V)
    assert plan.model_flops == 3 * forward
    assert plan.flops == Flops(3 * forward, 18 * forward), "float32 at highest precision takes six passes"


def test_a_slice_that_there_is_not_is_refused_in_one_line():
    with pytest.raises(ValueError, match=r"such as v5e:2x4.*got 'v5e'"):
        planning.target("v5e")
    if importlib.util.find_spec("libtpu") is None:
        with pytest.raises(ValueError, match=r"pip install 'flax-transformer\[tpu\]'"):
            planning.target("v5e:2x4")


@pytest.mark.parametrize(
    ("text", "needed"),
    [
        ("Ran out of memory in memory space hbm. Used 26.50G of 15.75G hbm. Exceeded by 10.75G.", 26.5 * 2**30),
        (
            "Ran out of memory on HBM, the total memory required for HLO temporaries (37.25G) exceeds available HBM "
            "(15.75G).",
            37.25 * 2**30 + 1000,
        ),
    ],
)
def test_what_the_compiler_says_when_memory_does_not_suffice_is_read(text, needed):
    error = jax.errors.JaxRuntimeError(f"RESOURCE_EXHAUSTED: {text}")
    assert planning._exhausted(error, beside=1000) == (needed, int(15.75 * 2**30))


def test_another_failure_of_the_compiler_is_raised():
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
        planning._exhausted(jax.errors.JaxRuntimeError("INTERNAL: another thing"), beside=0)


@pytest.mark.parametrize("largest", [0, 4, 8, 36, 40, 200])
def test_the_search_ends_at_the_largest_batch_that_fits(largest, capsys):
    fixed, each, limit = 1000, 50, 1000 + 50 * largest + 30
    compiled = []

    def compiled_for(batch_size: int) -> planning.Plan:
        compiled.append(batch_size)
        needed = fixed + each * batch_size + (batch_size % 3)  # not quite a straight line
        return planning.Plan(
            batch_size=batch_size, devices=4, needed=needed, limit=limit, fits=needed <= limit, parameters=300,
            optimizer=600, batch=0, flops=Flops(1, 1), model_flops=1, sent={}, moved=1.0,
        )  # fmt: skip

    found = _largest(compiled_for(8), compiled_for, unit=4, chip=None)
    assert len(compiled) <= 7
    assert found.startswith(
        f"largest batch that fits: {largest}, {largest / 4:g} sequences a chip"
        if largest
        else "largest batch that fits: none"
    )
    assert f"{largest + 4} needs" in found
