"""Each record in both directions: what passes, what does not and why, and that no number changes."""

from __future__ import annotations

import numpy as np
import pytest
from programs import Case, Value, concat, difference, product, total

from bnfold.ops import Kind
from bnfold.report import Reason, Refusal
from bnfold.rounding import FLOAT16, FLOAT32

LAYER = {"SetLinear": 1, "Bypass": 1}
LAYERS = {"SetLinear": 2, "Bypass": 1}
SCALE = {"SetScale": 1, "Bypass": 1}
BACK, AHEAD = "bn backward into ", "bn forward into "


def table(*cases: Case):
    return pytest.mark.parametrize("case", cases, ids=[c.id for c in cases])


def kept(backward: str, forward: str) -> dict[str, str]:
    return {"bn": f"{backward}, {forward}"}


def ends(why: str) -> dict[str, str]:
    """Refused backward; the norm's result is the model's output."""
    return kept(why, "model-output at bn.out")


def starts(why: str) -> dict[str, str]:
    """Refused forward; the norm reads the model's input."""
    return kept("model-input at x", why)


# ---------------------------------------------------------------------- Linear


def conv_cases(what, **options) -> list[Case]:
    """The layer with a norm behind it, and with a norm before it: shifted, then not."""
    name = "deconv" if options.get("transposed") else "conv"
    padded = "transposed" in options or "padded" in options

    def before(x):
        return x.norm().conv(**options)

    return [
        Case(f"{what}, norm behind", lambda x: x.conv(**options).norm(), BACK + name, {}, LAYER),
        Case(f"{what}, scale before", lambda x: x.norm(shift=False).conv(**options), AHEAD + name, {}, LAYER),
        Case(f"{what}, shift before", before, kept=starts(f"padded-shift at {name}"))
        if padded else Case(f"{what}, shift before", before, AHEAD + name, {}, LAYER),
    ]  # fmt: skip


@table(
    *conv_cases("conv", out=6),
    *conv_cases("equal channels", out=4),
    *conv_cases("one output channel", out=1),
    *conv_cases("taps", out=6, taps=3),
    *conv_cases("as many taps as positions", out=3, taps=5),
    *conv_cases("no bias", out=6, taps=2, bias=False),
    *conv_cases("two groups", out=6, groups=2, taps=2),
    *conv_cases("two groups, equal channels", out=4, groups=2),
    *conv_cases("depthwise", out=4, groups=4, taps=3),
    *conv_cases("depthwise with multiplier", out=8, groups=4),
    *conv_cases("padded", out=6, taps=3, padded=True),
    *conv_cases("padded, one tap", out=4, padded=True),
    *conv_cases("padded, two groups, no bias", out=2, taps=3, groups=2, padded=True, bias=False),
    *conv_cases("transposed", out=6, taps=3, transposed=True),
    *conv_cases("transposed, equal channels", out=4, taps=2, transposed=True),
    *conv_cases("transposed, two groups", out=6, groups=2, taps=2, transposed=True),
    *conv_cases("transposed, two groups, equal channels", out=4, groups=2, transposed=True),
    *conv_cases("transposed, depthwise with multiplier", out=8, groups=4, taps=2, transposed=True, bias=False),
    *conv_cases("float32 layer", out=6, taps=2, fmt=FLOAT32),
)
def test_conv(case):
    case.check()


def gemm_cases(what, shape=(3, 4), **options) -> list[Case]:
    axis = 0 if options.get("transposed_input") else 1
    return [
        Case(f"{what}, norm behind", lambda x: x.gemm(**options).norm(), BACK + "gemm", {}, LAYER, shape),
        Case(f"{what}, norm before", lambda x: x.norm(axis=axis).gemm(**options), AHEAD + "gemm", {}, LAYER, shape),
    ]


COLUMN, ROW = np.array([[1.0], [-2.0], [0.0]]), np.arange(5.0).reshape(1, 5)


@table(
    *gemm_cases("gemm", out=5),
    *gemm_cases("weight not transposed", out=5, trans=False),
    *gemm_cases("square", out=4, trans=False),
    *gemm_cases("input transposed", out=5, transposed_input=True),
    *gemm_cases("input transposed, square", shape=(4, 4), out=4, transposed_input=True),
    *gemm_cases("alpha and beta", out=5, alpha=0.75, beta=-3.0),
    *gemm_cases("alpha, no bias", out=5, alpha=-0.3, bias=False),
    *gemm_cases("beta 0", out=5, beta=0.0),
    *gemm_cases("scalar bias", out=5, bias=2.5, beta=0.5),
    *gemm_cases("column bias", out=5, bias=COLUMN, beta=0.5),
    *gemm_cases("row bias", out=5, bias=ROW),
    *gemm_cases("matrix bias", out=5, bias=COLUMN * ROW + 1, beta=2.0),
)
def test_gemm(case):
    case.check()


def frozen(x: Value) -> Value:
    return x.conv(4, frozen=Refusal(Reason.SHARED_WEIGHT, "conv", "its weight is tied"))


