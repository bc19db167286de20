"""Use of the devices is told where their peak is known, and a trace is of the steps that were asked for."""

from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flax_transformer import data, optimizers, training
from flax_transformer.commands.utilisation import TRACED, Trace, Utilisation
from flax_transformer.config import DecoderOnlyConfig
from flax_transformer.decoder_only import DecoderOnly

B, T, V, D, F = 3, 5, 11, 6, 14
CONFIG = DecoderOnlyConfig.small(vocab_size=V, d_model=D, d_ff=F, num_heads=2, num_layers=1, max_length=T)
FORWARD = 2 * B * T * (4 * D * D + 2 * D * F + 2 * T * D + D * V)


def device(kind: str, peak_bytes: int | None) -> SimpleNamespace:
    stats = None if peak_bytes is None else {"peak_bytes_in_use": peak_bytes}
    return SimpleNamespace(device_kind=kind, process_index=0, memory_stats=lambda: stats)


def utilisation(*devices: SimpleNamespace) -> Utilisation:
    structure, parameters, buffers = training.split_model(DecoderOnly(CONFIG, rngs=nnx.Rngs(0)))
    state = training.init_state(parameters, buffers, optimizers.sgd(0.1), seed=0)
    return Utilisation(structure, training.next_token_loss, state, devices)


def batch() -> data.Batch:
    ids = np.zeros((B, T), np.int32)
    return data.Batch(ids, ids, np.ones((B, T), np.float32))


def test_mfu_is_the_models_own_operations_over_the_peak_of_all_devices():
    use = utilisation(*[device("TPU v5 lite", None)] * 2)
    assert use.flops(batch()) == 3 * FORWARD
    assert use.mfu(197e12) == pytest.approx(0.5)
    assert use.mfu(None) is None


def test_nothing_is_counted_where_the_peak_is_not_known():
    use = utilisation(device("cpu", None))
    assert use.flops(batch()) == 0
    assert use.mfu(1e9) is None
    assert use.peak_memory() is None


def test_memory_is_that_of_the_fullest_device():
    assert utilisation(device("cpu", 300), device("cpu", 700)).peak_memory() == 700


@pytest.mark.parametrize("steps", [TRACED.start - 1, TRACED.stop + 3, TRACED.start])
def test_a_trace_is_of_the_steps_that_were_asked_for_and_ends_with_the_run(tmp_path, monkeypatch, steps):
    told = []
    monkeypatch.setattr(jax.profiler, "start_trace", lambda directory: told.append(directory))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: told.append(taken))
    taken = 0
    with Trace(tmp_path / "profile") as trace:
        for taken in range(1, steps + 1):
            trace.before_step()
            trace.after_step(jnp.float32(taken))
    expected = [] if steps < TRACED.start else [str(tmp_path / "profile"), min(steps, TRACED.stop - 1)]
    assert told == expected


def test_no_trace_is_made_unasked(monkeypatch):
    monkeypatch.setattr(jax.profiler, "start_trace", lambda directory: pytest.fail(f"a trace in {Path(directory)}"))
    with Trace(None) as trace:
        for _ in range(20):
            trace.before_step()
            trace.after_step(jnp.float32(0))
