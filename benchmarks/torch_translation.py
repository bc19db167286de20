"""The paper's encoder-decoder in plain eager PyTorch, with a key/value cache, as one writes it by hand to decode quickly.

Parameters have the encoder-decoder document's names, for which we have a weight table. No dropout, since every benchmark
leaves dropout out.
"""

import math
from typing import Literal

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

KeysAndValues = tuple[torch.Tensor, torch.Tensor]  # B N S H


class Attention(nn.Module):
    def __init__(self, d_model: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.linears = nn.ModuleList([nn.Linear(d_model, d_model, bias=False) for _ in range(4)])

    def keys_and_values(self, x: torch.Tensor) -> KeysAndValues:
        return self._split(self.linears[1](x)), self._split(self.linears[2](x))

    def forward(self, x: torch.Tensor, past: KeysAndValues, mask: torch.Tensor | None) -> torch.Tensor:
        mixed = F.scaled_dot_product_attention(self._split(self.linears[0](x)), *past, attn_mask=mask)
        return self.linears[3](mixed.transpose(1, 2).reshape(x.shape))

    def _split(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(*x.shape[:2], self.num_heads, -1).transpose(1, 2)


class FeedForward(nn.Module):
    def __init__(self, d_model: int, d_ff: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(d_model, d_ff)
        self.w2 = nn.Linear(d_ff, d_model)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.relu(self.w1(x)))


class AddAndNorm(nn.Module):
    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(d_model, eps=1e-6)

    def forward(self, x: torch.Tensor, change: torch.Tensor) -> torch.Tensor:
        return self.norm(x + change)


class EncoderLayer(nn.Module):
    def __init__(self, d_model: int, d_ff: int, num_heads: int) -> None:
        super().__init__()
        self.self_attn = Attention(d_model, num_heads)
        self.feed_forward = FeedForward(d_model, d_ff)
        self.sublayer = nn.ModuleList([AddAndNorm(d_model) for _ in range(2)])

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.sublayer[0](x, self.self_attn(x, self.self_attn.keys_and_values(x), mask))
        return self.sublayer[1](x, self.feed_forward(x))


class DecoderLayer(nn.Module):
    def __init__(self, d_model: int, d_ff: int, num_heads: int) -> None:
        super().__init__()
        self.self_attn = Attention(d_model, num_heads)
        self.src_attn = Attention(d_model, num_heads)
        self.feed_forward = FeedForward(d_model, d_ff)
        self.sublayer = nn.ModuleList([AddAndNorm(d_model) for _ in range(3)])

    def forward(
        self,
        x: torch.Tensor,
        text: KeysAndValues,
        text_mask: torch.Tensor | None,
        memory: KeysAndValues,
        memory_mask: torch.Tensor,
    ) -> torch.Tensor:
        x = self.sublayer[0](x, self.self_attn(x, text, text_mask))
        x = self.sublayer[1](x, self.src_attn(x, memory, memory_mask))
        return self.sublayer[2](x, self.feed_forward(x))


class Embedding(nn.Module):
    """Of ids B T that stand at ``first`` and after it."""

    def __init__(self, vocab_size: int, table: torch.Tensor) -> None:
        super().__init__()
        self.lut = nn.Embedding(vocab_size, table.shape[1])
        self.register_buffer("pe", table[None])
        self.pe: torch.Tensor

    def forward(self, ids: torch.Tensor, first: int = 0) -> torch.Tensor:
        return self.lut(ids) * math.sqrt(self.pe.shape[2]) + self.pe[:, first : first + ids.shape[1]]


class Translator(nn.Module):
    """Greedy translation, source ids B S -> target ids B length."""

    def __init__(self, *, vocab_size: int, table: torch.Tensor, d_ff: int, num_heads: int, num_layers: int) -> None:
        super().__init__()
        d_model = table.shape[1]
        self.encoder = nn.ModuleList([EncoderLayer(d_model, d_ff, num_heads) for _ in range(num_layers)])
        self._layers = [DecoderLayer(d_model, d_ff, num_heads) for _ in range(num_layers)]
        self.decoder = nn.ModuleList(self._layers)
        self.src_embed, self.tgt_embed = Embedding(vocab_size, table), Embedding(vocab_size, table)
        self.generator = nn.Linear(d_model, vocab_size, bias=False)

    @torch.inference_mode()
    def translate(
        self, source: torch.Tensor, mask: torch.Tensor, *, start_id: int, length: int, cache: Literal["on", "off"]
    ) -> torch.Tensor:
        """``cache="off"`` decodes the whole prefix anew for every token, as the document's ``autoregressive_infer``."""
        memory = self.src_embed(source)
        for layer in self.encoder:
            memory = layer(memory, mask)
        ids = torch.full((source.shape[0], length), start_id)
        if cache == "off":
            for position in range(length - 1):
                features = self._whole(ids[:, : position + 1], memory, mask)
                ids[:, position + 1] = self.generator(features[:, -1]).argmax(-1)
            return ids
        # Contiguous, and with room for the whole text: nothing is copied as it grows.
        kept = [tuple(part.contiguous() for part in layer.src_attn.keys_and_values(memory)) for layer in self._layers]
        room = [tuple(part.new_empty((*part.shape[:2], length, part.shape[3])) for part in pair) for pair in kept]
        for position in range(length - 1):
            x = self.tgt_embed(ids[:, position : position + 1], position)
            for layer, text, past in zip(self._layers, room, kept, strict=True):
                for part, new in zip(text, layer.self_attn.keys_and_values(x), strict=True):
                    part[:, :, position : position + 1] = new
                x = layer(x, tuple(part[:, :, : position + 1] for part in text), None, past, mask)
            ids[:, position + 1] = self.generator(x[:, 0]).argmax(-1)
        return ids

    def _whole(self, ids: torch.Tensor, memory: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        causal = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
        x = self.tgt_embed(ids)
        for layer in self._layers:
            text, past = layer.self_attn.keys_and_values(x), layer.src_attn.keys_and_values(memory)
            x = layer(x, text, causal, past, mask)
        return x

    def document_state(self) -> dict[str, torch.Tensor]:
        """`state_dict()` under the document's names."""
        replacements = {
            "encoder.": "encoder.layers.",
            "decoder.": "decoder.layers.",
            "norm.weight": "norm.gamma",
            "norm.bias": "norm.beta",
            "embed.lut": "embed.0.lut",
            "embed.pe": "embed.1.pe",
            "generator.": "generator.proj.",
        }
        state = {}
        for name, tensor in self.state_dict().items():
            for old, new in replacements.items():
                name = name.replace(old, new)
            state[name] = tensor
        return state
