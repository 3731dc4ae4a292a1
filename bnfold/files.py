"""Output files: where they go, whether they can, and that they are whole or not there at all."""

from __future__ import annotations

import errno
import glob
import json
import os
import shutil
import tempfile
from collections.abc import Generator, Iterable
from contextlib import contextmanager, suppress
from pathlib import Path

from .errors import InvalidFileError, UsageError

PART = ".part"  # how the names of hidden folders end
RECORD = ".bnfold.record"  # in there: which files are placed beside the output, and which are removed in the end


def default_output(source: Path, verb: str) -> Path:
    """`model.pt` becomes `model.onnx` beside it; what stays of its kind, `model.folded.pt`."""
    if source.is_dir():
        raise InvalidFileError(f"{source}: is a folder; name the file in it")
    if verb == "export" and source.suffix.lower() != ".onnx":
        return source.with_suffix(".onnx")
    return source.with_name(f"{source.stem}.folded{source.suffix}")


def check_output(output: Path, source: Path | None, *, force: bool, in_place: bool) -> None:
    """Refuse early, before any work is done, what could not be written at the end.

    A source that is missing is left to the reader of it to report.

    Raises UsageError when the output would overwrite the input or an existing file, InvalidFileError when its folder
    is missing or not writable.
    """
    if source is not None and not os.path.lexists(source):
        return
    try:
        there = output.exists()
        same = there and source is not None and output.samefile(source)
    except OSError as e:
        raise InvalidFileError(f"cannot write {output}: {e.strerror or e}") from e
    if output.is_dir():
        raise InvalidFileError(f"{output} is a folder: pass a file name with -o")
    if same and not in_place:
        raise UsageError(f"{output} is the input: pass -o with another path, or --in-place to overwrite it")
    if there and not same and not force:
        raise UsageError(f"{output} exists: pass --force to overwrite it, or -o with another path")
    folder = output.parent
    if not folder.is_dir():
        what = "is not a folder" if folder.exists() else "does not exist"
        raise InvalidFileError(f"cannot write {output}: {folder} {what}")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise InvalidFileError(f"cannot write {output}: the folder {folder} is not writable")


@contextmanager
def staged(output: Path, superseded: Iterable[Path] = ()) -> Generator[Path]:
    """A path for the output in a hidden folder beside it; when the block ends well it becomes the output.

    What else the block leaves in that folder (data files) appears beside the output first, at the same relative path,
    where nothing may stand yet. The output is renamed last, everything flushed to disk before, so that at each moment
    there is the old output or the new one, whole; then `superseded` files are removed. Otherwise nothing is left. A
    process that is killed leaves its hidden folder (and, at worst, data files without an output): the next one that
    writes the same output removes them.
    """
    try:
        _sweep(output)
        folder, lock = _hidden_folder(output)
    except OSError as e:
        raise InvalidFileError(f"cannot write {output}: {e.strerror or e}") from e
    try:
        yield folder / output.name
        record = _publish(folder, output, superseded)
        _remove(record, "superseded", output)
    except OSError as e:
        raise InvalidFileError(f"cannot write {output}: {e.strerror or e}") from e
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def _hidden_folder(output: Path) -> tuple[Path, int | None]:
    """A new folder, locked where locks exist: while this process lives, no other one takes it for a left-over."""
    while True:
        folder = Path(tempfile.mkdtemp(dir=output.parent, prefix=f".{output.name}.", suffix=PART))
        lock = _locked(folder, wait=True)
        if folder.is_dir():
            return folder, lock
        if lock is not None:  # another process was quicker to remove it than we to lock it
            os.close(lock)


def _locked(folder: Path, *, wait: bool) -> int | None:
    """A descriptor that holds the folder's lock, or None where it cannot be had."""
    try:
        import fcntl

        descriptor = os.open(folder, os.O_RDONLY)
    except (ImportError, OSError):
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _publish(folder: Path, output: Path, superseded: Iterable[Path]) -> Path:
    """Move the folder's files to where they belong, the output last; undo it when that does not succeed.

    Returns the record of what is to be removed: in case of failure what was placed, else what is superseded.
    """
    staged_output = folder / output.name
    others = [f for f in _files_in(folder) if f != staged_output]
    mode = 0o666 & ~_umask()
    for file in (*others, staged_output):
        file.chmod(output.stat().st_mode & 0o777 if file == staged_output and output.exists() else mode)
        _flush(file)
    record = folder / RECORD
    placed = {str(f.relative_to(folder)): _identity(f) for f in others}
    old = {os.path.relpath(f, output.parent): _identity(f) for f in superseded}
    record.write_text(json.dumps({"placed": placed, "superseded": old}))
    made: list[Path] = []
    try:
        for file in others:
            final = output.parent / file.relative_to(folder)
            if os.path.lexists(final):
                raise FileExistsError(errno.EEXIST, f"{final} exists")
            missing = [p for p in final.parents if not p.exists()]
            final.parent.mkdir(parents=True, exist_ok=True)
            made += missing
            file.rename(final)
        _flush(output.parent)
        staged_output.replace(output)
    except BaseException:
        if staged_output.exists():  # else a signal came just after the last step
            _remove(record, "placed", output)
            for empty in made:
                with suppress(OSError):
                    empty.rmdir()
        raise
    with suppress(OSError):
        _flush(output.parent)
    return record


def _identity(file: Path) -> list[int]:
    """What tells a file from another one that may later have its name."""
    found = file.lstat()
    return [found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns]


def _remove(record: Path, which: str, output: Path) -> None:
    """Remove files beside the output that a record names, if they are still the ones it means."""
    for name, identity in json.loads(record.read_text())[which].items():
        final = output.parent / name
        if os.path.lexists(final) and _identity(final) == identity:
            final.unlink()


def _sweep(output: Path) -> None:
    """Remove what killed processes left behind of the same output."""
    for folder in output.parent.glob(f".{glob.escape(output.name)}.*{PART}"):
        lock = _locked(folder, wait=False) if folder.is_dir() else None
        if lock is None:
            continue
        try:
            with suppress(FileNotFoundError, ValueError):  # it did not come so far, or not far in writing it
                _remove(folder / RECORD, "placed" if (folder / output.name).exists() else "superseded", output)
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(lock)


def _files_in(folder: Path) -> list[Path]:
    return sorted(f for f in folder.rglob("*") if not f.is_dir())


def _flush(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
