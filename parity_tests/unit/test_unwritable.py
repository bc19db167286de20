"""A disk that is full, or a permission that is gone, in the middle of a run: one line, and nothing lost."""

import errno
import os
import shutil
import time
from pathlib import Path

import orbax.checkpoint as ocp
import pytest

import train
from flax_transformer import checkpoint, data
from parity_tests.unit.small_runs import TINY, assert_same_run, call

NO_SPACE, NO_PERMISSION = os.strerror(errno.ENOSPC), os.strerror(errno.EACCES)


def fill_disk(patch, output: Path) -> str:
    usage = shutil.disk_usage(output.parent)
    patch.setattr(checkpoint.shutil, "disk_usage", lambda path: usage._replace(free=100))
    return f"{output / 'checkpoint'} cannot be written ({NO_SPACE}). "


def fill_disk_within_a_save(patch, output: Path) -> str:
    """What tensorstore says then is no OSError."""

    def save(self, directory, **options):
        raise ValueError("RESOURCE_EXHAUSTED: Failed to write 7 bytes to file 4 [os_error_code='28']")

    patch.setattr(ocp.Checkpointer, "save", save)
    return f"{output / 'checkpoint'} cannot be written ({NO_SPACE}). "


def lose_permission(patch, output: Path) -> str:
    def save(self, directory, **options):
        raise PermissionError(errno.EACCES, NO_PERMISSION, "/some/temporary")

    patch.setattr(ocp.Checkpointer, "save", save)
    return f"{output / 'checkpoint'} cannot be written ({NO_PERMISSION}). "


def shut_metrics(patch, output: Path) -> str:
    opened = Path.open

    def refuse(self, mode="r", *arguments, **options):
        if self.name == "metrics.jsonl" and mode == "a":
            raise OSError(errno.ENOSPC, NO_SPACE)
        return opened(self, mode, *arguments, **options)

    patch.setattr(Path, "open", refuse)
    return f"{output / 'metrics.jsonl'} cannot be written ({NO_SPACE}). "


def wait_for(path: Path) -> None:
    end = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < end, f"{path} was not written"
        time.sleep(0.01)


@pytest.mark.parametrize("fault", [fill_disk, fill_disk_within_a_save, lose_permission, shut_metrics])
def test_a_directory_that_can_no_longer_be_written_ends_the_run_with_one_line_and_it_goes_on_later(
    whole, text, tmp_path, monkeypatch, fault
):
    output = tmp_path / "run"
    sample_batch, words = data.sample_batch, ""
    with monkeypatch.context() as patch:

        def happen(*arguments, step, **options):
            nonlocal words
            if step == 10:
                wait_for(output / "checkpoint" / "9")  # another thread writes it, and is not to meet the fault
                words = fault(patch, output)
            return sample_batch(*arguments, step=step, **options)

        patch.setattr(data, "sample_batch", happen)
        status, _, err = call(train.main, "--data", text, *TINY, "--output", output)
    assert (status, err.count("\n")) == (1, 1)
    assert words
    assert words in err
    resuming = f"python train.py decoder-only --output {output} --resume"
    assert err.endswith(f"go on with: {resuming}\n")
    assert {path.name for path in (output / "checkpoint").iterdir()} == {"6", "7", "9"}

    status, out, err = call(train.main, *resuming.split()[2:])
    assert (status, err) == (0, "")
    assert "resumed after step" in out
    assert_same_run(output, whole)


def test_a_directory_that_cannot_be_written_from_the_start_is_one_line_before_anything_is_trained(text):
    status, out, err = call(
        train.main, "--data", text, *TINY, "--output", "/proc/run"
    )  # where root cannot write either
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert "output '/proc/run' cannot be written" in err
    assert "give another --output" in err


def test_a_run_that_is_resumed_where_nothing_can_be_written_any_more_is_one_line(whole, tmp_path, monkeypatch):
    output = tmp_path / "run"
    shutil.copytree(whole, output)

    def refuse(*arguments, **options):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), "/some/temporary")

    monkeypatch.setattr(checkpoint.tempfile, "mkstemp", refuse)
    status, out, err = call(train.main, "--output", output, "--resume")
    assert (status, out, err.count("\n")) == (1, "", 1)
    assert f"{output / 'config.json'} cannot be written (Read-only file system). " in err
