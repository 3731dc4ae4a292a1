"""An ONNX model behind the engine's port: lifted to a Program, edited in place on a copy of its ModelProto.

Nothing makes a round trip through another representation, so what is not edited cannot be lost.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx
from onnx import FunctionProto, GraphProto, ModelProto, NodeProto, TensorProto

from ..affine import Affine
from ..folding import Bypass, Plan, SetLinear, SetScale
from ..ops import Kind, Linear, Program, Scale, Stored
from ..report import Refusal
from ..rounding import BFLOAT16, FloatFormat, round_product
from .onnx_constants import FORMAT_OF
from .onnx_lift import Lifted, lift
from .onnx_scopes import Scope, read_scopes
from .sites import Site

OnnxSite = Site[Scope, NodeProto]
ELEM_TYPE = {fmt: elem for elem, fmt in FORMAT_OF.items()}


class OnnxGraph:
    """`lift()` describes the model, `apply(plan)` returns an edited copy. The model given is never changed."""

    def __init__(self, model: ModelProto, *, freeze_initializers: bool = False, respect_inputs: bool = False):
        self._model = ModelProto()
        self._model.CopyFrom(model)
        overridable, self._listed, self.notes = _overridable(model, freeze_initializers, respect_inputs)
        self._lifted: Lifted = lift(read_scopes(self._model), overridable)

    def lift(self) -> Program:
        """The model as records."""
        return self._lifted.program

    def objections(self, plan: Plan) -> Mapping[int, Refusal]:
        """None: every plan can be written into the file."""
        return {}

    def apply(self, plan: Plan) -> tuple[ModelProto, int]:
        """The edited model, and the bytes added by weights whose original other nodes still need."""
        writer = _Writer(self._model, self._lifted, self._listed)
        for edit in plan.edits:
            record, site = self._lifted.program.records[edit.site], self._lifted.sites[edit.site]
            match edit:
                case SetLinear():
                    assert isinstance(record, Linear)
                    writer.set_linear(record, site, edit.new.weight, edit.new.bias, edit.new.bias_format)
                case SetScale():
                    assert isinstance(record, Scale)
                    writer.set_scale(record, site, edit.map)
                case Bypass():
                    writer.bypass(site, edit.direction)
        writer.clean_up()
        return self._model, writer.bytes_added


def _overridable(model: ModelProto, freeze: bool, respect: bool) -> tuple[frozenset[str], frozenset[str], tuple[str, ...]]:  # fmt: skip
    """Initializers a caller may override, those listed as inputs without meaning it, and what to say about them.

    From IR 4 on an initializer that is also a graph input can be overridden. Old exporters list *every* initializer
    without meaning it; onnxruntime then folds nothing. So: all listed, or IR 3: constants; only some: an interface.
    """
    inputs = {i.name for i in model.graph.input}
    initializers = {t.name for t in model.graph.initializer}
    listed = inputs & initializers
    if not listed:
        return frozenset(), frozenset(), ()
    if respect:
        return frozenset(listed), frozenset(), ()
    if freeze:
        return frozenset(), frozenset(listed), ("initializers that are also graph inputs were frozen, as asked",)
    if listed == initializers or model.ir_version < 4:
        note = "every initializer is listed as a graph input (an old exporter's habit): taken as constants"
        return frozenset(), frozenset(listed), (note,)
    return frozenset(listed), frozenset(), ()


class _Writer:
    """Carries out edits on the protos; remembers which names they made superfluous."""

    def __init__(self, model: ModelProto, lifted: Lifted, listed: frozenset[str]):
        self.model, self.lifted, self.listed = model, lifted, listed
        self.scopes = lifted.scopes
        self.taken = {n for s in self.scopes for n in _names(s.proto)}
        self.released: list[tuple[Scope, str]] = []
        self.bytes_added = 0

    # ------------------------------------------------------------------ edits

    def set_linear(
        self, record: Linear, site: OnnxSite, weight: Stored | None, bias: Stored | None, fmt: FloatFormat
    ) -> None:
        first, last = site.nodes[0], site.nodes[-1]
        if weight is not None:
            self._put(site.scope, first, site.weight, weight, record.weight.format, "weight")
        if bias is None:
            return
        if site.bias is not None:
            self._put(site.scope, last, site.bias, bias, fmt, "bias")
            _remove_attribute(last, "beta")
            return
        if record.out_axis == -2:  # a weight on the left: its channels are the rows of the product
            bias = bias.reshape(-1, 1)
        result = first.output[0]
        first.output[0] = self._fresh(f"{result}_unbiased")
        name = self._add_constant(site.scope, bias, fmt, f"{result}_bias")
        node = onnx.helper.make_node("Add", [first.output[0], name], [result])
        if first.name:
            node.name = self._fresh(f"{first.name}_bias")
        self._insert(site.scope, node, after=first)

    def set_scale(self, record: Scale, site: OnnxSite, m: Affine) -> None:
        fmt = record.format
        if record.kind is Kind.NORM:
            node = site.nodes[0]
            vectors = m.vectors(record.channel_axis, record.channels)
            assert vectors is not None
            epsilon = next((float(np.float32(a.f)) for a in node.attribute if a.name == "epsilon"), 1e-5)
            one = np.ones(record.channels)
            values = vectors[0] * np.sqrt(1 + float(np.float32(epsilon))), vectors[1], one * 0, one
            for k, (what, v) in enumerate(zip(("scale", "bias", "mean", "var"), values, strict=True), 1):
                self._put(site.scope, node, k, fmt.pack(round_product(fmt, v)), fmt, what)
            return
        # Arithmetic: its first node becomes the Mul, its last the Add, what lies between goes.
        first, last = site.nodes[0], site.nodes[-1]
        for node in site.nodes[1:-1]:
            self.bypass(Site(site.scope, (node,)), "backward")
        x = first.input[0] if record.kind is Kind.ARITHMETIC_NORM else first.input[1 - site.weight]
        for node in {id(n): n for n in (first, last)}.values():
            self._release(site.scope, node.input)
        parts = [("Mul", m.scale)] if not m.no_scale else []
        parts += [("Add", m.shift)] if not m.no_shift or not parts else []
        result = last.output[0]
        keep = [first] if first is last else [first, last]
        for k, (op, values) in enumerate(parts):
            name = self._add_constant(site.scope, fmt.pack(round_product(fmt, values)), fmt, f"{result}_{op.lower()}")
            if k < len(keep):
                node = keep[k]
                node.op_type = op
                del node.input[:]
                del node.attribute[:]
                node.input.extend([x, name])
            else:
                node = onnx.helper.make_node(op, [x, name], [self._fresh(f"{result}_folded")])
                self._insert(site.scope, node, after=keep[-1])
                keep[-1].output[0], node.output[0] = node.output[0], result
                node.input[0] = keep[-1].output[0]
                keep.append(node)
            x = keep[k].output[0]
        if len(parts) < len(keep):
            self.bypass(Site(site.scope, (keep[-1],)), "backward")

    def bypass(self, site: OnnxSite, direction: str) -> None:
        """Take the site's nodes out; its activation passes from the first node's input to the last node's output."""
        nodes, scope = site.nodes, site.scope
        own = {o for n in nodes for o in n.output}
        x = self._activation(site)
        y = nodes[-1].output[0]
        for node in nodes:
            self._release(scope, [i for i in node.input if i != x and i not in own])
            scope.proto.node.remove(node)
        for name in own - {y}:
            _drop_value_info(scope.proto, name)
        old, new = (x, y) if direction == "backward" else (y, x)
        _drop_value_info(scope.proto, old)
        _rename(scope.proto, old, new)

    def _activation(self, site: OnnxSite) -> str:
        node = site.nodes[0]
        if node.op_type in ("BatchNormalization", "InstanceNormalization"):
            return node.input[0]
        constants = self.lifted.constant_names(site.scope)
        return next(i for i in node.input if i and i not in constants)

    # ------------------------------------------------------------------ constants

    def _put(
        self, scope: Scope, node: NodeProto, k: int, values: Stored, fmt: FloatFormat, what: str
    ) -> None:
        """Make input `k` of the node the given constant: in place where it is the only reader of an initializer."""
        while len(node.input) <= k:
            node.input.append("")
        old = node.input[k]
        initializer = _initializer(scope.proto, old)
        if initializer is not None and self._readers(old) == 1 and initializer.data_type == ELEM_TYPE[fmt]:
            _fill(initializer, values, fmt)
            if self.model.ir_version >= 4:
                self._unlist(old)
            return
        name = self._add_constant(scope, values, fmt, f"{old or node.output[0]}_{what if not old else 'folded'}")
        node.input[k] = name
        if old:
            self._release(scope, [old])
            self.bytes_added += values.nbytes if self._readers(old) else 0

    def _add_constant(self, scope: Scope, values: Stored, fmt: FloatFormat, hint: str) -> str:
        name = self._fresh(hint)
        tensor = TensorProto(name=name, data_type=ELEM_TYPE[fmt], dims=values.shape)
        _fill(tensor, values, fmt)
        if isinstance(scope.proto, GraphProto):
            scope.proto.initializer.append(tensor)
            if self.model.ir_version < 4 and scope.parent is None:  # before IR 4 every initializer is an input too
                self.model.graph.input.append(
                    onnx.helper.make_tensor_value_info(name, tensor.data_type, list(tensor.dims))
                )
        else:
            node = onnx.helper.make_node("Constant", [], [name])
            node.attribute.append(onnx.helper.make_attribute("value", tensor))
            scope.proto.node.insert(0, node)
        return name

    def _fresh(self, hint: str) -> str:
        name, k = hint, 2
        while name in self.taken:
            name, k = f"{hint}_{k}", k + 1
        self.taken.add(name)
        return name

    def _release(self, scope: Scope, names: object) -> None:
        self.released += [(scope, n) for n in names if n]  # type: ignore[attr-defined]

    def _unlist(self, name: str) -> None:
        """A constant that changed is no input any more."""
        if name in self.listed:
            kept = [i for i in self.model.graph.input if i.name != name]
            del self.model.graph.input[:]
            self.model.graph.input.extend(kept)

    def _readers(self, name: str) -> int:
        return sum(_count(s.proto, name) for s in self.scopes)

    @staticmethod
    def _insert(scope: Scope, node: NodeProto, after: NodeProto) -> None:
        position = next(k for k, n in enumerate(scope.proto.node) if n is after or n == after)
        scope.proto.node.insert(position + 1, node)

    # ------------------------------------------------------------------ cleaning up

    def clean_up(self) -> None:
        """Remove constants, and the nodes that computed them, which only edited nodes read."""
        pending = list(self.released)
        while pending:
            scope, name = pending.pop()
            if self._readers(name):
                continue
            home = _home(scope, name)
            if home is None:
                continue
            proto = home.proto
            initializer = _initializer(proto, name)
            if initializer is not None and name not in {o.name for o in proto.output}:
                proto.initializer.remove(initializer)
                self._unlist(name)
                _drop_value_info(proto, name)
            for node in [n for n in proto.node if name in n.output and n.output[0] in self.lifted.constant_names(home)]:
                if not any(self._readers(o) for o in node.output):
                    pending += [(home, i) for i in node.input if i]
                    for o in node.output:
                        _drop_value_info(proto, o)
                    proto.node.remove(node)


