"""ATen nodes of an exported program as the engine's records. The table at the foot says which op lifts to what."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from ..affine import Affine, Shape
from ..norms import Broken, normalization_map
from ..ops import Geometry, Kind, Linear, Opaque, Program, Record, Scale, inputs_of, outputs_of
from ..report import Reason, Refusal
from . import torch_layout
from .sites import Site, join
from .torch_constants import FORMAT_OF, Constant, Constants

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
        return self.lifter.constants.get(self.args.get(key))

    def shape(self, key: str) -> Shape:
        return shape_of(self.args[key])

    def x(self, key: str) -> str:
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
        inputs = [n.name for n in self.node.all_input_nodes if self.lifter.reads(n, self.node)]
        items = [u.name for u in self.node.users] if self.op in TUPLED else []
        name = self.lifter.norm_name(self.node, self.constant("running_mean")) if norm else self.label
        return Opaque(name, tuple(inputs), (self.name, *items), self.op, why or self.lifter.hook(self.node), norm)

    def refuse(self, key: str, what: str, norm: bool = False) -> Opaque:
        return self.opaque(self.lifter.constants.why_not(self.args[key], self.label, what), norm)


def lift(ep: ExportedProgram, modules: Modules) -> Lifted:
    """Describe the program. Norms of the tree that it never calls are listed as `not-executed`."""
    return _Lifter(ep, modules, Constants(ep)).lift()


def shape_of(node: fx.Node) -> Shape:
    """The node's shape; symbolic sizes as text, equal text meaning equal size."""
    return tuple(n if isinstance(n, int) else str(n) for n in node.meta["val"].shape)


def path_of(node: fx.Node) -> tuple[str, str]:
    """Path and class of the module call the node stands in, `#2` on the path for a second call."""
    stack = node.meta.get("nn_module_stack") or {}
    if not stack:
        return "", ""
    key, (path, cls) = list(stack.items())[-1]
    name = cls if isinstance(cls, str) else f"{cls.__module__}.{cls.__qualname__}"
    return call_of(key, path), name


def call_of(key: str, path: str) -> str:
    """The path of a module with `#2` for its second call, from its key in a node's module stack (`...@1`)."""
    _, at, call = key.rpartition("@")
    return f"{path}#{int(call) + 1}" if at and call.isdigit() else path


@dataclass(slots=True, eq=False)
class _Lifter:
    ep: ExportedProgram
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
        missing = [p for p in self.modules.norms if p not in self.seen]
        for path in missing:
            why = Refusal(Reason.NOT_EXECUTED, path, "evaluation never calls it")
            records.append(Opaque(path, (), (), self.modules.norms[path], why, norm=True))
            sites.append(Site(None, ()))
        user = [s.arg.name for s in self.ep.graph_signature.input_specs
                if s.kind is InputKind.USER_INPUT and hasattr(s.arg, "name")]  # fmt: skip
        program = Program(tuple(records), self.shapes, frozenset(user), tuple(outputs), {}, tuple(self.broken))
        return Lifted(program, sites, self.constants)

    def reads(self, operand: fx.Node, node: fx.Node) -> bool:
        """Whether the node reads the operand's values (not only its shape) at run time."""
        if self.constants.get(operand) is not None or not _holds_tensors(operand):
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
        n = Node(node, op, _arguments(node), self)
        rule = LIFT.get(op) if _holds_tensors(node) else None
        found = rule(n) if rule is not None else n.opaque()
        records = found if isinstance(found, list) else [found]
        if not inputs_of(records[0]) and not _holds_tensors(node):
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
            k = 0 if isinstance(n.args["other"], fx.Node) and n.constant("other") is None else 1
            constant = n.constant(names[k])
            return Site(None, (n.node,), k, constant=constant)
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
                statistics = _arguments(inner).get("running_mean")
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


