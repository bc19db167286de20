"""How every test runs: strict promotion, warnings as errors, checked shapes, a compile cache."""

import os
from collections.abc import Iterator
from pathlib import Path

# Before JAX starts: tests are for the CPU, whatever else the machine has.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Before PyTorch starts: its threads wait busily, and one test process a core leaves them nothing to run on.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import jax
import pytest
from jaxtyping import install_import_hook

# Shapes and dtypes in the annotations of these modules are checked at run time. Not in the two model files, where the
# wrong input of a user must reach our own error, nor in the configuration, which checks itself.
CHECKED = ["attention", "dropout", "initialisation", "layers", "losses", "numerics"]
install_import_hook([f"flax_transformer.{module}" for module in CHECKED], "beartype.beartype")

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
# A new shape costs seconds of compiling; the cache makes the second run of the tests, and a second worker, start warm.
jax.config.update("jax_compilation_cache_dir", str(Path(__file__).parent.parent / ".jax_cache"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


@pytest.fixture
def float64() -> Iterator[None]:
    """JAX's 64-bit mode for one test; a switch left on would change every test after it."""
    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="module", autouse=True)
def programs_do_not_pile_up() -> Iterator[None]:
    """Thousands of compiled programs take gigabytes; the next module finds what it needs again on disk."""
    yield
    jax.clear_caches()


@pytest.fixture(autouse=True)
def no_switch_is_left_on() -> Iterator[None]:
    yield
    assert jax.dtypes.canonicalize_dtype("float64") == "float32", "a test left JAX's 64-bit mode on"
