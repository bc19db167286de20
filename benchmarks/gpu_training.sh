#!/usr/bin/env bash
# Train steps of GPT-2 small and of the encoder-decoder document's model in bfloat16 on one GPU, beside torch.compile with
# autocast, SDPA and fused Adam, within eight minutes. Prints Markdown for docs/benchmarks.md, with the card and versions.
#
#   pip install -e '.[test,cuda]' && bash benchmarks/gpu_training.sh
set -euo pipefail
cd "$(dirname "$0")/.."
exec python -m benchmarks.gpu_training "$@"
