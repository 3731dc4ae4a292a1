"""Affine maps against numpy: apply the map and change the layout, in either order."""

from __future__ import annotations

import numpy as np
import pytest

from bnfold.affine import Affine


def random_map(rng, shape, scale_axes=(), shift_axes=None) -> Affine:
    """A map on tensors of this shape whose scale and shift vary along the given axes; whole numbers."""

    def values(axes):
        return rng.integers(-9, 10, [n if i in axes else 1 for i, n in enumerate(shape)]).astype(float)

    return Affine(values(scale_axes), values(scale_axes if shift_axes is None else shift_axes))


def apply(m: Affine, x: np.ndarray) -> np.ndarray:
    assert m.scale.ndim == m.shift.ndim == m.rank == x.ndim
    for a in (m.scale, m.shift):
        assert a.dtype == np.float64
        assert all(k in (1, n) for k, n in zip(a.shape, x.shape, strict=True))
    y = m.scale * x + m.shift
    assert y.shape == x.shape
    return y


def same(m: Affine, other: Affine) -> bool:
    return all(np.array_equal(a, b) for a, b in ((m.scale, other.scale), (m.shift, other.shift)))


# ---------------------------------------------------------------------- form

CANONICAL = {
    "scalars": (2.0, 0.0, 3, (1, 1, 1), (1, 1, 1)),
    "leading ones are added": (np.array([1.0, 2, 3]), 0.5, 3, (1, 1, 3), (1, 1, 1)),
    "a constant dimension is cut": (np.full((1, 4, 1), 2.0), np.arange(4.0).reshape(1, 4, 1), 3, (1, 1, 1), (1, 4, 1)),
    "one dimension is constant": (np.array([[1.0, 2], [1, 2]]), np.array([[1.0, 1], [2, 2]]), 2, (1, 2), (2, 1)),
    "only the last differs": (np.array([1.0, 1, 1, 2]), 0.0, 1, (4,), (1,)),
    "nan equals nothing": (np.array([np.nan, np.nan]), 0.0, 1, (2,), (1,)),
    "integers become float64": (np.array([1, 2]), np.float32(1), 1, (2,), (1,)),
    "no elements": (np.ones((0, 3)), 0.0, 2, (0, 1), (1, 1)),
}


@pytest.mark.parametrize(("scale", "shift", "rank", "scale_shape", "shift_shape"), CANONICAL.values(), ids=CANONICAL)
def test_canonical_form(scale, shift, rank, scale_shape, shift_shape):
    m = Affine.of(scale, shift, rank)
    assert (m.scale.shape, m.shift.shape) == (scale_shape, shift_shape)
    assert m.scale.dtype == m.shift.dtype == np.float64
    full = np.broadcast_shapes(np.shape(scale), m.scale.shape)
    np.testing.assert_array_equal(np.broadcast_to(m.scale, full), np.broadcast_to(scale, full))


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_per_channel(axis):
    m = Affine.per_channel(np.array([1.0, 2]), np.array([3.0, 3]), 3, axis)
    x = np.ones((2, 2, 2))
    expected = np.moveaxis(np.moveaxis(x, axis, -1) * [1, 2] + 3, -1, axis)
    np.testing.assert_array_equal(apply(m, x), expected)
    assert m.varying == {axis % 3}


PROPERTIES = {  # scale, shift: no_shift, no_scale, positive, nonnegative, varying
    "identity": (1.0, 0.0, "no_shift no_scale positive nonnegative", set()),
    "pure shift": (1.0, [0.0, 1], "no_scale positive nonnegative", {1}),
    "zero scale": ([0.0, 1], 0.0, "no_shift nonnegative", {1}),
    "negative scale": ([-1.0, 1], 2.0, "", {1}),
    "negative zero": (-0.0, -0.0, "no_shift nonnegative", set()),
    "tiny": (1e-300, 0.0, "no_shift positive nonnegative", set()),
    "nan": (np.nan, np.nan, "", set()),
}


@pytest.mark.parametrize(("scale", "shift", "true", "varying"), PROPERTIES.values(), ids=PROPERTIES)
def test_properties(scale, shift, true, varying):
    m = Affine.of(np.asarray(scale), np.asarray(shift), 2)
    assert {p for p in ("no_shift", "no_scale", "positive", "nonnegative") if getattr(m, p)} == set(true.split())
    assert m.varying == varying


