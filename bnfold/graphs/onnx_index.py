"""Who defines and who reads each name of an ONNX model, scope by scope; kept up to date while nodes are edited.

Names are resolved as ONNX does: to the scope itself, else outwards, but never out of a function. Nodes and tensors
are edited through the protos they are; what is to be removed or inserted is carried out by `write` at the end, in one
pass over each list, so that a thousand edits do not cost a thousand searches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from onnx import FunctionProto, GraphProto, ModelProto, NodeProto, TensorProto, TensorShapeProto

from .onnx_scopes import Scope, hidden, mentioned

Key = tuple[int, str]  # identity of the defining scope, and the name in it


class Index:
    """Definitions and uses of all names. Every node that is read or written must come from here or from a Scope."""

    def __init__(self, model: ModelProto, scopes: Sequence[Scope]):
        self._model, self._scopes = model, scopes
        self._producer: dict[Key, NodeProto | None] = {}  # None: an input or an initializer
        self._tensor: dict[Key, TensorProto] = {}
        self._readers: dict[Key, dict[int, NodeProto]] = {}
        self._held: Counter[Key] = Counter()  # uses that are not operands: outputs, training, annotations
        self._after: dict[int, list[NodeProto]] = {}
        self._front: dict[int, list[NodeProto]] = {}
        self._gone: dict[int, object] = {}  # removed nodes and tensors by identity
        self._forgotten: set[Key] = set()  # values that are gone
        self._requantized: set[Key] = set()
        self._reshaped: dict[Key, Sequence[int]] = {}
        self._unlisted: set[str] = set()
        self.taken = {n for s in scopes for n in _names(s)}
        for scope in scopes:
            self._define(scope)
        for scope in scopes:
            self._read(scope)
        for name in _training_names(model):
            self.taken.add(name)
            self._held[self._key(scopes[0], name)] += 1

    def _define(self, scope: Scope) -> None:
        at = id(scope)
        if isinstance(scope.proto, FunctionProto):
            self._producer.update({(at, name): None for name in scope.proto.input})
        else:
            self._producer.update({(at, v.name): None for v in scope.proto.input})
            self._producer.update({(at, t.values.name): None for t in scope.proto.sparse_initializer})
            self._tensor.update({(at, t.name): t for t in scope.proto.initializer})
            self._producer.update({(at, t.name): None for t in scope.proto.initializer})
        self._producer.update({(at, o): node for node in scope.nodes for o in node.output if o})

    def _read(self, scope: Scope) -> None:
        for node in scope.nodes:
            self._enter(scope, node)
        if isinstance(scope.proto, FunctionProto):
            held = list(scope.proto.output)
        else:
            held = [o.name for o in scope.proto.output]
            held += [e.value for a in scope.proto.quantization_annotation for e in a.quant_parameter_tensor_names]
        held += [name for node in scope.nodes for name in hidden(node)]
        self._held.update(self._key(scope, name) for name in held)

    def _enter(self, scope: Scope, node: NodeProto) -> None:
        for name in node.input:
            if name:
                self._readers.setdefault(self._key(scope, name), {})[id(node)] = node

    # ------------------------------------------------------------------ questions

    def home(self, scope: Scope, name: str) -> Scope | None:
        """The scope, from here outwards, that defines the name."""
        at: Scope | None = scope
        while at is not None and (id(at), name) not in self._producer:
            at = at.parent
        return at

    def _key(self, scope: Scope, name: str) -> Key:
        return id(self.home(scope, name) or scope), name

    def readers(self, scope: Scope, name: str) -> int:
        """How many operands and outputs read the value that the name stands for in this scope."""
        key = self._key(scope, name)
        nodes = self._readers.get(key, {}).values()
        return self._held[key] + sum(list(n.input).count(name) for n in nodes)

    def initializer(self, scope: Scope, name: str) -> TensorProto | None:
        """The initializer that the name stands for in this scope."""
        return self._tensor.get(self._key(scope, name))

    def producer(self, scope: Scope, name: str) -> NodeProto | None:
        """The node that computes the value, None for inputs and initializers."""
        return self._producer.get(self._key(scope, name))

    def fresh(self, hint: str) -> str:
        """A name no value or node of the model has, as near to the hint as can be."""
        name, k = hint, 2
        while name in self.taken:
            name, k = f"{hint}_{k}", k + 1
        self.taken.add(name)
        return name

    # ------------------------------------------------------------------ edits

    def set_inputs(self, scope: Scope, node: NodeProto, names: Sequence[str]) -> None:
        """Give a node other operands."""
        for name in node.input:
            self._readers.get(self._key(scope, name), {}).pop(id(node), None)
        del node.input[:]
        node.input.extend(names)
        self._enter(scope, node)

    def set_output(self, scope: Scope, node: NodeProto, name: str) -> None:
        """Let a node's only output have another name; readers of the old one are left alone."""
        if self._producer.get((id(scope), node.output[0])) is node:
            del self._producer[id(scope), node.output[0]]
        node.output[0] = name
        self._producer[id(scope), name] = node

    def insert(self, scope: Scope, node: NodeProto, after: NodeProto | None) -> None:
        """Place a new node, complete, behind one of the file's own or at the front."""
        where = self._front.setdefault(id(scope), []) if after is None else self._after.setdefault(id(after), [])
        where.append(node)
        self._producer.update({(id(scope), o): node for o in node.output if o})
        self._enter(scope, node)

    def add_initializer(self, scope: Scope, name: str) -> TensorProto:
        """A new, empty initializer of a graph."""
        assert isinstance(scope.proto, GraphProto)
        tensor = scope.proto.initializer.add()
        tensor.name = name
        self._producer[id(scope), name] = None
        self._tensor[id(scope), name] = tensor
        return tensor

    def remove_node(self, scope: Scope, node: NodeProto) -> None:
        """Take a node out; what is known of the values it computed is forgotten."""
        self._gone[id(node)] = node
        for name in node.input:
            self._readers.get(self._key(scope, name), {}).pop(id(node), None)
        for name in node.output:
            self._producer.pop((id(scope), name), None)
            self._forgotten.add((id(scope), name))

    def remove_initializer(self, scope: Scope, name: str) -> None:
        """Take an initializer of this scope out, with its entry among the graph's inputs."""
        tensor = self._tensor.pop((id(scope), name))
        self._gone[id(tensor)] = tensor
        self._producer.pop((id(scope), name), None)
        self._forgotten.add((id(scope), name))
        if scope is self._scopes[0]:
            self._unlisted.add(name)

    def rename(self, scope: Scope, old: str, new: str) -> None:
        """Let whatever reads `old`, and the node of this scope that computes it, say `new`."""
        readers = self._readers.pop(self._key(scope, old), {})
        for node in readers.values():
            _replace(node.input, old, new)
        producer = self._producer.pop((id(scope), old), None)
        if producer is not None:
            _replace(producer.output, old, new)
            self._producer[id(scope), new] = producer
        self._readers.setdefault(self._key(scope, new), {}).update(readers)
        self._forgotten.add((id(scope), old))
        self._forgotten.discard((id(scope), new))

    def changed(self, scope: Scope, name: str, shape: Sequence[int], *, listed: bool) -> None:
        """An initializer's values are no longer what the file says of them. `listed`: it may stay a graph input."""
        home, key = self.home(scope, name), self._key(scope, name)
        self._requantized.add(key)
        if tuple(self._tensor[key].dims) != tuple(shape):
            self._reshaped[key] = shape
        if home is self._scopes[0] and not listed:
            self._unlisted.add(name)

    # ------------------------------------------------------------------ carrying out

    def write(self) -> None:
        """Carry out removals and insertions. The index is of no use afterwards."""
        for scope in self._scopes:
            proto, at = scope.proto, id(scope)
            for k in reversed(range(len(scope.nodes))):
                for new in reversed(self._after.get(id(scope.nodes[k]), ())):
                    proto.node.insert(k + 1, new)
                if id(scope.nodes[k]) in self._gone:
                    del proto.node[k]
            for new in self._front.get(at, ()):
                proto.node.insert(0, new)
            self._write_facts(proto, at)
        _drop(self._model.graph.input, lambda v: v.name in self._unlisted)

    def _write_facts(self, proto: GraphProto | FunctionProto, at: int) -> None:
        """Drop what the file says of values that are gone or no longer as they were."""
        _drop(proto.value_info, lambda v: (at, v.name) in self._forgotten or (at, v.name) in self._reshaped)
        if isinstance(proto, FunctionProto):
            return
        _drop(proto.initializer, lambda t: id(t) in self._gone)
        stale = self._forgotten | self._requantized
        _drop(proto.quantization_annotation, lambda a: (at, a.tensor_name) in stale)
        for entry in proto.input:
            shape = self._reshaped.get((at, entry.name))
            if shape is not None:
                entry.type.tensor_type.shape.CopyFrom(_shape_proto(shape))


def _shape_proto(shape: Sequence[int]) -> TensorShapeProto:
    return TensorShapeProto(dim=[TensorShapeProto.Dimension(dim_value=n) for n in shape])


def _drop(items: Any, condition: Any) -> None:
    for k in reversed([k for k, item in enumerate(items) if condition(item)]):
        del items[k]


def _replace(names: Any, old: str, new: str) -> None:
    for k, name in enumerate(names):
        if name == old:
            names[k] = new


def _names(scope: Scope) -> Iterator[str]:
    """Every name of a value or node that the scope contains."""
    proto = scope.proto
    for node in scope.nodes:
        yield from (node.name, *node.input, *node.output)
        yield from hidden(node)
    if isinstance(proto, FunctionProto):
        yield from (*proto.input, *proto.output)
    else:
        yield from (v.name for v in (*proto.input, *proto.output, *proto.value_info, *proto.initializer))
        yield from (t.values.name for t in proto.sparse_initializer)


def _training_names(model: ModelProto) -> Iterator[str]:
    for info in model.training_info:
        yield from mentioned(info.initialization)
        yield from mentioned(info.algorithm)
        for binding in (*info.initialization_binding, *info.update_binding):
            yield from (binding.key, binding.value)
