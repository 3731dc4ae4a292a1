"""A table of the files that people hold: what `bnfold export` and `bnfold inspect` make of each, as typed.

What is exported is checked against the network that the file was made from, by onnxruntime and numbers of our own.
"""

from __future__ import annotations

import io
import json
import pickle
import tarfile
import warnings
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from checkpoints import WEIGHTS, net, old, saved, zipped
from command import bnfold, contents, one_line
from safetensors.torch import save as safetensors
from torch import nn
from torch.ao.nn import quantized

from bnfold.report import Report

FACTORY = "--factory checkpoints:Net"
SIZE = "--input 2x3x8x8"
TRUST = "--trust-pickle"
NETWORK = """
from torch import nn

class Net(nn.Module):
    def __init__(self, channels=4, name=""):
        super().__init__()
        self.conv = nn.Conv2d(3, channels, 3)
        self.bn = nn.BatchNorm2d(channels)

    def forward(self, x):
        return self.bn(self.conv(x))
"""


@dataclass(frozen=True)
class Row:
    """A file, or several, the line that is typed, and what comes of it.

    `write` fills the folder. `kind` is what inspect calls the file; None where it refuses it as export does. On
    success `says` are the notes of the report; otherwise fragments of the one line that is printed.
    """

    write: Callable[[Path], Any]
    line: str
    code: int = 0
    says: tuple[str, ...] = ()
    kind: str | None = "torch"
    folded: int = 1
    network: Callable[[], nn.Module] | None = net
    side: int = 8
    limit: float | None = 1e-5  # of the range of the output: ten times the noise; 20 epsilons of float16


def file(name: str, data: Callable[[], bytes] | bytes) -> Callable[[Path], Any]:
    """Writes one file."""
    return lambda folder: (folder / name).write_bytes(data if isinstance(data, bytes) else data())


def prefixed(prefix: str) -> OrderedDict[str, torch.Tensor]:
    return OrderedDict((prefix + k, v) for k, v in WEIGHTS.items())


def taking(name: str, wrapped: Any, says: str = "", more: str = "", **other: Any) -> Row:
    """A row of a file of torch.save that loads into `Net`."""
    return Row(
        file(name, lambda: saved(wrapped)), f"{name} {FACTORY} {SIZE} {more}", says=(says,) * bool(says), **other
    )


def refused(name: str, data: Any, says: str, more: str = "", code: int = 6, kind: str | None = None) -> Row:
    return Row(file(name, data), f"{name} {more}".strip(), code, tuple(says.split(" … ")), kind)


def script(made: Callable[[nn.Module], Any]) -> Callable[[Path], Any]:
    def write(folder: Path) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's, that TorchScript is old
            made(net()).save(folder / "net.jit")

    return write


def program(folder: Path, name: str) -> None:
    dims = {"x": {0: torch.export.Dim("batch")}}
    torch.export.save(torch.export.export(net(), (torch.randn(2, 3, 8, 8),), dynamic_shapes=dims), folder / name)


def shards(folder: Path, kind: str, index: str, leave_out: int | None = None) -> None:
    keys, found = list(WEIGHTS), {}
    for k, part in enumerate((keys[:3], keys[3:])):
        tensors = {n: WEIGHTS[n] for n in part}
        found |= dict.fromkeys(part, f"part-{k}.{kind}")
        if k != leave_out:
            (folder / f"part-{k}.{kind}").write_bytes(saved(tensors) if kind == "bin" else safetensors(tensors))
    (folder / index).write_text(json.dumps({"metadata": {}, "weight_map": found}))


def onnx_model() -> onnx.ModelProto:
    """Conv and norm of the network, as another exporter might have written them."""
    weights = {k: v.numpy() for k, v in WEIGHTS.items() if "num_batches" not in k}
    value = onnx.helper.make_tensor_value_info
    nodes = [
        onnx.helper.make_node("Conv", ["x", "conv.weight", "conv.bias"], ["c"], "conv"),
        onnx.helper.make_node("BatchNormalization", ["c", *(k for k in weights if k.startswith("bn."))], ["y"], "bn"),
    ]
    ends = [value("x", 1, ["batch", 3, "h", "w"])], [value("y", 1, None)]
    arrays = [onnx.numpy_helper.from_array(v, k) for k, v in weights.items()]
    built = onnx.helper.make_graph(nodes, "net", *ends, arrays)
    return onnx.helper.make_model(built, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8)


