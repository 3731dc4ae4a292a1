"""Output files: where they go, whether they can, and that they are whole or not there at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from .errors import InvalidFileError, UsageError


def default_output(source: Path, verb: str) -> Path:
    """`model.pt` becomes `model.onnx` beside it; what stays of its kind, `model.folded.onnx` or `model.folded.pt2`."""
    kind = source.suffix.lower()
    if verb == "export" and kind != ".onnx":
        return source.with_suffix(".onnx")
    return source.with_name(f"{source.stem}.folded{source.suffix if kind in ('.onnx', '.pt2') else '.onnx'}")


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
def staged(output: Path) -> Iterator[Path]:
    """A temporary path in the output's folder, renamed to the output when the block ends well, removed otherwise.

    The file is flushed to disk before the rename, so that the output is the old file or the new one, never a part.
    """
    try:
        handle, name = tempfile.mkstemp(dir=output.parent, prefix=f".{output.name}.", suffix=".part")
    except OSError as e:
        raise InvalidFileError(f"cannot write {output}: {e.strerror or e}") from e
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        with temporary.open("rb") as f:
            os.fsync(f.fileno())
        mode = output.stat().st_mode & 0o777 if output.exists() else 0o666 & ~_umask()
        temporary.chmod(mode)
        temporary.replace(output)
    except OSError as e:
        raise InvalidFileError(f"cannot write {output}: {e.strerror or e}") from e
    finally:
        with suppress(FileNotFoundError):
            temporary.unlink()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
