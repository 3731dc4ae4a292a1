"""What is constant in an ONNX graph, and its values.

"Constant" is wider than "initializer": Constant nodes, and whatever deterministic nodes compute from constants alone
(a transposed weight, `Expand(CastLike(0, x), Shape(w)[0:1])`, `Sqrt(Add(var, eps))`). It is also narrower: an
initializer that is a graph input can be overridden by the caller. Arithmetic on constants is carried out in float64,
so that folding rounds once; casts to a narrower type round as they do at run time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs
from onnx import NodeProto, TensorProto, numpy_helper

from ..ops import Stored, Tensor
from ..report import Reason, Refusal
from ..rounding import BFLOAT16, FLOAT16, FLOAT32, FLOAT64, FloatFormat, round_product
from .onnx_scopes import DEFAULT_DOMAINS, Scope, TypeInfo

FORMAT_OF: dict[int, FloatFormat] = {
    TensorProto.FLOAT: FLOAT32,
    TensorProto.DOUBLE: FLOAT64,
    TensorProto.FLOAT16: FLOAT16,
    TensorProto.BFLOAT16: BFLOAT16,
}
LARGEST = 1 << 28  # elements of a constant expression; more is refused rather than computed

# Data passes through these unchanged, so that they need no float64.
_MOVES = {"Identity", "Transpose", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Expand", "Slice", "Gather", "Concat",
          "Tile", "Split"}  # fmt: skip
_NOT_PURE = {"RandomNormal", "RandomUniform", "RandomNormalLike", "RandomUniformLike", "Multinomial", "Bernoulli",
             "If", "Loop", "Scan", "SequenceMap", "DequantizeLinear", "QuantizeLinear", "BatchNormalization",
             "Dropout"}  # fmt: skip
_ROOTS = {"Sqrt", "Pow"}


@dataclass(frozen=True, slots=True, eq=False)
class Constant:
    """A value known before the model runs. Floats are as stored, or float64 where they were computed.

    `rooted`: a square root went into it, the mark of running statistics spelled as arithmetic.
    """

    name: str
    elem_type: int
    shape: tuple[int, ...]
    load: Callable[[], np.ndarray]
    rooted: bool = False

    @property
    def format(self) -> FloatFormat | None:
        """The float format it is declared in, or None for other types."""
        return FORMAT_OF.get(self.elem_type)

    def float64(self) -> np.ndarray:
        """Its values in float64, exactly."""
        return self.load().astype(np.float64)

    def tensor(self) -> Tensor:
        """The constant as the engine reads it. Computed values are rounded once to the declared type."""
        fmt = self.format
        assert fmt is not None

        def read() -> Stored:
            values = self.load()
            if values.dtype == np.float64 and fmt is not FLOAT64:
                return fmt.pack(round_product(fmt, values))
            return values.view(np.uint16) if fmt is BFLOAT16 else values

        return Tensor(self.name, self.shape, fmt, read)


class Constants:
    """Looks tensors up; remembers what it computed. Keyed by onnx-graphsurgeon tensor identity."""

    def __init__(self, overridable: frozenset[str], type_of: Callable[[Any], TypeInfo | None]):
        self._overridable, self._type_of = overridable, type_of
        self._known: dict[int, Constant | None] = {}
        self._scope_of: dict[int, Scope] = {}
        self._busy: set[int] = set()
        self._keep: list[Any] = []  # identities are keys, so the objects must live as long

    def enter(self, scope: Scope) -> None:
        """Make a scope's nodes known, for the opset they are written in and their initializers' protos."""
        initializers = {t.name: t for t in getattr(scope.proto, "initializer", ())}
        for node in scope.graph.nodes:
            self._scope_of[id(node)] = scope
            self._keep.append(node)
        if scope.is_function:
            return
        for name, tensor in scope.graph.tensors().items():
            if isinstance(tensor, gs.Constant) and name in initializers:
                self._keep.append(tensor)
                self._known.setdefault(id(tensor), self._initializer(initializers[name]))

    def _initializer(self, proto: TensorProto) -> Constant | None:
        if proto.name in self._overridable:
            return None
        return Constant(
            proto.name, proto.data_type, tuple(proto.dims), lambda: numpy_helper.to_array(proto)
        )

    def get(self, tensor: Any) -> Constant | None:
        """The tensor's value, or None when it depends on an input."""
        key = id(tensor)
        if key not in self._known:
            if key in self._busy:
                return None
            self._busy.add(key)
            self._known[key] = self._computed(tensor)
            self._busy.discard(key)
        return self._known[key]

    def why_not(self, tensor: Any, node: str, what: str) -> Refusal:
        """The reason a parameter is no constant."""
        if tensor.name in self._overridable:
            return Refusal(
                Reason.OVERRIDABLE_PARAMETER, node, f"its {what} {tensor.name} is also a graph input a caller may set"
            )
        producer = tensor.inputs[0].op if tensor.inputs else "the model's input"
        if producer in ("DequantizeLinear", "QuantizeLinear"):
            return Refusal(Reason.QUANTIZED_PARAMETER, node, f"its {what} {tensor.name} comes from {producer}")
        return Refusal(
            Reason.DYNAMIC_PARAMETER, node, f"its {what} {tensor.name} is computed at run time by {producer}"
        )

    def _computed(self, tensor: Any) -> Constant | None:
        if isinstance(tensor, gs.Constant) or len(tensor.inputs) != 1:
            return None
        node = tensor.inputs[0]
        scope = self._scope_of.get(id(node))
        if scope is None or node.domain not in (None, *DEFAULT_DOMAINS) or node.op in _NOT_PURE:
            return None
        position = next(k for k, o in enumerate(node.outputs) if o is tensor)
        if node.op == "Constant":
            return _constant_node(tensor.name, node)
        if node.op in ("Shape", "Size"):
            return self._shape(tensor.name, node)
        if node.op == "CastLike":
            return self._cast_like(tensor.name, node)
        operands = [None if t.is_empty() else self.get(t) for t in node.inputs]
        if not node.inputs or any(c is None and not t.is_empty() for c, t in zip(operands, node.inputs, strict=True)):
            return None
        if any(isinstance(a, gs.Node.AttributeRef) for a in node.attrs.values()):
            return None
        if node.op == "Cast":
            return _cast(tensor.name, operands[0], int(node.attrs["to"]))
        return _evaluate(tensor.name, node, operands, position, scope.opset)

    def _shape(self, name: str, node: Any) -> Constant | None:
        source = self.get(node.inputs[0])
        info = self._type_of(node.inputs[0])
        shape = source.shape if source is not None else None if info is None else info.shape
        if shape is None:
            return None
        if node.op == "Shape":
            shape = shape[node.attrs.get("start", 0) : node.attrs.get("end")]
        sizes = [n for n in shape if isinstance(n, int)]
        if len(sizes) != len(shape):
            return None
        value = np.array(sizes if node.op == "Shape" else int(np.prod(sizes)), np.int64)
        return Constant(name, TensorProto.INT64, value.shape, lambda: value)

    def _cast_like(self, name: str, node: Any) -> Constant | None:
        source, like = self.get(node.inputs[0]), self.get(node.inputs[1])
        info = self._type_of(node.inputs[1])
        target = like.elem_type if like is not None else 0 if info is None else info.elem_type
        return _cast(name, source, target) if source is not None and target else None