@table(
    Case("linear over the last dimension", lambda x: x.linear(6).norm(axis=2), BACK + "linear", {}, LAYER),
    Case("linear, norm over dimension 1", lambda x: x.linear(6).norm(), kept=ends("not-per-channel at linear")),
    Case("linear, the same with equal sizes", lambda x: x.linear(4).norm(), (), ends("not-per-channel at linear"),
         shape=(2, 4, 4)),
    Case("before linear, last dimension", lambda x: x.norm(axis=-1).linear(6), AHEAD + "linear", {}, LAYER),
    Case("before linear, dimension 1", lambda x: x.norm().linear(6), kept=starts("not-per-channel at linear")),
    Case("before linear, dimension 1, equal sizes", lambda x: x.norm().linear(4), (),
         starts("not-per-channel at linear"), shape=(2, 4, 4)),
    Case("before conv, along positions", lambda x: x.norm(axis=2).conv(3), kept=starts("not-per-channel at conv")),
    Case("matmul takes a bias for a norm", lambda x: x.matmul(6).norm(axis=2), BACK + "matmul", {}, LAYER),
    Case("before matmul", lambda x: x.norm(axis=2).matmul(6), AHEAD + "matmul", {}, LAYER),
    Case("a scale needs no bias", lambda x: _(x.matmul(6), "mul", 2), "mul backward into matmul", {}, LAYER),
    Case("a shift needs one", lambda x: _(x.matmul(6), "plus", 2)),
    Case("a shift before matmul needs one", lambda x: _(x, "plus", 2).matmul(6)),
    Case("a shift into a free bias", lambda x: _(x.conv(3, bias=False), "plus", 1), "plus backward into conv", {},
         LAYER),
    Case("left matmul", lambda x: x.left_matmul(6).norm(), BACK + "matmul", {}, LAYER),
    Case("left matmul, square", lambda x: x.left_matmul(4).norm(), BACK + "matmul", {}, LAYER, (2, 4, 4)),
    Case("before left matmul", lambda x: x.norm(axis=1).left_matmul(6), AHEAD + "matmul", {}, LAYER),
    Case("left matmul, last dimension", lambda x: x.left_matmul(6).norm(axis=2), (), ends("not-per-channel at matmul")),
    Case("embedding", lambda x: x.embedding(6).norm(axis=2), BACK + "embedding", {}, LAYER, (2, 3)),
    Case("embedding, norm over tokens", lambda x: x.embedding(3).norm(), (), ends("not-per-channel at embedding"),
         shape=(2, 3)),
    Case("before embedding", lambda x: x.norm(shift=False).embedding(6), (), starts("unsupported-op at embedding"),
         shape=(2, 3)),
    Case("frozen, norm behind", lambda x: frozen(x).norm(), kept=ends("shared-weight at conv")),
    Case("frozen, norm before", lambda x: frozen(x.norm()), kept=starts("shared-weight at conv")),
)  # fmt: skip
def test_other_linear_layers(case):
    case.check()


def _(x: Value, op: str, axis: int) -> Value:
    """`mul` or `plus` with a random constant along one axis."""
    return getattr(x, op)(x.per_channel(axis))


# ---------------------------------------------------------------------- Scale

SKIP = {"skip": ["bn"]}
STUCK = {"bn": "unsupported-op at gelu, model-output at bn.out"}
EXCLUDED = {"bn": "excluded at bn"}


@table(
    Case("norm into the next norm", lambda x: x.gelu().norm().norm(), AHEAD + "bn2",
         {"bn2": "unsupported-op at gelu, model-output at bn2.out"}, SCALE),
    Case("norm into the norm before", lambda x: x.gelu().norm().norm(), "bn2 backward into bn", EXCLUDED, SCALE,
         options=SKIP),
    Case("norm into an arithmetic norm", lambda x: x.gelu().norm(kind=Kind.ARITHMETIC_NORM).norm(),
         "bn2 backward into bn", EXCLUDED, SCALE, options=SKIP),
    Case("norms over different dimensions", lambda x: x.gelu().norm().norm(axis=2),
         kept={"bn": "unsupported-op at gelu, not-per-channel at bn2",
               "bn2": "not-per-channel at bn, model-output at bn2.out"}),
    Case("an arithmetic norm takes another dimension",
         lambda x: x.gelu().norm().norm(axis=2, kind=Kind.ARITHMETIC_NORM),
         AHEAD + "bn2", {"bn2": "unsupported-op at gelu, model-output at bn2.out"}, SCALE),
    Case("mul into norm", lambda x: _(x.gelu().norm(), "mul", 1), "mul backward into bn", EXCLUDED, SCALE,
         options=SKIP),
    Case("plus into norm", lambda x: _(x.gelu().norm(), "plus", 1), "plus backward into bn", EXCLUDED, SCALE,
         options=SKIP),
    Case("norm into mul: one operation less", lambda x: _(x.gelu().norm(), "mul", 1), AHEAD + "mul", {}, SCALE),
    Case("norm into plus: one operation less", lambda x: _(x.gelu().norm(), "plus", 1), AHEAD + "plus", {}, SCALE),
    Case("mul before norm", lambda x: _(x.gelu(), "mul", 1).norm(), "mul forward into bn", STUCK, SCALE),
    Case("plus before norm", lambda x: _(x.gelu(), "plus", 1).norm(), "plus forward into bn", STUCK, SCALE),
    Case("mul along another dimension", lambda x: _(x.gelu().norm(), "mul", 2), kept=EXCLUDED, options=SKIP),
    Case("mul and mul", lambda x: _(_(x.gelu(), "mul", 1), "mul", 2), "mul forward into mul2", {}, SCALE),
    Case("plus and plus", lambda x: _(_(x.gelu(), "plus", 1), "plus", 1), "plus forward into plus2", {}, SCALE),
    Case("mul and plus are two operations", lambda x: _(_(x.gelu(), "mul", 1), "plus", 1)),
    Case("plus and mul are two operations", lambda x: _(_(x.gelu(), "plus", 1), "mul", 1)),
    Case("mul, mul and plus", lambda x: _(_(_(x.gelu(), "mul", 1), "mul", 1), "plus", 1), "mul forward into mul2", {},
         SCALE),
)  # fmt: skip
def test_scale(case):
    case.check()


