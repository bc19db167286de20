"""PyTorch: plain modules and `torch.optim.Adam`, as eager as it comes or with all that makes it faster."""

import contextlib
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from benchmarks import torch_translation
from benchmarks.rows import LEARNING_RATE, PAD_ID, START_ID, Row, make_batch
from benchmarks.torch_gpt import GPT, AttentionKind
from torch_reference import decoder_only, encoder_decoder


@dataclasses.dataclass(frozen=True)
class Variant:
    """How a train step is taken; the defaults are PyTorch's own.

    Attributes:
        attention: products, or `F.scaled_dot_product_attention`.
        fused_adam: Adam in one pass over the parameters.
        compiled: the loss under `torch.compile`.
        autocast: the loss under `torch.autocast` with bfloat16.
    """

    attention: AttentionKind = "products"
    fused_adam: bool = False
    compiled: Literal["no", "loss"] = "no"
    autocast: Literal["no", "bfloat16"] = "no"


VARIANTS = {
    "eager": Variant(),
    "fused": (fused := Variant(attention="kernel", fused_adam=True)),
    "compiled": dataclasses.replace(fused, compiled="loss"),
    "autocast": dataclasses.replace(fused, autocast="bfloat16"),
    "autocast-compiled": dataclasses.replace(fused, compiled="loss", autocast="bfloat16"),
}


class Side:
    """A model and its optimizer. The eager one draws weights and writes them to a file for all the others."""

    def __init__(
        self, row: Row, *, weights: Path, seed: int, threads: int, variant: str = "eager", device: str = "cpu"
    ) -> None:
        torch.set_num_threads(threads)
        torch.manual_seed(seed)
        way, self._device = VARIANTS[variant], device
        module, loss = _build(row, seed=seed, attention=way.attention, device=device)
        self._module = module.eval()  # no dropout; no module here does anything else in train mode
        if variant == "eager":
            _write(module, weights)
        else:
            _read(module, weights)
        module.to(device)
        self._loss: Callable[[], torch.Tensor] = torch.compile(loss) if way.compiled == "loss" else loss
        self._context: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext
        if way.autocast == "bfloat16":
            self._context = lambda: torch.autocast(device, torch.bfloat16)
        self._optimizer = torch.optim.Adam(module.parameters(), lr=LEARNING_RATE, fused=way.fused_adam or None)

    def step(self) -> float:
        """Takes one step; the loss before it, in nats per token."""
        self._optimizer.zero_grad(set_to_none=True)
        with self._context():
            loss = self._loss()
        loss.backward()
        self._optimizer.step()
        return loss.item()

    def gradient_norm(self) -> float:
        """Of the latest step. Summed in float64: PyTorch's float32 norm of 12.8 million numbers is 4.5e-4 too small."""
        return nn.utils.get_total_norm(
            [p.grad.double() for p in self._module.parameters() if p.grad is not None]
        ).item()


class Translator:
    """The same for decoding: a step is a whole translation."""

    def __init__(self, row: Row, *, weights: Path, seed: int, threads: int, variant: str = "eager") -> None:
        del variant
        torch.set_num_threads(threads)
        torch.manual_seed(seed)
        table = encoder_decoder.PositionalEncoding(row.d_model, 0.0, max(row.length, row.source_length)).pe[0]
        self._module = torch_translation.Translator(
            vocab_size=row.vocab_size, table=table, d_ff=row.d_ff, num_heads=row.num_heads, num_layers=row.num_layers
        ).eval()
        arrays: dict[str, Any] = {name: tensor.numpy() for name, tensor in self._module.document_state().items()}
        np.savez(weights, **arrays)
        self._source = torch.from_numpy(make_batch(row, seed=seed).source).long()
        self._mask = (self._source != PAD_ID)[:, None, None, :]
        self._row = row

    def step(self) -> list[list[int]]:
        """The ids of the translations."""
        return self._module.translate(
            self._source, self._mask, start_id=START_ID, length=self._row.length, cache=self._row.reference_cache
        ).tolist()


