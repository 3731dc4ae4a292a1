"""An ONNX model as scopes: the main graph, the bodies of If, Loop and Scan, and model-local functions.

onnx-graphsurgeon reads the model: it decodes attributes and resolves names across nested graphs, so that an inner
node's input *is* the outer tensor object. It is never written back (it drops fields); nodes are paired with the
protos they came from, and edits land on those.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import onnx
import onnx_graphsurgeon as gs
from onnx import AttributeProto, FunctionProto, GraphProto, ModelProto, NodeProto, TensorProto
from onnx_graphsurgeon.ir.tensor import LazyValues
from onnx_graphsurgeon.logger import G_LOGGER

from ..affine import Dim, Shape
from ..errors import InvalidFileError
from .onnx_names import check_names

DEFAULT_DOMAINS = ("", "ai.onnx")
SMALL = 1024  # bytes; larger initializers cannot be shape operands and stay out of shape inference


@dataclass(frozen=True, slots=True, eq=False)
class TypeInfo:
    """What is known of a value: element type (0: unknown) and shape (None: not even the rank)."""

    elem_type: int
    shape: Shape | None


@dataclass(slots=True, eq=False)
class Scope:
    """One list of nodes with names of its own. `types` are by name, from shape inference."""

    proto: GraphProto | FunctionProto
    graph: Any  # gs.Graph or gs.Function
    opset: int
    types: dict[str, TypeInfo]
    parent: Scope | None = None
    children: list[Scope] = field(default_factory=list)
    defined: set[str] = field(init=False)
    initializers: dict[str, TensorProto] = field(init=False)  # but for those that a Loop or Scan sets
    nodes: list[NodeProto] = field(init=False)  # the file's, in order; kept, since they are told apart by identity

    def __post_init__(self) -> None:
        self.nodes = list(self.proto.node)
        self.defined = defined(self.proto)
        if isinstance(self.proto, FunctionProto):
            self.initializers = {}
        else:
            given = set[str]() if self.parent is None else {i.name for i in self.proto.input}
            self.initializers = {t.name: t for t in self.proto.initializer if t.name not in given}

    def sees(self, name: str) -> bool:
        """Whether this scope or one around it defines the name."""
        return name in self.defined or (self.parent is not None and self.parent.sees(name))

    @property
    def is_function(self) -> bool:
        """Whether constants live in nodes, since functions have no initializers."""
        return isinstance(self.proto, FunctionProto)

    def pairs(self) -> Iterator[tuple[Any, NodeProto]]:
        """Each node as onnx-graphsurgeon decoded it, with its proto."""
        return zip(self.graph.nodes, self.nodes, strict=True)

    def walk(self) -> Iterator[Scope]:
        """The scope and all below it, outer ones first."""
        yield self
        for child in self.children:
            yield from child.walk()


def read_scopes(model: ModelProto) -> list[Scope]:
    """All scopes of the model, the main graph first. Raises InvalidFileError when it cannot be read as a graph."""
    check_names(model)
    try:
        with G_LOGGER.suppress(G_LOGGER.CRITICAL + 1):  # what it would print, it also raises
            graph = gs.import_onnx(_readable(model))
    except Exception as e:
        first = (str(e).splitlines() or [type(e).__name__])[0]
        raise InvalidFileError(f"the ONNX graph cannot be read: {first}") from e
    inferred = _inferred(model)
    opset = opset_of(model) or 1
    main = _graph_scope(model.graph, graph, opset, inferred.graph, None)
    functions = [
        Scope(f, g, opset_of(f) or opset, _declared(f.value_info))
        for f, g in zip(model.functions, graph.functions, strict=True)
    ]
    for scope in functions:
        _add_children(scope, None)
    return [s for top in (main, *functions) for s in top.walk()]


def _readable(model: ModelProto) -> ModelProto:
    """The model, or a copy without the attributes that onnx-graphsurgeon cannot decode: text that is no UTF-8."""
    if all(_is_text(a) for node in every_node(model) for a in node.attribute):
        return model
    copy = ModelProto()
    copy.CopyFrom(model)
    for node in every_node(copy):
        for a in [a for a in node.attribute if not _is_text(a)]:
            node.attribute.remove(a)
    return copy


def _is_text(a: AttributeProto) -> bool:
    try:
        return all(s.decode() or True for s in (a.s, *a.strings))
    except UnicodeDecodeError:
        return False


def every_node(model: ModelProto) -> Iterator[NodeProto]:
    """All nodes of the model, those of nested graphs and functions included."""
    pending: list[GraphProto | FunctionProto] = [model.graph, *model.functions]
    while pending:
        for node in pending.pop().node:
            yield node
            pending += [g for a in node.attribute for g in _graphs(a)]


def _graphs(a: AttributeProto) -> list[GraphProto]:
    match a.type:
        case AttributeProto.GRAPH:
            return [a.g]
        case AttributeProto.GRAPHS:
            return list(a.graphs)
        case _:
            return []


def mentioned(graph: GraphProto) -> Iterator[str]:
    """Every name that a graph we do not otherwise look into, and those in it, read or define."""
    yield from (v.name for v in (*graph.input, *graph.output, *graph.initializer))
    for node in graph.node:
        yield from (name for name in (*node.input, *node.output) if name)
        for g in (g for a in node.attribute for g in _graphs(a)):
            yield from mentioned(g)


def hidden(node: NodeProto) -> Iterator[str]:
    """Names that may be captured by graphs which onnx-graphsurgeon does not read: those in an attribute of several."""
    return (name for a in node.attribute if a.type == AttributeProto.GRAPHS for g in a.graphs for name in mentioned(g))


def opset_of(holder: ModelProto | FunctionProto) -> int | None:
    """Version of the default domain, if it is imported."""
    return next((o.version for o in holder.opset_import if o.domain in DEFAULT_DOMAINS), None)


def _graph_scope(proto: GraphProto, graph: Any, opset: int, inferred: GraphProto | None, parent: Scope | None) -> Scope:
    scope = Scope(proto, graph, opset, _types(proto, inferred), parent)
    for tensor in proto.initializer:
        if parent is not None and parent.sees(tensor.name):
            _point(proto, graph, tensor.name, gs.Constant(tensor.name, LazyValues(tensor)))
    _add_children(scope, inferred)
    return scope


def _point(proto: GraphProto, graph: Any, name: str, tensor: Any) -> None:
    """Let the name mean this tensor in a graph and those below that do not define it themselves.

    onnx-graphsurgeon takes an inner initializer for the outer value of the same name.
    """
    for node, its in zip(graph.nodes, proto.node, strict=True):
        for k, t in enumerate(node.inputs):
            if t.name == name:
                node.inputs[k] = tensor
        for a in its.attribute:
            if a.type == AttributeProto.GRAPH and name not in defined(a.g):
                _point(a.g, node.attrs[a.name], name, tensor)


def defined(proto: GraphProto | FunctionProto) -> set[str]:
    """The names that a list of nodes defines itself."""
    names = {o for node in proto.node for o in node.output if o}
    if isinstance(proto, FunctionProto):
        return names | set(proto.input)
    return names | {v.name for v in (*proto.input, *proto.initializer)} | {
        t.values.name for t in proto.sparse_initializer
    }  # fmt: skip


def _add_children(scope: Scope, inferred: GraphProto | None) -> None:
    twins = inferred.node if inferred is not None and len(inferred.node) == len(scope.proto.node) else None
    for k, (node, proto) in enumerate(scope.pairs()):
        for attribute in proto.attribute:
            if attribute.type != AttributeProto.GRAPH or attribute.ref_attr_name:
                continue
            twin = None
            if twins is not None:
                twin = next((a.g for a in twins[k].attribute if a.name == attribute.name), None)
            scope.children.append(_graph_scope(attribute.g, node.attrs[attribute.name], scope.opset, twin, scope))


def _types(proto: GraphProto, inferred: GraphProto | None) -> dict[str, TypeInfo]:
    """Inferred facts first; what inference could not say is taken from the file's own value_info."""
    graphs = [proto] if inferred is None else [proto, inferred]
    found = _declared(v for g in graphs for v in (*g.value_info, *g.input, *g.output))
    for tensor in proto.initializer:
        found[tensor.name] = TypeInfo(tensor.data_type, tuple(tensor.dims))
    return found


