"""The host beside the device: never far ahead of it, and with an eye on whether its numbers are finite."""

import collections

from flax_transformer.training import Metrics

NOT_FINITE = 3  # the exit status of a run whose steps are skipped one after the other
_AHEAD = 2


class Watch:
    """Waits for the step before the last two, so that a signal does not find a queue of steps which all have to end first.

    What such a step says is on its way to the host already. Every process sees the same numbers at the same step.

    Attributes:
        status: `NOT_FINITE` once `limit` steps in a row were skipped, else 0.
    """

    def __init__(self, *, limit: int) -> None:
        self.status = 0
        self._limit = limit
        self._worst: tuple[int, int, float, float] | None = None
        self._ahead: collections.deque[tuple[int, Metrics]] = collections.deque()

    def took(self, number: int, metrics: Metrics) -> None:
        """A step was started; `metrics` is what it will have computed."""
        metrics.skipped_in_a_row.copy_to_host_async()
        self._ahead.append((number, metrics))
        if len(self._ahead) > _AHEAD:
            self._look(*self._ahead.popleft())

    def catch_up(self) -> None:
        """Waits for all steps."""
        while self._ahead:
            self._look(*self._ahead.popleft())

    def __str__(self) -> str:
        assert self._worst is not None, "nothing was skipped"
        number, skipped, loss, grad_norm = self._worst
        return (
            f"the loss or the gradient was not finite in {skipped} steps in a row, the last of them step {number} with "
            f"loss {loss} and gradient norm {grad_norm}; nothing of them entered the parameters"
        )

    def _look(self, number: int, metrics: Metrics) -> None:
        in_a_row = int(metrics.skipped_in_a_row)
        if in_a_row >= self._limit and not self.status:
            self.status = NOT_FINITE
            self._worst = (number, in_a_row, float(metrics.loss), float(metrics.grad_norm))
