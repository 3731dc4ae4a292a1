"""The driver: which way a norm goes, what stays and why, what happens when a result does not fit, and random nets."""

from __future__ import annotations

import re
from collections import Counter

import numpy as np
import pytest
from programs import (
    CARRIES,
    Case,
    Net,
    Value,
    check_sound,
    concat,
    difference,
    folds_text,
    kept_text,
    kind_of,
    planned,
    product,
    total,
)

from bnfold.errors import UsageError
from bnfold.folding import Bypass, SetLinear
from bnfold.ops import Kind, Program, inputs_of
from bnfold.report import Reason, Refusal
from bnfold.rounding import FLOAT16, FLOAT32

ONE, TWO, THREE = ({"SetLinear": 1, "Bypass": n} for n in (1, 2, 3))
SCALE = {"SetScale": 1, "Bypass": 1}


def table(*cases: Case):
    return pytest.mark.parametrize("case", cases, ids=[c.id for c in cases])


def plus(x: Value) -> Value:
    return x.plus(x.per_channel())


def mul(x: Value, axis=1) -> Value:
    return x.mul(x.per_channel(axis))


# ---------------------------------------------------------------------- several maps at one layer


@table(
    Case("two norms behind a layer", lambda x: x.conv(6, 2).norm().norm(),
         ("bn backward into conv", "bn2 backward into conv"), {}, TWO),
    Case("three norms behind a layer without bias", lambda x: x.conv(4, bias=False).norm().norm().norm(),
         ("bn backward into conv", "bn2 backward into conv", "bn3 backward into conv"), {}, THREE),
    Case("two norms before a layer", lambda x: x.norm().norm().conv(6, 2),
         ("bn forward into conv", "bn2 forward into conv"), {}, TWO),
    Case("a norm on each side", lambda x: x.norm().conv(6, 2).norm(),
         ("bn forward into conv", "bn2 backward into conv"), {}, TWO),
    Case("a norm on each side of a grouped layer", lambda x: x.norm().conv(4, 2, groups=2).norm(),
         ("bn forward into conv", "bn2 backward into conv"), {}, TWO),
    Case("a norm on each side of a gemm", lambda x: x.norm().gemm(4, alpha=0.5, beta=-2.0, trans=False).norm(),
         ("bn forward into gemm", "bn2 backward into gemm"), {}, TWO, (3, 4)),
    Case("a scale before and a norm behind a padded layer",
         lambda x: x.norm(shift=False).conv(6, 3, padded=True).norm(),
         ("bn forward into conv", "bn2 backward into conv"), {}, TWO),
    Case("a scale before and a norm behind a transposed layer",
         lambda x: x.norm(shift=False).conv(4, 3, transposed=True, groups=2).norm(),
         ("bn forward into deconv", "bn2 backward into deconv"), {}, TWO),
    Case("two on each side", lambda x: x.norm().norm().conv(4).norm().norm(),
         ("bn forward into conv", "bn2 forward into conv", "bn3 backward into conv", "bn4 backward into conv"), {},
         {"SetLinear": 1, "Bypass": 4}),
    Case("mul, plus and norm", lambda x: plus(mul(x.conv(6))).norm(),
         ("bn backward into conv", "mul backward into conv", "plus backward into conv"), {}, THREE),
    Case("plus and mul before a layer, the last one first", lambda x: mul(plus(x)).conv(3),
         ("mul forward into conv", "plus forward into conv"), {}, TWO),
    Case("between two layers it goes backward", lambda x: x.conv(6).norm().conv(3), "bn backward into conv", {}, ONE),
    Case("a chain of layers", lambda x: x.conv(4).norm().relu().conv(5).norm().relu().conv(3).norm(),
         ("bn backward into conv", "bn2 backward into conv2", "bn3 backward into conv3"), {},
         {"SetLinear": 3, "Bypass": 3}),
    Case("pre-activation", lambda x: x.norm("positive", False).relu().conv(4).norm("positive", False).relu().conv(3),
         ("bn forward into conv through relu", "bn2 backward into conv"), {}, TWO),
    Case("norm, activation, norm", lambda x: x.conv(4).norm().relu().norm("positive", False),
         ("bn backward into conv", "bn2 backward into conv through relu"), {}, TWO),
)  # fmt: skip
def test_several_maps(case):
    case.check()


# ---------------------------------------------------------------------- readers, outputs, inputs, captures


def also(*branches):
    """The value, read by several things."""
    return lambda v: [b(v) for b in branches]


def stays(why: str) -> dict[str, str]:
    return {"bn": why}


