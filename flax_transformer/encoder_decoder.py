"""The full encoder-decoder Transformer (Vaswani et al. 2017), with the encoder-decoder document as one of its presets."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from flax_transformer.attention import MultiHeadAttention
from flax_transformer.cache import Cache, KeysAndValues, Step, empty_texts, require_room
from flax_transformer.config import EncoderDecoderConfig
from flax_transformer.dropout import DropoutSource, require_source
from flax_transformer.inputs import require_config, require_token_ids
from flax_transformer.layers import Embedding, FeedForward, OutputProjection, Positions, Residual, final_norm
from flax_transformer.masks import require_mask
from flax_transformer.stacks import runner


class EncoderLayer(nnx.Module):
    """Self-attention, then feed-forward, each inside a residual connection."""

    def __init__(self, config: EncoderDecoderConfig, *, rngs: nnx.Rngs) -> None:
        self.self_attention = _attention(config, rngs=rngs)
        self.feed_forward = FeedForward(config, rngs=rngs)
        self.self_attention_residual, self.feed_forward_residual = _residuals(config, 2)

    def __call__(
        self, x: Float[Array, "B S D"], mask: Bool[Array, "#B 1 #S #S"] | None, dropout: DropoutSource | None = None
    ) -> Float[Array, "B S D"]:
        x = self.self_attention_residual(x, lambda y: self.self_attention(y, y, y, mask, dropout), dropout)
        return self.feed_forward_residual(x, lambda y: self.feed_forward(y, dropout), dropout)


class Encoder(nnx.Module):
    """L encoder layers (one layer L times with ``sharing="document"``) and the final norm."""

    def __init__(self, config: EncoderDecoderConfig, *, rngs: nnx.Rngs) -> None:
        self.layers = _stack(config, lambda: EncoderLayer(config, rngs=rngs))
        self.norm = final_norm(config)
        self.run_layers = runner(config)

    def __call__(
        self, x: Float[Array, "B S D"], mask: Bool[Array, "#B 1 #S #S"] | None, dropout: DropoutSource | None = None
    ) -> Float[Array, "B S D"]:
        return self.norm(self.run_layers(self.layers, x, mask, dropout=dropout))


class DecoderLayer(nnx.Module):
    """Self-attention, attention to the encoder's memory, feed-forward, each inside a residual connection."""

    def __init__(self, config: EncoderDecoderConfig, *, rngs: nnx.Rngs) -> None:
        self.self_attention = _attention(config, rngs=rngs)
        self.cross_attention = _attention(config, rngs=rngs)
        self.feed_forward = FeedForward(config, rngs=rngs)
        self.self_attention_residual, self.cross_attention_residual, self.feed_forward_residual = _residuals(config, 3)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        memory: Float[Array, "B S D"],
        source_mask: Bool[Array, "#B 1 #T #S"] | None,
        target_mask: Bool[Array, "#B 1 #T #T"] | None,
        dropout: DropoutSource | None = None,
    ) -> Float[Array, "B T D"]:
        x = self.self_attention_residual(x, lambda y: self.self_attention(y, y, y, target_mask, dropout), dropout)
        x = self.cross_attention_residual(
            x, lambda y: self.cross_attention(y, memory, memory, source_mask, dropout), dropout
        )
        return self.feed_forward_residual(x, lambda y: self.feed_forward(y, dropout), dropout)

    def step(
        self, x: Float[Array, "B T D"], text: KeysAndValues, memory: KeysAndValues, cache: Cache
    ) -> tuple[Float[Array, "B T D"], KeysAndValues]:
        """The layer's output of new positions, and ``text``, its own part of the cache, with their keys and values."""

        def attend(y: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
            nonlocal text
            text = text.write(self.self_attention.keys_and_values(y), cache.position)
            return self.self_attention.attend(y, text, cache.causal_mask(y.shape[1]))

        x = self.self_attention_residual(x, attend)
        rows = cache.source_rows(x.shape[1])
        x = self.cross_attention_residual(x, lambda y: self.cross_attention.attend(y, memory, rows))
        return self.feed_forward_residual(x, self.feed_forward), text


class Decoder(nnx.Module):
    """L decoder layers (one layer L times with ``sharing="document"``) and the final norm."""

    def __init__(self, config: EncoderDecoderConfig, *, rngs: nnx.Rngs) -> None:
        self.layers = _stack(config, lambda: DecoderLayer(config, rngs=rngs))
        self.norm = final_norm(config)
        self.run_layers = runner(config)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        memory: Float[Array, "B S D"],
        source_mask: Bool[Array, "#B 1 #T #S"] | None,
        target_mask: Bool[Array, "#B 1 #T #T"] | None,
        dropout: DropoutSource | None = None,
    ) -> Float[Array, "B T D"]:
        return self.norm(self.run_layers(self.layers, x, memory, source_mask, target_mask, dropout=dropout))

    def step(self, x: Float[Array, "B T D"], cache: Cache) -> tuple[Float[Array, "B T D"], Cache]:
        """The features of new positions, and the cache that holds them."""
        texts = []
        for layer, text, memory in zip(self.layers, cache.texts, cache.memory, strict=True):
            x, text = layer.step(x, text, memory, cache)
            texts.append(text)
        cache = dataclasses.replace(cache, position=cache.position + x.shape[1], texts=tuple(texts))
        return self.norm(x), cache


