"""What a configuration accepts, what it refuses and how it says so, and the sizes of every preset."""

import dataclasses
import math

import jax
import numpy as np
import pytest
from flax import nnx

import flax_transformer as ft
from flax_transformer.config import DecoderOnlyConfig, EncoderDecoderConfig, TransformerConfig

OPTIONS = {
    "activation": ("relu", "gelu", "gelu_tanh", "silu"),
    "norm_variance": ("biased", "unbiased"),
    "norm_eps_placement": ("inside_sqrt", "outside_sqrt"),
    "norm_position": ("pre", "post", "both"),
    "final_norm": ("none", "stack_end"),
    "sharing": ("none", "document"),
    "position_table": ("exp", "pow", "learned"),
    "embedding_scale": ("none", "sqrt_d_model"),
    "mask_fill": ("minus_1e9", "minus_inf", "dtype_min"),
    "attention": ("einsum", "flash"),
    "projection_bias": ("with", "without"),
    "output_bias": ("with", "without"),
    "initialisation": ("torch_default", "xavier_uniform", "gpt2"),
    "check_ids": ("off", "on"),
    "param_dtype": ("float32", "float64", "bfloat16"),
    "compute_dtype": ("float32", "float64", "bfloat16"),
    "precision": ("default", "high", "highest", "mixed"),
    "rematerialise": ("none", "layers"),
    "layers": ("unrolled", "scanned"),
}
SIZES = ("d_model", "d_ff", "num_heads", "num_layers", "max_length")
FRACTIONS = ("dropout", "attention_dropout", "activation_dropout", "label_smoothing")


def encoder_decoder(**options) -> EncoderDecoderConfig:
    return EncoderDecoderConfig(**{"source_vocab_size": 11, "target_vocab_size": 13, **options})


def decoder_only(**options) -> DecoderOnlyConfig:
    return DecoderOnlyConfig(**{"vocab_size": 11, **options})


BUILDERS = {"encoder_decoder": encoder_decoder, "decoder_only": decoder_only}
both_models = pytest.mark.parametrize("build", BUILDERS.values(), ids=BUILDERS.keys())


def refusal(build, **options) -> str:
    with pytest.raises(ValueError, match="Config: ") as error:
        build(**options)
    return str(error.value)


def test_every_field_is_covered_by_these_tests():
    tested = {*OPTIONS, *SIZES, *FRACTIONS, "norm_eps"}
    assert {field.name for field in dataclasses.fields(TransformerConfig)} == tested
    assert {f.name for f in dataclasses.fields(DecoderOnlyConfig)} - tested == {"vocab_size", "embedding_tying"}
    assert {f.name for f in dataclasses.fields(EncoderDecoderConfig)} - tested == {
        "source_vocab_size",
        "target_vocab_size",
        "embedding_tying",
    }


@both_models
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("value", ["other", None, True, ["relu"]])
def test_an_unknown_option_value_is_refused_with_every_choice(build, name, value):
    choices = ", ".join(map(repr, OPTIONS[name]))
    assert f"{name} must be one of {choices}, got {value!r}" in refusal(build, **{name: value})


def test_the_tyings_are_those_that_the_model_has():
    choices = "'none', 'output', 'source_target_output'"
    assert f"embedding_tying must be one of {choices}, got 'both'" in refusal(encoder_decoder, embedding_tying="both")
    message = refusal(decoder_only, embedding_tying="source_target_output")
    assert "embedding_tying must be one of 'none', 'output', got 'source_target_output'" in message


@both_models
@pytest.mark.parametrize("value", [value for name in OPTIONS if "dtype" not in name for value in OPTIONS[name]])
def test_every_documented_option_value_is_accepted(build, value):
    for name in (name for name, choices in OPTIONS.items() if value in choices):
        assert getattr(build(**{name: value}), name) == value


@pytest.mark.parametrize("value", [0, -3, 8.0, True, "8", None, np.int64(8)])
def test_a_size_that_is_no_positive_int_is_refused(value):
    for name in (*SIZES, "vocab_size"):
        assert f"{name} must be a positive int, got {value!r}" in refusal(decoder_only, **{name: value})
    for name in (*SIZES, "source_vocab_size", "target_vocab_size"):
        assert f"{name} must be a positive int, got {value!r}" in refusal(encoder_decoder, **{name: value})


