"""ONNX nodes as the engine's records. The table at the foot says which op lifts to what."""

from __future__ import annotations

from ast import literal_eval
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs
from onnx import NodeProto

from ..affine import Affine, Shape
from ..norms import Broken, normalization_map
from ..ops import Carry, Kind, Linear, Opaque, Permute, Program, Record, Reshape, Scale, outputs_of
from ..report import Reason, Refusal
from ..rounding import FLOAT32
from .onnx_constants import Constant, Constants
from .onnx_scopes import DEFAULT_DOMAINS, Scope, TypeInfo
from .sites import Site, join


@dataclass(slots=True, eq=False)
class Lifted:
    """A program and, record by record, where it stands in the file."""

    program: Program
    sites: list[Site[Scope, NodeProto]]
    scopes: list[Scope]
    constants: dict[int, set[str]]  # by id() of the scope: names of its computed constants and initializers

    def constant_names(self, scope: Scope) -> set[str]:
        """Names that are constants as seen from the scope."""
        own = self.constants.get(id(scope), set())
        return own if scope.parent is None else own | self.constant_names(scope.parent)


@dataclass(slots=True, eq=False)
class _Node:
    """One node being lifted."""

    node: Any  # gs.Node
    proto: NodeProto
    scope: Scope
    lifter: _Lifter

    @property
    def op(self) -> str:
        return self.proto.op_type

    @property
    def name(self) -> str:
        return self.proto.name or next((o for o in self.proto.output if o), self.proto.op_type)

    def attr(self, key: str, default: Any = None) -> Any:
        return self.node.attrs.get(key, default)

    def tensor(self, k: int) -> Any | None:
        """The k-th input, or None when it is left out."""
        inputs = self.node.inputs
        return inputs[k] if k < len(inputs) and not inputs[k].is_empty() else None

    def constant(self, k: int) -> Constant | None:
        t = self.tensor(k)
        return None if t is None else self.lifter.constants.get(t)

    def value(self, k: int = 0) -> str:
        return self.lifter.value(self.node.inputs[k])

    def result(self, k: int = 0) -> str:
        return self.lifter.value(self.node.outputs[k])

    def shape(self, value: str) -> Shape | None:
        return self.lifter.shapes.get(value)

    def opaque(self, why: Refusal | None = None, norm: bool = False) -> Opaque:
        inputs = [self.lifter.value(t) for t in self.node.inputs
                  if not t.is_empty() and self.lifter.constants.get(t) is None]  # fmt: skip
        outputs = [self.lifter.value(t) for t in self.node.outputs if not t.is_empty()]
        return Opaque(self.name, tuple(inputs), tuple(outputs), self.op, why, norm, module_of(self.proto))

    def refuse(self, k: int, what: str, norm: bool = False) -> Opaque:
        """The op with a parameter that is no constant."""
        return self.opaque(self.lifter.constants.why_not(self.node.inputs[k], self.name, what), norm)


def lift(scopes: list[Scope], overridable: frozenset[str]) -> Lifted:
    """Describe all scopes as one program; values captured by an inner scope are pinned."""
    return _Lifter(scopes, overridable).lift()


def module_of(proto: NodeProto) -> str | None:
    """The torch module a node came from, by the scope metadata torch's exporter writes."""
    for entry in proto.metadata_props:
        if entry.key == "pkg.torch.onnx.name_scopes":
            try:
                scopes = literal_eval(entry.value)
            except (ValueError, SyntaxError):
                return None
            return next((s for s in reversed(scopes[:-1]) if isinstance(s, str) and s), None) if scopes else None
    return None


