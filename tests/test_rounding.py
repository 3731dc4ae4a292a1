"""Rounding against an oracle: `fractions.Fraction`, and a slow rounding by integer arithmetic."""

from __future__ import annotations

import math
import warnings
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from bnfold.rounding import BFLOAT16, CHUNK, FLOAT16, FLOAT32, FLOAT64, FORMATS, Accumulator, FloatFormat, round_product

# precision, exponent of the smallest normal, exponent of the largest binade; written out again, on purpose
LIMITS = {
    "float64": (53, -1022, 1023),
    "float32": (24, -126, 127),
    "float16": (11, -14, 15),
    "bfloat16": (8, -126, 127),
}
INF, NAN = math.inf, math.nan

every = pytest.mark.parametrize("target", FORMATS.values(), ids=lambda f: f.name)
narrow = pytest.mark.parametrize("target", [FLOAT32, FLOAT16, BFLOAT16], ids=lambda f: f.name)


@pytest.fixture(autouse=True)
def _no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def spacing(exact: Fraction, target: FloatFormat) -> Fraction:
    """The distance of the format's numbers around `exact`, exponents without an upper limit."""
    precision, smallest, _ = LIMITS[target.name]
    e = exact.numerator.bit_length() - exact.denominator.bit_length()
    if abs(exact) < Fraction(2) ** e:
        e -= 1
    return Fraction(2) ** (max(e, smallest) - precision + 1)


def oracle(exact: Fraction, target: FloatFormat) -> float:
    """`exact` rounded once, half to even."""
    q = spacing(exact, target)
    k, rest = divmod(abs(exact), q)
    k += rest > q / 2 or (rest == q / 2 and k % 2 == 1)
    size = INF if k * q >= Fraction(2) ** (LIMITS[target.name][2] + 1) else float(k * q)
    return -size if exact < 0 else size


def fraction_sum(values) -> Fraction:
    return sum((Fraction(float(v)) for v in values), Fraction(0))


def assert_same(got, expected, *inputs) -> None:
    """Equal, signs of zeros included; NaN equals NaN. The message shows the first difference."""
    expected = np.asarray(expected)
    assert (got.shape, got.dtype) == (expected.shape, np.float64)
    same = np.isnan(got) & np.isnan(expected) | (got == expected) & (np.signbit(got) == np.signbit(expected))
    if not same.all():
        i = np.flatnonzero(~same)[0]
        first, right, *rest = [float(x.flat[i]).hex() for x in (got, expected, *inputs)]
        pytest.fail(f"{(~same).sum()} of {same.size} differ; the first is {first}, should be {right}, from {rest}")


def assert_rounds(target: FloatFormat, *factors) -> np.ndarray:
    """`round_product` of 1-D arrays is what the oracle says, and its values belong to the format. Returns them."""
    rows = zip(*factors, strict=True)
    expected = np.array([oracle(math.prod(Fraction(float(f)) for f in row), target) for row in rows])
    signs = np.prod([np.copysign(1, f) for f in factors], axis=0)
    got = round_product(target, *factors)
    assert_same(got, np.copysign(expected, signs), *factors)
    assert_same(target.unpack(target.pack(got)), got)
    return got


def rounded_twice(target: FloatFormat, *factors) -> np.ndarray:
    """What to avoid: the product in float64, then rounded to the format."""
    return np.array([oracle(Fraction(float(p)), target) for p in np.prod(factors, axis=0)])


def odd(rng, bits: int, n: int) -> np.ndarray:
    """Odd whole numbers of exactly so many bits."""
    return (rng.integers(1 << bits - 1, 1 << bits, n) | 1).astype(float)


def signed(rng, values) -> np.ndarray:
    return values * rng.choice([-1.0, 1.0], len(values))


def anywhere(rng, target: FloatFormat, first, *others) -> list[np.ndarray]:
    """The factors, the first with random sign and scaled by a power of two that puts the product in a random binade."""
    _, smallest, largest = LIMITS[target.name]
    binade = np.frexp(np.prod([first, *others], axis=0))[1] - 1
    return [signed(rng, np.ldexp(first, rng.integers(smallest, largest + 1, len(first)) - binade)), *others]