def op_name(node: fx.Node) -> str:
    """The ATen operator without overload, or the callable's name."""
    schema = getattr(node.target, "_schema", None)
    return schema.name.split("::")[1] if schema is not None else getattr(node.target, "__name__", str(node.target))


def _holds_tensors(node: fx.Node) -> bool:
    value = node.meta.get("val")
    leaves = value if isinstance(value, list | tuple) else [value]
    return any(isinstance(v, torch.Tensor) for v in leaves)


def _arguments(node: fx.Node) -> dict[str, Any]:
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return {str(k): a for k, a in enumerate(node.args)} | dict(node.kwargs)
    given = {a.name: v for a, v in zip(schema.arguments, node.args, strict=False)}
    return {a.name: given.get(a.name, node.kwargs.get(a.name, a.default_value)) for a in schema.arguments}


# ---------------------------------------------------------------------- linear layers


def _parameters(n: Node, weight: str = "weight", bias: str = "bias") -> tuple[Constant, Constant | None] | Opaque:
    w, b = n.constant(weight), n.constant(bias)
    if w is None:
        return n.refuse(weight, "weight")
    if b is None and n.args.get(bias) is not None:
        return n.refuse(bias, "bias")
    if w.format is None or (b is not None and b.format is None):
        return n.opaque()
    return w, b


def _conv(n: Node) -> Record:
    found = _parameters(n)
    if isinstance(found, Opaque):
        return found
    weight, bias = found
    transposed = "transpose" in n.op or bool(n.args.get("transposed", False))
    axis = len(n.shape("input")) - len(weight.shape) + 1  # 0 for an unbatched input
    return Linear(
        n.label,
        n.x("input"),
        n.name,
        weight.tensor(),
        None if bias is None else bias.tensor(),
        out_dim=1 if transposed else 0,
        in_axis=axis,
        out_axis=axis,
        groups=n.args["groups"],
        uniform_taps=not transposed and _unpadded(n.args["padding"], weight.shape[2:]),
        geometry=None if transposed else _geometry(n, weight.shape[2:]),
    )


def _geometry(n: Node, kernel: tuple[int, ...]) -> Geometry | None:
    """How a convolution slides, where its padding is given in numbers."""
    rank = len(kernel)
    given = [n.args[key] for key in ("stride", "dilation", "padding")]
    if any(isinstance(g, str) for g in given):
        return None
    stride, dilation, padding = (tuple(g) * (rank if len(g) == 1 else 1) for g in map(_listed, given))
    return Geometry(kernel, stride, dilation, padding, padding)


def _listed(value: Any) -> list[int]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _unpadded(padding: Any, kernel: tuple[int, ...]) -> bool:
    if isinstance(padding, str):
        return padding == "valid" or all(k == 1 for k in kernel)
    return not any(padding if isinstance(padding, list | tuple) else [padding])


def _linear(n: Node) -> Record:
    found = _parameters(n)
    if isinstance(found, Opaque):
        return found
    weight, bias = found
    if len(weight.shape) != 2:
        return n.opaque()
    return Linear(
        n.label, n.x("input"), n.name, weight.tensor(), None if bias is None else bias.tensor(),
        out_dim=0, in_axis=-1, out_axis=-1,
    )  # fmt: skip


def _addmm(n: Node) -> Record:
    found = _parameters(n, "mat2", "self")
    if isinstance(found, Opaque) or n.constant("mat1") is not None:
        return n.opaque()
    weight, bias = found
    return Linear(
        n.label, n.x("mat1"), n.name, weight.tensor(), None if bias is None else bias.tensor(), out_dim=1, in_axis=1,
        out_axis=1, alpha=float(n.args["alpha"]), beta=float(n.args["beta"]),
    )  # fmt: skip


