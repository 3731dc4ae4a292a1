"""Outputs that a sigmoid or softmax ends: they are judged before the saturation as well.

Where such an output is near zero throughout (a detector on noise), its range is tiny and a rounding error of the
input, which is small beside *its* range, is large beside the output's. What the function can return is known: so the
output is judged against a range of 1 at least, and what went into the function against its own range. A module does
not show what went in; where the function has an inverse, it is computed from the output, as far as that tells.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

SATURATING = frozenset({"HardSigmoid", "Sigmoid", "Softmax", "Tanh"})
LEAST_RANGE = 1.0


@dataclass(frozen=True, slots=True)
class Saturated:
    """An output that the operator `op` computes from `before`."""

    output: str
    op: str
    before: str
    place: int = field(compare=False)  # among the outputs


def saturated_outputs(reference: Any, candidate: Any) -> tuple[Saturated, ...]:
    """Outputs that end in the same saturation, of a value of the same name, in two ONNX models."""
    ours, theirs = _found(reference), _found(candidate)
    return tuple(s for s in ours if s in theirs)


def invertible_outputs(candidate: Any) -> tuple[Saturated, ...]:
    """Outputs of an ONNX model that end in a saturation from which one can tell what went into it."""
    return tuple(s for s in _found(candidate) if s.op in INVERSES)


def _logit(p: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.log(p) - np.log1p(-p)


# The inverse, and between what it is looked at: beyond, a float32 output has too few digits to tell.
INVERSES: dict[str, tuple[Callable[[NDArray[np.float64]], NDArray[np.float64]], float, float]] = {
    "Sigmoid": (_logit, -30.0, 8.0),
    "Tanh": (np.arctanh, -4.0, 4.0),
}


def clipped(end: Saturated, before: NDArray[Any]) -> NDArray[Any]:
    """What went into a saturation, as far as it is looked at."""
    _, low, high = INVERSES[end.op]
    return np.clip(before, low, high)


@np.errstate(all="ignore")
def undone(end: Saturated, output: NDArray[Any]) -> NDArray[Any]:
    """What must have gone into a saturation, by its output."""
    inverse, low, high = INVERSES[end.op]
    return np.clip(inverse(output.astype(np.float64)), low, high).astype(output.dtype)


def _found(model: Any) -> list[Saturated]:
    proto = read(model)
    if proto is None:
        return []
    results = {o.name: k for k, o in enumerate(proto.graph.output)}
    ends = [n for n in proto.graph.node if n.op_type in SATURATING and n.domain in ("", "ai.onnx")]
    return [
        Saturated(n.output[0], n.op_type, n.input[0], results[n.output[0]])
        for n in ends
        if n.output[0] in results and n.input[0] not in results
    ]


def read(model: Any) -> Any:
    """The proto of a model given as proto, bytes or path, without external data; None when it cannot be read."""
    import onnx

    try:
        if isinstance(model, str | os.PathLike):
            return onnx.load(os.fspath(model), load_external_data=False)
        return onnx.load_from_string(model) if isinstance(model, bytes) else model
    except Exception:  # whoever runs the model says what is wrong with it
        return None
