"""`export`: a checkpoint becomes a folded ONNX file that was checked against it, or no file at all."""

from __future__ import annotations

import glob
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from .errors import CaptureError, InvalidFileError, NotEquivalentError, RemainingNormsError, UsageError, about
from .files import check_output, default_output, staged
from .graphs.port import is_onnx, is_path
from .inputs import Example, Trials, inputs_for, is_specs, trials_for, trials_on
from .onnx_files import OnnxFile, open_onnx
from .onnx_names import check_names, fixed_batch, name_sizes, name_values, output_names, script_output_names
from .onnx_output import data_names, free_name, superseded_data, write_model
from .recognition import Reading, recognise
from .report import FileInfo, Fold, Reason, Report, Verdict
from .transform import fold, plan, planned

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Exported:
    """The file that was written, the report (with sizes), and the verdict (None when verification was turned off)."""

    path: Path
    report: Report
    verdict: Verdict | None


@dataclass(frozen=True, slots=True)
class _Form:
    """What a file that torch writes is to be like."""

    static: bool
    opset: int | None
    input_names: Sequence[str] | None
    output_names: Sequence[str] | None


def export(
    source: Any,
    output: Any = None,
    *,
    example_inputs: Any = None,
    verify: bool = True,
    factory: str | Callable[..., Any] | None = None,
    factory_args: Mapping[str, Any] | None = None,
    trust_pickle: bool = False,
    key: str | None = None,
    ema: bool = False,
    allow_missing: bool = False,
    only: str | Iterable[str] | None = None,
    skip: str | Iterable[str] | None = None,
    merge: bool = True,
    freeze_initializers: bool = False,
    respect_inputs: bool = False,
    keep_broken: bool = False,
    require_all: bool = False,
    static: bool = False,
    opset: int | None = None,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    tolerance: float | None = None,
    providers: Sequence[str] = ("CPUExecutionProvider",),
    force: bool = False,
    in_place: bool = False,
    progress: Progress | None = None,
) -> Exported:
    """Turn a checkpoint, a module, an ExportedProgram or an ONNX model into a folded, verified ONNX file.

    Args:
        source: A path (state dict with `factory`, pickled module, .pt2, .onnx) or the model itself.
        output: Where to write; `model.pt` becomes `model.onnx` beside it. Needed when `source` is no path.
        example_inputs: As for `fold`, a tuple of `inputs.InputSpec`, or `inputs.Arrays` read from a file; inferred
            where possible when left out. What declares its inputs itself (ONNX, an ExportedProgram) is verified on
            such arrays, and on inputs like such specs.
        factory: Builds the network for a file of bare weights. This, `factory_args`, `trust_pickle`, `key`, `ema` and
            `allow_missing` are those of `bnfold.load`.
        verify: Compare the file with the source in onnxruntime before it appears at its path.
        static: Pin all dimensions; otherwise dimension 0 stays free where the model allows it.
        opset: ONNX opset version. Left out, it is torch's default, or 22 for a network that holds bfloat16.
        require_all: Raise RemainingNormsError (nothing is written) when a normalization stays.
        progress: Called with the name of each step as it begins.

    Raises:
        NotEquivalentError: the file does not compute what the source computes; its `report` has the numbers.
        RemainingNormsError, UsageError, InvalidFileError, BrokenStatisticsError, CaptureError: see each.
    """
    step = progress or (lambda _: None)
    path = Path(source) if is_path(source) else None
    target = _target(path, output)
    check_output(target, path, force=force, in_place=in_place)
    selection: dict[str, Any] = {"only": only, "skip": skip, "merge": merge, "keep_broken": keep_broken}
    checks: dict[str, Any] = {
        "verify": verify, "require_all": require_all, "tolerance": tolerance, "progress": progress, "trials": Trials(),
    }  # fmt: skip
    notes: list[str] = []
    shapes = None
    if path is not None:
        step(f"loading {path.name}")
    on_disk = path is not None and factory is None and recognise(path) == "onnx"
    if path is not None and not on_disk:
        from .checkpoint import load_detailed

        loaded = load_detailed(path, Reading(factory, factory_args or {}, trust_pickle, key, ema, allow_missing))
        source, notes, shapes = loaded.model, list(loaded.notes), loaded.shapes
        if loaded.kind == "state-dict":
            source.eval()  # its training flag is the factory's, not a fact about the checkpoint
    onnx = on_disk or is_onnx(source)
    if onnx or _is_program(source):
        checks["trials"] = trials_on(example_inputs)
    if onnx:
        if opset or static or input_names or output_names:
            raise UsageError("--opset, --static and names apply to torch models; the source is an ONNX file already")
        listed = {"freeze_initializers": freeze_initializers, "respect_inputs": respect_inputs}
        return _from_onnx(path if on_disk else source, target, listed, selection, checks, providers)
    given = Example(None)
    if _is_script(source) and any(m.training for m in source.modules()):
        from .graphs.torch_graph import train_note
        from .graphs.torch_trial import eval_copy

        notes += train_note(source)
        source = eval_copy(source)  # the older exporter writes a script as it stands
    if not _is_program(source):
        given = inputs_for(source, example_inputs, shapes)
        trials = trials_for(source, example_inputs, given.inputs)
        if trials.batches or is_specs(example_inputs):  # else the file that is written says it all
            checks["trials"] = trials
    write = _script_to_onnx if _is_script(source) else _to_onnx
    form = _Form(static, opset, input_names, output_names)
    with about(path, InvalidFileError, CaptureError):
        candidate, report = write(source, given, selection, form, step)
    report = report.with_(notes=(*notes, *given.notes, *report.notes))
    size = None if path is None else path.stat().st_size
    superseded = superseded_data(target)
    with staged(target, superseded) as temporary:
        write_model(candidate, temporary, lambda: free_name(target))
        report = judged(source, temporary, report, target, checks, providers)
        report = _written(report, path, size, target, temporary, superseded)
    return Exported(target, report, report.verdict)


