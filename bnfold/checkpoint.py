"""What is in this model file, read without running code from it, and the network a factory builds for bare weights.

The format is recognised from the content, never from the suffix. Pickles are read with `weights_only=True`; a file
that needs more is refused unless the caller trusts it (`trust_pickle`). An exported program is checked member by member
before torch sees it, for `torch.export.load` unpickles what it finds and evaluates strings of the program as Python.
"""

from __future__ import annotations

import ast
import difflib
import importlib
import importlib.util
import io
import json
import logging
import os
import pickle
import pickletools
import re
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from .errors import InvalidFileError, UsageError

if TYPE_CHECKING:
    import onnx
    from torch import nn
    from torch.export import ExportedProgram

GIB = 1 << 30
TORCH_MAGIC = bytes.fromhex("6cfc9c46f9206aa85019")  # the first object in a torch.save file older than the zip format
AGAIN = "copy or download it again"

# Where training scripts put the weights, best first, and what wrappers put in front of every key.
WRAPPERS = ("state_dict", "model_state_dict", "model", "net", "network", "module", "params", "weights")
PREFIXES = ("module.", "_orig_mod.", "model.", "net.", "backbone.")
EMA = re.compile(r"(^|_)ema(_|$)")

# Files that are given for a model by mistake, by how they begin.
STRANGERS = {
    rb"$": f"is empty; {AGAIN}",
    rb"\s*<(!doctype|html)": "an HTML page, perhaps an error or login page saved as the model; download it again",
    rb"version https://git-lfs": "a Git LFS pointer, not the model; run `git lfs pull` where it was cloned",
    rb"\x80[\x02-\x05]": "a plain pickle, not written by torch.save; save model.state_dict() with torch.save",
    rb"\x89HDF": "an HDF5 (Keras) file, which is not read; export the model to ONNX",
    rb".{4}TFL3": "a TensorFlow Lite file, which is not read; export the model to ONNX",
    rb"\x1f\x8b|BZh|\xfd7zXZ|\x28\xb5\x2f\xfd|.{257}ustar": "a compressed file or a tar archive; unpack it first",
}


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model as its file holds it, and what was decided on the way.

    `kind` is "state-dict" (a factory's network with the file's weights), "module", "exported-program" or "onnx";
    `notes` are lines for the report. `default_shapes` are the input shapes the network itself declares (timm's
    `input_size`), with a batch of 2 because `torch.export` specialises a batch of 1; None when it declares none.
    """

    model: Any
    kind: str
    notes: tuple[str, ...] = ()
    default_shapes: tuple[tuple[int, ...], ...] | None = None


def load(
    path: str | os.PathLike[str],
    *,
    factory: str | Callable[..., nn.Module] | None = None,
    factory_args: Mapping[str, Any] | None = None,
    trust_pickle: bool = False,
) -> nn.Module | ExportedProgram | onnx.ModelProto:
    """The model in a file: a PyTorch checkpoint, safetensors, an exported program (`.pt2`) or ONNX.

    `factory` builds the network for a file that holds weights only: a callable, "package.module:callable" or
    "path/net.py:callable", called with `factory_args`. `trust_pickle` lets the file run code while it is read. The
    module keeps the train or eval state it was built or stored with. Raises InvalidFileError when the file is missing,
    damaged, unsafe or does not fit the network; UsageError when the factory is missing or wrong.
    """
    return load_detailed(path, factory=factory, factory_args=factory_args, trust_pickle=trust_pickle).model


def load_detailed(
    path: str | os.PathLike[str],
    *,
    factory: str | Callable[..., nn.Module] | None = None,
    factory_args: Mapping[str, Any] | None = None,
    trust_pickle: bool = False,
) -> Loaded:
    """As `load`, with the kind of the file and notes for the report."""
    path = Path(path)
    kind = _recognise(path)
    if kind in ("onnx", "exported-program"):
        model = _read_onnx(path) if kind == "onnx" else _read_program(path, trust_pickle)
        if factory is not None:
            raise UsageError(f"{path}: a whole model ({kind}); leave out --factory, which serves files of weights only")
        return Loaded(model, kind)
    stored = _read_safetensors(path) if kind == "safetensors" else _read_pickle(path, trust_pickle)
    where, value, notes = _choose(path, stored)
    if not isinstance(value, Mapping):
        value = _unwrap(value, notes)
        if factory is None:
            return Loaded(value, "module", tuple(notes), _declared_shapes(value))
        value = value.state_dict()
    if factory is None:
        keys = [k for k, v in value.items() if _is_tensor(v)]
        raise UsageError(
            f"{path}: holds weights only ({len(keys)} tensors{where and f' under {where!r}'}, e.g. {keys[0]!r}); "
            "pass --factory package.module:callable that builds the network"
        )
    network, name = _build(factory, factory_args or {})
    _fit(path, network, value, name, notes)
    return Loaded(network, "state-dict", tuple(notes), _declared_shapes(network))


# --- what the file is


def _recognise(path: Path) -> str:
    """One of "torch", "safetensors", "exported-program", and "onnx" when there is no sign of anything else."""
    try:
        if path.is_dir():
            raise InvalidFileError(f"{path}: is a folder; name the model file in it")
        size = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(512)
    except FileNotFoundError:
        raise InvalidFileError(f"{path}: no such file (looked from {Path.cwd()}); check the path") from None
    except OSError as error:
        raise InvalidFileError(f"{path}: cannot be read ({error.strerror}); check path and permissions") from None
    if head.startswith(b"PK"):
        return _recognise_zip(path, size)
    if head.startswith(b"\x80") and TORCH_MAGIC in head:
        return "torch"
    length = int.from_bytes(head[:8], "little")
    if head[8:9] == b"{" and length < GIB:
        if length > size - 8:
            raise InvalidFileError(f"{path}: a safetensors file cut short; {AGAIN}")
        return "safetensors"
    for pattern, found in STRANGERS.items():
        if re.match(pattern, head, re.IGNORECASE | re.DOTALL):
            raise InvalidFileError(f"{path}: {found}")
    return "onnx"


def _recognise_zip(path: Path, size: int) -> str:
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
    except (zipfile.BadZipFile, OSError, ValueError) as error:
        raise InvalidFileError(f"{path}: a zip archive cut short or damaged ({_line(error)}); {AGAIN}") from None
    total = sum(m.file_size for m in members)
    for name, unpacked, packed in [*((m.filename, m.file_size, m.compress_size) for m in members), ("", total, size)]:
        if name.startswith(("/", "\\")) or ":" in name or ".." in re.split(r"[/\\]", name):
            raise InvalidFileError(f"{path}: unsafe, its member {name!r} lies outside the archive; do not use it")
        if unpacked > max(GIB, 100 * packed):
            raise InvalidFileError(f"{path}: unsafe, {packed} bytes of it unpack to {unpacked}; do not use it")
    names = [m.filename.partition("/")[2] or m.filename for m in members]
    if "data.pkl" in names and ("constants.pkl" in names or any(n.startswith("code/") for n in names)):
        raise InvalidFileError(
            f"{path}: a TorchScript archive, which is not read yet; export the module it was made from "
            "(torch.export.save), or save its state_dict() and pass --factory"
        )
    if "data.pkl" in names:
        return "torch"
    if "serialized_exported_program.json" in names or any(re.match(r"models/.*\.json$", n) for n in names):
        return "exported-program"
    raise InvalidFileError(f"{path}: a zip archive without a model (it holds {_names(names)}); unpack it first")


# --- reading it


def _read_safetensors(path: Path) -> Any:
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except Exception as error:
        raise _damaged(path, error) from None


def _read_pickle(path: Path, trust_pickle: bool) -> Any:
    import torch

    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        with path.open("rb") as file:
            asked = _asked(file)
        if asked is None:
            raise _damaged(path, error) from None
        if not trust_pickle:
            what = f"asks for {_names(asked)}" if asked else f"is more than torch reads as weights ({_line(error)})"
            raise _unsafe(path, f"a pickle that {what}", "save model.state_dict() and pass --factory") from None
    except Exception as error:
        raise _damaged(path, error) from None
    try:
        with _importable(Path.cwd()):
            return torch.load(path, map_location="cpu", weights_only=False)
    except (ImportError, AttributeError) as error:
        raise InvalidFileError(
            f"{path}: the code it needs is not importable ({_line(error)}); run where that is, or set PYTHONPATH"
        ) from None
    except Exception as error:
        raise _damaged(path, error) from None


def _read_program(path: Path, trust_pickle: bool) -> ExportedProgram:
    import torch

    members: dict[str, bytes] = {}
    try:
        with zipfile.ZipFile(path) as source:
            for info in source.infolist():
                if info.filename in members:
                    raise InvalidFileError(f"{path}: unsafe, it holds {info.filename!r} twice; do not use it")
                members[info.filename] = source.read(info)
    except InvalidFileError:
        raise
    except Exception as error:
        raise _damaged(path, error) from None
    if not trust_pickle:
        _check_program(path, members)
    # torch gets this copy, not the file: two zip readers can see different members in one crafted archive.
    copy = io.BytesIO()
    with zipfile.ZipFile(copy, "w") as target:
        for name in list(members):
            target.writestr(name, members.pop(name))
    copy.seek(0)
    with _kept_log() as logged:
        try:
            program = torch.export.load(copy)
        except Exception as error:
            cause = _line(logged[-1] if logged and type(error) is RuntimeError else error)
            raise InvalidFileError(
                f"{path}: torch {torch.__version__} cannot read this program ({cause}); export it again with it"
            ) from None
    if not trust_pickle:
        program._guards_code = []  # checks of the inputs, as strings that ExportedProgram.module() would compile
    return program


@contextmanager
def _kept_log() -> Iterator[list[BaseException]]:
    """Keep what torch.export.load logs off the screen; the list gets the errors, whose causes it raises without."""
    errors: list[BaseException] = []

    def keep(record: logging.LogRecord) -> bool:
        errors.extend(e for e in record.exc_info or () if isinstance(e, BaseException))
        return False

    names = ("torch.export", "torch.export.pt2_archive._package", "torch._export.serde.serialize")
    loggers = [logging.getLogger(name) for name in names]
    for logger in loggers:
        logger.addFilter(keep)
    try:
        yield errors
    finally:
        for logger in loggers:
            logger.removeFilter(keep)


def _read_onnx(path: Path) -> onnx.ModelProto:
    import onnx
    from onnx.external_data_helper import load_external_data_for_model

    problem = "no ir_version, graph or opset_import"
    try:
        model = onnx.load_model_from_string(path.read_bytes())
    except Exception as error:
        model, problem = onnx.ModelProto(), _line(error)
    if not (model.ir_version and model.HasField("graph") and model.opset_import):
        if path.suffix == ".onnx":
            raise InvalidFileError(f"{path}: not a valid ONNX model ({problem}); copy or export it again")
        raise InvalidFileError(
            f"{path}: no model that bnfold knows; it reads torch.save, safetensors, torch.export (.pt2) and ONNX files"
        )
    for tensor in _tensors_of(model):
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            _check_external(path, tensor.name, {entry.key: entry.value for entry in tensor.external_data})
    try:
        load_external_data_for_model(model, str(path.parent))
    except Exception as error:
        raise _damaged(path, error) from None
    return model


def _tensors_of(message: Any) -> Iterator[onnx.TensorProto]:
    """Every tensor in a protobuf message: initializers, attributes, subgraphs, functions, parts of sparse tensors."""
    if message.DESCRIPTOR.full_name == "onnx.TensorProto":
        yield message
        return
    for field, value in message.ListFields():
        if field.message_type is not None:
            for part in [value] if hasattr(value, "ListFields") else value:
                yield from _tensors_of(part)


def _check_external(path: Path, tensor: str, entry: Mapping[str, str]) -> None:
    location = entry.get("location", "")
    file = path.parent / location  # an absolute location replaces the folder
    if ".." in re.split(r"[/\\]", location) or not file.resolve().is_relative_to(path.parent.resolve()):
        raise InvalidFileError(
            f"{path}: unsafe, the data of '{tensor}' is at {location!r}, outside the model's folder; do not use it"
        )
    if not file.is_file():
        raise InvalidFileError(f"{path}: its external data file {location!r} is missing; put it beside the model")
    needed = [entry.get(k, "0") for k in ("offset", "length")]
    if not all(n.isdecimal() for n in needed) or sum(map(int, needed)) > file.stat().st_size:
        raise InvalidFileError(f"{path}: its external data file {location!r} is cut short; {AGAIN}")


# --- what an exported program may contain

TEXT = re.compile(r"([^/]+/)?(archive_format|archive_version|version|byteorder|\.data/\w+)|[^/]+/extra/.*")
RAW_TENSOR = re.compile(r"[^/]+/data/(weights/weight|constants/tensor)_\d+")
NAME = re.compile(r"[\w.:@#+/$-]*")
OPERATOR = re.compile(
    r"torch\.ops\.(?!aten\.(save|from_file)\b)(aten|prims?|higher_order|quantized|quantized_decomposed|torchvision)"
    r"\.\w+(\.\w+)?|torch\.sym_\w+|torch\._sym_sqrt|math\.\w+|_operator\.(add|and_|eq|floordiv|ge|getitem|gt|le|lshift"
    r"|lt|mod|mul|ne|neg|or_|pos|pow|rshift|sub|truediv)"
)
FORMULA = ast.Expression | ast.Constant | ast.Name | ast.Call | ast.keyword | ast.BinOp | ast.UnaryOp | ast.Compare
FORMULA_PARTS = ast.BoolOp | ast.Tuple | ast.expr_context | ast.operator | ast.unaryop | ast.boolop | ast.cmpop


def _check_program(path: Path, members: Mapping[str, bytes]) -> None:
    """Refuse an exported program whose reading, tracing or running could run code that came with the file.

    Every member must be JSON without code, one of torch's short texts, raw bytes of a tensor, or must load with
    `weights_only=True`: what torch unpickles is then harmless wherever it looks for it.
    """
    import torch

    advice = "export it again with plain tensors as inputs"
    documents: dict[str, Any] = {}
    for name, data in members.items():
        if "data/aotinductor/" in name.lower():
            raise _unsafe(path, f"native code ({name!r})", "use the program it was compiled from")
        with suppress(ValueError, RecursionError):
            documents[name] = json.loads(data.decode())
        if code := _code_in(documents.get(name)):
            raise _unsafe(path, f"a program that spells a name or a shape {code[:80]!r}", advice)
    configs = [d["config"] for d in documents.values() if isinstance(d, dict) and isinstance(d.get("config"), dict)]
    payloads = [p for config in configs for p in config.values() if isinstance(p, dict)]
    pickled = {str(p.get("path_name")).lower() for p in payloads if p.get("use_pickle", True)}
    for name, data in members.items():
        raw = RAW_TENSOR.fullmatch(name) and name.rpartition("/")[2] not in pickled  # torch ignores case in names
        if raw or not data or name in documents or TEXT.fullmatch(name):
            continue
        try:
            torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except Exception as error:
            what = _names(_asked(io.BytesIO(data)) or ()) or "more than tensors, or is damaged"
            raise _unsafe(path, f"its member {name!r} asks for {what} ({_line(error)})", advice) from None


def _code_in(value: Any, key: str = "") -> str:
    """A string of a serialized program that may be more than a name, a shape or an operator of torch; else "".

    torch evaluates `expr_str` with sympy, looks `target` up from the torch module, writes names into generated Python
    and imports what `__enum__` and `default_factory_module` in the structure of the inputs say.
    """
    if key in ("metadata", "as_string", "as_strings", "guards_code"):  # text to torch; the guards are dropped later
        return ""
    if isinstance(value, dict):
        if "__enum__" in value or "default_factory_module" in value:
            return str(value)
        return next(filter(None, (_code_in(k) or _code_in(v, k) for k, v in value.items())), "")
    if isinstance(value, list):
        return next(filter(None, (_code_in(v, key) for v in value)), "")
    accepts = {"expr_str": _is_formula, "target": OPERATOR.fullmatch, "as_operator": OPERATOR.fullmatch}
    if not isinstance(value, str) or accepts.get(key, NAME.fullmatch)(value):
        return ""
    with suppress(ValueError, RecursionError):
        if key in ("in_spec", "out_spec", "context"):  # JSON inside JSON
            return _code_in(json.loads(value))
    return value


def _is_formula(text: str) -> bool:
    """Whether sympy only builds an expression from this: numbers, symbols, arithmetic, classes called by their names.

    Evaluating it sees Python's builtin functions too, but their names begin in lower case.
    """
    try:
        nodes = list(ast.walk(ast.parse(text, mode="eval")))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    called = [n.func for n in nodes if isinstance(n, ast.Call)]
    words = [str(n.value) for n in nodes if isinstance(n, ast.Constant)]
    return (
        text.isascii()
        and all(isinstance(n, FORMULA | FORMULA_PARTS) for n in nodes)
        and all(isinstance(f, ast.Name) and f.id[:1].isupper() for f in called)
        and all(re.fullmatch(r"[\w.+-]*", w) for w in words)
    )


# --- what to take from a checkpoint


def _choose(path: Path, stored: Any) -> tuple[str, Any, list[str]]:
    """Where the module or state dict to use is ("a.b", or "" at the top), itself, and notes. Raw goes before EMA."""
    found = [(".".join(where), where, value) for where, value in _candidates(stored)]
    known = [f for f in found if all(k in WRAPPERS or EMA.search(k) for k in f[1])]
    averaged = [f for f in known if any(map(EMA.search, f[1]))]
    raw = [f for f in known if f not in averaged]
    if not found:
        keys = f" with the keys {_names(stored)}" if isinstance(stored, Mapping) else ""
        raise InvalidFileError(
            f"{path}: holds a {type(stored).__name__}{keys}, neither a network nor its weights; save model.state_dict()"
        )
    if not known and len(found) > 1:
        sets = _names(f[0] for f in found)
        raise InvalidFileError(f"{path}: holds several sets of weights ({sets}); save the one you want by itself")
    where, _, value = (raw or averaged or found)[0]
    notes = [f"weights taken from '{where}'"] if where else []
    if raw and averaged:
        notes.append(f"the averaged copy under '{averaged[0][0]}' is not used")
    return where, value, notes


def _candidates(value: Any, where: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Modules and state dicts at the top or up to two keys below it, those under well-known keys first."""
    from torch import nn

    if isinstance(value, nn.Module):
        yield where, value
    elif isinstance(value, Mapping) and all(isinstance(k, str) for k in value):
        inner = [(k, v) for k, v in value.items() if isinstance(v, Mapping | nn.Module)]
        if not inner and any(map(_is_tensor, value.values())):
            yield where, value
        elif len(where) < 2:
            for key, part in sorted(inner, key=lambda kv: WRAPPERS.index(kv[0]) if kv[0] in WRAPPERS else 99):
                yield from _candidates(part, (*where, key))


