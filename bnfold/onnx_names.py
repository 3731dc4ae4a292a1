"""What the inputs, outputs and free sizes of an ONNX model that torch wrote are called."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain, count
from typing import Any

from .errors import UsageError
from .inputs import Free


def output_names(program: Any) -> list[str]:
    """Names for what an ExportedProgram returns, by where it is in what it returns.

    `output` for a tensor alone, `output_0` in a tuple; the keys of a dict and the fields of a named tuple, with what
    is below them behind a dot. None are given to what is of a class that does not say what its parts are called.
    """
    from torch.utils import _pytree as pytree  # noqa: TID251 -- the program is torch's

    spec, returned = program.call_spec.out_spec, program.graph_signature.user_outputs
    try:
        paths = pytree.tree_flatten_with_path(pytree.tree_unflatten(range(spec.num_leaves), spec))[0]
    except Exception:  # what a class of somebody's own makes of numbers in place of tensors
        return []
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


def check_names(model: Any, inputs: Sequence[str], outputs: Sequence[str]) -> None:
    """Raise UsageError unless the first inputs and outputs of a model can be called so."""
    graph = model.graph
    left = {i.name for i in graph.input[len(inputs) :]} | {t.name for t in graph.initializer}
    for option, names, values in (("input", inputs, graph.input), ("output", outputs, graph.output)):
        if len(names) > len(values):
            raise UsageError(f"--{option}-name: {len(names)} given, but the model's {option}s number {len(values)}")
        for name in names:
            if not _is_text(name):
                raise UsageError(f"--{option}-name {name!r}: no name that ONNX can hold; choose another")
            if name in left:
                raise UsageError(f"--{option}-name {name}: something else is called so; choose another")
            left.add(name)


def name_values(model: Any, inputs: Sequence[str] = (), outputs: Sequence[str] = ()) -> None:
    """Call the first inputs and outputs of a model so.

    Weights and other inputs keep their names, and an output whose name is theirs, or is taken, goes by one like it;
    all other values make room. An output that is an input, or is there twice, gets a value of its own.
    """
    graph = model.graph
    _part_outputs(graph, len(outputs))
    renamed = {value.name: name for value, name in zip(graph.input, inputs, strict=False)}
    staying = {i.name for i in graph.input[len(inputs) :]} | {t.name for t in graph.initializer}
    taken = staying | set(renamed.values())
    for k, (value, wanted) in enumerate(zip(graph.output, outputs, strict=False)):
        name = wanted if _is_text(wanted) else f"output_{k}"
        if name in taken:
            name = _fresh(f"{name}_output", taken | set(outputs))
        renamed[value.name] = name
        taken.add(name)
    values = {n for g in _graphs(graph) for node in g.node for n in (*node.input, *node.output)}
    for name in sorted(values & taken - staying - renamed.keys()):
        renamed[name] = _fresh(name, taken | values)
        taken.add(renamed[name])
    _rename(graph, {old: new for old, new in renamed.items() if old != new})


def _part_outputs(graph: Any, first: int) -> None:
    """Let each of the first outputs be a value of its own."""
    import onnx

    seen = {i.name for i in graph.input} | {t.name for t in graph.initializer}
    taken = seen | {n for g in _graphs(graph) for node in g.node for n in (*node.input, *node.output)}
    for output in graph.output[:first]:
        if output.name in seen:
            copied = _fresh(output.name, taken)
            graph.node.append(onnx.helper.make_node("Identity", [output.name], [copied], copied))
            output.name = copied
        seen.add(output.name)
        taken.add(output.name)


def _is_text(name: str) -> bool:
    """Whether a protobuf message can hold the name, and ONNX takes it for one."""
    return bool(name) and not re.search(r"[\ud800-\udfff\0]", name)


def _fresh(name: str, taken: Collection[str]) -> str:
    """The name, or the first with a number behind it that is free."""
    return next(n for n in chain([name], (f"{name}_{k}" for k in count(2))) if n not in taken)


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
