"""Recordings on disk: what comes back is what went in, and nothing damaged is read."""

import dataclasses
import json

import ml_dtypes
import numpy as np
import pytest

from flax_transformer import parity
from flax_transformer.parity import recording as format_


def random_recording() -> parity.Recording:
    rng = np.random.default_rng(0)
    draw = rng.standard_normal
    return parity.Recording(
        dtype="float64",
        inputs={"ids": rng.integers(0, 11, (3, 5)), "x": draw((3, 5, 7))},
        masks={"causal": np.tril(np.ones((5, 5), bool))},
        parameters={
            "zeta.weight": draw((7, 11)).T,
            "alpha.weight": draw((7, 3, 5)).astype(ml_dtypes.bfloat16).transpose(2, 0, 1),
            "scalar": draw(()),
        },
        buffers={"steps": np.array(7, np.int32), "half": draw((3,)).astype(np.float16), "none": draw((0, 5))},
        activations={"layers.0#1": draw((5, 3)), "layers.0#0": draw((5, 3))[::2], "#0/weights/1": draw((3, 1))},
        outputs={"/0": np.array([np.nan, np.inf, -0.0, 5e-324])},
        tensor_names={"zeta.weight": ("zeta.weight", "tied.weight"), "größe": ("größe",)},
        module_names={"": ("",), "layers.0": ("layers.0", "layers.1")},
        provenance={"framework": "numpy"},
    )


@pytest.fixture
def saved(tmp_path):
    folder = tmp_path / "recording"
    random_recording().save(folder)
    return folder


def assert_same(a: parity.Recording, b: parity.Recording) -> None:
    for field in dataclasses.fields(parity.Recording):
        ours, theirs = getattr(a, field.name), getattr(b, field.name)
        if field.name not in format_.SECTIONS:
            assert ours == theirs, field.name
            continue
        assert list(ours) == list(theirs), "the order of names is part of a recording"
        for name, array in ours.items():
            assert array.dtype == theirs[name].dtype, name
            assert array.shape == theirs[name].shape, name
            assert array.tobytes() == theirs[name].tobytes(), name


def test_a_recording_survives_the_disk_bit_for_bit_with_transposed_and_bfloat16_arrays(saved):
    assert_same(random_recording(), parity.load(saved))


def test_saving_again_replaces_the_recording(saved):
    other = dataclasses.replace(random_recording(), dtype="float32", masks={})
    other.save(saved)
    assert_same(other, parity.load(saved))


def test_a_changed_byte_in_any_file_is_found_and_every_such_file_is_named(saved):
    for name in ("parameters", "outputs"):
        file = saved / f"{name}.safetensors"
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(bytes(content))
    with pytest.raises(ValueError, match=r"parameters\.safetensors: changed.*outputs\.safetensors: changed"):
        parity.load(saved)


def test_truncated_missing_and_foreign_files_are_all_named(saved):
    truncated = saved / "activations.safetensors"
    truncated.write_bytes(truncated.read_bytes()[:-3])
    (saved / "buffers.safetensors").unlink()
    (saved / "stranger.safetensors").write_bytes(b"")
    with pytest.raises(
        ValueError,
        match=r"buffers\.safetensors: missing; activations\.safetensors: has \d+ bytes.*stranger\.safetensors: is not",
    ):
        parity.load(saved)


def rewrite(folder, change) -> None:
    file = folder / format_.MANIFEST
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def test_a_changed_alias_in_the_manifest_is_found(saved):
    rewrite(saved, lambda content: content["module_names"].update({"layers.0": ["layers.0"]}))
    with pytest.raises(ValueError, match=r"recording\.json: changed"):
        parity.load(saved)


def test_a_recording_of_another_version_says_so(saved):
    rewrite(saved, lambda content: content.update(version=1))
    with pytest.raises(ValueError, match="has version 1 and this program reads 2"):
        parity.load(saved)


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "cannot be read"), ("{", "damaged"), ("[]", "no recording"), ('{"format": "pickle"}', "no recording")],
)
def test_what_is_no_recording_is_refused(tmp_path, content, message):
    if content is not None:
        (tmp_path / format_.MANIFEST).write_text(content)
    with pytest.raises(ValueError, match=message):
        parity.load(tmp_path)


def test_an_interrupted_save_leaves_nothing_that_loads(saved, monkeypatch):
    def fail(*_):
        raise OSError("the disk is full")

    monkeypatch.setattr(format_, "save_file", fail)
    with pytest.raises(OSError, match="full"):
        random_recording().save(saved)
    with pytest.raises(ValueError, match="no recording"):
        parity.load(saved)


def test_arrays_that_the_format_cannot_hold_are_all_named_before_anything_is_written(tmp_path):
    odd = {"words": np.array(["a"]), "complex": np.ones(3, np.complex64)}
    with pytest.raises(ValueError, match=r"buffers/words: <U1; buffers/complex: complex64"):
        dataclasses.replace(random_recording(), buffers=odd).save(tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_inputs_are_named_by_place_or_keyword_and_only_floats_are_cast():
    rng = np.random.default_rng(1)
    x, ids = rng.standard_normal((3, 5)), rng.integers(0, 7, (3,))
    assert {name: a.dtype.name for name, a in format_.as_inputs((x, ids), "float32").items()} == {
        "0": "float32",
        "1": "int64",
    }
    assert format_.as_inputs({"x": x}, "bfloat16")["x"].dtype == ml_dtypes.bfloat16
    assert list(format_.as_inputs(x, "float64")) == ["0"]


@pytest.mark.parametrize("inputs", [(), {"x": "text"}, (None,)])
def test_inputs_that_are_no_numbers_are_refused(inputs):
    with pytest.raises(ValueError, match="inputs must be one or more arrays"):
        format_.as_inputs(inputs, "float64")


def test_an_unknown_dtype_is_refused():
    with pytest.raises(ValueError, match=r"must be one of float64, .* got 'double'"):
        format_.as_inputs(np.arange(3.0), "double")


def test_nested_outputs_are_flattened_with_their_places():
    @dataclasses.dataclass
    class Output:
        logits: np.ndarray
        cache: object

    arrays = [np.full((3,), float(n)) for n in range(3)]
    nested = Output(arrays[0], (None, {"k": arrays[1]}, [arrays[2]]))
    assert dict(format_.flatten(nested, np.ndarray)) == {
        "/logits": arrays[0],
        "/cache/1/k": arrays[1],
        "/cache/2/0": arrays[2],
    }
    assert [suffix for suffix, _ in format_.flatten(arrays[0], np.ndarray)] == [""]


def test_an_activation_key_can_be_taken_apart():
    key = format_.activation_key("layers.0", 12, "/cache/1")
    assert format_.split_activation_key(key) == ("layers.0", 12)
    assert format_.split_activation_key(format_.activation_key("", 0)) == ("", 0)
