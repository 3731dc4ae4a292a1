"""ATen layers and norms as the engine's records. The table at the foot says which op is described by which function."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import fx

from ..affine import Affine
from ..norms import Broken, normalization_map
from ..ops import Geometry, Kind, Linear, Opaque, Record, Scale
from ..report import Reason, Refusal
from .torch_constants import FORMAT_OF, Constant
from .torch_layout import sum_or_product
from .torch_nodes import NORM_OPS, TUPLED, op_name, path_of, shape_of

if TYPE_CHECKING:
    from .torch_lift import Node


def _parameters(n: Node, weight: str = "weight", bias: str = "bias") -> tuple[Constant, Constant | None] | Opaque:
    w, b = n.constant(weight), n.constant(bias)
    if w is None:
        return n.refuse(weight, "weight")
    if b is None and n.args.get(bias) is not None:
        return n.refuse(bias, "bias")
    if w.format is None or (b is not None and b.format is None):
        return n.opaque()
    return w, b


def _conv(n: Node) -> Record:
    found = _parameters(n)
    if isinstance(found, Opaque):
        return found
    weight, bias = found
    transposed = "transpose" in n.op or bool(n.args.get("transposed", False))
    axis = len(n.shape("input")) - len(weight.shape) + 1  # 0 for an unbatched input
    return Linear(
        n.label,
        n.x("input"),
        n.name,
        weight.tensor(),
        None if bias is None else bias.tensor(),
        out_dim=1 if transposed else 0,
        in_axis=axis,
        out_axis=axis,
        groups=n.args["groups"],
        uniform_taps=not transposed and _unpadded(n.args["padding"], weight.shape[2:]),
        geometry=None if transposed else _geometry(n, weight.shape[2:]),
    )


def _geometry(n: Node, kernel: tuple[int, ...]) -> Geometry | None:
    """How a convolution slides, where its padding is given in numbers."""
    rank = len(kernel)
    given = [n.args[key] for key in ("stride", "dilation", "padding")]
    if any(isinstance(g, str) for g in given):
        return None
    stride, dilation, padding = (tuple(g) * (rank if len(g) == 1 else 1) for g in map(_listed, given))
    return Geometry(kernel, stride, dilation, padding, padding)


def _listed(value: Any) -> list[int]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _unpadded(padding: Any, kernel: tuple[int, ...]) -> bool:
    if isinstance(padding, str):
        return padding == "valid" or all(k == 1 for k in kernel)
    return not any(padding if isinstance(padding, list | tuple) else [padding])


def _linear(n: Node) -> Record:
    found = _parameters(n)
    if isinstance(found, Opaque):
        return found
    weight, bias = found
    if len(weight.shape) != 2:
        return n.opaque()
    return Linear(
        n.label, n.x("input"), n.name, weight.tensor(), None if bias is None else bias.tensor(),
        out_dim=0, in_axis=-1, out_axis=-1,
    )  # fmt: skip


def _addmm(n: Node) -> Record:
    found = _parameters(n, "mat2", "self")
    if isinstance(found, Opaque) or n.constant("mat1") is not None:
        return n.opaque()
    weight, bias = found
    return Linear(
        n.label, n.x("mat1"), n.name, weight.tensor(), None if bias is None else bias.tensor(), out_dim=1, in_axis=1,
        out_axis=1, alpha=float(n.args["alpha"]), beta=float(n.args["beta"]),
    )  # fmt: skip


def _matmul(n: Node) -> Record:
    first, second = list(n.args)[:2]
    left, right = n.constant(first), n.constant(second)
    weight, key, x = (right, second, first) if left is None else (left, first, second)
    if weight is None or weight.format is None or len(weight.shape) != 2 or len(n.shape(x)) < 2:
        return n.opaque() if weight is not None else n.refuse(second, "right operand")
    axis = -1 if key == second else -2
    return Linear(
        n.label, n.x(x), n.name, weight.tensor(), None, out_dim=1 if key == second else 0, in_axis=axis, out_axis=axis,
        free_bias=False,
    )  # fmt: skip


def _embedding(n: Node) -> Record:
    weight = n.constant("weight")
    if weight is None or weight.format is None:
        return n.refuse("weight", "table")
    return Linear(
        n.label, n.x("indices"), n.name, weight.tensor(), None, out_dim=1, in_axis=-1, out_axis=-1, index_input=True,
    )  # fmt: skip


# ---------------------------------------------------------------------- scales


def _batch_norm(n: Node) -> Record:
    instance = n.op == "instance_norm"
    trains = bool(n.args.get("use_input_stats" if instance else "training", "with_update" in n.op))
    if n.args.get("running_mean") is None or n.args.get("running_var") is None:
        what = "each sample's own statistics" if instance else "the batch's statistics, in evaluation too"
        return n.opaque(Refusal(Reason.BATCH_STATISTICS, n.label, f"it normalises by {what}"), norm=True)
    if trains:
        return n.opaque(Refusal(Reason.TRAINING_MODE, n.label, "it is captured in training mode"), norm=True)
    parameters: list[np.ndarray | None] = []
    for key in ("running_mean", "running_var", "weight", "bias"):
        if n.args[key] is not None and n.constant(key) is None:
            return n.refuse(key, key, norm=True)
        c = n.constant(key)
        parameters.append(None if c is None else c.float64())
    mean, variance, gamma, beta = parameters
    assert mean is not None
    assert variance is not None
    name = n.lifter.norm_name(n.node, n.constant("running_mean"))
    epsilon = float(n.args["epsilon"] if "epsilon" in n.args else n.args["eps"])
    result = normalization_map(mean, variance, epsilon, gamma, beta)
    if isinstance(result, Broken):
        n.lifter.broken.append(f"{name}: {result.detail}")
        n.lifter.taken.discard(name)
        return n.opaque(Refusal(Reason.NOT_FINITE, name, result.detail), norm=True)
    out = _result(n)
    running = n.constant("running_mean")
    if out is None or running is None:
        return n.opaque(Refusal(Reason.BATCH_STATISTICS, n.label, "its batch statistics are read"), norm=True)
    rank = len(n.shape("input"))
    axis = rank - 2 if instance and rank == 2 else 1
    return Scale(
        name, n.x("input"), out, Affine.per_channel(*result, rank, axis), Kind.NORM, n.op,
        running.format or FORMAT_OF[torch.float32], channel_axis=axis, channels=len(mean), cost=2, epsilon=epsilon,
    )  # fmt: skip


def _result(n: Node) -> str | None:
    """The value that holds the normalised activation: the node itself, or the first item of its tuple."""
    if n.op not in TUPLED:
        return n.name
    items = list(n.node.users)
    if len(items) != 1 or op_name(items[0]) != "getitem" or items[0].args[1] != 0:
        return None
    return items[0].name


def _arithmetic(n: Node) -> Record:
    a, b = list(n.args)[:2]
    if n.op == "rsub":  # other - self
        a, b = b, a
    values = [_number(n, key) for key in (a, b)]
    if values[0] is values[1] or (n.op == "div" and (n.args.get("rounding_mode") or values[0] is not None)):
        return n.opaque()
    k = 0 if values[0] is not None else 1
    x, c = n.args[(a, b)[1 - k]], values[k]
    if not isinstance(x, fx.Node) or c is None or n.constant((a, b)[1 - k]) is not None:
        return n.opaque()
    value, result = x.meta["val"], n.node.meta["val"]
    if value.dtype != result.dtype or value.dtype not in FORMAT_OF or shape_of(x) != shape_of(n.node):
        return n.opaque()
    m = _constant_map(n, c, k, value.dim())
    if not (np.isfinite(m.scale).all() and np.isfinite(m.shift).all()):
        return n.opaque(Refusal(Reason.NOT_FINITE, n.label, "its constant is not finite"))
    kind = Kind.SCALE if n.op in ("mul", "div") else Kind.SHIFT
    op = {"add": "Add", "sub": "Sub", "rsub": "Sub", "mul": "Mul", "div": "Div"}[n.op]
    path, cls = path_of(n.node)
    module = path if any(word in cls.rpartition(".")[2].lower() for word in ("norm", "bn")) else None
    return Scale(n.label, x.name, n.name, m, kind, op, FORMAT_OF[value.dtype], module=module)


def _number(n: Node, key: str) -> np.ndarray | None:
    value = n.args[key]
    if isinstance(value, int | float) and not isinstance(value, bool):
        return np.array(value, np.float64)
    c = n.constant(key)
    return None if c is None or c.format is None else c.float64()


def _constant_map(n: Node, c: np.ndarray, position: int, rank: int) -> Affine:
    alpha = float(n.args.get("alpha", 1))
    with np.errstate(divide="ignore"):
        match n.op, position:
            case "mul", _:
                return Affine.of(c, 0.0, rank)
            case "div", _:
                return Affine.of(1 / c, 0.0, rank)
            case "add", 1:
                return Affine.of(1.0, alpha * c, rank)
            case "add", _:
                return Affine.of(alpha, c, rank)
            case _, 1:  # x - alpha * c
                return Affine.of(1.0, -alpha * c, rank)
            case _:  # c - alpha * x
                return Affine.of(-alpha, c, rank)


def _arithmetic_or_join(n: Node) -> Record | list[Record]:
    """Arithmetic with a constant, or a sum or product of two activations."""
    a, b = list(n.args.values())[:2]
    computed = all(isinstance(v, fx.Node) and n.lifter.constants.get(v) is None for v in (a, b))
    return sum_or_product(n) if computed and n.op in ("add", "sub", "mul") else _arithmetic(n)


LAYERS: dict[str, Callable[[Node], Record | list[Record]]] = {
    **dict.fromkeys(NORM_OPS, _batch_norm),
    "add": _arithmetic_or_join,
    "addmm": _addmm,
    "conv1d": _conv,
    "conv2d": _conv,
    "conv3d": _conv,
    "conv_transpose1d": _conv,
    "conv_transpose2d": _conv,
    "conv_transpose3d": _conv,
    "convolution": _conv,
    "div": _arithmetic,
    "embedding": _embedding,
    "linear": _linear,
    "matmul": _matmul,
    "mm": _matmul,
    "mul": _arithmetic_or_join,
    "rsub": _arithmetic,
    "sub": _arithmetic_or_join,
}
