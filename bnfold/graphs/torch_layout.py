"""ATen operations between layers: activations, pools, padding, resizing, joining, splitting, regrouping channels.

Each function describes one node by the engine's records; what decides how a map passes is in the record's needs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import fx

from ..affine import Affine, Dim, Shape
from ..ops import Carry, Concat, Kind, Need, Permute, Product, Record, Reshape, Scale, Sum, Take
from ..report import Reason, Refusal
from ..rounding import FloatFormat
from .torch_constants import FORMAT_OF

if TYPE_CHECKING:
    from .torch_lift import Node

Records = Record | list[Record]
_HOMOGENEOUS = frozenset({Need.POSITIVE, Need.NO_SHIFT})
_MAXIMUM = frozenset({Need.NONNEGATIVE})


def _first(n: Node) -> fx.Node:
    return next(iter(n.args.values()))


def _shape(n: Node) -> Shape:
    return n.shape(next(iter(n.args)))


def _carry(n: Node, needs: frozenset[Need] = frozenset(), mixed: frozenset[int] = frozenset()) -> Carry:
    return Carry(n.label, _first(n).name, n.name, needs, mixed)


# ---------------------------------------------------------------------- the same values


def same(n: Node) -> Records:
    """An op that returns its first operand unchanged."""
    x = _first(n)
    before, after = x.meta["val"], n.node.meta["val"]
    if before.dtype != after.dtype:
        return n.opaque(_cast(n, FORMAT_OF.get(before.dtype), FORMAT_OF.get(after.dtype)))
    if n.args.get("train", False) or before.shape != after.shape:
        return n.opaque()
    return Carry(n.label, x.name, n.name)


def _cast(n: Node, before: FloatFormat | None, after: FloatFormat | None) -> Refusal | None:
    """Why a cast of floats stops a map: it would be rounded to, and have to fit, another type than it was meant for."""
    if before is None or after is None:
        return None
    facts = f"it casts {before.name} to {after.name}, so that the map would be rounded to another type"
    return Refusal(Reason.UNSUPPORTED_OP, n.label, facts)


def permute(n: Node) -> Records:
    """Dimensions in another order."""
    x = _first(n)
    rank = x.meta["val"].dim()
    order = list(range(rank))
    match n.op:
        case "permute":
            order = [d % rank for d in n.args["dims"]]
        case "movedim":
            order = _moved(rank, n.args["source"], n.args["destination"])
        case "t" | "numpy_T" | "mT" | "adjoint":
            order = order[::-1] if n.op in ("t", "numpy_T") else [*order[:-2], rank - 1, rank - 2]
        case _:
            a, b = (n.args[k] % rank for k in list(n.args)[1:3])
            order[a], order[b] = order[b], order[a]
    return Permute(n.label, x.name, n.name, tuple(order))


def _moved(rank: int, source: Any, destination: Any) -> list[int]:
    shape = np.moveaxis(np.empty(tuple(range(2, rank + 2)), bool), source, destination).shape
    return [n - 2 for n in shape]


def reshape(n: Node) -> Records:
    """Dimensions regrouped; what they are, the traced value says."""
    x = _first(n)
    return Reshape(n.label, x.name, n.name)


# ---------------------------------------------------------------------- activations


def homogeneous(n: Node) -> Records:
    """`f(s * x) = s * f(x)` for positive s: ReLU, leaky ReLU, absolute value."""
    return _carry(n, _HOMOGENEOUS)


def prelu(n: Node) -> Records:
    """Like leaky ReLU, with slopes that must not depend on the input."""
    return _carry(n, _HOMOGENEOUS) if n.constant("weight") is not None else n.opaque()


def negation(n: Node) -> Records:
    """`-x`, a scale."""
    dtype = _first(n).meta["val"].dtype
    if dtype not in FORMAT_OF:
        return n.opaque()
    m = Affine.of(-1.0, 0.0, len(_shape(n)))
    return Scale(n.label, _first(n).name, n.name, m, Kind.SCALE, "Neg", FORMAT_OF[dtype])


# ---------------------------------------------------------------------- pools and means


def _last(n: Node, count: int) -> frozenset[int]:
    rank = len(_shape(n))
    return frozenset(range(rank - count, rank))


def _dimensions(n: Node) -> int:
    return next(int(c) for c in n.op if c in "123")


def max_pool(n: Node) -> Records:
    """A maximum lets any scale pass that is not negative; not when its indices are read."""
    value = n.node.meta["val"]
    mixed = _last(n, _dimensions(n))
    if not isinstance(value, list | tuple):
        return _carry(n, _MAXIMUM, mixed)
    items = n.items()
    if items is None or set(items) != {0}:
        return n.opaque()
    return Carry(n.label, _first(n).name, items[0].name, _MAXIMUM, mixed)


def average_pool(n: Node) -> Records:
    """A mean over the window; where padding counts as zeros, or a divisor is set, only a scale passes."""
    padding = n.args["padding"]
    padded = any(padding if isinstance(padding, list | tuple) else [padding]) or n.args.get("ceil_mode", False)
    zeros = (padded and n.args.get("count_include_pad", True)) or n.args.get("divisor_override")
    return _carry(n, frozenset({Need.NO_SHIFT} if zeros else ()), _last(n, _dimensions(n)))


def adaptive_average_pool(n: Node) -> Records:
    """The mean over windows that cover the input."""
    return _carry(n, mixed=_last(n, _dimensions(n)))


def reduction(n: Node) -> Records:
    """mean, sum, amax, amin over given dimensions; without keepdim, they are squeezed after."""
    shape = _shape(n)
    dims = n.args.get("dim")
    if _first(n).meta["val"].dtype != n.node.meta["val"].dtype:
        return n.opaque()
    axes = range(len(shape)) if dims is None or dims == [] else dims if isinstance(dims, list | tuple) else [dims]
    if not shape:
        return _carry(n)
    mixed = frozenset(a % len(shape) for a in axes)
    needs = {"mean": frozenset[Need](), "sum": frozenset({Need.NO_SHIFT})}.get(n.op, _MAXIMUM)
    if n.args.get("keepdim", False):
        return _carry(n, needs, mixed)
    kept = n.inner("kept", tuple(1 if i in mixed else d for i, d in enumerate(shape)))
    return [Carry(n.label, _first(n).name, kept, needs, mixed), Reshape(n.label, kept, n.name)]


# ---------------------------------------------------------------------- borders and sizes


def pad(n: Node) -> Records:
    """Zeros let a scale pass, mirrored and repeated borders any map; the padded axes are mixed."""
    pads, rank = list(n.args["pad" if "pad" in n.args else "padding"]), len(_shape(n))
    mixed = frozenset(rank - 1 - k // 2 for k, p in enumerate(pads) if not isinstance(p, int) or p != 0)
    mode = n.args.get("mode", "constant" if n.op in ("constant_pad_nd", "pad") else n.op)
    if mode != "constant":
        return _carry(n, mixed=mixed)
    value = n.args.get("value") or 0
    if isinstance(value, fx.Node) or value != 0:
        return n.opaque(Refusal(Reason.PADDED_SHIFT, n.label, f"it pads with {value}"))
    return _carry(n, frozenset({Need.NO_SHIFT}), mixed)


def resize(n: Node) -> Records:
    """Nearest and linear interpolation: every result is a mean of values."""
    rank = len(_shape(n))
    return _carry(n, mixed=frozenset(range(2, rank)))


# ---------------------------------------------------------------------- channels regrouped


def pixel_shuffle(n: Node) -> Records:
    """Blocks of channels become blocks of pixels: reshape, permute, reshape."""
    shape, r = _shape(n), n.args["upscale_factor"]
    if len(shape) != 4 or not isinstance(shape[1], int):
        return n.opaque()
    batch, c, h, w = shape
    return _shuffled(n, (batch, c // (r * r), r, r, h, w), (0, 1, 4, 2, 5, 3))


def pixel_unshuffle(n: Node) -> Records:
    """Blocks of pixels become blocks of channels."""
    shape, r = _shape(n), n.args["downscale_factor"]
    if len(shape) != 4:
        return n.opaque()
    batch, c, h, w = shape
    return _shuffled(n, (batch, c, _part(h, r), r, _part(w, r), r), (0, 1, 3, 5, 2, 4))


def channel_shuffle(n: Node) -> Records:
    """Channels of several groups dealt out in turn."""
    shape, g = _shape(n), n.args["groups"]
    if len(shape) < 3 or not isinstance(shape[1], int):
        return n.opaque()
    batch, c, *rest = shape
    order = (0, 2, 1, *range(3, 3 + len(rest)))
    return _shuffled(n, (batch, g, c // g, *rest), order)


def _part(size: Dim, by: int) -> Dim:
    return size // by if isinstance(size, int) else None


def _shuffled(n: Node, split: Shape, order: tuple[int, ...]) -> list[Record]:
    apart = n.inner("apart", split)
    moved = n.inner("moved", tuple(split[i] for i in order))
    x = _first(n).name
    return [Reshape(n.label, x, apart), Permute(n.label, apart, moved, order), Reshape(n.label, moved, n.name)]


# ---------------------------------------------------------------------- joining and taking apart


def concat(n: Node) -> Records:
    """Concatenation of activations (a constant part cannot take a map in)."""
    parts = n.args["tensors"]
    if any(n.lifter.constants.get(p) is not None for p in parts) or _mixed_types(n, parts):
        return n.opaque()
    rank = n.node.meta["val"].dim()
    if any(p.meta["val"].dim() != rank for p in parts):
        return n.opaque()
    return Concat(n.label, tuple(p.name for p in parts), n.name, n.args.get("dim", 0) % rank)


def _mixed_types(n: Node, values: Any) -> bool:
    return any(v.meta["val"].dtype != n.node.meta["val"].dtype for v in values)


def split(n: Node) -> Records:
    """split, chunk and unbind-like ops: consecutive pieces, each read as an item of the result."""
    shape = _shape(n)
    axis = n.args.get("dim", 0) % len(shape)
    items = n.items()
    sizes = [v.shape[axis] for v in n.node.meta["val"]]
    if items is None or not all(isinstance(s, int) for s in sizes):
        return n.opaque()
    ends = np.cumsum(sizes)
    pieces = {k: np.arange(ends[k] - sizes[k], ends[k]) for k in items}
    return Take(n.label, _first(n).name, tuple(i.name for i in items.values()), axis, tuple(pieces.values()))


def slice_(n: Node) -> Records:
    """A slice along one dimension, of unknown size as long as nothing varies along it."""
    shape = _shape(n)
    axis = n.args["dim"] % len(shape)
    start, end, step = n.args["start"], n.args["end"], n.args.get("step", 1)
    return _taken(n, axis, lambda size: np.arange(size)[start:end:step], (start, end, step))


def narrow(n: Node) -> Records:
    """A slice given by start and length."""
    start, length = n.args["start"], n.args["length"]
    return _taken(n, n.args["dim"], lambda size: np.arange(size)[start:][:length], (start, length))


def select(n: Node) -> Records:
    """One index of a dimension, which goes."""
    shape = _shape(n)
    axis, index = n.args["dim"] % len(shape), n.args["index"]
    size = shape[axis]
    if not isinstance(size, int) or not isinstance(index, int):
        return n.opaque()
    one = n.inner("taken", (*shape[:axis], 1, *shape[axis + 1 :]))
    take = Take(n.label, _first(n).name, (one,), axis, (np.array([index % size]),))
    return [take, Reshape(n.label, one, n.name)]


def index_select(n: Node) -> Records:
    """Constant indices along one dimension."""
    indices = n.constant("index")
    if indices is None:
        return n.opaque()
    return _taken(n, n.args["dim"], lambda size: indices.load().numpy().reshape(-1) % size, ())


def _taken(n: Node, axis: int, indices: Callable[[int], np.ndarray], bounds: tuple[Any, ...]) -> Records:
    shape = _shape(n)
    axis %= len(shape)
    size = shape[axis]
    known = isinstance(size, int) and all(b is None or isinstance(b, int) for b in bounds)
    found = indices(size) if known and isinstance(size, int) else np.zeros(1, np.int64)
    if not known and isinstance(size, int):
        return n.opaque()
    return Take(n.label, _first(n).name, (n.name,), axis, (found,))


def sum_or_product(n: Node) -> Records:
    """A sum, difference or product of two activations of one rank and type."""
    values = [v for v in list(n.args.values())[:2] if isinstance(v, fx.Node)]
    ranks = {v.meta["val"].dim() for v in values if isinstance(v.meta.get("val"), torch.Tensor)}
    constant = any(n.lifter.constants.get(v) is not None for v in values)
    floats = n.node.meta["val"].dtype in FORMAT_OF
    if len(values) != 2 or constant or len(ranks) != 1 or not floats or _mixed_types(n, values):
        return n.opaque()
    if n.op == "mul":
        return Product(n.label, (values[0].name, values[1].name), n.name)
    if n.args.get("alpha", 1) != 1:
        return n.opaque()
    return Sum(n.label, (values[0].name, values[1].name), n.name, (1, -1) if n.op == "sub" else ())


LAYOUT: dict[str, Callable[[Node], Records]] = {
    "_to_copy": same,
    "_unsafe_view": reshape,
    "abs": homogeneous,
    "adaptive_avg_pool1d": adaptive_average_pool,
    "adaptive_avg_pool2d": adaptive_average_pool,
    "adaptive_avg_pool3d": adaptive_average_pool,
    "adaptive_max_pool1d": max_pool,
    "adaptive_max_pool2d": max_pool,
    "adaptive_max_pool3d": max_pool,
    "adjoint": permute,
    "alias": same,
    "alpha_dropout": same,
    "amax": reduction,
    "amin": reduction,
    "avg_pool1d": average_pool,
    "avg_pool2d": average_pool,
    "avg_pool3d": average_pool,
    "cat": concat,
    "channel_shuffle": channel_shuffle,
    "chunk": split,
    "clone": same,
    "concat": concat,
    "constant_pad_nd": pad,
    "contiguous": same,
    "detach": same,
    "dropout": same,
    "feature_alpha_dropout": same,
    "feature_dropout": same,
    "flatten": reshape,
    "index_select": index_select,
    "leaky_relu": homogeneous,
    "mT": permute,
    "max_pool1d": max_pool,
    "max_pool2d": max_pool,
    "max_pool2d_with_indices": max_pool,
    "max_pool3d": max_pool,
    "mean": reduction,
    "movedim": permute,
    "narrow": narrow,
    "neg": negation,
    "numpy_T": permute,
    "pad": pad,
    "permute": permute,
    "pixel_shuffle": pixel_shuffle,
    "pixel_unshuffle": pixel_unshuffle,
    "prelu": prelu,
    "reflection_pad1d": pad,
    "reflection_pad2d": pad,
    "reflection_pad3d": pad,
    "relu": homogeneous,
    "replication_pad1d": pad,
    "replication_pad2d": pad,
    "replication_pad3d": pad,
    "reshape": reshape,
    "reshape_as": reshape,
    "select": select,
    "slice": slice_,
    "split": split,
    "split_with_sizes": split,
    "squeeze": reshape,
    "sum": reduction,
    "swapaxes": permute,
    "swapdims": permute,
    "t": permute,
    "tensor_split": split,
    "to": same,
    "transpose": permute,
    "unflatten": reshape,
    "unsqueeze": reshape,
    "upsample_bilinear2d": resize,
    "upsample_linear1d": resize,
    "upsample_nearest1d": resize,
    "upsample_nearest2d": resize,
    "upsample_nearest3d": resize,
    "upsample_trilinear3d": resize,
    "view": reshape,
    "view_as": reshape,
}
