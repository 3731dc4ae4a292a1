"""Outputs that are whole or not there at all, with the files that belong to them; left-overs; copies of ranges."""

from __future__ import annotations

import errno
import json
import os
import threading
from pathlib import Path

import numpy as np
import pytest

from bnfold import ranges
from bnfold.errors import InvalidFileError
from bnfold.files import RECORD, staged
from bnfold.ranges import Places, copy_range


def listing(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def write(part: Path, data: bytes = b"new", **others: bytes) -> None:
    part.write_bytes(data)
    for name, content in others.items():
        file = part.parent / name.replace("__", "/")
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(content)


def test_what_is_made_beside_the_output_comes_with_it(tmp_path):
    with staged(tmp_path / "out") as part:
        write(part, a=b"1", sub__b=b"2")
        assert listing(tmp_path).keys() == {str(p.relative_to(tmp_path)) for p in part.parent.rglob("*") if p.is_file()}
    assert listing(tmp_path) == {"out": b"new", "a": b"1", "sub/b": b"2"}
    assert all(p.stat().st_nlink == 1 for p in tmp_path.rglob("*") if p.is_file()), "onnx refuses data with two names"


def test_superseded_files_go_when_the_output_stands(tmp_path):
    (tmp_path / "old").write_bytes(b"old")
    (tmp_path / "out").write_bytes(b"old")
    with staged(tmp_path / "out", [tmp_path / "old"]) as part:
        write(part)
    assert listing(tmp_path) == {"out": b"new"}


def test_a_name_that_is_taken_is_not_overwritten(tmp_path):
    write(tmp_path / "out", b"old", b=b"of another")
    with pytest.raises(InvalidFileError, match="cannot write"), staged(tmp_path / "out", [tmp_path / "b"]) as part:
        write(part, a=b"1", b=b"2", sub__c=b"3")
    assert listing(tmp_path) == {"out": b"old", "b": b"of another"}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["b", "out"]


@pytest.mark.parametrize("step", ["rename", "replace", "fsync", "mkdir"])
def test_a_step_that_fails_leaves_nothing(step, tmp_path, monkeypatch):
    write(tmp_path / "out", b"old")

    def fail(*_, **__):
        raise OSError(errno.ENOSPC, "No space left")

    def make() -> None:
        with staged(tmp_path / "out") as part:
            write(part, a=b"1", sub__b=b"2")
            monkeypatch.setattr(os, step, fail)

    with pytest.raises(InvalidFileError, match="No space left"):
        make()
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    assert listing(tmp_path) == {"out": b"old"}


def test_the_mode_is_the_old_outputs(tmp_path):
    write(tmp_path / "out", b"old")
    (tmp_path / "out").chmod(0o640)
    with staged(tmp_path / "out") as part:
        write(part, a=b"1")
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o640
    umask = os.umask(0)
    os.umask(umask)
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o666 & ~umask


# ---------------------------------------------------------------------- left-overs


def left_over(folder: Path, **files: bytes) -> Path:
    """The hidden folder of a process that is dead: nothing holds its lock."""
    hidden = folder / ".out.dead.part"
    hidden.mkdir()
    for name, data in files.items():
        (hidden / name.replace("_", ".")).write_bytes(data)
    return hidden


def test_left_overs_go(tmp_path):
    left_over(tmp_path, out=b"half", data=b"half")
    (tmp_path / ".out2.alien.part").mkdir()
    with staged(tmp_path / "out") as part:
        write(part)
    assert [p.name for p in sorted(tmp_path.iterdir())] == [".out2.alien.part", "out"]


@pytest.mark.parametrize("same", [True, False], ids=["the same file", "another file of that name"])
def test_data_that_a_killed_process_had_placed(same, tmp_path):
    (tmp_path / "out.data").write_bytes(b"placed")
    s = (tmp_path / "out.data").stat()
    identity = [s.st_dev, s.st_ino, s.st_size if same else 1, s.st_mtime_ns]
    hidden = left_over(tmp_path, out=b"whole")
    (hidden / RECORD).write_text(json.dumps({"placed": {"out.data": identity}, "superseded": {}}))
    with staged(tmp_path / "out") as part:
        write(part)
    assert listing(tmp_path) == {"out": b"new"} | ({} if same else {"out.data": b"placed"})


def test_a_record_that_was_not_written_to_its_end(tmp_path):
    hidden = left_over(tmp_path, out=b"whole")
    (hidden / RECORD).write_text('{"placed": {"out.da')
    with staged(tmp_path / "out") as part:
        write(part)
    assert listing(tmp_path) == {"out": b"new"}


def test_the_folder_of_a_living_process_stays(tmp_path):
    pytest.importorskip("fcntl")
    with staged(tmp_path / "out") as first:
        write(first, b"first")
        with staged(tmp_path / "out") as second:
            write(second, b"second")
        assert first.read_bytes() == b"first"
    assert listing(tmp_path) == {"out": b"first"}


# ---------------------------------------------------------------------- ranges


WAYS = {
    "copy_file_range": (),
    "sendfile": ("copy_file_range",),
    "reading": ("copy_file_range", "sendfile"),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("missing", [True, False], ids=["not there", "refuses"])
def test_copies(way, missing, tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EXDEV, "between devices")

    for name in WAYS[way]:
        if missing:
            monkeypatch.delattr(os, name, raising=False)
        else:
            monkeypatch.setattr(os, name, refuse, raising=False)
    monkeypatch.setattr(ranges, "STEP", 1000)
    monkeypatch.setattr(ranges, "BUFFER", 300)
    data = np.random.default_rng(0).bytes(10_000)
    (tmp_path / "a").write_bytes(data)
    (tmp_path / "b").write_bytes(b"\1" * 8000)
    copy_range(tmp_path / "a", 1234, 5678, tmp_path / "b", 99)
    assert (tmp_path / "b").read_bytes() == b"\1" * 99 + data[1234:5678] + b"\1" * (8000 - 99 - 4444)
    with pytest.raises(OSError, match="cut short"):
        copy_range(tmp_path / "a", 9000, 10_001, tmp_path / "b", 0)


def test_a_full_disk_is_no_reason_for_another_way(tmp_path, monkeypatch):
    (tmp_path / "a").write_bytes(b"1234")
    (tmp_path / "b").write_bytes(b"")

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left")

    monkeypatch.setattr(os, "copy_file_range", full, raising=False)
    with pytest.raises(OSError, match="No space"):
        copy_range(tmp_path / "a", 0, 4, tmp_path / "b", 0)
    assert (tmp_path / "b").read_bytes() == b""


@pytest.mark.parametrize("plain", [True, False], ids=["seek", "at a place"])
def test_threads_read_and_write_at_their_places(plain, tmp_path, monkeypatch):
    if plain:
        monkeypatch.delattr(os, "preadv", raising=False)
        monkeypatch.delattr(os, "pwrite", raising=False)
    numbers = np.arange(4000, dtype=np.int32)
    (tmp_path / "a").write_bytes(b"12" + numbers.tobytes())
    (tmp_path / "b").write_bytes(b"")
    source, target = Places(tmp_path / "a"), Places(tmp_path / "b", "r+b")

    def work(first: int) -> None:
        part = np.empty(10, np.int32)
        for k in range(first, 4000, 40):
            source.read(2 + 4 * k, part)
            target.write(4 * k, part)

    threads = [threading.Thread(target=work, args=(10 * n,)) for n in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert (tmp_path / "b").read_bytes() == numbers.tobytes()
    with pytest.raises(OSError, match="cut short"):
        source.read(15_999, np.empty(10, np.int32))
