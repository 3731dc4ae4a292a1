"""Folded weights and biases against rational arithmetic: weights correctly rounded, biases within their bound.

The oracle does not share the engine's view of the layer: it goes over the weight as it is stored, element by element.
"""

from __future__ import annotations

import itertools
import warnings
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np
import pytest
from programs import decoded, stored
from test_rounding import oracle, spacing

from bnfold.affine import Affine
from bnfold.ops import Linear, Tensor
from bnfold.report import Reason, Refusal
from bnfold.rounding import BFLOAT16, FLOAT16, FLOAT32, FLOAT64, FloatFormat
from bnfold.weights import NewWeights, solve

Maps = tuple[np.ndarray, np.ndarray] | None  # scale and shift per channel

narrow = pytest.mark.parametrize("fmt", [FLOAT32, FLOAT16, BFLOAT16], ids=lambda f: f.name)
every = pytest.mark.parametrize("fmt", [FLOAT64, FLOAT32, FLOAT16, BFLOAT16], ids=lambda f: f.name)


@pytest.fixture(autouse=True)
def _no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def site(weight, bias=None, *, fmt=FLOAT32, bias_fmt=None, out_dim=0, rank=4, axis=1, **fields) -> Linear:
    """A layer on tensors of this rank; weight and bias must be numbers of their format."""
    b = None if bias is None else stored("bias", bias, bias_fmt or fmt)
    return Linear("layer", "x", "y", stored("weight", weight, fmt), b, out_dim, axis, axis, **fields)


def solved(layer: Linear, pre: Maps = None, post: Maps = None, rank=4) -> NewWeights | Refusal:
    def along(maps, axis):
        return None if maps is None else Affine.per_channel(*(np.asarray(a, float) for a in maps), rank, axis)

    return solve(layer, along(pre, layer.in_axis), along(post, layer.out_axis))


def channels(layer: Linear, index: tuple[int, ...]) -> tuple[int, int]:
    """Output and input channel of an element of the stored weight."""
    group = index[0] * layer.groups // layer.weight.shape[0]
    inner = group * layer.weight.shape[1] + index[1]
    return (index[0], inner) if layer.out_dim == 0 else (inner, index[0])


def exact(a) -> list[Fraction]:
    return [Fraction(float(v)) for v in a]


def values(array: np.ndarray, fmt: FloatFormat) -> np.ndarray:
    return decoded(Tensor("", array.shape, fmt, lambda: array))


def check(layer: Linear, pre: Maps = None, post: Maps = None, rank=4) -> NewWeights:
    """Solve, and prove every number of the answer."""
    new = solved(layer, pre, post, rank)
    assert isinstance(new, NewWeights), new
    ones, zeros = [Fraction(1)] * 4096, [Fraction(0)] * 4096
    s_in, t_in = (ones, zeros) if pre is None else map(exact, pre)
    s_out, t_out = (ones, zeros) if post is None else map(exact, post)
    old = decoded(layer.weight)
    sums = [[Fraction(0), Fraction(0)] for _ in range(layer.out_channels)]  # of W * t_in, and of its magnitudes
    got = old if new.weight is None else values(new.weight, layer.weight.format)
    assert got.shape == layer.weight.shape
    if new.weight is not None:
        assert new.weight.dtype == layer.weight.read().dtype
    for index in itertools.product(*map(range, old.shape)):
        o, i = channels(layer, index)
        w = Fraction(float(old[index]))
        assert got[index] == oracle(w * s_out[o] * s_in[i], layer.weight.format), f"weight{list(index)}"
        sums[o][0] += w * t_in[i]
        sums[o][1] += abs(w * t_in[i])
    if new.bias is None:
        assert layer.bias is None
        assert not any(a for a, _ in sums)
        assert not any(t_out)
        return new
    fmt = new.bias_format
    assert fmt == (layer.weight if layer.bias is None else layer.bias).format
    bias = values(new.bias, fmt)
    before = np.zeros(1) if layer.bias is None else decoded(layer.bias)
    assert bias.shape == np.broadcast_shapes((layer.out_channels,), before.shape)
    alpha, beta = Fraction(layer.alpha), Fraction(layer.beta)
    for index, b in np.ndenumerate(np.broadcast_to(before, bias.shape)):
        o = index[-1]
        b = beta * Fraction(float(b))
        right = s_out[o] * (b + alpha * sums[o][0]) + t_out[o]
        size = abs(s_out[o]) * (abs(b) + abs(alpha) * sums[o][1]) + abs(t_out[o])
        bound = spacing(size if fmt == FLOAT64 else right, fmt)
        assert abs(Fraction(float(bias[index])) - right) <= bound, f"bias{list(index)}"
    return new