def with_data(folder: Path, location: str = "net.data") -> None:
    onnx.save(onnx_model(), folder / "net.onnx", save_as_external_data=True, location="net.data", size_threshold=0)
    if location != "net.data":
        model = onnx.load(folder / "net.onnx", load_external_data=False)
        for tensor in model.graph.initializer:
            tensor.external_data[0].value = location
        (folder / "net.onnx").write_bytes(model.SerializeToString())


def arrays() -> bytes:
    np.savez(buffer := io.BytesIO(), **{k: v.numpy() for k, v in WEIGHTS.items()})
    return buffer.getvalue()


def tarred() -> bytes:
    with tarfile.open(fileobj=(buffer := io.BytesIO()), mode="w") as archive:
        archive.addfile(tarfile.TarInfo("pickle"))
    return buffer.getvalue()


def lightning() -> dict[str, Any]:
    return {
        "epoch": 3, "global_step": 100, "pytorch-lightning_version": "2.4.0", "state_dict": prefixed("model."),
        "optimizer_states": [], "lr_schedulers": [], "callbacks": {}, "loops": {"fit_loop": {"state_dict": {}}},
        "hyper_parameters": {"lr": 0.1, "channels": 4},
    }  # fmt: skip


def of(kind: torch.dtype) -> dict[str, torch.Tensor]:
    return {k: v.to(kind) if v.is_floating_point() else v for k, v in WEIGHTS.items()}


@cache
def from_timm() -> nn.Module:
    import timm

    torch.manual_seed(0)
    return randomised(timm.create_model("test_resnet", num_classes=7))


@cache
def from_torchvision() -> nn.Module:
    import torchvision

    torch.manual_seed(0)
    return randomised(torchvision.models.shufflenet_v2_x0_5(num_classes=7))


def randomised(network: nn.Module) -> nn.Module:
    """Statistics and gammas of its own, negative and tiny ones among them."""
    for m in network.modules():
        if isinstance(m, nn.BatchNorm2d):
            nn.init.normal_(m.running_mean, 0, 0.1)
            nn.init.uniform_(m.running_var, 0.5, 2)
            nn.init.normal_(m.weight)
            nn.init.normal_(m.bias, 0, 0.1)
            m.weight.data[:2] = torch.tensor([-0.5, 1e-6])
    return network.eval()


def half(kind: torch.dtype) -> Callable[[], nn.Module]:
    return lambda: net().to(kind)


def packed(tensor: torch.Tensor) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return torch.quantize_per_tensor(tensor, 0.1, 0, torch.qint8)


def average() -> dict[str, torch.Tensor]:
    return net(1).state_dict()