def _constant_node(name: str, node: Any) -> Constant | None:
    (kind, value), *rest = node.attrs.items() or [("", None)]
    if rest or isinstance(value, gs.Node.AttributeRef):
        return None
    if kind == "value":
        info = value._values  # gs keeps the TensorProto; `.values` would turn bfloat16 into float32
        if not isinstance(getattr(info, "tensor", None), TensorProto):
            return None
        proto: TensorProto = info.tensor
        return Constant(name, proto.data_type, tuple(proto.dims), lambda: numpy_helper.to_array(proto))
    types = {"value_float": TensorProto.FLOAT, "value_floats": TensorProto.FLOAT,
             "value_int": TensorProto.INT64, "value_ints": TensorProto.INT64}  # fmt: skip
    if kind not in types:
        return None
    array = np.array(value, np.float32 if types[kind] == TensorProto.FLOAT else np.int64)
    return Constant(name, types[kind], array.shape, lambda: array)


def _cast(name: str, source: Constant | None, target: int) -> Constant | None:
    if source is None:
        return None
    into, origin = FORMAT_OF.get(target), source.format
    if into is not None and origin is not None:
        if into.precision >= origin.precision and into is not FLOAT16:
            return Constant(name, target, source.shape, source.float64, source.rooted)
        return Constant(
            name, target, source.shape, lambda: round_product(into, source.float64()), source.rooted
        )
    if target == TensorProto.BOOL or into is not None or target in _INTEGERS:
        dtype = onnx.helper.tensor_dtype_to_np_dtype(target) if into is None else np.float64
        return Constant(name, target, source.shape, lambda: source.load().astype(dtype), source.rooted)
    return None


