"""Torch models behind the engine's port: modules, fx GraphModules, ExportedPrograms.

Everything is analysed as an exported program. A module's folds are written into a copy of its own tree when that can
say them (same class back), into the exported graph otherwise.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec, TensorArgument
from torch.fx.node import map_arg

from ..affine import Affine
from ..errors import UsageError
from ..folding import make_plan
from ..ops import Linear, Program, Scale, Stored
from ..planning import Bypass, Merge, Plan, SetLinear, SetScale
from ..report import Reason, Refusal
from ..rounding import FloatFormat, round_product
from .torch_capture import capture, functional, name_outputs
from .torch_constants import from_stored
from .torch_lift import Lifted, Modules, TorchSite, lift
from .torch_nodes import op_name
from .torch_tree import Tree, modules_of
from .torch_trial import as_inputs, eval_copy


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
        writer = _Writer(self.ep, self.lifted)
        for edit in plan.edits:
            record, site = self.lifted.program.records[edit.site], self.lifted.sites[edit.site]
            match edit:
                case SetLinear():
                    assert isinstance(record, Linear)
                    writer.set_linear(record, site, edit.new.weight, edit.new.bias, edit.new.bias_format)
                case SetScale():
                    assert isinstance(record, Scale)
                    writer.set_scale(record, site, edit.map)
                case Bypass():
                    assert isinstance(record, Scale)
                    writer.bypass(record, site)
                case Merge():
                    sites = self.lifted.sites
                    writer.merge(sites[edit.base], site, [sites[d] for d in edit.dropped])
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


class _Writer:
    """Carries out edits on an exported program: nodes, placeholders, signature and state together."""

    def __init__(self, ep: ExportedProgram, lifted: Lifted):
        self.ep, self.lifted = ep, lifted
        self.graph = ep.graph
        self.state: dict[str, Any] = dict(ep.state_dict)
        self.constants: dict[str, Any] = dict(ep.constants)
        self.specs = list(ep.graph_signature.input_specs)
        self.by_name = {n.name: n for n in self.graph.nodes}
        self.spec_of = {s.arg.name: s for s in self.specs if hasattr(s.arg, "name")}
        self.aliases: dict[int, int] = {}
        for t in self.state.values():
            self.aliases[t.data_ptr()] = self.aliases.get(t.data_ptr(), 0) + 1
        self.released: list[fx.Node] = []
        self.bytes_added = 0

    # ------------------------------------------------------------------ edits

    def set_linear(
        self, record: Linear, site: TorchSite, weight: Stored | None, bias: Stored | None, fmt: FloatFormat
    ) -> None:
        first, last = site.nodes[0], site.nodes[-1]
        if weight is not None:
            self._put(first, site.weight, from_stored(weight, record.weight.format), "weight")
        if bias is None:
            return
        if site.bias is not None:
            self._put(last, site.bias, from_stored(bias, fmt), "bias")
            if record.beta != 1:
                last.kwargs = {**last.kwargs, "beta": 1}
            return
        value = from_stored(bias, fmt)
        if record.out_axis == -2:
            value = value.reshape(-1, 1)
        constant = self._placeholder(value, f"{first.name}_bias")
        add = self._insert(first, torch.ops.aten.add.Tensor, (first, constant))
        first.replace_all_uses_with(add, delete_user_cb=lambda user: user is not add)

    def set_scale(self, record: Scale, site: TorchSite, m: Affine) -> None:
        """Write the map as `mul` and `add`, in the type the activation has."""
        fmt, last = record.format, site.nodes[-1]
        result = self._activation(record, site.nodes[0])
        steps = [(torch.ops.aten.mul.Tensor, m.scale, "scale")] if not m.no_scale else []
        steps += [(torch.ops.aten.add.Tensor, m.shift, "shift")] if not m.no_shift or not steps else []
        dtype, at = result.meta["val"].dtype, self._last_of(last)
        for target, values, what in steps:
            stored = from_stored(fmt.pack(round_product(fmt, values)), fmt)
            at = self._insert(at, target, (result, self._placeholder(stored, f"{last.name}_{what}")))
            result = at
        if result.meta["val"].dtype != dtype:
            result = self._insert(at, torch.ops.aten.to.dtype, (result, dtype))
        self._replace(record, site, result)

    def _insert(self, before: fx.Node, target: Any, args: tuple[Any, ...]) -> fx.Node:
        """A new call behind a node, with the node's place in the module tree."""
        with self.graph.inserting_after(before):
            node = self.graph.call_function(target, args)
        values = map_arg(args, lambda n: n.meta["val"])
        node.meta = {**before.meta, "val": target(*values)}
        return node

    def bypass(self, record: Scale, site: TorchSite) -> None:
        """Take the site's nodes out: what read the last reads what the first did."""
        self._replace(record, site, self._activation(record, site.nodes[0]))

    def merge(self, base: TorchSite, total: TorchSite, dropped: Iterable[TorchSite]) -> None:
        """Let the base layer stand for the sum: the sum and its other summands go."""
        node, gone = total.nodes[0], [n for site in dropped for n in reversed(site.nodes)]
        node.replace_all_uses_with(base.nodes[-1])
        for n in (node, *gone):
            self.released += [i for i in n.all_input_nodes if i not in gone]
            self.graph.erase_node(n)

    def _replace(self, record: Scale, site: TorchSite, value: fx.Node) -> None:
        last = self._last_of(site.nodes[-1])
        last.replace_all_uses_with(value)
        chain = [last, *[n for n in reversed(site.nodes) if n is not last]]
        for node in chain:
            self.released += [n for n in node.all_input_nodes if n is not value]
            self.graph.erase_node(node)
        self.released = [n for n in self.released if n not in chain]

    @staticmethod
    def _last_of(node: fx.Node) -> fx.Node:
        """The node that holds the result: an item of the tuple a decomposed norm returns."""
        users = list(node.users)
        return users[0] if len(users) == 1 and op_name(users[0]) == "getitem" else node

    def _activation(self, record: Scale, node: fx.Node) -> fx.Node:
        return next(n for n in node.all_input_nodes if self.lifted.constants.get(n) is None)

    # ------------------------------------------------------------------ constants

    def _put(self, node: fx.Node, k: int, value: torch.Tensor, what: str) -> None:
        """Make operand `k` of the node this constant: in place where the node alone reads the parameter."""
        old = node.args[k] if k < len(node.args) else None
        spec = self.spec_of.get(old.name) if isinstance(old, fx.Node) else None
        stored = self.state.get(spec.target) if spec is not None and spec.target is not None else None
        alone = isinstance(old, fx.Node) and len(old.users) == 1
        if spec is not None and stored is not None and alone and self._untied(stored) and _fits(value, stored):
            self.state[str(spec.target)] = _like(stored, value)
            return
        new = self._placeholder(value, self._origin(old) or f"{node.name}.{what}")
        node.args = (*node.args[:k], *[None] * (k - len(node.args)), new, *node.args[k + 1 :])
        if isinstance(old, fx.Node):
            self.released.append(old)
            self.bytes_added += value.nbytes if old.users and stored is not None else 0

    def _origin(self, node: Any) -> str | None:
        """The parameter that a constant operand is, or is made from alone."""
        while isinstance(node, fx.Node) and len(node.all_input_nodes) == 1:
            node = node.all_input_nodes[0]
        spec = self.spec_of.get(node.name) if isinstance(node, fx.Node) else None
        return spec.target if spec is not None else None

    def _untied(self, stored: torch.Tensor) -> bool:
        return self.aliases.get(stored.data_ptr(), 1) == 1

    def _placeholder(self, value: torch.Tensor, hint: str) -> fx.Node:
        """A new parameter: placeholder, signature entry and state under a fresh name."""
        taken = self.state.keys() | self.constants.keys()
        target, k = hint.replace(".", "_") + "_folded" if hint in taken else hint, 2
        base = target
        while target in taken or any(t.startswith(f"{target}.") for t in taken):
            target, k = f"{base}_{k}", k + 1
        before = next(n for n in self.graph.nodes if n.op != "placeholder" or self._is_user_input(n))
        with self.graph.inserting_before(before):
            node = self.graph.placeholder("p_" + target.replace(".", "_"))
        node.meta["val"] = self._fake(value)
        spec = InputSpec(InputKind.PARAMETER, TensorArgument(name=node.name), target)
        self.specs.insert([n.name for n in self.graph.nodes if n.op == "placeholder"].index(node.name), spec)
        self.spec_of[node.name] = spec
        self.state[target] = nn.Parameter(value, requires_grad=value.is_floating_point())
        return node

    def _is_user_input(self, node: fx.Node) -> bool:
        spec = self.spec_of.get(node.name)
        return node.op == "placeholder" and (spec is None or spec.kind is InputKind.USER_INPUT)

    def _fake(self, value: torch.Tensor) -> Any:
        for node in self.graph.nodes:
            mode = getattr(node.meta.get("val"), "fake_mode", None)
            if mode is not None:
                return mode.from_tensor(value, static_shapes=True)
        return value

    # ------------------------------------------------------------------ finishing

    def finish(self) -> ExportedProgram:
        """Remove constants that only edited nodes read, and state the program anew."""
        pending = list(self.released)
        owners: set[str] = set()
        while pending:
            node = pending.pop()
            if node.users or node not in self.graph.nodes:
                continue
            pending += node.all_input_nodes
            if node.op != "placeholder":
                self.graph.erase_node(node)
            elif not self._is_user_input(node):
                owners.add(str(self.spec_of[node.name].target).rpartition(".")[0])
                self._drop(node)
        counters = {f"{owner}.num_batches_tracked" for owner in owners}
        for node in [n for n in self.graph.nodes if n.op == "placeholder" and not n.users]:
            if node.name in self.spec_of and self.spec_of[node.name].target in counters:
                self._drop(node)
        for name in counters - {str(s.target) for s in self.specs}:
            self.state.pop(name, None)
        signature = copy.copy(self.ep.graph_signature)
        signature.input_specs = self.specs
        name_outputs(self.graph, signature)
        self.graph.lint()
        self.ep.graph_module.recompile()
        return ExportedProgram(
            root=self.ep.graph_module,
            graph=self.graph,
            graph_signature=signature,
            state_dict=self.state,
            range_constraints=self.ep.range_constraints,
            module_call_graph=self.ep.module_call_graph,
            example_inputs=self.ep.example_inputs,
            constants=self.constants,
            verifiers=[self.ep.verifier],
        )

    def _drop(self, node: fx.Node) -> None:
        spec = self.spec_of.pop(node.name)
        self.specs = [s for s in self.specs if s is not spec]
        if not any(s.target == spec.target for s in self.specs):
            self.state.pop(str(spec.target), None)
            self.constants.pop(str(spec.target), None)
        self.graph.erase_node(node)


def _fits(value: torch.Tensor, stored: torch.Tensor) -> bool:
    return stored.dtype == value.dtype and stored.shape == value.shape


def _like(old: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """The value as the kind of tensor that was there: parameter or buffer, on its device."""
    value = value.to(old.device)
    return nn.Parameter(value, old.requires_grad) if isinstance(old, nn.Parameter) else value
