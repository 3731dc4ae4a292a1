"""`export`: a checkpoint becomes a folded ONNX file that was checked against it, or no file at all."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .checkpoint import load_detailed
from .errors import InvalidFileError, NotEquivalentError, RemainingNormsError, UsageError
from .files import check_output, default_output, staged
from .graphs.port import is_onnx, is_path
from .report import FileInfo, Fold, Report, Verdict
from .transform import fold, planned
from .verification import verify as verify_models

Progress = Callable[[str], None]
LARGEST_FILE = 2**31 - 1  # a protobuf message holds no more


@dataclass(frozen=True, slots=True)
class Exported:
    """The file that was written, the report (with sizes), and the verdict (None when verification was turned off)."""

    path: Path
    report: Report
    verdict: Verdict | None


def export(
    source: Any,
    output: Any = None,
    *,
    example_inputs: Any = None,
    verify: bool = True,
    factory: str | Callable[..., Any] | None = None,
    factory_args: Mapping[str, Any] | None = None,
    trust_pickle: bool = False,
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
        example_inputs: As for `fold`, or a tuple of `inputs.InputSpec`; inferred where possible when left out.
        verify: Compare the file with the source in onnxruntime before it appears at its path.
        static: Pin all dimensions; otherwise dimension 0 stays free where the model allows it.
        opset: ONNX opset version; torch's default when left out.
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
    notes: list[str] = []
    if path is not None:
        step(f"loading {path.name}")
        loaded = load_detailed(path, factory=factory, factory_args=factory_args, trust_pickle=trust_pickle)
        source = loaded.model
        if loaded.kind == "state-dict":
            source.eval()  # its training flag is the factory's, not a fact about the checkpoint
        notes += loaded.notes
    selection: dict[str, Any] = dict(only=only, skip=skip, keep_broken=keep_broken)
    if is_onnx(source):
        if opset or static or input_names or output_names:
            raise UsageError("--opset, --static and names apply to torch models; the source is an ONNX file already")
        step("folding")
        folded = fold(source, freeze_initializers=freeze_initializers, respect_inputs=respect_inputs, **selection)
        candidate, report = folded.model, folded.report
    else:
        source, example_inputs, found = _inputs(source, example_inputs)
        notes += found
        candidate, report = _to_onnx(source, example_inputs, selection, static, opset, input_names, output_names, step)
    report = report.with_(notes=(*notes, *report.notes))
    if candidate.ByteSize() > LARGEST_FILE:
        raise InvalidFileError(f"{target}: the model is over 2 GB, which one ONNX file cannot hold")
    checks: dict[str, Any] = dict(verify=verify, require_all=require_all, tolerance=tolerance, progress=progress)
    with staged(target) as temporary:
        temporary.write_bytes(candidate.SerializeToString())
        report = judged(source, temporary, report, target, checks, providers)
    files = [FileInfo("source", str(path), path.stat().st_size)] if path is not None else []
    report = report.with_(files=(*files, FileInfo("output", str(target), target.stat().st_size)))
    return Exported(target, report, report.verdict)


def judged(
    source: Any,
    candidate: Any,
    report: Report,
    target: Path,
    checks: Mapping[str, Any],
    providers: Sequence[str] = ("CPUExecutionProvider",),
) -> Report:
    """The report with the verdict on the candidate; raises when it does not pass, so that nothing is written.

    `checks` holds `verify`, `require_all`, `tolerance` and `progress` as `export` takes them.
    """
    if checks["require_all"] and report.kept:
        raise RemainingNormsError(_remaining(report), report)
    if not checks["verify"]:
        return report
    if is_onnx(source) and not report.folded and not report.affine:
        same = Verdict(True, (), (), (), notes=("nothing folded: the model is the source, field by field",))
        return report.with_(verdict=same)
    (checks["progress"] or (lambda _: None))("verifying")
    verdict = verify_models(source, candidate, providers=providers, tolerance=checks["tolerance"])
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


def _inputs(source: Any, example_inputs: Any) -> tuple[Any, Any, list[str]]:
    """The source with example inputs: given, its own, or inferred."""
    from torch.export import ExportedProgram

    from .inputs import InputSpec, infer_inputs, make_inputs

    if isinstance(example_inputs, tuple) and example_inputs and isinstance(example_inputs[0], InputSpec):
        module = source if hasattr(source, "parameters") else None
        return source, make_inputs(example_inputs, module), []
    if example_inputs is not None:
        return source, example_inputs, []
    if isinstance(source, ExportedProgram):
        if source.example_inputs is None:
            return source, None, []
        args, kwargs = source.example_inputs
        return source, (kwargs if kwargs and not args else args), []
    inferred = infer_inputs(source)
    return source, inferred.inputs, [inferred.note]


def _to_onnx(
    source: Any,
    example_inputs: Any,
    selection: dict[str, Any],
    static: bool,
    opset: int | None,
    input_names: Sequence[str] | None,
    output_names: Sequence[str] | None,
    step: Progress,
) -> tuple[Any, Report]:
    """Capture, fold in torch, write as ONNX without the exporter's own folding, fold what is left there."""
    from .graphs.torch_graph import program_graph

    step("capturing the graph")
    graph = program_graph(source, example_inputs, static=static)
    step("folding")
    plan = planned(graph, **selection)
    program, added = graph.apply(plan)
    report = plan.report.with_(bytes_added=added)
    step("writing ONNX with torch.onnx")
    model = _exported(program, opset, input_names, output_names)
    if report.kept:
        step("folding what is left in ONNX")
        rest = fold(model, **{**selection, "only": None, "skip": None, "keep_broken": True})
        model, report = rest.model, _joined(report, rest.report, selection)
    return model, report