# The oracle


@pytest.mark.parametrize(
    ("target", "cast"), [(FLOAT64, "f8"), (FLOAT32, "f4"), (FLOAT16, "f2")], ids=["float64", "float32", "float16"]
)
def test_oracle_agrees_with_numpy_casts(target, cast):
    [x] = random_factors(np.random.default_rng(1), target, 1, 0)
    with np.errstate(all="ignore"):
        assert_same(np.array([oracle(Fraction(float(v)), target) for v in x]), (x + 0.0).astype(cast).astype(float), x)


# Products


def random_factors(rng, target: FloatFormat, count: int, spread: int, n: int = 2000) -> list[np.ndarray]:
    """Factors with exponents up to `spread` and a product anywhere in the format's range, or a bit beyond.

    Half of the significands are short, so that ties happen; some factors are zero.
    """
    precision, smallest, largest = LIMITS[target.name]
    total = rng.integers(smallest - precision - 8, largest + 8, n)
    factors = []
    for i in range(count):
        e = np.clip(total if i == count - 1 else rng.integers(-spread, spread + 1, n), -1074, 1023)
        total = total - e
        significand = np.where(rng.random(n) < 0.5, 1 + rng.random(n), 1 + rng.integers(0, 64, n) / 64)
        factors.append(np.where(rng.random(n) < 0.01, 0.0, signed(rng, np.ldexp(significand, e))))
    return factors


@every
@pytest.mark.parametrize(
    ("count", "spread"),
    [(1, 0), (2, 60), (2, 600), (3, 60), (3, 600)],
    ids=["one", "two", "two-far-apart", "three", "three-far-apart"],
)
def test_random_products(target, count, spread):
    factors = random_factors(np.random.default_rng([2, count, spread]), target, count, spread)
    got = np.abs(assert_rounds(target, *factors))
    assert (got == 0).sum() > 10
    assert ((got > 0) & (got < target.smallest_normal)).sum() > 10
    assert np.isfinite(got).sum() > 1000
    assert np.isinf(got).any() != (target == FLOAT64 and count == 1)


def odd_factors(rng, count: int, low: float, high: float) -> np.ndarray:
    """Rows of odd whole numbers up to 1.5 * high**(1 / count), or 5, whose product is in [low, high)."""
    parts = 2 * rng.integers(0, max(3, math.ceil(0.75 * high ** (1 / count))), (count, 8000)) + 1.0
    product = parts.prod(axis=0)
    return parts[:, (product >= low) & (product < high)][:, :1000]


@narrow
@pytest.mark.parametrize("subnormal", [False, True], ids=["normal", "subnormal"])
@pytest.mark.parametrize("count", [1, 2, 3], ids=["one", "two", "three"])
def test_exact_ties_go_to_even(target, count, subnormal):
    """An odd product of precision + 1 bits is a tie; so is any odd number of halves of the smallest subnormal."""
    rng = np.random.default_rng([3, count])
    middle = 2.0**target.precision
    first, *others = odd_factors(rng, count, 1, middle) if subnormal else odd_factors(rng, count, middle, 2 * middle)
    if subnormal:
        factors = [signed(rng, first * target.smallest_subnormal / 2), *others]
    else:
        factors = anywhere(rng, target, first, *others)
    got, exact = np.abs(assert_rounds(target, *factors)), np.abs(np.prod(factors, axis=0))
    assert len(got) > 200
    assert (got > exact).mean() > 0.2
    assert (got < exact).mean() > 0.2


def ties_missed_by_division(rng, target):
    """s is the float64 nearest to (a midpoint) / w, or one of its neighbours."""
    w = odd(rng, target.precision, 2000)
    s = odd(rng, target.precision + 1, 2000) / w
    return w, np.choose(rng.integers(0, 3, 2000), [s, np.nextafter(s, 0), np.nextafter(s, INF)])


