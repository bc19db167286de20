"""200 steps of training in both frameworks: the decoder-only document, from the same weights and on the same batches."""

import copy
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import flax_transformer as ft
from flax_transformer import optimizers, training
from flax_transformer.data import Batch
from flax_transformer.parity import tolerances
from parity_tests.references import needs_torch
from parity_tests.unit.small_models import build

pytestmark = needs_torch

STEPS, B, T, V, D, N = 200, 3, 7, 37, 20, 5
SMOOTHING, MAX_NORM, WARMUP, FACTOR = 0.1, 1.35, 40, 0.4
# The softmax ignores what it adds to a row of scores: its gradient is rounding noise, which Adam turns into full steps.
STRUCTURAL_ZEROS = {"Wk.bias"}
# Part of the way that a weight has gone. Training amplifies rounding: 200 steps left 1.4e-11 where a model was least well
# conditioned, 4e-15 here, in each of six seeds. The smallest mistake in a formula, clipping without its eps, leaves 1e-7.
FINAL_WEIGHTS = 2e-11


class Run(NamedTuple):
    """What is left of a training run, under the names of the document."""

    losses: np.ndarray
    weights: Mapping[str, np.ndarray]
    means: Mapping[str, np.ndarray]  # Adam's


def batches(seed: int) -> Batch:
    """Random ids of which a few labels do not count; STEPS batches, one after the other along the first axis."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, V, (STEPS, B, T + 1)).astype(np.int32)
    ids[..., 1::2] = (5 * ids[..., :-1:2] + 3) % V  # every other id can be learnt
    weights = (rng.random((STEPS, B, T)) > 0.2).astype(np.float32)
    return Batch(inputs=ids[..., :-1], labels=ids[..., 1:], weights=weights)


@functools.cache
def reference(seed: int) -> Any:
    """The document's module with random weights, in float64."""
    import torch

    from torch_reference.decoder_only import DecoderOnly

    torch.manual_seed(seed)
    module = DecoderOnly(V, d_model=D, num_heads=N, context_len=T).double()
    with torch.no_grad():
        for parameter in module.parameters():  # norms start at 1 and 0, which hides mistakes
            parameter.add_(0.1 * torch.randn_like(parameter))
    return module


def run_torch(seed: int) -> Run:
    import torch

    module = copy.deepcopy(reference(seed))
    optimizer = torch.optim.Adam(module.parameters(), lr=1.0, betas=(0.9, 0.98), eps=1e-9)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda count: FACTOR * D**-0.5 * min((count + 1) ** -0.5, (count + 1) * WARMUP**-1.5)
    )
    losses, clipped = [], 0
    for inputs, labels, weights in zip(*batches(seed), strict=True):
        targets = torch.from_numpy(np.where(weights == 0, -100, labels).astype(np.int64))
        # Probabilities are what the document returns; the softmax of their logarithms are they themselves.
        scores = module(torch.from_numpy(inputs.astype(np.int64))).log()
        loss = torch.nn.functional.cross_entropy(
            scores.reshape(-1, V), targets.reshape(-1), ignore_index=-100, label_smoothing=SMOOTHING
        )
        optimizer.zero_grad()
        loss.backward()
        clipped += int(torch.nn.utils.clip_grad_norm_(module.parameters(), MAX_NORM) > MAX_NORM)
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    assert 0 < clipped < STEPS, f"{clipped} of {STEPS} gradients were clipped; nothing is shown"
    named = dict(module.named_parameters())
    return Run(
        losses=np.asarray(losses),
        weights={name: value.detach().numpy() for name, value in named.items()},
        means={name: optimizer.state[value]["exp_avg"].numpy() for name, value in named.items()},
    )


def run_ours(seed: int) -> Run:
    config = ft.DecoderOnlyConfig.document(
        vocab_size=V, d_model=D, num_heads=N, max_length=T, param_dtype="float64", compute_dtype="float64"
    )
    model = build(config)
    module = reference(seed)
    ft.weights.load_torch(model, {**module.state_dict(), "position_embedding": module.position_embedding})
    structure, parameters, buffers = training.split_model(model)
    optimizer = optimizers.adam(
        optimizers.noam(D, warmup_steps=WARMUP, factor=FACTOR), b2=0.98, eps=1e-9, max_norm=MAX_NORM
    )
    loss = functools.partial(training.next_token_loss, label_smoothing=SMOOTHING)
    step = training.make_train_step(structure, loss, optimizer)

    @jax.jit
    def run(state, given):
        state, metrics = jax.lax.scan(lambda state, batch: step(state, batch, jnp.arange(B)), state, given)
        return state, metrics.loss

    state = training.init_state(parameters, buffers, optimizer, seed=0)
    state, losses = run(state, jax.tree.map(jnp.asarray, batches(seed)))

    def named(trained: Any) -> dict[str, np.ndarray]:
        arrays = ft.weights.to_torch(structure.merge(trained, state.buffers))
        return {name: array for name, array in arrays.items() if name != "position_embedding"}

    return Run(
        losses=np.asarray(losses),
        weights=named(state.parameters),
        means=named(optax.tree.get(state.optimizer_state, "mu")),
    )


@pytest.mark.usefixtures("float64")
def test_200_clipped_adam_steps_under_noam_leave_the_losses_and_weights_that_pytorch_is_left_with():
    theirs, ours = run_torch(0), run_ours(0)
    assert theirs.losses[-20:].mean() < 0.8 * theirs.losses[:20].mean(), "nothing was learnt; nothing is shown"
    np.testing.assert_allclose(ours.losses, theirs.losses, rtol=tolerances.MEANING)
    assert set(ours.weights) == set(theirs.weights) > STRUCTURAL_ZEROS
    start = {name: value.detach().numpy() for name, value in reference(0).named_parameters()}
    for name, expected in theirs.weights.items():
        if name in STRUCTURAL_ZEROS:
            continue
        way = np.abs(expected - start[name]).max()
        error = np.abs(ours.weights[name] - expected).max() / way
        assert error <= FINAL_WEIGHTS, f"{name}: {error:.1e} of the way"
    for run in (ours, theirs):
        for name in STRUCTURAL_ZEROS:
            of_its_module = np.abs(run.means[name.replace("bias", "weight")]).max()
            assert np.abs(run.means[name]).max() < tolerances.STRUCTURAL_ZERO * of_its_module, name
