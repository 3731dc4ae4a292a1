"""An ONNX model under construction: its nodes, how its constants are stored, and the shapes of all values."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper
from onnx.helper import tensor_dtype_to_np_dtype

from .arrays import Array, generator_of
from .program import Step, UnfitError

Shape = tuple[int, ...]
Kind = Callable[..., Shape | list[Shape]]  # (builder, step, *shapes) -> shapes of the results
ELEM_TYPE = {
    "double": TensorProto.DOUBLE,
    "float": TensorProto.FLOAT,
    "float16": TensorProto.FLOAT16,
    "bfloat16": TensorProto.BFLOAT16,
}
IR_OF_OPSET = {9: 4, 11: 6, 13: 7, 17: 8, 20: 9, 22: 10}  # 22: the first in which a Conv takes bfloat16
LARGEST = 4000  # elements of a value; a network grows no further


def fit(condition: bool) -> None:
    """Raise UnfitError unless the condition holds."""
    if not condition:
        raise UnfitError


class OnnxBuilder:
    """Nodes and constants so far, and the shapes of all values at the size the program is drawn for."""

    def __init__(self, shape: Shape, settings: Mapping[str, Any], kinds: Mapping[str, Kind]):
        self.settings, self.kinds = settings, kinds
        self.opset: int = settings.get("opset", 22 if settings.get("dtype") == "bfloat16" else 17)
        self.elem_type: int = ELEM_TYPE[settings.get("dtype", "double")]
        self.free: str = settings.get("free", "")
        self.shapes: dict[str, Shape] = {"x": shape}
        self.nodes: list[NodeProto] = []
        self.tensors: dict[str, TensorProto] = {}
        self.ways: dict[str, str] = {}
        self.step = Step("", (), {})

    @property
    def ids(self) -> bool:
        """Whether the input holds indices."""
        return bool(self.settings.get("ids"))

    def add(self, step: Step) -> list[str]:
        """Append the step's nodes."""
        nodes, tensors = len(self.nodes), set(self.tensors)
        self.step = step
        try:
            fit(bool(step.reads) and all(v in self.shapes for v in step.reads))
            fit(not self.ids or ("x" in step.reads) == (step.kind == "embed"))
            found = self.kinds[step.kind](self, step, *[self.shapes[v] for v in step.reads])
            shapes = found if isinstance(found, list) else [found]
            fit(all(s and min(s) > 0 and math.prod(s) <= LARGEST for s in shapes))
        except UnfitError:
            del self.nodes[nodes:]
            self.tensors = {k: t for k, t in self.tensors.items() if k in tensors}
            raise
        names = [step.name] if len(shapes) == 1 else [f"{step.name}_{k}" for k in range(len(shapes))]
        self.shapes.update(zip(names, shapes, strict=True))
        return names

    # ------------------------------------------------------------------ what the table's functions use

    def node(self, op: str, reads: Sequence[str], *results: str, **attributes: Any) -> str:
        """Append a node; its first result, by default the step's name."""
        count = sum(n.name.split(".")[0] == self.step.name for n in self.nodes)
        name = f"{self.step.name}.{count}" if count else self.step.name
        given = {k: v for k, v in attributes.items() if v is not None}
        outputs = results or (self.step.name,)
        self.nodes.append(helper.make_node(op, list(reads), list(outputs), name=name, **given))
        return outputs[0]

    def inner(self, what: str) -> str:
        """A value inside the step."""
        return f"{self.step.name}.{what}"

    def floats(self, name: str, values: Any, elem_type: int | None = None) -> str:
        """A constant of the network's float type, stored the way the settings say."""
        elem = elem_type or self.elem_type
        tensor = numpy_helper.from_array(np.asarray(values, np.float64).astype(tensor_dtype_to_np_dtype(elem)), name)
        return self.constant(tensor, self.settings.get("constants", "initializer"))

    def ints(self, what: str, values: Sequence[int] | int) -> str:
        """A constant of integers."""
        return self.constant(numpy_helper.from_array(np.array(values, np.int64), self.inner(what)))

    def singles(self, what: str, values: Sequence[float]) -> str:
        """A constant that is float32 in every network: what a Resize scales by."""
        return self.constant(numpy_helper.from_array(np.array(values, np.float32), self.inner(what)))

    def constant(self, tensor: TensorProto, way: str = "initializer") -> str:
        """A constant stored as an initializer, a Constant node, or an Identity of an initializer."""
        name = tensor.name
        known = self.tensors.get(name)
        if known is not None:
            fit(known.dims == tensor.dims)  # shared with an earlier step
            return name
        self.tensors[name] = tensor
        self.ways[name] = way
        return name

    def random(self, key: str, shape: Shape, scale: float = 1.0) -> Array:
        """Normal noise that depends on the key alone."""
        return generator_of(key).normal(0, scale, shape)

    # ------------------------------------------------------------------ the model

    def model(self, outputs: Sequence[str]) -> ModelProto:
        """The model so far."""
        stored: list[TensorProto] = []
        front: list[NodeProto] = []
        for name, tensor in self.tensors.items():
            t = TensorProto()
            t.CopyFrom(tensor)
            if self.ways[name] == "node":
                front.append(helper.make_node("Constant", [], [name], value=t))
                continue
            if self.ways[name] == "identity":
                t.name = f"{name}.stored"
                front.append(helper.make_node("Identity", [t.name], [name], name=f"{name}.same"))
            stored.append(t)
        rank = len(self.shapes["x"])
        dims: list[Any] = list(self.shapes["x"])
        if self.free:
            dims[0] = None if self.free == "unknown" else "batch"
        if self.free in ("spatial", "unknown"):
            dims[2:] = [None if self.free == "unknown" else f"size{k}" for k in range(2, rank)]
        x = helper.make_tensor_value_info("x", TensorProto.INT64 if self.ids else self.elem_type, dims)
        results = []
        for o in outputs:
            shape = [None] * len(self.shapes[o]) if self.free else list(self.shapes[o])
            results.append(helper.make_tensor_value_info(o, self.elem_type, shape))
        listed = bool(self.settings.get("listed"))
        inputs = [x, *(helper.make_tensor_value_info(t.name, t.data_type, t.dims) for t in stored if listed)]
        graph = helper.make_graph([*front, *self.nodes], "fuzz", inputs, results, stored)
        ir = 3 if listed and self.opset == 9 else IR_OF_OPSET[self.opset]
        return helper.make_model(graph, ir_version=ir, opset_imports=[helper.make_opsetid("", self.opset)])
