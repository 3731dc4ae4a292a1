"""Random arrays that depend on a name alone, and the parameters of random norms."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

GAMMAS, BETAS = (-0.7, 1.3, 0.0, 2.1, 1e-6), (0.4, 0.0, -1.1)
VARIANCES = (0.8, 1e-12, 1.7, 1e6, 0.3, 2.2, 0.6)


def generator_of(name: str) -> np.random.Generator:
    """Random numbers that depend on the name alone."""
    return np.random.default_rng(zlib.crc32(name.encode()))


def statistics(key: str, channels: int, style: str) -> dict[str, Array]:
    """Scale, bias, mean and variance of a norm, as `s`, `b`, `m`, `v`.

    `wild`: gamma negative, zero and tiny, shift zero, variances of 1e-12 and 1e6 among them. The other styles let more
    pass: `gentle` scales are positive, `scale` does not shift, `signed` does not either but some of its scales are
    negative, `shift` is nothing else (with an epsilon of 0).
    """
    rng = generator_of(key)
    turn = int(rng.integers(100))
    one, zero = np.ones(channels), np.zeros(channels)
    positive, shift = rng.uniform(0.5, 1.5, channels), rng.normal(size=channels)
    variance, mean = rng.uniform(0.5, 2.0, channels), rng.normal(size=channels)
    sign = np.where((np.arange(channels) + turn) % 2, 1.0, -1.0)

    def among(values: Sequence[float]) -> Array:
        return np.array([values[(turn + k) % len(values)] for k in range(channels)])

    match style:
        case "wild":
            found = among(GAMMAS), among(BETAS), mean, among(VARIANCES)
        case "scale":
            found = positive, zero, zero, variance
        case "signed":
            found = positive * sign, zero, zero, variance
        case "shift":
            found = one, shift, mean, one
        case _:
            found = positive, shift, mean, variance
    return dict(zip("sbmv", found, strict=True))