def ties_missed_by_inverse(rng, target):
    """w * s = midpoint * 2**51 + r with r in {-3, -1, 1, 3}, by the inverse of w modulo 2**51."""
    w = odd(rng, target.precision, 6000).astype(int).tolist()
    r = rng.choice([-3, -1, 1, 3], 6000).tolist()
    s = [ri * pow(wi, -1, 2**51) % 2**51 + 2**51 for wi, ri in zip(w, r, strict=True)]
    middles = [(wi * si - ri) >> 51 for wi, si, ri in zip(w, s, r, strict=True)]
    keep = [m % 2 == 1 and m.bit_length() == target.precision + 1 for m in middles]
    return np.array(w, float)[keep], np.array(s, float)[keep]


def ties_missed_by_division_of_three(rng, target):
    """t is the float64 nearest to (a midpoint) / (w * s)."""
    w, s = odd(rng, target.precision, 2000), rng.random(2000) + 0.5
    return w, s, odd(rng, target.precision + 1, 2000) / (w * s)


def ties_missed_by_quartics(rng, target):
    """midpoint * (1 - x**-4) and midpoint * (1 + x**-3) for x up to 2**26: down to 2**-104 beside the midpoint."""
    middle, x = odd(rng, target.precision + 1, 1500), np.exp2(rng.integers(20, 27, 1500))
    below = (middle * (x - 1), x + 1, x * x + 1)
    above = (middle * (x + 1), x * x - x + 1, np.ones(1500))
    return tuple(map(np.concatenate, zip(below, above, strict=True)))


def ties_missed_by_sextics(rng, target):
    """x**6 - 1 = (x**2 - 1)(x**2 + x + 1)(x**2 - x + 1) and
    27 * x**6 + 1 = (3 * x**2 + 1)(3 * x**2 + 3 * x + 1)(3 * x**2 - 3 * x + 1), times three factors of a midpoint.
    """
    high = 2.0 ** (target.precision + 1)
    below, above = odd_factors(rng, 3, high / 2, high), odd_factors(rng, 3, high / 54, high / 27)
    x, y = (2.0 ** int((53 - 1.6 - math.log2(1.5 * (high / by) ** (1 / 3))) / 2) for by in (1, 27))
    below *= np.array([[x**2 - 1], [x**2 + x + 1], [x**2 - x + 1]])
    above *= np.array([[3 * y**2 + 1], [3 * y**2 + 3 * y + 1], [3 * y**2 - 3 * y + 1]])
    assert max(below.max(), above.max()) < 2**53
    return tuple(np.concatenate([below, above], axis=1))


@narrow
@pytest.mark.parametrize(
    "build",
    [
        ties_missed_by_division,
        ties_missed_by_inverse,
        ties_missed_by_division_of_three,
        ties_missed_by_quartics,
        ties_missed_by_sextics,
    ],
    ids=lambda f: f.__name__.removeprefix("ties_missed_"),
)
def test_near_ties(target, build):
    rng = np.random.default_rng(4)
    factors = anywhere(rng, target, *build(rng, target))
    got = assert_rounds(target, *factors)
    assert (rounded_twice(target, *factors) != got).sum() > 100


@narrow
def test_near_ties_among_subnormals(target):
    rng = np.random.default_rng(5)
    halves = np.concatenate([odd(rng, bits, 150) for bits in range(2, target.precision + 1)])
    s = rng.random(len(halves)) + 0.5
    w = halves * (target.smallest_subnormal / 2) / s
    got = assert_rounds(target, w, s)
    assert (rounded_twice(target, w, s) != got).sum() > 20
    assert_rounds(target, signed(rng, w), np.sqrt(s), s / np.sqrt(s))


@narrow
def test_near_ties_at_overflow(target):
    rng = np.random.default_rng(6)
    edge = target.max_finite + np.ldexp(1.0, LIMITS[target.name][2] - target.precision)
    s = rng.random(2000) + 0.5
    got = assert_rounds(target, signed(rng, edge / s), s)
    assert 200 < np.isinf(got).sum() < 1800


