"""What `bnfold.checkpoint` makes of model files: every format, and every way to be wrong."""

import io
import json
import os
import pickle
import subprocess
import sys
import warnings
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any, NamedTuple

import onnx
import pytest
import torch
from checkpoints import WEIGHTS, Net, exported, net, old, older, refusal, saved, zipped
from onnx import TensorProto, helper
from safetensors.torch import save_file
from torch import nn
from torch.ao.nn import quantized

from bnfold.checkpoint import Reading, load, load_detailed
from bnfold.errors import BnfoldError, InvalidFileError, UsageError
from bnfold.factories import resolve_factory


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 4)
        self.b.weight = self.a.weight
        self.a.bias.requires_grad_(False)


def prefixed(prefix: str, weights: dict = WEIGHTS) -> OrderedDict:
    return OrderedDict((prefix + k, v) for k, v in weights.items())


def cast(dtype: torch.dtype, keys: str = "") -> dict:
    return {k: v.to(dtype) if v.is_floating_point() and keys in k else v for k, v in WEIGHTS.items()}


def graph(*extra: Any, nodes: Any = None) -> onnx.ModelProto:
    value = helper.make_tensor_value_info
    relu = [helper.make_node("Relu", ["x"], ["y"])]
    built = helper.make_graph(
        nodes or relu, "g", [value("x", 1, [2])], [value("y", 1, [2])], [t for t in extra if t is not None]
    )
    return helper.make_model(built, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def external(location: str, length: int = 8) -> TensorProto:
    tensor = TensorProto(name="w", data_type=1, dims=[2], data_location=TensorProto.EXTERNAL)
    for key, entry in (("location", location), ("offset", "0"), ("length", str(length))):
        tensor.external_data.add(key=key, value=entry)
    return tensor


# --- files that load


class Good(NamedTuple):
    data: bytes
    kind: str = "state-dict"
    notes: tuple[str, ...] = ()
    factory: Any = Net
    trust: bool = False
    options: dict[str, Any] = {}  # noqa: RUF012


def moved(data: bytes, device: str) -> bytes:
    """The file of a machine where the tensors lay on another device, which the pickle names as a text."""
    here, there = (pickle.dumps(d, 2)[2:-3] for d in ("cpu", device))  # without frame and memo
    if data[:2] != b"PK":
        return data.replace(here, there)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = {n: archive.read(n) for n in archive.namelist()}
    assert any(here in d for d in members.values())
    return zipped({n: d.replace(here, there) if n.endswith("data.pkl") else d for n, d in members.items()})


FOLD = "weights taken from "
OTHER = net(1).state_dict()
RAW = "are not used (model.conv.weight, model.conv.bias, model.bn.weight and 4 more)"
EMA = RAW.replace("model.", "model_ema.module.")
GOOD = {
    "bare": Good(saved(WEIGHTS)),
    "older-than-zip": Good(old(WEIGHTS)),
    "wrapped": Good(saved({"epoch": 3, "state_dict": WEIGHTS}), notes=(FOLD + "'state_dict'",)),
    "wrapped-twice": Good(saved({"net": {"params": WEIGHTS}}), notes=(FOLD + "'net.params'",)),
    "unknown-key-alone": Good(saved({"generator": WEIGHTS, "opt": {"state": {}}}), notes=(FOLD + "'generator'",)),
    "known-key-first": Good(saved({"other": prefixed("z."), "model": WEIGHTS}), notes=(FOLD + "'model'",)),
    "averaged-beside": Good(
        saved({"ema": cast(torch.float64), "model": WEIGHTS}),
        notes=(FOLD + "'model'", "the averaged copy under 'ema' is not used (--ema takes it)"),
    ),
    "averaged-of-timm": Good(
        saved({"state_dict_ema": WEIGHTS, "state_dict": WEIGHTS}),
        notes=(FOLD + "'state_dict'", "the averaged copy under 'state_dict_ema' is not used (--ema takes it)"),
    ),
    "averaged-alone": Good(saved({"ema": WEIGHTS}), notes=(FOLD + "'ema'",)),
    "prefix": Good(saved(prefixed("module.")), notes=("prefix 'module.' taken off the keys",)),
    "prefixes": Good(saved(prefixed("module._orig_mod.")), notes=("prefix 'module._orig_mod.' taken off the keys",)),
    "extras-beside": Good(saved({**WEIGHTS, "epoch": 3}), notes=("1 entries that are no tensors are ignored",)),
    "no-counter": Good(saved({k: v for k, v in WEIGHTS.items() if "num_batches" not in k})),
    "float-counter": Good(saved({k: v.float() for k, v in WEIGHTS.items()})),
    "of-a-gpu": Good(moved(saved(WEIGHTS), "cuda:0")),
    "of-another-accelerator": Good(moved(saved(WEIGHTS), "mps")),
    "older-of-a-gpu": Good(moved(old(WEIGHTS), "cuda:3")),
    "module-of-a-gpu": Good(moved(saved(net()), "cuda:1"), "module", factory=None, trust=True),
    "module": Good(saved(net()), "module", factory=None, trust=True),
    "older-module": Good(old(net()), "module", factory=None, trust=True),
    "module-wrapped": Good(
        saved({"model": net(), "ema": net()}),
        "module",
        (FOLD + "'model'", "the averaged copy under 'ema' is not used (--ema takes it)"),
        None,
        True,
    ),
    "module-averaged-alone": Good(saved({"model": None, "ema": net()}), "module", (FOLD + "'ema'",), None, True),
    "module-parallel": Good(saved(nn.DataParallel(net())), "module", ("DataParallel taken off",), None, True),
    "module-into-factory": Good(saved(net()), "state-dict", (), Net, True),
    "asked-for-by-key": Good(
        saved({"gen": OTHER, "dis": {"weights": WEIGHTS}}),
        notes=(FOLD + "'dis.weights'",),
        options={"key": "dis.weights"},
    ),
    "average-asked-for": Good(
        saved({"state_dict": OTHER, "state_dict_ema": WEIGHTS}),
        options={"ema": True},
        notes=("averaged weights taken from 'state_dict_ema'", "the raw copy under 'state_dict' is not used"),
    ),
    "average-among-the-keys": Good(
        saved({"state_dict": {**prefixed("model."), **prefixed("model_ema.module.", OTHER)}}),
        notes=(FOLD + "'state_dict'", "prefix 'model.' taken off the keys", f"7 keys of another copy {EMA}"),
    ),
    "average-among-the-keys-asked-for": Good(
        saved({"state_dict": {**prefixed("model.", OTHER), **prefixed("model_ema.module.")}}),
        options={"ema": True},
        notes=(FOLD + "'state_dict'", "prefix 'model_ema.module.' taken off the keys", f"7 keys of another copy {RAW}"),
    ),
    "average-of-bare-weights": Good(
        saved({**WEIGHTS, **prefixed("ema.", OTHER), "ema.decay": torch.ones(())}),
        notes=("8 keys of another copy are not used (ema.conv.weight, ema.conv.bias, ema.bn.weight and 5 more)",),
    ),
    "lightning": Good(
        saved(
            {
                "epoch": 3,
                "state_dict": prefixed("model."),
                "hyper_parameters": {"lr": 0.1},
                "optimizer_states": [],
                "pytorch-lightning_version": "2.4.0",
                "callbacks": {},
                "loops": {"fit_loop": {"state_dict": {}}},
            }
        ),
        notes=(FOLD + "'state_dict'", "prefix 'model.' taken off the keys"),
    ),
    "strange-keys-allowed": Good(
        saved({**prefixed("model."), "loss.weight": torch.ones(3)}),
        options={"allow_missing": True},
        notes=("prefix 'model.' taken off the keys", "1 keys unexpected (loss.weight): allowed"),
    ),
    "a-tensor-beside": Good(saved({"model": WEIGHTS, "best": torch.ones(())}), notes=(FOLD + "'model'",)),
    "weights-trusted": Good(saved(WEIGHTS), trust=True),
    "protocol-4-trusted": Good(saved(WEIGHTS, pickle_protocol=4), trust=True),
}


@pytest.mark.parametrize("name", GOOD)
def test_loads(name, tmp_path):
    case, file = GOOD[name], tmp_path / "any.bin"  # the suffix says nothing
    file.write_bytes(case.data)
    found = load_detailed(file, Reading(case.factory, trust_pickle=case.trust, **case.options))
    assert (found.kind, found.notes) == (case.kind, case.notes)
    assert_weights(found.model)


def assert_weights(network: nn.Module) -> None:
    assert type(network) is Net
    for key, tensor in network.state_dict().items():
        assert tensor.dtype == WEIGHTS[key].dtype, key
        assert torch.equal(tensor, WEIGHTS[key]) or key.endswith("num_batches_tracked"), key


def test_state_of_training_is_kept(tmp_path):
    torch.save(WEIGHTS, tmp_path / "w.pt")
    assert load(tmp_path / "w.pt", factory=Net).training
    assert not load(tmp_path / "w.pt", factory=lambda: Net().eval()).training


def test_safetensors(tmp_path):
    save_file(dict(WEIGHTS), tmp_path / "w.pt")
    assert_weights(load(tmp_path / "w.pt", factory=Net))


def test_exported_program_computes_the_same(tmp_path):
    file = tmp_path / "net.onnx"
    file.write_bytes(zipped(exported()))
    found = load_detailed(file)
    x = torch.randn(5, 3, 12, 8)
    assert found.kind == "exported-program"
    assert torch.equal(found.model.module()(x), net()(x))


def test_exported_program_of_an_older_torch(tmp_path):
    file = tmp_path / "net.pt2"
    file.write_bytes(zipped(older(exported())))
    x = torch.randn(5, 3, 12, 8)
    assert torch.equal(load(file).module()(x), net()(x))


def test_onnx_with_external_data(tmp_path):
    (tmp_path / "d").mkdir()
    (tmp_path / "d/w.bin").write_bytes(b"\0\0\x80?" * 2)
    (tmp_path / "net.pt").write_bytes(graph(external("d/w.bin")).SerializeToString())
    model = load(tmp_path / "net.pt")
    assert onnx.numpy_helper.to_array(model.graph.initializer[0]).tolist() == [1, 1]


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_a_checkpoint_in_several_files(kind, tmp_path):
    index: dict[str, str] = {}
    for k, part in enumerate((list(WEIGHTS)[:3], list(WEIGHTS)[3:])):
        shard = tmp_path / f"model-{k}.{kind}"
        (save_file if kind == "safetensors" else torch.save)({n: WEIGHTS[n] for n in part}, shard)
        index |= dict.fromkeys(part, shard.name)
    (tmp_path / "index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    assert_weights(load(tmp_path / "index.json", factory=Net))


@pytest.mark.parametrize("trace", [True, False], ids=["traced", "scripted"])
def test_torchscript(trace, tmp_path):
    x = torch.randn(3, 3, 9, 8)
    made = torch.jit.trace(net(), x) if trace else torch.jit.script(net())
    made.save(tmp_path / "net.bin")
    found = load_detailed(tmp_path / "net.bin")
    assert (found.kind, found.shapes) == ("torchscript", ((3, 3, 9, 8),) if trace else None)
    assert torch.equal(found.model(x), net()(x))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("keys", ["", "conv"])
def test_half_precision_is_kept(dtype, keys, tmp_path):
    stored = cast(dtype, keys)
    torch.save(stored, tmp_path / "w.pt")
    found = load_detailed(tmp_path / "w.pt", Reading(Net))
    for key, tensor in found.model.state_dict().items():
        assert tensor.dtype == stored[key].dtype, key
        assert torch.equal(tensor, stored[key])
    assert all(p.requires_grad for p in found.model.parameters())
    assert found.notes == (f"the network takes the stored types: {str(dtype)[6:]}" + (", float32" if keys else ""),)


def test_double_precision_is_copied_into_the_networks_own(tmp_path):
    torch.save(cast(torch.float64), tmp_path / "w.pt")
    assert_weights(load(tmp_path / "w.pt", factory=Net))


@pytest.mark.parametrize("keep", ["both", "first", "second"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_ties_and_gradients_are_the_networks(keep, dtype, tmp_path):
    stored = {k: v.to(dtype) for k, v in Tied().state_dict().items()}
    if keep != "both":
        del stored["b.weight" if keep == "first" else "a.weight"]
    torch.save(stored, tmp_path / "w.pt")
    network = load(tmp_path / "w.pt", factory=Tied)
    assert network.a.weight is network.b.weight
    assert torch.equal(network.a.weight, stored.get("a.weight", stored.get("b.weight")))
    assert network.a.weight.requires_grad
    assert not network.a.bias.requires_grad


# --- files that do not


class Bad(NamedTuple):
    data: bytes
    says: tuple[str, ...]
    error: type[BnfoldError] = InvalidFileError
    options: dict[str, Any] = {}  # noqa: RUF012
    name: str = "net.pt"


def script() -> bytes:
    """The members of a TorchScript archive, by name alone."""
    return zipped({"net/data.pkl": b"", "net/code/__torch__.py": b"", "net/constants.pkl": b""})


def bomb() -> bytes:
    """An archive whose directory claims that 100 bytes unpack to 2 GiB."""
    data = bytearray(zipped({"net/data.pkl": bytes(100)}))
    at = data.rindex(b"PK\1\2")
    data[at + 24 : at + 28] = (2 << 30).to_bytes(4, "little")
    return bytes(data)


def misses(*keys: str) -> dict[str, Any]:
    return {k: v for k, v in WEIGHTS.items() if k not in keys}


def renamed(old_name: str, new_name: str) -> dict[str, Any]:
    return {k.replace(old_name, new_name): v for k, v in WEIGHTS.items()}


def packed_int8(tensor: torch.Tensor) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch means to drop these tensors; files hold them
        return torch.quantize_per_tensor(tensor, 0.1, 0, torch.qint8)


def holding(buffer: torch.Tensor) -> nn.Module:
    network = net()
    network.register_buffer("table", buffer)
    return network


def failing(**_: Any) -> nn.Module:
    raise ValueError("no such size\nsecond line")


NEEDS = {"factory": Net}
BAD = {
    "empty": Bad(b"", ("is empty", "download it again")),
    "html": Bad(b"\n<!DOCTYPE html><html>", ("HTML page", "download it again")),
    "html-bare": Bad(b"<HTML><head>", ("HTML page",)),
    "git-lfs": Bad(b"version https://git-lfs.github.com/spec/v1\noid", ("Git LFS pointer", "git lfs pull")),
    "text": Bad(b"hello, this is no model", ("no model that bnfold knows", "safetensors")),
    "keras": Bad(b"\x89HDF\r\n\x1a\n", ("Keras", "ONNX")),
    "gzip": Bad(b"\x1f\x8b\x08\0\0", ("compressed", "unpack")),
    "tar": Bad(bytes(257) + b"ustar" + bytes(250), ("tar archive", "unpack")),
    "plain-pickle": Bad(pickle.dumps({"a": 1}), ("plain pickle", "torch.save")),
    "zip-cut-short": Bad(saved(WEIGHTS)[:1500], ("cut short", "download it again")),
    "zip-of-something": Bad(zipped({"a/b.txt": b"x"}), ("without a model", "b.txt")),
    "zip-climbing": Bad(zipped({"net/../../x": b"", "net/data.pkl": b""}), ("unsafe", "net/../../x")),
    "zip-absolute": Bad(zipped({"/etc/x": b"", "net/data.pkl": b""}), ("unsafe", "/etc/x")),
    "zip-bomb": Bad(bomb(), ("unsafe", "unpack to 2147483648")),
    "older-cut-short": Bad(old(WEIGHTS)[:-100], ("damaged or cut short",)),
    "older-cut-very-short": Bad(old(WEIGHTS)[:200], ("damaged or cut short",)),
    "older-with-noise": Bad(old(WEIGHTS)[:20] + os.urandom(300), ()),
    "torchscript-of-nothing": Bad(script(), ("damaged or cut short", "copy")),
    "index-without-its-shards": Bad(
        b'{"weight_map": {"a": "m-1.safetensors"}}', ("'m-1.safetensors' is missing", "beside the index")
    ),
    "index-that-leads-elsewhere": Bad(b'{"weight_map": {"a": "../m.bin"}}', ("unsafe", "outside its folder")),
    "index-of-nonsense": Bad(b'{"weight_map": 7}', ("damaged",)),
    "key-unknown": Bad(
        saved({"gen": WEIGHTS, "dis": WEIGHTS}),
        ("no weights under the key 'den'", "did you mean 'gen'?"),
        options={**NEEDS, "key": "den"},
    ),
    "no-average": Bad(
        saved({"model": WEIGHTS}),
        ("no averaged weights", "it holds 'model'", "leave out --ema"),
        options={**NEEDS, "ema": True},
    ),
    "safetensors-cut-short": Bad((500).to_bytes(8, "little") + b'{"a":', ("safetensors file cut short",)),
    "safetensors-noise": Bad((9).to_bytes(8, "little") + b"{noise !}", ("damaged", "copy")),
    "onnx-noise": Bad(b"\x08\x07noise", ("not a valid ONNX model",), name="net.onnx"),
    "onnx-cut-short": Bad(graph().SerializeToString()[:-5], ("not a valid ONNX model",), name="net.onnx"),
    "onnx-without-opset": Bad(b"\x08\x07", ("not a valid ONNX model", "opset_import"), name="net.onnx"),
    "onnx-with-factory": Bad(graph().SerializeToString(), ("leave out --factory",), UsageError, NEEDS),
    "onnx-data-missing": Bad(graph(external("w.bin")).SerializeToString(), ("w.bin", "missing")),
    "onnx-data-nowhere": Bad(graph(external("")).SerializeToString(), ("missing",)),
    "onnx-data-short": Bad(graph(external("net.pt", 9999)).SerializeToString(), ("cut short",)),
    "onnx-data-climbing": Bad(graph(external("../w.bin")).SerializeToString(), ("unsafe", "../w.bin")),
    "onnx-data-absolute": Bad(graph(external("/etc/passwd")).SerializeToString(), ("unsafe", "/etc/passwd")),
    "onnx-data-in-node": Bad(
        graph(nodes=[helper.make_node("Constant", [], ["y"], value=external("/etc/passwd"))]).SerializeToString(),
        ("unsafe", "/etc/passwd"),
    ),
    "no-factory": Bad(saved(WEIGHTS), ("weights only (7 tensors, e.g. 'conv.weight')", "--factory"), UsageError),
    "no-factory-wrapped": Bad(saved({"model": WEIGHTS}), ("(7 tensors under 'model', e.g. 'conv.",), UsageError),
    "tensor": Bad(saved(torch.ones(2)), ("a Tensor, neither",)),
    "optimizer-only": Bad(saved({"optimizer": {"lr": 1}, "epoch": 2}), ("the keys optimizer, epoch", "neither")),
    "two-networks": Bad(saved({"gen": WEIGHTS, "dis": WEIGHTS}), ("several", "'gen', 'dis'", "--key"), options=NEEDS),
    "keys-missing": Bad(
        saved(misses("conv.bias", "bn.weight")), ("Net", "2 keys missing (conv.bias, bn.weight)"), options=NEEDS
    ),
    "keys-renamed": Bad(
        saved(renamed("conv.", "conv1.")),
        ("2 keys missing (conv.weight, conv.bias) and 2 keys unexpected (conv1.", "'conv.weight' ~ 'conv1.weight'"),
        options=NEEDS,
    ),
    "keys-unexpected": Bad(
        saved({**WEIGHTS, **prefixed("head.")}),
        ("7 keys unexpected (head.conv.weight, head.conv.bias, head.bn.weight and 4 more)",),
        options=NEEDS,
    ),
    "prefix-of-some": Bad(saved({**prefixed("module."), "extra": torch.ones(1)}), ("unexpected",), options=NEEDS),
    "shapes": Bad(
        saved(WEIGHTS),
        ("Net", "6 shapes differ: 'conv.weight' is (4, 3, 3, 3) in the file, (8, 3, 3, 3) in the network"),
        options={"factory": Net, "factory_args": {"channels": 8}},
    ),
    "ties-differ": Bad(
        saved({k: torch.randn(v.shape) for k, v in Tied().state_dict().items()}),
        ("ties 'a.weight' and 'b.weight'",),
        options={"factory": Tied},
    ),
    "module-untrusted": Bad(
        saved(net()), ("asks for", "Net", "torch.nn.modules.conv.Conv2d", "and 1 more", "--trust-pickle")
    ),
    "older-module-untrusted": Bad(old({"model": net()}), ("asks for", "Conv2d", "--trust-pickle")),
    "on-meta": Bad(saved(net().to("meta").state_dict()), ("conv.weight is on the meta device",), options=NEEDS),
    "module-on-meta": Bad(
        saved(net().to("meta")), ("conv.weight is on the meta device",), options={"trust_pickle": True}
    ),
    "quantized": Bad(
        saved({**WEIGHTS, "conv.weight": packed_int8(WEIGHTS["conv.weight"])}),
        ("conv.weight is quantized (qint8)", "fold the float network"),
        options=NEEDS,
    ),
    "module-quantized": Bad(
        saved(nn.Sequential(net(), quantized.Linear(3, 3))),
        ("1 (Linear) is quantized (torch.ao.nn.quantized", "fold the float network"),
        options={"trust_pickle": True},
    ),
    "module-with-quantized-buffer": Bad(
        saved(holding(packed_int8(torch.ones(2, 2)))),
        ("table is quantized (qint8)",),
        options={"trust_pickle": True},
    ),
    "protocol-4-weights": Bad(saved(WEIGHTS, pickle_protocol=4), ("more than torch reads", "Unsupported operand")),
    "protocol-4-untrusted": Bad(saved(net(), pickle_protocol=4), ("Net", "Conv2d", "--trust-pickle")),
    "factory-fails": Bad(
        saved(WEIGHTS), ("failing failed (ValueError: no such size)",), UsageError, {"factory": failing}
    ),
    "factory-argument": Bad(
        saved(WEIGHTS), ("TypeError", "'depth'"), UsageError, {"factory": Net, "factory_args": {"depth": 3}}
    ),
    "factory-of-something": Bad(saved(WEIGHTS), ("returned a dict",), UsageError, {"factory": dict}),
    "factory-on-meta": Bad(
        saved(WEIGHTS), ("meta device",), UsageError, {"factory": lambda: Net().to(torch.device("meta"))}
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_refuses(name, tmp_path):
    case = BAD[name]
    file = tmp_path / case.name
    file.write_bytes(case.data)
    message = refusal(file, case.error, **case.options)
    for fragment in case.says:
        assert fragment in message


def test_torch_says_nothing_of_its_own_while_it_reads(tmp_path):
    (tmp_path / "net.pt").write_bytes(BAD["quantized"].data)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        refusal(tmp_path / "net.pt", InvalidFileError, **NEEDS)


def test_refuses_what_is_no_file(tmp_path):
    (tmp_path / "file").touch()
    assert "is a folder" in refusal(tmp_path)
    assert "no such file" in refusal(tmp_path / "missing.pt")
    assert "cannot be read" in refusal(tmp_path / "file" / "net.pt")


def test_module_whose_code_is_missing(tmp_path, monkeypatch):
    (tmp_path / "gone_net.py").write_text("import torch\nclass Net(torch.nn.Module): pass\n")
    monkeypatch.chdir(tmp_path)
    torch.save(resolve_factory("gone_net:Net")(), "net.pt")
    assert isinstance(load("net.pt", trust_pickle=True), nn.Module)
    del sys.modules["gone_net"]
    (tmp_path / "gone_net.py").unlink()
    message = refusal(Path("net.pt"), trust_pickle=True)
    assert "No module named 'gone_net'" in message
    assert "PYTHONPATH" in message


def test_symlink_out_of_the_folder(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "secret").write_bytes(bytes(8))
    (tmp_path / "in/w.bin").symlink_to(tmp_path / "secret")
    (tmp_path / "in/net.onnx").write_bytes(graph(external("w.bin")).SerializeToString())
    assert "unsafe" in refusal(tmp_path / "in/net.onnx")


def test_onnx_needs_no_torch(tmp_path):
    onnx.save(graph(), tmp_path / "net.onnx")
    code = (
        "import sys; from bnfold.checkpoint import load; model = load(sys.argv[1]); "
        "assert model.graph.node; assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "net.onnx"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