VECTORS = {  # scale axes, shift axes, axis asked for: whether it is a map along that axis
    "constant": ((), (), 1, True),
    "both along it": ((1,), (1,), 1, True),
    "scale along it": ((1,), (), 1, True),
    "shift along it": ((), (1,), 1, True),
    "counted from the end": ((1,), (1,), -2, True),
    "along another": ((2,), (2,), 1, False),
    "shift along another": ((1,), (2,), 1, False),
    "along two": ((1, 2), (1,), 1, False),
}


@pytest.mark.parametrize(("scale_axes", "shift_axes", "axis", "fits"), VECTORS.values(), ids=VECTORS)
def test_vectors(scale_axes, shift_axes, axis, fits):
    x = np.random.default_rng(0).normal(size=(2, 4, 3))
    m = random_map(np.random.default_rng(1), x.shape, scale_axes, shift_axes)
    vectors = m.vectors(axis, 4)
    assert (vectors is not None) == fits
    if vectors is not None:
        assert [v.shape for v in vectors] == [(4,), (4,)]
        scale, shift = (v[:, None] for v in vectors)
        np.testing.assert_array_equal(scale * x + shift, apply(m, x))


# ---------------------------------------------------------------------- composition


@pytest.mark.parametrize("seed", range(20))
def test_after_is_composition(seed):
    rng = np.random.default_rng(seed)
    shape = (2, 3, 4)
    first, second = (random_map(rng, shape, *(rng.permutation(3)[: rng.integers(4)] for _ in "ab")) for _ in "ab")
    x = rng.integers(-9, 10, shape).astype(float)  # whole numbers: everything is exact
    np.testing.assert_array_equal(apply(second.after(first), x), apply(second, apply(first, x)))


def test_after_restores_the_canonical_form():
    a = Affine.per_channel(np.array([2.0, 4]), np.array([1.0, 2]), 3, 1)
    inverse = Affine.per_channel(np.array([0.5, 0.25]), np.array([-0.5, -0.5]), 3, 1)
    total = inverse.after(a)
    assert (total.scale.shape, total.shift.shape) == ((1, 1, 1), (1, 1, 1))
    assert total.no_scale
    assert total.no_shift


def test_after_overflows_without_a_warning():
    huge = Affine.of(1e200, 0.0, 1)
    total = huge.after(huge)
    assert total.scale == np.inf


# ---------------------------------------------------------------------- layout


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)], ids=str)
def test_transpose(order):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 3, 4))
    for axes in ((), (1,), (0, 2), (0, 1, 2)):
        m = random_map(rng, x.shape, axes, axes[:1])
        np.testing.assert_array_equal(apply(m.transpose(order), x.transpose(order)), apply(m, x).transpose(order))


N, U = "N", None  # a symbol, an unknown size
RESHAPES = {  # what is known of the old and the new shape, axes of the map: axes afterwards, or None
    "flatten C,H,W": ((2, 3, 4, 5), (2, 60), (1,), {1}),
    "flatten behind a symbol": ((N, 3, 4, 5), (N, 60), (1,), {1}),
    "flatten all": ((2, 3, 4), (24,), (1,), {0}),
    "flatten with 1x1 maps": ((N, 3, 1, 1), (N, 3), (1,), {1}),
    "unflatten": ((N, 60), (N, 3, 4, 5), (1,), {1, 2, 3}),
    "split channels into groups": ((N, 6, 4, 4), (N, 2, 3, 4, 4), (1,), {1, 2}),
    "merge groups into channels": ((N, 2, 3, 4), (N, 6, 4), (1, 2), {1}),
    "merge one of two": ((N, 2, 3, 4), (N, 6, 4), (2,), {1}),
    "regroup": ((N, 4, 6), (N, 3, 8), (1,), {1, 2}),
    "regroup three into two": ((2, 6, 10), (4, 30), (1,), {0, 1}),
    "tokens to heads": ((N, U, 12), (N, U, 3, 4), (2,), {2, 3}),
    "heads to tokens": ((N, U, 3, 4), (N, U, 12), (2, 3), {2}),
    "squeeze": ((N, 3, 1, 1), (N, 3), (1,), {1}),
    "unsqueeze": ((N, 3), (N, 1, 3, 1), (1,), {2}),
    "unsqueeze in front": ((3, 4), (1, 3, 4), (0,), {1}),
    "squeeze in front": ((1, 3, 4), (3, 4), (1,), {0}),
    "ones between": ((2, 1, 3, 1, 4), (2, 3, 4), (2,), {1}),
    "ones only": ((1, 1), (1,), (), set()),
    "from a scalar": ((), (1, 1), (), set()),
    "to a scalar": ((1,), (), (), set()),
    "same shape": ((N, 3, U), (N, 3, U), (), set()),
    "symbols on either side": ((N, 4, "L"), (N, 2, 2, "L"), (1,), {1, 2}),
    "matched from the right": ((U, 4, 5), (U, 20), (1,), {1}),
    "matched from the right, behind a symbol": ((U, N, 3, 4), (U, 3, 4), (2,), {1}),
    "matched from both ends": ((N, 4, U, 6), (N, 2, 2, U, 3, 2), (1, 3), {1, 2, 4, 5}),
    "unknown in the map's block": ((N, 4, U), (N, U), (1,), None),
    "unknown size outside it": ((N, 4, U, 5), (N, 4, U), (1,), {1}),
    "unknown old size in the middle": ((U, 4, U), (U, 4, U), (1,), None),
    "unknown is not paired by position": ((U, 4), (U, 2, 2), (1,), {1, 2}),
    "a static size is not paired with a symbol": ((4, N), (N, 4), (0,), None),
    "another symbol": ((N, 4, 2), ("M", 4, U), (1,), None),
    "a symbol moved": ((N, 4, "H"), (4, N, "H"), (1,), None),
    "batch folded into channels": ((N, 4, 3), (U, 3), (1,), None),
    "batch folded, map behind it": ((N, 4, 3), (U, 3), (2,), {1}),
    "batch folded, constant map": ((N, 4, 3), (U, 3), (), set()),
    "zero batch": ((0, 3, 4), (0, 12), (1,), {1}),
}
SYMBOLS = {"N": 2, "M": 2, "H": 3, "L": 5}


