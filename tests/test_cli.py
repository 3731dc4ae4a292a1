"""The command line as people type it: what it prints and where, its exit codes, what it leaves in the folder."""

import dataclasses
import errno
import io
import os
import re
import shutil
import subprocess
import sys
import textwrap
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnx
import pytest
import torch
from bnfold.cli.main import run
from command import Done, bnfold, contents, one_line
from onnx import TensorProto, helper, numpy_helper

from bnfold import exporter, files
from bnfold.checkpoint import load
from bnfold.report import Kept, OutputCheck, Reason, Refusal, Report, Verdict
from bnfold.transform import planned

NET = """
from torch import nn

class Net(nn.Module):
    def __init__(self, channels=4):
        super().__init__()
        self.conv = nn.Conv2d(3, channels, 3, padding=1)
        self.bn = nn.BatchNorm2d(channels)
        self.head = nn.Linear(channels, 5)

    def forward(self, x):
        return self.head(self.bn(self.conv(x)).relu().mean((2, 3)))

def chatty():
    print("building")
    return Net()
"""
NEEDS = "--factory cli_net:Net --input 1x3x8x8"
KEYS = ["schema", "norms", "folded", "kept", "affine", "findings", "statistics", "verdict", "files", "bytes_added",
        "notes", "contents"]  # fmt: skip


def program(*args: str, **options) -> subprocess.CompletedProcess[str]:
    """Run Python in a process of its own."""
    return subprocess.run([sys.executable, *args], capture_output=True, text=True, check=False, **options)


# --- a folder with a file of every kind


