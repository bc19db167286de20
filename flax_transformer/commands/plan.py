"""`train.py --plan SLICE`: what a step would take on TPUs that are not here."""

import contextlib
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from rich.console import Console

from flax_transformer import planning, training
from flax_transformer.chips import Chip
from flax_transformer.commands.jobs import Job
from flax_transformer.parallel import Layout

DOES_NOT_FIT = 1  # the exit status
_COMPILATIONS = 8  # at most, to find the largest batch
_USABLE = 0.98  # of a chip's memory, until the compiler says more exactly


def show(job: Job, layout: Layout, target: planning.Target, *, accumulate: int) -> int:
    """Compiles the job's step for a slice, prints what it takes, and searches the largest batch. Returns the exit status.

    Args:
        layout: over the devices of `target`.
        accumulate: in how many microbatches a batch is taken.

    Raises:
        ValueError: a batch that the devices cannot share.
    """
    structure, parameters, buffers = training.split_model(nnx.eval_shape(job.build_model))
    state = jax.eval_shape(
        lambda parameters, buffers: training.init_state(parameters, buffers, job.optimizer, seed=0), parameters, buffers
    )
    example = job.batch(0)

    def compiled_for(batch_size: int) -> planning.Plan:
        shape = (batch_size, job.longest)
        batch = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(shape, leaf.dtype), example)
        with _waiting(f"compiling a step of {batch_size} x {job.longest:,} tokens for {target.name}"):
            return planning.plan(layout, structure, job.loss, job.optimizer, state, batch, accumulate=accumulate)

    for line in job.title:
        print(line)
    count = sum(leaf.size for leaf in parameters.values())
    kind = f"{len(target.devices)} chips ({target.devices[0].device_kind})"
    print(f"{job.name}: {count:,} parameters on {target.name}, {kind}, {layout}", flush=True)
    plan = compiled_for(job.recipe.batch_size)
    print("\n".join(_lines(plan, job.longest, target.chip)), flush=True)
    print("\nsearching the largest batch that fits; every size takes a compilation", flush=True)
    print(_largest(plan, compiled_for, unit=layout.mesh.parts * accumulate, chip=target.chip))
    return 0 if plan.fits else DOES_NOT_FIT


def _lines(plan: planning.Plan, length: int, chip: Chip | None) -> list[str]:
    limit = plan.limit or (chip.memory if chip else None)
    of = f" of {_gib(limit)}" if limit else ""
    lines = [
        "",
        f"batch of {plan.batch_size} x {length:,} tokens, {plan.batch_size / plan.devices:g} sequences a chip: "
        f"{'fits' if plan.fits else 'does NOT fit'}; needs {_gib(plan.needed)}{of} a chip",
        f"  parameters   {_gib(plan.parameters)}",
        f"  optimizer    {_gib(plan.optimizer)}",
        f"  batch        {_gib(plan.batch)}",
        f"  activations  {_gib(plan.activations)}, with gradients and room to work in",
        f"FLOPs of a step: {plan.flops.useful:.3e}, of which the model's own {plan.model_flops:.3e}",
    ]
    if not plan.fits:
        return lines
    sent = ", ".join(f"{kind} {size / 1e6:,.1f} MB" for kind, size in plan.sent.items()) or "nothing"
    lines.append(f"sent by each chip: {sent}")
    if chip is None:
        return [*lines, "no estimate of time: the peaks of this chip are not known"]
    seconds = plan.seconds(chip)
    least, most = max(seconds.values()), sum(seconds.values())
    parts = ", ".join(f"{part} {1e3 * time:,.1f} ms" for part, time in seconds.items())
    return [
        *lines,
        f"roofline: {parts}",
        f"  a step takes at least {1e3 * least:,.1f} ms (MFU {plan.mfu(chip, seconds=least):.0%}) if these overlap "
        f"entirely, {1e3 * most:,.1f} ms (MFU {plan.mfu(chip, seconds=most):.0%}) if not at all",
        f"  assumed: {chip.flops / 1e12:g} TFLOP/s on bfloat16 operands, 6 passes for float32 at highest precision, "
        f"{chip.bandwidth / 1e9:g} GB/s of memory, {chip.interconnect / 1e9:g} GB/s between chips, every one at its peak",
    ]


def _largest(plan: planning.Plan, compiled_for: Callable[[int], planning.Plan], *, unit: int, chip: Chip | None) -> str:
    """The largest batch that fits, found between one that does and the next one that does not."""
    tried = [plan]
    for _ in range(_COMPILATIONS):
        fits, fails = _bounds(tried)
        low, high = fits.batch_size if fits else 0, fails.batch_size if fails else None
        if high is not None and high - low <= unit:
            break
        guess = _guess(tried, chip) // unit * unit
        guess = max(guess, low + unit)
        plan = compiled_for(guess if high is None else min(guess, high - unit))
        tried.append(plan)
        print(f"  {plan.batch_size}: {'fits' if plan.fits else 'does not fit'}, needs {_gib(plan.needed)}", flush=True)
    fits, fails = _bounds(tried)
    above = f"; {fails.batch_size} needs {_gib(fails.needed)}" if fails else ""
    if fits is None:
        return f"largest batch that fits: none{above}"
    exact = fails is not None and fails.batch_size - fits.batch_size <= unit
    return (
        f"largest batch that fits: {'' if exact else 'at least '}{fits.batch_size}, "
        f"{fits.batch_size / fits.devices:g} sequences a chip ({_gib(fits.needed)}){above}"
    )


def _bounds(tried: list[planning.Plan]) -> tuple[planning.Plan | None, planning.Plan | None]:
    """The largest batch that fitted, and the smallest that did not."""
    fits = max((plan for plan in tried if plan.fits), key=lambda plan: plan.batch_size, default=None)
    fails = min((plan for plan in tried if not plan.fits), key=lambda plan: plan.batch_size, default=None)
    return fits, fails


def _guess(tried: list[planning.Plan], chip: Chip | None) -> int:
    """Where a straight line of memory over the batch reaches the limit."""
    limit = next((plan.limit for plan in tried if plan.limit), int(_USABLE * chip.memory) if chip else None)
    if limit is None:
        return 2 * max(plan.batch_size for plan in tried)
    near, *others = sorted(tried, key=lambda plan: abs(plan.needed - limit))
    if others and others[0].batch_size != near.batch_size and others[0].needed != near.needed:
        slope = (near.needed - others[0].needed) / (near.batch_size - others[0].batch_size)
    else:
        slope = near.activations / near.batch_size  # too much, for gradients are among them
    return near.batch_size + int((limit - near.needed) / slope)


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"


@contextlib.contextmanager
def _waiting(message: str) -> Any:
    console = Console(stderr=True)
    with console.status(message) if console.is_terminal else contextlib.nullcontext():
        yield
