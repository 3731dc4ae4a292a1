"""One rounding: products and sums of float64 numbers, computed exactly (or in doubled precision), rounded once.

A folded weight is `scale * weight` and belongs in the weight's own format. A float64 product cast to float32 is
rounded twice, and where the first rounding lands on a midpoint of float32 the second one goes the wrong way. Casts
from float64 to bfloat16 (and torch's to float16) are themselves two roundings. So the rounding is done here.

*To a grid.* For |x| in [u, 2u), u a power of two, the format's numbers are the multiples of q = u * 2**(1 - precision),
and below its normal range u stays the smallest normal. Adding c = 1.5 * 2**52 * q leaves float64 no bit below q, so
`(x + c) - c` is x rounded half to even to the format.

*Once.* Let x = hi + lo with |lo| not above half an ulp of hi. Midpoints of the narrow formats are float64 numbers, so
unless hi is one, hi and x round alike. If hi is one, the sign of lo decides.

*Exactly.* `hi + lo == a * b` is Dekker's product (1971), `hi + lo == a + b` Knuth's sum; dot products are Dot2 of
Ogita, Rump, Oishi, "Accurate sum and dot product" (SIAM J. Sci. Comput. 26, 2005), summed pairwise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .affine import Array

Pair = tuple[Array, Array]
"""An unevaluated sum `hi + lo`."""

CHUNK = 1 << 13  # elements worked on at a time: temporaries stay in the cache and below malloc's mmap threshold


@dataclass(frozen=True, slots=True)
class FloatFormat:
    """A binary floating-point format that tensors are stored in, none wider than float64.

    `precision` counts the bits of the significand with the hidden one; the smallest normal is `2**min_exponent`.
    """

    name: str
    precision: int
    min_exponent: int
    max_finite: float

    @property
    def smallest_normal(self) -> float:
        """The least positive number of full precision."""
        return 2.0**self.min_exponent

    @property
    def smallest_subnormal(self) -> float:
        """The least positive number, and the spacing of all numbers below twice the smallest normal."""
        return 2.0 ** (self.min_exponent - self.precision + 1)

    @property
    def stored_type(self) -> np.dtype[Any]:
        """The type of arrays that hold this format as stored: its own, or uint16 bit patterns for bfloat16."""
        return np.dtype(np.uint16 if self.name == "bfloat16" else self.name)

    @np.errstate(all="ignore")
    def unpack(self, stored: NDArray[Any]) -> Array:
        """The stored values, exactly, in float64. Raises TypeError for an array that is not of `stored_type`."""
        if stored.dtype != self.stored_type:
            raise TypeError(f"{self.name} is read from {self.stored_type} arrays, not from {stored.dtype}")
        if self.name == "bfloat16":
            stored = np.left_shift(stored, 16, dtype=np.uint32).view(np.float32)
        return np.asarray(stored, np.float64)

    @np.errstate(all="ignore")
    def pack(self, values: Array) -> NDArray[Any]:
        """The values as stored. They must be numbers of this format (what the rounding functions return)."""
        if self.name != "bfloat16":
            return values.astype(self.stored_type)
        return np.asarray(values.astype(np.float32).view(np.uint32) >> np.uint32(16)).astype(np.uint16)


FLOAT64 = FloatFormat("float64", 53, -1022, float(np.finfo(np.float64).max))
FLOAT32 = FloatFormat("float32", 24, -126, float(np.finfo(np.float32).max))
FLOAT16 = FloatFormat("float16", 11, -14, float(np.finfo(np.float16).max))
BFLOAT16 = FloatFormat("bfloat16", 8, -126, (2 - 2.0**-7) * 2.0**127)
FORMATS: dict[str, FloatFormat] = {f.name: f for f in (FLOAT64, FLOAT32, FLOAT16, BFLOAT16)}


@np.errstate(all="ignore")
def round_product(target: FloatFormat, factor: Array, *others: Array) -> Array:
    """The exact product of one to three broadcastable arrays, rounded once to `target`; values in float64.

    Rounding is half to even, with gradual underflow, and to infinity beyond `max_finite`. Zeros, infinities and NaN
    multiply as in IEEE arithmetic. Raises ValueError for more than three factors.
    """
    if len(others) > 2:
        raise ValueError(f"round_product takes at most three factors, not {len(others) + 1}")
    # An intermediate product of such factors does not overflow, and if it underflows the result is zero anyway.
    tame = len(others) < 2 or all(_largest(f) < 2.0**300 for f in (factor, *others))
    chunks = np.nditer(
        [factor, *others, None],
        flags=["external_loop", "buffered", "zerosize_ok"],
        op_flags=[*(["readonly"] for _ in range(1 + len(others))), ["writeonly", "allocate"]],
        op_dtypes=[np.float64] * (2 + len(others)),
        order="C",
        buffersize=CHUNK,
    )
    with chunks:
        for *factors, out in chunks:
            out[...] = _round_chunk(target, factors, tame)
        return chunks.operands[-1]


@dataclass(slots=True, eq=False)
class Accumulator:
    """Sums of products in doubled precision, elementwise over one shape: the value is `hi + lo`.

    `hi` is the sum as plain float64 arithmetic gives it, `lo` the sum of its rounding errors. The error of the value is
    about n**2 * 2**-106 times the sum of the terms' magnitudes, for n terms, as long as products stay above 2**-968.
    Where a term is infinite or NaN, or the sum overflows, `hi` stands alone.
    """

    hi: Array
    lo: Array

    @staticmethod
    def zeros(shape: tuple[int, ...]) -> Accumulator:
        """An empty sum for each element of `shape`."""
        return Accumulator(np.zeros(shape), np.zeros(shape))

    def add(self, values: Array) -> None:
        """Add `values`, which broadcast to the shape."""
        self._add(values, np.zeros(()))

    def add_pair(self, other: Accumulator) -> None:
        """Add another accumulator's value, of the same shape."""
        self._add(other.hi, other.lo)

    def add_product(self, a: Array, b: Array) -> None:
        """Add `a * b`, which broadcasts to the shape."""
        self._add(*_two_product(a, b))

    def add_dot(self, matrix: Array, vector: Array) -> None:
        """Add `(matrix * vector).sum(axis=-1)`, which broadcasts to the shape."""
        self._add(*_dot(*np.broadcast_arrays(matrix, vector)))

    @np.errstate(all="ignore")
    def scale(self, factor: Array) -> None:
        """Multiply by `factor`, which broadcasts to the shape."""
        self.hi[...], error = _two_product(self.hi, factor)
        self.lo[...] = self.lo * factor + error

    @np.errstate(all="ignore")
    def round(self, target: FloatFormat) -> Array:
        """The value rounded once to `target`; values in float64."""
        hi, lo = _two_sum(self.hi, np.where(np.isfinite(self.lo), self.lo, 0))
        return _round_pair(target, hi, lo)

    @np.errstate(all="ignore")
    def _add(self, values: Array, errors: Array) -> None:
        self.hi[...], error = _two_sum(self.hi, values)
        self.lo += errors + error


