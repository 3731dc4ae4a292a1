"""Files that could run code while they are read, checked before torch reads them: pickles and exported programs.

Pickles are read with `weights_only=True`; one that needs more is refused unless the caller trusts it. An exported
program (`.pt2`) is checked member by member, for `torch.export.load` unpickles what it finds and evaluates strings of
the program as Python. The names of a zip archive and what it claims to unpack to are checked for both.
"""

from __future__ import annotations

import ast
import io
import json
import logging
import os
import pickle
import pickletools
import re
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from .errors import AGAIN, InvalidFileError, first_line, some_of
from .factories import importable

if TYPE_CHECKING:
    from torch.export import ExportedProgram

GIB = 1 << 30


def member_names(path: Path) -> list[str]:
    """The names in a zip archive that are safe to unpack; raises InvalidFileError for any other."""
    try:
        size = path.stat().st_size
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
    except (zipfile.BadZipFile, OSError, ValueError) as error:
        raise InvalidFileError(f"{path}: a zip archive cut short or damaged ({first_line(error)}); {AGAIN}") from None
    total = sum(m.file_size for m in members)
    for name, unpacked, packed in [*((m.filename, m.file_size, m.compress_size) for m in members), ("", total, size)]:
        if name.startswith(("/", "\\")) or ":" in name or ".." in re.split(r"[/\\]", name):
            raise InvalidFileError(f"{path}: unsafe, its member {name!r} lies outside the archive; do not use it")
        if unpacked > max(GIB, 100 * packed):
            raise InvalidFileError(f"{path}: unsafe, {packed} bytes of it unpack to {unpacked}; do not use it")
    return [m.filename for m in members]


def read_pickle(path: Path, trust_pickle: bool) -> Any:
    """What a torch.save file holds. Raises InvalidFileError when damaged or in need of more trust than given."""
    import torch

    try:
        with path.open("rb") as file:  # of a path, torch takes the suffix at its word
            return _load_weights(file)
    except pickle.UnpicklingError as error:
        with path.open("rb") as file:
            asked = _asked(file)
        if asked is None:
            raise damaged(path, error) from None
        if not trust_pickle:
            what = f"asks for {some_of(asked)}" if asked else f"is more than torch reads as weights ({cause_of(error)})"
            raise unsafe(path, f"a pickle that {what}", "save model.state_dict() and pass --factory") from None
    except Exception as error:
        raise damaged(path, error) from None
    try:
        with importable(Path.cwd()), warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            with path.open("rb") as file:
                return torch.load(file, map_location="cpu", weights_only=False)
    except (ImportError, AttributeError) as error:
        raise InvalidFileError(
            f"{path}: the code it needs is not importable ({cause_of(error)}); run where that is, or set PYTHONPATH"
        ) from None
    except Exception as error:
        raise damaged(path, error) from None


def _load_weights(source: IO[bytes]) -> Any:
    """What torch reads without running code.

    Its warnings are left out: what it says of pickle protocols it raises as well, and what it says of storages and
    quantized tensors is about its own code.
    """
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return torch.load(source, map_location="cpu", weights_only=True)


def read_program(path: Path, trust_pickle: bool) -> ExportedProgram:
    """An exported program. Raises InvalidFileError when it is damaged or unsafe; `trust_pickle` skips the checks."""
    import torch

    members = members_of(path)
    if not trust_pickle:
        _check_program(path, members)
    copy = packed(members)  # torch gets this one, not the file: two zip readers can see different members in one file
    with _kept_log() as logged:
        try:
            program = torch.export.load(copy)
        except Exception as error:
            cause = cause_of(logged[-1] if logged and type(error) is RuntimeError else error)
            raise InvalidFileError(
                f"{path}: torch {torch.__version__} cannot read this program ({cause}); export it again with it"
            ) from None
    if not trust_pickle:
        program._guards_code = []  # checks of the inputs, as strings that ExportedProgram.module() would compile
    return program


