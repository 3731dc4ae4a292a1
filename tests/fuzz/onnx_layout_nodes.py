"""Kinds of step that regroup, join and take apart dimensions, as ONNX nodes. The table is at the foot."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from .onnx_builder import Kind, OnnxBuilder, Shape, fit
from .program import Step, UnfitError

# ---------------------------------------------------------------------- dimensions regrouped


def depth_to_space(b: OnnxBuilder, s: Step, x: Shape) -> Shape:
    fit(len(x) == 4 and x[1] % 4 == 0 and (b.opset >= 11 or not s.get("mode")))
    b.node("DepthToSpace", [s.reads[0]], blocksize=2, mode=s.get("mode"))
    return x[0], x[1] // 4, 2 * x[2], 2 * x[3]


def space_to_depth(b: OnnxBuilder, s: Step, x: Shape) -> Shape:
    fit(len(x) == 4 and x[2] % 2 == 0 and x[3] % 2 == 0)
    b.node("SpaceToDepth", [s.reads[0]], blocksize=2)
    return x[0], 4 * x[1], x[2] // 2, x[3] // 2


def shuffle(b: OnnxBuilder, s: Step, x: Shape) -> Shape:
    """Channels of several groups dealt out in turn, as Reshape, Transpose, Reshape."""
    groups = s.get("groups", 2)
    fit(len(x) >= 3 and x[1] % groups == 0)
    y = b.node("Reshape", [s.reads[0], b.ints("apart", [0, groups, x[1] // groups, -1])], b.inner("a"))
    y = b.node("Transpose", [y], b.inner("t"), perm=[0, 2, 1, 3])
    if b.free in ("spatial", "unknown"):
        target = b.node("Shape", [s.reads[0]], b.inner("shape"))
    else:
        target = b.ints("together", [0, x[1], *x[2:]])
    b.node("Reshape", [y, target])
    return x


def tokens(b: OnnxBuilder, s: Step, x: Shape) -> Shape:
    """Spatial dimensions become one: `(N, C, H, W)` is `(N, C, H * W)`, or channels last."""
    fit(len(x) >= 3)
    last = s.get("channels_last")
    y = b.node("Reshape", [s.reads[0], b.ints("shape", [0, 0, -1])], b.inner("flat") if last else s.name)
    if last:
        b.node("Transpose", [y], perm=[0, 2, 1])
    flat = math.prod(x[2:])
    return (x[0], flat, x[1]) if last else (x[0], x[1], flat)


def flatten(b: OnnxBuilder, s: Step, x: Shape) -> Shape:
    fit(len(x) >= 2 and (len(x) == 2 or b.free not in ("spatial", "unknown") or math.prod(x[2:]) == 1))
    if s.get("reshape"):
        b.node("Reshape", [s.reads[0], b.ints("shape", [0, math.prod(x[1:])])])
    else:
        b.node("Flatten", [s.reads[0]], axis=1)
    return x[0], math.prod(x[1:])


def transpose(b: OnnxBuilder, s: Step, x: Shape) -> Shape:
    order = s.get("order", list(range(len(x)))[::-1])
    fit(sorted(order) == list(range(len(x))) and not (b.free and order[0]))
    b.node("Transpose", [s.reads[0]], perm=order)
    return tuple(x[a] for a in order)


def view(b: OnnxBuilder, s: Step, x: Shape) -> Shape:
    """Reshaped to the shape it has, which only `Shape` of it says."""
    y = b.node("Reshape", [s.reads[0], b.ints("rows", [0, -1])], b.inner("flat"))
    b.node("Reshape", [y, b.node("Shape", [s.reads[0]], b.inner("shape"))])
    return x


def regroup(b: OnnxBuilder, s: Step, x: Shape) -> Shape:
    """One dimension cut in two: `(N, C, ...)` is `(N, C / 2, 2, ...)`, the rest as one."""
    fit(len(x) >= 2 and x[1] % 2 == 0)
    rest = [-1] if len(x) > 2 else []
    b.node("Reshape", [s.reads[0], b.ints("shape", [0, x[1] // 2, 2, *rest])])
    return (x[0], x[1] // 2, 2, *([math.prod(x[2:])] if rest else []))


def squeeze(b: OnnxBuilder, s: Step, x: Shape) -> Shape:
    axes = [a for a in range(2, len(x)) if x[a] == 1]
    fit(bool(axes) and b.free not in ("spatial", "unknown"))
    _with_axes(b, "Squeeze", s.reads[0], axes)
    return tuple(n for a, n in enumerate(x) if a not in axes)


def unsqueeze(b: OnnxBuilder, s: Step, x: Shape) -> Shape:
    fit(len(x) < 5)
    _with_axes(b, "Unsqueeze", s.reads[0], [len(x)])
    return *x, 1


def _with_axes(b: OnnxBuilder, op: str, x: str, axes: list[int]) -> None:
    if b.opset < 13:
        b.node(op, [x], axes=axes)
    else:
        b.node(op, [x, b.ints("axes", axes)])


# ---------------------------------------------------------------------- joining and taking apart


def concat(b: OnnxBuilder, s: Step, *shapes: Shape) -> Shape:
    axis = s.get("axis", 1) % len(shapes[0])
    rests = {(*x[:axis], *x[axis + 1 :]) for x in shapes}
    fit(len(shapes) >= 2 and len(rests) == 1 and len({len(x) for x in shapes}) == 1)
    b.node("Concat", s.reads, axis=axis)
    return (*shapes[0][:axis], sum(x[axis] for x in shapes), *shapes[0][axis + 1 :])


def split(b: OnnxBuilder, s: Step, x: Shape) -> list[Shape]:
    axis = s.get("axis", 1)
    fit(axis < len(x) and x[axis] >= 2 and (axis == 1 or not b.free))
    first = s.get("first", x[axis] // 2)
    fit(0 < first < x[axis])
    sizes = [first, x[axis] - first]
    results = [f"{s.name}_0", f"{s.name}_1"]
    if b.opset < 13:
        b.node("Split", [s.reads[0]], *results, axis=axis, split=sizes)
    elif s.get("equal") and sizes[0] == sizes[1]:
        b.node("Split", [s.reads[0]], *results, axis=axis, num_outputs=2 if b.opset >= 18 else None)
    else:
        b.node("Split", [s.reads[0], b.ints("sizes", sizes)], *results, axis=axis)
    return [(*x[:axis], n, *x[axis + 1 :]) for n in sizes]


def cut(b: OnnxBuilder, s: Step, x: Shape) -> Shape:
    """A slice along one axis or two, possibly backwards."""
    axes = s.get("axes", [1])
    starts, ends, steps = (s.get(k, [d]) for k, d in (("starts", 0), ("ends", 2), ("steps", 1)))
    starts, ends, steps = ([v[k % len(v)] for k in range(len(axes))] for v in (starts, ends, steps))
    fit(all(a < len(x) for a in axes) and all(a == 1 or not b.free for a in axes))
    sizes = list(x)
    for a, lo, hi, by in zip(axes, starts, ends, steps, strict=True):
        sizes[a] = len(range(*slice(lo, hi, by).indices(x[a])))
    if b.opset < 10:
        fit(set(steps) == {1})
        b.node("Slice", [s.reads[0]], axes=axes, starts=starts, ends=ends)
    else:
        operands = [b.ints(k, v) for k, v in (("starts", starts), ("ends", ends), ("axes", axes))]
        b.node("Slice", [s.reads[0], *operands, b.ints("steps", steps)])
    return tuple(sizes)


def gather(b: OnnxBuilder, s: Step, x: Shape) -> Shape:
    axis, indices = s.get("axis", 1), s.get("indices", [0])
    listed = indices if isinstance(indices, list) else [indices]
    fit(axis < len(x) and (axis == 1 or not b.free) and all(-x[axis] <= i < x[axis] for i in listed))
    b.node("Gather", [s.reads[0], b.ints("indices", indices)], axis=axis)
    return (*x[:axis], *([len(listed)] if isinstance(indices, list) else []), *x[axis + 1 :])


def join(op: str) -> Callable[..., Shape]:
    """Sum, difference or product of activations that broadcast."""

    def add(b: OnnxBuilder, s: Step, *shapes: Shape) -> Shape:
        fit(len(shapes) >= 2 and (op == "Sum" or len(shapes) == 2))
        try:
            found = np.broadcast_shapes(*shapes)
        except ValueError:
            raise UnfitError from None
        b.node(op, s.reads)
        return found

    return add


LAYOUT: dict[str, Kind] = {
    "add": join("Add"),
    "concat": concat,
    "cut": cut,
    "depth_to_space": depth_to_space,
    "flatten": flatten,
    "gather": gather,
    "product": join("Mul"),
    "regroup": regroup,
    "shuffle": shuffle,
    "space_to_depth": space_to_depth,
    "split": split,
    "squeeze": squeeze,
    "sub": join("Sub"),
    "sum": join("Sum"),
    "tokens": tokens,
    "transpose": transpose,
    "unsqueeze": unsqueeze,
    "view": view,
}
