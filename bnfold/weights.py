"""One Linear site with its pending maps -> its new weight and bias.

With the weight viewed as `[G, dim0/G, dim1, *taps]`, both sides of every kind of linear layer are one broadcast:

    W' = s_out * W * s_in
    b' = s_out * (beta * b + alpha * sum(W * t_in)) + t_out

where `(s_in, t_in)` is the map that used to be applied to the input and `(s_out, t_out)` the one that used to be
applied to the output. Weights are computed from the original values and rounded once.

A weight may be larger than memory: it is read once, in blocks of rows; each block is scaled, put where the new weight
is kept, and summed up against the shift of the input, all while it is in the processor's cache. One thread computes:
numpy hands the interpreter's lock on at every operation, which for pieces that fit into a cache costs more than a
second thread brings. What is written to a file is written behind its back (`ranges.Writer`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from .affine import Affine, Array
from .ops import Linear, Stored
from .quantized import NewGrid, rescaled
from .report import Reason, Refusal
from .rounding import Accumulator, FloatFormat
from .scaling import PIECE, scale_rows

BLOCK = PIECE  # elements of a weight that are read at a time; one row at least


@dataclass(frozen=True, slots=True, eq=False)
class NewWeights:
    """Values as stored (see FloatFormat.pack); `bias` is None when the layer needs none, and then it had none.

    With a new bias, the site's `beta` becomes 1. The weight is a numpy.memmap where its draft was kept in a file.
    """

    weight: Stored | None  # None: unchanged
    bias: Stored | None
    bias_format: FloatFormat
    grid: NewGrid | None = None  # of a weight that is stored as integers


def solve(site: Linear, pre: Affine | None, post: Affine | None) -> NewWeights | Refusal:
    """Weight and bias that absorb `pre` on the input side and `post` on the output side.

    Refuses with `overflow`, `underflow` or `not-finite` what the stored type cannot hold. The maps must have passed
    the rules: they vary along the site's channel axes only.
    """
    s_in, t_in = _vectors(pre, site.in_axis, site.in_channels)
    s_out, t_out = _vectors(post, site.out_axis, site.out_channels)
    if site.index_input:
        return _table(site, s_out, t_out)
    factors = [_factor(s, site, side) for s, side in ((s_out, "out"), (s_in, "in")) if s is not None]
    factors = [f for f in factors if not (f == 1).all()]
    t_in = t_in if t_in is not None and t_in.any() else None
    grid = rescaled(site, site.grid, factors) if site.grid is not None and factors else None
    if isinstance(grid, Refusal):
        return grid
    worked = _work(site, factors if site.grid is None else (), t_in)
    if isinstance(worked, Refusal):
        return worked
    new_weight, dots = worked
    fmt = site.bias.format if site.bias is not None else site.weight.format
    old = None if site.bias is None else site.bias.values()
    if old is None and t_in is None and (t_out is None or not t_out.any()):
        return NewWeights(new_weight, None, fmt, grid)
    bias = _bias(site, dots, old, s_out, t_out).round(fmt)
    if not np.isfinite(bias).all():
        return _bias_problem(site, fmt, bias, old)
    return NewWeights(new_weight, fmt.pack(bias), fmt, grid)


# ---------------------------------------------------------------------- blocks of rows


@dataclass(frozen=True, slots=True)
class _Block:
    """Rows `start` to `stop` of a weight's first dimension: part of one group, or whole groups."""

    groups: slice
    rows: slice  # within each group
    start: int
    stop: int

    @property
    def shape(self) -> tuple[int, int]:
        """Groups, and rows of each."""
        return self.groups.stop - self.groups.start, self.rows.stop - self.rows.start