@narrow
@pytest.mark.parametrize(
    ("ulps", "grid"),
    [(0.5, 0), (0.5 + 2**-40, 1), (1.0, 1), (1.5 - 2**-40, 1), (1.5, 2), (2.5, 2), (0.5 - 2**-40, 0)],
    ids=["half", "above-half", "one", "below-three-halves", "three-halves", "five-halves", "below-half"],
)
def test_subnormal_edges(target, ulps, grid):
    x = np.array([ulps, -ulps]) * target.smallest_subnormal
    assert_same(round_product(target, x), np.array([1.0, -1.0]) * grid * target.smallest_subnormal)


@narrow
def test_overflow_edges(target):
    half = np.ldexp(1.0, LIMITS[target.name][2] - target.precision)
    x = target.max_finite + half * np.array([0, 0.5, 1 - 2**-20, 1, 1.5, 1e6])
    got = assert_rounds(target, np.concatenate([x, -x]))
    assert got[:6].tolist() == [target.max_finite] * 3 + [INF] * 3


def test_float64_of_two_factors_is_the_ieee_product():
    a, b = random_factors(np.random.default_rng(8), FLOAT64, 2, 500)
    with np.errstate(all="ignore"):
        assert_same(round_product(FLOAT64, a, b), a * b, a, b)


def test_float64_of_three_factors_beside_ties():
    rng = np.random.default_rng(9)
    first, *others = odd_factors(rng, 3, 2.0**53, 2.0**54)
    assert_rounds(FLOAT64, signed(rng, first), *others)
    first, *others = ties_missed_by_sextics(rng, FLOAT64)
    near = [signed(rng, np.ldexp(first, rng.integers(-900, 800, len(first)))), *others]
    assert (np.prod(near, axis=0) != assert_rounds(FLOAT64, *near)).sum() > 100


@pytest.mark.parametrize("binade", [-1022, -1030, -1060, -1074, 1023, 1024])
def test_float64_of_three_factors_at_the_edges(binade):
    rng = np.random.default_rng([10, binade + 1074])
    m, n = odd(rng, 27, 400), odd(rng, 27, 400)
    assert_rounds(
        FLOAT64, signed(rng, np.ldexp(m, binade // 2)), np.ldexp(n, binade - binade // 2 - 3), np.full(400, 2.0**-50)
    )
    assert_rounds(FLOAT64, np.array([2.0**27 - 1]), np.array([-(2.0**27 + 1)]), np.array([2.0**970]))


@pytest.mark.parametrize(
    ("x", "right", "through_float32"),
    [
        (1 + 2**-8 + 2**-30, 1 + 2**-7, 1.0),
        (1 + 3 * 2**-8 - 2**-30, 1 + 2**-7, 1 + 2**-6),
        (-(1 + 2**-8 + 2**-30), -(1 + 2**-7), -1.0),
        (2.0**-134 * (1 + 2**-20), 2.0**-133, 0.0),
        (3 * 2.0**-134 * (1 - 2**-20), 2.0**-133, 2.0**-132),
    ],
    ids=["above-tie", "below-tie", "negative", "above-subnormal-tie", "below-subnormal-tie"],
)
def test_bfloat16_is_not_rounded_through_float32(x, right, through_float32):
    assert oracle(Fraction(oracle(Fraction(x), FLOAT32)), BFLOAT16) == through_float32
    assert round_product(BFLOAT16, np.array([x])).tolist() == [right]


@every
@pytest.mark.parametrize(
    ("factors", "expected"),
    [
        ((0.0, 3.0), 0.0),
        ((0.0, -3.0), -0.0),
        ((-0.0, 3.0, 1.0), -0.0),
        ((-0.0, 1e300, -1e300), 0.0),
        ((INF, 2.0), INF),
        ((INF, -2.0), -INF),
        ((2.0, INF, -2.0), -INF),
        ((-INF, 5e-324, 1.0), -INF),
        ((INF, 0.0), NAN),
        ((0.0, 1.0, INF), NAN),
        ((NAN, 1.0), NAN),
        ((1.0, 2.0, NAN), NAN),
        ((1e300, 1e300), INF),
        ((-1e300, 1e300, 1.0), -INF),
        ((1e-300, 1e-300), 0.0),
        ((-1e-300, 1e-300, 1.0), -0.0),
    ],
    ids=str,
)
def test_zero_infinity_nan(target, factors, expected):
    arrays = [np.array([1.0, f]) for f in factors]
    assert_same(round_product(target, *arrays), np.array([1.0, expected]))


@every
def test_broadcasting_over_several_chunks(target):
    rng = np.random.default_rng(10)
    rows, columns = odd(rng, 10, 6).reshape(6, 1, 1, 1), odd(rng, 10, 40).reshape(1, 40, 1, 1)
    weight = odd(rng, 20, 6 * 40 * 7 * 9).reshape(7, 40, 6, 9).transpose(2, 1, 0, 3) / 2**30
    assert weight.size > CHUNK
    exact = (rows * weight * columns).ravel()  # 40 bits
    assert_same(round_product(target, rows, weight, columns).ravel(), round_product(target, exact))
    sample = slice(None, None, 50)
    assert_rounds(target, exact[sample], np.ones_like(exact[sample]))


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (2, 1, 3)], ids=str)
@pytest.mark.parametrize("count", [1, 2, 3])
def test_shapes(shape, count):
    got = round_product(FLOAT32, *[np.full(shape, 1.1)] * count)
    assert (got.shape, got.dtype) == (shape, np.float64)
    assert (got == float(np.float32(1.1**count))).all()
    assert FLOAT32.pack(got).shape == BFLOAT16.pack(round_product(BFLOAT16, got)).shape == shape


