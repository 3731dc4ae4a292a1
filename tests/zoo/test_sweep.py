"""The sweep must be able to fail: folds that are wrong on purpose, reports that lie, processes that die or hang."""

from __future__ import annotations

import copy
import json
import os
import resource
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("timm")
pytest.importorskip("torchvision")

import measure
import sweep
import torch
from architectures import Architecture, chosen, norms_of
from networks import Ready, settle
from sweep import Job, outcomes, todo
from table import Expectation, faults, judge, read_results, totals
from torch import nn

import bnfold

SMALL = nn.Sequential(
    nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(),
    nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 3, padding=1),
)  # fmt: skip


def small() -> Ready:
    module = copy.deepcopy(SMALL).eval().double().requires_grad_(False)
    draw = lambda batch: torch.randn(batch, 3, 5, 6, generator=torch.Generator().manual_seed(0)).double()  # noqa: E731
    settle(module, draw(4))
    return Ready(module, draw, "3x5x6")


def test_what_is_right_passes():
    row = measure.judged(small())
    assert (row["status"], row["folded"], row["kept"], row["class"]) == ("ok", 1, 1, "same")
    assert (row["run_before"], row["run_after"]) == (2, 1)
    assert row["error"] < 1e-14


def off_by_a_millionth(result: bnfold.Folded) -> None:
    result.model[0].bias.data[1] *= 1 + 1e-6


def off_at_the_border(result: bnfold.Folded) -> None:
    result.model[0].padding_mode = "replicate"
    result.model[0]._reversed_padding_repeated_twice = [1, 1, 1, 1]


def norm_left_in(result: bnfold.Folded) -> None:
    result.model[1] = nn.BatchNorm2d(4, eps=0.0).double().eval()


def one_batch_only(result: bnfold.Folded) -> None:
    inner = result.model.forward
    result.model.forward = lambda x: inner(x).reshape(2, 2, 5, 6)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (off_by_a_millionth, "off by"),
        (off_at_the_border, "off by"),
        (norm_left_in, "2 norms still run, 1 are said to be kept"),
        (one_batch_only, "at the other batch: RuntimeError"),
    ],
)
def test_a_wrong_model_is_seen(damage: Callable[[Any], None], said: str, monkeypatch: pytest.MonkeyPatch):
    fold = bnfold.fold

    def damaged(*args: Any) -> bnfold.Folded:  # type: ignore[name-defined]
        result = fold(*args)
        damage(result)
        return result

    monkeypatch.setattr(bnfold, "fold", damaged)
    row = measure.judged(small())
    assert row["status"] == "wrong"
    assert said in row["problem"]


def test_a_changed_argument_is_seen(monkeypatch: pytest.MonkeyPatch):
    fold = bnfold.fold

    def careless(module: nn.Module, inputs: Any) -> Any:
        result = fold(module, inputs)
        module[1].num_batches_tracked += 1
        return result

    monkeypatch.setattr(bnfold, "fold", careless)
    assert measure.judged(small())["problem"] == "the argument was changed"


@pytest.mark.parametrize(
    ("lie", "said"),
    [
        (lambda r: replace(r, kept=()), "1 norms are not reported, first 5"),
        (lambda r: replace(r, folded=r.folded * 2), "1 is reported 2 times"),
        (lambda r: replace(r, kept=tuple(replace(k, reasons=()) for k in r.kept)), "5 is kept without a reason"),
        (lambda r: replace(r, kept=tuple(replace(k, norm="9") for k in r.kept)), "does not have, first 9"),
    ],
    ids=["missing", "twice", "no-reason", "unknown"],
)
def test_a_report_that_lies_is_seen(lie: Callable[[Any], Any], said: str):
    net = small()
    report = bnfold.fold(net.module, net.inputs(2)).report
    assert measure.miscounted(net.module, report) == []
    assert said in "; ".join(measure.miscounted(net.module, lie(report)))


def test_the_statistics_are_those_of_the_activations_and_gammas_are_odd():
    net = small()
    with torch.no_grad():
        value = net.module[:1](net.inputs(64))
    norm = net.module[1]
    assert ((norm.running_mean - value.mean((0, 2, 3))).abs() < 2 * value.std((0, 2, 3))).all()
    gammas = torch.cat([m.weight for m in norms_of(nn.Sequential(*[_settled(16) for _ in range(2)])).values()])
    assert (gammas < 0).any()
    assert (gammas == 0).any()
    assert ((gammas != 0) & (gammas.abs() < 1e-2)).any()


