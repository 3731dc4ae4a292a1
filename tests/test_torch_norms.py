"""Every normalization that acts by running statistics folds, however it is spelled; every other one says why not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch_models import (
    EXACT,
    Case,
    Chain,
    Net,
    bn,
    check,
    check_report,
    compare,
    conv,
    image,
    in_double,
    row,
    run,
    tensor,
)
from torchvision.ops import FrozenBatchNorm2d

import bnfold

BF16, FP16 = torch.bfloat16, torch.float16


def behind_conv(norm: nn.Module) -> nn.Module:
    return Chain(conv=conv(), bn=norm)


def forward_replaced(chain: nn.Module) -> nn.Module:
    """A norm that no longer normalises: somebody gave the instance another forward."""
    chain.bn.forward = lambda x: x * 2
    return chain


@pytest.mark.parametrize(
    "case",
    [
        row("no-affine", lambda: behind_conv(bn(8, affine=False)), image(), "bn"),
        row("no-momentum", lambda: behind_conv(bn(8, momentum=None)), image(), "bn"),
        row("momentum-0", lambda: behind_conv(bn(8, momentum=0.0)), image(), "bn"),
        row("momentum-1", lambda: behind_conv(bn(8, momentum=1.0)), image(), "bn"),
        row("statistics-alone", lambda: behind_conv(bn(8, affine=False, momentum=None, eps=0.1)), image(), "bn"),
        row("large-epsilon", lambda: behind_conv(bn(8, eps=0.3)), image(), "bn"),
        row("no-epsilon", lambda: behind_conv(bn(8, eps=0.0)), image(), "bn"),
        row("no-beta", lambda: behind_conv(_without_beta(bn(8))), image(), "bn"),
        row("sync", lambda: behind_conv(nn.SyncBatchNorm(8)), image(), "bn"),
        row("frozen", lambda: behind_conv(FrozenBatchNorm2d(8)), image(), "bn"),
        row("frozen-in-front", lambda: Chain(bn=FrozenBatchNorm2d(4), conv=conv()), image(), "bn"),
        row(
            "instance-1d",
            lambda: Chain(conv=nn.Conv1d(4, 8, 3), bn=nn.InstanceNorm1d(8, affine=True, track_running_stats=True)),
            tensor(2, 4, 9),
            "bn",
        ),
        row(
            "instance-2d",
            lambda: behind_conv(nn.InstanceNorm2d(8, affine=True, track_running_stats=True)),
            image(),
            "bn",
        ),
        row(
            "instance-3d-in-front",
            lambda: Chain(bn=nn.InstanceNorm3d(4, track_running_stats=True), conv=nn.Conv3d(4, 8, 2)),
            tensor(2, 4, 3, 4, 5),
            "bn",
        ),
        row(
            "lazy-that-has-seen-a-batch",
            lambda: _materialised(Chain(conv=nn.LazyConv2d(8, 3), bn=nn.LazyBatchNorm2d())),
            image(),
            "bn",
        ),
        row("one-channel", lambda: Chain(conv=conv(4, 1), bn=bn(1)), image(), "bn"),
        row("one-value-per-channel", lambda: Chain(conv=nn.Conv2d(4, 8, 7), bn=bn(8)), image(side=7), "bn"),
    ],
)
def test_norm_modules(case: Case):
    check(case)


class DetectronFrozenBatchNorm2d(nn.Module):
    """As detectron2 freezes norms: buffers, and arithmetic on them where a gradient is wanted, else a function."""

    def __init__(self, channels: int, arithmetic: bool):
        super().__init__()
        self.arithmetic, self.eps = arithmetic, 1e-5
        for name, value in zip(
            ("running_mean", "running_var", "weight", "bias"), statistics(channels).values(), strict=True
        ):
            self.register_buffer(name, value.detach())

    def forward(self, x):
        if not self.arithmetic:
            return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, False, eps=self.eps)
        scale = self.weight * (self.running_var + self.eps).rsqrt()
        bias = self.bias - self.running_mean * scale
        scale, bias = scale.reshape(1, -1, 1, 1), bias.reshape(1, -1, 1, 1)
        return x * scale.to(x.dtype) + bias.to(x.dtype)


class BatchRenorm2d(nn.Module):
    """Batch renormalization (Ioffe, 2017); in evaluation r is 1 and d is 0, and it is batch normalization.

    Some keep the running variance, some the running deviation, and some do the arithmetic channels last.
    """

    def __init__(self, channels: int, deviation: bool, last: bool = False):
        super().__init__()
        self.deviation, self.last = deviation, last
        mean, var, weight, bias = statistics(channels).values()
        self.register_buffer("running_mean", mean)
        self.register_buffer("running_std" if deviation else "running_var", var)
        self.weight, self.bias = weight, bias

    def forward(self, x):
        lay = (lambda v: v) if self.last else (lambda v: v.view(1, -1, 1, 1))
        x = x.transpose(1, -1) if self.last else x
        scale = self.running_std if self.deviation else torch.sqrt(self.running_var + 1e-3)
        y = (x - lay(self.running_mean)) / lay(scale)
        y = lay(self.weight) * y + lay(self.bias)
        return y.transpose(1, -1) if self.last else y


@pytest.mark.parametrize(
    "case",
    [
        row("frozen-function", lambda: behind_conv(DetectronFrozenBatchNorm2d(8, False)), image(), "bn"),
        row(
            "frozen-arithmetic",
            lambda: behind_conv(DetectronFrozenBatchNorm2d(8, True)),
            image(),
            "bn",
        ),
        row(
            "frozen-in-front",
            lambda: Chain(bn=DetectronFrozenBatchNorm2d(4, True), conv=conv()),
            image(),
            "bn",
        ),
        row("renorm-variance", lambda: behind_conv(BatchRenorm2d(8, False)), image(), "bn"),
        row("renorm-deviation", lambda: behind_conv(BatchRenorm2d(8, True)), image(), "bn"),
        row("renorm-in-front", lambda: Chain(bn=BatchRenorm2d(4, True), conv=conv()), image(), "bn"),
        row("renorm-last", lambda: behind_conv(BatchRenorm2d(8, True, last=True)), image(), "bn", same_class=False),
    ],
)
def test_norms_of_other_libraries(case: Case):
    """What behaves like batch normalization in evaluation is one."""
    check(replace(case, left=0))


def _without_beta(norm: nn.Module) -> nn.Module:
    norm.bias = None
    return norm


def _materialised(module: nn.Module) -> nn.Module:
    module(torch.randn(2, 4, 7, 8))
    return module


def statistics(channels: int = 8) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    draw = lambda: torch.randn(channels, generator=generator)  # noqa: E731
    return {"m": draw(), "v": draw().exp(), "g": nn.Parameter(draw()), "b": nn.Parameter(draw())}


def spelled(formula) -> nn.Module:
    """A convolution, and a norm written as arithmetic on per-channel vectors laid along dimension 1."""

    def run(self, x):
        vectors = (getattr(self, n).view(1, -1, 1, 1) for n in "mvgb")
        return formula(self.conv(x), *vectors)

    return Net(run, conv=conv(), **statistics())


@pytest.mark.parametrize(
    "case",
    [
        row(
            "functional",
            lambda: Net(lambda s, x: F.batch_norm(s.conv(x), s.m, s.v, s.g, s.b), conv=conv(), **statistics()),
            image(),
            "batch_norm",
        ),
        row(
            "functional-bare",
            lambda: Net(lambda s, x: F.batch_norm(s.conv(x), s.m, s.v), conv=conv(), **statistics()),
            image(),
            "batch_norm",
        ),
        row(
            "functional-twice",
            lambda: Net(
                lambda s, x: _functional(s, s.second(_functional(s, s.conv(x)).tanh())),
                conv=conv(),
                second=conv(8, 8),
                **statistics(),
            ),
            image(),
            "batch_norm batch_norm_1",
        ),
        row(
            "functional-on-a-module",
            lambda: Net(
                lambda s, x: F.batch_norm(s.conv(x), s.bn.running_mean, s.bn.running_var, s.bn.weight, s.bn.bias),
                conv=conv(),
                bn=bn(8),
            ),
            image(),
            "bn",
        ),
        row(
            "sub-div-mul-add",
            lambda: spelled(lambda x, m, v, g, b: (x - m) / torch.sqrt(v + 1e-5) * g + b),
            image(),
            "sub",
        ),
        row("sub-rsqrt", lambda: spelled(lambda x, m, v, g, b: (x - m) * torch.rsqrt(v + 1e-5)), image(), "sub"),
        row(
            "scale-and-shift",
            lambda: spelled(lambda x, m, v, g, b: x * (g * (v + 1e-5).rsqrt()) + (b - m * g * (v + 1e-5).rsqrt())),
            image(),
            "mul_1",
        ),
        row("power", lambda: spelled(lambda x, m, v, g, b: b + g * ((x - m) * (v + 1e-5) ** -0.5)), image(), "sub"),
    ],
)
def test_norms_that_are_no_modules(case: Case):
    """Functional norms and arithmetic fold in the graph, under the name of their first node."""
    check(replace(case, same_class=False, left=0))


def _functional(self, x):
    return F.batch_norm(x, self.m, self.v, self.g, self.b)


SIGMOID = "unsupported-op"


def alone(*norms: nn.Module) -> nn.Module:
    """Norms between an input and a sigmoid: no layer can take them."""
    return Chain(**{f"b{k}": n for k, n in enumerate(norms, 1)}, act=nn.Sigmoid())


@pytest.mark.parametrize(
    "case",
    [
        row("behind-conv", lambda: Chain(conv=conv(), b1=bn(8), b2=bn(8)), image(), "b1 b2"),
        row(
            "three-kinds",
            lambda: Chain(
                conv=conv(), b1=bn(8), b2=nn.InstanceNorm2d(8, track_running_stats=True), b3=FrozenBatchNorm2d(8)
            ),
            image(),
            "b1 b2 b3",
        ),
        row("no-layer", lambda: alone(bn(4), bn(4)), image(), "b1", {"b2": "model-input unsupported-op"}),
        row(
            "no-layer-sync",
            lambda: alone(bn(4), nn.SyncBatchNorm(4)),
            image(),
            "b1",
            {"b2": "model-input unsupported-op"},
        ),
        row(
            "no-layer-instance",
            lambda: alone(bn(4), nn.InstanceNorm2d(4, affine=True, track_running_stats=True)),
            image(),
            "b1",
            {"b2": "model-input unsupported-op"},
        ),
        row(
            "no-layer-no-affine",
            lambda: alone(bn(4), bn(4, affine=False)),
            image(),
            "b1",
            {"b2": "model-input unsupported-op"},
            same_class=False,
        ),
        row(
            "no-layer-no-beta",
            lambda: alone(bn(4), _without_beta(bn(4))),
            image(),
            "b1",
            {"b2": "model-input unsupported-op"},
            same_class=False,
        ),
        row(
            "no-layer-bf16",
            lambda: alone(bn(4), bn(4, affine=False)),
            image(dtype=BF16),
            "b1",
            {"b2": "model-input unsupported-op"},
            same_class=False,
            dtype=BF16,
        ),
        row("between-convs", lambda: Chain(c1=conv(4, 6), b1=bn(6), b2=bn(6), c2=conv(6, 4)), image(), "b1 b2"),
        row(
            "two-frozen",
            lambda: Chain(conv=conv(), b1=FrozenBatchNorm2d(8), b2=FrozenBatchNorm2d(8)),
            image(),
            "b1 b2",
        ),
    ],
)
def test_norms_in_a_row(case: Case):
    """The second takes the first, or a layer takes both."""
    check(case)


@pytest.mark.parametrize(
    "case",
    [
        row(
            "batch-statistics",
            lambda: behind_conv(bn(8, track_running_stats=False)),
            image(),
            kept={"bn": "batch-statistics"},
        ),
        row("instance-statistics", lambda: behind_conv(nn.InstanceNorm2d(8)), image(), kept={"bn": "batch-statistics"}),
        row(
            "functional-without-statistics",
            lambda: Net(lambda s, x: F.batch_norm(s.conv(x), None, None, s.g, s.b, True), conv=conv(), **statistics()),
            image(),
            kept={"batch_norm": "batch-statistics"},
            batches=False,
        ),
        row(
            "never-called",
            lambda: Net(lambda s, x: s.bn(s.conv(x)), conv=conv(), bn=bn(8), aux=Chain(bn=bn(3))),
            image(),
            "bn",
            {"aux.bn": "not-executed"},
        ),
        row(
            "result-unused",
            lambda: Net(lambda s, x: (s.bn(x), s.conv(x))[1], conv=conv(), bn=bn(4)),
            image(),
            kept={"bn": "not-captured"},
            left=1,
        ),
        row(
            "forward-replaced",
            lambda: forward_replaced(Chain(conv=conv(), bn=bn(8))),
            image(),
            kept={"bn": "not-captured"},
            left=0,
        ),
        row("alone", lambda: Net(lambda s, x: s.bn(x), bn=bn(4)), image(), kept={"bn": "model-input model-output"}),
        row(
            "frozen-alone",
            lambda: alone(FrozenBatchNorm2d(4)),
            image(),
            kept={"b1": "model-input unsupported-op"},
            left=0,
        ),
        row(
            "only",
            lambda: Chain(c1=conv(4, 4), b1=bn(4), c2=conv(4, 4), b2=bn(4)),
            image(),
            "b2",
            {"b1": "excluded"},
            options={"only": "*2"},
        ),
        row(
            "skip",
            lambda: Chain(c1=conv(4, 4), b1=bn(4), c2=conv(4, 4), b2=bn(4)),
            image(),
            "b1",
            {"b2": "excluded"},
            options={"skip": ["b2"]},
        ),
        row(
            "computed-statistics",
            lambda: Net(
                lambda s, x: F.batch_norm(s.conv(x), x.mean((0, 2, 3)).repeat(2), s.v), conv=conv(), **statistics()
            ),
            image(),
            kept={"batch_norm": "dynamic-parameter"},
            batches=False,
        ),
        row(
            "computed-weight",
            lambda: Net(lambda s, x: s.bn(F.conv2d(x, s.conv.weight * x.mean())), conv=conv(), bn=bn(8)),
            image(),
            kept={"bn": "dynamic-parameter model-output"},
            batches=False,
        ),
        row(
            "broken-kept",
            lambda: behind_conv(bn(8)),
            image(),
            kept={"bn": "not-finite"},
            prepare=lambda m: m.bn.running_var.fill_(-1.0),
            options={"keep_broken": True},
        ),
    ],
)
def test_norms_that_stay(case: Case):
    if "broken" in case.id:
        _check_broken(case)
    else:
        check(case)


LOOK_ALIKES = {  # of a convolution's result y, with six channels and six columns
    "layer-norm": lambda s, y: F.layer_norm(y, (6,), s.g, s.b),
    "layer-norm-by-hand": lambda s, y: (
        (y - y.mean(-1, keepdim=True)) / (y.var(-1, keepdim=True) + 1e-5).sqrt() * s.g + s.b
    ),
    "group-norm": lambda s, y: F.group_norm(y, 3, s.g, s.b),
    "prelu-by-hand": lambda s, y: torch.relu(y) - s.g.view(-1, 1, 1) * torch.relu(-y),
    "one-over": lambda s, y: s.g.view(-1, 1, 1) / y,
    "scale-along-the-width": lambda s, y: y * s.g,
    "shift-along-the-width": lambda s, y: y + s.g,
}


@pytest.mark.parametrize("kind", LOOK_ALIKES)
def test_what_only_looks_like_a_norm(kind):
    """No norm is found, and nothing changes."""
    build = lambda: Net(lambda s, x: LOOK_ALIKES[kind](s, s.conv(x)), conv=conv(4, 6), **statistics(6))  # noqa: E731
    report = check(Case(kind, build, image()))
    assert report.norms == report.affine == ()


ARITHMETIC = {  # of a convolution's result y and a constant for each of six channels
    "add": lambda c, y: torch.add(y, c, alpha=-2.0),
    "add-to-a-constant": lambda c, y: torch.add(c, y, alpha=-2.0),
    "subtract": lambda c, y: torch.sub(y, c, alpha=3.0),
    "subtract-from-a-constant": lambda c, y: torch.sub(c, y, alpha=3.0),
    "subtract-from-a-number": lambda _, y: torch.rsub(y, 0.5, alpha=3.0),
    "multiply": torch.mul,
    "divide": lambda c, y: torch.div(y, c + 3),
}


def folded_program(forward, **more):
    """An exported program, before and after, in float64: a module's tree cannot say that an operator is gone."""
    case = Case("program", lambda: Net(forward, conv=conv(4, 6), bn=bn(6), **more), image(), dtype=torch.float64)
    module, x = case.make().double(), in_double(case.given())
    result = bnfold.fold(torch.export.export(module, (x,)))
    compare(result.model.module()(x), run(module, x), EXACT)
    return result