def test_four_factors_are_an_error():
    one = np.ones(1)
    with pytest.raises(ValueError, match="at most three factors, not 4"):
        round_product(FLOAT32, one, one, one, one)


# Formats


@every
def test_limits(target):
    info = ml_dtypes.finfo(target.name)
    assert (target.precision, target.min_exponent, target.max_finite) == (info.nmant + 1, info.minexp, float(info.max))
    assert target.smallest_normal == float(info.smallest_normal)
    assert target.smallest_subnormal == float(info.smallest_subnormal)


@pytest.mark.parametrize("target", [FLOAT16, BFLOAT16], ids=lambda f: f.name)
def test_all_bit_patterns_survive(target):
    patterns = np.arange(1 << 16, dtype=np.uint16)
    stored = patterns.view(target.stored_type)
    values = target.unpack(stored)
    with np.errstate(invalid="ignore"):
        assert_same(values, patterns.view(ml_dtypes.bfloat16 if target == BFLOAT16 else np.float16).astype(float))
    back, numbers = target.pack(values), ~np.isnan(values)
    assert back.dtype == target.stored_type
    assert (back.view(np.uint16) == patterns)[numbers].all()
    assert np.isnan(target.unpack(back)[~numbers]).all()
    assert_same(round_product(target, values), values)


@pytest.mark.parametrize(("target", "word"), [(FLOAT64, np.uint64), (FLOAT32, np.uint32)], ids=["float64", "float32"])
def test_random_bit_patterns_survive(target, word):
    patterns = np.random.default_rng(11).integers(0, np.iinfo(word).max, 20_000, word)
    values = target.unpack(patterns.view(target.stored_type))
    numbers = ~np.isnan(values)
    assert (target.pack(values).view(word) == patterns)[numbers].all()
    assert_same(round_product(target, values), values)


@pytest.mark.parametrize(
    ("target", "stored"),
    [(BFLOAT16, np.zeros(1, ml_dtypes.bfloat16)), (BFLOAT16, np.zeros(1, np.float32)), (FLOAT32, np.zeros(1))],
    ids=["ml_dtypes", "float32-as-bfloat16", "float64-as-float32"],
)
def test_unpack_refuses_other_types(target, stored):
    with pytest.raises(TypeError, match=f"{target.name} is read from {target.stored_type} arrays"):
        target.unpack(stored)


# Sums


