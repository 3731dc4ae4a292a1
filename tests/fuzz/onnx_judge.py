"""Fold an ONNX program and judge what came out, in float64, element by element."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping

import numpy as np
import onnx
from onnx import ModelProto, TensorProto, numpy_helper
from onnx.helper import tensor_dtype_to_np_dtype

import bnfold

from .arrays import Array, generator_of
from .evaluation import magnitude, run
from .onnx_builder import LARGEST
from .onnx_nodes import build
from .program import Failure, Program
from .tally import Tally

# Of M (see evaluation.py): ten layers of a hundred terms are 1000 roundings, each of 2 ** -53.
LIMIT = 1e-13
# Half the distance of neighbouring numbers, relative, and the smallest subnormal of the formats a fold rounds to.
# A folded bias may be off by a whole unit in the last place, so that the unit counts twice.
ROUNDING = {
    TensorProto.FLOAT: (2.0**-24, 2.0**-149),
    TensorProto.FLOAT16: (2.0**-11, 2.0**-24),
    TensorProto.BFLOAT16: (2.0**-8, 2.0**-133),
    TensorProto.DOUBLE: (0.0, 0.0),  # in LIMIT
}


def judge(program: Program, tally: Tally | None = None) -> Failure | None:
    """What is wrong with the fold of a program. Raises UnfitError for one that is no network."""
    model = build(program)
    try:
        onnx.checker.check_model(model, full_check=True)
        feeds = [f for f in _feeds(program, model) if f is not None]
        wanted = [run(model, f) for f in feeds]
    except Exception as e:
        return Failure("the generator made an invalid model", _short(e))
    try:
        return next(_problems(program, model, feeds, wanted, tally), None)
    except Exception as e:
        return Failure(f"crash: {type(e).__name__}", _short(e))


def _short(e: Exception) -> str:
    return "".join(traceback.format_exception(e)[-4:])


def _feeds(program: Program, model: ModelProto) -> Iterator[dict[str, Array] | None]:
    """The input at the size that was drawn and, where dimensions are free, at another one the model runs at."""
    shape = program.shape
    yield {"x": _input(program, shape)}
    free = program.settings.get("free")
    if not free:
        return
    other = (shape[0] + 1, *shape[1:])
    if free != "batch":
        other = (*other[:2], *(n + 2 for n in other[2:]))
    feed = {"x": _input(program, other)}
    try:
        found = run(model, feed)
    except Exception:
        return
    if all(v.size < 4 * LARGEST for v in found):
        yield feed


def _input(program: Program, shape: tuple[int, ...]) -> Array:
    rng = generator_of(f"input {shape}")
    if program.settings.get("ids"):
        return rng.integers(0, 5, shape)
    elem = getattr(TensorProto, program.settings.get("dtype", "double").upper())
    return rng.normal(0.3, 1.0, shape).astype(tensor_dtype_to_np_dtype(elem))


def _problems(
    program: Program,
    model: ModelProto,
    feeds: list[dict[str, Array]],
    wanted: list[list[Array]],
    tally: Tally | None,
) -> Iterator[Failure]:
    before = model.SerializeToString(deterministic=True)
    result = bnfold.fold(model)
    folded: ModelProto = result.model
    if model.SerializeToString(deterministic=True) != before:
        yield Failure("the argument was changed", "")
    yield from _interface(model, folded)
    yield from report_problems(result.report)
    yield from _nodes_left(model, folded, result.report)
    for feed, want in zip(feeds, wanted, strict=True):
        yield from _numbers(model, folded, feed, want, tally)
    if program.settings.get("again"):
        yield from _again(model, folded, feeds[0], wanted[0], tally)
    if not result.report.folded and not result.report.affine and folded.SerializeToString(deterministic=True) != before:
        yield Failure("nothing folds, yet the model changed", "")
    if tally is not None:
        tally.count(program, result.report)


def _interface(model: ModelProto, folded: ModelProto) -> Iterator[Failure]:
    try:
        onnx.checker.check_model(folded, full_check=True)
    except Exception as e:
        yield Failure("the folded model is invalid", _short(e))
    if [v.SerializeToString() for v in model.graph.output] != [v.SerializeToString() for v in folded.graph.output]:
        yield Failure("the outputs are others", str([v.name for v in folded.graph.output]))
    given = [
        [v.name for v in m.graph.input if v.name not in {t.name for t in m.graph.initializer}] for m in (model, folded)
    ]
    if given[0] != given[1]:
        yield Failure("the inputs are others", str(given))
    if len(folded.graph.node) > len(model.graph.node):
        yield Failure("more nodes than before", f"{len(model.graph.node)} became {len(folded.graph.node)}")


def report_problems(report: bnfold.Report) -> Iterator[Failure]:
    """Every norm is in exactly one of `folded` and `kept`, each kept one with reasons; JSON gives the report back."""
    told = [f.norm for f in report.folded if f.norm] + [k.norm for k in report.kept]
    if sorted(told) != sorted(n.norm for n in report.norms) or len(set(told)) < len(told):
        yield Failure("a norm is not in exactly one of folded and kept", str(report))
    for k in report.kept:
        if not k.reasons or not all(r.detail and r.at for r in k.reasons):
            yield Failure("a norm is kept without a reason", str(k))
    for f in (*report.folded, *report.affine):
        if not f.into or f.direction not in ("backward", "forward", "both", "merge"):
            yield Failure("a fold leads nowhere", str(f))
    if bnfold.Report.from_json(report.to_json()) != report:
        yield Failure("the report is another one after JSON", str(report))


def _nodes_left(model: ModelProto, folded: ModelProto, report: bnfold.Report) -> Iterator[Failure]:
    """The norms that still stand are those that the report says are kept."""
    had, has = ({n.name for n in m.graph.node if n.op_type == "BatchNormalization"} for m in (model, folded))
    listed, kept = {n.norm for n in report.norms}, {k.norm for k in report.kept}
    if not had <= listed or has != had & kept:
        yield Failure("the report and the norms that are left disagree", f"{sorted(has)}, but kept: {sorted(kept)}")


# ---------------------------------------------------------------------- numbers


def _numbers(
    model: ModelProto, folded: ModelProto, feed: Mapping[str, Array], want: list[Array], tally: Tally | None
) -> Iterator[Failure]:
    """Each element within LIMIT of its magnitude, and what the rounding of folded parameters can add to that."""
    got = run(folded, feed)
    uncertain = _uncertainty(model, folded)
    bounds: list[Array] | None = None
    for k, (w, g) in enumerate(zip(want, got, strict=True)):
        name = model.graph.output[k].name
        if w.shape != g.shape:
            yield Failure("an output has another shape", f"{name}: {w.shape} became {g.shape}")
            return
        if not np.isfinite(w).all():
            continue  # the network itself overflows float64
        error, range_ = np.abs(g - w), max(float(np.abs(w).max()), 1e-300)
        bounds = bounds or _bounds(model, folded, feed, uncertain)
        if tally is not None and not any(u.any() for u in uncertain.values()):
            # The promise is 1e-11 of the output's range. Where terms a thousand times as large cancel, the range is
            # no measure of what float64 can do; there M alone judges.
            if bounds[k].max() < 1000 * LIMIT * range_:
                tally.worst = max(tally.worst, float(error.max()) / range_)
            else:
                tally.cancelling += 1
        if not (error <= bounds[k]).all():  # NaN is not
            with np.errstate(all="ignore"):
                ratio = float(np.nanmax(error / bounds[k]))
            yield Failure(
                "wrong numbers",
                f"{name}: off by {np.nanmax(error):.2e} on a range of {range_:.2e}, {ratio:.1e} times what rounding "
                f"explains, at {np.unravel_index(np.argmax(~(error <= bounds[k])), w.shape)}",
            )
            return


def _bounds(
    model: ModelProto, folded: ModelProto, feed: Mapping[str, Array], uncertain: Mapping[str, Array]
) -> list[Array]:
    found = [LIMIT * m for m in magnitude(model, feed)]
    if any(u.any() for u in uncertain.values()):
        wider, exact = magnitude(folded, feed, uncertain), magnitude(folded, feed)
        found = [f + 1.01 * (w - e) for f, w, e in zip(found, wider, exact, strict=True)]
    return found


def _uncertainty(model: ModelProto, folded: ModelProto) -> dict[str, Array]:
    """How far each parameter that folding wrote can be from its exact value."""
    old = {t.name: t.raw_data for t in model.graph.initializer}
    found: dict[str, Array] = {}
    for t in folded.graph.initializer:
        if t.data_type in ROUNDING and old.get(t.name) != t.raw_data:
            unit, smallest = ROUNDING[t.data_type]
            found[t.name] = 2 * (unit * np.abs(numpy_helper.to_array(t).astype(np.float64)) + smallest)
    return found


def _again(
    model: ModelProto, folded: ModelProto, feed: Mapping[str, Array], want: list[Array], tally: Tally | None
) -> Iterator[Failure]:
    """The same bytes when folded again, and folding the folded model changes nothing, or at least nothing wrongly."""
    stored = folded.SerializeToString(deterministic=True)
    if bnfold.fold(model).model.SerializeToString(deterministic=True) != stored:
        yield Failure("a second run gives another file", "")
    twice = bnfold.fold(folded)
    if not twice.report.folded and twice.model.SerializeToString(deterministic=True) == stored:
        return
    if tally is not None:
        tally.folded_twice += 1
    yield from _numbers(model, twice.model, feed, want, None)


def text(program: Program) -> str:
    """The program to paste into a test, and the model it builds."""
    return f"{program}\n{onnx.printer.to_text(build(program))}"