def _matmul(n: Node) -> Record:
    first, second = list(n.args)[:2]
    left, right = n.constant(first), n.constant(second)
    weight, key, x = (right, second, first) if left is None else (left, first, second)
    if weight is None or weight.format is None or len(weight.shape) != 2 or len(n.shape(x)) < 2:
        return n.opaque() if weight is not None else n.refuse(second, "right operand")
    axis = -1 if key == second else -2
    return Linear(
        n.label, n.x(x), n.name, weight.tensor(), None, out_dim=1 if key == second else 0, in_axis=axis, out_axis=axis,
        free_bias=False,
    )  # fmt: skip


def _embedding(n: Node) -> Record:
    weight = n.constant("weight")
    if weight is None or weight.format is None:
        return n.refuse("weight", "table")
    return Linear(
        n.label, n.x("indices"), n.name, weight.tensor(), None, out_dim=1, in_axis=-1, out_axis=-1, index_input=True,
    )  # fmt: skip


# ---------------------------------------------------------------------- scales


def _batch_norm(n: Node) -> Record:
    instance = n.op == "instance_norm"
    trains = bool(n.args.get("use_input_stats" if instance else "training", "with_update" in n.op))
    if n.args.get("running_mean") is None or n.args.get("running_var") is None:
        what = "each sample's own statistics" if instance else "the batch's statistics, in evaluation too"
        return n.opaque(Refusal(Reason.BATCH_STATISTICS, n.label, f"it normalises by {what}"), norm=True)
    if trains:
        return n.opaque(Refusal(Reason.TRAINING_MODE, n.label, "it is captured in training mode"), norm=True)
    parameters: list[np.ndarray | None] = []
    for key in ("running_mean", "running_var", "weight", "bias"):
        if n.args[key] is not None and n.constant(key) is None:
            return n.refuse(key, key, norm=True)
        c = n.constant(key)
        parameters.append(None if c is None else c.float64())
    mean, variance, gamma, beta = parameters
    assert mean is not None
    assert variance is not None
    name = n.lifter.norm_name(n.node, n.constant("running_mean"))
    epsilon = float(n.args["epsilon"] if "epsilon" in n.args else n.args["eps"])
    result = normalization_map(mean, variance, epsilon, gamma, beta)
    if isinstance(result, Broken):
        n.lifter.broken.append(f"{name}: {result.detail}")
        n.lifter.taken.discard(name)
        return n.opaque(Refusal(Reason.NOT_FINITE, name, result.detail), norm=True)
    out = _result(n)
    running = n.constant("running_mean")
    if out is None or running is None:
        return n.opaque(Refusal(Reason.BATCH_STATISTICS, n.label, "its batch statistics are read"), norm=True)
    rank = len(n.shape("input"))
    axis = rank - 2 if instance and rank == 2 else 1
    return Scale(
        name, n.x("input"), out, Affine.per_channel(*result, rank, axis), Kind.NORM, n.op,
        running.format or FORMAT_OF[torch.float32], channel_axis=axis, channels=len(mean), cost=2,
    )  # fmt: skip


def _result(n: Node) -> str | None:
    """The value that holds the normalised activation: the node itself, or the first item of its tuple."""
    if n.op not in TUPLED:
        return n.name
    items = list(n.node.users)
    if len(items) != 1 or op_name(items[0]) != "getitem" or items[0].args[1] != 0:
        return None
    return items[0].name


