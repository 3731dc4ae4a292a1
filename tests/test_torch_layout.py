"""What lies between layers in torch: what a map passes, backward and forward, what it does not, and why."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

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
    snapshot,
    tensor,
)

import bnfold

# ---------------------------------------------------------------------- operations that keep the channels

MAPS: dict[str, Callable[[nn.BatchNorm2d], Any]] = {  # what is made of a norm whose gammas are not negative
    "any": lambda m: m.weight[1].neg_(),
    "nonnegative": lambda m: m.weight[1].zero_(),
    "scale": lambda m: (m.weight[1].neg_(), m.bias.zero_(), m.running_mean.zero_()),
    "positive": lambda m: (m.weight.clamp_(min=1e-6), m.bias.zero_(), m.running_mean.zero_()),
}
SHIFT, SIGN = "nonzero-shift", "negative-scale"
PASSES: dict[str, str] = {}
HOMOGENEOUS = {"any": SHIFT, "nonnegative": SHIFT, "scale": SIGN}
MAXIMUM = {"any": SIGN, "scale": SIGN}
SCALES = {"any": SHIFT, "nonnegative": SHIFT}


def nothing(why: str) -> dict[str, str]:
    return dict.fromkeys(MAPS, why)


OPS: dict[str, tuple[Callable[[], nn.Module] | Callable[..., torch.Tensor], dict[str, str]]] = {
    "identity": (nn.Identity(), PASSES),
    "dropout": (nn.Dropout(0.5), PASSES),
    "relu": (nn.ReLU(), HOMOGENEOUS),
    "leaky-relu": (nn.LeakyReLU(0.2), HOMOGENEOUS),
    "prelu": (nn.PReLU(), HOMOGENEOUS),
    "absolute-value": (torch.abs, HOMOGENEOUS),
    "max-pool": (nn.MaxPool2d(3, 2, 1), MAXIMUM),
    "adaptive-max-pool": (nn.AdaptiveMaxPool2d(2), MAXIMUM),
    "largest": (lambda x: x.amax((2, 3), keepdim=True), MAXIMUM),
    "average-pool": (nn.AvgPool2d(2), PASSES),
    "average-pool-padding-left-out": (nn.AvgPool2d(3, 2, 1, count_include_pad=False), PASSES),
    "average-pool-padding-counted": (nn.AvgPool2d(3, 2, 1), SCALES),
    "average-pool-divisor": (nn.AvgPool2d(2, divisor_override=3), SCALES),
    "adaptive-average-pool": (nn.AdaptiveAvgPool2d((2, 3)), PASSES),
    "mean": (lambda x: x.mean((2, 3), keepdim=True), PASSES),
    "sum": (lambda x: x.sum(3, keepdim=True), SCALES),
    "zeros-around": (nn.ZeroPad2d((1, 0, 2, 1)), SCALES),
    "mirrored-border": (nn.ReflectionPad2d((1, 0, 2, 1)), PASSES),
    "repeated-border": (nn.ReplicationPad2d(1), PASSES),
    "wrapped-border": (nn.CircularPad2d(1), PASSES),
    "halves-around": (nn.ConstantPad2d(1, 0.5), nothing("padded-shift")),
    "nearest": (nn.Upsample(scale_factor=2), PASSES),
    "bilinear": (nn.Upsample(scale_factor=2, mode="bilinear"), PASSES),
    "bicubic": (nn.Upsample(scale_factor=2, mode="bicubic"), nothing("unsupported-op")),
    "sigmoid": (torch.sigmoid, nothing("unsupported-op")),
    "swapped-sides": (lambda x: x.transpose(2, 3), PASSES),
    "through-tokens": (lambda x: x.flatten(2).transpose(1, 2).transpose(1, 2).unflatten(2, x.shape[2:]), PASSES),
    "corner": (lambda x: x[:, :, 1:, ::2], PASSES),
}


class Around(nn.Module):
    """The operation between a layer and a norm, and between a norm and a layer, for each kind of map."""

    def __init__(self, op: Callable):
        super().__init__()
        self.op = copy.deepcopy(op)
        for kind in MAPS:
            self.add_module(f"c_{kind}", conv(kernel=1))
            self.add_module(f"behind_{kind}", bn(8))
            self.add_module(f"front_{kind}", bn(4))
            self.add_module(f"d_{kind}", conv(4, 3, 1))

    def forward(self, x):
        part = self.get_submodule
        behind = [part(f"behind_{k}")(self.op(part(f"c_{k}")(x))) for k in MAPS]
        return behind + [part(f"d_{k}")(self.op(part(f"front_{k}")(x))) for k in MAPS]


@pytest.mark.parametrize("name", OPS)
def test_operations_that_keep_the_channels(name):
    op, stay = OPS[name]

    def prepare(module: nn.Module) -> None:
        for kind, change in MAPS.items():
            for norm in (module.get_submodule(f"{side}_{kind}") for side in ("behind", "front")):
                norm.weight.abs_()
                change(norm)

    kept = {f"behind_{k}": f"{why} model-output" for k, why in stay.items()}
    kept |= {f"front_{k}": f"model-input {why}" for k, why in stay.items()}
    folded = tuple(n for k in MAPS for n in (f"behind_{k}", f"front_{k}") if n not in kept)
    judge(Case(name, lambda: Around(op).double(), image(dtype=torch.float64), folded, kept, prepare=prepare))


def judge(case: Case) -> None:
    """What `check` does, in float64 alone."""
    module, given = case.make(), case.given()
    before = snapshot(module)
    result = bnfold.fold(module, given)
    assert snapshot(module) == before
    assert type(result.model) is type(module)
    check_report(case, result.report)
    for x in (given, image(batch=3, side=9, dtype=torch.float64)()):
        compare(run(result.model, x), run(case.make(), x), EXACT)


# ---------------------------------------------------------------------- operations on channels


def behind(op: Callable, channels: int, outputs: int = 8) -> Callable[[], nn.Module]:
    """A layer, the operation, a norm."""
    return lambda: Net(lambda s, x: s.bn(op(s.conv(x))), conv=conv(4, outputs), bn=bn(channels))


def in_front(op: Callable, channels: int, inputs: int = 4) -> Callable[[], nn.Module]:
    """A norm, the operation, a layer."""
    return lambda: Net(lambda s, x: s.conv(op(s.bn(x))), bn=bn(inputs), conv=conv(channels, 3, 2))


def shuffled(x: torch.Tensor, groups: int = 2) -> torch.Tensor:
    """As ShuffleNet writes it."""
    n, c, h, w = x.shape
    return x.view(n, groups, c // groups, h, w).transpose(1, 2).contiguous().view(n, c, h, w)


def to_space(x: torch.Tensor) -> torch.Tensor:
    """Pixel shuffle that deals blocks before channels, as TensorFlow and ONNX's DCR do."""
    n, c, h, w = x.shape
    return x.view(n, 2, 2, c // 4, h, w).permute(0, 3, 4, 1, 5, 2).reshape(n, c // 4, 2 * h, 2 * w)


PICK = torch.tensor([3, 1, 0])


@pytest.mark.parametrize(
    "case",
    [
        row("pixel-shuffle", behind(lambda x: F.pixel_shuffle(x, 2), 2), image(), "bn"),
        row("counted-from-the-end", behind(lambda x: x.permute(0, -1, 1, 2).permute(0, -2, -1, 1), 8), image(), "bn"),
        row("pixel-shuffle-blocks-first", behind(to_space, 2), image(), "bn"),
        row("pixel-unshuffle", in_front(lambda x: F.pixel_unshuffle(x[:, :, :6], 2), 16), image(), "bn"),
        row(
            "in-front-of-a-pixel-shuffle",
            in_front(lambda x: F.pixel_shuffle(x, 2), 1),
            image(),
            kept={"bn": "model-input not-per-channel"},
        ),
        row("channel-shuffle", behind(shuffled, 8), image(), "bn"),
        row("channel-shuffle-in-front", in_front(shuffled, 4), image(), "bn"),
        row("channel-shuffle-op", behind(lambda x: F.channel_shuffle(x, 4), 8), image(), "bn"),
        row("some-channels", behind(lambda x: x[:, 2:7], 5), image(), "bn"),
        row("every-other-channel", in_front(lambda x: x[:, 1::2], 2), image(), "bn"),
        row("channels-by-index", in_front(lambda x: x.index_select(1, PICK), 3), image(), "bn"),
        row("channels-by-index-behind", behind(lambda x: x.index_select(1, PICK), 3), image(), "bn"),
        row(
            "a-channel-twice",
            behind(lambda x: x.index_select(1, torch.tensor([0, 2, 0])), 3),
            image(),
            kept={"bn": "repeated-channel model-output"},
        ),
        row("a-channel-twice-in-front", in_front(lambda x: x.index_select(1, torch.tensor([0, 2, 0])), 3), image(),
            "bn"),
        row("one-channel", behind(lambda x: x.select(1, 3).unsqueeze(1), 1), image(), "bn"),
    ],
)  # fmt: skip
def test_operations_on_channels(case: Case):
    check(case)


def vector(features: int) -> nn.BatchNorm1d:
    return nn.BatchNorm1d(features)


@pytest.mark.parametrize(
    "case",
    [
        row(
            "flatten-one-position",
            lambda: Chain(conv=conv(), pool=nn.AdaptiveAvgPool2d(1), flat=nn.Flatten(), bn=vector(8)),
            image(),
            "bn",
        ),
        row(
            "flatten-one-position-in-front",
            lambda: Chain(bn=bn(4), pool=nn.AdaptiveAvgPool2d(1), flat=nn.Flatten(), fc=nn.Linear(4, 3)),
            image(),
            "bn",
        ),
        row(
            "flatten-positions-in-front",
            lambda: Chain(bn=bn(4), flat=nn.Flatten(), fc=nn.Linear(4 * 7 * 8, 3)),
            image(),
            "bn",
        ),
        row(
            "flatten-behind-a-mean",
            lambda: Net(lambda s, x: s.fc(s.bn(x).mean((2, 3))), bn=bn(4), fc=nn.Linear(4, 3)),
            image(),
            "bn",
        ),
        row(
            "squeeze",
            lambda: Net(lambda s, x: s.bn(s.conv(x).squeeze(3)), conv=conv(kernel=(3, 8)), bn=vector(8)),
            image(),
            "bn",
        ),
        row(
            "unsqueeze",
            lambda: Net(lambda s, x: s.bn(s.fc(x).unsqueeze(2).unsqueeze(3)), fc=nn.Linear(4, 8), bn=bn(8)),
            tensor(3, 4),
            "bn",
        ),
        row(
            "unsqueeze-in-front",
            lambda: Net(lambda s, x: s.conv(s.bn(x)[:, :, None, None]), bn=vector(4), conv=conv(kernel=1)),
            tensor(3, 4),
            "bn",
        ),
    ],
)
def test_dimensions_that_come_and_go(case: Case):
    check(case)


# ---------------------------------------------------------------------- joins and parts


def joined(self, x):
    return self.bn(torch.cat([self.c1(x), self.c2(x), self.c3(x)], 1))


def one_part(self, x):
    return self.conv(torch.cat([x.tanh(), self.bn(x), x.sigmoid()], 1))


def in_three(self, x):
    """Query, key and value from one layer, a norm on two of them."""
    q, k, v = self.qkv(x).chunk(3, 1)
    return self.b1(q).softmax(1) * self.b2(k).tanh() + v.sigmoid()


def split_in_front(self, x):
    a, b = self.bn(x).split((1, 3), 1)
    return self.c1(a), self.c2(b).tanh()


def split_and_one_refuses(self, x):
    a, b = self.bn(x).split((1, 3), 1)
    return self.c1(a), b.tanh()


def summed(self, x):
    return self.bn(self.c1(x) + self.c2(x).add(self.c3(x.tanh())))


def gated(self, x):
    """Squeeze and excitation: a product of a layer and a gate per channel."""
    y = self.c1(x)
    return self.bn(y * self.gate(y.mean((2, 3), keepdim=True)).sigmoid())


def gated_by_another(self, x):
    return self.bn(self.c1(x) * self.gate(x.mean((2, 3), keepdim=True)).sigmoid())


def gated_behind(self, x):
    """The gate is computed from what the norm puts out."""
    y = self.bn(self.c1(x))
    return y * self.gate(y.mean((2, 3), keepdim=True)).sigmoid()


def gated_in_front(self, x):
    return self.c2(self.bn(x) * self.gate(x.mean((2, 3), keepdim=True)).sigmoid())


def one_plus(self, x):
    return self.conv(self.bn(x) + x.tanh())


def without_shift(m: nn.Module) -> None:
    m.bn.bias.zero_()
    m.bn.running_mean.zero_()


def without_scale(m: nn.Module) -> None:
    m.bn.eps = 0.0
    m.bn.weight.fill_(1.5)
    m.bn.running_var.fill_(2.25)


@pytest.mark.parametrize(
    "case",
    [
        row("concat", lambda: Net(joined, c1=conv(4, 3), c2=conv(4, 5), c3=conv(4, 1), bn=bn(9)), image(), "bn"),
        row(
            "concat-one-refuses",
            lambda: Net(joined, c1=conv(4, 3), c2=Chain(c=conv(4, 5), act=nn.Tanh()), c3=conv(4, 1), bn=bn(9)),
            image(),
            kept={"bn": "unsupported-op model-output"},
        ),
        row("concat-one-part-in-front", lambda: Net(one_part, bn=bn(4), conv=conv(12, 5)), image(), "bn"),
        row("query-key-value", lambda: Net(in_three, qkv=conv(4, 18), b1=bn(6), b2=bn(6)), image(), "b1 b2"),
        row("split-in-front", lambda: Net(split_in_front, bn=bn(4), c1=conv(1, 3), c2=conv(3, 3)), image(), "bn"),
        row(
            "split-and-one-refuses",
            lambda: Net(split_and_one_refuses, bn=bn(4), c1=conv(1, 3)),
            image(),
            kept={"bn": "model-input unsupported-op"},
        ),
        row("sum", lambda: Net(summed, c1=conv(), c2=conv(), c3=conv(), bn=bn(8)), image(), "bn"),
        row("gate", lambda: Net(gated, c1=conv(), gate=conv(8, 8, 1), bn=bn(8)), image(),
            kept={"bn": "nonzero-shift model-output"}),
        row("gate-of-its-own-value", lambda: Net(gated, c1=conv(), gate=conv(8, 8, 1), bn=bn(8)), image(),
            kept={"bn": "multiple-consumers model-output"}, prepare=without_shift),
        row("gate-of-another", lambda: Net(gated_by_another, c1=conv(kernel=1), gate=conv(4, 8, 1), bn=bn(8)), image(),
            "bn", prepare=without_shift),
        row("gate-behind", lambda: Net(gated_behind, c1=conv(), gate=conv(8, 8, 1), bn=bn(8)), image(), "bn"),
        row("gate-in-front", lambda: Net(gated_in_front, bn=bn(4), gate=conv(4, 4, 1), c2=conv()), image(),
            kept={"bn": "model-input nonzero-shift"}),
        row("gate-in-front-scale", lambda: Net(gated_in_front, bn=bn(4), gate=conv(4, 4, 1), c2=conv(padding=1)),
            image(), "bn", prepare=without_shift),
        row("one-summand-in-front", lambda: Net(one_plus, bn=bn(4), conv=conv()), image(),
            kept={"bn": "model-input unequal-branches"}),
        row("one-summand-in-front-shift", lambda: Net(one_plus, bn=bn(4), conv=conv()), image(), "bn",
            prepare=without_scale),
    ],
)  # fmt: skip
def test_joins_and_parts(case: Case):
    check(case)


# ---------------------------------------------------------------------- scale and shift part ways


def positive(m: nn.Module) -> None:
    for norm in m.modules():
        if isinstance(norm, bn):
            norm.weight.abs_().clamp_(min=1e-3)


def added_to_another(self, x, z):
    return self.c2(self.bn(self.c1(x) + z))


def mixed(self, x):
    """ConvMixer's block (Trockman and Kolter, 2022), with ReLU."""
    y = x.tanh()
    return self.b2(torch.relu(self.c2(self.b1(torch.relu(self.c1(y))) + y)))


@pytest.mark.parametrize(
    "case",
    [
        row("the-shift-into-a-summand-the-scale-into-a-padded-layer",
            lambda: Net(added_to_another, c1=conv(4, 4, 1), bn=bn(4), c2=conv(padding=1)),
            lambda: (image()(), image()()), "bn", prepare=positive),
        row("the-scale-through-a-relu-the-shift-through-a-sum",
            lambda: Net(mixed, c1=conv(4, 4, padding=1, groups=4), b1=bn(4), c2=conv(kernel=1), b2=bn(8)),
            image(), "b1", {"b2": "nonzero-shift model-output"}, prepare=positive),
        row("a-scale-that-is-negative",
            lambda: Net(mixed, c1=conv(4, 4, padding=1, groups=4), b1=bn(4), c2=conv(kernel=1), b2=bn(8)),
            image(), kept={"b1": "nonzero-shift unequal-branches", "b2": "nonzero-shift model-output"},
            prepare=lambda m: m.b1.weight[1].fill_(-0.5)),
    ],
)  # fmt: skip
def test_scale_and_shift_part_ways(case: Case):
    """Where neither way lets both pass, each may let one."""
    report = check(case)
    assert all(f.direction == "both" for f in report.folded)


# ---------------------------------------------------------------------- parallel branches


def unit(inputs: int = 4, outputs: int = 4, kernel: int = 3, **options: Any) -> nn.Module:
    """A convolution and its norm, padded so that the size stays."""
    layer = conv(inputs, outputs, kernel, padding=kernel // 2, bias=False, **options)
    return Chain(conv=layer, bn=bn(outputs))


class Branches(nn.Module):
    """Branches on one value, added, with what is behind them."""

    def __init__(self, *branches: nn.Module, then: nn.Module | None = None):
        super().__init__()
        self.branches, self.then = nn.ModuleList(branches), then or nn.ReLU()

    def forward(self, x):
        return self.then(sum(branch(x) for branch in self.branches))


def repvgg(stride: int = 1, groups: int = 1) -> nn.Module:
    """Ding et al., 2021: 3x3, 1x1 and, where sizes agree, a norm alone."""
    outputs = 4 if stride == 1 else 8
    options = {"stride": stride, "groups": groups}
    alone = [bn(4)] if stride == 1 else []
    return Branches(unit(4, outputs, **options), unit(4, outputs, 1, **options), *alone)


def mobileone() -> nn.Module:
    """Vasu et al., 2023: several depthwise 3x3, a 1x1 and a norm; then the same of 1x1."""
    depthwise = Branches(*(unit(groups=4) for _ in range(3)), unit(kernel=1, groups=4), bn(4))
    return Chain(depthwise=depthwise, pointwise=Branches(unit(4, 8, 1), unit(4, 8, 1)))


class RepGhost(nn.Module):
    """Chen et al., 2022: a depthwise layer beside a norm of its own input, inside a bottleneck."""

    def __init__(self):
        super().__init__()
        self.primary, self.cheap, self.alone = Chain(u=unit(4, 6, 1), act=nn.ReLU()), unit(6, 6, groups=6), bn(6)

    def forward(self, x):
        y = self.primary(x)
        return torch.relu(self.cheap(y) + self.alone(y))


class RepViT(nn.Module):
    """Wang et al., 2024: a depthwise unit, a bare 1x1 and the value itself, under one more norm."""

    def __init__(self):
        super().__init__()
        self.unit, self.one, self.bn = unit(groups=4), conv(4, 4, 1, groups=4), bn(4)

    def forward(self, x):
        return self.bn((self.unit(x) + self.one(x)) + x)


class RepMixer(nn.Module):
    """FastViT (Vasu et al., 2023): a mixer less a norm alone, scaled, beside the value itself."""

    def __init__(self):
        super().__init__()
        self.mixer, self.norm = Branches(unit(groups=4), unit(kernel=1, groups=4), bn(4), then=nn.Identity()), bn(4)
        self.gamma = nn.Parameter(torch.randn(4, 1, 1))

    def forward(self, x):
        return x + self.gamma * (self.mixer(x) - self.norm(x))


class Scaled(nn.Module):
    def __init__(self, factor: Any):
        super().__init__()
        self.factor = factor

    def forward(self, x):
        return x * self.factor


@pytest.mark.parametrize(
    ("build", "before", "after"),
    [
        pytest.param(repvgg, 2, 1, id="repvgg"),
        pytest.param(lambda: repvgg(2), 2, 1, id="repvgg-strided"),
        pytest.param(lambda: repvgg(groups=2), 2, 1, id="repvgg-groups"),
        pytest.param(mobileone, 6, 2, id="mobileone"),
        pytest.param(RepGhost, 2, 2, id="repghost"),
        pytest.param(RepViT, 2, 1, id="repvit"),
        pytest.param(lambda: Branches(unit(), conv(4, 4, (1, 3), padding=(0, 1)), conv(4, 4, (3, 1), padding=(1, 0))),
                     3, 1, id="square-row-column"),
        pytest.param(lambda: Branches(conv(4, 4, 5, padding=2), conv(4, 4, 3, padding=2, dilation=2), unit(kernel=1)),
                     3, 1, id="dilated"),
        pytest.param(lambda: Branches(unit(), unit(groups=2), unit(groups=4, kernel=1)), 3, 1, id="groups-in-a-dense"),
        pytest.param(lambda: Branches(unit(4, 8, stride=2), unit(4, 8, 1, stride=2)), 2, 1, id="strided"),
        pytest.param(lambda: Branches(nn.Identity(), unit()), 1, 1, id="the-value-itself"),
        pytest.param(lambda: Branches(unit(), Scaled(-0.5)), 1, 1, id="a-pure-scale"),
        pytest.param(lambda: Branches(unit(4, 4, 5), unit(), then=Chain(bn=bn(4), act=nn.ReLU())), 2, 1,
                     id="a-norm-behind"),
        pytest.param(RepMixer, 2, 1, id="fastvit-mixer"),
        pytest.param(lambda: Branches(unit(), unit(), then=nn.Identity()), 2, 1, id="equal-kernels"),
    ],
)  # fmt: skip
def test_branches_become_one_layer(build, before, after):
    """Re-parameterization, without the network's own code for it; every norm goes on the way."""
    case = Case("merge", lambda: build().double(), image(dtype=torch.float64))
    module, x = case.make(), case.given()
    program = torch.export.export(module, (x,))
    merged, apart = bnfold.fold(program), bnfold.fold(program, merge=False)
    assert merged.report.kept == ()
    assert any(f.direction == "merge" for f in merged.report.folded)
    assert not any(f.direction == "merge" for f in apart.report.folded)
    assert [convolutions(p) for p in (program, apart.model, merged.model)] == [before, before, after]
    for folded in (merged, apart):
        compare(run(folded.model.module(), x), run(case.make(), x), EXACT)


def convolutions(program: torch.export.ExportedProgram) -> int:
    return sum("conv" in str(n.target) for n in program.graph.nodes if n.op == "call_function")


def test_a_module_with_a_norm_alone_among_its_branches_becomes_a_graph():
    """A norm beside layers goes only where they become one."""
    norms = tuple(n for n, m in repvgg().named_modules() if isinstance(m, bn))
    report = check(Case("repvgg", repvgg, image(), norms, same_class=False))
    assert [f.direction for f in report.folded].count("merge") == 3


@pytest.mark.parametrize(
    "build",
    [
        pytest.param(lambda: Branches(unit(groups=4), unit(kernel=1)), id="a-dense-one-beside-a-depthwise"),
        pytest.param(lambda: Branches(conv(padding=1), conv(padding=1, padding_mode="reflect")), id="borders"),
        pytest.param(lambda: Branches(conv(kernel=3, padding=2, dilation=2), conv(padding=1)), id="other-taps"),
        pytest.param(lambda: Branches(conv(stride=2, padding=1), conv(kernel=2, stride=2, padding=(1, 0))),
                     id="between-the-taps"),
        pytest.param(lambda: Branches(unit(), nn.Sequential(nn.Tanh(), unit())), id="another-value"),
        pytest.param(lambda: Branches(unit(), nn.Sequential(unit(), nn.Tanh())), id="an-activation-behind"),
        pytest.param(lambda: Branches(unit(4, 4, 3), nn.MaxPool2d(3, 1, 1)), id="a-pool"),
    ],
)  # fmt: skip
def test_branches_that_do_not_fit_stay_apart(build):
    """More multiply-adds than before, other borders, other positions: no merge, and the norms fold all the same."""
    norms = tuple(n for n, m in build().named_modules() if isinstance(m, bn))
    report = check(Case("apart", build, image(), norms))
    assert not any(f.direction == "merge" for f in report.folded)


class Narrowed(nn.Module):
    """Two inputs of which nobody says the size: what is folded is the trace."""

    def __init__(self):
        super().__init__()
        self.conv, self.bn = conv(4, 9, 1), bn(4)

    def forward(self, x, y):
        return self.bn(self.conv(x).narrow(1, 3, 4)) + y


@pytest.mark.parametrize("kind", ["trace", "program"])
def test_channels_taken_by_start_and_length(kind):
    """An exported program has `narrow`, a trace becomes a slice."""
    case = Case("narrow", Narrowed, lambda: (image()(), image()()), dtype=torch.float64)
    module, inputs = case.make().double(), in_double(case.given())
    result = bnfold.fold(module if kind == "trace" else torch.export.export(module, inputs))
    assert [f.norm for f in result.report.folded] == ["bn"]
    folded = result.model if kind == "trace" else result.model.module()
    compare(folded(*inputs), run(module, inputs), EXACT)
