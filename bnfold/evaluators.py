"""Ways to run a model on numpy arrays: one adapter for each kind of model that `verify` takes.

onnxruntime, onnx and torch are imported only by the adapter that needs them: two ONNX files are compared without
torch. An adapter never changes the model it was given; torch models run as copies.
"""

from __future__ import annotations

import copy
import ctypes
import dataclasses
import os
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from .errors import UsageError
from .sessions import CPU, HALVES, first_line, start

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
DTYPES: dict[str, np.dtype[Any]] = {  # ONNX's words, then those that ONNX, torch and numpy have in common
    "float": np.dtype(np.float32),
    "double": np.dtype(np.float64),
    "bfloat16": BFLOAT16,
    **{n: np.dtype(n) for n in ("bool", "float16", "float32", "float64", "int8", "int16", "int32", "int64")},
    **{n: np.dtype(n) for n in ("uint8", "uint16", "uint32", "uint64")},
}

Array = NDArray[Any]
Dim = int | str | None  # a size, a symbol, or nothing known
Batch = tuple[Any, ...] | Mapping[str, Any]  # by position, or by name
Outputs = list[tuple[str, Array]]  # no dict: onnxruntime lets a graph name one output twice


@dataclass(frozen=True, slots=True)
class InputSpec:
    """One input as a model declares it. `dtype` is None where it is no tensor of numbers.

    `bounds` holds the smallest and the largest size of a symbol, where the model says so; `values` the smallest and
    the largest value, where a person does.
    """

    name: str
    dtype: np.dtype[Any] | None
    shape: tuple[Dim, ...]
    bounds: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    values: tuple[float, float] | None = None


class Evaluator(Protocol):
    """A model that can be run."""

    @property
    def inputs(self) -> tuple[InputSpec, ...] | None:
        """The inputs in positional order, or None where the model does not declare them."""
        ...

    @property
    def float_type(self) -> np.dtype[Any]:
        """The type of floating-point inputs where nothing says more."""
        ...

    @property
    def halves(self) -> frozenset[str]:
        """The 16-bit types in which some of it is computed."""
        ...

    @property
    def note(self) -> str:
        """Where it does not compute as the model says, how it does."""
        ...

    def run(self, batch: Batch) -> Outputs:
        """The tensors among the outputs, named, in order. Raises whatever the library raises."""
        ...

    def in_float64(self) -> Evaluator | None:
        """A copy that computes in float64, or None where there is no such thing."""
        ...


def evaluator(model: Any, role: str, provider: str = CPU, watch: Sequence[str] = ()) -> Evaluator:
    """The adapter for `model`; `role` names it in messages, `provider` is where onnxruntime runs it.

    `watch` names inner values of an ONNX model that are returned behind its outputs.

    Raises InvalidFileError when onnxruntime cannot load it, UsageError when the provider cannot run it.
    """
    if _is_a(model, "torch.nn", "Module"):
        return ModuleEvaluator(model, role)
    if _is_a(model, "torch.export", "ExportedProgram"):
        return ProgramEvaluator(model, role)
    if is_onnx(model):
        return OnnxEvaluator(model, role, provider, watch)
    raise UsageError(
        f"{role}: cannot run a {type(model).__name__}; pass an nn.Module, an ExportedProgram, a ModelProto, its bytes "
        "or the path of an .onnx file"
    )


def is_onnx(model: Any) -> bool:
    """Whether onnxruntime is to run this."""
    return isinstance(model, bytes | str | os.PathLike) or _is_a(model, "onnx", "ModelProto")


def is_float(dtype: np.dtype[Any]) -> bool:
    """Whether values of this type are rounded ones."""
    return dtype.kind in "fc" or dtype == BFLOAT16


# --- onnxruntime ------------------------------------------------------------------------------------------------------


