"""bfloat16 computed in float32, for providers of onnxruntime without kernels for it: the CPU has hardly any.

Every bfloat16 value is a float32 value, so a widened model computes what the given one means, without the roundings
in between. No weight is touched: a Cast stands behind each initializer, whose data may lie in another file.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

BFLOAT16, FLOAT = 16, 1  # TensorProto.DataType
TYPES = frozenset({  # attributes that name a type
    "dtype", "output_datatype", "output_dtype", "precision", "softmax_precision", "stash_type", "to",
})  # fmt: skip
HELD = " (held as bfloat16)"


def holds(model: Any, kind: int = BFLOAT16) -> bool:
    """Whether anything in an ONNX model is said to be of that type (a TensorProto.DataType)."""
    return any(_is_narrow(m, kind) for m in _messages(model))


def widened(model: Any) -> tuple[Any, frozenset[str]]:
    """A copy that computes in float32 what the model has in bfloat16, and which inputs and outputs were bfloat16.

    They are float32 now, and for the caller to round. Functions are inlined, for a call may hand a type to them;
    overridable initializers of that type are no inputs any more. Raises what onnx raises where it cannot infer types.
    """
    import onnx
    from onnx import inliner, shape_inference

    inferred = shape_inference.infer_shapes(model).graph  # an output that is only watched declares no type
    known = {
        v.name
        for v in (*inferred.value_info, *inferred.input, *inferred.output, *inferred.initializer)
        if any(_is_narrow(m) for m in _messages(v))
    }
    ends = {v.name for v in (*model.graph.input, *model.graph.output)}
    copied = onnx.ModelProto()
    copied.CopyFrom(inliner.inline_local_functions(model) if model.functions else model)
    for message in list(_messages(copied)):
        if isinstance(message, onnx.GraphProto):
            _cast_initializers(message)
    for message in list(_messages(copied)):
        if not _is_narrow(message) or (isinstance(message, onnx.TensorProto) and message.name.endswith(HELD)):
            continue
        if isinstance(message, onnx.TensorProto):
            values = onnx.numpy_helper.to_array(message).astype(np.float32)
            message.CopyFrom(onnx.numpy_helper.from_array(values, message.name))
        elif isinstance(message, onnx.NodeProto):
            for attribute in _narrow_attributes(message):
                attribute.i = FLOAT
        else:
            message.elem_type = FLOAT
    return copied, frozenset(known & ends)


def _cast_initializers(graph: Any) -> None:
    """A float32 value in the place of each bfloat16 initializer, from which it is cast."""
    import onnx

    narrow = [t for t in graph.initializer if t.data_type == BFLOAT16]
    names = {t.name for t in narrow}
    casts = [onnx.helper.make_node("Cast", [n + HELD], [n], to=FLOAT) for n in sorted(names)]
    nodes, inputs = [*casts, *graph.node], [i for i in graph.input if i.name not in names]
    del graph.node[:], graph.input[:]
    graph.node.extend(nodes)
    graph.input.extend(inputs)
    for tensor in narrow:
        tensor.name += HELD


def _is_narrow(message: Any, kind: int = BFLOAT16) -> bool:
    """Whether this one is a tensor of that type, the type of one, or a node that has the type in an attribute."""
    if message.DESCRIPTOR.name == "NodeProto":
        return bool(_narrow_attributes(message, kind))
    return getattr(message, "data_type", 0) == kind or getattr(message, "elem_type", 0) == kind


def _narrow_attributes(node: Any, kind: int = BFLOAT16) -> list[Any]:
    """Not those of BitCast, which reads the 16 bits: what it makes is bfloat16 and nothing else."""
    return [a for a in node.attribute if a.name in TYPES and a.i == kind and node.op_type != "BitCast"]


def _messages(message: Any) -> Iterator[Any]:
    """A protobuf message and every one within it."""
    yield message
    for field, value in message.ListFields():
        if field.message_type is not None:
            for inner in (value,) if hasattr(value, "ListFields") else value:
                yield from _messages(inner)
