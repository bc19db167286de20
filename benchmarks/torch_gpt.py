"""A GPT-2 in plain PyTorch, as one writes it by hand; no dropout, since every benchmark leaves dropout out."""

import math
from collections.abc import Mapping
from typing import Literal

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

AttentionKind = Literal["products", "kernel"]


class Attention(nn.Module):
    """Causal self-attention, query, key and value in one projection; `kernel` is `F.scaled_dot_product_attention`."""

    causal: torch.Tensor

    def __init__(self, d_model: int, num_heads: int, length: int, kind: AttentionKind) -> None:
        super().__init__()
        self.kind = kind
        self.num_heads = num_heads
        self.c_attn = nn.Linear(d_model, 3 * d_model)
        self.c_proj = nn.Linear(d_model, d_model)
        self.register_buffer("causal", torch.ones(length, length).tril().bool(), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        split = (batch, length, self.num_heads, width // self.num_heads)
        query, key, value = (part.view(split).transpose(1, 2) for part in self.c_attn(x).split(width, dim=-1))
        if self.kind == "kernel":
            mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        else:
            scores = query @ key.transpose(-2, -1) / math.sqrt(split[-1])
            mixed = scores.masked_fill(~self.causal[:length, :length], -math.inf).softmax(dim=-1) @ value
        return self.c_proj(mixed.transpose(1, 2).reshape(x.shape))


class FeedForward(nn.Module):
    def __init__(self, d_model: int, d_ff: int) -> None:
        super().__init__()
        self.c_fc = nn.Linear(d_model, d_ff)
        self.c_proj = nn.Linear(d_ff, d_model)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))


class Block(nn.Module):
    def __init__(self, d_model: int, d_ff: int, num_heads: int, length: int, kind: AttentionKind) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(d_model)
        self.attn = Attention(d_model, num_heads, length, kind)
        self.ln_2 = nn.LayerNorm(d_model)
        self.mlp = FeedForward(d_model, d_ff)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """Ids B T -> logits B T V, the output projection being the embedding table."""

    def __init__(
        self,
        *,
        vocab_size: int,
        d_model: int,
        d_ff: int,
        num_heads: int,
        num_layers: int,
        length: int,
        attention: AttentionKind,
    ) -> None:
        super().__init__()
        embedding = nn.Embedding(vocab_size, d_model)
        blocks = [Block(d_model, d_ff, num_heads, length, attention) for _ in range(num_layers)]
        self.transformer = nn.ModuleDict(
            dict(
                wte=embedding,
                wpe=nn.Embedding(length, d_model),
                h=nn.ModuleList(blocks),
                ln_f=nn.LayerNorm(d_model),
            )
        )
        self.lm_head = nn.Linear(d_model, vocab_size, bias=False)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)
        self.lm_head.weight = embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        parts = self.transformer
        x = parts["wte"](ids) + parts["wpe"](torch.arange(ids.shape[1], device=ids.device))
        for block in parts["h"]:  # pyright: ignore[reportGeneralTypeIssues]
            x = block(x)
        return self.lm_head(parts["ln_f"](x))

    def published_state(self) -> dict[str, torch.Tensor]:
        """`state_dict()` as GPT-2 is published: the matrices of the blocks are (in, out) there."""
        return _transposed(self.state_dict())

    def load_published(self, state: Mapping[str, torch.Tensor]) -> None:
        self.load_state_dict(_transposed(state))


def _transposed(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.T if tensor.ndim == 2 and ".h." in name else tensor for name, tensor in state.items()}
