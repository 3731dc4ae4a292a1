"""An exported program as the engine's records: which nodes are read, how they are named, what belongs together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.export.graph_signature import InputKind

from ..affine import Shape
from ..ops import Linear, Opaque, Program, Record, Scale, inputs_of, outputs_of
from ..report import Reason, Refusal
from .sites import Site, join
from .torch_constants import Constant, Constants
from .torch_layers import LAYERS
from .torch_layout import LAYOUT
from .torch_nodes import (
    NORM_OPS,
    SHAPE_OF_SECOND,
    SHAPE_READERS,
    TUPLED,
    UNKNOWN,
    ProgramLike,
    arguments_of,
    holds_tensors,
    op_name,
    path_of,
    shape_of,
)

TorchSite = Site[None, fx.Node]


@dataclass(slots=True, eq=False)
class Lifted:
    """A program and, record by record, the nodes it stands for."""

    program: Program
    sites: list[TorchSite]
    constants: Constants


@dataclass(frozen=True, slots=True)
class Modules:
    """What the module tree says beyond the graph: which paths are norms, which have hooks that see values."""

    norms: Mapping[str, str] = field(default_factory=dict)  # path -> class name
    hooked: frozenset[str] = frozenset()
    called: frozenset[str] = frozenset()  # norms that a run called, where that was asked


@dataclass(slots=True, eq=False)
class Node:
    """One node being lifted; arguments by their schema's names."""

    node: fx.Node
    op: str
    args: dict[str, Any]
    lifter: _Lifter

    @property
    def name(self) -> str:
        """The value the node computes."""
        return self.node.name

    @property
    def label(self) -> str:
        """What a person knows the node by."""
        return self.lifter.label(self.node)

    def constant(self, key: str) -> Constant | None:
        """The argument's value, where it is known before the model runs."""
        return self.lifter.constants.get(self.args.get(key))

    def shape(self, key: str) -> Shape:
        """The argument's shape."""
        return shape_of(self.args[key])

    def x(self, key: str) -> str:
        """The argument's name as a value."""
        return self.args[key].name

    def inner(self, what: str, shape: Shape) -> str:
        """A value inside the node, where it takes more than one record to say what it does."""
        name = f"{self.name}/{what}"
        self.lifter.shapes[name] = shape
        return name

    def items(self) -> dict[int, fx.Node] | None:
        """The items that are read of a result of several tensors, by index; None when it is read otherwise."""
        found: dict[int, fx.Node] = {}
        for user in self.node.users:
            k = user.args[1] if op_name(user) == "getitem" else None
            if not isinstance(k, int) or k in found:
                return None
            found[k] = user
        return found

    def opaque(self, why: Refusal | None = None, norm: bool = False) -> Opaque:
        """The node as one that nothing passes; `norm`: it is a normalization that must stay."""
        inputs = [n.name for n in self.node.all_input_nodes if self.lifter.reads(n, self.node)]
        items = [u.name for u in self.node.users] if self.op in TUPLED else []
        name = self.lifter.norm_name(self.node, self.constant("running_mean")) if norm else self.label
        return Opaque(name, tuple(inputs), (self.name, *items), self.op, why or self.lifter.hook(self.node), norm)

    def refuse(self, key: str, what: str, norm: bool = False) -> Opaque:
        """The node as opaque because an argument, in words, is no constant."""
        return self.opaque(self.lifter.constants.why_not(self.args[key], self.label, what), norm)


def lift(ep: ProgramLike, modules: Modules) -> Lifted:
    """Describe the program. Norms of the tree that it never calls are listed as `not-executed`."""
    return _Lifter(ep, modules, Constants(ep)).lift()


