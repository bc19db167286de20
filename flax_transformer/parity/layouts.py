"""How a candidate lays out what the reference has: functions, and the words for them that a rules file can hold."""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

Transform = Callable[..., np.ndarray]


def from_kernel(kernel: np.ndarray) -> np.ndarray:
    """Flax's layout (spatial axes, in, out) -> PyTorch's (out, in, spatial axes): the transpose, for a linear map."""
    return np.moveaxis(kernel, (-1, -2), (0, 1)) if kernel.ndim >= 2 else kernel


def same(array: np.ndarray) -> np.ndarray:
    """The array as it is."""
    return array


LAYOUTS: dict[str, Transform] = {"same": same, "kernel": from_kernel}

Arrays = Sequence[np.ndarray]
Numbers = Sequence[int]

# Word -> the numbers that follow it, and what it makes of the candidate's arrays.
STEPS: dict[str, tuple[str, Callable[[Arrays, Numbers], Arrays]]] = {
    "same": ("", lambda arrays, _: arrays),
    "kernel": ("", lambda arrays, _: [from_kernel(array) for array in arrays]),
    "transpose": ("AXIS...", lambda arrays, axes: [np.transpose(array, axes) for array in arrays]),
    "reshape": ("SIZE...", lambda arrays, sizes: [np.reshape(array, sizes) for array in arrays]),
    "take": ("INDEX AXIS", lambda arrays, place: [np.take(array, place[0], axis=place[1]) for array in arrays]),
    "part": (
        "INDEX COUNT AXIS",
        lambda arrays, place: [np.split(a, place[1], axis=place[2])[place[0]] for a in arrays],
    ),
    "concatenate": ("AXIS", lambda arrays, axis: [np.concatenate(arrays, axis=axis[0])]),
    "stack": ("AXIS", lambda arrays, axis: [np.stack(arrays, axis=axis[0])]),
}


@dataclasses.dataclass(frozen=True)
class Layout:
    """A layout in words, such as "transpose 0 2 1" or "kernel, concatenate 0": steps, taken from left to right.

    "concatenate" and "stack" make one array of several, every other step is done to each array.

    Raises:
        ValueError: a step is none of the words of ``STEPS``, or has other numbers than its word needs; the message goes on
            after "there is no".
    """

    text: str

    def __post_init__(self) -> None:
        self._steps()

    def __call__(self, *arrays: np.ndarray) -> np.ndarray:
        """The one array in the reference's layout.

        Raises:
            ValueError: a step does not fit the arrays, or several are left.
        """
        left: Arrays = arrays
        for word, numbers in self._steps():
            try:
                left = STEPS[word][1](left, numbers)
            except (ValueError, IndexError) as error:
                shapes = " and ".join(str(array.shape) for array in left)
                step = " ".join([word, *map(str, numbers)])
                raise ValueError(f"{step!r} does not fit an array of shape {shapes} ({error})") from error
        if len(left) != 1:
            raise ValueError(f"{self.text!r} leaves {len(left)} arrays; make them one with concatenate or stack")
        return left[0]

    def __str__(self) -> str:
        return self.text

    def _steps(self) -> list[tuple[str, list[int]]]:
        steps = []
        for step in self.text.split(","):
            word, *numbers = step.split() or [""]
            wanted = STEPS[word][0] if word in STEPS else None
            integers = [int(number) for number in numbers if number.removeprefix("-").isdecimal()]
            enough = wanted is not None and (
                len(numbers) >= 1 if wanted.endswith("...") else len(numbers) == len(wanted.split())
            )
            if not enough or len(integers) != len(numbers):
                known = ", ".join(f"{name} {signature}".rstrip() for name, (signature, _) in STEPS.items())
                raise ValueError(f"layout {self.text!r} (there are {known})")
            steps.append((word, integers))
        return steps


def as_transform(layout: str | Transform) -> Transform:
    """What a layout in words does; a function is one already.

    Raises:
        ValueError: there is no such layout.
    """
    if not isinstance(layout, str):
        return layout
    return LAYOUTS[layout] if layout in LAYOUTS else Layout(layout)


def joins(layout: str | Transform) -> bool:
    """Whether a layout can make one array of several."""
    return callable(layout) or any(word in layout for word in ("concatenate", "stack"))


def in_words(transform: Transform) -> str:
    """The words for a layout; "function" for one that has none."""
    if isinstance(transform, Layout):
        return str(transform)
    return next((name for name, known in LAYOUTS.items() if known is transform), "function")