@table(
    Case("layer with another reader", lambda x: also(Value.gelu, Value.norm)(x.conv(4)),
         kept=stays("multiple-consumers at conv, model-output at bn.out")),
    Case("it goes forward then", lambda x: also(Value.gelu, lambda v: v.norm().conv(3))(x.conv(4)),
         "bn forward into conv2", {}, ONE),
    Case("many other readers", lambda x: also(*[Value.gelu] * 5, Value.norm)(x.conv(4)),
         kept=stays("multiple-consumers at conv, model-output at bn.out")),
    Case("two norms read one layer", lambda x: also(lambda v: v.norm().conv(3), lambda v: v.norm().relu())(x.conv(4)),
         "bn forward into conv2", {"bn2": "multiple-consumers at conv, nonzero-shift at relu"}, ONE),
    Case("forward into all readers", lambda x: also(*[lambda v: v.conv(3)] * 3)(x.norm()),
         "bn forward into conv, conv2, conv3", {}, {"SetLinear": 3, "Bypass": 1}),
    Case("forward into all readers or none",
         lambda x: also(lambda v: v.conv(3), Value.gelu, lambda v: v.conv(3))(x.norm()),
         kept=stays("model-input at x, unsupported-op at gelu")),
    Case("forward, one reader is padded",
         lambda x: also(lambda v: v.conv(3), lambda v: v.conv(3, 2, padded=True))(x.norm()),
         kept=stays("model-input at x, padded-shift at conv2")),
    Case("forward, two readers of different kinds",
         lambda x: also(lambda v: v.conv(3), lambda v: v.reshape(2, 20).gemm(3))
         (x.norm()), "bn forward into conv, gemm through reshape", {}, {"SetLinear": 2, "Bypass": 1}),
    Case("backward, behind a fork", lambda x: _late_fork(x.conv(4)),
         kept=stays("multiple-consumers at identity, model-output at bn.out")),
    Case("readers of the norm do not matter backward", lambda x: also(Value.gelu, Value.gelu)(x.conv(4).norm()),
         "bn backward into conv", {}, ONE),
    Case("the norm's result is an output", lambda x: also(lambda v: v, Value.gelu)(x.conv(4).norm()),
         "bn backward into conv", {}, ONE),
    Case("the layer's result is an output", lambda x: also(lambda v: v, Value.norm)(x.conv(4)),
         kept=stays("model-output at conv.out, model-output at bn.out")),
    Case("a value in between is an output", lambda x: also(lambda v: v, lambda v: v.norm("positive", False))
         (x.conv(4).relu()), kept=stays("model-output at relu.out, model-output at bn.out")),
    Case("forward, the norm's result is an output", lambda x: also(lambda v: v, lambda v: v.conv(3))(x.norm()),
         kept=stays("model-input at x, model-output at bn.out")),
    Case("forward, a value in between is an output", lambda x: also(lambda v: v, lambda v: v.conv(3))
         (x.norm("positive", False).relu()), kept=stays("model-input at x, model-output at relu.out")),
    Case("behind a norm that is an output", lambda x: also(lambda v: v, Value.norm)(x.conv(4).norm()),
         "bn backward into conv", {"bn2": "model-output at bn.out, model-output at bn2.out"}, ONE),
    Case("the layer's result is captured", lambda x: x.conv(4).pin().norm(),
         kept=stays("multiple-consumers at conv.out, model-output at bn.out")),
    Case("forward, the norm's result is captured", lambda x: x.norm().pin().conv(3),
         kept=stays("model-input at x, multiple-consumers at bn.out")),
    Case("a captured result stays what it is", lambda x: x.conv(4).norm().pin().gelu(), "bn backward into conv", {},
         ONE),
    Case("behind a norm whose result is captured", lambda x: x.conv(4).norm().pin().norm(),
         "bn backward into conv", {"bn2": "multiple-consumers at bn.out, model-output at bn2.out"}, ONE),
    Case("behind a captured shift", lambda x: plus(plus(x.conv(4)).pin()).gelu(), "plus backward into conv", {}, ONE),
    Case("the input is captured", lambda x: x.pin().norm().conv(3), "bn forward into conv", {}, ONE),
    Case("nothing reads the norm", lambda x: [x.norm(), x.gelu()][1],
         kept=stays("model-input at x, not-executed at bn.out")),
    Case("nothing reads it, and a ReLU is before it",
         lambda x: [x.conv(3).relu().norm(maps=(2, 1)), x.gelu()][1],
         kept=stays("nonzero-shift at relu, not-executed at bn.out")),
    Case("nothing reads it, but a layer is before it", lambda x: [x.conv(3).norm(), x.gelu()][1],
         "bn backward into conv", {}, ONE),
    Case("a reader nobody reads", lambda x: also(Value.relu, lambda v: v.conv(3))(x.norm("positive", False))[1:],
         "bn forward into conv through relu", {}, ONE),
    Case("input and output", lambda x: x.norm(), kept=stays("model-input at x, model-output at bn.out")),
)  # fmt: skip
def test_readers(case):
    case.check()