@dataclass(slots=True, eq=False)
class _Lifter:
    scopes: list[Scope]
    overridable: frozenset[str]
    constants: Constants = field(init=False)
    shapes: dict[str, Shape | None] = field(default_factory=lambda: {})
    pinned: dict[str, Refusal] = field(default_factory=lambda: {})
    broken: list[str] = field(default_factory=lambda: [])
    names: dict[int, str] = field(default_factory=lambda: {})
    homes: dict[str, Scope] = field(default_factory=lambda: {})
    readers: dict[str, int] = field(default_factory=lambda: {})
    current: Scope = field(init=False)
    _types: dict[int, TypeInfo] = field(default_factory=lambda: {})
    _alive: list[Any] = field(default_factory=lambda: [])

    def __post_init__(self) -> None:
        self.constants = Constants(self.overridable, self.type_of)

    # ------------------------------------------------------------------ values

    def value(self, tensor: Any) -> str:
        """A program-wide unique name of an onnx-graphsurgeon tensor."""
        key = id(tensor)
        if key not in self.names:
            self._alive.append(tensor)
            name, k = tensor.name, 2
            while name in self.homes:
                name, k = f"{tensor.name}~{k}", k + 1
            self.names[key], self.homes[name] = name, self.current
            info = self.current.types.get(tensor.name)
            if info is not None:
                self._types[key] = info
                self.shapes[name] = info.shape
        name = self.names[key]
        if self.homes[name] is not self.current:
            self.pinned.setdefault(
                name, Refusal(Reason.MULTIPLE_CONSUMERS, name, f"{name} is captured by a nested graph")
            )
        return name

    def type_of(self, tensor: Any) -> TypeInfo | None:
        self.value(tensor)
        info = self._types.get(id(tensor))
        shape = self.shapes.get(self.names[id(tensor)])
        return TypeInfo(info.elem_type if info else 0, shape) if info or shape else None

    # ------------------------------------------------------------------ scopes

    def lift(self) -> Lifted:
        records: list[Record] = []
        sites: list[Site[Scope, NodeProto]] = []
        inputs: set[str] = set()
        outputs: list[str] = []
        constants: dict[int, set[str]] = {}
        for scope in self.scopes:
            self.constants.enter(scope)
        for scope in self.scopes:
            self.current = scope
            names = {t.name for t in getattr(scope.proto, "initializer", ()) if t.name not in self.overridable}
            constants[id(scope)] = names
            inputs.update(self.value(t) for t in scope.graph.inputs)
            outputs += [self.value(t) for t in scope.graph.outputs]
            for node, proto in scope.pairs():
                if self._is_constant(node):
                    names.update(proto.output)
                    continue
                found = self._records(_Node(node, proto, scope, self))
                for record, site in found:
                    records.append(record)
                    sites.append(site)
        records, sites = join(records, sites, {*outputs, *self.pinned})
        program = Program(
            tuple(records), self.shapes, frozenset(inputs), tuple(outputs), self.pinned, tuple(self.broken)
        )
        return Lifted(program, sites, self.scopes, constants)

    def _is_constant(self, node: Any) -> bool:
        outputs = [t for t in node.outputs if not t.is_empty()]
        return bool(outputs) and all(self.constants.get(t) is not None for t in outputs)

    def _records(self, n: _Node) -> list[tuple[Record, Site[Scope, NodeProto]]]:
        if n.op in ("Shape", "Size") and n.node.domain in (None, *DEFAULT_DOMAINS):
            return []  # reads only the shape
        for a in n.node.attrs.values():
            if isinstance(a, gs.Node.AttributeRef):
                return [(n.opaque(), Site(n.scope, (n.proto,)))]
        rule = LIFT.get(n.op) if n.node.domain in (None, *DEFAULT_DOMAINS) else None
        record = rule(n) if rule is not None else n.opaque()
        self._remember_shape(record)
        return [(record, _site(record, n))]

    def _remember_shape(self, record: Record) -> None:
        """What a record itself says of its output's shape, where inference was silent."""
        if isinstance(record, Opaque) or self.shapes.get(outputs_of(record)[0]) is not None:
            return
        out = outputs_of(record)[0]
        if isinstance(record, Linear) and len(record.weight.shape) > 2:
            self.shapes[out] = (None, record.out_channels, *[None] * (len(record.weight.shape) - 2))
        elif isinstance(record, Scale | Carry):
            self.shapes[out] = self.shapes.get(record.input)


def _site(record: Record, n: _Node) -> Site[Scope, NodeProto]:
    if isinstance(record, Linear) and n.op == "MatMul":
        return Site(n.scope, (n.proto,), 1 if n.constant(0) is None else 0)
    if isinstance(record, Linear):
        return Site(n.scope, (n.proto,), 1, 2)
    if isinstance(record, Scale) and not record.is_norm:
        k = 0 if n.constant(0) is not None else 1
        return Site(n.scope, (n.proto,), k, constant=n.constant(k))
    return Site(n.scope, (n.proto,))


