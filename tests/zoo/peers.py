"""How many norms two other tools leave in the same networks, counted in what they return. They may fail: that is said.

`onnx` is `torch.onnx.export` as it comes (dynamo=True, optimize=True): BatchNormalization nodes, and norms that it
wrote as arithmetic (their running variance is still read by some other node). `jit` is `torch.jit.trace` and
`torch.jit.freeze` on the module in evaluation mode: `aten::batch_norm` nodes. Freezing is all that is asked of it;
`torch.jit.optimize_for_inference` is not called. Neither result is run, so a peer that is wrong counts as one that is
right. Both work in float32, their usual type.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from typing import Any

import torch
from architectures import Architecture, first_line
from networks import ready
from torch import nn
from torch.utils import _pytree as pytree


def peers(found: Architecture) -> dict[str, Any]:
    """Norms left by each peer, or `failed:` and the first line of what it raised."""
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    row: dict[str, Any] = {"name": found.name}
    try:
        net = ready(found.name)
    except Exception as e:
        return row | {"onnx": f"failed: {first_line(e)}", "jit": f"failed: {first_line(e)}"}
    module = net.module.float()
    given = pytree.tree_map(lambda t: t.float(), net.inputs(2))
    inputs = given if isinstance(given, tuple) else (given,)
    return row | {"jit": _attempt(frozen, module, inputs), "onnx": _attempt(exported, module, inputs)}


def frozen(module: nn.Module, inputs: tuple[Any, ...]) -> int:
    """Norms left by `torch.jit.freeze`."""
    with torch.no_grad():
        graph = torch.jit.freeze(torch.jit.trace(module, inputs, check_trace=False, strict=False)).graph
    return len(graph.findAllNodes("aten::batch_norm", recurse=True))


def exported(module: nn.Module, inputs: tuple[Any, ...]) -> int:
    """Norms left by `torch.onnx.export`."""
    with torch.no_grad():
        program = torch.onnx.export(module, inputs, dynamo=True, verbose=False)
    assert program is not None
    graphs = [program.model.graph, *program.model.functions.values()]
    norms = [n for g in graphs for n in g.all_nodes() if n.op_type == "BatchNormalization"]
    variances = {n.inputs[4].name for n in norms if n.inputs[4] is not None}
    read = {v.name for g in graphs for n in g.all_nodes() for v in n.inputs if v is not None}
    spelled_out = {name for name in read - variances if name.endswith("running_var")}
    return len(norms) + len(spelled_out)


def _attempt(count: Callable[[nn.Module, tuple[Any, ...]], int], module: nn.Module, inputs: tuple[Any, ...]) -> Any:
    try:
        return count(module, inputs)
    except Exception as e:
        return f"failed: {first_line(e)}"
