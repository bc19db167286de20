"""From the options of `train.py encoder-decoder` to its job."""

import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from numpy.typing import NDArray

from flax_transformer import data, decoding, masks, training
from flax_transformer.commands.jobs import Job, chosen_sizes, describe, intervals, refuse, vocabulary_loss
from flax_transformer.commands.recipes import ENCODER_DECODER
from flax_transformer.commands.train_options import EncoderDecoderOptions, given
from flax_transformer.config import EncoderDecoderConfig
from flax_transformer.encoder_decoder import EncoderDecoder
from flax_transformer.tokenizer import Tokenizer, encode_ordinary

_HELD_OUT = 500
_SPLIT_SEED = 0  # not the run's: the losses of two seeds are of the same pairs
_SAMPLES = 10
_DRAWN_TOKENS = 32


def prepare_encoder_decoder(options: EncoderDecoderOptions) -> Job:
    """Reads the pairs and resolves every option. Builds no model and writes nothing.

    Raises:
        ValueError: whatever the user has to change.
    """
    preset = ENCODER_DECODER[options.preset]
    recipe = dataclasses.replace(preset.recipe, **given(options, dataclasses.fields(preset.recipe)))
    problems = [f"--max-length must be at least 2, got {recipe.max_length}"] if recipe.max_length < 2 else []
    if options.device.steps_per_dispatch > 1:
        problems.append("--steps-per-dispatch must be 1 here, for batches of pairs have several lengths")
    refuse(options, recipe, problems)
    seed = options.training.seed

    text, notices = _read(options)
    tokenizer = Tokenizer.from_ids(np.concatenate([encode_ordinary(side) for side in text.sources + text.targets]))
    vocab_size = tokenizer.vocab_size + data.NUM_SPECIAL_IDS
    parts = data.split_pairs(text, seed=_SPLIT_SEED, at_most=_HELD_OUT)
    train, held_out = (
        data.encode_pairs(
            part, encode_source=tokenizer.encode, encode_target=tokenizer.encode, max_length=recipe.max_length
        )
        for part in (parts.train, parts.validation)
    )
    too_long = train.too_long + held_out.too_long
    batches = data.PairBatches(train, batch_size=recipe.batch_size, seed=seed, buckets=recipe.buckets)

    sizes = chosen_sizes(options, EncoderDecoderConfig)
    sizes.pop("max_length", None)
    config = preset.config(vocab_size=vocab_size, **sizes)
    config = dataclasses.replace(config, max_length=max(config.max_length, recipe.max_length))

    schedule = recipe.make_schedule(d_model=config.d_model)
    every = intervals(options, recipe)
    over_vocabulary = vocabulary_loss(options, positions=recipe.batch_size * recipe.max_length, vocab_size=vocab_size)
    loss = functools.partial(training.translation_loss, **over_vocabulary)
    return Job(
        name="encoder-decoder",
        title=[
            *notices,
            f"{text.name}: {len(train):,} pairs to train on, {len(held_out):,} held out, {too_long:,} left out for more "
            f"than {recipe.max_length} tokens; one vocabulary of {vocab_size:,}",
        ],
        build_model=lambda: EncoderDecoder(config, rngs=nnx.Rngs(seed)),
        loss=functools.partial(loss, label_smoothing=config.label_smoothing),
        validation_loss=loss,
        optimizer=recipe.make_optimizer(schedule),
        schedule=schedule,
        batch=batches.batch,
        longest=batches.shapes[-1][1],
        validation=lambda: data.validation_pair_batches(held_out, batch_size=recipe.batch_size, buckets=recipe.buckets),
        baseline=data.unigram_loss(
            train.target.ids, np.insert(held_out.target.ids, 0, data.BEGIN_ID), vocab_size=vocab_size
        ),
        write_sample=lambda model: _translations(
            model, tokenizer, parts.validation, held_out, length=recipe.max_length
        ),
        sample_file="samples.txt",
        draw_attention=lambda model, root: _draw_attention(model, tokenizer, held_out, root),
        tokenizer=tokenizer,
        record=describe(
            "encoder-decoder",
            options,
            config=config,
            recipe=recipe,
            resolved={**every, "max_length": recipe.max_length, "vocabulary_loss": over_vocabulary["vocabulary_loss"]},
            data={
                "name": text.name,
                "sha256": text.sha256,
                "train_pairs": len(train),
                "validation_pairs": len(held_out),
                "too_long": too_long,
                "tokenizer_sha256": tokenizer.sha256,
            },
        ),
        recipe=recipe,
        **every,
        work=f"{recipe.batch_size} pairs",
    )


