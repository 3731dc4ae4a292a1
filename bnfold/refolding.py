"""`fold` on files: an .onnx or .pt2 goes in, one of the same kind comes out, checked, or no file at all."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from .errors import UsageError
from .exporter import export, judged
from .files import check_output, default_output, staged
from .recognition import Reading, recognise
from .report import FileInfo, Report
from .transform import fold


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

    An ONNX file comes back as one, an exported program as one, a checkpoint as a checkpoint of its kind (or as
    safetensors, where the output ends so). `reading` says how to read it, `example_inputs` (as for `export`) what its
    network takes. Raises as `export` does.
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
            source, target, freeze_initializers=freeze_initializers, respect_inputs=respect_inputs, force=force,
            in_place=in_place, **common,
        ).report  # fmt: skip
    from .checkpoint import load_detailed

    reading = reading or Reading()
    if suffix == ".onnx":
        load_detailed(source, reading)  # what is wrong with the file itself comes first
        raise UsageError(f"{source} is no ONNX file: `bnfold export` turns it into one")
    if kind == "exported-program":
        return _fold_program(source, target, reading, common)
    from .writeback import fold_checkpoint

    selection = {key: common[key] for key in ("only", "skip", "keep_broken")} | {"merge": False}
    checks = {key: common[key] for key in ("verify", "require_all", "tolerance", "progress")} | {"shapes": None}
    return fold_checkpoint(source, target, reading, example_inputs, selection, checks, force=force, in_place=in_place)


def _fold_program(source: Path, target: Path, reading: Reading, common: dict[str, Any]) -> Report:
    from .checkpoint import load_detailed

    step = common["progress"] or (lambda _: None)
    step(f"loading {source.name}")
    loaded = load_detailed(source, reading)
    import torch

    step("folding")
    folded = fold(
        loaded.model, only=common["only"], skip=common["skip"], merge=common["merge"], keep_broken=common["keep_broken"]
    )
    size = source.stat().st_size  # before it is overwritten, if it is
    with staged(target) as temporary:
        with temporary.open("wb") as f:
            torch.export.save(folded.model, f)
        report = judged(loaded.model, folded.model, folded.report, target, common)
    files = FileInfo("source", str(source), size), FileInfo("output", str(target), target.stat().st_size)
    return report.with_(notes=(*loaded.notes, *report.notes), files=files)
