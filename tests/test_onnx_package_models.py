"""The onnx package's own test models: what does not fold comes back to the byte, what folds changes where it says."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from onnx_models import changes_only_what_is_reported

import bnfold

DATA = Path(onnx.__file__).parent / "backend" / "test" / "data"
FILES = sorted(DATA.rglob("*.onnx"))
FOLDS = {"light_densenet121": 121, "light_inception_v2": 69, "light_resnet50": 53, "light_shufflenet": 49}


def named(path: Path) -> str:
    return path.stem if path.stem != "model" else path.parent.name


@pytest.mark.parametrize("group", sorted({p.relative_to(DATA).parts[0] for p in FILES} - {"light"}))
def test_what_does_not_fold_comes_back_to_the_byte(group):
    kept = 0
    for path in (p for p in FILES if p.relative_to(DATA).parts[0] == group):
        model = onnx.load(path)
        result = bnfold.fold(model)
        report = result.report
        assert not report.folded, path
        assert [k.norm for k in report.kept] == [n.norm for n in report.norms], path
        assert all(k.reasons for k in report.kept), path
        if not report.affine:
            assert result.model.SerializeToString() == model.SerializeToString(), path
        else:
            changes_only_what_is_reported(model, result)
        kept += len(report.kept)
    assert kept == {"pytorch-converted": 5}.get(group, 0)


@pytest.mark.parametrize("path", [p for p in FILES if named(p) in FOLDS], ids=named)
def test_what_folds_changes_where_it_says(path):
    """These are skeletons: their weights are made at run time of one number, `ConstantOfShape`."""
    model = onnx.load(path)
    result = bnfold.fold(model)
    assert len(result.report.folded) == len(result.report.norms) == FOLDS[named(path)]
    changes_only_what_is_reported(model, result)


def test_the_package_has_the_models():
    assert len(FILES) > 100
    assert {named(p) for p in FILES} >= FOLDS.keys()