def _unwrap(module: nn.Module, notes: list[str]) -> nn.Module:
    inside = {"DataParallel": "module", "DistributedDataParallel": "module", "OptimizedModule": "_orig_mod"}
    while attribute := inside.get(type(module).__name__):
        notes.append(f"{type(module).__name__} taken off")
        module = getattr(module, attribute)
    return module


def _is_tensor(value: Any) -> bool:
    import torch

    return isinstance(value, torch.Tensor)


def _declared_shapes(network: nn.Module) -> tuple[tuple[int, ...], ...] | None:
    config = getattr(network, "pretrained_cfg", None) or getattr(network, "default_cfg", None)
    size = config.get("input_size") if isinstance(config, Mapping) else None
    return ((2, *size),) if isinstance(size, tuple | list) and all(isinstance(n, int) for n in size) else None


# --- weights into a network


def _fit(path: Path, network: nn.Module, stored: Mapping[str, Any], name: str, notes: list[str]) -> None:
    """Load every stored tensor into its place in the network. Raises InvalidFileError unless all of them fit."""
    import torch

    prefix = _prefix(stored, network.state_dict())
    if prefix:
        notes.append(f"prefix '{prefix}' taken off the keys")
    kept = [k for k, v in stored.items() if _is_tensor(v) or k.endswith("_extra_state")]
    if len(kept) < len(stored):
        notes.append(f"{len(stored) - len(kept)} entries that are no tensors are ignored")
    tensors = OrderedDict((k[len(prefix) :], stored[k]) for k in kept)
    if versions := getattr(stored, "_metadata", None):  # of the module classes; torch migrates old layouts by them
        inner = {k: v for k, v in versions.items() if f"{k}.".startswith(prefix)}
        vars(tensors)["_metadata"] = {f"{k}."[len(prefix) : -1]: v for k, v in inner.items()}
    _adopt_types(network, tensors, notes)
    places = network.state_dict(keep_vars=True)
    misfit, advice = f"{path}: does not fit the network of {name}", "pass the factory and arguments it was trained with"
    try:
        # copied in place: assign=True would break ties, and requires_grad would follow the file
        missing, unexpected = network.load_state_dict(tensors, strict=False)
    except RuntimeError as error:
        pairs = [(k, tuple(v.shape), tuple(places[k].shape)) for k, v in tensors.items() if k in places]
        wrong = [f"'{k}' is {file} in the file, {own} in the network" for k, file, own in pairs if file != own]
        what = f"{len(wrong)} shapes differ: {'; '.join(wrong[:3])}" if wrong else " ".join(str(error).split())
        raise InvalidFileError(f"{misfit}, {what}; {advice}") from None
    names: dict[int, str] = {}  # of each parameter, the first; tied ones have more, and a file may hold only one
    for key in [k for k in tensors if k in places]:
        first = names.setdefault(id(places[key]), key)
        if first != key and not torch.equal(tensors[first], tensors[key]):
            raise InvalidFileError(f"{misfit}, which ties '{first}' and '{key}': they differ in the file; {advice}")
    missing = [k for k in missing if not k.endswith("num_batches_tracked") and id(places.get(k)) not in names]
    if missing or unexpected:
        found = [f"{len(k)} keys {w} ({_names(k)})" for k, w in ((missing, "missing"), (unexpected, "unexpected")) if k]
        keys, others = (missing, unexpected) if missing else (unexpected, list(places))
        close = [(k, difflib.get_close_matches(k, others, 1)) for k in keys[:3]]
        nearest = ", ".join(f"'{k}' ~ '{match[0]}'" for k, match in close if match)
        raise InvalidFileError(f"{misfit}: {' and '.join(found)}{nearest and '; nearest: ' + nearest}; {advice}")


