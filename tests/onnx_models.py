"""Small ONNX models in text form, a float64 evaluation of them that shares no code with bnfold, and a differ.

`model("(float[N,3,7,6] x) => (float[N,4,5,4] y) { c = Conv(x, w) [n] y = BN(c, n) }", w=(4, 3, 3, 3), n=4)` is a
model whose `w` is random and whose norm `n` has four channels: `BN(c, n)` reads `n_s, n_b, n_m, n_v`.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx.inliner
import onnxruntime
import torch
import torch.nn.functional as F
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, numpy_helper
from onnx.helper import get_attribute_value, make_attribute, make_opsetid, tensor_dtype_to_np_dtype
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

import bnfold
from bnfold import Report
from bnfold.report import Folded

Array = np.ndarray[Any, Any]
BF16 = tensor_dtype_to_np_dtype(TensorProto.BFLOAT16)

# ---------------------------------------------------------------------- building


def rng_of(name: str) -> np.random.Generator:
    """A generator of its own for each name: adding an array changes no other."""
    return np.random.default_rng(zlib.crc32(name.encode()))


def norm(name: str, channels: int, **given: Array) -> dict[str, Array]:
    """Parameters of a norm: gammas negative, zero and tiny, zero shifts, variances of 1e-12 and 1e6 among them."""
    turn, rng = zlib.crc32(name.encode()), rng_of(name)

    def some(*values: float) -> Array:
        return np.array([values[(turn + k) % len(values)] for k in range(channels)])

    found = {
        "s": some(-0.7, 1.3, 0.0, 2.1, 1e-6),
        "b": some(0.4, 0.0, -1.1),
        "m": rng.normal(size=channels),
        "v": some(0.8, 1e-12, 1.7, 1e6, 0.3, 2.2, 0.6),
    } | given
    return {f"{name}_{key}": np.asarray(values, np.float64) for key, values in found.items()}


def gentle(name: str, channels: int) -> dict[str, Array]:
    """Parameters of a norm with positive scales near 1."""
    rng = rng_of(name)
    return norm(
        name, channels, s=rng.uniform(0.5, 1.5, channels), v=rng.uniform(0.5, 2, channels), b=rng.normal(size=channels)
    )


def arrays_of(dtype: Any, **given: Any) -> dict[str, Array]:
    """Initializers by name: an int is a norm of so many channels, a tuple the shape of a random array."""
    found: dict[str, Array] = {}
    for name, what in given.items():
        if isinstance(what, int):
            found |= {k: v.astype(dtype) for k, v in norm(name, what).items()}
        elif isinstance(what, tuple):
            found[name] = rng_of(name).normal(size=what).astype(dtype)
        else:
            found[name] = np.asarray(what) if np.asarray(what).dtype != np.float64 else np.asarray(what).astype(dtype)
    return found


def model(text: str, opset: int = 17, ir: int = 8, dtype: Any = np.float32, **given: Any) -> ModelProto:
    """Parse `(inputs) => (outputs) { nodes }`, with functions behind it; what `given` names are initializers."""
    text = re.sub(r"\bBN(<[^>]*>)?\((\w+), (\w+)\)", r"BatchNormalization\1(\2, \3_s, \3_b, \3_m, \3_v)", text)
    domains = "".join(f', "{d}" : 1' for d in sorted(set(re.findall(r"\b(acme\w*)\.", text))))
    m = onnx.parser.parse_model(f'<ir_version: {ir}, opset_import: ["" : {opset}{domains}]> g {text}')
    add_initializers(m, arrays_of(dtype, **given))
    return m


def add_initializers(m: ModelProto, arrays: Mapping[str, Array]) -> None:
    """Store the arrays; before IR 4, list them as inputs too."""
    for name, values in arrays.items():
        tensor = numpy_helper.from_array(values, name)
        m.graph.initializer.append(tensor)
        if m.ir_version < 4:
            list_inputs(m, name)


def list_inputs(m: ModelProto, *names: str) -> None:
    """Make initializers graph inputs too."""
    for t in m.graph.initializer:
        if t.name in names:
            m.graph.input.append(onnx.helper.make_tensor_value_info(t.name, t.data_type, list(t.dims)))


def initializer(m: ModelProto, name: str) -> Array:
    """The values of an initializer of the main graph."""
    return numpy_helper.to_array(next(t for t in m.graph.initializer if t.name == name))


def ops(m: ModelProto) -> list[str]:
    """Types of all nodes, those of nested graphs behind their owner, those of functions last."""
    return [n.op_type for n in every_node(m)]


def every_node(m: ModelProto) -> Iterator[NodeProto]:
    """All nodes of a model, in the order of `ops`."""

    def walk(nodes: Sequence[NodeProto]) -> Iterator[NodeProto]:
        for n in nodes:
            yield n
            for a in n.attribute:
                yield from walk(a.g.node)

    yield from walk(m.graph.node)
    for f in m.functions:
        yield from walk(f.node)


# ---------------------------------------------------------------------- float64 evaluation

FLOATS = {TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16}


def evaluate(m: ModelProto, feeds: Mapping[str, Array]) -> list[Array]:
    """Outputs with every float of the model promoted to float64; convolutions are torch's."""
    promoted = ModelProto()
    promoted.CopyFrom(onnx.inliner.inline_local_functions(m) if m.functions else m)
    _promote(promoted.graph)
    promoted.opset_import.append(make_opsetid("oracle", 1))
    version = next(o.version for o in m.opset_import if o.domain == "")
    for n in every_node(promoted):
        if n.op_type == "BatchNormalization":
            n.attribute.append(make_attribute("trains", _trains(n, version)))
        if n.op_type in ORACLE:
            n.domain = "oracle"
    doubles = {k: v.astype(np.float64) if v.dtype.kind == "f" or v.dtype == BF16 else v for k, v in feeds.items()}
    with np.errstate(all="ignore"):
        return ReferenceEvaluator(promoted, new_ops=list(ORACLE.values())).run(None, doubles)


