"""The recorder in one file runs without this library, JAX or ml_dtypes, and records the same."""

import subprocess
import sys

import numpy as np
import pytest

from flax_transformer import parity
from flax_transformer.parity.__main__ import main
from flax_transformer.parity.standalone import recorder_source

torch = pytest.importorskip("torch")
from parity_tests.unit.toy_port import Port, Reference, draw  # noqa: E402

PROGRAM = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("flax_transformer", "jax", "flax", "ml_dtypes", "optax"):
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Refuse())
import numpy as np, torch
import copied_recorder

torch.manual_seed(3)
module = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Dropout(0.5), torch.nn.Linear(7, 3))
x = np.random.default_rng(0).standard_normal((2, 5)).astype(np.float32)
copied_recorder.record_torch(
    module, x, loss=lambda y, _: (y * y).mean(), optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.1), steps=3
).save("recording")
try:
    copied_recorder.record_torch(module, x, dtype="bfloat16")
except ValueError as error:
    print(error)
"""


def test_the_copied_recorder_needs_torch_numpy_and_safetensors_alone(tmp_path):
    assert main(["recorder", str(tmp_path / "copied_recorder.py")]) == 0
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=tmp_path, capture_output=True, text=True, env={"PYTHONPATH": str(tmp_path)}
    )
    assert done.returncode == 0, done.stderr
    assert "must be one of float64, float32, float16, got 'bfloat16'" in done.stdout
    loaded = parity.load(tmp_path / "recording")
    torch.manual_seed(3)
    module = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Dropout(0.5), torch.nn.Linear(7, 3))
    x = np.random.default_rng(0).standard_normal((2, 5)).astype(np.float32)
    here = parity.record_torch(
        module,
        x,
        loss=lambda y, _: (y * y).mean(),
        optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
        steps=3,
    )
    assert list(loaded.activations) == list(here.activations)
    assert parity.compare(here, loaded).passed


def test_a_file_that_is_there_is_not_replaced(tmp_path, capsys):
    (tmp_path / "mine.py").write_text("mine")
    assert main(["recorder", str(tmp_path / "mine.py")]) == 2
    assert "mine.py" in capsys.readouterr().err
    assert (tmp_path / "mine.py").read_text() == "mine"


def test_the_file_imports_nothing_of_this_library():
    assert "from flax_transformer" not in recorder_source().replace("python -m flax_transformer", "")


def test_recordings_of_both_sides_still_agree():
    torch.manual_seed(3)
    module = Reference()
    assert parity.compare(parity.record_torch(module, draw()), parity.record_flax(Port(module), draw())).passed