# ---------------------------------------------------------------------- Carry

SHIFT, SIGN, PASSES = "nonzero-shift", "negative-scale", ""
CARRY = {  # sign of the scale, shift: why it stays
    "identity": {"any shift": PASSES, "any": PASSES, "nonnegative": PASSES, "positive": PASSES},
    "relu": {"any shift": SHIFT, "positive shift": SHIFT, "any": SIGN, "nonnegative": SIGN, "positive": PASSES},
    "leaky": {"any shift": SHIFT, "positive shift": SHIFT, "any": SIGN, "nonnegative": SIGN, "positive": PASSES},
    "maxpool": {"any shift": SIGN, "any": SIGN, "nonnegative shift": PASSES, "positive": PASSES},
    "avgpool": {"any shift": PASSES, "nonnegative": PASSES},
    "countedpool": {"any shift": SHIFT, "positive shift": SHIFT, "any": PASSES, "nonnegative": PASSES},
    "pad": {"any shift": SHIFT, "positive shift": SHIFT, "any": PASSES},
    "mean": {"any shift": PASSES, "any": PASSES},
}


def carry_cases():
    for kind, row in CARRY.items():
        for what, why in row.items():
            sign, shift = what.split()[0], "shift" in what
            yield Case(
                f"{kind}, {what}, backward", lambda x, k=kind, s=sign, t=shift: x.conv(4).carry(k).norm(s, t),
                () if why else f"{BACK}conv through {kind}", ends(f"{why} at {kind}") if why else {},
                {} if why else LAYER,
            )  # fmt: skip
            yield Case(
                f"{kind}, {what}, forward", lambda x, k=kind, s=sign, t=shift: x.norm(s, t).carry(k).conv(3),
                () if why else f"{AHEAD}conv through {kind}", starts(f"{why} at {kind}") if why else {},
                {} if why else LAYER,
            )  # fmt: skip


@table(
    *carry_cases(),
    Case("a chain, backward",
         lambda x: x.conv(6, 2).carry("maxpool").carry("relu").carry("pad").norm("positive", False),
         BACK + "conv through pad, relu, maxpool", {}, LAYER),
    Case("a chain, forward", lambda x: x.norm("positive", False).carry("leaky").carry("pad").conv(6, 2, padded=True),
         AHEAD + "conv through leaky, pad", {}, LAYER),
    Case("along a mixed dimension, backward", lambda x: x.linear(6).carry("avgpool").norm(axis=2),
         kept=ends("not-per-channel at avgpool")),
    Case("along a mixed dimension, forward", lambda x: x.norm(axis=2).carry("mean").linear(6),
         kept=starts("not-per-channel at mean")),
)  # fmt: skip
def test_carry(case):
    case.check()


# ---------------------------------------------------------------------- Permute and Reshape


