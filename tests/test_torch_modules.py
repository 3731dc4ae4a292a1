"""A module keeps its class where its tree can say the folds: subclasses, containers, code that looks at its norms."""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch_models import Case, Chain, Net, bn, check, conv, image, row, snapshot
from torchvision.ops import FrozenBatchNorm2d

import bnfold

# ---------------------------------------------------------------------- subclasses of norms


class NormAct(nn.BatchNorm2d):
    """A norm that contains its activation, as timm builds them."""

    def __init__(self, channels: int, act: nn.Module, drop: nn.Module | None = None):
        super().__init__(channels)
        self.drop, self.act = drop or nn.Identity(), act

    def forward(self, x):
        return self.act(self.drop(super().forward(x)))


class LeakyNorm(nn.BatchNorm2d):
    def forward(self, x):
        return F.leaky_relu(super().forward(x))


class DoubledNorm(nn.BatchNorm2d):
    def forward(self, x):
        return super().forward(x) * 2


class TupleNorm(nn.BatchNorm2d):
    def forward(self, x):
        return super().forward(x), x.shape[1]


class CentredNorm(nn.BatchNorm2d):
    """gamma is stored as its distance from 1."""

    def forward(self, x):
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight + 1, self.bias, False, 0.0, self.eps)


class FrozenInCode(nn.BatchNorm2d):
    """Never in training mode, whatever it is told."""

    def train(self, mode: bool = True):
        return super().train(False)


class NormOfMany(nn.Module):
    """A norm per domain; evaluation uses one."""

    def __init__(self, channels: int):
        super().__init__()
        self.domains = nn.ModuleList(bn(channels) for _ in range(3))

    def forward(self, x):
        return self.domains[1](x)


def behind_conv(norm: nn.Module) -> nn.Module:
    return Chain(conv=conv(), bn=norm)


UNUSED = {"bn.domains.0": "not-executed", "bn.domains.2": "not-executed"}


@pytest.mark.parametrize(
    "case",
    [
        row("activation", lambda: behind_conv(NormAct(8, nn.SiLU())), image(), "bn"),
        row("activation-in-place", lambda: behind_conv(NormAct(8, nn.ReLU(True))), image(), "bn"),
        row("dropout-and-activation", lambda: behind_conv(NormAct(8, nn.GELU(), nn.Dropout())), image(), "bn"),
        row("activation-is-identity", lambda: behind_conv(NormAct(8, nn.Identity())), image(), "bn"),
        row("activation-is-identity-in-front", lambda: Chain(bn=NormAct(4, nn.Identity()), conv=conv()), image(), "bn"),
        row(
            "activation-with-weights",
            lambda: behind_conv(NormAct(8, nn.Sequential(nn.Conv2d(8, 8, 1), nn.Tanh()))),
            image(),
            "bn",
        ),
        row("functional-activation", lambda: behind_conv(LeakyNorm(8)), image(), "bn", same_class=False),
        row("scale-after", lambda: behind_conv(DoubledNorm(8)), image(), "bn", same_class=False),
        row(
            "tuple",
            lambda: Net(lambda s, x: s.bn(s.conv(x))[0].tanh(), conv=conv(), bn=TupleNorm(8)),
            image(),
            "bn",
            same_class=False,
        ),
        row("centred-gamma", lambda: behind_conv(CentredNorm(8)), image(), "bn"),
        row(
            "centred-gamma-takes-another",
            lambda: Chain(b1=bn(4), b2=CentredNorm(4), act=nn.Sigmoid()),
            image(),
            "b1",
            {"b2": "model-input unsupported-op"},
            same_class=False,
        ),
        row(
            "activation-takes-another",
            lambda: Chain(b1=bn(4), b2=NormAct(4, nn.Tanh())),
            image(),
            "b1",
            {"b2": "model-input unsupported-op"},
        ),
        row("frozen-in-code", lambda: behind_conv(FrozenInCode(8)), image(), "bn"),
        row("one-of-many", lambda: behind_conv(NormOfMany(8)), image(), "bn.domains.1", UNUSED),
    ],
)
def test_subclasses_of_norms(case: Case):
    check(case)


def test_what_stays_of_a_norm_is_its_activation():
    case = Case("stays", lambda: Chain(c1=conv(), b1=NormAct(8, nn.ReLU()), c2=conv(8, 8), b2=bn(8)), image())
    folded = bnfold.fold(case.make(), case.given()).model
    assert [type(m) for m in folded] == [nn.Conv2d, nn.ReLU, nn.Conv2d, nn.Identity]


# ---------------------------------------------------------------------- subclasses of layers


