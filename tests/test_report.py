"""The report's JSON: what goes out comes back, the schema is stable, every reason is explained."""

from __future__ import annotations

import json
import math
import re

import pytest

from bnfold.report import (
    REASONS,
    SCHEMA,
    FileInfo,
    Fold,
    Kept,
    Norm,
    OutputCheck,
    Reason,
    Refusal,
    Report,
    Verdict,
)

REFUSED = Refusal(Reason.PADDED_SHIFT, "conv", "taps are missing at the borders")
OUTPUT = OutputCheck("y", 1e-7, 1e-4, 2e-8, 3, (0, 3, 1))
FULL = Report(
    norms=(Norm("bn1", "BatchNormalization", 8, "features.1"), Norm("bn2", "InstanceNormalization")),
    folded=(Fold("bn1", ("conv1", "conv2"), ("relu",), "forward", "BatchNormalization"),),
    kept=(Kept("bn2", (REFUSED, Refusal(Reason.MODEL_OUTPUT, "y", "y is an output")), "InstanceNormalization"),),
    affine=(Fold(None, ("conv3",), (), "merge"),),
    findings=({"kind": "x", "values": [1, 2.5, None, "é"]},),
    statistics=({"norm": "bn1", "drift": 0.25},),
    verdict=Verdict(True, (OUTPUT,), ("CPUExecutionProvider",), (0, 1), "relu", ("a note",)),
    files=(FileInfo("source", "model.pt", 1234), FileInfo("output", "model.onnx", 1200)),
    bytes_added=64,
    notes=("folded in eval mode",),
)
FAILED = Verdict(
    False, (OutputCheck("y", math.inf, math.nan, -math.inf), OutputCheck("z", 0.0, 1.0, problem="NaN")), (), ()
)
REPORTS = {
    "empty": Report(),
    "full": FULL,
    "no floor": FULL.with_(verdict=Verdict(True, (OutputCheck("y", 0.0, 1e-4),), ("p",), (0,))),
}


@pytest.mark.parametrize("report", REPORTS.values(), ids=REPORTS)
@pytest.mark.parametrize("indent", [None, 2])
def test_json_comes_back(report, indent):
    text = report.to_json(indent)
    assert Report.from_json(text) == report
    assert Report.from_json(text.encode()) == report
    assert ("\n" in text) == (indent is not None)


def test_what_json_has_no_number_for():
    text = FULL.with_(verdict=FAILED).to_json()
    assert all(word not in text.replace('"inf"', "").replace('"-inf"', "") for word in ("Infinity", ": NaN", ": inf"))
    first, second = Report.from_json(text).verdict.outputs
    assert (first.error, first.floor) == (math.inf, -math.inf)
    assert math.isnan(first.limit)
    assert second.problem == "NaN"


def test_schema():
    data = json.loads(FULL.to_json())
    assert list(data) == [
        "schema", "norms", "folded", "kept", "affine", "findings", "statistics", "verdict", "files", "bytes_added",
        "notes", "contents",
    ]  # fmt: skip
    assert data["schema"] == SCHEMA == 1
    assert data["folded"][0] == {
        "norm": "bn1", "into": ["conv1", "conv2"], "through": ["relu"], "direction": "forward",
        "op": "BatchNormalization",
    }  # fmt: skip
    assert data["kept"][0]["reasons"][0] == {
        "reason": "padded-shift", "at": "conv", "detail": "taps are missing at the borders",
    }  # fmt: skip
    assert data["verdict"]["outputs"][0] == {
        "name": "y", "error": 1e-7, "floor": 2e-8, "limit": 1e-4, "worst_channel": 3, "worst_index": [0, 3, 1],
        "problem": "",
    }  # fmt: skip
    assert data["norms"][0] == {"norm": "bn1", "op": "BatchNormalization", "channels": 8, "module": "features.1"}
    assert data["files"][0] == {"role": "source", "path": "model.pt", "bytes": 1234}


def without(key):
    data = FULL.to_dict()
    del data[key]
    return json.dumps(data)


def altered(**changes):
    return json.dumps(FULL.to_dict() | changes)


NO_REPORTS = {
    "no JSON": ("", "Expecting value"),
    "a list": ("[]", "the key 'schema' is missing"),
    "no schema": ("{}", "the key 'schema' is missing"),
    "another schema": (altered(schema=2), "the report has schema 2; this version reads schema 1"),
    "a key is missing": (without("kept"), "kept"),
    "an unknown reason": (altered(kept=[{"norm": "a", "op": "", "reasons": [{"reason": "x", "at": "", "detail": ""}]}]),
                          "'x' is not a valid Reason"),
    "an unknown field": (altered(norms=[{"norm": "a", "op": "", "color": "red"}]), "color"),
    "a field is missing": (altered(folded=[{"norm": "a"}]), "into"),
    "no list": (altered(norms=3), "int"),
}  # fmt: skip


@pytest.mark.parametrize(("text", "message"), NO_REPORTS.values(), ids=NO_REPORTS)
def test_no_report(text, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        Report.from_json(text)


def test_reasons_are_stable_and_explained():
    """The list is part of the public contract: a name may be added, none changed."""
    assert [str(r) for r in Reason] == [
        "multiple-consumers", "model-output", "model-input", "unsupported-op", "padded-shift", "nonzero-shift",
        "negative-scale", "not-per-channel", "unknown-shape", "unequal-branches", "dynamic-parameter",
        "overridable-parameter", "training-mode", "not-finite", "overflow", "underflow", "quantized-parameter",
        "repeated-channel", "shared-weight", "batch-statistics", "no-gain", "not-executed", "not-captured",
        "not-expressible", "excluded", "hooked",
    ]  # fmt: skip
    assert set(REASONS) == set(Reason)
    for doc in REASONS.values():
        assert all(line and line[-1] == "." and "\n" not in line for line in doc)
    assert Reason("padded-shift") is Reason.PADDED_SHIFT


def test_a_copy_with_changes():
    assert FULL.with_(notes=("other",)) == Report(**{**fields(FULL), "notes": ("other",)})
    assert FULL.notes == ("folded in eval mode",)


def fields(report: Report) -> dict:
    return {k: getattr(report, k) for k in Report.__dataclass_fields__}


def test_a_verdict_is_true_when_it_passed():
    assert FULL.verdict
    assert not FAILED