def sizes(known, total=None):
    """Sizes for what is known: symbols as SYMBOLS says, unknown ones 7 but for one that makes up the total."""
    out = [7 if n is None else SYMBOLS.get(n, n) for n in known]
    if total is not None and None in known and np.prod(out) != total:
        k = known.index(None)
        out[k] = total // int(np.prod(out[:k] + out[k + 1 :]))
    return tuple(out)


@pytest.mark.parametrize(("old", "new", "axes", "expected"), RESHAPES.values(), ids=RESHAPES)
def test_reshape(old, new, axes, expected):
    rng = np.random.default_rng(0)
    before = sizes(old)
    x = rng.normal(size=before)
    m = random_map(rng, before, axes)
    moved = m.reshape(old, new)
    if expected is None:
        assert moved is None
        return
    assert moved is not None
    assert moved.varying == expected
    y = x.reshape(sizes(new, x.size))
    if x.size:
        np.testing.assert_array_equal(apply(moved, y), apply(m, x).reshape(y.shape))


def test_reshape_keeps_what_varies_in_scale_and_shift_apart():
    m = random_map(np.random.default_rng(0), (2, 3, 4), (1,), (2,))
    x = np.random.default_rng(1).normal(size=(2, 3, 4))
    moved = m.reshape((2, 3, 4), (2, 12))
    assert moved is not None
    np.testing.assert_array_equal(apply(moved, x.reshape(2, 12)), apply(m, x).reshape(2, 12))


def random_shape(rng, count: int) -> tuple[int, ...]:
    """Some factorization of `count`, with ones in between."""
    dims = []
    while count > 1:
        d = rng.choice([k for k in range(2, count + 1) if count % k == 0])
        dims.append(int(d))
        count //= d
    for _ in range(rng.integers(3)):
        dims.insert(rng.integers(len(dims) + 1), 1)
    return tuple(dims)


def hide(rng, size: int, probability: float):
    """The size, a symbol that stands for this size everywhere, or None."""
    return rng.choice([None, f"size{size}"]) if rng.random() < probability else size


@pytest.mark.parametrize("seed", range(200))
def test_reshape_between_random_shapes(seed):
    """Static shapes never fail; where sizes are hidden it fails or is right."""
    rng = np.random.default_rng(seed)
    count = int(rng.choice([12, 16, 24, 36, 60]))
    old, new = random_shape(rng, count), random_shape(rng, count)
    axes = [i for i in range(len(old)) if rng.random() < 0.4]
    m = random_map(rng, old, axes, rng.permutation(axes)[:1])
    x = rng.normal(size=old)
    back = None
    for hidden in (0, 0.3, 0.6):
        known, to = (tuple(hide(rng, n, hidden) for n in s) for s in (old, new))
        moved = m.reshape(known, to)
        if not hidden:
            assert moved is not None
            back = moved.reshape(new, old)
        if moved is not None:
            np.testing.assert_array_equal(apply(moved, x.reshape(new)), apply(m, x).reshape(new))
    assert back is not None
    assert same(back, Affine.of(m.scale, m.shift, m.rank))