def _declared(values: Iterable[onnx.ValueInfoProto]) -> dict[str, TypeInfo]:
    """What is said of values, later words first, unless they say less."""
    found: dict[str, TypeInfo] = {}
    for info in values:
        if info.type.HasField("tensor_type"):
            t = info.type.tensor_type
            shape = tuple(_dim(d) for d in t.shape.dim) if t.HasField("shape") else None
            known = found.get(info.name)
            if shape is not None or known is None:
                found[info.name] = TypeInfo(t.elem_type, _filled(shape, known.shape if known else None))
    return found


def _filled(shape: Shape | None, claimed: Shape | None) -> Shape | None:
    """The shape, with the sizes claimed elsewhere for dims that inference only made names up for."""
    if shape is None or claimed is None or len(shape) != len(claimed):
        return shape
    made_up = (d is None or (isinstance(d, str) and d.startswith("unk__")) for d in shape)
    return tuple(c if unsure and c is not None else d for d, c, unsure in zip(shape, claimed, made_up, strict=True))


def _dim(d: onnx.TensorShapeProto.Dimension) -> Dim:
    if d.HasField("dim_value"):
        return int(d.dim_value) if d.dim_value >= 0 else None  # some exporters write -1 for what they do not know
    return d.dim_param or None


def _inferred(model: ModelProto) -> ModelProto:
    """A copy without large data, with inferred shapes; shapes the file merely claims for inner values are dropped."""
    skeleton = ModelProto()
    skeleton.ir_version = model.ir_version
    skeleton.opset_import.extend(model.opset_import)
    skeleton.functions.extend(model.functions)
    skeleton.graph.name = model.graph.name
    skeleton.graph.node.extend(model.graph.node)
    skeleton.graph.input.extend(model.graph.input)
    skeleton.graph.output.extend(model.graph.output)
    for tensor in model.graph.initializer:
        kept = skeleton.graph.initializer.add()
        if tensor.ByteSize() <= SMALL and tensor.data_location != TensorProto.EXTERNAL:
            kept.CopyFrom(tensor)
        else:
            kept.name, kept.data_type = tensor.name, tensor.data_type
            kept.dims.extend(tensor.dims)
    try:
        return onnx.shape_inference.infer_shapes(skeleton, data_prop=True)
    except Exception:  # an ill-typed file: rules that need shapes will refuse
        return skeleton