def _exported(program: Any, opset: int | None, inputs: Sequence[str] | None, outputs: Sequence[str] | None) -> Any:
    import torch

    from .graphs.torch_capture import quiet

    try:
        with quiet():
            exported = torch.onnx.export(
                program,
                dynamo=True,
                optimize=False,  # its own folding works in float32 and would hide what was there
                verbose=False,
                opset_version=opset,
                input_names=list(inputs) if inputs else None,
                output_names=list(outputs) if outputs else None,
            )
    except Exception as e:
        first = (str(e).strip().splitlines() or [type(e).__name__])[0]
        raise InvalidFileError(f"torch.onnx cannot write this model: {first}") from e
    assert exported is not None
    model = exported.model_proto
    _name_batch(model)
    return model


def _name_batch(model: Any) -> None:
    """Call the free leading dimension of the inputs `batch` instead of the exporter's `s77`."""
    leading = {i.type.tensor_type.shape.dim[0].dim_param for i in model.graph.input
               if i.type.tensor_type.shape.dim} - {""}  # fmt: skip
    if len(leading) != 1:
        return
    symbol = re.compile(rf"\b{re.escape(leading.pop())}\b")
    for info in (*model.graph.input, *model.graph.output, *model.graph.value_info):
        for dim in info.type.tensor_type.shape.dim:
            if dim.dim_param:
                dim.dim_param = symbol.sub("batch", dim.dim_param)


def _joined(report: Report, rest: Report, selection: dict[str, Any]) -> Report:
    """The torch report with norms that only the ONNX graph could fold moved from kept to folded."""
    modules = {n.norm: n.module for n in rest.norms}
    late = {modules.get(f.norm or ""): f for f in rest.folded}
    folded = [Fold(k.norm, late[k.norm].into, late[k.norm].through, late[k.norm].direction, k.op)
              for k in report.kept if k.norm in late]  # fmt: skip
    kept = tuple(k for k in report.kept if k.norm not in late)
    return report.with_(folded=(*report.folded, *folded), kept=kept)


def _remaining(report: Report) -> str:
    first = "; ".join(f"{k.norm} ({k.reasons[0].reason})" for k in report.kept[:3])
    more = f" and {len(report.kept) - 3} more" if len(report.kept) > 3 else ""
    return f"{len(report.kept)} of {len(report.norms)} normalizations remain: {first}{more}"


def _difference(target: Path, verdict: Verdict) -> str:
    worst = max(verdict.outputs, key=lambda o: (bool(o.problem), o.error / o.limit if o.limit else 0))
    what = worst.problem or f"error {worst.error:.1e} of its range, allowed {worst.limit:.1e}"
    return f"{target} was not written: output {worst.name} is not what the source computes ({what})"
