"""ONNX nodes as the engine's records. The table at the foot says which op lifts to what."""

from __future__ import annotations

from ast import literal_eval
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import onnx
import onnx_graphsurgeon as gs
from onnx import NodeProto

from ..affine import Shape
from ..errors import InvalidFileError
from ..ops import Carry, Linear, Opaque, Program, Record, Scale, outputs_of
from ..report import Reason, Refusal
from ..rounding import FloatFormat
from . import onnx_layers, onnx_layout
from .onnx_constants import FORMAT_OF, Constant, Constants
from .onnx_data import Stretch
from .onnx_scopes import DEFAULT_DOMAINS, Scope, TypeInfo, hidden
from .sites import Site, join

# How many of their operands they read by value; of the rest only shape or type, which folding does not change.
READ_BY_VALUE = {"Shape": 0, "Size": 0, "RandomNormalLike": 0, "RandomUniformLike": 0, "EyeLike": 0, "CastLike": 1}


@dataclass(slots=True, eq=False)
class Lifted:
    """A program and, record by record, where it stands in the file."""

    program: Program
    sites: list[Site[Scope, NodeProto]]
    scopes: list[Scope]
    constants: dict[int, set[str]]  # by id() of the scope: names of its computed constants and initializers


@dataclass(slots=True, eq=False)
class Node:
    """One node being lifted."""

    node: Any  # gs.Node
    proto: NodeProto
    scope: Scope
    lifter: _Lifter

    @property
    def op(self) -> str:
        """The op's type."""
        return self.proto.op_type

    @property
    def is_standard(self) -> bool:
        """Whether the op is one of ONNX's own."""
        return self.node.domain in (None, *DEFAULT_DOMAINS)

    @property
    def name(self) -> str:
        """What the report calls it: its name, else its first output."""
        return self.proto.name or next((o for o in self.proto.output if o), self.proto.op_type)

    @property
    def module(self) -> str | None:
        """The torch module it came from, where the file says so."""
        return module_of(self.proto)

    def attr(self, key: str, default: Any = None) -> Any:
        """An attribute's value, of the type that the op's definition says."""
        return self.node.attrs.get(key, default)

    def tensor(self, k: int) -> Any | None:
        """The k-th input, or None when it is left out."""
        inputs = self.node.inputs
        return inputs[k] if k < len(inputs) and not inputs[k].is_empty() else None

    def constant(self, k: int) -> Constant | None:
        """The k-th input's value, or None when it is left out or not known before the run."""
        t = self.tensor(k)
        return None if t is None else self.lifter.constants.get(t)

    def value(self, k: int = 0) -> str:
        """The program's name of the k-th input."""
        return self.lifter.value(self.node.inputs[k])

    def result(self, k: int = 0) -> str:
        """The program's name of the k-th output."""
        return self.lifter.value(self.node.outputs[k])

    def shape(self, value: str) -> Shape | None:
        """What is known of a value's shape."""
        return self.lifter.shapes.get(value)

    def inner(self, what: str, shape: Shape) -> str:
        """A value inside the node, where it takes more than one record to say what it does."""
        return self.lifter.new_value(f"{self.result()}/{what}", shape)

    def format(self, k: int) -> FloatFormat | None:
        """The float format of the k-th input, or None for other types and unknown ones."""
        tensor = self.tensor(k)
        info = None if tensor is None else self.lifter.type_of(tensor)
        return None if info is None else FORMAT_OF.get(info.elem_type)

    def invalid(self, what: str) -> InvalidFileError:
        """The error for a node that no runtime would run."""
        return InvalidFileError(f"{self.op} {self.name!r}: {what}")

    def opaque(self, why: Refusal | None = None, norm: bool = False) -> Opaque:
        """The op as one that lets nothing pass."""
        read = [(k, self.lifter.value(t)) for k, t in enumerate(self.node.inputs)
                if not t.is_empty() and self.lifter.constants.get(t) is None]  # fmt: skip
        by_value = READ_BY_VALUE.get(self.op) if self.is_standard else None
        inputs = [v for k, v in read if by_value is None or k < by_value]
        outputs = [self.lifter.value(t) for t in self.node.outputs if not t.is_empty()]
        return Opaque(self.name, tuple(inputs), tuple(outputs), self.op, why, norm, self.module)

    def check(self) -> None:
        """Raise InvalidFileError where operands are missing or attributes are of another type than the op's."""
        try:
            schema = onnx.defs.get_schema(self.op, self.scope.opset)
        except onnx.defs.SchemaError:
            raise self.invalid(f"opset {self.scope.opset} has no such operation") from None
        if not schema.min_input <= len(self.proto.input) <= schema.max_input:
            raise self.invalid(f"it has {len(self.proto.input)} operands, not {schema.min_input} to {schema.max_input}")
        if any(not name for name in self.proto.input[: schema.min_input]) or not self.proto.output:
            raise self.invalid("an operand or the output that it cannot do without is left out")
        for a in self.proto.attribute:
            known, found = schema.attributes.get(a.name), onnx.AttributeProto.AttributeType.Name(a.type)
            if known is not None and str(known.type) != f"AttrType.{found}":
                raise self.invalid(f"its attribute {a.name} is a {found}, not of {known.type}")

    def refuse(self, k: int, what: str, norm: bool = False) -> Opaque:
        """The op with a parameter that is no constant."""
        return self.opaque(self.lifter.constants.why_not(self.node.inputs[k], self.name, what), norm)


