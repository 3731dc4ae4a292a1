"""`fold` on files: one of the same kind comes out, or an exported program; checked, or no file at all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from .errors import UsageError
from .exporter import export, judged
from .files import check_output, default_output, staged
from .inputs import Example, inputs_for, trials_for, trials_on
from .recognition import Reading, recognise
from .report import FileInfo, Report
from .transform import planned


def fold_file(
    source: Path,
    output: Path | None = None,
    *,
    verify: bool = True,
    only: Iterable[str] | None = None,
    skip: Iterable[str] | None = None,
    merge: bool = True,
    freeze_initializers: bool = False,
    respect_inputs: bool = False,
    keep_broken: bool = False,
    require_all: bool = False,
    reading: Reading | None = None,
    example_inputs: Any = None,
    tolerance: float | None = None,
    force: bool = False,
    in_place: bool = False,
    progress: Callable[[str], None] | None = None,
) -> Report:
    """Fold a file; without `output`, `model.onnx` becomes `model.folded.onnx` beside it, or itself with `in_place`.

    An ONNX file comes back as one, an exported program as one, a checkpoint as a checkpoint of its kind; or as
    safetensors, or its network as an exported program, where the output ends so (.safetensors, .pt2). `reading` says
    how to read it, `example_inputs` (as for `export`) what its network takes. Raises as `export` does.
    """
    target = output or (source if in_place else default_output(source, "fold"))
    common: dict[str, Any] = {
        "verify": verify,
        "only": only,
        "skip": skip,
        "merge": merge,
        "keep_broken": keep_broken,
        "require_all": require_all,
        "tolerance": tolerance,
        "progress": progress,
    }
    check_output(target, source, force=force, in_place=in_place)
    kind, suffix = recognise(source), target.suffix.lower()
    if kind == "onnx":
        if suffix == ".pt2":
            raise UsageError(f"{source} is an ONNX file: pass -o with an .onnx ending")
        return export(
            source, target, example_inputs=example_inputs, freeze_initializers=freeze_initializers,
            respect_inputs=respect_inputs, force=force, in_place=in_place, **common,
        ).report  # fmt: skip
    from .checkpoint import load_detailed

    reading = reading or Reading()
    if suffix == ".onnx":
        load_detailed(source, reading)  # what is wrong with the file itself comes first
        raise UsageError(f"{source} is no ONNX file: `bnfold export` turns it into one")
    if kind == "exported-program" or suffix == ".pt2":
        return _to_program(source, target, reading, example_inputs, common)
    from .writeback import fold_checkpoint

    selection = {key: common[key] for key in ("only", "skip", "keep_broken")} | {"merge": False}
    checks = {key: common[key] for key in ("verify", "require_all", "tolerance", "progress")}
    return fold_checkpoint(source, target, reading, example_inputs, selection, checks, force=force, in_place=in_place)


def _to_program(source: Path, target: Path, reading: Reading, example_inputs: Any, common: Mapping[str, Any]) -> Report:
    """Fold an exported program, or capture the network in a checkpoint as one and fold that."""
    from .checkpoint import load_detailed

    step = common["progress"] or (lambda _: None)
    step(f"loading {source.name}")
    loaded = load_detailed(source, reading)
    if loaded.kind == "torchscript":
        raise UsageError(f"{source} is TorchScript, which torch.export does not take: `bnfold export` makes it ONNX")
    import torch

    from .graphs.torch_graph import program_graph

    given, trials = Example(None), trials_on(example_inputs)
    if loaded.kind == "state-dict":
        loaded.model.eval()  # its training flag is the factory's, not a fact about the checkpoint
    if loaded.kind != "exported-program":
        step("capturing the graph")
        given = inputs_for(loaded.model, example_inputs)
        trials = trials_for(loaded.model, example_inputs, given.inputs)
    graph = program_graph(loaded.model, given.inputs, free=given.free)
    step("folding")
    plan = planned(graph, **{key: common[key] for key in ("only", "skip", "merge", "keep_broken")})
    program, added = graph.apply(plan)
    report = plan.report.with_(bytes_added=added, notes=(*loaded.notes, *given.notes, *plan.report.notes))
    size = source.stat().st_size  # before it is overwritten, if it is
    step("writing")
    with staged(target) as temporary:
        with temporary.open("wb") as f:
            torch.export.save(program, f)
        report = judged(loaded.model, program, report, target, {**common, "trials": trials})
    files = FileInfo("source", str(source), size), FileInfo("output", str(target), target.stat().st_size)
    return report.with_(files=files)
