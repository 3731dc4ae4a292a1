"""The kinds of step as ONNX nodes, in the spelling of the opset asked for. The table is at the foot."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from onnx import ModelProto, TensorProto

from .arrays import Array, statistics
from .onnx_builder import Kind, OnnxBuilder, Shape, fit
from .onnx_layout_nodes import LAYOUT
from .program import Program, Step


def build(program: Program) -> ModelProto:
    """The program as a model. Raises UnfitError when its steps do not go together."""
    b = OnnxBuilder(program.shape, program.settings, BUILD)
    for step in program.steps:
        b.add(step)
    fit(bool(program.outputs) and all(o in b.shapes and o != "x" for o in program.outputs))
    return b.model(program.outputs)


# ---------------------------------------------------------------------- layers with weights


def _slides(s: Step, sizes: Shape) -> tuple[list[int], list[int], list[int], list[int]]:
    """Kernel, strides, dilations and pads (in front, then behind) for so many axes."""
    n = len(sizes)

    def spread(key: str, default: int, count: int = n) -> list[int]:
        given = s.get(key) or [default]
        return [given[k % len(given)] for k in range(count)]

    return spread("kernel", 1), spread("strides", 1), spread("dilations", 1), spread("pads", 0, 2 * n)


def _window(s: Step, sizes: Shape) -> Shape:
    """The sizes of what slides over them."""
    kernel, strides, dilations, pads = _slides(s, sizes)
    if s.get("auto_pad") in ("SAME_UPPER", "SAME_LOWER"):
        return tuple(-(-n // t) for n, t in zip(sizes, strides, strict=True))
    found = []
    for a, n in enumerate(sizes):
        lo, hi, span = pads[a], pads[a + len(sizes)], dilations[a] * (kernel[a] - 1) + 1
        if s.get("ceil_mode"):
            out = -(-(n + lo + hi - span) // strides[a]) + 1
            fit((out - 1) * strides[a] < n + lo)  # or a window starts in the padding behind, which not all count
        else:
            out = (n + lo + hi - span) // strides[a] + 1
        found.append(out)
    return tuple(found)


def _attributes(s: Step, sizes: Shape) -> dict[str, Any]:
    """The attributes of a sliding op that differ from their defaults."""
    kernel, strides, dilations, pads = _slides(s, sizes)
    given = {
        "strides": strides if "strides" in s.options else None,
        "dilations": dilations if "dilations" in s.options else None,
        "pads": pads if "pads" in s.options else None,
        "auto_pad": s.get("auto_pad"),
    }
    return {"kernel_shape": kernel, **given}


def conv(b: OnnxBuilder, s: Step, x: Shape) -> Shape:
    fit(3 <= len(x) <= 5)
    kernel, _, _, _ = _slides(s, x[2:])
    group, out = s.get("group", 1), s.get("out", x[1])
    fit(x[1] % group == 0 and out % group == 0)
    key = s.get("weights", s.name)
    shape = (out, x[1] // group, *kernel)
    reads = [s.reads[0], b.floats(f"{key}_w", b.random(f"{key}_w", shape))]
    if s.get("bias"):
        reads.append(b.floats(f"{key}_b", b.random(f"{key}_b", (out,))))
    b.node("Conv", reads, group=group if group > 1 else None, **_attributes(s, x[2:]))
    return x[0], out, *_window(s, x[2:])


def conv_transpose(b: OnnxBuilder, s: Step, x: Shape) -> Shape:
    fit(3 <= len(x) <= 5)
    kernel, strides, dilations, pads = _slides(s, x[2:])
    group, out, n = s.get("group", 1), s.get("out", x[1]), len(x) - 2
    extra = s.get("output_padding", 0)
    fit(x[1] % group == 0 and out % group == 0 and extra < min(strides))
    key = s.get("weights", s.name)
    reads = [s.reads[0], b.floats(f"{key}_w", b.random(f"{key}_w", (x[1], out // group, *kernel)))]
    if s.get("bias"):
        reads.append(b.floats(f"{key}_b", b.random(f"{key}_b", (out,))))
    given = _attributes(s, x[2:]) | {"output_padding": [extra] * n if extra else None}
    b.node("ConvTranspose", reads, group=group if group > 1 else None, **given)
    sizes = [(x[2 + a] - 1) * strides[a] + dilations[a] * (kernel[a] - 1) + 1 + extra for a in range(n)]
    return x[0], out, *(size - pads[a] - pads[a + n] for a, size in enumerate(sizes))


def gemm(b: OnnxBuilder, s: Step, x: Shape) -> Shape:
    fit(len(x) == 2)
    source, out = s.reads[0], s.get("out", x[1])
    if s.get("trans_a"):
        source = b.node("Transpose", [source], b.inner("t"), perm=[1, 0])
    key = s.get("weights", s.name)
    shape = (out, x[1]) if s.get("trans_b") else (x[1], out)
    reads = [source, b.floats(f"{key}_w", b.random(f"{key}_w", shape))]
    form = s.get("bias")
    if form or b.opset < 11:
        sizes: dict[Any, Shape] = {None: (out,), "row": (1, out), "one": (1,), "scalar": ()}
        fit(form != "scalar" or b.opset >= 11)
        reads.append(b.floats(f"{key}_b", b.random(f"{key}_b", sizes.get(form, (out,)))))
    given = {"alpha": s.get("alpha"), "beta": s.get("beta"), "transB": 1 if s.get("trans_b") else None}
    b.node("Gemm", reads, transA=1 if s.get("trans_a") else None, **given)
    return x[0], out


def matmul(b: OnnxBuilder, s: Step, x: Shape) -> Shape | list[Shape]:
    """A matrix on the right, its bias an Add. `open`: the product is a result as well, for others to read."""
    fit(len(x) >= 2)
    key, out, y = s.get("weights", s.name), s.get("out", x[-1]), (*x[:-1], s.get("out", x[-1]))
    w = b.floats(f"{key}_w", b.random(f"{key}_w", (x[-1], out)))
    if not s.get("bias"):
        b.node("MatMul", [s.reads[0], w])
        return y
    opened = bool(s.get("open"))
    product = b.node("MatMul", [s.reads[0], w], f"{s.name}_1" if opened else b.inner("product"))
    bias = b.floats(f"{key}_b", b.random(f"{key}_b", (out,)))
    b.node("Add", [product, bias], f"{s.name}_0" if opened else s.name)
    return [y, y] if opened else y


def matmul_left(b: OnnxBuilder, s: Step, x: Shape) -> Shape:
    fit(len(x) >= 2)
    key, out = s.get("weights", s.name), s.get("out", x[-2])
    b.node("MatMul", [b.floats(f"{key}_w", b.random(f"{key}_w", (out, x[-2]))), s.reads[0]])
    return *x[:-2], out, x[-1]


def embed(b: OnnxBuilder, s: Step, x: Shape) -> Shape:
    fit(b.ids and s.reads[0] == "x")
    width = s.get("width", 4)
    b.node("Gather", [b.floats(f"{s.name}_w", b.random(f"{s.name}_w", (5, width))), s.reads[0]])
    return *x, width


# ---------------------------------------------------------------------- norms and arithmetic


def _statistics(b: OnnxBuilder, s: Step, channels: int) -> tuple[dict[str, Array], float]:
    style = s.get("style", "gentle")
    epsilon = 0.0 if style == "shift" else s.get("epsilon", 1e-5)
    found = statistics(s.get("statistics", s.name), channels, style)
    if b.elem_type == TensorProto.FLOAT16:  # what it can hold, so that variance + epsilon is positive and finite
        found["v"] = found["v"].clip(1e-7, 6e4)
    return found, epsilon


def norm(b: OnnxBuilder, s: Step, x: Shape) -> Shape:
    fit(len(x) >= 2)
    values, epsilon = _statistics(b, s, x[1])
    wide = TensorProto.FLOAT if s.get("wide") and b.opset >= 15 and b.elem_type != TensorProto.DOUBLE else None
    key = s.get("statistics", s.name)
    reads = [b.floats(f"{key}_{part}", v, wide) for part, v in values.items()]
    given = {"epsilon": None if epsilon == 1e-5 else epsilon, "momentum": s.get("momentum")}
    b.node("BatchNormalization", [s.reads[0], *reads], **given)
    return x


def arithmetic_norm(b: OnnxBuilder, s: Step, x: Shape) -> Shape | list[Shape]:
    """Spelled as Sub, Div by a root (or Mul by its reciprocal), Mul, Add; or as one Mul and one Add.

    `open`: what the last Add reads is a result as well, for others to read.
    """
    fit(len(x) >= 2)
    values, epsilon = _statistics(b, s, x[1])
    key, column = s.get("statistics", s.name), (1, x[1], *[1] * (len(x) - 2))
    p = {k: b.floats(f"{key}_{k}", v.reshape(column)) for k, v in values.items()}
    root = b.node("Add", [p["v"], b.floats(f"{s.name}_e", epsilon)], b.inner("variance"))
    root = b.node("Sqrt", [root], b.inner("root"))
    way, y, shift = s.get("spelling", "div"), s.reads[0], p["b"]
    opened = bool(s.get("open"))
    scaled = f"{s.name}_1" if opened else b.inner("scaled")
    if way == "two":  # scale = gamma / root, shift = beta - mean * scale: both constant
        scale = b.node("Div", [p["s"], root], b.inner("scale"))
        shift = b.node("Sub", [shift, b.node("Mul", [p["m"], scale], b.inner("moved"))], b.inner("shift"))
        b.node("Mul", [y, scale] if s.get("first") else [scale, y], scaled)
    else:
        y = b.node("Sub", [y, p["m"]], b.inner("centred"))
        inverse = b.node("Reciprocal", [root], b.inner("inverse")) if way == "mul" else root
        y = b.node("Mul" if way == "mul" else "Div", [y, inverse], b.inner("normalised"))
        b.node("Mul", [y, p["s"]], scaled)
    b.node("Add", [scaled, shift], f"{s.name}_0" if opened else s.name)
    return [x, x] if opened else x


def constant(b: OnnxBuilder, s: Step, x: Shape) -> Shape:
    """Arithmetic with a constant: a scalar, one value per channel, per last position, or per element."""
    sizes: dict[str, Shape] = {
        "channel": (x[1], *[1] * (len(x) - 2)) if len(x) > 1 else (1,),
        "last": (x[-1],),
        "sample": x[1:],
        "one": (1,) * len(x),
        "scalar": (),
    }
    op, shape = s.get("op", "Mul"), sizes[s.get("form", "scalar")]
    fit(op != "Div" or not s.get("first"))
    fit(b.free not in ("spatial", "unknown") or s.get("form") not in ("last", "sample"))
    values = b.random(s.name, shape) + 0.1
    if s.get("positive"):
        values = np.abs(values) + 0.1
    c = b.floats(f"{s.name}_c", np.where(np.abs(values) < 0.05, 0.5, values))
    b.node(op, [c, s.reads[0]] if s.get("first") else [s.reads[0], c])
    return x


# ---------------------------------------------------------------------- activations


def simple(op: str, **attributes: Any) -> Callable[[OnnxBuilder, Step, Shape], Shape]:
    """An op of one operand whose result has its shape."""

    def add(b: OnnxBuilder, s: Step, x: Shape) -> Shape:
        b.node(op, [s.reads[0]], **attributes)
        return x

    return add


def prelu(b: OnnxBuilder, s: Step, x: Shape) -> Shape:
    """With constant slopes, or `computed` ones."""
    fit(len(x) >= 2)
    if s.get("computed"):
        fit(len(x) >= 3)
        mean = b.node("GlobalAveragePool", [s.reads[0]], b.inner("mean"))
        b.node("PRelu", [s.reads[0], b.node("Tanh", [mean], b.inner("slope"))])
        return x
    shape = (x[1], *[1] * (len(x) - 2)) if s.get("per_channel") else (1,)
    b.node("PRelu", [s.reads[0], b.floats(f"{s.name}_slope", b.random(s.name, shape))])
    return x


def clip(b: OnnxBuilder, s: Step, x: Shape) -> Shape:
    if b.opset < 11:
        b.node("Clip", [s.reads[0]], min=0.0, max=6.0)
    else:
        b.node("Clip", [s.reads[0], b.floats(f"{s.name}_lo", 0.0), b.floats(f"{s.name}_hi", 6.0)])
    return x


def quotient(b: OnnxBuilder, s: Step, x: Shape) -> Shape:
    """A constant divided by `1 + |x|`, which looks like arithmetic with a constant and is none."""
    y = b.node("Abs", [s.reads[0]], b.inner("size"))
    y = b.node("Add", [y, b.floats(f"{s.name}_one", 1.0)], b.inner("more"))
    b.node("Div", [b.floats(f"{s.name}_c", b.random(s.name, ())), y])
    return x


# ---------------------------------------------------------------------- pools, borders, sizes


def pool(op: str) -> Callable[[OnnxBuilder, Step, Shape], Shape]:
    """MaxPool and AveragePool; padding must be smaller than the kernel."""

    def add(b: OnnxBuilder, s: Step, x: Shape) -> Shape:
        fit(3 <= len(x) <= 5 and (b.opset >= 11 or not s.get("ceil_mode")))
        fit("dilations" not in s.options or (op == "MaxPool" and b.opset >= 11))
        kernel, _, dilations, pads = _slides(s, x[2:])
        fit(all(p < kernel[k % len(kernel)] for k, p in enumerate(pads)))
        fit(all(d * (k - 1) < n for k, d, n in zip(kernel, dilations, x[2:], strict=True)))
        given = _attributes(s, x[2:]) | {"ceil_mode": 1 if s.get("ceil_mode") else None}
        if op == "AveragePool":
            given["count_include_pad"] = 1 if s.get("count_include_pad") else None
        b.node(op, [s.reads[0]], **given)
        return *x[:2], *_window(s, x[2:])

    return add


def global_pool(op: str) -> Callable[[OnnxBuilder, Step, Shape], Shape]:
    """The mean or maximum over all spatial dimensions."""

    def add(b: OnnxBuilder, s: Step, x: Shape) -> Shape:
        fit(len(x) >= 3)
        b.node(op, [s.reads[0]])
        return *x[:2], *[1] * (len(x) - 2)

    return add


def reduce(b: OnnxBuilder, s: Step, x: Shape) -> Shape:
    op, axes, keep = s.get("op", "ReduceMean"), s.get("axes", [len(x) - 1]), s.get("keepdims", 1)
    positive = {a % len(x) for a in axes}
    fit(len(positive) == len(axes) and len(axes) < len(x))
    if b.opset >= (13 if op == "ReduceSum" else 18):
        b.node(op, [s.reads[0], b.ints("axes", axes)], keepdims=keep)
    else:
        b.node(op, [s.reads[0]], axes=list(axes), keepdims=keep)
    return tuple(1 if a in positive else n for a, n in enumerate(x) if keep or a not in positive)


def pad(b: OnnxBuilder, s: Step, x: Shape) -> Shape:
    before, after = s.get("before", [0, 0, 1]), s.get("after", [0, 0, 1])
    mode, value, n = s.get("mode", "constant"), s.get("value", 0.0), len(x)
    before, after = [*before, *[0] * n][:n], [*after, *[0] * n][:n]
    fit(mode != "reflect" or all(max(p, q) < size for p, q, size in zip(before, after, x, strict=True)))
    if b.opset < 11:
        b.node("Pad", [s.reads[0]], pads=before + after, mode=mode, value=value or None)
    else:
        reads = [s.reads[0], b.ints("pads", before + after)]
        if value:
            reads.append(b.floats(f"{s.name}_value", value))
        b.node("Pad", reads, mode=mode)
    return tuple(p + q + size for p, q, size in zip(before, after, x, strict=True))


def resize(b: OnnxBuilder, s: Step, x: Shape) -> Shape:
    fit(len(x) in (3, 4) and b.opset >= 9)
    factor, mode = s.get("factor", 2.0), s.get("mode", "nearest")
    sizes = tuple(int(n * factor) for n in x[2:])
    scales = [1.0, 1.0, *[factor] * (len(x) - 2)]
    if b.opset < 10:
        fit(factor >= 1)
        kept = b.singles("scales", scales)
        b.node("Upsample", [s.reads[0], kept], mode=mode)
        return *x[:2], *sizes
    given = {"coordinate_transformation_mode": s.get("coordinates"), "mode": mode}
    if mode == "nearest" and s.get("nearest"):
        given["nearest_mode"] = s.get("nearest")
    region = b.singles("roi", [])
    kept = b.singles("scales", scales)
    if s.get("sizes") and not b.free:
        empty = b.singles("none", [])
        b.node("Resize", [s.reads[0], region, empty, b.ints("sizes", [*x[:2], *sizes])], **given)
    else:
        b.node("Resize", [s.reads[0], region, kept], **given)
    return *x[:2], *sizes


BUILD: dict[str, Kind] = {
    **LAYOUT,
    "abs": simple("Abs"),
    "arithmetic_norm": arithmetic_norm,
    "average_pool": pool("AveragePool"),
    "clip": clip,
    "constant": constant,
    "conv": conv,
    "conv_transpose": conv_transpose,
    "dropout": simple("Dropout"),
    "embed": embed,
    "gemm": gemm,
    "global_average_pool": global_pool("GlobalAveragePool"),
    "global_max_pool": global_pool("GlobalMaxPool"),
    "identity": simple("Identity"),
    "leaky_relu": simple("LeakyRelu", alpha=0.25),
    "matmul": matmul,
    "matmul_left": matmul_left,
    "max_pool": pool("MaxPool"),
    "neg": simple("Neg"),
    "norm": norm,
    "pad": pad,
    "prelu": prelu,
    "quotient": quotient,
    "reduce": reduce,
    "relu": simple("Relu"),
    "resize": resize,
    "sigmoid": simple("Sigmoid"),
    "tanh": simple("Tanh"),
}
