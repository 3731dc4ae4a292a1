"""Example inputs: from the shapes a person names, or inferred from the module."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from .errors import UsageError

SIDES = (224, 256, 384, 64, 32)  # image sizes that are tried, in this order
LENGTHS = (1024, 16000, 256, 64)  # signal lengths, likewise
VOLUMES = (16, 32, 64)  # sides of volumes
_SIZE = r"0*[1-9]\d*"
_SPEC = re.compile(rf"(?:(?P<name>[A-Za-z_][\w.]*)=)?(?P<shape>{_SIZE}(?:x{_SIZE})*|scalar)(?::(?P<dtype>\w+))?")


@dataclass(frozen=True, slots=True)
class InputSpec:
    """One input: its shape, and a name and a dtype where they were given."""

    shape: tuple[int, ...]
    name: str | None = None
    dtype: str = "float32"

    def __str__(self) -> str:
        return "x".join(map(str, self.shape)) or "scalar"


@dataclass(frozen=True, slots=True)
class Inferred:
    """Inputs that the module accepted, and a line that says which."""

    inputs: tuple[Any, ...]
    note: str


def parse_inputs(texts: Iterable[str]) -> tuple[InputSpec, ...]:
    """`1x3x224x224`, `image=1x3x224x224`, `ids=1x16:int64`. Raises UsageError for anything else."""
    specs: list[InputSpec] = []
    for text in texts:
        m = _SPEC.fullmatch(text.strip())
        if m is None:
            raise UsageError(f"--input {text}: expected sizes such as 1x3x224x224, name=1x3x224x224 or ids=1x16:int64")
        shape = () if m["shape"] == "scalar" else tuple(map(int, m["shape"].split("x")))
        specs.append(InputSpec(shape, m["name"], m["dtype"] or "float32"))
    named = [s for s in specs if s.name]
    if named and len(named) != len(specs):
        raise UsageError("--input: name all inputs or none")
    return tuple(specs)


def shapes_of(specs: Sequence[InputSpec]) -> dict[str, tuple[int, ...]] | list[tuple[int, ...]]:
    """The shapes by name where the specs are named, else in order, as `verify` takes them."""
    return {s.name or "": s.shape for s in specs} if specs[0].name else [s.shape for s in specs]


def inputs_for(
    module: Any, given: Any = None, shapes: Sequence[tuple[int, ...]] | None = None
) -> tuple[Any, tuple[str, ...]]:
    """Example inputs for a module, and notes: those that were given (specs or tensors), else inferred ones.

    `shapes` are those that the module's file says it takes.
    """
    if is_specs(given):
        return make_inputs(given, module), ()
    if given is not None:
        return given, ()
    if shapes is not None:
        specs = [InputSpec(s) for s in shapes]
        text = ", ".join(map(str, specs))
        return make_inputs(specs, module), (f"input {text}, as the file says; pass --input for another",)
    inferred = infer_inputs(module)
    return inferred.inputs, (inferred.note,)


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
        dtype = getattr(torch, s.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise UsageError(f"--input {s}: {s.dtype} is no dtype of torch")
        if dtype.is_floating_point:
            wanted = own if dtype is torch.float32 and own is not None else dtype
            made.append(torch.randn(s.shape, generator=generator).to(wanted))
        elif dtype is torch.bool:
            made.append(torch.randint(0, 2, s.shape, generator=generator, dtype=torch.int64).bool())
        else:
            made.append(torch.randint(0, 8, s.shape, generator=generator, dtype=torch.int64).to(dtype))
    if specs and specs[0].name:
        return {s.name: t for s, t in zip(specs, made, strict=True) if s.name}
    return tuple(made)


def infer_inputs(module: Any) -> Inferred:
    """Inputs for a module that says nothing about them: from its configuration or its first layer, by trying.

    Raises UsageError that lists the shapes tried.
    """
    import torch

    from .graphs.torch_capture import eval_copy

    trial = eval_copy(module)
    tried: list[str] = []
    for spec in _candidates(trial):
        inputs = make_inputs([spec], trial)
        assert isinstance(inputs, tuple)
        try:
            with torch.no_grad():
                trial(*inputs)
        except Exception:
            tried.append(str(spec))
            continue
        return Inferred(inputs, f"input {spec} was inferred; pass --input for another")
    kind = type(module).__name__
    if not tried:
        raise UsageError(f"cannot tell what input {kind} takes: pass --input, e.g. --input 1x3x224x224")
    raise UsageError(f"{kind} ran on none of the inputs tried ({', '.join(tried)}): pass --input with its shape")


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
