"""ONNX models on disk: read without their external data, which stays in its files until someone asks for a part.

A tensor of a model may keep its bytes in a data file beside the model: `location`, relative to the model's folder,
`offset` and `length`. Where a location leaves the folder, the model is refused: what a model file says must not decide
which files of a machine are read. Sizes are checked when the model is opened, bytes are read when they are needed.
"""

from __future__ import annotations

import math
import posixpath
import re
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .errors import AGAIN, InvalidFileError, first_line
from .onnx_wire import read_skeleton
from .ops import Stored
from .ranges import Places

if TYPE_CHECKING:
    from onnx import ModelProto, TensorProto

LONGEST = 1024  # characters of a data file's name
DIGITS = 20  # of a place in a data file, more than any has
LENT = 1024  # bytes; smaller tensors may be shapes, which shape inference wants to see
ITEM_BYTES = {
    "FLOAT": 4, "DOUBLE": 8, "FLOAT16": 2, "BFLOAT16": 2, "COMPLEX64": 8, "COMPLEX128": 16, "BOOL": 1,
    "INT8": 1, "INT16": 2, "INT32": 4, "INT64": 8, "UINT8": 1, "UINT16": 2, "UINT32": 4, "UINT64": 8,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Extent:
    """Where a tensor's bytes are. `alone`: no other tensor of the model has any of them."""

    location: str
    offset: int
    length: int
    alone: bool = True

    @property
    def stop(self) -> int:
        """Where they end."""
        return self.offset + self.length


@dataclass(slots=True, eq=False)
class OnnxFile:
    """A model as its file holds it, and where its external data is.

    `lent` are small tensors whose values were read into the model, and those that are no initializers: they keep what
    the file says of their place, and `give_back` makes them external again. `embedded` says where in the model file
    itself the data of initializers is that were not read, by id() of those, which are `stored`.
    """

    path: Path
    model: ModelProto
    extents: dict[int, Extent] = field(default_factory=dict[int, Extent])  # by id() of the tensor's proto
    external: list[TensorProto] = field(default_factory=list[Any])  # in the order of the file
    lent: list[TensorProto] = field(default_factory=list[Any])
    embedded: Mapping[int, tuple[int, int]] = field(default_factory=dict[int, tuple[int, int]])
    stored: list[TensorProto] = field(default_factory=list[Any])

    @property
    def folder(self) -> Path:
        """What locations are relative to."""
        return self.path.parent

    @property
    def locations(self) -> list[str]:
        """The data files, in the order in which the model names them."""
        return list(dict.fromkeys(e.location for e in self.extents.values()))

    @property
    def bytes(self) -> int:
        """The size of the model with its data."""
        return self.path.stat().st_size + sum((self.folder / p).stat().st_size for p in self.locations)

    def extent(self, tensor: TensorProto) -> Extent | None:
        """Where the bytes of an initializer are; None when the model holds them itself."""
        return self.extents.get(id(tensor))

    def read(self, extent: Extent) -> bytes:
        """The bytes of a tensor. Raises InvalidFileError when they cannot be read."""
        data = np.empty(extent.length, np.uint8)
        self.reader(extent)(0, data)
        return data.tobytes()

    def reader(self, extent: Extent) -> Callable[[int, Stored], None]:
        """What fills an array with the bytes of a tensor, from the given one of its own on."""
        path = self.folder / extent.location
        with _readable(path):
            file = Places(path)

        def fill(start: int, out: Stored) -> None:
            with _readable(path):
                file.read(extent.offset + start, out)

        return fill

    def give_back(self) -> None:
        """Make the lent tensors external again, but for those that were given new values."""
        for tensor in self.lent:
            if tensor.external_data:
                tensor.ClearField("raw_data")
                tensor.data_location = tensor.EXTERNAL

    def load(self) -> ModelProto:
        """The model with all of its external data, in memory."""
        for tensor in self.external:
            extent = self.extents[id(tensor)]
            if not tensor.HasField("raw_data"):
                tensor.raw_data = self.read(extent)
            tensor.ClearField("data_location")
            tensor.ClearField("external_data")
        self.complete(self.model)
        return self.model

    def complete(self, model: ModelProto, changed: Mapping[int, Stored] | None = None) -> None:
        """Give initializers of the model that lack their data what is in the file, or what it was changed to."""
        for tensor in model.graph.initializer:
            values = (changed or {}).get(id(tensor))
            if values is not None:
                tensor.raw_data = np.ascontiguousarray(values, values.dtype.newbyteorder("<")).tobytes()
            elif id(tensor) in self.embedded and not tensor.HasField("raw_data"):
                tensor.raw_data = self.read(self.place(tensor))

    def place(self, tensor: TensorProto) -> Extent:
        """Where in the model file the data of an initializer is that was not read."""
        start, stop = self.embedded[id(tensor)]
        return Extent(self.path.name, start, stop - start)


@contextmanager
def _readable(path: Path) -> Generator[None]:
    try:
        yield
    except OSError as e:
        raise InvalidFileError(f"{path}: cannot be read ({e.strerror or e}); check the file and the disk") from e


def open_onnx(path: Path) -> OnnxFile:
    """Read a model, but not its external data, whose places are checked. Raises InvalidFileError in one line."""
    import onnx

    problem = "no ir_version, graph or opset_import"
    skeleton = read_skeleton(path, _may_stay)
    try:
        model = skeleton.model if skeleton is not None else onnx.load_model_from_string(path.read_bytes())
    except Exception as error:
        model, problem = onnx.ModelProto(), first_line(error)
    if not (model.ir_version and model.HasField("graph") and model.opset_import):
        if path.suffix == ".onnx":
            raise InvalidFileError(f"{path}: not a valid ONNX model ({problem}); copy or export it again")
        raise InvalidFileError(
            f"{path}: no model that bnfold knows; it reads torch.save, safetensors, torch.export (.pt2) and ONNX files"
        )
    file = OnnxFile(path, model)
    if skeleton is not None:
        file.embedded, file.stored = skeleton.ranges, skeleton.tensors
    file.external = [t for t in tensors_of(model) if t.data_location == onnx.TensorProto.EXTERNAL]
    checked = _Checks(path)
    extents = [checked.extent(t) for t in file.external]
    file.extents = dict(zip(map(id, file.external), _with_neighbours(extents), strict=True))
    initializers = {id(t) for t in model.graph.initializer}
    for tensor in file.external:
        extent = file.extents[id(tensor)]
        if extent.length <= LENT or id(tensor) not in initializers:
            tensor.raw_data = file.read(extent)
            tensor.ClearField("data_location")
            file.lent.append(tensor)
    return file


def _may_stay(tensor: TensorProto, length: int) -> bool:
    return length > LENT and _size_of(tensor) == length and tensor.data_location != tensor.EXTERNAL


def locations_in(path: Path) -> list[str]:
    """Data files in or below its folder that a model names; none where it cannot be read as a model."""
    import onnx

    try:
        model = onnx.load_model_from_string(path.read_bytes())
    except Exception:
        return []
    told = [e.value for t in tensors_of(model) for e in t.external_data if e.key == "location"]
    return [n for n in dict.fromkeys(map(posixpath.normpath, told)) if _is_inside(path.parent, n)]


def _is_inside(folder: Path, location: str) -> bool:
    inside = (folder / location).resolve().is_relative_to(folder.resolve())
    return inside and ".." not in re.split(r"[/\\]", location)


def tensors_of(message: Any) -> Iterator[TensorProto]:
    """Every tensor in a protobuf message: initializers, attributes, subgraphs, functions, parts of sparse tensors."""
    if message.DESCRIPTOR.full_name == "onnx.TensorProto":
        yield message
        return
    for descriptor, value in message.ListFields():
        if descriptor.message_type is not None:
            for part in [value] if hasattr(value, "ListFields") else value:
                yield from tensors_of(part)


@dataclass(slots=True)
class _Checks:
    """The data files of a model at this path, each looked at once; their sizes."""

    path: Path
    sizes: dict[str, int] = field(default_factory=dict[str, int])

    def extent(self, tensor: TensorProto) -> Extent:
        entry = {e.key: e.value for e in tensor.external_data}
        if not all(isinstance(s, str) for s in (tensor.name, *entry, *entry.values())):  # protobuf's bytes: no UTF-8
            raise InvalidFileError(f"{self.path}: it does not say in clear text where a tensor's data is; {AGAIN}")
        told = entry.get("location", "")
        if told not in self.sizes:
            self.sizes[told] = self._size(tensor.name, told)
        size, location = self.sizes[told], posixpath.normpath(told)
        numbers = [entry.get(key, "0") or "0" for key in ("offset", "length")]
        if not all(n.isdecimal() and len(n) < DIGITS for n in numbers) or sum(map(int, numbers)) > size:
            raise self._cut_short(location)
        offset, length = map(int, numbers)
        needed = _size_of(tensor)
        if needed is not None and length not in (0, needed):
            what = f"{length} bytes of data, its shape {tuple(tensor.dims)} asks for {needed}"
            raise InvalidFileError(f"{self.path}: the tensor '{tensor.name}' has {what}; export the model again")
        length = length or (size - offset if needed is None else needed)
        if offset + length > size:
            raise self._cut_short(location)
        return Extent(location, offset, length)

    def _size(self, tensor: str, location: str) -> int:
        path = self.path
        if "\0" in location or len(location) > LONGEST:
            raise InvalidFileError(
                f"{path}: the data of '{tensor}' is said to be in a file that cannot exist; do not use it"
            )
        file = path.parent / location  # an absolute location replaces the folder
        if not _is_inside(path.parent, location):
            raise InvalidFileError(
                f"{path}: unsafe, the data of '{tensor}' is at {location!r}, outside the model's folder; do not use it"
            )
        if not file.is_file():
            raise InvalidFileError(f"{path}: its external data file {location!r} is missing; put it beside the model")
        return file.stat().st_size

    def _cut_short(self, location: str) -> InvalidFileError:
        return InvalidFileError(f"{self.path}: its external data file {location!r} is cut short; {AGAIN}")


def _size_of(tensor: TensorProto) -> int | None:
    """How many bytes the tensor's shape asks for; None for types that are not made of whole bytes."""
    types = tensor.DataType
    name = types.Name(tensor.data_type) if tensor.data_type in types.values() else ""
    item = ITEM_BYTES.get(name)
    return None if item is None or any(n < 0 for n in tensor.dims) else math.prod(tensor.dims) * item


def _with_neighbours(extents: Sequence[Extent]) -> list[Extent]:
    """The extents, with the word on which of them share bytes with another."""
    shared: set[int] = set()
    order = sorted(range(len(extents)), key=lambda i: (extents[i].location, extents[i].offset, extents[i].stop))
    furthest: int | None = None  # the extent before that reaches furthest into the file
    for i in order:
        e, f = extents[i], None if furthest is None else extents[furthest]
        if f is not None and furthest is not None and f.location == e.location and f.stop > e.offset:
            shared.update((furthest, i))
        if f is None or f.location != e.location or e.stop >= f.stop:
            furthest = i
    return [Extent(e.location, e.offset, e.length, i not in shared) for i, e in enumerate(extents)]
