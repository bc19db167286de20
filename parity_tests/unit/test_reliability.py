"""The scripts of benchmarks/reliability in their short form: every promise about interruptions, kept a few times."""

import os
import subprocess
import sys

import pytest

import train

ROOT = train.Path(train.__file__).parent


def last_row(*arguments: str) -> list[str]:
    """The cells of the last row of a script's table."""
    command = [sys.executable, "-m", "benchmarks.reliability", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    row = [line for line in done.stdout.splitlines() if line.startswith("|")][-1]
    return [cell.strip() for cell in row.strip("|").split("|")]


@pytest.mark.slow  # its short form is in test_resume
def test_a_run_that_is_killed_goes_on_bit_for_bit_and_loses_at_most_one_save():
    kills, *where, lost, runs, equal = last_row("kill", "--times", "5")
    assert kills == "5"
    assert sum(map(int, where)) == 5
    assert lost in "01"
    assert runs == equal


def test_damage_to_any_file_is_named_and_the_checkpoint_before_is_loaded():
    damage, trials, named, loaded = last_row("bitrot", "--trials", "1")
    assert damage == "a file added"
    assert int(trials) > 10
    assert trials == named == loaded


def test_a_state_saved_on_some_devices_is_the_same_on_others():
    *_, pairs, unequal = last_row("elastic")
    assert int(pairs) > 200
    assert unequal == "0"


@pytest.mark.slow
def test_the_manifest_keeps_training_waiting_no_longer():
    assert last_row("save-wait", "--megabytes", "100")[0].startswith("of which the manifest")