class OnnxEvaluator:
    """An ONNX model on one onnxruntime provider, graph optimizations off: the file is judged, not what they make of it.

    On CUDA, TF32 is off too, whose products are good to 1e-3 only. Overridable initializers are no inputs. What is
    bfloat16, on a provider that lacks a kernel for it, is computed in float32; inputs and outputs are still bfloat16.
    """

    float_type = DTYPES["float32"]
    note = ""

    def __init__(self, model: Any, role: str, provider: str = CPU, watch: Sequence[str] = ()) -> None:
        self._role = role
        started = start(model, role, provider, watch)
        self._session, self._narrow, self.halves = started.session, started.narrow, started.halves
        if started.widened:
            self.note = f"{provider} lacks kernels for bfloat16: the {role} computed in float32"
        self.inputs = tuple(
            InputSpec(
                i.name,
                BFLOAT16 if i.name in self._narrow else DTYPES.get(i.type[len("tensor(") : -1]),
                tuple(_dim(d) for d in i.shape),
            )
            for i in self._session.get_inputs()
        )

    def in_float64(self) -> None:
        """None: onnxruntime's CPU provider has no float64 convolution."""
        return

    def run(self, batch: Batch) -> Outputs:
        """Run the session; arrays of another float or integer type are converted to the declared one."""
        values = _bind(batch, self.inputs, self._role)
        feeds = {spec.name: _typed(v, spec.dtype) for spec, v in zip(self.inputs, values, strict=True)}
        feeds = {n: v.astype(np.float32) if n in self._narrow else v for n, v in feeds.items()}
        declared = self._session.get_outputs()
        if any("bfloat16" in x.type for x in (*self._session.get_inputs(), *declared)):
            results = self._run_values(feeds)
        else:
            results = self._session.run(None, feeds)
        outputs = [(d.name, x) for d, r in zip(declared, results, strict=True) for x in _flat(d.name, r)]
        return [(n, a.astype(BFLOAT16) if d in self._narrow else a) for d, (n, a) in outputs]

    def _run_values(self, feeds: dict[str, Any]) -> list[Any]:
        """Run by OrtValue, the only way in and out for bfloat16."""
        from onnxruntime import OrtValue

        bfloat16 = 16  # TensorProto.BFLOAT16
        values = {
            n: OrtValue.ortvalue_from_numpy_with_onnx_type(v.view(np.uint16), bfloat16)
            if v.dtype == BFLOAT16
            else OrtValue.ortvalue_from_numpy(v)
            for n, v in feeds.items()
        }
        return [_read_value(v) for v in self._session.run_with_ort_values(None, values)]


def _dim(d: Any) -> Dim:
    return None if not d or (isinstance(d, int) and d < 0) else d


def _read_value(value: Any) -> Any:
    if value.data_type() != "tensor(bfloat16)":
        return value.numpy()
    bits = ctypes.string_at(value.data_ptr(), 2 * int(np.prod(value.shape())))
    return np.frombuffer(bits, np.uint16).view(BFLOAT16).reshape(value.shape())


def _flat(name: str, result: Any) -> Iterator[tuple[str, Array]]:
    """The tensors in one output, which may be a sequence, a map or an absent optional."""
    if result is None:
        return
    if not isinstance(result, list | dict):
        yield name, np.asarray(result)
        return
    for k, r in result.items() if isinstance(result, dict) else enumerate(result):
        yield from _flat(f"{name}.{k}", r)


# --- torch ------------------------------------------------------------------------------------------------------------


class ModuleEvaluator:
    """A copy of an nn.Module in evaluation mode, without gradients; torch's random state is left as it was."""

    inputs = None
    note = ""

    def __init__(self, module: Any, role: str, float64: bool = False) -> None:
        self._role, self._float64 = role, float64
        try:
            self._module = _copy(module, float64).eval()
        except Exception as e:
            raise UsageError(f"{role}: {type(module).__name__} cannot be copied: {first_line(e)}") from e
        self.float_type, self.halves = _float_type(self._module), _halves(self._module)

    def in_float64(self) -> ModuleEvaluator:
        """The module with every floating-point parameter and buffer in float64."""
        return ModuleEvaluator(self._module, self._role, float64=True)

    def run(self, batch: Batch) -> Outputs:
        """Call the module, by keyword where the batch is a mapping."""
        args, kwargs = ((), dict(batch)) if isinstance(batch, Mapping) else (batch, {})
        return _forward(self._module, args, kwargs, self._float64)


