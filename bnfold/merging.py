"""Parallel branches as one convolution: layers that read the same value and are only added (re-parameterization).

`sum_j post_j(W_j * pre_j(x))` is one convolution when the kernels lie on one grid: the smaller ones are laid into the
taps of the largest; the value itself, or a norm alone, is a Dirac kernel of one tap. A merge costs no multiply-adds:
every branch must fit into the taps and the groups that the largest has already.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from .affine import Affine, Array
from .ops import Geometry, Linear
from .report import Reason, Refusal
from .rounding import Accumulator
from .weights import NewWeights


@dataclass(frozen=True, slots=True, eq=False)
class Branch:
    """One summand: a layer, or (`layer` None) the value itself, with the maps before and behind it.

    `taps` says where its kernel lies in that of the layer it is merged into.
    """

    layer: Linear | None
    pre: Affine | None
    post: Affine | None
    taps: tuple[slice, ...]


def composed(branches: list[Branch], pre: Affine | None, post: Affine | None) -> list[Branch]:
    """The branches of `post(sum(branch(pre(x))))`. The shift of `post` counts once, so that the first one gets it."""
    result: list[Branch] = []
    for k, b in enumerate(branches):
        behind = post if post is None or k == 0 else Affine.of(post.scale, 0.0, post.rank)
        result.append(dataclasses.replace(b, pre=_chain(pre, b.pre), post=_chain(b.post, behind)))
    return result


def _chain(first: Affine | None, then: Affine | None) -> Affine | None:
    if first is None or then is None:
        return then if first is None else first
    return then.after(first)


def place(base: Linear, branch: Branch) -> Branch | None:
    """The branch with its kernel laid into the base's, or None when it does not fit.

    The positions its taps read must be positions that taps of the base read.
    """
    g, other = base.geometry, branch.layer
    if g is None or not _fits(base, branch):
        return None
    ones = (1,) * len(g.kernel)
    none = (0,) * len(ones)
    h = other.geometry if other is not None else Geometry(ones, ones, ones, none, none)
    if h is None or h.stride != g.stride or h.span != g.span:
        return None
    taps: list[slice] = []
    for k, d, p, k2, d2, p2 in zip(g.kernel, g.dilation, g.before, h.kernel, h.dilation, h.before, strict=True):
        first, step = p - p2, d2 if k2 > 1 else d
        if first % d or step % d:
            return None
        start, stride = first // d, step // d
        if start < 0 or start + (k2 - 1) * stride >= k:
            return None
        taps.append(slice(start, start + (k2 - 1) * stride + 1, stride))
    return dataclasses.replace(branch, taps=tuple(taps))


def _fits(base: Linear, branch: Branch) -> bool:
    """Whether channels agree and every connection of the branch is one the base has."""
    other = branch.layer
    if other is None:
        along = branch.post is None or branch.post.vectors(base.in_axis, base.in_channels) is not None
        return base.in_channels == base.out_channels and along
    same = (other.in_channels, other.out_channels) == (base.in_channels, base.out_channels)
    return same and other.groups % base.groups == 0 and other.weight.format is base.weight.format


def solve_merged(base: Linear, branches: list[Branch]) -> NewWeights | Refusal:
    """Weight and bias of the base when it computes the sum of the branches, each rounded once."""
    fmt, channels = base.weight.format, (base.out_channels,)
    weight, bias = Accumulator.zeros(base.weight.shape), Accumulator.zeros(channels)
    for b in branches:
        kernel = _kernel(base, b)
        s_in, t_in = _vectors(b.pre, base.in_axis, base.in_channels)
        s_out, t_out = _vectors(b.post, base.out_axis, base.out_channels)
        part = Accumulator.zeros(kernel.shape)
        part.add_product(kernel, s_out.reshape(-1, *[1] * (kernel.ndim - 1)))
        part.scale(_per_input(s_in, base, kernel.ndim))
        where = (slice(None), slice(None), *b.taps)
        Accumulator(weight.hi[where], weight.lo[where]).add_pair(part)
        shift = Accumulator.zeros(channels)
        if t_in.any():
            against = np.broadcast_to(_per_input(t_in, base, kernel.ndim), kernel.shape)
            shift.add_dot(kernel.reshape(*channels, -1), against.reshape(*channels, -1))
        if b.layer is not None and b.layer.bias is not None:
            shift.add(b.layer.bias.values().reshape(-1))
        shift.scale(s_out)
        shift.add(t_out)
        bias.add_pair(shift)
    of_bias = base.bias.format if base.bias is not None else fmt
    new_weight, new_bias = weight.round(fmt), bias.round(of_bias)
    if not (np.isfinite(new_weight).all() and np.isfinite(new_bias).all()):
        return Refusal(Reason.OVERFLOW, base.node, f"a merged weight or bias does not fit into {fmt.name}")
    has_bias = base.bias is not None or bool(new_bias.any())
    return NewWeights(fmt.pack(new_weight), of_bias.pack(new_bias) if has_bias else None, of_bias)


def _vectors(m: Affine | None, axis: int, channels: int) -> tuple[Array, Array]:
    vectors = (np.ones(channels), np.zeros(channels)) if m is None else m.vectors(axis, channels)
    assert vectors is not None, "a map that varies along another axis passed the rules"
    return vectors


def _per_input(vector: Array, base: Linear, rank: int) -> Array:
    """A vector over input channels along dim1 of the weight, for the group of each output channel."""
    groups = vector.reshape(base.groups, 1, -1)
    rows = np.broadcast_to(groups, (base.groups, base.out_channels // base.groups, groups.shape[-1]))
    return rows.reshape(base.out_channels, -1, *[1] * (rank - 2))


def _kernel(base: Linear, b: Branch) -> Array:
    """The branch's kernel with the groups of the base: `[out, in / groups, *taps]`."""
    layer, size = b.layer, base.weight.shape[1]
    if layer is not None and layer.groups == base.groups:
        return layer.weight.values()
    groups = base.in_channels if layer is None else layer.groups
    own = np.ones((base.out_channels, 1, *[1] * len(b.taps))) if layer is None else layer.weight.values()
    kernel = np.zeros((base.out_channels, size, *own.shape[2:]))
    for o in range(base.out_channels):
        first = o // (base.out_channels // groups) * own.shape[1]
        start = first - o // (base.out_channels // base.groups) * size
        kernel[o, start : start + own.shape[1]] = own[o]
    return kernel
