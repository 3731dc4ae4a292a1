"""Folds written into the module's own tree: weights changed, a norm replaced by Identity or by what it carried.

A fold can be said in the tree when each layer it touches is one module, called once, whose weight is its own
parameter, and the norm is one module, called once. Whether the replacement really computes what the module did is
not deduced but tried, on the module alone, in float64.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import fx, nn
from torch.nn.modules.batchnorm import _NormBase

from ..affine import Affine
from ..notes import Note
from ..ops import Linear, Scale
from ..planning import Bypass, Merge, Plan, SetLinear, SetScale
from ..report import Reason, Refusal
from ..rounding import round_product
from .torch_constants import from_stored
from .torch_lift import Lifted, Modules, TorchSite
from .torch_nodes import SHAPE_READERS, ProgramLike, call_of, op_name, path_of
from .torch_trial import Inputs, agrees, eval_copy, first_names, first_sample

SILENT = {"getitem", *SHAPE_READERS}  # what a norm's module may do besides: nothing that computes values
_PROBE_TOLERANCE = 1e-9  # of the range, between two float64 evaluations of one layer


def modules_of(module: nn.Module) -> Modules:
    """Norms of the tree by path, and paths whose forward hooks could change values."""
    norms: dict[str, str] = {}
    hooked: set[str] = set()
    for path, m in module.named_modules():
        if isinstance(m, _NormBase) and path:
            norms[path] = type(m).__name__
        if m._forward_hooks or m._forward_pre_hooks:
            hooked.add(path)
    return Modules(norms, frozenset(hooked))


@dataclass(frozen=True, slots=True)
class _Unsaid:
    """Why an edit cannot be written into the tree."""

    why: str
    reason: Reason = Reason.NOT_EXPRESSIBLE


class Tree:
    """A private copy of the module, its exported program and what was lifted from it."""

    def __init__(self, module: nn.Module, ep: ProgramLike, lifted: Lifted):
        self.module, self.ep, self.lifted = module, ep, lifted
        self.modules = dict(module.named_modules(remove_duplicate=False))
        names = first_names(module)
        self.targets: dict[str, str] = {}  # placeholder -> the parameter it stands for, under its first name
        for spec in ep.graph_signature.input_specs:
            owner, dot, leaf = (spec.target or "").rpartition(".")
            self.targets[getattr(spec.arg, "name", "")] = f"{names.get(owner, owner)}{dot}{leaf}"
        self.calls: dict[str, list[fx.Node]] = {}  # nodes inside each module call, by path (`#2`: second call)
        for node in ep.graph.nodes:
            for key, (path, _) in (node.meta.get("nn_module_stack") or {}).items():
                self.calls.setdefault(call_of(key, path), []).append(node)
        counts: dict[int, int] = {}
        for m in module.modules():
            for p in (*m._parameters.values(), *m._buffers.values()):
                if p is not None:
                    counts[id(p)] = counts.get(id(p), 0) + 1
        self.tied = {k for k, n in counts.items() if n > 1}
        self.rests: dict[int, tuple[str, ...] | _Unsaid] = {}  # what replaces a norm, by record index

    # ------------------------------------------------------------------ what can be said

    def cannot_say(self, plan: Plan) -> dict[int, Refusal]:
        """Scales whose fold has no expression in the tree, and why."""
        blocked: dict[int, Refusal] = {}
        for edit in plan.edits:
            record, site = self.lifted.program.records[edit.site], self.lifted.sites[edit.site]
            match edit:
                case SetLinear():
                    assert isinstance(record, Linear)
                    problem = self._layer(record, site, edit.new.bias is not None)
                case SetScale():
                    assert isinstance(record, Scale)
                    problem = self._norm_parameters(record, site)
                case Bypass():
                    assert isinstance(record, Scale)
                    problem = self._replacement(edit.site, record, site, edit.direction)
                case Merge():
                    blocked[edit.site] = Refusal(
                        Reason.NOT_EXPRESSIBLE, record.node, "parallel branches become one layer"
                    )
                    continue
            if not isinstance(problem, _Unsaid):
                continue
            scales = [edit.site] if isinstance(edit, Bypass) else plan.contributors(edit.site)
            for s in scales:
                blocked.setdefault(s, Refusal(problem.reason, self.lifted.program.records[s].node, problem.why))
        return blocked

    def _layer(self, record: Linear, site: TorchSite, needs_bias: bool) -> nn.Module | _Unsaid:
        """The module that is the layer."""
        node = site.nodes[0]
        path, _ = path_of(node)
        module = self.modules.get(path)
        if f"{path.split('#')[0]}#2" in self.calls:
            return _shared(path.split("#")[0])
        if len(site.nodes) != 1 or (site.bias is None and not record.index_input) or module is None:
            return _Unsaid(f"{record.node} is not a module of its own, called once")
        weight = node.args[site.weight]
        own = getattr(module, "weight", None)
        if id(own) in self.tied or (isinstance(weight, fx.Node) and len(weight.users) != 1):
            return _shared(f"the weight of {record.node}")
        if not isinstance(weight, fx.Node) or self.targets.get(weight.name) != f"{path}.weight".lstrip("."):
            return _Unsaid(f"the weight of {record.node} is computed, not the module's own parameter")
        if not needs_bias:
            return module
        return self._bias(module, record, node, site, path)

    def _bias(
        self, module: nn.Module, record: Linear, node: fx.Node, site: TorchSite, path: str
    ) -> nn.Module | _Unsaid:
        if "bias" not in module._parameters:
            return _Unsaid(f"{record.node} has no bias parameter to set")
        own = module._parameters["bias"]
        if own is not None:
            bias = node.args[site.bias] if site.bias is not None and site.bias < len(node.args) else None
            mine = isinstance(bias, fx.Node) and self.targets.get(bias.name) == f"{path}.bias".lstrip(".")
            if not mine or id(own) in self.tied or len(bias.users) != 1:  # type: ignore[union-attr]
                return _shared(f"the bias of {record.node}")
            return module
        if _is_torchs_own(module) or self._honours_bias(module, record, node):
            return module
        return _Unsaid(f"{record.node} ({type(module).__name__}) ignores a bias")

    def _honours_bias(self, module: nn.Module, record: Linear, node: fx.Node) -> bool:
        """Whether a class of somebody's own adds a bias set on it, by trying."""
        trial = copy.deepcopy(module).double()
        bias = torch.arange(1, record.out_channels + 1, dtype=torch.float64)
        try:
            with torch.no_grad():
                x = _sample(node.args[0])
                before = trial(x)
                trial.bias = nn.Parameter(bias)
                moved = (trial(x) - before).movedim(record.out_axis, -1)
        except Exception:
            return False
        return bool(((moved - bias).abs() <= 1e-6 * (1 + before.abs().max())).all())

    def _norm_parameters(self, record: Scale, site: TorchSite) -> nn.Module | _Unsaid:
        module = self.modules.get(record.node)
        if not isinstance(module, _NormBase):
            return _Unsaid(f"{record.node} is not a norm module with parameters of its own")
        names = ("weight", "bias", "running_mean", "running_var")  # operands 1 to 4 of every op that is a norm
        operands = site.nodes[0].args[1:5]
        mine = len(operands) == len(names) and all(
            isinstance(node, fx.Node)
            and self.targets.get(node.name) == f"{record.node}.{name}"
            and len(node.users) == 1
            for node, name in zip(operands, names, strict=True)
        )
        if not mine:
            return _Unsaid(f"{record.node} is not a norm module with parameters of its own")
        if any(id(getattr(module, name)) in self.tied for name in names) or f"{record.node}#2" in self.calls:
            return _shared(record.node)
        return module

    def _replacement(self, index: int, record: Scale, site: TorchSite, direction: str) -> tuple[str, ...] | _Unsaid:
        """The children that stand in the norm's place, in order; none of them is an Identity."""
        if direction == "forward" and _overwritten(record, site):
            return _Unsaid(f"an in-place operation would write into what {record.node} reads")
        if index not in self.rests:
            self.rests[index] = self._rest(record, site)
        return self.rests[index]

    def _rest(self, record: Scale, site: TorchSite) -> tuple[str, ...] | _Unsaid:
        path = path_of(site.nodes[0])[0]
        module = self.modules.get(path)
        if module is None or not path or f"{path}#2" in self.calls or path_of(site.nodes[-1])[0] != path:
            return _Unsaid(f"{record.node} is not a module of its own, called once")
        names = self._children_run(path, site)
        if names is None or not self._equivalent(module, names, record, site):
            return _Unsaid(f"{record.node} ({type(module).__name__}) does more than normalise")
        return names

    def _children_run(self, path: str, site: TorchSite) -> tuple[str, ...] | None:
        """The children that the module's call ran besides the norm, in order; None when it did more itself."""
        names: list[str] = []
        for node in self.calls.get(path, []):
            if node in site.nodes or self.lifted.constants.get(node) is not None or op_name(node) in SILENT:
                continue
            inner = path_of(node)[0].split("#")[0]
            if inner == path:
                return None
            child = inner[len(path) + 1 :].split(".")[0]
            if not names or names[-1] != child:
                names.append(child)
        return tuple(names)

    @staticmethod
    def _equivalent(module: nn.Module, names: tuple[str, ...], record: Scale, site: TorchSite) -> bool:
        """Whether the module alone computes what stays of it on the norm's map, in float64 on random input."""
        if _is_torchs_own(module) and not names:
            return True
        try:
            with torch.no_grad():
                x = _sample(next(n for n in site.nodes[0].all_input_nodes if n.name == record.input))
                trial = copy.deepcopy(module).double()
                want = trial.forward(x.clone())
                scaled = x * torch.from_numpy(record.map.scale.copy()) + torch.from_numpy(record.map.shift.copy())
                got = stand_in(trial, names)(scaled)
        except Exception:
            return False
        if not isinstance(want, torch.Tensor) or not isinstance(got, torch.Tensor) or want.shape != got.shape:
            return False
        return bool(((want - got).abs() <= _PROBE_TOLERANCE * (1e-30 + want.abs().max())).all())

    def holds(self, plan: Plan, inputs: Inputs) -> bool:
        """Whether the edited module runs as before, on a batch of one too: Python may do what no graph shows."""
        for given in (inputs, first_sample(inputs)):
            if not agrees(self.apply(plan, eval_copy(self.module, share_parameters=True)), self.module, given):
                return False
        return True

    # ------------------------------------------------------------------ writing

    def apply(self, plan: Plan, module: nn.Module) -> nn.Module:
        """The module, a copy of this tree's, edited. The plan must have passed `cannot_say`."""
        modules = dict(module.named_modules(remove_duplicate=False))
        for edit in plan.edits:
            record, site = self.lifted.program.records[edit.site], self.lifted.sites[edit.site]
            path = path_of(site.nodes[0])[0]
            match edit:
                case SetLinear():
                    assert isinstance(record, Linear)
                    self._set(modules[path], "weight", edit.new.weight, record.weight.format)
                    self._set(modules[path], "bias", edit.new.bias, edit.new.bias_format)
                case SetScale():
                    assert isinstance(record, Scale)
                    self._set_norm(modules[record.node], record, edit.map)
                case Bypass():
                    names = self.rests[edit.site]
                    assert not isinstance(names, _Unsaid)
                    replace_module(modules, modules[path], stand_in(modules[path], names))
                case Merge():
                    raise AssertionError("a merge passed cannot_say")
        return module

    def note(self, plan: Plan) -> Note:
        """What `apply` changes in the tree besides values."""
        replaced: dict[str, tuple[str, ...]] = {}
        biases: list[str] = []
        for edit in plan.edits:
            path = path_of(self.lifted.sites[edit.site].nodes[0])[0]
            if isinstance(edit, Bypass):
                names = self.rests[edit.site]
                assert not isinstance(names, _Unsaid)
                replaced[path] = names
            elif isinstance(edit, SetLinear) and edit.new.bias is not None and self.modules[path].bias is None:
                biases.append(path)
        return Note(replaced, tuple(biases))

    @staticmethod
    def _set(module: nn.Module, name: str, values: Any, fmt: Any) -> None:
        if values is None:
            return
        old = module._parameters.get(name)
        like = old if old is not None else module._parameters["weight"]
        assert like is not None
        value = from_stored(values, fmt).to(like.device)
        if name == "bias":
            value = value.reshape(-1)
        setattr(module, name, nn.Parameter(value, requires_grad=like.requires_grad))

    @staticmethod
    def _set_norm(module: Any, record: Scale, m: Affine) -> None:
        vectors = m.vectors(record.channel_axis, record.channels)
        assert vectors is not None
        ones = np.ones(record.channels)
        values = {"weight": vectors[0] * np.sqrt(1 + module.eps), "bias": vectors[1],
                  "running_mean": 0 * ones, "running_var": ones}  # fmt: skip
        fmt = record.format
        for name, v in values.items():
            old = getattr(module, name)
            value = from_stored(fmt.pack(round_product(fmt, v)), fmt).to(device=old.device, dtype=old.dtype)
            setattr(module, name, nn.Parameter(value, old.requires_grad) if name in ("weight", "bias") else value)


