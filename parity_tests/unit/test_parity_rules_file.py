"""Rules in a file mean what ``Rules`` in Python mean, and a wrong file is refused with every wrong entry named."""

import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest

from flax_transformer import parity
from flax_transformer.parity.layouts import STEPS, as_transform
from flax_transformer.parity.recording import FORMAT, SECTIONS, VERSION
from parity_tests.unit.test_parity_matching import draw, recorded

DOCUMENT = (Path(__file__).parents[2] / "docs" / "parity.md").read_text(encoding="utf-8")
RULES = """
[parameters]
"attention.in_proj_weight" = ["query.kernel", "key.kernel", "value.kernel"]
head.weight = "head.kernel"
scale = []

[modules]
layers.0 = "blocks.0"
dropout = []
"" = ""

[transforms]
"attention.in_proj_weight" = "kernel, concatenate 0"
head.weight = "kernel"
"""


def written(folder, text: str):
    path = folder / "rules.toml"
    path.write_text(text)
    return path


def test_a_file_says_what_rules_in_python_say_with_and_without_quotation_marks(tmp_path):
    assert parity.load_rules(written(tmp_path, RULES)) == parity.Rules(
        parameters={
            "attention.in_proj_weight": ("query.kernel", "key.kernel", "value.kernel"),
            "head.weight": "head.kernel",
            "scale": None,
        },
        modules={"layers.0": "blocks.0", "dropout": None, "": ""},
        transforms={"attention.in_proj_weight": "kernel, concatenate 0", "head.weight": "kernel"},
    )


def test_every_wrong_entry_is_named_with_its_table_and_key(tmp_path):
    text = """
    transforms = "kernel"
    [parameter]
    a = "b"
    [parameters]
    "c.d" = 3
    "c.e" = ["x", 5]
    "f.g" = "x"
    f.g = "x"
    [modules]
    h.i = ["x", "y"]
    """
    with pytest.raises(ValueError, match="are not right") as error:
        parity.load_rules(written(tmp_path, text))
    for part in (
        "parameter: is none of the tables parameters, modules, transforms",
        "transforms: must be a table, [transforms]",
        "parameters: 'c.d' = 3 must be a name, or [] for none",
        "parameters: 'c.e' = ['x', 5] must be a name",
        "parameters: 'f.g' is there twice",
        "modules: 'h.i' = ['x', 'y'] must be one path",
    ):
        assert part in str(error.value)


@pytest.mark.parametrize(
    "layout", ["sideways", "", "kernel 1", "transpose", "transpose x", "take 1", "concatenate", "kernel,", "part 0 3"]
)
def test_a_layout_that_is_no_layout_is_refused_and_the_words_are_listed(tmp_path, layout):
    with pytest.raises(
        ValueError, match=rf"transforms: 'a' = '{layout}' is no layout '{layout}' \(there are same, kernel"
    ):
        parity.load_rules(written(tmp_path, f'[transforms]\na = "{layout}"'))


def test_a_number_is_no_layout(tmp_path):
    with pytest.raises(ValueError, match="transforms: 'a' = 7 must be the words of a layout"):
        parity.load_rules(written(tmp_path, "[transforms]\na = 7"))


@pytest.mark.parametrize(("content", "message"), [(None, "cannot be read"), (b"= 1", "no TOML"), (b"\xff", "no TOML")])
def test_what_is_no_toml_is_refused(tmp_path, content, message):
    path = tmp_path / "rules.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        parity.load_rules(path)


