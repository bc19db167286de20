"""PyTorch eager: plain modules, `torch.optim.Adam`, one step after another."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from benchmarks import torch_translation
from benchmarks.rows import LEARNING_RATE, PAD_ID, START_ID, Row, make_batch
from benchmarks.torch_gpt import GPT
from torch_reference import decoder_only, encoder_decoder


class Side:
    """A model with fresh weights, which it writes to a file for the other side, and its optimizer."""

    def __init__(self, row: Row, *, weights: Path, seed: int, threads: int) -> None:
        torch.set_num_threads(threads)
        torch.manual_seed(seed)
        module, self._loss = _build(row, seed=seed)
        self._module = module.eval()  # no dropout; no module here does anything else in train mode
        state = module.published_state() if isinstance(module, GPT) else module.state_dict()
        arrays: dict[str, Any] = {name: tensor.detach().numpy() for name, tensor in state.items()}
        np.savez(weights, **arrays)
        self._optimizer = torch.optim.Adam(module.parameters(), lr=LEARNING_RATE)

    def step(self) -> float:
        """Takes one step; the loss before it, in nats per token."""
        self._optimizer.zero_grad(set_to_none=True)
        loss = self._loss()
        loss.backward()
        self._optimizer.step()
        return loss.item()

    def gradient_norm(self) -> float:
        """Of the latest step."""
        return nn.utils.get_total_norm([p.grad for p in self._module.parameters() if p.grad is not None]).item()


class Translator:
    """The same for decoding: a step is a whole translation."""

    def __init__(self, row: Row, *, weights: Path, seed: int, threads: int) -> None:
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


def make_product(size: int, *, threads: int) -> Callable[[], torch.Tensor]:
    """A product of two square float32 matrices."""
    torch.set_num_threads(threads)
    left, right = torch.rand(2, size, size)
    return lambda: left @ right


def _build(row: Row, *, seed: int) -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    """The module, and its loss on the batch. The documents' modules return probabilities; the loss is of their logits."""
    source, inputs, labels = (torch.from_numpy(array).long() for array in make_batch(row, seed=seed))
    sizes = dict(d_model=row.d_model, d_ff=row.d_ff)
    match row.model:
        case "gpt":
            heads = dict(num_heads=row.num_heads, num_layers=row.num_layers)
            gpt = GPT(vocab_size=row.vocab_size, length=row.length, **sizes, **heads)
            return gpt, lambda: _cross_entropy(gpt(inputs), labels)
        case "decoder-only":
            block = decoder_only.DecoderOnly(row.vocab_size, row.d_model, row.num_heads, row.length)

            def block_loss() -> torch.Tensor:
                embedded = block.input_embedding(inputs)
                features = block.block_output(block.attend(embedded).merged, embedded)
                return _cross_entropy(block.output(features), labels)

            return block, block_loss
        case "encoder-decoder":
            transformer = encoder_decoder.make_standard_transformer(
                row.vocab_size, row.vocab_size, **sizes, h=row.num_heads, N=row.num_layers
            )
            source_mask = encoder_decoder.create_pad_mask(source, PAD_ID)
            target_mask = encoder_decoder.create_pad_mask(inputs, PAD_ID) * encoder_decoder.subsequent_mask(row.length)

            def pair_loss() -> torch.Tensor:
                memory = transformer.encode(source, source_mask)
                features = transformer.decode(inputs, memory, source_mask, target_mask)
                return _cross_entropy(transformer.generator.proj(features), labels)

            return transformer, pair_loss
    raise ValueError(f"{row.model} is not trained here")


def _cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=PAD_ID)