def _home(scope: Scope, name: str) -> Scope | None:
    """The scope, from here outwards, that defines the name."""
    at: Scope | None = scope
    while at is not None:
        if any(name in n.output for n in at.proto.node) or _initializer(at.proto, name) is not None:
            return at
        at = at.parent
    return None


def _initializer(proto: GraphProto | FunctionProto, name: str) -> TensorProto | None:
    if isinstance(proto, FunctionProto):
        return None
    return next((t for t in proto.initializer if t.name == name), None)


def _names(proto: GraphProto | FunctionProto) -> set[str]:
    names = {v for n in proto.node for v in (*n.output, *n.input)} | {n.name for n in proto.node}
    if isinstance(proto, FunctionProto):
        return names | set(proto.input) | set(proto.output)
    return names | {v.name for v in (*proto.input, *proto.output, *proto.value_info, *proto.initializer)} | {
        t.values.name for t in proto.sparse_initializer
    }


def _count(proto: GraphProto | FunctionProto, name: str) -> int:
    """How many operands and outputs of this scope read the name."""
    outputs = proto.output if isinstance(proto, FunctionProto) else [o.name for o in proto.output]
    return sum(list(n.input).count(name) for n in proto.node) + list(outputs).count(name)


def _fill(tensor: TensorProto, values: Stored, fmt: FloatFormat) -> None:
    for key in ("float_data", "int32_data", "double_data", "int64_data", "uint64_data", "external_data"):
        tensor.ClearField(key)
    tensor.ClearField("data_location")
    del tensor.dims[:]
    tensor.dims.extend(values.shape)
    data = values.astype("<u2") if fmt is BFLOAT16 else values.astype(values.dtype.newbyteorder("<"))
    tensor.raw_data = np.ascontiguousarray(data).tobytes()


def _remove_attribute(node: NodeProto, name: str) -> None:
    for a in [a for a in node.attribute if a.name == name]:
        node.attribute.remove(a)


def _drop_value_info(proto: GraphProto | FunctionProto, name: str) -> None:
    for v in [v for v in proto.value_info if v.name == name]:
        proto.value_info.remove(v)


def _rename(proto: GraphProto | FunctionProto, old: str, new: str) -> None:
    """Rename a value in a scope and, unless they define the name themselves, in nested graphs."""
    for node in proto.node:
        for names in (node.input, node.output):
            for k, name in enumerate(names):
                if name == old:
                    names[k] = new
        for a in node.attribute:
            if a.type == onnx.AttributeProto.GRAPH and old not in _defined(a.g):
                _rename(a.g, old, new)
    if isinstance(proto, GraphProto):
        return
    for k, name in enumerate(proto.output):
        if name == old:
            proto.output[k] = new


def _defined(graph: GraphProto) -> set[str]:
    return {i.name for i in (*graph.input, *graph.initializer)} | {o for n in graph.node for o in n.output}
