"""The engine's edits on the protos of an ONNX model. What is not edited is not touched, so that it cannot be lost."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, TensorProto

from ..affine import Affine
from ..ops import Kind, Linear, Scale, Stored
from ..quantized import NewGrid
from ..rounding import FloatFormat, round_product
from .onnx_constants import FORMAT_OF, type_of_range
from .onnx_data import Aside, Rewriting
from .onnx_index import Index
from .onnx_lift import Lifted
from .onnx_scopes import Scope
from .sites import Site

OnnxSite = Site[Scope, NodeProto]
ELEM_TYPE = {fmt: elem for elem, fmt in FORMAT_OF.items()}


class Writer:
    """Carries out edits, one at most for each record; `finish` removes what they made superfluous."""

    def __init__(
        self, model: ModelProto, lifted: Lifted, listed: frozenset[str], rewriting: Rewriting | Aside | None = None
    ):
        self._model, self._lifted, self._listed, self._rewriting = model, lifted, listed, rewriting
        self._index = Index(model, lifted.scopes)
        self._released: list[tuple[Scope, str]] = []
        self._copied: list[tuple[Scope, str, int]] = []  # by whom, of what, bytes

    # ------------------------------------------------------------------ edits

    def set_linear(
        self, record: Linear, site: OnnxSite, weight: Stored | None, bias: Stored | None, fmt: FloatFormat
    ) -> None:
        """Give a linear layer its new parameters; a MatMul without bias gets an Add behind it."""
        first, last = site.nodes[0], site.nodes[-1]
        if weight is not None:
            self._put(site.scope, first, site.weight, weight, ELEM_TYPE[record.weight.format], "weight")
        if bias is None:
            return
        if site.bias is not None:
            self._put(site.scope, last, site.bias, bias, ELEM_TYPE[fmt], "bias")
            _remove_attribute(last, "beta")
            return
        if record.out_axis == -2:  # a weight on the left: its channels are the rows of the product
            bias = bias.reshape(-1, 1)
        result = first.output[0]
        bare = self._index.fresh(f"{result}_unbiased")
        self._index.set_output(site.scope, first, bare)
        name = self._add_constant(site.scope, bias, ELEM_TYPE[fmt], f"{result}_bias")
        node = onnx.helper.make_node("Add", [bare, name], [result])
        if site.scope.opset < 7:
            node.attribute.append(onnx.helper.make_attribute("broadcast", 1))
        if first.name:
            node.name = self._index.fresh(f"{first.name}_bias")
        self._index.insert(site.scope, node, after=first)

    def set_grid(self, record: Linear, site: OnnxSite, new: NewGrid) -> None:
        """Give the DequantizeLinear of a weight new scales; what other nodes read of it, they keep."""
        assert record.grid is not None
        scope, node = site.scope, self._own_dequantizer(site.scope, site.nodes[0], site.weight)
        elem_type = type_of_range(record.grid.low, record.grid.high)
        dtype = onnx.helper.tensor_dtype_to_np_dtype(elem_type)
        self._put(scope, node, 1, new.scale, ELEM_TYPE[record.grid.scale.format], "scale")
        if new.zero_point is not None and len(node.input) > 2 and node.input[2]:
            self._put(scope, node, 2, new.zero_point.astype(dtype), elem_type, "zero_point")
        if new.integers is not None:
            self._put(scope, node, 0, new.integers.astype(dtype), elem_type, "integers")
        if new.axis != record.grid.axis:
            _remove_attribute(node, "axis")
            node.attribute.append(onnx.helper.make_attribute("axis", new.axis))

    def _own_dequantizer(self, scope: Scope, reader: NodeProto, k: int) -> NodeProto:
        """The DequantizeLinear above an operand that no other node reads; a copy of it, and of what lies between."""
        index, name, chain = self._index, reader.input[k], list[NodeProto]()
        while not chain or chain[-1].op_type != "DequantizeLinear":
            producer = index.producer(scope, name)
            assert producer is not None
            chain.append(producer)
            name = producer.input[0]
        here = all(index.home(scope, n.output[0]) is scope and index.readers(scope, n.output[0]) == 1 for n in chain)
        if here:
            return chain[-1]
        after = chain[-1] if index.home(scope, chain[-1].output[0]) is scope else None
        above, copies = "", list[NodeProto]()
        for old in reversed(chain):
            new = NodeProto()
            new.CopyFrom(old)
            new.name = index.fresh(f"{old.name}_folded") if old.name else ""
            new.output[0] = index.fresh(f"{old.output[0]}_folded")
            if above:
                new.input[0] = above
            above = new.output[0]
            copies.append(new)
        for new in copies if after is not None else reversed(copies):  # what goes to the front is put there one by one
            index.insert(scope, new, after=after)
        names = [*reader.input]
        names[k] = above
        self._release(scope, [reader.input[k]])
        index.set_inputs(scope, reader, names)
        return copies[0]

    def set_scale(self, record: Scale, site: OnnxSite, m: Affine) -> None:
        """Let a norm, or arithmetic with a constant, compute another map."""
        if record.kind is Kind.NORM:
            self._set_norm(record, site, m)
        else:
            self._set_arithmetic(record, site, m)

    def _set_norm(self, record: Scale, site: OnnxSite, m: Affine) -> None:
        node, fmt = site.nodes[0], record.format
        vectors = m.vectors(record.channel_axis, record.channels)
        assert vectors is not None, "a map that varies along another axis passed the rules"
        epsilon = next((a.f for a in node.attribute if a.name == "epsilon"), 1e-5)
        one = np.ones(record.channels)
        values = vectors[0] * np.sqrt(1 + float(np.float32(epsilon))), vectors[1], one * 0, one
        for k, (what, v) in enumerate(zip(("scale", "bias", "mean", "var"), values, strict=True), 1):
            self._put(site.scope, node, k, fmt.pack(round_product(fmt, v)), ELEM_TYPE[fmt], what)
        _remove_attribute(node, "spatial")  # before opset 9, 0 means one value per element; now it is one per channel

    def _set_arithmetic(self, record: Scale, site: OnnxSite, m: Affine) -> None:
        """The first node becomes a Mul, the last an Add; nodes in between go, one that is missing is inserted."""
        scope, nodes, index, fmt = site.scope, list(site.nodes), self._index, record.format
        parts = [("Mul", m.scale)] if not m.no_scale else []
        parts += [("Add", m.shift)] if not m.no_shift or not parts else []
        x, result = _activation(record, site), nodes[-1].output[0]
        kept = [nodes[0], nodes[-1]][-len(parts) :] if len(nodes) > 1 else nodes
        for node in nodes:
            self._release(scope, (name for name in node.input if name != x))
        for node in nodes:
            if not any(node is k for k in kept):
                self._remove(scope, node, x)
        for k, (op, values) in enumerate(parts):
            stored = fmt.pack(round_product(fmt, values))
            name = self._add_constant(scope, stored, ELEM_TYPE[fmt], f"{result}_{op.lower()}")
            if k < len(kept):
                kept[k].op_type = op
                del kept[k].attribute[:]
                index.set_inputs(scope, kept[k], [x, name])
                x = kept[k].output[0]
                continue
            x = index.fresh(f"{result}_folded")
            index.set_output(scope, kept[0], x)
            index.insert(scope, onnx.helper.make_node(op, [x, name], [result]), after=kept[0])

    def bypass(self, record: Scale, site: OnnxSite, direction: str) -> None:
        """Take the site's nodes out; its activation passes from the first node's input to the last node's output."""
        scope, x, y = site.scope, _activation(record, site), site.nodes[-1].output[0]
        for node in site.nodes:
            self._release(scope, (name for name in node.input if name != x))
            self._remove(scope, node, x)
        if direction == "backward":
            self._index.rename(scope, x, y)

    def merge(self, base: OnnxSite, total: OnnxSite, dropped: Iterable[OnnxSite]) -> None:
        """Let the base layer stand for the sum: the sum and its other summands go."""
        scope, y = base.scope, total.nodes[0].output[0]
        x = base.nodes[-1].output[0]
        self._index.remove_node(scope, total.nodes[0])
        for site in dropped:
            if self._index.readers(scope, site.nodes[-1].output[0]):
                continue  # something reads its shape, so it stays
            for node in site.nodes:
                self._release(scope, node.input)
                self._index.remove_node(scope, node)
        self._index.rename(scope, x, y)

    def _remove(self, scope: Scope, node: NodeProto, x: str) -> None:
        """Take a node out; whatever reads its result reads `x` instead."""
        self._index.remove_node(scope, node)
        self._index.rename(scope, node.output[0], x)

    # ------------------------------------------------------------------ constants

    def _put(self, scope: Scope, node: NodeProto, k: int, values: Stored, elem_type: int, what: str) -> None:
        """Make input `k` of the node the given constant: in place where it is the only reader of an initializer."""
        names = [*node.input, *[""] * (k + 1 - len(node.input))]
        old, index = names[k], self._index
        tensor = index.initializer(scope, old) if old else None
        if tensor is not None and index.readers(scope, old) == 1 and tensor.data_type == elem_type:
            index.changed(scope, old, values.shape, listed=self._model.ir_version < 4 or old not in self._listed)
            _describe(tensor, values, elem_type)
            if self._rewriting is None or not self._rewriting.replace(tensor, values):
                _fill(tensor, values)
            return
        hint = f"{old or node.output[0]}_{'folded' if old else what}"
        names[k] = self._add_constant(scope, values, elem_type, hint, like=tensor)
        index.set_inputs(scope, node, names)
        if old:
            self._release(scope, [old])
            self._copied.append((scope, old, values.nbytes))

    def _add_constant(
        self, scope: Scope, values: Stored, elem_type: int, hint: str, like: TensorProto | None = None
    ) -> str:
        name = self._index.fresh(hint)
        old_main = self._model.ir_version < 4 and scope.parent is None
        if scope.is_function or (self._model.ir_version < 4 and not old_main):
            tensor = TensorProto(name=name)
            _describe(tensor, values, elem_type)
            _fill(tensor, values)
            node = onnx.helper.make_node("Constant", [], [name], value=tensor)
            self._index.insert(scope, node, after=None)
            return name
        tensor = self._index.add_initializer(scope, name)
        _describe(tensor, values, elem_type)
        if self._rewriting is None or not self._rewriting.add(tensor, values, like):
            _fill(tensor, values)
        if old_main:  # before IR 4 every initializer is an input too
            entry = onnx.helper.make_tensor_value_info(name, elem_type, list(values.shape))
            self._model.graph.input.append(entry)
        return name

    def _release(self, scope: Scope, names: Iterable[str]) -> None:
        self._released += [(scope, n) for n in names if n]

    # ------------------------------------------------------------------ cleaning up

    def finish(self) -> int:
        """Remove constants, and the nodes that computed them, which only edited nodes read; carry everything out.

        Returns the bytes added by copies of constants that other nodes still read.
        """
        pending, index = self._released, self._index
        while pending:
            scope, name = pending.pop()
            home = index.home(scope, name)
            if home is None or index.readers(home, name) or name not in self._lifted.constants[id(home)]:
                continue
            node = index.producer(home, name)
            if node is None:
                if index.initializer(home, name) is not None:
                    index.remove_initializer(home, name)
            elif not any(index.readers(home, o) for o in node.output if o):
                pending += [(home, i) for i in node.input if i]
                index.remove_node(home, node)
        added = sum(size for scope, name, size in self._copied if index.readers(scope, name))
        index.write()
        return added


def _activation(record: Scale, site: OnnxSite) -> str:
    """What the site's first node acts on."""
    return site.nodes[0].input[0 if record.kind is Kind.NORM else 1 - site.weight]


def _remove_attribute(node: NodeProto, name: str) -> None:
    for a in [a for a in node.attribute if a.name == name]:
        node.attribute.remove(a)


def _describe(tensor: TensorProto, values: Stored, elem_type: int) -> None:
    """Let a tensor be of the values' type and shape."""
    for key in ("float_data", "int32_data", "double_data", "int64_data", "uint64_data"):
        tensor.ClearField(key)
    tensor.data_type = elem_type
    del tensor.dims[:]
    tensor.dims.extend(values.shape)


def _fill(tensor: TensorProto, values: Stored) -> None:
    """Store the values in the tensor itself."""
    tensor.ClearField("external_data")
    tensor.ClearField("data_location")
    tensor.raw_data = np.ascontiguousarray(values, values.dtype.newbyteorder("<")).tobytes()
