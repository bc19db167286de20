"""Train a Transformer from the command line.

python train.py                                   a small GPT on a built-in English text, in minutes on a laptop
python train.py decoder-only --data my.txt        the same on your own text
python train.py encoder-decoder                   a small translator, from old to modern English
python train.py decoder-only --help               every option
"""

import contextlib
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
import numpy as np

from flax_transformer import distributed, parallel, planning, training
from flax_transformer.checkpoint import Checkpoints, NotFiniteError, RunDirectory, write_json, writing
from flax_transformer.commands import runs
from flax_transformer.commands.agreement import (
    DisagreementError,
    code_version,
    require_same_run,
    require_same_state,
)
from flax_transformer.commands.command_line import parse
from flax_transformer.commands.decoder_only_job import prepare_decoder_only
from flax_transformer.commands.encoder_decoder_job import prepare_encoder_decoder
from flax_transformer.commands.jobs import Job, count_labels
from flax_transformer.commands.plan import show
from flax_transformer.commands.processes import Agreement, from_main_process, together
from flax_transformer.commands.progress import Display, Pace, Report, StopSignal, Terminated, display, terminable
from flax_transformer.commands.records import UNWRITABLE, Records
from flax_transformer.commands.tensorboard import require_tensorboard
from flax_transformer.commands.train_options import DecoderOnlyOptions, Options
from flax_transformer.commands.utilisation import Trace, Utilisation
from flax_transformer.commands.watch import NOT_FINITE, Watch
from flax_transformer.losses import LossSums
from flax_transformer.sharding import MeshShape


@dataclasses.dataclass(frozen=True)
class Run:
    """A job, where it is kept and how it is laid over devices."""

    job: Job
    options: Options
    directory: RunDirectory
    layout: parallel.Layout
    arguments: Sequence[str]  # of the command line


@dataclasses.dataclass(frozen=True)
class Trained:
    """What the loop leaves.

    Attributes:
        state: on the host.
        validation_loss: after the last step; None: the run was stopped before it.
        status: the exit status, if it was stopped.
        bad_steps: what stopped it, if that was not a signal.
    """

    state: training.TrainState
    validation_loss: float | None
    status: int = 0
    bad_steps: str | None = None


def prepare(options: Options) -> tuple[Job, parallel.Layout]:
    """Reads the data and resolves every option. Builds no model and writes nothing."""
    layout = layout_of(options)
    job = prepare_job(options)
    layout.check_batch_size(job.recipe.batch_size, accumulate=options.device.accumulate)
    if options.run.tensorboard and distributed.is_main_process():
        require_tensorboard()
    return job, layout


def layout_of(options: Options, *, devices: Any = None) -> parallel.Layout:
    mesh = MeshShape() if options.device.mesh is None else MeshShape.parse(options.device.mesh)
    return parallel.layout(options.device.parallel, devices=devices, mesh=mesh)


def prepare_job(options: Options) -> Job:
    return (
        prepare_decoder_only(options) if isinstance(options, DecoderOnlyOptions) else prepare_encoder_decoder(options)
    )


def plan(options: Options, slice_name: str) -> int:
    """Compiles the step for TPUs that are not here, and prints what it takes. Returns the exit status."""
    target = planning.target(slice_name)
    layout = layout_of(options, devices=target.devices)
    return show(prepare_job(options), layout, target, accumulate=options.device.accumulate)


def begin(run: Run) -> tuple[training.ModelStructure, training.TrainState, list[str]]:
    """The model's structure, the state to go on from, and lines about what was found."""

    def build() -> tuple[training.ModelStructure, training.TrainState, list[str]]:
        structure, parameters, buffers = training.split_model(run.job.build_model())
        state = training.init_state(parameters, buffers, run.job.optimizer, seed=run.options.training.seed)
        if not distributed.is_main_process():
            return structure, state, []
        with Checkpoints(run.directory.checkpoints) as checkpoints:
            return structure, *runs.resume(checkpoints, state)

    structure, own, notices = together(build)
    state = from_main_process(own)
    if int(state.step) % run.options.device.steps_per_dispatch:
        raise ValueError(
            f"the run stopped after step {int(state.step)}, which is no multiple of --steps-per-dispatch "
            f"{run.options.device.steps_per_dispatch}; resume it with --steps-per-dispatch 1"
        )
    return structure, state, notices


def execute(run: Run, structure: training.ModelStructure, state: training.TrainState, notices: Sequence[str]) -> int:
    """Trains, validates, saves, samples. Returns the exit status.

    Raises:
        OSError: the directory of the run cannot be written any more; here or in another process.
    """
    job, main, first = run.job, distributed.is_main_process(), int(state.step)
    together(lambda: describe(run, first) if main else None)
    with display(job.recipe.steps, process_index=jax.process_index()) as shown, StopSignal() as stop:
        for line in (*job.title, *notices):
            shown.say(line)
        count = sum(leaf.size for leaf in state.parameters.values())
        shown.say(f"{job.name}: {count:,} parameters, {job.recipe.steps} steps of {job.work}, {_in_words(run.layout)}")
        if run.options.run.resume:
            shown.say(f"resumed after step {first}" if first else "nothing to resume; beginning at step 0")
        trained = train(run, structure, state, shown, stop)
    if trained.validation_loss is None:
        if main:
            _say_why(run, trained)
        return trained.status
    validation_loss = trained.validation_loss
    try:
        together(lambda: finish(run, structure, trained.state, validation_loss) if main else None)
    except KeyboardInterrupt as interruption:
        if main:
            _say_why(run, dataclasses.replace(trained, status=_status_of(interruption)))
        return _status_of(interruption)
    return 0