def assert_accurate(accumulator: Accumulator, exact: list[Fraction], terms: list[Fraction], count: int) -> None:
    """Every format is within half an ulp, plus what doubled precision leaves: count**2 * 2**-104 of sum |terms|."""
    for target in FORMATS.values():
        got = accumulator.round(target).ravel()
        assert len(got) == len(exact)
        for value, right, size in zip(got, exact, terms, strict=True):
            slack = size * count**2 / 2**104
            if slack < spacing(right, target) / 2 and abs(right) < target.max_finite:
                assert abs(Fraction(float(value)) - right) <= spacing(right, target) / 2 + slack
            if target == FLOAT64:
                assert abs(Fraction(float(value)) - right) <= spacing(size, FLOAT64)


def cancelling(rng, rows: int, n: int, condition: float) -> np.ndarray:
    """Rows of 2 * n terms whose large parts cancel in pairs: sum |terms| is about `condition` times the sum."""
    large = signed(rng, np.ldexp(1 + rng.random(rows * n), rng.integers(-10, 1, rows * n))).reshape(rows, n)
    small = (1 + rng.random((rows, n))) / condition
    difference = large + small  # rounded, so the remainder has to go along as well
    return rng.permuted(np.concatenate([difference, -large, small - (difference - large)], axis=1), axis=1)


@pytest.mark.parametrize("condition", [1e10, 1e13, 1e16, 1e20], ids="{:.0e}".format)
@pytest.mark.parametrize("way", ["add", "add_product", "add_dot"])
def test_ill_conditioned_sums(condition, way):
    rng = np.random.default_rng(12)
    terms = cancelling(rng, 20, 40, condition)
    factor = np.exp2(rng.integers(-3, 4, terms.shape[1]))
    accumulator = Accumulator.zeros((20,))
    if way == "add":
        for column in terms.T:
            accumulator.add(column)
    elif way == "add_product":
        for column, f in zip(terms.T, factor, strict=True):
            accumulator.add_product(column * f, 1 / f)
    else:
        accumulator.add_dot(terms * factor, 1 / factor)
    exact = [fraction_sum(row) for row in terms]
    assert_accurate(accumulator, exact, [fraction_sum(np.abs(row)) for row in terms], terms.shape[1])
    plain = [abs(Fraction(float(row.sum())) - x) > spacing(x, FLOAT32) for row, x in zip(terms, exact, strict=True)]
    assert any(plain) or condition < 1e11


@pytest.mark.parametrize(
    "shape",
    [(4, 300), (300, 4), (3, CHUNK + 5), (CHUNK + 7, 2), (2, 3, 50), (5, 1), (7,)],
    ids=str,
)
def test_dot_of_any_shape(shape):
    rng = np.random.default_rng(13)
    matrix, vector = rng.standard_normal(shape), rng.standard_normal(shape[-1])
    accumulator = Accumulator.zeros(shape[:-1])
    accumulator.add_dot(matrix, vector)
    rows = matrix.reshape(-1, shape[-1])[:500]
    products = [[Fraction(a) * Fraction(b) for a, b in zip(row.tolist(), vector.tolist(), strict=True)] for row in rows]
    kept = Accumulator(accumulator.hi.ravel()[:500], accumulator.lo.ravel()[:500])
    assert_accurate(kept, [sum(p) for p in products], [sum(map(abs, p)) for p in products], shape[-1])


def test_dot_with_a_vector_per_group_and_with_nothing():
    rng = np.random.default_rng(14)
    weight, shift = rng.integers(-9, 9, (2, 3, 5)).astype(float), rng.integers(-9, 9, (2, 1, 5)).astype(float)
    accumulator = Accumulator.zeros((2, 3))
    accumulator.add_dot(weight, shift)
    accumulator.add_dot(np.ones((2, 3, 0)), np.ones(0))
    accumulator.add(np.array([[1.0], [2.0]]))
    assert_same(accumulator.round(FLOAT32), (weight * shift).sum(axis=-1) + np.array([[1.0], [2.0]]))


