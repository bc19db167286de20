"""The encoder-decoder document: the full Transformer, its masks, generator and greedy inference.

Source: part six, the last, of a Chinese tutorial series that builds the Transformer by hand. Code, names, order of
construction and order of arithmetic are the document's; only comments and docstrings are ours. The document's
mistakes are kept, and a docstring says where one sits. Every mask has 1 or True where a query may attend.

Axes: B batch, T target or query, S source or key, D model, V vocabulary.

`python -m torch_reference.encoder_decoder` walks through the document on real sentences.
"""

import copy
import math

import torch
import torch.nn as nn


class Generator(nn.Module):
    """Section 1.4, and word for word again in section 3: `softmax(x W + b)`, B T D -> B T V.

    It returns probabilities; the logits exist only as the output of `proj`.
    """

    def __init__(self, d_model, vocab_size):
        super().__init__()
        self.proj = nn.Linear(d_model, vocab_size)

    def forward(self, x):
        return torch.softmax(self.proj(x), dim=-1)


def subsequent_mask(size):
    """Section 2: the causal mask, float32 of shape (1, size, size), 1 on and below the diagonal."""
    mask = torch.ones(1, size, size)
    return torch.tril(mask)


def create_pad_mask(x, pad_idx=0):
    """Section 2: ids of shape (B, S) -> bool of shape (B, 1, S), False where the id is `pad_idx`.

    `&` of this mask and `subsequent_mask` raises, one being bool and the other float32; their product is float32.
    """
    return (x != pad_idx).unsqueeze(-2)


def clones(module, N):
    """Section 3: a list that holds `module` itself N times; despite the name, nothing is copied."""
    return nn.ModuleList([module for _ in range(N)])


class LayerNorm(nn.Module):
    """Section 3: `gamma * (x - mean) / (std + eps) + beta` with the standard deviation over n - 1, eps outside it."""

    def __init__(self, features, eps=1e-6):
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(features))
        self.beta = nn.Parameter(torch.zeros(features))
        self.eps = eps

    def forward(self, x):
        mean = x.mean(-1, keepdim=True)
        std = x.std(-1, keepdim=True)
        return self.gamma * (x - mean) / (std + self.eps) + self.beta


class SublayerConnection(nn.Module):
    """Section 3: `norm(x + dropout(sublayer(norm(x))))`, normalised before and after by the same norm."""

    def __init__(self, size, dropout):
        super().__init__()
        self.norm = LayerNorm(size)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, sublayer):
        return self.norm(x + self.dropout(sublayer(self.norm(x))))


class MultiHeadedAttention(nn.Module):
    """Section 3: attention over h heads of width d_model / h, B T D -> B T D.

    `clones` makes one `Linear` of the four, so queries, keys, values and the output share one projection. The mask,
    B T S or B 1 S, gets its head axis here. Masked scores become -1e9: a row with nothing to attend to attends
    uniformly. `attn` keeps the weights of the latest call, after dropout.
    """

    def __init__(self, h, d_model, dropout=0.1):
        super().__init__()
        assert d_model % h == 0
        self.d_k = d_model // h
        self.h = h
        self.linears = clones(nn.Linear(d_model, d_model), 4)
        self.attn = None
        self.dropout = nn.Dropout(p=dropout)

    def attention(self, q, k, v, mask=None, dropout=None):
        scores = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(self.d_k)
        if mask is not None:
            scores = scores.masked_fill(mask == 0, -1e9)
        p_attn = torch.softmax(scores, dim=-1)
        if dropout is not None:
            p_attn = dropout(p_attn)
        return torch.matmul(p_attn, v), p_attn

    def forward(self, query, key, value, mask=None):
        if mask is not None:
            mask = mask.unsqueeze(1)
        nbatch = query.size(0)
        query, key, value = [
            l(x).view(nbatch, -1, self.h, self.d_k).transpose(1, 2)
            for l, x in zip(self.linears, (query, key, value))  # noqa: B905, E741 - the document's line
        ]
        x, self.attn = self.attention(query, key, value, mask, self.dropout)
        x = x.transpose(1, 2).contiguous().view(nbatch, -1, self.h * self.d_k)
        return self.linears[-1](x)


class PositionwiseFeedForward(nn.Module):
    """Section 3: `w2(dropout(relu(w1(x))))`, D -> d_ff -> D."""

    def __init__(self, d_model, d_ff, dropout=0.1):
        super().__init__()
        self.w1 = nn.Linear(d_model, d_ff)
        self.w2 = nn.Linear(d_ff, d_model)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return self.w2(self.dropout(torch.relu(self.w1(x))))


class Embeddings(nn.Module):
    """Section 3: a row per id, times sqrt(d_model); no row is reserved for padding."""

    def __init__(self, d_model, vocab):
        super().__init__()
        self.lut = nn.Embedding(vocab, d_model)
        self.d_model = d_model

    def forward(self, x):
        return self.lut(x) * math.sqrt(self.d_model)


