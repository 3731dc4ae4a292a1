"""Which torch graph stands for a model."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram

from ..errors import CaptureError, UsageError
from .port import Graph
from .torch_graph import ProgramGraph
from .torch_module import ModuleGraph, TracedGraph
from .torch_parts import PartsGraph
from .torch_traced import UntraceableError
from .torch_trial import as_inputs


def open_torch(model: Any, example_inputs: Any = None, *, keep_class: bool = False) -> Graph:
    """The graph of a module or an ExportedProgram. Raises UsageError for other kinds.

    A module without example inputs runs on inputs that are inferred; where none fits, its fx trace is taken. A module
    that torch.export cannot capture is taken in parts.
    """
    if isinstance(model, ExportedProgram):
        return ProgramGraph(model)
    if isinstance(model, torch.jit.ScriptModule):
        raise UsageError("a TorchScript module cannot be folded: pass the nn.Module it was made from")
    if not isinstance(model, nn.Module):
        raise UsageError(f"cannot fold a {type(model).__name__}: expected an nn.Module or an ExportedProgram")
    notes: tuple[str, ...] = ()
    if example_inputs is None:
        from ..inputs import infer_inputs

        try:
            inferred = infer_inputs(model)
        except UsageError as e:
            try:
                return TracedGraph(model)
            except UntraceableError as why:
                raise UsageError(f"{e}; nor can it be traced without ({why})") from e
        example_inputs, notes = inferred.inputs, inferred.notes
    inputs = as_inputs(example_inputs)
    graph: ModuleGraph | PartsGraph
    try:
        graph = ModuleGraph(model, inputs, keep_class)
    except CaptureError as failure:
        graph = PartsGraph(model, inputs, failure)
    graph.notes = (*notes, *graph.notes)
    return graph
