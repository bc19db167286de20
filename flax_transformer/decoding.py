"""Text out of a trained model: greedy and sampled, each as one compiled loop over a buffer of fixed size.

Every step runs the whole model over the whole buffer. What lies behind the position that is being written does not
matter, because attention is causal; it is there so that every step has the same shape.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from flax_transformer.decoder_only import DecoderOnly
from flax_transformer.encoder_decoder import EncoderDecoder
from flax_transformer.masks import causal_mask

Choose = Callable[[Float[Array, "B V"], PRNGKeyArray | None], Int[Array, "B"]]


def generate_greedy(
    model: DecoderOnly, prompt: Int[Array, "B P"], *, num_tokens: int, end_id: int | None = None
) -> Int[Array, "B P+num_tokens"]:
    """The prompt, continued by the most likely token `num_tokens` times.

    The model sees the last `max_length` tokens: once the text is longer than its position table, the window slides, and
    its first token takes position 0.

    Args:
        model: without dropout, as every call without `dropout=`.
        prompt: token ids, at least one per row, all rows of one length.
        num_tokens: how many to append.
        end_id: a row that has produced this id is filled up with it; None: nothing ends a row.

    Returns:
        Prompt and continuation, int32.

    Raises:
        ValueError: an empty prompt, a prompt not of shape (B, P), or `num_tokens` below 1.
    """
    return _generate(model, prompt, None, num_tokens=num_tokens, choose=_most_likely, end_id=end_id)


def generate_sampled(
    model: DecoderOnly,
    prompt: Int[Array, "B P"],
    *,
    key: PRNGKeyArray,
    num_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    end_id: int | None = None,
) -> Int[Array, "B P+num_tokens"]:
    """The prompt, continued by tokens drawn from softmax(logits / temperature), a pure function of its arguments.

    As `generate_greedy`, and:

    Args:
        key: the same key gives the same text.
        temperature: above 0; towards 0 the most likely token takes all.
        top_k: draw from the k most likely tokens alone (and from all that tie with the k-th); None: from all.

    Raises:
        ValueError: also a temperature not above 0, or a `top_k` not in [1, V].
    """
    if not 0.0 < temperature < float("inf"):
        raise ValueError(f"temperature must be above 0, got {temperature}; generate_greedy takes the likeliest token.")
    vocab_size = model.config.vocab_size
    if top_k is not None and not 1 <= top_k <= vocab_size:
        raise ValueError(f"top_k must be between 1 and the vocabulary's {vocab_size} tokens, got {top_k}.")
    choose = _sampler(temperature, top_k)
    return _generate(model, prompt, key, num_tokens=num_tokens, choose=choose, end_id=end_id)


def translate_greedy(
    model: EncoderDecoder,
    source: Int[Array, "B S"],
    source_mask: Bool[Array, "#B 1 #T S"],
    *,
    start_id: int,
    length: int,
    end_id: int | None = None,
) -> Int[Array, "B length"]:
    """The target that takes the most likely token at every step, the start token included.

    This is the encoder-decoder document's `autoregressive_infer(model, src, src_mask, max_len, start_idx)`, for any
    batch and with an optional end: `length` = max_len counts the start token, so `length` - 1 tokens are chosen.

    Args:
        model: without dropout.
        source: token ids.
        source_mask: usually `masks.padding_mask(source)`.
        start_id: the first token of every target.
        length: of the result, at most the model's `max_length`.
        end_id: a row that has produced this id is filled up with it; None, as the document: nothing ends a row.

    Returns:
        Target ids, int32.

    Raises:
        ValueError: `length` not in [1, max_length], and whatever the model refuses.
    """
    if not 1 <= length <= model.config.max_length:
        raise ValueError(
            f"length must be between 1 and the model's max_length={model.config.max_length}, got {length}; "
            "a position beyond the position table has no row there."
        )
    graph, state = nnx.split(model)
    return _translate(graph, state, source, source_mask, start_id, -1 if end_id is None else end_id, length=length)


def _most_likely(logits: Float[Array, "B V"], key: PRNGKeyArray | None) -> Int[Array, "B"]:
    del key
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


@functools.cache  # one function object per setting, so that the compiled loop is found again
def _sampler(temperature: float, top_k: int | None) -> Choose:
    def choose(logits: Float[Array, "B V"], key: PRNGKeyArray | None) -> Int[Array, "B"]:
        assert key is not None
        logits = logits.astype(jnp.float32) / temperature
        if top_k is not None:
            lowest = jax.lax.top_k(logits, top_k)[0][:, -1:]
            logits = jnp.where(logits < lowest, -jnp.inf, logits)
        return jax.random.categorical(key, logits, axis=-1).astype(jnp.int32)

    return choose


def _generate(
    model: DecoderOnly,
    prompt: Int[Array, "B P"],
    key: PRNGKeyArray | None,
    *,
    num_tokens: int,
    choose: Choose,
    end_id: int | None,
) -> Int[Array, "B P+num_tokens"]:
    prompt = jnp.asarray(prompt, jnp.int32)
    if prompt.ndim != 2 or prompt.shape[1] < 1:
        raise ValueError(
            f"prompt must have shape (B, P) with at least one token, got {prompt.shape}; one text is ids[None, :]."
        )
    if num_tokens < 1:
        raise ValueError(f"num_tokens must be at least 1, got {num_tokens}.")
    graph, state = nnx.split(model)
    window = min(prompt.shape[1] + num_tokens, model.config.max_length)
    buffer = jnp.pad(prompt, ((0, 0), (0, num_tokens)))
    end = -1 if end_id is None else end_id  # no token has the id -1
    return _extend(graph, state, buffer, key, end, start=prompt.shape[1], window=window, choose=choose)


@functools.partial(jax.jit, static_argnames=("graph", "start", "window", "choose"))
def _extend(
    graph: nnx.GraphDef,
    state: Any,
    buffer: Int[Array, "B size"],
    key: PRNGKeyArray | None,
    end_id: Int[Array, ""],
    *,
    start: int,
    window: int,
    choose: Choose,
) -> Int[Array, "B size"]:
    """Fills `buffer` from `start` on."""
    model = nnx.merge(graph, state)

    def write(position: Int[Array, ""], carry: tuple[Array, Array]) -> tuple[Array, Array]:
        buffer, ended = carry
        first = jnp.maximum(position - window, 0)
        features = model.features(jax.lax.dynamic_slice_in_dim(buffer, first, window, axis=1))
        last = jax.lax.dynamic_slice_in_dim(features, position - 1 - first, 1, axis=1)
        step_key = None if key is None else jax.random.fold_in(key, position)
        return _append(buffer, ended, position, choose(model.logits(last)[:, 0], step_key), end_id)

    ended = jnp.zeros(buffer.shape[0], bool)
    return jax.lax.fori_loop(start, buffer.shape[1], write, (buffer, ended))[0]


@functools.partial(jax.jit, static_argnames=("graph", "length"))
def _translate(
    graph: nnx.GraphDef,
    state: Any,
    source: Int[Array, "B S"],
    source_mask: Bool[Array, "#B 1 #T S"],
    start_id: Int[Array, ""],
    end_id: Int[Array, ""],
    *,
    length: int,
) -> Int[Array, "B length"]:
    model = nnx.merge(graph, state)
    memory = model.encode(source, source_mask)
    buffer = jnp.zeros((source.shape[0], length), jnp.int32).at[:, 0].set(start_id)

    def write(position: Int[Array, ""], carry: tuple[Array, Array]) -> tuple[Array, Array]:
        buffer, ended = carry
        features = model.decode(buffer, memory, source_mask, causal_mask(length))
        last = jax.lax.dynamic_slice_in_dim(features, position - 1, 1, axis=1)
        return _append(buffer, ended, position, _most_likely(model.logits(last)[:, 0], None), end_id)

    ended = jnp.zeros(source.shape[0], bool)
    return jax.lax.fori_loop(1, length, write, (buffer, ended))[0]


def _append(
    buffer: Int[Array, "B size"],
    ended: Bool[Array, "B"],
    position: Int[Array, ""],
    token: Int[Array, "B"],
    end_id: Int[Array, ""],
) -> tuple[Int[Array, "B size"], Bool[Array, "B"]]:
    token = jnp.where(ended, end_id, token)
    return buffer.at[:, position].set(token), ended | (token == end_id)
