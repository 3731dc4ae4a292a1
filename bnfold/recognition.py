"""What kind of model a file is, recognised from its content, never from its suffix, and how it is to be read."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import AGAIN, InvalidFileError, some_of

if TYPE_CHECKING:
    from torch import nn

TORCH_MAGIC = bytes.fromhex("6cfc9c46f9206aa85019")  # the first object in a torch.save file older than the zip format
LONGEST_HEADER = 1 << 30  # of a safetensors file, in bytes
INDEX_BYTES = 1 << 26  # an index of shards is no longer than this

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
class Reading:
    """How a file is to be read: everything that a person may say about it.

    `factory` builds the network for a file that holds weights only: a callable, "package.module:callable" or
    "path/net.py:callable", called with `factory_args`. `trust_pickle` lets the file run code while it is read. `key`
    ("a.b") names the weights to take where a file holds several, `ema` says that an average is wanted rather than
    the raw ones. `allow_missing` lets keys be missing, or be there for nothing.
    """

    factory: str | Callable[..., nn.Module] | None = None
    factory_args: Mapping[str, Any] = field(default_factory=dict[str, Any])
    trust_pickle: bool = False
    key: str | None = None
    ema: bool = False
    allow_missing: bool = False


def recognise(path: Path) -> str:
    """What the file is; "onnx" when there is no sign of anything else.

    One of "torch" (torch.save), "torchscript", "exported-program", "safetensors", "sharded" (the index of a checkpoint
    in several files) and "onnx". Raises InvalidFileError for what is no model, or cannot be read.
    """
    head = head_of(path)
    if head.startswith(b"PK"):
        return _recognise_zip(path)
    if head.startswith(b"\x80") and TORCH_MAGIC in head:
        return "torch"
    length = int.from_bytes(head[:8], "little")
    if head[8:9] == b"{" and length < LONGEST_HEADER:
        if length > path.stat().st_size - 8:
            raise InvalidFileError(f"{path}: a safetensors file cut short; {AGAIN}")
        return "safetensors"
    if head.lstrip().startswith(b"{") and b'"weight_map"' in path.read_bytes()[:INDEX_BYTES]:
        return "sharded"
    for pattern, found in STRANGERS.items():
        if re.match(pattern, head, re.IGNORECASE | re.DOTALL):
            raise InvalidFileError(f"{path}: {found}")
    return "onnx"


def head_of(path: Path) -> bytes:
    """How a file begins. Raises InvalidFileError where there is none, or it cannot be read."""
    try:
        if path.is_dir():
            raise InvalidFileError(f"{path}: is a folder; name the file in it")
        with path.open("rb") as file:
            return file.read(512)
    except FileNotFoundError:
        raise InvalidFileError(f"{path}: no such file (looked from {Path.cwd()}); {_nearest(path)}") from None
    except OSError as error:
        raise InvalidFileError(f"{path}: cannot be read ({error.strerror}); check path and permissions") from None


def _nearest(path: Path) -> str:
    """What to do about a file that is not there."""
    if path.is_symlink():
        return f"it is a link to {path.readlink()}, which is not there"
    try:
        close = difflib.get_close_matches(path.name, [f.name for f in path.parent.iterdir()], 1)
    except OSError:
        close = []
    return f"did you mean {path.with_name(close[0])}?" if close else "check the path"


def _recognise_zip(path: Path) -> str:
    from .archives import member_names

    names = [n.partition("/")[2] or n for n in member_names(path)]
    if "data.pkl" in names and ("constants.pkl" in names or any(n.startswith("code/") for n in names)):
        return "torchscript"
    if "data.pkl" in names:
        return "torch"
    if "serialized_exported_program.json" in names or any(re.match(r"models/.*\.json$", n) for n in names):
        return "exported-program"
    raise InvalidFileError(f"{path}: a zip archive without a model (it holds {some_of(names)}); unpack it first")


def safetensors_header(path: Path) -> dict[str, Any]:
    """What a safetensors file says of its tensors, by name, and of itself under `__metadata__`. Raises ValueError."""
    with path.open("rb") as file:
        return json.loads(file.read(int.from_bytes(file.read(8), "little")))


def shards_of(path: Path) -> list[Path]:
    """The files that the index of a sharded checkpoint names. Raises InvalidFileError where they are not beside it."""
    from .archives import damaged

    try:
        named = sorted(set(json.loads(path.read_bytes())["weight_map"].values()))
        shards = [path.parent / name for name in named]
        outside = [s for s in shards if not s.resolve().is_relative_to(path.parent.resolve())]
        missing = [s for s in shards if not s.is_file()]
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise damaged(path, error) from None
    if outside:
        raise InvalidFileError(f"{path}: unsafe, its shard {outside[0].name!r} lies outside its folder; do not use it")
    if missing:
        raise InvalidFileError(f"{path}: its shard {missing[0].name!r} is missing; put all of them beside the index")
    if nested := [s for s in shards if recognise(s) not in ("torch", "safetensors")]:
        raise InvalidFileError(f"{path}: its shard {nested[0].name!r} is no file of weights; {AGAIN}")
    return shards
