"""Per-element affine maps on tensors, `x -> scale * x + shift`, and how they pass through changes of layout.

`scale` and `shift` are float64 arrays with the *rank of the tensor* they act on. A dimension along which nothing
varies has size 1, any other has the tensor's full size: the map of a batch normalization on NCHW is `(1, C, 1, 1)`.
Passing a Transpose is then `numpy.transpose`, passing a Split is slicing, and broadcasting does the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Dim = int | str | None
"""One dimension of a shape: a static size, a symbol (equal symbols are equal sizes), or unknown."""
Shape = tuple[Dim, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Affine:
    """`x -> scale * x + shift`. Both arrays have the tensor's rank and broadcast to one another."""

    scale: Array
    shift: Array

    @staticmethod
    def of(scale: Array | float, shift: Array | float, rank: int) -> Affine:
        """Broadcastable arrays brought to `rank` (leading ones added), dimensions that do not vary cut to 1."""
        return Affine(_canonical(scale, rank), _canonical(shift, rank))

    @staticmethod
    def per_channel(scale: Array, shift: Array, rank: int, axis: int) -> Affine:
        """The map with one scale and shift per index of `axis`; both arrays are 1-D."""
        shape = [1] * rank
        shape[axis] = -1
        return Affine.of(scale.reshape(shape), shift.reshape(shape), rank)

    @property
    def rank(self) -> int:
        """Rank of the tensors the map acts on."""
        return self.scale.ndim

    @property
    def varying(self) -> frozenset[int]:
        """The dimensions along which scale or shift vary."""
        sizes = np.broadcast_shapes(self.scale.shape, self.shift.shape)
        return frozenset(i for i, n in enumerate(sizes) if n != 1)

    @property
    def no_shift(self) -> bool:
        """Whether the map is a pure scale."""
        return not self.shift.any()

    @property
    def no_scale(self) -> bool:
        """Whether the map is a pure shift."""
        return bool((self.scale == 1).all())

    @property
    def positive(self) -> bool:
        """Whether every scale is above zero."""
        return bool((self.scale > 0).all())

    @property
    def nonnegative(self) -> bool:
        """Whether no scale is below zero."""
        return bool((self.scale >= 0).all())

    def after(self, first: Affine) -> Affine:
        """`self` applied to the result of `first`. It overflows silently: what cannot be stored is refused later."""
        with np.errstate(over="ignore", invalid="ignore"):
            scale, shift = self.scale * first.scale, self.scale * first.shift + self.shift
        return Affine.of(scale, shift, self.rank)

    def vectors(self, axis: int, size: int) -> tuple[Array, Array] | None:
        """Scale and shift as 1-D arrays along `axis`, or None when the map varies along another dimension."""
        if self.varying - {axis % self.rank}:
            return None
        return (
            np.broadcast_to(self.scale.reshape(-1), (size,)),
            np.broadcast_to(self.shift.reshape(-1), (size,)),
        )

    def transpose(self, order: Sequence[int]) -> Affine:
        """The same map on the tensor with its dimensions permuted as `numpy.transpose` does."""
        return Affine(self.scale.transpose(order), self.shift.transpose(order))

    def reshape(self, old: Shape, new: Shape) -> Affine | None:
        """The same map on the tensor reshaped from `old` to `new`; None when sizes that matter are unknown.

        Row-major order means that dimensions regroup in blocks of equal size. Only blocks along which the map
        varies need static sizes.
        """
        scale, shift = np.broadcast_arrays(self.scale, self.shift)
        pieces: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
        for ours, theirs in _blocks(old, new):
            if all(scale.shape[i] == 1 for i in ours):
                pieces.append(((1,) * len(ours), (1,) * len(theirs)))
                continue
            before, after = _static(old[i] for i in ours), _static(new[j] for j in theirs)
            if before is None or after is None or np.prod(before) != np.prod(after):
                return None
            pieces.append((before, after))
        full = tuple(n for before, _ in pieces for n in before)
        shape = tuple(n for _, after in pieces for n in after)
        return Affine.of(
            np.broadcast_to(scale, full).reshape(shape), np.broadcast_to(shift, full).reshape(shape), len(shape)
        )


def _canonical(values: Array | float, rank: int) -> Array:
    a = np.asarray(values, np.float64)
    a = a.reshape((1,) * (rank - a.ndim) + a.shape)
    for axis, size in enumerate(a.shape):
        first = a[(slice(None),) * axis + (slice(0, 1),)]
        if size > 1 and (a == first).all():
            a = first
    return a


def _static(dims: Iterable[Dim]) -> tuple[int, ...] | None:
    sizes = tuple(dims)
    known = tuple(n for n in sizes if isinstance(n, int))
    return known if len(known) == len(sizes) else None


def _blocks(old: Shape, new: Shape) -> list[tuple[list[int], list[int]]]:
    """Groups of dimensions of `old` and `new` that hold the same elements, in order.

    Blocks are matched from the left (equal symbols or equal products of static sizes) and, where that stops, from
    the right; what neither end reaches is one block in the middle.
    """
    left, i, j = _match(old, new)
    back, k, m = _match(tuple(reversed(old[i:])), tuple(reversed(new[j:])))
    middle = (list(range(i, len(old) - k)), list(range(j, len(new) - m)))
    right = [([len(old) - 1 - a for a in reversed(x)], [len(new) - 1 - b for b in reversed(y)]) for x, y in back]
    return left + ([middle] if middle[0] or middle[1] else []) + right[::-1]


def _match(old: Shape, new: Shape) -> tuple[list[tuple[list[int], list[int]]], int, int]:
    """Blocks matched from the front, and how far on each side they reach."""
    blocks: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(old) and j < len(new):
        a, b = old[i], new[j]
        if isinstance(a, str) and a == b:
            blocks.append(([i], [j]))
            i, j = i + 1, j + 1
            continue
        ours, theirs = [i], [j]
        while isinstance(a, int) and isinstance(b, int) and a != b:
            if a < b:
                ours.append(ours[-1] + 1)
                a = _times(a, old, ours[-1])
            else:
                theirs.append(theirs[-1] + 1)
                b = _times(b, new, theirs[-1])
        if not (isinstance(a, int) and isinstance(b, int)) or a == 0:
            return blocks, i, j
        blocks.append((ours, theirs))
        i, j = ours[-1] + 1, theirs[-1] + 1
    while blocks and i < len(old) and old[i] == 1:
        blocks[-1][0].append(i)
        i += 1
    while blocks and j < len(new) and new[j] == 1:
        blocks[-1][1].append(j)
        j += 1
    return blocks, i, j


def _times(product: int, shape: Shape, index: int) -> int | None:
    size = shape[index] if index < len(shape) else None
    return product * size if isinstance(size, int) else None
