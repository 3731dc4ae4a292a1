"""What a checkpoint file holds: keys, shapes and types, read without torch and without running anything in it.

The pickle inside a torch.save file or a TorchScript archive is read with a pickle machine that knows tensors and
containers. Whatever else it names (a class, a function) becomes an inert `Instance` that remembers the name and the
state it was given, so that a file that would run code is described like any other. No tensor's data is read.
"""

from __future__ import annotations

import pickle
import re
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from .archives import damaged
from .errors import AGAIN, InvalidFileError
from .recognition import recognise, safetensors_header, shards_of
from .selection import Looks, Weights, sets_of_weights

STORAGES = {
    "Double": "float64", "Float": "float32", "Half": "float16", "BFloat16": "bfloat16", "Long": "int64",
    "Int": "int32", "Short": "int16", "Char": "int8", "Byte": "uint8", "Bool": "bool",
    "ComplexFloat": "complex64", "ComplexDouble": "complex128", "QInt8": "qint8", "QUInt8": "quint8",
    "QInt32": "qint32", "Untyped": "uint8",
}  # fmt: skip
SAFETENSORS = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32",
    "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
}  # fmt: skip
DEEPEST = 40  # modules within modules
LEGACY_PREFACE = 3  # pickles before the object in a torch.save file older than the zip format: magic, version, system


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor as its file describes it."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class StoredNorm:
    """A normalization with running statistics, as the keys of a state dict show it: `bn1` of `bn1.running_mean`."""

    name: str
    channels: int
    affine: bool
    counted: bool  # whether num_batches_tracked is there


@dataclass(frozen=True, slots=True)
class Contents:
    """A checkpoint. `sets` are its weights, `others` what else is at its top, `asks_for` the code it would run."""

    format: str
    sets: tuple[Weights, ...]
    others: Mapping[str, str] = field(default_factory=dict[str, str])
    asks_for: tuple[str, ...] = ()


def read_contents(path: Path, kind: str) -> Contents:
    """What the file holds; `kind` as `checkpoint.recognise` has it. Raises InvalidFileError for a damaged file."""
    try:
        if kind == "safetensors":
            return Contents(kind, tuple(_sets(_header(path))))
        if kind == "sharded":
            parts = [read_contents(p, recognise(p)) for p in shards_of(path)]
            whole = {k: t for part in parts for weights in part.sets for k, t in tensors_in(weights.value)}
            return Contents(kind, tuple(_sets(whole)), {}, tuple(g for part in parts for g in part.asks_for))
        value, asks_for = _legacy(path) if not zipfile.is_zipfile(path) else _zipped(path)
    except InvalidFileError:
        raise
    except Exception as e:  # what a crafted pickle makes of the machine
        raise damaged(path, e) from None
    sets = tuple(_sets(value))
    taken = {w.where[0] for w in sets if w.where}
    others = {str(k): _described(v) for k, v in value.items() if k not in taken} if isinstance(value, Mapping) else {}
    return Contents(kind, sets, {} if any(not w.where for w in sets) else others, asks_for)


def as_plain(contents: Contents) -> dict[str, Any]:
    """The contents as plain data, for a report.

    `format`, `sets` (each with its `key`, `kind`, `tensors` by name with shape and dtype, and `norms`), `others` (what
    else is at the top) and `asks_for` (what reading the file in earnest would import).
    """
    sets: list[dict[str, Any]] = []
    for weights in contents.sets:
        tensors = dict(tensors_in(weights.value))
        network = isinstance(weights.value, Instance)
        sets.append({
            "key": weights.path,
            "kind": f"network {type(weights.value).global_name}" if network else "state dict",
            "tensors": {k: {"shape": list(t.shape), "dtype": t.dtype} for k, t in tensors.items()},
            "norms": [{"norm": n.name, "channels": n.channels, "affine": n.affine, "counted": n.counted}
                      for n in norms_in(tensors)],
        })  # fmt: skip
    return {
        "format": contents.format, "sets": sets, "others": dict(contents.others), "asks_for": list(contents.asks_for)
    }  # fmt: skip


def read_pickled(file: IO[bytes]) -> Any:
    """What a pickle holds, read as `read_contents` does."""
    return _Machine(file).load()


