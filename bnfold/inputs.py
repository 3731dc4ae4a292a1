"""Example inputs: from the shapes a person names, from a file of arrays, or inferred from the module."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from .errors import InvalidFileError, UsageError, first_line, some_of

SIDES = (224, 256, 384, 64, 32)  # image sizes that are tried, in this order
LENGTHS = (1024, 16000, 256, 64)  # signal lengths, likewise
VOLUMES = (16, 32, 64)  # sides of volumes
APART = 32  # between the sizes of two free dimensions, so that no exporter takes them for one
BELOW = 8  # made integers lie in [0, 8), where nothing says what they may be
_SIZE = r"(?:0*[1-9]\d*|[A-Z][A-Z0-9_]*)"
_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_SPEC = re.compile(
    rf"(?:(?P<name>[A-Za-z_][\w.]*)=)?(?P<shape>{_SIZE}(?:x{_SIZE})*|scalar)(?::(?P<dtype>[A-Za-z]\w*))?"
    rf"(?::(?P<least>{_NUMBER})\.\.(?P<most>{_NUMBER}))?"
)

Free = Mapping[str, Mapping[int, str]]
"""What the free dimensions of inputs are called, by the input's name, or its position in digits."""


@dataclass(frozen=True, slots=True)
class InputSpec:
    """One input: its shape, and where they were given a name, a dtype, and its values.

    A size that is free has a name, or is None. `values` are the smallest and the largest value that the input may hold.
    """

    shape: tuple[int | str | None, ...]
    name: str | None = None
    dtype: str = "float32"
    values: tuple[float, float] | None = None

    def __str__(self) -> str:
        return "x".join(map(str, self.shape)) or "scalar"


@dataclass(frozen=True, slots=True)
class Arrays:
    """Real inputs, one batch of them, from a file: numpy arrays by name, unless the file has them in order only."""

    path: Path
    named: Mapping[str, Any]
    in_order: bool

    @property
    def batch(self) -> Any:
        """As `verify` takes a batch."""
        return tuple(self.named.values()) if self.in_order else dict(self.named)


@dataclass(frozen=True, slots=True)
class Trials:
    """What a verification runs on: given batches, and batches made of inputs like `specs` (as declared, if None)."""

    batches: tuple[Any, ...] = ()
    specs: Mapping[str, InputSpec] | Sequence[InputSpec] | None = None


@dataclass(frozen=True, slots=True)
class Example:
    """Inputs for a module, lines for the report that say how they came about, and what is to stay free in them."""

    inputs: Any
    notes: tuple[str, ...] = ()
    free: Free = field(default_factory=dict[str, Mapping[int, str]])


def parse_inputs(texts: Iterable[str]) -> tuple[InputSpec, ...]:
    """`1x3x224x224`, `image=1x3xHxW`, `ids=1x16:int64:0..999`. Raises UsageError for anything else."""
    specs: list[InputSpec] = []
    for text in texts:
        m = _SPEC.fullmatch(text.strip())
        if m is None:
            raise UsageError(
                f"--input {text}: expected sizes such as 1x3x224x224 or name=1x3xHxW, and if need be type and values, "
                "ids=1x16:int64:0..99"
            )
        sizes = [] if m["shape"] == "scalar" else m["shape"].split("x")
        shape = tuple(int(n) if n.isdecimal() else n for n in sizes)
        dtype = m["dtype"] or "float32"
        values = None if m["least"] is None else _values(text, dtype, m["least"], m["most"])
        specs.append(InputSpec(shape, m["name"], dtype, values))
    named = [s for s in specs if s.name]
    if named and len(named) != len(specs):
        raise UsageError("--input: name all inputs or none")
    return tuple(specs)


def _values(text: str, dtype: str, least: str, most: str) -> tuple[float, float]:
    """The smallest and the largest value of an input, if its type can hold them."""
    import numpy as np

    low, high = float(least), float(most)
    if low > high:
        raise UsageError(f"--input {text}: {least} is above {most}; the smaller one comes first")
    limits = np.iinfo(dtype) if re.fullmatch(r"u?int(8|16|32|64)", dtype) else None
    if limits and not (low >= limits.min and high <= limits.max and low.is_integer() and high.is_integer()):
        raise UsageError(f"--input {text}: {dtype} holds whole numbers from {limits.min} to {limits.max}")
    return low, high


