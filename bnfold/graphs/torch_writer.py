"""The engine's edits on an exported program: nodes, placeholders, signature and state together."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec, TensorArgument
from torch.fx.node import map_arg

from ..affine import Affine
from ..ops import Linear, Scale, Stored
from ..quantized import NewGrid
from ..rounding import FloatFormat, round_product
from .torch_capture import name_outputs
from .torch_constants import from_stored
from .torch_lift import Lifted, TorchSite
from .torch_nodes import op_name


class Writer:
    """Carries out edits on an exported program: nodes, placeholders, signature and state together."""

    def __init__(self, ep: ExportedProgram, lifted: Lifted):
        self.ep, self.lifted = ep, lifted
        self.graph = ep.graph
        self.state: dict[str, Any] = dict(ep.state_dict)
        self.constants: dict[str, Any] = dict(ep.constants)
        self.specs = list(ep.graph_signature.input_specs)
        self.by_name = {n.name: n for n in self.graph.nodes}
        self.spec_of = {s.arg.name: s for s in self.specs if hasattr(s.arg, "name")}
        self.released: list[fx.Node] = []
        self.bytes_added = 0

    # ------------------------------------------------------------------ edits

    def set_linear(
        self, record: Linear, site: TorchSite, weight: Stored | None, bias: Stored | None, fmt: FloatFormat
    ) -> None:
        """Give a linear layer its new parameters; a matmul without bias gets an add behind it."""
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

    def set_grid(self, record: Linear, site: TorchSite, new: NewGrid) -> None:
        """No torch graph is lifted with a weight of integers."""
        raise AssertionError(f"{record.node} has no grid")

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

    def bypass(self, record: Scale, site: TorchSite, direction: str) -> None:
        """Take the site's nodes out: what read the last reads what the first did. fx needs no names kept."""
        self._replace(record, site, self._activation(record, site.nodes[0]))

    def merge(self, base: TorchSite, total: TorchSite, dropped: Iterable[TorchSite]) -> None:
        """Let the base layer stand for the sum: the sum and its other summands go."""
        node, gone = total.nodes[0], [n for site in dropped for n in self._chain(site)]
        node.replace_all_uses_with(base.nodes[-1])
        for n in (node, *gone):
            self.released += [i for i in n.all_input_nodes if i not in gone]
            self.graph.erase_node(n)

    def _replace(self, record: Scale, site: TorchSite, value: fx.Node) -> None:
        chain = self._chain(site)
        chain[0].replace_all_uses_with(value)
        for node in chain:
            self.released += [n for n in node.all_input_nodes if n is not value]
            self.graph.erase_node(node)
        self.released = [n for n in self.released if n not in chain]

    def _chain(self, site: TorchSite) -> list[fx.Node]:
        """The site's nodes from the last, which holds its result, to the first."""
        last = self._last_of(site.nodes[-1])
        return [last, *[n for n in reversed(site.nodes) if n is not last]]

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
        if spec is not None and stored is not None and alone and _fits(value, stored):
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
