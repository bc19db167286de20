"""The vocabulary of weight tables, on a module of nothing but weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flax_transformer.layers import Buffer
from flax_transformer.weights import rules
from flax_transformer.weights.transfer import export, load
from parity_tests.unit.small_models import assert_same_arrays, bits, bits_of


class Weights(nnx.Module):
    def __init__(self, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)

        def random(*shape: int) -> jax.Array:
            return jnp.asarray(rng.standard_normal(shape), jnp.float32)

        self.query, self.key, self.value = (nnx.Param(random(3, 5)) for _ in range(3))
        self.layers = nnx.Param(random(2, 7, 3))
        self.table = Buffer(random(11, 3))
        self.parts = nnx.List([nnx.Param(random(7)), nnx.Param(random(5, 3))])


REST = (rules.copy("part", "parts.0"), rules.transpose("flipped", "parts.1"))
QKV = ("query", "key", "value")
VOCABULARIES = {
    "split columns, stack": (
        rules.split("qkv", QKV, axis=1),
        rules.stack(["h.0", "h.1"], "layers"),
        rules.buffer("pe", "table"),
    ),
    "split rows of the transpose, stack transposed": (
        rules.split("qkv", QKV, axis=0, then=rules.transposed),
        rules.stack(["h.0", "h.1"], "layers", then=rules.transposed),
        rules.buffer("pe", "table", leading_axes=2),
    ),
    "aliases": (
        *(rules.copy(name, name) for name in QKV),
        rules.alias("tied", of="key"),
        rules.stack(["h.0", "h.1"], "layers"),
        rules.buffer("pe", "table", leading_axes=1),
    ),
}


def expected_state(name: str, module: Weights) -> dict[str, np.ndarray]:
    query, key, value = (np.asarray(getattr(module, part)[...]) for part in QKV)
    layers, table = np.asarray(module.layers[...]), np.asarray(module.table[...])
    rest = {"part": np.asarray(module.parts[0][...]), "flipped": np.asarray(module.parts[1][...]).T}
    own = {
        "split columns, stack": {
            "qkv": np.concatenate([query, key, value], axis=1),
            "h.0": layers[0],
            "h.1": layers[1],
            "pe": table,
        },
        "split rows of the transpose, stack transposed": {
            "qkv": np.concatenate([query.T, key.T, value.T], axis=0),
            "h.0": layers[0].T,
            "h.1": layers[1].T,
            "pe": table[None, None],
        },
        "aliases": {
            "query": query,
            "key": key,
            "value": value,
            "tied": key,
            "h.0": layers[0],
            "h.1": layers[1],
            "pe": table[None],
        },
    }
    return {**own[name], **rest}


@pytest.mark.parametrize("name", VOCABULARIES)
def test_every_rule_is_its_own_inverse_and_does_what_it_says(name):
    table = (*VOCABULARIES[name], *REST)
    module, other = Weights(), Weights(seed=1)
    state = export(module, table)
    assert_same_arrays(state, expected_state(name, module))
    load(other, expected_state(name, module), table, cast="exact")
    assert bits_of(other) == bits_of(module)


def problems_of(table, state) -> str:
    module = Weights(seed=1)
    before = bits_of(module)
    with pytest.raises(ValueError, match="nothing was loaded") as error:
        load(module, state, table, cast="exact")
    assert bits_of(module) == before
    return str(error.value)


def test_a_rule_that_misses_or_misshapes_a_source_names_what_it_wants():
    name = "split columns, stack"
    table, state = (*VOCABULARIES[name], *REST), expected_state(name, Weights())
    message = problems_of(table, {**state, "qkv": state["qkv"][:, :14], "h.1": state["h.1"].T})
    assert "qkv has shape (3, 14), expected (3, 15) (split: qkv -> query, key, value)" in message
    assert "h.1 has shape (3, 7), expected (7, 3) (stack: h.0, h.1 -> layers)" in message
    assert "2 problem(s)" in message
    del state["qkv"], state["h.0"], state["pe"]
    message = problems_of(table, state)
    assert "missing key qkv (shape (3, 15), split: qkv -> query, key, value)" in message
    assert "missing key h.0 (shape (7, 3), stack: h.0, h.1 -> layers)" in message
    assert "missing key pe (shape (11, 3), buffer: pe -> table)" in message
    assert "3 problem(s)" in message


def test_a_table_that_fills_a_target_twice_or_never_is_refused():
    name = "aliases"
    state = expected_state(name, Weights())
    table = [rule for rule in (*VOCABULARIES[name], *REST) if rule.sources != ("value",)]
    assert "no rule fills value" in problems_of(table, {k: v for k, v in state.items() if k != "value"})
    assert "key is filled twice (copy: value -> key)" in problems_of([*table, rules.copy("value", "key")], state)


def test_only_an_optional_buffer_may_be_absent_and_is_not_exported():
    name = "split columns, stack"
    table = (*VOCABULARIES[name][:2], rules.buffer("pe", "table", optional=True), *REST)
    module, other = Weights(), Weights(seed=1)
    state = export(module, table)
    assert "pe" not in state
    before = bits(other.table[...])
    load(other, state, table, cast="exact")
    assert bits(other.table[...]) == before
    load(other, expected_state(name, module), table, cast="exact")
    assert bits_of(other) == bits_of(module)
