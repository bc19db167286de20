"""Watching the calls of a PyTorch module: every submodule's output, gradients that arrive there, masks of dropout."""

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np

from flax_transformer.parity.recording import BFLOAT16, Masks, activation_key, flatten, given_mask, require_all_used

if TYPE_CHECKING:
    import torch


class Watch:
    """What one forward pass, and the backward pass after it, leave behind."""

    def __init__(self, modules: "Mapping[str, torch.nn.Module]", dropout: Masks | None, *, gradients: bool) -> None:
        self.modules = modules
        self.activations: dict[str, np.ndarray] = {}
        self.gradients: dict[str, np.ndarray] = {}
        self.masks: dict[str, np.ndarray] = {}
        self._given = dropout
        self._with_gradients = gradients
        self._calls: Counter[str] = Counter()
        self._sites: Counter[str] = Counter()
        self._running: list[str] = []

    @contextlib.contextmanager
    def watching(self) -> "Iterator[None]":
        """Listens to every module, and stands in for PyTorch's dropout, while the context is open."""
        import torch.nn.functional as F  # noqa: N812  (its usual name)

        attention = F.scaled_dot_product_attention
        handles = []
        for path, module in self.modules.items():
            handles.append(module.register_forward_pre_hook(self._entering(path)))
            handles.append(module.register_forward_hook(self._leaving(path)))
        try:
            with (
                mock.patch.object(F, "dropout", self._dropout),
                mock.patch.object(F, "scaled_dot_product_attention", self._attention(attention)),
            ):
                yield
        finally:
            for handle in handles:
                handle.remove()
        require_all_used(self._given, len(self.masks))

    def _entering(self, path: str) -> Callable[..., None]:
        return lambda _module, _args: self._running.append(path)

    def _leaving(self, path: str) -> Callable[..., Any]:
        import torch

        def hook(_module: Any, _args: Any, output: Any) -> Any:
            self._running.pop()
            number = self._calls[path]
            self._calls[path] += 1
            if self._with_gradients:
                # A module may return its argument, or a tensor that it goes on using: an alias has a gradient of its own.
                output = _aliased(output)
            for suffix, tensor in flatten(output, torch.Tensor):
                key = activation_key(path, number, suffix)
                self.activations[key] = to_numpy(tensor)
                if self._with_gradients and tensor.requires_grad:
                    self.gradients[key] = np.zeros_like(self.activations[key])
                    tensor.register_hook(self._arriving(key))
            return output

        return hook

    def _arriving(self, key: str) -> "Callable[[torch.Tensor], None]":
        def hook(gradient: "torch.Tensor") -> None:
            self.gradients[key] = to_numpy(gradient)

        return hook

    def _dropout(self, input: "torch.Tensor", p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
        """``torch.nn.functional.dropout`` with the mask given, or drawn as it draws, and recorded."""
        import torch

        if not training or p == 0:
            return input
        path = self._running[-1] if self._running else ""
        key = activation_key(path, self._sites[path])
        self._sites[path] += 1
        mask = self._draw(key, input, p)
        self.masks[key] = mask
        # The arithmetic of torch.nn.functional.dropout: the noise is scaled first, then one product.
        noise = torch.from_numpy(mask).to(device=input.device, dtype=input.dtype).div_(1 - p)
        return input.mul_(noise) if inplace else input * noise

    def _draw(self, key: str, input: "torch.Tensor", p: float) -> np.ndarray:
        import torch

        if self._given is None:
            # The mask depends on the generator and the shape alone, so that ones show what would have been drawn.
            return to_numpy(torch.dropout(torch.ones_like(input), p, True)) != 0
        return given_mask(self._given, key, len(self.masks), tuple(input.shape))

    def _attention(self, original: Callable[..., Any]) -> Callable[..., Any]:
        import torch

        def attention(
            query: Any,
            key: Any,
            value: Any,
            attn_mask: Any = None,
            dropout_p: float = 0.0,
            is_causal: bool = False,
            scale: float | None = None,
            enable_gqa: bool = False,
        ) -> Any:
            """``scaled_dot_product_attention``, written out where it drops weights, so that its mask can be seen."""
            if dropout_p == 0:
                return original(query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa)
            if enable_gqa:
                raise ValueError(
                    "dropout inside scaled_dot_product_attention(enable_gqa=True) cannot be recorded; repeat the keys"
                )
            scores = query @ key.transpose(-2, -1) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
            if is_causal:
                attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
            if attn_mask is not None:
                hidden = attn_mask.dtype == torch.bool
                scores = scores.masked_fill(~attn_mask, -math.inf) if hidden else scores + attn_mask
            return self._dropout(scores.softmax(-1), dropout_p) @ value

        return attention


@contextlib.contextmanager
def unfused() -> "Iterator[None]":
    import torch

    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)


def _aliased(output: Any) -> Any:
    """``output`` with a view for each tensor of a tensor, tuple, list or dict; other containers as they are."""
    import torch

    if isinstance(output, torch.Tensor):
        return output.view_as(output) if output.requires_grad else output
    if type(output) in (tuple, list):
        return type(output)(_aliased(value) for value in output)
    if type(output) is dict:
        return {name: _aliased(value) for name, value in output.items()}
    return output


def to_tensor(array: np.ndarray) -> "torch.Tensor":
    import torch

    array = np.array(array, order="C")
    if BFLOAT16 is not None and array.dtype == BFLOAT16:  # NumPy takes None for float64
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array.astype(np.int64) if array.dtype.kind in "iu" else array)


def to_numpy(tensor: "torch.Tensor") -> np.ndarray:
    import torch

    # A copy: a later operation may work in place.
    tensor = tensor.detach().to("cpu", copy=True).contiguous()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(BFLOAT16)
    return tensor.numpy()