class StandardisedConv(nn.Conv2d):
    """Weight standardisation: the weight that is used is computed from the one that is stored."""

    def forward(self, x):
        w = self.weight
        w = (w - w.mean((1, 2, 3), keepdim=True)) / (w.std((1, 2, 3), keepdim=True) + 1e-5)
        return F.conv2d(x, w, self.bias)


class BatchStandardisedConv(nn.Conv2d):
    """The same by batch_norm in training mode, which normalises the weight and is no norm of the network."""

    def forward(self, x):
        w = F.batch_norm(self.weight.reshape(1, self.out_channels, -1), None, None, training=True, momentum=0.0)
        return F.conv2d(x, w.reshape_as(self.weight), self.bias)


class BiaslessConv(nn.Conv2d):
    """Ignores a bias."""

    def forward(self, x):
        return F.conv2d(x, self.weight)


class BiasApartConv(nn.Conv2d):
    """Adds its bias itself."""

    def forward(self, x):
        return F.conv2d(x, self.weight) + self.bias.view(1, -1, 1, 1)


class SamePaddedConv(nn.Conv2d):
    """Pads by hand, as TensorFlow did."""

    def forward(self, x):
        return F.conv2d(F.pad(x, (0, 1, 0, 1)), self.weight, self.bias, 2)


def patched(m: nn.Module, forward: Callable) -> nn.Module:
    m.forward = types.MethodType(forward, m)
    return m


@pytest.mark.parametrize(
    "case",
    [
        row("standardised", lambda: Chain(conv=StandardisedConv(4, 8, 3), bn=bn(8)), image(), "bn", same_class=False),
        row(
            "standardised-by-batch-norm",
            lambda: Chain(conv=BatchStandardisedConv(4, 8, 3), bn=bn(8)),
            image(),
            "bn",
            same_class=False,
        ),
        row(
            "ignores-a-bias",
            lambda: Chain(conv=BiaslessConv(4, 8, 3, bias=False), bn=bn(8)),
            image(),
            "bn",
            same_class=False,
        ),
        row("adds-its-bias", lambda: Chain(conv=BiasApartConv(4, 8, 3), bn=bn(8)), image(), "bn", same_class=False),
        row("same-padded", lambda: Chain(conv=SamePaddedConv(4, 8, 3, bias=False), bn=bn(8)), image(), "bn"),
        row(
            "patched-layer",
            lambda: Chain(conv=patched(conv(bias=False), lambda s, x: F.conv2d(x, s.weight)), bn=bn(8)),
            image(),
            "bn",
            same_class=False,
        ),
        row(
            "patched-norm",
            lambda: Chain(conv=conv(), bn=patched(bn(8), lambda s, x: nn.BatchNorm2d.forward(s, x).tanh())),
            image(),
            "bn",
            same_class=False,
        ),
        row("closure-over-the-layer", lambda: _closure(), image(), "bn", same_class=False),
    ],
)
def test_layers_with_a_mind_of_their_own(case: Case):
    check(case)


def _closure() -> nn.Module:
    m = Chain(conv=conv(bias=False), bn=bn(8))
    layer = m.conv
    layer.forward = lambda x: F.conv2d(x, layer.weight)
    return m


# ---------------------------------------------------------------------- code that looks at its norms


def branch_on_batch(self, x):
    return self.bn(self.conv(x)) if x.shape[0] > 1 else self.conv(x)


def norms_by_type(self, x):
    y = self.bn(self.conv(x))
    return y.tanh() if isinstance(self.bn, nn.BatchNorm2d) else y


@pytest.mark.parametrize(
    "case",
    [
        row(
            "reads-an-attribute",
            lambda: Net(lambda s, x: s.bn(s.conv(x)) * s.bn.num_features, conv=conv(), bn=bn(8)),
            image(),
            "bn",
            same_class=False,
        ),
        row(
            "reads-gamma",
            lambda: Net(lambda s, x: s.bn(s.conv(x)) + s.bn.weight.sum(), conv=conv(), bn=bn(8)),
            image(),
            "bn",
            same_class=False,
        ),
        row(
            "reads-the-layers-weight",
            lambda: Net(lambda s, x: s.bn(s.conv(x)) + s.conv.weight.sum(), conv=conv(), bn=bn(8)),
            image(),
            "bn",
            same_class=False,
        ),
        row("asks-for-the-type", lambda: Net(norms_by_type, conv=conv(), bn=bn(8)), image(), "bn", same_class=False),
        row("layers-in-a-plain-list", lambda: _plain_list(), image(), "bn", same_class=False),
        row(
            "branches-on-the-batch",
            lambda: Net(branch_on_batch, conv=conv(), bn=bn(8)),
            image(batch=1),
            kept={"bn": "not-executed"},
            batches=False,
        ),
    ],
)
def test_code_that_looks_at_its_norms(case: Case):
    """Neither graph nor tree shows it; running the edited copy does."""
    check(case)


