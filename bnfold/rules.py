"""How an affine map passes each record: one small rule backward, one forward.

`backward(record, position, m)` asks: what must happen at the record's inputs so that its output at `position` comes
out with `m` applied? `forward(record, position, m)` asks: the input at `position` no longer has `m` applied to it;
what must happen at the outputs to make up for it? Either the record takes the map in (Absorb), or it passes it on
(alternatives, each a tuple of pushes that must *all* succeed), or it refuses, and says why.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import assert_never

import numpy as np

from .affine import Affine
from .ops import (
    Carry,
    Concat,
    Kind,
    Linear,
    Need,
    Opaque,
    Permute,
    Product,
    Program,
    Record,
    Reshape,
    Scale,
    Sum,
    Take,
)
from .report import Reason, Refusal


@dataclass(frozen=True, slots=True)
class Absorb:
    """The record takes the map in; `adds` is how many elementwise operations that costs at run time."""

    map: Affine
    adds: int = 0


@dataclass(frozen=True, slots=True)
class Push:
    """The map goes on to the record's input (backward) or output (forward) at `position`."""

    position: int
    map: Affine


Step = Absorb | list[tuple[Push, ...]] | Refusal


def backward(record: Record, position: int, m: Affine, program: Program) -> Step:
    """Move `m` from the record's output at `position` to before it."""
    match record:
        case Linear():
            return record.frozen or _absorb_linear(record, m, record.out_axis, record.out_channels)
        case Scale():
            return _absorb_scale(record, m, m.after(record.map))
        case Carry():
            return _carry(record, m)
        case Permute():
            return [(Push(0, m.transpose(np.argsort(record.order).tolist())),)]
        case Reshape():
            return _reshape(record.node, m, program, record.output, record.input)
        case Concat():
            return _cut(record, m, program)
        case Take():
            return _embed(record, position, m, program)
        case Sum():
            return _spread(record, m, program)
        case Product():
            if not m.no_shift:
                return Refusal(Reason.NONZERO_SHIFT, record.node, "a product of activations lets only a scale pass")
            return [(Push(i, m),) for i, v in enumerate(record.inputs) if _fits(m, program, v)]
        case Opaque():
            return _opaque(record)
        case _:
            assert_never(record)


def forward(record: Record, position: int, m: Affine, program: Program) -> Step:
    """Move `m` from the record's input at `position` to behind it."""
    match record:
        case Linear():
            if record.frozen:
                return record.frozen
            if record.index_input:
                return Refusal(Reason.UNSUPPORTED_OP, record.node, "an embedding's input is an index")
            if not record.uniform_taps and not m.no_shift:
                return Refusal(
                    Reason.PADDED_SHIFT, record.node, "taps are missing at the borders, so a shift is not uniform there"
                )
            return _absorb_linear(record, m, record.in_axis, record.in_channels)
        case Scale():
            return _absorb_scale(record, m, record.map.after(m))
        case Carry():
            return _carry(record, m)
        case Permute():
            return [(Push(0, m.transpose(record.order)),)]
        case Reshape():
            return _reshape(record.node, m, program, record.input, record.output)
        case Concat():
            return _pad(record, position, m, program)
        case Take():
            return _index(record, m, program)
        case Sum():
            if not m.no_scale:
                return Refusal(Reason.UNEQUAL_BRANCHES, record.node, "only one summand is scaled")
            return _broadcast(record, _signed(m, record.sign(position)), program)
        case Product():
            if not m.no_shift:
                return Refusal(Reason.NONZERO_SHIFT, record.node, "a product of activations lets only a scale pass")
            return _broadcast(record, m, program)
        case Opaque():
            return _opaque(record)
        case _:
            assert_never(record)


def _absorb_linear(record: Linear, m: Affine, axis: int, channels: int) -> Step:
    if m.vectors(axis, channels) is None:
        return Refusal(
            Reason.NOT_PER_CHANNEL,
            record.node,
            f"the map varies along dimension {_dims(m, axis)}, the layer's channels are dimension {axis % m.rank}",
        )
    needs_bias = not m.no_shift and record.bias is None and not record.free_bias
    return Absorb(m, adds=int(needs_bias))


