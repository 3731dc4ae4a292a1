"""Small Programs to plan on, and an interpreter of its own to prove the plans: numpy only, no code of the engine.

`Net` and `Value` build a Program record by record and evaluate each one as it is added. `check` plans, carries the
edits out on the records, runs them again, and compares structure and numbers together.

What the records leave open is fixed here by convention. A weight with taps is a 1-D convolution over the last
dimension: with `uniform_taps` a valid one, else padded by one zero on either side, or transposed for `out_dim` 1. A
Carry or Opaque computes what its node's name says.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from bnfold.affine import Affine
from bnfold.folding import Bypass, Plan, Selection, SetLinear, SetScale, make_plan
from bnfold.ops import (
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
    Tensor,
    inputs_of,
    outputs_of,
)
from bnfold.report import Reason, Refusal, Report
from bnfold.rounding import FLOAT64, FloatFormat

# ---------------------------------------------------------------------- the interpreter


def stored(name: str, values: np.ndarray, fmt: FloatFormat) -> Tensor:
    """A constant that cannot be written to."""
    kept = fmt.pack(np.asarray(values, np.float64))
    kept.setflags(write=False)
    return Tensor(name, kept.shape, fmt, lambda: kept)


def decoded(t: Tensor) -> np.ndarray:
    bits = t.read()
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(float) if bits.dtype == np.uint16 else bits + 0.0


def windows(x: np.ndarray, reduce: Callable) -> np.ndarray:
    return reduce(np.stack([x[..., :-1], x[..., 1:]]), axis=0)


SIGNED = frozenset({Need.POSITIVE, Need.NO_SHIFT})
ZERO_PADDED = frozenset({Need.NO_SHIFT})
# name: what it computes, what it needs, whether it mixes the last dimension
CARRIES: dict[str, tuple[Callable[[np.ndarray], np.ndarray], frozenset[Need], bool]] = {
    "identity": (lambda x: x, frozenset(), False),
    "relu": (lambda x: np.maximum(x, 0), SIGNED, False),
    "leaky": (lambda x: np.where(x > 0, x, x / 8), SIGNED, False),
    "maxpool": (lambda x: windows(x, np.max), frozenset({Need.NONNEGATIVE}), True),
    "avgpool": (lambda x: windows(x, np.mean), frozenset(), True),
    "countedpool": (lambda x: windows(zero_padded(x), np.mean), ZERO_PADDED, True),
    "pad": (lambda x: zero_padded(x), ZERO_PADDED, True),
    "mean": (lambda x: x.mean(-1, keepdims=True), frozenset(), True),
}


def zero_padded(x: np.ndarray) -> np.ndarray:
    return np.concatenate([np.zeros_like(x[..., :1]), x, np.zeros_like(x[..., :1])], -1)


def evaluate(r: Record, values: dict[str, np.ndarray], shape: tuple[int, ...], size: Callable) -> list[np.ndarray]:
    """The record's outputs. `size` is the identity, or abs: then what comes out bounds the sum of |terms|."""
    x = [values[v] for v in inputs_of(r)]
    match r:
        case Linear():
            return [linear(r, x[0], size)]
        case Scale():
            return [x[0] * size(r.map.scale) + size(r.map.shift)]
        case Carry():
            return [CARRIES[r.node.rstrip("0123456789")][0](x[0])]
        case Permute():
            return [x[0].transpose(r.order)]
        case Reshape():
            return [x[0].reshape(shape)]
        case Concat():
            return [np.concatenate(x, r.axis)]
        case Take():
            return [x[0].take(i, r.axis) for i in r.indices]
        case Sum():
            signed = [size(r.sign(k)) * v for k, v in enumerate(x)]
            return [sum(signed[1:], signed[0])]
        case Product():
            return [x[0] * x[1]]
        case Opaque():
            y = sum(x[1:], x[0])
            return [(k + 1) * (y if size is np.abs else np.tanh(y)) for k in range(len(r.outputs))]


