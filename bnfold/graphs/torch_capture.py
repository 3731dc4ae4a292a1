"""From an nn.Module to an ExportedProgram in which every value is what it says: eval mode, no mutation.

The module is copied first. In-place operations (`relu_`, `add_`) become functional ones, because taking a norm out
would otherwise let them write into a value that others still read.
"""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn
from torch.export import Dim, ExportedProgram
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from ..errors import CaptureError, UsageError

Inputs = tuple[tuple[Any, ...], dict[str, Any]]


def eval_copy(module: nn.Module) -> nn.Module:
    """A deep copy in eval mode. Cached non-leaf tensors (the old weight_norm keeps one) are copied detached.

    Raises UsageError for a lazy module that has not seen a batch yet: it has no weights to fold.
    """
    _check_materialised(module)
    memo: dict[int, Any] = {}
    for m in module.modules():
        for value in vars(m).values():
            if isinstance(value, torch.Tensor) and not value.is_leaf:
                memo[id(value)] = value.detach().clone()
    return copy.deepcopy(module, memo).eval()


def as_inputs(example_inputs: Any) -> Inputs:
    """Positional and keyword inputs from what a person passes: a tensor, a tuple, a list or a dict of keywords."""
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    if isinstance(example_inputs, tuple | list):
        return tuple(example_inputs), {}
    return (example_inputs,), {}


def capture(module: nn.Module, inputs: Inputs, *, static: bool = False) -> ExportedProgram:
    """Export a module that is a private copy in eval mode, with a free batch dimension where the model allows it.

    `static` pins all dimensions to those of the inputs.

    Raises CaptureError with the exporter's first line, UsageError when the inputs do not fit the module.
    """
    args, kwargs = _batched(inputs)
    attempts = [] if static else [(args, kwargs, True), (args, kwargs, False)]
    if static or args is not inputs[0]:
        attempts.append((*inputs, False))
    first: Exception | None = None
    for a, k, dynamic in attempts:
        try:
            with quiet(), torch.no_grad():
                ep = torch.export.export(module, a, k, dynamic_shapes=_free_batch((a, k)) if dynamic else None)
            ep = functional(ep)
            ep.graph.eliminate_dead_code()  # sizes the exporter asked for and did not need
            return ep
        except Exception as e:
            first = first or e
    assert first is not None
    _check_runs(module, inputs)
    raise CaptureError(f"torch.export cannot capture {type(module).__name__}: {_line(first)}") from first


def _check_runs(module: nn.Module, inputs: Inputs) -> None:
    """A module that does not run on the inputs is wrong usage, not a shortcoming of the exporter."""
    try:
        with torch.no_grad():
            module(*inputs[0], **inputs[1])
    except Exception as e:
        shapes = ", ".join(str(tuple(t.shape)) for t in pytree.tree_leaves(inputs) if isinstance(t, torch.Tensor))
        raise UsageError(f"{type(module).__name__} does not run on inputs of shape {shapes}: {_line(e)}") from e


def _check_materialised(module: nn.Module) -> None:
    for name, m in module.named_modules():
        if isinstance(m, LazyModuleMixin) and any(is_lazy(p) for p in (*m._parameters.values(), *m._buffers.values())):
            raise UsageError(f"{name or type(m).__name__} is an uninitialised lazy module: run a batch through it first")


def _batched(inputs: Inputs) -> Inputs:
    """Inputs with a batch of 1 doubled: torch.export specialises sizes 0 and 1."""
    leaves = [t for t in pytree.tree_leaves(inputs) if isinstance(t, torch.Tensor) and t.dim() > 0]
    if not leaves or any(t.shape[0] != 1 for t in leaves):
        return inputs

    def double(t: Any) -> Any:
        return torch.cat([t, t]) if isinstance(t, torch.Tensor) and t.dim() > 0 else t

    return pytree.tree_map(double, inputs)


def _free_batch(inputs: Inputs) -> Any:
    """Dimension 0 of every tensor left to the exporter to keep free."""
    args, kwargs = pytree.tree_map(
        lambda t: {0: Dim.AUTO} if isinstance(t, torch.Tensor) and t.dim() > 0 and t.shape[0] > 1 else None, inputs
    )
    return kwargs if not args else (*args, *kwargs.values())


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the exporter's progress and solver chatter: what matters comes back as errors."""
    loggers = [logging.getLogger(n) for n in ("torch.fx.experimental.symbolic_shapes", "torch.export", "torch.onnx")]
    levels = [lg.level for lg in loggers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for lg in loggers:
            lg.setLevel(logging.CRITICAL)
        try:
            yield
        finally:
            for lg, level in zip(loggers, levels, strict=True):
                lg.setLevel(level)


def _line(e: Exception) -> str:
    lines = [ln.strip() for ln in str(e).splitlines() if ln.strip()]
    return f"{type(e).__name__}: {lines[0] if lines else ''}"[:300]


# ---------------------------------------------------------------------- mutation


def functional(ep: ExportedProgram) -> ExportedProgram:
    """The program without in-place operations; edits the graph it is given."""
    order = {n: i for i, n in enumerate(ep.graph.nodes)}
    mutating = [n for n in ep.graph.nodes if _mutates(n)]
    if not mutating:
        return ep
    for node in mutating:
        twin = _functional_twin(node)
        if twin is None or not _owned(node, order):
            with quiet():
                return ep.run_decompositions({})
        node.target = twin
        node.meta["was_in_place"] = True
        for user in [u for u in node.args[0].users if order[u] > order[node]]:
            user.replace_input_with(node.args[0], node)
    ep.graph_module.recompile()
    return ep


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
