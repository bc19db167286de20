"""The command line: `python -m benchmarks.reliability --help`."""

import sys
from collections.abc import Sequence
from typing import Annotated

import tyro

from benchmarks.reliability.bitrot import Bitrot
from benchmarks.reliability.elastic import Elastic
from benchmarks.reliability.kill import Kill
from benchmarks.reliability.save_wait import SaveWait

Command = (
    Annotated[Kill, tyro.conf.subcommand("kill")]
    | Annotated[Bitrot, tyro.conf.subcommand("bitrot")]
    | Annotated[SaveWait, tyro.conf.subcommand("save-wait")]
    | Annotated[Elastic, tyro.conf.subcommand("elastic")]
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status: 1 where a promise is broken."""
    command = tyro.cli(Command, prog="python -m benchmarks.reliability", description=__doc__, args=arguments)
    return 0 if command.run() else 1


if __name__ == "__main__":
    sys.exit(main())
