"""``python -m flax_transformer.parity``: its exit status tells right from wrong from unusable; no error is a traceback."""

import dataclasses
import json
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest

from flax_transformer import parity
from flax_transformer.parity import recording as format_
from flax_transformer.parity.__main__ import main
from parity_tests.unit.small_recordings import RULES, Fused, Split, record

pytestmark = pytest.mark.xdist_group("report")  # one worker makes the recordings


@pytest.fixture(scope="module")
def recordings() -> dict[str, parity.Recording]:
    return {
        "reference": record(Split()),
        "candidate": record(Split(), execution="jit"),
        "wrong": record(Split(epsilon=1e-3)),
        "fused": record(Fused(Split())),
    }


@pytest.fixture(scope="module")
def originals(recordings, tmp_path_factory):
    folder = tmp_path_factory.mktemp("recordings")
    for name, recording in recordings.items():
        recording.save(folder / name)
    return folder


@pytest.fixture
def saved(originals, tmp_path):
    """Recordings that a test may damage."""
    return shutil.copytree(originals, tmp_path / "recordings")


@pytest.fixture
def call(capsys):
    def run(*arguments: object) -> tuple[int, str, str]:
        try:
            status = main([str(argument) for argument in arguments])
        except SystemExit as exit_:
            status = exit_.code
        printed = capsys.readouterr()
        assert "Traceback" not in printed.err
        assert isinstance(status, int)
        return status, printed.out, printed.err

    return run


def test_a_right_port_exits_with_0_and_plain_text(originals, call):
    status, out, err = call("compare", originals / "reference", originals / "candidate")
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].startswith("PASSED (float64")
    rungs = ["keys", "shapes", "modules", "output", "loss", "backward", "gradients", "updates", "training"]
    assert [line.split()[1] for line in lines if line.startswith("  ok ")] == rungs
    assert "zero by structure, exempt from updates and training: blocks.0.key.bias, blocks.1.key.bias" in lines
    assert "\x1b" not in out, "no colours where nobody can see them"


def test_a_wrong_port_exits_with_1_and_says_where_to_look(originals, call):
    status, out, _ = call("compare", originals / "reference", originals / "wrong")
    assert status == 1
    assert out.startswith("DIVERGED")
    assert "first divergence: rung modules, module blocks.1.norm, blocks.1.norm#0: differs by" in out
    assert "         (model)#0: differs by" in out


def test_long_lines_are_not_broken_where_the_output_is_a_file(originals, call):
    _, out, _ = call("compare", originals / "reference", originals / "wrong")
    assert max(map(len, out.splitlines())) > 100


def test_the_command_runs_as_a_module(originals):
    command = [sys.executable, "-m", "flax_transformer.parity", "compare", originals / "reference", originals / "wrong"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.splitlines()[0].split()[0], done.stderr) == (1, "DIVERGED", "")


def test_the_json_says_all_that_the_verdict_says(originals, call, recordings, tmp_path):
    status, _, _ = call(
        "compare", originals / "reference", originals / "wrong", "--json", tmp_path / "verdict.json"
    )  # fmt: skip
    assert status == 1
    content = json.loads((tmp_path / "verdict.json").read_text())
    verdict = parity.compare(recordings["reference"], recordings["wrong"])
    assert (content["format"], content["version"]) == ("flax_transformer.parity verdict", 1)
    assert content["passed"] is False
    assert content["first_divergence"]["path"] == "blocks.1.norm"
    assert {rung["name"]: rung["passed"] for rung in content["rungs"]} == {
        **dict.fromkeys(parity.RUNGS),
        **{rung.name: rung.passed for rung in verdict.rungs},
    }
    rows = {rung["name"]: rung["rows"] for rung in content["rungs"]}
    for rung in verdict.rungs:
        assert [row["name"] for row in rows[rung.name]] == [row.name for row in rung.rows]
    for row in (row for found in rows.values() for row in found if row["judged"] is not None):
        assert row["passed"] == (row["judged"] <= row["allowed"]), row
    assert content["structural_zeros"] == list(verdict.structural_zeros)
    np.testing.assert_array_equal(content["curves"]["candidate"], verdict.curves["candidate"])
    assert {match["layout"] for match in content["matches"]} == {"same"}


