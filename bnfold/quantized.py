"""Weights stored as integers, `w = (q - zero_point) * scale`: a map moves into the scale, and q stays an integer.

A factor that is one number for each channel multiplies that channel's scale; one scale for the whole weight becomes one
for each channel where the format allows it. Scales are positive by convention, so a negative factor mirrors the
channel's integers about the zero point: `q' = 2 zero_point - q`, which must lie in their range (of int8 with zero
point 0 everything but -128 does). A factor of zero sets them to the zero point, for a scale of zero is none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .affine import Array
from .ops import Grid, Linear, Stored
from .report import Reason, Refusal
from .rounding import round_product


@dataclass(frozen=True, slots=True, eq=False)
class NewGrid:
    """What becomes of a grid: scales as stored, along `axis` of the integers (None: one for all).

    `zero_point` has the shape of the scales; None where it stays as it is. `integers`: None where none was mirrored.
    """

    scale: Stored
    axis: int | None
    zero_point: NDArray[np.int64] | None = None
    integers: NDArray[np.int64] | None = None


def rescaled(site: Linear, grid: Grid, factors: Sequence[Array]) -> NewGrid | Refusal:
    """The grid times factors that broadcast to the layer's weight viewed as `[G, dim0/G, dim1, *taps]`.

    Refuses with `quantized-parameter` what the grid cannot say, with `overflow` and `underflow` scales that leave the
    normal numbers of their type.
    """
    sizes = site.weight.shape[:2]
    total = np.ones((site.groups, sizes[0] // site.groups, sizes[1], *[1] * (len(site.weight.shape) - 2)))
    for f in factors:
        total = total * f
    found = _along(site, grid, total.reshape(sizes))
    if isinstance(found, Refusal):
        return found
    factor, axis = found
    fmt = grid.scale.format
    if not np.isfinite(grid.scale.values()).all():
        return Refusal(Reason.NOT_FINITE, site.node, "a scale of its quantized weight is not finite")
    scale = round_product(fmt, grid.scale.values(), np.where(factor == 0, 1.0, np.abs(factor)))
    span = grid.high - grid.low
    if not (np.abs(scale) <= fmt.max_finite / span).all():
        return Refusal(
            Reason.OVERFLOW, site.node, f"the folded scale of the quantized weight is too large for {fmt.name}"
        )
    if not (np.abs(scale) >= fmt.smallest_normal).all():
        return Refusal(
            Reason.UNDERFLOW, site.node, f"the folded scale of the quantized weight falls below the normal {fmt.name}"
        )
    point = None if np.shape(grid.zero_point) == scale.shape else np.broadcast_to(grid.zero_point, scale.shape)
    integers = _mirrored(site, grid, np.sign(factor), axis) if (factor <= 0).any() else None
    if isinstance(integers, Refusal):
        return integers
    return NewGrid(fmt.pack(scale), axis, point, integers)


def _along(site: Linear, grid: Grid, total: Array) -> tuple[Array, int | None] | Refusal:
    """The factor of each scale, and the axis of the integers along which the scales then run."""
    if (total == total[0, 0]).all():
        return total[0, 0], grid.axis
    rows, columns = (0, total[:, 0], total == total[:, :1]), (1, total[0], total == total[:1])
    for dim, vector, even in (rows, columns):
        axis = grid.order[dim]
        if even.all() and (grid.axis == axis or (grid.axis is None and grid.may_run)):
            return vector, axis
    if grid.axis is None and not grid.may_run:
        return _cannot(site, "it has one scale, and this opset knows no scales along an axis")
    if grid.axis is None:
        return _cannot(site, "the map varies along both sides of the weight")
    return _cannot(site, f"its scales run along dimension {grid.axis} of the integers, and the map along another")


def _mirrored(site: Linear, grid: Grid, sign: Array, axis: int | None) -> NDArray[np.int64] | Refusal:
    """The integers on the other side of the zero point where the sign is negative, at it where it is zero."""
    q = grid.integers()
    shape = [1] * q.ndim
    if axis is not None:
        shape[axis] = -1
    middle = grid.zero_point.reshape(shape) if grid.zero_point.ndim else grid.zero_point
    result = middle + sign.reshape(shape).astype(np.int64) * (q - middle)
    if result.min() < grid.low or result.max() > grid.high:
        worst = grid.low if result.max() > grid.high else grid.high
        return _cannot(site, f"a negative scale mirrors the integers, and {worst} has no opposite in their type")
    return result


def _cannot(site: Linear, why: str) -> Refusal:
    return Refusal(Reason.QUANTIZED_PARAMETER, site.node, f"its weight is stored as integers: {why}")
