"""The options of `train.py`, as they are typed, explained and kept in a run's config.json."""

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from flax_transformer.commands.recipes import DECODER_ONLY, ENCODER_DECODER, ScheduleName
from flax_transformer.config import Attention, Rematerialise, RunLayers
from flax_transformer.data import BadPairs
from flax_transformer.parallel import Kind
from flax_transformer.tokenizer import Vocabulary


def _option(metavar: str | None, default: str, text: str | None = None) -> Any:
    """How an option is shown. Its text is given here if it takes more than the one line of a docstring that tyro keeps."""
    return tyro.conf.arg(metavar=metavar, help_behavior_hint=f"(default: {default})", help=text)


TrainingPrecision = Literal["float32", "mixed", "bfloat16"]
# What each means for a configuration.
PRECISIONS: dict[TrainingPrecision, dict[str, str]] = {
    "float32": {"precision": "highest", "compute_dtype": "float32"},
    "mixed": {"precision": "mixed", "compute_dtype": "float32"},
    "bfloat16": {"precision": "default", "compute_dtype": "bfloat16"},
}

_PRESETS_OWN = "the preset's"
_Count = Annotated[int | None, _option("N", _PRESETS_OWN)]
_Number = Annotated[float | None, _option("X", _PRESETS_OWN)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """What of the preset's model is to be different."""

    d_model: _Count = None
    """Width of the model; the feed-forward network is four times as wide."""
    num_heads: _Count = None
    """Attention heads; must divide the width."""
    num_layers: _Count = None
    """Layers of each stack."""
    dropout: _Number = None
    """Share of activations that is dropped in training, in [0, 1)."""
    attention_dropout: _Number = None
    """Share of attention weights that is dropped in training, in [0, 1)."""
    attention: Annotated[
        Attention | None,
        _option(
            "{einsum,flash}",
            "einsum",
            "How attention is computed: einsum: plain products; flash: the kernel of a TPU or GPU, whose memory does not "
            "grow with the square of the length; it takes --attention-dropout 0 and a precision below float32's, and falls "
            "back to plain products, with a warning, where it cannot be used.",
        ),
    ] = None
    rematerialise: Annotated[
        Rematerialise | None,
        _option(
            "{none,layers}",
            "none",
            "layers: each layer is computed once more in the backward pass in place of being kept, a third more work in "
            "much less memory (on a CPU with --layers scanned alone).",
        ),
    ] = None
    layers: Annotated[
        RunLayers | None,
        _option(
            "{unrolled,scanned}",
            "unrolled",
            "scanned: one layer is compiled, and a loop goes over all of them: a deep model compiles as fast as a flat one.",
        ),
    ] = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """What of the preset's recipe is to be different. The optimizer is AdamW, behind clipping of the gradient's norm."""

    steps: _Count = None
    """How many optimizer steps to take."""
    batch_size: _Count = None
    """Sequences, or pairs, in a batch: all devices together, which share them equally."""
    learning_rate: _Number = None
    """The highest of the learning rates."""
    schedule: Annotated[
        ScheduleName | None,
        _option(
            "{cosine,noam,constant}",
            _PRESETS_OWN,
            "How the learning rate goes. After a linear warmup, cosine: half a cosine down to a tenth; noam: a fall with "
            "the square root of the step, as in the paper, whose own highest rate is 1 / sqrt(width * warmup steps); "
            "constant: no warmup and no fall.",
        ),
    ] = None
    warmup: _Number = None
    """Share of the steps that the warmup takes, in [0, 1)."""
    precision: Annotated[
        TrainingPrecision,
        _option(
            None,
            "mixed",
            "How products are computed; weights, gradients and optimizer are float32 always. mixed: the factors rounded "
            "to bfloat16, sums and results in float32, as a TPU does by default, here on every backend (1.3 to 2.4 times"
            " as fast as float32 on a CPU with AMX); float32: in float32 on every backend, so that every layout over "
            "devices gives the same numbers up to 2e-6; bfloat16: activations too, which saves memory on a TPU or GPU "
            "and is slow on a CPU. docs/precision.md compares the three.",
        ),
    ] = "mixed"
    vocabulary_loss: Annotated[
        Literal["auto", "plain", "fused"],
        _option(
            None,
            "auto",
            "How the loss over the vocabulary is computed. plain: from all logits of the batch; fused: in chunks of the "
            "vocabulary, whose logits are computed twice and never kept, which is faster and takes a fraction of the "
            "memory where the vocabulary is large; auto: fused from four million logits (tokens of a batch x vocabulary) "
            "on, in float32 from twelve. The numbers are the same up to rounding.",
        ),
    ] = "auto"
    seed: Annotated[int, _option("N", "0")] = 0
    """Decides the first weights, the batches, dropout and the written text: equal seeds, equal runs."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Where the run is kept, and how often. The directory holds config.json (every setting, resolved), provenance.json
    with versions, devices and digests of the data, tokenizer.json, metrics.jsonl with one JSON object a logged step,
    checkpoint/ and at the end results.json, a picture of the loss and what the model wrote."""

    config: Annotated[Path | None, _option("FILE", "none")] = None
    """Another run's config.json: its options are the defaults of this command line."""
    output: Annotated[Path | None, _option("DIR", "runs/MODEL, or a fresh one beside it")] = None
    """Where the run is kept. A directory that holds something already is refused, unless it is to be resumed."""
    resume: Annotated[
        bool,
        _option(
            None,
            "a fresh run",
            "Continue the run in --output from its last checkpoint, with its own options, exactly as if it had never "
            "stopped. If the directory is missing or empty, the run begins there: so one command line serves for every "
            "attempt.",
        ),
    ] = False
    log_every: Annotated[int, _option("N", "20")] = 20
    """Steps between two reports."""
    validate_every: Annotated[int | None, _option("N", "a fifth of the steps")] = None
    """Steps between two validations. The last step is always validated."""
    save_every: Annotated[
        int | None,
        _option(
            "N",
            "a fifth of the steps",
            "Steps between two checkpoints. The best step so far, the last one, and the one at which Ctrl-C or SIGTERM "
            "stops the run are always saved.",
        ),
    ] = None
    keep: Annotated[int, _option("N", "3")] = 3
    """How many of the last checkpoints are kept, beside the one with the least validation loss."""
    max_bad_steps: Annotated[
        int,
        _option(
            "K",
            "10",
            "A step whose loss or gradient is not finite changes nothing but the number of steps; after so many in a row "
            "the run is saved and stops with exit status 3.",
        ),
    ] = 10
    tensorboard: Annotated[
        bool,
        _option(
            None,
            "no",
            "Write the numbers of metrics.jsonl for TensorBoard as well, to the directory tensorboard in --output (extra "
            "`tensorboard`). To look at them: pip install tensorboard; tensorboard --logdir runs",
        ),
    ] = False
    profile: Annotated[
        bool,
        _option(
            None,
            "no",
            "Trace steps 11 to 15 of this launch with jax.profiler, to the directory profile in --output. To look at it: "
            "pip install xprof; xprof --logdir DIR/profile",
        ),
    ] = False
    attention_maps: Literal["none", "sample"] = "none"
    """sample: at the end, draw the attention of every layer and head on one held-out example, tokens on the axes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceOptions:
    """How a step is laid over devices: all that are present, of one process or of several. To train with several
    processes, start the same command line in each, with --distributed auto where a TPU pod, SLURM, Open MPI or Kubernetes
    tells them of each other, or else with the last three options. Process 0 alone prints and writes."""

    parallel: Annotated[
        Kind,
        _option(
            None,
            "jit",
            "jit: one program, which the compiler splits; pmap: one program per device. Both take the same steps, up to "
            "the order in which numbers are added.",
        ),
    ] = "jit"
    mesh: Annotated[
        str | None,
        _option(
            "data=N,fsdp=N,tensor=N",
            "all devices along data",
            "How the devices are arranged under --parallel jit. Along data each holds the whole model and a part of the "
            "batch; along fsdp parameters and optimizer are spread as well; along tensor every product is, for one part of "
            "the batch. An axis that is left out has 1 device, and data all that are left. Every mesh takes the same steps, "
            "up to the order in which numbers are added.",
        ),
    ] = None
    accumulate: Annotated[
        int,
        _option(
            "N",
            "1",
            "In how many microbatches a batch is taken, one after the other: a batch of the same size in less memory. The "
            "same steps, up to the order in which numbers are added.",
        ),
    ] = 1
    steps_per_dispatch: Annotated[
        int,
        _option(
            "N",
            "1",
            "How many steps the devices take for one word of the host, which is what very small models wait for. Everything "
            "that happens every so many steps, and the steps themselves, must be a multiple of it; decoder-only alone, "
            "whose batches have one shape.",
        ),
    ] = 1
    plan: Annotated[
        str | None,
        _option(
            "SLICE",
            "train here",
            "Train nothing, but compile the step for a slice of TPUs that are not here, such as v5e:2x4, v6e:4x4 or "
            "v5p:2x2x2, and print whether it fits, what the memory of a chip is taken by, the largest batch that fits, and "
            "the least time that a step takes (extra `tpu`, for the compiler).",
        ),
    ] = None
    distributed: Literal["off", "auto"] = "off"
    """Whether to look for other processes in the surroundings."""
    coordinator: Annotated[str | None, _option("HOST:PORT", "none")] = None
    """Where process 0 is to be reached."""
    num_processes: Annotated[int | None, _option("N", "none")] = None
    """How many processes there are."""
    process_id: Annotated[int | None, _option("I", "none")] = None
    """Which of them this is, from 0."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderOnlyOptions:
    """Train a decoder-only (GPT-style) Transformer on a text, then validate it, save it and let it write.

    The first 90 % of the text's tokens train the model, the rest validate it. The validation loss is printed beside the
    unigram baseline: what knowing the frequency of each token, and nothing else, would give. A model that has learned
    anything about the order of words is below it.

    To let the model write more: python -m flax_transformer.commands.generate DIR --prompt TEXT
    """

    preset: Annotated[
        Literal["small", "document", "gpt2-small"],
        tyro.conf.arg(
            help="The model and its recipe. "
            + "; ".join(
                f"{name}: {preset.words} ({preset.recipe.steps:,} steps of {preset.recipe.batch_size} x "
                f"{preset.recipe.context_length} tokens, {preset.recipe.schedule} schedule up to "
                f"{preset.recipe.learning_rate:.2g}, {preset.recipe.vocabulary} vocabulary)"
                for name, preset in DECODER_ONLY.items()
            )
        ),
    ] = "small"
    data: Annotated[Path | None, _option("FILE", "the help pages of Python itself, pydoc_data.topics")] = None
    """The text to train on, UTF-8."""
    vocabulary: Annotated[Vocabulary | None, _option("{compact,full}", _PRESETS_OWN)] = None
    """Of o200k_base, compact: the tokens that occur in the text; full: all up to the largest that occurs."""
    context_length: _Count = None
    """Tokens in a sequence: how far back the model can look."""
    prompt: Annotated[str | None, _option("TEXT", "the beginning of the validation text")] = None
    """What the trained model is to continue."""
    generate_tokens: Annotated[int, _option("N", "100")] = 100
    """How many tokens it is to write; 0: none."""
    model: tyro.conf.OmitArgPrefixes[ModelOptions] = ModelOptions()
    training: tyro.conf.OmitArgPrefixes[TrainingOptions] = TrainingOptions()
    run: tyro.conf.OmitArgPrefixes[RunOptions] = RunOptions()
    device: tyro.conf.OmitArgPrefixes[DeviceOptions] = DeviceOptions()


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncoderDecoderOptions:
    """Train an encoder-decoder Transformer on sentences and their translations, then let it translate.

    About 2 % of the pairs, at most 500, are held out, none of whose sources the model is trained on. The loss on them is
    printed beside the unigram baseline: what knowing the frequency of each target token, and nothing else, would give.
    Ten of them are shown with their references and the model's greedy translations, and kept in samples.txt.

    Source and target have one vocabulary: the tokens of o200k_base that occur in the pairs, and padding, begin and end.
    """

    preset: Annotated[
        Literal["small", "document", "paper-base", "paper-big"],
        tyro.conf.arg(
            help="The model and its recipe. "
            + "; ".join(
                f"{name}: {preset.words} ({preset.recipe.steps:,} steps of {preset.recipe.batch_size} pairs, "
                f"{preset.recipe.schedule} schedule up to {preset.recipe.learning_rate:.2g})"
                for name, preset in ENCODER_DECODER.items()
            )
        ),
    ] = "small"
    source_file: Annotated[Path | None, _option("FILE", "King James to World English Bible, extra `data`")] = None
    """The sentences, UTF-8, one a line. Goes with --target-file."""
    target_file: Annotated[Path | None, _option("FILE", "none")] = None
    """Their translations: line i of this file translates line i of the other."""
    pairs: Annotated[Path | None, _option("FILE.tsv", "none")] = None
    """Instead of two files: lines of a sentence, one tab, its translation."""
    bad_pairs: Annotated[
        BadPairs,
        _option(
            None,
            "refuse",
            "What to do about empty sides, wrong columns, files of unequal length, bytes that are not UTF-8 and enormous "
            "lines. Either way they are counted and shown with their line numbers.",
        ),
    ] = "refuse"
    max_length: _Count = None
    """The longest sentence in tokens, its end included. Longer pairs are counted and left out, never cut."""
    model: tyro.conf.OmitArgPrefixes[ModelOptions] = ModelOptions()
    training: tyro.conf.OmitArgPrefixes[TrainingOptions] = TrainingOptions()
    run: tyro.conf.OmitArgPrefixes[RunOptions] = RunOptions()
    device: tyro.conf.OmitArgPrefixes[DeviceOptions] = DeviceOptions()


Options = DecoderOnlyOptions | EncoderDecoderOptions
COMMANDS: dict[str, type[DecoderOnlyOptions] | type[EncoderDecoderOptions]] = {
    "decoder-only": DecoderOnlyOptions,
    "encoder-decoder": EncoderDecoderOptions,
}

# What belongs to one launch, and not to the run.
_OF_A_LAUNCH = {
    "config",
    "output",
    "resume",
    "plan",
    "profile",
    "distributed",
    "coordinator",
    "num_processes",
    "process_id",
}


def flat(options: Any) -> dict[str, Any]:
    """Every option by its name, whatever group it stands in."""
    values: dict[str, Any] = {}
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        values |= flat(value) if dataclasses.is_dataclass(value) else {field.name: value}
    return values


def given(options: Options, fields: Iterable[dataclasses.Field]) -> dict[str, Any]:
    """The options that are not left to the preset, of those that are named as one of the fields."""
    names = {field.name for field in fields}
    return {name: value for name, value in flat(options).items() if name in names and value is not None}


def as_record(options: Options, resolved: dict[str, Any]) -> dict[str, Any]:
    """What config.json keeps of the options, with the values that a preset decided filled in.

    Paths are absolute: the file may be read from another directory.
    """
    values = {name: value for name, value in flat(options).items() if name not in _OF_A_LAUNCH}
    values |= {name: value for name, value in resolved.items() if name in values}
    return {name: str(value.absolute()) if isinstance(value, Path) else value for name, value in values.items()}


def as_arguments(record: dict[str, Any]) -> list[str]:
    """The command line that says what `as_record` kept."""
    words = []
    for name, value in record.items():
        option = f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            words += [option] * value
        elif value is not None:
            words.append(f"{option}={value}")
    return words
