"""A decoder-only (GPT-style) Transformer, with the decoder-only document as one of its presets."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from flax_transformer.attention import MultiHeadAttention
from flax_transformer.cache import Cache, KeysAndValues, Step, empty_texts, require_room
from flax_transformer.config import DecoderOnlyConfig
from flax_transformer.dropout import DropoutSource, require_source
from flax_transformer.flash_attention import Pattern
from flax_transformer.inputs import require_config, require_token_ids
from flax_transformer.layers import Embedding, FeedForward, OutputProjection, Positions, Residual, final_norm
from flax_transformer.masks import causal_mask, combine_masks, require_mask
from flax_transformer.stacks import runner


class Block(nnx.Module):
    """Causal self-attention, then feed-forward, each inside a residual connection."""

    def __init__(self, config: DecoderOnlyConfig, *, rngs: nnx.Rngs) -> None:
        self.attention = MultiHeadAttention(config, projections="separate", rngs=rngs)
        self.feed_forward = FeedForward(config, rngs=rngs)
        self.attention_residual = Residual(config)
        self.feed_forward_residual = self.attention_residual if config.sharing == "document" else Residual(config)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        mask: Bool[Array, "#B 1 T T"],
        dropout: DropoutSource | None = None,
        *,
        pattern: Pattern = "any",
    ) -> Float[Array, "B T D"]:
        x = self.attention_residual(x, lambda y: self.attention(y, y, y, mask, dropout, pattern=pattern), dropout)
        return self.feed_forward_residual(x, lambda y: self.feed_forward(y, dropout), dropout)

    def step(
        self, x: Float[Array, "B T D"], text: KeysAndValues, cache: Cache
    ) -> tuple[Float[Array, "B T D"], KeysAndValues]:
        """The block's output of new positions, and ``text``, its own part of the cache, with their keys and values."""

        def attend(y: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
            nonlocal text
            text = text.write(self.attention.keys_and_values(y), cache.position)
            return self.attention.attend(y, text, cache.causal_mask(y.shape[1]))

        x = self.attention_residual(x, attend)
        return self.feed_forward_residual(x, self.feed_forward), text


class DecoderOnly(nnx.Module):
    """The decoder-only Transformer.

    With ``DecoderOnlyConfig.document(...)`` it computes what the document's script computes, except that a call returns
    logits; the document's probabilities are ``probabilities(ids)``. The document fixes the length at 16; here any
    length up to ``max_length`` is accepted.
    """

    def __init__(self, config: DecoderOnlyConfig, *, rngs: nnx.Rngs) -> None:
        require_config(config, DecoderOnlyConfig, model="DecoderOnly")
        self.config = config
        self.embedding = Embedding(config, config.vocab_size, rngs=rngs)
        self.positions = Positions(config, rngs=rngs)
        self.blocks = nnx.List([Block(config, rngs=rngs) for _ in range(config.num_layers)])
        self.run_layers = runner(config)
        self.norm = final_norm(config)
        tied_to = self.embedding.embedding if config.embedding_tying == "output" else None
        self.output = OutputProjection(config, config.vocab_size, tied_to=tied_to, rngs=rngs)

    def __call__(
        self,
        ids: Int[Array, "B T"],
        mask: Bool[Array, "#B 1 #T #T"] | None = None,
        *,
        dropout: DropoutSource | None = None,
    ) -> Float[Array, "B T V"]:
        """Logits of the next token after each position.

        Args:
            ids: token ids; position t of the result has seen ids[: t + 1].
            mask: which positions may be attended to besides the causal mask, as ``masks.padding_mask(ids)``.
            dropout: a source of dropout masks, as ``dropout.RandomDropout(keys)``; None is deterministic.
        Raises:
            ValueError: ids not integers of two axes, longer than ``max_length``, a mask of another dtype or shape, a
                ``dropout`` that is no source, and with ``check_ids="on"`` ids outside the vocabulary.
        """
        return self.logits(self.features(ids, mask, dropout=dropout))

    def features(
        self,
        ids: Int[Array, "B T"],
        mask: Bool[Array, "#B 1 #T #T"] | None = None,
        *,
        dropout: DropoutSource | None = None,
    ) -> Float[Array, "B T D"]:
        """The last hidden states, before the output projection."""
        ids = require_token_ids(ids, self.config.max_length, name="ids")
        B, T = ids.shape  # noqa: N806  (axis letters, see config.py)
        mask = require_mask(mask, (B, T, T), name="mask")
        causal = causal_mask(T)
        pattern: Pattern = "causal" if mask is None else "any"
        mask = causal if mask is None else combine_masks(causal, mask)
        dropout = require_source(dropout)
        x = self.positions(self.embedding(ids), dropout)
        return self.norm(self.run_layers(self.blocks, x, mask, dropout=dropout, pattern=pattern))

    def logits(self, features: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """The output projection of the hidden states."""
        return self.output(features)

    def start(self, batch_size: int, *, length: int) -> Cache:
        """An empty cache for ``batch_size`` texts of up to ``length`` tokens.

        Raises:
            ValueError: ``length`` not in [1, max_length].
        """
        return Cache(jnp.int32(0), empty_texts(self.config, batch_size=batch_size, length=length))

    def step(self, ids: Int[Array, "B T"], cache: Cache) -> Step:
        """Reads the next ``ids`` of the texts in ``cache``: a whole prompt, or one token each.

            cache = model.start(batch_size, length=64)
            logits, cache = model.step(prompt, cache)
            logits, cache = model.step(chosen[:, None], cache)

        The logits are those of ``self`` on all that was read, at its last position, without dropout and without a mask
        of the caller's.

        Returns:
            Logits B V of the token after the last of ``ids``, and the cache that holds them.

        Raises:
            ValueError: see ``cache.require_room``.
        """
        ids = require_room(ids, cache)
        x = self.positions(self.embedding(ids), offset=cache.position)
        texts = []
        for block, text in zip(self.blocks, cache.texts, strict=True):
            x, text = block.step(x, text, cache)
            texts.append(text)
        logits = self.logits(self.norm(x[:, -1:]))[:, 0]
        return Step(logits, dataclasses.replace(cache, position=cache.position + ids.shape[1], texts=tuple(texts)))

    def probabilities(
        self, ids: Int[Array, "B T"], mask: Bool[Array, "#B 1 #T #T"] | None = None
    ) -> Float[Array, "B T V"]:
        """softmax of the logits: what the document's script computes last."""
        return jax.nn.softmax(self(ids, mask), axis=-1)
