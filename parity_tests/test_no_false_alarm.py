"""The other side of the planted mistakes: what is right never raises an alarm, whatever the shape and the weights."""

import jax
import pytest

from flax_transformer import parity
from parity_tests.cases import Case, load_reference, model_loss, rules_for
from parity_tests.cases.decoder_only_document import document_case as decoder_only
from parity_tests.cases.encoder_decoder_document import document_case as encoder_decoder
from parity_tests.ladder import without
from parity_tests.references import needs_torch, record

hypothesis = pytest.importorskip("hypothesis")
from hypothesis import strategies  # noqa: E402

pytestmark = needs_torch

SEEDS = range(100, 130)
SHAPES = [
    decoder_only("shape 1", "small", B=2, vocab_size=11, d_model=12, num_heads=3, context_len=5),
    decoder_only("shape 2", "small", B=1, vocab_size=53, d_model=28, num_heads=7, context_len=9),
    decoder_only("shape 3", "small", B=5, vocab_size=7, d_model=16, num_heads=2, context_len=3),
    decoder_only("shape 4", "small", B=3, vocab_size=29, d_model=24, num_heads=1, context_len=11),
    encoder_decoder("shape 5", "small", B=3, S=5, T=6, src_vocab=7, tgt_vocab=9, d_model=12, d_ff=20, h=3, N=1),
    encoder_decoder("shape 6", "small", B=4, S=7, T=5, src_vocab=17, tgt_vocab=5, d_model=16, d_ff=12, h=2, N=1),
]


def require_no_alarm(case: Case, seed: int, *, execution: str) -> None:
    reference = without(record(case, "float64", seed), "updates", "moments")
    learns = execution == "jit"
    with jax.enable_x64(True):
        model = case.model(case.config("float64"))
        load_reference(case, model, reference)
        candidate = parity.record_flax(
            model,
            dict(reference.inputs),
            execution="jit" if learns else "eager",
            call=case.call_model,
            masks=case.model_masks(reference.inputs),
            loss=model_loss(case) if learns else None,
        )
        rules = rules_for(case, model)
    if not learns:
        reference = without(reference, "losses", "gradients", "activation_gradients")
    verdict = parity.compare(reference, candidate, rules)
    assert verdict.passed, f"seed {seed}:\n{verdict}"


@pytest.mark.parametrize("case", SHAPES, ids=str)
def test_thirty_draws_of_weights_and_inputs_raise_no_alarm(case):
    with parity.shared_traces():
        for seed in SEEDS:
            require_no_alarm(case, seed, execution="jit")


@strategies.composite
def configurations(draw) -> Case:
    heads, size = draw(strategies.integers(1, 6)), draw(strategies.sampled_from([4, 6, 8, 10]))
    B = draw(strategies.integers(3, 5))  # noqa: N806
    T = draw(strategies.integers(4, 12))  # noqa: N806
    if draw(strategies.booleans()):
        vocabulary = draw(strategies.integers(2, 60))
        return decoder_only(
            "random", "small", B=B, vocab_size=vocabulary, d_model=heads * size, num_heads=heads, context_len=T
        )
    return encoder_decoder(
        "random",
        "small",
        B=B,
        S=draw(strategies.integers(3, 12)),
        T=T,
        src_vocab=draw(strategies.integers(2, 40)),
        tgt_vocab=draw(strategies.integers(2, 40)),
        d_model=heads * size,
        d_ff=draw(strategies.integers(4, 40)),
        h=heads,
        N=draw(strategies.integers(1, 3)),
    )


@pytest.mark.slow
@hypothesis.settings(max_examples=200, deadline=None, derandomize=True, database=None)
@hypothesis.given(case=configurations(), seed=strategies.integers(0, 2**16))
def test_200_random_configurations_raise_no_alarm(case, seed):
    require_no_alarm(case, seed, execution="eager")