def _blocks(shape: tuple[int, ...], groups: int) -> Iterator[_Block]:
    size, row = shape[0] // groups, int(np.prod(shape[1:]))
    rows = max(BLOCK // max(row, 1), 1)
    if rows < size:
        for g in range(groups):
            for r in range(0, size, rows):
                stop = min(r + rows, size)
                yield _Block(slice(g, g + 1), slice(r, stop), g * size + r, g * size + stop)
        return
    step = max(rows // max(size, 1), 1)
    for g in range(0, groups, step):
        stop = min(g + step, groups)
        yield _Block(slice(g, stop), slice(0, size), g * size, stop * size)


def _work(
    site: Linear, factors: Sequence[Array], t_in: Array | None
) -> tuple[Stored | None, Accumulator | None] | Refusal:
    """The new weight, and per output channel the sum of the old one against the shift of the input; what is needed."""
    if not factors and t_in is None:
        return None, None
    fmt, read = site.weight.format, site.weight.rows()
    draft = site.weight.redrafted() if factors else None
    dots = None if t_in is None else Accumulator.zeros((site.groups, site.out_channels // site.groups))

    for block in _blocks(site.weight.shape, site.groups):
        rows = read(block.start, block.stop)
        grouped = rows.reshape(block.shape + rows.shape[1:])
        if draft is not None:
            new = draft.space(block.start, block.stop)
            reason = scale_rows(fmt, grouped, [_cut(f, block) for f in factors], new.reshape(grouped.shape))
            if reason is not None:
                return _weight_problem(site, reason)
            draft.put(block.start, new)
        if dots is not None and t_in is not None:
            where = (block.groups, block.rows if site.out_dim == 0 else slice(None))
            part = _dots(site, fmt.unpack(grouped), t_in, block)
            Accumulator(dots.hi[where], dots.lo[where]).add_pair(part)
    return None if draft is None else draft.values(), dots


def _dots(site: Linear, grouped: Array, t_in: Array, block: _Block) -> Accumulator:
    """What a block adds to each output channel: rows of `[G, out/G, in/G * taps]` against the shift of each input."""
    rows = grouped if site.out_dim == 0 else np.moveaxis(grouped, 2, 1)
    taps = int(np.prod(rows.shape[3:]))
    vector = t_in.reshape(site.groups, 1, -1)[block.groups]
    if site.out_dim == 1:
        vector = vector[..., block.rows]
    rows = rows.reshape(*rows.shape[:2], -1)
    dots = Accumulator.zeros(rows.shape[:2])
    dots.add_dot(rows, np.broadcast_to(np.repeat(vector, taps, axis=2), rows.shape))
    return dots


def _table(site: Linear, s_out: Array | None, t_out: Array | None) -> NewWeights | Refusal:
    """A lookup returns one row, so that a shift goes into every row and no bias is needed."""
    fmt, read, draft = site.weight.format, site.weight.rows(), site.weight.redrafted()

    for block in _blocks(site.weight.shape, 1):
        old = fmt.unpack(read(block.start, block.stop))
        total = Accumulator.zeros(old.shape)
        total.add(old)
        if s_out is not None:
            total.scale(s_out)
        if t_out is not None:
            total.add(t_out)
        new = total.round(fmt)
        if not np.isfinite(new).all():
            reason = Reason.OVERFLOW if np.isfinite(old).all() else Reason.NOT_FINITE
            return Refusal(reason, site.node, f"a folded row does not fit into {fmt.name}, or is not a number")
        space = draft.space(block.start, block.stop)
        space[...] = fmt.pack(new)
        draft.put(block.start, space)
    return NewWeights(draft.values(), None, fmt)


# ---------------------------------------------------------------------- maps along the channels


def _vectors(m: Affine | None, axis: int, channels: int) -> tuple[Array | None, Array | None]:
    if m is None:
        return None, None
    vectors = m.vectors(axis, channels)
    assert vectors is not None, "a map that varies along another axis passed the rules"
    return vectors


def _factor(vector: Array, site: Linear, side: str) -> Array:
    """A per-channel vector laid along the grouped weight's dim0 or dim1."""
    dim = site.out_dim if side == "out" else 1 - site.out_dim
    shape = [site.groups, *[1] * len(site.weight.shape)]
    shape[1 + dim] = -1
    return vector.reshape(shape)


def _cut(factor: Array, block: _Block) -> Array:
    """The part of a factor that belongs to a block of rows."""
    return factor[block.groups, block.rows] if factor.shape[1] > 1 else factor[block.groups]


def _bias(
    site: Linear, dots: Accumulator | None, old: Array | None, s_out: Array | None, t_out: Array | None
) -> Accumulator:
    shape = np.broadcast_shapes((site.out_channels,), () if old is None else old.shape)
    total = Accumulator.zeros(shape)
    if dots is not None:
        if site.alpha != 1:
            dots.scale(np.asarray(site.alpha, np.float64))
        total.add(dots.hi.reshape(-1))
        total.add(dots.lo.reshape(-1))
    if old is not None:
        total.add_product(old, np.asarray(site.beta, np.float64))
    if s_out is not None:
        total.scale(s_out)
    if t_out is not None:
        total.add(t_out)
    return total


# ---------------------------------------------------------------------- what does not fit


def _weight_problem(site: Linear, reason: Reason) -> Refusal:
    name = site.weight.format.name
    if reason is Reason.UNDERFLOW:
        return Refusal(reason, site.node, f"a folded weight becomes zero in {name}")
    return Refusal(reason, site.node, f"a folded weight does not fit into {name}, or is not a number")


def _bias_problem(site: Linear, fmt: FloatFormat, bias: Array, old: Array | None) -> Refusal:
    channel = int(np.argwhere(~np.isfinite(bias))[0][-1])
    finite = (old is None or bool(np.isfinite(old).all())) and _is_finite(site)
    reason = Reason.OVERFLOW if finite else Reason.NOT_FINITE
    text = f"the folded bias of channel {channel} does not fit into {fmt.name}, or is not a number"
    return Refusal(reason, site.node, text)


def _is_finite(site: Linear) -> bool:
    read = site.weight.rows()
    blocks = _blocks(site.weight.shape, site.groups)
    return all(np.isfinite(site.weight.format.unpack(read(b.start, b.stop))).all() for b in blocks)
