"""An ONNX model as scopes: the main graph, the bodies of If, Loop and Scan, and model-local functions.

onnx-graphsurgeon reads the model: it decodes attributes and resolves names across nested graphs, so that an inner
node's input *is* the outer tensor object. It is never written back (it drops fields); nodes are paired with the
protos they came from, and edits land on those.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import onnx
import onnx_graphsurgeon as gs
from onnx import AttributeProto, FunctionProto, GraphProto, ModelProto, NodeProto, TensorProto
from onnx_graphsurgeon.logger import G_LOGGER

from ..affine import Dim, Shape
from ..errors import InvalidFileError

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
    children: list[Scope] = field(default_factory=lambda: [])

    @property
    def is_function(self) -> bool:
        """Whether constants live in nodes, since functions have no initializers."""
        return isinstance(self.proto, FunctionProto)

    def pairs(self) -> Iterator[tuple[Any, NodeProto]]:
        """Each node as onnx-graphsurgeon decoded it, with its proto."""
        return zip(self.graph.nodes, self.proto.node, strict=True)

    def walk(self) -> Iterator[Scope]:
        """This scope and all below it, outer ones first."""
        yield self
        for child in self.children:
            yield from child.walk()


def read_scopes(model: ModelProto) -> list[Scope]:
    """All scopes of the model, the main graph first. Raises InvalidFileError when it cannot be read as a graph."""
    G_LOGGER.severity = G_LOGGER.CRITICAL
    try:
        graph = gs.import_onnx(model)
    except Exception as e:
        first = (str(e).splitlines() or [type(e).__name__])[0]
        raise InvalidFileError(f"the ONNX graph cannot be read: {first}") from e
    inferred = _inferred(model)
    opset = opset_of(model) or 1
    main = _graph_scope(model.graph, graph, opset, inferred.graph, None)
    functions = [
        Scope(f, g, opset_of(f) or opset, {}) for f, g in zip(model.functions, graph.functions, strict=True)
    ]
    for scope in functions:
        _add_children(scope, None)
    return [s for top in (main, *functions) for s in top.walk()]


def opset_of(holder: ModelProto | FunctionProto) -> int | None:
    """Version of the default domain, if it is imported."""
    return next((o.version for o in holder.opset_import if o.domain in DEFAULT_DOMAINS), None)


def _graph_scope(proto: GraphProto, graph: Any, opset: int, inferred: GraphProto | None, parent: Scope | None) -> Scope:
    scope = Scope(proto, graph, opset, _types(proto, inferred), parent)
    _add_children(scope, inferred)
    return scope


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
    found: dict[str, TypeInfo] = {}
    graphs = [proto] if inferred is None else [proto, inferred]
    for g in graphs:
        for info in (*g.value_info, *g.input, *g.output):
            if info.type.HasField("tensor_type"):
                t = info.type.tensor_type
                shape = tuple(_dim(d) for d in t.shape.dim) if t.HasField("shape") else None
                known = found.get(info.name)
                if shape is not None or known is None:
                    found[info.name] = TypeInfo(t.elem_type, shape)
    for tensor in proto.initializer:
        found[tensor.name] = TypeInfo(tensor.data_type, tuple(tensor.dims))
    return found


def _dim(d: onnx.TensorShapeProto.Dimension) -> Dim:
    if d.HasField("dim_value"):
        return int(d.dim_value)
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