def lift(scopes: list[Scope], overridable: frozenset[str], stored: Mapping[int, Stretch] | None = None) -> Lifted:
    """Describe all scopes as one program; values captured by an inner scope are pinned.

    `stored` are initializers, by id() of their protos, that are read from data files.
    """
    return _Lifter(scopes, overridable, stored or {}).lift()


def module_of(proto: NodeProto) -> str | None:
    """The torch module a node came from, by the scope metadata torch's exporter writes."""
    for entry in proto.metadata_props:
        if entry.key == "pkg.torch.onnx.name_scopes":
            try:
                scopes = literal_eval(entry.value)
            except (ValueError, SyntaxError, MemoryError, RecursionError):
                return None
            outer = scopes[:-1] if isinstance(scopes, list | tuple) else ()
            return next((s for s in reversed(outer) if isinstance(s, str) and s), None)
    return None


@dataclass(slots=True, eq=False)
class _Lifter:
    scopes: list[Scope]
    overridable: frozenset[str]
    stored: Mapping[int, Stretch] = field(default_factory=dict)
    constants: Constants = field(init=False)
    shapes: dict[str, Shape | None] = field(default_factory=dict)
    pinned: dict[str, Refusal] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)
    names: dict[int, str] = field(default_factory=dict)
    homes: dict[str, Scope] = field(default_factory=dict)
    readers: dict[str, int] = field(default_factory=dict)
    current: Scope = field(init=False)
    _types: dict[int, TypeInfo] = field(default_factory=dict)
    _alive: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.constants = Constants(self.overridable, self.type_of, self.stored)

    # ------------------------------------------------------------------ values

    def value(self, tensor: Any) -> str:
        """A program-wide unique name of an onnx-graphsurgeon tensor."""
        key = id(tensor)
        if key not in self.names:
            self._alive.append(tensor)
            info = self.current.types.get(tensor.name)
            self.names[key] = self.new_value(tensor.name, None if info is None else info.shape)
            if info is not None:
                self._types[key] = info
        name = self.names[key]
        if self.homes[name] is not self.current:
            self.pinned.setdefault(
                name, Refusal(Reason.MULTIPLE_CONSUMERS, name, f"{name} is captured by a nested graph")
            )
        return name

    def new_value(self, hint: str, shape: Shape | None) -> str:
        """A name that no other value of the program has."""
        name, k = hint, 2
        while name in self.homes:
            name, k = f"{hint}~{k}", k + 1
        self.homes[name], self.shapes[name] = self.current, shape
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
            names = {n for n in scope.initializers if scope.parent is not None or n not in self.overridable}
            constants[id(scope)] = names
            inputs.update(self.value(t) for t in scope.graph.inputs)
            outputs += [self.value(t) for t in scope.graph.outputs]
            for node, proto in scope.pairs():
                if self._is_constant(node):
                    names.update(proto.output)
                    continue
                found = self._records(Node(node, proto, scope, self))
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

    def _records(self, n: Node) -> list[tuple[Record, Site[Scope, NodeProto]]]:
        rule = LIFT.get(n.op) if n.is_standard else None
        for name in hidden(n.proto):
            self._capture(name, n.scope)
        for key, a in n.node.attrs.items():
            if rule is not None and isinstance(a, gs.Node.AttributeRef):
                why = Refusal(Reason.DYNAMIC_PARAMETER, n.name, f"each call of the function sets its attribute {key}")
                return [(n.opaque(why, norm=rule is onnx_layers.batch_norm), Site(n.scope, (n.proto,)))]
        if rule is not None:
            n.check()
        try:
            found = rule(n) if rule is not None else n.opaque()
        except (ArithmeticError, IndexError, TypeError, ValueError) as e:
            raise n.invalid("its operands or attributes are not of the form it asks for") from e
        records = found if isinstance(found, list) else [found]
        for record in records:
            self._remember_shape(record)
        return [(record, _site(record, n)) for record in records]

    def _capture(self, name: str, scope: Scope) -> None:
        """Pin what a graph that is not looked into may read."""
        tensor = scope.graph.tensors().get(name)
        if tensor is not None:
            value = self.value(tensor)
            self.pinned.setdefault(
                value, Refusal(Reason.MULTIPLE_CONSUMERS, value, f"{value} is captured by a nested graph")
            )
        elif scope.parent is not None:
            self._capture(name, scope.parent)

    def _remember_shape(self, record: Record) -> None:
        """What a record itself says of its output's shape, where inference was silent."""
        if isinstance(record, Opaque) or self.shapes.get(outputs_of(record)[0]) is not None:
            return
        out = outputs_of(record)[0]
        if isinstance(record, Linear) and record.out_axis == 1:  # Conv and Gemm; a MatMul has any rank
            self.shapes[out] = (None, record.out_channels, *[None] * (len(record.weight.shape) - 2))
        elif isinstance(record, Scale | Carry):
            shape = self.shapes.get(record.input)
            mixed = record.mixed if isinstance(record, Carry) else ()
            self.shapes[out] = shape and tuple(None if i in mixed else d for i, d in enumerate(shape))