_INTEGERS = {TensorProto.INT8, TensorProto.INT16, TensorProto.INT32, TensorProto.INT64,
             TensorProto.UINT8, TensorProto.UINT16, TensorProto.UINT32, TensorProto.UINT64}  # fmt: skip


def _evaluate(
    name: str, node: Any, operands: list[Constant | None], position: int, opset: int
) -> Constant | None:
    """One node on constant operands, by onnx's reference implementation."""
    if _too_large(node, operands):
        return None
    moves = node.op in _MOVES
    feeds = {
        f"i{k}": c.load() if moves or c.format is None else c.float64() for k, c in enumerate(operands) if c is not None
    }
    proto = NodeProto(op_type=node.op, input=[f"i{k}" if c else "" for k, c in enumerate(operands)])
    proto.output.extend(f"o{k}" for k in range(len(node.outputs)))
    for key, value in node.attrs.items():
        if isinstance(value, gs.Constant):
            value = value._values.tensor
        if isinstance(value, gs.Graph):
            return None
        proto.attribute.append(onnx.helper.make_attribute(key, value))
    result = _run(proto, feeds, opset)
    if result is None:
        return None
    array = np.asarray(result[position])
    elem_type = next((c.elem_type for c in operands if c is not None), TensorProto.FLOAT)
    if not np.issubdtype(array.dtype, np.floating) and array.dtype.name != "bfloat16":
        elem_type = onnx.helper.np_dtype_to_tensor_dtype(array.dtype)
    elif elem_type not in FORMAT_OF:
        elem_type = onnx.helper.np_dtype_to_tensor_dtype(array.dtype)
    rooted = node.op in _ROOTS or any(c is not None and c.rooted for c in operands)
    return Constant(name, elem_type, array.shape, lambda: array, rooted)


def _too_large(node: Any, operands: list[Constant | None]) -> bool:
    if node.op in ("ConstantOfShape", "Expand", "Tile"):
        shape = operands[-1]
        if shape is not None and shape.format is None:
            own = operands[0].shape if node.op == "Tile" and operands[0] is not None else ()
            return float(np.prod(np.abs(shape.load().astype(np.float64)))) * float(np.prod(own)) > LARGEST
    return sum(int(np.prod(c.shape)) for c in operands if c is not None) > LARGEST


def _run(proto: NodeProto, feeds: dict[str, np.ndarray], opset: int) -> list[Any] | None:
    from onnx.reference import ReferenceEvaluator

    values = [onnx.helper.make_tensor_value_info(n, onnx.helper.np_dtype_to_tensor_dtype(a.dtype), a.shape)
              for n, a in feeds.items()]  # fmt: skip
    outs = [onnx.ValueInfoProto(name=n) for n in proto.output]
    graph = onnx.helper.make_graph([proto], "constant", values, outs)
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", opset)])
    try:
        with np.errstate(all="ignore"):
            return list(ReferenceEvaluator(model).run(None, feeds))  # type: ignore[arg-type]
    except Exception:  # an op the reference does not have, or an invalid node: it stays a computed value
        return None