def _settled(channels: int) -> nn.Module:
    module = nn.Sequential(nn.BatchNorm2d(channels)).eval().double().requires_grad_(False)
    settle(module, torch.randn(2, channels, 3, 3).double())
    return module


# ---------------------------------------------------------------------- processes and files


def misbehaves(job: Job, answer: Any, timeout: int) -> None:
    """Stands in for `perform`, in a process of its own."""
    match job.found.name:
        case "dies":
            os._exit(7)
        case "grows":
            kept = bytearray(b"x") * (3 * 2**30)
            time.sleep(600)
            del kept
        case "hangs":
            time.sleep(600)
        case "computes":
            soon = int(time.process_time()) + 2
            resource.setrlimit(resource.RLIMIT_CPU, (soon, soon + 60))
            while True:
                pass


@pytest.mark.parametrize(
    ("names", "timeout", "said"),
    [
        (["dies", "grows", "computes"], 600, ["exit code 7", "GiB of memory", "more than 600 s"]),
        (["hangs"], 1, ["hangs"]),
    ],
    ids=["dies-grows-computes", "hangs"],
)
def test_a_process_that_ends_badly_costs_one_row(
    names: list[str], timeout: float, said: list[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sweep, "perform", misbehaves)
    monkeypatch.setattr(sweep, "HANGS", 1)
    jobs = [Job("fold", Architecture(name, "family")) for name in names]
    rows = {job.found.name: row for job, row in outcomes(jobs, workers=3, timeout=timeout, memory=2.0 * 2**30)}
    for name, words in zip(names, said, strict=True):
        assert rows[name]["status"] == "ended"
        assert words in rows[name]["problem"]


def test_what_has_a_result_is_not_done_again(tmp_path: Path):
    out = tmp_path / "results.jsonl"
    rows = [Architecture(f"timm/{n}", n, 1, 1) for n in "abc"]
    lines = [
        {"kind": "fold", "name": "timm/a", "status": "ok"},
        {"kind": "fold", "name": "timm/b", "status": "wrong"},
        {"kind": "peers", "name": "timm/a", "onnx": 1, "jit": 2},
    ]
    out.write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = {"only": "*", "limit": None, "fold": True, "peers": True, "again": False, "failed": False}

    def jobs(**changed: Any) -> str:
        found = todo(rows, out, Namespace(**{**options, **changed}))
        return " ".join(f"{j.kind}:{j.found.name[-1]}" for j in found)

    assert jobs() == "fold:c peers:b peers:c"
    assert jobs(failed=True, peers=False) == "fold:b fold:c"
    assert jobs(again=True, peers=False) == "fold:a fold:b fold:c"
    assert jobs(only="*/a", again=True, fold=False) == "peers:a"
    assert read_results(out)["timm/a"] == {"name": "timm/a", "status": "ok", "onnx": 1, "jit": 2}


def test_a_large_one_is_left_out_unless_it_is_the_smallest_of_its_family():
    rows = [Architecture("a", "f", 2 * 10**8, 1), Architecture("b", "f", 3 * 10**8, 1), Architecture("c", "g", 10, 0)]
    assert [(r.name, bool(r.skipped)) for r in chosen(rows)] == [("a", False), ("b", True)]


def folded(name: str, norms: int, reasons: dict[str, int], **other: Any) -> dict[str, Any]:
    kept = sum(reasons.values())
    row = {"name": name, "norms": norms, "reasons": reasons, "kept": kept, "folded": norms - kept, "status": "ok"}
    return row | other


def test_expectations_and_totals():
    row = folded("timm/x", 10, {"unsupported-op": 1, "negative-scale": 2})
    assert judge(Expectation("timm/x", 10, 3), row) == ""
    assert judge(Expectation("timm/x", 10, 1, argued=("negative-scale",)), row) == ""
    assert judge(Expectation("timm/x", 10, 2), row) == "3 left, expected 2: 1 unsupported-op, 2 negative-scale"
    assert judge(Expectation("timm/x", 11, 3), row) == "10 norms, expected 11"
    assert judge(Expectation("timm/x", 10, 3), None) == "not swept"
    rows = {"timm/x": row, "timm/y": folded("timm/y", 10, {}, status="wrong", problem="off")}
    assert totals(rows).lost == 1 / 20
    assert "WRONG timm/y: off" in faults(rows)
    assert "LOST 5.00% of all norms, at most 2%" in faults(rows)
