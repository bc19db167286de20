"""Attention by the kernel of the platform that a program is compiled for: weights are never in memory.

    TPU     the Pallas kernel that JAX ships (Dao et al. 2022, arXiv:2205.14135)
    GPU     cuDNN's
    others  `jax.nn.dot_product_attention`, which holds the weights

A kernel is one program of one device. Where a program is split over a mesh (`over_mesh`), each device runs it on its own
examples and heads.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Bool, Float

Pattern = Literal["any", "causal", "keys"]
"""What a mask is known to be: anything; exactly `masks.causal_mask(T)`; one that says the same of a key to every query."""

_BLOCKS = (512, 256, 128)  # rows of a tile of the TPU's kernel, which must divide T and S
_MESH: list[tuple[Mesh, tuple[str, ...], str]] = []


@contextlib.contextmanager
def over_mesh(mesh: Mesh, *, examples: tuple[str, ...], heads: str) -> Iterator[None]:
    """While a program is traced that the compiler is to split over a mesh: examples and heads over its axes."""
    _MESH.append((mesh, examples, heads))
    try:
        yield
    finally:
        _MESH.pop()


def obstacle(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S N H"],
    *,
    pattern: Pattern,
    drops: bool,
    precision: jax.lax.Precision,
) -> str | None:
    """Why a kernel cannot take the place of the plain products; None: it can.

    Args:
        pattern: of the mask.
        drops: whether attention weights are dropped in this call.
        precision: of products.
    """
    if drops:
        return "attention_dropout drops weights, which a kernel never holds; set attention_dropout to 0"
    if pattern == "any":
        return "a kernel knows the causal mask and masks of keys, and this one is neither"
    if any(length % _BLOCKS[-1] for length in (query.shape[1], key.shape[1])):
        return f"sequences must be a multiple of {_BLOCKS[-1]} long, got {query.shape[1]} and {key.shape[1]}"
    if query.dtype != jnp.bfloat16 and precision != jax.lax.Precision.DEFAULT:
        return f"kernels multiply in bfloat16, and precision {precision.name.lower()} asks for more"
    return None


def flash_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S N H"],
    value: Float[Array, "B S N H"],
    *,
    mask: Bool[Array, "#B 1 #T #S"] | None,
    pattern: Pattern,
) -> Float[Array, "B T N H"]:
    """softmax(q k^T / sqrt(H)) v for a mask of a known pattern; call it where `obstacle` finds none.

    The backward pass takes the forward one again and keeps nothing of it but query, key and value. A query that may attend
    to no key attends to all equally on a TPU; on a GPU it is cuDNN's to say.
    """
    keys = None if pattern == "causal" or mask is None else jnp.broadcast_to(mask[:, 0, 0], key.shape[:2])
    attend = functools.partial(_attend, pattern == "causal")
    if not _MESH:
        return attend(query, key, value, keys)
    mesh, examples, heads = _MESH[-1]
    spread = heads if query.shape[2] % mesh.shape[heads] == 0 else None
    rows = PartitionSpec(examples, None, spread, None)
    arguments = (query, key, value) if keys is None else (query, key, value, keys)
    # Mosaic kernels say nothing of what varies over a mesh, so it cannot be checked.
    return jax.shard_map(
        lambda q, k, v, keys=None: attend(q, k, v, keys),
        mesh=mesh,
        in_specs=(rows, rows, rows, PartitionSpec(examples, None))[: len(arguments)],
        out_specs=rows,
        check_vma=False,
    )(*arguments)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(causal: bool, query: Array, key: Array, value: Array, keys: Array | None) -> Array:
    return _dispatch(causal, query, key, value, keys)


def _forward(causal: bool, query: Array, key: Array, value: Array, keys: Array | None) -> tuple[Array, tuple]:
    return _dispatch(causal, query, key, value, keys), (query, key, value, keys)


def _backward(causal: bool, kept: tuple, gradient: Array) -> tuple[Array, Array, Array, None]:
    *inputs, keys = kept

    # The pullback is taken inside each branch: taken of all, every branch would hold what the others keep for it.
    def pulled(kernel):
        def pull(query: Array, key: Array, value: Array, gradient: Array) -> tuple[Array, Array, Array]:
            return jax.vjp(lambda *inputs: kernel(causal, *inputs, keys), query, key, value)[1](gradient)

        return pull

    return *_by_platform(pulled, *inputs, gradient), None


_attend.defvjp(_forward, _backward)


def _dispatch(causal: bool, query: Array, key: Array, value: Array, keys: Array | None) -> Array:
    def bound(kernel):
        return lambda *inputs: kernel(causal, *inputs, keys)

    return _by_platform(bound, query, key, value)


def _by_platform(bind: Callable[[Any], Callable[..., Any]], *arguments: Array) -> Any:
    """The kernel of the platform that this is compiled for, which need not be one that is here."""
    kernels = {"tpu": _on_tpu, "default": _elsewhere}
    if jax.default_backend() == "gpu":  # all of them are traced, and cuDNN's wants to be there
        kernels["cuda"] = _on_gpu
    return jax.lax.platform_dependent(*arguments, **{name: bind(kernel) for name, kernel in kernels.items()})


def _on_tpu(causal: bool, query: Array, key: Array, value: Array, keys: Array | None) -> Array:
    from jax.experimental.pallas.ops.tpu import flash_attention as tpu  # takes its time, and only TPUs need it

    rows, columns = (next(b for b in _BLOCKS if length % b == 0) for length in (query.shape[1], key.shape[1]))
    blocks = tpu.BlockSizes(
        block_q=rows,
        block_k_major=columns,
        block_k=columns,
        block_b=1,
        block_q_major_dkv=rows,
        block_k_major_dkv=columns,
        block_k_dkv=columns,
        block_q_dkv=rows,
        block_k_major_dq=columns,
        block_k_dq=columns,
        block_q_dq=rows,
    )
    segments = None
    if keys is not None:  # whoever has the same number sees each other
        segments = tpu.SegmentIds(jnp.ones(query.shape[:2], jnp.int32), keys.astype(jnp.int32))
    heads_first = (x.swapaxes(1, 2) for x in (query, key, value))
    scale = 1.0 / math.sqrt(query.shape[-1])
    mixed = tpu.flash_attention(*heads_first, None, segments, causal=causal, sm_scale=scale, block_sizes=blocks)
    return mixed.swapaxes(1, 2)


def _on_gpu(causal: bool, query: Array, key: Array, value: Array, keys: Array | None) -> Array:
    narrow = (x.astype(jnp.bfloat16) for x in (query, key, value))
    mixed = jax.nn.dot_product_attention(*narrow, mask=_as_mask(keys), is_causal=causal, implementation="cudnn")
    return mixed.astype(query.dtype)


def _elsewhere(causal: bool, query: Array, key: Array, value: Array, keys: Array | None) -> Array:
    return jax.nn.dot_product_attention(query, key, value, mask=_as_mask(keys), is_causal=causal, implementation="xla")


def _as_mask(keys: Array | None) -> Array | None:
    return None if keys is None else keys[:, None, None, :]
