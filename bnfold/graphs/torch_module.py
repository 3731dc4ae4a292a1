"""Modules behind the engine's port.

A module is analysed as an exported program, or as its fx trace where no input is known that it runs on. Its folds are
written into a copy of its own tree when that can say them (same class back), into the exported graph otherwise.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Mapping
from typing import Any

from torch import fx, nn
from torch.export import ExportedProgram

from ..folding import make_plan
from ..notes import Note
from ..ops import Opaque, Program, Scale
from ..planning import Bypass, Merge, Plan
from ..report import Reason, Refusal
from .torch_capture import capture
from .torch_graph import TorchGraph, train_note
from .torch_lift import Lifted, lift
from .torch_traced import UntraceableError, trace
from .torch_tree import Tree, modules_of
from .torch_trial import Inputs, eval_copy, recorded_calls


class ModuleGraph(TorchGraph):
    """A module comes back as its own class where its tree can say the folds, as a GraphModule otherwise."""

    def __init__(self, module: nn.Module, inputs: Inputs, keep_class: bool, *, share_parameters: bool = False):
        self._keep_class = keep_class
        self._inputs = inputs
        self._copy = eval_copy(module, share_parameters=share_parameters)
        self.notes = train_note(module)
        modules = modules_of(self._copy)
        super().__init__(capture(self._copy, self._inputs), modules)
        if any(isinstance(r, Opaque) and r.why and r.why.reason is Reason.NOT_EXECUTED for r in self.lift().records):
            called = frozenset(recorded_calls(self._copy, self._inputs))
            self.lifted = lift(self.ep, dataclasses.replace(modules, called=called))
        self.tree = Tree(self._copy, self.ep, self.lifted)
        self._in_tree = True

    def objections(self, plan: Plan) -> Mapping[int, Refusal]:
        """Folds that the module tree cannot say, where they should not cost the class.

        With `keep_class`, all of them; without, norms and merged branches are worth a graph, plain arithmetic is not.
        """
        if not self._in_tree:
            return {}
        unsaid = self.tree.cannot_say(plan)
        merges = any(isinstance(e, Merge) for e in plan.edits)
        if not self._keep_class and (merges or self._costs_norms(plan, unsaid)):
            return self._leave_tree()
        if not unsaid and plan.edits and not self.tree.holds(plan, self._inputs):
            if not self._keep_class:
                return self._leave_tree()
            return _all(plan, self.lifted.program)
        return unsaid

    def _costs_norms(self, plan: Plan, unsaid: Mapping[int, Refusal]) -> bool:
        """Whether norms stay that the plan folds, when all that the tree cannot say is left out."""
        records = self.lifted.program.records
        wanted = set(bypassed(plan))
        left_out = {i: _LEFT_OUT for i, r in enumerate(records) if isinstance(r, Scale) and i not in wanted}
        norms = {i for i in wanted if isinstance(r := records[i], Scale) and r.is_norm}
        while unsaid and not norms & unsaid.keys():
            left_out |= dict.fromkeys(unsaid, _LEFT_OUT)
            plan = make_plan(self.lifted.program, None, left_out)
            unsaid = self.tree.cannot_say(plan)
        return bool(norms & unsaid.keys()) or not norms <= set(bypassed(plan))

    def _leave_tree(self) -> Mapping[int, Refusal]:
        self._in_tree = False
        if any(m._forward_hooks or m._forward_pre_hooks for m in self._copy.modules()):
            self.notes = (*self.notes, "the model became a graph: what its hooks compute is in it, they are not called")
        return {}

    def note(self, plan: Plan) -> Note:
        """What `apply` changes in the module's tree, whose class must have been kept."""
        assert self._in_tree
        return self.tree.note(plan)

    def apply(self, plan: Plan) -> tuple[Any, int]:
        """The folded module, and the bytes added."""
        if self._in_tree:
            return self.tree.apply(plan, self._copy), 0
        ep, added = super().apply(plan)
        return as_module(ep), added


class TracedGraph:
    """A module that no input is known for: its fx trace says what folds, its tree takes the folds."""

    def __init__(self, module: nn.Module):
        self._copy = eval_copy(module)
        self._lifted: Lifted = lift(program := trace(self._copy), modules_of(self._copy))
        self.tree = Tree(self._copy, program, self._lifted)
        self.notes = (*train_note(module), "no input was found that the module runs on: its fx trace was folded")

    def lift(self) -> Program:
        """The trace as records."""
        return self._lifted.program

    def objections(self, plan: Plan) -> Mapping[int, Refusal]:
        """Folds that the module tree cannot say."""
        unsaid = self.tree.cannot_say(plan)
        if not unsaid and plan.edits and not self._traces_after(plan):
            unsaid = _all(plan, self._lifted.program)
        more = "; with example inputs the graph could be edited"
        return {i: dataclasses.replace(r, detail=r.detail + more) for i, r in unsaid.items()}

    def _traces_after(self, plan: Plan) -> bool:
        try:
            trace(self.tree.apply(plan, eval_copy(self._copy, share_parameters=True)))
        except UntraceableError:
            return False
        return True

    def note(self, plan: Plan) -> Note:
        """What `apply` changes in the module's tree."""
        return self.tree.note(plan)

    def apply(self, plan: Plan) -> tuple[Any, int]:
        """The folded module; a tree edit adds no bytes."""
        return self.tree.apply(plan, self._copy), 0


RELIES = "the module's own code relies on its norms: it fails or differs"
_LEFT_OUT = Refusal(Reason.NOT_EXPRESSIBLE, "", "")


def _all(plan: Plan, program: Program) -> dict[int, Refusal]:
    return {i: Refusal(Reason.NOT_EXPRESSIBLE, program.records[i].node, RELIES) for i in bypassed(plan)}


def bypassed(plan: Plan) -> list[int]:
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