# ---------------------------------------------------------------------- random layers


@dataclass(frozen=True)
class Layout:
    """A weight's shape and what its dimensions mean."""

    shape: tuple[int, ...]
    out_dim: int = 0
    groups: int = 1
    fields: dict = field(default_factory=dict)


LAYOUTS = {
    "conv": Layout((5, 4, 2, 3)),
    "square conv": Layout((4, 4, 3)),
    "conv, 2 groups": Layout((6, 2, 3), groups=2),
    "depthwise": Layout((4, 1, 3, 3), groups=4),
    "depthwise with multiplier": Layout((8, 1, 2), groups=4),
    "transposed": Layout((4, 5, 2, 2), out_dim=1),
    "square transposed": Layout((4, 4, 2), out_dim=1),
    "transposed, 2 groups": Layout((4, 3, 2), out_dim=1, groups=2),
    "square transposed, 2 groups": Layout((4, 2, 2), out_dim=1, groups=2),
    "transposed depthwise with multiplier": Layout((3, 2, 2), out_dim=1, groups=3),
    "matmul": Layout((7, 6), out_dim=1),
    "gemm": Layout((6, 7), fields={"alpha": 0.7, "beta": -1.3}),
    "alpha 0": Layout((6, 7), fields={"alpha": 0.0, "beta": 1e-3}),
    "one channel": Layout((1, 1, 1)),
}
layouts = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
sides = pytest.mark.parametrize("sides", ["pre", "post", "both"])


def numbers(rng, shape, fmt: FloatFormat, spread=2) -> np.ndarray:
    """Numbers of the format, of several magnitudes."""
    raw = rng.normal(size=shape) * 2.0 ** rng.integers(-spread, spread + 1, shape)
    return np.vectorize(lambda v: oracle(Fraction(v), fmt), otypes=[float])(raw)


def maps(rng, n: int, fmt: FloatFormat) -> Maps:
    """Scales and shifts with whatever occurs: negative, zero and tiny scales, zero shifts, variances far out.

    In float16 less far, or weights would underflow (and the fold be refused).
    """
    far = 30 if fmt == FLOAT16 else 1e6
    scale = rng.uniform(0.25, 2, n) * rng.choice([-1, 1], n) / np.sqrt(rng.choice([1, 1, far, 1 / far], n))
    scale[rng.integers(n)] *= rng.choice([0, far**-0.5])
    shift = rng.normal(size=n) * rng.choice([0, 1, 10], n)
    return scale, shift


def layer_of(layout: Layout, rng, fmt: FloatFormat, bias: bool) -> Linear:
    weight = numbers(rng, layout.shape, fmt)
    out = layout.shape[layout.out_dim] * (layout.groups if layout.out_dim else 1)
    b = numbers(rng, out, fmt) if bias else None
    return site(weight, b, fmt=fmt, out_dim=layout.out_dim, groups=layout.groups, **layout.fields)


@every
@layouts
@sides
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_random_layers(fmt, layout, sides, bias):
    rng = np.random.default_rng([len(str(layout)), len(sides), bias, fmt.precision])
    layer = layer_of(layout, rng, fmt, bias)
    pre = maps(rng, layer.in_channels, fmt) if sides != "post" else None
    post = maps(rng, layer.out_channels, fmt) if sides != "pre" else None
    check(layer, pre, post)


@pytest.mark.parametrize("shape", [(), (1,), (5,), (1, 5), (3, 1), (3, 5)], ids=str)
@every
def test_bias_shapes(fmt, shape):
    rng = np.random.default_rng(len(shape))
    layer = site(numbers(rng, (5, 4), fmt), numbers(rng, shape, fmt), fmt=fmt, alpha=-0.5, beta=3.0)
    new = check(layer, maps(rng, 4, fmt), maps(rng, 5, fmt), rank=2)
    assert new.bias is not None
    assert new.bias.shape == (5,) if len(shape) < 2 else (shape[0], 5)


