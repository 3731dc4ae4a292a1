"""Example inputs: from the shapes a person names, or inferred from the module."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from .errors import UsageError

SIDES = (224, 256, 384, 64, 32)  # image sizes that are tried, in this order
LENGTHS = (1024, 16000, 256, 64)  # signal lengths, likewise
VOLUMES = (16, 32, 64)  # sides of volumes
APART = 32  # between the sizes of two free dimensions, so that no exporter takes them for one
_SIZE = r"(?:0*[1-9]\d*|[A-Z][A-Z0-9_]*)"
_SPEC = re.compile(rf"(?:(?P<name>[A-Za-z_][\w.]*)=)?(?P<shape>{_SIZE}(?:x{_SIZE})*|scalar)(?::(?P<dtype>\w+))?")

Free = Mapping[str, Mapping[int, str]]
"""What the free dimensions of inputs are called, by the input's name, or its position in digits."""


@dataclass(frozen=True, slots=True)
class InputSpec:
    """One input: its shape, whose free sizes have names, and a name and a dtype where they were given."""

    shape: tuple[int | str, ...]
    name: str | None = None
    dtype: str = "float32"

    def __str__(self) -> str:
        return "x".join(map(str, self.shape)) or "scalar"


@dataclass(frozen=True, slots=True)
class Example:
    """Inputs for a module, lines for the report that say how they came about, and what is to stay free in them."""

    inputs: Any
    notes: tuple[str, ...] = ()
    free: Free = field(default_factory=dict[str, Mapping[int, str]])


def parse_inputs(texts: Iterable[str]) -> tuple[InputSpec, ...]:
    """`1x3x224x224`, `image=1x3xHxW`, `ids=1x16:int64`. Raises UsageError for anything else."""
    specs: list[InputSpec] = []
    for text in texts:
        m = _SPEC.fullmatch(text.strip())
        if m is None:
            raise UsageError(f"--input {text}: expected sizes such as 1x3x224x224, name=1x3xHxW or ids=1x16:int64")
        sizes = [] if m["shape"] == "scalar" else m["shape"].split("x")
        shape = tuple(int(n) if n.isdecimal() else n for n in sizes)
        specs.append(InputSpec(shape, m["name"], m["dtype"] or "float32"))
    named = [s for s in specs if s.name]
    if named and len(named) != len(specs):
        raise UsageError("--input: name all inputs or none")
    return tuple(specs)


def shapes_of(specs: Sequence[InputSpec]) -> dict[str, tuple[int | str, ...]] | list[tuple[int | str, ...]]:
    """The shapes by name where the specs are named, else in order, as `verify` takes them."""
    return {s.name or "": s.shape for s in specs} if specs[0].name else [s.shape for s in specs]


def inputs_for(module: Any, given: Any = None, shapes: Sequence[tuple[int, ...]] | None = None) -> Example:
    """Example inputs for a module: those that were given (specs or tensors), else inferred ones.

    `shapes` are those that the module's file says it takes. Raises UsageError where none fits.
    """
    if is_specs(given):
        return _sized(given, module)
    if given is not None:
        return Example(given)
    if shapes is not None:
        specs = [InputSpec(s) for s in shapes]
        text = ", ".join(map(str, specs))
        return Example(make_inputs(specs, module), (f"input {text}, as the file says; pass --input for another",))
    return infer_inputs(module)


def is_specs(given: Any) -> bool:
    """Whether these are specs and not yet tensors."""
    return isinstance(given, tuple) and bool(given) and isinstance(given[0], InputSpec)


