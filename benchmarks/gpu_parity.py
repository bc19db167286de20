"""``python -m benchmarks.gpu_parity``: the ladder on this machine's accelerator, and what lower precision does there.

PyTorch's side is recorded on the CPU, ours on whatever JAX finds first; the two small documents and PyTorch's own layers.
"""

import dataclasses
import sys
from importlib import metadata
from typing import Any

import jax
import numpy as np

from flax_transformer import parity
from flax_transformer.parity.measures import rms
from parity_tests.cases import Case, all_cases, load_reference, model_loss, rules_for
from parity_tests.ladder import without
from parity_tests.references import record

# How our model computes, and the emulation that predicts it.
MODES = {
    "float32, highest": ({"precision": "highest"}, None),
    "float32, default": ({"precision": "default"}, "gpu_tf32"),
    "bfloat16": ({"compute_dtype": "bfloat16"}, None),
}


def candidate(case: Case, reference: parity.Recording, **options: Any) -> tuple[parity.Recording, parity.Rules]:
    """Our model's recording with the reference's weights, forward and gradients, and the rules."""
    model = case.model(dataclasses.replace(case.config("float32"), **options))
    load_reference(case, model, reference)
    recording = parity.record_flax(
        model,
        dict(reference.inputs),
        dtype="float32",
        execution="jit",
        call=case.call_model,
        masks=case.model_masks(reference.inputs),
        loss=model_loss(case),
    )
    return recording, rules_for(case, model)


def errors(case: Case, found: parity.Recording, truth: parity.Recording, rules: parity.Rules) -> tuple[float, float]:
    """Relative rms errors of the logits, and of all gradients together."""
    logits = _relative([(found.outputs["/logits"], truth.outputs["/logits"])])
    pairs = []
    for name, exact in truth.gradients.items():
        targets = rules.parameters[name]
        names = (targets,) if isinstance(targets, str) else targets or ()
        pairs.append((rules.transform([name])(*(found.gradients[target] for target in names)), exact))
    return logits, _relative(pairs)


def _relative(pairs: list[tuple[np.ndarray, np.ndarray]]) -> float:
    found, exact = (
        np.concatenate([np.asarray(side, np.float64).ravel() for side in sides]) for sides in zip(*pairs, strict=True)
    )
    return rms(found - exact) / rms(exact)


def emulated(case: Case, reference: parity.Recording, mode: str) -> tuple[float, float]:
    """The same errors as the emulation predicts them, on the CPU."""
    from flax_transformer import training

    with jax.default_device(jax.devices("cpu")[0]):
        model = case.model(case.config("float32"))
        load_reference(case, model, reference)
        structure, parameters, buffers = training.split_model(model)
        batch = {name: np.asarray(array) for name, array in reference.inputs.items()}

        def loss(parameters: Any) -> tuple[Any, Any]:
            output = case.call_model(structure.merge(parameters, buffers), **batch)
            return model_loss(case)(output, batch), output["logits"]

        gradients_of = jax.value_and_grad(loss, has_aux=True)
        with jax.default_matmul_precision("highest"):
            (_, plain), exact = jax.jit(gradients_of)(parameters)
            (_, logits), gradients = jax.jit(parity.emulate(gradients_of, mode))(parameters)  # pyright: ignore[reportArgumentType]
        pairs = [(np.asarray(gradients[name]), np.asarray(exact[name])) for name in exact]
        return _relative([(np.asarray(logits), np.asarray(plain))]), _relative(pairs)


def main() -> int:
    device = jax.devices()[0]
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("jax", "flax", "torch"))
    print(f"{device.device_kind} ({device.platform}), {versions}\n")
    print("| case | mode | ladder in float32 | logits | gradients | emulated logits | emulated gradients |")
    print("|---|---|---|---|---|---|---|")
    diverged = False
    for case in all_cases():
        if case.size != "small":
            continue
        reference, truth = (without(record(case, dtype, 0), "updates", "moments") for dtype in ("float32", "float64"))
        for name, (options, mode) in MODES.items():
            found, rules = candidate(case, reference, **options)
            held = "not held to it"
            if options.get("precision") == "highest":
                verdict = parity.compare(reference, found, rules, truth=truth)
                held = "passed" if verdict.passed else f"diverged: {verdict.first_divergence}"
                diverged = diverged or not verdict.passed
            figures = [f"{value:.1e}" for value in errors(case, found, truth, rules)]
            figures += [f"{value:.1e}" for value in emulated(case, reference, mode)] if mode else ["", ""]
            print(f"| {case} | {name} | {held} | " + " | ".join(figures) + " |", flush=True)
    return 1 if diverged else 0


if __name__ == "__main__":
    sys.exit(main())