def _status_of(interruption: KeyboardInterrupt) -> int:
    return 128 + (signal.SIGTERM if isinstance(interruption, Terminated) else signal.SIGINT)


def _say_why(run: Run, trained: Trained) -> None:
    saved = f"step {int(trained.state.step)} is saved in {run.directory.root}"
    if trained.bad_steps is None:
        print(f"stopped by {signal.Signals(trained.status - 128).name}; {saved}\nto resume: {_resuming(run)}")
        return
    further = 2 * run.options.run.max_bad_steps
    _fail(
        f"{trained.bad_steps}; {saved}. Begin anew with a lower --learning-rate; or, if it is the data of these steps, go "
        f"on behind them with: {_resuming(run)} --max-bad-steps {further}",
        status=trained.status,
    )


def describe(run: Run, first: int) -> None:
    """Writes what the run is, and what it is run with."""
    write_json(run.directory.config, run.job.record)
    with writing(run.directory.tokenizer):
        run.job.tokenizer.save(run.directory.tokenizer)
    runs.write_provenance(run.directory, record=run.job.record, step=first, arguments=run.arguments)


def train(
    run: Run, structure: training.ModelStructure, state: training.TrainState, shown: Display, stop: StopSignal
) -> Trained:
    """Takes the steps that are left.

    The host waits for the device where a step is logged, or saved; elsewhere it is at most two steps ahead.

    Raises:
        OSError: the directory of the run cannot be written any more; here or in another process.
        NotFiniteError: what was to be saved was not finite.
        DisagreementError: processes hold different states.
    """
    job, layout, total = run.job, run.layout, run.job.recipe.steps
    accumulate, at_once = run.options.device.accumulate, run.options.device.steps_per_dispatch
    take_steps = layout.compile_train_step(structure, job.loss, job.optimizer, accumulate=accumulate, steps=at_once)
    evaluate = layout.compile_eval_step(structure, job.validation_loss)
    first, validation = int(state.step), None
    use, pace = Utilisation(structure, job.validation_loss, state, layout.devices), Pace(first, total)
    state = layout.place_state(state)
    require_same_state(first, layout.replicas(state))
    agreement, status, watch = Agreement(), 0, Watch(limit=run.options.run.max_bad_steps)

    def validate() -> float:
        sums = [jax.device_get(evaluate(state, layout.place_batch(batch))) for batch in job.validation()]
        return float(LossSums(*(jnp.asarray(sum(part)) for part in zip(*sums, strict=True))).mean)

    profile = run.directory.profile if run.options.run.profile else None
    with together(lambda: open_records(run, first)) as records, Trace(profile) as trace:
        # In every process the same, which have to save together.
        best = float(from_main_process(np.float32(records.best_validation_loss if records else math.inf)))
        if first < total:
            shown.begin()
        for number in range(first + at_once, total + 1, at_once):
            trace.before_step()
            batches = [job.batch(taken) for taken in range(number - at_once, number)]
            state, metrics = take_steps(state, layout.place(batches))
            trace.after_step(metrics)
            tokens, flops = sum(map(count_labels, batches)), sum(map(use.flops, batches))
            pace.took(number, tokens, metrics, flops=flops)
            watch.took(number, metrics)

            validated = number % job.validate_every == 0 or number == total
            validation = None
            logged = validated or number == at_once or number % run.options.run.log_every == 0
            if logged or pace.is_overdue():
                loss, grad_norm, _, skipped, _ = (value.item() for value in jax.device_get(metrics))
                speed = pace.measure()
                validation = validate() if validated else None
                rate = float(job.schedule(jnp.asarray(number - 1 - skipped)))
                report = Report(
                    number,
                    loss,
                    rate,
                    grad_norm,
                    speed.tokens_per_second,
                    speed.seconds_left,
                    validation,
                    skipped,
                    use.mfu(speed.flops_per_second),
                    use.peak_memory(),
                )
                if records and logged:
                    records.append(report.as_metrics())
                shown.show(report)
                pace.go_on()

            if number == total:
                watch.catch_up()
            status = agreement.largest((records.status if records else 0) or stop.status or watch.status)
            if status or validated or number % job.save_every == 0:
                require_same_state(number, layout.replicas(state))
            is_best = validation is not None and validation < best
            best = best if validation is None else min(best, validation)
            if is_best or status or number % job.save_every == 0 or number == total:
                whole = layout.unplace_state(state)  # every process holds a part of it
                if records:
                    records.save(number, whole, validation_loss=validation)
            if status:
                break
        together(records.close if records else lambda: None)
    final = layout.unplace_state(state)
    if status:
        return Trained(final, None, status, str(watch) if status == NOT_FINITE else None)
    return Trained(final, validation if first < total else validate())


