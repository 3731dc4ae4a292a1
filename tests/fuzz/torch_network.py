"""Programs as torch modules: the kinds of step, and the module that interprets them."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.ops import FrozenBatchNorm2d

from .arrays import statistics
from .program import Program, Step, UnfitError

Shape = tuple[int, ...]
Parts = dict[str, nn.Module]
CONV = {3: nn.Conv1d, 4: nn.Conv2d, 5: nn.Conv3d}
TRANSPOSED = {3: nn.ConvTranspose1d, 4: nn.ConvTranspose2d, 5: nn.ConvTranspose3d}
NORM = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}
INSTANCE = {3: nn.InstanceNorm1d, 4: nn.InstanceNorm2d, 5: nn.InstanceNorm3d}
LARGEST = 6000  # elements of a value; a network grows no further


class NormAct(nn.BatchNorm2d):
    """A norm with its activation inside."""

    def __init__(self, channels: int):
        super().__init__(channels)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(super().forward(x))


class FunctionalNorm(nn.Module):
    """A norm that is no norm module: `F.batch_norm`, or arithmetic on its buffers."""

    def __init__(self, channels: int, arithmetic: bool):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))
        self.eps, self.arithmetic = 1e-5, arithmetic

    def forward(self, x: Tensor) -> Tensor:
        if not self.arithmetic:
            return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.1, self.eps)
        column = (1, -1, *[1] * (x.dim() - 2))
        scale = self.weight * (self.running_var + self.eps).rsqrt()
        return x * scale.reshape(column) + (self.bias - self.running_mean * scale).reshape(column)


class Product(nn.Module):
    """A matrix on the right or left of a value, without a bias or with one."""

    def __init__(self, inputs: int, outputs: int, left: bool, bias: bool):
        super().__init__()
        self.weight = nn.Parameter(torch.randn((outputs, inputs) if left else (inputs, outputs)))
        self.bias = nn.Parameter(torch.randn(outputs)) if bias and not left else None
        self.left = left

    def forward(self, x: Tensor) -> Tensor:
        y = self.weight @ x if self.left else x @ self.weight
        return y if self.bias is None else y + self.bias


class Network(nn.Module):
    """The program's steps on named values. `add` is what draws and builds alike."""

    def __init__(self, shape: Shape, settings: Mapping[str, Any]):
        super().__init__()
        self.parts = nn.ModuleDict()
        self.steps: list[tuple[Step, str]] = []  # and the part or function that carries it out
        self.outputs: tuple[str, ...] = ()
        self.examples = {"x": given(shape, settings)}
        self.shapes: dict[str, Shape] = {"x": shape}
        self.ids = bool(settings.get("ids"))

    def add(self, step: Step) -> list[str]:
        """Append the step, running it on what was run so far."""
        if not step.reads or any(v not in self.shapes for v in step.reads):
            raise UnfitError
        if self.ids and ("x" in step.reads) != (step.kind == "embed"):
            raise UnfitError
        again = step.get("again")
        if step.kind in PARTS:
            if again is None:
                self.parts[step.name] = made(step, self.shapes[step.reads[0]])
            elif again not in self.parts:
                raise UnfitError
        try:
            with torch.no_grad():
                found = self._do(step, [self.examples[v].clone() for v in step.reads])
        except (RuntimeError, ValueError, IndexError, KeyError, TypeError):
            found = None
        if found is None or not all(0 < t.numel() <= LARGEST for t in found):
            if step.name in self.parts:
                del self.parts[step.name]
            raise UnfitError
        names = [step.name] if len(found) == 1 else [f"{step.name}_{k}" for k in range(len(found))]
        self.examples.update(zip(names, found, strict=True))
        self.shapes.update({n: tuple(t.shape) for n, t in zip(names, found, strict=True)})
        self.steps.append((step, step.name))
        return names

    def _do(self, step: Step, values: list[Tensor]) -> list[Tensor]:
        if step.kind in PARTS:
            return [self.parts[step.get("again", step.name)](*values)]
        found = FUNCTIONS[step.kind](step, *values)
        return found if isinstance(found, list) else [found]

    def forward(self, x: Tensor) -> list[Tensor]:
        values = {"x": x if self.ids else x * 1}  # operations in place are not to write into the caller's
        for step, name in self.steps:
            found = self._do(step, [values[v] for v in step.reads])
            values.update({name: found[0]} if len(found) == 1 else {f"{name}_{k}": t for k, t in enumerate(found)})
        return [values[o] for o in self.outputs]


