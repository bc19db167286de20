"""Train a Transformer from the command line.

python train.py                                   a small GPT on a built-in English text, in minutes on a laptop
python train.py decoder-only --data my.txt        the same on your own text
python train.py decoder-only --help               every option
"""

import dataclasses
import importlib.metadata
import math
import platform
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import optax
import tyro
from flax import nnx

from flax_transformer import data, optimizers, training
from flax_transformer.checkpoint import Checkpoints, RunDirectory, write_json
from flax_transformer.commands.generate import Sampling, continue_text
from flax_transformer.commands.progress import Display, Report, StopSignal, display
from flax_transformer.commands.runs import append_metrics, claim_directory
from flax_transformer.config import DecoderOnlyConfig
from flax_transformer.decoder_only import DecoderOnly
from flax_transformer.tokenizer import Tokenizer, Vocabulary


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """What a preset decides, besides the model."""

    steps: int
    batch_size: int
    context_length: int
    learning_rate: float
    vocabulary: Vocabulary
    warmup: float = 0.1  # share of the steps
    final: float = 0.1  # share of the learning rate that is left at the end
    b2: float = 0.95
    weight_decay: float = 0.1
    max_norm: float = 1.0


# `small` and `document` were chosen by measurement on 2 cores; `gpt2-small` is what its successors commonly use.
RECIPES = {
    "small": Recipe(steps=900, batch_size=8, context_length=64, learning_rate=2e-3, vocabulary="compact"),
    "document": Recipe(steps=300, batch_size=4, context_length=16, learning_rate=3e-3, vocabulary="full"),
    "gpt2-small": Recipe(steps=2000, batch_size=8, context_length=1024, learning_rate=6e-4, vocabulary="compact"),
}
PRESETS = {
    "small": DecoderOnlyConfig.small,
    "document": DecoderOnlyConfig.document,
    "gpt2-small": DecoderOnlyConfig.gpt2_small,
}


Preset = Literal["small", "document", "gpt2-small"]


def _presets_in_words() -> str:
    models = {
        "small": "trains in minutes on 2 cores",
        "document": "the decoder-only document's model as written",
        "gpt2-small": "the size of GPT-2, for accelerators",
    }
    return "The model and its recipe. " + "; ".join(
        f"{name}: {words} ({recipe.steps} steps of {recipe.batch_size} x {recipe.context_length} tokens, learning rate "
        f"{recipe.learning_rate:g}, {recipe.vocabulary} vocabulary)"
        for (name, words), recipe in zip(models.items(), RECIPES.values(), strict=True)
    )


def _option(metavar: str, default: str) -> Any:
    return tyro.conf.arg(metavar=metavar, help_behavior_hint=f"(default: {default})")