def _largest(values: Array) -> float:
    return max(np.max(values, initial=0.0), -np.min(values, initial=0.0))


def _round_chunk(target: FloatFormat, factors: Sequence[Array], tame: bool) -> Array:
    if target == FLOAT64 and len(factors) == 3:
        return _round_triple(factors)
    if not tame:
        return _round_pair(target, *_exact(factors))
    product = factors[0]
    for f in factors[1:]:
        product = product * f
    if target == FLOAT64:
        return product
    nearest, unit = _nearest(target, product)
    # The float64 product is within 2**-51 units of the exact one: farther from a midpoint both round alike.
    doubtful = np.abs(product - nearest) >= unit * (2.0**-target.precision - 2.0**-50)
    if len(factors) > 1 and doubtful.any():
        nearest[doubtful] = _round_pair(target, *_exact([f[doubtful] for f in factors]))
    return _overflowed(target, nearest, product)


def _round_pair(target: FloatFormat, hi: Array, lo: Array) -> Array:
    """`hi + lo` rounded once, where |lo| is at most half an ulp of hi."""
    if target == FLOAT64:
        return hi
    nearest, unit = _nearest(target, hi)
    half = unit * 2.0**-target.precision
    tied = (np.abs(hi - nearest) == half) & (lo != 0)
    nearest = np.where(tied, np.copysign(hi + np.copysign(half, lo), hi), nearest)
    return _overflowed(target, nearest, hi)


def _nearest(target: FloatFormat, x: Array) -> Pair:
    """The value x rounded half to even, exponents without an upper limit, and the power of two u of its binade."""
    exponent_bits = x.view(np.int64) & np.int64(0x7FF << 52)
    unit = np.maximum(exponent_bits.view(np.float64), target.smallest_normal)
    shift = unit * (1.5 * 2.0 ** (53 - target.precision))
    return np.copysign((x + shift) - shift, x), unit