def given(shape: Shape, settings: Mapping[str, Any], turn: int = 0) -> Tensor:
    """The input of a shape."""
    g = torch.Generator().manual_seed(zlib.crc32(f"{shape} {turn}".encode()))
    if settings.get("ids"):
        return torch.randint(0, 5, shape, generator=g)
    return torch.randn(shape, generator=g, dtype=torch.float64) + 0.3


def build(program: Program) -> Network:
    """The program as a module in eval mode, in float64. Raises UnfitError when its steps do not go together."""
    network = Network(program.shape, program.settings)
    for step in program.steps:
        network.add(step)
    if not program.outputs or any(o not in network.shapes for o in program.outputs):
        raise UnfitError
    network.outputs = program.outputs
    del network.examples, network.shapes
    return network.eval()


def made(step: Step, shape: Shape) -> nn.Module:
    """The step's module, with parameters that depend on its name alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(zlib.crc32(step.name.encode()))
        try:
            part = PARTS[step.kind](step, shape).eval().double()
        except (ValueError, KeyError, IndexError, RuntimeError):
            raise UnfitError from None
    found = {k: torch.from_numpy(v) for k, v in statistics(step.name, shape[1], step.get("style", "gentle")).items()} \
        if len(shape) > 1 else {}  # fmt: skip
    names = {"running_mean": "m", "running_var": "v"}
    if getattr(part, "running_var", None) is not None:
        names |= {"weight": "s", "bias": "b"}
        for name, key in names.items():
            if getattr(part, name, None) is not None:
                getattr(part, name).data.copy_(found[key])
        if step.get("style") == "shift":
            part.eps = 0.0  # type: ignore[assignment]
    return part


# ---------------------------------------------------------------------- kinds of step


def _conv(s: Step, x: Shape) -> nn.Module:
    kernel = s.get("kernel", 1)
    padding: Any = "same" if s.get("same") else s.get("padding", 0)
    return CONV[len(x)](
        x[1], s.get("out", x[1]), kernel, s.get("stride", 1), padding, s.get("dilation", 1), s.get("groups", 1),
        bool(s.get("bias")), s.get("padding_mode", "zeros"),
    )  # fmt: skip


def _conv_transpose(s: Step, x: Shape) -> nn.Module:
    return TRANSPOSED[len(x)](
        x[1], s.get("out", x[1]), s.get("kernel", 1), s.get("stride", 1), s.get("padding", 0),
        groups=s.get("groups", 1), bias=bool(s.get("bias")),
    )  # fmt: skip


def _norm(s: Step, x: Shape) -> nn.Module:
    match s.get("spelling"):
        case None:
            options = {"momentum": None} if s.get("momentum") else {}
            return NORM[len(x)](x[1], affine=not s.get("bare"), **options)
        case "sync":
            return nn.SyncBatchNorm(x[1])
        case "frozen":
            return FrozenBatchNorm2d(x[1])
        case "act":
            return NormAct(x[1])
        case "instance":
            return INSTANCE[len(x)](x[1], affine=not s.get("bare"), track_running_stats=True)
        case "untracked":
            return NORM[len(x)](x[1], track_running_stats=False)
        case way:
            return FunctionalNorm(x[1], way == "arithmetic")


PARTS: dict[str, Callable[[Step, Shape], nn.Module]] = {
    "average_pool": lambda s, x: {3: nn.AvgPool1d, 4: nn.AvgPool2d, 5: nn.AvgPool3d}[len(x)](
        s.get("kernel", 3), s.get("stride", 1), s.get("padding", 0), count_include_pad=not s.get("exclude"),
        ceil_mode=bool(s.get("ceil")),
    ),
    "adaptive_pool": lambda s, x: {3: nn.AdaptiveAvgPool1d, 4: nn.AdaptiveAvgPool2d, 5: nn.AdaptiveAvgPool3d}[len(x)](
        s.get("size", 1)
    ),
    "conv": _conv,
    "conv_transpose": _conv_transpose,
    "dropout": lambda s, x: nn.Dropout(),
    "embed": lambda s, x: nn.Embedding(5, 4),
    "flatten": lambda s, x: nn.Flatten(),
    "identity": lambda s, x: nn.Identity(),
    "leaky_relu": lambda s, x: nn.LeakyReLU(0.2),
    "linear": lambda s, x: nn.Linear(x[-1], s.get("out", x[-1]), bool(s.get("bias"))),
    "matmul": lambda s, x: Product(
        x[-2 if s.get("left") else -1], s.get("out", 4), bool(s.get("left")), bool(s.get("bias"))
    ),
    "max_pool": lambda s, x: {3: nn.MaxPool1d, 4: nn.MaxPool2d, 5: nn.MaxPool3d}[len(x)](2, 1, s.get("padding", 0)),
    "norm": _norm,
    "pad": lambda s, x: {
        "zero": nn.ZeroPad2d, "reflect": nn.ReflectionPad2d, "replicate": nn.ReplicationPad2d,
        "constant": lambda n: nn.ConstantPad2d(n, 0.5),
    }[s.get("mode", "zero")](s.get("size", 1)),
    "prelu": lambda s, x: nn.PReLU(x[1] if s.get("per_channel") else 1),
    "relu": lambda s, x: nn.ReLU(inplace=bool(s.get("inplace"))),
    "resize": lambda s, x: nn.Upsample(scale_factor=2, mode=s.get("mode", "nearest")),
    "shuffle": lambda s, x: nn.ChannelShuffle(s.get("groups", 2)),
    "pixel_shuffle": lambda s, x: nn.PixelUnshuffle(2) if s.get("back") else nn.PixelShuffle(2),
    "sigmoid": lambda s, x: nn.Sigmoid(),
}  # fmt: skip


def _mean(s: Step, x: Tensor) -> Tensor:
    dims = tuple(range(2, x.dim()))
    match s.get("op", "mean"):
        case "amax":
            return x.amax(dims, keepdim=not s.get("squeezed"))
        case "sum":
            return x.sum(dims, keepdim=not s.get("squeezed"))
        case _:
            return x.mean(dims, keepdim=not s.get("squeezed"))


def _constant(s: Step, x: Tensor) -> Tensor:
    match s.get("op", "scale"):
        case "shift":
            return x + 0.5
        case "from":
            return 1.5 - x
        case "divide":
            return x / 4.0
        case "negate":
            return -x
        case "scale_":
            return x.clone().mul_(0.5)
        case "shift_":  # behind a view
            return (x * 1).view(x.shape).add_(1.0)
        case _:
            return x * -2.0


def _take(s: Step, x: Tensor) -> Tensor | list[Tensor]:
    match s.get("op", "half"):
        case "chunk":
            return list(x.chunk(2, 1))
        case "split":
            return list(x.split([1, x.shape[1] - 1], 1))
        case "select":
            return x.index_select(1, torch.tensor(s.get("indices", [0])))
        case "narrow":
            return x.narrow(1, 1, x.shape[1] - 1)
        case "one":
            return x[:, 0]
        case "rows":
            return x[:, :, 1:]
        case _:
            return x[:, : max(1, x.shape[1] // 2)]


def _layout(s: Step, x: Tensor) -> Tensor:
    match s.get("op", "tokens"):
        case "swap":
            return x.permute(0, 1, *range(x.dim() - 1, 1, -1))
        case "channels_last":
            return x.movedim(1, -1)
        case "features":
            return x.flatten(2).transpose(1, 2)
        case "regroup":
            return x.reshape(x.shape[0], x.shape[1] // 2, 2, -1)
        case "squeeze":
            return x.unsqueeze(-1).squeeze(-1)
        case _:
            return x.flatten(2).transpose(1, 2).transpose(1, 2).reshape(x.shape)


FUNCTIONS: dict[str, Callable[..., Tensor | list[Tensor]]] = {
    "add": lambda s, x, y: (x * 1).add_(y) if s.get("inplace") else torch.add(x, y, alpha=s.get("alpha", 1)),
    "concat": lambda s, *x: torch.cat(x, 1),
    "constant": _constant,
    "layout": _layout,
    "mean": _mean,
    "product": lambda s, x, y: x * y,
    "sub": lambda s, x, y: x - y,
    "take": _take,
}
