"""Two processes that do not agree, in several ways one after the other; started by unit/test_agreement.py.

python -m parity_tests.agreement_worker PORT PROCESS TEXT DIRECTORY

Process 1 is the one that differs. The last line of each process's output is JSON: for each way the exit status of
train.py and what it wrote to standard error.
"""

import contextlib
import dataclasses
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import train
from flax_transformer import distributed, parallel

TINY = [
    *("--d-model", "8", "--num-heads", "2", "--num-layers", "1", "--context-length", "5", "--batch-size", "8"),
    *("--generate-tokens", "0", "--validate-every", "100", "--save-every", "3", "--log-every", "1", "--steps", "9"),
]


def perturb(state: Any) -> Any:
    """One parameter is a little larger."""
    name = min(state.parameters)
    return dataclasses.replace(state, parameters={**state.parameters, name: state.parameters[name] + 1e-6})


def step_four_goes_wrong(compile_train_step: Callable) -> Callable:
    def compile_faulty(*arguments, **options):
        step, calls = compile_train_step(*arguments, **options), []

        def faulty(state, placed):
            calls.append(1)
            state, metrics = step(state, placed)
            return (perturb(state) if len(calls) == 4 else state), metrics

        return faulty

    return compile_faulty


def ways(layout: Any) -> dict[str, tuple[list[str], Any]]:
    """What process 1 is given besides, and what is changed in it."""
    received = train.from_main_process
    faulty = step_four_goes_wrong(layout.compile_train_step)
    code = {**train.code_version(), "source_sha256": "another"}
    return {
        "configuration": (["--seed", "3", "--log-every", "2"], contextlib.nullcontext()),
        "code": ([], mock.patch.object(train, "code_version", return_value=code)),
        "restored": ([], mock.patch.object(train, "from_main_process", lambda state: perturb(received(state)))),
        "trained": ([], mock.patch.object(layout, "compile_train_step", faulty)),
    }


def main(port: str, process: str, text: str, directory: str) -> None:
    distributed.initialise_distributed(coordinator=f"localhost:{port}", num_processes=2, process_id=int(process))
    results = {}
    layout = parallel.layout("pmap")
    with mock.patch.object(parallel, "layout", return_value=layout):
        for way, (arguments, fault) in ways(layout).items():
            own = [*TINY, "--data", text, "--output", str(Path(directory) / way), "--parallel", "pmap"]
            with contextlib.redirect_stderr(io.StringIO()) as err, contextlib.redirect_stdout(io.StringIO()):
                if process == "1":
                    with fault:
                        status = train.main([*own, *arguments])
                else:
                    status = train.main(own)
            results[way] = [status, err.getvalue()]
    print(json.dumps(results), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
