"""A module that torch.export cannot capture as a whole: its largest children that can be are folded, each by itself.

One run of the module on the example inputs tells what each child is called with. From the top down, a child that holds
norms is captured; where that fails, its own children are tried. The parts stand in one program, and what lies between
them is a record that nothing passes: it is not captured, and the exporter's first line says why.

Folds are written into the module's tree alone: a graph in a child's place would hold for inputs of one size, would not
call its hooks, and the module around it, which comes back as its own class, would not show that.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from ..errors import BnfoldError, CaptureError
from ..notes import Note
from ..ops import Opaque, Program, Record, within
from ..planning import Plan
from ..report import Reason, Refusal
from .torch_graph import train_note
from .torch_module import RELIES, ModuleGraph, bypassed
from .torch_trial import Inputs, agrees, eval_copy, recorded_calls


@dataclass(slots=True, eq=False)
class Part:
    """A child that was captured: where it is, and at which record its own begin."""

    path: str
    graph: ModuleGraph
    first: int = 0

    def own(self, plan: Plan) -> Plan:
        """The edits inside the part."""
        return plan.part(self.first, len(self.graph.lift().records))


class PartsGraph:
    """A module is folded inside the children that can be captured. It comes back as its own class."""

    def __init__(self, module: nn.Module, inputs: Inputs, failure: CaptureError):
        self._copy = eval_copy(module)
        self._inputs, self._why = inputs, {"": str(failure)}
        self._calls = recorded_calls(self._copy, inputs)
        self._parts = list(self._captured("", self._copy, set()))
        self.notes: tuple[str, ...] = (*train_note(module), str(failure), _found(self._parts))

    def _captured(self, path: str, module: nn.Module, seen: set[int]) -> Iterator[Part]:
        for name, child in module.named_children():
            where = f"{path}.{name}" if path else name
            if id(child) in seen or isinstance(child, _NormBase) or not any(map(_is_norm, child.modules())):
                continue
            seen.add(id(child))
            part = self._part(where, child)
            if part is not None:
                yield part
            else:
                yield from self._captured(where, child, seen)

    def _part(self, path: str, child: nn.Module) -> Part | None:
        calls = self._calls.get(path)
        if not calls:
            return None
        try:
            return Part(path, ModuleGraph(child, calls[0], True, share_parameters=True))
        except BnfoldError as e:
            self._why[path] = str(e)
            return None

    # ------------------------------------------------------------------ the port

    def lift(self) -> Program:
        """The parts as one program, with what was not captured around each."""
        records: list[Record] = []
        shapes: dict[str, Any] = {}
        broken: list[str] = []
        for part in self._parts:
            own = part.graph.lift()
            why = Refusal(Reason.NOT_CAPTURED, part.path, self._reason(part.path.rpartition(".")[0]))
            given, taken = (tuple(f"{part.path}.{v}" for v in values) for values in (sorted(own.inputs), own.outputs))
            records.append(Opaque(part.path, (), given, "call", why))
            part.first = len(records)
            records += [within(r, part.path) for r in own.records]
            records.append(Opaque(part.path, taken, (), "call", why))
            shapes |= {f"{part.path}.{v}": s for v, s in own.shapes.items()}
            broken += [f"{part.path}.{b}" for b in own.broken]
        records += self._outside()
        return Program(tuple(records), shapes, frozenset(), (), {}, tuple(broken))

    def _outside(self) -> Iterator[Opaque]:
        """Norms in no part."""
        inside = [f"{part.path}." for part in self._parts]
        for path, module in self._copy.named_modules():
            if not isinstance(module, _NormBase) or path.startswith(tuple(inside)):
                continue
            if path in self._calls:
                why = Refusal(Reason.NOT_CAPTURED, path, self._reason(path.rpartition(".")[0]))
            else:
                why = Refusal(Reason.NOT_EXECUTED, path, "the example inputs never lead to it")
            yield Opaque(path, (), (), type(module).__name__, why, norm=True)

    def _reason(self, path: str) -> str:
        """Why the module at the path is in no part: the message for it, or for what it stands in."""
        while path not in self._why:
            path = path.rpartition(".")[0]
        return self._why[path]

    def objections(self, plan: Plan) -> Mapping[int, Refusal]:
        """What the parts object to; then what the module's own code does not bear, found by trying."""
        objections: dict[int, Refusal] = {}
        for part in self._parts:
            for i, why in part.graph.objections(part.own(plan)).items():
                objections[part.first + i] = dataclasses.replace(why, at=f"{part.path}.{why.at}")
        if objections or self._holds(plan, self._parts):
            return objections
        guilty = [part for part in self._parts if not self._holds(plan, [part])] or self._parts
        return {
            part.first + i: Refusal(Reason.NOT_EXPRESSIBLE, part.path, RELIES)
            for part in guilty
            for i in bypassed(part.own(plan))
        }

    def _holds(self, plan: Plan, parts: list[Part]) -> bool:
        """Whether the module runs as before with these parts edited."""
        edited = self._edited(plan, parts, eval_copy(self._copy, share_parameters=True))
        return agrees(edited, self._copy, self._inputs)

    def note(self, plan: Plan) -> Note:
        """What `apply` changes in the module's tree."""
        return Note.joined((part.path, part.graph.note(part.own(plan))) for part in self._parts)

    def apply(self, plan: Plan) -> tuple[nn.Module, int]:
        """The module with its parts folded, and the bytes of weights that the rest of it needs as they were."""
        before = [{id(p) for p in self._copy.get_submodule(part.path).parameters()} for part in self._parts]
        result = self._edited(plan, self._parts, self._copy)
        everywhere = {id(p): p for p in result.parameters()}
        given_up: set[int] = set()
        for part, old in zip(self._parts, before, strict=True):
            given_up |= old - {id(p) for p in result.get_submodule(part.path).parameters()}
        return result, sum(everywhere[k].nbytes for k in given_up & everywhere.keys())

    @staticmethod
    def _edited(plan: Plan, parts: list[Part], module: nn.Module) -> nn.Module:
        for part in parts:
            own = part.own(plan)
            if own.edits:
                part.graph.tree.apply(own, _own_child(module, part.path))
        return module


def _own_child(module: nn.Module, path: str) -> nn.Module:
    """The child at a path; a copy of it takes its place where others hold modules that are inside it."""
    child = module.get_submodule(path)
    inside = set(map(id, child.modules())) - {id(child)}
    places = list(module.named_modules(remove_duplicate=False))
    homes = [p for p, m in places if m is child]
    if not any(id(m) in inside for p, m in places if not p.startswith(tuple(f"{h}." for h in homes))):
        return child
    copied = eval_copy(child, share_parameters=True)
    for parent, _, name in (home.rpartition(".") for home in homes):
        module.get_submodule(parent)._modules[name] = copied
    return copied


def _is_norm(module: nn.Module) -> bool:
    return isinstance(module, _NormBase)


def _found(parts: list[Part]) -> str:
    names = ", ".join(p.path for p in parts[:5]) + (f" and {len(parts) - 5} more" if len(parts) > 5 else "")
    return f"folded inside what can be captured: {names}" if parts else "none of its children can be captured either"