def chain(seed: int = 0, norms: int = 2, stays: bool = False) -> onnx.ModelProto:
    """x -> Conv -> bn1 -> Relu -> Conv -> bn2 -> y; with `stays`, Relu -> bn3 -> y behind it, which cannot fold."""
    rng = np.random.default_rng(seed)
    nodes, tensors, last = [], [], "x"

    def add(op: str, name: str, *constants, **attributes) -> None:
        nonlocal last
        names = [f"{name}.{i}" for i in range(len(constants))]
        tensors.extend(numpy_helper.from_array(np.float32(c), n) for c, n in zip(constants, names, strict=True))
        nodes.append(helper.make_node(op, [last, *names], [f"{name}.out"], name, **attributes))
        last = f"{name}.out"

    def norm(name: str) -> None:
        gamma, beta, mean = (rng.normal(size=3) for _ in range(3))
        add("BatchNormalization", name, gamma, beta, mean, rng.uniform(0.5, 2, 3))

    for i in range(1, norms + 1):
        add("Conv", f"conv{i}", rng.normal(size=(3, 3, 3, 3)), pads=[1, 1, 1, 1])
        norm(f"bn{i}")
        if i < norms or stays:
            add("Relu", f"relu{i}")
    if stays:
        norm("bn3")
    nodes[-1].output[0] = "y"
    shape = ["batch", 3, 8, 8]
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes, "chain", [value("x", TensorProto.FLOAT, shape)], [value("y", TensorProto.FLOAT, shape)], tensors
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The files that all tests get a copy of."""
    folder = tmp_path_factory.mktemp("made")
    (folder / "cli_net.py").write_text(NET)
    sys.path.insert(0, str(folder))
    try:
        from cli_net import Net  # pyright: ignore[reportMissingImports]
    finally:
        sys.path.remove(str(folder))
    torch.manual_seed(0)
    network = Net()
    network(torch.randn(8, 3, 8, 8) * 3 + 1)  # running statistics of its own
    network.eval()
    torch.save(network.state_dict(), folder / "model.pt")
    torch.save(network, folder / "pickled.pt")
    broken = {k: v.clone() for k, v in network.state_dict().items()}
    broken["bn.running_var"][2] = float("nan")
    torch.save(broken, folder / "nan.pt")
    renamed = {k.replace("bn.", "norm."): v for k, v in network.state_dict().items()}
    torch.save(renamed, folder / "renamed.pt")
    (folder / "noise.pt").write_bytes(np.random.default_rng(0).bytes(500))
    (folder / "text.pt").write_text("no model at all\n")
    (folder / "taken.onnx").write_text("something else")
    rng = np.random.default_rng(2)
    np.savez(folder / "x.npz", x=rng.normal(size=(3, 3, 8, 8)))
    np.savez(folder / "wrong.npz", z=rng.normal(size=(3, 3, 8, 8)), y=rng.normal(size=3))
    (folder / "sub").mkdir()
    onnx.save(chain(), folder / "chain.onnx")
    onnx.save(chain(seed=1), folder / "other.onnx")
    onnx.save(chain(norms=1, stays=True), folder / "stays.onnx")
    yield folder
    del sys.modules["cli_net"]


@pytest.fixture
def folder(made, tmp_path, monkeypatch):
    """The current folder: a copy of the files."""
    shutil.copytree(made, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def ops(path: Path | str) -> list[str]:
    return [n.op_type for n in onnx.load(path).graph.node]


def dims(value: onnx.ValueInfoProto) -> list[int | str]:
    return [d.dim_param or d.dim_value for d in value.type.tensor_type.shape.dim]


# --- export of a checkpoint


@pytest.fixture(scope="module")
def exported(made, tmp_path_factory):
    """`bnfold export model.pt` with nothing but what it needs: what it printed, and the folder before and after."""
    folder = tmp_path_factory.mktemp("exported")
    shutil.copytree(made, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    before = contents(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        done = bnfold(f"export model.pt {NEEDS}")
    return done, folder, before


def test_export_writes_one_file_beside_the_checkpoint(exported):
    done, folder, before = exported
    assert (done.code, done.err) == (0, "")
    after = contents(folder)
    assert {k: after[k] for k in before} == before
    assert set(after) - set(before) == {"model.onnx"}


def test_export_says_what_it_did_in_plain_lines(exported):
    done, folder, _ = exported
    found, folded, output, verdict, wrote = done.out.splitlines()
    assert found == "1 normalization (1 batch_norm): 1 folded, 0 kept"
    assert folded == "folded  bn  ->  conv (backward)"
    assert output.startswith("output  ")
    assert "of its range (limit 1.0e-04" in output
    assert verdict.startswith("equivalent on onnxruntime CPU")
    kilobytes = [f"{(folder / name).stat().st_size / 1000:.1f} kB" for name in ("model.onnx", "model.pt")]
    assert wrote == "wrote model.onnx  {} (source {})".format(*kilobytes)


def test_export_folds_and_leaves_the_batch_free(exported):
    _, folder, _ = exported
    graph = onnx.load(folder / "model.onnx").graph
    assert "BatchNormalization" not in [n.op_type for n in graph.node]
    assert dims(graph.input[0]) == ["batch", 3, 8, 8]
    assert dims(graph.output[0]) == ["batch", 5]


def test_export_verifies_as_the_checkpoint(exported, monkeypatch):
    _, folder, _ = exported
    monkeypatch.chdir(folder)
    assert bnfold(f"verify model.pt model.onnx {NEEDS}").code == 0


def test_export_with_every_wish_and_json(folder):
    done = bnfold(f"export model.pt {NEEDS} --json --static --opset 20 --input-name image --output-name logits")
    assert (done.code, done.err) == (0, "")
    assert list(done.json) == KEYS
    report = done.report
    assert [(f.norm, f.into, f.direction) for f in report.folded] == [("bn", ("conv",), "backward")]
    assert report.kept == ()
    assert report.verdict is not None
    assert (report.verdict.passed, [o.name for o in report.verdict.outputs]) == (True, ["logits"])
    sizes = [(f.role, f.path, f.bytes) for f in report.files]
    assert sizes == [(r, p, Path(p).stat().st_size) for r, p in (("source", "model.pt"), ("output", "model.onnx"))]
    model = onnx.load("model.onnx")
    assert [o.version for o in model.opset_import if not o.domain] == [20]
    assert (model.graph.input[0].name, dims(model.graph.input[0])) == ("image", [1, 3, 8, 8])
    assert (model.graph.output[0].name, dims(model.graph.output[0])) == ("logits", [1, 5])


def test_export_keeps_broken_statistics_on_request(folder):
    done = bnfold(f"export nan.pt {NEEDS} --keep-broken --json")
    assert (done.code, done.err) == (0, "")
    assert [(k.norm, [r.reason for r in k.reasons]) for k in done.report.kept] == [("bn", [Reason.NOT_FINITE])]
    assert "BatchNormalization" in ops("nan.onnx")


def test_export_of_a_trusted_pickle_warns(folder):
    done = bnfold("export pickled.pt --trust-pickle --input 1x3x8x8 --skip bn")
    assert done.code == 0
    assert one_line(done) == "bnfold: warning: --trust-pickle lets pickled.pt run code while it is read\n"
    assert "kept    bn  excluded: " in done.out
    assert "BatchNormalization" in ops("pickled.onnx")  # nor does the second sweep, over ONNX, fold what was to stay


def test_export_folds_in_onnx_what_torch_could_not(folder, monkeypatch):
    def refused(graph, **_):
        plan = planned(graph, skip="bn")
        kept = [Kept(k.norm, (Refusal(Reason.UNSUPPORTED_OP, "somewhere", ""),), k.op) for k in plan.report.kept]
        return dataclasses.replace(plan, report=plan.report.with_(kept=tuple(kept)))

    monkeypatch.setattr(exporter, "planned", refused)
    report = bnfold(f"export model.pt {NEEDS} --json").report
    assert [(f.norm, f.op) for f in report.folded] == [("bn", "batch_norm")]
    assert report.kept == ()
    assert "BatchNormalization" not in ops("model.onnx")


@pytest.mark.parametrize(
    ("wish", "says"),
    [
        pytest.param("--opset 3", "--opset 3: torch.onnx could only write opset", id="opset-out-of-reach"),
        pytest.param("--input-name a --input-name b", "--input-name: 2 given", id="too-many-input-names"),
    ],
)
def test_export_refuses_what_torch_would_pass_over(wish, says, folder):
    before = contents(folder)
    done = bnfold(f"export model.pt {NEEDS} {wish}")
    assert done.code == 2
    assert says in one_line(done)
    assert contents(folder) == before


# --- the other verbs


def test_inspect_changes_nothing(folder):
    before = contents(folder)
    done = bnfold("inspect stays.onnx")
    assert (done.code, done.err) == (0, "")
    found, folds, *stays = done.out.splitlines()
    assert found == "2 normalizations (2 BatchNormalization): 1 would fold, 1 would stay"
    assert folds == "would fold  bn1  ->  conv1 (backward)"
    assert stays
    assert all(line.startswith("would stay  bn3  ") for line in stays)
    assert contents(folder) == before


def test_inspect_of_a_checkpoint_infers_what_it_is_not_told(folder):
    told, inferred = (bnfold(f"inspect model.pt --factory cli_net:Net {more}") for more in ("-i 1x3x8x8", ""))
    assert (told.code, inferred.code) == (0, 0)
    note, *rest = inferred.out.splitlines()
    assert note.startswith("note: input 2x3x224x224 was inferred")
    assert rest == told.out.splitlines()


def test_inspect_reports_broken_statistics(folder):
    done = bnfold(f"inspect nan.pt {NEEDS}")
    assert (done.code, done.err) == (0, "")
    assert "would stay  bn  not-finite: variance[2] = nan" in done.out


def test_stdout_is_the_results_alone(folder):
    done = bnfold("inspect model.pt --factory cli_net:chatty --input 1x3x8x8 --json")
    assert done.code == 0
    assert done.err == "building\n"
    assert list(done.json) == KEYS


def test_fold_writes_beside_the_input(folder):
    before = contents(folder)
    done = bnfold("fold chain.onnx")
    assert (done.code, done.err) == (0, "")
    after = contents(folder)
    assert {k: after[k] for k in before} == before
    assert set(after) - set(before) == {"chain.folded.onnx"}
    assert ops("chain.folded.onnx") == ["Conv", "Relu", "Conv"]
    assert done.out.splitlines()[-1].startswith("wrote chain.folded.onnx  ")


@pytest.mark.parametrize(
    "how",
    [
        pytest.param("fold chain.onnx -o chain.onnx --in-place", id="fold-named"),
        pytest.param("fold chain.onnx -o sub/../chain.onnx --in-place", id="fold-named-otherwise"),
        pytest.param("fold chain.onnx --in-place", id="fold-unnamed"),
        pytest.param("export chain.onnx -o chain.onnx --in-place", id="export-named"),
    ],
)
def test_in_place(how, folder):
    before = contents(folder)
    done = bnfold(f"{how} --json")
    assert done.code == 0
    assert [f.bytes for f in done.report.files] == [len(before["chain.onnx"]), Path("chain.onnx").stat().st_size]
    assert ops("chain.onnx") == ["Conv", "Relu", "Conv"]
    assert set(contents(folder)) == set(before)


@pytest.mark.parametrize(
    ("verb", "source", "output"),
    [
        pytest.param("export", "at/model.pt", "at/model.onnx", id="checkpoint"),
        pytest.param("export", "net.v2.safetensors", "net.v2.onnx", id="two-dots"),
        pytest.param("export", "model", "model.onnx", id="no-ending"),
        pytest.param("export", "model.pt2", "model.onnx", id="program"),
        pytest.param("export", "model.onnx", "model.folded.onnx", id="onnx"),
        pytest.param("fold", "at/model.onnx", "at/model.folded.onnx", id="fold-onnx"),
        pytest.param("fold", "model.ONNX", "model.folded.ONNX", id="fold-onnx-in-capitals"),
        pytest.param("fold", "model.pt2", "model.folded.pt2", id="fold-program"),
        pytest.param("fold", "model.bin", "model.folded.bin", id="fold-other-ending"),
    ],
)
def test_default_output(verb, source, output):
    assert files.default_output(Path(source), verb) == Path(output)


def test_force_overwrites(folder):
    assert bnfold("fold chain.onnx -o taken.onnx --force").code == 0
    assert ops("taken.onnx") == ["Conv", "Relu", "Conv"]


@pytest.mark.parametrize(
    ("choice", "folded"),
    [
        pytest.param("--only bn1", ["bn1"], id="only"),
        pytest.param("--only 'bn*'", ["bn1", "bn2"], id="only-pattern"),
        pytest.param("--only bn1 --only bn2", ["bn1", "bn2"], id="only-two"),
        pytest.param("--skip bn1", ["bn2"], id="skip"),
        pytest.param("--only 'bn?' --skip '*2'", ["bn1"], id="only-and-skip"),
        pytest.param("--skip 'bn*'", [], id="skip-all"),
    ],
)
def test_selection(choice, folded, folder):
    report = bnfold(f"fold chain.onnx {choice} --json").report
    assert [f.norm for f in report.folded] == folded
    assert {k.norm: [r.reason for r in k.reasons] for k in report.kept} == {
        n: [Reason.EXCLUDED] for n in ("bn1", "bn2") if n not in folded
    }


def test_verify_of_equal_models(folder):
    done = bnfold("verify chain.onnx chain.onnx")
    assert (done.code, done.err) == (0, "")
    output, verdict = done.out.splitlines()
    assert output.startswith("output  y  error 0.0e+00 of its range (limit ")
    assert verdict.startswith("equivalent on onnxruntime CPU")


REAL = {
    "export": "export model.pt --factory cli_net:Net -o out.onnx",
    "export-onnx": "export chain.onnx -o out.onnx",
    "fold": "fold model.pt --factory cli_net:Net",
    "fold-onnx": "fold chain.onnx",
    "fold-to-program": "fold model.pt --factory cli_net:Net -o out.pt2",
    "inspect": "inspect model.pt --factory cli_net:Net",
    "verify": "verify chain.onnx chain.onnx",
    "verify-checkpoint": "verify model.pt out.onnx --factory cli_net:Net",
}


@pytest.mark.parametrize("verb", REAL)
def test_real_inputs(verb, folder):
    if verb == "verify-checkpoint":
        assert bnfold(f"export model.pt {NEEDS} -o out.onnx").code == 0
    done = bnfold(f"{REAL[verb]} --input-file x.npz --json")
    assert (done.code, done.err) == (0, "")
    assert done.report.verdict is None if verb == "inspect" else done.report.verdict.passed
    assert not any("given inputs only" in n for n in done.report.notes)


def test_verify_of_different_models(folder):
    done = bnfold("verify chain.onnx other.onnx")
    assert done.code == 3
    assert one_line(done) == "bnfold: other.onnx does not compute what chain.onnx computes\n"
    output, verdict = done.out.splitlines()
    assert output.startswith("output  y  error ")
    assert verdict.startswith("NOT equivalent on onnxruntime CPU")


def test_verify_of_different_models_as_json(folder):
    done = bnfold("verify chain.onnx other.onnx --json")
    assert done.code == 3
    assert list(done.json) == [*KEYS, "error"]
    assert done.json["error"] == {"message": one_line(done).removeprefix("bnfold: ").strip(), "exit_code": 3}
    verdict = done.report.verdict
    assert verdict is not None
    assert not verdict.passed
    assert verdict.outputs[0].error > verdict.outputs[0].limit


def test_explain(folder):
    one, every, as_json = (bnfold(f"explain {what}") for what in ("padded-shift", "", "padded-shift --json"))
    assert (one.code, every.code, as_json.code) == (0, 0, 0)
    assert one.out.startswith("padded-shift\n  ")
    assert one.out in every.out
    assert [line for line in every.out.splitlines() if line[0] != " "] == list(Reason)
    assert list(as_json.json["reasons"]) == ["padded-shift"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_on_a_terminal_reports_are_tables(folder, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    model = chain(norms=1, stays=True)
    model.graph.node[1].name = "stage[0].bn"  # which is no markup
    onnx.save(model, "stays.onnx")
    with redirect_stdout(Terminal()) as out, redirect_stderr(Terminal()) as err, pytest.raises(SystemExit) as end:
        run(["fold", "stays.onnx"])
    assert end.value.code == 0
    lines = [" ".join(re.sub("\x1b\\[[0-9;]*m", "", line).split()) for line in out.getvalue().splitlines()]
    for line in (
        "stage[0].bn conv1 backward",
        "model-output y y is an output of the model",
        "2 normalizations (2 BatchNormalization): 1 folded, 1 kept",
    ):
        assert line in lines
    assert lines[-2].startswith("equivalent on onnxruntime CPU")
    assert lines[-1].startswith("wrote stays.folded.onnx ")
    assert "verifying" in err.getvalue()


# --- results that may not be written


@pytest.mark.parametrize("verb", ["fold", "export"])
@pytest.mark.parametrize("form", ["", "--json"])
def test_require_all(verb, form, folder):
    before = contents(folder)
    done = bnfold(f"{verb} stays.onnx -o out.onnx --require-all {form}")
    assert done.code == 4
    assert "1 of 2 normalizations remain: bn3 (" in one_line(done)
    assert contents(folder) == before
    if form:
        assert done.json["error"]["exit_code"] == 4
        assert [k.norm for k in done.report.kept] == ["bn3"]
    else:
        assert "kept    bn3  " in done.out


def test_fold_of_a_model_without_norms(folder):
    assert bnfold("fold chain.onnx --in-place").code == 0
    found, verdict, _ = bnfold("fold chain.onnx").out.splitlines()
    assert found == "no normalizations"
    assert verdict == "equivalent; nothing folded: the model is the source, field by field"


def test_require_all_of_what_folds(folder):
    assert bnfold("fold chain.onnx --require-all").code == 0


FAILED = Verdict(False, (OutputCheck("y", 0.25, 1e-4),), ("CPUExecutionProvider",), (0,))


@pytest.mark.parametrize("verb", ["fold", "export"])
@pytest.mark.parametrize("form", ["", "--json"])
def test_what_fails_verification_is_not_written(verb, form, folder, monkeypatch):
    monkeypatch.setattr(exporter, "verify_models", lambda *_, **__: FAILED)
    before = contents(folder)
    done = bnfold(f"{verb} chain.onnx -o out.onnx {form}")
    assert done.code == 3
    assert "out.onnx was not written: output y is not what the source computes (error 2.5e-01" in one_line(done)
    assert contents(folder) == before
    if form:
        assert done.json["error"]["exit_code"] == 3
        assert done.report.verdict == FAILED
    else:
        assert "output  y  error 2.5e-01 of its range (limit 1.0e-04)\nNOT equivalent" in done.out


def test_no_verify_writes_unseen(folder, monkeypatch):
    monkeypatch.setattr(exporter, "verify_models", lambda *_, **__: FAILED)
    done = bnfold("fold chain.onnx --no-verify")
    assert done.code == 0
    assert "equivalent" not in done.out


class Accident(NamedTuple):
    """What happens while the result stands in its temporary file, the exit code, and what is said."""

    what: BaseException
    code: int
    says: str


ACCIDENTS = {
    "interrupt": Accident(KeyboardInterrupt(), 130, "bnfold: interrupted\n"),
    "bug": Accident(RuntimeError("boom\nmore"), 1, "bnfold: internal error: RuntimeError: boom (BNFOLD_DEBUG=1 "),
    "bug-that-says-nothing": Accident(KeyError(), 1, "bnfold: internal error: KeyError: "),
    "disk-full": Accident(OSError(errno.ENOSPC, "No space left"), 6, "bnfold: cannot write out.onnx: No space left\n"),
}


@pytest.mark.parametrize("name", ACCIDENTS)
@pytest.mark.parametrize("form", ["", "--json"])
def test_accidents_leave_nothing_behind(name, form, folder, monkeypatch):
    case = ACCIDENTS[name]
    staged: list[str] = []

    def fail(*_, **__):
        staged.extend(p.name for p in folder.glob(".out.onnx.*"))
        raise case.what

    monkeypatch.setattr(exporter, "verify_models", fail)
    before = contents(folder)
    done = bnfold(f"export chain.onnx -o out.onnx {form}")
    assert done.code == case.code
    assert one_line(done).startswith(case.says)
    assert len(staged) == 1
    assert contents(folder) == before
    assert not form or done.json["error"]["exit_code"] == case.code


def test_unwritable_folder(folder, monkeypatch):
    monkeypatch.setattr(files.os, "access", lambda *_: False)  # root may write everywhere
    done = bnfold("fold chain.onnx -o sub/out.onnx")
    assert done.code == 6
    assert "the folder sub is not writable" in one_line(done)


# --- refusals: one line on stderr, the documented code, nothing changed


class Bad(NamedTuple):
    line: str
    code: int
    says: tuple[str, ...]


BAD = {
    # the command itself
    "unknown-command": Bad("exprt model.pt", 2, ("No such command 'exprt'", "'export'")),
    "unknown-option": Bad("export model.pt --fource", 2, ("No such option: --fource", "--force")),
    "option-of-another-verb": Bad("inspect chain.onnx --static", 2, ("No such option: --static",)),
    "no-file": Bad("export", 2, ("Missing argument",)),
    "value-missing": Bad("export model.pt --input", 2, ("--input",)),
    "value-no-number": Bad("export model.pt --opset ten", 2, ("--opset", "int")),
    "reason-unknown": Bad("explain padded", 2, ("no reason 'padded'", "did you mean padded-shift?")),
    "reason-like-none": Bad("explain zzz", 2, ("no reason 'zzz'", "bnfold explain")),
    # the input file
    "missing": Bad(f"export none.pt {NEEDS}", 6, ("none.pt: no such file",)),
    "missing-whose-output-exists": Bad(f"export taken.pt {NEEDS}", 6, ("taken.pt: no such file",)),
    "missing-below-a-file": Bad(f"export text.pt/model.pt {NEEDS}", 6, ("text.pt/model.pt: cannot be read",)),
    "folder": Bad(f"export sub {NEEDS}", 6, ("sub: is a folder",)),
    "noise": Bad(f"export noise.pt {NEEDS}", 6, ("noise.pt: no model that bnfold knows",)),
    "text": Bad(f"export text.pt {NEEDS}", 6, ("text.pt: no model that bnfold knows",)),
    "no-onnx": Bad("fold taken.onnx", 6, ("taken.onnx: not a valid ONNX model",)),
    "inspect-missing": Bad("inspect none.onnx", 6, ("none.onnx: no such file",)),
    "fold-missing": Bad("fold none.onnx", 6, ("none.onnx: no such file",)),
    "verify-missing": Bad("verify chain.onnx none.onnx", 6, ("none.onnx: no such file",)),
    "fold-checkpoint": Bad("fold pickled.pt --trust-pickle -o out.onnx", 2, ("`bnfold export`",)),
    # the network
    "no-factory": Bad("export model.pt --input 1x3x8x8", 2, ("model.pt: holds weights only", "--factory")),
    "factory-misspelt": Bad("export model.pt --factory cli_net:Nett", 2, ("no 'Nett'; did you mean Net?",)),
    "factory-argument": Bad(f"export model.pt {NEEDS} --factory-arg depth", 2, ("'depth'", "key=value")),
    "factory-of-onnx": Bad("export chain.onnx -o out.onnx --factory cli_net:Net", 2, ("leave out --factory",)),
    "keys": Bad(f"export renamed.pt {NEEDS}", 6, ("4 keys missing (bn.weight,", "5 keys unexpected (norm.weight,")),
    "shapes": Bad(f"export model.pt {NEEDS} --factory-arg channels=8", 6, ("'conv.weight' is (4, 3, 3, 3)",)),
    "pickled": Bad("export pickled.pt --input 1x3x8x8", 6, ("cli_net.Net", "--trust-pickle")),
    "nan": Bad(f"export nan.pt {NEEDS}", 6, ("bn: variance[2] = nan", "--keep-broken")),
    # the inputs
    "input-rank": Bad("export model.pt --factory cli_net:Net --input 1x3", 2, ("of shape (1, 3)",)),
    "input-channels": Bad("inspect model.pt --factory cli_net:Net --input 1x4x8x8", 2, ("of shape (1, 4, 8, 8)",)),
    "input-syntax": Bad("export model.pt --factory cli_net:Net -i 1,3,8", 2, ("--input 1,3,8:", "1x3x224x224")),
    "input-of-size-zero": Bad("export model.pt --factory cli_net:Net --input 0x3x8x8", 2, ("--input 0x3x8x8",)),
    "input-dtype": Bad("export model.pt --factory cli_net:Net --input 1x3x8x8:real", 2, ("real is no dtype",)),
    "input-syntax-inspect": Bad("inspect chain.onnx --input 1,3", 2, ("--input 1,3:",)),
    "input-half-named": Bad("inspect model.pt --factory cli_net:Net -i 1 -i x=1", 2, ("all inputs or none",)),
    "input-name-unknown": Bad("export model.pt --factory cli_net:Net --input y=1x3x8x8", 2, ("'y'",)),
    "input-of-onnx": Bad("export chain.onnx -o out.onnx --input 1x4x8x8", 2, ("x: 1x4x8x8",)),
    "inputs-said-twice": Bad(f"export model.pt {NEEDS} --input-file x.npz", 2, ("--input and --input-file",)),
    "inputs-file-missing": Bad("fold chain.onnx --input-file none.npz", 6, ("none.npz: no such file",)),
    "inputs-file-of-another-kind": Bad("inspect chain.onnx --input-file model.pt", 6, ("model.pt: holds",)),
    "inputs-file-misnamed": Bad("verify chain.onnx other.onnx --input-file wrong.npz", 2, ("lacks x; it has z, y",)),
    "verify-input-name": Bad("verify chain.onnx other.onnx --input z=1x3x8x8", 2, ("no input is called z",)),
    "provider": Bad("verify chain.onnx chain.onnx --provider Abacus", 2, ("Abacus",)),
    "opset-of-onnx": Bad("export chain.onnx -o out.onnx --opset 20", 2, ("--opset", "an ONNX file already")),
    # which norms
    "only-nothing": Bad("fold chain.onnx --only bm1", 2, ("'bm1' matches no normalization", "bn1")),
    "skip-nothing": Bad("fold chain.onnx --skip 'norm*'", 2, ("'norm*' matches no normalization", "bn1")),
    "only-nothing-inspect": Bad("inspect chain.onnx --only bm1", 2, ("'bm1' matches no normalization",)),
    # the output
    "output-exists": Bad("fold chain.onnx -o taken.onnx", 2, ("taken.onnx exists", "--force")),
    "output-exists-in-place": Bad("fold chain.onnx -o taken.onnx --in-place", 2, ("taken.onnx exists",)),
    "output-is-input": Bad("fold chain.onnx -o chain.onnx", 2, ("chain.onnx is the input", "--in-place")),
    "output-is-input-forced": Bad("fold chain.onnx -o ./sub/../chain.onnx --force", 2, ("is the input",)),
    "output-folder-missing": Bad("fold chain.onnx -o none/out.onnx", 6, ("none does not exist",)),
    "output-below-a-file": Bad("fold chain.onnx -o text.pt/out.onnx", 6, ("text.pt is not a folder",)),
    "output-is-folder": Bad("fold chain.onnx -o sub --force", 6, ("sub is a folder",)),
    "output-name-too-long": Bad(f"fold chain.onnx -o {'n' * 300}.onnx", 6, ("cannot write", "too long")),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_refuses(name, folder):
    case, before = BAD[name], contents(folder)
    done = bnfold(case.line)
    assert done.code == case.code
    assert done.out == ""
    message = one_line(Done(done.code, done.out, done.err.split("read\n")[-1]))  # behind the warning of --trust-pickle
    for fragment in case.says:
        assert fragment in message
    assert contents(folder) == before


@pytest.mark.parametrize("name", BAD)
def test_refuses_in_json(name, folder):
    case = BAD[name]
    done = bnfold(f"{case.line.split()[0]} --json {case.line.partition(' ')[2]}")
    assert done.code == case.code
    assert list(done.json) == [*KEYS, "error"]
    assert done.json["error"]["exit_code"] == case.code
    assert done.err.splitlines()[-1] == f"bnfold: {done.json['error']['message']}"
    assert done.report == Report()


# --- the process


def test_help_is_light_and_the_same_program(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    module = program("-X", "importtime", "-m", "bnfold", "--help")
    here = bnfold("--help")
    assert (module.returncode, module.stdout) == (here.code, here.out) == (0, here.out)
    for word in ("export", "fold", "inspect", "verify", "explain", "Exit codes: 0 done; 1 internal error; 2"):
        assert word in here.out
    imported = {line.rpartition("|")[2].strip() for line in module.stderr.splitlines()}
    assert "typer" in imported
    assert not imported & {"torch", "onnx", "onnxruntime", "onnx_graphsurgeon", "numpy", "rich.console"}


def test_no_arguments_ask_for_some(monkeypatch):
    done = bnfold("")
    assert (done.code, done.err) == (2, "")
    assert done.out == bnfold("--help").out


def test_onnx_alone_needs_no_torch(folder):
    code = """
