"""TorchScript: archives become folded ONNX files; a script that could do more than compute is not even loaded."""

import io
import zipfile
from pathlib import Path

import onnx
import pytest
import torch
from torch import nn

import bnfold
from bnfold.checkpoint import Reading, load, load_detailed
from bnfold.errors import InvalidFileError, UsageError
from bnfold.scripts import write_script


class Net(nn.Module):
    """Two inputs, control flow that scripting keeps, norms in front of and behind layers."""

    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
        self.norm = nn.BatchNorm2d(4)
        self.last = nn.Conv2d(4, 2, 1)

    def forward(self, x, y):
        z = self.first(x)
        if y.dim() == 4:
            z = z + self.first(y)
        return self.last(self.norm(z))


def net() -> Net:
    torch.manual_seed(0)
    module = Net()
    for _ in range(3):
        module(torch.randn(8, 3, 9, 8) * 2 + 1, torch.randn(8, 3, 9, 8))
    with torch.no_grad():
        module.norm.weight.copy_(torch.tensor([-1.5, 0.0, 1e-6, 2.0]))
    return module.eval()


INPUTS = torch.randn(2, 3, 9, 8), torch.randn(2, 3, 9, 8)


def stored(kind: str, folder: Path, module: nn.Module | None = None) -> Path:
    module = module or net()
    made = torch.jit.trace(module, INPUTS) if kind == "traced" else torch.jit.script(module)
    made.save(folder / "net.pt")
    return folder / "net.pt"


@pytest.mark.parametrize("kind", ["traced", "scripted"])
def test_a_script_is_exported_and_verified(kind, tmp_path):
    done = bnfold.export(stored(kind, tmp_path), tmp_path / "out.onnx", example_inputs=INPUTS)
    assert done.verdict.passed
    assert [n.op for n in done.report.norms] == ["BatchNormalization"] * 3  # one module is called twice
    assert not done.report.kept
    model = onnx.load(done.path)
    assert [i.name for i in model.graph.input] == ["x", "y"]
    assert {i.type.tensor_type.shape.dim[0].dim_param for i in model.graph.input} == {"batch"}
    assert "BatchNormalization" not in {n.op_type for n in model.graph.node}


def test_a_trace_knows_its_inputs(tmp_path):
    done = bnfold.export(stored("traced", tmp_path), tmp_path / "out.onnx")
    assert "input 2x3x9x8, 2x3x9x8, as the file says; pass --input for another" in done.report.notes


def test_inputs_of_a_script_are_inferred_from_its_layers(tmp_path):
    torch.jit.script(net().first).save(tmp_path / "net.pt")
    done = bnfold.export(tmp_path / "net.pt", tmp_path / "out.onnx")
    assert "input 2x3x224x224 was inferred; pass --input for another" in done.report.notes


def test_options(tmp_path):
    path = stored("scripted", tmp_path)
    done = bnfold.export(
        path, tmp_path / "out.onnx", example_inputs={"y": INPUTS[1], "x": INPUTS[0]}, static=True, opset=17,
        input_names=["left", "right"], output_names=["scores"],
    )  # fmt: skip
    model = onnx.load(done.path)
    assert [i.name for i in (*model.graph.input, *model.graph.output)] == ["left", "right", "scores"]
    assert [d.dim_value for d in model.graph.input[0].type.tensor_type.shape.dim] == [2, 3, 9, 8]
    assert model.opset_import[0].version == 17


def test_a_script_left_in_training_mode(tmp_path):
    path = stored("scripted", tmp_path, net().train())
    script = torch.jit.load(path)
    for source in (path, script):
        done = bnfold.export(source, tmp_path / "out.onnx", example_inputs=INPUTS, force=True)
        assert not done.report.kept
        assert done.verdict.passed
        assert any("train mode" in note for note in done.report.notes)
    assert script.training


def test_what_the_exporter_cannot_write(capfd):
    class Odd(nn.Module):
        def forward(self, x):
            return torch.linalg.eigvals(x)

    script = torch.jit.script(Odd())
    with pytest.raises(InvalidFileError, match=r"torch\.onnx cannot write this script"):
        write_script(script, torch.randn(2, 2))
    assert capfd.readouterr() == ("", "")  # it would print the whole graph


def test_a_factory_for_a_script(tmp_path):
    with pytest.raises(UsageError, match="a whole model"):
        load(stored("scripted", tmp_path), factory=Net)


# ---------------------------------------------------------------------- scripts that do more than compute


