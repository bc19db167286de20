"""Train a Transformer from the command line.

python train.py                                   a small GPT on a built-in English text, in minutes on a laptop
python train.py decoder-only --data my.txt        the same on your own text
python train.py encoder-decoder                   a small translator, from old to modern English
python train.py decoder-only --help               every option
"""

import argparse
import dataclasses
import math
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import tyro

from flax_transformer import parallel, training
from flax_transformer.checkpoint import Checkpoints, RunDirectory, write_json
from flax_transformer.commands import runs
from flax_transformer.commands.decoder_only_job import prepare_decoder_only
from flax_transformer.commands.encoder_decoder_job import prepare_encoder_decoder
from flax_transformer.commands.jobs import Job, count_labels
from flax_transformer.commands.processes import anywhere, from_main_process, together
from flax_transformer.commands.progress import Display, Pace, Report, StopSignal, display
from flax_transformer.commands.train_options import COMMANDS, DecoderOnlyOptions, Options, as_arguments
from flax_transformer.losses import LossSums


@dataclasses.dataclass(frozen=True)
class Run:
    """A job, where it is kept and how it is laid over devices."""

    job: Job
    options: Options
    directory: RunDirectory
    layout: parallel.Layout
    arguments: Sequence[str]  # of the command line


def prepare(options: Options) -> tuple[Job, parallel.Layout]:
    """Reads the data and resolves every option. Builds no model and writes nothing."""
    layout = parallel.layout(options.devices.parallel)
    job = prepare_decoder_only(options) if isinstance(options, DecoderOnlyOptions) else prepare_encoder_decoder(options)
    layout.check_batch_size(job.recipe.batch_size)
    return job, layout


def begin(run: Run) -> tuple[training.ModelStructure, training.TrainState, list[str]]:
    """The model's structure, the state to go on from, and lines about what was found."""
    structure, parameters, buffers = training.split_model(run.job.build_model())
    state = training.init_state(parameters, buffers, run.job.optimizer, seed=run.options.training.seed)

    def restore() -> tuple[training.TrainState, list[str]]:
        if not parallel.is_main_process():
            return state, []
        with Checkpoints(run.directory.checkpoints) as checkpoints:
            return runs.restore_newest(checkpoints, state)

    state, notices = together(restore)
    return structure, from_main_process(state), notices


def execute(run: Run, structure: training.ModelStructure, state: training.TrainState, notices: Sequence[str]) -> int:
    """Trains, validates, saves, samples. Returns the exit status."""
    job, main, first = run.job, parallel.is_main_process(), int(state.step)
    if main:
        write_json(run.directory.config, job.record)
        job.tokenizer.save(run.directory.tokenizer)
        runs.write_provenance(run.directory, record=job.record, step=first, arguments=run.arguments)
    with display(job.recipe.steps, process_index=jax.process_index()) as shown, StopSignal() as stop:
        for line in (*job.title, *notices):
            shown.say(line)
        count = sum(leaf.size for leaf in state.parameters.values())
        shown.say(
            f"{job.name}: {count:,} parameters, {job.recipe.steps} steps of {job.work}, {_in_words(run.layout.devices)}"
        )
        if run.options.run.resume:
            shown.say(f"resumed after step {first}" if first else "nothing to resume; beginning at step 0")
        trained = train(run, structure, state, shown, stop)
    if trained.validation_loss is None:
        number = stop.received or signal.SIGTERM  # which another process received
        if main:
            step = int(trained.state.step)
            print(f"stopped by {number.name}; step {step} is saved in {run.directory.root}\n{_how_to_resume(run)}")
        return 128 + number
    if main:
        finish(run, structure, trained.state, trained.validation_loss)
    together(lambda: None)  # a process that ended before the others would be missed
    return 0


@dataclasses.dataclass(frozen=True)
class Trained:
    """What the loop leaves.

    Attributes:
        state: on the host.
        validation_loss: after the last step; None: the run was stopped before it.
    """

    state: training.TrainState
    validation_loss: float | None


def train(
    run: Run, structure: training.ModelStructure, state: training.TrainState, shown: Display, stop: StopSignal
) -> Trained:
    """Takes the steps that are left. The host waits for the device only where a step is logged, or saved."""
    job, layout, total, main = run.job, run.layout, run.job.recipe.steps, parallel.is_main_process()
    take_step = layout.compile_train_step(structure, job.loss, job.optimizer)
    evaluate = layout.compile_eval_step(structure, job.validation_loss)
    first, validation = int(state.step), None
    best = runs.best_validation_loss(runs.rewind_metrics(run.directory, first)) if main else math.inf
    state, pace = layout.place_state(state), Pace(first, total)

    def validate() -> float:
        sums = [jax.device_get(evaluate(state, layout.place_batch(batch))) for batch in job.validation()]
        return float(LossSums(*(jnp.asarray(sum(part)) for part in zip(*sums, strict=True))).mean)

    with Checkpoints(run.directory.checkpoints, keep=run.options.run.keep, saving="asynchronous") as checkpoints:
        for number in range(first + 1, total + 1):
            batch = job.batch(number - 1)
            state, metrics = take_step(state, layout.place_batch(batch))
            pace.took(number, count_labels(batch), metrics)

            validated = number % job.validate_every == 0 or number == total
            validation = None
            logged = validated or number == 1 or number % run.options.run.log_every == 0
            if logged:
                loss, grad_norm, _ = (float(value) for value in jax.device_get(metrics))
                speed, left = pace.measure()
                validation = validate() if validated else None
                report = Report(
                    number, loss, float(job.schedule(jnp.asarray(number - 1))), grad_norm, speed, left, validation
                )
                if main:
                    runs.append_metrics(run.directory, report.as_metrics())
                shown.show(report)
                pace.go_on()

            # Several processes must stop at one step, and to ask them all is to wait for all.
            stopped = (logged or jax.process_count() == 1) and anywhere(stop.received is not None)
            is_best = validation is not None and validation < best
            best = best if validation is None else min(best, validation)
            if main and (is_best or stopped or number % job.save_every == 0 or number == total):
                checkpoints.save(number, layout.unplace_state(state), validation_loss=validation)
            if stopped and number < total:
                return Trained(layout.unplace_state(state), None)
    return Trained(layout.unplace_state(state), validation if first < total else validate())


