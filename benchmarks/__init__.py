"""Train steps of ours, PyTorch's and Flax's own in one run, as ratios: `python -m benchmarks --help`, docs/benchmarks.md.

Not installed: run from the root of the repository, with the `test` extra.
"""
