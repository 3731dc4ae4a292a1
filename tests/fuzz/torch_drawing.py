"""Random torch programs, grown from single steps and from the motifs that networks are made of."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

from .program import Drawing, Program
from .torch_network import Network, Shape

STYLES = {"gentle": 4, "wild": 5, "scale": 3, "signed": 1, "shift": 1}
SPELLINGS = {
    None: 10, "act": 2, "frozen": 2, "sync": 1, "instance": 2, "functional": 2, "arithmetic": 2, "untracked": 0.5,
}  # fmt: skip
CARRIERS = ["act", "act", "act", "pool", "pool", "pad", "resize", "shuffle", "mean", "take", "layout", "join"]


def draw(seed: int) -> Program:
    """The program of a seed."""
    r = random.Random(seed)
    settings: dict[str, Any] = {}
    c = r.choice([2, 4, 4, 6, 8])
    shape: Shape = r.choices([(2, c, 6, 7), (2, c, 8), (2, c, 3, 4, 4), (2, c), (2, 5, c)], [12, 1, 1, 1, 1])[0]
    if r.random() < 0.04:
        settings["ids"], shape = True, (2, 3)
    if r.random() < 0.1:
        settings["again"] = True
    d = Drawing(r, Network(shape, settings), TABLE)
    if settings.get("ids"):
        d.emit("embed", "x")
    d.grow(WEIGHTS, r.randint(2, 5))
    if not d.steps:
        d.emit("norm", "x")
    return d.finish(shape, settings)


def _some_norm(d: Drawing, v: str) -> str:
    earlier = [s.name for s in d.steps if s.kind == "norm" and "again" not in s.options]
    if earlier and d.chance(0.08):
        return d.emit("norm", v, again=d.r.choice(earlier))
    spelling = d.r.choices(list(SPELLINGS), list(SPELLINGS.values()))[0]
    return d.emit("norm", v, spelling=spelling, style=d.r.choices(list(STYLES), list(STYLES.values()))[0],
                  bare=d.chance(0.15) or None, momentum=d.chance(0.1) or None)  # fmt: skip


def _some_conv(d: Drawing, v: str) -> str:
    x = d.shape(v)
    if len(x) < 3 or (len(x) == 3 and d.chance(0.4)):
        kind = "matmul" if d.chance(0.4) else "linear"
        left = kind == "matmul" and d.chance(0.3)
        return d.emit(kind, v, out=d.r.choice([3, 4, 6]), bias=d.chance(0.5) or None, left=left or None)
    earlier = [s.name for s in d.steps if s.kind == "conv" and "again" not in s.options]
    if earlier and d.chance(0.1):
        return d.emit("conv", v, again=d.r.choice(earlier))
    c = x[1]
    groups = d.r.choice([1, 1, 1, 2, c])
    options = {"groups": groups if c % groups == 0 and groups > 1 else None, "bias": d.chance(0.5) or None}
    if d.chance(0.12):
        options |= {"out": d.r.choice([c, 2 * c]), "stride": d.r.choice([None, 2])}
        return d.emit("conv_transpose", v, kernel=2, **options)
    kernel = d.r.choice([1, 3])
    if kernel == 3:
        options |= {"padding": d.r.choice([None, 1]), "dilation": 2 if d.chance(0.1) else None}
        options["padding_mode"] = d.r.choice([None, None, "reflect", "circular"]) if options["padding"] else None
        options["same"] = d.chance(0.1) or None
    return d.emit("conv", v, kernel=kernel, out=d.r.choice([c, 2 * c]), stride=2 if d.chance(0.1) else None, **options)


def _carrier(d: Drawing, v: str) -> str:
    match d.r.choice(CARRIERS):
        case "act":
            kind = d.r.choice(["relu", "relu", "leaky_relu", "prelu", "sigmoid", "dropout", "identity"])
            inplace = d.chance(0.5) or None if kind == "relu" else None
            return d.emit(kind, v, inplace=inplace, per_channel=d.chance(0.5) or None if kind == "prelu" else None)
        case "pool":
            kind = d.r.choice(["max_pool", "average_pool", "adaptive_pool"])
            extra = {"exclude": d.chance(0.5) or None, "ceil": d.chance(0.2) or None} if kind == "average_pool" else {}
            extra |= {"size": d.r.choice([None, 2])} if kind == "adaptive_pool" else {"padding": d.r.choice([None, 1])}
            return d.emit(kind, v, **extra)
        case "pad":
            return d.emit("pad", v, mode=d.r.choice(["zero", "reflect", "replicate", "constant"]))
        case "resize":
            return d.emit("resize", v, mode=d.r.choice(["nearest", "bilinear"]))
        case "shuffle":
            if d.chance(0.5):
                return d.emit("shuffle", v)
            return d.emit("pixel_shuffle", v, back=d.chance(0.3) or None)
        case "mean":
            return d.emit("mean", v, op=d.r.choice([None, "amax", "sum"]), squeezed=d.chance(0.4) or None)
        case "take":
            op = d.r.choice([None, "chunk", "split", "select", "narrow", "one", "rows"])
            indices = d.r.choice([[0], [1, 0], [0, 0, 1]]) if op == "select" else None
            return d.emit_all("take", v, op=op, indices=indices)[-1]
        case "layout":
            return d.emit("layout", v, op=d.r.choice([None, "swap", "channels_last", "features", "regroup", "squeeze"]))
        case _:
            return _join(d, v)


def _join(d: Drawing, v: str) -> str:
    kind = d.r.choice(["add", "add", "product", "concat", "sub"])
    fits = [w for w in d.values if d.shape(w) == d.shape(v)]
    if kind == "concat":
        fits = [w for w in d.values if d.shape(w)[2:] == d.shape(v)[2:] and len(d.shape(w)) == len(d.shape(v))]
    reads = [v, d.r.choice([w for w in fits if w != v] or [v])]
    d.r.shuffle(reads)
    return d.emit(kind, *reads, inplace=(kind == "add" and d.chance(0.3)) or None, alpha=2 if d.chance(0.1) else None)


def _arithmetic(d: Drawing, v: str) -> str:
    return d.emit("constant", v, op=d.r.choice([None, "shift", "from", "divide", "negate", "scale_", "shift_"]))


def _merge(d: Drawing, v: str) -> str:
    """Parallel branches that are only added (RepVGG)."""
    if len(d.shape(v)) != 4:
        return v
    branches = [d.emit("conv", v, kernel=3, padding=1, bias=True), d.emit("conv", v, kernel=1)]
    branches = [_some_norm(d, b) for b in branches] if d.chance(0.7) else branches
    if d.chance(0.6):
        branches.append(v if d.chance(0.4) else _some_norm(d, v))
    y = branches[0]
    for b in branches[1:]:
        y = d.emit("add", y, b)
    return y


def _gate(d: Drawing, v: str) -> str:
    """Squeeze and excitation."""
    if len(d.shape(v)) != 4:
        return v
    y = d.emit("conv", v, kernel=1)
    gate = d.emit("sigmoid", d.emit("conv", d.emit("adaptive_pool", v), bias=True))
    return _some_norm(d, d.emit("product", y, gate))


def _head(d: Drawing, v: str) -> str:
    y = d.emit("adaptive_pool", v) if d.chance(0.5) and len(d.shape(v)) == 4 else v
    y = _some_norm(d, y) if d.chance(0.5) else y
    y = d.emit("linear", d.emit("flatten", y), out=4, bias=d.chance(0.5) or None)
    return d.emit("linear", _some_norm(d, y)) if d.chance(0.5) else y


WEIGHTS: Mapping[str, float] = {
    "conv_norm": 8, "norm_conv": 5, "between": 8, "merge": 2, "gate": 1, "head": 2, "norm": 3, "carrier": 2, "join": 2,
    "arithmetic": 2,
}  # fmt: skip
TABLE: Mapping[str, Callable[[Drawing, str], Any]] = {
    "conv_norm": lambda d, v: _some_norm(d, _some_conv(d, v)),
    "norm_conv": lambda d, v: _some_conv(d, _some_norm(d, v)),
    "between": lambda d, v: _some_norm(d, _carrier(d, _some_conv(d, v))),
    "merge": _merge, "gate": _gate, "head": _head, "norm": _some_norm, "carrier": _carrier, "join": _join,
    "arithmetic": _arithmetic,
}  # fmt: skip
