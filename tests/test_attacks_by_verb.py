"""Files that would run code, opened with every verb: a marker file stays unwritten unless `--trust-pickle` is said."""

import io
import json
import pickle
import pickletools
import tarfile
import warnings
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from checkpoints import WEIGHTS, exported, net, old, saved, zipped
from command import bnfold

FACTORY = "--factory checkpoints:Net --input 1x3x8x8"


class Touch:
    """Pickles as a call of `open("marker", "w")`."""

    def __reduce__(self):
        return open, ("marker", "w")


def hidden_in(part: int) -> bytes:
    """A good file older than the zip format, one of whose other pickles is replaced: magic, version, system, keys."""
    data = old(WEIGHTS)
    file = io.BytesIO(data)
    starts = []
    for _ in range(5):
        starts.append(file.tell())
        list(pickletools.genops(file))  # to its end
    starts.append(file.tell())
    evil = pickle.dumps((Touch(), pickle.loads(data[starts[part] : starts[part + 1]])), 2)
    return data[: starts[part]] + evil + data[starts[part + 1] :]


def tarred() -> bytes:
    """The layout of torch before 0.1.10."""
    with tarfile.open(fileobj=(buffer := io.BytesIO()), mode="w") as archive:
        for name in ("sys_info", "pickle", "tensors", "storages"):
            entry = tarfile.TarInfo(name)
            data = pickle.dumps(Touch(), 2)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    return buffer.getvalue()


def script_with(member: str) -> bytes:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.trace(net(), torch.randn(1, 3, 8, 8)).save("script.tmp")
    data = Path("script.tmp").read_bytes()
    Path("script.tmp").unlink()
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = {n: archive.read(n) for n in archive.namelist()}
    changed = next(n for n in members if n.endswith(member))
    return zipped({**members, changed: pickle.dumps(Touch(), 2)})


def program_with(member: str) -> bytes:
    members = exported()
    changed = next(n for n in members if n.endswith(member))
    return zipped({**members, changed: saved((Touch(),))})


def shards() -> bytes:
    Path("part.bin").write_bytes(saved({**WEIGHTS, "x": Touch()}))
    return json.dumps({"weight_map": dict.fromkeys(WEIGHTS, "part.bin")}).encode()


FILES: dict[str, Callable[[], bytes]] = {
    "zip": lambda: saved(Touch()),
    "zip-of-protocol-4": lambda: saved(Touch(), pickle_protocol=4),
    "beside-the-weights": lambda: saved({"state_dict": WEIGHTS, "epoch": Touch()}),
    "among-the-weights": lambda: saved({"state_dict": {**WEIGHTS, "bn.extra": Touch()}}),
    "below-a-module": lambda: saved(torch.nn.Sequential(net(), torch.nn.Identity()).train().apply(
        lambda m: setattr(m, "note", Touch()))),
    "old": lambda: old({"state_dict": WEIGHTS, "epoch": Touch()}),
    "old-version": lambda: hidden_in(1),
    "old-system": lambda: hidden_in(2),
    "old-keys": lambda: hidden_in(4),
    "plain": lambda: pickle.dumps(Touch()),
    "plain-of-protocol-0": lambda: pickle.dumps(Touch(), protocol=0),
    "tar": tarred,
    "shard": shards,
    "program-inputs": lambda: program_with("sample_inputs/model.pt"),
    "script-data": lambda: script_with("/data.pkl"),
    "script-constants": lambda: script_with("/constants.pkl"),
}  # fmt: skip
VERBS = {
    "export": "export evil.pt -o out.onnx",
    "export-with-factory": f"export evil.pt -o out.onnx {FACTORY}",
    "fold": "fold evil.pt -o out.pt",
    "fold-with-factory": f"fold evil.pt -o out.pt {FACTORY}",
    "fold-in-place": f"fold evil.pt --in-place {FACTORY}",
    "inspect": "inspect evil.pt",
    "inspect-with-factory": f"inspect evil.pt {FACTORY}",
    "verify": "verify evil.pt good.onnx",
    "verify-against": "verify good.onnx evil.pt",
    "inputs": "verify good.onnx good.onnx --input-file evil.pt",
    "inputs-of-export": "export good.onnx -o out.onnx --input-file evil.pt",
}
TRUSTED = ["zip", "beside-the-weights", "old", "below-a-module", "shard", "program-inputs"]


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    weights = {k: v.numpy() for k, v in WEIGHTS.items() if "num_batches" not in k}
    value = onnx.helper.make_tensor_value_info
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("Conv", ["x", "conv.weight"], ["y"])],
        "g", [value("x", 1, ["N", 3, 8, 8])], [value("y", 1, None)],
        [onnx.numpy_helper.from_array(weights["conv.weight"], "conv.weight")],
    )  # fmt: skip
    onnx.save(
        onnx.helper.make_model(graph, ir_version=8, opset_imports=[onnx.helper.make_opsetid("", 17)]), "good.onnx"
    )
    return tmp_path


@pytest.mark.parametrize("name", FILES)
def test_nothing_runs_that_was_not_trusted(name, folder):
    Path("evil.pt").write_bytes(data := FILES[name]())
    for verb, line in VERBS.items():
        done = bnfold(line)
        assert not Path("marker").exists(), verb
        assert done.code in (0, 2, 6), (verb, done)
        assert Path("evil.pt").read_bytes() == data or done.code == 0, verb
        Path("evil.pt").write_bytes(data)
        if done.code:
            assert done.err.count("\n") == 1, (verb, done.err)
            assert "Traceback" not in done.err


@pytest.mark.parametrize("name", [n for n in FILES if not n.startswith(("script", "shard", "program", "tar"))])
def test_they_are_dangerous(name, folder):
    """Opened without care, each runs."""
    Path("evil.pt").write_bytes(data := FILES[name]())
    with suppress(Exception):
        if name.startswith("plain"):
            pickle.loads(data)
        else:
            torch.load("evil.pt", weights_only=False)
    assert Path("marker").exists()


@pytest.mark.parametrize("name", TRUSTED)
def test_with_trust_it_runs(name, folder):
    """And says so in one line before it does."""
    Path("evil.pt").write_bytes(FILES[name]())
    for verb in ("export-with-factory", "fold-with-factory", "inspect-with-factory"):
        line = VERBS[verb] if name != "program-inputs" else VERBS[verb].replace(FACTORY, "")
        done = bnfold(f"{line} --trust-pickle")
        assert Path("marker").exists(), (verb, done)
        assert "--trust-pickle lets evil.pt run code while it is read" in done.err.splitlines()[0]
        Path("marker").unlink()


@pytest.mark.parametrize("name", ["plain", "plain-of-protocol-0", "tar", "script-data", "script-constants"])
def test_what_no_trust_makes_run(name, folder):
    """What is no file of torch.save, and TorchScript, whose pickles its own interpreter reads."""
    Path("evil.pt").write_bytes(FILES[name]())
    for line in VERBS.values():
        bnfold(f"{line} --trust-pickle")
        assert not Path("marker").exists()


def test_objects_in_arrays_are_not_read(folder):
    np.save("evil.npy", np.array([Touch()], object), allow_pickle=True)
    np.savez("evil.npz", x=np.array([Touch()], object))
    for name in ("evil.npy", "evil.npz"):
        for line in ("verify good.onnx good.onnx", "export good.onnx -o out.onnx", "inspect good.onnx"):
            done = bnfold(f"{line} --input-file {name}")
            assert done.code == 6
            assert name in done.err
            assert not Path("marker").exists()
