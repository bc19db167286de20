"""Continue a text with a model that `train.py decoder-only` trained.

python -m flax_transformer.commands.generate runs/decoder-only --prompt "The"
"""

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import jax
import jax.numpy as jnp
import tyro
from jax.typing import ArrayLike

from flax_transformer import decoding
from flax_transformer.commands.runs import load_run
from flax_transformer.decoder_only import DecoderOnly
from flax_transformer.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is chosen."""

    method: Literal["sample", "greedy"] = "sample"
    """`sample` draws from the model's distribution, `greedy` takes the likeliest token every time."""
    temperature: float = 0.8
    """Below 1: the likely tokens more often than the model says; above 1: less often. For `sample`."""
    top_k: Annotated[int | None, tyro.conf.arg(metavar="N|None")] = 40
    """Draw from the N likeliest tokens only; `None`: from all. For `sample`."""
    seed: int = 0
    """The same seed gives the same text. For `sample`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generate:
    """Continue a text with a model that `train.py decoder-only` trained.

    The text goes to standard output, the prompt first. A model with the compact vocabulary knows only the tokens of the
    text that it was trained on.
    """

    run: tyro.conf.Positional[Path]
    """Directory of a run, as `runs/decoder-only`."""
    prompt: Annotated[str, tyro.conf.arg(metavar="TEXT")]
    """The text to continue."""
    tokens: int = 100
    """How many tokens to append."""
    sampling: tyro.conf.OmitArgPrefixes[Sampling] = Sampling()


def continue_text(
    model: DecoderOnly, tokenizer: Tokenizer, prompt: ArrayLike, *, tokens: int, sampling: Sampling
) -> str:
    """The text of the ids `prompt`, shape (P,), and of the ids that the model continues it with.

    Raises:
        ValueError: an empty prompt, or a number out of range.
    """
    top_k = sampling.top_k and min(sampling.top_k, tokenizer.vocab_size)  # a small vocabulary has no 40 to choose from
    ids = jnp.asarray(prompt, jnp.int32)[None]
    if sampling.method == "greedy":
        result = decoding.generate_greedy(model, ids, num_tokens=tokens)
    else:
        result = decoding.generate_sampled(
            model,
            ids,
            key=jax.random.key(sampling.seed),
            num_tokens=tokens,
            temperature=sampling.temperature,
            top_k=top_k,
        )
    return tokenizer.decode(jax.device_get(result[0]))


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status."""
    options = tyro.cli(Generate, prog="python -m flax_transformer.commands.generate", args=arguments)
    try:
        run = load_run(options.run)
        if not isinstance(run.model, DecoderOnly):
            raise ValueError(f"{options.run} holds an encoder-decoder, which translates; give a run of decoder-only")
        if not options.prompt:
            raise ValueError("--prompt must hold at least one character; give some text to continue")
        prompt = run.tokenizer.encode(options.prompt)
        text = continue_text(run.model, run.tokenizer, prompt, tokens=options.tokens, sampling=options.sampling)
    except ValueError as error:
        print(f"generate: {error}", file=sys.stderr)
        return 2
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
