"""Parts of files: read, written, and copied inside the kernel where it can do that."""

from __future__ import annotations

import errno
import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import numpy as np

from .ops import Stored
from .scratch import Scratch

STEP = 1 << 25  # bytes asked of the kernel at a time
BUFFER = 1 << 20  # bytes held where the kernel does not copy by itself
ELSEWHERE = {errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM, errno.ETXTBSY, errno.EBADF}
"""What a kernel says that cannot copy between these two files; another way may do."""


class Places:
    """A file that several threads read or write at places of their own. Closed when it is no longer in use."""

    def __init__(self, path: Path, mode: Literal["rb", "r+b", "xb"] = "rb"):
        self._path = path
        self._file = path.open(mode, buffering=0)
        self._lock = threading.Lock()  # where reading and writing at a place takes two steps

    def read(self, offset: int, out: Stored) -> None:
        """Fill a contiguous array. Raises OSError when the file ends before."""
        view, done = _bytes_of(out), 0
        while done < len(view):
            count = self._read(offset + done, view[done:])
            if not count:
                raise _cut_short(self._path)
            done += count

    def write(self, offset: int, values: Stored) -> None:
        """Write a contiguous array."""
        view, done = _bytes_of(values), 0
        while done < len(view):
            done += self._write(offset + done, view[done:])

    def begin_flush(self, offset: int, length: int) -> None:
        """Let the disk begin with what was written there, instead of with all of it at the end."""
        _begin_flush(self._file.fileno(), offset, length)

    def _read(self, offset: int, view: memoryview) -> int:
        if hasattr(os, "preadv"):
            return os.preadv(self._file.fileno(), [view], offset)
        with self._lock:
            self._file.seek(offset)
            return self._file.readinto(view) or 0

    def _write(self, offset: int, view: memoryview) -> int:
        if hasattr(os, "pwrite"):
            return os.pwrite(self._file.fileno(), view, offset)
        with self._lock:
            self._file.seek(offset)
            return self._file.write(view) or 0


class Writer:
    """Writes arrays on a thread of its own, in the order given, so that the processor need not wait for a file.

    At most one array is waiting to be written, so that two spaces in turn are enough to work on.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "bnfold-writer")
        self._last: Future[None] | None = None
        self._next, self._other = Scratch(), Scratch()

    def space(self, shape: tuple[int, ...], stored: np.dtype[Any]) -> Stored:
        """An array to be filled and written before the next one is asked for."""
        return self._next.array(shape, stored)

    def write(self, file: Places, offset: int, values: Stored) -> None:
        """Have a contiguous array written. Raises what became of the one before: OSError."""
        self.wait()
        self._last = self._pool.submit(file.write, offset, values)
        self._next, self._other = self._other, self._next

    def wait(self) -> None:
        """Until everything is written. Raises OSError when it could not be."""
        last, self._last = self._last, None
        if last is not None:
            last.result()


def _bytes_of(array: Stored) -> memoryview:
    return array.data.cast("B") if array.nbytes else memoryview(b"")


def copy_range(source: Path, start: int, stop: int, target: Path, to: int) -> None:
    """Copy bytes `start` to `stop` of a file into one that exists, at `to`."""
    if start >= stop:
        return
    with source.open("rb", buffering=0) as a, target.open("r+b", buffering=0) as b:
        done = 0
        for way in (_by_copy_file_range, _by_sendfile, _by_reading):
            try:
                while done < stop - start:
                    count = way(a.fileno(), start + done, b.fileno(), to + done, min(stop - start - done, STEP))
                    if not count:
                        raise _cut_short(source)
                    _begin_flush(b.fileno(), to + done, count)
                    done += count
                return
            except (AttributeError, OSError) as e:
                if way is _by_reading or (isinstance(e, OSError) and e.errno not in ELSEWHERE):
                    raise


def _begin_flush(descriptor: int, offset: int, length: int) -> None:
    """Linux takes "not needed", said of pages that are to be written, as a wish to begin, and does not wait for it."""
    if length >= BUFFER and hasattr(os, "posix_fadvise"):
        with suppress(OSError):
            os.posix_fadvise(descriptor, offset, length, os.POSIX_FADV_DONTNEED)


def _by_copy_file_range(source: int, start: int, target: int, to: int, count: int) -> int:
    return os.copy_file_range(source, target, count, start, to)


def _by_sendfile(source: int, start: int, target: int, to: int, count: int) -> int:
    os.lseek(target, to, os.SEEK_SET)
    return os.sendfile(target, source, start, count)


def _by_reading(source: int, start: int, target: int, to: int, count: int) -> int:
    os.lseek(source, start, os.SEEK_SET)
    os.lseek(target, to, os.SEEK_SET)
    data = memoryview(os.read(source, min(count, BUFFER)))
    done = 0
    while done < len(data):
        done += os.write(target, data[done:])
    return len(data)


def _cut_short(path: Path) -> OSError:
    return OSError(errno.EIO, f"{path} is cut short")