class PositionalEncoding(nn.Module):
    """Section 3: adds sines and cosines of the position, frequencies `exp(-i ln(10000) / d_model)`, then drops out.

    The table is a buffer, hence the `pe` entries of the state, computed in float32 for `max_len` positions.
    """

    pe: torch.Tensor

    def __init__(self, d_model, dropout, max_len=5000):
        super().__init__()
        self.dropout = nn.Dropout(p=dropout)
        pe = torch.zeros(max_len, d_model)
        position = torch.arange(0, max_len).unsqueeze(1)
        div_term = torch.exp(torch.arange(0, d_model, 2) * -(math.log(10000.0) / d_model))
        pe[:, 0::2] = torch.sin(position * div_term)
        pe[:, 1::2] = torch.cos(position * div_term)
        pe = pe.unsqueeze(0)
        self.register_buffer("pe", pe)

    def forward(self, x):
        x = x + self.pe[:, : x.size(1)]
        return self.dropout(x)


class EncoderLayer(nn.Module):
    """Section 3: self-attention, then feed-forward, in sublayer connections that are one object."""

    def __init__(self, size, self_attn, feed_forward, dropout):
        super().__init__()
        self.self_attn = self_attn
        self.feed_forward = feed_forward
        self.sublayer = clones(SublayerConnection(size, dropout), 2)
        self.size = size

    def forward(self, x, mask):
        x = self.sublayer[0](x, lambda x: self.self_attn(x, x, x, mask))
        return self.sublayer[1](x, self.feed_forward)


class Encoder(nn.Module):
    """Section 3: one layer applied N times, then one more norm."""

    def __init__(self, layer, N):
        super().__init__()
        self.layers = clones(layer, N)
        self.norm = LayerNorm(layer.size)

    def forward(self, x, mask):
        for layer in self.layers:
            x = layer(x, mask)
        return self.norm(x)


class DecoderLayer(nn.Module):
    """Section 3: self-attention, attention to the memory, feed-forward, in sublayer connections that are one object."""

    def __init__(self, size, self_attn, src_attn, feed_forward, dropout):
        super().__init__()
        self.size = size
        self.self_attn = self_attn
        self.src_attn = src_attn
        self.feed_forward = feed_forward
        self.sublayer = clones(SublayerConnection(size, dropout), 3)

    def forward(self, x, memory, src_mask, tgt_mask):
        x = self.sublayer[0](x, lambda x: self.self_attn(x, x, x, tgt_mask))
        x = self.sublayer[1](x, lambda x: self.src_attn(x, memory, memory, src_mask))
        return self.sublayer[2](x, self.feed_forward)


class Decoder(nn.Module):
    """Section 3: one layer applied N times, then one more norm."""

    def __init__(self, layer, N):
        super().__init__()
        self.layers = clones(layer, N)
        self.norm = LayerNorm(layer.size)

    def forward(self, x, memory, src_mask, tgt_mask):
        for layer in self.layers:
            x = layer(x, memory, src_mask, tgt_mask)
        return self.norm(x)


class Transformer(nn.Module):
    """Section 3: source ids B S and target ids B T -> probabilities B T V."""

    def __init__(self, encoder, decoder, src_embed, tgt_embed, generator):
        super().__init__()
        self.encoder = encoder
        self.decoder = decoder
        self.src_embed = src_embed
        self.tgt_embed = tgt_embed
        self.generator = generator

    def encode(self, src, src_mask):
        return self.encoder(self.src_embed(src), src_mask)

    def decode(self, tgt, memory, src_mask, tgt_mask):
        return self.decoder(self.tgt_embed(tgt), memory, src_mask, tgt_mask)

    def forward(self, src, tgt, src_mask, tgt_mask):
        memory = self.encode(src, src_mask)
        out = self.decode(tgt, memory, src_mask, tgt_mask)
        return self.generator(out)


def make_standard_transformer(src_vocab, tgt_vocab, d_model=512, d_ff=2048, h=8, N=6, dropout=0.1):
    """Section 3: the whole model, with PyTorch's default initialisation.

    `dropout` does not reach attention, which keeps its own default of 0.1. The three attentions are copies of one
    another, as are the two feed-forwards: different objects, equal weights at first.
    """
    c = copy.deepcopy
    attn = MultiHeadedAttention(h, d_model)
    ff = PositionwiseFeedForward(d_model, d_ff, dropout)
    position = PositionalEncoding(d_model, dropout)

    encoder = Encoder(EncoderLayer(d_model, c(attn), c(ff), dropout), N)
    decoder = Decoder(DecoderLayer(d_model, c(attn), c(attn), c(ff), dropout), N)

    src_embed = nn.Sequential(Embeddings(d_model, src_vocab), c(position))
    tgt_embed = nn.Sequential(Embeddings(d_model, tgt_vocab), c(position))

    generator = Generator(d_model, tgt_vocab)

    return Transformer(encoder, decoder, src_embed, tgt_embed, generator)


def autoregressive_infer(model, src, src_mask, max_len, start_idx):
    """Section 5: greedy decoding of one sentence, ids (1, S) -> ids (1, max_len) that begin with `start_idx`.

    It stops at no end token, decodes the whole prefix anew for every word, and leaves the model in eval mode.
    """
    model.eval()
    with torch.no_grad():
        memory = model.encode(src, src_mask)
        tgt = torch.full((1, 1), start_idx, dtype=torch.long)

        for _ in range(max_len - 1):
            tgt_mask = subsequent_mask(tgt.size(1))
            out = model.decode(tgt, memory, src_mask, tgt_mask)
            prob = model.generator(out)
            next_word = torch.argmax(prob[:, -1, :], dim=-1, keepdim=True)
            tgt = torch.cat([tgt, next_word], dim=1)
    return tgt


if __name__ == "__main__":
    from torch_reference.walks.encoder_decoder import main

    main()
