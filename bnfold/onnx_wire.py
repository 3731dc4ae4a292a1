"""A model file without the weights that are stored in it, and back: its protobuf wire format, as far as that takes.

A weight in a model file is one field, `raw_data`, of a TensorProto in the list of initializers. Parsing a file copies
all of them, and serializing the model copies them twice more. Here they stay where they are: the file is walked field
by field, the message is parsed from what lies between them, and a new file is written from serialized parts and ranges
of the old one. What is written is, byte for byte, what `SerializeToString` of the whole model would have written.

https://protobuf.dev/programming-guides/encoding
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .ops import Stored
from .ranges import copy_range

if TYPE_CHECKING:
    from onnx import ModelProto, TensorProto

# Field numbers of ModelProto, GraphProto and TensorProto.
GRAPH, INITIALIZER, RAW_DATA = 7, 5, 9
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5  # wire types


class Skeleton(NamedTuple):
    """A parsed model and, by id() of its initializers, where in the file the `raw_data` that it lacks is."""

    model: ModelProto
    ranges: dict[int, tuple[int, int]]
    tensors: list[TensorProto]  # identities are keys, so the messages must live as long


class _Field(NamedTuple):
    number: int
    kind: int
    start: int  # of the tag
    value: int  # of the payload
    stop: int


def read_skeleton(path: Path, keep: Callable[[TensorProto, int], bool]) -> Skeleton | None:
    """Parse a model file without large weights; None where it is not of the plain form, or no message at all.

    `keep` says of a tensor without its data, and the length of that, whether it may stay in the file.
    """
    import onnx

    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            top = list(_fields(data, 0, len(data)))
            graphs = [f for f in top if f.number == GRAPH]
            if len(graphs) != 1 or graphs[0].kind != BYTES:
                return None
            model = onnx.ModelProto()
            model.ParseFromString(_joined(data, (f for f in top if f.number != GRAPH)))
            inner = list(_fields(data, graphs[0].value, graphs[0].stop))
            model.graph.SetInParent()
            model.graph.ParseFromString(_joined(data, (f for f in inner if f.number != INITIALIZER)))
            skeleton = Skeleton(model, {}, [])
            for f in inner:
                if f.number == INITIALIZER:
                    _add_tensor(skeleton, data, f, keep)
            return skeleton
    except Exception:  # whatever is wrong with the file is said where it is parsed whole
        return None


def _add_tensor(skeleton: Skeleton, data: Any, f: _Field, keep: Callable[[TensorProto, int], bool]) -> None:
    tensor = skeleton.model.graph.initializer.add()
    parts = list(_fields(data, f.value, f.stop))
    raw = [p for p in parts if p.number == RAW_DATA]
    if len(raw) == 1 and raw[0].kind == BYTES:
        tensor.ParseFromString(_joined(data, (p for p in parts if p.number != RAW_DATA)))
        if keep(tensor, raw[0].stop - raw[0].value):
            skeleton.ranges[id(tensor)] = raw[0].value, raw[0].stop
            skeleton.tensors.append(tensor)
            return
    tensor.ParseFromString(data[f.value : f.stop])


def _fields(data: Any, at: int, stop: int) -> Iterator[_Field]:
    """The fields of a message. Raises ValueError where it ends before a field does, or where groups are used."""
    while at < stop:
        start = at
        tag, at = _varint(data, at)
        kind = tag & 7
        if kind == BYTES:
            length, value = _varint(data, at)
            at = value + length
        elif kind == VARINT:
            value, at = at, _varint(data, at)[1]
        elif kind in (FIXED32, FIXED64):
            value, at = at, at + (4 if kind == FIXED32 else 8)
        else:
            raise ValueError(f"wire type {kind}")
        if at > stop:
            raise ValueError("cut short")
        yield _Field(tag >> 3, kind, start, value, at)


def _varint(data: Any, at: int) -> tuple[int, int]:
    """A number, and where it ends."""
    result = shift = 0
    while True:
        byte = data[at]
        at += 1
        result |= (byte & 127) << shift
        if byte < 128:
            return result, at
        shift += 7
        if shift > 63:
            raise ValueError("a number of more than 64 bits")


def _joined(data: Any, fields: Iterator[_Field]) -> bytes:
    """The bytes of fields, tags and all; neighbours in one piece."""
    runs: list[list[int]] = []
    for f in fields:
        if runs and runs[-1][1] == f.start:
            runs[-1][1] = f.stop
        else:
            runs.append([f.start, f.stop])
    return b"".join(data[start:stop] for start, stop in runs)


# ---------------------------------------------------------------------- writing


Data = tuple[int, int] | Stored
"""The `raw_data` of a tensor: a range of the source file, or values."""


def write_spliced(model: ModelProto, data: Mapping[int, Data], source: Path, path: Path) -> int:
    """Write a model some of whose initializers lack their data, which is given by their id(); returns the file's size.

    The model has neither graph nor initializers afterwards.
    """
    tensors = list(model.graph.initializer)
    missing = [None if t.HasField("raw_data") else data.get(id(t)) for t in tensors]
    sizes = [t.ByteSize() if m is None else _with_data(t.ByteSize(), m) for t, m in zip(tensors, missing, strict=True)]
    del model.graph.initializer[:]
    graph_head, graph_tail = _parted(model.graph, INITIALIZER)
    inside = len(graph_head) + sum(len(_prefix(INITIALIZER, n)) + n for n in sizes) + len(graph_tail)
    model.ClearField("graph")
    model_head, model_tail = _parted(model, GRAPH)
    with path.open("wb") as file:
        file.write(model_head + _prefix(GRAPH, inside) + graph_head)
        for tensor, place, size in zip(tensors, missing, sizes, strict=True):
            file.write(_prefix(INITIALIZER, size))
            if place is None:
                file.write(tensor.SerializeToString())
                continue
            head, tail = _parted(tensor, RAW_DATA)
            file.write(head + _prefix(RAW_DATA, _length(place)))
            if isinstance(place, tuple):
                file.flush()
                copy_range(source, *place, path, file.tell())
                file.seek(0, os.SEEK_END)
            else:
                file.write(np.ascontiguousarray(place, place.dtype.newbyteorder("<")).data)
            file.write(tail)
        file.write(graph_tail + model_tail)
        return file.tell()


def _length(data: Data) -> int:
    return data[1] - data[0] if isinstance(data, tuple) else data.nbytes


def _with_data(size: int, data: Data) -> int:
    length = _length(data)
    return size + len(_prefix(RAW_DATA, length)) + length


def _parted(message: Any, number: int) -> tuple[bytes, bytes]:
    """A message that lacks the field of the number, serialized: what comes before the field, and what after it.

    Fields are written in the order of their numbers, unknown ones last.
    """
    front = type(message)()
    front.CopyFrom(message)
    for field, _ in front.ListFields():
        if field.number > number:
            front.ClearField(field.name)
    head, whole = front.SerializeToString(), message.SerializeToString()
    for field, _ in front.ListFields():
        front.ClearField(field.name)
    head = head[: len(head) - front.ByteSize()]  # only fields that are unknown are left
    assert whole.startswith(head), f"{message.DESCRIPTOR.name} is not serialized in the order of its fields"
    return head, whole[len(head) :]


def _prefix(number: int, length: int) -> bytes:
    """Tag and length of a field of bytes."""
    return _encoded(number << 3 | BYTES) + _encoded(length)


def _encoded(number: int) -> bytes:
    result = bytearray()
    while number > 127:
        result.append(number & 127 | 128)
        number >>= 7
    result.append(number)
    return bytes(result)