def linear(r: Linear, x: np.ndarray, size: Callable) -> np.ndarray:
    weight = size(decoded(r.weight))
    if r.index_input:
        return weight[np.floor(np.abs(x) * 7).astype(int) % len(weight)]
    x = np.moveaxis(x, r.in_axis, -1)
    rows, columns = len(weight) // r.groups, x.shape[-1] // r.groups
    parts = []
    for g in range(r.groups):
        kernel = weight[g * rows : (g + 1) * rows]
        if r.out_dim == 1:
            kernel = kernel.swapaxes(0, 1)
        parts.append(slide(r, x[..., g * columns : (g + 1) * columns], kernel.reshape(*kernel.shape[:2], -1)))
    y = size(r.alpha) * np.concatenate(parts, -1)
    if r.bias is not None:
        y = y + size(r.beta) * size(decoded(r.bias))
    return np.moveaxis(y, -1, r.out_axis)


def slide(r: Linear, x: np.ndarray, kernel: np.ndarray) -> np.ndarray:
    """One group: x is [..., position, in], kernel [out, in, taps]."""
    if r.weight.read().ndim == 2:
        return np.einsum("...i,oi->...o", x, kernel[:, :, 0])
    taps = kernel.shape[-1]
    if not r.uniform_taps:
        border = taps - 1 if r.out_dim == 1 else 1
        x = np.pad(x, [(0, 0)] * (x.ndim - 2) + [(border, border), (0, 0)])
        kernel = kernel[..., ::-1] if r.out_dim == 1 else kernel
    n = x.shape[-2] - taps + 1
    return sum(np.einsum("...i,oi->...o", x[..., k : k + n, :], kernel[..., k]) for k in range(taps))


@np.errstate(over="ignore", invalid="ignore")
def run(records: Iterable[Record], inputs: dict[str, np.ndarray], shapes: dict, size: Callable = np.asarray) -> dict:
    """All values; a Reshape's target is the shape its output had when it was built."""
    values = {k: size(v) for k, v in inputs.items()}
    for r in records:
        outputs = outputs_of(r)
        values.update(zip(outputs, evaluate(r, values, shapes.get(outputs[0]), size), strict=True))
    return values


def edited(program: Program, plan: Plan) -> list[Record]:
    """The records with the plan carried out, each edit once and on a record of its kind."""
    records = list(program.records)
    for edit in plan.edits:
        old = records[edit.site]
        assert old is program.records[edit.site], "two edits at one site"
        match edit:
            case SetLinear(_, new):
                assert isinstance(old, Linear)
                weight, bias, beta = old.weight, old.bias, old.beta
                if new.weight is not None:
                    assert (new.weight.dtype, new.weight.shape) == (weight.read().dtype, weight.shape)
                    weight = Tensor("new", weight.shape, weight.format, lambda a=new.weight: a)
                if new.bias is None:
                    assert bias is None
                else:
                    assert bias is None or new.bias_format == bias.format
                    beta, bias = 1.0, Tensor("new", new.bias.shape, new.bias_format, lambda a=new.bias: a)
                records[edit.site] = dataclasses.replace(old, weight=weight, bias=bias, beta=beta)
            case SetScale(_, m):
                assert isinstance(old, Scale)
                records[edit.site] = dataclasses.replace(old, map=m)
            case Bypass():
                assert isinstance(old, Scale)
                records[edit.site] = Carry("identity", old.input, old.output)
    return records


def run_plan(net: Net, program: Program, plan: Plan) -> dict[str, np.ndarray]:
    """All values after the plan's edits."""
    return run(edited(program, plan), net.given, {k: v.shape for k, v in net.values.items()})


# ---------------------------------------------------------------------- building


def statistics(rng: np.random.Generator, channels: int, sign: str = "any", shift: bool = True) -> tuple:
    """Scale and shift of a norm; among the channels are a negative, a zero and a tiny gamma (as `sign` allows), a zero
    shift, and variances of 1e-12 and 1e6."""
    gamma, variance = rng.uniform(0.5, 2, channels), rng.uniform(0.5, 2, channels)
    mean, beta = rng.normal(size=(2, channels))
    at = rng.permutation(max(channels, 3)) % channels
    variance[at[0]], variance[at[1]] = 1e-12, 1e6
    gamma[at[2]] = 1e-9
    if sign != "positive":
        gamma[at[1]] = 0
    if sign == "any":
        gamma[at[0]] = -1.5
    mean[at[-1]] = beta[at[-1]] = 0
    if not shift:
        mean[:] = beta[:] = 0
    scale = gamma / np.sqrt(variance + 1e-5)
    return scale, beta - mean * scale