def test_numbers_that_are_none_are_words_in_the_json(recordings):
    outputs = {"": np.array([np.nan, np.inf, 1.0])}
    first, second = (
        dataclasses.replace(recordings["reference"], losses={"loss": np.array([1.0, loss, -loss])}, outputs=outputs)
        for loss in (np.inf, np.nan)
    )
    content = parity.compare(first, second).to_dict()
    assert json.loads(json.dumps(content, allow_nan=False)) == content
    assert content["curves"] == {"reference": [1.0, "Infinity", "-Infinity"], "candidate": [1.0, "NaN", "NaN"]}


def test_rules_from_a_file_match_what_has_other_names_and_layouts(saved, call):
    rules = saved / "rules.toml"
    rules.write_text(RULES)
    arguments = "compare", saved / "fused", saved / "reference"
    status, out, _ = call(*arguments, "--rules", rules)
    assert status == 0, out
    assert call(*arguments)[0] == 1, "nothing but rules can say what is fused"
    swapped = RULES.replace(
        '["blocks.0.query.bias", "blocks.0.key.bias"]', '["blocks.0.key.bias", "blocks.0.query.bias"]'
    )
    rules.write_text(swapped)
    status, out, _ = call(*arguments, "--rules", rules)
    assert status == 1
    assert "first divergence: rung shapes, module layers.0.both, layers.0.both.bias: " in out


def test_an_element_whose_gradient_is_noise_is_not_judged_though_it_is_exactly_0_by_chance(recordings):
    # Half of a fused bias is the key's, which softmax ignores; Adam makes full steps of its noise.
    name = "layers.0.both.bias"
    gradients = {**recordings["fused"].gradients}
    gradients[name] = np.where(np.abs(gradients[name]) < 1e-15, 0.0, gradients[name])
    updates = {**recordings["fused"].updates}
    updates[name] = np.where(gradients[name] == 0, 0.0, updates[name])
    assert np.sum(gradients[name] == 0) >= 5
    fused = dataclasses.replace(recordings["fused"], gradients=gradients, updates=updates)
    rules = parity.Rules(
        parameters={name: ("blocks.0.query.bias", "blocks.0.key.bias")}, transforms={name: "concatenate 0"}
    )
    verdict = parity.compare(fused, recordings["reference"], rules)
    assert [
        row.passed for rung in verdict.rungs if rung.name == "updates" for row in rung.rows if row.name == name
    ] == [True]


def test_float32_is_compared_with_a_truth_and_an_envelope(tmp_path, call):
    runs = {
        "reference": record(Split(), dtype="float32", steps=3),
        "again": record(Split(), dtype="float32", execution="jit", steps=3),
        "truth": record(Split(), steps=3),
    }
    for name, run in runs.items():
        run.save(tmp_path / name)
    arguments = "compare", tmp_path / "reference", tmp_path / "again"
    truth = "--truth", tmp_path / "truth"
    status, out, _ = call(*arguments, *truth, "--envelope", tmp_path / "again", tmp_path / "reference")
    assert status == 0, out
    assert out.startswith("PASSED (float32")
    assert call(*arguments)[::2] == (2, message("float32 recordings need truth="))
    assert call(*arguments, *truth, "--envelope", tmp_path / "truth")[::2] == (
        2,
        message("a recording of the envelope is of"),
    )


def message(*parts: str):
    """What equals one line that names the command and holds every part."""

    class Line:
        def __eq__(self, other: object) -> bool:
            text = str(other)
            return text.startswith("parity: ") and text.count("\n") == 1 and all(part in text for part in parts)

        def __repr__(self) -> str:
            return f"one line with {parts}"

    return Line()


