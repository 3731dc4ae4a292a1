"""Tensors of a model on disk that keep their bytes in data files: read in part, and written without being held.

A folded weight has the shape and type of the old one, so that its new bytes fit where the old ones were. `Rewriting`
makes new data files beside the new model: what a plan computes is written straight to its place (a *draft*), all else
is copied from the old file, to the same offset. So each byte of a file is read once and written once, whatever its
size. A plan may be given up and made again; nothing is copied before it stands, and the copy covers what became of
drafts that it does not use. What cannot keep its place, because others read the old bytes or the size is another, is
appended, aligned as its neighbours are; it waits in a file of its own until the plan stands.
"""

from __future__ import annotations

import math
import posixpath
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from onnx import ModelProto, TensorProto

from ..onnx_files import Extent, OnnxFile, tensors_of
from ..ops import Draft, Held, Stored
from ..ranges import Places, Writer, copy_range
from ..rounding import FloatFormat
from ..scratch import Scratch

EMBEDDED = 1 << 16  # bytes; larger new tensors of a model with external data join it
PAGE = 4096  # alignment where a file does not show any
WIDEST = 1 << 16  # of the alignments that files show: what Windows can map


Room = Callable[[Extent, tuple[int, ...], FloatFormat], Draft]
"""Where new values of a shape and type go that replace those in an extent."""


@dataclass(frozen=True, slots=True, eq=False)
class Stretch:
    """An initializer in a data file. `format` is None where it is not of a float type."""

    file: OnnxFile
    proto: TensorProto
    extent: Extent
    room: Room

    def loaded(self) -> TensorProto:
        """A tensor like it that holds its values itself."""
        return TensorProto(
            name=self.proto.name, data_type=self.proto.data_type, dims=self.proto.dims,
            raw_data=self.file.read(self.extent),
        )  # fmt: skip

    def open_rows(self, fmt: FloatFormat) -> Callable[[int, int], Stored]:
        """What reads rows `start` to `stop` of the first dimension, as stored."""
        read, inner = self.file.reader(self.extent), tuple(self.proto.dims[1:])
        stored = fmt.stored_type.newbyteorder("<")
        size = math.prod(inner) * stored.itemsize
        scratch = Scratch()

        def rows(start: int, stop: int) -> Stored:
            found = scratch.array((stop - start, *inner), stored)
            read(start * size, found)
            return found.astype(fmt.stored_type, copy=False)

        return rows

    def draft(self, fmt: FloatFormat) -> Draft:
        """Where new values of the same shape and type go."""
        return self.room(self.extent, tuple(self.proto.dims), fmt)


class FileDraft:
    """A new weight that is written to its place in a file, row by row, while the next rows are computed."""

    def __init__(self, writer: Writer, path: Path, offset: int, shape: tuple[int, ...], fmt: FloatFormat):
        self._writer, self._path, self._offset, self._shape = writer, path, offset, shape
        self._type, self._stored = fmt.stored_type, fmt.stored_type.newbyteorder("<")
        self._row = math.prod(shape[1:]) * self._stored.itemsize
        self._file = Places(path, "r+b")

    def space(self, start: int, stop: int) -> Stored:
        """An array that the writer lends."""
        return self._writer.space((stop - start, *self._shape[1:]), self._type)

    def put(self, start: int, rows: Stored) -> None:
        """Have the rows written to their place."""
        self._writer.write(self._file, self._offset + start * self._row, rows.astype(self._stored, copy=False))

    def values(self) -> Stored:
        """A mapping of the place, which takes no memory until it is looked at."""
        self._writer.wait()
        self._file.begin_flush(self._offset, self._row * self._shape[0])
        return np.memmap(self._path, self._stored, "r", self._offset, self._shape)


