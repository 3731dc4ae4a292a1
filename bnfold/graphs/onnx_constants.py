"""What is constant in an ONNX graph, and its values.

"Constant" is wider than "initializer": Constant nodes, and whatever deterministic nodes compute from constants alone
(a transposed weight, `Expand(CastLike(0, x), Shape(w)[0:1])`, `Sqrt(Add(var, eps))`). It is also narrower: an
initializer that is a graph input can be overridden by the caller. Arithmetic on constants is carried out in float64,
so that folding rounds once; casts to a narrower type round as they do at run time, and what decides (comparisons,
rounding, casts to integers) decides on the values of the run, computed in the types the graph declares.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs
from onnx import ModelProto, NodeProto, TensorProto, numpy_helper

from ..errors import InvalidFileError
from ..norms import RUNNING_DEVIATION
from ..ops import Grid, Stored, Tensor
from ..report import Reason, Refusal
from ..rounding import BFLOAT16, FLOAT16, FLOAT32, FLOAT64, FloatFormat, round_product
from .onnx_data import Stretch
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
             "If", "Loop", "Scan", "SequenceMap", "QuantizeLinear", "BatchNormalization",
             "Dropout"}  # fmt: skip
_DECIDE = {"Ceil", "Floor", "Mod", "Round", "Sign"}
_ROOTS = {"Sqrt", "Pow"}


@dataclass(frozen=True, slots=True, eq=False)
class Constant:
    """A value known before the model runs. `load` gives floats as stored, or in float64 where they were computed.

    `run` gives computed values as the run computes them, in the declared type; None where `load` does. `rooted`: a
    square root went into it, the mark of running statistics spelled as arithmetic.
    """

    name: str
    elem_type: int
    shape: tuple[int, ...]
    load: Callable[[], np.ndarray]
    rooted: bool = False
    run: Callable[[], np.ndarray] | None = None
    stretch: Stretch | None = None  # of a data file, where it is an initializer kept there
    grid: Grid | None = None  # of what is stored as integers
    dequantized: bool = False  # integers went into it

    @property
    def format(self) -> FloatFormat | None:
        """The float format it is declared in, or None for other types."""
        return FORMAT_OF.get(self.elem_type)

    def float64(self) -> np.ndarray:
        """Its values in float64, exactly."""
        return _converted(self.load(), np.float64)

    def at_run(self) -> np.ndarray:
        """Its values as the run has them."""
        return self.load() if self.run is None else self.run()

    def tensor(self) -> Tensor:
        """The constant as the engine reads it. Computed values are rounded once to the declared type."""
        fmt = self.format
        assert fmt is not None

        def read() -> Stored:
            values = self.load()
            if values.dtype == np.float64 and fmt is not FLOAT64:
                return fmt.pack(round_product(fmt, values))
            return values.view(np.uint16) if fmt is BFLOAT16 else values

        if self.stretch is None:
            return Tensor(self.name, self.shape, fmt, read)
        rows, draft = self.stretch.open_rows, self.stretch.draft
        return Tensor(self.name, self.shape, fmt, read, partial(rows, fmt), partial(draft, fmt))


class Constants:
    """Looks tensors up; remembers what it computed. Keyed by onnx-graphsurgeon tensor identity."""

    def __init__(
        self,
        overridable: frozenset[str],
        type_of: Callable[[Any], TypeInfo | None],
        stored: Mapping[int, Stretch],
    ):
        self._overridable, self._type_of, self._stored = overridable, type_of, stored
        self._known: dict[int, Constant | None] = {}
        self._scope_of: dict[int, Scope] = {}
        self._busy: set[int] = set()
        self._keep: list[Any] = []  # identities are keys, so the objects must live as long

    def enter(self, scope: Scope) -> None:
        """Make a scope's nodes known, for the opset they are written in and their initializers' protos."""
        for node in scope.graph.nodes:
            self._scope_of[id(node)] = scope
            self._keep.append(node)
        for name, tensor in scope.graph.tensors().items():
            if isinstance(tensor, gs.Constant) and id(tensor) not in self._known:
                self._keep.append(tensor)
                self._known[id(tensor)] = self._initializer(name, scope)

    def _initializer(self, name: str, scope: Scope) -> Constant | None:
        home = scope
        while name not in home.defined and home.parent is not None:
            home = home.parent
        proto = home.initializers.get(name)
        if proto is None or (home.parent is None and name in self._overridable):
            return None
        rooted = name.rpartition(".")[2] == RUNNING_DEVIATION
        stretch = self._stored.get(id(proto))
        load = (lambda: _array(proto)) if stretch is None else (lambda: _array(stretch.loaded()))
        return Constant(name, proto.data_type, tuple(proto.dims), load, rooted, stretch=stretch)

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
        its = f"its {what} {tensor.name}"
        causes = self._causes(tensor)
        if causes and all(t.name in self._overridable for t in causes):
            also = "is" if tensor is causes[0] else f"is computed from {causes[0].name},"
            return Refusal(Reason.OVERRIDABLE_PARAMETER, node, f"{its} {also} also a graph input a caller may set")
        if isinstance(tensor, gs.Constant):
            return Refusal(Reason.DYNAMIC_PARAMETER, node, f"{its} is stored as a sparse tensor")
        if not tensor.inputs:
            return Refusal(Reason.DYNAMIC_PARAMETER, node, f"{its} is an input")
        producer = tensor.inputs[0].op
        if producer in ("DequantizeLinear", "QuantizeLinear"):
            return Refusal(Reason.QUANTIZED_PARAMETER, node, f"{its} comes from {producer}")
        return Refusal(Reason.DYNAMIC_PARAMETER, node, f"{its} is computed at run time by {producer}")

    def _causes(self, tensor: Any) -> list[Any]:
        """The values without a producer that keep the tensor from being constant."""
        found: list[Any] = []
        pending, seen = [tensor], {id(tensor)}
        while pending:
            t = pending.pop()
            if not t.inputs and not t.is_empty() and self.get(t) is None:
                found.append(t)
            above = [i for node in t.inputs for i in node.inputs if id(i) not in seen]
            seen.update(map(id, above))
            pending += above
        return found

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
        if node.op == "DequantizeLinear":
            return dequantized(tensor.name, node, operands, scope.opset)
        if node.op == "Cast":
            found = _cast(tensor.name, operands[0], int(node.attrs["to"]))
        else:
            found = _evaluate(tensor.name, node, operands, position, scope.opset)
        if found is None or not any(c is not None and c.dequantized for c in operands):
            return found
        return replace(found, grid=_moved(node, operands[0]), dequantized=True)

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


def dequantized(name: str, node: Any, operands: list[Constant | None], opset: int) -> Constant | None:
    """`(q - zero_point) * scale` of constants; the integers stay what a weight is stored as."""
    q, scale, point = (*operands, None)[:3]
    limits = next((r for t, r in _RANGE.items() if q is not None and t == q.elem_type), None)
    plain = not node.attrs.get("block_size") and not node.attrs.get("output_dtype")
    if q is None or scale is None or limits is None or scale.format is None or not plain:
        return None
    rank, vector = len(q.shape), scale.shape not in ((), (1,))
    axis = int(node.attrs.get("axis", 1))
    if vector and (opset < 13 or not -rank <= axis < rank or scale.shape != (q.shape[axis],)):
        return None
    if point is not None and point.shape != scale.shape and not (math.prod(point.shape) == 1 and not vector):
        return None
    axis = axis % rank if vector else None
    zero = np.array(0) if point is None else point.load().astype(np.int64)
    zero = zero if vector else zero.reshape(())

    def integers() -> np.ndarray:
        return q.load().astype(np.int64)

    def load() -> np.ndarray:
        laid = [1] * rank
        if axis is not None:
            laid[axis] = -1
        factor = scale.float64().reshape(laid if vector else ())
        return (integers() - (zero.reshape(laid) if zero.ndim else zero)) * factor

    fmt, dtype = scale.format, onnx.helper.tensor_dtype_to_np_dtype(scale.elem_type)
    may_run = not vector and opset >= 13
    grid = Grid(scale.tensor(), zero, integers, tuple(range(rank)), axis, may_run, *limits)
    run = lambda: round_product(fmt, load()).astype(dtype)  # noqa: E731
    return Constant(name, scale.elem_type, q.shape, load, run=run, grid=grid, dequantized=True)


def _moved(node: Any, source: Constant | None) -> Grid | None:
    """The grid behind a node that only reorders dimensions."""
    if source is None or source.grid is None or node.op not in ("Identity", "Transpose"):
        return None
    order = source.grid.order
    default = list(range(len(order)))[:: -1 if node.op == "Transpose" else 1]
    return replace(source.grid, order=tuple(order[k] for k in node.attrs.get("perm", default)))


_RANGE = {  # of the integer types that weights and biases are stored in
    TensorProto.INT8: (-(1 << 7), (1 << 7) - 1), TensorProto.UINT8: (0, (1 << 8) - 1),
    TensorProto.INT16: (-(1 << 15), (1 << 15) - 1), TensorProto.UINT16: (0, (1 << 16) - 1),
    TensorProto.INT32: (-(1 << 31), (1 << 31) - 1),
}  # fmt: skip


def type_of_range(low: int, high: int) -> int:
    """The integer type with this range."""
    return next(t for t, limits in _RANGE.items() if limits == (low, high))


def _constant_node(name: str, node: Any) -> Constant | None:
    (kind, value), *rest = node.attrs.items() or [("", None)]
    if rest or isinstance(value, gs.Node.AttributeRef):
        return None
    if kind == "value":
        # onnx-graphsurgeon keeps the TensorProto; `.values` would turn bfloat16 into float32.
        proto = getattr(getattr(value, "_values", None), "tensor", None)
        if not isinstance(proto, TensorProto):
            return None
        return Constant(name, proto.data_type, tuple(proto.dims), lambda: _array(proto))
    elem_type, holds = _PLAIN.get(kind, (0, ()))
    if not elem_type or not isinstance(value, holds):
        return None
    array = np.array(value, np.float32 if elem_type == TensorProto.FLOAT else np.int64)
    return Constant(name, elem_type, array.shape, lambda: array)


_PLAIN: dict[str, tuple[int, type]] = {
    "value_float": (TensorProto.FLOAT, float), "value_floats": (TensorProto.FLOAT, list),
    "value_int": (TensorProto.INT64, int), "value_ints": (TensorProto.INT64, list),
}  # fmt: skip


def _cast(name: str, source: Constant | None, target: int) -> Constant | None:
    if source is None:
        return None
    into, origin = FORMAT_OF.get(target), source.format
    if into is not None and (origin is not None or source.elem_type in {TensorProto.BOOL, *_INTEGERS}):
        dtype = onnx.helper.tensor_dtype_to_np_dtype(target)
        wider = origin is not None and into.precision >= origin.precision and into is not FLOAT16
        return Constant(
            name, target, source.shape,
            source.float64 if wider else lambda: round_product(into, source.float64()), source.rooted,
            lambda: round_product(into, source.at_run().astype(np.float64)).astype(dtype),
        )  # fmt: skip
    if target == TensorProto.BOOL or target in _INTEGERS:
        dtype = onnx.helper.tensor_dtype_to_np_dtype(target)
        return Constant(name, target, source.shape, lambda: _converted(source.at_run(), dtype), source.rooted)
    return None


def _converted(values: np.ndarray, dtype: Any) -> np.ndarray:
    """NaN is converted without a warning."""
    with np.errstate(invalid="ignore"):
        return values.astype(dtype)


_INTEGERS = {TensorProto.INT8, TensorProto.INT16, TensorProto.INT32, TensorProto.INT64,
             TensorProto.UINT8, TensorProto.UINT16, TensorProto.UINT32, TensorProto.UINT64}  # fmt: skip


def _array(proto: TensorProto) -> np.ndarray:
    try:
        return numpy_helper.to_array(proto)
    except Exception as e:
        first = (str(e).splitlines() or [type(e).__name__])[0]
        raise InvalidFileError(f"the constant {proto.name!r} cannot be read: {first}") from e


def _evaluate(name: str, node: Any, operands: list[Constant | None], position: int, opset: int) -> Constant | None:
    """One node on constant operands, by onnx's reference implementation."""
    model = None if _too_large(node, operands) else _single(node, operands, opset)
    if model is None:
        return None
    elem_type = model.graph.output[position].type.tensor_type.elem_type
    floats = [c for c in operands if c is not None and c.format is not None]
    rooted = node.op in _ROOTS or any(c is not None and c.rooted for c in operands)

    def run() -> np.ndarray | None:
        return _run(model, [c and c.at_run() for c in operands], position)

    if elem_type not in FORMAT_OF or node.op in _DECIDE or not floats:
        found = run()
        return None if found is None else Constant(name, elem_type, found.shape, lambda: found, rooted)
    moves = node.op in _MOVES
    found = _run(model, [c and (c.load() if moves or not c.format else c.float64()) for c in operands], position)
    if found is None:
        return None
    same = moves and all(c.run is None for c in floats)
    return Constant(name, elem_type, found.shape, lambda: found, rooted, None if same else lambda: _or(run(), found))


