"""Real architectures with random weights and randomised statistics: everything that can fold does, to 1e-11."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch_models import EXACT, Chain, compare, run, snapshot, tensor

import bnfold

timm = pytest.importorskip("timm")
models = pytest.importorskip("torchvision.models")


@dataclass(frozen=True)
class Architecture:
    """A network, its input, how many norms fold at least, and what keeps others."""

    build: Callable[[], nn.Module]
    inputs: Callable[[], torch.Tensor]
    folded: int
    kept: Mapping[str, int] = field(default_factory=dict)  # first reason -> how many norms it keeps at most
    same_class: bool = True


def torchvision_model(name: str, **options) -> Callable[[], nn.Module]:
    return lambda: getattr(models, name)(weights=None, **options)


def timm_model(name: str) -> Callable[[], nn.Module]:
    return lambda: timm.create_model(name, pretrained=False)


def picture(side: int = 64) -> Callable[[], torch.Tensor]:
    return tensor(2, 3, side, side)


def sigmoid_network() -> nn.Module:
    """The fully connected network of the batch normalization paper (Ioffe and Szegedy, 2015, section 4.1)."""
    layers: dict[str, nn.Module] = {"flat": nn.Flatten()}
    for k, width in enumerate((28 * 28, 100, 100), 1):
        layers |= {f"fc{k}": nn.Linear(width, 100, bias=False), f"bn{k}": nn.BatchNorm1d(100), f"act{k}": nn.Sigmoid()}
    return Chain(**layers, out=nn.Linear(100, 10))


class InceptionBlock(nn.Module):
    """Four branches that are joined, each convolution followed by its norm (the same paper, figure 5)."""

    def __init__(self, inputs: int, width: int, pool: nn.Module):
        super().__init__()
        self.one = self.unit(inputs, width, 1)
        self.three = nn.Sequential(self.unit(inputs, width, 1), self.unit(width, width, 3))
        self.threes = nn.Sequential(self.unit(inputs, width, 1), self.unit(width, width, 3), self.unit(width, width, 3))
        self.pooled = nn.Sequential(pool, self.unit(inputs, width, 1))

    @staticmethod
    def unit(inputs: int, outputs: int, kernel: int) -> nn.Module:
        layer = nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, bias=False)
        return nn.Sequential(layer, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True))

    def forward(self, x):
        return torch.cat([self.one(x), self.three(x), self.threes(x), self.pooled(x)], 1)


def inception_network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 7, 2, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
        InceptionBlock(8, 6, nn.AvgPool2d(3, 1, 1)),
        InceptionBlock(24, 8, nn.MaxPool2d(3, 1, 1)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 10),
    )


def slow(*values, id):  # noqa: A002
    return pytest.param(*values, id=id, marks=pytest.mark.slow)


HEADS = {"not-executed": 2}  # auxiliary heads, which evaluation never calls


@pytest.mark.parametrize(
    "net",
    [
        pytest.param(Architecture(sigmoid_network, tensor(3, 1, 28, 28), 3), id="sigmoid-network"),
        pytest.param(Architecture(inception_network, picture(), 15), id="inception-network"),
        pytest.param(Architecture(torchvision_model("resnet18"), picture(), 20), id="torchvision-resnet18"),
        pytest.param(Architecture(timm_model("regnety_002"), picture(), 44), id="timm-regnety_002"),
        pytest.param(Architecture(timm_model("levit_128"), picture(224), 64), id="timm-levit_128"),
        pytest.param(Architecture(timm_model("repvgg_a0"), picture(), 61, same_class=False), id="timm-repvgg_a0"),
        slow(Architecture(torchvision_model("mobilenet_v3_small"), picture(), 34), id="torchvision-mobilenet_v3_small"),
        slow(Architecture(torchvision_model("resnet50"), picture(), 53), id="torchvision-resnet50"),
        # Norms in front of their ReLU, behind a concatenation that others read.
        slow(Architecture(torchvision_model("densenet121"), picture(), 59, {"*": 62}), id="torchvision-densenet121"),
        slow(
            Architecture(torchvision_model("googlenet", init_weights=False), picture(), 57, HEADS),
            id="torchvision-googlenet",
        ),
        slow(
            Architecture(torchvision_model("inception_v3", init_weights=False), picture(96), 94, HEADS),
            id="torchvision-inception_v3",
        ),
        slow(Architecture(timm_model("resnet50"), picture(), 53), id="timm-resnet50"),
        slow(Architecture(timm_model("efficientnet_b0"), picture(), 49), id="timm-efficientnet_b0"),
    ],
)
def test_architecture(net: Architecture):
    module, reference = made(net.build), made(net.build)
    inputs = drawn(net.inputs)
    before = snapshot(module)
    result = bnfold.fold(module, inputs)
    assert snapshot(module) == before
    check_accounts(net, result.report, module)
    if net.same_class:
        assert type(result.model) is type(module)
    compare(run(result.model, inputs), run(reference, inputs), EXACT)


def check_accounts(net: Architecture, report: bnfold.Report, module: nn.Module) -> None:
    """Every norm of the tree is in the report once, folded or with a reason."""
    names = [f.norm for f in report.folded if f.norm] + [k.norm for k in report.kept]
    assert sorted(names) == sorted(n for n, m in module.named_modules() if isinstance(m, _NormBase))
    kept = Counter(k.reasons[0].reason for k in report.kept)
    assert len(report.folded) >= net.folded
    assert len(report.kept) <= sum(net.kept.values()), kept
    assert "*" in net.kept or set(kept) <= set(net.kept), kept


def made(build: Callable[[], nn.Module]) -> nn.Module:
    """The network in float64, with statistics such as training leaves, negative gammas and zeros among them."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        module = build()
    generator = torch.Generator().manual_seed(2)
    draw = lambda t: torch.randn(t.shape, generator=generator, dtype=torch.float64)  # noqa: E731
    for m in module.modules():
        if isinstance(m, _NormBase):
            m.running_mean.copy_(0.3 * draw(m.running_mean))
            m.running_var.copy_((0.5 * draw(m.running_var)).exp())
            m.weight.data.copy_(draw(m.weight))
            m.weight.data[::7] = 0.0
            m.bias.data.copy_(draw(m.bias))
    return module.eval().double()


def drawn(inputs: Callable[[], torch.Tensor]) -> torch.Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return inputs().double()
