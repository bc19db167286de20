"""``python -m parity_tests.faults [--write] [--only WORDS]``: where every planted mistake is caught."""

import argparse
import json
import sys

from flax_transformer import parity
from parity_tests.faults.planting import CASES, FAULTS, MATRIX, expected, verdict_on


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m parity_tests.faults", description=__doc__)
    parser.add_argument(
        "--write", action="store_true", help=f"write what was found to {MATRIX.name}, to be read by a person"
    )
    parser.add_argument("--only", default="", help="mistakes whose name holds these words")
    options = parser.parse_args()
    known = expected() if MATRIX.exists() else {}
    unnoticed = 0
    with parity.shared_traces():
        for fault in FAULTS:
            if options.only not in fault.name:
                continue
            found = {}
            for name in fault.cases:
                divergence = verdict_on(fault, CASES[name]).first_divergence
                found[name] = ["", ""] if divergence is None else [divergence.rung, divergence.path]
                unnoticed += divergence is None
                print(f"{fault.name:50} {name:28} {': '.join(found[name]) if divergence else 'UNNOTICED'}", flush=True)
            known[fault.name] = found
    if options.write:
        MATRIX.write_text(json.dumps(known, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return 1 if unnoticed else 0


if __name__ == "__main__":
    sys.exit(main())
