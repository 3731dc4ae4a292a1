"""Files that attack: whatever runs on loading would leave a file named `marker`."""

import json
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import WEIGHTS, Net, exported, old, older, refusal, saved, zipped

from bnfold.checkpoint import load, load_detailed
from bnfold.errors import UsageError


@pytest.fixture
def program() -> dict[str, bytes]:
    """The members of a good exported program with a dynamic batch and height."""
    return exported()


class Touch:
    """Pickles as a call of `open(marker, "w")`."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self):
        return open, (str(self.marker), "w")


PICKLES: dict[str, Callable[[Touch], bytes]] = {
    "zip": saved,
    "zip-wrapped": lambda evil: saved({"state_dict": WEIGHTS, "epoch": evil}),
    "zip-protocol-4": lambda evil: saved(evil, pickle_protocol=4),
    "older": old,
    "plain": pickle.dumps,
    "plain-protocol-0": lambda evil: pickle.dumps(evil, protocol=0),
    "beside-a-program": lambda evil: zipped(
        {"m/models/model.json": "{}", "m/data.pkl": pickle.dumps(evil, 2), "m/version": "3"}
    ),
}


@pytest.mark.parametrize("name", PICKLES)
@pytest.mark.parametrize("factory", [None, Net])
def test_pickles_do_not_run(name, factory, tmp_path):
    marker, file = tmp_path / "marker", tmp_path / "net.pt"
    file.write_bytes(PICKLES[name](Touch(marker)))
    refusal(file, factory=factory)
    assert not marker.exists()


def test_trusted_pickles_run(tmp_path):
    marker, file = tmp_path / "marker", tmp_path / "net.pt"
    file.write_bytes(saved({"model": WEIGHTS, "epoch": Touch(marker)}))
    load(file, factory=Net, trust_pickle=True)
    assert marker.exists()


def edited(members: dict[str, bytes], change: Callable[[Any], None]) -> dict[str, bytes]:
    """The program with its JSON changed: `change` sees every mapping in it."""

    def visit(value: Any) -> None:
        for part in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
            visit(part)
        if isinstance(value, dict):
            change(value)

    name = next(n for n in members if n.endswith("models/model.json"))
    visit(document := json.loads(members[name]))
    return {**members, name: json.dumps(document).encode()}


def everywhere(members: dict[str, bytes], key: str, text: str) -> dict[str, bytes]:
    return edited(members, lambda d: d.update({key: text}) if key in d else None)


def placed(members: dict[str, bytes], name: str, data: bytes) -> dict[str, bytes]:
    top = next(iter(members)).partition("/")[0]
    return {**members, f"{top}/{name}": data}


def declared(members: dict[str, bytes], path_name: str) -> dict[str, bytes]:
    """The program with its first weight declared a pickle, stored at `path_name`."""
    name = next(n for n in members if n.endswith("model_weights_config.json"))
    document = json.loads(members[name])
    next(iter(document["config"].values())).update(path_name=path_name, use_pickle=True)
    return {**members, name: json.dumps(document).encode()}


def config(members: dict[str, bytes]) -> bytes:
    """What the program says of its first weight, which is raw."""
    document = json.loads(next(data for name, data in members.items() if name.endswith("weights_config.json")))
    return json.dumps({"config": dict([next(iter(document["config"].items()))])}).encode()


def other_top(members: dict[str, bytes], top: str) -> dict[str, bytes]:
    return {f"{top}/{name.partition('/')[2]}": data for name, data in members.items()}


SAMPLE = "data/sample_inputs/model.pt"
PROGRAMS: dict[str, Callable[[dict[str, bytes], Touch], dict[str, bytes]]] = {
    "sample-inputs": lambda m, e: placed(m, SAMPLE, saved((e,))),
    "sample-inputs-older": lambda m, e: placed(m, SAMPLE, old((e,))),
    "sample-inputs-plain": lambda m, e: placed(m, SAMPLE, pickle.dumps((e,))),
    "sample-inputs-protocol-0": lambda m, e: placed(m, SAMPLE, pickle.dumps((e,), 0)),
    "sample-inputs-called-extra": lambda m, e: other_top(placed(m, SAMPLE, saved((e,))), "extra"),
    "sample-inputs-called-raw": lambda m, e: placed(
        placed(m, SAMPLE, saved((e,))),
        "data/sample_inputs/x.json",
        json.dumps({"config": {"x": {"path_name": "model.pt", "use_pickle": False}}}).encode(),
    ),
    "weights-of-old": lambda m, e: placed(m, "data/weights/model.pt", saved({"x": e})),
    "constants-of-old": lambda m, e: placed(m, "data/constants/model.pt", saved({"x": e})),
    "weight-pickled": lambda m, e: declared(placed(m, "data/weights/weight_0", saved(e)), "weight_0"),
    "weight-in-other-case": lambda m, e: declared(placed(m, "data/weights/weight_0", saved(e)), "WEIGHT_0"),
    "weight-elsewhere": lambda m, e: declared(placed(m, "data/weights/x", saved(e)), "x"),
    "opaque-constant-called-raw": lambda m, e: placed(
        placed(m, "data/constants/opaque_obj_0", pickle.dumps(e, 0).ljust(4000)),
        "data/constants/model_constants_config.json",
        config(m).replace(b"weight_0", b"opaque_obj_0"),
    ),
    "native-code": lambda m, _: placed(m, "data/aotinductor/model/a.so", b"\x7fELF"),
    "shape": lambda m, e: everywhere(m, "expr_str", f"open({str(e.marker)!r}, 'w')"),
    "shape-hidden": lambda m, e: everywhere(m, "expr_str", f"Max(1, open({str(e.marker)!r}, 'w'))"),
    "shape-in-symbol": lambda m, e: everywhere(m, "expr_str", f'Integer("open({str(e.marker)!r})")'),
    "shape-method": lambda m, _: everywhere(m, "expr_str", "Symbol('s0').__class__"),
    "target": lambda m, _: everywhere(m, "target", "torch.os.system"),
    "target-writing": lambda m, _: everywhere(m, "target", "torch.ops.aten.save"),
    "target-calling": lambda m, _: everywhere(m, "target", "_operator.methodcaller"),
    "name": lambda m, e: everywhere(m, "name", f"x=open({str(e.marker)!r},'w')"),
    "enumeration": lambda m, _: everywhere(
        m, "in_spec", json.dumps([1, {"context": json.dumps({"__enum__": True, "fqn": "antigravity:a", "name": "b"})}])
    ),
    "factory-of-defaults": lambda m, _: everywhere(
        m, "in_spec", json.dumps([1, {"context": {"default_factory_module": "os", "default_factory_name": "abort"}}])
    ),
    "older-layout": lambda m, e: older(m, state_dict={"x": e}),
    "older-layout-inputs": lambda m, e: older(m, example_inputs=((e,), {})),
    "older-layout-json": lambda m, e: {
        **{n: d for n, d in older(m).items() if n != "serialized_constants.pt"},
        "serialized_constants.json": saved({"x": e}),
    },
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_do_not_run(name, program, tmp_path):
    marker, file = tmp_path / "marker", tmp_path / "net.pt2"
    file.write_bytes(zipped(PROGRAMS[name](program, Touch(marker))))
    assert "could run code" in refusal(file)
    assert not marker.exists()


def test_guards_do_not_run(program, tmp_path):
    marker, file = tmp_path / "marker", tmp_path / "net.pt2"
    guard = f"open({str(marker)!r}, 'w')"
    file.write_bytes(zipped(edited(program, lambda d: "guards_code" in d and d.update(guards_code=[guard]))))
    load(file).module()(torch.randn(2, 3, 8, 8))
    assert not marker.exists()


def test_trusted_programs_run(program, tmp_path):
    marker, file = tmp_path / "marker", tmp_path / "net.pt2"
    file.write_bytes(zipped(PROGRAMS["sample-inputs"](program, Touch(marker))))
    load(file, trust_pickle=True)
    assert marker.exists()


def test_program_with_a_member_twice(program, tmp_path):
    marker, file = tmp_path / "marker", tmp_path / "net.pt2"
    file.write_bytes(zipped(program))
    name = next(n for n in program if n.endswith(SAMPLE))
    with zipfile.ZipFile(file, "a") as archive, pytest.warns(UserWarning, match="Duplicate"):
        archive.writestr(name, saved((Touch(marker),)))
    assert "twice" in refusal(file)
    assert not marker.exists()


def test_program_behind_another(program, tmp_path):
    """Readers that trust the offsets of the last directory and readers that correct them see different archives."""
    marker, file = tmp_path / "marker", tmp_path / "net.pt2"
    file.write_bytes(zipped(PROGRAMS["sample-inputs"](program, Touch(marker))) + zipped(program))
    assert load_detailed(file).kind == "exported-program"
    assert not marker.exists()


def test_program_damaged(program, tmp_path):
    file = tmp_path / "net.pt2"
    data = bytearray(zipped(program))
    at = data.index(b'{"graph_module"')
    data[at : at + 9] = b"{ garbage"
    file.write_bytes(data)
    assert "damaged" in refusal(file)
    file.write_bytes(zipped(edited(program, lambda d: d.pop("graph_module", None))))
    assert "cannot read this program" in refusal(file)
    file.write_bytes(zipped(edited(program, lambda d: "major" in d and d.update(major=99))))
    assert "schema version" in refusal(file)
    file.write_bytes(zipped(program))
    assert "leave out --factory" in refusal(file, UsageError, factory=Net)