# ---------------------------------------------------------------------- linear layers


def _parameters(n: _Node) -> tuple[Constant, Constant | None] | Opaque:
    """Constant weight (input 1) and bias (input 2), or the op with the reason one is not."""
    weight, bias = n.constant(1), n.constant(2)
    if weight is None:
        return n.refuse(1, "weight")
    if bias is None and n.tensor(2) is not None:
        return n.refuse(2, "bias")
    if weight.format is None:
        return n.opaque()
    return weight, bias


def _conv(n: _Node) -> Record:
    found = _parameters(n)
    if isinstance(found, Opaque):
        return found
    weight, bias = found
    transposed = n.op == "ConvTranspose"
    pads = n.attr("pads") or []
    unpadded = n.attr("auto_pad", "NOTSET") in ("NOTSET", "VALID") and not any(pads)
    if len(weight.shape) < 3:
        return n.opaque()
    return Linear(
        n.name,
        n.value(0),
        n.result(),
        weight.tensor(),
        None if bias is None else bias.tensor(),
        out_dim=1 if transposed else 0,
        in_axis=1,
        out_axis=1,
        groups=n.attr("group", 1),
        uniform_taps=unpadded and not transposed,
    )


def _gemm(n: _Node) -> Record:
    found = _parameters(n)
    if isinstance(found, Opaque):
        return found
    weight, bias = found
    if len(weight.shape) != 2 or n.attr("broadcast", 1) != 1:
        return n.opaque()
    return Linear(
        n.name,
        n.value(0),
        n.result(),
        weight.tensor(),
        None if bias is None else bias.tensor(),
        out_dim=0 if n.attr("transB", 0) else 1,
        in_axis=0 if n.attr("transA", 0) else 1,
        out_axis=1,
        alpha=n.attr("alpha", 1.0),
        beta=n.attr("beta", 1.0),
    )


def _matmul(n: _Node) -> Record:
    left, right = n.constant(0), n.constant(1)
    weight, x = (right, 0) if left is None else (left, 1)
    if weight is None:
        return n.refuse(1, "right operand")
    shape = n.shape(n.value(x)) if n.tensor(x) is not None else None
    if weight.format is None or len(weight.shape) != 2 or shape is None or len(shape) < 2:
        return n.opaque()
    axis = -1 if x == 0 else -2
    return Linear(
        n.name, n.value(x), n.result(), weight.tensor(), None, out_dim=x ^ 1, in_axis=axis, out_axis=axis,
        free_bias=False,
    )  # fmt: skip


# ---------------------------------------------------------------------- scales


def _batch_norm(n: _Node) -> Record:
    training = _trains(n)
    if training:
        return n.opaque(Refusal(Reason.TRAINING_MODE, n.name, training), norm=True)
    parameters: list[np.ndarray] = []
    for k, what in enumerate(("scale", "bias", "mean", "variance"), 1):
        c = n.constant(k)
        if c is None:
            return n.refuse(k, what, norm=True)
        parameters.append(c.float64())
    x = n.value(0)
    shape = n.shape(x)
    if shape is None:
        return n.opaque(Refusal(Reason.UNKNOWN_SHAPE, n.name, "the rank of its input is not known"), norm=True)
    gamma, beta, mean, variance = parameters
    if not mean.shape == variance.shape == gamma.shape == beta.shape:
        return n.opaque(Refusal(Reason.UNKNOWN_SHAPE, n.name, "its parameters differ in shape"), norm=True)
    result = normalization_map(mean, variance, float(np.float32(n.attr("epsilon", 1e-5))), gamma, beta)
    if isinstance(result, Broken):
        n.lifter.broken.append(f"{n.name}: {result.detail}")
        return n.opaque(Refusal(Reason.NOT_FINITE, n.name, result.detail), norm=True)
    rank = len(shape)
    if gamma.ndim == 1:
        m = Affine.per_channel(*result, rank, 1) if rank > 1 else Affine.of(*result, rank)
    else:  # opset < 9 with spatial=0: one map per element of the sample
        m = Affine.of(*result, rank)
    scale = n.constant(1)
    assert scale is not None
    return Scale(
        n.name, x, n.result(), m, Kind.NORM, n.op, scale.format or FLOAT32,
        channels=gamma.shape[0], cost=2, module=module_of(n.proto),
    )  # fmt: skip


