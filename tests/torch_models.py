"""Small torch networks with adversarial statistics, and the one assertion that judges a fold of them.

`check` takes a function that builds the network, so that the reference is never the object that bnfold saw: a second
network, built from the same seed, converted to float64 and run. Nothing of bnfold computes what is right.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import bnfold

torch.set_num_threads(1)

EXACT = 1e-11  # of the range: float64 rounding through a few layers is 1e-15
# The algebra is judged in float64. In the other types each weight is off by half an ulp and the sums round anew, in
# an order that is the processor's own: what is judged there is that the type is right and the result is near.
LIMITS = {torch.float64: EXACT, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}


bn = nn.BatchNorm2d


def conv(inputs: int = 4, outputs: int = 8, kernel: int = 3, **options: Any) -> nn.Conv2d:
    """A convolution from 4 channels to 8, unless they say otherwise."""
    return nn.Conv2d(inputs, outputs, kernel, **options)


class Net(nn.Module):
    """A module from parts and a function `forward(self, *inputs)`."""

    def __init__(self, forward: Callable[..., Any], **parts: Any):
        super().__init__()
        for name, part in parts.items():
            if isinstance(part, torch.Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)
        self.run = forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(self, *args, **kwargs)


class Chain(nn.Sequential):
    """Named parts in a row: `Chain(conv=..., bn=...)`."""

    def __init__(self, **parts: nn.Module):
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)


def randomise(module: nn.Module, generator: torch.Generator) -> None:
    """Statistics as no trained network has them: variances 1e-12 and 1e6, gamma zero and negative, shift zero."""
    for m in module.modules():
        if not isinstance(m, _NormBase) and not type(m).__name__.startswith("Frozen"):
            continue
        odd = {"running_mean": (0.0,), "running_var": (1e-12, 1e6, 1.0), "weight": (2.0, -1.5, 0.0, 1e-3), "bias": ()}
        for name, first in odd.items():
            value = getattr(m, name, None)
            if value is None:
                continue
            drawn = torch.randn(value.shape, generator=generator, dtype=torch.float64)
            if name == "running_var":
                drawn = drawn.exp()
            if value.numel() > len(first):
                drawn[: len(first)] = torch.tensor(first, dtype=torch.float64)
            if name == "bias" and value.numel() > 1:
                drawn[1] = 0.0
            value.data.copy_(drawn.clamp(max=torch.finfo(value.dtype).max))


LUCK = 4  # how much worse than the original's own rounding, of another order of operations, that of the fold may be


@dataclass(frozen=True)
class Case:
    """A network, what it runs on, and what becomes of its norms."""

    id: str
    build: Callable[[], nn.Module]
    inputs: Callable[[], Any]
    folded: tuple[str, ...] = ()
    kept: Mapping[str, str] = field(default_factory=dict)  # norm -> its reasons, backward before forward; "*": any
    same_class: bool = True
    left: int | None = None  # norms that still run; None: one for each kept that was executed
    dtype: torch.dtype = torch.float32
    batches: bool = True  # dimension 0 is a batch dimension
    prepare: Callable[[Any], None] | None = None  # the last word on the network, after its statistics are drawn
    train: bool = False  # the network is left in training mode
    options: Mapping[str, Any] = field(default_factory=dict)  # for `fold`

    def make(self) -> nn.Module:
        """The network, the same every time."""
        seed = zlib.crc32(self.id.encode())
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            module = self.build()
        randomise(module, torch.Generator().manual_seed(seed))
        if self.prepare is not None:
            with torch.no_grad():
                self.prepare(module)
        return module if self.train else module.eval()

    def given(self) -> Any:
        """The example inputs, the same every time."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(zlib.crc32(self.id.encode()) + 1)
            return self.inputs()


def row(id: str, build: Any, inputs: Any, folded: str = "", kept: Mapping[str, str] | None = None, **other: Any) -> Any:  # noqa: A002
    """A line of a table for `pytest.mark.parametrize`."""
    return pytest.param(Case(id, build, inputs, tuple(folded.split()), kept or {}, **other), id=id)


def tensor(*shape: int, dtype: torch.dtype = torch.float32) -> Callable[[], torch.Tensor]:
    """Normal noise of a shape, drawn when it is called."""
    return lambda: torch.randn(shape).to(dtype)


def image(channels: int = 4, batch: int = 2, side: int = 7, dtype: torch.dtype = torch.float32) -> Callable[[], Any]:
    """A small image, odd-sized so that strides and borders show."""
    return tensor(batch, channels, side, side + 1, dtype=dtype)


# ---------------------------------------------------------------------- the assertion


def check(case: Case) -> bnfold.Report:
    """Fold in float64 and in the case's own type; see that structure, numbers and the argument are as they must be."""
    exact = replace(case, build=lambda: case.build().double(), dtype=torch.float64)
    _fold_and_judge(exact, lambda: in_double(case.given()))
    return _fold_and_judge(case, case.given)