def _read(options: EncoderDecoderOptions) -> tuple[data.ParallelText, list[str]]:
    """The pairs, and lines about those that were skipped."""
    two, one = (options.source_file, options.target_file), options.pairs
    if one is not None and two != (None, None):
        raise ValueError("pairs are in two files or in one; give --source-file and --target-file, or --pairs")
    if (two[0] is None) != (two[1] is None):
        lacking = "--source-file" if two[0] is None else "--target-file"
        raise ValueError(f"{lacking} is missing; give both files, or one file of both with --pairs")
    if one is not None:
        checked = data.read_tab_separated(one, bad_pairs=options.bad_pairs)
    elif two[0] is not None and two[1] is not None:
        checked = data.read_two_files(two[0], two[1], bad_pairs=options.bad_pairs)
    else:
        return data.king_james_to_world_english(), []
    return checked.text, [f"skipped: {checked.report}"] if checked.report.bad else []


def _translations(
    model: EncoderDecoder, tokenizer: Tokenizer, text: data.ParallelText, pairs: data.EncodedPairs, *, length: int
) -> str:
    """Ten held-out sentences, spread over all of them, beside their references and greedy translations."""
    rows = np.unique(np.linspace(0, len(pairs) - 1, _SAMPLES).round().astype(int))
    longest = int(pairs.source.lengths[rows].max())
    source = jnp.asarray(pairs.source.padded(rows, length=longest))
    written = decoding.translate_greedy(
        model,
        source,
        masks.padding_mask(source),
        start_id=data.BEGIN_ID,
        length=min(length, 2 * longest + 8),  # a model that has not learned to end goes on and on
        end_id=data.END_ID,
    )
    return "\n\n".join(
        f"source:      {text.sources[place]}\n"
        f"reference:   {text.targets[place]}\n"
        f"translation: {tokenizer.decode(data.remove_special(row[1:]))}"
        for place, row in zip(pairs.places[rows], jax.device_get(written), strict=True)
    )


def _draw_attention(model: EncoderDecoder, tokenizer: Tokenizer, pairs: data.EncodedPairs, root: Path) -> None:
    """Of the first held-out pair that is short enough to be read: the encoder's, the decoder's and what lies between."""
    from flax_transformer import pictures  # matplotlib takes its time, and only those who ask for pictures wait for it

    longest = np.maximum(pairs.source.lengths, pairs.target.lengths)
    row = int(np.argmax(longest <= max(_DRAWN_TOKENS, longest.min())))
    source = pairs.source.padded([row], length=int(pairs.source.lengths[row]))[:, :_DRAWN_TOKENS]
    labels = pairs.target.padded([row], length=int(pairs.target.lengths[row]))[:, :_DRAWN_TOKENS]
    target = np.insert(labels[:, :-1], 0, data.BEGIN_ID, axis=1)
    weights = pictures.collect_attention(
        model, source, target, masks.padding_mask(jnp.asarray(source)), masks.causal_mask(target.shape[1])
    )
    tokens = {"source": _tokens(tokenizer, source[0]), "target": _tokens(tokenizer, target[0])}
    for kind, rows, columns in (
        ("encoder.self_attention", "source", "source"),
        ("decoder.self_attention", "target", "target"),
        ("decoder.cross_attention", "target", "source"),
    ):
        stack, attention = kind.split(".")
        chosen = {name: maps for name, maps in weights.items() if name.startswith(stack) and name.endswith(attention)}
        pictures.attention_maps(
            chosen, rows=tokens[rows], columns=tokens[columns], output=root / f"attention.{kind}.png"
        )


def _tokens(tokenizer: Tokenizer, ids: NDArray[np.int32]) -> list[str]:
    special = {data.PAD_ID: "<pad>", data.BEGIN_ID: "<begin>", data.END_ID: "<end>"}
    return [special.get(int(token)) or tokenizer.decode([token - data.NUM_SPECIAL_IDS]) for token in ids]
