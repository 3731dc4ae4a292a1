"""Where records stand in a native graph, and native nodes that only together make one record."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar, assert_never

import numpy as np

from ..affine import Affine
from ..ops import Kind, Linear, Program, Record, Scale, Stored, Tensor, inputs_of
from ..planning import Bypass, Merge, Plan, SetLinear, SetScale
from ..quantized import NewGrid
from ..rounding import FloatFormat

S = TypeVar("S")
N = TypeVar("N")


class ConstantLike(Protocol):
    """A constant operand of a native node."""

    @property
    def rooted(self) -> bool:
        """Whether a square root went into it: the mark of running statistics spelled as arithmetic."""
        ...

    def tensor(self) -> Tensor:
        """The constant as the engine reads it."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Site(Generic[S, N]):
    """Where a record stands: its nodes (a MatMul and its Add; the chain of an arithmetic norm) and their scope.

    `weight` is the operand of the first node that holds the weight or, in arithmetic, the `constant`; `bias` the
    operand of the last node that holds the bias, None where a bias takes an Add of its own.
    """

    scope: S
    nodes: tuple[N, ...]
    weight: int = 1
    bias: int | None = None
    constant: ConstantLike | None = None


class Writer(Protocol[S, N]):
    """What carries out the engine's edits in a native graph."""

    def set_linear(
        self, record: Linear, site: Site[S, N], weight: Stored | None, bias: Stored | None, fmt: FloatFormat
    ) -> None:
        """Give a linear layer its new parameters."""
        ...

    def set_grid(self, record: Linear, site: Site[S, N], new: NewGrid) -> None:
        """Give a weight that is stored as integers new scales, and new integers where some are mirrored."""
        ...

    def set_scale(self, record: Scale, site: Site[S, N], m: Affine) -> None:
        """Let a norm, or arithmetic with a constant, compute another map."""
        ...

    def bypass(self, record: Scale, site: Site[S, N], direction: str) -> None:
        """Take a scale out."""
        ...

    def merge(self, base: Site[S, N], total: Site[S, N], dropped: Iterable[Site[S, N]]) -> None:
        """Let a layer stand for a sum; its other summands go."""
        ...


def carry_out(plan: Plan, program: Program, sites: Sequence[Site[S, N]], writer: Writer[S, N]) -> None:
    """Hand each edit of the plan to the writer."""
    for edit in plan.edits:
        record, site = program.records[edit.site], sites[edit.site]
        match edit:
            case SetLinear():
                assert isinstance(record, Linear)
                writer.set_linear(record, site, edit.new.weight, edit.new.bias, edit.new.bias_format)
                if edit.new.grid is not None:
                    writer.set_grid(record, site, edit.new.grid)
            case SetScale():
                assert isinstance(record, Scale)
                writer.set_scale(record, site, edit.map)
            case Bypass():
                assert isinstance(record, Scale)
                writer.bypass(record, site, edit.direction)
            case Merge():
                writer.merge(sites[edit.base], site, [sites[d] for d in edit.dropped])
            case _:
                assert_never(edit)


Records = list[Record]


def join(records: Records, sites: list[Site[S, N]], held: set[str]) -> tuple[Records, list[Site[S, N]]]:
    """Join what belongs together. `held` values (outputs, captures) must keep standing on their own."""
    readers: dict[str, int] = {}
    for r in records:
        for v in inputs_of(r):
            readers[v] = readers.get(v, 0) + 1
    alone = {v for v, n in readers.items() if n == 1 and v not in held}
    for step in (_join_biases, _join_norms):
        gone = step(records, sites, alone)
        sites = [s for i, s in enumerate(sites) if i not in gone]
        records = [r for i, r in enumerate(records) if i not in gone]
    return records, sites


def _join_biases(records: Records, sites: list[Site[S, N]], alone: set[str]) -> set[int]:
    """`MatMul` and the constant `Add` that alone reads it are one Linear with a bias."""
    bare = {r.output: i for i, r in enumerate(records) if isinstance(r, Linear) and _takes_bias(r, alone)}
    gone: set[int] = set()
    for i, r in enumerate(records):
        if not isinstance(r, Scale):
            continue
        k, bias = bare.get(r.input), sites[i].constant
        if k is None or bias is None or sites[k].scope is not sites[i].scope or r.op != "Add":
            continue
        linear = records[k]
        assert isinstance(linear, Linear)
        records[k] = dataclasses.replace(linear, output=r.output, bias=bias.tensor(), free_bias=True)
        sites[k] = Site(sites[k].scope, (*sites[k].nodes, *sites[i].nodes), sites[k].weight, sites[i].weight)
        gone.add(i)
    return gone


def _takes_bias(r: Linear, alone: set[str]) -> bool:
    return not r.free_bias and r.bias is None and r.out_axis == -1 and r.output in alone


def _join_norms(records: Records, sites: list[Site[S, N]], alone: set[str]) -> set[int]:
    """Arithmetic over running statistics, `((x - mean) / sqrt(var + eps)) * gamma + beta`, is one norm."""
    scales = {i: r for i, r in enumerate(records) if isinstance(r, Scale) and not r.is_norm}
    reader = {r.input: i for i, r in scales.items() if r.input in alone}
    writer = {r.output: i for i, r in scales.items() if r.output in alone}
    gone: set[int] = set()
    claimed: set[int] = set()
    for i, r in scales.items():
        constant = sites[i].constant
        if i in claimed or r.kind is not Kind.SCALE or constant is None or not constant.rooted:
            continue
        chain = _chain(i, scales, reader, writer, claimed)
        if len(chain) < 2 or any(sites[k].scope is not sites[i].scope for k in chain):
            continue
        total: Affine = scales[chain[0]].map
        for k in chain[1:]:
            total = scales[k].map.after(total)
        first, last = scales[chain[0]], scales[chain[-1]]
        channels = int(np.prod(np.broadcast_shapes(total.scale.shape, total.shift.shape)))
        records[chain[-1]] = Scale(
            r.module or first.node, first.input, last.output, total, Kind.ARITHMETIC_NORM, "arithmetic", r.format,
            channels=channels, cost=len(chain), module=r.module,
        )  # fmt: skip
        sites[chain[-1]] = Site(sites[i].scope, tuple(n for k in chain for n in sites[k].nodes), sites[chain[0]].weight)
        claimed.update(chain)
        gone.update(chain[:-1])
    return gone


def _chain(
    i: int, scales: dict[int, Scale], reader: dict[str, int], writer: dict[str, int], claimed: set[int]
) -> list[int]:
    """The shift in front of the rooted scale, the scale, further scales, and the shift that ends it."""
    chain = [i]
    k = writer.get(scales[i].input)
    if k is not None and k not in claimed and scales[k].kind is Kind.SHIFT:
        chain.insert(0, k)
    while (k := reader.get(scales[chain[-1]].output)) is not None:
        chain.append(k)
        if scales[k].kind is Kind.SHIFT:
            break
    return chain