def members_of(path: Path) -> dict[str, bytes]:
    """The members of a zip archive whose names `member_names` found safe. Raises InvalidFileError for a damaged one."""
    members: dict[str, bytes] = {}
    try:
        with zipfile.ZipFile(path) as source:
            for info in source.infolist():
                if info.filename in members:
                    raise InvalidFileError(f"{path}: unsafe, it holds {info.filename!r} twice; do not use it")
                members[info.filename] = source.read(info)
    except InvalidFileError:
        raise
    except Exception as error:
        raise damaged(path, error) from None
    return members


def packed(members: dict[str, bytes]) -> io.BytesIO:
    """An archive of the members, which are taken out of the dictionary as they are written."""
    copy = io.BytesIO()
    with zipfile.ZipFile(copy, "w") as target:
        for name in list(members):
            target.writestr(name, members.pop(name))
    copy.seek(0)
    return copy


@contextmanager
def _kept_log() -> Iterator[list[BaseException]]:
    """Keep what torch.export.load logs off the screen; the list gets the errors, whose causes it raises without."""
    errors: list[BaseException] = []

    def keep(record: logging.LogRecord) -> bool:
        errors.extend(e for e in record.exc_info or () if isinstance(e, BaseException))
        return False

    names = ("torch.export", "torch.export.pt2_archive._package", "torch._export.serde.serialize")
    loggers = [logging.getLogger(name) for name in names]
    for logger in loggers:
        logger.addFilter(keep)
    try:
        yield errors
    finally:
        for logger in loggers:
            logger.removeFilter(keep)


# --- what an exported program may contain

TEXT = re.compile(r"([^/]+/)?(archive_format|archive_version|version|byteorder|\.data/\w+)|[^/]+/extra/.*")
RAW_TENSOR = re.compile(r"[^/]+/data/(weights/weight|constants/tensor)_\d+")
NAME = re.compile(r"[\w.:@#+/$-]*")
OPERATOR = re.compile(
    r"torch\.ops\.(?!aten\.(save|from_file)\b)(aten|prims?|higher_order|quantized|quantized_decomposed|torchvision)"
    r"\.\w+(\.\w+)?|torch\.sym_\w+|torch\._sym_sqrt|math\.\w+|_operator\.(add|and_|eq|floordiv|ge|getitem|gt|le|lshift"
    r"|lt|mod|mul|ne|neg|or_|pos|pow|rshift|sub|truediv)"
)
FORMULA = ast.Expression | ast.Constant | ast.Name | ast.Call | ast.keyword | ast.BinOp | ast.UnaryOp | ast.Compare
FORMULA_PARTS = ast.BoolOp | ast.Tuple | ast.expr_context | ast.operator | ast.unaryop | ast.boolop | ast.cmpop


def _check_program(path: Path, members: Mapping[str, bytes]) -> None:
    """Refuse an exported program whose reading, tracing or running could run code that came with the file.

    Every member must be JSON without code, one of torch's short texts, raw bytes of a tensor, or must load with
    `weights_only=True`: what torch unpickles is then harmless wherever it looks for it.
    """
    advice = "export it again with plain tensors as inputs"
    documents: dict[str, Any] = {}
    for name, data in members.items():
        if "data/aotinductor/" in name.lower():
            raise unsafe(path, f"native code ({name!r})", "use the program it was compiled from")
        with suppress(ValueError, RecursionError):
            documents[name] = json.loads(data.decode())
        if code := _code_in(documents.get(name)):
            raise unsafe(path, f"a program that spells a name or a shape {code[:80]!r}", advice)
    configs = [d["config"] for d in documents.values() if isinstance(d, dict) and isinstance(d.get("config"), dict)]
    payloads = [p for config in configs for p in config.values() if isinstance(p, dict)]
    pickled = {str(p.get("path_name")).lower() for p in payloads if p.get("use_pickle", True)}
    for name, data in members.items():
        raw = RAW_TENSOR.fullmatch(name) and name.rpartition("/")[2] not in pickled  # torch ignores case in names
        if raw or not data or name in documents or TEXT.fullmatch(name):
            continue
        try:
            _load_weights(io.BytesIO(data))
        except Exception as error:
            what = some_of(_asked(io.BytesIO(data)) or ()) or "more than tensors, or is damaged"
            raise unsafe(path, f"its member {name!r} asks for {what} ({cause_of(error)})", advice) from None