def test_every_damaged_file_of_both_recordings_is_named_in_one_line(saved, call):
    truncated = saved / "reference" / "activations.safetensors"
    truncated.write_bytes(truncated.read_bytes()[:-7])
    changed = saved / "candidate" / "gradients.safetensors"
    middle = changed.stat().st_size // 2
    content = bytearray(changed.read_bytes())
    content[middle] ^= 4
    changed.write_bytes(bytes(content))
    (saved / "candidate" / "losses.safetensors").unlink()
    status, out, err = call("compare", saved / "reference", saved / "candidate")
    assert (status, out) == (2, "")
    assert err == message(
        "activations.safetensors: has", "gradients.safetensors: changed", "losses.safetensors: missing"
    )
    assert call("show", saved / "reference")[::2] == (2, message("activations.safetensors: has"))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "cannot be read"),
        (b"{", "damaged"),
        (b"\xff\xfe", "damaged"),
        (b'{"format": "onnx"}', "is no recording"),
        (b"[[[", "damaged"),
    ],
)
def test_what_is_no_recording_exits_with_2(saved, call, content, reason):
    manifest = saved / "candidate" / format_.MANIFEST
    manifest.unlink()
    if content is not None:
        manifest.write_bytes(content)
    status, out, err = call("compare", saved / "reference", saved / "candidate")
    assert (status, out) == (2, "")
    assert err == message(reason)


def forge(folder, change) -> None:
    """Change a manifest and its digest, as whoever knows the format can."""
    file = folder / format_.MANIFEST
    content = json.loads(file.read_text())
    del content["sha256"]
    change(content)
    file.write_text(json.dumps({**content, "sha256": format_._digest(content)}))


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (lambda content: content.pop("sections"), ["no right sections"]),
        (lambda content: content["sections"].pop("losses"), ["no right sections"]),
        (lambda content: content.update(dtype=3, provenance=[]), ["no right dtype", "no right provenance"]),
        (lambda content: content["sections"]["inputs"].pop("names"), ["no right names of inputs"]),
        (
            lambda content: content["tensor_names"].update(more=["more"]),
            ["names other tensors than it holds: ['more']"],
        ),
        (lambda content: content["module_names"].pop("head"), ["calls modules that it does not name: ['head']"]),
        (lambda content: content["module_names"].pop(""), ["has tensors and no module that holds them"]),
        (lambda content: content.update(version=1), ["has version 1 and this program reads"]),
    ],
    ids=range(8),
)
def test_a_manifest_that_was_forged_with_its_digest_is_refused(saved, call, change, parts):
    forge(saved / "candidate", change)
    status, out, err = call("compare", saved / "reference", saved / "candidate")
    assert (status, out) == (2, "")
    assert err == message(*parts)


def test_a_forged_file_that_is_no_safetensors_is_refused(saved, call):
    file = saved / "candidate" / "losses.safetensors"
    file.write_bytes(b"not at all")

    def resign(content) -> None:
        content["sections"]["losses"] |= {"bytes": file.stat().st_size, "sha256": format_._sha256(file)}

    forge(saved / "candidate", resign)
    assert call("compare", saved / "reference", saved / "candidate")[::2] == (
        2,
        message("losses.safetensors: cannot be"),
    )


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        (
            {"activations": {"head": np.ones(3)}, "activation_gradients": {}},
            "without the number of their call: ['head']",
        ),
        ({"gradients": {"stranger": np.ones(3)}}, "has gradients of what is no parameter: ['stranger']"),
        ({"moments": {"first/stranger": np.ones(3)}}, "has moments of what is no parameter"),
        ({"losses": {"other": np.ones(5)}}, "has the losses ['other'] instead"),
        ({"losses": {}}, "has gradients and no loss"),
        ({"gradients": {}}, "has updates of parameters without gradients"),
        ({"activation_gradients": {"stranger#0": np.ones(3)}}, "has gradients of what no module gave"),
    ],
)
def test_a_recording_that_contradicts_itself_is_refused(recordings, saved, call, changes, part):
    dataclasses.replace(recordings["candidate"], **changes).save(saved / "candidate")
    status, out, err = call("compare", saved / "reference", saved / "candidate")
    assert (status, out) == (2, "")
    assert err == message("the recordings contradict themselves: the candidate", part)