def _prefix(keys: Iterable[str], wanted: Mapping[str, Any]) -> str:
    """The stack of wrapper prefixes, common to all keys, without which most of them match; "" if none helps."""
    keys = list(keys)
    best, most, stack = "", sum(k in wanted for k in keys), ""
    while step := next((p for p in PREFIXES if all(k.startswith(stack + p) for k in keys)), ""):
        stack += step
        if (count := sum(k[len(stack) :] in wanted for k in keys)) > most:
            best, most = stack, count
    return best


def _adopt_types(network: nn.Module, tensors: Mapping[str, Any], notes: list[str]) -> None:
    """Give the network the half precision types of the file; other types are copied into the network's own."""
    import torch

    floats = {k: t for k, t in tensors.items() if _is_tensor(t) and t.is_floating_point()}
    types = {t.dtype for k, t in floats.items() if not k.endswith("num_batches_tracked")}
    if not types & {torch.float16, torch.bfloat16}:
        return
    if len(types) == 1:
        network.to(next(iter(types)))
    for key, own in network.state_dict(keep_vars=True).items():
        if key in floats and own.is_floating_point():
            own.data = own.data.to(floats[key].dtype)  # the same parameter, so that ties hold
    notes.append(f"the network takes the stored types: {', '.join(sorted(str(t)[6:] for t in types))}")