def _late_fork(x: Value) -> list[Value]:
    y = x.carry("identity")
    return [y.gelu(), y.norm()]


# ---------------------------------------------------------------------- gain, several sweeps, scales that move on


def ones(x: Value) -> Value:
    """A norm that only shifts."""
    return x.norm(maps=(1, x.net.rng.normal(size=x.shape[1])))


def _plus_last(x: Value) -> Value:
    return x.plus(x.per_channel(2))


def paid_late(x: Value) -> Value:
    """The bias the shift needs is first paid for by the norm behind the layer."""
    return _plus_last(x).matmul(6).norm(axis=2)


def paid_later(x: Value) -> list[Value]:
    """The shift needs a bias in matmul; the norm needs one in matmul and one in matmul2; bn2 pays for that one."""
    a = x.gelu().plus(x.per_channel(2))
    b = x.gelu().norm(axis=2, maps=(1, [1, 0, -2, 3, 1]))
    return [total(a, b).matmul(3), b.matmul(3).norm(axis=2)]


@table(
    Case("a second sweep", paid_late, ("bn backward into matmul", "plus forward into matmul"), {}, TWO),
    Case("a scale pays for no bias", lambda x: _plus_last(x.matmul(3).mul(2.0)), "mul backward into matmul", {}, ONE),
    Case("a third sweep", paid_later, ("bn forward into matmul, matmul2 through sum", "bn2 backward into matmul2",
                                       "plus forward into matmul through sum"), {}, {"SetLinear": 2, "Bypass": 3}),
    Case("two biases cost as much as a norm", lambda x: also(*[lambda v: v.matmul(3)] * 2)(x.norm(axis=2)),
         kept=stays("model-input at x, no-gain at bn")),
    Case("backward, two biases cost as much", lambda x: concat(2, x.matmul(3), x.matmul(3)).norm(axis=2),
         kept=stays("no-gain at bn, model-output at bn.out")),
    Case("but not as an arithmetic norm", lambda x: concat(2, x.matmul(3), x.matmul(3))
         .norm(axis=2, kind=Kind.ARITHMETIC_NORM), "bn backward into matmul, matmul2 through concat", {},
         {"SetLinear": 2, "Bypass": 1}),
    Case("no gain backward, free forward", lambda x: x.matmul(3).plus(np.ones(3)).linear(2), "plus forward into linear",
         {}, ONE),
    Case("a norm into a norm that stays", lambda x: x.gelu().norm("positive", False).relu().norm(),
         "bn forward into bn2 through relu", {"bn2": "nonzero-shift at relu, model-output at bn2.out"}, SCALE),
    Case("a norm into a norm that moves on", lambda x: x.norm().carry("identity").norm().conv(3),
         ("bn forward into conv through identity", "bn2 forward into conv"), {}, TWO),
    Case("three norms, each into the next", lambda x: x.gelu().norm().norm().norm().reshape(2, 20).gemm(3),
         ("bn forward into gemm", "bn2 forward into gemm", "bn3 forward into gemm through reshape"), {}, THREE),
    Case("a norm into two norms that move on", lambda x: also(lambda v: v.norm().conv(2), lambda v: v.norm().conv(3))
         (x.norm()), ("bn forward into conv, conv2", "bn2 forward into conv", "bn3 forward into conv2"), {},
         {"SetLinear": 2, "Bypass": 3}),
    Case("a norm into one that moves on and one that stays", lambda x: also(lambda v: v.norm().conv(2), Value.norm)
         (x.norm()), ("bn forward into conv, bn3", "bn2 forward into conv"),
         {"bn3": "model-input at x, model-output at bn3.out"}, {"SetLinear": 1, "SetScale": 1, "Bypass": 2}),
    Case("scales into a norm that moves on", lambda x: mul(plus(x)).norm().conv(3),
         ("bn forward into conv", "mul forward into conv", "plus forward into conv"), {}, THREE),
    Case("a scale into a scale that stays", lambda x: mul(mul(x.gelu(), 2)), "mul forward into mul2", {}, SCALE),
    Case("no norms", lambda x: x.conv(3).relu()),
    Case("a pure shift norm through a sum", lambda x: total(ones(x.gelu()), x).conv(3),
         "bn forward into conv through sum", {}, ONE),
)  # fmt: skip
def test_gain_and_sweeps(case):
    case.check()