def _promote(graph: Any) -> None:
    if isinstance(graph, GraphProto):
        for v in (*graph.input, *graph.output):
            if v.type.tensor_type.elem_type in FLOATS:
                v.type.tensor_type.elem_type = TensorProto.DOUBLE
        for t in [t for t in graph.initializer if t.data_type == TensorProto.STRING]:
            graph.initializer.remove(t)  # onnx.reference cannot read those that are no UTF-8
        for t in graph.initializer:
            _double(t)
        del graph.sparse_initializer[:]  # onnx.reference fails on them
    del graph.value_info[:]
    for n in graph.node:
        if n.op_type == "ConstantOfShape" and not n.attribute:
            n.attribute.append(make_attribute("value", numpy_helper.from_array(np.zeros(1))))
        for a in n.attribute:
            match a.type:
                case AttributeProto.TENSOR:
                    _double(a.t)
                case AttributeProto.GRAPH:
                    _promote(a.g)
                case AttributeProto.INT if a.name in ("to", "dtype") and a.i in FLOATS:
                    a.i = TensorProto.DOUBLE
                case AttributeProto.FLOAT | AttributeProto.FLOATS if n.op_type == "Constant":
                    a.CopyFrom(make_attribute("value", numpy_helper.from_array(np.float64(get_attribute_value(a)))))


def _double(t: TensorProto) -> None:
    if t.data_type in FLOATS:
        t.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(t).astype(np.float64), t.name))


def _trains(n: NodeProto, opset: int) -> int:
    flags = {a.name: a.i for a in n.attribute}
    if opset >= 14:
        return flags.get("training_mode", 0)
    return int(any(n.output[1:])) if opset >= 7 else 1 - flags.get("is_test", 0)


class BatchNormalization(OpRun):
    op_domain = "oracle"

    def _run(self, x, s, b, mean, var, epsilon=None, trains=0, spatial=1, **_):
        eps = float(np.float32(1e-5 if epsilon is None else epsilon))
        if trains:
            axes = tuple(i for i in range(x.ndim) if i != 1)
            mean, var = x.mean(axes), x.var(axes)
        shape = (1, -1) + (1,) * (x.ndim - 2) if spatial in (1, None) else (1, *x.shape[1:])
        s, b, mean, var = (p.reshape(shape if x.ndim > 1 else (1,)) for p in (s, b, mean, var))
        y = (x - mean) / np.sqrt(var + eps) * s + b
        return y, *[mean.reshape(-1) for _ in self.onnx_node.output[1:]]