# --- factories


def parse_factory_args(items: Sequence[str]) -> dict[str, Any]:
    """Keyword arguments from "key=value": the value is JSON or True, False, None where it reads so, else text."""
    args: dict[str, Any] = {}
    for item in items:
        key, equals, text = item.partition("=")
        if not equals or not key.isidentifier():
            raise UsageError(f"--factory-arg {item!r} is not of the form key=value, e.g. num_classes=10")
        words = {"True": True, "False": False, "None": None}
        args[key] = words.get(text, text)
        with suppress(ValueError):
            args[key] = json.loads(text)
    return args


def resolve_factory(spec: str) -> Callable[..., Any]:
    """The callable that "package.module:attribute.attribute" or "path/net.py:attribute" names, else a UsageError."""
    target, colon, attributes = spec.rpartition(":")
    if not colon or not target or not attributes:
        raise UsageError(
            f"--factory {spec!r} has no module or no callable; write package.module:callable or net.py:Net"
        )
    value: Any = _import(spec, target)
    for part in attributes.split("."):
        if not hasattr(value, part):
            close = difflib.get_close_matches(part, dir(value), 3)
            hint = f"did you mean {' or '.join(close)}?" if close else "check the spelling"
            raise UsageError(f"--factory {spec!r}: {target} has no {part!r}; {hint}")
        value = getattr(value, part)
    if not callable(value):
        raise UsageError(
            f"--factory {spec!r} is no callable but a {type(value).__name__}; name what builds the network"
        )
    return value