def test_layouts_in_words_do_what_numpy_does():
    a, b, c = (draw(3, 5, seed=seed) for seed in range(3))
    cube = draw(2, 3, 7)
    for layout, arrays, expected in (
        ("same", [a], a),
        ("kernel", [a], a.T),
        ("transpose 0 2 1", [cube], cube.transpose(0, 2, 1)),
        ("reshape 2 -1", [cube], cube.reshape(2, 21)),
        ("reshape 2 -1, kernel", [cube], cube.reshape(2, 21).T),
        ("take 1 2", [cube], cube[:, :, 1]),
        ("part 2 3 1", [cube], cube[:, 2:]),
        ("concatenate -1", [a, b, c], np.concatenate([a, b, c], axis=-1)),
        ("kernel, concatenate 0", [a, b], np.concatenate([a.T, b.T])),
        ("stack 1, transpose 1 0 2", [a, b], np.stack([a, b])),
    ):
        np.testing.assert_array_equal(as_transform(layout)(*arrays), expected, err_msg=layout)


def test_a_fused_parameter_is_compared_with_three_kernels_by_words_alone():
    query, key, value = (draw(5, 3, seed=seed) for seed in range(3))
    reference = recorded({"in_proj": np.concatenate([query, key, value])}, ["#0"])
    kernels = {"q.kernel": query.T, "k.kernel": key.T, "v.kernel": value.T}
    rules = parity.Rules(parameters={"in_proj": tuple(kernels)}, transforms={"in_proj": "kernel, concatenate 0"})
    verdict = parity.compare(reference, recorded(kernels, ["#0"]), rules)
    assert verdict.passed, str(verdict)
    assert str(verdict.matches[0]) == "in_proj = q.kernel+k.kernel+v.kernel (kernel, concatenate 0 layout), by rule"


def test_layouts_that_do_not_fit_are_all_named_with_their_shapes():
    reference = recorded({"a": draw(3, 5), "b": draw(7), "c": draw(3, 5)}, ["m#0", "#0"])
    rules = parity.Rules(transforms={"a": "transpose 0 2 1", "b": "part 0 2 0", "m": "take 2 0"})
    with pytest.raises(ValueError, match="must fit the candidate's arrays") as error:
        parity.compare(reference, reference, rules)
    for part in (
        "a: 'transpose 0 2 1' does not fit an array of shape (3, 5)",
        "b: 'part 0 2 0' does not fit an array of shape (7,)",
        "m: 'take 2 0' does not fit an array of shape (2, 3)",
    ):
        assert part in str(error.value)
    assert "c:" not in str(error.value)


def test_several_names_need_a_layout_that_makes_them_one():
    reference = recorded({"a": draw(6, 5)}, ["#0"])
    candidate = recorded({"b": draw(3, 5), "c": draw(3, 5)}, ["#0"])
    for transforms in ({}, {"a": "kernel"}):
        rules = parity.Rules(parameters={"a": ("b", "c")}, transforms=transforms)
        with pytest.raises(ValueError, match=r"one array of \('b', 'c'\) for 'a', or layout with concatenate or stack"):
            parity.compare(reference, candidate, rules)
    other = dataclasses.replace(rules, transforms={"a": "concatenate 1"})
    found = parity.compare(reference, candidate, other).first_divergence
    assert found is not None
    assert found.row.detail == "has shape (3, 10), the reference (6, 5)"


def test_the_document_has_every_step_of_a_layout_and_rules_that_load(tmp_path):
    rows = re.findall(r"^\| `(\w+) ?([^`]*)` \|", DOCUMENT.split("## Rules")[1].split("## The report")[0], re.MULTILINE)
    assert dict(rows) == {word: numbers for word, (numbers, _) in STEPS.items()}
    example = DOCUMENT.split("```toml\n")[1].split("```")[0]
    rules = parity.load_rules(written(tmp_path, example))
    assert rules.parameters["blocks.0.attention.scale"] is None
    assert rules.transforms["blocks.0.attention.in_proj_weight"] == "kernel, concatenate 0"


def test_the_document_has_every_section_of_a_recording_in_order():
    rows = re.findall(r"^\| `(\w+)` \|", DOCUMENT.split("| section |")[1].split("Dtypes are")[0], re.MULTILINE)
    assert tuple(rows) == SECTIONS
    assert f"Version {VERSION}." in DOCUMENT
    assert f'"{FORMAT}"' in DOCUMENT