def _or(first: np.ndarray | None, second: np.ndarray) -> np.ndarray:
    return second if first is None else first


def _too_large(node: Any, operands: list[Constant | None]) -> bool:
    if node.op in ("ConstantOfShape", "Expand", "Tile"):
        shape = operands[-1]
        if shape is not None and shape.format is None:
            own = operands[0].shape if node.op == "Tile" and operands[0] is not None else ()
            return float(np.prod(np.abs(shape.load().astype(np.float64)))) * float(np.prod(own)) > LARGEST
    return sum(int(np.prod(c.shape)) for c in operands if c is not None) > LARGEST


def _single(node: Any, operands: list[Constant | None], opset: int) -> ModelProto | None:
    """A model of the node alone, its outputs typed by inference; None where that is not possible."""
    proto = NodeProto(op_type=node.op, input=[f"i{k}" if c else "" for k, c in enumerate(operands)])
    proto.output.extend(f"o{k}" for k in range(len(node.outputs)))
    for key, value in node.attrs.items():
        if isinstance(value, gs.Constant):
            value = getattr(value._values, "tensor", None)
        if value is None or isinstance(value, gs.Graph):
            return None
        proto.attribute.append(onnx.helper.make_attribute(key, value))
    values = [
        onnx.helper.make_tensor_value_info(f"i{k}", c.elem_type, c.shape)
        for k, c in enumerate(operands)
        if c is not None
    ]
    graph = onnx.helper.make_graph([proto], "constant", values, [onnx.ValueInfoProto(name=n) for n in proto.output])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", opset)])
    try:
        model = onnx.shape_inference.infer_shapes(model)
    except Exception:  # an invalid node: it stays a computed value
        return None
    return model if all(o.type.tensor_type.elem_type for o in model.graph.output) else None


def _run(model: ModelProto, values: list[np.ndarray | None], position: int) -> np.ndarray | None:
    from onnx.reference import ReferenceEvaluator

    feeds = {f"i{k}": v for k, v in enumerate(values) if v is not None}
    try:
        with np.errstate(all="ignore"):
            found = ReferenceEvaluator(model).run(None, feeds)[position]  # pyright: ignore[reportArgumentType]
    except Exception:  # an op the reference does not have, or an invalid node
        return None
    return np.asarray(found) if isinstance(found, np.ndarray | np.generic) else None