RAW, EMA = "weights taken from", "averaged weights taken from"
UNUSED = "the averaged copy under '{}' is not used (--ema takes it)"
ROWS: dict[str, Row] = {
    # containers
    "torch.save": taking("net.pt", WEIGHTS),
    "torch.save-of-old": Row(file("net.pth", lambda: old(WEIGHTS)), f"net.pth {FACTORY} {SIZE}"),
    "torch.save-called-onnx": taking("net.onnx", WEIGHTS, more="-o out.onnx"),
    "torch.save-called-tar": taking("net.pth.tar", WEIGHTS),
    "torch.save-called-th": taking("net.th", WEIGHTS),
    "torch.save-called-ckpt": taking("net.ckpt", WEIGHTS),
    "torch.save-called-bin": taking("pytorch_model.bin", WEIGHTS),
    "torch.save-called-pkl": taking("net.pkl", WEIGHTS),
    "torch.save-called-safetensors": taking("net.safetensors", WEIGHTS),
    "safetensors": Row(
        file("net.safetensors", lambda: safetensors(dict(WEIGHTS))), f"net.safetensors {FACTORY} {SIZE}",
        kind="safetensors",
    ),
    "safetensors-called-pt": Row(
        file("net.pt", lambda: safetensors(dict(WEIGHTS))), f"net.pt {FACTORY} {SIZE}", kind="safetensors"
    ),
    "safetensors-in-shards": Row(
        lambda f: shards(f, "safetensors", "net.safetensors.index.json"),
        f"net.safetensors.index.json {FACTORY} {SIZE} -o out.onnx", kind="sharded",
    ),
    "bin-in-shards": Row(
        lambda f: shards(f, "bin", "pytorch_model.bin.index.json"),
        f"pytorch_model.bin.index.json {FACTORY} {SIZE} -o out.onnx", kind="sharded",
    ),
    "script-traced": Row(
        script(lambda n: torch.jit.trace(n, torch.randn(2, 3, 8, 8))), "net.jit",
        says=("input 2x3x8x8, as the file says",), kind="torchscript",
    ),
    "script-scripted": Row(script(torch.jit.script), f"net.jit {SIZE}", kind="torchscript"),
    "script-in-training": Row(
        script(lambda n: torch.jit.script(n.train())), f"net.jit {SIZE}", says=("a copy in eval mode was folded",),
        kind="torchscript",
    ),
    "program": Row(lambda f: program(f, "net.pt2"), "net.pt2", kind="exported-program"),
    "program-called-pt": Row(lambda f: program(f, "net.pt"), "net.pt", kind="exported-program"),
    "onnx": Row(file("net.onnx", lambda: onnx_model().SerializeToString()), "net.onnx -o out.onnx", kind="onnx"),
    "onnx-called-pt": Row(file("net.pt", lambda: onnx_model().SerializeToString()), "net.pt", kind="onnx"),
    "onnx-with-data": Row(with_data, "net.onnx -o out.onnx", kind="onnx"),
    # wrappers and prefixes
    "under-state_dict": taking("net.pt", {"epoch": 3, "state_dict": WEIGHTS}, f"{RAW} 'state_dict'"),
    "under-model": taking("net.pt", {"model": WEIGHTS, "optimizer": {"state": {}}}, f"{RAW} 'model'"),
    "under-model_state_dict": taking("net.pt", {"model_state_dict": WEIGHTS}, f"{RAW} 'model_state_dict'"),
    "under-net": taking("net.pt", {"net": WEIGHTS, "acc": 0.9}, f"{RAW} 'net'"),
    "under-module": taking("net.pt", {"module": WEIGHTS}, f"{RAW} 'module'"),
    "under-ema": taking("net.pt", {"ema": WEIGHTS}, f"{RAW} 'ema'"),
    "nested-twice": taking("net.pt", {"checkpoint": {"net": WEIGHTS}}, f"{RAW} 'checkpoint.net'"),
    "under-a-key-that-is-named": taking(
        "net.pt", {"gen": average(), "dis": {"net": WEIGHTS}}, f"{RAW} 'dis.net'", "--key dis.net"
    ),
    "average-beside": taking("net.pt", {"model": WEIGHTS, "ema": average()}, UNUSED.format("ema")),
    "average-asked-for": taking("net.pt", {"model": average(), "ema": WEIGHTS}, f"{EMA} 'ema'", "--ema"),
    "prefix-module": taking("net.pt", prefixed("module."), "prefix 'module.' taken off the keys"),
    "prefix-compiled": taking("net.pt", prefixed("_orig_mod."), "prefix '_orig_mod.' taken off the keys"),
    "prefix-model": taking("net.pt", prefixed("model."), "prefix 'model.' taken off the keys"),
    "prefix-net": taking("net.pt", prefixed("net."), "prefix 'net.' taken off the keys"),
    "prefix-backbone": taking("net.pt", prefixed("backbone."), "prefix 'backbone.' taken off the keys"),
    "prefixes": taking("net.pt", prefixed("module._orig_mod."), "prefix 'module._orig_mod.' taken off the keys"),
    "lightning": taking("epoch=3.ckpt", lightning(), "prefix 'model.' taken off the keys"),
    # contents
    "no-counter": taking("net.pt", {k: v for k, v in WEIGHTS.items() if "num_batches" not in k}),
    "counter-a-float": taking("net.pt", {k: v.float() for k, v in WEIGHTS.items()}),
    "half": taking(
        "net.pt", of(torch.float16), "the network takes the stored types: float16", network=half(torch.float16),
        limit=2e-2,
    ),
    "bfloat16": taking(
        "net.pt", of(torch.bfloat16), "the network takes the stored types: bfloat16",
        limit=None,  # no kernels on the CPU: tests/test_bfloat16.py
    ),
    "half-in-safetensors": Row(
        file("net.safetensors", lambda: safetensors(of(torch.float16))), f"net.safetensors {FACTORY} {SIZE}",
        kind="safetensors", network=half(torch.float16), limit=2e-2,
    ),
    "keys-missing-allowed": taking(
        "net.pt", {**prefixed("model."), "loss.weight": torch.ones(3)}, "1 keys unexpected (loss.weight): allowed",
        "--allow-missing",
    ),
    # modules
    "module": Row(file("net.pt", lambda: saved(net())), f"net.pt {TRUST} {SIZE}"),
    "module-of-old": Row(file("net.pt", lambda: old(net())), f"net.pt {TRUST} {SIZE}"),
    "module-in-training": Row(
        file("net.pt", lambda: saved(net().train())), f"net.pt {TRUST} {SIZE}", says=("a copy in eval mode was folded",)
    ),
    "module-under-model": Row(  # as ultralytics writes them
        file("best.pt", lambda: saved({"model": net().half(), "ema": None, "epoch": -1, "train_args": {}})),
        f"best.pt {TRUST} {SIZE}", says=(f"{RAW} 'model'",), network=half(torch.float16), limit=2e-2,
    ),
    "module-in-DataParallel": Row(
        file("net.pt", lambda: saved(nn.DataParallel(net()))), f"net.pt {TRUST} {SIZE}",
        says=("DataParallel taken off",),
    ),
    # networks
    "timm": Row(
        file("net.pt", lambda: saved(from_timm().state_dict())),
        "net.pt --factory timm:create_model --factory-arg model_name=test_resnet --factory-arg num_classes=7",
        folded=15, network=from_timm, side=160,
    ),
    "timm-and-json": Row(
        file("net.pt", lambda: saved({"state_dict": from_timm().state_dict(), "arch": "test_resnet"})),
        """net.pt --factory timm:create_model --factory-arg model_name=test_resnet --factory-arg num_classes=7
        --factory-arg 'pretrained_cfg_overlay={"input_size": [3, 96, 96]}'""",
        folded=15, network=from_timm, side=96,
    ),
    "torchvision": Row(
        file("net.pth", lambda: saved(from_torchvision().state_dict())),
        "net.pth --factory torchvision.models:shufflenet_v2_x0_5 --factory-arg num_classes=7 --input 1x3x64x64",
        folded=56, network=from_torchvision, side=64, limit=1e-4,
    ),
    "factory-in-a-file": Row(
        lambda f: (torch.save(WEIGHTS, f / "net.pt"), (f / "kinds_net.py").write_text(NETWORK)),
        f"net.pt --factory kinds_net.py:Net --factory-arg channels=4 --factory-arg name=4x {SIZE}",
    ),
    # what cannot be read
    "missing": Row(lambda _: None, "none.pt", 6, ("none.pt: no such file",), None),
    "a-folder": Row(lambda f: (f / "net.pt").mkdir(), "net.pt", 6, ("net.pt: is a folder",), None),
    "empty": refused("net.pt", b"", "net.pt: is empty … download it again"),
    "html": refused("net.pt", b"<!DOCTYPE html><html><body>404</body></html>", "net.pt: an HTML page"),
    "git-lfs": refused("net.onnx", b"version https://git-lfs.github.com/spec/v1\nsize 9\n", "net.onnx: … git lfs pull"),
    "json": refused("net.json", b'{"layers": 3}', "net.json: no model that bnfold knows"),
    "text": refused("net.pt", b"hello, this is no model\n", "net.pt: no model that bnfold knows"),
    "noise": refused("net.pt", np.random.default_rng(0).bytes(4000), "net.pt: no model that bnfold knows"),
    "npz": refused("net.pt", arrays, "net.pt: a zip archive without a model … conv.weight"),
    "tar": refused("net.tar", tarred, "net.tar: a compressed file or a tar archive; unpack it"),
    "gzip": refused("net.pt.gz", b"\x1f\x8b\x08\0" + bytes(60), "net.pt.gz: a compressed file … unpack it"),
    "pickle": refused("net.pkl", lambda: pickle.dumps({"a": 1}), "net.pkl: a plain pickle … torch.save"),
    "keras": refused("net.h5", b"\x89HDF\r\n\x1a\n" + bytes(60), "net.h5: an HDF5 (Keras) file … ONNX"),
    "zip-cut-short": refused("net.pt", lambda: saved(WEIGHTS)[:2000], "net.pt: a zip archive cut short … download it"),
    "old-cut-short": refused("net.pt", lambda: old(WEIGHTS)[:-50], "net.pt: damaged or cut short", FACTORY),
    "safetensors-cut-short": refused(
        "net.safetensors", lambda: safetensors(dict(WEIGHTS))[:100], "net.safetensors: a safetensors file cut short"
    ),
    "safetensors-without-its-end": refused(
        "net.safetensors", lambda: safetensors(dict(WEIGHTS))[:-4], "net.safetensors: … cut short", FACTORY
    ),
    "onnx-cut-short": refused(
        "net.onnx", lambda: onnx_model().SerializeToString()[:-9], "net.onnx: not a valid ONNX model", "-o out.onnx"
    ),
    "onnx-without-its-data": Row(
        lambda f: (with_data(f), (f / "net.data").unlink()), "net.onnx -o out.onnx", 6,
        ("net.onnx: ", "net.data", "is missing"), None,
    ),
    "onnx-whose-data-is-elsewhere": Row(
        lambda f: with_data(f, "../net.data"), "net.onnx -o out.onnx", 6, ("net.onnx: unsafe", "../net.data"), None
    ),
    "shard-missing": Row(
        lambda f: shards(f, "bin", "net.index.json", leave_out=1), f"net.index.json {FACTORY} -o out.onnx", 6,
        ("its shard 'part-1.bin' is missing",), None,
    ),
    "zip-that-climbs": refused(
        "net.pt", lambda: zipped({"net/../../x": b"", "net/data.pkl": b""}), "net.pt: unsafe … net/../../x"
    ),
    # what does not fit
    "no-factory": refused(
        "net.pt", lambda: saved(WEIGHTS), "net.pt: holds weights only … --factory", code=2, kind="torch"
    ),
    "no-trust": refused("net.pt", lambda: saved(net()), "net.pt: … checkpoints.Net … --trust-pickle", kind="torch"),
    "no-weights": refused("net.pt", lambda: saved({"epoch": 3}), "net.pt: … epoch … neither", FACTORY, kind="torch"),
    "several": refused(
        "net.pt", lambda: saved({"gen": WEIGHTS, "dis": average()}), "net.pt: … 'gen', 'dis' … --key", FACTORY,
        kind="torch",
    ),
    "no-average": refused("net.pt", lambda: saved({"model": WEIGHTS}), "no averaged weights … leave out --ema",
                          f"{FACTORY} --ema", kind="torch"),
    "wrong-key": refused("net.pt", lambda: saved({"gen": WEIGHTS, "dis": average()}), "'den' … did you mean 'gen'",
                         f"{FACTORY} --key den", kind="torch"),
    "keys-missing": refused(
        "net.pt", lambda: saved({k.replace("bn", "norm"): v for k, v in WEIGHTS.items()}),
        "4 keys missing (bn.weight, … 5 keys unexpected (norm. … 'bn.weight' ~ 'norm.weight' … --allow-missing",
        FACTORY, kind="torch",
    ),
    "other-shapes": refused(
        "net.pt", lambda: saved(WEIGHTS), "'conv.weight' is (4, 3, 3, 3) in the file, (8, 3, 3, 3) in the network",
        f"{FACTORY} --factory-arg channels=8", kind="torch",
    ),
    "not-finite": refused(
        "net.pt", lambda: saved({**WEIGHTS, "bn.running_var": torch.full((4,), torch.nan)}),
        "bn: … nan … --keep-broken", f"{FACTORY} {SIZE}", kind="torch",
    ),
    "meta": refused("net.pt", lambda: saved(net().to("meta").state_dict()), "net.pt: conv.weight is on the meta device",
                    FACTORY, kind="torch"),
    "quantized": refused(
        "net.pt", lambda: saved({**WEIGHTS, "conv.weight": packed(WEIGHTS["conv.weight"])}),
        "net.pt: conv.weight is quantized (qint8) … fold the float network", FACTORY, kind="torch",
    ),
    "module-quantized": refused(
        "net.pt", lambda: saved(nn.Sequential(net(), quantized.Linear(3, 3))), "net.pt: 1 (Linear) is quantized",
        TRUST, kind="torch",
    ),
    "module-whose-code-is-missing": refused(
        "net.pt", lambda: old(net()).replace(b"checkpoints", b"gonepackage"), "gonepackage … PYTHONPATH", TRUST,
        kind="torch",
    ),
}  # fmt: skip