def tensors_in(weights: Any, prefix: str = "", depth: int = DEEPEST) -> Iterator[tuple[str, TensorInfo]]:
    """Keys and tensors of a state dict, or of a pickled or scripted network by the names its state dict would have."""
    if isinstance(weights, Instance):
        state = weights.state if isinstance(weights.state, Mapping) else {}
        if "_modules" in state:
            parts = [state.get(k) or {} for k in ("_parameters", "_buffers", "_modules")]
            weights = {k: v for part in parts if isinstance(part, Mapping) for k, v in part.items()}
        else:
            weights = state
    if not isinstance(weights, Mapping) or depth == 0:
        return
    for key, value in weights.items():
        if isinstance(value, TensorInfo):
            yield f"{prefix}{key}", value
        elif isinstance(value, Instance):
            yield from tensors_in(value, f"{prefix}{key}.", depth - 1)


def norms_in(tensors: Mapping[str, TensorInfo]) -> tuple[StoredNorm, ...]:
    """The norms that a state dict shows, in its order."""
    found: list[StoredNorm] = []
    for key, tensor in tensors.items():
        name, _, last = key.rpartition(".")
        start = f"{name}." if name else ""
        if last == "running_mean" and f"{start}running_var" in tensors:
            channels = tensor.shape[0] if tensor.shape else 1
            counted = f"{start}num_batches_tracked" in tensors
            found.append(StoredNorm(name or "(the network itself)", channels, f"{start}weight" in tensors, counted))
    return tuple(found)


# ---------------------------------------------------------------------- formats


def _sets(value: Any) -> Iterator[Weights]:
    return sets_of_weights(value, Looks(lambda v: isinstance(v, TensorInfo), _is_network))


def _is_network(value: Any) -> bool:
    return isinstance(value, Instance) and next(tensors_in(value), None) is not None


def _header(path: Path) -> dict[str, TensorInfo]:
    entries = {key: entry for key, entry in safetensors_header(path).items() if key != "__metadata__"}
    for key, entry in entries.items():
        first, last = entry["data_offsets"]
        if not 0 <= first <= last or not all(isinstance(n, int) and n >= 0 for n in entry["shape"]):
            raise ValueError(f"the entry of {key!r} is none")
    with path.open("rb") as file:
        start = 8 + int.from_bytes(file.read(8), "little")
    _check_length(path, start + max((entry["data_offsets"][1] for entry in entries.values()), default=0))
    return {
        key: TensorInfo(tuple(entry["shape"]), SAFETENSORS.get(entry["dtype"], str(entry["dtype"]).lower()))
        for key, entry in entries.items()
    }


def _check_length(path: Path, needed: int) -> None:
    """Raise InvalidFileError for a file that is shorter than what it says it holds."""
    if (size := path.stat().st_size) < needed:
        raise InvalidFileError(f"{path}: cut short, {size} bytes of {needed}; {AGAIN}")


def _zipped(path: Path) -> tuple[Any, tuple[str, ...]]:
    with zipfile.ZipFile(path) as archive:
        name = next((n for n in archive.namelist() if n.rpartition("/")[2] == "data.pkl"), None)
        if name is None:
            raise InvalidFileError(f"{path}: a zip archive without data.pkl; {AGAIN}")
        with archive.open(name) as file:
            machine = _Machine(file)
            return machine.load(), machine.asks_for


def _legacy(path: Path) -> tuple[Any, tuple[str, ...]]:
    with path.open("rb") as file:
        for _ in range(LEGACY_PREFACE):
            _Machine(file).load()
        machine = _Machine(file)
        value = machine.load()
        keys = _Machine(file).load()  # of the storages, whose lengths and bytes follow in this order
        _check_length(path, file.tell() + sum(8 + machine.storages.get(k, 0) for k in keys))
        return value, machine.asks_for


def _bytes_of(dtype: str) -> int:
    """The size of an element, by the bits in the name of its type."""
    bits = re.search(r"\d+", dtype)
    return int(bits[0]) // 8 if bits else int(dtype == "bool")


def _described(value: Any) -> str:
    """What an entry that is no set of weights is, in a few words."""
    if isinstance(value, TensorInfo):
        return f"{value.dtype} {list(value.shape)}"
    if isinstance(value, Instance):
        return type(value).global_name
    if isinstance(value, Mapping):
        return f"{len(value)} entries"
    if isinstance(value, list | tuple | set):
        return f"{type(value).__name__} of {len(value)}"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


# ---------------------------------------------------------------------- a pickle machine that runs nothing