class ProgramEvaluator:
    """A copy of an ExportedProgram's graph module. Arguments that are no tensors keep the values of the export."""

    note = ""

    def __init__(self, program: Any, role: str, float64: bool = False) -> None:
        self._program, self._role, self._float64 = program, role, float64
        self._module = _copy(program.module(), float64)
        self.float_type, self.halves = _float_type(self._module), _halves(self._module)
        arguments = [n for n in program.graph.nodes if n.op == "placeholder"]
        count = len(program.graph_signature.user_inputs)
        self._arguments = [(n.name, n.meta.get("val")) for n in arguments[len(arguments) - count :]]
        self.inputs = _program_inputs(self._arguments, program.range_constraints)

    def in_float64(self) -> ProgramEvaluator:
        """The program with every floating-point parameter, buffer and constant in float64."""
        return ProgramEvaluator(self._program, self._role, float64=True)

    def run(self, batch: Batch) -> Outputs:
        """Call the graph module with the structure of arguments it was exported with."""
        from torch.utils import _pytree as pytree  # noqa: TID251 -- a torch model takes part

        bound = zip(_bind(batch, self.inputs, self._role), self.inputs, strict=True)
        values = (v if _is_tensor(v) else _typed(v, spec.dtype) for v, spec in bound)
        leaves = [next(values) if _is_tensor(v) else v for _, v in self._arguments]
        args, kwargs = pytree.tree_unflatten(leaves, self._program.call_spec.in_spec)
        return _forward(self._module, args, kwargs, self._float64)


def _copy(module: Any, float64: bool) -> Any:
    from .graphs.torch_trial import detached

    copied = copy.deepcopy(module, detached(module))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # scripted modules warn of gradients that nobody asks for
        return copied.double() if float64 else copied


def _forward(module: Any, args: Any, kwargs: Any, float64: bool) -> Outputs:
    import torch  # noqa: TID251 -- a torch model takes part
    from torch.utils import _pytree as pytree  # noqa: TID251

    device = next((t.device for t in _state(module)), torch.device("cpu"))
    args, kwargs = pytree.tree_map(lambda v: _to_torch(v, device, float64), (args, kwargs))
    with torch.no_grad(), torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        result = module(*args, **kwargs)
    return [(".".join(path) or "output", to_numpy(t).copy()) for path, t in _tensors(result, ())]