def _shared(what: str) -> _Unsaid:
    return _Unsaid(f"{what} is used in more than one place", Reason.SHARED_WEIGHT)


def _is_torchs_own(module: nn.Module) -> bool:
    """Whether the module does what its class in torch does."""
    return type(module).__module__.startswith("torch.nn.modules.") and "forward" not in vars(module)


def stand_in(norm: nn.Module, names: tuple[str, ...]) -> nn.Module:
    """What the norm's module is without the norm, with the hooks that watch it."""
    children = [norm.get_submodule(n) for n in names]
    hooks = {k: v for k, v in vars(norm).items() if k.startswith(("_forward", "_backward")) and "hooks" in k and v}
    if len(children) == 1 and not hooks:
        return children[0]
    result = nn.Sequential(*children) if children else nn.Identity()
    vars(result).update(hooks)
    return result.eval()


def replace_module(modules: dict[str, nn.Module], old: nn.Module, new: nn.Module) -> None:
    """Put the new module wherever the old one is registered."""
    for path in [p for p, m in modules.items() if m is old]:
        parent, _, name = path.rpartition(".")
        modules[parent]._modules[name] = new


def _sample(node: Any) -> torch.Tensor:
    """Random float64 input of the shape a node has in the graph; free sizes as they were traced."""
    value = node.meta["val"]
    sizes = [n if isinstance(n, int) else 2 for n in value.shape]
    if not value.is_floating_point():
        return torch.zeros(sizes, dtype=value.dtype)
    return torch.randn(sizes, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def _overwritten(record: Scale, site: TorchSite) -> bool:
    """Whether an in-place operation writes into what the norm reads or returns: Identity would make them one.

    The graph here is functional already; capture marks the nodes that were not.
    """
    root = next(n for n in site.nodes[0].all_input_nodes if n.name == record.input)
    while _may_alias(root) and root.args and isinstance(root.args[0], fx.Node):
        root = root.args[0]
    pending, seen = [root, site.nodes[-1]], set[fx.Node]()
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        if any(u.meta.get("was_in_place") for u in node.users):
            return True
        pending += [u for u in node.users if _may_alias(u)]
    return False


def _may_alias(node: fx.Node) -> bool:
    """Whether the node may return its argument or a view of it."""
    schema = getattr(node.target, "_schema", None)
    if node.op != "call_function" or schema is None:
        return node.op == "call_function"
    return "dropout" in schema.name or any(r.alias_info is not None for r in schema.returns)
