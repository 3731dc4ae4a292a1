"""Sessions of onnxruntime that compute what a model says, also where onnxruntime does not take it as it is."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import InvalidFileError, UsageError

CPU = "CPUExecutionProvider"


HALVES = {"float16": 10, "bfloat16": 16}  # TensorProto.DataType


@dataclass(frozen=True, slots=True)
class Started:
    """A session, and the 16-bit types of the model.

    `widened` says that bfloat16 is computed in float32, for want of kernels; `narrow` names the inputs and outputs
    that are bfloat16 in the model and float32 in the session.
    """

    session: Any
    halves: frozenset[str]
    widened: bool = False
    narrow: frozenset[str] = frozenset()


def check_providers(providers: Sequence[str]) -> None:
    """Raise UsageError unless this onnxruntime has every provider."""
    import onnxruntime

    if isinstance(providers, str) or not providers:
        raise UsageError(f"providers: expected a sequence of names such as ({CPU!r},), got {providers!r}")
    available = onnxruntime.get_available_providers()
    if absent := [p for p in providers if p not in available]:
        raise UsageError(
            f"this onnxruntime has no provider {', '.join(absent)}; available: {', '.join(available)} "
            "(for CUDA, install onnxruntime-gpu in place of onnxruntime)"
        )


def start(model: Any, role: str, provider: str, watch: Sequence[str] = ()) -> Started:
    """Load a model (a proto, its bytes or a path) on one provider; `watch` names inner values to be outputs as well.

    Raises InvalidFileError when onnxruntime cannot load it, UsageError when the provider cannot run it.
    """
    name = f"{role} {os.fspath(model)}" if isinstance(model, str | os.PathLike) else role
    source = _source(model, name, watch)
    try:
        started = _started(source, provider)
    except Exception as e:
        if _lacks_kernels(e):
            raise UsageError(f"{name}: {provider} cannot run it: {first_line(e)}; choose another provider") from e
        raise InvalidFileError(f"{name}: onnxruntime cannot load it: {first_line(e)}") from e
    if provider not in started.session.get_providers():
        raise UsageError(f"{provider} is installed but does not start; check the driver, CUDA and cuDNN")
    return started


@dataclass(frozen=True, slots=True)
class _Source:
    """What onnxruntime is to load, and the folder of its external data where that is not beside a path."""

    model: str | bytes
    halves: frozenset[str]
    folder: str = ""


def _started(source: _Source, provider: str) -> Started:
    try:
        return Started(_session(source, provider), source.halves)
    except Exception as e:
        if not _lacks_kernels(e) or "bfloat16" not in source.halves:
            raise
    wide, narrow = _widened(source)
    return Started(_session(wide, provider), source.halves, True, narrow)


def _session(source: _Source, provider: str) -> Any:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    if source.folder:
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", source.folder)
    settings = {"use_tf32": "0"} if provider == "CUDAExecutionProvider" else {}
    return ort.InferenceSession(source.model, options, providers=[(provider, settings)])


def _lacks_kernels(error: Exception) -> bool:
    return type(error).__name__ == "NotImplemented"  # onnxruntime's, whose class is not public


def _widened(source: _Source) -> tuple[_Source, frozenset[str]]:
    """The model with bfloat16 in float32, and which inputs and outputs were bfloat16."""
    import onnx

    from .widening import widened

    if isinstance(source.model, bytes):
        proto, folder = onnx.load_from_string(source.model), source.folder
    else:
        proto, folder = onnx.load(source.model, load_external_data=False), str(Path(source.model).absolute().parent)
    wide, narrow = widened(proto)
    return _Source(wide.SerializeToString(), source.halves, folder), narrow


def _source(model: Any, name: str, watch: Sequence[str]) -> _Source:
    """A BatchNormalization with empty names at the end of its outputs ends the process in onnxruntime 1.32, at every
    optimization level unless it happens to be fused. Without those names it means the same.
    """
    import onnx

    from .widening import holds

    path = Path(model) if isinstance(model, str | os.PathLike) else None
    try:
        if path is not None:
            proto: Any = onnx.load(path, load_external_data=False)
        else:
            proto = onnx.load_from_string(model) if isinstance(model, bytes) else model
        halves = frozenset(half for half, kind in HALVES.items() if holds(proto, kind))
        if watch or any(_trailing(n) for n in _norms(proto)):
            proto = copy.deepcopy(proto)
            proto.graph.output.extend(onnx.ValueInfoProto(name=n) for n in watch)
            for node in _norms(proto):
                del node.output[len(node.output) - _trailing(node) :]
            return _Source(proto.SerializeToString(), halves, "" if path is None else str(path.absolute().parent))
        if path is not None:
            return _Source(str(path), halves)
        return _Source(model if isinstance(model, bytes) else proto.SerializeToString(), halves)
    except FileNotFoundError as e:
        raise InvalidFileError(f"{name}: no such file") from e
    except Exception as e:
        hint = " (above 2 GB, save it with external data and pass its path)" if path is None else ""
        raise InvalidFileError(f"{name}: cannot be read as an ONNX model: {first_line(e)}{hint}") from e


def _norms(proto: Any) -> Iterator[Any]:
    """Every BatchNormalization, in the graph, its subgraphs and the model's functions."""
    pending = [proto.graph.node, *(f.node for f in proto.functions)]
    while pending:
        for node in pending.pop():
            if node.op_type == "BatchNormalization":
                yield node
            pending += [g.node for a in node.attribute for g in (a.g, *a.graphs) if g.node]


def _trailing(node: Any) -> int:
    """How many output names at the end are empty."""
    return len(node.output) - max((i + 1 for i, o in enumerate(node.output) if o), default=0)


def first_line(error: BaseException) -> str:
    """What an exception says, in one line."""
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return re.sub(r"^\[ONNXRuntimeError\] : \d+ : \w+ : ", "", line)[:300]