@both_models
@pytest.mark.parametrize("name", FRACTIONS)
def test_a_fraction_outside_0_to_1_is_refused(build, name):
    for value in (-0.1, 1, 1.5, math.nan, math.inf):
        assert f"{name} must be in [0, 1), got {value!r}" in refusal(build, **{name: value})
    for value in ("0.1", None, True, np.float32(0.1)):
        assert f"{name} must be an int or a float, got {value!r}" in refusal(build, **{name: value})
    for value in (0, 0.0, 0.999):
        assert getattr(build(**{name: value}), name) == value


@both_models
def test_an_eps_that_is_negative_or_not_finite_is_refused(build):
    for value in (-1e-6, math.nan, math.inf):
        assert f"norm_eps must be a finite number that is not negative, got {value!r}" in refusal(build, norm_eps=value)
    assert "norm_eps must be an int or a float, got '1e-6'" in refusal(build, norm_eps="1e-6")
    assert build(norm_eps=0).norm_eps == 0


@both_models
def test_an_option_that_does_not_exist_is_refused_by_name(build):
    with pytest.raises(TypeError, match="droput"):
        build(droput=0.1)


@both_models
def test_heads_that_do_not_divide_the_width_are_refused(build):
    message = refusal(build, d_model=20, num_heads=3)
    assert "num_heads must divide d_model, but 20 % 3 = 2; choose another num_heads or d_model" in message
    assert build(d_model=21, num_heads=3, position_table="learned").head_size == 7


@both_models
@pytest.mark.parametrize("table", ["exp", "pow"])
def test_a_sinusoidal_table_of_odd_width_is_refused(build, table):
    message = refusal(build, d_model=21, num_heads=3, position_table=table)
    assert "needs an even d_model, got 21; make d_model even or take position_table='learned'" in message


@both_models
def test_an_unbiased_variance_of_one_number_is_refused(build):
    options = dict(d_model=1, num_heads=1, position_table="learned")
    message = refusal(build, norm_variance="unbiased", **options)
    assert "divides by d_model - 1 and needs d_model >= 2, got 1" in message
    assert build(norm_variance="biased", **options).d_model == 1


def test_one_table_for_two_vocabularies_is_refused():
    message = refusal(encoder_decoder, embedding_tying="source_target_output")
    assert "needs one vocabulary, got source_vocab_size=11 and target_vocab_size=13" in message
    assert "make them equal or tie 'output'" in message
    encoder_decoder(embedding_tying="source_target_output", target_vocab_size=11)


@both_models
@pytest.mark.parametrize("name", ["param_dtype", "compute_dtype"])
def test_float64_without_the_64_bit_mode_is_refused(build, name):
    message = refusal(build, **{name: "float64"})
    assert "float64 needs JAX's 64-bit mode" in message
    assert "with jax.enable_x64(True):" in message
    with jax.enable_x64(True):
        assert getattr(build(**{name: "float64"}), name) == "float64"


def test_all_wrong_options_are_listed_in_one_error():
    message = refusal(decoder_only, vocab_size=0, d_ff=2.5, dropout=1, activation="swish", norm_eps=-1, precision="low")
    for name in ("vocab_size", "d_ff", "dropout", "activation", "norm_eps", "precision"):
        assert f"{name} must be" in message
    assert message.startswith("DecoderOnlyConfig: ")
    assert message.count("; ") == 5


def test_all_wrong_combinations_are_listed_in_one_error():
    message = refusal(
        encoder_decoder, d_model=21, num_heads=4, embedding_tying="source_target_output", compute_dtype="float64"
    )
    for words in ("num_heads must divide", "needs an even d_model", "needs one vocabulary", "64-bit mode"):
        assert words in message
    assert message.startswith("EncoderDecoderConfig: ")


@both_models
def test_replacing_a_field_validates_again(build):
    config = build()
    assert dataclasses.replace(config, num_heads=8).num_heads == 8
    with pytest.raises(ValueError, match="num_heads must divide d_model"):
        dataclasses.replace(config, num_heads=7)
    with pytest.raises(ValueError, match="dropout must be in"):
        dataclasses.replace(config, dropout=2.0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.dropout = 0.5


@both_models
def test_equal_configurations_are_equal_keys(build):
    assert build(dropout=0.25) == build(dropout=0.25) != build(dropout=0.125)
    assert len({build(dropout=0.25), build(dropout=0.25), build(dropout=0.125)}) == 2


def parameter_count(model_class, config) -> int:
    """Distinct parameters, without allocating one."""
    model = nnx.eval_shape(lambda: model_class(config, rngs=nnx.Rngs(0)))
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))