# ---------------------------------------------------------------------- selection and refusals from outside


def three(x: Value) -> Value:
    """Three norms that all can fold, and a constant."""
    for name in ("stem.bn", "layer1.bn", "layer2.bn"):
        x = x.conv(4).norm(name=name)
    return plus(x)


ALL = ("stem.bn backward into conv", "layer1.bn backward into conv2", "layer2.bn backward into conv3")
PLUS = "plus backward into conv3"


def excluded(*names: str) -> dict[str, str]:
    return {n: f"excluded at {n}" for n in names}


@table(
    Case("all", three, (*ALL, PLUS), {}, {"SetLinear": 3, "Bypass": 4}),
    Case("only one", three, ALL[0], excluded("layer1.bn", "layer2.bn"), ONE, options={"only": ["stem.bn"]}),
    Case("only by pattern", three, ALL[1:], excluded("stem.bn"), {"SetLinear": 2, "Bypass": 2},
         options={"only": ["layer?.bn"]}),
    Case("two patterns", three, (ALL[0], ALL[2], PLUS), excluded("layer1.bn"), {"SetLinear": 2, "Bypass": 3},
         options={"only": ["stem*", "layer2*", "plus"]}),
    Case("skip", three, (*ALL[:2], "plus backward into layer2.bn"), excluded("layer2.bn"),
         {"SetLinear": 2, "SetScale": 1, "Bypass": 3}, options={"skip": ["layer2.bn"]}),
    Case("skip wins over only", three, ALL[1], excluded("stem.bn", "layer2.bn"), ONE,
         options={"only": ["layer*"], "skip": ["layer2*"]}),
    Case("skip all", three, (), excluded("stem.bn", "layer1.bn", "layer2.bn"), options={"skip": ["*"]}),
    Case("a constant is skipped", three, ALL, {}, {"SetLinear": 3, "Bypass": 3}, options={"skip": ["plus"]}),
    Case("refused from outside", three, (*ALL[1:], PLUS), {"stem.bn": "not-expressible at conv"},
         {"SetLinear": 2, "Bypass": 3},
         options={"refused": {1: Refusal(Reason.NOT_EXPRESSIBLE, "conv", "the module tree cannot say it")}}),
    Case("all refused from outside", lambda x: plus(x.conv(4).norm()), (), {"bn": "hooked at bn"},
         options={"refused": {i: Refusal(Reason.HOOKED, "bn", "a hook") for i in (1, 2)}}),
)  # fmt: skip
def test_selection(case):
    case.check()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"only": ["layer3.bn"]}, "the pattern 'layer3.bn' matches no normalization; the closest are layer"),
        ({"skip": ["stem.bn", "zzz"]}, "'zzz' matches no normalization; the closest are stem.bn, layer1.bn, "),
        ({"only": ["Stem.bn"]}, "the pattern 'Stem.bn' matches no normalization; the closest are stem.bn"),
    ],
    ids=["typing error", "far off", "case counts"],
)
def test_unknown_pattern(options, message):
    net = Net(np.random.default_rng(0))
    program = net.program(three(net.input(2, 4, 5)))
    with pytest.raises(UsageError, match=re.escape(message)):
        planned(program, **options)


def test_unknown_pattern_without_norms():
    net = Net(np.random.default_rng(0))
    with pytest.raises(UsageError, match="the model has none"):
        planned(net.program(net.input(2, 4, 5).conv(3)), only=["bn"])


def test_a_pattern_may_name_an_opaque_norm():
    net = Net(np.random.default_rng(0))
    why = Refusal(Reason.BATCH_STATISTICS, "ln", "it normalises by the batch")
    plan = planned(net.program(net.input(2, 4, 5).opaque(name="ln", norm=True, why=why)[0]), only=["ln"])
    assert kept_text(plan.report) == {"ln": "batch-statistics at ln"}


# ---------------------------------------------------------------------- what does not fit

HUGE, SMALL, LARGE = (1e6, 0.0), (1e-9, 0.0), (1.0, 1e6)  # maps, in float16


def half(x: Value, out=4, **options) -> Value:
    weight = 0.5 + x.net.rng.random((out, x.shape[1], 1))
    return x.conv(out, **{"fmt": FLOAT16, "weight": weight, **options})


