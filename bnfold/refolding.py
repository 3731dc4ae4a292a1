"""`fold` on files: an .onnx or .pt2 goes in, one of the same kind comes out, checked, or no file at all."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from .checkpoint import Reading, load_detailed
from .errors import UsageError
from .exporter import export, judged
from .files import check_output, default_output, staged
from .recognition import recognise
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
    trust_pickle: bool = False,
    tolerance: float | None = None,
    force: bool = False,
    in_place: bool = False,
    progress: Callable[[str], None] | None = None,
) -> Report:
    """Fold a file; without `output`, `model.onnx` becomes `model.folded.onnx` beside it, or itself with `in_place`.

    Raises as `export` does.
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
    if target.suffix.lower() != ".pt2":
        check_output(target, source, force=force, in_place=in_place)
        if recognise(source) != "onnx":
            load_detailed(source, Reading(trust_pickle=trust_pickle))  # what is wrong with the file itself comes first
            raise UsageError(f"{source} is no ONNX file: `bnfold export` turns it into one")
        return export(
            source, target, freeze_initializers=freeze_initializers, respect_inputs=respect_inputs, force=force,
            in_place=in_place, **common,
        ).report  # fmt: skip
    return _fold_program(source, target, trust_pickle, force, in_place, common)


def _fold_program(
    source: Path, target: Path, trust_pickle: bool, force: bool, in_place: bool, common: dict[str, Any]
) -> Report:
    step = common["progress"] or (lambda _: None)
    check_output(target, source, force=force, in_place=in_place)
    step(f"loading {source.name}")
    loaded = load_detailed(source, Reading(trust_pickle=trust_pickle))
    if loaded.kind != "exported-program":
        raise UsageError(f"{source} is no exported program (.pt2): pass -o with an .onnx ending")
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
