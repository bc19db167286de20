#!/usr/bin/env bash
# The ladder on a GPU, within five minutes: float32 at highest precision against PyTorch, then TF32 and bfloat16 beside what
# the emulation on the CPU predicts. Prints Markdown for docs/precision.md, with the card's name and the versions.
#
#   pip install -e '.[test,cuda]' && bash benchmarks/gpu_parity.sh
set -euo pipefail
cd "$(dirname "$0")/.."
export XLA_PYTHON_CLIENT_PREALLOCATE=false
exec python -m benchmarks.gpu_parity "$@"