def _fold_and_judge(case: Case, given: Callable[[], Any]) -> bnfold.Report:
    module, inputs = case.make(), given()
    before, data = snapshot(module), pytree.tree_map(_bytes, inputs)
    result = bnfold.fold(module, inputs, **case.options)
    assert snapshot(module) == before, "the argument was changed"
    assert pytree.tree_map(_bytes, inputs) == data, "the example inputs were changed"
    check_report(case, result.report)
    model = result.model
    if case.same_class:
        assert type(model) is type(module), type(model)
    else:
        assert isinstance(model, fx.GraphModule)
    assert not any(m.training for m in model.modules())
    original, reference = case.make().eval(), case.make().eval().double()
    executed = [n for n, why in case.kept.items() if "not-executed" not in why]
    left = len(executed) if case.left is None else case.left
    for x in (inputs, pytree.tree_map(_longer, inputs))[: 2 if case.batches else 1]:
        calls, got = watched(model, x)
        own, native = watched(original, x)
        want = run(reference, in_double(x))
        assert calls.norms + math.ceil(max(0, calls.arithmetic - own.arithmetic) / 2) == left, (calls, own)
        assert pytree.tree_map(_dtype, got) == pytree.tree_map(_dtype, native)
        compare(got, want, max(LIMITS[case.dtype], 0 if case.dtype is torch.float64 else LUCK * distance(native, want)))
    assert pytree.tree_map(_bytes, inputs) == data, "the folded model writes into its input"
    return result.report


def check_report(case: Case, report: bnfold.Report) -> None:
    """Every norm once; those that fold and those that stay are the ones named, with these reasons."""
    assert sorted(f.norm for f in report.folded if f.norm is not None) == sorted(case.folded), report
    found = {
        k.norm: "*" if case.kept.get(k.norm) == "*" else " ".join(r.reason for r in k.reasons) for k in report.kept
    }
    assert found == dict(case.kept), report
    assert all(k.reasons for k in report.kept)
    assert sorted(n.norm for n in report.norms) == sorted([*case.folded, *case.kept])


def run(model: Any, inputs: Any) -> Any:
    """Call the model the way `fold` takes its inputs: a tensor, a tuple, or a dict of keywords."""
    with torch.no_grad():
        if isinstance(inputs, dict):
            return model(**inputs)
        return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def compare(got: Any, want: Any, limit: float) -> None:
    """Same containers, same shapes, and no element off by more than `limit` of its tensor's range."""
    left, right = pytree.tree_flatten(got), pytree.tree_flatten(want)
    assert left[1] == right[1]
    for a, b in zip(left[0], right[0], strict=True):
        if not isinstance(b, torch.Tensor):
            assert a == b
            continue
        assert a.shape == b.shape
        if not b.is_floating_point():
            assert torch.equal(a, b)
            continue
        assert torch.isfinite(a).all()
        error = distance(a, b)
        assert error <= limit, f"error {error:.1e} of the range, allowed {limit:.0e}"


def distance(got: Any, want: Any) -> float:
    """The largest distance of an element, relative to the range of its tensor."""
    pairs = zip(pytree.tree_leaves(got), pytree.tree_leaves(want), strict=True)
    floats = [(a.detach().double(), b.detach().double()) for a, b in pairs if _is_float(b)]
    return max((float((a - b).abs().max() / b.abs().max().clamp_min(1e-30)) for a, b in floats), default=0.0)


def in_double(inputs: Any) -> Any:
    """The inputs with every float in float64."""
    return pytree.tree_map(lambda t: t.double() if _is_float(t) else t, inputs)


class Calls(TorchDispatchMode):
    """Counts what runs: normalizations, and arithmetic on whole activations."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = self.arithmetic = 0

    def __repr__(self) -> str:
        return f"{self.norms} norms, {self.arithmetic} arithmetic"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::").removesuffix("_")
        self.norms += "batch_norm" in name or "instance_norm" in name
        if name in ("add", "sub", "mul", "div", "rsub"):
            self.arithmetic += sum(isinstance(a, torch.Tensor) and a.dim() >= 2 and a.shape[0] > 1 for a in args[:1])
        return func(*args, **(kwargs or {}))


def watched(model: Any, inputs: Any) -> tuple[Calls, Any]:
    """What runs, and the outputs."""
    calls = Calls()
    with calls:
        outputs = run(model, inputs)
    return calls, outputs


HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_state_dict_hooks", "_load_state_dict_pre_hooks")


def snapshot(module: nn.Module) -> list[Any]:
    """All that a fold could change: attributes, flags, hooks, tensors byte by byte; and the global random state."""
    seen: list[Any] = [torch.get_rng_state().numpy().tobytes(), torch.is_grad_enabled(), torch.get_default_dtype()]
    for name, m in module.named_modules(remove_duplicate=False):
        seen.append((name, id(m), type(m), m.training, sorted(vars(m))))
        seen += [(h, tuple(getattr(m, h).items())) for h in HOOKS]
        tensors = {**m._parameters, **m._buffers, **{k: v for k, v in vars(m).items() if isinstance(v, torch.Tensor)}}
        seen += [(k, id(t), t.requires_grad, t.dtype, _bytes(t)) for k, t in tensors.items() if t is not None]
    return seen


def _bytes(t: Any) -> Any:
    if not isinstance(t, torch.Tensor):
        return t
    return t.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _dtype(t: Any) -> Any:
    return t.dtype if isinstance(t, torch.Tensor) else type(t)


def _is_float(t: Any) -> bool:
    return isinstance(t, torch.Tensor) and t.is_floating_point()


def _longer(t: Any) -> Any:
    return torch.cat([t, t.flip(0)[:1]]) if isinstance(t, torch.Tensor) and t.dim() else t
