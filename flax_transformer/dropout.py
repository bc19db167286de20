"""Dropout as an argument, not a mode: a call that is given no ``dropout`` is deterministic.

A model holds no random state. Who wants dropout passes a source of masks with the call; the sites of the model ask it in
execution order, which is the order in which PyTorch draws from its generator. Another source may therefore replay masks
that another framework drew.
"""

import abc
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int


class DropoutSource(abc.ABC):
    """Says, site after site of one forward pass, which elements are kept."""

    @abc.abstractmethod
    def keep(self, shape: tuple[int, ...], rate: float) -> Bool[Array, "..."]:
        """The mask of the next site: True with probability ``1 - rate``. The first axis of ``shape`` is B."""

    def of_layers(self, count: int, sites: int) -> Callable[[Int[Array, ""]], "DropoutSource"]:
        """Sources of the next ``count`` layers, each of so many sites, by the number of the layer, which may be traced: for
        a loop over layers, whose body is run once for all of them. This source goes on after the last.

        Raises:
            ValueError: the source must be asked site after site.
        """
        raise ValueError(
            f"{type(self).__name__} gives its masks site after site, and scanned layers are run once for all; take a model "
            'with layers="unrolled", or RandomDropout'
        )


class RandomDropout(DropoutSource):
    """Independent masks from one key per example.

    The mask of a site is drawn from ``fold_in(keys[b], site)`` for each example b alone, so it does not depend on how the
    batch is laid over devices. Use one object for one forward pass: it counts the sites.

    Args:
        keys: (B,) of ``jax.random.key``s, one per example.
        first_site: the number of its first site, which may be traced.
    """

    def __init__(self, keys: Array, *, first_site: int | Int[Array, ""] = 0) -> None:
        if not jnp.issubdtype(keys.dtype, jax.dtypes.prng_key) or keys.ndim != 1:
            raise ValueError(
                f"RandomDropout needs one jax.random.key per example, shape (B,), got {keys.dtype} of shape {keys.shape}; "
                "split one key with jax.random.split(key, batch_size)"
            )
        self._keys = keys
        self._site = first_site

    def keep(self, shape: tuple[int, ...], rate: float) -> Bool[Array, "..."]:
        if shape[0] != self._keys.shape[0]:
            raise ValueError(
                f"dropout has {self._keys.shape[0]} keys for a batch of {shape[0]}; pass one key per example"
            )
        site = self._site
        self._site += 1
        return jax.vmap(lambda key: jax.random.bernoulli(jax.random.fold_in(key, site), 1 - rate, shape[1:]))(
            self._keys
        )

    def of_layers(self, count: int, sites: int) -> Callable[[Int[Array, ""]], DropoutSource]:
        first = self._site
        self._site = first + count * sites
        return lambda layer: RandomDropout(self._keys, first_site=first + layer * sites)


class _CountedSites(DropoutSource):
    """Keeps everything and counts how often it was asked."""

    def __init__(self) -> None:
        self.count = 0

    def keep(self, shape: tuple[int, ...], rate: float) -> Bool[Array, "..."]:
        del rate
        self.count += 1
        return jnp.ones(shape, bool)


def count_sites(call: Callable[[DropoutSource], Any]) -> int:
    """How many masks a call asks its source for. Traces the call and computes nothing."""
    source = _CountedSites()
    jax.eval_shape(lambda: call(source))
    return source.count


class ReplayedDropout(DropoutSource):
    """Masks that were drawn elsewhere, such as by PyTorch (``parity.record_torch(mode="train").dropout``), one a site.

    Use one object for one forward pass.

    Args:
        masks: in the order in which the sites come; True = kept.
    """

    def __init__(self, masks: Iterable[np.ndarray]) -> None:
        self._masks = [np.asarray(mask) != 0 for mask in masks]
        self._site = 0

    def keep(self, shape: tuple[int, ...], rate: float) -> Bool[Array, "..."]:
        del rate
        found = self._masks[self._site].shape if self._site < len(self._masks) else "none, for there are no more"
        if found != shape:
            raise ValueError(
                f"dropout site {self._site} needs a mask of shape {shape}, got {found}; masks are replayed in the order of "
                "drawing, by a model of the same sites and a batch of the same size"
            )
        mask = jnp.asarray(self._masks[self._site])
        self._site += 1
        return mask


class RecordedDropout(DropoutSource):
    """Another source's masks, kept in ``masks``, so that another framework can replay them."""

    def __init__(self, source: DropoutSource) -> None:
        self.masks: list[Array] = []
        self._source = source

    def keep(self, shape: tuple[int, ...], rate: float) -> Bool[Array, "..."]:
        self.masks.append(self._source.keep(shape, rate))
        return self.masks[-1]


def require_source(dropout: Any) -> DropoutSource | None:
    """Raises ValueError if what a model's call is given as ``dropout`` is neither a source of masks nor None."""
    if dropout is None or isinstance(dropout, DropoutSource):
        return dropout
    got = repr(dropout) if isinstance(dropout, int | float) else type(dropout).__name__
    raise ValueError(
        f"dropout= takes a source of masks, got {got}; pass RandomDropout("
        "jax.random.split(key, batch_size)) to train, or None. The rate is a field of the model's configuration"
    )


class Dropout(nnx.Module):
    """y = x * keep / (1 - rate), keep ~ Bernoulli(1 - rate); y = x without a source or where the rate is 0.

    As ``torch.nn.Dropout`` in training mode, whose arithmetic (scaling the mask, then one product) it follows.
    """

    def __init__(self, rate: float) -> None:
        self.rate = rate

    def __call__(self, x: Float[Array, "B *rest"], source: DropoutSource | None) -> Float[Array, "B *rest"]:
        if source is None or self.rate == 0:
            return x
        keep = source.keep(x.shape, self.rate)
        return x * (keep.astype(x.dtype) / (1 - self.rate))