def device_peak() -> int:
    """Bytes of a GPU."""
    return torch.cuda.max_memory_allocated()


def make_product(size: int, *, threads: int, variant: str = "eager") -> Callable[[], torch.Tensor]:
    """A product of two square float32 matrices."""
    del variant
    torch.set_num_threads(threads)
    left, right = torch.rand(2, size, size)
    return lambda: left @ right


def _write(module: nn.Module, weights: Path) -> None:
    state = module.published_state() if isinstance(module, GPT) else module.state_dict()
    arrays: dict[str, Any] = {name: tensor.detach().numpy() for name, tensor in state.items()}
    np.savez(weights, **arrays)


def _read(module: nn.Module, weights: Path) -> None:
    with np.load(weights) as stored:
        state = {name: torch.from_numpy(array) for name, array in stored.items()}
    if isinstance(module, GPT):
        module.load_published(state)
    else:
        module.load_state_dict(state)


def _build(
    row: Row, *, seed: int, attention: AttentionKind, device: str
) -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    """The module, and its loss on the batch. The documents' modules return probabilities; the loss is of their logits."""
    source, inputs, labels = (torch.from_numpy(array).long().to(device) for array in make_batch(row, seed=seed))
    sizes = dict(d_model=row.d_model, d_ff=row.d_ff)
    match row.model:
        case "gpt":
            heads = dict(num_heads=row.num_heads, num_layers=row.num_layers)
            gpt = GPT(vocab_size=row.vocab_size, length=row.length, **sizes, **heads, attention=attention)
            return gpt, lambda: _cross_entropy(gpt(inputs), labels)
        case "decoder-only":
            block = decoder_only.DecoderOnly(row.vocab_size, row.d_model, row.num_heads, row.length)
            attend = _attend_by_kernel if attention == "kernel" else lambda block, x: block.attend(x).merged

            def block_loss() -> torch.Tensor:
                embedded = block.input_embedding(inputs)
                features = block.block_output(attend(block, embedded), embedded)
                return _cross_entropy(block.output(features), labels)

            return block, block_loss
        case "encoder-decoder":
            transformer = encoder_decoder.make_standard_transformer(
                row.vocab_size, row.vocab_size, **sizes, h=row.num_heads, N=row.num_layers
            )
            if attention == "kernel":
                for module in transformer.modules():
                    if isinstance(module, encoder_decoder.MultiHeadedAttention):
                        module.attention = _mix_by_kernel
            source_mask = encoder_decoder.create_pad_mask(source, PAD_ID)
            causal = encoder_decoder.subsequent_mask(row.length).to(device)
            target_mask = encoder_decoder.create_pad_mask(inputs, PAD_ID) * causal

            def pair_loss() -> torch.Tensor:
                memory = transformer.encode(source, source_mask)
                features = transformer.decode(inputs, memory, source_mask, target_mask)
                return _cross_entropy(transformer.generator.proj(features), labels)

            return transformer, pair_loss
    raise ValueError(f"{row.model} is not trained here")


def _attend_by_kernel(block: decoder_only.DecoderOnly, x: torch.Tensor) -> torch.Tensor:
    """`block.attend(x).merged`."""
    query, key, value = (block.split_heads(project(x)) for project in (block.Wq, block.Wk, block.Wv))
    mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    return mixed.permute(0, 2, 1, 3).reshape(x.shape)


def _mix_by_kernel(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None = None,
    dropout: nn.Module | None = None,
) -> tuple[torch.Tensor, None]:
    """`MultiHeadedAttention.attention` without dropout, and without the weights, which the kernel never holds.

    The document fills masked scores with -1e9, the kernel with minus infinity: the same, as no row here is all padding.
    """
    del dropout
    return F.scaled_dot_product_attention(q, k, v, attn_mask=None if mask is None else mask.bool()), None


def _cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=PAD_ID)
