"""What the inputs, outputs and free sizes of an ONNX model that torch wrote are called."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .inputs import Free


def output_names(program: Any) -> list[str]:
    """Names for the tensors that an ExportedProgram returns, by where they are in what it returns.

    `output` for a tensor alone, `output_0` in a tuple; the keys of a dict and the fields of a named tuple, with what
    is below them behind a dot.
    """
    from torch.utils import _pytree as pytree  # noqa: TID251 -- the program is torch's

    spec, returned = program.call_spec.out_spec, program.graph_signature.user_outputs
    paths = pytree.tree_flatten_with_path(pytree.tree_unflatten(range(spec.num_leaves), spec))[0]
    if len(paths) != len(returned):
        return []
    tensors = [path for path, value in zip(paths, returned, strict=True) if isinstance(value, str)]
    return [_spelled([_part(key) for key in path]) for path, _ in tensors]


def script_output_names(script: Any) -> list[str]:
    """The same for a TorchScript module, whose types tell how many tensors it returns."""
    (result,) = [o.type() for o in script.graph.outputs()]
    if result.kind() == "TensorType":
        return ["output"]
    parts = result.elements() if result.kind() == "TupleType" else []
    flat = all(p.kind() == "TensorType" for p in parts)
    return [_spelled([k]) for k in range(len(parts))] if flat else []


def _part(key: Any) -> Any:
    return next(getattr(key, a) for a in ("key", "idx", "name") if hasattr(key, a))


def _spelled(path: Sequence[Any]) -> str:
    if not path or isinstance(path[0], int):
        path = ("_".join(["output", *map(str, path[:1])]), *path[1:])
    return ".".join(map(str, path))


def name_values(model: Any, inputs: Sequence[str] = (), outputs: Sequence[str] = ()) -> None:
    """Call the first inputs and outputs of a model so.

    Other values make room. A name that an initializer or an input has stays with it, and an output that is an input, or
    is there twice, keeps its name.
    """
    graph = model.graph
    renamed = {value.name: name for value, name in zip(graph.input, inputs, strict=False)}
    given = {i.name for i in graph.input} | {t.name for t in graph.initializer}
    taken = {renamed.get(name, name) for name in given}
    once = Counter(o.name for o in graph.output)
    for value, name in zip(graph.output, outputs, strict=False):
        if value.name not in given and once[value.name] == 1:
            renamed[value.name] = name if name not in taken else f"{name}_output"
            taken.add(renamed[value.name])
    values = {n for g in _graphs(graph) for node in g.node for n in (*node.input, *node.output)}
    for name in sorted(values & set(renamed.values()) - renamed.keys()):
        fresh = next(f"{name}_{k}" for k in range(2, len(values) + 3) if f"{name}_{k}" not in values | taken)
        renamed[name] = fresh
        taken.add(fresh)
    _rename(graph, {old: new for old, new in renamed.items() if old != new})


def _rename(graph: Any, names: Mapping[str, str]) -> None:
    """Other names for values, everywhere that they are named."""
    for g in _graphs(graph):
        for node in g.node:
            for values in (node.input, node.output):
                values[:] = [names.get(v, v) for v in values]
        for value in (*g.input, *g.output, *g.value_info, *g.initializer):
            value.name = names.get(value.name, value.name)


def _graphs(graph: Any) -> Iterator[Any]:
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                if inner.node:
                    yield from _graphs(inner)


def fixed_batch(model: Any) -> tuple[str, ...]:
    """A line that says so where no input of a model has a batch of any size."""
    shapes = [v.type.tensor_type.shape.dim for v in model.graph.input]
    if any(s[0].dim_param for s in shapes if s) or not any(len(s) > 1 for s in shapes):
        return ()
    size = next(s[0].dim_value for s in shapes if len(s) > 1)
    return (f"the batch is fixed at {size}: the network cannot be exported for any size; --input gives another",)


def name_sizes(model: Any, free: Free) -> tuple[str, ...]:
    """Call free sizes of the inputs what they are to be called, a leading one `batch` instead of the exporter's `s77`.

    Returns a line for each size that was to stay free and did not.
    """
    sizes = [
        dim for info in (*model.graph.input, *model.graph.output, *model.graph.value_info)
        for dim in info.type.tensor_type.shape.dim if dim.dim_param
    ]  # fmt: skip
    for dim in sizes:
        if dim.dim_param.isdecimal():  # what was to be free and turned out to be fixed is spelled as a name
            dim.dim_value = int(dim.dim_param)
    names: dict[str, str] = {}
    notes: list[str] = []
    for k, value in enumerate(model.graph.input):
        dims = value.type.tensor_type.shape.dim
        for i, name in (free.get(value.name) or free.get(str(k)) or {}).items():
            if dims[i].dim_param:
                names.setdefault(dims[i].dim_param, name)
            else:
                notes.append(
                    f"{name} of input {value.name} is {dims[i].dim_value}: the exporter could not keep it free"
                )
    leading = {v.type.tensor_type.shape.dim[0].dim_param for v in model.graph.input
               if v.type.tensor_type.shape.dim} - {"", *names}  # fmt: skip
    if len(leading) == 1 and "batch" not in names.values():
        names[leading.pop()] = "batch"
    if names:
        symbols = re.compile(rf"\b({'|'.join(map(re.escape, names))})\b")
        for dim in sizes:
            if dim.dim_param:
                dim.dim_param = symbols.sub(lambda m: names[m[1]], dim.dim_param)
    return tuple(notes)
