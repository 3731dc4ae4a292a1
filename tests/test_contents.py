"""Looking into checkpoints: what they hold is told without torch, and nothing of what they say is run."""

import io
import json
import os
import pickle
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import WEIGHTS, Net, net, old, saved, zipped
from safetensors.torch import save_file
from torch import nn

from bnfold.contents import as_plain, read_contents
from bnfold.errors import InvalidFileError
from bnfold.recognition import recognise

TENSORS = {k: {"shape": list(v.shape), "dtype": str(v.dtype)[6:]} for k, v in WEIGHTS.items()}
NORM = {"norm": "bn", "channels": 4, "affine": True, "counted": True}


class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Conv2d(3, 4, 1, bias=False), nn.BatchNorm2d(4, affine=False))
        self.register_buffer("scale", torch.ones(2, dtype=torch.float64))


def look(data: bytes, tmp_path: Path, name: str = "any.bin") -> dict[str, Any]:
    (tmp_path / name).write_bytes(data)
    return as_plain(read_contents(tmp_path / name, recognise(tmp_path / name)))


FILES = {  # file, key of its weights, what they are, and what else is at the top
    "weights": (lambda: saved(WEIGHTS), "", "state dict", {}),
    "older-than-zip": (lambda: old(WEIGHTS), "", "state dict", {}),
    "protocol-4": (lambda: saved(WEIGHTS, pickle_protocol=4), "", "state dict", {}),
    "parameters": (lambda: saved({k: nn.Parameter(v, False) for k, v in WEIGHTS.items()}), "", "state dict", {}),
    "wrapped": (
        lambda: saved({"epoch": 3, "state_dict": WEIGHTS, "args": {"lr": 0.1}, "loss": torch.ones(2), "names": ["a"]}),
        "state_dict", "state dict", {"epoch": "3", "args": "1 entries", "loss": "float32 [2]", "names": "list of 1"},
    ),
    "module": (lambda: saved(net()), "", "network checkpoints.Net", {}),
    "older-module": (lambda: old(net()), "", "network checkpoints.Net", {}),
    "module-wrapped": (lambda: saved({"model": net(), "ema": None}), "model", "network checkpoints.Net",
                       {"ema": "None"}),
}  # fmt: skip


@pytest.mark.parametrize("kind", FILES)
def test_what_a_file_holds(kind, tmp_path):
    make, key, what, others = FILES[kind]
    found = look(make(), tmp_path)
    assert found["format"] == "torch"
    assert found["sets"] == [{"key": key, "kind": what, "tensors": TENSORS, "norms": [NORM]}]
    assert found["others"] == others


def test_a_module_names_what_it_would_import(tmp_path):
    asked = look(saved(net()), tmp_path)["asks_for"]
    assert asked == [
        "checkpoints.Net", "torch.nn.modules.conv.Conv2d", "torch.nn.modules.batchnorm.BatchNorm2d",
    ]  # fmt: skip
    assert look(saved(WEIGHTS), tmp_path)["asks_for"] == []


@pytest.mark.parametrize("kind", ["module", "parallel", "script"])
def test_keys_of_networks_are_those_of_their_state_dicts(kind, tmp_path):
    module = Deep()
    if kind == "script":
        buffer = io.BytesIO()
        torch.jit.save(torch.jit.script(module.inner), buffer)
        data, expected = buffer.getvalue(), module.inner.state_dict()
    else:
        module = nn.DataParallel(module) if kind == "parallel" else module
        data, expected = saved(module), module.state_dict()
    (found,) = look(data, tmp_path)["sets"]
    assert {k: (tuple(t["shape"]), t["dtype"]) for k, t in found["tensors"].items()} == {
        k: (tuple(v.shape), str(v.dtype)[6:]) for k, v in expected.items()
    }
    assert [n["channels"] for n in found["norms"]] == [4]
    assert not found["norms"][0]["affine"]


DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16,
          torch.int8, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.uint16]  # fmt: skip


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "older"])
def test_types(legacy, tmp_path):
    given = {str(d)[6:]: torch.zeros(2, 3, dtype=d) for d in DTYPES}
    found = look((old if legacy else saved)(given), tmp_path)
    assert {k: t["dtype"] for k, t in found["sets"][0]["tensors"].items()} == {k: k for k in given}


