"""Text out of a trained model: greedy and sampled, each as one compiled loop over a buffer of fixed size.

`cache="on"`: a step reads the one new token, and attends to the keys and values that are kept of the others (`cache`).
`cache="off"`: a step runs the whole model over the whole buffer. What lies behind the position that is being written does
not matter, because attention is causal; it is there so that every step has the same shape. Both write the same text, as
far as rounding does not decide between two tokens; the second is the yardstick of the first.
"""

import functools
from collections.abc import Callable
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from flax_transformer.cache import Cache
from flax_transformer.decoder_only import DecoderOnly
from flax_transformer.encoder_decoder import EncoderDecoder
from flax_transformer.masks import causal_mask

_NO_ID = -1
UseCache = Literal["on", "off"]
Choose = Callable[[Float[Array, "B V"], PRNGKeyArray | None], Int[Array, "B"]]
# Of the text so far, where its next token will stand, and the cache: the logits of that token, and the cache after it.
NextLogits = Callable[[Int[Array, "B size"], Int[Array, ""], Any], tuple[Float[Array, "B V"], Any]]


def generate_greedy(
    model: DecoderOnly,
    prompt: Int[Array, "B P"],
    *,
    num_tokens: int,
    end_id: int | None = None,
    cache: UseCache = "on",
) -> Int[Array, "B P+num_tokens"]:
    """The prompt, continued by the most likely token `num_tokens` times.

    The model sees the last `max_length` tokens: once the text is longer than its position table, the window slides, and
    its first token takes position 0. Every key and value is another one then, so that the cache ends there, and the
    whole window is computed at every step.

    Args:
        model: without dropout, as every call without `dropout=`.
        prompt: token ids, at least one per row, all rows of one length.
        num_tokens: how many to append.
        end_id: a row that has produced this id is filled up with it; None: nothing ends a row.
        cache: `on` keeps the keys and values of what was read; `off` computes the whole text anew for every token.

    Returns:
        Prompt and continuation, int32.

    Raises:
        ValueError: an empty prompt, a prompt not of shape (B, P), `num_tokens` below 1, or another `cache`.
    """
    return _generate(model, prompt, None, num_tokens=num_tokens, choose=_most_likely, end_id=end_id, cache=cache)


def generate_sampled(
    model: DecoderOnly,
    prompt: Int[Array, "B P"],
    *,
    key: PRNGKeyArray,
    num_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    end_id: int | None = None,
    cache: UseCache = "on",
) -> Int[Array, "B P+num_tokens"]:
    """The prompt, continued by tokens drawn from softmax(logits / temperature), a pure function of its arguments.

    As `generate_greedy`, and:

    Args:
        key: the same key gives the same text, with and without a cache.
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
    return _generate(model, prompt, key, num_tokens=num_tokens, choose=choose, end_id=end_id, cache=cache)


def translate_greedy(
    model: EncoderDecoder,
    source: Int[Array, "B S"],
    source_mask: Bool[Array, "#B 1 #T S"],
    *,
    start_id: int,
    length: int,
    end_id: int | None = None,
    cache: UseCache = "on",
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
        cache: `on` keeps the keys and values of the target, and those of the source; `off`, as the document, computes the
            whole target anew for every token.

    Returns:
        Target ids, int32.

    Raises:
        ValueError: `length` not in [1, max_length], another `cache`, and whatever the model refuses.
    """
    _require_cache(cache)
    if not 1 <= length <= model.config.max_length:
        raise ValueError(
            f"length must be between 1 and the model's max_length={model.config.max_length}, got {length}; "
            "a position beyond the position table has no row there."
        )
    graph, state = nnx.split(model)
    end = _NO_ID if end_id is None else end_id
    return _translate(graph, state, source, source_mask, start_id, end, length=length, cache=cache)


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
    cache: UseCache,
) -> Int[Array, "B P+num_tokens"]:
    _require_cache(cache)
    prompt = jnp.asarray(prompt, jnp.int32)
    if prompt.ndim != 2 or prompt.shape[1] < 1:
        raise ValueError(
            f"prompt must have shape (B, P) with at least one token, got {prompt.shape}; one text is ids[None, :]."
        )
    if num_tokens < 1:
        raise ValueError(f"num_tokens must be at least 1, got {num_tokens}.")
    graph, state = nnx.split(model)
    end = _NO_ID if end_id is None else end_id
    return _extend(graph, state, prompt, key, end, num_tokens=num_tokens, choose=choose, cache=cache)


