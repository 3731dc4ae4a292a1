"""Random networks: whatever bnfold makes of them, it computes what they computed."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch_models import EXACT, compare, randomise, run, snapshot
from torchvision.ops import FrozenBatchNorm2d

import bnfold

SIDE = 8
QUICK, ALL = range(20), range(20, 2000)


class NormAct(nn.BatchNorm2d):
    """A norm with its activation inside."""

    def __init__(self, channels: int):
        super().__init__(channels)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x):
        return self.act(super().forward(x))


def a_conv(r: random.Random, c: int) -> nn.Module:
    groups = r.choice([1, 1, 2, c]) if c % 2 == 0 else 1
    kernel, outputs = r.choice([1, 3]), r.choice([c, 2 * c])
    mode = r.choice(["zeros", "reflect", "circular"]) if kernel == 3 else "zeros"
    padding = r.choice([0, 1]) if kernel == 3 else 0
    return nn.Conv2d(c, outputs, kernel, 1, padding, groups=groups, bias=r.random() < 0.5, padding_mode=mode)


LAYERS: list[Callable[[random.Random, int], nn.Module]] = [
    a_conv,
    a_conv,
    lambda r, c: nn.ConvTranspose2d(c, r.choice([4, 6]), 2, bias=r.random() < 0.5),
    lambda r, c: nn.BatchNorm2d(c),
    lambda r, c: nn.BatchNorm2d(c),
    lambda r, c: nn.BatchNorm2d(c, affine=False),
    lambda r, c: nn.InstanceNorm2d(c, affine=True, track_running_stats=True),
    lambda r, c: FrozenBatchNorm2d(c),
    lambda r, c: NormAct(c),
    lambda r, c: nn.ReLU(inplace=r.random() < 0.5),
    lambda r, c: r.choice([nn.LeakyReLU(0.2), nn.PReLU(c), nn.Sigmoid(), nn.Dropout(), nn.Identity()]),
    lambda r, c: nn.MaxPool2d(2, 1),
    lambda r, c: nn.AvgPool2d(3, 1, 1, count_include_pad=r.random() < 0.5),
    lambda r, c: r.choice([nn.ZeroPad2d(1), nn.ReflectionPad2d(1), nn.ConstantPad2d(1, 0.5)]),
    lambda r, c: (
        nn.Upsample(scale_factor=2, mode=r.choice(["nearest", "bilinear"])) if r.random() < 0.3 else nn.Identity()
    ),
    lambda r, c: nn.PixelShuffle(2) if c % 4 == 0 else nn.Identity(),
]
ONE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "scale": lambda x: x * -2.0,
    "shift": lambda x: x + 0.5,
    "scale_": lambda x: x.clone().mul_(0.5),
    "shift_behind_a_view": lambda x: (x * 1).view(x.shape).add_(1.0),
    "half": lambda x: x[:, : max(1, x.shape[1] // 2)],
    "chunk": lambda x: x.chunk(2, 1)[0],
    "mean": lambda x: x.mean((2, 3), keepdim=True),
    "swap": lambda x: x.permute(0, 1, 3, 2),
    "tokens": lambda x: x.flatten(2).transpose(1, 2).transpose(1, 2).reshape(x.shape),
}  # fmt: skip
TWO: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "add": lambda x, y: x + y,
    "add_": lambda x, y: (x * 1).add_(y),
    "product": lambda x, y: x * y,
    "cat": lambda x, y: torch.cat([x, y], 1),
}


class RandomNet(nn.Module):
    """A program of up to nine steps over the last three values; modules may be called again; up to two outputs."""

    def __init__(self, seed: int):
        super().__init__()
        r = random.Random(seed)
        self.layers, self.steps = nn.ModuleList(), []
        values = [torch.zeros(1, 4, SIDE, SIDE)]
        for _ in range(r.randint(3, 9)):
            i, j = (r.randrange(max(0, len(values) - 3), len(values)) for _ in range(2))
            kind = r.choices(["layer", "again", *ONE, *TWO], [20, 2] + [1] * (len(ONE) + len(TWO)))[0]
            if kind == "layer":
                self.layers.append(r.choice(LAYERS)(r, values[i].shape[1]))
            layer = len(self.layers) - 1 if kind == "layer" else r.randrange(max(1, len(self.layers)))
            step = (kind, i, j, layer)
            try:
                with torch.no_grad():
                    values.append(self.eval().do(step, [v.clone() for v in values]))
                self.steps.append(step)
            except (RuntimeError, IndexError, ValueError):
                continue  # the shapes do not go together
        self.outputs = sorted({len(values) - 1, r.randrange(len(values))})

    def do(self, step, values):
        kind, i, j, layer = step
        if kind in ONE:
            return ONE[kind](values[i])
        return TWO[kind](values[i], values[j]) if kind in TWO else self.layers[layer](values[i])

    def forward(self, x):
        values = [x * 1]  # operations in place are not to write into the caller's
        for step in self.steps:
            values.append(self.do(step, values))
        return [values[k] for k in self.outputs]


def made(seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = RandomNet(seed)
    randomise(module, torch.Generator().manual_seed(seed))
    return module.eval().double()


@pytest.mark.parametrize(
    "seeds",
    [
        pytest.param(QUICK, id="some"),
        *[pytest.param(ALL[k : k + 198], id=f"{ALL[k]}-", marks=pytest.mark.slow) for k in range(0, len(ALL), 198)],
    ],
)
def test_random_networks(seeds):
    folded = 0
    for seed in seeds:
        module, generator = made(seed), torch.Generator().manual_seed(seed)
        x, y = (torch.randn(n, 4, SIDE, SIDE, generator=generator, dtype=torch.float64) for n in (2, 3))
        before = snapshot(module)
        result = bnfold.fold(module, x)
        assert snapshot(module) == before, seed
        for given in (x, y):
            compare(run(result.model, given), run(made(seed), given), EXACT)
        names = [f.norm for f in result.report.folded if f.norm] + [k.norm for k in result.report.kept]
        assert len(names) == len(set(names)) == len(result.report.norms), seed
        folded += len(result.report.folded)
    assert folded > len(seeds) / 10