@table(
    Case("weight overflows", lambda x: half(x).norm(maps=HUGE), kept=stays("overflow at conv, model-output at bn.out")),
    Case("weight underflows", lambda x: half(x).norm(maps=SMALL),
         kept=stays("underflow at conv, model-output at bn.out")),
    Case("bias overflows", lambda x: half(x).norm(maps=LARGE), kept=stays("overflow at conv, model-output at bn.out")),
    Case("weight is not finite", lambda x: half(x, weight=np.full((4, 4, 1), np.inf)).norm(maps=(0, 0)),
         kept=stays("not-finite at conv, model-output at bn.out")),
    Case("bias is not finite", lambda x: half(x, bias=[0, 0, np.nan, 0]).norm(maps=(2, 0)),
         kept=stays("not-finite at conv, model-output at bn.out")),
    Case("one channel is enough", lambda x: half(x).norm(maps=([1, 1, 1e6, 1], 0)),
         kept=stays("overflow at conv, model-output at bn.out")),
    Case("overflow before a layer", lambda x: half(x.norm(maps=HUGE)),
         kept=stays("model-input at x, overflow at conv")),
    Case("it goes the other way", lambda x: half(x).norm(maps=HUGE).conv(3), "bn forward into conv2", {}, ONE),
    Case("another factor takes it", lambda x: product(half(x), x.conv(4)).norm(maps=HUGE),
         "bn backward into conv2 through product", {}, ONE),
    Case("no factor takes it", lambda x: product(half(x), half(x)).norm(maps=HUGE),
         kept=stays("overflow at conv, model-output at bn.out")),
    Case("one summand of two", lambda x: total(x.conv(4), half(x)).norm(maps=HUGE),
         kept=stays("overflow at conv2, model-output at bn.out")),
    Case("the others still fold", lambda x: half(half(x).norm(maps=(2, 1)).relu()).norm(maps=HUGE),
         "bn backward into conv", {"bn2": "overflow at conv2, model-output at bn2.out"}, ONE),
    Case("the first of two is at fault", lambda x: half(x.norm(maps=HUGE)).norm(maps=(2, 1)), "bn2 backward into conv",
         {"bn": "model-input at x, overflow at conv"}, ONE),
    Case("the last of two is at fault", lambda x: half(x.norm(maps=(2, 1))).norm(maps=HUGE), "bn forward into conv",
         {"bn2": "overflow at conv, model-output at bn2.out"}, ONE),
    Case("both are at fault", lambda x: half(x.norm(maps=HUGE)).norm(maps=HUGE), (),
         {"bn": "model-input at x, overflow at conv", "bn2": "overflow at conv, model-output at bn2.out"}),
    Case("together they fit", lambda x: half(x.norm(maps=HUGE)).norm(maps=SMALL),
         ("bn forward into conv", "bn2 backward into conv"), {}, TWO),
    Case("the second goes into the first instead", lambda x: half(x).norm(maps=(300, 0)).norm(maps=(300, 0)),
         ("bn backward into conv",), {"bn2": "overflow at conv, model-output at bn2.out"}, ONE),
    Case("a zero scale is no underflow", lambda x: half(x).norm(maps=([0, 1, 2, 0], 1)), "bn backward into conv", {},
         ONE),
    Case("a scale overflows", lambda x: x.gelu().norm(maps=(300, 0), fmt=FLOAT16).norm(maps=(300, 0), fmt=FLOAT16),
         kept={"bn": "unsupported-op at gelu, overflow at bn2", "bn2": "overflow at bn, model-output at bn2.out"}),
    Case("a scale's shift overflows", lambda x: x.gelu().norm(maps=(1, 6e4), fmt=FLOAT16).plus(6e4, fmt=FLOAT16),
         kept=stays("unsupported-op at gelu, overflow at plus")),
    Case("a scale underflows", lambda x: x.gelu().norm(maps=(1e-5, 0), fmt=FLOAT16).norm(maps=(1e-5, 0), fmt=FLOAT16),
         kept={"bn": "unsupported-op at gelu, underflow at bn2", "bn2": "underflow at bn, model-output at bn2.out"}),
    Case("a constant underflows", lambda x: x.gelu().mul(1e-5, fmt=FLOAT16).mul(1e-5, fmt=FLOAT16)),
    Case("the overflowing scale moves on", lambda x: x.norm(maps=(300, 0), fmt=FLOAT16).norm(maps=(300, 0), fmt=FLOAT16)
         .conv(3), ("bn forward into conv", "bn2 forward into conv"), {}, TWO),
    Case("only one of two into a scale overflows", lambda x: x.gelu().norm(maps=(2, 0), fmt=FLOAT16).norm(
         maps=(1e4, 0), fmt=FLOAT16).norm(maps=(10, 0), fmt=FLOAT16), "bn forward into bn2",
         {"bn2": "unsupported-op at gelu, overflow at bn3", "bn3": "overflow at bn2, model-output at bn3.out"}, SCALE),
    Case("float64 itself overflows", lambda x: x.conv(3).norm(maps=(1e160, 1)).norm(maps=(1e160, 1)),
         "bn backward into conv", {"bn2": "overflow at conv, model-output at bn2.out"}, ONE),
    Case("float32", lambda x: x.conv(3, fmt=FLOAT32).norm(maps=(1e39, 1)),
         kept=stays("overflow at conv, model-output at bn.out")),
    Case("a table overflows", lambda x: x.embedding(3, fmt=FLOAT16).norm(axis=2, maps=LARGE),
         kept=stays("overflow at embedding, model-output at bn.out"), shape=(2, 3)),
)  # fmt: skip
def test_what_does_not_fit(case):
    case.check()