class EncoderDecoder(nnx.Module):
    """The encoder-decoder Transformer.

    With ``EncoderDecoderConfig.document(...)`` it computes what the document's ``make_standard_transformer`` computes,
    except that a call returns logits; the document's probabilities are ``probabilities(...)``.

    Masks are boolean, True = may attend, broadcastable to B 1 T S (``masks``), or None to mask nothing: the causal mask
    is the caller's to give, as in the document.
    """

    def __init__(self, config: EncoderDecoderConfig, *, rngs: nnx.Rngs) -> None:
        require_config(config, EncoderDecoderConfig, model="EncoderDecoder")
        self.config = config
        self.source_embedding = Embedding(config, config.source_vocab_size, rngs=rngs)
        self.target_embedding = (
            self.source_embedding
            if config.embedding_tying == "source_target_output"
            else Embedding(config, config.target_vocab_size, rngs=rngs)
        )
        self.source_positions = Positions(config, rngs=rngs)
        self.target_positions = Positions(config, rngs=rngs)
        self.encoder = Encoder(config, rngs=rngs)
        self.decoder = Decoder(config, rngs=rngs)
        tied_to = None if config.embedding_tying == "none" else self.target_embedding.embedding
        self.output = OutputProjection(config, config.target_vocab_size, tied_to=tied_to, rngs=rngs)

    def __call__(
        self,
        source: Int[Array, "B S"],
        target: Int[Array, "B T"],
        source_mask: Bool[Array, "#B 1 #T #S"] | None,
        target_mask: Bool[Array, "#B 1 #T #T"] | None,
        *,
        dropout: DropoutSource | None = None,
    ) -> Float[Array, "B T V"]:
        """Logits of the next token after each target position.

        Args:
            source, target: token ids; position t of the result has seen target[: t + 1] under a causal mask.
            source_mask: which source positions may be attended to, by the encoder and by the decoder.
            target_mask: usually ``combine_masks(padding_mask(target), causal_mask(T))``.
            dropout: a source of dropout masks, as ``dropout.RandomDropout(keys)``; None is deterministic.
        Raises:
            ValueError: ids not integers of two axes, a sequence longer than ``max_length``, different batches, a mask of
                another dtype or shape, a ``dropout`` that is no source, and with ``check_ids="on"`` ids outside the
                vocabulary.
        """
        return self.logits(self.features(source, target, source_mask, target_mask, dropout=dropout))

    def features(
        self,
        source: Int[Array, "B S"],
        target: Int[Array, "B T"],
        source_mask: Bool[Array, "#B 1 #T #S"] | None,
        target_mask: Bool[Array, "#B 1 #T #T"] | None,
        *,
        dropout: DropoutSource | None = None,
    ) -> Float[Array, "B T D"]:
        """What a call gives to the output projection: ``decode`` of what ``encode`` gives."""
        memory = self.encode(source, source_mask, dropout=dropout)
        return self.decode(target, memory, source_mask, target_mask, dropout=dropout)

    def encode(
        self, source: Int[Array, "B S"], source_mask: Array | None, *, dropout: DropoutSource | None = None
    ) -> Float[Array, "B S D"]:
        """The encoder's memory of ``source``."""
        source = require_token_ids(source, self.config.max_length, name="source")
        B, S = source.shape  # noqa: N806  (axis letters, see config.py)
        source_mask = require_mask(source_mask, (B, S, S), name="source_mask of encode")
        dropout = require_source(dropout)
        x = self.source_positions(self.source_embedding(source), dropout)
        return self.encoder(x, source_mask, dropout)

    def decode(
        self,
        target: Int[Array, "B T"],
        memory: Float[Array, "B S D"],
        source_mask: Bool[Array, "#B 1 #T #S"] | None,
        target_mask: Bool[Array, "#B 1 #T #T"] | None,
        *,
        dropout: DropoutSource | None = None,
    ) -> Float[Array, "B T D"]:
        """The decoder's features of ``target`` given ``memory``, before the output projection."""
        target = require_token_ids(target, self.config.max_length, name="target")
        B, T = target.shape  # noqa: N806
        if memory.ndim != 3 or memory.shape[0] != B or memory.shape[2] != self.config.d_model:
            raise ValueError(
                f"memory must have shape (B, S, D) = ({B}, S, {self.config.d_model}), got {memory.shape}; "
                "source and target need one batch size"
            )
        source_mask = require_mask(source_mask, (B, T, memory.shape[1]), name="source_mask of decode")
        target_mask = require_mask(target_mask, (B, T, T), name="target_mask")
        dropout = require_source(dropout)
        x = self.target_positions(self.target_embedding(target), dropout)
        return self.decoder(x, memory, source_mask, target_mask, dropout)

    def logits(self, features: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """The output projection of the decoder's features."""
        return self.output(features)

    def start(self, source: Int[Array, "B S"], source_mask: Array | None, *, length: int) -> Cache:
        """A cache for targets of up to ``length`` tokens: the encoder's memory of ``source``, as the keys and values that
        the decoder attends to, and no target yet.

        Args:
            source: token ids.
            source_mask: as of a call; broadcastable to B 1 S S for the encoder and to B 1 length S for the decoder.
            length: start token included.

        Raises:
            ValueError: ``length`` not in [1, max_length], and what ``encode`` refuses.
        """
        memory = self.encode(source, source_mask)
        B, S, _ = memory.shape  # noqa: N806
        kept = tuple(layer.cross_attention.keys_and_values(memory) for layer in self.decoder.layers)
        return Cache(
            jnp.int32(0),
            empty_texts(self.config, batch_size=B, length=length),
            # Without the barrier XLA moves the transposition of these into the loop that uses them, and does it every step.
            jax.lax.optimization_barrier(kept),
            require_mask(source_mask, (B, length, S), name="source_mask of start"),
        )

    def step(self, ids: Int[Array, "B T"], cache: Cache) -> Step:
        """Reads the next ``ids`` of the targets in ``cache``: a start token, a whole prefix, or one token each.

            cache = model.start(source, padding_mask(source), length=64)
            logits, cache = model.step(start_tokens, cache)
            logits, cache = model.step(chosen[:, None], cache)

        The logits are those of ``self`` on all that was read, at its last position, with the causal mask as
        ``target_mask`` and without dropout. Padding in the target cannot be masked: with ``minus_1e9`` or ``dtype_min``,
        a target that begins with masked padding would attend to all its positions equally, the later ones too, which
        are not there yet.

        Returns:
            Logits B V of the token after the last of ``ids``, and the cache that holds them.

        Raises:
            ValueError: see ``cache.require_room``.
        """
        ids = require_room(ids, cache)
        x = self.target_positions(self.target_embedding(ids), offset=cache.position)
        features, cache = self.decoder.step(x, cache)
        return Step(self.logits(features[:, -1:])[:, 0], cache)

    def probabilities(
        self,
        source: Int[Array, "B S"],
        target: Int[Array, "B T"],
        source_mask: Bool[Array, "#B 1 #T #S"] | None,
        target_mask: Bool[Array, "#B 1 #T #T"] | None,
    ) -> Float[Array, "B T V"]:
        """softmax of the logits: what the document's model returns."""
        return jax.nn.softmax(self(source, target, source_mask, target_mask), axis=-1)


def _attention(config: EncoderDecoderConfig, *, rngs: nnx.Rngs) -> MultiHeadAttention:
    projections = "shared" if config.sharing == "document" else "separate"
    return MultiHeadAttention(config, projections=projections, rngs=rngs)


def _residuals(config: EncoderDecoderConfig, count: int) -> list[Residual]:
    if config.sharing == "document":
        return [Residual(config)] * count
    return [Residual(config) for _ in range(count)]


def _stack(config: EncoderDecoderConfig, make_layer) -> nnx.List:
    if config.sharing == "document":
        return nnx.List([make_layer()] * config.num_layers)
    return nnx.List([make_layer() for _ in range(config.num_layers)])