@functools.partial(jax.jit, static_argnames=("graph", "num_tokens", "choose", "cache"))
def _extend(
    graph: nnx.GraphDef,
    state: Any,
    prompt: Int[Array, "B P"],
    key: PRNGKeyArray | None,
    end_id: Int[Array, ""],
    *,
    num_tokens: int,
    choose: Choose,
    cache: UseCache,
) -> Int[Array, "B P+num_tokens"]:
    model: DecoderOnly = nnx.merge(graph, state)
    start, size = prompt.shape[1], prompt.shape[1] + num_tokens
    window = min(size, model.config.max_length)

    def recompute(text: Array, position: Array, kept: None) -> tuple[Array, None]:
        first = jnp.maximum(position - window, 0)
        features = model.features(jax.lax.dynamic_slice_in_dim(text, first, window, axis=1))
        last = jax.lax.dynamic_slice_in_dim(features, position - 1 - first, 1, axis=1)
        return model.logits(last)[:, 0], kept

    text, ended = _blank(prompt, num_tokens, end_id), jnp.zeros(prompt.shape[0], bool)
    write = functools.partial(_write, choose=choose, key=key, end_id=end_id)
    if cache == "on" and start <= window:
        kept = model.start(prompt.shape[0], length=window)
        if start > 1:
            kept = model.step(prompt[:, :-1], kept).cache
        stop = min(window + 1, size)  # a token at `window` is still chosen by the positions 0 .. window - 1
        text, ended = write(_step(model), text, ended, kept, start=start, stop=stop)
        start = stop
    return write(recompute, text, ended, None, start=start, stop=size)[0]


@functools.partial(jax.jit, static_argnames=("graph", "length", "cache"))
def _translate(
    graph: nnx.GraphDef,
    state: Any,
    source: Int[Array, "B S"],
    source_mask: Bool[Array, "#B 1 #T S"],
    start_id: Int[Array, ""],
    end_id: Int[Array, ""],
    *,
    length: int,
    cache: UseCache,
) -> Int[Array, "B length"]:
    model: EncoderDecoder = nnx.merge(graph, state)

    def recompute(text: Array, position: Array, memory: Array) -> tuple[Array, Array]:
        features = model.decode(text, memory, source_mask, causal_mask(length))
        last = jax.lax.dynamic_slice_in_dim(features, position - 1, 1, axis=1)
        return model.logits(last)[:, 0], memory

    start = jnp.full((source.shape[0], 1), start_id, jnp.int32)
    text, ended = _blank(start, length - 1, end_id), jnp.zeros(source.shape[0], bool)
    write = functools.partial(_write, choose=_most_likely, key=None, end_id=end_id, start=1, stop=length)
    if cache == "on":
        return write(_step(model), text, ended, model.start(source, source_mask, length=length))[0]
    return write(recompute, text, ended, model.encode(source, source_mask))[0]


def _step(model: DecoderOnly | EncoderDecoder) -> NextLogits:
    """The logits by reading the last token, all others being in the cache."""

    def step(text: Array, position: Array, kept: Cache) -> tuple[Array, Cache]:
        return model.step(jax.lax.dynamic_slice_in_dim(text, position - 1, 1, axis=1), kept)

    return step


def _blank(beginning: Int[Array, "B P"], num_tokens: int, end_id: Int[Array, ""]) -> Int[Array, "B P+num_tokens"]:
    """``beginning``, and room for more tokens, which ends the rows already should the loop end early."""
    rest = jnp.full((beginning.shape[0], num_tokens), jnp.maximum(end_id, 0), jnp.int32)
    return jnp.concatenate([beginning, rest], axis=1)


def _write(
    next_logits: NextLogits,
    text: Int[Array, "B size"],
    ended: Bool[Array, "B"],
    kept: Any,
    *,
    start: int,
    stop: int,
    choose: Choose,
    key: PRNGKeyArray | None,
    end_id: Int[Array, ""],
) -> tuple[Int[Array, "B size"], Bool[Array, "B"]]:
    """Writes the positions from ``start`` to before ``stop``, or to where every row has ended."""

    def goes_on(carry: tuple[Array, Array, Array, Any]) -> Bool[Array, ""]:
        position, _, ended, _ = carry
        return (position < stop) & ~jnp.all(ended)

    def write(carry: tuple[Array, Array, Array, Any]) -> tuple[Array, Array, Array, Any]:
        position, text, ended, kept = carry
        logits, kept = next_logits(text, position, kept)
        token = choose(logits, None if key is None else jax.random.fold_in(key, position))
        token = jnp.where(ended, end_id, token)
        return position + 1, text.at[:, position].set(token), ended | (token == end_id), kept

    _, text, ended, _ = jax.lax.while_loop(goes_on, write, (jnp.int32(start), text, ended, kept))
    return text, ended


def _require_cache(cache: str) -> None:
    if cache not in get_args(UseCache):
        raise ValueError(f"cache must be 'on' or 'off', got {cache!r}.")
