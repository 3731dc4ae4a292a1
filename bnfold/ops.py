"""What the engine sees of a graph: a closed set of ten records, and the Program they form.

A graph library's nodes are *described* by these records, never replaced by them: the plan comes back as edits that
name sites (records), and the native graph carries them out. Values are named by strings that are unique in the
program; a record's `node` is the name a person knows it by.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from .affine import Affine, Shape
from .report import Refusal
from .rounding import FloatFormat

Stored = NDArray[np.generic]


class Need(Enum):
    """What a map must be like to pass an op unchanged."""

    POSITIVE = auto()  # every scale > 0
    NONNEGATIVE = auto()  # every scale >= 0
    NO_SHIFT = auto()  # shift == 0


class Draft(Protocol):
    """Where the rows of a new weight go as they are computed, in any order; rows may be put again.

    So a weight need not be held whole: whoever lends the old one decides where the new one is kept.
    """

    def space(self, start: int, stop: int) -> Stored:
        """An array for rows `start` to `stop`, to be filled and `put` before the next one is asked for."""
        ...

    def put(self, start: int, rows: Stored) -> None:
        """Keep what `space` gave, as stored."""
        ...

    def values(self) -> Stored:
        """The whole new weight, as stored: an array, or the mapping of a file (numpy.memmap)."""
        ...


@dataclass(slots=True, eq=False)
class Held:
    """A draft in memory."""

    array: Stored

    def space(self, start: int, stop: int) -> Stored:
        """The rows themselves."""
        return self.array[start:stop]

    def put(self, start: int, rows: Stored) -> None:
        """Nothing is left to do."""

    def values(self) -> Stored:
        """The array itself."""
        return self.array


@dataclass(frozen=True, slots=True, eq=False)
class Tensor:
    """A constant in the graph, read only when it is needed.

    `read` returns the values as stored (bfloat16 as uint16 bit patterns, see FloatFormat); `shape` is theirs. What
    lies in a file can be read in part: `open_rows` returns what reads rows `start` to `stop` of the first dimension.
    `draft` makes room for as many new values; without it they are kept in memory.
    """

    name: str
    shape: tuple[int, ...]
    format: FloatFormat
    read: Callable[[], Stored]
    open_rows: Callable[[], Callable[[int, int], Stored]] | None = None
    draft: Callable[[], Draft] | None = None

    def values(self) -> NDArray[np.float64]:
        """The values, exactly, in float64."""
        return self.format.unpack(self.read())

    def rows(self) -> Callable[[int, int], Stored]:
        """What returns rows as stored, from `start` to `stop`, which hold until it is called again.

        Without `open_rows`, all of them are read here.
        """
        if self.open_rows is not None:
            return self.open_rows()
        whole = self.read()
        return lambda start, stop: whole[start:stop]

    def redrafted(self) -> Draft:
        """Room for a new value of the same shape and format."""
        return self.draft() if self.draft is not None else Held(np.empty(self.shape, self.format.stored_type))


@dataclass(frozen=True, slots=True, eq=False)
class Grid:
    """How a weight is stored as integers: `w = (q - zero_point) * scale`.

    `order` says which dimension of the integers each dimension of the weight is (a weight may be read transposed).
    """

    scale: Tensor  # one, or one for each index of `axis`
    zero_point: NDArray[np.int64]  # likewise
    integers: Callable[[], NDArray[np.int64]]
    order: tuple[int, ...]
    axis: int | None  # of the integers; None: one scale for all
    may_run: bool  # whether one scale may become one for each channel
    low: int  # the range of the integers' type
    high: int


@dataclass(frozen=True, slots=True)
class Geometry:
    """How a convolution slides: tap i of output o reads the input at `o * stride - before + i * dilation`.

    `before` and `after` are how many zeros pad the input in front and behind.
    """

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    before: tuple[int, ...]
    after: tuple[int, ...]

    @property
    def span(self) -> tuple[int, ...]:
        """By how much the result is longer than the input at stride 1; with the stride this decides its size."""
        axes = zip(self.kernel, self.dilation, self.before, self.after, strict=True)
        return tuple(b + a - d * (k - 1) for k, d, b, a in axes)


@dataclass(frozen=True, slots=True, eq=False)
class Linear:
    """Conv, ConvTranspose, Gemm, MatMul, Embedding: linear along one channel axis, with constant weights.

    The weight is `[dim0, dim1, *taps]` with the group factor on dim 0; `out_dim` says which of the two indexes
    output channels (the other indexes input channels). `out = alpha * W(in) + beta * bias`.
    """

    node: str
    input: str
    output: str
    weight: Tensor
    bias: Tensor | None  # broadcasts to the output with the channel on its last dimension
    out_dim: int
    in_axis: int
    out_axis: int
    groups: int = 1
    uniform_taps: bool = True  # every output position sees every tap: no implicit padding, not ConvTranspose
    index_input: bool = False  # Embedding: the input is an index, nothing folds in from above
    free_bias: bool = True  # a bias costs no node
    alpha: float = 1.0
    beta: float = 1.0
    geometry: Geometry | None = None  # of a convolution that may be merged with others
    frozen: Refusal | None = None  # why its parameters must stay
    grid: Grid | None = None  # of a weight that is stored as integers and must stay so

    @property
    def out_channels(self) -> int:
        """Number of output channels over all groups."""
        return self.weight.shape[self.out_dim] * (1 if self.out_dim == 0 else self.groups)

    @property
    def in_channels(self) -> int:
        """Number of input channels over all groups."""
        return self.weight.shape[1 - self.out_dim] * (self.groups if self.out_dim == 0 else 1)


class Kind(Enum):
    """How a Scale is written in the native graph, which decides what it can take up and what removing it saves."""

    NORM = auto()  # one node holding scale and shift: BatchNormalization, InstanceNorm with tracked statistics
    ARITHMETIC_NORM = auto()  # the same spelled as Sub, Div, Mul, Add over running statistics
    SCALE = auto()  # Mul or Div by a constant
    SHIFT = auto()  # Add or Sub of a constant


@dataclass(frozen=True, slots=True, eq=False)
class Scale:
    """A fixed affine map: a normalization that acts by running statistics, or arithmetic with a constant."""

    node: str
    input: str
    output: str
    map: Affine
    kind: Kind
    op: str
    format: FloatFormat  # what its parameters are stored in
    channel_axis: int = 1  # NORM: the axis its parameter vectors run along
    channels: int = 1  # NORM: their length
    cost: int = 1  # elementwise operations it takes at run time
    epsilon: float = 0.0  # NORM: what it adds to the variance, which is written as 1 when the map changes
    module: str | None = None  # the module it came from, where `node` is not its name

    @property
    def is_norm(self) -> bool:
        """Whether the report lists it among the normalizations."""
        return self.kind in (Kind.NORM, Kind.ARITHMETIC_NORM)


@dataclass(frozen=True, slots=True)
class Carry:
    """An op that a map with the given needs passes unchanged, if it is constant along `mixed` axes."""

    node: str
    input: str
    output: str
    needs: frozenset[Need] = frozenset()
    mixed: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Permute:
    """`output = numpy.transpose(input, order)`."""

    node: str
    input: str
    output: str
    order: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Reshape:
    """Row-major regrouping of dimensions; the shapes are those of the program."""

    node: str
    input: str
    output: str


@dataclass(frozen=True, slots=True)
class Concat:
    """Concatenation along `axis`."""

    node: str
    inputs: tuple[str, ...]
    output: str
    axis: int


@dataclass(frozen=True, slots=True, eq=False)
class Take:
    """Each output is `input` indexed along `axis` (Split, Slice, chunk, constant Gather)."""

    node: str
    input: str
    outputs: tuple[str, ...]
    axis: int
    indices: tuple[NDArray[np.int64], ...]


@dataclass(frozen=True, slots=True)
class Sum:
    """Sum of activations, each with its sign: a difference has -1 on what it takes away. Without `signs`, all are 1."""

    node: str
    inputs: tuple[str, ...]
    output: str
    signs: tuple[int, ...] = ()

    def sign(self, position: int) -> int:
        """1 or -1."""
        return self.signs[position] if self.signs else 1


@dataclass(frozen=True, slots=True)
class Product:
    """Product of two activations."""

    node: str
    inputs: tuple[str, ...]
    output: str


@dataclass(frozen=True, slots=True)
class Opaque:
    """Everything else: nothing passes. `why` is more exact than `unsupported-op` where more is known.

    `norm`: it is a normalization all the same, one that is no fixed affine map or must stay, and `why` says so.
    """

    node: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    op: str
    why: Refusal | None = None
    norm: bool = False
    module: str | None = None


Record = Linear | Scale | Carry | Permute | Reshape | Concat | Take | Sum | Product | Opaque


def inputs_of(record: Record) -> tuple[str, ...]:
    """The activations a record reads, in operand order."""
    return record.inputs if isinstance(record, Concat | Sum | Product | Opaque) else (record.input,)


def outputs_of(record: Record) -> tuple[str, ...]:
    """The values a record produces."""
    return record.outputs if isinstance(record, Take | Opaque) else (record.output,)


def within(record: Record, path: str) -> Record:
    """The record as a part of a larger program: its node and its values are named under the path."""

    def under(name: str) -> str:
        return f"{path}.{name}"

    changes: dict[str, object] = {"node": under(record.node)}
    if isinstance(record, Concat | Sum | Product | Opaque):
        changes["inputs"] = tuple(map(under, record.inputs))
    else:
        changes["input"] = under(record.input)
    if isinstance(record, Take | Opaque):
        changes["outputs"] = tuple(map(under, record.outputs))
    else:
        changes["output"] = under(record.output)
    if isinstance(record, Scale | Opaque) and record.module is not None:
        changes["module"] = under(record.module)
    if isinstance(record, Opaque) and record.why is not None:
        changes["why"] = dataclasses.replace(record.why, at=under(record.why.at))
    return dataclasses.replace(record, **changes)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Program:
    """A graph's records in topological order, with the shapes of its values.

    `pinned` values are read from outside the records (subgraph captures, values a caller can observe): they cannot
    change. Graph `outputs` may be renamed but not changed. `broken` names norms whose statistics have no right result,
    with channels and values.
    """

    records: tuple[Record, ...]
    shapes: Mapping[str, Shape | None]
    inputs: frozenset[str]
    outputs: tuple[str, ...]
    pinned: Mapping[str, Refusal] = field(default_factory=lambda: dict[str, Refusal]())
    broken: tuple[str, ...] = ()

    def shape(self, value: str) -> Shape | None:
        """The value's shape, or None when not even its rank is known."""
        return self.shapes.get(value)

    def norms(self) -> Iterable[str]:
        """Names of all normalizations, in order."""
        for r in self.records:
            if (isinstance(r, Scale) and r.is_norm) or (isinstance(r, Opaque) and r.norm):
                yield r.node
