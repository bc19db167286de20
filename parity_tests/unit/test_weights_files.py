"""Safetensors files of our own, and PyTorch files: read whole or refused, and never run."""

import os
import pickle
import re
import sys
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

from flax_transformer.weights import load_safetensors, load_torch, read_torch_file, save_safetensors, to_torch
from flax_transformer.weights.files import FORMAT
from flax_transformer.weights.transfer import variables
from parity_tests.unit.small_models import DOUBLE, PRESETS, assert_same_arrays, bits_of, build


def model_of(name: str = "decoder_only_document", *, seed: int = 0, **options: Any) -> Any:
    return build(PRESETS[name](**options), seed=seed)


def refused(path, words: str, model=None) -> None:
    model = model or model_of(seed=1)
    before = bits_of(model)
    with pytest.raises(ValueError, match=re.escape(words)) as error:
        load_safetensors(model, path)
    assert str(path) in str(error.value) or "nothing was loaded" in str(error.value)
    assert bits_of(model) == before


# Safetensors


def assert_comes_back(name: str, path, **options: Any) -> None:
    model, other = (model_of(name, seed=seed, **options) for seed in (0, 1))
    bias = next(node for _, node in nnx.iter_graph(model) if isinstance(node, nnx.Param) and node.shape == (12,))
    bias[...] = jnp.asarray([jnp.nan, -0.0, jnp.inf] * 4, bias.dtype)
    save_safetensors(model, path)
    load_safetensors(other, path)
    assert bits_of(other) == bits_of(model)
    stored = safetensors.numpy.load_file(path)
    assert_same_arrays(stored, {key: variable[...] for key, variable in variables(model)})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["encoder_decoder_document", "gpt2_small"])
def test_a_file_comes_back_bit_for_bit(tmp_path, name, dtype):
    assert_comes_back(name, tmp_path / "weights", param_dtype=dtype)
    assert [path.name for path in tmp_path.iterdir()] == ["weights"]


def test_a_float64_file_comes_back_bit_for_bit(tmp_path, float64):
    assert_comes_back("encoder_decoder_document", tmp_path / "weights", **DOUBLE)


def test_a_shared_tensor_is_stored_once_under_one_name(tmp_path):
    save_safetensors(model_of("encoder_decoder_document"), tmp_path / "weights")
    stored = safetensors.numpy.load_file(tmp_path / "weights")
    assert len(stored) == 26 + 2
    assert "encoder.layers.0.self_attention.key.kernel" in stored
    save_safetensors(model_of("gpt2_small"), tmp_path / "weights")
    assert len(safetensors.numpy.load_file(tmp_path / "weights")) == 36


def test_a_failed_save_leaves_the_earlier_file_and_no_other(tmp_path, monkeypatch):
    path = tmp_path / "weights"
    save_safetensors(model_of(), path)
    content = path.read_bytes()

    def fill_the_disk(state, path, metadata):
        path.write_bytes(content[:100])
        raise OSError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(safetensors.numpy, "save_file", fill_the_disk)
        with pytest.raises(OSError, match="No space left"):
            save_safetensors(model_of(seed=1), path)
    assert path.read_bytes() == content
    assert [entry.name for entry in tmp_path.iterdir()] == ["weights"]
    save_safetensors(other := model_of(seed=1), path)
    load_safetensors(model := model_of(), path)
    assert bits_of(model) == bits_of(other)


def test_a_file_of_another_model_is_refused_with_every_difference(tmp_path):
    path = tmp_path / "weights"
    save_safetensors(model_of("gpt2_small"), path)
    model = model_of("gpt2_small", d_ff=24, num_layers=1, embedding_tying="none")
    before = bits_of(model)
    with pytest.raises(ValueError, match="nothing was loaded") as error:
        load_safetensors(model, path)
    assert bits_of(model) == before
    for words in (
        "unexpected key blocks.1.attention.key.kernel of shape (12, 12)",
        "blocks.0.feed_forward.up.kernel has shape (12, 20), expected (12, 24)",
        "missing key output.kernel (shape (13, 12)",
    ):
        assert words in str(error.value)


def test_a_file_of_another_type_is_refused_rather_than_cast(tmp_path):
    path = tmp_path / "weights"
    save_safetensors(model_of(param_dtype="bfloat16"), path)
    refused(path, "blocks.0.attention.query.kernel is stored as bfloat16 but the model keeps float32")
    save_safetensors(model_of(), path)
    refused(path, "is stored as float32 but the model keeps bfloat16", model_of(param_dtype="bfloat16"))


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}, {"format": FORMAT + "0"}])
def test_a_safetensors_file_that_is_not_ours_is_refused(tmp_path, metadata):
    path = tmp_path / "model.safetensors"
    safetensors.numpy.save_file(to_torch(model_of()), path, metadata=metadata)
    found = None if metadata is None else metadata["format"]
    refused(path, f"is not written by save_safetensors: its format is {found!r}")
    # What the message advises works.
    load_torch(model := model_of(seed=1), safetensors.numpy.load_file(path))
    assert_same_arrays(to_torch(model), to_torch(model_of()))


@pytest.mark.parametrize("keep", [0, 4, 8, 100, 0.5, -1])
def test_a_truncated_file_is_refused(tmp_path, keep):
    save_safetensors(model_of(), path := tmp_path / "weights")
    content = path.read_bytes()
    path.write_bytes(content[: int(keep * len(content)) if isinstance(keep, float) else keep])
    refused(path, "is damaged or no safetensors file")