@pytest.mark.parametrize("kind", ARITHMETIC)
@pytest.mark.parametrize("norm", [False, True], ids=["alone", "and-a-norm"])
def test_arithmetic_with_a_constant_folds(kind, norm):
    constant = nn.Parameter(torch.linspace(-2, 2, 6).view(6, 1, 1))
    result = folded_program(
        lambda s, x: (s.bn if norm else nn.Identity())(ARITHMETIC[kind](s.c, s.conv(x))), c=constant
    )
    assert result.report.affine
    assert not result.report.kept
    called = [str(n.target) for n in result.model.graph.nodes if n.op == "call_function"]
    assert called == ["aten.conv2d.default"]


@pytest.mark.parametrize("op", [torch.add, torch.sub])
def test_a_sum_with_a_factor_is_no_sum(op):
    """The branches would merge, were it one."""
    result = folded_program(lambda s, x: s.bn(op(s.conv(x), s.other(x), alpha=2.0)), other=conv(4, 6))
    assert [str(k.reasons[0].reason) for k in result.report.kept] == ["unsupported-op"]


@pytest.mark.parametrize("rounding", ["floor", "trunc"])
def test_a_rounded_quotient_is_no_map(rounding):
    result = folded_program(lambda s, x: s.bn(torch.div(s.conv(x), 0.25, rounding_mode=rounding)))
    assert not result.report.affine
    assert [str(k.reasons[0].reason) for k in result.report.kept] == ["unsupported-op"]