@dataclass(slots=True, eq=False)
class _Lifter:
    ep: ProgramLike
    modules: Modules
    constants: Constants
    broken: list[str] = field(default_factory=list)
    seen: set[str] = field(default_factory=lambda: set())
    taken: set[str] = field(default_factory=lambda: set())
    shapes: dict[str, Shape | None] = field(default_factory=dict)
    itemized: set[fx.Node] = field(default_factory=lambda: set())  # nodes whose items are values of their records

    def lift(self) -> Lifted:
        records: list[Record] = []
        sites: list[TorchSite] = []
        outputs: list[str] = []
        for node in self.ep.graph.nodes:
            if isinstance(node.meta.get("val"), torch.Tensor):
                self.shapes[node.name] = shape_of(node)
            if node.op == "output":
                outputs = [n.name for n in node.all_input_nodes]
            elif node.op == "call_function" and self.constants.get(node) is None:
                for record, site in self._records(node):
                    records.append(record)
                    sites.append(site)
            elif node.op == "get_attr":
                nested = self._nested(node)
                records += nested
                sites += [Site(None, (node,))] * len(nested)
        records, sites = join(records, sites, set(outputs))
        spelled = {r.module for r in records if isinstance(r, Scale) and r.is_norm and r.module}
        self.seen |= {path.split("#")[0] for path in spelled}
        missing = [p for p in self.modules.norms if p not in self.seen]
        for path in missing:
            if path in self.modules.called:
                why = Refusal(Reason.NOT_CAPTURED, path, "it is called, but no normalization comes of it")
            else:
                why = Refusal(Reason.NOT_EXECUTED, path, "evaluation never calls it")
            records.append(Opaque(path, (), (), self.modules.norms[path], why, norm=True))
            sites.append(Site(None, ()))
        user = [s.arg.name for s in self.ep.graph_signature.input_specs
                if s.kind is InputKind.USER_INPUT and hasattr(s.arg, "name")]  # fmt: skip
        program = Program(tuple(records), self.shapes, frozenset(user), tuple(outputs), {}, tuple(self.broken))
        return Lifted(program, sites, self.constants)

    def reads(self, operand: fx.Node, node: fx.Node) -> bool:
        """Whether the node reads the operand's values (not only its shape) at run time."""
        if self.constants.get(operand) is not None or not holds_tensors(operand):
            return False
        name = op_name(node)
        if name in SHAPE_READERS:
            return False
        return not (name in SHAPE_OF_SECOND and operand is not node.args[0])

    def hook(self, node: fx.Node) -> Refusal | None:
        path, _ = path_of(node)
        if path.split("#")[0] in self.modules.hooked and op_name(node) not in LIFT:
            return Refusal(Reason.HOOKED, self.label(node), f"a forward hook on {path} computes {op_name(node)}")
        return None

    def label(self, node: fx.Node) -> str:
        """The path of a layer's module, where the node is the layer; else the node's name."""
        path, cls = path_of(node)
        kind = cls.rpartition(".")[2].lower()
        own = cls.startswith("torch.nn.modules.") or any(w in kind for w in ("conv", "linear", "embedding", "norm"))
        return path if path and own and op_name(node) in LIFT else node.name

    def norm_name(self, node: fx.Node, statistics: Constant | None = None) -> str:
        """The norm's module path, or the node's name for one that is no module of its own. Unique.

        A functional call on the `statistics` of a norm module goes by that module.
        """
        path, cls = path_of(node)
        plain = path.split("#")[0]
        owner = statistics.name.rpartition(".")[0] if statistics is not None else ""
        if plain not in self.modules.norms and owner in self.modules.norms:
            path = plain = owner
        is_module = plain in self.modules.norms or any(w in cls.rpartition(".")[2].lower() for w in ("norm", "bn"))
        name, k = (path if plain and is_module else node.name), 2
        self.seen.add(plain)
        if name in self.taken:
            name = node.name
        base = name
        while name in self.taken:
            name, k = f"{base}#{k}", k + 1
        self.taken.add(name)
        return name

    def _records(self, node: fx.Node) -> list[tuple[Record, TorchSite]]:
        op = op_name(node)
        if op in SHAPE_READERS:
            return []
        if op == "getitem":
            source = node.args[0]
            if isinstance(source, fx.Node) and (op_name(source) in TUPLED or source in self.itemized):
                return []  # lifted with its tuple
            return [(Opaque(node.name, (source.name,), (node.name,), op), Site(None, (node,)))]  # type: ignore[union-attr]
        n = Node(node, op, arguments_of(node), self)
        rule = LIFT.get(op)
        if "val" not in node.meta or UNKNOWN in node.meta:
            why = Refusal(Reason.UNKNOWN_SHAPE, n.label, "the shape of its result is not known without example inputs")
            found = n.opaque(why, norm=op in NORM_OPS)
        else:
            found = rule(n) if rule is not None and holds_tensors(node) else n.opaque()
        records = found if isinstance(found, list) else [found]
        if not inputs_of(records[0]) and "val" in node.meta and not holds_tensors(node):
            return []  # arithmetic on sizes
        if not isinstance(records[-1], Opaque) and node.name not in outputs_of(records[-1]):
            self.itemized.add(node)
        return [(record, self._site(record, n)) for record in records]

    def _site(self, record: Record, n: Node) -> TorchSite:
        names = list(n.args)
        if isinstance(record, Linear):
            weight, bias = _WEIGHT_AND_BIAS.get(n.op, ("weight", "bias"))
            if n.op in ("mm", "matmul"):
                first, second = names[:2]
                weight, bias = (first if n.constant(first) else second), None
            return Site(None, (n.node,), names.index(weight), None if bias is None else names.index(bias))
        if isinstance(record, Scale) and not record.is_norm:
            other = n.args.get("other")
            k = 0 if isinstance(other, fx.Node) and n.constant("other") is None else 1
            return Site(None, (n.node,), k, constant=n.constant(names[k]) if k < len(names) else None)
        return Site(None, (n.node,))

    def _nested(self, node: fx.Node) -> list[Record]:
        """Norms inside a nested graph (a branch, a region under another gradient mode): seen, not entered."""
        module = getattr(self.ep.graph_module, str(node.target), None)
        if not isinstance(module, fx.GraphModule):
            return []
        outer = self._given_to(node, module)
        found: list[Record] = []
        for inner in module.graph.nodes:
            if inner.op == "call_function" and op_name(inner) in NORM_OPS:
                statistics = arguments_of(inner).get("running_mean")
                name = self.norm_name(inner, self.constants.get(outer.get(statistics)))
                why = Refusal(Reason.NOT_CAPTURED, node.name, "it stands in a nested graph")
                found.append(Opaque(name, (), (), op_name(inner), why, norm=True))
        return found

    @staticmethod
    def _given_to(node: fx.Node, module: fx.GraphModule) -> dict[Any, fx.Node]:
        """What the inputs of a nested graph are outside: the last operands of the call that runs it."""
        operands = [n for user in node.users for n in user.all_input_nodes if n.op != "get_attr"]
        inputs = [n for n in module.graph.nodes if n.op == "placeholder"]
        return dict(zip(inputs, operands[-len(inputs) :], strict=False)) if inputs else {}


_WEIGHT_AND_BIAS = {"addmm": ("mat2", "self"), "embedding": ("weight", None)}

LIFT: dict[str, Callable[[Node], Record | list[Record]]] = {**LAYERS, **LAYOUT}