@dataclass(eq=False)
class Net:
    """A Program under construction, with the values its records have on random inputs."""

    rng: np.random.Generator
    given: dict[str, np.ndarray] = field(default_factory=dict)
    values: dict[str, np.ndarray] = field(default_factory=dict)
    shapes: dict[str, tuple | None] = field(default_factory=dict)
    records: list[Record] = field(default_factory=list)
    pinned: dict[str, Refusal] = field(default_factory=dict)
    names: Counter = field(default_factory=Counter)

    def input(self, *shape: int, name: str = "x") -> Value:
        self.given[name] = self.values[name] = self.rng.normal(size=shape)
        self.shapes[name] = shape
        return Value(self, name)

    def name(self, kind: str, wanted: str | None = None) -> str:
        if wanted is not None:
            return wanted
        self.names[kind] += 1
        return kind if self.names[kind] == 1 else f"{kind}{self.names[kind]}"

    @np.errstate(over="ignore", invalid="ignore")
    def add(self, record: Record, shape: tuple | None = None) -> list[Value]:
        outputs = outputs_of(record)
        for v, a in zip(outputs, evaluate(record, self.values, shape, np.asarray), strict=True):
            self.values[v], self.shapes[v] = a, a.shape
        self.records.append(record)
        return [Value(self, v) for v in outputs]

    def program(self, *outputs: Value) -> Program:
        return Program(
            tuple(self.records), self.shapes, frozenset(self.given), tuple(v.name for v in outputs), self.pinned
        )


