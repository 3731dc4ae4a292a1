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
from torch.export.graph_signature import InputKind, InputSpec, TensorArgument

from ..affine import Affine
from ..errors import UsageError
from ..folding import Bypass, Plan, SetLinear, SetScale
from ..ops import Kind, Linear, Program, Scale, Stored
from ..report import Reason, Refusal
from ..rounding import FloatFormat, round_product
from .torch_capture import as_inputs, capture, eval_copy, functional
from .torch_constants import from_stored
from .torch_lift import Lifted, Modules, TorchSite, lift, op_name
from .torch_tree import Tree, modules_of


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
        return writer.finish(), writer.bytes_added


class ProgramGraph(TorchGraph):
    """An ExportedProgram comes back as one."""

    def __init__(self, program: ExportedProgram):
        super().__init__(functional(copy.deepcopy(program)), Modules())


class ModuleGraph(TorchGraph):
    """A module comes back as its own class where its tree can say the folds, as a GraphModule otherwise."""

    def __init__(self, module: nn.Module, example_inputs: Any, keep_class: bool):
        self._keep_class = keep_class
        self._copy = eval_copy(module)
        self.notes = _train_note(module)
        super().__init__(capture(self._copy, as_inputs(example_inputs)), modules_of(self._copy))
        self._tree = Tree(self._copy, self.ep, self.lifted)
        self._in_tree = True

    def objections(self, plan: Plan) -> Mapping[int, Refusal]:
        """Folds that the module tree cannot say, where they should not cost the class.

        With `keep_class`, all of them; without, plain arithmetic alone is no reason to return another class.
        """
        records = self.lifted.program.records
        unsaid = self._tree.cannot_say(plan)
        norms = [i for i in unsaid if isinstance(r := records[i], Scale) and r.is_norm]
        self._in_tree = self._keep_class or not norms
        if not self._in_tree:
            return {}
        return {i: Refusal(Reason.NOT_EXPRESSIBLE, records[i].node, why) for i, why in unsaid.items()}

    def apply(self, plan: Plan) -> tuple[Any, int]:
        """The folded module, and the bytes added."""
        if self._in_tree:
            return self._tree.apply(plan), 0
        ep, added = super().apply(plan)
        return as_module(ep), added


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
        with self.graph.inserting_after(first):
            add = self.graph.call_function(torch.ops.aten.add.Tensor, (first, constant))
        add.meta = dict(first.meta)
        first.replace_all_uses_with(add, delete_user_cb=lambda user: user is not add)

    def set_scale(self, record: Scale, site: TorchSite, m: Affine) -> None:
        fmt = record.format
        first, last = site.nodes[0], site.nodes[-1]
        x = self._activation(record, first)
        shape = [1] * m.rank

        def parameter(values: Any, what: str, axis: int | None = None) -> fx.Node:
            stored = from_stored(fmt.pack(round_product(fmt, values)), fmt)
            return self._placeholder(stored, f"{last.name}_{what}")

        if record.kind is Kind.NORM:
            shape[record.channel_axis] = record.channels
        scale, shift = m.scale, m.shift
        result: fx.Node = x
        with self.graph.inserting_after(last):
            pass
        steps = [(torch.ops.aten.mul.Tensor, scale, "scale")] if not m.no_scale else []
        steps += [(torch.ops.aten.add.Tensor, shift, "shift")] if not m.no_shift or not steps else []
        meta, at = dict(last.meta), self._last_of(last)
        for target, values, what in steps:
            constant = parameter(values, what)
            with self.graph.inserting_after(at):
                at = self.graph.call_function(target, (result, constant))
            at.meta = dict(meta)
            result = at
        self._replace(record, site, result)

    def bypass(self, record: Scale, site: TorchSite) -> None:
        """Take the site's nodes out: what read the last reads what the first did."""
        self._replace(record, site, self._activation(record, site.nodes[0]))

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
        if isinstance(old, fx.Node) and stored is not None and len(old.users) == 1 and self._untied(stored):
            if stored.dtype == value.dtype and stored.shape == value.shape:
                assert spec is not None
                self.state[spec.target] = _like(stored, value)
                return
        hint = spec.target if spec is not None and spec.target else f"{node.name}.{what}"
        new = self._placeholder(value, hint)
        node.args = (*node.args[:k], *[None] * (k - len(node.args)), new, *node.args[k + 1 :])
        if isinstance(old, fx.Node):
            self.released.append(old)
            self.bytes_added += value.nbytes if old.users and stored is not None else 0

    def _untied(self, stored: torch.Tensor) -> bool:
        return self.aliases.get(stored.data_ptr(), 1) == 1

    def _placeholder(self, value: torch.Tensor, hint: str) -> fx.Node:
        """A new parameter: placeholder, signature entry and state under a fresh name."""
        target, k = hint.replace(".", "_") + "_folded" if hint in self.state else hint, 2
        base = target
        while target in self.state or any(t.startswith(f"{target}.") for t in self.state):
            target, k = f"{base}_{k}", k + 1
        before = next(n for n in self.graph.nodes if n.op != "placeholder" or self._is_user_input(n))
        with self.graph.inserting_before(before):
            node = self.graph.placeholder("p_" + target.replace(".", "_"))
        node.meta["val"] = self._fake(value)
        position = sum(1 for n in self.graph.nodes if n.op == "placeholder" and not self._is_user_input(n)) - 1
        spec = InputSpec(InputKind.PARAMETER, TensorArgument(name=node.name), target)
        self.specs.insert(position, spec)
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
        for node in [n for n in self.graph.nodes if n.op == "placeholder" and not n.users]:
            target = str(getattr(self.spec_of.get(node.name), "target", "") or "")
            owner, _, last = target.rpartition(".")
            if last == "num_batches_tracked" and owner in owners:
                self._drop(node)
        signature = copy.copy(self.ep.graph_signature)
        signature.input_specs = self.specs
        results = next(n for n in self.graph.nodes if n.op == "output").args[0]
        for spec, result in zip(signature.output_specs, results, strict=True):  # type: ignore[arg-type]
            if isinstance(result, fx.Node) and hasattr(spec.arg, "name"):
                spec.arg.name = result.name
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
            constants=self.ep.constants,
            verifiers=[self.ep.verifier],
        )

    def _drop(self, node: fx.Node) -> None:
        spec = self.spec_of.pop(node.name)
        self.specs = [s for s in self.specs if s is not spec]
        if not any(s.target == spec.target for s in self.specs):
            self.state.pop(str(spec.target), None)
        self.graph.erase_node(node)


def _like(old: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """The value as the kind of tensor that was there: parameter or buffer, on its device."""
    value = value.to(old.device)
    return nn.Parameter(value, old.requires_grad) if isinstance(old, nn.Parameter) else value
