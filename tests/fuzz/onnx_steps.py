"""The options of each kind of step in a random ONNX program: as few as say what is meant, often at their borders."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .program import Drawing

STYLES = {"gentle": 8, "wild": 5, "scale": 3, "signed": 1, "shift": 2}
SCALES = {"gentle": 2, "wild": 1, "scale": 8, "signed": 2}  # what passes activations, zero padding and products
SHIFTS = {"gentle": 2, "wild": 1, "shift": 6}  # what passes one branch of a sum


def norm(d: Drawing, v: str, styles: Mapping[str, float] = STYLES) -> str:
    """BatchNormalization or its arithmetic, now and then with the statistics of an earlier one."""
    style = d.r.choices(list(styles), list(styles.values()))[0]
    shared = [s for s in d.steps if s.kind == "norm" and d.shape(s.name)[1:2] == d.shape(v)[1:2]]
    options: dict[str, Any] = {"style": style, "epsilon": d.r.choice([None, None, 1e-3, 0.0])}
    if shared and d.chance(0.15):
        options |= {"statistics": (s := d.r.choice(shared)).get("statistics", s.name), "style": s.get("style")}
    if d.chance(0.05):
        options["momentum"] = 0.5
    if d.chance(0.3):
        options["wide"] = True
    if d.chance(0.2):
        spelling = d.r.choice(["div", "mul", "two"])
        options |= {"first": d.chance(0.5) or None, "open": d.chance(0.15) or None}
        return d.emit("arithmetic_norm", v, **options, spelling=spelling)
    return d.emit("norm", v, **options)


def _slides(d: Drawing, v: str, kernels: tuple[int, ...]) -> dict[str, Any]:
    """Kernel, strides, dilations and pads for a value's spatial dimensions, as few as can be said."""
    n = max(1, len(d.shape(v)) - 2)
    r = d.r
    found: dict[str, Any] = {"kernel": [r.choice(kernels)] * n if d.chance(0.7) else r.choices(kernels, k=n)}
    if d.chance(0.2):
        found["strides"] = r.choices([1, 2], k=n)
    if d.chance(0.1):
        found["dilations"] = r.choices([1, 2], k=n)
    if d.chance(0.45):
        found["pads"] = [k // 2 for k in found["kernel"]] * 2 if d.chance(0.7) else r.choices([0, 1, 2], k=2 * n)
    elif d.chance(0.1):
        found["auto_pad"] = r.choice(["SAME_UPPER", "SAME_LOWER", "VALID"])
        found.pop("dilations", None)
    return found


def _groups(d: Drawing, v: str) -> dict[str, Any]:
    """Output channels and groups: one, two, depthwise, depthwise with a multiplier."""
    c = d.shape(v)[1]
    group = d.r.choice([1, 1, 1, 2, c])
    if c % group:
        group = 1
    out = d.r.choice([c, c, 4, 6, 2 * c])
    return {"group": group if group > 1 else None, "out": out if out % group == 0 else c}


def conv(d: Drawing, v: str) -> str:
    """A convolution, now and then with the weights of an earlier one; a linear layer where nothing is spatial."""
    if len(d.shape(v)) < 3:
        return linear(d, v)
    earlier = [s for s in d.steps if s.kind == "conv"]
    if earlier and d.chance(0.08):
        return d.emit("conv", v, **{"weights": earlier[0].name} | dict(earlier[0].options))
    options = _slides(d, v, (1, 1, 2, 3)) | _groups(d, v) | {"bias": d.chance(0.5) or None}
    return d.emit("conv", v, **options)


def conv_transpose(d: Drawing, v: str) -> str:
    """A transposed convolution."""
    if len(d.shape(v)) < 3:
        return v
    options = _slides(d, v, (1, 2, 3)) | _groups(d, v) | {"bias": d.chance(0.5) or None}
    options.pop("auto_pad", None)
    options["output_padding"] = 1 if d.chance(0.2) else None
    return d.emit("conv_transpose", v, **options)


def linear(d: Drawing, v: str) -> str:
    """Gemm on a matrix, MatMul on either side of anything."""
    out = d.r.choice([None, 3, 4, 6])
    if len(d.shape(v)) == 2 and d.chance(0.7):
        return d.emit(
            "gemm", v, out=out, trans_a=d.chance(0.2) or None, trans_b=d.chance(0.5) or None,
            bias=d.r.choice([None, "column", "row", "one", "scalar"]),
            alpha=0.5 if d.chance(0.3) else None, beta=2.0 if d.chance(0.3) else None,
        )  # fmt: skip
    if d.chance(0.3):
        return d.emit("matmul_left", v, out=out)
    bias = d.chance(0.5) or None
    return d.emit("matmul", v, out=out, bias=bias, open=(bias and d.chance(0.2)) or None)


def constant(d: Drawing, v: str) -> str:
    """Arithmetic with a constant."""
    op = d.r.choice(["Mul", "Add", "Sub", "Div"])
    return d.emit(
        "constant", v, op=op, form=d.r.choice(["channel", "channel", "one", "scalar", "last", "sample"]),
        first=d.chance(0.4) or None, positive=d.chance(0.5) or None,
    )  # fmt: skip


def activation(d: Drawing, v: str) -> str:
    """An activation, or an op that returns what it is given."""
    kind = d.r.choices(
        ["relu", "leaky_relu", "prelu", "abs", "neg", "sigmoid", "tanh", "clip", "quotient", "identity", "dropout"],
        [8, 3, 3, 1, 1, 1, 1, 1, 1, 1, 1],
    )[0]
    if kind != "prelu":
        return d.emit(kind, v)
    return d.emit(kind, v, per_channel=d.chance(0.5) or None, computed=d.chance(0.25) or None)


def pool(d: Drawing, v: str) -> str:
    """A pool over windows, or over everything."""
    kind = d.r.choice(["max_pool", "average_pool", "average_pool", "global_average_pool", "global_max_pool"])
    if kind.startswith("global") or len(d.shape(v)) < 3:
        return d.emit(kind if kind.startswith("global") else "global_average_pool", v) if d.chance(0.4) else v
    options = _slides(d, v, (2, 3))
    if kind == "average_pool":
        options.pop("dilations", None)
        options["count_include_pad"] = d.chance(0.5) or None
    options["ceil_mode"] = d.chance(0.15) or None
    if options["ceil_mode"]:
        options.pop("auto_pad", None)
    return d.emit(kind, v, **options)


def reduce(d: Drawing, v: str) -> str:
    """A reduction, over spatial dimensions as a rule."""
    rank = len(d.shape(v))
    if rank < 3:
        return v
    axes = list(range(2, rank)) if d.chance(0.7) else [d.r.randrange(1, rank)]
    axes = [a - rank for a in axes] if d.chance(0.3) else axes
    op = d.r.choice(["ReduceMean", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceSum"])
    return d.emit("reduce", v, op=op, axes=axes, keepdims=d.r.choice([None, 0]))


def pad(d: Drawing, v: str) -> str:
    """A border of zeros, of another value, mirrored or repeated."""
    rank = len(d.shape(v))
    if rank < 3:
        return v
    channels = int(d.chance(0.1))
    before, after = ([0, channels, *d.r.choices([0, 1, 2], k=rank - 2)] for _ in range(2))
    mode = d.r.choice(["constant", "constant", "reflect", "edge"])
    value = 0.5 if mode == "constant" and d.chance(0.2) else None
    return d.emit("pad", v, before=before, after=after, mode=mode, value=value)


def resize(d: Drawing, v: str) -> str:
    """Nearest or linear resizing."""
    return d.emit(
        "resize", v, factor=d.r.choice([2.0, 2.0, 0.5, 1.5]), mode=d.r.choice(["nearest", "linear"]),
        coordinates=d.r.choice([None, None, "asymmetric", "align_corners"]), sizes=d.chance(0.3) or None,
    )  # fmt: skip


def layout(d: Drawing, v: str) -> str:
    """One of the ways to regroup dimensions that fit the value."""
    rank = len(d.shape(v))
    if rank < 2:
        return v
    ways: dict[str, dict[str, Any]] = {
        "depth_to_space": {"mode": d.r.choice([None, "DCR", "CRD"])},
        "space_to_depth": {},
        "shuffle": {"groups": d.r.choice([2, 2, 3])},
        "tokens": {"channels_last": d.chance(0.5) or None},
        "flatten": {"reshape": d.chance(0.3) or None},
        "transpose": {"order": [0, *d.r.sample(range(1, rank), rank - 1)]},
        "view": {},
        "regroup": {},
        "squeeze": {},
        "unsqueeze": {},
    }
    for kind in d.r.sample(list(ways), len(ways)):
        y = d.emit(kind, v, **ways[kind])
        if y != v:
            return y
    return v


def take(d: Drawing, v: str) -> str:
    """Some of the channels, or all of them in another order."""
    x = d.shape(v)
    if len(x) < 2 or x[1] < 2:
        return v
    c = x[1]
    match d.r.choice(["split", "split", "cut", "cut", "gather", "gather"]):
        case "split":
            parts = d.emit_all("split", v, first=d.r.choice([None, 1]), equal=d.chance(0.5) or None)
            if len(parts) == 2 and d.chance(0.5):
                return d.emit("concat", parts[1], parts[0])
            return parts[-1]
        case "cut":
            if d.chance(0.3):
                return d.emit("cut", v, starts=[c - 1], ends=[-c - 1], steps=[-1])
            if d.chance(0.3) and len(x) > 2:
                return d.emit("cut", v, axes=[1, len(x) - 1], starts=[0, 1], ends=[c - 1, 9])
            return d.emit("cut", v, starts=[d.r.choice([0, 1])], ends=[d.r.choice([c, 9, -1, 2])])
        case _:
            indices = d.r.choice([[*range(c)][::-1], d.r.choices(range(c), k=c + 1), [0], 1, [-1, 0]])
            return d.emit("gather", v, indices=indices)


def join(d: Drawing, v: str) -> str:
    """A concatenation, sum, product or difference with an earlier value."""
    x = d.shape(v)
    if d.chance(0.3):
        fits = [w for w in d.values if len(d.shape(w)) == len(x) and (d.shape(w)[0], *d.shape(w)[2:]) == (x[0], *x[2:])]
        others = d.r.choices(fits, k=d.r.choice([1, 1, 2]))
        return d.emit("concat", *d.r.sample([v, *others], len(others) + 1))
    fits = [w for w in d.values if d.shape(w) == x or (len(d.shape(w)) == len(x) and broadcasts(d.shape(w), x))]
    other = d.r.choice([w for w in fits if w != v] or [v])
    kind = d.r.choices(["add", "product", "sum", "sub"], [6, 3, 2, 1])[0]
    reads = [v, other] if d.chance(0.5) else [other, v]
    return d.emit(kind, *reads, *(d.r.choices(fits, k=1) if kind == "sum" and d.chance(0.5) else []))


def broadcasts(a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    """Whether a value of shape `a` broadcasts to shape `b`, of the same rank."""
    return all(m in (1, n) for m, n in zip(a, b, strict=True))


CARRIERS: tuple[Callable[[Drawing, str], str], ...] = (
    activation, activation, pool, pool, pad, resize, layout, layout, take, take, reduce,
    join,
)  # fmt: skip

STEPS: Mapping[str, Callable[[Drawing, str], str]] = {
    "activation": activation,
    "constant": constant,
    "conv": conv,
    "join": join,
    "layout": layout,
    "linear": linear,
    "norm": norm,
    "pad": pad,
    "pool": pool,
    "reduce": reduce,
    "take": take,
}
