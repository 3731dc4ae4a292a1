"""Exported programs behind the engine's port; edits always come back as an exported program."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.export import ExportedProgram

from ..inputs import Free
from ..ops import Program
from ..planning import Plan
from ..report import Refusal
from .sites import carry_out
from .torch_capture import capture, functional, without_regions
from .torch_lift import Lifted, Modules, lift
from .torch_tree import modules_of
from .torch_trial import as_inputs, eval_copy
from .torch_writer import Writer


def program_graph(
    model: Any, example_inputs: Any = None, *, static: bool = False, free: Free | None = None
) -> TorchGraph:
    """The graph of a module or ExportedProgram whose edits always come back as an ExportedProgram."""
    if isinstance(model, ExportedProgram):
        return ProgramGraph(model)
    module = eval_copy(model)
    graph = TorchGraph(capture(module, as_inputs(example_inputs), static=static, free=free), modules_of(module))
    graph.notes = train_note(model)
    return graph


def train_note(module: nn.Module) -> tuple[str, ...]:
    """A line for the report when the module was not in eval mode."""
    trains = any(m.training for m in module.modules())
    return ("the module was in train mode: a copy in eval mode was folded",) if trains else ()


class TorchGraph:
    """An exported program, lifted."""

    notes: tuple[str, ...] = ()

    def __init__(self, ep: ExportedProgram, modules: Modules):
        self.ep = ep
        self.lifted: Lifted = lift(ep, modules)

    def lift(self) -> Program:
        """The program as records."""
        return self.lifted.program

    def objections(self, plan: Plan) -> Mapping[int, Refusal]:
        """Scales whose fold the result must not contain; none for a graph edit."""
        return {}

    def apply(self, plan: Plan) -> tuple[Any, int]:
        """The edited model and the bytes added by copied weights."""
        writer = Writer(self.ep, self.lifted)
        carry_out(plan, self.lifted.program, self.lifted.sites, writer)
        return writer.finish(), writer.bytes_added


class ProgramGraph(TorchGraph):
    """An ExportedProgram comes back as one."""

    def __init__(self, program: ExportedProgram):
        super().__init__(functional(without_regions(_copied(program))), Modules())


def _copied(program: ExportedProgram) -> ExportedProgram:
    """A deep copy with the nodes' own names: fx renames what is called like a builtin, `input` above all."""
    result = copy.deepcopy(program)
    for old, new in zip(program.graph.nodes, result.graph.nodes, strict=True):
        new.name = old.name
    return result