@dataclass(frozen=True, slots=True, eq=False)
class NoDraft:
    """Where a dry run, which is only asked whether values fit, puts them."""

    shape: tuple[int, ...]
    format: FloatFormat

    @classmethod
    def instead(cls, extent: Extent, shape: tuple[int, ...], fmt: FloatFormat) -> Draft:
        """Room nowhere."""
        return cls(shape, fmt)

    def space(self, start: int, stop: int) -> Stored:
        """An array of its own."""
        return np.empty((stop - start, *self.shape[1:]), self.format.stored_type)

    def put(self, start: int, rows: Stored) -> None:
        """Forget the rows."""

    def values(self) -> Stored:
        """Zeros of the right shape that take no memory."""
        return np.broadcast_to(np.zeros((), self.format.stored_type), self.shape)


@dataclass(slots=True, eq=False)
class _DataFile:
    """A new data file: the size of the old one, where it ends with what was appended, and what is not to be copied."""

    source: Path
    path: Path
    size: int
    end: int
    alignment: int
    written: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])

    def ready(self) -> Path:
        """The file, made when it is first asked for."""
        if not self.path.exists():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("xb") as file:
                file.truncate(self.size)
        return self.path

    @property
    def changed(self) -> bool:
        """Whether it is more than a copy."""
        return bool(self.written)

    def copy_rest(self) -> None:
        """Copy every part of the old file that was not written."""
        path, at = self.ready(), 0
        for start, stop in [*sorted(self.written), (self.size, self.size)]:
            copy_range(self.source, at, min(start, self.size), path, at)
            at = max(at, stop)


class Rewriting:
    """New data files for a model: `folder` is where they are made, `locations` how each old one is named there."""

    def __init__(self, file: OnnxFile, folder: Path, locations: Mapping[str, str]):
        self._file, self._locations = file, locations
        self._waiting, self._waiting_end = folder / ".bnfold.appended", 0
        self._data: dict[str, _DataFile] = {}
        self._writer = Writer()
        for location, name in locations.items():
            source = file.folder / location
            size = source.stat().st_size
            offsets = [e.offset for e in file.extents.values() if e.location == location]
            self._data[location] = _DataFile(source, folder / name, size, size, _alignment(offsets))

    def draft(self, extent: Extent, shape: tuple[int, ...], fmt: FloatFormat) -> Draft:
        """Room in the place of the old values, or, where others need those, among what will be appended."""
        if extent.alone:
            return FileDraft(self._writer, self._data[extent.location].ready(), extent.offset, shape, fmt)
        offset = self._waiting_end
        self._waiting_end += _up(extent.length, PAGE)
        with self._waiting.open("ab") as waiting:
            waiting.truncate(self._waiting_end)
        return FileDraft(self._writer, self._waiting, offset, shape, fmt)

    def replace(self, tensor: TensorProto, values: Stored) -> bool:
        """Give a tensor that is external other values; False when it is not. Its type and shape are set already."""
        place = self._file.extent(tensor)
        if place is None:
            return False
        path = self._data[place.location].ready()
        if _lies_at(values, path, place.offset) or (place.alone and values.nbytes == place.length):
            self._write(place.location, place.offset, values)
            _point(tensor, place.location, place.offset, values.nbytes)
        else:
            self._append(tensor, place.location, values)
        return True

    def add(self, tensor: TensorProto, values: Stored, like: TensorProto | None) -> bool:
        """Make a new tensor external, beside the one it is a copy of; False when it is small enough to be embedded."""
        place = None if like is None else self._file.extent(like)
        if values.nbytes <= EMBEDDED and not isinstance(values, np.memmap):
            return False
        self._append(tensor, place.location if place is not None else next(iter(self._data)), values)
        return True

    def finish(self, model: ModelProto) -> None:
        """Copy what was not written, and let the model name the new files."""
        self._writer.wait()
        self._waiting.unlink(missing_ok=True)
        self._file.give_back()
        external = [t for t in tensors_of(model) if t.data_location == TensorProto.EXTERNAL]
        locations = [posixpath.normpath(_entry(t, "location")) for t in external]
        for location, data in self._data.items():
            if location in locations:
                data.copy_rest()
            else:
                data.path.unlink(missing_ok=True)
        for tensor, location in zip(external, locations, strict=True):
            _point(tensor, self._locations[location], checksum=not self._data[location].changed)

    def _append(self, tensor: TensorProto, location: str, values: Stored) -> None:
        data = self._data[location]
        offset = _up(data.end, data.alignment)
        data.end = offset + values.nbytes
        self._write(location, offset, values)
        _point(tensor, location, offset, values.nbytes)

    def _write(self, location: str, offset: int, values: Stored) -> None:
        data = self._data[location]
        path = data.ready()
        data.written.append((offset, offset + values.nbytes))
        if _lies_at(values, path, offset):
            return
        if isinstance(values, np.memmap):
            copy_range(Path(str(values.filename)), values.offset, values.offset + values.nbytes, path, offset)
        else:
            Places(path, "r+b").write(offset, np.ascontiguousarray(values, values.dtype.newbyteorder("<")))


