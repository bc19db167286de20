"""The decoder-only document: a GPT-style model of a single block, with tokenizing and sampling of batches.

Source: a Chinese tutorial that writes the model as one script. The script is cut into functions and a class where
its sections are; names, order of construction and order of arithmetic are the script's, its mistakes included, and
only comments and docstrings are ours. For equal random draws call things in the script's order: `torch.manual_seed`,
then `sample_batch`, then `DecoderOnly`.

Axes: B batch, T position (always `context_len` of them), N heads, H head size, D model, V vocabulary.

`python -m torch_reference.decoder_only` walks through the document on real text.
"""

from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F


def split_tokens(tokenized_txt: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Section 3: the first 90 % of the ids train, the rest validate."""
    train_txt = tokenized_txt[: int(0.9 * len(tokenized_txt))]
    val_txt = tokenized_txt[int(0.9 * len(tokenized_txt)) :]
    return train_txt, val_txt


def sample_batch(data: torch.Tensor, batch_size: int, context_len: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Section 4: `batch_size` random windows of the ids `data` and their labels, which sit one id later.

    Returns x and y, both (batch_size, context_len); one draw of `torch.randint` from the global generator.
    """
    idxs = torch.randint(0, high=len(data) - context_len, size=(batch_size,))
    x_batch = torch.stack([data[idx : idx + context_len] for idx in idxs])
    y_batch = torch.stack([data[idx + 1 : idx + context_len + 1] for idx in idxs])
    return x_batch, y_batch


def position_column(context_len: int) -> torch.Tensor:
    """Section 6, `position`: 0, 1, ... as a float32 column, (context_len, 1)."""
    return torch.arange(0, context_len, dtype=torch.float).unsqueeze(1)


def even_features(d_model: int) -> torch.Tensor:
    """Section 6, `i`: 0, 2, 4, ... below d_model, the 2i of the formula."""
    return torch.arange(0, d_model, 2)


def position_embedding(context_len: int, d_model: int) -> torch.Tensor:
    """Section 6: sin and cos of `pos / 10000^(i / d_model)` in turn, (context_len, d_model).

    The position is divided by a power. The encoder-decoder document multiplies by an exponential instead, so the two
    tables differ in their last bits.
    """
    table = torch.zeros(context_len, d_model)
    position = position_column(context_len)
    i = even_features(d_model)
    temp = torch.pow(10000, i / d_model)
    table[:, 0::2] = torch.sin(position / temp)
    table[:, 1::2] = torch.cos(position / temp)
    return table


@dataclass(frozen=True)
class Attention:
    """What section 7 prints on its way through attention, under the script's names where it has one.

    masked_scores  B N T T, -inf above the diagonal
    weights        B N T T, the script's `output` after the softmax
    value          B N T H
    A              B N T H, weights @ value
    merged         B T D, the heads of A side by side
    """

    masked_scores: torch.Tensor
    weights: torch.Tensor
    value: torch.Tensor
    A: torch.Tensor
    merged: torch.Tensor


class DecoderOnly(nn.Module):
    """Sections 5 to 8: ids (B, context_len) -> probabilities of the next id, B T V.

    One block and nothing above it: attention, residual, norm, feed-forward, residual, and the same norm again. No
    dropout. The script creates its output projection in the expression that uses it, so it has no name there; here it
    is `output`. The position table moves and changes precision with the module, but is no entry of its state.
    """

    position_embedding: torch.Tensor

    def __init__(self, vocab_size: int, d_model: int = 64, num_heads: int = 4, context_len: int = 16):
        super().__init__()
        self.d_model = d_model
        self.num_heads = num_heads
        self.context_len = context_len
        self.embeddings = nn.Embedding(vocab_size, d_model)
        self.register_buffer("position_embedding", position_embedding(context_len, d_model), persistent=False)
        self.Wq = nn.Linear(d_model, d_model)
        self.Wk = nn.Linear(d_model, d_model)
        self.Wv = nn.Linear(d_model, d_model)
        self.Wo = nn.Linear(d_model, d_model)
        self.layer_norm = nn.LayerNorm(d_model)
        self.ffn = nn.Sequential(nn.Linear(d_model, d_model * 4), nn.ReLU(), nn.Linear(d_model * 4, d_model))
        self.output = nn.Linear(d_model, vocab_size)

    def input_embedding(self, ids: torch.Tensor) -> torch.Tensor:
        """Sections 5 and 6, `x_input`: the row of every id plus the row of its position, B T -> B T D."""
        return self.embeddings(ids) + self.position_embedding

    def split_heads(self, x: torch.Tensor) -> torch.Tensor:
        """Section 8.2: B T D -> B N T H."""
        return x.view(x.size(0), self.context_len, self.num_heads, self.d_model // self.num_heads).permute(0, 2, 1, 3)

    def attend(self, X: torch.Tensor) -> Attention:
        """Sections 8.1 to 8.6: causal attention of X to itself, before the output projection."""
        Q = K = V = X
        query = self.split_heads(self.Wq(Q))
        key = self.split_heads(self.Wk(K))
        value = self.split_heads(self.Wv(V))
        scores = query @ key.transpose(-2, -1)
        head_dim = self.d_model // self.num_heads
        scores = scores / head_dim**0.5
        mask = torch.triu(torch.ones(self.context_len, self.context_len, device=X.device), diagonal=1).bool()
        masked_scores = scores.masked_fill(mask, float("-inf"))
        weights = F.softmax(masked_scores, -1)
        A = weights @ value
        merged = A.permute(0, 2, 1, 3).reshape(X.size(0), self.context_len, self.d_model)
        return Attention(masked_scores, weights, value, A, merged)

    def block_output(self, merged: torch.Tensor, X: torch.Tensor) -> torch.Tensor:
        """Sections 8.7 and 8.8 up to the second norm, B T D -> B T D."""
        output = self.Wo(merged) + X
        output_layernorm = self.layer_norm(output)
        output = self.ffn(output_layernorm) + output_layernorm
        return self.layer_norm(output)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Ids (B, context_len) -> probabilities (B, context_len, vocab_size).

        Raises ValueError for any other shape of `ids`: the script fixes the length.
        """
        if ids.ndim != 2 or ids.shape[1] != self.context_len:
            raise ValueError(
                f"ids must have shape (B, {self.context_len}), since the script fixes the length at context_len; "
                f"got {tuple(ids.shape)}; cut the rows to that length, or construct DecoderOnly with their context_len"
            )
        X = self.input_embedding(ids)
        output = self.block_output(self.attend(X).merged, X)
        return F.softmax(self.output(output), -1)


if __name__ == "__main__":
    from torch_reference.walks.decoder_only import main

    raise SystemExit(main())
