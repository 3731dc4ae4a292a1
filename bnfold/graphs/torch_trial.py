"""Private copies of a module, and what one run of them can tell.

A module is Python: it may read attributes of its norms, keep its layers in plain lists too, branch on a size or a type.
Neither the exported program nor the module tree shows that; one run on the example inputs does. Its threshold is
coarse, because only gross differences are in question: exactness is the engine's part.
"""

from __future__ import annotations

import copy
import logging
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from ..errors import FLOAT_FIRST, UsageError

Inputs = tuple[tuple[Any, ...], dict[str, Any]]

# Where torch keeps the modules that compute on packed integers; those that only imitate it (qat) hold floats.
_QUANTIZED = re.compile(r"torch\.(ao\.)?nn\.(intrinsic\.)?quantized\b")

# Of a value, and of its output's range: above the rounding of the type, below a norm left out.
_GROSS = {torch.float64: (1e-7, 1e-9), torch.float16: (0.1, 2e-2), torch.bfloat16: (0.1, 2e-2)}
_GROSS_SINGLE = (1e-2, 1e-4)


def eval_copy(module: nn.Module, *, share_parameters: bool = False) -> nn.Module:
    """A deep copy in eval mode. Cached non-leaf tensors (the old weight_norm keeps one) are copied detached.

    `share_parameters` copies everything else, for a run that may change buffers and attributes.

    Raises UsageError for a module without weights that could be folded (`check_weights`).
    """
    check_weights(module)
    shared: dict[int, Any] = {id(p): p for p in module.parameters()} if share_parameters else {}
    try:
        return copy.deepcopy(module, shared | detached(module)).eval()
    except Exception as e:
        raise UsageError(f"{type(module).__name__} cannot be copied, so nothing can be folded: {first_line(e)}") from e


def detached(module: nn.Module) -> dict[int, Any]:
    """What takes the place of cached non-leaf tensors, which torch does not copy, in a deep copy: its memo."""
    values = [v for m in module.modules() for v in vars(m).values()]
    return {id(v): v.detach().clone() for v in values if isinstance(v, torch.Tensor) and not v.is_leaf}


def first_names(module: nn.Module) -> dict[str, str]:
    """Every path in the tree, and the first under which the same module is registered."""
    first: dict[int, str] = {}
    return {path: first.setdefault(id(m), path) for path, m in module.named_modules(remove_duplicate=False)}


def as_inputs(example_inputs: Any) -> Inputs:
    """Positional and keyword inputs from what a person passes: a tensor, a tuple, a list or a dict of keywords."""
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    if isinstance(example_inputs, tuple | list):
        return tuple(example_inputs), {}
    return (example_inputs,), {}


def first_sample(inputs: Inputs) -> Inputs:
    """The inputs cut to a batch of one: what is free in the graph may be a branch in Python."""
    return pytree.tree_map(lambda t: t[:1] if isinstance(t, torch.Tensor) and t.dim() > 0 else t, inputs)


def check_weights(module: nn.Module) -> None:
    """Raise UsageError where there are no weights to fold: lazy, on the meta device, or quantized."""
    for name, m in module.named_modules():
        kind = type(m).__name__
        where = f"{name} ({kind})" if name else kind
        if _QUANTIZED.match(type(m).__module__):  # its tensors are packed out of reach
            raise UsageError(f"{where} is quantized ({type(m).__module__}): {FLOAT_FIRST}")
        tensors = {k: t for k, t in (*m._parameters.items(), *m._buffers.items()) if t is not None}
        if isinstance(m, LazyModuleMixin) and any(is_lazy(t) for t in tensors.values()):
            raise UsageError(f"{where} has no weights yet: run a batch through it first")
        for key, tensor in tensors.items():
            check_values(f"{name}.{key}" if name else key, tensor)


def check_values(name: str, tensor: torch.Tensor) -> None:
    """Raise UsageError for a tensor on the meta device, which holds no values, and for a quantized one."""
    if tensor.is_meta:
        raise UsageError(f"{name} is on the meta device, a shape without values: load its weights, then save it")
    if tensor.is_quantized:
        kind = str(tensor.dtype).removeprefix("torch.")
        raise UsageError(f"{name} is quantized ({kind}): {FLOAT_FIRST}")


def outputs_of(module: nn.Module, inputs: Inputs) -> Any:
    """What the module returns on copies of the inputs; its buffers may change, random numbers repeat on each call."""
    args, kwargs = pytree.tree_map(lambda t: t.detach().clone() if isinstance(t, torch.Tensor) else t, inputs)
    state = torch.get_rng_state()
    try:
        with quiet(), torch.no_grad():
            return module(*args, **kwargs)
    finally:
        torch.set_rng_state(state)


def recorded_calls(module: nn.Module, inputs: Inputs) -> dict[str, list[Inputs]]:
    """What each module is called with in one run, by its first path; a copy is run.

    Raises UsageError when the run fails.
    """
    trial = eval_copy(module, share_parameters=True)
    calls: dict[str, list[Inputs]] = {}

    def watch(path: str) -> Any:
        def record(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            calls.setdefault(path, []).append((args, kwargs))

        return record

    for path, child in trial.named_modules():
        if path and not isinstance(child, torch.jit.ScriptModule):  # those take no hooks
            child.register_forward_pre_hook(watch(path), prepend=True, with_kwargs=True)
    try:
        outputs_of(trial, inputs)
    except Exception as e:
        raise UsageError(f"{type(module).__name__} does not run on the inputs: {first_line(e)}") from e
    return calls


def agrees(candidate: nn.Module, module: nn.Module, inputs: Inputs) -> bool:
    """Whether the candidate runs where the module does, and returns about the same. Changes neither's parameters."""
    try:
        want = outputs_of(eval_copy(module, share_parameters=True), inputs)
    except Exception:
        return True  # no example to go by
    try:
        got = outputs_of(candidate, inputs)
    except Exception:
        return False
    ours, theirs = pytree.tree_flatten(got), pytree.tree_flatten(want)
    return ours[1] == theirs[1] and all(_alike(a, b) for a, b in zip(ours[0], theirs[0], strict=True))


def _alike(got: Any, want: Any) -> bool:
    if not isinstance(got, torch.Tensor) or not isinstance(want, torch.Tensor):
        return type(got) is type(want)
    if got.shape != want.shape or got.dtype != want.dtype:
        return False
    if not want.is_floating_point() or want.numel() == 0:
        return True
    finite = torch.isfinite(want)
    if not torch.equal(finite, torch.isfinite(got)) or not finite.any():
        return not finite.any()
    value, range_ = _GROSS.get(want.dtype, _GROSS_SINGLE)
    a, b = got[finite].double(), want[finite].double()
    return bool(((a - b).abs() <= value * b.abs() + range_ * b.abs().max()).all())


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


def first_line(e: Exception) -> str:
    """An exception in one line."""
    lines = [ln.strip() for ln in str(e).splitlines() if ln.strip()]
    return f"{type(e).__name__}: {lines[0] if lines else ''}"[:300]
