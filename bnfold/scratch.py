"""Memory that is used again: what works on large arrays piece by piece should not ask the system for each piece."""

from __future__ import annotations

import math
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

Scalar = TypeVar("Scalar", bound=np.generic)


class Scratch:
    """Memory for one array after another: each takes the place of the one before."""

    def __init__(self) -> None:
        self._held = np.empty(0, np.uint8)

    def array(self, shape: tuple[int, ...], stored: np.dtype[Scalar]) -> NDArray[Scalar]:
        """An array of that shape and type whose values are arbitrary."""
        size = math.prod(shape) * stored.itemsize
        if size > len(self._held):
            self._held = np.empty(size, np.uint8)
        return self._held[:size].view(stored).reshape(shape)