def test_the_encoder_decoder_document_preset_is_the_document():
    config = EncoderDecoderConfig.document(source_vocab_size=100, target_vocab_size=120)
    assert (config.d_model, config.d_ff, config.num_heads, config.num_layers) == (512, 2048, 8, 6)
    assert config.max_length == 5000
    assert parameter_count(ft.EncoderDecoder, config) == 5_165_688
    assert parameter_count(ft.EncoderDecoder, dataclasses.replace(config, num_layers=9)) == 5_165_688


def test_the_documents_attention_dropout_is_a_tenth_whatever_dropout_is():
    config = EncoderDecoderConfig.document(source_vocab_size=11, target_vocab_size=13, dropout=0.3)
    assert (config.dropout, config.activation_dropout, config.attention_dropout) == (0.3, 0.3, 0.1)
    config = EncoderDecoderConfig.document(source_vocab_size=11, target_vocab_size=13, attention_dropout=0.2)
    assert (config.dropout, config.activation_dropout, config.attention_dropout) == (0.1, 0.1, 0.2)


def test_the_decoder_only_document_preset_is_the_document():
    config = DecoderOnlyConfig.document(vocab_size=199_854)
    assert (config.d_model, config.d_ff, config.num_heads, config.num_layers) == (64, 256, 4, 1)
    assert config.max_length == 16
    assert (config.dropout, config.attention_dropout, config.activation_dropout) == (0, 0, 0)
    embedding, attention, feed_forward = 199_854 * 64, 4 * (64 * 64 + 64), 2 * 64 * 256 + 256 + 64
    one_norm, output = 2 * 64, 64 * 199_854 + 199_854
    assert parameter_count(ft.DecoderOnly, config) == embedding + attention + feed_forward + one_norm + output
    assert DecoderOnlyConfig.document(vocab_size=7, d_model=24).d_ff == 96


def test_the_paper_presets_have_the_papers_sizes():
    base, big = EncoderDecoderConfig.paper_base(), EncoderDecoderConfig.paper_big()
    assert (base.d_model, base.d_ff, base.num_heads, base.num_layers) == (512, 2048, 8, 6)
    assert (base.dropout, base.label_smoothing) == (0.1, 0.1)
    assert (big.d_model, big.d_ff, big.num_heads, big.num_layers) == (1024, 4096, 16, 6)
    assert (big.dropout, big.label_smoothing) == (0.3, 0.1)
    assert parameter_count(ft.EncoderDecoder, base) == 63_045_632
    # The paper's table 3 rounds these to 65 and 213 million.
    assert parameter_count(ft.EncoderDecoder, big) == 214_171_648


def test_gpt2_small_has_the_parameters_of_gpt2_small():
    config = DecoderOnlyConfig.gpt2_small()
    assert (config.vocab_size, config.max_length, config.d_model) == (50_257, 1024, 768)
    assert parameter_count(ft.DecoderOnly, config) == 124_439_808


def test_the_plain_defaults_are_conventional():
    for config in (
        EncoderDecoderConfig.small(source_vocab_size=11, target_vocab_size=13),
        DecoderOnlyConfig.small(vocab_size=11),
    ):
        assert (config.norm_variance, config.norm_eps_placement) == ("biased", "inside_sqrt")
        assert (config.norm_position, config.final_norm, config.sharing) == ("pre", "stack_end", "none")
        assert (config.param_dtype, config.compute_dtype, config.precision) == ("float32", "float32", "highest")


@pytest.mark.parametrize(
    "preset",
    [
        lambda **options: EncoderDecoderConfig.document(source_vocab_size=11, target_vocab_size=13, **options),
        lambda **options: EncoderDecoderConfig.small(source_vocab_size=11, target_vocab_size=13, **options),
        EncoderDecoderConfig.paper_base,
        EncoderDecoderConfig.paper_big,
        lambda **options: DecoderOnlyConfig.document(vocab_size=11, **options),
        lambda **options: DecoderOnlyConfig.small(vocab_size=11, **options),
        DecoderOnlyConfig.gpt2_small,
    ],
)
def test_every_preset_takes_any_field_and_keeps_the_rest(preset):
    changes = dict(d_ff=96, num_layers=5, max_length=33, dropout=0.25, activation="silu", param_dtype="bfloat16")
    changed, plain = preset(**changes), preset()
    assert {name: getattr(changed, name) for name in changes} == changes
    for field in dataclasses.fields(plain):
        if field.name not in {*changes, "activation_dropout"}:
            assert getattr(changed, field.name) == getattr(plain, field.name), field.name