# ---------------------------------------------------------------------- the plan itself


def test_bypass_says_which_name_stays():
    net = Net(np.random.default_rng(0))
    plan = planned(net.program(net.input(2, 4, 5).norm().conv(3).norm()))
    assert [e if isinstance(e, Bypass) else type(e) for e in plan.edits] == [
        Bypass(0, "forward"), SetLinear, Bypass(2, "backward"),
    ]  # fmt: skip


def test_contributors_follow_scales_that_moved_on():
    net = Net(np.random.default_rng(0))
    x = net.input(2, 4, 5)
    plan = planned(net.program(x.norm().norm().conv(3), x.norm().relu()))
    assert plan.contributors(2) == (0, 1)
    assert plan.contributors(4) == ()


def test_a_layer_gets_no_bias_it_does_not_need():
    net = Net(np.random.default_rng(0))
    plan = planned(net.program(net.input(2, 4, 5).matmul(3).norm(axis=2, shift=False)))
    [edit, _] = plan.edits
    assert isinstance(edit, SetLinear)
    assert edit.new.bias is None


def test_the_norms_channels_and_operations_are_reported():
    net = Net(np.random.default_rng(0))
    plan = planned(net.program(mul(net.input(2, 4, 5).norm(axis=2).conv(6).norm())))
    assert [(n.norm, n.op, n.channels) for n in plan.report.norms] == [
        ("bn", "BatchNormalization", 5),
        ("bn2", "BatchNormalization", 6),
    ]
    assert [f.op for f in plan.report.folded] == ["BatchNormalization"]
    assert [f.op for f in plan.report.affine] == ["Mul"]
    assert [k.op for k in plan.report.kept] == ["BatchNormalization"]


def test_long_chains_do_not_exhaust_the_stack():
    net = Net(np.random.default_rng(0))
    x = net.input(2, 4, 5).conv(4)
    for _ in range(100):
        x = x.relu()
    [line] = folds_text(planned(net.program(x.norm("positive", False))).report)
    assert line.startswith("bn backward into conv through relu100, relu99")


# ---------------------------------------------------------------------- random nets


