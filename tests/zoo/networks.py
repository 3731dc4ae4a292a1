"""One architecture made ready to be folded: built from a seed, with statistics as if trained, on a small input.

The input is the smallest that the network takes, of a side of 64 pixels or more: at 32 the last stage is one pixel, and
a kernel of three by three would show nothing but its centre. A network of fixed size is built for a smaller one where
its builder takes `img_size`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from architectures import VARIANTS, builder, family_of, norms_of
from torch import nn
from torch.utils import _pytree as pytree

SIDES = (64, 96, 128, 160, 192, 224)


@dataclass(frozen=True)
class Ready:
    """A network in evaluation mode, and inputs that it accepts, for any batch size.

    In float64, but for networks that fix float32 inside (RAFT's coordinates).
    """

    module: nn.Module
    inputs: Callable[[int], Any]
    shape: str
    dtype: torch.dtype = torch.float64


def ready(name: str) -> Ready:
    """The network, built from a seed, on the smallest input that it accepts. Raises what the last attempt raised."""
    base, _, variant = name.partition("+")
    torch.manual_seed(1)
    failed: Exception | None = None
    for module, shape, draw in _attempts(base):
        for dtype in (torch.float64, torch.float32):
            inputs = partial(drawn, draw, dtype)
            try:
                _run(module.to(dtype), inputs(2))
            except Exception as e:
                failed = e
                continue
            settle(module, inputs(4), VARIANTS.get(base, {}).get(variant, ""))
            return Ready(module, inputs, shape, dtype)
    assert failed is not None
    raise failed


def _attempts(name: str) -> Iterator[tuple[nn.Module, str, Callable[[int], Any]]]:
    """Networks and inputs to try, smallest first. One network serves all sizes, unless its size is fixed."""
    if not name.startswith("timm/"):
        module = prepared(builder(name))
        yield from ((module, *drawing(shape, kind)) for shape, kind in torchvision_shapes(family_of(name)))
        return
    module = builder(name)
    config: Any = module.pretrained_cfg
    channels, side, _ = config.get("input_size") or (3, 224, 224)
    if not config.get("fixed_input_size"):
        module = prepared(module)
        yield from ((module, *drawing((channels, s, s))) for s in (*(s for s in SIDES if s < side), side))
        return
    del module
    for s in (s for s in SIDES if s < side):
        try:
            smaller = builder(name, img_size=s)
        except Exception:
            continue
        yield (prepared(smaller), *drawing((channels, s, s)))
    yield (prepared(builder(name)), *drawing((channels, side, side)))


def torchvision_shapes(family: str) -> list[tuple[tuple[int, ...], str]]:
    """Shapes to try without the batch dimension, and how the model takes them."""
    group = family.split(".")[0]
    if group == "video":
        return [((3, 8, 64, 64), "one"), ((3, 16, 224, 224), "one")]
    if group == "optical_flow":
        return [((3, 128, 128), "pair")]
    if group == "detection":
        return [((3, 64, 96), "list")]
    return [((3, s, s), "one") for s in SIDES]


def drawing(shape: tuple[int, ...], kind: str = "one") -> tuple[str, Callable[[int], Any]]:
    """The shape in words, and inputs of it for any batch size, the same every time: more are not other ones."""

    def draw(batch: int) -> Any:
        generator = torch.Generator().manual_seed(3)
        images = torch.stack([torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(batch)])
        if kind == "list":
            return (list(images.sigmoid()),)
        return (images, images.flip(0).roll(1, -1)) if kind == "pair" else images

    return "x".join(map(str, shape)) + {"one": "", "pair": " two images", "list": " list of images"}[kind], draw


def drawn(draw: Callable[[int], Any], dtype: torch.dtype, batch: int) -> Any:
    """Inputs for a batch size, in a type."""
    return pytree.tree_map(lambda t: t.to(dtype), draw(batch))


def prepared(module: nn.Module) -> nn.Module:
    """In evaluation mode, without gradients."""
    return module.eval().requires_grad_(False)


def settle(module: nn.Module, inputs: Any, positive: str = "") -> None:
    """Give every norm statistics such as training leaves, and gammas that are negative, zero and tiny too.

    One run in evaluation mode: each norm, when it is called, takes the moments of what it is given, moved by a third
    of a standard deviation, the variance by a factor around one. So activations neither grow nor vanish however deep
    the network is, and its rounding errors do not either. Norms that are never called draw theirs.
    """
    generator = torch.Generator().manual_seed(2)
    norms = norms_of(module)
    for name, m in norms.items():
        _draw(m, generator, fnmatchcase(name, positive))
    hooks = [m.register_forward_pre_hook(lambda m, args: _take(m, args[0], generator)) for m in norms.values()]
    try:
        _run(module, inputs)
    finally:
        for hook in hooks:
            hook.remove()


def _draw(norm: Any, generator: torch.Generator, positive: bool) -> None:
    channels = norm.running_mean.numel()
    draw = lambda: torch.randn(channels, generator=generator, dtype=torch.float64)  # noqa: E731
    norm.running_mean.copy_(0.3 * draw())
    norm.running_var.copy_((0.5 * draw()).exp())
    if norm.weight is None:
        return
    gamma = draw()
    gamma[3::11] = 1e-3 * gamma[3::11]
    gamma[5::7] = 0.0
    norm.weight.data.copy_(gamma.abs() + 0.1 if positive else gamma)
    norm.bias.data.copy_(0.5 * draw())


def _take(norm: Any, value: torch.Tensor, generator: torch.Generator) -> None:
    draw = lambda: torch.randn(value.shape[1], generator=generator, dtype=torch.float64)  # noqa: E731
    axes = [d for d in range(value.dim()) if d != 1]
    variance, mean = torch.var_mean(value, axes, correction=0)
    variance = torch.where(variance > 1e-12, variance, 1e-12)  # a channel that is constant, behind a gamma of zero
    norm.running_mean.copy_(mean + 0.3 * variance.sqrt() * draw())
    norm.running_var.copy_(variance * (0.5 * draw()).exp())


def _run(module: nn.Module, inputs: Any) -> Any:
    with torch.no_grad():
        return module(*inputs) if isinstance(inputs, tuple) else module(inputs)