@pytest.fixture(params=ROWS, ids=ROWS)
def row(request, tmp_path, monkeypatch) -> Row:
    """The row, its files in the current folder."""
    found = ROWS[request.param]
    monkeypatch.chdir(tmp_path)
    found.write(tmp_path)
    return found


def test_export(row, tmp_path):
    before = contents(tmp_path)
    done = bnfold(f"export --json {row.line}")
    assert done.code == row.code, done.err
    if row.code:
        assert contents(tmp_path) == before
        error = done.json["error"]["message"]
        assert done.err.splitlines()[-1] == f"bnfold: {error}"
        assert "\n" not in error
        for fragment in row.says:
            assert fragment in error
        return
    report = Report.from_json(done.out)
    assert len(report.folded) == row.folded
    assert not report.kept
    assert report.verdict.passed
    for fragment in row.says:
        assert any(fragment in note for note in report.notes), report.notes
    after = contents(tmp_path)
    assert {n: b for n, b in after.items() if n in before} == before
    (new,) = {n for n in after if n.endswith(".onnx")} - set(before)
    assert set(after) - set(before) <= {new, f"{new}.data"}
    as_the_network_computes(tmp_path / new, row)


def as_the_network_computes(path: Path, row: Row) -> None:
    """The file computes what the network does in float64, and has no norm."""
    model = onnx.load(path)
    assert "BatchNormalization" not in [n.op_type for n in model.graph.node]
    assert model.graph.input[0].type.tensor_type.shape.dim[0].dim_param  # any batch size
    network = row.network().double().eval()
    kind = onnx.helper.tensor_dtype_to_np_dtype(model.graph.input[0].type.tensor_type.elem_type)
    if row.limit is None:
        return
    x = np.random.default_rng(0).standard_normal((3, 3, row.side, row.side)).astype(kind)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {session.get_inputs()[0].name: x})
    with torch.no_grad():
        right = network(torch.from_numpy(x).double()).numpy()
    assert found.dtype == kind
    assert np.abs(found - right).max() <= row.limit * np.abs(right).max()


