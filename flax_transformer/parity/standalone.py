"""The PyTorch recorder as one file, to be copied into a repository that has neither JAX nor this library."""

import re
from importlib import metadata
from pathlib import Path

# In the order in which they need each other.
FILES = ("recording.py", "torch_calls.py", "torch_recorder.py")

HEADER = """# record_torch of flax-transformer {version}, in one file.
# It needs torch, numpy and safetensors, and for bfloat16 ml_dtypes.
#
#     recording = record_torch(module, inputs, dtype="float64")
#     recording.save("reference")
#
# The directory is then compared elsewhere: python -m flax_transformer.parity compare reference candidate
#
# Licence: Apache-2.0. Made by: python -m flax_transformer.parity recorder FILE. Do not edit; make it again.
# ruff: noqa
# pyright: basic
"""


def recorder_source() -> str:
    """The text of the file."""
    parts = [HEADER.format(version=metadata.version("flax-transformer"))]
    for name in FILES:
        text = Path(__file__).with_name(name).read_text(encoding="utf-8")
        # What it imports from its neighbours stands above it.
        parts.append(
            re.sub(r"^from flax_transformer\.parity\.\w+ import (\([^)]*\)|.*)\n", "", text, flags=re.MULTILINE)
        )
    return "\n\n".join(parts)