@pytest.mark.parametrize(
    ("weight_fmt", "bias_fmt"), [(FLOAT16, FLOAT32), (BFLOAT16, FLOAT32), (FLOAT32, FLOAT16), (BFLOAT16, FLOAT64)],
    ids=lambda f: f.name,
)  # fmt: skip
def test_bias_of_another_format(weight_fmt, bias_fmt):
    rng = np.random.default_rng(0)
    weight, bias = numbers(rng, (5, 4, 3), weight_fmt), numbers(rng, 5, bias_fmt)
    new = check(site(weight, bias, fmt=weight_fmt, bias_fmt=bias_fmt), maps(rng, 4, weight_fmt), maps(rng, 5, bias_fmt))
    assert new.bias_format == bias_fmt


def test_a_map_that_is_the_same_for_all_channels():
    rng = np.random.default_rng(0)
    layer = layer_of(LAYOUTS["conv, 2 groups"], rng, FLOAT32, bias=True)
    check(layer, (np.full(4, 0.3), np.full(4, -0.7)), (np.full(6, 1.1), np.full(6, 0.1)))


# ---------------------------------------------------------------------- near-ties


def odd(rng, bits: int, n: int) -> np.ndarray:
    return (rng.integers(1 << bits - 1, 1 << bits, n) | 1).astype(float)


def near_ties(rng, fmt: FloatFormat, n: int, count: int) -> list[np.ndarray]:
    """Weights of the format and `count` - 1 factors with products as close to a midpoint of the format as they come."""
    weight = odd(rng, fmt.precision, n) * 2.0**-fmt.precision
    others = [rng.uniform(0.5, 2, n) * rng.choice([-1, 1], n) for _ in range(count - 2)]
    middle = odd(rng, fmt.precision + 1, n) * 2.0**-fmt.precision
    last = middle / np.prod([weight, *others], axis=0)
    steps = rng.integers(-2, 3, n)
    for _ in range(2):
        last = np.where(steps > 0, np.nextafter(last, np.inf), np.where(steps < 0, np.nextafter(last, -np.inf), last))
        steps -= np.sign(steps)
    return [weight, *others, last]


def rounded_twice(fmt: FloatFormat, *factors) -> np.ndarray:
    return np.array([oracle(Fraction(float(p)), fmt) for p in np.prod(factors, axis=0)])


def rounded_once(fmt: FloatFormat, *factors) -> np.ndarray:
    return np.array([oracle(np.prod(exact(row)), fmt) for row in zip(*factors, strict=True)])


@narrow
@pytest.mark.parametrize(
    ("kind", "count"), [("behind", 2), ("before", 2), ("behind, transposed", 2), ("both", 3), ("depthwise", 3)],
    ids=lambda v: str(v),
)  # fmt: skip
def test_near_ties(fmt, kind, count):
    """Where two roundings differ from one."""
    n = 400
    weight, *factors = near_ties(np.random.default_rng(count), fmt, n, count)
    assert (rounded_twice(fmt, weight, *factors) != rounded_once(fmt, weight, *factors)).sum() > n / 20
    zero = np.zeros(n)
    match kind:
        case "behind":
            check(site(weight.reshape(n, 1, 1), fmt=fmt), post=(factors[0], zero))
        case "before":
            check(site(weight.reshape(1, n, 1), fmt=fmt), pre=(factors[0], zero))
        case "behind, transposed":
            check(site(weight.reshape(1, n, 1), fmt=fmt, out_dim=1), post=(factors[0], zero))
        case "both":
            # One input channel with one scale: take the ties one at a time.
            for w, s, t in list(zip(weight, *factors, strict=True))[:50]:
                check(site(np.full((1, 1, 1), w), fmt=fmt), (np.array([s]), zero[:1]), (np.array([t]), zero[:1]))
        case "depthwise":
            layer = site(weight.reshape(n, 1, 1), fmt=fmt, groups=n)
            check(layer, (factors[0], zero), (factors[1], zero))


@narrow
def test_near_ties_in_biases(fmt):
    """Sums that a float64 accumulator rounds to a midpoint: here the bound is half an ulp and a hair."""
    rng = np.random.default_rng(0)
    n = 200
    b, s = near_ties(rng, fmt, n, 2)
    t = rng.choice([-1, 1], n) * 2.0**-60
    new = check(site(np.ones((n, 1, 1)), b, fmt=fmt), post=(s, t))
    assert new.bias is not None
    right = np.array([oracle(x * y + z, fmt) for x, y, z in zip(exact(b), exact(s), exact(t), strict=True)])
    np.testing.assert_array_equal(values(new.bias, fmt), right)