def make_inputs(specs: Sequence[InputSpec], like: Any = None) -> tuple[Any, ...] | dict[str, Any]:
    """Seeded tensors for the specs: a tuple by position, or a dict when they are named.

    Floating inputs take the dtype of the module `like` when the spec leaves it at float32; integers lie in [0, 8).
    """
    import torch

    own = next((p.dtype for p in like.parameters() if p.is_floating_point()), None) if like is not None else None
    generator = torch.Generator().manual_seed(0)
    made: list[Any] = []
    for s in specs:
        shape = [n for n in s.shape if isinstance(n, int)]
        assert len(shape) == len(s.shape), "free sizes are chosen first"
        dtype = getattr(torch, s.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise UsageError(f"--input {s}: {s.dtype} is no dtype of torch")
        if dtype.is_floating_point:
            wanted = own if dtype is torch.float32 and own is not None else dtype
            made.append(torch.randn(shape, generator=generator).to(wanted))
        elif dtype is torch.bool:
            made.append(torch.randint(0, 2, shape, generator=generator, dtype=torch.int64).bool())
        else:
            made.append(torch.randint(0, 8, shape, generator=generator, dtype=torch.int64).to(dtype))
    if specs and specs[0].name:
        return {s.name: t for s, t in zip(specs, made, strict=True) if s.name}
    return tuple(made)


def infer_inputs(module: Any) -> Example:
    """Inputs for a module that says nothing about them: from its configuration or its first layer, by trying.

    Raises UsageError that lists the shapes tried.
    """
    inputs, taken, tried = _first_that_runs(module, ([spec] for spec in _candidates(module)))
    if inputs is not None:
        return Example(inputs, (f"input {taken[0]} was inferred; pass --input for another",))
    kind = type(module).__name__
    if not tried:
        raise UsageError(f"cannot tell what input {kind} takes: pass --input, e.g. --input 1x3x224x224")
    raise UsageError(f"{kind} ran on none of the inputs tried ({', '.join(tried)}): pass --input with its shape")


def _sized(specs: Sequence[InputSpec], module: Any) -> Example:
    """Inputs of the shapes in the specs; for their free sizes, the first on which the module runs."""
    free = {s.name or str(k): {i: n for i, n in enumerate(s.shape) if isinstance(n, str)} for k, s in enumerate(specs)}
    if not any(free.values()):
        return Example(make_inputs(specs, module))
    inputs, taken, tried = _first_that_runs(module, _with_sizes(specs))
    if inputs is None:
        kind = type(module).__name__
        raise UsageError(f"{kind} ran on none of the inputs tried ({', '.join(tried)}): pass --input with sizes")
    text = ", ".join(map(str, taken))
    return Example(inputs, (f"free sizes were tried with {text}",), {k: dims for k, dims in free.items() if dims})


def _with_sizes(specs: Sequence[InputSpec]) -> Iterator[list[InputSpec]]:
    """The specs with numbers for their free sizes: a batch of 2, sides that differ, then equal ones."""
    names = dict.fromkeys(n for s in specs for n in s.shape[1:] if isinstance(n, str))
    batch = {n: 2 for s in specs for n in s.shape[:1] if isinstance(n, str)}
    rank = max(len(s.shape) for s in specs)
    for side in {3: LENGTHS, 5: VOLUMES}.get(rank, SIDES):
        for apart in (APART, 0):
            sizes = {n: side + apart * k for k, n in enumerate(names)} | batch
            yield [replace(s, shape=tuple(sizes[n] if isinstance(n, str) else n for n in s.shape)) for s in specs]


def _first_that_runs(
    module: Any, attempts: Iterable[Sequence[InputSpec]]
) -> tuple[Any, Sequence[InputSpec], Sequence[str]]:
    """Inputs, and the specs they were made from; or None, and the texts of all that were tried."""
    import torch

    from .graphs.torch_capture import eval_copy

    trial = eval_copy(module)
    tried: dict[str, None] = {}
    for specs in attempts:
        inputs = make_inputs(specs, trial)
        try:
            with torch.no_grad():
                trial(**inputs) if isinstance(inputs, dict) else trial(*inputs)
        except Exception:
            tried[", ".join(map(str, specs))] = None
            continue
        return inputs, specs, ()
    return None, (), list(tried)


def _candidates(module: Any) -> list[InputSpec]:
    for holder in (getattr(module, "default_cfg", None), getattr(module, "pretrained_cfg", None)):
        size = holder.get("input_size") if isinstance(holder, dict) else None
        if size:
            return [InputSpec((2, *size))]
    size = getattr(module, "input_size", None)
    found = [InputSpec((2, *size))] if isinstance(size, tuple | list) and all(isinstance(n, int) for n in size) else []
    for layer in module.modules():
        if shapes := _shapes_into(layer):
            return [*found, *shapes]
    return found


def _shapes_into(layer: Any) -> list[InputSpec]:
    """Inputs that the first layer of a network may be given; none for what is no layer. Scripted layers have a name."""
    names = {c.__name__ for c in type(layer).__mro__} | {getattr(layer, "original_name", "")}
    weight = getattr(layer, "weight", None)
    if weight is None:
        return []
    for rank, sides in ((1, LENGTHS), (2, SIDES), (3, VOLUMES)):
        if {f"Conv{rank}d", f"ConvTranspose{rank}d"} & names:
            straight = f"Conv{rank}d" in names
            channels = getattr(layer, "in_channels", None) or weight.shape[1 if straight else 0]
            return [InputSpec((2, channels, *[n] * rank)) for n in sides]
    if "Linear" in names:
        return [InputSpec((2, weight.shape[1])), InputSpec((2, 4, weight.shape[1]))]
    if "Embedding" in names:
        return [InputSpec((2, 16), dtype="int64"), InputSpec((2,), dtype="int64")]
    return []