def test_safetensors_types(tmp_path):
    given = {str(d)[6:]: torch.zeros(2, 3, dtype=d) for d in DTYPES if d not in (torch.complex64, torch.uint16)}
    save_file(given, tmp_path / "w")
    found = look((tmp_path / "w").read_bytes(), tmp_path)
    assert {k: t["dtype"] for k, t in found["sets"][0]["tensors"].items()} == {k: k for k in given}


def test_several_files(tmp_path):
    save_file({"conv.weight": WEIGHTS["conv.weight"]}, tmp_path / "a.safetensors")
    torch.save({k: v for k, v in WEIGHTS.items() if k != "conv.weight"}, tmp_path / "b.bin")
    index = {"weight_map": dict.fromkeys(WEIGHTS, "b.bin") | {"conv.weight": "a.safetensors"}}
    found = look(json.dumps(index).encode(), tmp_path, "index.json")
    assert found["sets"][0]["tensors"] == TENSORS


# ---------------------------------------------------------------------- nothing runs


class Evil:
    """What a pickle of it would do when it is read in earnest."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "older"])
@pytest.mark.parametrize("place", ["alone", "beside", "as-key", "as-tensor"])
def test_code_in_a_checkpoint_is_named_and_does_not_run(place, legacy, tmp_path):
    evil = Evil(tmp_path / "marker")
    given = {
        "alone": evil,
        "beside": {"state_dict": WEIGHTS, "x": evil},
        "as-key": {"state_dict": WEIGHTS, "opt": {evil: 1}},
        "as-tensor": {**WEIGHTS, "w": evil},
    }[place]
    found = look((old if legacy else saved)(given), tmp_path)
    assert found["asks_for"] == [f"{os.mkdir.__module__}.mkdir"]
    assert not (tmp_path / "marker").exists()


def pickled(*parts: bytes) -> bytes:
    return zipped({"net/data.pkl": b"\x80\x02" + b"".join(parts) + b"."})


MACHINES = {  # programs for the pickle machine that a reader must survive
    "a-number-for-4-billion-objects": pickled(b"N", b"r", struct.pack("<I", 0xFFFFFFFF)),
    "a-text-of-4-gigabytes": pickled(b"X", struct.pack("<I", 0xFFFFFFF0), b"short"),
    "an-attribute-of-a-class": pickled(b"ccollections\nOrderedDict\n", b")R}", b"X\x09\0\0\0__class__NsNb"),
    "a-tensor-of-nonsense": pickled(b"ctorch._utils\n_rebuild_tensor_v2\n", b"(NNNNtR"),
    "a-call-of-a-text": pickled(b"X\x02\0\0\0hi", b")R"),
    "nothing": pickled(),
    "an-empty-stack": pickled(b"R"),
    "an-unknown-opcode": pickled(b"\xff"),
    "a-memo-that-is-not-there": pickled(b"h\x07"),
    "an-extension": pickled(b"\x82\x01"),
    "a-pickle-in-itself": pickled(b"]q\x00h\x00a"),
    "deep": pickled(b"]" * 100_000, b"a" * 99_999),
}


@pytest.mark.parametrize("kind", MACHINES)
def test_crafted_pickles(kind, tmp_path):
    try:
        found = look(MACHINES[kind], tmp_path)
    except InvalidFileError as e:
        message = str(e)
        assert "\n" not in message
        assert "any.bin: damaged" in message
    else:
        assert found["sets"] == []


def test_a_network_that_contains_itself(tmp_path):
    module = net()
    object.__setattr__(module, "_loop", module)
    module._modules["again"] = module
    (found,) = look(saved(module), tmp_path)["sets"]
    assert found["tensors"].keys() >= WEIGHTS.keys()


# ---------------------------------------------------------------------- at the shell


def inspected(path: Path, *options: str) -> subprocess.CompletedProcess[str]:
    code = (  # the kernel's own high-water mark; that of getrusage begins with the parent's
        "import pathlib, re, sys; sys.argv[0] = 'bnfold'; from bnfold.cli.main import run\n"
        "try: run()\n"
        "finally:\n"
        "  peak = re.search(r'VmHWM:\\s*(\\d+)', pathlib.Path('/proc/self/status').read_text())\n"
        "  print('torch' in sys.modules, peak[1], file=sys.stderr)"
    )
    return subprocess.run(
        [sys.executable, "-c", code, "inspect", str(path), *options], capture_output=True, text=True, check=False
    )


def test_two_gigabytes_are_described_without_torch(tmp_path):
    header: dict[str, Any] = {}
    for k in range(128):
        header[f"l{k}.weight"] = {"dtype": "F32", "shape": [4096, 1024], "data_offsets": [k << 24, (k + 1) << 24]}
    text = json.dumps(header).encode()
    path = tmp_path / "big.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    os.truncate(path, 8 + len(text) + (128 << 24))
    assert path.stat().st_size > 2**31
    done = inspected(path)
    assert done.returncode == 0, done.stderr
    assert "128 tensors (128 float32), 0 normalizations" in done.stdout
    imported, memory = done.stderr.split()
    assert imported == "False"
    assert int(memory) < 200 << 10


@pytest.mark.parametrize("make", [lambda: saved({"model": WEIGHTS}), lambda: saved(net())], ids=["weights", "module"])
def test_torch_is_not_imported(make, tmp_path):
    (tmp_path / "a.pt").write_bytes(make())
    done = inspected(tmp_path / "a.pt", "--json")
    assert done.returncode == 0, done.stderr
    assert done.stderr.split()[0] == "False"
    report = json.loads(done.stdout)
    assert [n["norm"] for n in report["norms"]] == ["bn"]
    assert report["contents"]["sets"][0]["tensors"] == TENSORS


def test_what_to_pass_for_a_plan(tmp_path):
    torch.save({"epoch": 7, "state_dict": WEIGHTS, "state_dict_ema": WEIGHTS}, tmp_path / "a.pt")
    lines = inspected(tmp_path / "a.pt").stdout.splitlines()
    assert lines[:5] == [
        "note: pass --factory package.module:callable to see what folding would do",
        "a file of torch.save",
        "under 'state_dict': state dict, 7 tensors (6 float32, 1 int64), 1 normalization",
        "under 'state_dict_ema': state dict, 7 tensors (6 float32, 1 int64), 1 normalization",
        "epoch: 7",
    ]
    assert "tensor  state_dict: conv.weight  float32 [4, 3, 3, 3]" in lines
    assert "norm    state_dict_ema: bn  4 channels" in lines


def test_a_pickle_that_only_looks_like_a_checkpoint(tmp_path):
    (tmp_path / "a.pt").write_bytes(pickle.dumps(Evil(tmp_path / "marker")))
    done = inspected(tmp_path / "a.pt")
    assert done.returncode == 6
    assert not (tmp_path / "marker").exists()


def header_only(entries: Any) -> bytes:
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text


ENTRY = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}


def test_names_cannot_steer_the_terminal(tmp_path):
    """Escape sequences, and what is no text, are spelled out; JSON holds them as they are."""
    (tmp_path / "a.safetensors").write_bytes(header_only({"\x1b[31mred\ud800": ENTRY}))
    done = inspected(tmp_path / "a.safetensors")
    assert done.returncode == 0, done.stderr
    assert "\\x1b[31mred\\ud800" in done.stdout
    assert "\x1b" not in done.stdout
    told = json.loads(inspected(tmp_path / "a.safetensors", "--json").stdout)
    assert list(told["contents"]["sets"][0]["tensors"]) == ["\x1b[31mred\ud800"]


@pytest.mark.parametrize(
    "entry",
    [
        {**ENTRY, "data_offsets": [8, 0]}, {**ENTRY, "data_offsets": [-8, 0]}, {**ENTRY, "data_offsets": "no"},
        {**ENTRY, "shape": [-1]}, {**ENTRY, "shape": ["a"]}, {**ENTRY, "shape": None}, {}, 7,
    ],
)  # fmt: skip
def test_entries_that_are_none(entry, tmp_path):
    (tmp_path / "a.safetensors").write_bytes(header_only({"a": entry}))
    done = inspected(tmp_path / "a.safetensors")
    assert done.returncode == 6
    assert "a.safetensors: damaged" in done.stderr


@pytest.mark.parametrize("name", ["index.json", "x\0y", "z" * 5000, "\ud800", "", "."])
def test_shards_that_are_none(name, tmp_path):
    (tmp_path / "index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    for options in ((), ("--factory", "checkpoints:Net")):
        done = inspected(tmp_path / "index.json", *options)
        assert done.returncode == 6
        assert done.stderr.count("bnfold: ") == 1


def test_the_network_itself_is_a_norm(tmp_path):
    torch.save(nn.BatchNorm1d(3).state_dict(), tmp_path / "a.pt")
    (found,) = as_plain(read_contents(tmp_path / "a.pt", "torch"))["sets"]
    assert found["norms"] == [{"norm": "(the network itself)", "channels": 3, "affine": True, "counted": True}]


assert Net  # pickles of the tests name it
