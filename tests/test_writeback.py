"""Checkpoints folded and written back: the user's own class takes the weights, and nothing else has changed."""

import io
import json
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import bnfold
from bnfold.checkpoint import Reading
from bnfold.errors import InvalidFileError, UsageError
from bnfold.notes import Note, apply_note
from bnfold.refolding import fold_file


class BatchNormAct(nn.BatchNorm2d):
    """A norm that holds its activation, as timm's do; the activation has a parameter."""

    def __init__(self, channels: int):
        super().__init__(channels)
        self.act = nn.PReLU()

    def forward(self, x):
        return self.act(super().forward(x))


class Net(nn.Module):
    """Norms behind layers with and without a bias, in front of one, with an activation, and one that stays."""

    def __init__(self):
        super().__init__()
        self.a, self.a_norm = nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4)
        self.b, self.b_norm = nn.Conv2d(4, 4, 1), BatchNormAct(4)
        self.stays = nn.BatchNorm2d(4)
        self.ahead, self.c = nn.BatchNorm2d(4, affine=False), nn.Conv2d(4, 6, 2, bias=False)
        self.head = nn.Linear(6, 5, bias=False)
        self.register_buffer("scale", torch.full((), 2.0))

    def forward(self, x):
        x = self.a_norm(self.a(x)).relu()
        x = self.stays(self.b_norm(self.b(x)).sigmoid()).tanh()
        return self.head(self.c(self.ahead(x)).mean((2, 3))) * self.scale


KEPT = {"stays"}
INPUTS = torch.randn(4, 3, 9, 8, generator=torch.Generator().manual_seed(5))


def net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    module = Net()
    for norm in (m for m in module.modules() if isinstance(m, nn.BatchNorm2d)):
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.5, 2)
        if norm.affine:
            nn.init.normal_(norm.weight)
            nn.init.normal_(norm.bias)
            norm.weight.data[:2] = torch.tensor([0.0, -1e-6])
    return module.eval()


def prefixed(prefix: str, weights: dict) -> OrderedDict:
    return OrderedDict((prefix + k, v) for k, v in weights.items())


WEIGHTS, OTHER = net().state_dict(), net(1).state_dict()
OPTIMIZER = torch.optim.SGD(net().parameters(), 0.1, momentum=0.9).state_dict()


class Case(NamedTuple):
    stored: Any
    where: tuple[str, ...] = ()
    prefix: str = ""
    legacy: bool = False
    options: dict[str, Any] = {}  # noqa: RUF012


CASES = {
    "bare": Case(WEIGHTS),
    "older-than-zip": Case(WEIGHTS, legacy=True),
    "plain-dictionary": Case(dict(WEIGHTS)),
    "wrapped": Case({"epoch": 3, "state_dict": WEIGHTS, "optimizer": OPTIMIZER, "best": torch.tensor(0.5)},
                    ("state_dict",)),
    "wrapped-twice": Case({"net": {"params": WEIGHTS, "args": [1, "x"]}}, ("net", "params")),
    "prefixed": Case(prefixed("module._orig_mod.", WEIGHTS), (), "module._orig_mod."),
    "lightning": Case(
        {"epoch": 1, "state_dict": prefixed("model.", WEIGHTS), "hyper_parameters": {"lr": 0.1}, "callbacks": {}},
        ("state_dict",), "model."),
    "average-beside": Case({"model": WEIGHTS, "ema": OTHER}, ("model",)),
    "average-asked-for": Case({"model": OTHER, "ema": WEIGHTS}, ("ema",), options={"ema": True}),
    "average-among-the-keys": Case({**prefixed("model.", WEIGHTS), **prefixed("model_ema.", OTHER)}, (), "model."),
    "strange-keys": Case({**WEIGHTS, "loss.weight": torch.ones(3)}, options={"allow_missing": True}),
    "no-counters": Case({k: v for k, v in WEIGHTS.items() if "num_batches" not in k}),
    "half": Case({k: v.half() if v.is_floating_point() else v for k, v in WEIGHTS.items()}),
    "double": Case({k: v.double() if v.is_floating_point() else v for k, v in WEIGHTS.items()}),
}  # fmt: skip


def inner(stored: Any, where: tuple[str, ...]) -> Any:
    for key in where:
        stored = stored[key]
    return stored


