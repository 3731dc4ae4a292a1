"""Every kind of layer takes a normalization in, from behind it and from in front of it."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch_models import Case, Chain, Net, bn, check, conv, image, row, tensor

CONV = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
CONV_TRANSPOSE = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
NORM = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
GROUPS = {  # in, out, groups; equal and unequal channels
    "dense": (4, 6, 1),
    "square": (6, 6, 1),
    "groups2": (4, 6, 2),
    "square-groups2": (6, 6, 2),
    "depthwise": (4, 4, 4),
    "multiplier": (3, 6, 3),
    "one-channel": (1, 1, 1),
}


def volume(channels: int, dims: int):
    return tensor(2, channels, *[7, 6, 5][:dims])


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape))


def around(dims: int, channels: tuple[int, int, int], bias: bool) -> nn.Module:
    """A norm behind a convolution, one behind a transposed convolution, and one in front of a convolution."""
    inputs, outputs, groups = channels
    options = {"groups": groups, "bias": bias}
    return Chain(
        down=CONV[dims](inputs, outputs, 3, 2, padding=1, **options),
        behind=NORM[dims](outputs),
        act1=nn.Tanh(),
        back=CONV[dims](outputs, inputs, 1),
        act2=nn.Sigmoid(),
        up=CONV_TRANSPOSE[dims](inputs, outputs, 3, 2, padding=1, output_padding=1, **options),
        behind_up=NORM[dims](outputs),
        act3=nn.Tanh(),
        front=NORM[dims](outputs),
        last=CONV[dims](
            outputs, inputs, 2, dilation=2, groups=math.gcd(outputs, inputs) if groups > 1 else 1, bias=bias
        ),
    )


def grid() -> list:
    """One to three dimensions, all kinds of groups, every other network with biases."""
    rows = []
    for dims, (name, channels) in itertools.product(CONV, GROUPS.items()):
        if dims == 2 or name in ("dense", "groups2", "multiplier"):
            bias = len(rows) % 2 == 0
            build = partial(around, dims, channels, bias)
            given = volume(channels[0], dims)
            rows.append(row(f"{dims}d-{name}-{'bias' if bias else 'bare'}", build, given, "behind behind_up front"))
    return rows


@pytest.mark.parametrize("case", grid())
def test_convolutions(case: Case):
    check(case)


PADDED = "model-input padded-shift"


@pytest.mark.parametrize(
    "case",
    [
        *[
            row(mode, lambda m=mode: _padded(m), image(), "b1 b2 b3 b4")
            for mode in ("zeros", "reflect", "replicate", "circular")
        ],
        row("same-even-kernel", lambda: Chain(conv=conv(kernel=4, padding="same"), bn=bn(8)), image(), "bn"),
        row("in-front-unpadded", lambda: Chain(bn=bn(4), conv=conv(stride=2)), image(), "bn"),
        row("in-front-valid", lambda: Chain(bn=bn(4), conv=conv(padding="valid")), image(), "bn"),
        row("in-front-same-1x1", lambda: Chain(bn=bn(4), conv=conv(kernel=1, padding="same")), image(), "bn"),
        *[
            row(f"in-front-{mode}", lambda m=mode: Chain(bn=bn(4), conv=conv(padding=1, padding_mode=m)), image(), "bn")
            for mode in ("reflect", "replicate", "circular")
        ],
        row("in-front-grouped", lambda: Chain(bn=bn(4), conv=conv(4, 6, groups=2, stride=2)), image(), "bn"),
        row("in-front-depthwise", lambda: Chain(bn=bn(4), conv=conv(4, 8, groups=4, bias=False)), image(), "bn"),
        row("in-front-padded", lambda: Chain(bn=bn(4), conv=conv(padding=1)), image(), kept={"bn": PADDED}),
        row("in-front-one-side", lambda: Chain(bn=bn(4), conv=conv(padding=(0, 1))), image(), kept={"bn": PADDED}),
        row(
            "in-front-padded-1x1", lambda: Chain(bn=bn(4), conv=conv(kernel=1, padding=1)), image(), kept={"bn": PADDED}
        ),
        row("in-front-same", lambda: Chain(bn=bn(4), conv=conv(padding="same")), image(), kept={"bn": PADDED}),
        row(
            "in-front-transposed", lambda: Chain(bn=bn(4), up=nn.ConvTranspose2d(4, 6, 3)), image(), kept={"bn": PADDED}
        ),
        row(
            "in-front-transposed-1x1",
            lambda: Chain(bn=bn(4), up=nn.ConvTranspose2d(4, 6, 1, 2)),
            image(),
            kept={"bn": PADDED},
        ),
    ],
)
def test_padding(case: Case):
    check(case)


def _padded(mode: str) -> nn.Module:
    """The ways to say how much padding: a number, one for each side, "same" and "valid"."""
    parts: dict[str, nn.Module] = {}
    for k, way in enumerate((1, (2, 1), "same", "valid"), 1):
        parts |= {f"c{k}": conv(4, 4, padding=way, padding_mode=mode), f"b{k}": bn(4), f"act{k}": nn.Tanh()}
    return Chain(**parts)


def test_a_shift_free_norm_passes_padding():
    """Only the shift is wrong at padded borders: without one, the scale folds forward."""

    def without_shift(m):
        for norm in (m.bn, m.bn2):
            norm.bias.zero_()
            norm.running_mean.zero_()

    def build():
        return Net(
            lambda s, x: s.up(s.bn2(s.conv(s.bn(x)).tanh())),
            bn=bn(4),
            conv=conv(padding=1),
            bn2=bn(8),
            up=nn.ConvTranspose2d(8, 6, 3),
        )

    check(Case("shift-free", build, image(), ("bn", "bn2"), prepare=without_shift))


PER_FEATURE = {"bn": "not-per-channel model-output"}


@pytest.mark.parametrize(
    "case",
    [
        row("linear", lambda: Chain(fc=nn.Linear(4, 8), bn=nn.BatchNorm1d(8)), tensor(3, 4), "bn"),
        row("linear-bare", lambda: Chain(fc=nn.Linear(4, 8, bias=False), bn=nn.BatchNorm1d(8)), tensor(3, 4), "bn"),
        row("in-front-of-linear", lambda: Chain(bn=nn.BatchNorm1d(4), fc=nn.Linear(4, 8)), tensor(3, 4), "bn"),
        row(
            "in-front-of-linear-bare",
            lambda: Chain(bn=nn.BatchNorm1d(4), fc=nn.Linear(4, 8, bias=False)),
            tensor(3, 4),
            "bn",
        ),
        row("linear-3d", lambda: Chain(fc=nn.Linear(4, 8), bn=nn.BatchNorm1d(5)), tensor(3, 5, 4), kept=PER_FEATURE),
        row(
            "linear-3d-sizes-agree",
            lambda: Chain(fc=nn.Linear(4, 8), bn=nn.BatchNorm1d(8)),
            tensor(3, 8, 4),
            kept=PER_FEATURE,
        ),
        row(
            "in-front-of-linear-3d",
            lambda: Chain(bn=nn.BatchNorm1d(4), fc=nn.Linear(4, 8)),
            tensor(3, 4, 4),
            kept={"bn": "model-input not-per-channel"},
        ),
        row(
            "linear-3d-transposed",
            lambda: Net(lambda s, x: s.bn(s.fc(x).transpose(1, 2)), fc=nn.Linear(4, 8), bn=nn.BatchNorm1d(8)),
            tensor(3, 5, 4),
            "bn",
        ),
        row(
            "linear-tokens-in-one-row",
            lambda: Net(_tokens, fc=nn.Linear(4, 8), bn=nn.BatchNorm1d(8)),
            tensor(3, 5, 4),
            "bn",
        ),
        row(
            "linear-as-image",
            lambda: Net(lambda s, x: s.bn(s.fc(x).unflatten(1, (8, 1, 1))), fc=nn.Linear(4, 8), bn=bn(8)),
            tensor(3, 4),
            "bn",
        ),
        row(
            "conv1d-then-features", lambda: Chain(conv=nn.Conv1d(4, 8, 3), bn=nn.BatchNorm1d(8)), tensor(2, 4, 9), "bn"
        ),
        row(
            "conv-then-flatten",
            lambda: Chain(conv=conv(), flat=nn.Flatten(), bn=nn.BatchNorm1d(8 * 5 * 6)),
            image(),
            kept={"bn": "not-per-channel model-output"},
        ),
        row(
            "flatten-then-linear",
            lambda: Chain(bn=bn(4), flat=nn.Flatten(), fc=nn.Linear(4 * 3 * 4, 5)),
            image(side=3),
            "bn",
        ),
    ],
)
def test_features(case: Case):
    check(case)


def _tokens(self, x):
    y = self.fc(x)
    return self.bn(y.flatten(0, 1)).reshape_as(y)


@pytest.mark.parametrize(
    "case",
    [
        row(
            "conv1d",
            lambda: Chain(conv=nn.Conv1d(4, 8, 3), bn=nn.BatchNorm1d(6)),
            tensor(4, 8),
            kept=PER_FEATURE,
            batches=False,
        ),
        row(
            "conv1d-sizes-agree",
            lambda: Chain(conv=nn.Conv1d(4, 6, 3), bn=nn.BatchNorm1d(6)),
            tensor(4, 8),
            kept=PER_FEATURE,
            batches=False,
        ),
        row(
            "conv1d-in-front",
            lambda: Chain(bn=nn.BatchNorm1d(9), conv=nn.Conv1d(4, 8, 3)),
            tensor(4, 9),
            kept={"bn": "model-input not-per-channel"},
            batches=False,
        ),
        row(
            "conv2d-instance-norm",
            lambda: Chain(conv=conv(), bn=nn.InstanceNorm2d(8, track_running_stats=True)),
            tensor(4, 7, 8),
            "bn",
            batches=False,
            same_class=False,
        ),
    ],
)
def test_unbatched_inputs(case: Case):
    check(case)


@pytest.mark.parametrize(
    "case",
    [
        row(
            "conv",
            lambda: Net(lambda s, x: s.bn(F.conv2d(x, s.w, s.b)), w=parameter(8, 4, 3, 3), b=parameter(8), bn=bn(8)),
            image(),
            "bn",
        ),
        row(
            "conv-bare",
            lambda: Net(lambda s, x: s.bn(F.conv2d(x, s.w)), w=parameter(8, 4, 3, 3), bn=bn(8)),
            image(),
            "bn",
        ),
        row(
            "conv-buffer",
            lambda: Net(lambda s, x: s.bn(F.conv2d(x, s.w)), w=torch.randn(8, 4, 3, 3), bn=bn(8)),
            image(),
            "bn",
        ),
        row(
            "conv-weight-computed",
            lambda: Net(lambda s, x: s.bn(F.conv2d(x, s.w.softmax(1) * 2)), w=parameter(8, 4, 3, 3), bn=bn(8)),
            image(),
            "bn",
        ),
        row(
            "conv-transpose",
            lambda: Net(lambda s, x: s.bn(F.conv_transpose2d(x, s.w, groups=2)), w=parameter(4, 3, 3, 3), bn=bn(6)),
            image(),
            "bn",
        ),
        row(
            "linear",
            lambda: Net(
                lambda s, x: s.bn(F.linear(x, s.w, s.b)), w=parameter(8, 4), b=parameter(8), bn=nn.BatchNorm1d(8)
            ),
            tensor(3, 4),
            "bn",
        ),
        row(
            "addmm",
            lambda: Net(
                lambda s, x: s.bn(torch.addmm(s.b, x, s.w, beta=0.5, alpha=2.0)),
                w=parameter(4, 8),
                b=parameter(8),
                bn=nn.BatchNorm1d(8),
            ),
            tensor(3, 4),
            "bn",
        ),
        row(
            "addmm-behind-a-norm",
            lambda: Net(
                lambda s, x: torch.addmm(s.b, s.bn(x), s.w, beta=0.5, alpha=2.0),
                w=parameter(4, 8),
                b=parameter(8),
                bn=nn.BatchNorm1d(4),
            ),
            tensor(3, 4),
            "bn",
        ),
        # A matrix product has no bias to take a shift: an addition stays, half of what was there.
        row(
            "matmul",
            lambda: Net(lambda s, x: s.bn(x @ s.w), w=parameter(4, 8), bn=nn.BatchNorm1d(8)),
            tensor(3, 4),
            "bn",
            left=1,
        ),
        row(
            "matmul-and-add",
            lambda: Net(lambda s, x: s.bn(x @ s.w + s.b), w=parameter(4, 8), b=parameter(8), bn=nn.BatchNorm1d(8)),
            tensor(3, 4),
            "bn",
        ),
        row(
            "matmul-from-left",
            lambda: Net(lambda s, x: s.bn(s.w @ x), w=parameter(8, 4), bn=nn.BatchNorm1d(8)),
            tensor(3, 4, 5),
            "bn",
            left=1,
        ),
    ],
)
def test_functional_layers(case: Case):
    """Layers that are no modules fold in the graph."""
    check(replace(case, same_class=False))


@pytest.mark.parametrize(
    "case",
    [
        row(
            "rows",
            lambda: Chain(table=nn.Embedding(10, 8, padding_idx=2), bn=nn.BatchNorm1d(8)),
            lambda: torch.randint(0, 10, (6,)),
            "bn",
        ),
        row(
            "sequences",
            lambda: Net(lambda s, i: s.bn(s.table(i).transpose(1, 2)), table=nn.Embedding(10, 8), bn=nn.BatchNorm1d(8)),
            lambda: torch.randint(0, 10, (3, 6)),
            "bn",
        ),
        row(
            "tied-to-the-output",
            lambda: _tied_table(),
            lambda: torch.randint(0, 10, (6,)),
            "bn",
            same_class=False,
        ),
    ],
)
def test_embeddings(case: Case):
    check(case)


def _tied_table() -> nn.Module:
    m = Net(
        lambda s, i: s.fc(s.bn(s.table(i)).tanh()), table=nn.Embedding(10, 8), bn=nn.BatchNorm1d(8), fc=nn.Linear(8, 10)
    )
    m.fc.weight = m.table.weight
    return m


@pytest.mark.parametrize(
    "case",
    [
        row("all-take", lambda: _fork(conv(4, 6, 1)), image(), "bn"),
        row("one-refuses", lambda: _fork(conv(4, 6, 3, padding=1)), image(), kept={"bn": PADDED}),
    ],
)
def test_two_layers_behind_one_norm(case: Case):
    """Both readers take the map, or neither does."""
    check(case)


def _fork(second: nn.Module) -> nn.Module:
    def run(self, x):
        y = self.bn(x)
        return self.first(y).sigmoid() + self.second(y).tanh()

    return Net(run, first=conv(4, 6, 1), second=second, bn=bn(4))
