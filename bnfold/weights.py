"""One Linear site with its pending maps -> its new weight and bias.

With the weight viewed as `[G, dim0/G, dim1, *taps]`, both sides of every kind of linear layer are one broadcast:

    W' = s_out * W * s_in
    b' = s_out * (beta * b + alpha * sum(W * t_in)) + t_out

where `(s_in, t_in)` is the map that used to be applied to the input and `(s_out, t_out)` the one that used to be
applied to the output. Weights are computed from the original values and rounded once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .affine import Affine, Array
from .ops import Linear, Stored
from .report import Reason, Refusal
from .rounding import Accumulator, FloatFormat, round_product


@dataclass(frozen=True, slots=True, eq=False)
class NewWeights:
    """Values as stored (see FloatFormat.pack); `bias` is None when the layer needs none, and then it had none.

    With a new bias, the site's `beta` becomes 1.
    """

    weight: Stored | None  # None: unchanged
    bias: Stored | None
    bias_format: FloatFormat


def solve(site: Linear, pre: Affine | None, post: Affine | None) -> NewWeights | Refusal:
    """Weight and bias that absorb `pre` on the input side and `post` on the output side.

    Refuses with `overflow`, `underflow` or `not-finite` what the stored type cannot hold. The maps must have passed
    the rules: they vary along the site's channel axes only.
    """
    s_in, t_in = _vectors(pre, site.in_axis, site.in_channels)
    s_out, t_out = _vectors(post, site.out_axis, site.out_channels)
    weight = site.weight.values()
    if site.index_input:
        return _table(site, weight, s_out, t_out)
    grouped = _grouped(weight, site.groups)
    factors = [_factor(s, site, grouped.ndim, side) for s, side in ((s_out, "out"), (s_in, "in")) if s is not None]
    factors = [f for f in factors if not (f == 1).all()]
    new_weight = None
    if factors:
        rounded = round_product(site.weight.format, grouped, *factors)
        problem = _range_problem(site, grouped, rounded, factors)
        if problem is not None:
            return problem
        new_weight = site.weight.format.pack(rounded.reshape(weight.shape))
    fmt = site.bias.format if site.bias is not None else site.weight.format
    old = None if site.bias is None else site.bias.values()
    shifts = t_out is not None and bool(t_out.any()), t_in is not None and bool(t_in.any())
    if old is None and not any(shifts):
        return NewWeights(new_weight, None, fmt)
    total = _bias(site, grouped, old, t_in if shifts[1] else None, s_out, t_out)
    bias = total.round(fmt)
    if not np.isfinite(bias).all():
        return _bias_problem(site, fmt, bias, [weight] if old is None else [weight, old])
    return NewWeights(new_weight, fmt.pack(bias), fmt)


def _table(site: Linear, weight: Array, s_out: Array | None, t_out: Array | None) -> NewWeights | Refusal:
    """A lookup returns one row, so that a shift goes into every row and no bias is needed."""
    fmt = site.weight.format
    total = Accumulator.zeros(weight.shape)
    total.add(weight)
    if s_out is not None:
        total.scale(s_out)
    if t_out is not None:
        total.add(t_out)
    rows = total.round(fmt)
    if not np.isfinite(rows).all():
        reason = Reason.OVERFLOW if np.isfinite(weight).all() else Reason.NOT_FINITE
        return Refusal(reason, site.node, f"a folded row does not fit into {fmt.name}, or is not a number")
    return NewWeights(fmt.pack(rows), None, fmt)


def _vectors(m: Affine | None, axis: int, channels: int) -> tuple[Array | None, Array | None]:
    if m is None:
        return None, None
    vectors = m.vectors(axis, channels)
    assert vectors is not None, "a map that varies along another axis passed the rules"
    return vectors


def _grouped(weight: Array, groups: int) -> Array:
    return weight.reshape(groups, weight.shape[0] // groups, *weight.shape[1:])


def _factor(vector: Array, site: Linear, rank: int, side: str) -> Array:
    """A per-channel vector laid along the grouped weight's dim0 or dim1."""
    dim = site.out_dim if side == "out" else 1 - site.out_dim
    shape = [site.groups, *[1] * (rank - 1)]
    shape[1 + dim] = -1
    return vector.reshape(shape)


def _bias(
    site: Linear, grouped: Array, old: Array | None, t_in: Array | None, s_out: Array | None, t_out: Array | None
) -> Accumulator:
    shape = np.broadcast_shapes((site.out_channels,), () if old is None else old.shape)
    total = Accumulator.zeros(shape)
    if t_in is not None:
        # Rows are output channels: [G, out/G, in/G * taps] against the shift of each input channel.
        rows = grouped if site.out_dim == 0 else np.moveaxis(grouped, 2, 1)
        taps = int(np.prod(rows.shape[3:]))
        vector = np.repeat(t_in.reshape(site.groups, 1, -1), taps, axis=2)
        rows = rows.reshape(site.groups, rows.shape[1], -1)
        dots = Accumulator.zeros(rows.shape[:2])
        dots.add_dot(rows, np.broadcast_to(vector, rows.shape))
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


def _range_problem(site: Linear, old: Array, new: Array, factors: list[Array]) -> Refusal | None:
    fmt = site.weight.format
    if not np.isfinite(new).all():
        reason = Reason.OVERFLOW if np.isfinite(old).all() else Reason.NOT_FINITE
        return Refusal(reason, site.node, f"a folded weight does not fit into {fmt.name}, or is not a number")
    flushed: NDArray[np.bool_] = (new == 0) & (np.abs(old) >= fmt.smallest_normal)
    if flushed.any():
        for f in factors:
            flushed = flushed & (f != 0)
        if flushed.any():
            return Refusal(Reason.UNDERFLOW, site.node, f"a folded weight becomes zero in {fmt.name}")
    return None


def _bias_problem(site: Linear, fmt: FloatFormat, bias: Array, sources: list[Array]) -> Refusal:
    channel = int(np.argwhere(~np.isfinite(bias))[0][-1])
    reason = Reason.OVERFLOW if all(np.isfinite(a).all() for a in sources) else Reason.NOT_FINITE
    text = f"the folded bias of channel {channel} does not fit into {fmt.name}, or is not a number"
    return Refusal(reason, site.node, text)