def same(a: Any, b: Any) -> bool:
    """Whether two entries of a checkpoint are equal to the bit, and of one kind."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def without(stored: Any, where: tuple[str, ...]) -> Any:
    """The checkpoint without the weights at the place."""
    if not where:
        return None
    return {k: without(v, where[1:]) if k == where[0] else v for k, v in stored.items()}


def assert_equivalent(folded: nn.Module, original: nn.Module, tolerance: float = 1e-5) -> None:
    want, got = original(INPUTS), folded(INPUTS)
    assert (got - want).abs().max() <= tolerance * want.abs().max()


@pytest.mark.parametrize("name", CASES)
def test_weights_come_back_in_their_place(name, tmp_path):
    case, source, target = CASES[name], tmp_path / "in.pt", tmp_path / "out.pt"
    torch.save(case.stored, source, _use_new_zipfile_serialization=not case.legacy)
    before = source.read_bytes()
    inputs = INPUTS.half() if name == "half" else INPUTS
    report = fold_file(source, target, reading=Reading(Net, **case.options), example_inputs=inputs)
    assert report.verdict.passed
    kept = KEPT | ({"a_norm"} if name == "half" else set())  # its smallest gamma would make weights zero
    assert {k.norm for k in report.kept} == kept
    assert len(report.folded) == len(report.norms) - len(kept)
    assert source.read_bytes() == before
    assert (target.read_bytes()[:2] == b"PK") is not case.legacy
    stored = torch.load(target, weights_only=True)
    assert same(without(stored, case.where), without(torch.load(source, weights_only=True), case.where))
    old, new = inner(case.stored, case.where), inner(stored, case.where)
    assert type(new) is type(old)
    folded = apply_note(Net(), f"{target}.json").eval()
    known = folded.state_dict()
    mine = {k.removeprefix(case.prefix): v for k, v in new.items() if k.removeprefix(case.prefix) in known}
    assert mine.keys() >= {k for k in known if "num_batches" not in k}
    folded.load_state_dict(mine, strict=name != "no-counters")
    assert_equivalent(folded, net(), 2e-2 if name == "half" else 1e-5)
    for key in [k for k in old if k in new and key_is_untouched(k)]:
        assert same(new[key], old[key]), key
    gone = [f"{case.prefix}{norm}." for norm in ("a_norm", "ahead") if norm not in kept]
    assert not [k for k in new if k.startswith(tuple(gone))]
    assert {v.dtype for k, v in new.items() if "num" not in k} == {v.dtype for k, v in old.items() if "num" not in k}


def key_is_untouched(key: str) -> bool:
    return "stays" in key or "ema" in key or "loss" in key or key.endswith(("scale", "head.weight"))


def test_the_note(tmp_path):
    torch.save(WEIGHTS, tmp_path / "a.pt")
    report = fold_file(tmp_path / "a.pt", reading=Reading(Net), example_inputs=INPUTS)
    assert json.loads((tmp_path / "a.folded.pt.json").read_text()) == {
        "schema": 1, "replaced": {"a_norm": [], "b_norm": ["act"], "ahead": []}, "biases": ["a", "c"],
    }  # fmt: skip
    assert "a.folded.pt.json says how the class changes: bnfold.apply_note" in report.notes
    folded = bnfold.apply_note(Net(), tmp_path / "a.folded.pt.json")
    assert isinstance(folded.a_norm, nn.Identity)
    assert isinstance(folded.b_norm, nn.PReLU)
    assert folded.a.bias.requires_grad
    assert not folded.c.bias.any()


def test_notes_that_do_not_fit(tmp_path):
    with pytest.raises(UsageError, match="not of a Linear: it has no module 'bn'"):
        apply_note(nn.Linear(2, 2), Note({"bn": ()}, ()))
    for text in ("", "[]", "{}", '{"schema": 1}', '{"schema": 1, "replaced": 3, "biases": []}'):
        (tmp_path / "note.json").write_text(text)
        with pytest.raises(InvalidFileError, match=r"note\.json"):
            apply_note(Net(), tmp_path / "note.json")
    with pytest.raises(InvalidFileError, match="No such file"):
        apply_note(Net(), tmp_path / "missing.json")


def test_safetensors_keep_their_metadata(tmp_path):
    save_file(dict(WEIGHTS), tmp_path / "a.safetensors", metadata={"format": "pt", "author": "me"})
    fold_file(tmp_path / "a.safetensors", reading=Reading(Net), example_inputs=INPUTS)
    target = tmp_path / "a.folded.safetensors"
    with safe_open(target, "pt") as file:
        assert file.metadata() == {"format": "pt", "author": "me"}
    folded = apply_note(Net(), f"{target}.json").eval()
    folded.load_state_dict(load_file(target))
    assert_equivalent(folded, net())


@pytest.mark.parametrize("kind", ["torch", "sharded"])
def test_the_ending_may_ask_for_safetensors(kind, tmp_path):
    source = tmp_path / "in.json"
    if kind == "torch":
        torch.save({"state_dict": WEIGHTS, "epoch": 1}, source)
    else:
        save_file(dict(WEIGHTS), tmp_path / "shard.safetensors")
        source.write_text(json.dumps({"weight_map": dict.fromkeys(WEIGHTS, "shard.safetensors")}))
    target = tmp_path / "out.safetensors"
    fold_file(source, target, reading=Reading(Net), example_inputs=INPUTS)
    folded = apply_note(Net(), f"{target}.json").eval()
    folded.load_state_dict(load_file(target))
    assert_equivalent(folded, net())


MODULES = {  # what is stored, and how the network is found in it
    "alone": (net, lambda v: v),
    "parallel": (lambda: nn.DataParallel(net()), lambda v: v.module),
    "wrapped": (lambda: {"model": net(), "ema": net(1), "epoch": 4, "names": ["a"]}, lambda v: v["model"]),
    "wrapped-parallel": (lambda: {"model": nn.DataParallel(net()), "epoch": 4}, lambda v: v["model"].module),
}


@pytest.mark.parametrize("name", MODULES)
def test_pickled_networks(name, tmp_path):
    make, find = MODULES[name]
    torch.save(make(), tmp_path / "a.pt")
    report = fold_file(tmp_path / "a.pt", reading=Reading(trust_pickle=True), example_inputs=INPUTS)
    stored = torch.load(tmp_path / "a.folded.pt", weights_only=False)
    assert type(stored) is type(make())
    found = find(stored)
    assert type(found) is Net
    assert isinstance(found.a_norm, nn.Identity)
    assert_equivalent(found, net())
    assert {k.norm for k in report.kept} == KEPT
    assert not (tmp_path / "a.folded.pt.json").exists()
    if isinstance(stored, dict):
        assert {k: v for k, v in stored.items() if k not in ("model", "ema")} == {
            k: v for k, v in make().items() if k not in ("model", "ema")
        }
        if "ema" in stored:
            assert same(stored["ema"].state_dict(), OTHER)


PROGRAMS = {  # what is stored, how it is read, and what the notes say of it
    "state-dict": ({"state_dict": prefixed("module.", WEIGHTS)}, Reading(Net), "weights taken from 'state_dict'"),
    "pickled": (net(), Reading(trust_pickle=True), None),
    "training": (net().train(), Reading(trust_pickle=True), "train mode"),
}


@pytest.mark.parametrize("kind", PROGRAMS)
def test_the_ending_may_ask_for_a_program(kind, tmp_path):
    """A program is a graph: what a module tree cannot say folds, and no note is needed."""
    stored, reading, said = PROGRAMS[kind]
    torch.save(stored, tmp_path / "a.pt")
    target = tmp_path / "out.pt2"
    report = fold_file(tmp_path / "a.pt", target, reading=reading, example_inputs=INPUTS)
    assert report.verdict.passed
    assert {k.norm for k in report.kept} == KEPT
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.pt", "out.pt2"]
    assert said is None or any(said in n for n in report.notes)
    program = torch.export.load(target)
    assert_equivalent(program.module(), net())
    assert program.module()(INPUTS[:1]).shape[0] == 1  # the batch is free
    assert sum("batch_norm" in str(n.target) for n in program.graph.nodes) == len(KEPT)


def test_a_program_keeps_what_a_tree_cannot_say(tmp_path):
    torch.manual_seed(0)
    original = Shared()
    original(torch.randn(8, 3, 9, 8) * 2 + 1)
    torch.save(original.eval().state_dict(), tmp_path / "a.pt")
    report = fold_file(tmp_path / "a.pt", tmp_path / "b.pt2", reading=Reading(Shared), example_inputs=INPUTS)
    assert not report.kept
    assert_equivalent(torch.export.load(tmp_path / "b.pt2").module(), original)


class Shared(nn.Module):
    """Branches that could merge, and a layer under two norms: a tree cannot say either."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(3, 4, 1)
        self.c, self.n, self.m = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.BatchNorm2d(4)

    def forward(self, x):
        x = self.a(x) + self.b(x)
        return self.n(self.c(x)) + self.m(self.c(x.relu()))