def _from_onnx(
    source: Any,
    target: Path,
    listed: Mapping[str, bool],
    selection: Mapping[str, Any],
    checks: Mapping[str, Any],
    providers: Sequence[str],
) -> Exported:
    """Fold a ModelProto, or the model at a path, whose external data is neither loaded nor held."""
    path = source if isinstance(source, Path) else None
    file = None if path is None else open_onnx(path)
    size = None if file is None else file.bytes
    data = () if file is None or not target.exists() or target.samefile(file.path) else file.locations
    if file is not None and any(target.samefile(file.folder / p) for p in data):
        raise UsageError(f"{target} holds the weights of {path}: pass -o with another path")
    superseded = superseded_data(target, file)
    with staged(target, superseded) as temporary:
        (checks["progress"] or (lambda _: None))("folding")
        report = _folded(source if file is None else file, target, temporary, listed, selection)
        del file  # its memory is verification's
        report = judged(source, temporary, report, target, checks, providers)
        report = _written(report, path, size, target, temporary, superseded)
    return Exported(target, report, report.verdict)


def _folded(
    source: Any, target: Path, temporary: Path, listed: Mapping[str, bool], selection: Mapping[str, Any]
) -> Report:
    """Write the folded model to `temporary`, and its external data beside that under the names they will have."""
    from .graphs.onnx_data import Aside, Rewriting
    from .graphs.onnx_graph import OnnxGraph

    names = data_names(source, target) if isinstance(source, OnnxFile) else {}
    aside = Aside(source) if isinstance(source, OnnxFile) and not names else None
    rewriting = Rewriting(source, temporary.parent, names) if names else aside
    graph = OnnxGraph(source, **listed, rewriting=rewriting)
    planning = planned(graph, **selection)
    model, added = graph.apply(planning)
    report = planning.report.with_(bytes_added=added)
    del planning  # the new weights are in the model now, which takes as much again to be written
    changed = aside.values if aside is not None else {}
    write_model(model, temporary, lambda: free_name(target, names.values()), source, changed)
    return report