def open_records(run: Run, first: int) -> contextlib.AbstractContextManager[Records | None]:
    """What is kept of the steps after `first`: by process 0, in which everything is written."""
    if not distributed.is_main_process():
        return contextlib.nullcontext()
    keep, tensorboard = run.options.run.keep, run.options.run.tensorboard
    return Records(run.directory, step=first, keep=keep, tensorboard=tensorboard)


def finish(run: Run, structure: training.ModelStructure, state: training.TrainState, validation_loss: float) -> None:
    """Writes, draws and prints what the run came to."""
    from flax_transformer import pictures  # matplotlib takes its time, which nobody waits for at the beginning

    job, root = run.job, run.directory.root
    write_json(
        run.directory.results,
        {"step": int(state.step), "validation_loss": validation_loss, "unigram_loss": job.baseline},
    )
    print(f"validation loss {validation_loss:.3f} nats per token; unigram baseline {job.baseline:.3f}", flush=True)
    model = structure.merge(*jax.device_put((state.parameters, state.buffers)))
    sample = job.write_sample(model)
    with writing(root):
        (root / job.sample_file).write_text(sample + "\n", encoding="utf-8")
        try:
            pictures.loss_curve(
                run.directory.metrics,
                root / "loss.png",
                baseline=job.baseline,
                in_training_only=_in_training_only(job.record["model"]),
            )
            if run.options.run.attention_maps == "sample":
                job.draw_attention(model, root)
        except ValueError as error:  # a run that has diverged
            print(f"no picture: {error}")
    print(f"saved in {root}")
    print(f"\n{sample}" if sample else "", end="\n" if sample else "")


def _in_training_only(model: dict[str, Any]) -> list[str]:
    """What the loss of a training batch has and that of validation has not."""
    found = [name for name in model if name.endswith("dropout") and model[name]]
    return ["dropout"] * bool(found) + ["label smoothing"] * bool(model.get("label_smoothing"))


def _resuming(run: Run) -> str:
    return f"python train.py {run.job.name} --output {shlex.quote(str(run.directory.root))} --resume"


def _in_words(layout: parallel.Layout) -> str:
    devices, mesh = layout.devices, layout.mesh
    arranged = f" ({mesh})" if mesh.data < len(devices) else ""
    processes = f" of {jax.process_count()} processes" if jax.process_count() > 1 else ""
    return f"{len(devices)} {devices[0].device_kind} device{'s' if len(devices) > 1 else ''}{processes}{arranged}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status, whose meanings `python train.py --help` tells."""
    with terminable(), contextlib.ExitStack() as held:
        return _main(list(sys.argv[1:] if arguments is None else arguments), held)


def _main(arguments: Sequence[str], held: contextlib.ExitStack) -> int:
    try:
        try:
            options = parse(arguments)
            if options.device.plan is not None:
                return plan(options, options.device.plan)
            run = set_up(options, arguments, held)
            begun = begin(run)
        except (ValueError, OSError) as error:
            return _fail(error, status=2)
        try:
            return execute(run, *begun)
        except OSError as error:  # without a name it is another process's, which says more
            return _fail(error if error.filename is None else _unwritable(error, run), status=UNWRITABLE)
        except DisagreementError as error:
            return _fail(error, status=1)
        except NotFiniteError as error:
            return _fail(f"{error}. Begin anew with a lower --learning-rate", status=NOT_FINITE)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return _fail(f"{error} Give a smaller --batch-size, shorter sequences or a smaller model.", status=1)
    except KeyboardInterrupt as interruption:  # before the training loop, or the second one within it
        return _fail("interrupted", status=_status_of(interruption))


def set_up(options: Options, arguments: Sequence[str], held: contextlib.ExitStack) -> Run:
    """From the options to all that is known before a model is built. Joins the other processes, if there are any.

    Args:
        held: lets go of the run's directory at the end.
    """
    device = options.device
    distributed.initialise_distributed(
        device.distributed,
        coordinator=device.coordinator,
        num_processes=device.num_processes,
        process_id=device.process_id,
    )
    job, layout = together(lambda: prepare(options))
    require_same_run(job.record, code_version(Path(__file__)))
    return Run(job, options, together(lambda: claim(options, job, held)), layout, arguments)


def _unwritable(error: OSError, run: Run) -> str:
    return (
        f"{error.filename} cannot be written ({error.strerror}). What was saved before is whole. Make room on the disk, "
        f"or get the permission back, and go on with: {_resuming(run)}"
    )


def _fail(problem: object, *, status: int) -> int:
    print(f"train.py: {' '.join(str(problem).split())}", file=sys.stderr)
    return status


def claim(options: Options, job: Job, held: contextlib.ExitStack) -> RunDirectory:
    """The directory of the run, which process 0 alone touches."""
    if not distributed.is_main_process():
        return RunDirectory(options.run.output or Path("runs"))
    return held.enter_context(runs.open_directory(options.run.output, job.record, resume=options.run.resume))


if __name__ == "__main__":
    sys.exit(main())
