"""From an nn.Module to an ExportedProgram in which every value is what it says: eval mode, no mutation.

In-place operations (`relu_`, `add_`) become functional ones, because taking a norm out would otherwise let them write
into a value that others still read.
"""

from __future__ import annotations

import copy
import inspect
import io
from collections.abc import Mapping
from contextlib import redirect_stderr
from typing import Any

import torch
from torch import fx, nn
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import ExportGraphSignature
from torch.utils import _pytree as pytree

from ..errors import CaptureError, UsageError
from ..inputs import Free
from .torch_trial import Inputs, agrees, first_line, first_names, first_sample, outputs_of, quiet
from .torch_trial import eval_copy as eval_copy


def capture(module: nn.Module, inputs: Inputs, *, static: bool = False, free: Free | None = None) -> ExportedProgram:
    """Export a module in eval mode, which is not run itself, with a free batch dimension where the model allows it.

    `static` pins all dimensions to those of the inputs; those in `free` are to stay free like the batch.

    Raises CaptureError with the exporter's first line, UsageError when the inputs do not fit the module.
    """
    inputs = _in_order(module, inputs)
    batched = _batched(inputs)
    attempts: list[tuple[Inputs, Free | None]] = [(batched, free), (batched, {}), (inputs, None)]
    attempts = attempts[2:] if static else attempts[0 if free else 1 :]
    first: Exception | None = None
    for given, dynamic in attempts:
        try:
            trial = eval_copy(module, share_parameters=True)  # the exporter runs it, and resets its attributes
            shapes = None if dynamic is None else _dimensions(trial, given, dynamic)
            with quiet(), redirect_stderr(io.StringIO()), torch.no_grad():  # it prints the program where it fails
                ep = functional(without_regions(torch.export.export(trial, *given, dynamic_shapes=shapes)))
            ep.graph.eliminate_dead_code()  # sizes the exporter asked for and did not need
        except Exception as e:
            first = first or e
            continue
        _name_calls(ep, module)
        if dynamic is None or _holds_for_one(ep, module, inputs):
            return ep
    assert first is not None
    _check_runs(module, inputs)
    raise CaptureError(f"torch.export cannot capture {type(module).__name__}: {first_line(first)}") from first


def _holds_for_one(ep: ExportedProgram, module: nn.Module, inputs: Inputs) -> bool:
    """Whether a program traced with a larger batch does on a batch of one what the module does.

    Running a program changes the buffers it writes to: then a copy is run.
    """
    trial = copy.deepcopy(ep) if ep.graph_signature.buffers_to_mutate else ep
    return agrees(trial.module(), module, first_sample(inputs))


def _name_calls(ep: ExportedProgram, module: nn.Module) -> None:
    """Let a module that is registered under several names go by the first, its calls counted over all of them."""
    names = first_names(module)
    if all(path == name for path, name in names.items()):
        return
    calls: dict[str, list[str]] = {}
    for node in ep.graph.nodes:
        stack: dict[str, Any] = {}
        for key, (path, cls) in (node.meta.get("nn_module_stack") or {}).items():
            name = names.get(str(path), str(path))
            known = calls.setdefault(name, [])
            if key not in known:
                known.append(key)
            k = known.index(key)
            stack[f"{name}@{k}" if k else name] = name, cls
        if stack:
            node.meta["nn_module_stack"] = stack


def _check_runs(module: nn.Module, inputs: Inputs) -> None:
    """A module that does not run on the inputs is wrong usage, not a shortcoming of the exporter."""
    try:
        outputs_of(eval_copy(module, share_parameters=True), inputs)
    except Exception as e:
        shapes = ", ".join(str(tuple(t.shape)) for t in pytree.tree_leaves(inputs) if isinstance(t, torch.Tensor))
        raise UsageError(f"{type(module).__name__} does not run on inputs of shape {shapes}: {first_line(e)}") from e


def _in_order(module: nn.Module, inputs: Inputs) -> Inputs:
    """Keywords in the order of the module's parameters: who calls the program by position goes by that."""
    args, kwargs = inputs
    named = [n for n in inspect.signature(module.forward).parameters if n in kwargs]
    return args, {n: kwargs[n] for n in dict.fromkeys([*named, *kwargs])}


def _batched(inputs: Inputs) -> Inputs:
    """Inputs with a batch of 1 doubled: torch.export specialises sizes 0 and 1."""
    leaves = [t for t in pytree.tree_leaves(inputs) if isinstance(t, torch.Tensor) and t.dim() > 0]
    if not leaves or any(t.shape[0] != 1 for t in leaves):
        return inputs

    def double(t: Any) -> Any:
        return torch.cat([t, t]) if isinstance(t, torch.Tensor) and t.dim() > 0 else t

    return pytree.tree_map(double, inputs)


def _dimensions(module: nn.Module, inputs: Inputs, free: Free) -> Any:
    """What is left to the exporter to keep free, by the names of the module's parameters.

    That is dimension 0 of every tensor, and what `free` asks for.
    """
    bound = inspect.signature(module.forward).bind(*inputs[0], **inputs[1]).arguments

    def of(tensor: Any, asked: Mapping[int, str]) -> dict[int, Any] | None:
        if not isinstance(tensor, torch.Tensor) or not tensor.dim():
            return None
        leading = {0: Dim.AUTO} if tensor.shape[0] > 1 else {}
        return leading | {i: Dim.AUTO for i in asked if i < tensor.dim()} or None

    return {
        name: pytree.tree_map(lambda t, k=k, name=name: of(t, free.get(name) or free.get(str(k), {})), value)
        for k, (name, value) in enumerate(bound.items())
    }