# ---------------------------------------------------------------------- cancellation


@every
@pytest.mark.parametrize("closeness", [0.0, 2.0**-40, 2.0**-20, 2.0**-3], ids=str)
def test_the_mean_cancels_the_bias(fmt, closeness):
    """A norm whose mean is the layer's bias, all but exactly."""
    rng = np.random.default_rng(0)
    n = 64
    bias = numbers(rng, n, fmt)
    scale = rng.uniform(1, 300, n)
    shift = -(bias * (1 + closeness * rng.normal(size=n))) * scale
    check(site(numbers(rng, (n, 2, 1), fmt), bias, fmt=fmt), post=(scale, shift))


@every
def test_the_input_shift_cancels_the_bias(fmt):
    """A hundred products that sum up to the bias, almost."""
    rng = np.random.default_rng(0)
    weight = numbers(rng, (4, 50, 2), fmt)
    shift = rng.normal(size=50)
    total = (weight.sum(axis=2) * shift).sum(axis=1)
    bias = np.array([oracle(-Fraction(v), fmt) for v in total])
    check(site(weight, bias, fmt=fmt), (np.ones(50), shift))
    if fmt.precision < 24:
        return
    check(site(weight, bias, fmt=fmt), (np.ones(50), shift), (np.full(4, 1e3), -1e3 * (bias + total)))


def test_an_exact_cancellation_gives_zero():
    new = check(site(np.ones((1, 2, 1)), [3.0]), (np.ones(2), np.array([1.0, -4.0])))
    assert new.bias == [0]


# ---------------------------------------------------------------------- tables


@every
@pytest.mark.parametrize("shift", [False, True], ids=["scale", "scale and shift"])
def test_embedding(fmt, shift):
    """A shift goes into every row; with a scale alone every entry is correctly rounded."""
    rng = np.random.default_rng(0)
    n = 200
    row, scale = near_ties(rng, fmt, n, 2) if fmt != FLOAT64 else (rng.normal(size=n), rng.normal(size=n))
    table = np.stack([row, -row, numbers(rng, n, fmt)])
    t = rng.normal(size=n) if shift else np.zeros(n)
    layer = site(table, fmt=fmt, out_dim=1, axis=-1, rank=3, index_input=True)
    new = solved(layer, post=(scale, t), rank=3)
    assert isinstance(new, NewWeights)
    assert new.bias is None
    assert new.weight is not None
    got = values(new.weight, fmt)
    for (r, c), w in np.ndenumerate(table):
        terms = Fraction(w) * Fraction(scale[c]), Fraction(t[c])
        if shift and fmt == FLOAT64:
            assert abs(Fraction(got[r, c]) - sum(terms)) <= spacing(sum(map(abs, terms)), fmt)
        else:
            assert got[r, c] == oracle(sum(terms), fmt)


# ---------------------------------------------------------------------- what changes and what does not

W = np.array([[[1.0], [2.0]], [[3.0], [4.0]]])
ONE, ZERO = np.ones(2), np.zeros(2)


def test_a_pure_shift_leaves_the_weight():
    assert check(site(W), post=(ONE, np.array([1.0, 0.0]))).weight is None
    assert check(site(W, [1.0, 2.0]), pre=(ONE, np.array([1.0, 0.0]))).weight is None


def test_a_pure_scale_makes_no_bias():
    assert check(site(W), (2 * ONE, ZERO), (3 * ONE, ZERO)).bias is None


def test_shifts_that_cancel_still_make_a_bias():
    new = check(site(W), (ONE, ONE), (ONE, np.array([-3.0, -7.0])))
    np.testing.assert_array_equal(new.bias, [0, 0])


def test_beta_is_multiplied_into_the_bias():
    new = check(site(W[:, :, 0], [1.0, 2.0], alpha=2.0, beta=0.5), post=(ONE, ONE), rank=2)
    np.testing.assert_array_equal(new.bias, [1.5, 2])


def test_the_original_is_not_written_to():
    layer = site(W, [1.0, 2.0])
    check(layer, (2 * ONE, ONE), (3 * ONE, ONE))
    np.testing.assert_array_equal(decoded(layer.weight), W)