def _code_in(value: Any, key: str = "") -> str:
    """A string of a serialized program that may be more than a name, a shape or an operator of torch; else "".

    torch evaluates `expr_str` with sympy, looks `target` up from the torch module, writes names into generated Python
    and imports what `__enum__` and `default_factory_module` in the structure of the inputs say.
    """
    if key in ("metadata", "as_string", "as_strings", "guards_code"):  # text to torch; the guards are dropped later
        return ""
    if isinstance(value, dict):
        if "__enum__" in value or "default_factory_module" in value:
            return str(value)
        return next(filter(None, (_code_in(k) or _code_in(v, k) for k, v in value.items())), "")
    if isinstance(value, list):
        return next(filter(None, (_code_in(v, key) for v in value)), "")
    accepts = {"expr_str": _is_formula, "target": OPERATOR.fullmatch, "as_operator": OPERATOR.fullmatch}
    if not isinstance(value, str) or accepts.get(key, NAME.fullmatch)(value):
        return ""
    with suppress(ValueError, RecursionError):
        if key in ("in_spec", "out_spec", "context"):  # JSON inside JSON
            return _code_in(json.loads(value))
    return value


def _is_formula(text: str) -> bool:
    """Whether sympy only builds an expression from this: numbers, symbols, arithmetic, classes called by their names.

    Evaluating it sees Python's builtin functions too, but their names begin in lower case.
    """
    try:
        nodes = list(ast.walk(ast.parse(text, mode="eval")))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    called = [n.func for n in nodes if isinstance(n, ast.Call)]
    words = [str(n.value) for n in nodes if isinstance(n, ast.Constant)]
    return (
        text.isascii()
        and all(isinstance(n, FORMULA | FORMULA_PARTS) for n in nodes)
        and all(isinstance(f, ast.Name) and f.id[:1].isupper() for f in called)
        and all(re.fullmatch(r"[\w.+-]*", w) for w in words)
    )


# --- words for messages


def _asked(file: IO[bytes]) -> list[str] | None:
    """What the pickles in a torch.save file ask for beyond tensors, found without running them; None if damaged."""
    names: dict[str, None] = {}
    try:
        if zipfile.is_zipfile(file):
            archive = zipfile.ZipFile(file)
            file = io.BytesIO(archive.read(next(n for n in archive.namelist() if n.endswith("data.pkl"))))
        file.seek(0)
        for _ in range(5):  # a file older than the zip format holds five pickles, the fourth of which is the object
            words, memo = [""], {}
            for opcode, argument, _ in pickletools.genops(file):
                if opcode.name in ("GLOBAL", "INST"):
                    names[str(argument).replace(" ", ".")] = None
                elif opcode.name == "STACK_GLOBAL":
                    names[".".join(words[-2:])] = None
                elif opcode.name == "MEMOIZE":
                    memo[len(memo)] = words[-1]
                elif opcode.name in ("BINGET", "LONG_BINGET") or isinstance(argument, str):
                    words.append(argument if isinstance(argument, str) else memo.get(argument, ""))
            if not file.read(1):
                break
            file.seek(-1, os.SEEK_CUR)
    except Exception:
        return None
    types = r"\w+Storage|(b?float|u?int|complex)\d+|bool|Size|device"
    return [n for n in names if not re.fullmatch(rf"collections\.OrderedDict|torch\.(_utils\.\w+|{types})", n)]


def unsafe(path: Path, what: str, advice: str) -> InvalidFileError:
    """The error to raise for a file that could run code; `what` says what in it, `advice` what to do instead."""
    return InvalidFileError(
        f"{path}: {what}: reading it could run code from the file; {advice}, or pass --trust-pickle if you trust it"
    )


def damaged(path: Path, error: Exception) -> InvalidFileError:
    """The error to raise for a file that its own library cannot read."""
    return InvalidFileError(f"{path}: damaged or cut short ({cause_of(error)}); {AGAIN}")


def cause_of(error: BaseException) -> str:
    """As `first_line`, but what torch wraps in advice is taken out of it."""
    wrapped = re.search(r"WeightsUnpickler error: \s*(.*)", str(error))
    return f"{type(error).__name__}: {wrapped[1][:200]}" if wrapped else first_line(error)
