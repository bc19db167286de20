"""The ladder of parity: does a model in one framework compute what its original in another computes?

Record a run on each side, then compare the recordings. It knows arrays, names and files only, and no model::

    from flax_transformer import parity

    reference = parity.record_torch(torch_module, inputs, dtype="float64")
    candidate = parity.record_flax(flax_module, inputs, dtype="float64")
    verdict = parity.compare(reference, candidate)
    print(verdict)
    assert verdict.passed, verdict.first_divergence
"""

from flax_transformer.parity.comparison import compare, compare_pooled
from flax_transformer.parity.conditioning import Conditioning, conditioning
from flax_transformer.parity.emulation import emulate
from flax_transformer.parity.flax_program import shared_traces
from flax_transformer.parity.flax_recorder import live_flax, record_flax
from flax_transformer.parity.judgement import judge_position_table
from flax_transformer.parity.layouts import from_kernel
from flax_transformer.parity.localisation import localise
from flax_transformer.parity.matching import Match, Rules
from flax_transformer.parity.measures import Measures, measure
from flax_transformer.parity.precision import PrecisionTable, precision_table
from flax_transformer.parity.recording import Recording, load
from flax_transformer.parity.rules_file import load_rules
from flax_transformer.parity.search import Found, search
from flax_transformer.parity.torch_recorder import live_torch, record_torch
from flax_transformer.parity.verdict import RUNGS, Divergence, Row, Rung, Verdict

__all__ = [
    "RUNGS",
    "Conditioning",
    "Divergence",
    "Found",
    "Match",
    "Measures",
    "PrecisionTable",
    "Recording",
    "Row",
    "Rules",
    "Rung",
    "Verdict",
    "compare",
    "compare_pooled",
    "conditioning",
    "emulate",
    "from_kernel",
    "judge_position_table",
    "live_flax",
    "live_torch",
    "load",
    "load_rules",
    "localise",
    "measure",
    "precision_table",
    "record_flax",
    "record_torch",
    "search",
    "shared_traces",
]
