"""ONNX models evaluated in float64 by onnx.reference, and how large their rounding errors can be.

`magnitude` is a running error bound (Higham, Accuracy and Stability of Numerical Algorithms, 3.3): the network of
absolute values. Every element of a network of linear layers, sums and products is a sum of products along paths
through it; the bound is the sum of their absolute values, M. However the factors are grouped, which is all that
folding changes, float64 computes that element to within `n u M`, n being the number of roundings along a path. Where a
value passes an activation, M takes the activation's Lipschitz constant; a maximum errs by no more than the largest
error among its arguments.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx
from numpy.lib.stride_tricks import sliding_window_view
from onnx import ModelProto, NodeProto, TensorProto, numpy_helper
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun
from onnx_models import BatchNormalization
from onnx_models import Conv as TorchConv
from onnx_models import ConvTranspose as TorchConvTranspose

from .arrays import Array

FLOATS = {TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE}


def run(model: ModelProto, feeds: Mapping[str, Array]) -> list[Array]:
    """The outputs with every float in float64."""
    return _run(_promoted(model), feeds)


def magnitude(
    model: ModelProto, feeds: Mapping[str, Array], uncertainty: Mapping[str, Array] | None = None
) -> list[Array]:
    """M of every output, with the `uncertainty` of some initializers added to their absolute values."""
    m = _promoted(model)
    for t in m.graph.initializer:
        if t.data_type == TensorProto.DOUBLE:
            wider = (uncertainty or {}).get(t.name, 0.0)
            t.CopyFrom(numpy_helper.from_array(np.abs(numpy_helper.to_array(t)) + wider, t.name))
    for n in m.graph.node:
        _absolute(n)
    return _run(m, {k: np.abs(v) for k, v in feeds.items()})


def _run(m: ModelProto, feeds: Mapping[str, Array]) -> list[Array]:
    for n in m.graph.node:
        if n.op_type in _OWN:
            n.domain = "oracle"
    m.opset_import.append(onnx.helper.make_opsetid("oracle", 1))
    doubles = {k: v.astype(np.float64) if v.dtype.kind not in "iub" else v for k, v in feeds.items()}
    with np.errstate(all="ignore"):
        return ReferenceEvaluator(m, new_ops=list(_OWN.values())).run(None, doubles)  # type: ignore[return-value]


def _promoted(model: ModelProto) -> ModelProto:
    m = ModelProto()
    m.CopyFrom(model)
    for v in (*m.graph.input, *m.graph.output):
        if v.type.tensor_type.elem_type in FLOATS:
            v.type.tensor_type.elem_type = TensorProto.DOUBLE
    tensors = [a.t for n in m.graph.node if n.op_type == "Constant" for a in n.attribute]
    exact = {n.input[k] for n in m.graph.node if n.op_type in ("Resize", "Upsample") for k in range(1, len(n.input))}
    for t in (*m.graph.initializer, *tensors):
        if t.data_type in FLOATS and t.name not in exact:  # the scales of a Resize are float32 by definition
            t.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(t).astype(np.float64), t.name))
    del m.graph.value_info[:]
    return m


# ---------------------------------------------------------------------- the network of absolute values

_SAME = {"Abs", "LeakyRelu", "Neg", "Relu"}  # Lipschitz constant 1, zero stays zero
_RENAMED = {"Sub": "Add", "ReduceMin": "ReduceMax", "PRelu": "WidePRelu", "Sigmoid": "WideSigmoid", "Tanh": "WideTanh",
            "Clip": "WideClip", "BatchNormalization": "WideBatchNormalization"}  # fmt: skip


def _absolute(n: NodeProto) -> None:
    if n.op_type in _SAME:
        n.op_type = "Identity"
        del n.attribute[:]
    elif n.op_type == "Constant":
        for a in n.attribute:
            if a.t.data_type == TensorProto.DOUBLE:
                a.t.CopyFrom(numpy_helper.from_array(np.abs(numpy_helper.to_array(a.t)), a.t.name))
    elif n.op_type == "Gemm":
        for a in n.attribute:
            a.f = abs(a.f)
    elif n.op_type == "Div" and n.name.startswith("quotient"):
        n.op_type = "Mul"  # c / y for y >= 1 has the Lipschitz constant c
    n.op_type = _RENAMED.get(n.op_type, n.op_type)


class WidePRelu(OpRun):
    op_domain = "oracle"

    def _run(self, x, slope):
        return (x * np.maximum(1.0, slope),)


class WideSigmoid(OpRun):
    op_domain = "oracle"

    def _run(self, x):
        return (x / 4 + 1,)


class WideTanh(OpRun):
    op_domain = "oracle"

    def _run(self, x):
        return (x + 1,)


class WideClip(OpRun):
    op_domain = "oracle"

    def _run(self, x, *bounds, min=None, max=None):  # noqa: A002
        return (x + 6,)


class WideBatchNormalization(OpRun):
    op_domain = "oracle"

    def _run(self, x, s, b, mean, var, epsilon=None, **_):
        eps = float(np.float32(1e-5 if epsilon is None else epsilon))
        s, b, mean, var = (p.reshape(1, -1, *[1] * (x.ndim - 2)) for p in (s, b, mean, var))
        return ((x + mean) * (s / np.sqrt(var + eps)) + b,)


# ---------------------------------------------------------------------- pools, faster than onnx.reference's


def _windows(x: Array, padding: float, beyond: float, kernel: Any, **given: Any) -> Array:
    """`(N, C, *out, *kernel)`: what each position of a pool sees, in the padding and, with ceil_mode, beyond it."""
    n = x.ndim - 2
    strides, dilations = given.get("strides") or [1] * n, given.get("dilations") or [1] * n
    pads, same = list(given.get("pads") or [0] * 2 * n), given.get("auto_pad")
    reach = [d * (k - 1) + 1 for d, k in zip(dilations, kernel, strict=True)]
    more = [0] * n
    for a, size in enumerate(x.shape[2:]):
        if same in ("SAME_UPPER", "SAME_LOWER"):
            total = max(0, (-(-size // strides[a]) - 1) * strides[a] + reach[a] - size)
            pads[a] = total // 2 if same == "SAME_UPPER" else total - total // 2
            pads[a + n] = total - pads[a]
        padded = size + pads[a] + pads[a + n]
        last = math.ceil((padded - reach[a]) / strides[a]) * strides[a]
        if given.get("ceil_mode") and last < size + pads[a]:  # it starts inside the input or the padding in front
            more[a] = max(0, last + reach[a] - padded)
    x = np.pad(x, [(0, 0), (0, 0), *zip(pads[:n], pads[n:], strict=True)], constant_values=padding)
    x = np.pad(x, [(0, 0), (0, 0), *((0, m) for m in more)], constant_values=beyond)
    seen = sliding_window_view(x, reach, tuple(range(2, x.ndim)))  # type: ignore[call-overload]
    seen = seen[(slice(None), slice(None), *(slice(None, None, t) for t in strides))]
    return seen[(..., *(slice(None, None, d) for d in dilations))]


class MaxPool(OpRun):
    op_domain = "oracle"

    def _run(self, x, kernel_shape=None, storage_order=None, **given):
        return (_windows(x, -np.inf, -np.inf, kernel_shape, **given).max(tuple(range(x.ndim, 2 * x.ndim - 2))),)


class AveragePool(OpRun):
    op_domain = "oracle"

    def _run(self, x, kernel_shape=None, count_include_pad=None, **given):
        axes = tuple(range(x.ndim, 2 * x.ndim - 2))
        total = _windows(x, 0.0, 0.0, kernel_shape, **given).sum(axes)
        ones = np.ones((1, 1, *x.shape[2:]))
        return (total / _windows(ones, float(count_include_pad or 0), 0.0, kernel_shape, **given).sum(axes),)


class GlobalMaxPool(OpRun):
    op_domain = "oracle"

    def _run(self, x):
        return (x.max(tuple(range(2, x.ndim)), keepdims=True),)


class Upsample(OpRun):
    op_domain = "oracle"

    def _run(self, x, scales, mode=None):
        for axis, scale in enumerate(scales.tolist()):
            at = np.arange(int(x.shape[axis] * scale)) / scale
            low = np.floor(at).astype(int)
            high = np.minimum(low + 1, x.shape[axis] - 1)
            part = (at - low if mode == "linear" else 0 * at).reshape(-1, *[1] * (x.ndim - 1 - axis))
            x = x.take(low, axis) * (1 - part) + x.take(high, axis) * part
        return (x,)


class Conv(TorchConv):
    op_domain = "oracle"

    def _run(self, x, *parameters, **given):
        return super()._run(np.ascontiguousarray(x), *parameters, **given)  # torch takes no negative strides


class ConvTranspose(TorchConvTranspose):
    op_domain = "oracle"

    def _run(self, x, *parameters, **given):
        return super()._run(np.ascontiguousarray(x), *parameters, **given)


_OWN: dict[str, Callable[..., Any]] = {
    c.__name__: c
    for c in (AveragePool, BatchNormalization, Conv, ConvTranspose, GlobalMaxPool, MaxPool, Upsample,
              WideBatchNormalization, WideClip, WidePRelu, WideSigmoid, WideTanh)
}  # fmt: skip