def _overflowed(target: FloatFormat, rounded: Array, x: Array) -> Array:
    """What rounded beyond the largest number (or, far out, to NaN) becomes an infinity; NaN stays."""
    beyond = ~(np.abs(rounded) <= target.max_finite)
    return np.where(beyond, x * np.inf, rounded) if beyond.any() else rounded


def _exact(factors: Sequence[Array]) -> Pair:
    hi, lo, exponent = _exact_mantissa(factors)
    return np.ldexp(hi, exponent), np.ldexp(lo, exponent)


def _exact_mantissa(factors: Sequence[Array]) -> tuple[Array, Array, NDArray[np.int32]]:
    """hi, lo, e with `(hi + lo) * 2**e` the product; for three factors lo itself is rounded, but its sign is right.

    Mantissas are in [0.5, 1), so nothing here overflows or underflows.
    """
    mantissas, exponents = zip(*map(np.frexp, factors), strict=True)
    head, tail = _two_product(mantissas[0], mantissas[1])
    if len(factors) == 2:
        return head, tail, exponents[0] + exponents[1]
    # (head + tail) * m = p + e + q + f exactly, with e, q below 2**-51 p and f below 2**-104 p.
    p, e = _two_product(head, mantissas[2])
    q, f = _two_product(tail, mantissas[2])
    s, t = _two_sum(e, q)
    hi, r = _two_sum(p, s)
    # The rest is r + t + f = x + y + v. If r + u is inexact, |x| is far above |y| and |v|; if exact, y is 0.
    u, v = _two_sum(t, f)
    x, y = _two_sum(r, u)
    hi = np.where(np.isfinite(p), np.copysign(hi, p), p)
    return hi, x + (y + v), exponents[0] + exponents[1] + exponents[2]


def _round_triple(factors: Sequence[Array]) -> Array:
    """The product of three factors in float64; by rational numbers where it is subnormal or all but a tie."""
    hi, lo, exponent = _exact_mantissa(factors)
    rounded = np.ldexp(hi, exponent)
    tied = np.abs(lo) >= np.spacing(np.nextafter(np.abs(hi), 0)) * (0.5 - 2.0**-40)
    doubtful = np.isfinite(hi) & (hi != 0) & (tied | (np.abs(rounded) < 2 * FLOAT64.smallest_normal))
    for i in np.flatnonzero(doubtful):
        try:
            rounded[i] = float(math.prod(Fraction(float(f[i])) for f in factors))
        except OverflowError:
            rounded[i] = math.copysign(math.inf, hi[i])
    return rounded


def _two_sum(a: Array, b: Array) -> Pair:
    """The float64 sum and its rounding error (Knuth), which is NaN where the sum is not finite."""
    total = a + b
    part = total - a
    return total, (a - (total - part)) + (b - part)


@np.errstate(all="ignore")
def _two_product(a: Array, b: Array) -> Pair:
    """The float64 product and its rounding error (Dekker), which is NaN where the product is not finite."""
    product = a * b
    (a1, a2), (b1, b2) = _split(a), _split(b)
    return product, ((a1 * b1 - product) + a1 * b2 + a2 * b1) + a2 * b2


def _split(a: Array) -> Pair:
    """Head and tail of 26 bits each with sum a, so that their products are exact."""
    head = ((a.view(np.int64) + np.int64(1 << 26)) & np.int64(-1 << 27)).view(np.float64)
    return head, a - head


@np.errstate(all="ignore")
def _dot(a: Array, b: Array) -> Pair:
    """The sum of `a * b` over the last axis, halved along its first long axis until a chunk is left."""
    if a.size > CHUNK:
        axis = next(i for i, n in enumerate(a.shape) if n > 1)
        (hi, lo), (hi2, lo2) = map(_dot, np.array_split(a, 2, axis), np.array_split(b, 2, axis))
        if axis < a.ndim - 1:
            return np.concatenate((hi, hi2), axis), np.concatenate((lo, lo2), axis)
        hi, error = _two_sum(hi, hi2)
        return hi, lo + lo2 + error
    if a.size == 0:
        return np.zeros(a.shape[:-1]), np.zeros(a.shape[:-1])
    hi, lo = _two_product(a, b)
    while (n := hi.shape[-1]) > 1:
        middle = (n + 1) // 2
        hi[..., : n // 2], error = _two_sum(hi[..., : n // 2], hi[..., middle:])
        lo[..., : n // 2] += lo[..., middle:] + error
        hi, lo = hi[..., :middle], lo[..., :middle]
    return hi[..., 0], lo[..., 0]