def _check_broken(case: Case):
    """There is no right output to compare with; the network must be left as it is."""
    module, inputs = case.make(), case.given()
    result = bnfold.fold(module, inputs, **case.options)
    assert [k.reasons[0].reason for k in result.report.kept] == ["not-finite"]
    torch.testing.assert_close(run(result.model, inputs), run(module, inputs), rtol=0, atol=0, equal_nan=True)


class Branching(nn.Module):
    """A branch on data, as torch can export it."""

    def __init__(self):
        super().__init__()
        self.conv, self.bn, self.second, self.inner = conv(), bn(8), conv(8, 8), bn(8)

    def forward(self, x):
        y = self.bn(self.conv(x))
        return torch.cond(y.sum() > 0, lambda y: self.inner(self.second(y)), lambda y: self.second(y), (y,))


def test_norms_inside_a_branch_are_named_and_kept():
    """What stands before the branch folds; both branches stay right."""
    case = Case("branch", Branching, image(), ("bn",), {"inner": "not-captured"}, dtype=torch.float64)
    module, reference, x = case.make().double(), case.make().double(), in_double(case.given())
    result = bnfold.fold(module, x)
    check_report(case, result.report)
    sums = []
    for scale in (100.0, -100.0):
        compare(run(result.model, scale * x), run(reference, scale * x), EXACT)
        sums.append(float(reference.bn(reference.conv(scale * x)).sum().detach()))
    assert min(sums) < 0 < max(sums), "only one branch was taken"