def _site(record: Record, n: Node) -> Site[Scope, NodeProto]:
    if isinstance(record, Linear) and n.op == "MatMul":
        return Site(n.scope, (n.proto,), 1 if n.constant(0) is None else 0)
    if isinstance(record, Linear):
        return Site(n.scope, (n.proto,), 0) if record.index_input else Site(n.scope, (n.proto,), 1, 2)
    if isinstance(record, Scale) and not record.is_norm:
        k = 0 if n.constant(0) is not None else 1
        return Site(n.scope, (n.proto,), k, constant=n.constant(k))
    return Site(n.scope, (n.proto,))


def _sum_or_constant(n: Node) -> Record | list[Record]:
    return onnx_layout.sum_(n) if n.op in ("Add", "Sub") and _both_computed(n) else onnx_layers.arithmetic(n)


def _product_or_constant(n: Node) -> Record | list[Record]:
    return onnx_layout.product(n) if _both_computed(n) else onnx_layers.arithmetic(n)


def _both_computed(n: Node) -> bool:
    return n.tensor(1) is not None and n.constant(0) is None and n.constant(1) is None


LIFT: dict[str, Callable[[Node], Record | list[Record]]] = {
    "Add": _sum_or_constant,
    "BatchNormalization": onnx_layers.batch_norm,
    "Conv": onnx_layers.convolution,
    "ConvTranspose": onnx_layers.convolution,
    "Div": onnx_layers.arithmetic,
    "Gemm": onnx_layers.gemm,
    "MatMul": onnx_layers.matmul,
    "Mul": _product_or_constant,
    "Sub": _sum_or_constant,
    **onnx_layout.LAYOUT,
}