def read_arrays(path: Path) -> Arrays:
    """The arrays of an .npz or .npy file. Raises InvalidFileError where it is none, or holds Python objects."""
    import numpy as np

    from .recognition import head_of

    head = head_of(path)
    try:
        if head.startswith(b"PK"):
            from .archives import member_names

            member_names(path)
            with np.load(path, allow_pickle=False) as file:
                named = {name: file[name] for name in file.files}
        elif head.startswith(b"\x93NUMPY"):
            named = {"arr_0": np.load(path, allow_pickle=False)}
        else:
            raise InvalidFileError(f"{path}: neither .npz nor .npy; write it with numpy.savez(path, name=array)")
    except InvalidFileError:
        raise
    except Exception as error:
        raise InvalidFileError(f"{path}: cannot be read as arrays ({first_line(error)})") from None
    if not named or not all(isinstance(a, np.ndarray) for a in named.values()):
        raise InvalidFileError(f"{path}: holds {some_of(named) or 'no arrays'}; write it with numpy.savez")
    return Arrays(path, named, all(re.fullmatch(r"arr_\d+", name) for name in named))


def trials_on(given: Any, model: Any = None) -> Trials:
    """What to verify a model on, with what a person said of its inputs: specs as they are, arrays, or nothing."""
    if isinstance(given, Arrays):
        batch = _tensors(given, model) if hasattr(model, "forward") else given.batch
        return Trials((batch,), _keyed(_specs_like(batch)))
    return Trials(specs=_keyed(given)) if is_specs(given) else Trials()


def trials_for(module: Any, given: Any, inputs: Any) -> Trials:
    """What to verify a module on that runs on `inputs`, made from what was `given`: others like them, in batches of 1
    and 2.

    They are used themselves where they mean something, because they were read from a file or hold integers.
    """
    if is_specs(given):
        like: list[InputSpec] | None = [replace(s, shape=_any_batch(s.shape)) for s in given]
    else:
        like = _specs_like(inputs)
    meant = not is_specs(given) and (like is None or any("float" not in s.dtype for s in like))
    batches = (inputs,) if meant or isinstance(given, Arrays) else ()
    arguments = list(arguments_of(module).items())[: len(like or ())]
    named = {s.name: s for s in like or ()}
    if named and named.keys() == {n for n, _ in arguments} and all(by_position for _, by_position in arguments):
        return Trials(batches, [named[n] for n, _ in arguments])
    return Trials(batches, _keyed(like))


def _keyed(specs: Sequence[InputSpec] | None) -> dict[str, InputSpec] | list[InputSpec] | None:
    """By name where the specs are named, else in order."""
    if not specs:
        return None
    return {s.name or "": s for s in specs} if specs[0].name else list(specs)


def _specs_like(inputs: Any) -> list[InputSpec] | None:
    """Specs of tensors or arrays like these, the first size free; None where there is more to them than that."""
    given = inputs if isinstance(inputs, dict | tuple | list) else (inputs,)
    items = given.items() if isinstance(given, dict) else ((None, v) for v in given)
    specs: list[InputSpec] = []
    for name, value in items:
        if not hasattr(value, "shape") or not hasattr(value, "dtype"):
            return None
        dtype = str(value.dtype).removeprefix("torch.")
        values = None
        if value.shape and "int" in dtype and 0 not in value.shape:
            values = (float(value.min()), float(value.max()))
        specs.append(InputSpec(_any_batch(tuple(map(int, value.shape))), name, dtype, values))
    return specs


def _any_batch(shape: tuple[int | str | None, ...]) -> tuple[int | str | None, ...]:
    return (None if isinstance(shape[0], int) else shape[0], *shape[1:]) if shape else ()


