"""Where a model that is written keeps its external data, and what becomes of the data of a model it replaces.

A model that is written never shares a data file with another one. Its data files have the names that its source gave
them, where the output goes to another folder and those names are free there; otherwise `out.onnx.data`, and where that
exists, `out.onnx.data.2` and so on: a file that the old output still needs is not overwritten. When the new output
stands, the data files of the one it replaced are removed, unless another .onnx file in the folder speaks of them.
"""

from __future__ import annotations

import itertools
import mmap
import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .errors import InvalidFileError
from .onnx_files import LENT, OnnxFile, locations_in
from .onnx_wire import write_spliced
from .ops import Stored
from .ranges import Places

if TYPE_CHECKING:
    from onnx import GraphProto, ModelProto

LARGEST_FILE = 2**31 - 1  # a protobuf message holds no more
HEADERS = 1 << 20  # more than the tags and lengths of what is spliced into it
PAGE = mmap.ALLOCATIONGRANULARITY  # what a runtime can map a tensor at


def data_names(file: OnnxFile, output: Path) -> Mapping[str, str]:
    """How each data file of a model is to be called beside the output."""
    folder, locations = output.parent, file.locations
    taken = any(os.path.lexists(folder / name) or name == output.name for name in locations)
    if not taken and not folder.samefile(file.folder):
        return {name: name for name in locations}
    names: dict[str, str] = {}
    for location in locations:
        names[location] = free_name(output, names.values())
    return names


def free_name(output: Path, taken: Collection[str] = ()) -> str:
    """The first of `out.onnx.data`, `out.onnx.data.2`, … that is neither there nor taken."""
    first = f"{output.name}.data"
    names = itertools.chain([first], (f"{first}.{k}" for k in itertools.count(2)))
    return next(n for n in names if n not in taken and not os.path.lexists(output.parent / n))


def superseded_data(output: Path, source: OnnxFile | None = None) -> tuple[Path, ...]:
    """Data files of the model that the output replaces which are of no use to anyone afterwards."""
    if not output.is_file() or output.is_symlink() or output.stat().st_nlink > 1 or not _contains(output, b"location"):
        return ()  # what goes by several names is still there under the others
    in_place = source is not None and output.samefile(source.path)
    needed = set[Path]() if source is None or in_place else {(source.folder / p).resolve() for p in source.locations}
    found = [f for f in (output.parent / name for name in locations_in(output)) if f.is_file() and f.suffix != ".onnx"]
    others = [f for f in output.parent.iterdir() if f.is_file() and f not in found and not f.samefile(output)]
    return tuple(
        f for f in found
        if not f.samefile(output) and f.resolve() not in needed
        and not any(_contains(o, os.fsencode(f.name)) for o in others)
    )  # fmt: skip


def _contains(path: Path, word: bytes, step: int = 1 << 20) -> bool:
    """Whether the word is somewhere in a file."""
    tail = b""
    with path.open("rb") as file:
        while chunk := file.read(step):
            if word in tail + chunk:
                return True
            tail = chunk[-len(word) :]
    return False


def write_model(
    model: ModelProto,
    path: Path,
    name: Callable[[], str],
    source: Any = None,
    changed: Mapping[int, Stored] | None = None,
) -> None:
    """Write a model; what is too large for one file keeps its tensors in a data file beside it, called `name()`.

    The model may be changed. What it lacks because it stays in the `source`, an OnnxFile, is copied from there, but for
    `changed` values, by id() of the tensor. Raises InvalidFileError when it is too large even so.
    """
    if isinstance(source, OnnxFile) and source.embedded:
        data = {**source.embedded, **(changed or {})}
        lengths = (v.nbytes if isinstance(v, np.ndarray) else v[1] - v[0] for v in data.values())
        if model.ByteSize() + sum(lengths) + HEADERS < LARGEST_FILE:
            write_spliced(model, data, source.path, path)
            return
        source.complete(model, changed or {})
    data = _serialized(model)
    if data is None:
        _move_out(model, path.parent, name())
        data = _serialized(model)
    if data is None:
        raise InvalidFileError(
            f"{path.name}: the model is over 2 GB without its tensors, which one ONNX file cannot hold"
        )
    path.write_bytes(data)


def _serialized(model: ModelProto) -> bytes | None:
    """The bytes of the model file, or None where there are too many."""
    from google.protobuf.message import EncodeError

    try:
        data = model.SerializeToString()
    except EncodeError:
        return None
    return data if len(data) <= LARGEST_FILE else None


def _move_out(model: ModelProto, folder: Path, location: str) -> None:
    """Make the initializers external, in the order of the file, each on a page of its own."""
    file, end = Places(folder / location, "xb"), 0
    for graph in _graphs(model.graph):
        for tensor in graph.initializer:
            values = np.frombuffer(tensor.raw_data, np.uint8)
            if len(values) <= LENT:
                continue
            offset = -(-end // PAGE) * PAGE
            file.write(offset, values)
            end = offset + len(values)
            for key, value in {"location": location, "offset": str(offset), "length": str(len(values))}.items():
                tensor.external_data.add(key=key, value=value)
            tensor.ClearField("raw_data")
            tensor.data_location = tensor.EXTERNAL


def _graphs(graph: GraphProto) -> list[GraphProto]:
    inner = [g for node in graph.node for a in node.attribute for g in (a.g, *a.graphs) if g.node]
    return [graph, *(g for i in inner for g in _graphs(i))]