INF, NAN = np.inf, np.nan
REFUSALS = {  # weight, bias, post scale, post shift: reason and a word of the sentence; None fits
    "weight overflows": ([1, 2], None, [1, 6e4], 0, Reason.OVERFLOW, "weight does not fit into float16"),
    "the largest weight": ([1, 2], None, [65504, 32752], 0, None, ""),
    "rounds to the largest weight": ([1, 2], None, [65519, 1], 0, None, ""),
    "rounds to infinity": ([1, 2], None, [65520, 1], 0, Reason.OVERFLOW, "weight does not fit into float16"),
    "bias overflows": ([1, 2], [0, 1], [1, 1], [0, 65519.9], Reason.OVERFLOW, "bias of channel 1 does not fit"),
    "new bias overflows": ([1, 2], None, [1, 1], [-1e300, 0], Reason.OVERFLOW, "bias of channel 0 does not fit"),
    "weight underflows": ([1, 2], None, [1e-8, 1], 0, Reason.UNDERFLOW, "weight becomes zero in float16"),
    "down to the least number": ([1, 2], None, [2.0**-24, 1], 0, None, ""),
    "half the least number": ([1, 2], None, [2.0**-25, 1], 0, Reason.UNDERFLOW, "weight becomes zero in float16"),
    "a zero scale": ([1, 2], None, [0, -1], 0, None, ""),
    "a zero weight": ([0, 2], None, [1e-9, 1], 0, None, ""),
    "a subnormal weight may vanish": ([2.0**-24, 2], None, [1e-3, 1], 0, None, ""),
    "an infinite weight": ([1, INF], None, [2, 1], 0, Reason.NOT_FINITE, "weight does not fit"),
    "an infinite weight and a zero scale": ([1, INF], None, [1, 0], 0, Reason.NOT_FINITE, "weight does not fit"),
    "a weight that is not a number": ([1, NAN], None, [2, 1], 0, Reason.NOT_FINITE, "not a number"),
    "an infinite bias": ([1, 2], [INF, 1], [2, 1], 0, Reason.NOT_FINITE, "bias of channel 0"),
    "a bias that is not a number": ([1, 2], [0, NAN], [2, 1], 0, Reason.NOT_FINITE, "bias of channel 1"),
    "an infinite map": ([1, 2], [0, 1], [INF, 1], 0, Reason.OVERFLOW, "weight does not fit"),
    "a map that is not a number": ([1, 2], [0, 1], [1, 1], [NAN, 1], Reason.OVERFLOW, "bias of channel 0"),
}  # fmt: skip


@pytest.mark.parametrize(("weight", "bias", "scale", "shift", "reason", "text"), REFUSALS.values(), ids=REFUSALS)
def test_refusals(weight, bias, scale, shift, reason, text):
    bias = None if bias is None else np.array(bias, float)
    layer = site(np.array(weight, float).reshape(2, 1, 1), bias, fmt=FLOAT16)
    new = solved(layer, post=(scale, np.broadcast_to(shift, 2)))
    if reason is None:
        assert isinstance(new, NewWeights)
        return
    assert isinstance(new, Refusal)
    assert (new.reason, new.at) == (reason, "layer")
    assert text in new.detail


@pytest.mark.parametrize("side", ["pre", "post"])
def test_refusals_name_the_side_that_is_not_zero(side):
    """On either side, a weight that vanishes by a factor that is not zero."""
    layer = site(W, fmt=FLOAT16)
    new = solved(layer, **{side: (np.array([1e-9, 1.0]), ZERO)})
    assert isinstance(new, Refusal)
    assert new.reason == Reason.UNDERFLOW
    other = {"pre": "post", "post": "pre"}[side]
    assert isinstance(solved(layer, **{side: (np.array([1e-9, 1.0]), ZERO), other: (ZERO, ZERO)}), NewWeights)


def test_shift_through_an_infinite_weight():
    new = solved(site(np.array([[[INF], [1.0]]])), pre=(ONE, ONE))
    assert isinstance(new, Refusal)
    assert new.reason == Reason.NOT_FINITE


@pytest.mark.parametrize(
    ("table", "scale", "reason"), [([1, 2], 1e5, Reason.OVERFLOW), ([1, NAN], 2, Reason.NOT_FINITE)], ids=["1e5", "nan"]
)
def test_refused_tables(table, scale, reason):
    layer = site(np.array([table], float), fmt=FLOAT16, out_dim=1, axis=-1, index_input=True)
    new = solved(layer, post=(np.full(2, scale), ZERO), rank=3)
    assert isinstance(new, Refusal)
    assert (new.reason, new.at) == (reason, "layer")
