"""From the options of `train.py decoder-only` to its job."""

import dataclasses
import functools
from pathlib import Path

import numpy as np
from flax import nnx
from numpy.typing import NDArray

from flax_transformer import data, training
from flax_transformer.commands.generate import Sampling, continue_text
from flax_transformer.commands.jobs import Job, chosen_sizes, describe, intervals, refuse, vocabulary_loss
from flax_transformer.commands.recipes import DECODER_ONLY
from flax_transformer.commands.train_options import DecoderOnlyOptions, given
from flax_transformer.config import DecoderOnlyConfig
from flax_transformer.decoder_only import DecoderOnly
from flax_transformer.tokenizer import Tokenizer

_DRAWN_TOKENS = 32


def prepare_decoder_only(options: DecoderOnlyOptions) -> Job:
    """Reads the text and resolves every option. Builds no model and writes nothing.

    Raises:
        ValueError: whatever the user has to change.
    """
    preset = DECODER_ONLY[options.preset]
    recipe = dataclasses.replace(preset.recipe, **given(options, dataclasses.fields(preset.recipe)))
    refuse(options, recipe, _problems(options, recipe.context_length))
    seed = options.training.seed

    corpus = data.default_corpus() if options.data is None else data.read_corpus(options.data)
    tokenizer = Tokenizer.build(corpus.text, vocabulary=recipe.vocabulary)
    ids = tokenizer.encode(corpus.text)
    parts = data.split(ids)
    data.check_split(parts, context_length=recipe.context_length, source=corpus.name)
    prompt = parts.validation[:16] if options.prompt is None else tokenizer.encode(options.prompt)

    sizes = chosen_sizes(options, DecoderOnlyConfig)
    config = preset.config(vocab_size=tokenizer.vocab_size, max_length=recipe.context_length, **sizes)

    def write_sample(model: DecoderOnly) -> str:
        if not options.generate_tokens:
            return ""
        return continue_text(model, tokenizer, prompt, tokens=options.generate_tokens, sampling=Sampling(seed=seed))

    shape = dict(batch_size=recipe.batch_size, context_length=recipe.context_length)
    schedule = recipe.make_schedule(d_model=config.d_model)
    every = intervals(options, recipe)
    over_vocabulary = vocabulary_loss(
        options, positions=recipe.batch_size * recipe.context_length, vocab_size=tokenizer.vocab_size
    )
    loss = functools.partial(training.next_token_loss, **over_vocabulary)
    return Job(
        name="decoder-only",
        title=[
            f"{corpus.name}: {len(parts.train):,} tokens to train on, {len(parts.validation):,} to validate with; "
            f"{recipe.vocabulary} vocabulary of {tokenizer.vocab_size:,}"
        ],
        build_model=lambda: DecoderOnly(config, rngs=nnx.Rngs(seed)),
        loss=loss,
        validation_loss=loss,
        optimizer=recipe.make_optimizer(schedule),
        schedule=schedule,
        batch=lambda step: data.sample_batch(parts.train, **shape, seed=seed, step=step),
        longest=recipe.context_length,
        validation=lambda: data.validation_batches(parts.validation, **shape),
        baseline=data.unigram_loss(parts.train, parts.validation, vocab_size=tokenizer.vocab_size),
        write_sample=write_sample,
        sample_file="sample.txt",
        draw_attention=lambda model, root: _draw_attention(model, tokenizer, prompt[: recipe.context_length], root),
        tokenizer=tokenizer,
        record=describe(
            "decoder-only",
            options,
            config=config,
            recipe=recipe,
            resolved={**every, "vocabulary_loss": over_vocabulary["vocabulary_loss"]},
            data={
                "name": corpus.name,
                "sha256": corpus.sha256,
                "train_tokens": len(parts.train),
                "validation_tokens": len(parts.validation),
                "tokenizer_sha256": tokenizer.sha256,
            },
        ),
        recipe=recipe,
        **every,
        work=f"{recipe.batch_size * recipe.context_length:,} tokens",
    )


def _draw_attention(model: DecoderOnly, tokenizer: Tokenizer, ids: NDArray[np.int32], root: Path) -> None:
    from flax_transformer import pictures  # matplotlib takes its time, and only those who ask for pictures wait for it

    ids = ids[:_DRAWN_TOKENS]
    tokens = [tokenizer.decode([token]) for token in ids]
    weights = pictures.collect_attention(model, ids[None])
    pictures.attention_maps(weights, rows=tokens, columns=tokens, output=root / "attention.png")


def _problems(options: DecoderOnlyOptions, context_length: int) -> list[str]:
    wrong = []
    if context_length < 1:
        wrong.append(f"--context-length must be at least 1, got {context_length}")
    if options.generate_tokens < 0:
        wrong.append(f"--generate-tokens must be at least 0, got {options.generate_tokens}")
    if options.prompt == "" and options.generate_tokens:
        wrong.append("--prompt must hold at least one character; leave it out to start with the validation text")
    return wrong
