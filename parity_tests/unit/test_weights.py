"""Weights in and out: bit for bit, strict both ways, and all or nothing."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

from flax_transformer.weights import load_torch, table_for, to_torch
from flax_transformer.weights.transfer import as_array
from parity_tests.unit.small_models import DOUBLE, PRESETS, assert_same_arrays, bits, bits_of, build, hollow

DOCUMENTS = ("encoder_decoder_document", "decoder_only_document")
both_documents = pytest.mark.parametrize("name", DOCUMENTS)


def model_of(name: str, *, seed: int = 0, **options: Any) -> Any:
    return build(PRESETS[name](**options), seed=seed)


def refused(model, state, **options: Any) -> list[str]:
    """The problems of a state that must not load, after checking that nothing was loaded."""
    before = bits_of(model)
    with pytest.raises(ValueError, match="the state does not fit the model; nothing was loaded") as error:
        load_torch(model, state, **options)
    assert bits_of(model) == before
    first, *problems = str(error.value).split("\n  ")
    assert first.endswith(f"{len(problems)} problem(s):")
    return problems


# Round trips


def reference_of(name: str) -> Any:
    torch = pytest.importorskip("torch")
    from torch_reference.decoder_only import DecoderOnly
    from torch_reference.encoder_decoder import make_standard_transformer

    torch.manual_seed(3)
    if name == "encoder_decoder_document":
        return make_standard_transformer(11, 13, 12, 20, 3, 2)
    return DecoderOnly(13, 12, 3, 17)


# The decoder-only document fixes its feed-forward network at four times the width, the other its table at 5000 rows.
AS_THE_DOCUMENT: dict[str, dict[str, Any]] = {
    "encoder_decoder_document": dict(max_length=5000),
    "decoder_only_document": dict(d_ff=48),
}


@both_documents
def test_a_documents_state_comes_back_bit_for_bit_under_the_same_keys(name):
    reference = reference_of(name)
    state = {key: tensor.numpy() for key, tensor in reference.state_dict().items()}
    model = model_of(name, **AS_THE_DOCUMENT[name])
    load_torch(model, reference.state_dict())
    assert_same_arrays(to_torch(model), state)
    load_torch(other := model_of(name, seed=1, **AS_THE_DOCUMENT[name]), to_torch(model))
    assert bits_of(other) == bits_of(model)


@both_documents
def test_pytorch_loads_what_we_export(name):
    torch, reference = pytest.importorskip("torch"), reference_of(name)
    exported = to_torch(model_of(name, seed=5, **AS_THE_DOCUMENT[name]))
    reference.load_state_dict({key: torch.from_numpy(array) for key, array in exported.items()}, strict=True)
    assert_same_arrays({key: tensor.numpy() for key, tensor in reference.state_dict().items()}, exported)


def test_the_document_at_its_own_depth_has_262_keys_for_26_parameters_and_2_buffers():
    table = table_for(hollow(PRESETS["encoder_decoder_document"](num_layers=6)))
    keys = [source for rule in table.rules for source in rule.sources]
    assert len(keys) == len(set(keys)) == 262
    targets = [target for rule in table.rules for target in rule.targets]
    assert len(targets) == len(set(targets)) == 28
    assert sum(rule.kind == "buffer" for rule in table.rules) == 2


def test_tensors_land_where_their_names_say():
    model = model_of("encoder_decoder_document")
    state = to_torch(model)
    decoder = model.decoder.layers[0]
    for key, value in {
        "decoder.layers.1.src_attn.linears.2.weight": decoder.cross_attention.value.kernel[...].T,
        "decoder.layers.0.self_attn.linears.3.bias": decoder.self_attention.output.bias[...],
        "encoder.layers.1.feed_forward.w1.weight": model.encoder.layers[1].feed_forward.up.kernel[...].T,
        "encoder.layers.0.feed_forward.w2.weight": model.encoder.layers[0].feed_forward.down.kernel[...].T,
        "decoder.layers.0.sublayer.2.norm.gamma": decoder.feed_forward_residual.norm.scale[...],
        "encoder.norm.beta": model.encoder.norm.bias[...],
        "src_embed.0.lut.weight": model.source_embedding.embedding[...],
        "tgt_embed.1.pe": model.target_positions.table[...][None],
        "generator.proj.weight": model.output.kernel[...],
    }.items():
        np.testing.assert_array_equal(state[key], value, strict=False)


@both_documents
def test_the_position_table_is_copied_whatever_it_holds(name):
    model, state = model_of(name), to_torch(model_of(name, seed=1))
    rng = np.random.default_rng(4)
    if name == "encoder_decoder_document":
        for key in ("src_embed.1.pe", "tgt_embed.1.pe"):
            state[key] = rng.standard_normal((1, 17, 12)).astype(np.float32)
        load_torch(model, state)
        np.testing.assert_array_equal(model.source_positions.table[...], state["src_embed.1.pe"][0])
        np.testing.assert_array_equal(model.target_positions.table[...], state["tgt_embed.1.pe"][0])
        return
    # The other document keeps its table out of the state, so it may be given and need not be.
    assert "position_embedding" not in state
    before = bits(model.positions.table[...])
    load_torch(model, state)
    assert bits(model.positions.table[...]) == before
    table = rng.standard_normal((17, 12)).astype(np.float32)
    load_torch(model, {**state, "position_embedding": table})
    np.testing.assert_array_equal(model.positions.table[...], table)
    assert (
        "position_embedding has shape (17, 11), expected (17, 12)"
        in refused(model, {**state, "position_embedding": table[:, :11]})[0]
    )


@pytest.mark.parametrize("name", [*DOCUMENTS, "paper_base", "encoder_decoder_small", "gpt2_small"])
def test_every_preset_comes_back_bit_for_bit_from_pytorch_names(name):
    model, other = model_of(name), model_of(name, seed=1)
    load_torch(other, to_torch(model))
    assert bits_of(other) == bits_of(model)


@both_documents
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_exported_arrays_may_be_saved_by_anyone(tmp_path, name, dtype):
    state = to_torch(model_of(name, param_dtype=dtype))
    safetensors.numpy.save_file(state, tmp_path / "state")  # 0.8.0 would scramble an array that is transposed in memory
    assert_same_arrays(safetensors.numpy.load_file(tmp_path / "state"), state)
    assert all(array.flags.owndata for array in state.values())
    assert len({id(array) for array in state.values()}) == len(state)


def test_gpt2_has_gpt2s_names_fused_projections_and_tied_head():
    model = model_of("gpt2_small")
    state = to_torch(model)
    block = [
        f"{module}.{tensor}"
        for module in ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj")
        for tensor in ("weight", "bias")
    ]
    blocks = {f"transformer.h.{index}.{name}" for index in range(2) for name in block}
    ends = {"transformer.ln_f.weight", "transformer.ln_f.bias", "lm_head.weight"}
    assert set(state) == blocks | ends | {"transformer.wte.weight", "transformer.wpe.weight"}
    attention = model.blocks[1].attention
    projections = (attention.query, attention.key, attention.value)
    fused = np.concatenate([np.asarray(p.kernel[...]) for p in projections], axis=1)
    np.testing.assert_array_equal(state["transformer.h.1.attn.c_attn.weight"], fused)
    np.testing.assert_array_equal(
        state["transformer.h.1.attn.c_attn.bias"], np.concatenate([np.asarray(p.bias[...]) for p in projections])
    )
    np.testing.assert_array_equal(state["transformer.h.0.mlp.c_fc.weight"], model.blocks[0].feed_forward.up.kernel[...])
    np.testing.assert_array_equal(state["lm_head.weight"], state["transformer.wte.weight"])
    state["lm_head.weight"] = state["lm_head.weight"] + 1
    assert "lm_head.weight must equal transformer.wte.weight, since the model shares them" in refused(model, state)[0]


def test_gpt2s_table_serves_sinusoidal_untied_and_biasless_models_too():
    options: dict[str, Any] = dict(position_table="exp", embedding_tying="none", output_bias="with", final_norm="none")
    model = model_of("gpt2_small", projection_bias="without", **options)
    state = to_torch(model)
    assert {"lm_head.bias", "lm_head.weight"} < set(state)
    assert not any(key.endswith(("c_attn.bias", "attn.c_proj.bias")) or "ln_f" in key or "wpe" in key for key in state)
    load_torch(other := model_of("gpt2_small", seed=1, projection_bias="without", **options), state)
    assert bits_of(other) == bits_of(model)


def test_the_documents_state_also_fills_a_model_that_shares_nothing():
    shared = model_of("encoder_decoder_document")
    copies = model_of("encoder_decoder_document", seed=1, sharing="none")
    state = to_torch(shared)
    load_torch(copies, state)
    assert_same_arrays(to_torch(copies), state)
    # Unlike the shared model, it may then be given other values under each name.
    state["encoder.layers.1.self_attn.linears.2.bias"] = np.arange(12, dtype=np.float32)
    load_torch(copies, state)
    assert_same_arrays(to_torch(copies), state)
    message = "encoder.layers.1.self_attn.linears.2.bias must equal encoder.layers.0.self_attn.linears.0.bias"
    (problem,) = refused(shared, state)
    assert problem.startswith(message)
    assert "12 of 12 values" in problem
    assert "sharing='none'" in problem


# Kinds of arrays and of types


def test_arrays_may_be_of_numpy_jax_or_pytorch_and_are_copied():
    model, state = model_of("decoder_only_document"), to_torch(model_of("decoder_only_document", seed=1))
    expected = {key: array.copy() for key, array in state.items()}
    mixed: dict[str, Any] = {key: jnp.asarray(array) if "bias" in key else array for key, array in state.items()}
    mixed["Wq.weight"] = np.asfortranarray(state["Wq.weight"])
    mixed["Wk.weight"] = np.ascontiguousarray(state["Wk.weight"].T).T
    load_torch(model, mixed)
    for array in state.values():
        array += 1
    assert_same_arrays(to_torch(model), expected)


def test_pytorch_tensors_of_every_layout_and_floating_type_are_read():
    torch = pytest.importorskip("torch")
    values = torch.randn(5, 7, generator=torch.manual_seed(0))
    for tensor in (values, values.T, values[:, ::2], torch.nn.Parameter(values), values.bfloat16(), values.half()):
        array = as_array(tensor)
        np.testing.assert_array_equal(array.astype(np.float32), tensor.detach().float().numpy())
        assert array.dtype.name == str(tensor.dtype).removeprefix("torch.")
    array = as_array(tensor := values.bfloat16().T)
    np.testing.assert_array_equal(array.view(np.uint16), tensor.contiguous().view(torch.uint16).numpy())
    tensor.zero_()
    assert array.any()


def test_a_wider_type_is_taken_where_no_bit_is_lost():
    model = model_of("decoder_only_document")
    state = {
        key: array.astype(np.float16) for key, array in to_torch(model_of("decoder_only_document", seed=1)).items()
    }
    wider: dict[str, Any] = {key: array.astype(np.float64) for key, array in state.items()}
    load_torch(model, wider)
    for key, array in to_torch(model).items():
        assert array.dtype == np.float32
        np.testing.assert_array_equal(array, state[key].astype(np.float32))
    wider["Wq.bias"] = wider["Wq.bias"] + 1e-12
    (problem,) = refused(model, wider)
    assert problem == (
        "Wq.bias would lose bits from float64 to float32; build the model with param_dtype='float64', or pass cast='round'"
    )
    load_torch(model, wider, cast="round")
    np.testing.assert_array_equal(to_torch(model)["Wq.bias"], wider["Wq.bias"].astype(np.float32))
    wider["Wq.bias"] = np.full(12, 1e300)  # overflows quietly, as rounding does
    load_torch(model, wider, cast="round")
    assert np.isinf(to_torch(model)["Wq.bias"]).all()


def test_a_bfloat16_model_takes_a_float32_state_by_rounding_only():
    model = model_of("encoder_decoder_document", param_dtype="bfloat16")
    state = to_torch(model_of("encoder_decoder_document"))
    problems = refused(model, state)
    assert len(problems) == 26
    assert all("would lose bits from float32 to bfloat16" in problem for problem in problems)
    load_torch(model, state, cast="round")
    for key, array in to_torch(model).items():
        assert bits(array) == bits(state[key].astype(array.dtype))
        assert array.dtype == (np.float32 if key.endswith(".pe") else jnp.bfloat16)


def test_nan_and_infinity_are_weights_like_others():
    model, state = model_of("decoder_only_document"), to_torch(model_of("decoder_only_document", seed=1))
    state["Wq.bias"][:3] = [np.nan, np.inf, -0.0]
    load_torch(model, state)
    assert_same_arrays(to_torch(model), state)


def test_a_float64_model_is_loaded_in_the_64_bit_mode_only():
    with jax.enable_x64(True):
        model = model_of("decoder_only_document", **DOUBLE)
        state = {key: array + 1e-9 for key, array in to_torch(model).items()}
        load_torch(model, state)
        assert_same_arrays(to_torch(model), state)
    problems = refused(model, state)
    assert "float64 parameters need JAX's 64-bit mode; load inside `with jax.enable_x64(True):`" in problems


# What does not fit


def test_every_problem_is_listed_at_once_and_nothing_is_loaded():
    state: dict[str, Any] = to_torch(model_of("encoder_decoder_document", seed=1))
    first = "encoder.layers.0.self_attn.linears.0"
    del state["generator.proj.bias"], state["decoder.layers.1.feed_forward.w1.bias"]
    state["encoder.layers.2.norm.gamma"] = np.zeros((3, 5), np.float32)
    state[f"{first}.weight"] = state[f"{first}.weight"][:, :11]
    state["decoder.norm.beta"] = state["decoder.norm.beta"][None]
    state["encoder.layers.1.sublayer.0.norm.gamma"] = state["encoder.layers.1.sublayer.0.norm.gamma"] + 1
    state["encoder.norm.beta"] = np.arange(12)
    state["encoder.norm.gamma"] = state["encoder.norm.gamma"].astype(np.float64) / 3
    state["src_embed.0.lut.weight"] = None
    state["tgt_embed.0.lut.weight"] = "a table"
    problems = refused(model_of("encoder_decoder_document"), state)
    listing = "\n".join(problems)
    for words in (
        "missing key generator.proj.bias (shape (13,), copy: generator.proj.bias -> output.bias)",
        "missing key decoder.layers.1.feed_forward.w1.bias (alias: ",
        "unexpected key encoder.layers.2.norm.gamma of shape (3, 5)",
        f"{first}.weight has shape (12, 11), expected (12, 12) (transpose: {first}.weight -> encoder.layers.0.",
        f"encoder.layers.0.self_attn.linears.1.weight must equal {first}.weight",
        "float32 (12, 12) against float32 (12, 11)",
        "decoder.norm.beta has shape (1, 12), expected (12,)",
        "encoder.layers.1.sublayer.0.norm.gamma must equal encoder.layers.0.sublayer.0.norm.gamma",
        "encoder.norm.beta has dtype int64, expected a floating one",
        "encoder.norm.gamma would lose bits from float64 to float32",
        "src_embed.0.lut.weight is not an array but NoneType",
        "tgt_embed.0.lut.weight has shape (), expected (13, 12)",
    ):
        assert words in listing, words
    assert len(problems) == 10 + 7  # that weight has seven aliases, four projections in two layers


def test_an_alias_must_be_equal_bit_for_bit():
    model, state = model_of("encoder_decoder_document"), to_torch(model_of("encoder_decoder_document", seed=1))
    names = [f"encoder.layers.{layer}.self_attn.linears.{number}.bias" for layer in (0, 1) for number in range(4)]
    for name in names:
        state[name] = np.where(np.arange(12) == 3, np.float32(0), state[name])
    load_torch(model, state)
    state[names[5]] = np.where(np.arange(12) == 3, np.float32(-0.0), state[names[5]])
    assert refused(model, state)[0].startswith(f"{names[5]} must equal {names[0]}")
    state[names[5]] = state[names[0]].astype(np.float64)
    assert "float64 (12,) against float32 (12,)" in refused(model, state)[0]
    state[names[5]] = state[names[0]].view(np.int32)
    assert "int32 (12,) against float32 (12,)" in refused(model, state)[0]


def test_values_that_are_no_arrays_are_named():
    torch = pytest.importorskip("torch")
    good = to_torch(model_of("decoder_only_document"))
    for value, words in (
        (torch.nn.Linear(3, 5), "Wq.bias is not an array but Linear"),
        (torch.float32, "Wq.bias is not an array but dtype"),
        (torch.ones(12).to_sparse(), "Wq.bias is a tensor that NumPy cannot hold (can't convert Sparse"),
        (torch.ones(12, device="meta"), "Wq.bias is a tensor that NumPy cannot hold (Cannot copy out of meta"),
        ({"nested": 1}, "Wq.bias is not an array but dict"),
    ):
        (problem,) = refused(model_of("decoder_only_document"), {**good, "Wq.bias": value})
        assert problem.startswith(words)


@pytest.mark.parametrize("state", [[("a", 1)], None, "weights.pt"])
def test_a_state_that_is_no_mapping_is_refused(state):
    with pytest.raises(ValueError, match=r"maps names to arrays, got .*; pass module\.state_dict\(\)"):
        load_torch(model_of("decoder_only_document"), state)


def test_a_model_without_a_table_is_refused():
    linear = nnx.Linear(3, 5, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"no table of weights is known for Linear; write one .* and pass table="):
        load_torch(linear, {})