def _import(spec: str, target: str) -> Any:
    file = Path(target).resolve() if target.endswith(".py") else None
    if file and not file.is_file():
        raise UsageError(f"--factory {spec!r}: no such file {file}; check the path")
    importlib.invalidate_caches()
    try:
        with _importable(file.parent if file else Path.cwd()):
            if not file:
                return importlib.import_module(target)
            found = importlib.util.spec_from_file_location(f"_bnfold_factory_{file.stem}", file)
            assert found
            assert found.loader
            module = sys.modules[found.name] = importlib.util.module_from_spec(found)
            found.loader.exec_module(module)
            return module
    except ModuleNotFoundError as error:
        if not file and error.name and f"{target}.".startswith(f"{error.name}."):
            raise UsageError(
                f"--factory {spec!r}: no module {error.name!r} in {Path.cwd()}, PYTHONPATH or what is installed; "
                "run where it is, or set PYTHONPATH"
            ) from None
        raise UsageError(f"--factory {spec!r}: importing {target} failed ({_line(error)}); mend it first") from error
    except (Exception, SystemExit) as error:
        raise UsageError(f"--factory {spec!r}: importing {target} failed ({_line(error)}); mend it first") from error


def _build(factory: str | Callable[..., Any], args: Mapping[str, Any]) -> tuple[nn.Module, str]:
    from torch import nn

    build = resolve_factory(factory) if isinstance(factory, str) else factory
    name = factory if isinstance(factory, str) else getattr(factory, "__qualname__", repr(factory))
    try:
        with _importable(Path.cwd()):
            network = build(**args)
    except Exception as error:
        raise UsageError(f"the factory {name} failed ({_line(error)}); check it and each --factory-arg") from error
    if not isinstance(network, nn.Module):
        raise UsageError(f"the factory {name} returned a {type(network).__name__}; it must return a torch.nn.Module")
    if any(t.is_meta for t in network.state_dict().values() if _is_tensor(t)):
        raise UsageError(f"the factory {name} built the network on the meta device; let it build on the CPU")
    return network, name