def test_what_the_tree_cannot_say_stays(tmp_path):
    torch.save(Shared().eval().state_dict(), tmp_path / "a.pt")
    report = fold_file(tmp_path / "a.pt", reading=Reading(Shared), example_inputs=INPUTS)
    assert not report.folded
    assert {(k.norm, r.reason) for k in report.kept for r in k.reasons} == {
        ("n", "shared-weight"),
        ("m", "shared-weight"),
    }


class Remembers(nn.Sequential):
    """A network with a state of its own, no tensor."""

    def __init__(self):
        super().__init__(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))

    def get_extra_state(self):
        return {"seen": 3}

    def set_extra_state(self, state):
        self.seen = state


class Normed(nn.Sequential):
    """A weight that is computed anew at every call, the old way: a tensor that torch does not copy."""

    def __init__(self):
        super().__init__(
            nn.utils.weight_norm(nn.Conv2d(3, 4, 3)), nn.BatchNorm2d(4), nn.Conv2d(4, 5, 1), nn.BatchNorm2d(5)
        )


@pytest.mark.filterwarnings("ignore:.*weight_norm")
@pytest.mark.parametrize("make", [Remembers, Normed])
def test_networks_with_a_state_of_their_own(make, tmp_path):
    torch.manual_seed(0)
    original = make()
    original(torch.randn(8, 3, 9, 8) * 2 + 1)
    torch.save(original.eval().state_dict(), tmp_path / "a.pt")
    report = fold_file(tmp_path / "a.pt", reading=Reading(make), example_inputs=INPUTS)
    assert len(report.folded) == 1
    folded = apply_note(make(), tmp_path / "a.folded.pt.json").eval()
    folded.load_state_dict(torch.load(tmp_path / "a.folded.pt", weights_only=True))
    assert_equivalent(folded, original)