# ---------------------------------------------------------------------- regions and mutation


def without_regions(ep: ExportedProgram) -> ExportedProgram:
    """The program with regions under another gradient mode, or without autocast, put in line; edits its graph.

    Inference does not ask for the first, and the second is what a program is captured under anyway.
    """
    _put_in_line(ep.graph_module)
    ep.graph_module.recompile()
    return ep


def _put_in_line(module: fx.GraphModule) -> None:
    graph = module.graph
    for node in list(graph.nodes):
        inner = _region(node)
        if inner is None:
            continue
        body: fx.GraphModule = getattr(module, str(inner.target))
        _put_in_line(body)
        if any(n.op == "get_attr" for n in body.graph.nodes):
            continue  # what stays nested in it has its body there
        operands = node.args[node.args.index(inner) + 1 :]
        inputs = [n for n in body.graph.nodes if n.op == "placeholder"]
        values = dict(zip(inputs, operands, strict=True))
        with graph.inserting_before(node):
            results = graph.graph_copy(body.graph, values)
        for item in list(node.users):
            item.replace_all_uses_with(results[item.args[1]])  # type: ignore[index]
            graph.erase_node(item)
        graph.erase_node(node)
        if not inner.users:
            graph.erase_node(inner)
            delattr(module, str(inner.target))


def _region(node: fx.Node) -> fx.Node | None:
    """The operand that is the body of a region that may be put in line."""
    position = {"wrap_with_set_grad_enabled": 1, "wrap_with_autocast": 4}.get(getattr(node.target, "__name__", ""))
    if node.op != "call_function" or position is None or (position == 4 and node.args[2]):
        return None
    plain = all(getattr(u.target, "__name__", "") == "getitem" for u in node.users)
    inner = node.args[position]
    return inner if plain and isinstance(inner, fx.Node) and inner.op == "get_attr" else None


def functional(ep: ExportedProgram) -> ExportedProgram:
    """The program without in-place operations; edits the graph it is given.

    Nodes that were in place are marked so in their meta; where the exporter had to rewrite the program, all are.
    """
    if not any(map(_mutates, ep.graph.nodes)):
        return ep
    if not make_functional(ep.graph):
        with quiet():
            ep = ep.run_decompositions({})
        for n in ep.graph.nodes:
            n.meta["was_in_place"] = True
        return ep
    name_outputs(ep.graph, ep.graph_signature)
    ep.graph_module.recompile()
    return ep


def make_functional(graph: fx.Graph) -> bool:
    """Let each in-place operation return its result instead; False where one writes into what others may hold."""
    order = {n: i for i, n in enumerate(graph.nodes)}
    for node in [n for n in graph.nodes if _mutates(n)]:
        twin = _functional_twin(node)
        if twin is None or not _owned(node, order):
            return False
        node.target = twin
        node.meta["was_in_place"] = True
        for user in [u for u in node.args[0].users if order[u] > order[node]]:
            user.replace_input_with(node.args[0], node)
    return True


def name_outputs(graph: fx.Graph, signature: ExportGraphSignature) -> None:
    """Let the signature name the values that the graph returns now."""
    results = next(n for n in graph.nodes if n.op == "output").args[0]
    for spec, result in zip(signature.output_specs, results, strict=True):  # type: ignore[arg-type]
        if isinstance(result, fx.Node) and hasattr(spec.arg, "name"):
            spec.arg.name = result.name


def _mutates(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return node.op == "call_function" and schema is not None and schema.is_mutable


def _functional_twin(node: fx.Node) -> Any | None:
    target = node.target
    name = target._schema.name.split("::")[1]  # type: ignore[union-attr]
    packet = getattr(torch.ops.aten, name[:-1], None) if name.endswith("_") else None
    twin = getattr(packet, target._overloadname, None) if packet is not None else None  # type: ignore[union-attr]
    if twin is None:
        return None
    same = [a.name for a in twin._schema.arguments] == [a.name for a in target._schema.arguments]  # type: ignore[union-attr]
    return twin if same else None


def _is_view(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    if node.op != "call_function" or schema is None:
        return True  # placeholders, getitems, calls we know nothing of: assume the worst
    if "dropout" in schema.name:
        return True  # in eval it returns its argument, which its schema does not say
    return any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)


def _owned(node: fx.Node, order: Mapping[fx.Node, int]) -> bool:
    """Whether the value mutated is this graph's own, and no view of it is read afterwards."""
    value = node.args[0]
    if not isinstance(value, fx.Node) or _is_view(value):
        return False
    return not any(_is_view(u) and _read_after(u, node, order) for u in value.users if u is not node)


def _read_after(view: fx.Node, node: fx.Node, order: Mapping[fx.Node, int]) -> bool:
    return any(order[u] > order[node] or (_is_view(u) and _read_after(u, node, order)) for u in view.users)