def test_nothing_compared_exits_with_2(recordings, saved, call):
    hollow = dataclasses.replace(recordings["reference"], activations={}, activation_gradients={}, outputs={})
    hollow.save(saved / "hollow")
    status, out, err = call("compare", saved / "hollow", saved / "hollow")
    assert (status, out) == (2, "")
    assert err == message("nothing was compared, which is never a pass")


def test_different_inputs_exit_with_2(recordings, saved, call):
    other = {name: array + 1 for name, array in recordings["candidate"].inputs.items()}
    dataclasses.replace(recordings["candidate"], inputs=other).save(saved / "candidate")
    assert call("compare", saved / "reference", saved / "candidate")[::2] == (
        2,
        message("cannot be compared: input 0 differs"),
    )


@pytest.mark.parametrize(
    ("rules", "parts"),
    [
        (
            "[parameters]\na.b = 'c'\n[modules]\nd = 'e'",
            ["no parameter 'a.b' of the reference", "no module 'e' of the candidate"],
        ),
        ("[transforms]\nhead.kernel = 'sideways'", ["transforms: 'head.kernel' = 'sideways' is no layout"]),
        ("[transforms]\nhead.kernel = 'transpose 0 2 1'", ["head.kernel: 'transpose 0 2 1' does not fit"]),
        ("[parameter]", ["parameter: is none of the tables"]),
        ("a = = b", ["are no TOML"]),
        (None, ["rules.toml cannot be read"]),
    ],
)
def test_wrong_rules_exit_with_2(saved, call, rules, parts):
    path = saved / "rules.toml"
    if rules is not None:
        path.write_text(rules)
    status, out, err = call("compare", saved / "reference", saved / "candidate", "--rules", path)
    assert (status, out) == (2, "")
    assert err == message(*parts)


@pytest.mark.parametrize("option", ["--report", "--json"])
def test_a_place_that_cannot_be_written_exits_with_2(originals, call, tmp_path, option):
    for place in (tmp_path, tmp_path / "nowhere" / "file"):
        status, _, err = call("compare", originals / "reference", originals / "candidate", option, place)
        assert (status, err) == (2, message(f"{place} cannot be written"))


@pytest.mark.parametrize(
    "arguments",
    [[], ["compare"], ["compare", "a"], ["compare", "a", "b", "c"], ["prove", "a", "b"], ["show", "--modules", "x"]],
)
def test_wrong_arguments_exit_with_2(call, arguments):
    status, out, err = call(*arguments)
    assert (status, out) == (2, "")
    assert err


@pytest.mark.parametrize(("arguments", "words"), [
    ([], ["compare", "show"]),
    (["compare"], ["REFERENCE", "CANDIDATE", "--rules", "--truth", "--envelope", "--report", "--json", "exit status"]),
    (["show"], ["RECORDING", "--modules"]),
])  # fmt: skip
def test_help_explains_every_argument(call, arguments, words):
    status, out, _ = call(*arguments, "--help")
    assert status == 0
    for word in words:
        assert word in out


def test_show_says_what_is_in_a_recording(originals, call):
    status, out, err = call("show", originals / "reference", "--modules", "3")
    assert (status, err) == (0, "")
    assert out.startswith("float64, 5 steps\n")
    for pattern in (
        r"framework +flax",
        r"parameters +14 arrays",
        r"activations +10 arrays",
        r"moments +28 arrays",
        r"0 +float64 \[2, 3, 7\]",
        r"11 modules",
        r"\(the model itself\)",
        r"blocks\.0",
        r"and 8 more",
    ):
        assert re.search(pattern, out), pattern
    assert "decoded" not in out