class Aside:
    """New values of initializers whose data was not read, kept aside until the model file is written."""

    def __init__(self, file: OnnxFile):
        self._file = file
        self.values: dict[int, Stored] = {}  # by id() of the initializer

    def replace(self, tensor: TensorProto, values: Stored) -> bool:
        """Keep a tensor's new values; False when its old ones are in the model."""
        if id(tensor) not in self._file.embedded:
            return False
        self.values[id(tensor)] = values
        return True

    def add(self, tensor: TensorProto, values: Stored, like: TensorProto | None) -> bool:
        """New tensors hold their values themselves."""
        return False

    def finish(self, model: ModelProto) -> None:
        """Nothing is left to do."""


def memory(extent: Extent, shape: tuple[int, ...], fmt: FloatFormat) -> Draft:
    """Room in memory."""
    return Held(np.empty(shape, fmt.stored_type))


def stretches(file: OnnxFile, read_once: Callable[[str], bool], room: Room) -> dict[int, Stretch]:
    """The initializers of the main graph whose data was not read, by id() of their protos.

    `read_once` says whether a single operand reads the initializer of that name: only then its bytes may be replaced.
    """
    lent = set(map(id, file.lent))
    found = {id(t): Stretch(file, t, file.place(t), memory) for t in file.stored}
    for tensor in file.external:
        if id(tensor) not in lent:
            e = file.extents[id(tensor)]
            place = Extent(e.location, e.offset, e.length, e.alone and read_once(tensor.name))
            found[id(tensor)] = Stretch(file, tensor, place, room)
    return found


def _lies_at(values: Stored, path: Path, offset: int) -> bool:
    """Whether the values are the mapping of this place."""
    return isinstance(values, np.memmap) and values.offset == offset and Path(str(values.filename)) == path.resolve()


def _entry(tensor: TensorProto, key: str) -> str:
    return next((e.value for e in tensor.external_data if e.key == key), "")


def _point(
    tensor: TensorProto, location: str, offset: int | None = None, length: int = 0, *, checksum: bool = True
) -> None:
    """Make the tensor external. Without an offset only the file's name changes; what is said of it else stays."""
    entries = {e.key: e.value for e in tensor.external_data} | {"location": location}
    if offset is not None:
        entries |= {"offset": str(offset), "length": str(length)}
    if not checksum:
        entries.pop("checksum", None)
    tensor.ClearField("external_data")
    for key, value in entries.items():
        tensor.external_data.add(key=key, value=value)
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL


def _up(n: int, alignment: int) -> int:
    return -(-n // alignment) * alignment


def _alignment(offsets: Iterable[int]) -> int:
    """The largest power of two that all offsets of a file are multiples of."""
    common = math.gcd(*offsets)
    return min(common & -common, WIDEST) if common else PAGE
