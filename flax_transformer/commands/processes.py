"""Several processes that train one model: what they must agree on before any of them goes on."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

Result = TypeVar("Result")


def together(action: Callable[[], Result]) -> Result:
    """What the action returns, once it has succeeded in every process: one that ended alone would leave the others waiting.

    Raises:
        ValueError: the action's, here or in another process.
    """
    try:
        result, problem = [action()], None
    except ValueError as error:
        result, problem = [], error
    failed = anywhere(problem is not None)
    if problem is not None:
        raise problem
    if failed:
        raise ValueError("another process cannot go on; see what it says")
    return result[0]


def anywhere(condition: bool) -> bool:
    """Whether the condition holds in one process at least. All of them have to ask."""
    if jax.process_count() == 1:
        return condition
    return bool(multihost_utils.process_allgather(np.asarray(condition)).any())


def from_main_process(tree: Any) -> Any:
    """The arrays of process 0, in every process, on its host."""
    return tree if jax.process_count() == 1 else jax.device_get(multihost_utils.broadcast_one_to_all(tree))
