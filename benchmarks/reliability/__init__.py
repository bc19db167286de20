"""What an interruption costs, measured: `python -m benchmarks.reliability --help`."""
