"""train.py, which tells in a file what it is doing: python -m benchmarks.reliability.launch FILE ARGUMENTS...

Byte 0 of the file counts saves (odd: one is being written), byte 1 evaluations, byte 2 is 1 once steps are taken.
"""

import mmap
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import train
from flax_transformer.checkpoint import Checkpoints
from flax_transformer.parallel import Layout

SAVE, EVALUATION, TRAINING = range(3)


def main(phases: str, *arguments: str) -> int:
    with open(phases, "r+b") as file, mmap.mmap(file.fileno(), 3) as shared:

        def marked(action: Callable[..., Any], place: int) -> Callable[..., Any]:
            def run(*given: Any, **options: Any) -> Any:
                shared[TRAINING] = 1
                shared[place] = (shared[place] + 1) % 256
                try:
                    return action(*given, **options)
                finally:
                    shared[place] = (shared[place] + 1) % 256

            return run

        write, compile_eval_step = marked(Checkpoints._write, SAVE), Layout.compile_eval_step

        def compile_marked(*given: Any, **options: Any) -> Any:
            return marked(compile_eval_step(*given, **options), EVALUATION)

        with (
            mock.patch.object(Checkpoints, "_write", write),
            mock.patch.object(Layout, "compile_eval_step", compile_marked),
        ):
            return train.main(arguments)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
