"""What is in this model file, read without running code from it, and its weights put into the network they belong to.

The format is recognised from the content, never from the suffix. What could run code while it is read is checked in
`archives`; the network for bare weights is built in `factories`.
"""

from __future__ import annotations

import difflib
import os
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .archives import damaged, read_pickle, read_program
from .errors import InvalidFileError, UsageError, about, some_of
from .factories import build_network
from .onnx_files import open_onnx
from .recognition import Reading, recognise, safetensors_header, shards_of
from .selection import Looks, NotChosenError, Prefix, choose, prefix_of, sets_of_weights

if TYPE_CHECKING:
    import onnx
    from torch import nn
    from torch.export import ExportedProgram


@dataclass(frozen=True, slots=True, eq=False)
class Origin:
    """Where a network was in its checkpoint: all that is needed to put another one in its place.

    `stored` is the whole checkpoint, `where` the keys that lead to `weights`, of which `keys` belong to the network,
    behind `prefix`. `wrapper` is the module around a pickled network and the attribute that holds it; `metadata` is
    that of a safetensors file.
    """

    kind: str  # as recognise has it
    stored: Any
    where: tuple[str, ...]
    weights: Any
    prefix: str = ""
    keys: frozenset[str] = frozenset()
    wrapper: tuple[Any, str] | None = None
    is_legacy: bool = False
    metadata: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model as its file holds it, and what was decided on the way.

    `kind` is "state-dict" (a factory's network with the file's weights), "module", "torchscript", "exported-program"
    or "onnx"; `notes` are lines for the report. `shapes` are those of the inputs where the file itself says them, with
    a batch of at least 2, because a batch of 1 is specialised when a graph is captured.
    """

    model: Any
    kind: str
    notes: tuple[str, ...] = ()
    shapes: tuple[tuple[int, ...], ...] | None = None
    origin: Origin | None = field(default=None, repr=False, compare=False)


def load(
    path: str | os.PathLike[str],
    *,
    factory: str | Callable[..., nn.Module] | None = None,
    factory_args: Mapping[str, Any] | None = None,
    trust_pickle: bool = False,
    key: str | None = None,
    ema: bool = False,
    allow_missing: bool = False,
) -> nn.Module | ExportedProgram | onnx.ModelProto:
    """The model in a file: a PyTorch checkpoint, safetensors, TorchScript, an exported program (`.pt2`) or ONNX.

    The keywords are those of `Reading`. The module keeps the train or eval state it was built or stored with. Raises
    InvalidFileError when the file is missing, damaged, unsafe or does not fit the network; UsageError when the factory
    is missing or wrong.
    """
    return load_detailed(path, Reading(factory, factory_args or {}, trust_pickle, key, ema, allow_missing)).model


def load_detailed(path: str | os.PathLike[str], reading: Reading | None = None) -> Loaded:
    """As `load`, with the kind of the file and notes for the report."""
    path, reading = Path(path), reading or Reading()
    kind = recognise(path)
    if kind in ("onnx", "exported-program", "torchscript"):
        loaded = _whole_model(path, kind, reading.trust_pickle)
        if reading.factory is not None:
            raise UsageError(f"{path}: a whole model ({kind}); leave out --factory, which serves files of weights only")
        return loaded
    from .graphs.torch_trial import check_values, check_weights

    stored = _read_weights(path, kind, reading.trust_pickle)
    where, value, notes = _chosen(path, stored, reading)
    legacy = kind == "torch" and not zipfile.is_zipfile(path)
    origin = Origin(kind, stored, where, value, is_legacy=legacy, metadata=_metadata_of(path, kind))
    if not isinstance(value, Mapping):
        value, wrapper = _unwrap(value, notes)
        with about(path, UsageError, raised=InvalidFileError):
            check_weights(value)
        if reading.factory is None:
            return Loaded(value, "module", tuple(notes), origin=replace(origin, weights=value, wrapper=wrapper))
        value = value.state_dict()
    with about(path, UsageError, raised=InvalidFileError):
        for name, entry in value.items():
            for tensor in entry if isinstance(entry, tuple) else (entry,):  # quantized layers pack weight and bias
                if _is_tensor(tensor):
                    check_values(name, tensor)
    if reading.factory is None:
        keys = [k for k, v in value.items() if _is_tensor(v)]
        under = f" under {'.'.join(where)!r}" if where else ""
        raise UsageError(
            f"{path}: holds weights only ({len(keys)} tensors{under}, e.g. {keys[0]!r}); "
            "pass --factory package.module:callable that builds the network"
        )
    network, built = build_network(reading.factory, reading.factory_args)
    found = _fit(path, network, value, built, reading, notes)
    origin = replace(origin, weights=value, prefix=found.text, keys=frozenset(found.keys))
    return Loaded(network, "state-dict", tuple(notes), origin=origin)


# --- reading


def _whole_model(path: Path, kind: str, trust_pickle: bool) -> Loaded:
    if kind == "torchscript":
        from .scripts import read_script

        script, shapes = read_script(path, trust_pickle)
        return Loaded(script, kind, shapes=shapes)
    return Loaded(open_onnx(path).load() if kind == "onnx" else read_program(path, trust_pickle), kind)


def _read_weights(path: Path, kind: str, trust_pickle: bool) -> Any:
    if kind == "sharded":
        merged: dict[str, Any] = {}
        for shard in shards_of(path):
            merged.update(_read_weights(shard, recognise(shard), trust_pickle))
        return merged
    return _read_safetensors(path) if kind == "safetensors" else read_pickle(path, trust_pickle)


def _metadata_of(path: Path, kind: str) -> Mapping[str, str]:
    return safetensors_header(path).get("__metadata__") or {} if kind == "safetensors" else {}


def _read_safetensors(path: Path) -> Any:
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except Exception as error:
        raise damaged(path, error) from None


# --- what to take from a checkpoint


def _chosen(path: Path, stored: Any, reading: Reading) -> tuple[tuple[str, ...], Any, list[str]]:
    """The keys that lead to the module or state dict to use, itself, and notes."""
    from torch import nn

    found = list(sets_of_weights(stored, Looks(_is_tensor, lambda v: isinstance(v, nn.Module))))
    if not found:
        keys = f" with the keys {some_of(stored)}" if isinstance(stored, Mapping) else ""
        raise InvalidFileError(
            f"{path}: holds a {type(stored).__name__}{keys}, neither a network nor its weights; save model.state_dict()"
        )
    try:
        weights, notes = choose(found, reading.key, ema=reading.ema)
    except NotChosenError as error:
        raise InvalidFileError(f"{path}: {error}") from None
    return weights.where, weights.value, notes


def _unwrap(module: nn.Module, notes: list[str]) -> tuple[nn.Module, tuple[nn.Module, str] | None]:
    """The network without what wraps networks, and the innermost wrapper with the name it holds the network by."""
    inside = {"DataParallel": "module", "DistributedDataParallel": "module", "OptimizedModule": "_orig_mod"}
    wrapper: tuple[nn.Module, str] | None = None
    while attribute := inside.get(type(module).__name__):
        notes.append(f"{type(module).__name__} taken off")
        wrapper, module = (module, attribute), getattr(module, attribute)
    return module, wrapper


def _is_tensor(value: Any) -> bool:
    import torch

    return isinstance(value, torch.Tensor)


# --- weights into a network


def _fit(
    path: Path, network: nn.Module, stored: Mapping[str, Any], name: str, reading: Reading, notes: list[str]
) -> Prefix:
    """Load every stored tensor into its place in the network; which keys they are.

    Raises InvalidFileError unless all of them fit.
    """
    import torch

    kept = [k for k, v in stored.items() if _is_tensor(v) or k.endswith("_extra_state")]
    if len(kept) < len(stored):
        notes.append(f"{len(stored) - len(kept)} entries that are no tensors are ignored")
    found = prefix_of(kept, network.state_dict(), ema=reading.ema)
    prefix = found.text
    if prefix:
        notes.append(f"prefix '{prefix}' taken off the keys")
    if found.unused:
        notes.append(f"{len(found.unused)} keys of another copy are not used ({some_of(found.unused)})")
    tensors = OrderedDict((k[len(prefix) :], stored[k]) for k in found.keys)
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
    unexpected = [*unexpected, *found.strange]
    wrong = [f"{len(k)} keys {w} ({some_of(k)})" for k, w in ((missing, "missing"), (unexpected, "unexpected")) if k]
    if wrong and reading.allow_missing:
        built = "; the factory's own values stay where keys are missing" if missing else ""
        notes.append(f"{' and '.join(wrong)}: allowed{built}")
    elif wrong:
        keys, others = (missing, unexpected) if missing else (unexpected, list(places))
        close = [(k, difflib.get_close_matches(k, others, 1)) for k in keys[:3]]
        nearest = ", ".join(f"'{k}' ~ '{match[0]}'" for k, match in close if match)
        advice += ", or --allow-missing"
        raise InvalidFileError(f"{misfit}: {' and '.join(wrong)}{nearest and '; nearest: ' + nearest}; {advice}")
    return found


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