@pytest.mark.parametrize(
    "case",
    [
        row("float64", lambda: behind_conv(bn(8)).double(), image(dtype=torch.float64), "bn", dtype=torch.float64),
        row("float16", lambda: behind_conv(bn(8)).half(), image(dtype=FP16), "bn", dtype=FP16),
        row("bfloat16", lambda: behind_conv(bn(8)).bfloat16(), image(dtype=BF16), "bn", dtype=BF16),
        row(
            "bfloat16-with-float32-norm",
            lambda: Chain(conv=conv().bfloat16(), bn=bn(8)),
            image(dtype=BF16),
            "bn",
            dtype=BF16,
        ),
        row(
            "float16-with-float32-norm",
            lambda: Chain(bn=bn(4), conv=conv().half()),
            image(dtype=FP16),
            "bn",
            dtype=FP16,
        ),
        row(
            "bfloat16-functional",
            lambda: Net(
                lambda s, x: s.bn(F.conv2d(x, s.w)), w=nn.Parameter(torch.randn(8, 4, 3, 3)), bn=bn(8)
            ).bfloat16(),
            image(dtype=BF16),
            "bn",
            dtype=BF16,
            same_class=False,
        ),
        row(
            "bfloat16-linear",
            lambda: Chain(fc=nn.Linear(4, 8, bias=False), bn=nn.BatchNorm1d(8)).bfloat16(),
            tensor(3, 4, dtype=BF16),
            "bn",
            dtype=BF16,
        ),
    ],
)
def test_types(case: Case):
    """Weights keep their type, and so do the outputs."""
    check(case)