def finish(run: Run, structure: training.ModelStructure, state: training.TrainState, validation_loss: float) -> None:
    """Writes, draws and prints what the run came to."""
    from flax_transformer import pictures  # matplotlib takes its time, which nobody waits for at the beginning

    job, root = run.job, run.directory.root
    write_json(
        run.directory.results,
        {"step": int(state.step), "validation_loss": validation_loss, "unigram_loss": job.baseline},
    )
    model = structure.merge(*jax.device_put((state.parameters, state.buffers)))
    sample = job.write_sample(model)
    (root / job.sample_file).write_text(sample + "\n", encoding="utf-8")
    try:
        pictures.loss_curve(run.directory.metrics, root / "loss.png", baseline=job.baseline)
        if run.options.run.attention_maps == "sample":
            job.draw_attention(model, root)
    except ValueError as error:  # a run that has diverged
        print(f"no picture: {error}")
    print(f"validation loss {validation_loss:.3f} nats per token; unigram baseline {job.baseline:.3f}")
    print(f"saved in {root}")
    print(f"\n{sample}" if sample else "", end="\n" if sample else "")


def _how_to_resume(run: Run) -> str:
    return f"to resume: python train.py {run.job.name} --output {shlex.quote(str(run.directory.root))} --resume"


def _in_words(devices: Sequence[Any]) -> str:
    processes = f" of {jax.process_count()} processes" if jax.process_count() > 1 else ""
    return f"{len(devices)} {devices[0].device_kind} device{'s' if len(devices) > 1 else ''}{processes}"


def parse(arguments: Sequence[str]) -> Options:
    """The options of a command line, whose defaults are those of --config, and of a run to resume."""
    arguments = list(arguments)
    if not arguments or (arguments[0].startswith("-") and arguments[0] not in ("-h", "--help")):
        arguments.insert(0, "decoder-only")
    name, *rest = arguments
    marks = (tyro.conf.FlagCreatePairsOff,)
    if name not in COMMANDS:
        return tyro.extras.subcommand_cli_from_dict(
            COMMANDS, prog="train.py", description=_DESCRIPTION, args=arguments, config=marks
        )
    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for option in ("--config", "--output"):
        early.add_argument(option, nargs="?", type=Path)
    early.add_argument("--resume", action="store_true")
    known, _ = early.parse_known_args(rest)
    sources = [known.config] if known.config else []
    if known.resume and known.output and (saved := RunDirectory(known.output).config).exists():
        sources.insert(0, saved)
    defaults = [text for path in sources for text in as_arguments(runs.options_of(path, command=name))]
    return tyro.cli(COMMANDS[name], prog=f"train.py {name}", args=[*defaults, *rest], config=marks)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status: 0, 2 for a mistake of the user, 128 + n for signal n."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        try:
            options = parse(arguments)
            devices = options.devices
            parallel.initialise_distributed(
                devices.distributed,
                coordinator=devices.coordinator,
                num_processes=devices.num_processes,
                process_id=devices.process_id,
            )
            job, layout = together(lambda: prepare(options))
            directory = together(lambda: claim(options, job))
            run = Run(job, options, directory, layout, arguments)
            structure, state, notices = begin(run)
        except ValueError as error:
            print(f"train.py: {' '.join(str(error).split())}", file=sys.stderr)
            return 2
        return execute(run, structure, state, notices)
    except KeyboardInterrupt:  # outside the training loop, or the second one within it
        print("train.py: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT


def claim(options: Options, job: Job) -> RunDirectory:
    """The directory of the run, which process 0 alone touches."""
    if not parallel.is_main_process():
        return RunDirectory(options.run.output or Path("runs"))
    return runs.open_directory(options.run.output, job.record, resume=options.run.resume)


_DESCRIPTION = """Train a Transformer in JAX/Flax.

python train.py: a small GPT on a built-in English text, in minutes on a laptop.

python train.py decoder-only --data my.txt: the same on your own text.

python train.py encoder-decoder: a small translator, from the King James Version to modern English (extra `data`).

python train.py encoder-decoder --pairs my.tsv: the same on your own pairs.

python train.py decoder-only --help, python train.py encoder-decoder --help: every option.

Without the name of a model, decoder-only is meant, and its options can follow at once: python train.py --steps 50"""


if __name__ == "__main__":
    sys.exit(main())
