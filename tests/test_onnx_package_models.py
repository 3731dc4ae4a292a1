"""The onnx package's own test models: what does not fold comes back to the byte, what folds changes where it says."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from onnx import ModelProto
from onnx_models import differences, same_interface

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
            judged(model, result)
        kept += len(report.kept)
    assert kept == {"pytorch-converted": 5}.get(group, 0)


@pytest.mark.parametrize("path", [p for p in FILES if named(p) in FOLDS], ids=named)
def test_what_folds_changes_where_it_says(path):
    """These are skeletons: their weights are made at run time of one number, `ConstantOfShape`."""
    model = onnx.load(path)
    result = bnfold.fold(model)
    assert len(result.report.folded) == len(result.report.norms) == FOLDS[named(path)]
    judged(model, result)


def judged(old: ModelProto, result: bnfold.report.Folded) -> None:
    """Interface and everything that no entry of the report names are as they were."""
    report, new = result.report, result.model
    same_interface(old, new)
    onnx.checker.check_model(new)
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
        assert name in edited | operands or reads_only(old, name, edited), place


def reads_only(model: ModelProto, name: str, edited: set[str]) -> bool:
    """Whether the value, or what the node of the name computes, is read by edited nodes alone."""
    values = {name} | {o for n in model.graph.node if name in (n.name, n.output[0]) for o in n.output}
    readers = [n for n in model.graph.node if values & set(n.input)]
    return all((n.name or n.output[0]) in edited or reads_only(model, n.output[0], edited) for n in readers)


def test_the_package_has_the_models():
    assert len(FILES) > 100
    assert {named(p) for p in FILES} >= FOLDS.keys()