class Instance:
    """What a global of the pickle that is not known was made into: nothing but what the pickle says of it.

    A pickle may fill it like a list, a dict or a set, or give it a state.
    """

    global_name = ""
    state: Any = None

    def __init__(self, *_arguments: Any, **_named: Any) -> None:
        """Called with anything, it does nothing."""

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        if not isinstance(self.state, dict):
            self.state = {}
        self.state[key] = value

    def append(self, value: Any) -> None:
        """For the opcodes that fill lists."""

    def extend(self, values: Any) -> None:
        """For the opcodes that fill lists."""

    def add(self, value: Any) -> None:
        """For the opcodes that fill sets."""


@dataclass(frozen=True, slots=True)
class _Storage:
    dtype: str


@dataclass(frozen=True, slots=True)
class _Type:
    """A storage class or a dtype of torch."""

    dtype: str

    def __call__(self, *_: Any) -> _Storage:
        return _Storage(self.dtype)


def _tensor(storage: Any, _offset: Any, size: Any, *rest: Any) -> TensorInfo:
    types = [r.dtype for r in rest if isinstance(r, _Type)]  # version 3 names the type beside an untyped storage
    return TensorInfo(_sizes(size), types[0] if types else getattr(storage, "dtype", "?"))


def _without_storage(dtype: Any, size: Any, *_: Any) -> TensorInfo:
    return TensorInfo(_sizes(size), getattr(dtype, "dtype", "?"))


def _sizes(size: Any) -> tuple[int, ...]:
    return tuple(n for n in size if isinstance(n, int))


def _first(value: Any, *_: Any) -> Any:
    return value


def _called(make: Callable[..., Any], _type: Any, arguments: Any, *_: Any) -> Any:
    return make(*arguments)


KNOWN: dict[str, Any] = {
    "builtins.set": set,
    "__builtin__.set": set,
    "collections.OrderedDict": OrderedDict,
    "torch.Size": tuple,
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor,
    "torch._utils._rebuild_qtensor": _tensor,
    "torch._utils._rebuild_meta_tensor_no_storage": _without_storage,
    "torch._utils._rebuild_parameter": _first,
    "torch._utils._rebuild_parameter_with_state": _first,
    **{
        f"torch.jit._pickle.{name}": _first
        for name in ("restore_type_tag", "build_intlist", "build_doublelist", "build_boollist", "build_tensorlist")
    },
    "torch._tensor._rebuild_from_type": _called,
    "torch._tensor._rebuild_from_type_v2": _called,
}
DTYPE = re.compile(r"torch\.((?:b?float|u?int|q?u?int|complex)\d+\w*|bool)")
STORAGE = re.compile(r"torch\.(?:storage\.|cuda\.)?(\w+?)Storage")
# Classes that torch itself reads with weights_only=True
HARMLESS = re.compile(r"torch\.(device|serialization\._get_layout|_utils\.\w+|_tensor\.\w+|nn\.parameter\.\w+)")


class _Machine(pickle._Unpickler):  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue, reportUntypedBaseClass]
    """Reads a pickle. Nothing that it can reach has an effect outside of the value it returns.

    The machine that is written in Python: the one in C makes room for as many objects as a pickle says it will number.
    """

    def __init__(self, file: IO[bytes]):
        super().__init__(file, encoding="latin-1")
        self._classes: dict[str, type[Instance]] = {}
        self.storages: dict[Any, int] = {}  # their bytes, by key

    @property
    def asks_for(self) -> tuple[str, ...]:
        """The globals that reading the file in earnest would import and perhaps call."""
        return tuple(n for n in self._classes if not HARMLESS.fullmatch(n))

    def find_class(self, module: str, name: str) -> Any:
        """The inert counterpart of a global."""
        full = f"{module}.{name}"
        if full in KNOWN:
            return KNOWN[full]
        if found := STORAGE.fullmatch(full):
            kind = str(found[1])
            return _Type(STORAGES.get(kind, kind.lower()))
        if found := DTYPE.fullmatch(full):
            return _Type(str(found[1]))
        if full not in self._classes:
            self._classes[full] = type("Instance", (Instance,), {"global_name": full})
        return self._classes[full]

    def persistent_load(self, pid: Any) -> Any:
        """A storage, of which only the type counts, or, in older files, a class that comes with its source text."""
        if not isinstance(pid, tuple) or len(pid) < 2:
            return _Storage("?")
        what, kind, *rest = pid
        if isinstance(kind, _Type):
            match rest:
                case [str() as key, _, int() as count, *_]:
                    self.storages[key] = count * _bytes_of(kind.dtype)
            return kind()
        return kind if what == "module" else _Storage("?")
