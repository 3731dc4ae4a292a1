"""ONNX operations between layers: activations, pools, padding, resizing, joining, splitting, regrouping channels.

Each function describes one node by the engine's records; what decides how a map passes is in the record's needs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from ..affine import Affine, Dim, Shape
from ..ops import Carry, Concat, Kind, Linear, Need, Opaque, Permute, Product, Record, Reshape, Scale, Sum, Take
from ..report import Reason, Refusal
from .onnx_constants import FORMAT_OF

if TYPE_CHECKING:
    from .onnx_lift import Node

Records = Record | list[Record]
_HOMOGENEOUS = frozenset({Need.POSITIVE, Need.NO_SHIFT})


def _carry(n: Node, needs: frozenset[Need] = frozenset(), mixed: frozenset[int] = frozenset()) -> Carry:
    return Carry(n.name, n.value(0), n.result(), needs, mixed)


def _unknown(n: Node, what: str) -> Opaque:
    return n.opaque(Refusal(Reason.UNKNOWN_SHAPE, n.name, f"{what} is not known"))


# ---------------------------------------------------------------------- the same values


def identity(n: Node) -> Records:
    """The value itself."""
    return _carry(n)


def cast(n: Node) -> Records:
    """The value itself where the type stays; else a map would be rounded to another type than it was meant for."""
    before, after = n.format(0), FORMAT_OF.get(n.attr("to", 0))
    if before is None or after is None:
        return n.opaque()
    if before is after:
        return identity(n)
    facts = f"it casts {before.name} to {after.name}, so that the map would be rounded to another type"
    return n.opaque(Refusal(Reason.UNSUPPORTED_OP, n.name, facts))


def dropout(n: Node) -> Records:
    """The value itself, unless it drops something or its mask is read."""
    if any(n.proto.output[1:]):
        return n.opaque()
    training = n.constant(2)
    if n.scope.opset >= 12 and n.tensor(2) is not None and (training is None or bool(training.load().any())):
        return n.opaque()
    if n.scope.opset < 7 and not n.attr("is_test", 0):
        return n.opaque()
    return identity(n)


def transpose(n: Node) -> Records:
    """Dimensions in another order; reversed where none is given."""
    shape = n.shape(n.value(0))
    order = n.attr("perm") or (None if shape is None else list(range(len(shape)))[::-1])
    if order is None:
        return n.opaque()
    if sorted(order) != list(range(len(order))) or (shape is not None and len(shape) != len(order)):
        raise n.invalid(f"perm {list(order)} does not go with an input of shape {shape}")
    return Permute(n.name, n.value(0), n.result(), tuple(order))


def reshape(n: Node) -> Records:
    """Dimensions regrouped; what they are, shape inference says."""
    return Reshape(n.name, n.value(0), n.result())


# ---------------------------------------------------------------------- activations


def homogeneous(n: Node) -> Records:
    """`f(s * x) = s * f(x)` for positive s: ReLU, leaky ReLU, absolute value."""
    return _carry(n, _HOMOGENEOUS)


def prelu(n: Node) -> Records:
    """Like leaky ReLU, with slopes that must not depend on the input."""
    slope, shape = n.constant(1), n.shape(n.value(0))
    keeps = slope is not None and shape is not None and len(slope.shape) <= len(shape)
    return _carry(n, _HOMOGENEOUS) if keeps else n.opaque()


def negation(n: Node) -> Records:
    """`-x`, a scale."""
    shape, fmt = n.shape(n.value(0)), n.format(0)
    if shape is None or fmt is None or n.scope.opset < 7:
        return n.opaque()
    return Scale(n.name, n.value(0), n.result(), Affine.of(-1.0, 0.0, len(shape)), Kind.SCALE, n.op, fmt)


# ---------------------------------------------------------------------- pools and means


def _spatial(n: Node) -> frozenset[int] | None:
    shape = n.shape(n.value(0))
    return None if shape is None else frozenset(range(2, len(shape)))


def max_pool(n: Node) -> Records:
    """A maximum lets any scale pass that is not negative; not when its indices are read."""
    spatial = _spatial(n)
    if spatial is None or any(n.proto.output[1:]):
        return n.opaque()
    return _carry(n, frozenset({Need.NONNEGATIVE}), spatial)


def average_pool(n: Node) -> Records:
    """A mean over the window; where padding counts as zeros, only a scale passes."""
    spatial = _spatial(n)
    if spatial is None:
        return n.opaque()
    padded = any(n.attr("pads") or []) or n.attr("auto_pad", "NOTSET") not in ("NOTSET", "VALID")
    zeros = n.attr("count_include_pad", 0) and (padded or n.attr("ceil_mode", 0))
    return _carry(n, frozenset({Need.NO_SHIFT} if zeros else ()), spatial)


def global_average_pool(n: Node) -> Records:
    """The mean over all spatial dimensions."""
    spatial = _spatial(n)
    return n.opaque() if spatial is None else _carry(n, mixed=spatial)


def global_max_pool(n: Node) -> Records:
    """The maximum over all spatial dimensions."""
    spatial = _spatial(n)
    return n.opaque() if spatial is None else _carry(n, frozenset({Need.NONNEGATIVE}), spatial)


def reduction(n: Node) -> Records:
    """ReduceMean, ReduceMax, ReduceMin, ReduceSum over known axes; without keepdims, the axes are squeezed after."""
    shape = n.shape(n.value(0))
    axes = _axes(n)
    if shape is None or axes is None:
        return _unknown(n, "over which axes it reduces")
    if not axes:
        if n.attr("noop_with_empty_axes", 0):
            return _carry(n)
        axes = list(range(len(shape)))
    if not shape:
        return _carry(n)
    mixed = frozenset(a % len(shape) for a in axes)
    needs = {"ReduceMean": frozenset[Need](), "ReduceSum": frozenset({Need.NO_SHIFT})}
    need = needs.get(n.op, frozenset({Need.NONNEGATIVE}))
    if n.attr("keepdims", 1):
        return _carry(n, need, mixed)
    kept = n.inner("kept", tuple(1 if i in mixed else d for i, d in enumerate(shape)))
    return [Carry(n.name, n.value(0), kept, need, mixed), Reshape(n.name, kept, n.result())]


def _axes(n: Node) -> list[int] | None:
    """The axes, from the attribute or the second input; [] where there are none; None where they are not known."""
    given = n.attr("axes")
    if given is not None:
        return list(given)
    if n.tensor(1) is None:
        return []
    c = n.constant(1)
    return None if c is None else [int(a) for a in np.atleast_1d(c.load())]


# ---------------------------------------------------------------------- borders and sizes


def pad(n: Node) -> Records:
    """Zeros let a scale pass, mirrored and repeated borders any map; the padded axes are mixed."""
    shape = n.shape(n.value(0))
    pads = n.attr("pads") or n.attr("paddings")
    if pads is None:
        c = n.constant(1)
        pads = None if c is None else [int(p) for p in c.load().reshape(-1)]
    if shape is None or pads is None:
        return _unknown(n, "how far it pads")
    axes = range(len(shape))
    if n.tensor(3) is not None:
        c = n.constant(3)
        if c is None:
            return _unknown(n, "which axes it pads")
        axes = [int(a) % len(shape) for a in c.load()]
    half = len(pads) // 2
    mixed = frozenset(a for a, lo, hi in zip(axes, pads[:half], pads[half:], strict=False) if lo or hi)
    if n.attr("mode", "constant") != "constant":
        return _carry(n, mixed=mixed)
    value: Any = n.attr("value", 0.0)
    if n.tensor(2) is not None:
        c = n.constant(2)
        value = math.nan if c is None or c.load().size != 1 else float(c.load().reshape(-1)[0])
    if value != 0:
        return n.opaque(Refusal(Reason.PADDED_SHIFT, n.name, f"it pads with {value}"))
    return _carry(n, frozenset({Need.NO_SHIFT}), mixed)


def resize(n: Node) -> Records:
    """Nearest and linear interpolation: results are means, so that maps pass that are constant where sizes change."""
    before, after = n.shape(n.value(0)), n.shape(n.result())
    mode = n.attr("mode", "nearest")
    if before is None or after is None or len(before) != len(after) or mode not in ("nearest", "linear", "bilinear"):
        return n.opaque()
    crop = n.attr("coordinate_transformation_mode", "") == "tf_crop_and_resize"
    still = () if crop else _unresized(n, before, after)
    mixed = frozenset(range(len(before))) - frozenset(still)
    if crop and n.attr("extrapolation_value", 0.0) != 0:
        return n.opaque(Refusal(Reason.PADDED_SHIFT, n.name, "what lies outside gets a value that is not zero"))
    return _carry(n, frozenset({Need.NO_SHIFT} if crop else ()), mixed)


def _unresized(n: Node, before: Shape, after: Shape) -> list[int]:
    """Axes that are copied as they are: of one size before and after, and not by rounding (4 * 1.2 is 4 too)."""
    same = [i for i, (a, b) in enumerate(zip(before, after, strict=True)) if a is not None and a == b]
    by_size = n.op == "Resize" and n.tensor(3) is not None
    axes = n.attr("axes")
    if by_size:
        return same
    scales = n.attr("scales")
    if scales is None:
        c = n.constant(1 if n.op == "Upsample" or n.scope.opset < 11 else 2)
        scales = None if c is None else [float(v) for v in c.float64().reshape(-1)]
    if scales is None:
        return []
    factor = dict(zip(range(len(before)) if axes is None else [a % len(before) for a in axes], scales, strict=False))
    return [i for i in same if factor.get(i, 1.0) == 1.0]


# ---------------------------------------------------------------------- channels regrouped


def depth_to_space(n: Node) -> Records:
    """Blocks of channels become blocks of pixels: reshape, permute, reshape."""
    shape = n.shape(n.value(0))
    b = n.attr("blocksize")
    if shape is None or len(shape) != 4 or not isinstance(shape[1], int) or not b:
        return _unknown(n, "its channel count")
    batch, c, h, w = shape
    if n.attr("mode", "DCR") == "DCR":
        return _shuffled(n, (batch, b, b, c // (b * b), h, w), (0, 3, 4, 1, 5, 2))
    return _shuffled(n, (batch, c // (b * b), b, b, h, w), (0, 1, 4, 2, 5, 3))


def space_to_depth(n: Node) -> Records:
    """Blocks of pixels become blocks of channels."""
    shape = n.shape(n.value(0))
    b = n.attr("blocksize")
    if shape is None or len(shape) != 4 or not b:
        return _unknown(n, "its shape")
    batch, c, h, w = shape
    return _shuffled(n, (batch, c, _part(h, b), b, _part(w, b), b), (0, 3, 5, 1, 2, 4))


def _part(size: Dim, by: int) -> Dim:
    return size // by if isinstance(size, int) else None


def _shuffled(n: Node, split: Shape, order: tuple[int, ...]) -> list[Record]:
    apart = n.inner("apart", split)
    moved = n.inner("moved", tuple(split[i] for i in order))
    x = n.value(0)
    return [Reshape(n.name, x, apart), Permute(n.name, apart, moved, order), Reshape(n.name, moved, n.result())]


# ---------------------------------------------------------------------- joining and taking apart


def concat(n: Node) -> Records:
    """Concatenation."""
    shape = n.shape(n.value(0))
    if shape is None:
        return n.opaque()
    values = tuple(n.value(k) for k in range(len(n.node.inputs)))
    return Concat(n.name, values, n.result(), n.attr("axis", 1) % len(shape))


def split(n: Node) -> Records:
    """Consecutive pieces along an axis: sizes given, or equal (the last one smaller)."""
    shape = n.shape(n.value(0))
    if shape is None:
        return n.opaque()
    axis = n.attr("axis", 0) % len(shape)
    size, count = shape[axis], len(n.proto.output)
    sizes = n.attr("split")
    if sizes is None and n.tensor(1) is not None:
        c = n.constant(1)
        sizes = None if c is None else [int(s) for s in c.load()]
    elif sizes is None and isinstance(size, int):
        each = -(-size // count)
        sizes = [min(each, size - k * each) for k in range(count)]
    if sizes is None or not all(n.proto.output):
        return _unknown(n, "where it splits")
    ends = np.cumsum(sizes)
    pieces = tuple(np.arange(e - s, e) for s, e in zip(sizes, ends, strict=True))
    return Take(n.name, n.value(0), tuple(n.result(k) for k in range(count)), axis, pieces)


def slice_(n: Node) -> Records:
    """One Take for each axis that is cut; an axis of unknown size is fine as long as nothing varies along it."""
    shape = n.shape(n.value(0))
    parts = _slice_operands(n)
    if shape is None or parts is None:
        return _unknown(n, "what it cuts out")
    records: list[Record] = []
    x, current = n.value(0), list(shape)
    for position, (axis, start, end, step) in enumerate(parts):
        axis %= len(shape)
        size = shape[axis]
        indices = np.arange(size)[start:end:step] if isinstance(size, int) else np.zeros(1, np.int64)
        current[axis] = len(indices) if isinstance(size, int) else None
        last = position == len(parts) - 1
        y = n.result() if last else n.inner(f"cut{position}", tuple(current))
        records.append(Take(n.name, x, (y,), axis, (indices,)))
        x = y
    return records or _carry(n)


def _slice_operands(n: Node) -> list[tuple[int, int, int, int]] | None:
    if n.attr("starts") is not None:
        starts, ends = n.attr("starts"), n.attr("ends")
        axes, steps = n.attr("axes") or range(len(starts)), [1] * len(starts)
    else:
        found = [n.constant(k) if n.tensor(k) is not None else None for k in range(1, 5)]
        if any(c is None and n.tensor(k) is not None for k, c in enumerate(found, 1)):
            return None
        lists = [None if c is None else [int(v) for v in c.load()] for c in found]
        starts, ends = lists[0], lists[1]
        if starts is None or ends is None:
            return None
        axes, steps = lists[2] or range(len(starts)), lists[3] or [1] * len(starts)
    return list(zip(axes, starts, ends, steps, strict=True))


def gather(n: Node) -> Records:
    """A table looked up by a computed index is an embedding; an activation indexed by constants is a Take."""
    table, indices = n.constant(0), n.constant(1)
    axis = n.attr("axis", 0)
    if table is not None and indices is None and len(table.shape) == 2 and axis == 0 and table.format is not None:
        if table.dequantized:
            why = f"its table {table.name} is stored as integers"
            return n.opaque(Refusal(Reason.QUANTIZED_PARAMETER, n.name, why))
        return Linear(
            n.name, n.value(1), n.result(), table.tensor(), None, out_dim=1, in_axis=-1, out_axis=-1, index_input=True
        )
    shape = n.shape(n.value(0)) if table is None else None
    if shape is None or indices is None or len(indices.shape) > 1:
        return n.opaque()
    axis %= len(shape)
    size = shape[axis]
    if not isinstance(size, int):
        return _unknown(n, "the size it indexes")
    taken = np.atleast_1d(indices.load()).astype(np.int64) % max(size, 1)
    if indices.shape:
        return Take(n.name, n.value(0), (n.result(),), axis, (taken,))
    one = n.inner("taken", (*shape[:axis], 1, *shape[axis + 1 :]))
    return [Take(n.name, n.value(0), (one,), axis, (taken,)), Reshape(n.name, one, n.result())]


def sum_(n: Node) -> Records:
    """A sum or difference of activations of one rank."""
    return Sum(n.name, _terms(n), n.result(), (1, -1) if n.op == "Sub" else ()) if _one_rank(n) else n.opaque()


def product(n: Node) -> Records:
    """A product of two activations of one rank (squeeze and excitation)."""
    return Product(n.name, _terms(n), n.result()) if _one_rank(n) else n.opaque()


def _terms(n: Node) -> tuple[str, ...]:
    return tuple(n.value(k) for k in range(len(n.node.inputs)))


def _one_rank(n: Node) -> bool:
    shapes = [n.shape(v) for v in _terms(n)]
    known = {len(s) for s in shapes if s is not None}
    floats = n.format(0) is not None
    return floats and len(known) == 1 and None not in shapes and n.scope.opset >= 7


LAYOUT: dict[str, Callable[[Node], Records]] = {
    "Abs": homogeneous,
    "AveragePool": average_pool,
    "Cast": cast,
    "Concat": concat,
    "DepthToSpace": depth_to_space,
    "Dropout": dropout,
    "Flatten": reshape,
    "Gather": gather,
    "GlobalAveragePool": global_average_pool,
    "GlobalMaxPool": global_max_pool,
    "Identity": identity,
    "LeakyRelu": homogeneous,
    "MaxPool": max_pool,
    "Neg": negation,
    "PRelu": prelu,
    "Pad": pad,
    "ReduceMax": reduction,
    "ReduceMean": reduction,
    "ReduceMin": reduction,
    "ReduceSum": reduction,
    "Relu": homogeneous,
    "Reshape": reshape,
    "Resize": resize,
    "Slice": slice_,
    "SpaceToDepth": space_to_depth,
    "Split": split,
    "Squeeze": reshape,
    "Sum": sum_,
    "Transpose": transpose,
    "Unsqueeze": reshape,
    "Upsample": resize,
}
