"""Several processes that train one model: what they must agree on before any of them goes on."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from flax_transformer.checkpoint import NotFiniteError
from flax_transformer.commands.progress import GATE, Terminated

Result = TypeVar("Result")

# What `together` raises, here and in the other processes, by what they tell each other of it.
_PROBLEMS: dict[int, type[BaseException]] = {
    1: OSError,
    2: NotFiniteError,
    3: ValueError,
    4: Terminated,
    5: KeyboardInterrupt,
}


def together(action: Callable[[], Result]) -> Result:
    """What the action returns, once it has succeeded in every process: one that ended alone would leave the others waiting.

    So from the first time on, a signal raises within such an action alone; one that came before raises at its begin.

    Raises:
        ValueError, OSError, NotFiniteError, KeyboardInterrupt: the action's, here or in another process.
    """
    try:
        GATE.closed = False
        GATE.raise_pending()
        result, problem, number = [action()], None, 0
        GATE.closed = jax.process_count() > 1
    except tuple(_PROBLEMS.values()) as error:
        GATE.closed = jax.process_count() > 1
        result, problem = [], error
        number = next(number for number, kind in _PROBLEMS.items() if isinstance(error, kind))
    largest = _largest(number)
    if problem is not None:
        raise problem
    if largest:
        raise _PROBLEMS[largest]("another process cannot go on; see what it says")
    return result[0]


def from_main_process(tree: Any) -> Any:
    """The arrays of process 0, in every process, on its host."""
    return tree if jax.process_count() == 1 else jax.device_get(multihost_utils.broadcast_one_to_all(tree))


class Agreement:
    """What all processes agree on at every step, without making their devices wait for it.

    They add up on the devices, after the step that was begun last; the answer of the step before is then at hand. So a
    process learns of what another one asks for within two steps, and all learn of it at the same step.
    """

    def __init__(self) -> None:
        mesh = Mesh(np.asarray(jax.devices()), ("devices",), axis_types=(AxisType.Auto,))
        self._spread = NamedSharding(mesh, PartitionSpec("devices"))
        self._largest = jax.jit(jnp.max, out_shardings=NamedSharding(mesh, PartitionSpec()))
        self._before: jax.Array | None = None

    def largest(self, number: int) -> int:
        """The largest number that a process gave when it was last asked. All of them have to ask, step by step."""
        if jax.process_count() == 1:
            return number
        shape = (jax.device_count(),)
        asked = jax.make_array_from_callback(shape, self._spread, lambda index: np.full(1, number, np.int32))
        before, self._before = self._before, self._largest(asked)
        if jax.default_backend() == "cpu":
            jax.block_until_ready(self._before)  # see Layout._in_turn: two programs at once may wait for ever
        return 0 if before is None else int(before)


def _largest(number: int) -> int:
    if jax.process_count() == 1:
        return number
    return int(multihost_utils.process_allgather(np.asarray(number, np.int32)).max())