@dataclass(frozen=True, eq=False)
class Value:
    """A value of a Net; its methods append records. Nodes are named by their kind: conv, conv2, ..."""

    net: Net
    name: str

    @property
    def shape(self) -> tuple[int, ...]:
        return self.net.values[self.name].shape

    def declared(self, *dims: int | str | None) -> Value:
        """What the program is to know of the shape."""
        self.net.shapes[self.name] = dims
        return self

    def shapeless(self) -> Value:
        self.net.shapes[self.name] = None
        return self

    def pin(self) -> Value:
        self.net.pinned[self.name] = Refusal(Reason.MULTIPLE_CONSUMERS, self.name, "it is captured")
        return self

    # linear layers

    def _linear(self, kind, shape, bias, axis, name=None, fmt=FLOAT64, bias_fmt=None, weight=None, **fields) -> Value:
        rng, node = self.net.rng, self.net.name(kind, name)
        w = stored(f"{node}.weight", rng.normal(size=shape) if weight is None else weight, fmt)
        b = None if bias is None else stored(f"{node}.bias", np.asarray(bias), bias_fmt or fmt)
        axes = {"in_axis": axis, "out_axis": axis} | fields
        return self.net.add(Linear(node, self.name, f"{node}.out", w, b, **axes))[0]

    def _bias(self, bias, out: int):
        return self.net.rng.normal(size=out) if bias is True else None if bias is False else bias

    def conv(self, out, taps=1, *, groups=1, bias=True, padded=False, transposed=False, **more) -> Value:
        inner = self.shape[1]
        shape = (inner, out // groups, taps) if transposed else (out, inner // groups, taps)
        return self._linear(
            "deconv" if transposed else "conv", shape, self._bias(bias, out), 1, out_dim=int(transposed),
            groups=groups, uniform_taps=not (padded or transposed), **more,
        )  # fmt: skip

    def gemm(self, out, *, trans=True, bias=True, transposed_input=False, **more) -> Value:
        inner = self.shape[0 if transposed_input else 1]
        return self._linear(
            "gemm", (out, inner) if trans else (inner, out), self._bias(bias, out), 1, out_dim=1 - trans,
            in_axis=0 if transposed_input else 1, **more,
        )  # fmt: skip

    def linear(self, out, *, bias=True, **more) -> Value:
        return self._linear("linear", (out, self.shape[-1]), self._bias(bias, out), -1, out_dim=0, **more)

    def matmul(self, out, **more) -> Value:
        return self._linear("matmul", (self.shape[-1], out), None, -1, out_dim=1, free_bias=False, **more)

    def left_matmul(self, out, **more) -> Value:
        return self._linear("matmul", (out, self.shape[-2]), None, -2, out_dim=0, free_bias=False, **more)

    def embedding(self, out, **more) -> Value:
        return self._linear("embedding", (7, out), None, -1, out_dim=1, index_input=True, **more)

    # affine maps

    def norm(self, sign="any", shift=True, *, axis=1, kind=Kind.NORM, name=None, fmt=FLOAT64, maps=None) -> Value:
        axis %= len(self.shape)
        scale, offset = statistics(self.net.rng, self.shape[axis], sign, shift) if maps is None else maps
        channels = self.shape[axis]
        scale, offset = (np.broadcast_to(np.asarray(a, float), (channels,)) for a in (scale, offset))
        m = Affine.per_channel(scale, offset, len(self.shape), axis)
        fields = {"channel_axis": axis, "channels": channels, "cost": 2 if kind is Kind.NORM else 4}
        return self._scale("bn", m, kind, "BatchNormalization", name, fmt, **fields)

    def mul(self, c, *, name=None, fmt=FLOAT64) -> Value:
        return self._scale("mul", Affine.of(np.asarray(c), 0.0, len(self.shape)), Kind.SCALE, "Mul", name, fmt)

    def plus(self, c, *, name=None, fmt=FLOAT64) -> Value:
        return self._scale("plus", Affine.of(1.0, np.asarray(c), len(self.shape)), Kind.SHIFT, "Add", name, fmt)

    def per_channel(self, axis=1, lowest=0.5) -> np.ndarray:
        """A random constant along one axis, for `mul` and `plus`."""
        shape = [1] * len(self.shape)
        shape[axis] = self.shape[axis]
        return self.net.rng.uniform(lowest, 2, shape)

    def _scale(self, prefix, m, kind, op, name, fmt, **fields) -> Value:
        node = self.net.name(prefix, name)
        return self.net.add(Scale(node, self.name, f"{node}.out", m, kind, op, fmt, **fields))[0]

    # the rest

    def carry(self, kind: str) -> Value:
        _, needs, mixes = CARRIES[kind]
        mixed = frozenset({len(self.shape) - 1} if mixes else ())
        node = self.net.name(kind)
        return self.net.add(Carry(node, self.name, f"{node}.out", needs, mixed))[0]

    def relu(self) -> Value:
        return self.carry("relu")

    def permute(self, *order: int) -> Value:
        node = self.net.name("permute")
        return self.net.add(Permute(node, self.name, f"{node}.out", order))[0]

    def reshape(self, *shape: int) -> Value:
        node = self.net.name("reshape")
        return self.net.add(Reshape(node, self.name, f"{node}.out"), np.empty(self.shape).reshape(shape).shape)[0]

    def take(self, axis: int, *indices: Iterable[int]) -> list[Value]:
        node = self.net.name("take")
        arrays = tuple(np.asarray(i, np.int64) for i in indices)
        outputs = tuple(f"{node}.out{k}" for k in range(len(arrays)))
        return self.net.add(Take(node, self.name, outputs, axis, arrays))

    def split(self, axis: int, *sizes: int) -> list[Value]:
        ends = np.cumsum(sizes)
        return self.take(axis, *(range(end - n, end) for n, end in zip(sizes, ends, strict=True)))

    def gelu(self) -> Value:
        return self.opaque()[0]

    def opaque(self, *others: Value, outputs=1, why=None, norm=False, name=None) -> list[Value]:
        node = self.net.name("gelu", name)
        names = tuple(f"{node}.out{k or ''}" for k in range(outputs))
        return self.net.add(Opaque(node, (self.name, *(v.name for v in others)), names, "Gelu", why, norm))


def concat(axis: int, *values: Value) -> Value:
    net, node = values[0].net, values[0].net.name("concat")
    return net.add(Concat(node, tuple(v.name for v in values), f"{node}.out", axis))[0]


def total(*values: Value) -> Value:
    net, node = values[0].net, values[0].net.name("sum")
    return net.add(Sum(node, tuple(v.name for v in values), f"{node}.out"))[0]


def difference(a: Value, b: Value) -> Value:
    node = a.net.name("difference")
    return a.net.add(Sum(node, (a.name, b.name), f"{node}.out", (1, -1)))[0]


def product(a: Value, b: Value) -> Value:
    node = a.net.name("product")
    return a.net.add(Product(node, (a.name, b.name), f"{node}.out"))[0]


# ---------------------------------------------------------------------- checking


@dataclass(frozen=True)
class Case:
    """One small net and what must come of it.

    `build` maps the input (of `shape`) to one output or several. `folded` lines read `bn backward into conv through
    relu`, affine entries among them; `kept` maps a norm to `reason at node, reason at node`, backward first.
    """

    id: str
    build: Callable
    folded: str | tuple[str, ...] = ()
    kept: dict[str, str] = field(default_factory=dict)
    edits: dict[str, int] = field(default_factory=dict)
    shape: tuple[int, ...] = (2, 4, 5)
    options: dict = field(default_factory=dict)

    def check(self) -> None:
        """With three draws of all random numbers."""
        for seed in range(3):
            net = Net(np.random.default_rng([seed, *self.id.encode()]))
            out = self.build(net.input(*self.shape))
            program = net.program(*(out if isinstance(out, list | tuple) else [out]))
            folded = [self.folded] if isinstance(self.folded, str) else self.folded
            check(net, program, folded, self.kept, self.edits, **self.options)


def check(net: Net, program: Program, folded, kept: dict[str, str], edits: dict[str, int], **options) -> Plan:
    """Plan; compare edits and report with what is expected, and all numbers before with all numbers after."""
    plan = planned(program, **options)
    assert_equal("folded", folds_text(plan.report), sorted(folded))
    assert_equal("kept", kept_text(plan.report), kept)
    assert_equal("edits", Counter(type(e).__name__ for e in plan.edits), Counter(edits))
    check_sound(net, program, plan)
    return plan


def assert_equal(what: str, got, expected) -> None:
    assert got == expected, f"{what}: {got}, expected {expected}"


def planned(program: Program, only=(), skip=(), refused=None) -> Plan:
    return make_plan(program, Selection(tuple(only), tuple(skip)), refused)


def folds_text(report: Report) -> list[str]:
    lines = []
    for f in (*report.folded, *report.affine):
        through = f" through {', '.join(f.through)}" if f.through else ""
        lines.append(f"{f.norm} {f.direction} into {', '.join(f.into)}{through}")
    return sorted(lines)


def kept_text(report: Report) -> dict[str, str]:
    return {k.norm: ", ".join(f"{r.reason} at {r.at}" for r in k.reasons) for k in report.kept}


def check_sound(net: Net, program: Program, plan: Plan) -> None:
    """What holds of every plan: the report accounts for every norm and every edit, and no number changed."""
    report, records = plan.report, program.records
    norms = list(program.norms())
    assert [n.norm for n in report.norms] == norms
    assert Counter(norms) == Counter([f.norm for f in report.folded] + [k.norm for k in report.kept])
    places = {r.node for r in records} | net.values.keys()
    assert all(k.reasons and all(r.at in places and r.detail for r in k.reasons) for k in report.kept)

    assert [e.site for e in plan.edits] == sorted({e.site for e in plan.edits})
    gone = {e.site: e.direction for e in plan.edits if isinstance(e, Bypass)}
    moved = {f.norm: f for f in (*report.folded, *report.affine)}
    assert {records[i].node: d for i, d in gone.items()} == {name: f.direction for name, f in moved.items()}
    changed = {e.site: records[e.site].node for e in plan.edits if e.site not in gone}
    assert {name for f in moved.values() for name in f.into} == set(changed.values())
    assert all(len(set(f.into)) == len(f.into) and len(set(f.through)) == len(f.through) for f in moved.values())
    for site, name in changed.items():
        assert {records[i].node for i in plan.contributors(site)} == {n for n, f in moved.items() if name in f.into}

    after = run_plan(net, program, plan)
    sizes = run(records, net.given, {k: v.shape for k, v in net.values.items()}, np.abs)
    formats = [records[i].weight.format for i in changed if isinstance(records[i], Linear)]
    # A path through one of these nets rounds at most 2**8 times before and after, each time by 2**-53 of the sum of
    # |terms|; a weight or bias in a narrower format is rounded once more, in each of at most four layers.
    limit = max(2.0**-44, *(2.0 ** (2 - f.precision) for f in formats if f.precision < 53), 0.0)
    for v in {*program.outputs, *program.pinned}:
        before = net.values[v]
        assert after[v].shape == before.shape
        with np.errstate(invalid="ignore"):
            error = np.abs(after[v] - before)
        close = (error <= limit * sizes[v]) & (error <= max(limit, 1e-11) * np.abs(before).max(initial=0))
        same = (after[v] == before) | np.isnan(after[v]) & np.isnan(before)
        assert (close | same).all(), f"{v} changed by {error.max()}"


def kind_of(node: str) -> str:
    """`conv` of `conv12`."""
    return re.sub(r"\d+$", "", node)