def _written(
    report: Report, path: Path | None, size: int | None, target: Path, temporary: Path, superseded: Sequence[Path] = ()
) -> Report:
    """The report with source and output, each with its external data, and a word on where that is."""
    files = [f for f in temporary.parent.rglob("*") if f.is_file()]
    data = ", ".join(sorted(str(f.relative_to(temporary.parent)) for f in files if f != temporary))
    notes = [f"{target.name} keeps its weights in {data}"] if data else []
    notes += [f"{f.name}, which it needs no more, is removed" for f in superseded]
    source = () if path is None or size is None else (FileInfo("source", str(path), size),)
    output = FileInfo("output", str(target), sum(f.stat().st_size for f in files))
    return report.with_(files=(*source, output), notes=(*report.notes, *notes))


def verify_models(reference: Any, candidate: Any, trials: Trials, **options: Any) -> Verdict:
    """`verification.verify`, which is imported when something is verified, on these trials and made ones."""
    from .verification import SEEDS, verify

    return verify(reference, candidate, trials.batches or None, shapes=trials.specs, seeds=SEEDS, **options)


def judged(
    source: Any,
    candidate: Any,
    report: Report,
    target: Path,
    checks: Mapping[str, Any],
    providers: Sequence[str] = ("CPUExecutionProvider",),
) -> Report:
    """The report with the verdict on the candidate; raises when it does not pass, so that nothing is written.

    `checks` holds `verify`, `require_all`, `tolerance` and `progress` as `export` takes them, and the `trials` to
    verify on.
    """
    if checks["require_all"] and report.kept:
        raise RemainingNormsError(_remaining(report), report)
    if not checks["verify"]:
        return report
    if (is_onnx(source) or is_path(source)) and not report.folded and not report.affine:
        same = Verdict(True, (), (), (), notes=("nothing folded: the model is the source, field by field",))
        return report.with_(verdict=same)
    (checks["progress"] or (lambda _: None))("verifying")
    verdict = verify_models(
        source, candidate, trials=checks["trials"], providers=providers, tolerance=checks["tolerance"]
    )
    report = report.with_(verdict=verdict)
    if not verdict.passed:
        raise NotEquivalentError(_difference(target, verdict), report)
    return report


def _target(path: Path | None, output: Any) -> Path:
    if output is not None:
        return Path(output)
    if path is None:
        raise UsageError("export needs an output path when the source is no file")
    return default_output(path, "export")


def _is_program(source: Any) -> bool:
    """Whether the source is an ExportedProgram, without importing torch for it."""
    return type(source).__module__.startswith("torch.export") and type(source).__name__ == "ExportedProgram"


def _is_script(source: Any) -> bool:
    """Whether the source is a TorchScript module."""
    return any(c.__name__ == "ScriptModule" and c.__module__ == "torch.jit._script" for c in type(source).__mro__)


def _to_onnx(
    source: Any,
    given: Example,
    selection: dict[str, Any],
    form: _Form,
    step: Progress,
) -> tuple[Any, Report]:
    """Capture, fold in torch, write as ONNX without the exporter's own folding, fold what is left there."""
    from .graphs.torch_graph import program_graph

    step("capturing the graph")
    graph = program_graph(source, given.inputs, static=form.static, free=given.free)
    step("folding")
    planning = planned(graph, **selection)
    program, added = graph.apply(planning)
    report = planning.report.with_(bytes_added=added)
    step("writing ONNX with torch.onnx")
    values = (n.meta.get("val") for n in program.graph.nodes)  # autocast has bfloat16 where no weight is
    opset, why = _opset(form, program.state_dict.values(), program.constants.values(), values)
    model = _exported(program, form, opset)
    _named(model, form, output_names(program))
    fixed = () if form.static or _is_program(source) else fixed_batch(model)
    sizes = name_sizes(model, {} if form.static else given.free)
    report = report.with_(notes=(*report.notes, *why, *sizes, *fixed))
    if late := _late(report, model):
        step("folding what is left in ONNX")
        rest = fold(model, only=[glob.escape(n) for n in late], keep_broken=True)
        model, report = rest.model, _joined(report, rest.report, late)
    return model, report


def _script_to_onnx(
    source: Any,
    given: Example,
    selection: dict[str, Any],
    form: _Form,
    step: Progress,
) -> tuple[Any, Report]:
    """Write a TorchScript module as ONNX, norms and all, and fold it there."""
    from .scripts import write_script

    step("writing ONNX with torch.onnx")
    opset, why = _opset(form, source.parameters(), source.buffers())
    model = write_script(source, given.inputs, free=given.free, static=form.static, opset=opset)
    _check_opset(model, form)
    _named(model, form, script_output_names(source))
    step("folding")
    folded = fold(model, **selection)
    return folded.model, folded.report.with_(notes=(*why, *folded.report.notes))


