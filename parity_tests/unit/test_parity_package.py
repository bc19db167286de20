"""The package without PyTorch: a recording made on one machine is checked on another."""

import subprocess
import sys


def output_of(program: str) -> str:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.strip()


def test_without_torch_the_package_works_and_one_error_says_what_to_install():
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "from flax_transformer import parity\n"
        "try:\n    parity.record_torch(None, 1)\n"
        "except ModuleNotFoundError as error:\n    print(error)"
    )
    assert 'pip install "flax-transformer[test]"' in output_of(program)


def test_importing_the_package_does_not_import_torch():
    assert output_of("import sys; from flax_transformer import parity; print('torch' in sys.modules)") == "False"
