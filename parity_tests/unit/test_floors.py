"""Imports go down only: the floors of design and CONTRIBUTING, read off the source."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIBRARY = ROOT / "flax_transformer"

# From the ground up. A module may import from lower floors, and from its own floor where that makes no cycle.
FLOORS = [
    ["config", "numerics", "initialisation", "masks", "dropout", "inputs", "weights.rules"],
    ["cache", "layers", "flash_attention", "attention", "stacks"],
    ["encoder_decoder", "decoder_only", "weights"],
    ["losses", "optimizers", "schedules", "sharding", "vocabulary_loss", "flops", "collectives", "chips"],
    ["training", "distributed", "layout", "parallel", "planning"],
    ["decoding"],
    ["commands", "pictures"],
]
# Beside the building: these import no floor at all.
APART = ["checkpoint", "tokenizer", "data", "parity", "manifest"]
# Of these, what another may import: it knows the standard library alone.
SHARED = {"checkpoint": ["manifest"]}
# Arrays and pytrees only, never a model class.
NO_MODELS = ["losses", "optimizers", "schedules", "sharding", "vocabulary_loss", "flops", "collectives", "chips"]
# Of parity, the only files that may import a package: the rest knows arrays, names and files.
PARITY_OWNERS = {
    "flax": ["parity/conditioning.py", "parity/flax_calls.py", "parity/flax_program.py", "parity/flax_recorder.py"],
    "jax": [
        "parity/conditioning.py",
        "parity/emulation.py",
        "parity/flax_calls.py",
        "parity/flax_program.py",
        "parity/flax_recorder.py",
        "parity/precision.py",
    ],
}
# The only files that may import a package.
OWNERS = {
    "matplotlib": ["pictures.py"],
    "orbax": ["checkpoint.py"],
    "tensorboardX": ["commands/tensorboard.py"],
    "tiktoken": ["tokenizer.py"],
    "torch": ["parity/torch_calls.py", "parity/torch_recorder.py", "weights/torch_files.py"],
}


def modules() -> Iterator[tuple[str, Path]]:
    for path in sorted(LIBRARY.rglob("*.py")):
        parts = path.relative_to(LIBRARY).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def imports(path: Path) -> set[str]:
    """Every module that a file imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name} imports relatively; say the whole name"
            found |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def own_imports(path: Path) -> set[str]:
    prefix = "flax_transformer."
    return {name.removeprefix(prefix) for name in imports(path) if name.startswith(prefix)}


def within(name: str, place: str) -> bool:
    return name == place or name.startswith(place + ".")


def floor(name: str) -> int | None:
    """The number of the floor that a module stands on; the most specific place decides."""
    places = [(len(place), number) for number, level in enumerate(FLOORS) for place in level if within(name, place)]
    return max(places)[1] if places else None


@pytest.mark.parametrize(("name", "path"), [(name, path) for name, path in modules() if name])
def test_a_module_imports_from_its_own_floor_or_below(name, path):
    if any(within(name, place) for place in APART):
        known = [name.split(".")[0], *SHARED.get(name, [])]
        strangers = {own for own in own_imports(path) if not any(within(own, place) for place in known)}
        assert not strangers, f"{name} stands apart and imports {strangers}"
        return
    here = floor(name)
    assert here is not None, f"{name} stands on no floor; add it to FLOORS or APART"
    above = {own for own in own_imports(path) if (there := floor(own)) is not None and there > here}
    assert not above, f"{name} imports from above: {above}"


@pytest.mark.parametrize("name", NO_MODELS)
def test_losses_and_optimizers_know_no_model(name):
    path = LIBRARY / f"{name}.py"
    models = {own for own in own_imports(path) if any(within(own, place) for place in FLOORS[2])}
    assert not models


@pytest.mark.parametrize("package", OWNERS)
def test_a_package_with_an_owner_is_imported_there_alone(package):
    importers = [
        str(path.relative_to(LIBRARY)) for _, path in modules() if any(within(name, package) for name in imports(path))
    ]
    assert sorted(set(importers) - set(OWNERS[package])) == []
    assert importers, f"nothing imports {package}; the rule is dead"


@pytest.mark.parametrize("package", PARITY_OWNERS)
def test_parity_imports_a_framework_in_the_files_made_for_it_alone(package):
    importers = [
        str(path.relative_to(LIBRARY))
        for name, path in modules()
        if within(name, "parity") and any(within(imported, package) for imported in imports(path))
    ]
    assert sorted(importers) == PARITY_OWNERS[package]


def test_nothing_but_the_tests_and_the_walks_sees_both_frameworks():
    files = [path for path in (ROOT / "torch_reference").rglob("*.py") if "flax_transformer" in path.read_text()]
    for path in files:
        top = ast.parse(path.read_text()).body
        direct = [node for node in top if isinstance(node, ast.Import | ast.ImportFrom) and "flax" in ast.unparse(node)]
        assert not direct, f"{path.name} imports flax_transformer when it is imported"


def test_importing_the_library_pulls_in_no_torch_orbax_matplotlib_or_parity():
    unwanted = ["torch", "orbax", "matplotlib", "tiktoken", "flax_transformer.parity"]
    program = f"import sys, flax_transformer; print([name for name in {unwanted} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"