def _plain_list() -> nn.Module:
    m = Net(lambda s, x: s.parts[1](s.parts[0](x)), conv=conv(), bn=bn(8))
    m.parts = [m.conv, m.bn]
    return m


def test_norms_in_containers():
    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.named["bn"](self.named["conv"](x))

    def build():
        return Net(
            forward,
            layers=nn.ModuleList([conv(), bn(8), nn.Tanh()]),
            named=nn.ModuleDict({"conv": conv(8, 8), "bn": bn(8)}),
        )

    check(Case("containers", build, image(), ("layers.1", "named.bn")))


# ---------------------------------------------------------------------- keep_class

KEEP = {"keep_class": True}


@pytest.mark.parametrize(
    "case",
    [
        row(
            "block-twice",
            lambda: Net(
                lambda s, x: s.b2(s.c2(s.bn(s.conv(s.bn(s.conv(x)).tanh())))),
                conv=conv(4, 4),
                bn=bn(4),
                c2=conv(4, 4),
                b2=bn(4),
            ),
            image(),
            "b2",
            {"bn": "shared-weight", "bn#2": "shared-weight"},
        ),
        row(
            "functional-layer",
            lambda: Net(
                lambda s, x: s.b2(F.conv2d(s.bn(s.conv(x)).tanh(), s.w)),
                conv=conv(),
                bn=bn(8),
                w=nn.Parameter(torch.randn(8, 8, 3, 3)),
                b2=bn(8),
            ),
            image(),
            "bn",
            {"b2": "not-expressible"},
        ),
        row(
            "functional-norm",
            lambda: Net(
                lambda s, x: F.batch_norm(s.bn(s.conv(x)).tanh(), s.m, s.v),
                conv=conv(),
                bn=bn(8),
                m=torch.randn(8),
                v=torch.ones(8),
            ),
            image(),
            "bn",
            {"batch_norm_1": "unsupported-op model-output"},
        ),
        row("activation-inside", lambda: Chain(conv=conv(), bn=LeakyNorm(8)), image(), kept={"bn": "not-expressible"}),
        row(
            "reads-an-attribute",
            lambda: Net(lambda s, x: s.bn(s.conv(x)) * s.bn.eps, conv=conv(), bn=bn(8)),
            image(),
            kept={"bn": "not-expressible"},
        ),
        row("all-can-be-said", lambda: Chain(conv=conv(), bn=bn(8)), image(), "bn"),
    ],
)
def test_keep_class(case: Case):
    """The tree says what it can; what only a graph could fold stays and says so."""
    check(replace(case, options=KEEP))


@pytest.mark.parametrize(
    "case",
    [
        row("behind", lambda: Net(lambda s, x: s.bn(s.conv(x)) * 2 + 1, conv=conv(), bn=bn(8)), image(), "bn"),
        row("in-front", lambda: Net(lambda s, x: s.bn(s.conv(x * 2 - 1)), conv=conv(), bn=bn(8)), image(), "bn"),
        row(
            "between",
            lambda: Net(lambda s, x: s.bn(s.conv(x) * 2), conv=conv(), bn=bn(8)),
            image(),
            "bn",
            same_class=False,
        ),
        row(
            "between-in-front",
            lambda: Net(lambda s, x: s.conv(s.bn(x) * 2), conv=conv(), bn=bn(4)),
            image(),
            "bn",
            same_class=False,
        ),
    ],
)
def test_plain_arithmetic_is_no_reason_to_lose_the_class(case: Case):
    """Where a norm folds without it, it stays; where the norm needs it gone, the graph takes both."""
    check(case)


# ---------------------------------------------------------------------- training mode


@pytest.mark.parametrize(
    "build",
    [
        pytest.param(lambda: Chain(conv=conv(), drop=nn.Dropout(0.5), bn=bn(8)), id="all"),
        pytest.param(lambda: Chain(conv=conv(), bn=FrozenBatchNorm2d(8), drop=nn.Dropout(0.5)), id="frozen"),
        pytest.param(lambda: Chain(conv=conv(), bn=bn(8).eval(), act=nn.RReLU()), id="part"),
    ],
)
def test_a_module_left_in_training_mode(build):
    """A copy in evaluation mode is folded, the report says so, and the argument goes on training."""
    case = Case("training", build, image(), ("bn",), train=True)
    report = check(case)
    assert any("train mode" in note for note in report.notes)
    module = case.make()
    before = snapshot(module)
    bnfold.plan(module, case.given())
    assert snapshot(module) == before