def _tensors(result: Any, prefix: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    from torch.utils import _pytree as pytree  # noqa: TID251 -- a torch model takes part

    try:
        leaves = pytree.tree_flatten_with_path(result)[0]
    except ValueError:  # a class that was registered without names for its parts
        leaves = [((pytree.SequenceKey(k),), leaf) for k, leaf in enumerate(pytree.tree_leaves(result))]
    for keys, leaf in leaves:
        path = (*prefix, *(str(next(getattr(k, a) for a in ("key", "idx", "name") if hasattr(k, a))) for k in keys))
        if _is_tensor(leaf):
            yield path, leaf
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            yield from _tensors({f.name: getattr(leaf, f.name) for f in dataclasses.fields(leaf)}, path)


def _program_inputs(arguments: list[tuple[str, Any]], ranges: Mapping[Any, Any]) -> tuple[InputSpec, ...]:
    """The declared inputs; where a size is an expression of others (2*s0), the sizes of the export's sample instead."""
    tensors = [(name, value) for name, value in arguments if _is_tensor(value)]
    symbolic = [d for _, v in tensors for d in v.shape if not isinstance(d, int)]
    by_sample = any(not d.node.expr.is_symbol for d in symbolic)
    bounds = {str(s): (_bound(r.lower), _bound(r.upper)) for s, r in ranges.items()}

    def dim(d: Any) -> Dim:
        if isinstance(d, int):
            return d
        return int(d.node.hint) if by_sample and d.node.hint is not None else str(d.node.expr)

    return tuple(InputSpec(n, DTYPES.get(_word(v.dtype)), tuple(dim(d) for d in v.shape), bounds) for n, v in tensors)


def _bound(size: Any) -> int:
    return int(size) if size.is_Integer else 2**31  # sympy's integer infinity is none


def _float_type(module: Any) -> np.dtype[Any]:
    known = (DTYPES.get(_word(t.dtype)) for t in _state(module) if t.is_floating_point())
    return next((d for d in known if d is not None), DTYPES["float32"])


def _halves(module: Any) -> frozenset[str]:
    return frozenset(_word(t.dtype) for t in _state(module)) & HALVES.keys()


def _state(module: Any) -> Iterator[Any]:
    yield from module.parameters()
    yield from module.buffers()


def _word(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


# --- values -----------------------------------------------------------------------------------------------------------


def to_numpy(value: Any) -> Array:
    """A tensor, an array or a number as an array; bfloat16 as ml_dtypes' type."""
    if not _is_tensor(value):
        return np.asarray(value)
    tensor = value.detach().cpu().resolve_conj().resolve_neg()
    if _word(tensor.dtype) != "bfloat16":
        return tensor.numpy()
    import torch  # noqa: TID251 -- the value is a tensor

    return tensor.view(torch.int16).numpy().view(BFLOAT16)


def _to_torch(value: Any, device: Any, float64: bool) -> Any:
    """A tensor of its own for an array or a tensor, since a model may write into it; anything else as it is."""
    import torch  # noqa: TID251 -- a torch model takes part

    if _is_tensor(value):
        tensor = value.detach().clone()
    elif isinstance(value, np.ndarray) and value.dtype == BFLOAT16:
        tensor = torch.from_numpy(np.array(value.view(np.int16))).view(torch.bfloat16)
    elif isinstance(value, np.ndarray):
        tensor = torch.from_numpy(np.array(value))
    else:
        return value
    return tensor.to(device, torch.float64 if float64 and tensor.is_floating_point() else tensor.dtype)


def _typed(value: Any, dtype: np.dtype[Any] | None) -> Any:
    """The value as an ONNX input of that type takes it: floats become other floats, integers other integers."""
    if dtype is None:
        return value
    array = to_numpy(value)
    alike = (is_float(array.dtype) and is_float(dtype)) or (array.dtype.kind in "iu" and dtype.kind in "iu")
    return np.array(array, dtype=dtype if alike else array.dtype, order="C")


def _bind(batch: Batch, inputs: Sequence[InputSpec], role: str) -> list[Any]:
    """The values in the order of `inputs`. A single value fits a single input whatever it is called."""
    if isinstance(batch, Mapping) and not len(batch) == 1 == len(inputs):
        if missing := [i.name for i in inputs if i.name not in batch]:
            raise UsageError(f"{role}: the batch lacks {', '.join(missing)}; it has {', '.join(batch)}")
        return [batch[i.name] for i in inputs]
    if len(batch) != len(inputs):
        listed = ", ".join(i.name for i in inputs)
        raise UsageError(f"{role}: the batch has {len(batch)} values, the model {len(inputs)} inputs ({listed})")
    return list(batch.values()) if isinstance(batch, Mapping) else list(batch)


def _is_tensor(value: Any) -> bool:
    return _is_a(value, "torch", "Tensor")


def _is_a(value: Any, module: str, name: str) -> bool:
    """`isinstance` without the import: of a module that was never imported no instance can exist."""
    found = sys.modules.get(module)
    return found is not None and isinstance(value, getattr(found, name, ()))