def shuffled(x: Value, groups: int) -> Value:
    """Channel shuffle."""
    n, c, length = x.shape
    return x.reshape(n, groups, c // groups, length).permute(0, 2, 1, 3).reshape(n, c, length)


@table(
    Case("swapped", lambda x: x.conv(6).permute(0, 2, 1).norm(axis=2), BACK + "conv through permute", {}, LAYER),
    Case("rotated", lambda x: x.conv(6).permute(1, 2, 0).norm(axis=0), BACK + "conv through permute", {}, LAYER),
    Case("rotated the other way", lambda x: x.conv(6).permute(2, 0, 1).norm(axis=2), BACK + "conv through permute", {},
         LAYER),
    Case("rotated, equal sizes", lambda x: x.conv(4).permute(1, 2, 0).norm(axis=0), BACK + "conv through permute", {},
         LAYER, (4, 4, 4)),
    Case("off the channels", lambda x: x.conv(4).permute(1, 2, 0).norm(axis=1), (), ends("not-per-channel at conv"),
         shape=(4, 4, 4)),
    Case("forward, swapped", lambda x: x.norm().permute(0, 2, 1).linear(3), AHEAD + "linear through permute", {},
         LAYER),
    Case("forward, rotated", lambda x: x.norm().permute(2, 0, 1).linear(3), AHEAD + "linear through permute", {},
         LAYER),
    Case("forward, rotated the other way", lambda x: x.norm(axis=0).permute(1, 2, 0).linear(3),
         AHEAD + "linear through permute", {}, LAYER),
    Case("forward, off the channels", lambda x: x.norm(axis=2).permute(2, 0, 1).linear(3), (),
         starts("not-per-channel at linear"), shape=(4, 4, 4)),
)  # fmt: skip
def test_permute(case):
    case.check()


@table(
    Case("squeeze behind a mean", lambda x: x.conv(6).carry("mean").reshape(2, 6).norm(),
         BACK + "conv through reshape, mean", {}, LAYER),
    Case("split channels, norm over the inner ones", lambda x: x.conv(6).reshape(2, 2, 3, 5).norm(axis=2),
         BACK + "conv through reshape", {}, LAYER),
    Case("split channels, norm over the outer ones", lambda x: x.conv(6).reshape(2, 2, 3, 5).norm(axis=1),
         BACK + "conv through reshape", {}, LAYER),
    Case("merged channels", lambda x: x.linear(6).reshape(2, 4, 2, 3).permute(0, 2, 3, 1).reshape(2, 6, 4).norm(),
         BACK + "linear through reshape2, permute, reshape", {}, LAYER),
    Case("flattened with positions", lambda x: x.conv(3).reshape(2, 15).norm(), kept=ends("not-per-channel at conv")),
    Case("channel shuffle", lambda x: shuffled(x.conv(6), 2).norm(), BACK + "conv through reshape2, permute, reshape",
         {}, LAYER),
    Case("unknown channels", lambda x: x.conv(6).declared(2, None, 5).reshape(2, 2, 3, 5).norm(),
         kept=ends("unknown-shape at reshape")),
    Case("unknown positions",
         lambda x: x.conv(6).declared(2, 6, None).reshape(2, 2, 3, 5).declared(2, 2, 3, None).norm(),
         BACK + "conv through reshape", {}, LAYER),
    Case("symbolic batch", lambda x: x.conv(6).declared("N", 6, 5).reshape(2, 3, 2, 5).declared("N", 3, 2, 5).norm(),
         BACK + "conv through reshape", {}, LAYER),
    Case("unknown rank before", lambda x: x.conv(6).shapeless().reshape(2, 2, 3, 5).norm(),
         kept=ends("unknown-shape at reshape")),
    Case("unknown rank behind", lambda x: x.conv(6).reshape(2, 2, 3, 5).shapeless().norm(),
         kept=ends("unknown-shape at reshape")),
    Case("forward, flatten", lambda x: x.norm().reshape(2, 20).gemm(3), AHEAD + "gemm through reshape", {}, LAYER),
    Case("forward, flatten, unknown positions", lambda x: x.declared("N", 4, None).norm().declared("N", 4, None)
         .reshape(2, 20).declared("N", None).gemm(3), kept=starts("unknown-shape at reshape")),
    Case("forward, split", lambda x: x.norm().permute(0, 2, 1).reshape(2, 5, 2, 2).permute(0, 2, 3, 1).reshape(2, 4, 5)
         .conv(3), AHEAD + "conv through permute, reshape, permute2, reshape2", {}, LAYER),
    Case("forward, channel shuffle", lambda x: shuffled(x.norm(), 2).conv(4, groups=2, taps=2),
         AHEAD + "conv through reshape, permute, reshape2", {}, LAYER, (2, 6, 5)),
)  # fmt: skip
def test_reshape(case):
    case.check()


# ---------------------------------------------------------------------- Concat and Take


def beside(x: Value, position: int, axis: int = 1) -> Value:
    """The norm of `x` as one of three parts; the others are opaque."""
    parts = [x.gelu() for _ in range(3)]
    parts[position] = x.norm()
    return concat(axis, *parts)


@table(
    Case("two layers", lambda x: concat(1, x.conv(3), x.conv(3)).norm(), BACK + "conv, conv2 through concat", {},
         LAYERS),
    Case("unequal parts", lambda x: concat(1, x.conv(1), x.conv(4), x.conv(2)).norm(),
         BACK + "conv, conv2, conv3 through concat", {}, {"SetLinear": 3, "Bypass": 1}),
    Case("axis from the end", lambda x: concat(-2, x.conv(2), x.conv(3)).norm(), BACK + "conv, conv2 through concat",
         {}, LAYERS),
    Case("along positions", lambda x: concat(2, x.conv(3), x.conv(3, 2)).norm(), BACK + "conv, conv2 through concat",
         {}, LAYERS),
    Case("along positions, sizes unknown", lambda x: concat(2, x.conv(3).declared(2, 3, None), x.conv(3)).norm(),
         BACK + "conv, conv2 through concat", {}, LAYERS),
    Case("one part refuses", lambda x: concat(1, x.conv(3), x.gelu()).norm(), kept=ends("unsupported-op at gelu")),
    Case("one part is the input", lambda x: concat(1, x, x.conv(3)).norm(), kept=ends("model-input at x")),
    Case("one value twice", lambda x: _twice(x.conv(3)).norm(), kept=ends("multiple-consumers at conv")),
    Case("one part with another reader", lambda x: _shared(x.conv(3), x.conv(2)),
         kept={"bn": "multiple-consumers at conv2, model-output at bn.out"}),
    Case("each part through its own way", lambda x: concat(1, x.conv(3).carry("avgpool"), x.conv(4, 2)).norm(),
         BACK + "conv, conv2 through concat, avgpool", {}, LAYERS),
    Case("part of unknown size", lambda x: concat(1, x.conv(3).declared(2, None, 5), x.conv(3)).norm(),
         kept=ends("unknown-shape at concat")),
    Case("part of unknown rank", lambda x: concat(1, x.conv(3).shapeless(), x.conv(3)).norm(),
         kept=ends("unknown-shape at concat")),
    *(Case(f"forward, position {k}", lambda x, k=k: beside(x, k).conv(5), AHEAD + "conv through concat", {}, LAYER)
      for k in range(3)),
    *(Case(f"forward, flattened, position {k}", lambda x, k=k: beside(x, k, -2).reshape(2, 60).gemm(3),
           AHEAD + "gemm through concat, reshape", {}, LAYER) for k in range(3)),
    Case("forward, both parts", lambda x: concat(1, x.norm(), x.norm()).conv(3),
         ("bn forward into conv through concat", "bn2 forward into conv through concat"), {},
         {"SetLinear": 1, "Bypass": 2}),
    Case("forward, along positions", lambda x: beside(x, 1, 2).conv(3), kept=starts("not-per-channel at conv")),
    Case("forward, other part unknown", lambda x: concat(1, x.norm(), x.gelu().declared(2, None, 5)).conv(3),
         kept=starts("unknown-shape at concat")),
    Case("forward, other part of unknown rank", lambda x: concat(1, x.norm(), x.gelu().shapeless()).conv(3),
         kept=starts("unknown-shape at concat")),
    Case("forward into a norm", lambda x: concat(1, x.norm(), x.gelu()).norm(), AHEAD + "bn2 through concat",
         {"bn2": "model-input at x, model-output at bn2.out"}, SCALE),
)  # fmt: skip
def test_concat(case):
    case.check()


def _twice(x: Value) -> Value:
    return concat(1, x, x)


def _shared(a: Value, b: Value) -> list[Value]:
    return [concat(1, a, b).norm(), b.gelu()]


def taken(x: Value, *indices, axis=1) -> list[Value]:
    """A norm on the first part, the others as they are."""
    first, *rest = x.take(axis, *indices)
    return [first.norm(), *rest]


@table(
    Case("first of two", lambda x: taken(x.conv(5), [0, 1], [2, 3, 4]), BACK + "conv through take", {}, LAYER),
    Case("last of two", lambda x: taken(x.conv(5), [2, 3, 4], [0, 1]), BACK + "conv through take", {}, LAYER),
    Case("strided", lambda x: taken(x.conv(6), [1, 3, 5], [0, 2]), BACK + "conv through take", {}, LAYER),
    Case("permuted", lambda x: taken(x.conv(4), [2, 0, 3, 1]), BACK + "conv through take", {}, LAYER),
    Case("axis from the end", lambda x: taken(x.conv(5), [4, 2], axis=-2), BACK + "conv through take", {}, LAYER),
    Case("a norm on each", lambda x: [v.norm() for v in x.conv(5).split(1, 2, 3)],
         (BACK + "conv through take", "bn2 backward into conv through take"), {}, {"SetLinear": 1, "Bypass": 2}),
    Case("overlapping", lambda x: taken(x.conv(5), [0, 1, 2], [2, 3]), kept=ends("multiple-consumers at take")),
    Case("repeated", lambda x: taken(x.conv(5), [0, 1, 0]), kept=ends("repeated-channel at take")),
    Case("positions", lambda x: taken(x.conv(3), [0, 1]), BACK + "conv through take", {}, LAYER),
    Case("along positions", lambda x: taken(x.conv(3), [0, 1], axis=2), BACK + "conv through take", {}, LAYER),
    Case("all positions", lambda x: taken(x.conv(3), [4, 3, 2, 1, 0], axis=2), BACK + "conv through take", {}, LAYER),
    Case("of unknown size", lambda x: taken(x.conv(3).declared(2, None, 5), [0, 1]),
         kept=ends("unknown-shape at take")),
    Case("of unknown rank", lambda x: taken(x.conv(3).shapeless(), [0, 1]), kept=ends("unknown-shape at take")),
    Case("split and joined", lambda x: concat(1, *x.conv(5).split(1, 2, 3)[::-1]).norm(),
         BACK + "conv through concat, take", {}, LAYER),
    Case("forward, two parts", lambda x: [v.conv(3) for v in x.norm().split(1, 1, 3)],
         AHEAD + "conv, conv2 through take", {}, LAYERS),
    Case("forward, repeated and left out", lambda x: x.norm().take(1, [3, 0, 3])[0].conv(2),
         AHEAD + "conv through take", {}, LAYER),
    Case("forward, along positions", lambda x: x.norm().take(2, [0, 2])[0].conv(2), AHEAD + "conv through take", {},
         LAYER),
    Case("forward, of unknown size", lambda x: x.norm().declared(2, None, 5).take(1, [0, 2])[0].conv(2),
         kept=starts("unknown-shape at take")),
    Case("forward, along positions of unknown number",
         lambda x: x.norm().declared(2, 4, None).take(2, [0, 2])[0].conv(2), AHEAD + "conv through take", {}, LAYER),
    Case("forward, axis from the end", lambda x: x.norm().take(-2, [0, 2])[0].conv(2), AHEAD + "conv through take", {},
         LAYER),
    Case("forward, one part refuses", lambda x: _split_ways(x.norm()), kept=starts("unsupported-op at gelu")),
    Case("forward, a part is an output", lambda x: _split_out(x.norm()), kept=starts("model-output at take.out1")),
    Case("forward, a part is not read", lambda x: x.norm().split(1, 3, 1)[0].conv(2), AHEAD + "conv through take", {},
         LAYER),
    Case("forward, no part is read", lambda x: [x.norm().split(1, 3, 1)[0].carry("mean"), x.gelu()][1],
         kept=starts("not-executed at bn.out")),
    Case("forward, split and joined", lambda x: concat(1, *x.norm().split(1, 1, 3)[::-1]).conv(2),
         AHEAD + "conv through take, concat", {}, LAYER),
)  # fmt: skip
def test_take(case):
    case.check()


def _split_ways(x: Value) -> list[Value]:
    a, b = x.split(1, 1, 3)
    return [a.conv(3), b.gelu()]


def _split_out(x: Value) -> list[Value]:
    a, b = x.split(1, 1, 3)
    return [a.conv(3), b]


# ---------------------------------------------------------------------- Sum and Product


def late(x: Value) -> Value:
    """A layer whose output lets no shift in."""
    return x.conv(4).relu()


@table(
    Case("two layers", lambda x: total(x.conv(3), x.conv(3)).norm(), BACK + "conv, conv2 through sum", {}, LAYERS),
    Case("three layers", lambda x: total(x.conv(3), x.conv(3), x.conv(3)).norm(),
         BACK + "conv, conv2, conv3 through sum", {}, {"SetLinear": 3, "Bypass": 1}),
    Case("no shift", lambda x: total(late(x), late(x)).norm("positive", False),
         BACK + "conv, conv2 through sum, relu, relu2", {}, LAYERS),
    Case("the first takes the shift", lambda x: total(x.conv(4), late(x)).norm("positive"),
         BACK + "conv, conv2 through sum, relu", {}, LAYERS),
    Case("the last takes the shift", lambda x: total(late(x), x.conv(4)).norm("positive"),
         BACK + "conv, conv2 through sum, relu", {}, LAYERS),
    Case("nobody takes the shift", lambda x: total(late(x), late(x)).norm("positive"),
         kept=ends("nonzero-shift at relu")),
    Case("one refuses the scale", lambda x: total(x.conv(4), x.gelu()).norm(), kept=ends("unsupported-op at gelu")),
    Case("one value twice", lambda x: _doubled(x.conv(4)).norm(), kept=ends("multiple-consumers at conv")),
    Case("broadcast along positions", lambda x: total(x.conv(3), x.conv(3).carry("mean")).norm(),
         BACK + "conv, conv2 through sum, mean", {}, LAYERS),
    Case("broadcast along channels", lambda x: total(x.conv(3), x.conv(1)).norm(),
         kept=ends("unequal-branches at sum")),
    Case("channels of one summand unknown", lambda x: total(x.conv(3), x.conv(1).declared(2, None, 5)).norm(),
         kept=ends("unequal-branches at sum")),
    Case("channels of both unknown", lambda x: total(*(x.conv(n).declared(2, None, 5) for n in (3, 1))).norm(),
         kept=ends("unequal-branches at sum")),
    Case("unknown rank", lambda x: total(x.conv(3), x.conv(3).shapeless()).norm(),
         kept=ends("unequal-branches at sum")),
    Case("a difference", lambda x: difference(x.conv(4), x.conv(4)).norm(), BACK + "conv, conv2 through difference", {},
         LAYERS),
    Case("what is taken away takes the shift", lambda x: difference(late(x), x.conv(4)).norm("positive"),
         BACK + "conv, conv2 through difference, relu", {}, LAYERS),
    Case("a shift alone into what is taken away",
         lambda x: difference(x.gelu(), x.conv(4)).norm(maps=(1, [1, 0, -2, 3])),
         BACK + "conv through difference", {}, LAYER),
    Case("forward, shift of what is taken away",
         lambda x: difference(x.gelu(), x.norm(maps=(1, [1, 0, -2, 3]))).conv(3),
         AHEAD + "conv through difference", {}, LAYER),
    Case("nested", lambda x: total(x.conv(4), total(late(x), x.conv(4))).norm("positive"),
         BACK + "conv, conv2, conv3 through sum2, sum, relu", {}, {"SetLinear": 3, "Bypass": 1}),
    Case("forward, shift", lambda x: total(x.norm(maps=(1, [1, 0, -2, 3])), x.gelu()).conv(3),
         AHEAD + "conv through sum", {}, LAYER),
    Case("forward, shift, second operand", lambda x: total(x.gelu(), x.norm(maps=(1, [1, 0, -2, 3]))).conv(3),
         AHEAD + "conv through sum", {}, LAYER),
    Case("forward, scale", lambda x: total(x.norm(shift=False), x.gelu()).conv(3),
         kept=starts("unequal-branches at sum")),
    Case("forward, one value twice", lambda x: _doubled(x.norm(maps=(1, 2))).conv(3),
         kept=starts("multiple-consumers at sum")),
    Case("forward, lower rank", lambda x: total(x.norm(axis=0, maps=(1, [1, 0, -2, 3])), _higher(x)).conv(3),
         AHEAD + "conv through sum", {}, LAYER, (4, 5)),
    Case("forward, lower rank, equal sizes",
         lambda x: total(x.norm(axis=1, maps=(1, [1, 0, -2, 3])), _higher(x)).conv(3),
         kept=starts("not-per-channel at conv"), shape=(4, 4)),
    Case("forward, unknown rank", lambda x: total(x.norm(maps=(1, 2)), x.gelu()).shapeless().conv(3),
         kept=starts("unknown-shape at sum")),
)  # fmt: skip
def test_sum(case):
    case.check()


def _doubled(x: Value) -> Value:
    return total(x, x)


def _higher(x: Value) -> Value:
    return x.net.input(4, *x.shape, name="y").gelu()


@table(
    Case("first factor", lambda x: product(x.conv(4), x.gelu()).norm(shift=False), BACK + "conv through product", {},
         LAYER),
    Case("second factor", lambda x: product(x.gelu(), x.conv(4)).norm(shift=False), BACK + "conv through product", {},
         LAYER),
    Case("one of two layers", lambda x: product(x.conv(4), x.conv(4)).norm(shift=False), BACK + "conv through product",
         {}, LAYER),
    Case("shift", lambda x: product(x.conv(4), x.gelu()).norm(), kept=ends("nonzero-shift at product")),
    Case("both refuse", lambda x: product(x.gelu(), x).norm(shift=False), kept=ends("unsupported-op at gelu")),
    Case("one value twice", lambda x: _squared(x.conv(4)).norm(shift=False), kept=ends("multiple-consumers at conv")),
    Case("a gate over positions takes it", lambda x: product(x.gelu(), x.carry("mean").conv(4)).norm(shift=False),
         BACK + "conv through product", {}, LAYER),
    Case("a gate over channels does not", lambda x: product(x.gelu(), x.conv(1)).norm(shift=False),
         kept=kept("unsupported-op at gelu", "model-output at bn.out")),
    Case("no factor has the channels",
         lambda x: product(x.conv(1), x.carry("mean").gelu().shapeless()).norm(shift=False),
         kept=ends("unequal-branches at product")),
    Case("channels of a factor unknown", lambda x: product(x.conv(1).declared(2, None, 5), x.gelu().shapeless())
         .norm(shift=False), kept=ends("unequal-branches at product")),
    Case("forward", lambda x: product(x.norm(shift=False), x.gelu()).conv(3), AHEAD + "conv through product", {},
         LAYER),
    Case("forward, second operand", lambda x: product(x.gelu(), x.norm(shift=False)).conv(3, padded=True),
         AHEAD + "conv through product", {}, LAYER),
    Case("forward, shift", lambda x: product(x.norm(), x.gelu()).conv(3), kept=starts("nonzero-shift at product")),
    Case("forward, a gate", lambda x: product(x.gelu(), x.carry("mean").gelu().norm(shift=False)).conv(3),
         AHEAD + "conv through product", {}, LAYER),
    Case("forward, one value twice", lambda x: _squared(x.norm(shift=False)).conv(3),
         kept=starts("multiple-consumers at product")),
    Case("forward, both factors by different ways", lambda x: _both_ways(x.norm("positive", False)).conv(3),
         AHEAD + "conv through relu, product", {}, LAYER),
    Case("forward, lower rank, equal sizes", lambda x: product(x.norm(axis=1, shift=False), _higher(x)).conv(3),
         kept=starts("not-per-channel at conv"), shape=(4, 4)),
    Case("forward, lower rank", lambda x: product(x.norm(axis=0, shift=False), _higher(x)).conv(3),
         AHEAD + "conv through product", {}, LAYER, (4, 5)),
    Case("forward, unknown rank", lambda x: product(x.norm(shift=False), x.gelu()).shapeless().conv(3),
         kept=starts("unknown-shape at product")),
)  # fmt: skip
def test_product(case):
    case.check()


def _squared(x: Value) -> Value:
    return product(x, x)


def _both_ways(x: Value) -> Value:
    return product(x, x.relu())


# ---------------------------------------------------------------------- Opaque

WHY = Refusal(Reason.DYNAMIC_PARAMETER, "gelu", "its weight is computed")
BATCH = Refusal(Reason.BATCH_STATISTICS, "gelu", "it normalises by the batch")


@table(
    Case("backward", lambda x: x.conv(4).gelu().norm(), kept=ends("unsupported-op at gelu")),
    Case("forward", lambda x: x.norm().gelu().conv(4), kept=starts("unsupported-op at gelu")),
    Case("with a better reason", lambda x: x.opaque(why=WHY)[0].norm(), kept=ends("dynamic-parameter at gelu")),
    Case("forward, with a better reason", lambda x: x.norm().opaque(why=WHY)[0],
         kept=starts("dynamic-parameter at gelu")),
    Case("a norm that stays", lambda x: x.conv(4).opaque(why=BATCH, norm=True)[0],
         kept={"gelu": "batch-statistics at gelu"}),
    Case("behind a norm that stays", lambda x: x.conv(4).opaque(why=BATCH, norm=True)[0].norm(),
         kept={"gelu": "batch-statistics at gelu"} | ends("unsupported-op at gelu")),
)  # fmt: skip
def test_opaque(case):
    case.check()


# ---------------------------------------------------------------------- scale and shift part ways


def _mixed(x: Value, **norm) -> Value:
    """A norm whose scale passes the ReLU before it and whose shift passes the sum behind it."""
    return total(x.conv(4).relu().norm(**norm), x.gelu())


def _narrow(x: Value, fmt) -> Value:
    """As `_mixed`, with a layer in this format and a map that its weights could take in."""
    return total(x.conv(4, fmt=fmt).relu().norm(maps=([1.5, 2, 0.5, 1], [1, 0, -1, 2])), x.gelu())


def _added_twice(x: Value) -> list[Value]:
    """Two layers without a bias whose inputs take the shift."""
    return [total(x, x.net.input(*x.shape, name=name)).left_matmul(3) for name in "yz"]


def _summed(x: Value, **norm) -> Value:
    """A norm whose scale passes the padding behind it and whose shift passes the sum before it, not its scale."""
    return total(x.conv(4), x.gelu()).norm(**norm)


@table(
    Case("scale back, shift ahead", lambda x: _mixed(x, sign="positive").conv(3),
         "bn both into conv, conv2 through relu, sum", {}, LAYERS),
    Case("shift back, scale ahead", lambda x: _summed(x, sign="positive").conv(3, taps=3, padded=True),
         "bn both into conv, conv2 through sum", {}, LAYERS),
    Case("a zero scale has no shift to move back", lambda x: _summed(x).conv(3, taps=3, padded=True),
         kept=kept("unsupported-op at gelu", "padded-shift at conv2")),
    Case("float16 has no room in between", lambda x: _narrow(x, FLOAT16).conv(3),
         kept=kept("nonzero-shift at relu", "unequal-branches at sum")),
    Case("float32 has", lambda x: _narrow(x, FLOAT32).conv(3), "bn both into conv, conv2 through relu, sum", {},
         LAYERS),
    Case("a negative scale stays", lambda x: _mixed(x).conv(3),
         kept=kept("nonzero-shift at relu", "unequal-branches at sum")),
    Case("shift ahead meets padding", lambda x: _mixed(x, sign="positive").conv(3, taps=3, padded=True),
         kept=kept("nonzero-shift at relu", "unequal-branches at sum")),
    Case("two biases cost as much", lambda x: _added_twice(x.conv(4).relu().norm("positive")),
         kept=kept("nonzero-shift at relu", "unequal-branches at sum")),
    Case("one bias costs less", lambda x: _mixed(x, sign="positive").left_matmul(3),
         "bn both into conv, matmul through relu, sum", {}, LAYERS),
    Case("a positive scale alone is no gain", lambda x: x.conv(4).relu().norm(sign="positive"),
         kept=ends("nonzero-shift at relu")),
)  # fmt: skip
def test_parted(case):
    case.check()
