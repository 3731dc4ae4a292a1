"""A module that torch.export cannot capture as a whole: its largest children that can be are folded, each by itself.

One run of the module on the example inputs tells what each child is called with. From the top down, a child that holds
norms is captured; where that fails, its own children are tried. The parts stand in one program, and what lies between
them is a record that nothing passes: it is not captured, and the exporter's first line says why.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from ..errors import BnfoldError, CaptureError, UsageError
from ..ops import Opaque, Program, Record, within
from ..planning import Plan
from ..report import Reason, Refusal
from .torch_graph import train_note
from .torch_module import RELIES, ModuleGraph, bypassed
from .torch_trial import Inputs, agrees, eval_copy, first_names, outputs_of


@dataclass(slots=True, eq=False)
class Part:
    """A child that was captured: where it is, what it is called with, and at which record its own begin."""

    path: str
    inputs: Inputs
    graph: ModuleGraph
    first: int = 0

    @property
    def count(self) -> int:
        """How many records it has."""
        return len(self.graph.lift().records)


class PartsGraph:
    """A module is folded inside the children that can be captured. It comes back as its own class."""

    def __init__(self, module: nn.Module, inputs: Inputs, keep_class: bool, failure: CaptureError):
        self._copy = eval_copy(module)
        self._inputs, self._keep_class, self._why = inputs, keep_class, {"": str(failure)}
        self._names = first_names(self._copy)
        self._calls = _recorded(self._copy, inputs)
        self._parts = list(self._captured("", self._copy, set()))
        self._result: tuple[Plan, nn.Module, int] | None = None
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
            graph = ModuleGraph(child, calls[0], self._keep_class, share_parameters=True)
        except BnfoldError as e:
            self._why[path] = str(e)
            return None
        if not self._keep_class and not all(agrees(graph.ep.module(), child, given) for given in calls[1:]):
            graph = ModuleGraph(child, calls[0], True, share_parameters=True)  # a tree runs on inputs of other sizes
        return Part(path, calls[0], graph)

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
            for i, why in part.graph.objections(plan.part(part.first, part.count)).items():
                objections[part.first + i] = dataclasses.replace(why, at=f"{part.path}.{why.at}")
        if objections:
            return objections
        self._result = self._assembled(plan, self._parts)
        if agrees(self._result[1], self._copy, self._inputs):
            return {}
        return self._blamed(plan)

    def _blamed(self, plan: Plan) -> dict[int, Refusal]:
        """Folds without which the module's own code runs as before: those of parts that it does not bear edited."""
        refused: dict[int, Refusal] = {}
        self._reopen()
        for part in self._parts:
            own = plan.part(part.first, part.count)
            said = dict(part.graph.objections(own))
            if not said and not agrees(self._assembled(plan, [part])[1], self._copy, self._inputs):
                said = {i: Refusal(Reason.NOT_EXPRESSIBLE, part.path, RELIES) for i in bypassed(own)}
            refused |= {part.first + i: why for i, why in said.items()}
        self._reopen()
        every = {i: Refusal(Reason.NOT_EXPRESSIBLE, "", RELIES) for i in bypassed(plan)}
        return refused or every

    def apply(self, plan: Plan) -> tuple[nn.Module, int]:
        """The module with its parts folded, and the bytes added."""
        assert self._result is not None
        assert self._result[0].edits is plan.edits, "the plan was not asked about"
        return self._result[1:]

    def _assembled(self, plan: Plan, parts: list[Part]) -> tuple[Plan, nn.Module, int]:
        result = eval_copy(self._copy, share_parameters=True)
        modules = dict(result.named_modules(remove_duplicate=False))
        added = 0
        for part in parts:
            own = plan.part(part.first, part.count)
            if not own.edits:
                continue
            old = modules[part.path]
            new, more = part.graph.apply(own)
            for path in [p for p, m in modules.items() if m is old]:
                parent, _, name = path.rpartition(".")
                modules[parent]._modules[name] = new
            held = {id(p) for p in new.parameters()}
            left = {id(p) for p in result.parameters()} - held
            added += more + sum(p.nbytes for p in old.parameters() if id(p) in left and id(p) not in held)
        return plan, result, added

    def _reopen(self) -> None:
        """Capture the parts again, to be edited in their trees: a plan can be carried out on a graph once."""
        for part in self._parts:
            child = self._copy.get_submodule(part.path)
            part.graph = ModuleGraph(child, part.inputs, True, share_parameters=True)


def _is_norm(module: nn.Module) -> bool:
    return isinstance(module, _NormBase)


def _found(parts: list[Part]) -> str:
    names = ", ".join(p.path for p in parts[:5]) + (f" and {len(parts) - 5} more" if len(parts) > 5 else "")
    return f"folded inside what can be captured: {names}" if parts else "none of its children can be captured either"


def _recorded(module: nn.Module, inputs: Inputs) -> dict[str, list[Inputs]]:
    """What each module is called with in one run, by its first path. Raises UsageError when the run fails."""
    calls: dict[str, list[Inputs]] = {}
    handles = []

    def watch(path: str) -> Any:
        def record(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            calls.setdefault(path, []).append((args, kwargs))

        return record

    for path, child in module.named_modules():
        if path:
            handles.append(child.register_forward_pre_hook(watch(path), prepend=True, with_kwargs=True))
    try:
        outputs_of(module, inputs)
    except Exception as e:
        raise UsageError(f"{type(module).__name__} does not run on the inputs") from e
    finally:
        for handle in handles:
            handle.remove()
    return calls
