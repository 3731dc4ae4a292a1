"""Torch models behind the engine's port: modules, fx GraphModules, ExportedPrograms.

Everything is analysed as an exported program. A module's folds are written into a copy of its own tree when that can
say them (same class back), into the exported graph otherwise.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx, nn
from torch.export import ExportedProgram

from ..errors import UsageError
from ..folding import make_plan
from ..ops import Program, Scale
from ..planning import Bypass, Merge, Plan
from ..report import Reason, Refusal
from .sites import carry_out
from .torch_capture import capture, functional
from .torch_lift import Lifted, Modules, lift
from .torch_tree import Tree, modules_of
from .torch_trial import as_inputs, eval_copy
from .torch_writer import Writer


def open_torch(model: Any, example_inputs: Any = None, *, keep_class: bool = False) -> TorchGraph:
    """The graph of a module (which needs example inputs) or an ExportedProgram. Raises UsageError for other kinds."""
    if isinstance(model, ExportedProgram):
        return ProgramGraph(model)
    if isinstance(model, torch.jit.ScriptModule):
        raise UsageError("a TorchScript module cannot be folded: pass the nn.Module it was made from")
    if not isinstance(model, nn.Module):
        raise UsageError(f"cannot fold a {type(model).__name__}: expected an nn.Module or an ExportedProgram")
    if example_inputs is None:
        from ..inputs import infer_inputs

        example_inputs = infer_inputs(model).inputs
    return ModuleGraph(model, example_inputs, keep_class)


def program_graph(model: Any, example_inputs: Any = None, *, static: bool = False) -> TorchGraph:
    """The graph of a module or ExportedProgram whose edits always come back as an ExportedProgram."""
    if isinstance(model, ExportedProgram):
        return ProgramGraph(model)
    module = eval_copy(model)
    graph = TorchGraph(capture(module, as_inputs(example_inputs), static=static), modules_of(module))
    graph.notes = _train_note(model)
    return graph


def _train_note(module: nn.Module) -> tuple[str, ...]:
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
        super().__init__(functional(_copied(program)), Modules())


def _copied(program: ExportedProgram) -> ExportedProgram:
    """A deep copy with the nodes' own names: fx renames what is called like a builtin, `input` above all."""
    result = copy.deepcopy(program)
    for old, new in zip(program.graph.nodes, result.graph.nodes, strict=True):
        new.name = old.name
    return result


class ModuleGraph(TorchGraph):
    """A module comes back as its own class where its tree can say the folds, as a GraphModule otherwise."""

    def __init__(self, module: nn.Module, example_inputs: Any, keep_class: bool):
        self._keep_class = keep_class
        self._inputs = as_inputs(example_inputs)
        self._copy = eval_copy(module)
        self.notes = _train_note(module)
        super().__init__(capture(self._copy, self._inputs), modules_of(self._copy))
        self._tree = Tree(self._copy, self.ep, self.lifted)
        self._in_tree = True

    def objections(self, plan: Plan) -> Mapping[int, Refusal]:
        """Folds that the module tree cannot say, where they should not cost the class.

        With `keep_class`, all of them; without, plain arithmetic alone is no reason to return another class.
        """
        if not self._in_tree:
            return {}
        unsaid = self._tree.cannot_say(plan)
        if not self._keep_class and self._costs_norms(plan, unsaid):
            return self._leave_tree()
        if not unsaid and plan.edits and not self._tree.holds(plan, self._inputs):
            if not self._keep_class:
                return self._leave_tree()
            unsaid = dict.fromkeys(_bypassed(plan), "the module's own code relies on its norms: it fails or differs")
        records = self.lifted.program.records
        return {i: Refusal(Reason.NOT_EXPRESSIBLE, records[i].node, why) for i, why in unsaid.items()}

    def _costs_norms(self, plan: Plan, unsaid: Mapping[int, str]) -> bool:
        """Whether norms stay that the plan folds, when all that the tree cannot say is left out."""
        records = self.lifted.program.records
        wanted = set(_bypassed(plan))
        left_out = {i: _LEFT_OUT for i, r in enumerate(records) if isinstance(r, Scale) and i not in wanted}
        norms = {i for i in wanted if isinstance(r := records[i], Scale) and r.is_norm}
        while unsaid and not norms & unsaid.keys():
            left_out |= dict.fromkeys(unsaid, _LEFT_OUT)
            plan = make_plan(self.lifted.program, None, left_out)
            unsaid = self._tree.cannot_say(plan)
        return bool(norms & unsaid.keys()) or not norms <= set(_bypassed(plan))

    def _leave_tree(self) -> Mapping[int, Refusal]:
        self._in_tree = False
        if any(m._forward_hooks or m._forward_pre_hooks for m in self._copy.modules()):
            self.notes = (*self.notes, "the model became a graph: what its hooks compute is in it, they are not called")
        return {}

    def apply(self, plan: Plan) -> tuple[Any, int]:
        """The folded module, and the bytes added."""
        if self._in_tree:
            return self._tree.apply(plan, self._copy), 0
        ep, added = super().apply(plan)
        return as_module(ep), added


_LEFT_OUT = Refusal(Reason.NOT_EXPRESSIBLE, "", "")


def _bypassed(plan: Plan) -> list[int]:
    """Sites that the plan takes out."""
    alone = [e.site for e in plan.edits if isinstance(e, Bypass)]
    return alone + [d for e in plan.edits if isinstance(e, Merge) for d in e.dropped]


def as_module(ep: ExportedProgram) -> fx.GraphModule:
    """The program as a GraphModule on which `eval()` is allowed; it has no training mode to go to."""
    gm = ep.module()

    def train(self: fx.GraphModule, mode: bool = True) -> fx.GraphModule:
        if mode:
            raise NotImplementedError("a folded graph has no training mode")
        return self

    gm.train = types.MethodType(train, gm)
    gm.eval = types.MethodType(lambda self: self, gm)
    for m in gm.modules():
        m.training = False
    return gm