def _arithmetic(n: Node) -> Record:
    a, b = list(n.args)[:2]
    if n.op == "rsub":  # other - self
        a, b = b, a
    values = [_number(n, key) for key in (a, b)]
    if values[0] is values[1] or (n.op == "div" and (n.args.get("rounding_mode") or values[0] is not None)):
        return n.opaque()
    k = 0 if values[0] is not None else 1
    x, c = n.args[(a, b)[1 - k]], values[k]
    if not isinstance(x, fx.Node) or c is None or n.constant((a, b)[1 - k]) is not None:
        return n.opaque()
    value, result = x.meta["val"], n.node.meta["val"]
    if value.dtype != result.dtype or value.dtype not in FORMAT_OF or shape_of(x) != shape_of(n.node):
        return n.opaque()
    m = _constant_map(n, c, k, value.dim())
    if not (np.isfinite(m.scale).all() and np.isfinite(m.shift).all()):
        return n.opaque(Refusal(Reason.NOT_FINITE, n.label, "its constant is not finite"))
    kind = Kind.SCALE if n.op in ("mul", "div") else Kind.SHIFT
    op = {"add": "Add", "sub": "Sub", "rsub": "Sub", "mul": "Mul", "div": "Div"}[n.op]
    path, cls = path_of(n.node)
    module = path if "norm" in cls.lower() or "bn" in cls.rpartition(".")[2].lower() else None
    if module:
        n.lifter.seen.add(module.split("#")[0])
    return Scale(n.label, x.name, n.name, m, kind, op, FORMAT_OF[value.dtype], module=module)


def _number(n: Node, key: str) -> np.ndarray | None:
    value = n.args[key]
    if isinstance(value, int | float) and not isinstance(value, bool):
        return np.float64(value).reshape(())
    c = n.constant(key)
    return None if c is None or c.format is None else c.float64()


def _constant_map(n: Node, c: np.ndarray, position: int, rank: int) -> Affine:
    alpha = float(n.args.get("alpha", 1))
    with np.errstate(divide="ignore"):
        match n.op, position:
            case "mul", _:
                return Affine.of(c, 0.0, rank)
            case "div", _:
                return Affine.of(1 / c, 0.0, rank)
            case "add", 1:
                return Affine.of(1.0, alpha * c, rank)
            case "add", _:
                return Affine.of(alpha, c, rank)
            case _, 1:  # x - alpha * c
                return Affine.of(1.0, -alpha * c, rank)
            case _:  # c - alpha * x
                return Affine.of(-alpha, c, rank)


def _arithmetic_or_join(n: Node) -> Record | list[Record]:
    """Arithmetic with a constant, or a sum or product of two activations."""
    a, b = list(n.args.values())[:2]
    computed = all(isinstance(v, fx.Node) and n.lifter.constants.get(v) is None for v in (a, b))
    return torch_layout.sum_or_product(n) if computed and n.op in ("add", "mul") else _arithmetic(n)


TUPLED = {"_native_batch_norm_legit_no_training", "native_batch_norm", "_native_batch_norm_legit",
          "_native_batch_norm_legit_functional", "_batch_norm_with_update", "_batch_norm_with_update_functional",
          "_batch_norm_no_update", "cudnn_batch_norm", "miopen_batch_norm"}  # fmt: skip
NORM_OPS = {"batch_norm", "instance_norm", *TUPLED}
SHAPE_READERS = {"sym_size", "sym_numel", "sym_stride", "sym_storage_offset", "sym_is_contiguous",
                 "_assert_tensor_metadata", "zeros_like", "ones_like", "full_like", "empty_like", "rand_like",
                 "randn_like", "new_zeros", "new_ones", "new_full", "new_empty"}  # fmt: skip
SHAPE_OF_SECOND = {"reshape_as", "view_as", "expand_as"}
_WEIGHT_AND_BIAS = {"addmm": ("mat2", "self"), "embedding": ("weight", None)}

LIFT: dict[str, Callable[[Node], Record | list[Record]]] = {
    **dict.fromkeys(NORM_OPS, _batch_norm),
    "add": _arithmetic_or_join,
    "addmm": _addmm,
    "conv1d": _conv,
    "conv2d": _conv,
    "conv3d": _conv,
    "conv_transpose1d": _conv,
    "conv_transpose2d": _conv,
    "conv_transpose3d": _conv,
    "convolution": _conv,
    "div": _arithmetic,
    "embedding": _embedding,
    "linear": _linear,
    "matmul": _matmul,
    "mm": _matmul,
    "mul": _arithmetic_or_join,
    "rsub": _arithmetic,
    "sub": _arithmetic,
    **torch_layout.LAYOUT,
}
