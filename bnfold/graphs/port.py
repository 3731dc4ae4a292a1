"""The port every native graph stands behind, and the choice of the one that fits a model."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from ..errors import InvalidFileError, UsageError
from ..ops import Program
from ..planning import Plan
from ..report import Refusal


class Graph(Protocol):
    """A native graph: described once, edited on a copy. `notes` are lines for the report."""

    notes: tuple[str, ...]

    def lift(self) -> Program:
        """The graph as records."""
        ...

    def objections(self, plan: Plan) -> Mapping[int, Refusal]:
        """Scales, by record index, whose fold this graph cannot or should not express; empty when all is well."""
        ...

    def apply(self, plan: Plan) -> tuple[Any, int]:
        """The edited copy, of the kind that was opened, and the bytes that copied weights added."""
        ...


def is_onnx(model: object) -> bool:
    """Whether the model is an onnx.ModelProto, without importing onnx for it."""
    return type(model).__module__.startswith("onnx") and type(model).__name__ == "ModelProto"


def is_path(model: object) -> bool:
    """Whether the model is named by a path."""
    return isinstance(model, str | os.PathLike)


def open_graph(
    model: Any,
    example_inputs: Any = None,
    *,
    freeze_initializers: bool = False,
    respect_inputs: bool = False,
    keep_class: bool = False,
    dry: bool = False,
) -> Graph:
    """The graph of a ModelProto, a path to one, an nn.Module or an ExportedProgram. Raises UsageError for others.

    `dry`: the graph is not going to be edited, so that a path's external data is read only as far as it is asked for.
    """
    if is_path(model) or is_onnx(model):
        from .onnx_graph import OnnxGraph

        source = (_opened if dry else load_onnx)(Path(model)) if is_path(model) else model
        return OnnxGraph(source, freeze_initializers=freeze_initializers, respect_inputs=respect_inputs)
    module_of_type = type(model).__module__
    if "torch" not in module_of_type and not _is_torch(model):
        raise UsageError(
            f"cannot fold a {type(model).__name__}: expected an nn.Module, an ExportedProgram, an onnx.ModelProto "
            "or a path to an .onnx file"
        )
    from .torch_open import open_torch

    return open_torch(model, example_inputs, keep_class=keep_class)


def _opened(path: Path) -> Any:
    from ..onnx_files import open_onnx
    from ..recognition import recognise

    return open_onnx(path) if recognise(path) == "onnx" else load_onnx(path)


def load_onnx(path: Path) -> Any:
    """Read an ONNX file with its external data. Raises InvalidFileError in one line."""
    from ..checkpoint import load_detailed

    loaded = load_detailed(path)
    if not is_onnx(loaded.model):
        raise InvalidFileError(f"{path}: expected an ONNX model, found {loaded.kind}")
    return loaded.model


def _is_torch(model: object) -> bool:
    return any(c.__module__.startswith("torch.") for c in type(model).__mro__)
