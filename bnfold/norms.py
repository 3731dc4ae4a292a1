"""A normalization's running statistics and parameters as one affine map, or what is broken about them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .affine import Array

RUNNING_DEVIATION = "running_std"  # the buffer of norms that store the root of a variance: batch renormalization


@dataclass(frozen=True, slots=True)
class Broken:
    """Statistics that have no right result, in words: channels and values."""

    detail: str


def normalization_map(
    mean: Array, variance: Array, epsilon: float, gamma: Array | None, beta: Array | None
) -> tuple[Array, Array] | Broken:
    """Scale and shift of `gamma * (x - mean) / sqrt(variance + epsilon) + beta` (Ioffe and Szegedy, 2015, alg. 2).

    All arrays are float64 and of one shape. Computed in float64; a variance below zero is accepted as long as
    `variance + epsilon` is positive.
    """
    named = {"mean": mean, "variance": variance, "gamma": gamma, "beta": beta}
    problems: list[str] = []
    for name, values in named.items():
        if values is not None:
            problems += [f"{name}{_at(i)} = {values[i]}" for i in map(tuple, np.argwhere(~np.isfinite(values)))]
    with np.errstate(invalid="ignore"):
        low = np.isfinite(variance) & (variance + epsilon <= 0)
    problems += [f"variance{_at(i)} + epsilon = {variance[i] + epsilon:g}" for i in map(tuple, np.argwhere(low))]
    if problems:
        more = f" and {len(problems) - 4} more" if len(problems) > 4 else ""
        return Broken(", ".join(problems[:4]) + more)
    scale = 1 / np.sqrt(variance + epsilon)
    if gamma is not None:
        scale = gamma * scale
    shift = -mean * scale
    if beta is not None:
        shift = shift + beta
    return scale, shift


def _at(index: tuple[int, ...]) -> str:
    return f"[{', '.join(str(i) for i in index)}]"