def _absorb_scale(record: Scale, m: Affine, total: Affine) -> Step:
    if record.kind is not Kind.NORM:
        return Absorb(m, adds=max(0, cost_of(record.kind, total) - record.cost))
    axis = record.channel_axis
    if total.vectors(axis, record.channels) is None:
        return Refusal(
            Reason.NOT_PER_CHANNEL,
            record.node,
            f"the map varies along dimension {_dims(m, axis)}, the norm acts on dimension {axis}",
        )
    return Absorb(m)


def cost_of(kind: Kind, m: Affine) -> int:
    """Elementwise operations a Scale of this kind takes to compute `m`."""
    match kind:
        case Kind.NORM | Kind.ARITHMETIC_NORM:
            return 2
        case Kind.SCALE | Kind.SHIFT:
            return int(not m.no_scale) + int(not m.no_shift)
        case _:
            assert_never(kind)


def _dims(m: Affine, axis: int) -> str:
    return ", ".join(str(i) for i in sorted(m.varying - {axis % m.rank}))


def _carry(record: Carry, m: Affine) -> Step:
    if Need.NO_SHIFT in record.needs and not m.no_shift:
        return Refusal(Reason.NONZERO_SHIFT, record.node, "only a pure scale passes here, and the map also shifts")
    if Need.POSITIVE in record.needs and not m.positive:
        return Refusal(Reason.NEGATIVE_SCALE, record.node, "only positive scales pass here")
    if Need.NONNEGATIVE in record.needs and not m.nonnegative:
        return Refusal(Reason.NEGATIVE_SCALE, record.node, "no negative scale passes here")
    if m.varying & record.mixed:
        return Refusal(Reason.NOT_PER_CHANNEL, record.node, "the map varies along a dimension that is mixed here")
    return [(Push(0, m),)]


def _reshape(node: str, m: Affine, program: Program, old: str, new: str) -> Step:
    before, after = program.shape(old), program.shape(new)
    moved = None if before is None or after is None else m.reshape(before, after)
    if moved is None:
        return Refusal(Reason.UNKNOWN_SHAPE, node, f"cannot follow the channels from {before} to {after}")
    return [(Push(0, moved),)]


def _sizes(record: Concat, program: Program) -> list[int] | None:
    shapes = [program.shape(v) for v in record.inputs]
    sizes = [None if s is None else s[record.axis] for s in shapes]
    known = [n for n in sizes if isinstance(n, int)]
    return known if len(known) == len(sizes) else None


def _cut(record: Concat, m: Affine, program: Program) -> Step:
    axis = record.axis % m.rank
    if axis not in m.varying:
        return [tuple(Push(i, m) for i in range(len(record.inputs)))]
    sizes = _sizes(record, program)
    if sizes is None:
        return Refusal(Reason.UNKNOWN_SHAPE, record.node, "the sizes of the concatenated parts are not known")
    parts = [np.arange(end - n, end) for n, end in zip(sizes, accumulate(sizes), strict=True)]
    return [tuple(Push(i, _select(m, axis, part)) for i, part in enumerate(parts))]


def _pad(record: Concat, position: int, m: Affine, program: Program) -> Step:
    axis = record.axis % m.rank
    sizes = _sizes(record, program)
    if sizes is None:
        return Refusal(Reason.UNKNOWN_SHAPE, record.node, "the sizes of the concatenated parts are not known")
    start = sum(sizes[:position])
    return [(Push(0, _placed(m, axis, np.arange(start, start + sizes[position]), sum(sizes))),)]


