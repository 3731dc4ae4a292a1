"""What an fx node of an exported program says of itself: operator, arguments, shape, and the module call it is in."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import fx
from torch.export.graph_signature import ExportGraphSignature

from ..affine import Shape


class ProgramLike(Protocol):
    """What is read of an exported program, or of a trace that is lowered to look like one."""

    @property
    def graph(self) -> fx.Graph: ...  # noqa: D102
    @property
    def graph_module(self) -> Any: ...  # noqa: D102
    @property
    def graph_signature(self) -> ExportGraphSignature: ...  # noqa: D102
    @property
    def state_dict(self) -> dict[str, Any]: ...  # noqa: D102
    @property
    def constants(self) -> dict[str, Any]: ...  # noqa: D102


TUPLED = {"_native_batch_norm_legit_no_training", "native_batch_norm", "_native_batch_norm_legit",
          "_native_batch_norm_legit_functional", "_batch_norm_with_update", "_batch_norm_with_update_functional",
          "_batch_norm_no_update", "cudnn_batch_norm", "miopen_batch_norm"}  # fmt: skip
UNKNOWN = "unknown"  # in a node's meta: a call that could not be run for want of shapes
NORM_OPS = {"batch_norm", "instance_norm", *TUPLED}
SHAPE_READERS = {"sym_size", "sym_numel", "sym_stride", "sym_storage_offset", "sym_is_contiguous",
                 "_assert_tensor_metadata", "zeros_like", "ones_like", "full_like", "empty_like", "rand_like",
                 "randn_like", "new_zeros", "new_ones", "new_full", "new_empty"}  # fmt: skip
SHAPE_OF_SECOND = {"reshape_as", "view_as", "expand_as"}


def shape_of(node: fx.Node) -> Shape:
    """The node's shape; symbolic sizes as text, equal text meaning equal size."""
    return tuple(n if isinstance(n, int) else str(n) for n in node.meta["val"].shape)


def path_of(node: fx.Node) -> tuple[str, str]:
    """Path and class of the module call the node stands in, `#2` on the path for a second call."""
    stack = node.meta.get("nn_module_stack") or {}
    if not stack:
        return "", ""
    key, (path, cls) = list(stack.items())[-1]
    name = cls if isinstance(cls, str) else f"{cls.__module__}.{cls.__qualname__}"
    return call_of(key, path), name


def call_of(key: str, path: str) -> str:
    """The path of a module with `#2` for its second call, from its key in a node's module stack (`...@1`)."""
    _, at, call = key.rpartition("@")
    return f"{path}#{int(call) + 1}" if at and call.isdigit() else path


def op_name(node: fx.Node) -> str:
    """The ATen operator without overload, or the callable's name."""
    schema = getattr(node.target, "_schema", None)
    return schema.name.split("::")[1] if schema is not None else getattr(node.target, "__name__", str(node.target))


def holds_tensors(node: fx.Node) -> bool:
    """Whether the node's value is a tensor or a tuple with tensors."""
    value = node.meta.get("val")
    leaves = value if isinstance(value, list | tuple) else [value]
    return any(isinstance(v, torch.Tensor) for v in leaves)


def arguments_of(node: fx.Node) -> dict[str, Any]:
    """The node's arguments by the names of its schema, defaults filled in."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return {str(k): a for k, a in enumerate(node.args)} | dict(node.kwargs)
    given = {a.name: v for a, v in zip(schema.arguments, node.args, strict=False)}
    return {a.name: given.get(a.name, node.kwargs.get(a.name, a.default_value)) for a in schema.arguments}
