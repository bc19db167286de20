"""How the layers of a stack are run, one after the other: three ways to compute the same.

    unrolled       a layer at a time, each compiled on its own
    rematerialise  nothing of a layer is kept for the backward pass but its input; the layer is computed once more there.
                   A third more arithmetic, in the memory of one layer and L inputs. On a CPU the layers have to be scanned
                   too: of unrolled ones XLA finds that they are computed twice, and keeps them
    scanned        one layer is compiled, and a loop goes over the parameters of all: what takes long to compile unrolled, a
                   deep model, does not. The parameters are stacked in each call, which copies them once; outside they have
                   the names and shapes of an unrolled model

Dropout sites have the numbers that they have in an unrolled model, so all ways take the same masks.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from flax_transformer.config import TransformerConfig
from flax_transformer.dropout import DropoutSource, count_sites

Layers = Sequence[Any]
Call = Callable[[Any, Array, tuple[Any, ...], DropoutSource | None], Array]


def _call(layer: Any, x: Array, context: tuple[Any, ...], dropout: DropoutSource | None) -> Array:
    return layer(x, *context, dropout)


def _call_again_in_the_backward_pass(
    layer: Any, x: Array, context: tuple[Any, ...], dropout: DropoutSource | None, *, prevent_cse: bool
) -> Array:
    # The layer and its masks are traced once; the backward pass repeats the operations and asks for no further mask.
    return jax.checkpoint(lambda x: layer(x, *context, dropout), prevent_cse=prevent_cse)(x)


def _unrolled(
    layers: Layers,
    x: Float[Array, "B T D"],
    *context: Any,
    dropout: DropoutSource | None,
    call: Call,
    **known: Any,
) -> Float[Array, "B T D"]:
    for layer in layers:
        x = call(functools.partial(layer, **known), x, context, dropout)
    return x


def _scanned(
    layers: Layers,
    x: Float[Array, "B T D"],
    *context: Any,
    dropout: DropoutSource | None,
    call: Call,
    **known: Any,
) -> Float[Array, "B T D"]:
    first, count = layers[0], len(layers)
    graph = nnx.graphdef(first)
    # One layer that is applied L times needs no copies.
    stacked = None if all(layer is first for layer in layers) else _stack(layers)
    if dropout is None:
        sources = lambda number: None  # noqa: E731
    else:
        sources = dropout.of_layers(count, count_sites(lambda source: first(x, *context, source, **known)))

    def body(x: Array, numbered: tuple[Array, Any]) -> tuple[Array, None]:
        number, arrays = numbered
        layer = first if arrays is None else nnx.merge(graph, arrays)
        return call(functools.partial(layer, **known), x, context, sources(number)), None

    return jax.lax.scan(body, x, (jnp.arange(count), stacked))[0]


def _stack(layers: Layers) -> Any:
    return jax.tree.map(lambda *arrays: jnp.stack(arrays), *(nnx.as_pure(nnx.state(layer)) for layer in layers))


# Each is one object, so that two models of one configuration have one structure.
_RUNNERS = {
    ("unrolled", "none"): functools.partial(_unrolled, call=_call),
    ("unrolled", "layers"): functools.partial(
        _unrolled, call=functools.partial(_call_again_in_the_backward_pass, prevent_cse=True)
    ),
    ("scanned", "none"): functools.partial(_scanned, call=_call),
    # A loop's body cannot be merged with what is outside, which is what this would prevent.
    ("scanned", "layers"): functools.partial(
        _scanned, call=functools.partial(_call_again_in_the_backward_pass, prevent_cse=False)
    ),
}


def runner(config: TransformerConfig) -> Callable[..., Array]:
    """What runs the layers of a stack: `run(layers, x, *context, dropout=source, **known)`.

    A layer is called as `layer(x, *context, source, **known)`; what is known is the same for all of them, and no array.
    """
    return _RUNNERS[config.layers, config.rematerialise]


def unrolled(model: Any) -> Any:
    """The model whose layers are run one at a time, so that each can be watched: another structure of the same arrays.

    Args:
        model: an `EncoderDecoder` or a `DecoderOnly`; not changed.
    """
    config = dataclasses.replace(model.config, layers="unrolled", rematerialise="none")
    structure = nnx.graphdef(nnx.eval_shape(lambda: type(model)(config, rngs=nnx.Rngs(0))))
    return nnx.merge(structure, nnx.state(model))