def _embed(record: Take, position: int, m: Affine, program: Program) -> Step:
    if len(record.indices) == 1 and record.axis % m.rank not in m.varying:
        return [(Push(0, m),)]  # what is not taken is not read
    shape = program.shape(record.input)
    size = None if shape is None else shape[record.axis]
    if not isinstance(size, int):
        return Refusal(Reason.UNKNOWN_SHAPE, record.node, "the size of the dimension that is indexed is not known")
    indices = record.indices[position]
    others = [i for k, i in enumerate(record.indices) if k != position]
    if any(np.intersect1d(indices, o).size for o in others):
        return Refusal(Reason.MULTIPLE_CONSUMERS, record.node, "other outputs take the same channels")
    axis = record.axis % m.rank
    if len(np.unique(indices)) < len(indices):
        return Refusal(Reason.REPEATED_CHANNEL, record.node, "a channel is taken twice")
    return [(Push(0, _placed(m, axis, indices, size)),)]


def _index(record: Take, m: Affine, program: Program) -> Step:
    axis = record.axis % m.rank
    shape = program.shape(record.input)
    if axis in m.varying and (shape is None or not isinstance(shape[axis], int)):
        return Refusal(Reason.UNKNOWN_SHAPE, record.node, "the size of the dimension that is indexed is not known")
    return [tuple(Push(k, _select(m, axis, i)) for k, i in enumerate(record.indices))]


def _select(m: Affine, axis: int, indices: np.ndarray) -> Affine:
    def cut(a: np.ndarray) -> np.ndarray:
        return a if a.shape[axis] == 1 else a.take(indices, axis)

    return Affine.of(cut(m.scale), cut(m.shift), m.rank)


def _placed(m: Affine, axis: int, indices: np.ndarray, size: int) -> Affine:
    """The identity on `size` channels with `m` at `indices`."""

    def embed(a: np.ndarray, neutral: float) -> np.ndarray:
        full = np.full((*a.shape[:axis], size, *a.shape[axis + 1 :]), neutral)
        np.moveaxis(full, axis, 0)[indices] = np.moveaxis(a, axis, 0)
        return full

    return Affine.of(embed(m.scale, 1.0), embed(m.shift, 0.0), m.rank)


def _spread(record: Sum, m: Affine, program: Program) -> Step:
    if not all(_fits(m, program, v) for v in record.inputs):
        return Refusal(
            Reason.UNEQUAL_BRANCHES, record.node, "not every summand is known to have all channels of the sum"
        )
    scale = Affine.of(m.scale, 0.0, m.rank)
    count = range(len(record.inputs))
    if m.no_scale:
        return [(Push(i, _signed(m, record.sign(i))),) for i in count]
    if m.no_shift:
        return [tuple(Push(i, m) for i in count)]
    taken = [_signed(m, record.sign(i)) for i in count]
    return [tuple(Push(i, taken[i] if i == taker else scale) for i in count) for taker in count]


def _signed(m: Affine, sign: int) -> Affine:
    """The map on `-x` that does to the sum what `m` does, where the sign is negative: the shift changes its sign."""
    return m if sign > 0 else Affine.of(m.scale, -m.shift, m.rank)


def _broadcast(record: Sum | Product, m: Affine, program: Program) -> Step:
    """On to the output, which has more dimensions in front where another operand has."""
    shape = program.shape(record.output)
    if shape is None:
        return Refusal(Reason.UNKNOWN_SHAPE, record.node, "it is not known how its operands broadcast")
    return [(Push(0, Affine.of(m.scale, m.shift, len(shape))),)]


def _fits(m: Affine, program: Program, value: str) -> bool:
    """Whether the value is not broadcast along a dimension where the map varies."""
    shape = program.shape(value)
    if shape is None or len(shape) != m.rank:
        return False
    sizes = np.broadcast_shapes(m.scale.shape, m.shift.shape)
    return all(shape[i] == sizes[i] for i in m.varying)


def _opaque(record: Opaque) -> Refusal:
    if record.why is not None and not record.norm:
        return record.why
    return Refusal(Reason.UNSUPPORTED_OP, record.node, f"{record.op} does not let a per-channel map pass")
