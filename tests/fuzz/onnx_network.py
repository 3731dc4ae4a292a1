"""Random ONNX programs, grown from single steps and from the motifs that networks are made of."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from typing import Any

from . import onnx_steps as steps
from .onnx_builder import OnnxBuilder
from .onnx_nodes import BUILD
from .program import Drawing, Program


def draw(seed: int) -> Program:
    """The program of a seed."""
    r = random.Random(seed)
    settings = _settings(r)
    shape = _shape(r, settings)
    d = Drawing(r, OnnxBuilder(shape, settings, BUILD), TABLE)
    if settings.get("ids"):
        y = d.emit("embed", "x", width=r.choice([4, 6]))
        steps.norm(d, d.emit("transpose", y, order=[0, 2, 1]) if len(shape) == 2 else y)
    d.grow(WEIGHTS, r.randint(2, 5))
    if not d.steps:
        d.emit("norm", "x")
    return d.finish(shape, settings)


def _settings(r: random.Random) -> dict[str, Any]:
    dtype = r.choices(["double", "float", "float16", "bfloat16"], [70, 12, 9, 9])[0]
    settings: dict[str, Any] = {"opset": 22 if dtype == "bfloat16" else r.choice([9, 11, 13, 17, 20])}
    if dtype != "double":
        settings["dtype"] = dtype
    free = r.choices(["", "batch", "spatial", "unknown"], [5, 3, 1, 1])[0]
    if free:
        settings["free"] = free
    if r.random() < 0.15:
        settings["constants"] = r.choice(["node", "identity"])
    if r.random() < 0.05:
        settings["listed"] = True
    if r.random() < 0.06:
        settings["ids"] = True
    if r.random() < 0.3:
        settings["again"] = True
    return settings


def _shape(r: random.Random, settings: Mapping[str, Any]) -> tuple[int, ...]:
    if settings.get("ids"):
        return r.choice([(2, 3), (3,)])
    c = r.choice([1, 2, 3, 4, 4, 4, 6, 8])
    side = r.choice([4, 5, 6])
    return r.choices(
        [(2, c, side, side + 1), (2, c, 4, 4), (2, c, 3, 3), (2, c, 8), (2, c, 4, 3, 5), (3, c), (2, 5, c)],
        [10, 3, 2, 2, 1, 2, 2],
    )[0]


# ---------------------------------------------------------------------- motifs


def _conv_norm(d: Drawing, v: str) -> str:
    """Layer, norm, activation: what networks are made of."""
    y = steps.norm(d, steps.conv(d, v) if d.chance(0.85) else steps.conv_transpose(d, v))
    return steps.activation(d, y) if d.chance(0.6) else y


def _norm_conv(d: Drawing, v: str) -> str:
    """Norm, something that carries, layer: the forward direction."""
    if not d.chance(0.6):
        return steps.conv(d, steps.norm(d, v))
    y = steps.norm(d, v, steps.SCALES)
    for _ in range(d.r.choice([1, 1, 2])):
        y = d.r.choice(steps.CARRIERS)(d, y)
    return steps.conv(d, y)


def _between(d: Drawing, v: str) -> str:
    """A layer, something that carries, a norm."""
    y = steps.conv(d, v)
    for _ in range(d.r.choice([1, 1, 2])):
        y = d.r.choice(steps.CARRIERS)(d, y)
    return steps.norm(d, y, steps.SCALES if d.chance(0.5) else steps.STYLES)


def _passing(d: Drawing, v: str) -> str:
    """A layer, one op that chance alone rarely puts in its place, a norm; or norm, op, layer."""
    if len(d.shape(v)) != 4:
        return v
    forward = d.chance(0.5)
    kinds: dict[str, dict[str, Any]] = {
        "abs": {}, "add": {}, "concat": {}, "depth_to_space": {"mode": d.r.choice([None, "CRD"])}, "gather": {},
        "global_max_pool": {}, "leaky_relu": {}, "max_pool": {"kernel": [2]}, "prelu": {"per_channel": True},
        "relu": {}, "shuffle": {}, "space_to_depth": {}, "split": {}, "transpose": {"order": [0, 1, 3, 2]}, "view": {},
    }  # fmt: skip
    kind = d.r.choice(list(kinds))
    if forward:
        y = steps.norm(d, v, steps.SHIFTS if kind == "add" else steps.SCALES)
    else:
        y = d.emit("conv", v, out=8, bias=d.chance(0.5) or None)
    c, reads = d.shape(y)[1], [y]
    if kind in ("add", "concat"):
        reads.insert(d.r.randrange(2), d.emit("conv", v, out=c))
    if kind == "gather":
        kinds[kind]["indices"] = [0, 0, c - 1]
    y = d.emit(kind, *reads, **kinds[kind])
    return d.emit("conv", y, out=3) if forward else steps.norm(d, y, steps.SCALES)


def _parting(d: Drawing, v: str) -> str:
    """Scale and shift part ways: only the scale passes on one side, only the shift on the other.

    In front of the norm stands an activation or zero padding; behind it a sum with another branch (ConvMixer), or the
    other way round, a sum of layers before it and a padded layer behind it.
    """
    if len(d.shape(v)) != 4:
        return v
    c = d.shape(v)[1]
    if d.chance(0.5):
        y = steps.norm(d, d.emit("relu", d.emit("conv", v, kernel=[1])))
        return d.emit("conv", d.emit("add", y, d.emit("conv", v, group=c if c > 1 else None)), out=3)
    y = d.emit("add", d.emit("conv", v, kernel=[1], bias=True), v)
    return d.emit("conv", steps.norm(d, y), kernel=[3], pads=[1])


def _residual(d: Drawing, v: str) -> str:
    y = _conv_norm(d, v)
    z = v if d.shape(y) == d.shape(v) else d.emit("conv", v, out=d.shape(y)[1])
    y = d.emit(d.r.choice(["add", "add", "sum"]), y, steps.norm(d, z) if d.chance(0.4) else z)
    return steps.norm(d, y, steps.SHIFTS) if d.chance(0.5) else y


def _merge(d: Drawing, v: str) -> str:
    """Parallel branches that are only added (RepVGG): a convolution, a smaller one, a norm of the value itself."""
    x = d.shape(v)
    if len(x) != 4:
        return v
    group = d.r.choice([1, 1, 1, x[1]])
    stride = [2, 2] if d.chance(0.15) else None
    # The larger kernel is padded by `margin` more than the smaller one, as lying on one grid asks for, or nearly so.
    margin, dilation = d.r.choice([1, 1, 1, 0]), 2 if d.chance(0.1) else 1
    big = d.emit("conv", v, kernel=[3], pads=[margin * dilation], group=group if group > 1 else None, strides=stride,
                 dilations=[2] if dilation > 1 else None, bias=d.chance(0.5) or None,
                 out=1 if group == 1 and d.chance(0.1) else None)  # fmt: skip
    small = d.r.choice([
        {"kernel": [1]},
        {"kernel": [3, 1], "pads": [1, 0, 1, 0]},
        {"kernel": [3], "pads": [1]},
        {"kernel": [2], "pads": d.r.choice([[1, 1, 0, 0], [0, 0, 1, 1], [1, 0, 0, 1]])},
    ])  # fmt: skip
    branches = [big, d.emit("conv", v, **small, group=d.r.choice([None, x[1]]), strides=stride)]
    if d.chance(0.6):
        branches = [steps.norm(d, b) for b in branches]
    if d.chance(0.6):
        branches.append(v if d.chance(0.4) else steps.norm(d, v) if d.chance(0.7) else steps.constant(d, v))
    # Where one result is a single pixel, or has one channel, others broadcast it, and then they are not to merge.
    whole = max((d.shape(b) for b in branches), key=math.prod)
    branches = [b for b in branches if steps.broadcasts(d.shape(b), whole)]
    if len(branches) < 2:
        return branches[0]
    d.r.shuffle(branches)
    if d.chance(0.2):
        return d.emit("sum", *branches)
    y = branches[0]
    for b in branches[1:]:
        y = d.emit("sub" if d.chance(0.15) else "add", y, b)
    return steps.norm(d, y) if d.chance(0.3) else y


def _excite(d: Drawing, v: str) -> str:
    """Squeeze and excitation, with a norm behind the product."""
    y = steps.conv(d, v)
    if len(d.shape(y)) < 3:
        return y
    gate = d.emit("global_average_pool", v if d.shape(v)[:2] == d.shape(y)[:2] and d.chance(0.5) else y)
    gate = d.emit("sigmoid", d.emit("conv", gate, bias=True)) if d.chance(0.7) else d.emit("conv", gate)
    y = d.emit("product", y, gate)
    if d.chance(0.6):
        return steps.norm(d, y, steps.SCALES)
    return steps.conv(d, d.emit("product", steps.norm(d, v, steps.SCALES), gate))


def _concatenated(d: Drawing, v: str) -> str:
    """Branches, joined, and a norm over all of them."""
    if len(d.shape(v)) < 3:
        return v
    branches = [d.emit("conv", v, out=d.r.choice([2, 3, 4]), bias=d.chance(0.5) or None) for _ in range(2)]
    branches += [v] if d.chance(0.2) else []
    y = d.emit("concat", *branches)
    return steps.norm(d, steps.activation(d, y) if d.chance(0.4) else y)


def _head(d: Drawing, v: str) -> str:
    """Pooled or not, flattened, linear layers with norms between."""
    y = d.emit("global_average_pool", v) if d.chance(0.5) else v
    y = steps.norm(d, y) if d.chance(0.5) else y
    y = d.emit("squeeze", y) if d.chance(0.4) else y
    y = steps.linear(d, d.emit("flatten", y, reshape=d.chance(0.2) or None))
    return steps.linear(d, steps.norm(d, y)) if d.chance(0.6) else y


def _attention(d: Drawing, v: str) -> str:
    """Tokens, a linear layer cut into parts with a norm on each."""
    if len(d.shape(v)) == 4:
        v = steps.norm(d, v) if d.chance(0.4) else v
        v = d.emit("tokens", v, channels_last=True)
    if len(d.shape(v)) != 3:
        return v
    y = d.emit("matmul", v, out=6, bias=d.chance(0.5) or None)
    if d.chance(0.5):
        return d.emit("matmul", steps.norm(d, y))  # over the tokens, not the features
    y = steps.norm(d, d.emit("transpose", y, order=[0, 2, 1]))
    return steps.norm(d, d.emit_all("split", y, first=2)[0]) if d.chance(0.5) else y


def _shared(d: Drawing, v: str) -> str:
    """One layer at two places."""
    options = {"kernel": [1], "out": d.shape(v)[1] if len(d.shape(v)) > 1 else 1, "bias": True}
    a = d.emit("conv", v, **options)
    b = d.emit("conv", steps.norm(d, a), **options, weights=a)
    return d.emit("add", steps.norm(d, b), a) if d.chance(0.5) else steps.norm(d, b)


TABLE: Mapping[str, Callable[[Drawing, str], Any]] = {
    **steps.STEPS,
    "attention": _attention,
    "between": _between,
    "concatenated": _concatenated,
    "conv_norm": _conv_norm,
    "excite": _excite,
    "head": _head,
    "merge": _merge,
    "norm_conv": _norm_conv,
    "parting": _parting,
    "passing": _passing,
    "residual": _residual,
    "shared": _shared,
}
WEIGHTS: Mapping[str, float] = {
    "conv_norm": 10, "norm_conv": 6, "between": 12, "residual": 4, "merge": 4, "excite": 2, "concatenated": 3,
    "parting": 2, "passing": 5, "head": 3, "attention": 2, "shared": 1, "norm": 5, "conv": 2, "linear": 1,
    "constant": 4, "activation": 2, "pool": 1, "reduce": 1, "pad": 1, "layout": 2, "take": 2, "join": 3,
}  # fmt: skip