@contextmanager
def _importable(folder: Path) -> Iterator[None]:
    """Let modules in a folder be imported, as `python -m` lets those in the current one."""
    entry = str(folder)
    absent = entry not in sys.path
    if absent:
        sys.path.insert(0, entry)
    try:
        yield
    finally:
        if absent:
            with suppress(ValueError):
                sys.path.remove(entry)


# --- words for messages


def _asked(file: IO[bytes]) -> list[str] | None:
    """What the pickles in a torch.save file ask for beyond tensors, found without running them; None if damaged."""
    names: dict[str, None] = {}
    try:
        if zipfile.is_zipfile(file):
            archive = zipfile.ZipFile(file)
            file = io.BytesIO(archive.read(next(n for n in archive.namelist() if n.endswith("data.pkl"))))
        file.seek(0)
        for _ in range(5):  # a file older than the zip format holds five pickles, the fourth of which is the object
            words, memo = [""], {}
            for opcode, argument, _ in pickletools.genops(file):
                if opcode.name in ("GLOBAL", "INST"):
                    names[str(argument).replace(" ", ".")] = None
                elif opcode.name == "STACK_GLOBAL":
                    names[".".join(words[-2:])] = None
                elif opcode.name == "MEMOIZE":
                    memo[len(memo)] = words[-1]
                elif opcode.name in ("BINGET", "LONG_BINGET") or isinstance(argument, str):
                    words.append(argument if isinstance(argument, str) else memo.get(argument, ""))
            if not file.read(1):
                break
            file.seek(-1, os.SEEK_CUR)
    except Exception:
        return None
    types = r"\w+Storage|(b?float|u?int|complex)\d+|bool|Size|device"
    return [n for n in names if not re.fullmatch(rf"collections\.OrderedDict|torch\.(_utils\.\w+|{types})", n)]


def _unsafe(path: Path, what: str, advice: str) -> InvalidFileError:
    return InvalidFileError(
        f"{path}: {what}: reading it could run code from the file; {advice}, or pass --trust-pickle if you trust it"
    )


def _damaged(path: Path, error: Exception) -> InvalidFileError:
    return InvalidFileError(f"{path}: damaged or cut short ({_line(error)}); {AGAIN}")


def _names(names: Iterable[Any]) -> str:
    shown = [str(n) for n in names]
    return ", ".join(shown[:3]) + (f" and {len(shown) - 3} more" if len(shown) > 3 else "")


def _line(error: BaseException) -> str:
    text = str(error)
    cause = re.search(r"WeightsUnpickler error: \s*(.*)", text)  # torch wraps the cause in advice
    first = cause[1] if cause else next(iter(text.strip().splitlines()), "")
    return f"{type(error).__name__}: {first[:200]}".rstrip(": ")