def test_a_bias():
    """scale * (W @ shift + bias) + other * factor, as a fold computes it."""
    rng = np.random.default_rng(15)
    weight, shift, bias, scale, other, factor = (rng.standard_normal(n) for n in [(50, 30), 30, 50, 50, 50, 50])
    accumulator = Accumulator.zeros((50,))
    accumulator.add_dot(weight, shift)
    accumulator.add(bias)
    accumulator.scale(scale)
    accumulator.add_product(other, factor)
    exact, sizes = [], []
    for i in range(50):
        terms = [Fraction(w) * Fraction(s) for w, s in zip(weight[i].tolist(), shift.tolist(), strict=True)]
        terms = [Fraction(scale[i]) * t for t in (*terms, Fraction(bias[i]))]
        terms.append(Fraction(other[i]) * Fraction(factor[i]))
        exact.append(sum(terms))
        sizes.append(sum(map(abs, terms)))
    assert_accurate(accumulator, exact, sizes, 33)


@narrow
@pytest.mark.parametrize("sign", [1.0, -1.0], ids=["positive", "negative"])
@pytest.mark.parametrize(
    ("ulps", "rest", "grid"),
    [(2.5, 0, 2), (2.5, 1, 3), (2.5, -1, 2), (3.5, 0, 4), (3.5, 1, 4), (3.5, -1, 3), (0.5, 1, 1), (0.5, -1, 0)],
    ids=lambda x: f"{x:g}",
)
@pytest.mark.parametrize("place", ["normal", "subnormal"])
def test_a_sum_beside_a_midpoint_is_rounded_once(target, sign, ulps, rest, grid, place):
    base, ulp = (1.0, 2.0 ** (1 - target.precision)) if place == "normal" else (0.0, target.smallest_subnormal)
    accumulator = Accumulator.zeros((1,))
    accumulator.add(np.array([sign * (base + ulps * ulp)]))
    accumulator.add(np.array([sign * rest * ulp * 2.0**-80]))
    assert_same(accumulator.round(target), np.array([sign * (base + grid * ulp)]))


@every
@pytest.mark.parametrize(
    ("terms", "expected"),
    [
        ((INF, 1.0), INF),
        ((1.0, -INF, 3.0), -INF),
        ((INF, -INF), NAN),
        ((NAN, 1.0), NAN),
        ((1e308, 1e308), INF),
        ((-1e308, -1e308, 1.0), -INF),
    ],
    ids=str,
)
def test_infinite_terms(target, terms, expected):
    rows = np.array([terms, (1.0,) * len(terms)])
    added, products, dot = (Accumulator.zeros((2,)) for _ in range(3))
    for column in rows.T:
        added.add(column)
        products.add_product(column, np.ones(1))
    dot.add_dot(rows, np.ones(len(terms)))
    for accumulator in (added, products, dot):
        assert_same(accumulator.round(target), np.array([expected, len(terms)]))
        accumulator.scale(np.array([2.0, 0.5]))
        accumulator.add(np.ones(1))
        assert_same(accumulator.round(target), np.array([expected, 1 + len(terms) / 2]))


@pytest.mark.parametrize(
    ("factor", "expected"), [(INF, INF), (-INF, -INF), (0.0, 0.0), (NAN, NAN), (1e308, INF)], ids=str
)
def test_scaling_by_special_numbers(factor, expected):
    accumulator = Accumulator.zeros((1,))
    accumulator.add_dot(np.array([[1e10, 1e-10]]), np.ones(2))
    accumulator.scale(np.array([factor]))
    assert_same(accumulator.round(FLOAT32), np.array([expected]))


def test_products_keep_their_tail():
    """The error of a product is itself a float64 number; nothing overflows on the way to it."""
    rng = np.random.default_rng(16)
    a, b = random_factors(rng, FLOAT32, 2, 1000)
    kept = (np.abs(a) < 2.0**1023) & (np.abs(b) < 2.0**1023)
    a, b = a[kept], b[kept]
    accumulator = Accumulator.zeros(a.shape)
    accumulator.add_product(a, b)
    accumulator.add(-a * b)
    errors = [Fraction(x) * Fraction(y) - Fraction(x * y) for x, y in zip(a.tolist(), b.tolist(), strict=True)]
    assert accumulator.round(FLOAT64).tolist() == [float(e) for e in errors]
    assert all(Fraction(float(e)) == e for e in errors)
