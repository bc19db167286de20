"""What a model is: sizes, named options and presets, as frozen dataclasses.

Axis letters, everywhere in this package (those of ``jax.nn.dot_product_attention``, and five more):

=====  ==========================================================
``B``  batch: examples
``T``  target or query positions
``S``  source or key positions
``N``  attention heads
``H``  size of one head, ``D = N * H``
``D``  width of the model, ``d_model``
``F``  width inside the feed-forward network, ``d_ff``
``V``  vocabulary
``L``  layers
=====  ==========================================================

Every quirk of a document or of another implementation is one named option here, resolved once when a model is built;
only the presets combine quirks. The plain defaults are what is conventional today.
"""

import dataclasses
from typing import Literal, Self, get_args, get_origin, get_type_hints

import jax

Activation = Literal["relu", "gelu", "gelu_tanh", "silu"]
NormVariance = Literal["biased", "unbiased"]
NormEpsPlacement = Literal["inside_sqrt", "outside_sqrt"]
NormPosition = Literal["pre", "post", "both"]
FinalNorm = Literal["none", "stack_end"]
Sharing = Literal["none", "document"]
PositionTable = Literal["exp", "pow", "learned"]
EmbeddingScale = Literal["none", "sqrt_d_model"]
Attention = Literal["einsum", "flash"]
MaskFill = Literal["minus_1e9", "minus_inf", "dtype_min"]
Bias = Literal["with", "without"]
Initialisation = Literal["torch_default", "xavier_uniform", "gpt2"]
CheckIds = Literal["off", "on"]
Dtype = Literal["float32", "float64", "bfloat16"]
Precision = Literal["default", "high", "highest", "mixed"]
Rematerialise = Literal["none", "layers"]
RunLayers = Literal["unrolled", "scanned"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """The options that both models share (abstract: build one of the two configurations below).

    Sizes
        ``d_model`` (D), ``d_ff`` (F), ``num_heads`` (N), ``num_layers`` (L), ``max_length``: rows of the position table,
        the longest sequence that the model accepts.
    Dropout, all in [0, 1)
        ``dropout`` after the embeddings and on each sublayer's output; ``attention_dropout`` on the attention weights;
        ``activation_dropout`` after the feed-forward activation. They act only where a call is given ``dropout=``.
    ``activation``
        ``gelu`` is the exact one (erf), ``gelu_tanh`` its approximation; PyTorch's default is the former, JAX's the latter.
    ``norm_variance``, ``norm_eps``, ``norm_eps_placement``
        ``biased``/``inside_sqrt`` is ``torch.nn.LayerNorm``; ``unbiased``/``outside_sqrt`` the encoder-decoder document's.
    ``norm_position``
        ``pre``: x + f(norm(x)); ``post``: norm(x + f(x)), the paper; ``both``: norm(x + f(norm(x))) with one norm, the
        encoder-decoder document.
    ``final_norm``
        ``stack_end`` adds one norm after the last layer of each stack.
    ``sharing``
        ``document`` shares what the model's document shares: see the two classes below.
    ``position_table``
        ``exp`` and ``pow`` are one formula in two arithmetics (``layers.sinusoidal_table``); ``learned`` is a parameter.
    ``embedding_scale``
        ``sqrt_d_model`` multiplies embeddings by sqrt(D), as the paper does.
    ``mask_fill``
        What a masked score becomes (``masks.fill_value``); decides what a fully masked row gives.
    ``attention``
        ``einsum`` are plain products; ``flash`` the platform's kernel where it can take their place, which it cannot with
        attention dropout or float32 precision, and plain products elsewhere, with a warning (``flash_attention.py``).
    ``projection_bias``, ``output_bias``
        Bias of the four attention projections, and of the projection onto the vocabulary.
    ``initialisation``
        See ``initialisation.py``.
    ``label_smoothing``
        For the training loss; the model itself does not read it.
    ``check_ids``
        ``on``: ids outside the vocabulary raise. JAX would silently use the nearest row instead.
    ``param_dtype``, ``compute_dtype``, ``precision``
        Storage of parameters, type of activations, and ``jax.lax.Precision`` of every matrix product. ``highest`` means
        that float32 is float32 on every backend; JAX's own default is bfloat16 on TPU and TF32 on GPU. ``mixed`` is what a
        TPU does by default, on every backend: both factors of a product rounded to bfloat16, sums and results in
        float32, and everything that is no product in float32 (``numerics.mixed_einsum``).
    ``rematerialise``, ``layers``
        ``layers`` computes each layer once more in the backward pass, in place of keeping it; ``scanned`` compiles one
        layer and loops, which helps deep models. Same parameters and, up to rounding, same numbers: ``stacks.py``.
    """

    d_model: int
    d_ff: int
    num_heads: int
    num_layers: int
    max_length: int
    dropout: float = 0.1
    attention_dropout: float = 0.0
    activation_dropout: float = 0.0
    activation: Activation = "relu"
    norm_variance: NormVariance = "biased"
    norm_eps: float = 1e-5
    norm_eps_placement: NormEpsPlacement = "inside_sqrt"
    norm_position: NormPosition = "pre"
    final_norm: FinalNorm = "stack_end"
    sharing: Sharing = "none"
    position_table: PositionTable = "exp"
    embedding_scale: EmbeddingScale = "none"
    mask_fill: MaskFill = "dtype_min"
    attention: Attention = "einsum"
    projection_bias: Bias = "with"
    output_bias: Bias = "without"
    initialisation: Initialisation = "xavier_uniform"
    label_smoothing: float = 0.0
    check_ids: CheckIds = "off"
    param_dtype: Dtype = "float32"
    compute_dtype: Dtype = "float32"
    precision: Precision = "highest"
    rematerialise: Rematerialise = "none"
    layers: RunLayers = "unrolled"

    def __post_init__(self) -> None:
        problems = _invalid_options(self) or self._invalid_combinations()
        if problems:
            raise ValueError(f"{type(self).__name__}: " + "; ".join(problems))

    @property
    def head_size(self) -> int:
        """H = D / N."""
        return self.d_model // self.num_heads

    def _invalid_combinations(self) -> list[str]:
        problems = []
        if self.d_model % self.num_heads:
            problems.append(
                f"num_heads must divide d_model, but {self.d_model} % {self.num_heads} = "
                f"{self.d_model % self.num_heads}; choose another num_heads or d_model"
            )
        if self.position_table != "learned" and self.d_model % 2:
            problems.append(
                f"a sinusoidal position_table pairs sine and cosine and needs an even d_model, got {self.d_model}; "
                "make d_model even or take position_table='learned'"
            )
        if self.norm_variance == "unbiased" and self.d_model < 2:
            problems.append(
                f"an unbiased norm_variance divides by d_model - 1 and needs d_model >= 2, got {self.d_model}"
            )
        if self.precision == "mixed" and self.compute_dtype != "float32":
            problems.append(
                "precision='mixed' rounds the factors of float32 products and needs compute_dtype='float32', got "
                f"{self.compute_dtype!r}; choose one of the two"
            )
        if (
            "float64" in (self.param_dtype, self.compute_dtype)
            and jax.dtypes.canonicalize_dtype("float64") != "float64"
        ):
            problems.append(
                "float64 needs JAX's 64-bit mode, or JAX silently computes in float32; "
                "build and call the model inside `with jax.enable_x64(True):`"
            )
        return problems


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncoderDecoderConfig(TransformerConfig):
    """Configuration of ``EncoderDecoder``.

    ``sharing="document"``: all encoder layers are one layer, all decoder layers are one layer, the query, key, value and
    output projections of one attention are one projection, and the residual connections of one layer share one norm.

    ``embedding_tying``: ``output`` makes the output projection the target embedding; ``source_target_output`` makes all
    three one table, which needs one vocabulary.
    """

    source_vocab_size: int
    target_vocab_size: int
    d_model: int = 256
    d_ff: int = 1024
    num_heads: int = 4
    num_layers: int = 3
    max_length: int = 512
    embedding_scale: EmbeddingScale = "sqrt_d_model"
    embedding_tying: Literal["none", "output", "source_target_output"] = "none"

    def _invalid_combinations(self) -> list[str]:
        problems = super()._invalid_combinations()
        if self.embedding_tying == "source_target_output" and self.source_vocab_size != self.target_vocab_size:
            problems.append(
                "embedding_tying='source_target_output' needs one vocabulary, got source_vocab_size="
                f"{self.source_vocab_size} and target_vocab_size={self.target_vocab_size}; make them equal or tie 'output'"
            )
        return problems

    @classmethod
    def document(
        cls,
        *,
        source_vocab_size: int,
        target_vocab_size: int,
        d_model: int = 512,
        d_ff: int = 2048,
        num_heads: int = 8,
        num_layers: int = 6,
        dropout: float = 0.1,
        **options,
    ) -> Self:
        """``make_standard_transformer`` of the encoder-decoder document, as written: shared layers, a norm before and
        after each sublayer, an unbiased standard deviation, attention dropout 0.1 whatever ``dropout`` is.

        ``options`` are further fields, such as ``param_dtype`` or ``max_length``. The document drops activations at the
        rate ``dropout`` too, which is the field ``activation_dropout``: ``dataclasses.replace(config, dropout=0.2)``
        changes the former alone, so give both there, or call this again.
        """
        quirks = dict(
            max_length=5000,
            attention_dropout=0.1,
            activation_dropout=dropout,
            activation="relu",
            norm_variance="unbiased",
            norm_eps=1e-6,
            norm_eps_placement="outside_sqrt",
            norm_position="both",
            final_norm="stack_end",
            sharing="document",
            position_table="exp",
            embedding_scale="sqrt_d_model",
            mask_fill="minus_1e9",
            projection_bias="with",
            output_bias="with",
            initialisation="torch_default",
            embedding_tying="none",
        )
        return cls(
            source_vocab_size=source_vocab_size,
            target_vocab_size=target_vocab_size,
            d_model=d_model,
            d_ff=d_ff,
            num_heads=num_heads,
            num_layers=num_layers,
            dropout=dropout,
            **{**quirks, **options},
        )

    @classmethod
    def paper_base(cls, *, vocab_size: int = 37_000, **options) -> Self:
        """The base model of "Attention Is All You Need" (Vaswani et al. 2017, sections 3, 5.4 and table 3): independent
        layers, post-norm, no final norm, attention projections without bias, one table for source, target and output.

        The paper names no initialisation, norm eps or maximum length; ours are ``xavier_uniform``, 1e-6 and 1024.
        """
        recipe = dict(
            d_model=512,
            d_ff=2048,
            num_heads=8,
            num_layers=6,
            max_length=1024,
            dropout=0.1,
            activation="relu",
            norm_eps=1e-6,
            norm_position="post",
            final_norm="none",
            position_table="pow",
            embedding_scale="sqrt_d_model",
            projection_bias="without",
            output_bias="without",
            initialisation="xavier_uniform",
            embedding_tying="source_target_output",
            label_smoothing=0.1,
        )
        return cls(source_vocab_size=vocab_size, target_vocab_size=vocab_size, **{**recipe, **options})

    @classmethod
    def paper_big(cls, *, vocab_size: int = 37_000, **options) -> Self:
        """The big model of the paper (table 3, last row): twice the width and heads, dropout 0.3."""
        sizes = dict(d_model=1024, d_ff=4096, num_heads=16, dropout=0.3)
        return cls.paper_base(vocab_size=vocab_size, **{**sizes, **options})

    @classmethod
    def small(cls, *, source_vocab_size: int, target_vocab_size: int, **options) -> Self:
        """The plain defaults: a pre-norm model that trains on a laptop."""
        return cls(source_vocab_size=source_vocab_size, target_vocab_size=target_vocab_size, **options)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderOnlyConfig(TransformerConfig):
    """Configuration of ``DecoderOnly``.

    ``sharing="document"``: the two norms of a block are one norm.
    ``embedding_tying="output"``: the output projection is the embedding table.
    """

    vocab_size: int
    d_model: int = 128
    d_ff: int = 512
    num_heads: int = 4
    num_layers: int = 4
    max_length: int = 128
    activation: Activation = "gelu"
    position_table: PositionTable = "learned"
    initialisation: Initialisation = "gpt2"
    embedding_tying: Literal["none", "output"] = "output"

    @classmethod
    def document(
        cls, *, vocab_size: int, d_model: int = 64, num_heads: int = 4, max_length: int = 16, **options
    ) -> Self:
        """The decoder-only document's model, as written: one post-norm block whose two norms are one, no dropout."""
        quirks = dict(
            d_ff=4 * d_model,
            num_layers=1,
            dropout=0.0,
            activation="relu",
            norm_variance="biased",
            norm_eps=1e-5,
            norm_eps_placement="inside_sqrt",
            norm_position="post",
            final_norm="none",
            sharing="document",
            position_table="pow",
            embedding_scale="none",
            mask_fill="minus_inf",
            projection_bias="with",
            output_bias="with",
            initialisation="torch_default",
            embedding_tying="none",
        )
        return cls(
            vocab_size=vocab_size, d_model=d_model, num_heads=num_heads, max_length=max_length, **{**quirks, **options}
        )

    @classmethod
    def gpt2_small(cls, *, vocab_size: int = 50_257, **options) -> Self:
        """GPT-2 small (Radford et al. 2019): 12 pre-norm layers, learned positions, tanh GELU, tied output, 124 M."""
        recipe = dict(
            d_model=768,
            d_ff=3072,
            num_heads=12,
            num_layers=12,
            max_length=1024,
            dropout=0.1,
            attention_dropout=0.1,
            activation="gelu_tanh",
            norm_eps=1e-5,
            norm_position="pre",
            final_norm="stack_end",
            position_table="learned",
            projection_bias="with",
            output_bias="without",
            initialisation="gpt2",
            embedding_tying="output",
        )
        return cls(vocab_size=vocab_size, **{**recipe, **options})

    @classmethod
    def small(cls, *, vocab_size: int, **options) -> Self:
        """The plain defaults: a GPT-2 style model that trains on a laptop."""
        return cls(vocab_size=vocab_size, **options)


_SIZES = (
    "d_model",
    "d_ff",
    "num_heads",
    "num_layers",
    "max_length",
    "vocab_size",
    "source_vocab_size",
    "target_vocab_size",
)
_FRACTIONS = ("dropout", "attention_dropout", "activation_dropout", "label_smoothing")


def _invalid_options(config: TransformerConfig) -> list[str]:
    """Every field that holds a value its own rule forbids, as sentences."""
    problems = []
    hints = get_type_hints(type(config))
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        hint = hints[field.name]
        if get_origin(hint) is Literal:
            if value not in get_args(hint):
                choices = ", ".join(map(repr, get_args(hint)))
                problems.append(f"{field.name} must be one of {choices}, got {value!r}")
        elif field.name in _SIZES:
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                problems.append(f"{field.name} must be a positive int, got {value!r}")
        elif isinstance(value, bool) or not isinstance(value, int | float):
            problems.append(f"{field.name} must be an int or a float, got {value!r}")
        elif field.name in _FRACTIONS and not 0 <= value < 1:
            problems.append(f"{field.name} must be in [0, 1), got {value!r}")
        elif field.name == "norm_eps" and not 0 <= value < float("inf"):
            problems.append(f"norm_eps must be a finite number that is not negative, got {value!r}")
    return problems