class Fuzz:
    """A random net of every record, in chains and branches.

    `axis` remembers along which dimension a value has its channels, so that norms and layers mostly meet there.
    """

    def __init__(self, seed: int):
        self.rng = np.random.default_rng(seed)
        self.net = Net(self.rng)
        self.x = self.net.input(2, int(self.rng.choice([3, 4, 6])), int(self.rng.integers(3, 6)))
        self.axis: dict[str, int] = {}
        self.open = [self.x]
        for _ in range(int(self.rng.integers(2, 8))):
            self.step()

    def often(self, probability: float) -> bool:
        return bool(self.rng.random() < probability)

    def one_of(self, choices):
        return choices[self.rng.integers(len(choices))]

    def along(self, axis: int, *values: Value) -> list[Value]:
        self.axis.update({v.name: axis for v in values})
        return list(values)

    def step(self) -> None:
        """One more record, mostly behind the newest value."""
        x = self.open[-1] if self.often(0.75) else self.one_of(self.open)
        self.open += self.rng.choice(OPS, p=WEIGHTS)(self, x, self.axis.get(x.name, 1))

    def statistics(self) -> dict:
        sign = self.rng.choice(["any", "nonnegative", "positive"], p=[0.3, 0.1, 0.6])
        return {"sign": str(sign), "shift": self.often(0.4)}

    def norm(self, x: Value, axis: int) -> list[Value]:
        axis = axis if self.often(0.9) else int(self.rng.integers(len(x.shape)))
        kind = Kind.NORM if self.often(0.8) else Kind.ARITHMETIC_NORM
        shift = {"maps": (1, self.rng.normal(size=x.shape[axis]))}
        return self.along(axis, x.norm(axis=axis, kind=kind, **(shift if self.often(0.25) else self.statistics())))

    def stuck_norm(self, x: Value, axis: int) -> list[Value]:
        """A norm that can only go forward."""
        return self.norm(*self.along(axis, x.gelu()), axis)

    def constant(self, x: Value, axis: int) -> list[Value]:
        c = x.per_channel(axis if self.often(0.8) else int(self.rng.integers(len(x.shape))))
        return self.along(axis, x.mul(c) if self.often(0.5) else x.plus(c))

    def layer(self, x: Value, axis: int) -> list[Value]:
        out, rank = int(self.rng.choice([3, 4, 6])), len(x.shape)
        if rank == 2 and axis == 1 and self.often(0.7):
            alpha = float(self.one_of([1, -0.5]))
            return self.along(1, x.gemm(out, trans=self.often(0.5), bias=self.often(0.7), alpha=alpha, beta=2.0))
        if axis == rank - 1:
            return self.along(axis, x.linear(out, bias=self.often(0.7)) if self.often(0.6) else x.matmul(out))
        if axis != 1 or rank != 3:
            return self.along(rank - 2, x.left_matmul(out)) if axis == rank - 2 else []
        groups = int(self.one_of([g for g in (1, 1, 2, x.shape[1]) if x.shape[1] % g == 0]))
        return self.along(1, x.conv(
            groups * max(1, out // groups), int(self.rng.integers(1, 3 if x.shape[2] > 1 else 2)), groups=groups,
            bias=self.often(0.7), padded=self.often(0.25), transposed=self.often(0.2),
        ))  # fmt: skip

    def carry(self, x: Value, axis: int) -> list[Value]:
        kind = self.one_of([k for k in CARRIES if x.shape[-1] > 1 or k not in ("maxpool", "avgpool")])
        return self.along(axis, x.carry(kind))

    def permute(self, x: Value, axis: int) -> list[Value]:
        order = [int(i) for i in self.rng.permutation(len(x.shape))]
        return self.along(order.index(axis), x.permute(*order))

    def reshape(self, x: Value, axis: int) -> list[Value]:
        """Split a dimension in two, or merge two."""
        dims, k = list(x.shape), int(self.rng.integers(len(x.shape)))
        divisors = [d for d in range(1, dims[k] + 1) if dims[k] % d == 0]
        if len(dims) < 4 and self.often(0.7):
            d = int(self.one_of(divisors))
            dims[k : k + 1] = [d, dims[k] // d]
            return self.along(axis + (axis > k) + (axis == k and d == 1), x.reshape(*dims))
        k = min(k, len(dims) - 2)
        dims[k : k + 2] = [dims[k] * dims[k + 1]]
        return self.along(max(0, axis - (axis > k)), x.reshape(*dims)) if len(dims) > 1 else []

    def take(self, x: Value, axis: int) -> list[Value]:
        along = axis if self.often(0.7) else int(self.rng.integers(len(x.shape)))
        size = x.shape[along]
        order = self.rng.permutation(size) if self.often(0.3) else np.arange(size)
        cut = int(self.rng.integers(size))
        parts = [p for p in (order[:cut], order[cut:]) if len(p)]
        if self.often(0.1):
            parts[0] = self.rng.integers(size, size=size)
        return self.along(axis, *x.take(along - len(x.shape) * int(self.often(0.5)), *parts))

    def join(self, x: Value, axis: int) -> list[Value]:
        """The value and another one that fits, if there is one."""
        others = [v for v in self.open if v.shape == x.shape and v.name != x.name]
        return self.joined(x, self.one_of(others), axis) if others else []

    def joined(self, a: Value, b: Value, axis: int) -> list[Value]:
        along = axis if self.often(0.8) else int(self.rng.integers(len(a.shape)))
        along -= len(a.shape) * int(self.often(0.5))
        join = self.one_of([total, difference, difference, product, lambda *v: concat(along, *v)])
        return self.along(axis, join(*((a, b) if self.often(0.5) else (b, a))))

    def joined_anew(self, x: Value, axis: int) -> list[Value]:
        """The value, and a layer or something opaque over an input of its own."""
        y = self.net.input(*x.shape, name=self.net.name("y"))
        if self.often(0.3) or axis not in (1, len(x.shape) - 1) or (axis == 1 and len(x.shape) != 3):
            return self.joined(x, y.gelu(), axis)
        return self.joined(x, y.conv(x.shape[1]) if axis == 1 else y.linear(x.shape[-1]), axis)

    def two_ways(self, x: Value, axis: int) -> list[Value]:
        """The value and what is carried on from it."""
        return self.joined(x, x.carry(self.one_of(["identity", "relu"])), axis)

    def sandwich(self, x: Value, axis: int) -> list[Value]:
        """A layer, one to three things in between, a norm; or a norm first and a layer last."""
        backward = self.often(0.5)
        made = (self.layer if backward else self.stuck_norm)(x, axis)
        for _ in range(int(self.rng.integers(1, 4))):
            made += self.one_of(self.BETWEEN)(self, *self.newest(made or [x]))
        return made + (self.norm if backward else self.layer)(*self.newest(made or [x]))

    def parted(self, x: Value, axis: int) -> list[Value]:
        """A norm between a sum and an activation or padding, of which one lets its scale pass and one its shift."""
        if axis != 1 or len(x.shape) != 3:
            return []
        y, other = x.conv(x.shape[1]), self.net.input(*x.shape, name=self.net.name("y"))
        if self.often(0.5):
            return self.along(1, total(y.relu().norm("positive"), other.gelu()).conv(3))
        return self.along(1, total(y, other.gelu()).norm("positive").conv(3, padded=True))

    def newest(self, values: list[Value]) -> tuple[Value, int]:
        return values[-1], self.axis.get(values[-1].name, 1)

    def embed(self, x: Value, axis: int) -> list[Value]:
        # An index must not be computed: a rounding error would select another row.
        return self.along(3, self.x.embedding(4))

    def opaque(self, x: Value, axis: int) -> list[Value]:
        return self.along(axis, *x.opaque(outputs=int(self.rng.integers(1, 3))))

    def program(self) -> Program:
        """With what nobody reads as outputs, and a few more; some shapes are hidden, some values captured."""
        read = {v for r in self.net.records for v in inputs_of(r)}
        ends = [v for v in self.open if v.name not in read]
        outputs = [v for v in ends if self.often(0.9)] or ends[:1]
        outputs += [v for v in self.open if v.name in read and self.often(0.03)]
        for v in self.open:
            if self.often(0.02):
                v.pin()
            if self.often(0.05):
                v.declared(*(None if self.often(0.5) else n for n in v.shape))
        return self.net.program(*outputs)

    BETWEEN = (carry, permute, reshape, take, joined_anew, joined_anew, two_ways)


OPS, WEIGHTS = zip(
    (Fuzz.sandwich, 0.4), (Fuzz.layer, 0.15), (Fuzz.norm, 0.15), (Fuzz.constant, 0.05), (Fuzz.carry, 0.03),
    (Fuzz.permute, 0.02), (Fuzz.reshape, 0.02), (Fuzz.take, 0.02), (Fuzz.join, 0.05), (Fuzz.embed, 0.04),
    (Fuzz.opaque, 0.03), (Fuzz.parted, 0.04),
    strict=True,
)  # fmt: skip


RECORDS = dict.fromkeys(CARRIES, "carry") | {"bn": "scale", "mul": "scale", "plus": "scale"}
LINEARS = ("conv", "deconv", "gemm", "linear", "matmul")
PASSED = (*LINEARS, "scale", "carry", "permute", "reshape", "concat", "take", "sum", "difference", "product")


@pytest.mark.parametrize(
    ("seeds", "least"), [(range(500), 5), pytest.param(range(500, 20_500), 200, marks=pytest.mark.slow)],
    ids=["500", "20000"],
)  # fmt: skip
def test_random_nets(seeds, least):
    """No plan changes a number, and every record is passed or taken in, both ways, often enough to tell."""
    exercised: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    for seed in seeds:
        fuzz = Fuzz(seed)
        program = fuzz.program()
        plan = planned(program)
        try:
            check_sound(fuzz.net, program, plan)
        except AssertionError as e:
            pytest.fail(f"seed {seed}: {e}; {folds_text(plan.report)}")
        for f in (*plan.report.folded, *plan.report.affine):
            kinds = {kind_of(n) for n in (*f.into, *f.through)}
            exercised.update({f"{RECORDS.get(k, k)} {f.direction}" for k in kinds} | {f.direction})
        reasons.update(r.reason for k in plan.report.kept for r in k.reasons)
    wanted = {f"{k} {d}" for k in PASSED for d in ("backward", "forward")} | {"embedding backward", "both"}
    assert not {k: exercised[k] for k in wanted if exercised[k] < least}
    assert len(reasons) >= 11