def test_integer_inputs(tmp_path):
    def make() -> nn.Module:
        return nn.Sequential(nn.Embedding(9, 4), nn.Flatten(0, 1), nn.BatchNorm1d(4), nn.Linear(4, 2))

    torch.save(make().state_dict(), tmp_path / "a.pt")
    report = fold_file(tmp_path / "a.pt", reading=Reading(make), example_inputs=torch.randint(0, 9, (2, 5)))
    assert report.verdict.passed
    assert len(report.folded) == 1


REFUSED = ["factory", "script", "script-as-program", "onnx-ending", "module-as-safetensors", "index-as-torch"]


@pytest.mark.parametrize("what", REFUSED)
def test_refusals(what, tmp_path):
    source, target, says = tmp_path / "a.pt", None, "pass --factory"
    torch.save(WEIGHTS, source)
    reading = Reading()
    if what == "script":
        torch.jit.script(nn.ReLU()).save(source)
        says = "holds a torchscript, which is not written back: `bnfold export`"
    elif what == "script-as-program":
        torch.jit.script(nn.ReLU()).save(source)
        target, says = tmp_path / "b.pt2", "is TorchScript, which torch.export does not take: `bnfold export`"
    elif what == "onnx-ending":
        reading, target, says = Reading(Net), tmp_path / "b.onnx", "`bnfold export` turns it into one"
    elif what == "module-as-safetensors":
        torch.save(net(), source)
        reading, target, says = Reading(trust_pickle=True), tmp_path / "b.safetensors", "safetensors only weights"
    elif what == "index-as-torch":
        save_file(dict(WEIGHTS), tmp_path / "s.safetensors")
        source.write_text(json.dumps({"weight_map": dict.fromkeys(WEIGHTS, "s.safetensors")}))
        reading, says = Reading(Net), "is in several files"
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    with pytest.raises(UsageError, match=says):
        fold_file(source, target, reading=reading, example_inputs=INPUTS)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


def test_outputs_that_are_there(tmp_path):
    torch.save(WEIGHTS, tmp_path / "a.pt")
    wish: dict[str, Any] = {"reading": Reading(Net), "example_inputs": INPUTS}
    (tmp_path / "a.folded.pt.json").write_text("mine")
    with pytest.raises(UsageError, match=r"a\.folded\.pt\.json exists"):
        fold_file(tmp_path / "a.pt", **wish)
    assert not (tmp_path / "a.folded.pt").exists()
    fold_file(tmp_path / "a.pt", force=True, **wish)
    first = (tmp_path / "a.folded.pt").read_bytes()
    fold_file(tmp_path / "a.pt", force=True, **wish)
    assert (tmp_path / "a.folded.pt").read_bytes() == first
    fold_file(tmp_path / "a.pt", in_place=True, **wish)
    assert same(torch.load(tmp_path / "a.pt"), torch.load(io.BytesIO(first)))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.folded.pt", "a.folded.pt.json", "a.pt", "a.pt.json"]


def test_a_fold_that_fails_its_check_writes_nothing(tmp_path, monkeypatch):
    torch.save(WEIGHTS, tmp_path / "a.pt")
    with pytest.raises(bnfold.BnfoldError):
        fold_file(tmp_path / "a.pt", reading=Reading(Net), example_inputs=INPUTS, tolerance=0.0)
    assert [p.name for p in tmp_path.iterdir()] == ["a.pt"]


def test_at_the_shell(tmp_path):
    torch.save({"state_dict": prefixed("module.", WEIGHTS)}, tmp_path / "a.pt")
    done = subprocess.run(
        [sys.executable, "-m", "bnfold", "fold", str(tmp_path / "a.pt"), "--input", "2x3x9x8", "--factory",
         f"{Path(__file__)}:Net"],
        capture_output=True, text=True, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "4 normalizations (4 batch_norm): 3 folded, 1 kept" in done.stdout
    assert (tmp_path / "a.folded.pt").exists()
