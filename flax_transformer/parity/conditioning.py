"""Wrong or ill-conditioned? How strongly a model amplifies rounding, from perturbations in float64."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from flax_transformer.parity.flax_calls import walk
from flax_transformer.parity.flax_program import Traces, current_traces, split
from flax_transformer.parity.recording import as_inputs, names_of

# Relative size of a perturbation: far above float64's rounding, far below where a model stops being linear.
STEP = 1e-7
FLOAT32 = 2.0**-24

Named = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Conditioning:
    """How a model answers to relative noise of size 1, were it linear; 1 passes noise on as it comes.

    Attributes:
        outputs: what left a module, by ``activation_key`` -> relative change of the final output for one there.
        parameters: the same for every parameter.
        expected: final output, and every parameter's gradient (under "gradient NAME") if there was a loss -> its relative
            error if every module's output is rounded once to float32. A port's error near this is rounding, however large it
            is; one that is a hundred times larger is a mistake.
    """

    outputs: Mapping[str, float]
    parameters: Mapping[str, float]
    expected: Mapping[str, float]

    def __str__(self) -> str:
        def rows(title: str, named: Mapping[str, float], digits: str) -> list[str]:
            worst = sorted(named.items(), key=lambda item: -item[1])[:10]
            return [title, *(f"  {value:{digits}}  {name or '(output)'}" for name, value in worst)]

        return "\n".join(
            rows(
                "relative change of the output for a relative change of 1 in what leaves a module",
                self.outputs,
                "10.3g",
            )
            + rows("and in a parameter", self.parameters, "10.3g")
            + rows("relative error to be expected in float32", self.expected, "10.2e")
        )


def conditioning(
    module: nnx.Module,
    inputs: Any,
    *,
    call: Callable[..., Any] | None = None,
    loss: Callable[[Any, Any], Any] | None = None,
    draws: int = 4,
    seed: int = 0,
) -> Conditioning:
    """Perturb, in float64, every module's output and every parameter of a copy of ``module``, then all outputs at once.

    A perturbation multiplies each element by 1 + 1e-7 r, r uniform in [-1, 1]. With dy its effect on the final output y the
    amplification is (|dy| / |y|) / (1e-7 rms(r)), the mean over ``draws``: a condition number for random, not for the worst,
    errors.

    Args:
        module, inputs, call, loss: as for ``record_flax``.
        draws: perturbations of each place.
        seed: of their noise.
    Raises:
        ValueError: as ``record_flax``.
    """
    arrays = as_inputs(inputs, "float64")
    parts = list(walk(module))
    modules = names_of((path, part) for path, part in parts if isinstance(part, nnx.Module))
    tensors = names_of((path, part) for path, part in parts if not isinstance(part, nnx.Module))
    rng = np.random.default_rng(seed)
    with jax.enable_x64(True):
        program, parameters, rest = split(
            module,
            "float64",
            modules,
            tensors,
            mode="eval",
            call=call,
            loss=loss,
            by_keyword=isinstance(inputs, Mapping),
        )
        batch = {name: jnp.asarray(array) for name, array in arrays.items()}
        traces: Traces = current_traces()
        shapes = traces.observe.eval_shape(parameters, {}, program, rest, batch, {}, None)[1]["activations"]
        floating = [key for key, leaf in shapes.items() if jnp.issubdtype(leaf.dtype, jnp.floating)]
        still = {key: jnp.zeros(shapes[key].shape, shapes[key].dtype) for key in floating}
        clean = traces.observe(parameters, still, program, rest, batch, {}, None)[1]
        output = _flat(clean["outputs"])

        def noise(like: Any) -> Any:
            return jnp.asarray(rng.uniform(-1, 1, like.shape), like.dtype) * like

        def moved(parameters: Named, taps: Named) -> float:
            found = traces.observe(parameters, taps, program, rest, batch, {}, None)[1]
            return _relative(_flat(found["outputs"]), output)

        def amplification(answer: Callable[[], float]) -> float:
            # The root mean square of a uniform number in [-1, 1] is 1 / sqrt(3).
            return float(np.mean([answer() for _ in range(draws)])) * np.sqrt(3) / STEP

        outputs, of_parameters = {}, {}
        for key in floating:
            outputs[key] = amplification(
                lambda key=key: moved(parameters, {**still, key: STEP * noise(clean["activations"][key])})
            )
        for name, value in parameters.items():
            of_parameters[name] = amplification(
                lambda name=name, value=value: moved({**parameters, name: value + STEP * noise(value)}, still)
            )

        def rounded() -> Named:
            return {key: FLOAT32 * noise(clean["activations"][key]) for key in floating}

        expected = {"": float(np.mean([moved(parameters, rounded()) for _ in range(draws)]))}
        if loss is not None:
            exact = traces.observe_gradients(parameters, still, program, rest, batch, {}, None)["gradients"]
            changes: dict[str, list[float]] = {name: [] for name in exact}
            for _ in range(draws):
                found = traces.observe_gradients(parameters, rounded(), program, rest, batch, {}, None)["gradients"]
                for name in exact:
                    changes[name].append(_relative(np.asarray(found[name]), np.asarray(exact[name])))
            expected |= {f"gradient {name}": float(np.mean(values)) for name, values in changes.items()}
    return Conditioning(outputs=outputs, parameters=of_parameters, expected=expected)


def _flat(named: Mapping[str, Any]) -> np.ndarray:
    values = [np.asarray(array, np.float64).ravel() for array in named.values()]
    return np.concatenate(values) if values else np.zeros(0)


def _relative(found: np.ndarray, exact: np.ndarray) -> float:
    size = float(np.linalg.norm(exact.ravel()))
    change = float(np.linalg.norm((found - exact).ravel()))
    return change / size if size else 0.0