def inputs_for(module: Any, given: Any = None, shapes: Sequence[tuple[int, ...]] | None = None) -> Example:
    """Example inputs for a module: those that were given (specs, arrays or tensors), else inferred ones.

    `shapes` are those that the module's file says it takes. Raises UsageError where none fits.
    """
    if is_specs(given):
        return _sized(given, module)
    if isinstance(given, Arrays):
        return Example(_tensors(given, module), (f"inputs are those in {given.path.name}",))
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

    Floating inputs take the dtype of the module `like` when the spec leaves it at float32. Without `values` they are
    normal, integers lie in [0, 8).
    """
    import torch

    own = _float_type(like)
    generator = torch.Generator().manual_seed(0)
    made: list[Any] = []
    for s in specs:
        shape = [n for n in s.shape if isinstance(n, int)]
        assert len(shape) == len(s.shape), "free sizes are chosen first"
        dtype = getattr(torch, s.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise UsageError(f"--input {s}: {s.dtype} is no dtype of torch")
        try:
            made.append(_drawn(s, shape, dtype, own, generator))
        except (RuntimeError, TypeError, ValueError, OverflowError, MemoryError) as error:
            raise UsageError(f"--input {s}: torch cannot make it ({first_line(error)})") from None
    if specs and specs[0].name:
        return {s.name: t for s, t in zip(specs, made, strict=True) if s.name}
    return tuple(made)


def _drawn(spec: InputSpec, shape: list[int], dtype: Any, own: Any, generator: Any) -> Any:
    import torch

    if not dtype.is_floating_point:
        least, most = (int(v) for v in spec.values or (0, 1 if dtype is torch.bool else BELOW - 1))
        return torch.randint(least, most + 1, shape, generator=generator, dtype=torch.int64).to(dtype)
    noise = torch.randn(shape, generator=generator)
    if spec.values is not None:
        least, most = spec.values
        noise = least + (most - least) * torch.rand(shape, generator=generator)
    return noise.to(own if dtype is torch.float32 and own is not None else dtype)


def _float_type(module: Any) -> Any:
    """The dtype of the module's first floating-point parameter; None without one."""
    return next((p.dtype for p in module.parameters() if p.is_floating_point()), None) if module is not None else None


def _tensors(given: Arrays, module: Any) -> Any:
    """The arrays as a module takes them: in order where they are its first arguments, else by keyword.

    Floating-point ones take the module's type, for numpy makes float64 of everything. Raises UsageError where the names
    are not those of arguments.
    """
    import torch

    own = _float_type(module)
    tensors: dict[str, Any] = {}
    for name, array in given.named.items():
        try:
            tensor = torch.from_numpy(array.copy())
        except TypeError:
            raise UsageError(f"{given.path}: {name} holds {array.dtype}, of which torch makes no tensor") from None
        tensors[name] = tensor.to(own) if own is not None and tensor.is_floating_point() else tensor
    taken = arguments_of(module)
    if given.in_order or (len(tensors) == 1 and not set(tensors) & set(taken)):
        return tuple(tensors.values())
    if unknown := [n for n in tensors if n not in taken]:
        raise UsageError(
            f"{given.path}: {some_of(unknown)} is no argument of {type(module).__name__}.forward, which takes "
            f"{', '.join(taken) or 'none by name'}; name the arrays so, or save them in order (numpy.savez(path, a, b))"
        )
    ordered = {n: tensors[n] for n in taken if n in tensors}
    by_position = list(ordered) == list(taken)[: len(ordered)] and all(taken[n] for n in ordered)
    return tuple(ordered.values()) if by_position else ordered


def arguments_of(module: Any) -> dict[str, bool]:
    """The arguments of a module's `forward` that have a name, and whether each may be passed by position."""
    schema = getattr(module.forward, "schema", None)  # of a script
    if schema is not None:
        return {a.name: not a.kwarg_only for a in schema.arguments if a.name != "self"}
    parameters = inspect.signature(module.forward).parameters.values()
    return {p.name: p.kind is not p.KEYWORD_ONLY for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}


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
