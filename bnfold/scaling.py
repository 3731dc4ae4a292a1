"""Rows of a weight times the scales of their channels: rounded once, checked, at the speed of memory.

What a fold does to a network's size in bytes happens here. `round_product` proves every element; for float32, what
most weights are, that costs more than it must. With p the float64 product, within 2 units in its last place of the
exact one, the hardware's cast of p to float32 is the exact product rounded once, unless p lies that close to a
midpoint of float32. Midpoints of normal numbers have the bits 1000...0 below the 24 that float32 keeps, so they are
seen by one comparison of integers; these elements, and those with results below the normal range, whose midpoints lie
elsewhere, are settled by `round_product`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from .affine import Array
from .ops import Stored
from .report import Reason
from .rounding import FLOAT32, FloatFormat, round_product
from .scratch import Scratch

PIECE = 1 << 18  # elements worked on at a time: temporaries stay in a cache, and numpy outweighs Python
TAME = 2.0**300  # float64 products of float32 numbers and two scales below this neither overflow nor lose a normal one
BELOW = np.int64((1 << 29) - 1)  # the bits of a float64 mantissa that float32 does not keep
NEAR = np.int64(4)  # units in the last place of float64: a product of three factors is off by 2 at most


class _Room(threading.local):
    """What each thread that scales works in, kept: asking for it anew at each weight costs as much as the work."""

    def __init__(self) -> None:
        self.products, self.sizes = Scratch(), Scratch()


_room = _Room()


@np.errstate(all="ignore")
def scale_rows(fmt: FloatFormat, rows: Stored, factors: Sequence[Array], out: Stored) -> Reason | None:
    """Write the product of `rows` and one or two broadcastable factors to `out`, both as stored.

    Returns the first reason why a product cannot be held: `overflow`, `not-finite`, or `underflow` where a normal
    number becomes zero though no factor is.
    """
    quick = fmt is FLOAT32 and all(np.abs(f).max(initial=0) < TAME for f in factors)
    for at in _pieces(rows.shape):
        piece, scales, new = rows[at], [f[_cut(f, at)] for f in factors], out[at]
        product = _room.products.array(piece.shape, np.dtype(np.float64))
        size = _room.sizes.array(piece.shape, np.dtype(np.float32))
        if quick and _quick(piece, scales, new, product, size):
            continue
        reason = _exact(fmt, piece, scales, new)
        if reason is not None:
            return reason
    return None


def _quick(rows: Stored, scales: Sequence[Array], out: Stored, product: Array, size: NDArray[np.float32]) -> bool:
    """Whether the products are written to `out`; not where one is not finite or may have become zero.

    `product` and `size` are arrays of the same shape to work with.
    """
    np.copyto(product, rows)
    for s in scales:
        np.multiply(product, s, out=product)
    np.copyto(out, product, casting="same_kind")
    np.abs(out, out=size)
    if not size.max(initial=0) <= FLOAT32.max_finite:
        return False
    small: NDArray[np.bool_] | None = None
    if size.min(initial=1) <= FLOAT32.smallest_normal:
        if _lost(size == 0, rows, scales):
            return False
        small = (size <= FLOAT32.smallest_normal) & (product != 0)
    bits = product.view(np.int64)
    np.bitwise_and(bits, BELOW, out=bits)
    np.subtract(bits, (BELOW + 1) // 2 - NEAR, out=bits)
    distance, near = bits.view(np.uint64), np.uint64(2 * NEAR)
    if small is not None or distance.min(initial=BELOW) <= near:
        doubtful = distance <= near if small is None else small | (distance <= near)
        at = [np.broadcast_to(a, out.shape)[doubtful] for a in (rows, *scales)]
        out[doubtful] = round_product(FLOAT32, *(a.astype(np.float64) for a in at))
    return True


def _exact(fmt: FloatFormat, rows: Stored, scales: Sequence[Array], out: Stored) -> Reason | None:
    old = fmt.unpack(rows)
    new = round_product(fmt, old, *scales)
    if not np.isfinite(new).all():
        return Reason.OVERFLOW if np.isfinite(old).all() else Reason.NOT_FINITE
    if _lost((new == 0) & (np.abs(old) >= fmt.smallest_normal), old, scales):
        return Reason.UNDERFLOW
    out[...] = fmt.pack(new)
    return None


def _lost(zero: NDArray[np.bool_], rows: Stored, scales: Sequence[Array]) -> bool:
    """Whether a product is zero where no factor is."""
    if zero.any():
        zero &= rows != 0
        for s in scales:
            zero &= s != 0
    return bool(zero.any())


def _pieces(shape: tuple[int, ...]) -> Iterator[tuple[slice, ...]]:
    """Boxes of at most PIECE elements that cover an array: cut along the first axis on which a part is small enough."""
    inner = 1
    for axis in reversed(range(len(shape))):
        if inner * shape[axis] > PIECE:
            break
        inner *= shape[axis]
    else:
        yield ()
        return
    step = max(PIECE // inner, 1)
    for outer in np.ndindex(*shape[:axis]):
        where = tuple(slice(i, i + 1) for i in outer)
        for start in range(0, shape[axis], step):
            yield (*where, slice(start, start + step))


def _cut(factor: Array, piece: tuple[slice, ...]) -> tuple[slice, ...]:
    """The part of a factor that a piece of the rows is multiplied by; along dimensions of 1 it is the same for all."""
    return tuple(slice(None) if n == 1 else at for n, at in zip(factor.shape, piece, strict=False))
