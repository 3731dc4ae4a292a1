"""Outputs that a sigmoid or softmax ends: they are judged before the saturation as well.

Where such an output is near zero throughout (a detector on noise), its range is tiny and a rounding error of the
input, which is small beside *its* range, is large beside the output's. What the function can return is known: so the
output is judged against a range of 1 at least, and what went into the function against its own range.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

SATURATING = frozenset({"HardSigmoid", "Sigmoid", "Softmax", "Tanh"})
LEAST_RANGE = 1.0


@dataclass(frozen=True, slots=True)
class Saturated:
    """An output that the operator `op` computes from `before`."""

    output: str
    op: str
    before: str


def saturated_outputs(reference: Any, candidate: Any) -> tuple[Saturated, ...]:
    """Outputs that end in the same saturation, of a value of the same name, in two ONNX models."""
    ours, theirs = _found(reference), _found(candidate)
    return tuple(s for s in ours if s in theirs)


def _found(model: Any) -> list[Saturated]:
    proto = read(model)
    if proto is None:
        return []
    results = {o.name for o in proto.graph.output}
    ends = [n for n in proto.graph.node if n.op_type in SATURATING and n.domain in ("", "ai.onnx")]
    return [
        Saturated(n.output[0], n.op_type, n.input[0])
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
