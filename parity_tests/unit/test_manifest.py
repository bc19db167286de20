"""Bits that rot: every file of a checkpoint, damaged in every way, is named, and an earlier checkpoint is used."""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

import train
from flax_transformer import checkpoint, manifest
from flax_transformer.checkpoint import Checkpoints, DamageError
from flax_transformer.commands import generate, runs
from parity_tests.unit.small_runs import PATTERN, assert_same_run, call
from parity_tests.unit.test_checkpoint import assert_same_bits, random_state, shapes_of


def flip_bit(path: Path, *, seed: int = 0) -> None:
    content = bytearray(path.read_bytes())
    rng = np.random.default_rng(seed)
    content[rng.integers(len(content))] ^= 1 << rng.integers(8)
    path.write_bytes(content)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def delete(path: Path) -> None:
    path.unlink()


def swap_two_bytes(path: Path) -> None:
    """Of unchanged size and sum."""
    content = bytearray(path.read_bytes())
    other = next(number for number in range(1, len(content)) if content[number] != content[0])
    content[0], content[other] = content[other], content[0]
    path.write_bytes(content)


def files_of(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file())


@pytest.mark.parametrize("damage", [flip_bit, truncate, delete, swap_two_bytes])
def test_damage_to_any_file_of_a_checkpoint_is_named_and_nothing_is_loaded(tmp_path, damage):
    state = random_state(3)
    with Checkpoints(tmp_path / "good") as checkpoints:
        checkpoints.save(3, state, validation_loss=1.5)
    names = [path.relative_to(tmp_path / "good") for path in files_of(tmp_path / "good")]
    assert {"manifest.json", "metrics.json"} < {name.name for name in names}
    assert len(names) > 6
    for name in names:
        shutil.copytree(tmp_path / "good", tmp_path / "bad")
        damage(tmp_path / "bad" / name)
        with pytest.raises(DamageError) as error:
            Checkpoints(tmp_path / "bad").restore(shapes_of(state))
        assert str(error.value).startswith(f"{tmp_path / 'bad' / name} ")
        assert ";" not in str(error.value)
        shutil.rmtree(tmp_path / "bad")
    assert_same_bits(Checkpoints(tmp_path / "good").restore(shapes_of(state)), state)


def test_a_file_too_many_is_named(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(3, random_state(3))
        (tmp_path / "3" / "state" / "d" / "more").write_bytes(b"")
        with pytest.raises(DamageError, match=r"/d/more was not there when it was saved$"):
            checkpoints.restore(random_state(3))


@pytest.mark.parametrize("seed", range(40))
def test_every_flipped_bit_of_a_manifest_and_of_what_it_lists_is_found(tmp_path, seed):
    rng = np.random.default_rng(seed)
    (tmp_path / "deep").mkdir()
    for name in ("deep/one", "two"):
        (tmp_path / name).write_bytes(rng.bytes(11))
    manifest.write(tmp_path)
    assert manifest.problems(tmp_path) == []
    for path in (tmp_path / "two", tmp_path / "manifest.json"):
        before = path.read_bytes()
        flip_bit(path, seed=seed)
        assert manifest.problems(tmp_path) == [f"{path} is damaged: its checksum differs"]
        path.write_bytes(before)


def test_the_manifest_is_there_before_a_checkpoint_has_its_name(tmp_path, monkeypatch):
    """So that no kill leaves a whole checkpoint that looks damaged."""
    renamed = []
    rename = os.rename

    def watched(source, target):
        renamed.append((Path(target).name, manifest.problems(Path(source))))
        rename(source, target)

    monkeypatch.setattr(checkpoint.os, "rename", watched)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(5, random_state(5))
    assert ("5", []) in renamed


def test_text_is_generated_by_the_newest_undamaged_model_and_the_damaged_file_is_named(whole, tmp_path):
    output = tmp_path / "run"
    shutil.copytree(whole, output)
    prompt = [output, "--prompt", " a b", "--tokens", "5", "--method", "greedy"]
    for name in ("checkpoint/21", "checkpoint/23"):
        flip_bit(max(files_of(output / name), key=lambda path: path.stat().st_size))
    status, out, err = call(generate.main, *prompt)
    assert status == 0
    assert out.startswith(" a b")
    assert [line.split(" (")[0] for line in err.splitlines()] == [
        "the checkpoint of step 23 is damaged",
        "the checkpoint of step 21 is damaged",
    ]
    assert "is damaged: its checksum differs); this is the model of step 18" in err
    assert sorted(path.name for path in (output / "checkpoint").iterdir()) == ["18", "21", "23"]  # only read

    truncate(output / "checkpoint" / "18" / "manifest.json")
    status, out, err = call(generate.main, *prompt)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert "none of the checkpoints can be read; the newest, of step 23" in err


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('"num_heads": 2', '"num_heads": 1', "config.json is not the file that was written"),
        ('"seed": 0', '"seed": 1', "config.json is not the file that was written"),
    ],
)
def test_a_configuration_that_is_not_as_written_is_named(whole, tmp_path, old, new, words):
    """Another number of heads has arrays of the same shapes, and writes nonsense."""
    output = tmp_path / "run"
    shutil.copytree(whole, output)
    content = (output / "config.json").read_text()
    assert old in content
    (output / "config.json").write_text(content.replace(old, new))
    with pytest.raises(ValueError, match=words):
        runs.load_run(output)


def test_another_tokenizer_of_the_same_size_is_named(whole, tmp_path):
    output = tmp_path / "run"
    shutil.copytree(whole, output)
    runs.Tokenizer.build(PATTERN.replace("g", "h")).save(output / "tokenizer.json")
    with pytest.raises(ValueError, match=r"tokenizer\.json is not the one that the model of .* was trained with"):
        runs.load_run(output)


def test_a_run_goes_on_with_damaged_checkpoints_set_aside_and_damaged_records_told(whole, tmp_path):
    """Also where a file that only says which checkpoint is the best is damaged."""
    output = tmp_path / "run"
    shutil.copytree(whole, output)
    flip_bit(output / "checkpoint" / "23" / "metrics.json")
    delete(output / "checkpoint" / "21" / "metrics.json")
    (output / "provenance.json").write_text("{")
    status, out, err = call(train.main, "--output", output, "--resume")
    assert status == 0
    assert "metrics.json is damaged: its checksum differs" in out
    assert f"21/metrics.json is missing); it is now {output / 'checkpoint' / 'damaged-21-1'}" in out
    assert "resumed after step 18" in out
    assert "provenance.json is damaged" in err
    assert_same_run(output, whole)