_PRESETS_OWN = "the preset's"


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderOnlyOptions:
    """Train a decoder-only (GPT-style) Transformer on a text, then validate it, save it and let it write.

    The first 90 % of the text's tokens train the model, the rest validate it. The validation loss is printed beside the
    unigram baseline: what knowing the frequency of each token, and nothing else, would give. A model that has learned
    anything about the order of words is below it.

    The output directory then holds config.json (every setting, resolved), tokenizer.json, metrics.jsonl (one JSON object
    a logged step), checkpoint/, results.json and sample.txt. To let the model write more:
    python -m flax_transformer.commands.generate DIR --prompt TEXT
    """

    preset: Annotated[Preset, tyro.conf.arg(help=_presets_in_words())] = "small"
    data: Annotated[Path | None, _option("FILE", "the help pages of Python itself, pydoc_data.topics")] = None
    """The text to train on, UTF-8."""
    vocabulary: Annotated[Vocabulary | None, _option("{compact,full}", _PRESETS_OWN)] = None
    """Of o200k_base, `compact`: the tokens that occur in the text; `full`: all up to the largest that occurs."""
    steps: Annotated[int | None, _option("N", _PRESETS_OWN)] = None
    """How many optimizer steps to take."""
    batch_size: Annotated[int | None, _option("N", _PRESETS_OWN)] = None
    """Sequences in a batch."""
    context_length: Annotated[int | None, _option("N", _PRESETS_OWN)] = None
    """Tokens in a sequence: how far back the model can look."""
    learning_rate: Annotated[float | None, _option("X", _PRESETS_OWN)] = None
    """The highest of AdamW's learning rates, after a linear warmup and before a cosine down to a tenth."""
    d_model: Annotated[int | None, _option("N", _PRESETS_OWN)] = None
    """Width of the model; the feed-forward network is four times as wide."""
    num_heads: Annotated[int | None, _option("N", _PRESETS_OWN)] = None
    """Attention heads; must divide the width."""
    num_layers: Annotated[int | None, _option("N", _PRESETS_OWN)] = None
    """Blocks of attention and feed-forward."""
    dropout: Annotated[float | None, _option("X", _PRESETS_OWN)] = None
    """Share of activations that is dropped in training, in [0, 1)."""
    seed: int = 0
    """Decides the first weights, the batches, dropout and the written text: equal seeds, equal runs."""
    output: Annotated[Path | None, _option("DIR", "runs/decoder-only, or a fresh one beside it")] = None
    """Where the run is kept. A directory that holds something already is refused."""
    log_every: int = 20
    """Steps between two reports."""
    prompt: Annotated[str | None, _option("TEXT", "the beginning of the validation text")] = None
    """What the trained model is to continue."""
    generate_tokens: int = 100
    """How many tokens it is to write; 0: none."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """All that the training loop needs to know, whichever the model."""

    name: str
    title: str
    build_model: Callable[[], nnx.Module]
    loss: training.LossFunction
    optimizer: optax.GradientTransformation
    schedule: optimizers.Schedule
    batch: Callable[[int], data.Batch]
    validation: Callable[[], Iterator[data.Batch]]
    baseline: float
    write_sample: Callable[[Any], str]
    tokenizer: Tokenizer
    record: dict[str, Any]
    steps: int
    batch_size: int
    tokens_per_step: int
    seed: int
    log_every: int


def prepare_decoder_only(options: DecoderOnlyOptions) -> Job:
    """Reads the text and resolves every option. Builds no model and writes nothing.

    Raises:
        ValueError: whatever the user has to change.
    """
    recipe = dataclasses.replace(RECIPES[options.preset], **_given(options, dataclasses.fields(Recipe)))
    _refuse_bad_numbers(options, recipe)

    corpus = data.default_corpus() if options.data is None else data.read_corpus(options.data)
    tokenizer = Tokenizer.build(corpus.text, vocabulary=recipe.vocabulary)
    ids = tokenizer.encode(corpus.text)
    parts = data.split(ids)
    data.check_split(parts, context_length=recipe.context_length, source=corpus.name)
    prompt = parts.validation[:16] if options.prompt is None else tokenizer.encode(options.prompt)

    sizes = _given(options, dataclasses.fields(DecoderOnlyConfig))
    if options.d_model is not None:
        sizes["d_ff"] = 4 * options.d_model
    config = PRESETS[options.preset](vocab_size=tokenizer.vocab_size, max_length=recipe.context_length, **sizes)

    schedule = optimizers.warmup_cosine(
        recipe.learning_rate,
        warmup_steps=int(recipe.warmup * recipe.steps),
        total_steps=recipe.steps,
        final=recipe.final * recipe.learning_rate,
    )
    shape = dict(batch_size=recipe.batch_size, context_length=recipe.context_length)
    return Job(
        name="decoder-only",
        title=(
            f"{corpus.name}: {len(parts.train):,} tokens to train on, {len(parts.validation):,} to validate with; "
            f"{recipe.vocabulary} vocabulary of {tokenizer.vocab_size:,}"
        ),
        build_model=lambda: DecoderOnly(config, rngs=nnx.Rngs(options.seed)),
        loss=training.next_token_loss,
        optimizer=optimizers.adamw(schedule, b2=recipe.b2, weight_decay=recipe.weight_decay, max_norm=recipe.max_norm),
        schedule=schedule,
        batch=lambda step: data.sample_batch(parts.train, **shape, seed=options.seed, step=step),
        validation=lambda: data.validation_batches(parts.validation, **shape),
        baseline=data.unigram_loss(parts.train, parts.validation, vocab_size=tokenizer.vocab_size),
        write_sample=lambda model: (
            continue_text(
                model, tokenizer, prompt, tokens=options.generate_tokens, sampling=Sampling(seed=options.seed)
            )
            if options.generate_tokens
            else ""
        ),
        tokenizer=tokenizer,
        record={
            "command": "decoder-only",
            "model": dataclasses.asdict(config),
            "training": {"preset": options.preset, "seed": options.seed, **dataclasses.asdict(recipe)},
            "data": {
                "name": corpus.name,
                "sha256": corpus.sha256,
                "train_tokens": len(parts.train),
                "validation_tokens": len(parts.validation),
                "tokenizer_sha256": tokenizer.sha256,
            },
            "versions": {"python": platform.python_version()}
            | {name: importlib.metadata.version(name) for name in ("jax", "flax", "optax", "orbax-checkpoint")},
        },
        steps=recipe.steps,
        batch_size=recipe.batch_size,
        tokens_per_step=recipe.batch_size * recipe.context_length,
        seed=options.seed,
        log_every=options.log_every,
    )


def _given(options: DecoderOnlyOptions, fields: Iterable[dataclasses.Field]) -> dict[str, Any]:
    """The options that the user gave, of those that are named as one of the fields."""
    names = {field.name for field in fields} & {field.name for field in dataclasses.fields(options)}
    return {name: value for name in sorted(names) if (value := getattr(options, name)) is not None}


def _refuse_bad_numbers(options: DecoderOnlyOptions, recipe: Recipe) -> None:
    wrong = [
        f"--{name} must be at least {least}, got {value}"
        for name, value, least in (
            ("steps", recipe.steps, 1),
            ("batch-size", recipe.batch_size, 1),
            ("context-length", recipe.context_length, 1),
            ("log-every", options.log_every, 1),
            ("generate-tokens", options.generate_tokens, 0),
        )
        if value < least
    ]
    if not 0 < recipe.learning_rate < math.inf:
        wrong.append(f"--learning-rate must be a number above 0, got {recipe.learning_rate}")
    if not 0 <= options.seed < 2**32:
        wrong.append(f"--seed must be at least 0 and below 2^32, got {options.seed}")
    if options.prompt == "" and options.generate_tokens:
        wrong.append("--prompt must hold at least one character; leave it out to start with the validation text")
    if wrong:
        raise ValueError("; ".join(wrong))


def run(job: Job, directory: RunDirectory) -> int:
    """Trains, validates, saves, samples. Returns the exit status."""
    is_first = jax.process_index() == 0
    if is_first:
        write_json(directory.config, job.record)
        job.tokenizer.save(directory.tokenizer)
    structure, parameters, buffers = training.split_model(job.build_model())
    state = training.init_state(parameters, buffers, job.optimizer, seed=job.seed)
    count = sum(leaf.size for leaf in parameters.values())
    with display(job.steps, process_index=jax.process_index()) as shown, StopSignal() as stop:
        shown.say(job.title)
        shown.say(
            f"{job.name}: {count:,} parameters, {job.steps} steps of {job.tokens_per_step:,} tokens, {_devices()}"
        )
        state = train(job, structure, state, directory, shown, stop)
    with Checkpoints(directory.checkpoints) as checkpoints:
        checkpoints.save(int(state.step), state)
    if stop.received is not None:
        print(f"stopped by {stop.received.name}; step {int(state.step)} is saved in {directory.root}")
        return 128 + stop.received

    evaluate = jax.jit(training.make_eval_step(structure, job.loss))
    sums = [evaluate(state.parameters, state.buffers, batch) for batch in job.validation()]
    validation = float(jax.tree.map(lambda *parts: sum(parts), *sums).mean)
    sample = job.write_sample(structure.merge(state.parameters, state.buffers))
    if is_first:
        results = {"step": int(state.step), "validation_loss": validation, "unigram_loss": job.baseline}
        write_json(directory.root / "results.json", results)
        directory.sample.write_text(sample + "\n", encoding="utf-8")
        print(f"validation loss {validation:.3f} nats per token; unigram baseline {job.baseline:.3f}")
        print(f"saved in {directory.root}")
        print(f"\n{sample}" if sample else "", end="\n" if sample else "")
    return 0


def train(
    job: Job,
    structure: training.ModelStructure,
    state: training.TrainState,
    directory: RunDirectory,
    shown: Display,
    stop: StopSignal,
) -> training.TrainState:
    """Takes the steps that are left. The host waits for the device only where a step is logged."""
    step = jax.jit(training.make_train_step(structure, job.loss, job.optimizer), donate_argnums=0)
    examples = jnp.arange(job.batch_size)
    first = int(state.step) + 1
    began = last_time = time.perf_counter()
    last_step = first
    for number in range(first, job.steps + 1):
        state, metrics = step(state, job.batch(number - 1), examples)
        if number in (first, job.steps) or number % job.log_every == 0 or stop.received:
            loss, grad_norm, _ = (float(value) for value in jax.device_get(metrics))
            now = time.perf_counter()
            if number == first:
                speed, left, began = None, None, now
            else:
                speed = job.tokens_per_step * (number - last_step) / (now - last_time)
                left = (job.steps - number) * (now - began) / (number - first)
            last_time, last_step = now, number
            report = Report(number, loss, float(job.schedule(jnp.asarray(number - 1))), grad_norm, speed, left)
            if jax.process_index() == 0:
                append_metrics(directory, report.as_metrics())
            shown.show(report)
        if stop.received:
            break
    return state


def _devices() -> str:
    devices = jax.devices()
    return f"{len(devices)} {devices[0].device_kind} device{'s' if len(devices) > 1 else ''}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status: 0, 2 for a mistake of the user, 128 + n for signal n."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if not arguments or (arguments[0].startswith("-") and arguments[0] not in ("-h", "--help")):
        arguments.insert(0, "decoder-only")
    options = tyro.extras.subcommand_cli_from_dict(
        {"decoder-only": DecoderOnlyOptions}, prog="train.py", description=_DESCRIPTION, args=arguments
    )
    try:
        try:
            job = prepare_decoder_only(options)
            directory = claim_directory(options.output, default=Path("runs") / job.name)
        except ValueError as error:
            print(f"train.py: {' '.join(str(error).split())}", file=sys.stderr)
            return 2
        return run(job, directory)
    except KeyboardInterrupt:  # outside the training loop, or the second one within it
        print("train.py: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT


_DESCRIPTION = """Train a Transformer in JAX/Flax.

python train.py: a small GPT on a built-in English text, in minutes on a laptop.

python train.py decoder-only --data my.txt: the same on your own text.

python train.py decoder-only --help: every option.

Without the name of a model, decoder-only is meant, and its options can follow at once: python train.py --steps 50"""


if __name__ == "__main__":
    sys.exit(main())