def _late(report: Report, model: Any) -> dict[str, str]:
    """The norms that torch's graph could not fold though they were selected: from their names in ONNX to ours.

    A module that is called more than once is left out, for its calls cannot be told apart by their scopes.
    """
    open_ones = {k.norm for k in report.kept if all(r.reason is not Reason.EXCLUDED for r in k.reasons)}
    if not open_ones:
        return {}
    norms = plan(model).norms
    calls = Counter(n.module for n in norms)
    return {n.norm: n.module for n in norms if n.module in open_ones and calls[n.module] == 1}


def _opset(form: _Form, *tensors: Iterable[Any]) -> tuple[int | None, tuple[str, ...]]:
    """The opset to write (None: torch's default), and a line where it is not what one would expect."""
    if form.opset is not None or not any(str(getattr(t, "dtype", "")) == "torch.bfloat16" for t in chain(*tensors)):
        return form.opset, ()
    return 22, ("written as opset 22, the first in which ONNX convolves bfloat16",)


def _exported(program: Any, form: _Form, opset: int | None) -> Any:
    import torch

    from .graphs.torch_capture import quiet

    converter = logging.getLogger("onnxscript")  # it logs a traceback where it fails, and keeps the other opset
    level = converter.level
    try:
        converter.setLevel(logging.CRITICAL)
        with quiet():
            exported = torch.onnx.export(
                program,
                dynamo=True,
                optimize=False,  # its own folding works in float32 and would hide what was there
                verbose=False,
                opset_version=opset,
            )
    except Exception as e:
        first = (str(e).strip().splitlines() or [type(e).__name__])[0]
        raise InvalidFileError(f"torch.onnx cannot write this model: {first}") from e
    finally:
        converter.setLevel(level)
    assert exported is not None
    model = exported.model_proto
    _check_opset(model, form)
    return model


def _check_opset(model: Any, form: _Form) -> None:
    """torch.onnx passes over an opset it cannot reach; here that is wrong usage."""
    written = next((o.version for o in model.opset_import if o.domain in ("", "ai.onnx")), form.opset)
    if form.opset is not None and written != form.opset:
        raise UsageError(
            f"--opset {form.opset}: torch.onnx could only write opset {written}; leave it out, or try another"
        )


def _named(model: Any, form: _Form, outputs: Sequence[str]) -> None:
    """Give inputs and outputs the names that were asked for, outputs else those that the network has for them."""
    check_names(model, form.input_names or (), form.output_names or ())
    name_values(model, form.input_names or (), form.output_names or outputs)


def _joined(report: Report, rest: Report, late: Mapping[str, str]) -> Report:
    """The torch report with norms that only the ONNX graph could fold moved from kept to folded."""
    found = {late[f.norm]: f for f in rest.folded if f.norm and f.norm in late}
    ops = {k.norm: k.op for k in report.kept}
    folded = [Fold(name, f.into, f.through, f.direction, ops[name]) for name, f in found.items()]
    kept = tuple(k for k in report.kept if k.norm not in found)
    added = report.bytes_added + rest.bytes_added
    return report.with_(folded=(*report.folded, *folded), kept=kept, bytes_added=added)


def _remaining(report: Report) -> str:
    first = "; ".join(f"{k.norm} ({k.reasons[0].reason})" for k in report.kept[:3])
    more = f" and {len(report.kept) - 3} more" if len(report.kept) > 3 else ""
    return f"{len(report.kept)} of {len(report.norms)} normalizations remain: {first}{more}"


def _difference(target: Path, verdict: Verdict) -> str:
    worst = max(verdict.outputs, key=lambda o: (bool(o.problem), o.error / o.limit if o.limit else 0))
    what = worst.problem or f"error {worst.error:.1e} of its range, allowed {worst.limit:.1e}"
    return f"{target} was not written: output {worst.name} is not what the source computes ({what})"