def _spread(values: Sequence[int] | None, taps: int, default: int = 1) -> list[int]:
    return list(values or [default] * taps)


class Conv(OpRun):
    op_domain = "oracle"

    def _run(self, x, w, b=None, auto_pad=None, dilations=None, group=None, pads=None, strides=None, **_):
        taps = w.ndim - 2
        dilations, strides, pads = _spread(dilations, taps), _spread(strides, taps), _spread(pads, 2 * taps, 0)
        if auto_pad in ("SAME_UPPER", "SAME_LOWER"):
            for d in range(taps):
                n, k = x.shape[2 + d], dilations[d] * (w.shape[2 + d] - 1) + 1
                total = max(0, (-(-n // strides[d]) - 1) * strides[d] + k - n)
                less, more = total // 2, total - total // 2
                pads[d], pads[taps + d] = (less, more) if auto_pad == "SAME_UPPER" else (more, less)
        around = [p for d in reversed(range(taps)) for p in (pads[d], pads[taps + d])]
        x, w = F.pad(torch.tensor(x), around), torch.tensor(w)
        b = None if b is None else torch.tensor(b)
        f = (F.conv1d, F.conv2d, F.conv3d)[taps - 1]
        return (f(x, w, b, tuple(strides), 0, tuple(dilations), group or 1).numpy(),)


class ConvTranspose(OpRun):
    op_domain = "oracle"

    def _run(self, x, w, b=None, dilations=None, group=None, output_padding=None, pads=None, strides=None, **_):
        taps = w.ndim - 2
        dilations, strides, pads = _spread(dilations, taps), _spread(strides, taps), _spread(pads, 2 * taps, 0)
        extra = _spread(output_padding, taps, 0)
        f = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[taps - 1]
        x, w = torch.tensor(x), torch.tensor(w)
        y = f(x, w, None, tuple(strides), 0, tuple(extra), group or 1, tuple(dilations)).numpy()
        cut = tuple(slice(pads[d], y.shape[2 + d] - pads[taps + d]) for d in range(taps))
        y = y[(slice(None), slice(None), *cut)]
        return (y if b is None else y + b.reshape(-1, *[1] * taps),)


class DequantizeLinear(OpRun):
    op_domain = "oracle"

    def _run(self, q, s, z=None, axis=1, block_size=None, **_):
        if block_size:
            s, z = (None if v is None else np.repeat(v, block_size, axis) for v in (s, z))
        elif s.size > 1:
            shape = [1] * q.ndim
            shape[1 if axis is None else axis] = -1
            s, z = s.reshape(shape), None if z is None else z.reshape(shape)
        else:
            s, z = s.reshape(()), None if z is None else z.reshape(())
        return ((q.astype(np.float64) - (0 if z is None else z.astype(np.float64))) * s.astype(np.float64),)


ORACLE = {c.__name__: c for c in (BatchNormalization, Conv, ConvTranspose, DequantizeLinear)}


# ---------------------------------------------------------------------- judging

# Rounding a folded weight once moves an output by at most half an ulp of each term; a few terms of one sign and the
# bias add up to a few ulp of the channel's range.
LIMIT = {TensorProto.FLOAT: 1e-6, TensorProto.FLOAT16: 5e-3, TensorProto.BFLOAT16: 4e-2, TensorProto.DOUBLE: 1e-13}


def random_feeds(m: ModelProto, batch: int = 2) -> dict[str, Array]:
    """Random arrays for every required input; symbols are `batch`."""
    stored = {t.name for t in m.graph.initializer}
    feeds: dict[str, Array] = {}
    for v in m.graph.input:
        if v.name in stored:
            continue
        t = v.type.tensor_type
        shape = [d.dim_value or batch for d in t.shape.dim]
        values = rng_of(v.name).normal(0.5, 1.5, shape)
        dtype = tensor_dtype_to_np_dtype(t.elem_type)
        values = values > 0 if dtype.kind == "b" else np.abs(values) if dtype.kind in "iu" else values
        feeds[v.name] = np.asarray(values).astype(dtype)
    return feeds


def check(
    m: ModelProto,
    feeds: Mapping[str, Array] | None = None,
    *,
    folded: Sequence[str] = (),
    kept: Mapping[str, str] | None = None,
    affine: Sequence[str] = (),
    nodes: Sequence[str] | None = None,
    limit: float | None = None,
    checked: bool = True,
    oracle: Callable[[ModelProto, Mapping[str, Array]], list[Array]] = evaluate,
    **options: Any,
) -> bnfold.report.Folded:
    """Fold, and judge structure and numbers together.

    `folded`, `affine`: names in the report, in order; `kept`: a reason of each norm that stays; `nodes`: op types of
    the result (see `ops`). The result must be valid, have the same interface, compute the same in float64, be the same
    when made again, and not change when folded once more. `checked`: the checker accepts the model itself.
    """
    before = m.SerializeToString(deterministic=True)
    result = bnfold.fold(m, **options)
    assert m.SerializeToString(deterministic=True) == before, "the argument was changed"
    report: Report = result.report
    assert [f.norm for f in report.folded] == list(folded)
    assert [f.norm for f in report.affine] == list(affine)
    reasons = {k.norm: {str(r.reason) for r in k.reasons} for k in report.kept}
    assert reasons.keys() == (kept or {}).keys(), reasons
    for name, reason in (kept or {}).items():
        assert reason in reasons[name], (name, report.kept)
    found = result.model
    if nodes is not None:
        assert ops(found) == list(nodes)
    if checked:
        onnx.checker.check_model(found, full_check=True)
    same_interface(m, found)
    if loads(m):
        assert loads(found), "onnxruntime no longer loads it"
    feeds = random_feeds(m) if feeds is None else feeds
    element = next((v.type.tensor_type.elem_type for v in m.graph.input if v.type.tensor_type.elem_type in LIMIT), 1)
    close(oracle(m, feeds), oracle(found, feeds), LIMIT[element] if limit is None else limit)
    again = bnfold.fold(m, **options).model
    assert again.SerializeToString() == found.SerializeToString(), "a second run gives another file"
    if not folded and not affine:
        assert found.SerializeToString(deterministic=True) == before, "nothing folds, yet the model changed"
    if "only" in options or "skip" in options:
        return result
    twice = bnfold.fold(found, **options)
    assert not twice.report.folded
    assert twice.model.SerializeToString() == found.SerializeToString(), "folding again changes the model"
    return result


def loads(m: ModelProto) -> bool:
    """Whether onnxruntime accepts the file."""
    try:
        _session(m)
    except Exception:
        return False
    return True


def by_onnxruntime(m: ModelProto, feeds: Mapping[str, Array]) -> list[Array]:
    """Outputs in float32, for what onnx.reference reads otherwise: inner names that hide outer ones."""
    return _session(m).run(None, dict(feeds))


def _session(m: ModelProto) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    return onnxruntime.InferenceSession(m.SerializeToString(), options, providers=["CPUExecutionProvider"])


def same_interface(old: ModelProto, new: ModelProto) -> None:
    """Inputs a caller must give and outputs: names, types and order."""

    def required(m: ModelProto) -> list[bytes]:
        stored = {t.name for t in m.graph.initializer}
        return [v.SerializeToString(deterministic=True) for v in m.graph.input if v.name not in stored]

    assert required(old) == required(new)
    assert [v.SerializeToString(deterministic=True) for v in old.graph.output] == [
        v.SerializeToString(deterministic=True) for v in new.graph.output
    ]


def close(expected: Sequence[Array], found: Sequence[Array], limit: float) -> None:
    """Each channel (dimension 1) within `limit` of its own range, NaN and Inf in place."""
    assert len(expected) == len(found)
    for e, f in zip(expected, found, strict=True):
        assert e.shape == f.shape
        if e.dtype.kind != "f":
            np.testing.assert_array_equal(e, f)
            continue
        assert np.array_equal(np.isfinite(e), np.isfinite(f))
        e, f = np.nan_to_num(e), np.nan_to_num(f)
        axes = tuple(i for i in range(e.ndim) if i != 1)
        spread, error = np.abs(e).max(axes, initial=0), np.abs(e - f).max(axes, initial=0)
        assert (error <= limit * spread).all(), f"off by {np.max(error / np.maximum(spread, 1e-300)):.1e} of range"


# ---------------------------------------------------------------------- comparing files


def differences(old: Any, new: Any, path: str = "") -> list[str]:
    """Every field in which two messages differ, as a path: `graph.node[c].input[1]`.

    Entries of repeated messages are matched by name (nodes by their first output where they have none).
    """
    found: list[str] = []
    for field in old.DESCRIPTOR.fields:
        where = f"{path}.{field.name}".lstrip(".")
        a, b = getattr(old, field.name), getattr(new, field.name)
        if field.is_repeated:
            found += _lists(a, b, where, field.message_type is not None)
        elif field.message_type is not None:
            if old.HasField(field.name) != new.HasField(field.name):
                found.append(where)
            elif old.HasField(field.name):
                found += differences(a, b, where)
        elif old.HasField(field.name) != new.HasField(field.name) or repr(a) != repr(b):
            found.append(where)
    return found


def changes_only_what_is_reported(old: ModelProto, result: Folded) -> None:
    """Interface and everything that no entry of the report names are as they were."""
    report, new = result.report, result.model
    same_interface(old, new)
    assert _accepted(new) or not _accepted(old)
    edited = {name for f in (*report.folded, *report.affine) for name in (f.norm, *f.into)}
    gone = {n.output[0] for n in old.graph.node} - {n.output[0] for n in new.graph.node}
    known = {n.name or n.output[0]: n for n in old.graph.node}
    operands = {i for name in edited if name in known for i in known[name].input} | gone
    # An initializer or a constant that only edited nodes read may change or go, and new ones may come.
    for place in differences(old, new):
        kind, _, name = place.partition("[")
        name = name.partition("]")[0]
        if place.startswith("+graph.initializer["):
            continue
        assert kind.lstrip("-+") in ("graph.node", "graph.initializer", "graph.value_info", "graph.input"), place
        assert name in edited | operands or _reads_only(old, name, edited), place


def _accepted(model: ModelProto) -> bool:
    try:
        onnx.checker.check_model(model)
    except onnx.checker.ValidationError:
        return False
    return True


def _reads_only(model: ModelProto, name: str, edited: set[str]) -> bool:
    """Whether the value, or what the node of the name computes, is read by edited nodes alone."""
    values = {name} | {o for n in model.graph.node if name in (n.name, n.output[0]) for o in n.output}
    readers = [n for n in model.graph.node if values & set(n.input)]
    return all((n.name or n.output[0]) in edited or _reads_only(model, n.output[0], edited) for n in readers)


def _lists(a: Sequence[Any], b: Sequence[Any], where: str, messages: bool) -> list[str]:
    if not messages:
        return [] if repr(list(a)) == repr(list(b)) else [where]
    ours, theirs = {_key(x, k): x for k, x in enumerate(a)}, {_key(x, k): x for k, x in enumerate(b)}
    found = [f"-{where}[{k}]" for k in ours if k not in theirs] + [f"+{where}[{k}]" for k in theirs if k not in ours]
    common = [k for k in ours if k in theirs]
    if common != [k for k in theirs if k in ours]:
        found.append(f"{where} in another order")
    return found + [d for k in common for d in differences(ours[k], theirs[k], f"{where}[{k}]")]


def _key(message: Any, position: int) -> str:
    names = {f.name for f in message.DESCRIPTOR.fields}
    for field in ("name", "key", "tensor_name"):
        if field in names and getattr(message, field):
            return getattr(message, field)
    if "output" in names and len(message.output):
        return message.output[0]
    return str(position)