def test_inspect(row, tmp_path):
    """Without a factory, without trust: what the file is and which norms it has."""
    before = contents(tmp_path)
    done = bnfold(f"inspect --json {row.line.split()[0]}")
    assert contents(tmp_path) == before
    if row.kind is None:
        assert done.code == 6
        assert done.json["error"]["message"].count("\n") == 0
        return
    assert done.code == 0, done.err
    if row.kind in ("onnx", "exported-program", "torchscript"):
        (norm,) = done.json["norms"]
        assert (norm["module"] or norm["norm"]) in ("bn", "/bn/BatchNormalization")
        return
    assert done.json["contents"]["format"] == row.kind
    if row.code == 0 and row.folded == 1 and TRUST not in row.line:
        named = [n["norm"] for s in done.json["contents"]["sets"] for n in s["norms"]]
        assert any(n.endswith("bn") for n in named), named


def test_without_json(tmp_path, monkeypatch):
    """One line on stderr, and nothing on stdout."""
    for name, row in ROWS.items():
        if row.code:
            folder = tmp_path / name
            folder.mkdir()
            monkeypatch.chdir(folder)
            row.write(folder)
            done = bnfold(f"export {row.line}")
            assert (done.code, done.out) == (row.code, "")
            if TRUST not in row.line:  # which prints a warning of its own
                assert one_line(done).startswith("bnfold: ")