import sys
import textwrap
from bnfold.cli.main import run
for args in (["inspect", "chain.onnx"], ["fold", "chain.onnx"], ["verify", "chain.onnx", "chain.folded.onnx"]):
    try:
        run(args)
    except SystemExit as e:
        assert e.code == 0, e.code
assert "torch" not in sys.modules
"""
    done = program("-c", code)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_reader_that_stops_early_is_no_error():
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "wb") as nobody:
        done = subprocess.run([sys.executable, "-m", "bnfold", "explain"], stdout=nobody, stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (0, b"")


def test_debugging_shows_where(folder):
    code = """
from bnfold import exporter
from bnfold.cli.main import run
exporter.planned = lambda *_, **__: 1 / 0
run(["fold", "chain.onnx"])
"""
    done = program("-c", code, env={**os.environ, "BNFOLD_DEBUG": "1"})
    assert "ZeroDivisionError" in done.stderr
    assert "Traceback" in done.stderr


def test_folded_program(exported, tmp_path):
    """A .pt2 file comes back as one."""
    _, folder, _ = exported
    network = load(folder / "model.pt", factory=f"{folder}/cli_net.py:Net").eval()
    source, target = tmp_path / "net.pt2", tmp_path / "net.folded.pt2"
    torch.export.save(torch.export.export(network, (torch.randn(2, 3, 8, 8),)), source)
    done = bnfold(f"fold {source} --json")
    assert (done.code, [f.norm for f in done.report.folded]) == (0, ["bn"])
    assert {p.name for p in tmp_path.iterdir()} == {source.name, target.name}
    assert not [n for n in load(target).graph.nodes if "batch_norm" in str(n.target)]


def test_version_is_the_packages():
    from importlib.metadata import version

    assert bnfold("--version").out.strip() == f"bnfold {version('bnfold')}"


def test_a_terminated_process_leaves_no_part_behind(tmp_path):
    code = f"""
        import os, signal
        from pathlib import Path
        from bnfold.cli import main
        from bnfold.files import staged

        def work(**_):
            with staged(Path({str(tmp_path / "model.onnx")!r})) as part:
                part.write_bytes(b"half")
                os.kill(os.getpid(), signal.SIGTERM)

        main.app = work
        main.run(["export"])
    """
    done = program("-c", textwrap.dedent(code))
    assert done.returncode == 143
    assert not list(tmp_path.iterdir())
