"""What is in this model file, read without running code from it, and its weights put into the network they belong to.

The format is recognised from the content, never from the suffix. What could run code while it is read is checked in
`archives`; the network for bare weights is built in `factories`.
"""

from __future__ import annotations

import difflib
import os
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .archives import AGAIN, GIB, damaged, member_names, read_pickle, read_program, some_of
from .errors import InvalidFileError, UsageError
from .factories import build_network
from .onnx_files import open_onnx

if TYPE_CHECKING:
    import onnx
    from torch import nn
    from torch.export import ExportedProgram

TORCH_MAGIC = bytes.fromhex("6cfc9c46f9206aa85019")  # the first object in a torch.save file older than the zip format

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
    kind = recognise(path)
    if kind in ("onnx", "exported-program"):
        model = open_onnx(path).load() if kind == "onnx" else read_program(path, trust_pickle)
        if factory is not None:
            raise UsageError(f"{path}: a whole model ({kind}); leave out --factory, which serves files of weights only")
        return Loaded(model, kind)
    stored = _read_safetensors(path) if kind == "safetensors" else read_pickle(path, trust_pickle)
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
    network, name = build_network(factory, factory_args or {})
    _fit(path, network, value, name, notes)
    return Loaded(network, "state-dict", tuple(notes), _declared_shapes(network))


# --- what the file is


def recognise(path: Path) -> str:
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
        return _recognise_zip(path)
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


def _recognise_zip(path: Path) -> str:
    names = [n.partition("/")[2] or n for n in member_names(path)]
    if "data.pkl" in names and ("constants.pkl" in names or any(n.startswith("code/") for n in names)):
        raise InvalidFileError(
            f"{path}: a TorchScript archive, which is not read yet; export the module it was made from "
            "(torch.export.save), or save its state_dict() and pass --factory"
        )
    if "data.pkl" in names:
        return "torch"
    if "serialized_exported_program.json" in names or any(re.match(r"models/.*\.json$", n) for n in names):
        return "exported-program"
    raise InvalidFileError(f"{path}: a zip archive without a model (it holds {some_of(names)}); unpack it first")


# --- reading what holds no code


def _read_safetensors(path: Path) -> Any:
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except Exception as error:
        raise damaged(path, error) from None


# --- what to take from a checkpoint


def _choose(path: Path, stored: Any) -> tuple[str, Any, list[str]]:
    """Where the module or state dict to use is ("a.b", or "" at the top), itself, and notes. Raw goes before EMA."""
    found = [(".".join(where), where, value) for where, value in _candidates(stored)]
    known = [f for f in found if all(k in WRAPPERS or EMA.search(k) for k in f[1])]
    averaged = [f for f in known if any(map(EMA.search, f[1]))]
    raw = [f for f in known if f not in averaged]
    if not found:
        keys = f" with the keys {some_of(stored)}" if isinstance(stored, Mapping) else ""
        raise InvalidFileError(
            f"{path}: holds a {type(stored).__name__}{keys}, neither a network nor its weights; save model.state_dict()"
        )
    if not known and len(found) > 1:
        sets = some_of(f[0] for f in found)
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
        found = [
            f"{len(k)} keys {w} ({some_of(k)})" for k, w in ((missing, "missing"), (unexpected, "unexpected")) if k
        ]
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