def _trains(n: _Node) -> str:
    """How the node says that it normalises by the batch, or ''."""
    if n.scope.opset >= 14:
        return "training_mode is 1" if n.attr("training_mode", 0) else ""
    if n.scope.opset < 7:
        return "" if n.attr("is_test", 0) else "is_test is 0"
    return "its optional outputs are in use, the training form" if any(n.proto.output[1:]) else ""


def _arithmetic(n: _Node) -> Record:
    constants = n.constant(0), n.constant(1)
    if n.tensor(1) is None or constants == (None, None):
        return n.opaque()
    k = 0 if constants[0] is not None else 1
    c, x = constants[k], n.value(1 - k)
    shape = n.shape(x)
    if c is None or c.format is None or (n.op == "Div" and k == 0) or n.scope.opset < 7:
        return n.opaque()
    m = _constant_map(n.op, c.float64(), k, len(shape)) if shape is not None else None
    if shape is None or m is None or not _keeps_shape(c.shape, shape):
        why = Refusal(Reason.UNKNOWN_SHAPE, n.name, f"it is not known how a constant of shape {c.shape} broadcasts")
        return n.opaque(why if shape is None or None in shape else None)
    if not (np.isfinite(m.scale).all() and np.isfinite(m.shift).all()):
        return n.opaque(Refusal(Reason.NOT_FINITE, n.name, "its constant is not finite"))
    kind = Kind.SCALE if n.op in ("Mul", "Div") else Kind.SHIFT
    return Scale(n.name, x, n.result(), m, kind, n.op, c.format, module=module_of(n.proto))


def _constant_map(op: str, c: np.ndarray, position: int, rank: int) -> Affine | None:
    if c.ndim > rank:
        return None
    with np.errstate(divide="ignore"):
        match op:
            case "Mul":
                return Affine.of(c, 0.0, rank)
            case "Div":
                return Affine.of(1 / c, 0.0, rank)
            case "Add":
                return Affine.of(1.0, c, rank)
            case _:  # Sub
                return Affine.of(1.0, -c, rank) if position == 1 else Affine.of(-1.0, c, rank)


def _keeps_shape(constant: tuple[int, ...], shape: Shape) -> bool:
    """Whether broadcasting the constant leaves the activation's shape as it is."""
    padded = (1,) * (len(shape) - len(constant)) + constant
    return all(c == 1 or c == n for c, n in zip(padded, shape, strict=True))


# ---------------------------------------------------------------------- layout


def _identity(n: _Node) -> Record:
    return Carry(n.name, n.value(0), n.result())


def _dropout(n: _Node) -> Record:
    if any(n.proto.output[1:]):
        return n.opaque()
    training = n.constant(2)
    if n.scope.opset >= 12 and n.tensor(2) is not None and (training is None or bool(training.load().any())):
        return n.opaque()
    if n.scope.opset < 7 and not n.attr("is_test", 0):
        return n.opaque()
    return _identity(n)


def _transpose(n: _Node) -> Record:
    shape = n.shape(n.value(0))
    order = n.attr("perm") or (None if shape is None else list(range(len(shape)))[::-1])
    return n.opaque() if order is None else Permute(n.name, n.value(0), n.result(), tuple(order))


def _reshape(n: _Node) -> Record:
    return Reshape(n.name, n.value(0), n.result())


LIFT: dict[str, Callable[[_Node], Record]] = {
    "Add": _arithmetic,
    "BatchNormalization": _batch_norm,
    "Conv": _conv,
    "ConvTranspose": _conv,
    "Div": _arithmetic,
    "Dropout": _dropout,
    "Flatten": _reshape,
    "Gemm": _gemm,
    "Identity": _identity,
    "MatMul": _matmul,
    "Mul": _arithmetic,
    "Reshape": _reshape,
    "Squeeze": _reshape,
    "Sub": _arithmetic,
    "Transpose": _transpose,
    "Unsqueeze": _reshape,
}