def rewritten(path: Path, old: str, new: str) -> None:
    """Edit the code in an archive, as an attacker would."""
    with zipfile.ZipFile(path) as source:
        members = {i.filename: source.read(i) for i in source.infolist()}
    changed = {n: d.decode().replace(old, new).encode() if n.endswith(".py") else d for n, d in members.items()}
    assert changed != members
    with zipfile.ZipFile(path, "w") as target:
        for name, data in changed.items():
            target.writestr(name, data)


def compiled(marker: Path, lines: str, state: str = "pass") -> bytes:
    """A script whose code is given; MARKER stands for a path that must not come to exist."""
    source = f"""
import torch
from typing import Tuple
class Evil(torch.nn.Module):
    def forward(self, x):
        {lines}
        return x
    @torch.jit.export
    def __getstate__(self):
        return (torch.ones(1), self.training)
    @torch.jit.export
    def __setstate__(self, s: Tuple[torch.Tensor, bool]):
        self.training = s[1]
        {state}
"""
    file = marker.parent / "evil_source.py"
    file.write_text(source.replace("MARKER", str(marker)))
    namespace: dict = {"__name__": "evil_source", "__file__": str(file)}
    exec(compile(file.read_text(), str(file), "exec"), namespace)
    buffer = io.BytesIO()
    torch.jit.save(torch.jit.script(namespace["Evil"]()), buffer)
    marker.unlink(missing_ok=True)
    return buffer.getvalue()


ATTACKS = {  # lines of `forward`, of `__setstate__`, and what the message names
    "writes-when-called": ('torch.save(x, "MARKER")', "pass", "reads or writes files ('save'"),
    "writes-when-loaded": ("pass", 'torch.save(s[0], "MARKER")', "reads or writes files ('save'"),
    "reads-a-file": ('x = torch.from_file("MARKER", False, 1)', "pass", "reads or writes files ('from_file'"),
    "by-namespace": ('torch.ops.aten.save(x, "MARKER")', "pass", "reads or writes files ('save'"),
    "another-library": (
        'x = torch.ops.c10d_functional.all_reduce(x, "sum", "g", [0], 1)',
        "pass",
        "an operator of another library",
    ),
}


@pytest.mark.parametrize("kind", ATTACKS)
def test_a_script_that_reaches_out_is_refused(kind, tmp_path):
    lines, state, says = ATTACKS[kind]
    marker = tmp_path / "marker"
    (tmp_path / "evil.pt").write_bytes(compiled(marker, lines, state))
    with pytest.raises(InvalidFileError) as e:
        load(tmp_path / "evil.pt")
    assert says in str(e.value)
    assert "--trust-pickle" in str(e.value)
    assert not marker.exists()


def test_with_trust_it_is_loaded(tmp_path):
    marker = tmp_path / "marker"
    (tmp_path / "evil.pt").write_bytes(compiled(marker, "pass", 'torch.save(s[0], "MARKER")'))
    assert load_detailed(tmp_path / "evil.pt", Reading(trust_pickle=True)).kind == "torchscript"
    assert marker.exists()


EDITS = {  # what an attacker writes into the code of a harmless archive
    "spaced": ("torch.relu(", 'torch . save(x, "m")\n    torch.relu(', "'save'"),
    "by-a-name-in-a-text": ("torch.relu(", 'getattr(torch, "save")(x, "m")\n    torch.relu(', "'save'"),
    "no-python": ("torch.relu(", "torch.relu((", "cannot be looked through"),
}


@pytest.mark.parametrize("kind", EDITS)
def test_edited_code(kind, tmp_path):
    class Relu(nn.Module):
        def forward(self, x):
            return torch.relu(x)

    torch.jit.script(Relu()).save(tmp_path / "net.pt")
    old, new, says = EDITS[kind]
    rewritten(tmp_path / "net.pt", old, new)
    with pytest.raises(InvalidFileError, match="a script that") as e:
        load(tmp_path / "net.pt")
    assert says in str(e.value)


def test_a_member_that_is_there_twice(tmp_path):
    path = stored("scripted", tmp_path)
    with zipfile.ZipFile(path) as source:
        name = next(n for n in source.namelist() if n.endswith(".py"))
    with zipfile.ZipFile(path, "a") as target, pytest.warns(UserWarning, match="Duplicate"):
        target.writestr(name, "class A(Module):\n  pass\n")
    with pytest.raises(InvalidFileError, match="twice"):
        load(path)
