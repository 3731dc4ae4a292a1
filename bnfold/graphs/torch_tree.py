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
from torch.export import ExportedProgram
from torch.nn.modules.batchnorm import _NormBase

from ..folding import Bypass, Plan, SetLinear, SetScale
from ..ops import Kind, Linear, Scale
from ..rounding import round_product
from .torch_constants import from_stored
from .torch_lift import Lifted, Modules, TorchSite, op_name, path_of

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


class Tree:
    """A private copy of the module, its exported program and what was lifted from it."""

    def __init__(self, module: nn.Module, ep: ExportedProgram, lifted: Lifted):
        self.module, self.ep, self.lifted = module, ep, lifted
        self.modules = dict(module.named_modules(remove_duplicate=False))
        self.targets = {s.arg.name: s.target for s in ep.graph_signature.input_specs if hasattr(s.arg, "name")}
        self.calls: dict[str, list[fx.Node]] = {}  # nodes inside each module call, by path (`#2`: second call)
        for node in ep.graph.nodes:
            for key, (path, _) in (node.meta.get("nn_module_stack") or {}).items():
                _, _, call = key.rpartition("@")
                self.calls.setdefault(f"{path}#{int(call) + 1}" if call.isdigit() else path, []).append(node)
        counts: dict[int, int] = {}
        for m in module.modules():
            for p in (*m._parameters.values(), *m._buffers.values()):
                if p is not None:
                    counts[id(p)] = counts.get(id(p), 0) + 1
        self.tied = {k for k, n in counts.items() if n > 1}
        self.replacements: dict[int, nn.Module] = {}

    # ------------------------------------------------------------------ what can be said

    def cannot_say(self, plan: Plan) -> dict[int, str]:
        """Scales whose fold has no expression in the tree, and why."""
        blocked: dict[int, str] = {}
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
            if not isinstance(problem, _Unsaid):
                continue
            scales = [edit.site] if isinstance(edit, Bypass) else plan.contributors(edit.site)
            for s in scales:
                blocked.setdefault(s, problem.why)
        return blocked

    def _layer(self, record: Linear, site: TorchSite, needs_bias: bool) -> nn.Module | _Unsaid:
        """The module that is the layer."""
        node = site.nodes[0]
        path, _ = path_of(node)
        module = self.modules.get(path)
        if len(site.nodes) != 1 or site.bias is None and not record.index_input or module is None:
            return _Unsaid(f"{record.node} is not a module of its own, called once")
        weight = node.args[site.weight]
        if not isinstance(weight, fx.Node) or self.targets.get(weight.name) != f"{path}.weight".lstrip("."):
            return _Unsaid(f"the weight of {record.node} is computed, not the module's own parameter")
        own = getattr(module, "weight", None)
        if len(weight.users) != 1 or id(own) in self.tied:
            return _Unsaid(f"the weight of {record.node} is used in more than one place")
        if f"{path}#2" in self.calls:
            return _Unsaid(f"{record.node} is called more than once")
        if not needs_bias:
            return module
        return self._bias(module, record, node, site, path)

    def _bias(self, module: nn.Module, record: Linear, node: fx.Node, site: TorchSite, path: str) -> nn.Module | _Unsaid:
        if "bias" not in module._parameters:
            return _Unsaid(f"{record.node} has no bias parameter to set")
        own = module._parameters["bias"]
        if own is not None:
            bias = node.args[site.bias] if site.bias is not None and site.bias < len(node.args) else None
            mine = isinstance(bias, fx.Node) and self.targets.get(bias.name) == f"{path}.bias".lstrip(".")
            if not mine or id(own) in self.tied or len(bias.users) != 1:  # type: ignore[union-attr]
                return _Unsaid(f"the bias of {record.node} is used in more than one place")
            return module
        if type(module).__module__.startswith("torch.nn.modules.") or self._honours_bias(module, record, node):
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
        if not isinstance(module, _NormBase) or not module.affine or module.running_mean is None:
            return _Unsaid(f"{record.node} is not a norm module with parameters of its own")
        own = (*module._parameters.values(), *module._buffers.values())
        if any(id(t) in self.tied for t in own) or f"{record.node}#2" in self.calls:
            return _Unsaid(f"{record.node} is used in more than one place")
        return module

    def _replacement(self, index: int, record: Scale, site: TorchSite, direction: str) -> nn.Module | _Unsaid:
        """What stands in the norm's place: Identity, or the rest of what its module did."""
        if index in self.replacements:
            return self.replacements[index]
        path = path_of(site.nodes[0])[0]
        module = self.modules.get(path)
        if module is None or not path or f"{path}#2" in self.calls or path_of(site.nodes[-1])[0] != path:
            return _Unsaid(f"{record.node} is not a module of its own, called once")
        if sum(m is module for m in self.modules.values()) > 1:
            return _Unsaid(f"{record.node} is registered in more than one place")
        if module._forward_hooks or module._forward_pre_hooks:
            return _Unsaid(f"{record.node} carries forward hooks, which would be lost with it")
        if direction == "forward" and _mutated(site.nodes[-1]):
            return _Unsaid(f"an in-place operation follows {record.node}")
        rest = self._rest(path, site)
        if rest is None or not self._equivalent(module, rest, record, site):
            return _Unsaid(f"{record.node} ({type(module).__name__}) does more than normalise")
        self.replacements[index] = rest
        return rest

    def _rest(self, path: str, site: TorchSite) -> nn.Module | None:
        """The children that the module's call ran besides the norm, in order; None when it did more itself."""
        names: list[str] = []
        for node in self.calls.get(path, []):
            if node in site.nodes or self.lifted.constants.get(node) is not None or op_name(node) == "getitem":
                continue
            inner = path_of(node)[0].split("#")[0]
            if inner == path:
                return None
            child = inner[len(path) + 1 :].split(".")[0]
            if not names or names[-1] != child:
                names.append(child)
        children = [self.modules[f"{path}.{n}"] for n in names]
        if not children:
            return nn.Identity()
        return children[0] if len(children) == 1 else nn.Sequential(*children)

    @staticmethod
    def _equivalent(module: nn.Module, rest: nn.Module, record: Scale, site: TorchSite) -> bool:
        """Whether the module alone computes `rest` of the norm's map, in float64 on random input."""
        if type(module).__module__.startswith("torch.nn.modules.") and type(rest) is nn.Identity:
            return True
        try:
            with torch.no_grad():
                x = _sample(next(n for n in site.nodes[0].all_input_nodes if n.name == record.input))
                want = copy.deepcopy(module).double()(x.clone())
                scaled = x * torch.from_numpy(record.map.scale.copy()) + torch.from_numpy(record.map.shift.copy())
                got = copy.deepcopy(rest).double()(scaled)
        except Exception:
            return False
        if not isinstance(want, torch.Tensor) or not isinstance(got, torch.Tensor) or want.shape != got.shape:
            return False
        return bool(((want - got).abs() <= _PROBE_TOLERANCE * (1e-30 + want.abs().max())).all())

    # ------------------------------------------------------------------ writing

    def apply(self, plan: Plan) -> nn.Module:
        """The copy, edited. The plan must have passed `cannot_say`."""
        for edit in plan.edits:
            record, site = self.lifted.program.records[edit.site], self.lifted.sites[edit.site]
            match edit:
                case SetLinear():
                    assert isinstance(record, Linear)
                    module = self.modules[path_of(site.nodes[0])[0]]
                    self._set(module, "weight", edit.new.weight, record.weight.format)
                    self._set(module, "bias", edit.new.bias, edit.new.bias_format)
                case SetScale():
                    assert isinstance(record, Scale)
                    self._set_norm(record, edit.map)
                case Bypass():
                    path = path_of(site.nodes[0])[0]
                    parent, _, name = path.rpartition(".")
                    owner = self.modules[parent] if parent else self.module
                    rest = self.replacements[edit.site]
                    rest.eval()
                    setattr(owner, name, rest) if not isinstance(owner, nn.Sequential | nn.ModuleList) else (
                        owner._modules.__setitem__(name, rest)
                    )
        return self.module

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

    def _set_norm(self, record: Scale, m: Any) -> None:
        module: Any = self.modules[record.node]
        vectors = m.vectors(record.channel_axis, record.channels)
        ones = np.ones(record.channels)
        values = {"weight": vectors[0] * np.sqrt(1 + module.eps), "bias": vectors[1],
                  "running_mean": 0 * ones, "running_var": ones}  # fmt: skip
        fmt = record.format
        for name, v in values.items():
            old = getattr(module, name)
            value = from_stored(fmt.pack(round_product(fmt, v)), fmt).to(device=old.device, dtype=old.dtype)
            setattr(module, name, nn.Parameter(value, old.requires_grad) if name in ("weight", "bias") else value)


def _sample(node: Any) -> torch.Tensor:
    """Random float64 input of the shape a node has in the graph; free sizes as they were traced."""
    value = node.meta["val"]
    sizes = [n if isinstance(n, int) else 2 for n in value.shape]
    if not value.is_floating_point():
        return torch.zeros(sizes, dtype=value.dtype)
    return torch.randn(sizes, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def _mutated(node: fx.Node) -> bool:
    """Whether an operation that was in place reads the node: then Identity would let it write into its input.

    The graph here is functional already; capture marks the nodes it made so.
    """
    return any(u.meta.get("was_in_place") or _mutated(u) for u in node.users if u.meta.get("was_in_place") or _passes(u))


def _passes(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    if schema is None or "dropout" in schema.name:
        return node.op == "call_function"
    return any(r.alias_info is not None for r in schema.returns)