@pytest.mark.parametrize("content", [b"hello, world", b"\xff" * 64, b"PK\x03\x04" + b"\0" * 64])
def test_a_file_of_something_else_is_refused(tmp_path, content):
    (tmp_path / "weights").write_bytes(content)
    refused(tmp_path / "weights", "is damaged or no safetensors file")


def test_a_file_that_is_not_there_is_named(tmp_path):
    refused(tmp_path / "nowhere", "nowhere is not a file; save_safetensors writes one")
    refused(tmp_path, "is not a file")


# PyTorch's own files


def saved(path, content: Any, **options: Any):
    torch = pytest.importorskip("torch")
    torch.save(content, path, **options)
    return path


def reference() -> Any:
    pytest.importorskip("torch")
    from torch_reference.decoder_only import DecoderOnly

    return DecoderOnly(13, 12, 3, 17)


@pytest.mark.parametrize("zipped", [True, False])
def test_a_state_dict_file_is_read(tmp_path, zipped):
    state = reference().state_dict()
    path = saved(tmp_path / "state.pt", state, _use_new_zipfile_serialization=zipped)
    assert_same_arrays(read_torch_file(path), {key: tensor.numpy() for key, tensor in state.items()})
    load_torch(model := model_of(d_ff=48), read_torch_file(str(path)))
    assert_same_arrays(to_torch(model), read_torch_file(path))


def test_bfloat16_tensors_of_a_file_keep_their_bits(tmp_path):
    torch = pytest.importorskip("torch")
    tensor = torch.randn(3, 5, generator=torch.manual_seed(0)).bfloat16()
    array = read_torch_file(saved(tmp_path / "state.pt", {"tensor": tensor.T}))["tensor"]
    assert array.dtype == jnp.bfloat16
    np.testing.assert_array_equal(array.view(np.uint16), tensor.T.contiguous().view(torch.uint16).numpy())


class RunsWhenUnpickled:
    def __init__(self, path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("writer", ["pickle", "zipped", "legacy"])
def test_a_file_with_code_is_refused_and_the_code_does_not_run(tmp_path, writer):
    path, trace = tmp_path / "state.pt", tmp_path / "ran"
    content = {"Wq.weight": RunsWhenUnpickled(trace)}
    if writer == "pickle":
        pytest.importorskip("torch")
        path.write_bytes(pickle.dumps(content))
    else:
        saved(path, content, _use_new_zipfile_serialization=writer == "zipped")
    with pytest.raises(ValueError, match="holds more than tensors, which only an unsafe load would run"):
        read_torch_file(path)
    assert not trace.exists()


def test_a_whole_module_is_refused(tmp_path):
    path = saved(tmp_path / "module.pt", reference())
    with pytest.raises(ValueError, match=r"save module\.state_dict\(\) instead of the module"):
        read_torch_file(path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (lambda state: {"model": state, "step": 3}, r"holds dict, not a dict of tensors; .*or pass that part of it"),
        (lambda state: list(state.values()), "holds list, not a dict of tensors"),
        (lambda state: state["Wq.weight"], "holds Tensor, not a dict of tensors"),
        (lambda state: {"a.b": state["Wq.weight"].to_sparse()}, r"cannot be read: a\.b is a tensor that NumPy cannot"),
    ],
)
def test_a_file_of_anything_but_tensors_by_name_is_refused(tmp_path, content, words):
    path = saved(tmp_path / "state.pt", content(reference().state_dict()))
    with pytest.raises(ValueError, match=words):
        read_torch_file(path)


@pytest.mark.parametrize("zipped", [True, False])
def test_a_damaged_file_is_one_error_or_still_tensors(tmp_path, zipped):
    path = saved(tmp_path / "state.pt", reference().state_dict(), _use_new_zipfile_serialization=zipped)
    content, rng = path.read_bytes(), np.random.default_rng(0)
    refusals = 0
    for trial in range(40):
        damaged = bytearray(content)
        if trial % 2:
            damaged = damaged[: rng.integers(len(damaged))]
        else:
            for place in rng.integers(0, min(len(damaged), 2000), 5):
                damaged[place] = rng.integers(256)
        path.write_bytes(damaged)
        try:
            assert all(isinstance(array, np.ndarray) for array in read_torch_file(path).values())
        except ValueError as error:
            refusals += 1
            assert str(path) in str(error)  # noqa: PT017 - many of the trials raise and some need not
    assert refusals > 20


@pytest.mark.parametrize("content", [b"", b"hello, world", b"\x80\x04", b"{}"])
def test_a_file_of_something_else_is_no_pytorch_file(tmp_path, content):
    pytest.importorskip("torch")
    (tmp_path / "state.pt").write_bytes(content)
    with pytest.raises(ValueError, match=r"state\.pt is damaged, or holds more than tensors"):
        read_torch_file(tmp_path / "state.pt")


def test_a_pytorch_file_that_is_not_there_is_named(tmp_path):
    pytest.importorskip("torch")
    for path in (tmp_path / "nowhere.pt", tmp_path):
        with pytest.raises(ValueError, match=f"{path} is not a file"):
            read_torch_file(path)


def test_without_torch_the_remedy_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ValueError, match="reading a PyTorch file needs torch: pip install torch, or convert it"):
        read_torch_file(tmp_path / "state.pt")
    # Nor does anything else here need it.
    load_torch(model := model_of(seed=1), to_torch(model_of()))
    assert bits_of(model) == bits_of(model_of())
