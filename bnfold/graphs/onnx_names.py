"""Names in an ONNX model: each is defined once, before it is read. What else is read of a model relies on it."""

from __future__ import annotations

from collections.abc import Iterable

from onnx import AttributeProto, FunctionProto, GraphProto, ModelProto, NodeProto

from ..errors import InvalidFileError


def check_names(model: ModelProto) -> None:
    """Raise InvalidFileError for a name that is read before it is defined, never defined, or defined twice."""
    for proto in (model.graph, *model.functions):
        _check(proto, ())


def _check(proto: GraphProto | FunctionProto, around: tuple[set[str], ...]) -> None:
    where = f"{'function' if isinstance(proto, FunctionProto) else 'graph'} {proto.name!r}"
    known = _given(proto, where)
    later = {o for node in proto.node for o in node.output}
    for node in proto.node:
        for name in node.input:
            if name and name not in known and not any(name in names for names in around):
                what = "which is computed only after it" if name in later else "which nothing computes"
                raise InvalidFileError(f"{where}: {_title(node)} reads {name!r}, {what}")
        for a in node.attribute:
            if a.type == AttributeProto.UNDEFINED:
                raise InvalidFileError(f"{where}: attribute {a.name!r} of {_title(node)} has no type")
            if a.type == AttributeProto.GRAPH and not a.ref_attr_name:
                _check(a.g, (*around, known))
        _define(known, (o for o in node.output if o), where)
    for name in proto.output if isinstance(proto, FunctionProto) else (o.name for o in proto.output):
        if name not in known:
            raise InvalidFileError(f"{where}: its output {name!r} is computed by none of its nodes")


def _given(proto: GraphProto | FunctionProto, where: str) -> set[str]:
    known: set[str] = set()
    if isinstance(proto, FunctionProto):
        _define(known, proto.input, where)
        return known
    _define(known, (t.name for t in proto.initializer), where)
    for t in proto.initializer:
        if any(n < 0 for n in t.dims):
            raise InvalidFileError(f"{where}: initializer {t.name!r} has the shape {tuple(t.dims)}")
    _define(known, (t.values.name for t in proto.sparse_initializer), where)
    inputs: set[str] = set()
    _define(inputs, (v.name for v in proto.input), where)
    return known | inputs


def _define(known: set[str], names: Iterable[str], where: str) -> None:
    for name in names:
        if name in known:
            raise InvalidFileError(f"{where}: {name!r} is defined twice")
        known.add(name)


def _title(node: NodeProto) -> str:
    return f"{node.op_type} {(node.name or next(iter(node.output), ''))!r}"
