"""What is constant in an exported program, and its values: parameters, buffers, and what is computed from them alone.

Arithmetic on constants is carried out in float64, so that folding rounds once; casts to a narrower type round as they
do at run time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import fx
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx.node import map_arg

from ..norms import RUNNING_DEVIATION
from ..ops import Stored, Tensor
from ..report import Reason, Refusal
from ..rounding import BFLOAT16, FLOAT16, FLOAT32, FLOAT64, FloatFormat, round_product
from .torch_nodes import ProgramLike

FORMAT_OF: dict[torch.dtype, FloatFormat] = {
    torch.float32: FLOAT32,
    torch.float64: FLOAT64,
    torch.float16: FLOAT16,
    torch.bfloat16: BFLOAT16,
}
_MOVES = {"alias", "clone", "contiguous", "detach", "expand", "flatten", "permute", "reshape", "select", "slice",
          "squeeze", "t", "transpose", "unsqueeze", "view", "_unsafe_view", "cat", "stack", "repeat", "lift_fresh_copy",
          "narrow", "chunk", "split", "index_select"}  # fmt: skip
_CASTS = {"to", "_to_copy", "type_as"}
_ROOTS = {"rsqrt", "sqrt", "pow"}


@dataclass(frozen=True, slots=True, eq=False)
class Constant:
    """A value known before the model runs, in the graph's own dtype or, where it was computed, in float64.

    `rooted`: a square root went into it, the mark of running statistics spelled as arithmetic.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    load: Callable[[], Any]
    rooted: bool = False

    @property
    def format(self) -> FloatFormat | None:
        """The float format it is declared in, or None for other types."""
        return FORMAT_OF.get(self.dtype)

    def float64(self) -> np.ndarray:
        """Its values in float64, exactly."""
        return to_numpy(self.load().double())

    def tensor(self) -> Tensor:
        """The constant as the engine reads it. Computed values are rounded once to the declared type."""
        fmt = self.format
        assert fmt is not None

        def read() -> Stored:
            value = self.load()
            if value.dtype == torch.float64 and fmt is not FLOAT64:
                return fmt.pack(round_product(fmt, to_numpy(value)))
            return to_numpy(value.view(torch.int16)).view(np.uint16) if fmt is BFLOAT16 else to_numpy(value)

        return Tensor(self.name, self.shape, fmt, read)


def to_numpy(value: torch.Tensor) -> np.ndarray:
    """A contiguous array of a plain tensor, on the CPU and without history."""
    return value.detach().cpu().contiguous().numpy()


def from_stored(values: Stored, fmt: FloatFormat) -> torch.Tensor:
    """A tensor from values as stored (bfloat16 as bit patterns)."""
    contiguous = np.array(values, order="C", copy=True)
    if fmt is BFLOAT16:
        return torch.from_numpy(contiguous.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(contiguous)


class Constants:
    """Looks fx nodes up; remembers what it computed."""

    def __init__(self, ep: ProgramLike):
        self._known: dict[fx.Node, Constant | None] = {}
        changed = {s.target for s in ep.graph_signature.output_specs
                   if s.kind in (OutputKind.BUFFER_MUTATION, OutputKind.USER_INPUT_MUTATION)}  # fmt: skip
        specs = {s.arg.name: s for s in ep.graph_signature.input_specs if hasattr(s.arg, "name")}
        kinds = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)
        for node in ep.graph.nodes:
            if node.op != "placeholder":
                continue
            spec = specs.get(node.name)
            self._known[node] = None
            if spec is None or spec.kind not in kinds or spec.target is None or spec.target in changed:
                continue
            value = ep.state_dict.get(spec.target, ep.constants.get(spec.target))
            if isinstance(value, torch.Tensor):
                self._known[node] = _given(spec.target, value)

    def get(self, node: Any) -> Constant | None:
        """The node's value, or None when it depends on an input."""
        if not isinstance(node, fx.Node):
            return None
        if node not in self._known:
            self._known[node] = None
            self._known[node] = self._computed(node)
        return self._known[node]

    def why_not(self, node: Any, at: str, what: str) -> Refusal:
        """The reason a parameter is no constant."""
        producer = node.op if node.op != "call_function" else str(node.target)
        return Refusal(Reason.DYNAMIC_PARAMETER, at, f"its {what} is computed at run time by {producer} ({node.name})")

    def _computed(self, node: fx.Node) -> Constant | None:
        schema = getattr(node.target, "_schema", None)
        value = node.meta.get("val")
        if node.op != "call_function" or schema is None or not isinstance(value, torch.Tensor):
            return None
        if torch.Tag.nondeterministic_seeded in node.target.tags or schema.is_mutable:  # type: ignore[union-attr]
            return None
        shape = [n for n in value.shape if isinstance(n, int)]
        operands = [self.get(n) for n in node.all_input_nodes]
        if any(c is None for c in operands) or len(shape) != value.dim():
            return None
        name = schema.name.split("::")[1]
        rooted = name in _ROOTS or any(c is not None and c.rooted for c in operands)
        return Constant(node.name, value.dtype, tuple(shape), _once(lambda: self._run(node, name)), rooted)

    def _run(self, node: fx.Node, name: str) -> torch.Tensor:
        widen = name not in _MOVES

        def value(n: fx.Node) -> torch.Tensor:
            c = self.get(n)
            assert c is not None
            v = c.load()
            return v.double() if widen and v.is_floating_point() else v

        with torch.no_grad():
            args, kwargs = cast("Any", map_arg((node.args, dict(node.kwargs)), value))
            if name in _CASTS:
                return _cast(args[0], node.meta["val"].dtype)
            return node.target(*args, **kwargs)  # type: ignore[operator]


def _given(name: str, value: torch.Tensor) -> Constant:
    rooted = name.rpartition(".")[2] == RUNNING_DEVIATION
    return Constant(name, value.dtype, tuple(value.shape), lambda: value.detach(), rooted)


def _once(compute: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    kept: list[torch.Tensor] = []

    def load() -> torch.Tensor:
        if not kept:
            kept.append(compute())
        return kept[0]

    return load


def _cast(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A cast at run time: rounds to a narrower float type, keeps the digits when the type is float32 or wider."""
    fmt = FORMAT_OF.get(dtype)
    if fmt is None or not value.is_floating_point():
        return value.to(dtype)
    if fmt in (FLOAT32, FLOAT64):
        return value
    return torch.from_numpy(round_product(fmt, to_numpy(value)))