@pytest.mark.parametrize(
    ("prepare", "reason"),
    [
        pytest.param(lambda m: m.conv.weight.fill_(3e4), "overflow", id="weight-overflows"),
        pytest.param(
            lambda m: (m.conv.weight.fill_(1e-4), m.bn.weight.fill_(1e-6)), "underflow", id="weight-underflows"
        ),
        pytest.param(lambda m: m.bn.bias.fill_(6.5e4), "overflow", id="bias-overflows"),
        pytest.param(lambda m: m.conv.weight[0, 0, 0].fill_(torch.nan), "not-finite", id="weight-is-nan"),
    ],
)
def test_what_a_short_type_cannot_hold(prepare, reason):
    """The norm stays, and the layer is untouched."""

    def ranges(m):
        m.bn.running_mean.fill_(-50.0)
        m.bn.running_var.fill_(0.01)
        m.bn.weight.fill_(2.0)
        m.bn.bias.fill_(0.0)
        prepare(m)

    case = Case("short", lambda: behind_conv(bn(8)).half(), image(dtype=FP16), prepare=ranges)
    module = case.make()
    result = bnfold.fold(module, case.given())
    assert [k.reasons[0].reason for k in result.report.kept] == [reason]
    assert torch.equal(result.model.conv.weight.nan_to_num(), module.conv.weight.nan_to_num())


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("running_mean", torch.nan, r"mean\[3\] = nan"),
        ("running_mean", -torch.inf, r"mean\[3\] = -inf"),
        ("running_var", torch.inf, r"variance\[3\] = inf"),
        ("running_var", -1.0, r"variance\[3\] \+ epsilon = -0.99999"),
        ("weight", torch.nan, r"gamma\[3\] = nan"),
        ("bias", torch.nan, r"beta\[3\] = nan"),
    ],
)
def test_broken_statistics_are_named(key, value, said):
    module = Chain(stem=behind_conv(bn(8))).eval()
    getattr(module.stem.bn, key).data[3] = value
    with pytest.raises(bnfold.BnfoldError, match=rf"stem\.bn: {said}.*keep_broken=True") as caught:
        bnfold.fold(module, image()())
    assert caught.type.__name__ == "BrokenStatisticsError"
    assert "\n" not in str(caught.value)
    assert [k.reasons[0].reason for k in bnfold.plan(module, image()()).kept] == ["not-finite"]


def test_a_slightly_negative_variance_folds_where_epsilon_makes_up_for_it():
    check(
        Case(
            "negative",
            lambda: behind_conv(bn(8, eps=1e-3)),
            image(),
            ("bn",),
            prepare=lambda m: m.bn.running_var.fill_(-5e-4),
        )
    )
