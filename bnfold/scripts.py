"""TorchScript archives: looked through before torch reads them, and written as ONNX.

The interpreter of TorchScript knows neither Python nor its modules, but a script may call every operator that is
registered with torch, already while the archive is loaded (`__setstate__`). Two of torch's own write and read files,
`aten::save` and `aten::from_file`, two of torchvision's do, and other libraries may have registered anything. So the
code is parsed, and a script that names these is refused. What is left computes; it may still take for ever.
"""

from __future__ import annotations

import ast
import io
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

from .archives import cause_of, damaged, members_of, packed, unsafe
from .contents import TensorInfo, read_pickled
from .errors import FLOAT_FIRST, InvalidFileError
from .inputs import Free, arguments_of

LIBRARIES = {"aten", "prim", "prims", "quantized", "torchvision"}  # whose operators only compute
FILES = {"save", "from_file", "read_file", "write_file"}  # but for these
QUANTIZED = re.compile(rb"\bops\.quantized\.\w+")
CLASSES = "torch.classes."  # objects of libraries written in C++


def read_script(path: Path, trust_pickle: bool) -> tuple[Any, tuple[tuple[int, ...], ...] | None]:
    """A ScriptModule, and the shapes it was traced with if the archive has them.

    Raises InvalidFileError when it is damaged, quantized or unsafe; `trust_pickle` skips the last of these checks.
    """
    import torch

    from .graphs.torch_trial import quiet

    members = members_of(path)
    code = {n: d for n, d in members.items() if n.endswith(".py")}
    if not trust_pickle:
        what = next(filter(None, (_reaches_out(n, d) for n, d in code.items())), None)
        if what:
            raise unsafe(path, f"a script that {what}", "export the module it was made from")
    if called := next(filter(None, map(QUANTIZED.search, code.values())), None):
        raise InvalidFileError(f"{path}: is quantized ({called[0].decode()}): {FLOAT_FIRST}")
    shapes = _traced_shapes(members)
    copy = packed(members)  # torch gets this one, not the file: two zip readers can see different members in one file
    try:
        with quiet():
            return torch.jit.load(copy, map_location="cpu"), shapes
    except Exception as error:
        raise damaged(path, error) from None


def write_script(
    script: Any,
    inputs: Any,
    *,
    free: Free | None = None,
    static: bool = False,
    opset: int | None = None,
) -> Any:
    """The script as an ONNX model in which every norm is still there.

    Its first dimensions are free, and those that `free` names, unless `static`. `inputs` are a tuple, one tensor, or a
    dict by argument. torch's exporter by way of torch.export does not take scripts; its older one does. Raises
    InvalidFileError where it cannot write this one.
    """
    import onnx
    import torch

    from .graphs.torch_trial import quiet

    arguments = list(arguments_of(script))
    if isinstance(inputs, Mapping):
        inputs = tuple(inputs[a] for a in arguments if a in inputs)
    elif not isinstance(inputs, tuple):
        inputs = (inputs,)
    names = arguments[: len(inputs)]
    asked = [(free or {}).get(a) or (free or {}).get(str(k)) or {} for k, a in enumerate(arguments)]
    axes = {n: {0: "batch", **dims} for n, x, dims in zip(names, inputs, asked, strict=False) if x.dim()}
    try:
        with quiet(), _no_graph_printed(), TemporaryDirectory() as folder:
            written = Path(folder) / "script.onnx"
            torch.onnx.export(
                script, inputs, written, dynamo=False, opset_version=opset, input_names=names,
                dynamic_axes={} if static else axes,
                # In evaluation mode the exporter folds norms itself, in float32; `script` is in that mode already.
                training=torch.onnx.TrainingMode.PRESERVE, do_constant_folding=False,
            )  # fmt: skip
            return onnx.load(written)
    except Exception as error:
        raise InvalidFileError(f"torch.onnx cannot write this script: {cause_of(error)}") from error


@contextmanager
def _no_graph_printed() -> Iterator[None]:
    """Where it fails the exporter prints the whole graph to stdout, and turns on the switch that should prevent it."""
    import torch

    with patch.object(torch._C, "_jit_onnx_log", lambda *_: None, create=True):
        yield


def _traced_shapes(members: Mapping[str, bytes]) -> tuple[tuple[int, ...], ...] | None:
    """Shapes of the inputs of `forward` that `torch.jit.trace` left in the archive, with a batch of 2 or more."""
    data = next((d for n, d in members.items() if n.endswith("traced_inputs.pkl")), None)
    if data is None:
        return None
    try:
        traced = read_pickled(io.BytesIO(data))
        given = traced.get("forward") if isinstance(traced, Mapping) else None
        tensors = [t for t in given or () if isinstance(t, TensorInfo)]
    except Exception:
        return None
    if not tensors or len(tensors) != len(given or ()) or not all(t.dtype.startswith("float") for t in tensors):
        return None
    return tuple((max(t.shape[0], 2), *t.shape[1:]) if t.shape else () for t in tensors)


# ---------------------------------------------------------------------- what a script may say


def _reaches_out(name: str, code: bytes) -> str | None:
    """What in a file of code could do more than compute, in words; None where nothing could."""
    try:
        tree = ast.parse(code.decode())
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return f"cannot be looked through ({name}: {type(error).__name__})"
    for node in ast.walk(tree):
        for word in _words(node):
            if word in FILES:
                return f"reads or writes files ({word!r} in {name})"
        path = _path(node)
        if path.startswith(("ops.", "torch.ops.")) and path.removeprefix("torch.").split(".")[1] not in LIBRARIES:
            return f"calls {path}, an operator of another library"
        if CLASSES in path and "torch.classes.quantized" not in path:
            return f"holds objects of {path[path.index(CLASSES) :]}"
    return None


def _words(node: ast.AST) -> Iterator[str]:
    """Names by which a node could reach an operator: attributes, and texts that `getattr` might be given."""
    if isinstance(node, ast.Attribute):
        yield node.attr
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.Name):
        yield node.id


def _path(node: ast.AST) -> str:
    """`a.b.c` as text; "" for what is no chain of names."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return ""
    return ".".join((node.id, *reversed(parts)))
