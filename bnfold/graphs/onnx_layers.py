"""ONNX layers with weights, norms, and arithmetic with constants, as the engine's records."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..affine import Affine, Shape
from ..norms import Broken, normalization_map
from ..ops import Geometry, Kind, Linear, Opaque, Record, Scale
from ..report import Reason, Refusal
from ..rounding import FLOAT32
from .onnx_constants import Constant

if TYPE_CHECKING:
    from .onnx_lift import Node


# ---------------------------------------------------------------------- linear layers


def _parameters(n: Node) -> tuple[Constant, Constant | None] | Opaque:
    """Constant weight (input 1) and bias (input 2), or the op with the reason one is not."""
    weight, bias = n.constant(1), n.constant(2)
    if weight is None:
        return n.refuse(1, "weight")
    if bias is None and n.tensor(2) is not None:
        return n.refuse(2, "bias")
    if weight.format is None or (bias is not None and bias.format is None):
        return n.opaque()
    return weight, bias


def _linear(n: Node, weight: Constant, bias: Constant | None, x: int = 0, **facts: Any) -> Linear:
    """The layer; what its parts say of one another must agree."""
    if weight.dequantized:
        why = Refusal(Reason.QUANTIZED_PARAMETER, n.name, f"its weight {weight.name} is computed from integers")
        facts |= {"geometry": None, "grid": weight.grid, "frozen": why if weight.grid is None else None}
    linear = Linear(n.name, n.value(x), n.result(), weight.tensor(), None if bias is None else bias.tensor(), **facts)
    shape = n.shape(linear.input)
    size = None if shape is None else shape[linear.in_axis] if -len(shape) <= linear.in_axis < len(shape) else 0
    if isinstance(size, int) and size != linear.in_channels:
        raise n.invalid(f"its weight {weight.name} has {linear.in_channels} input channels, its input has {size}")
    return linear


def convolution(n: Node) -> Record:
    """Conv and ConvTranspose. Taps are uniform where nothing is padded, not even by `auto_pad`."""
    found = _parameters(n)
    if isinstance(found, Opaque):
        return found
    weight, bias = found
    transposed = n.op == "ConvTranspose"
    pads = n.attr("pads") or []
    unpadded = n.attr("auto_pad", "NOTSET") in ("NOTSET", "VALID") and not any(pads)
    groups = n.attr("group", 1)
    if len(weight.shape) < 3 or groups < 1 or weight.shape[0] % groups:
        raise n.invalid(f"a weight {weight.name} of shape {weight.shape} does not go with {groups} groups")
    linear = _linear(
        n, weight, bias, out_dim=1 if transposed else 0, in_axis=1, out_axis=1, groups=groups,
        uniform_taps=unpadded and not transposed, geometry=None if transposed else _geometry(n, weight.shape[2:]),
    )  # fmt: skip
    if bias is not None and bias.shape != (linear.out_channels,):
        raise n.invalid(f"its bias {bias.name} has shape {bias.shape}, not {(linear.out_channels,)}")
    return linear


def _geometry(n: Node, kernel: tuple[int, ...]) -> Geometry | None:
    """How a convolution slides, where its padding is written down."""
    if n.attr("auto_pad", "NOTSET") not in ("NOTSET", "VALID"):
        return None
    rank = len(kernel)
    pads = tuple(n.attr("pads") or [0] * 2 * rank)
    stride, dilation = tuple(n.attr("strides") or [1] * rank), tuple(n.attr("dilations") or [1] * rank)
    if not len(pads) == 2 * len(stride) == 2 * len(dilation) == 2 * rank or min(*pads, *stride, *dilation) < 0:
        return None
    return Geometry(kernel, stride, dilation, pads[:rank], pads[rank:])


def gemm(n: Node) -> Record:
    """Gemm with constant B and C. C keeps the shape of a matrix, so that it need not say that it broadcasts."""
    found = _parameters(n)
    if isinstance(found, Opaque):
        return found
    weight, bias = found
    if len(weight.shape) != 2:
        raise n.invalid(f"its weight {weight.name} is no matrix")
    linear = _linear(
        n, weight, bias, out_dim=0 if n.attr("transB", 0) else 1, in_axis=0 if n.attr("transA", 0) else 1, out_axis=1,
        alpha=n.attr("alpha", 1.0), beta=n.attr("beta", 1.0),
    )  # fmt: skip
    if bias is not None and (len(bias.shape) > 2 or bias.shape[-1:] not in ((), (1,), (linear.out_channels,))):
        raise n.invalid(f"its C {bias.name} of shape {bias.shape} does not broadcast to {linear.out_channels} columns")
    return linear


def matmul(n: Node) -> Record:
    """MatMul with a constant matrix on either side; on the left, its channels are the rows of the product."""
    left, right = n.constant(0), n.constant(1)
    weight, x = (right, 0) if left is None else (left, 1)
    if weight is None:
        return n.refuse(1, "right operand")
    shape = n.shape(n.value(x))
    if weight.format is None or len(weight.shape) != 2 or shape is None or len(shape) < 2:
        return n.opaque()
    if x == 1 and n.scope.opset < 7:  # a column of biases does not broadcast there
        return n.opaque()
    axis = -1 if x == 0 else -2
    return _linear(n, weight, None, x, out_dim=x ^ 1, in_axis=axis, out_axis=axis, free_bias=False)


# ---------------------------------------------------------------------- scales


def batch_norm(n: Node) -> Record:
    """BatchNormalization that acts by its running statistics, in the form of every opset."""
    training = _trains(n)
    if training:
        return n.opaque(Refusal(Reason.TRAINING_MODE, n.name, training), norm=True)
    parameters: list[np.ndarray] = []
    for k, what in enumerate(("scale", "bias", "mean", "variance"), 1):
        c = n.constant(k)
        if c is None:
            return n.refuse(k, what, norm=True)
        if c.format is None:
            raise n.invalid(f"its {what} {c.name} is not of a floating-point type")
        parameters.append(c.float64())
    x = n.value(0)
    shape = n.shape(x)
    if shape is None:
        return n.opaque(Refusal(Reason.UNKNOWN_SHAPE, n.name, "the rank of its input is not known"), norm=True)
    gamma, beta, mean, variance = parameters
    _check_channels(n, [p.shape for p in parameters], shape)
    epsilon = float(np.float32(n.attr("epsilon", 1e-5)))
    result = normalization_map(mean, variance, epsilon, gamma, beta)
    if isinstance(result, Broken):
        n.lifter.broken.append(f"{n.name}: {result.detail}")
        return n.opaque(Refusal(Reason.NOT_FINITE, n.name, result.detail), norm=True)
    rank = len(shape)
    if gamma.ndim == 1:
        m = Affine.per_channel(*result, rank, 1) if rank > 1 else Affine.of(*result, rank)
    else:  # opset < 9 with spatial=0: one map per element of the sample
        m = Affine.of(*result, rank)
    scale = n.constant(1)
    assert scale is not None
    return Scale(
        n.name, x, n.result(), m, Kind.NORM, n.op, scale.format or FLOAT32,
        channels=gamma.shape[0], cost=2, epsilon=epsilon, module=n.module,
    )  # fmt: skip


def _check_channels(n: Node, sizes: list[tuple[int, ...]], shape: Shape) -> None:
    """One value per channel; before opset 9, with spatial=0, one per element of the sample."""
    sample = shape[1:] if len(shape) > 1 else (1,)
    each = sample if n.scope.opset < 9 and n.attr("spatial", 1) == 0 else sample[:1]
    if not shape or len(set(sizes)) > 1 or len(sizes[0]) != len(each):
        raise n.invalid(f"parameters of shapes {', '.join(map(str, sizes))} do not go with an input of shape {shape}")
    if any(isinstance(have, int) and have != want for have, want in zip(each, sizes[0], strict=True)):
        raise n.invalid(f"parameters of shape {sizes[0]} do not go with an input of shape {shape}")


def _trains(n: Node) -> str:
    """How the node says that it normalises by the batch, or ''."""
    if n.scope.opset >= 14 and n.attr("training_mode", 0):
        return "training_mode is 1"
    if n.scope.opset < 7 and not n.attr("is_test", 0):
        return "is_test is 0"
    if n.scope.opset < 14 and any(n.proto.output[1:]):
        return "its optional outputs are in use, the training form"
    return ""


def arithmetic(n: Node) -> Record:
    """Add, Sub, Mul, Div with a constant that leaves the activation's shape as it is."""
    constants = n.constant(0), n.constant(1)
    if n.tensor(1) is None or constants == (None, None):
        return n.opaque()
    k = 0 if constants[0] is not None else 1
    c, x = constants[k], n.value(1 - k)
    shape = n.shape(x)
    if c is None or c.format is None or (n.op == "Div" and k == 0) or n.scope.opset < 7:
        return n.opaque()
    m = _constant_map(n.op, c.float64(), k, len(shape)) if shape is not None else None
    if shape is None or m is None or not _keeps_shape(c.shape, shape):
        why = Refusal(Reason.UNKNOWN_SHAPE, n.name, f"it is not known how a constant of shape {c.shape} broadcasts")
        return n.opaque(why if shape is None or None in shape else None)
    if not (np.isfinite(m.scale).all() and np.isfinite(m.shift).all()):
        return n.opaque(Refusal(Reason.NOT_FINITE, n.name, "its constant is not finite"))
    kind = Kind.SCALE if n.op in ("Mul", "Div") else Kind.SHIFT
    return Scale(n.name, x, n.result(), m, kind, n.op, c.format, module=n.module)


def _constant_map(op: str, c: np.ndarray, position: int, rank: int) -> Affine | None:
    if c.ndim > rank:
        return None
    with np.errstate(divide="ignore"):
        match op:
            case "Mul":
                return Affine.of(c, 0.0, rank)
            case "Div":
                return Affine.of(1 / c, 0.0, rank)
            case "Add":
                return Affine.of(1.0, c, rank)
            case _:  # Sub
                return Affine.of(1.0, -c, rank) if position == 1 else Affine.of(-1.0, c, rank)


def _keeps_shape(constant: tuple[int, ...], shape: Shape) -> bool:
    """Whether broadcasting the constant leaves the activation's shape as it is."""
    padded = (1,) * (len(shape) - len(constant)) + constant
    return all(c == 1 or c == n for c, n in zip(padded, shape, strict=True))
