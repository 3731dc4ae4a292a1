"""Model files whose weights are not parsed: what is written from parts is what the whole model would have been."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper
from onnx_models import model, rng_of

import bnfold
from bnfold.exporter import export
from bnfold.onnx_files import open_onnx
from bnfold.onnx_output import write_model
from bnfold.onnx_wire import read_skeleton

NODES = "(float[N,8,6,5] x) => (float[N,16,4,3] y, float[N,16,4,3] z) {{ [c] c = Conv(x, w, b) [n] y = BN(c, n) {0} }}"


def built(rest: str = "z = Conv(x, v)", **given) -> ModelProto:
    """A model with weights above a kilobyte, and fields behind the initializers of every message."""
    m = model(NODES.format(rest), w=(16, 8, 3, 3), v=(16, 8, 3, 3), b=(16,), n=16, **given)
    m.doc_string, m.producer_name, m.graph.doc_string = "all of it", "someone", "a graph"
    m.metadata_props.add(key="k", value="v")
    for t in m.graph.initializer[:2]:
        t.doc_string = "a weight"
        t.metadata_props.add(key="about", value="it")
    return m


def typed() -> ModelProto:
    """A weight in the field of its type, and one of a type that is not made of whole bytes."""
    m = built()
    w = next(t for t in m.graph.initializer if t.name == "v")
    values = numpy_helper.to_array(w).ravel().tolist()
    w.ClearField("raw_data")
    w.float_data.extend(values)
    m.graph.initializer.append(helper.make_tensor("four_bits", TensorProto.INT4, [4096], [1] * 4096))
    return m


def unknown() -> bytes:
    """Fields that this version of onnx does not know, in the model, the graph, a node and a tensor."""
    m = built()
    extra = b"\xfa\x3e\x03new"  # field 1007, three bytes
    m.graph.node[0].MergeFromString(extra)
    m.MergeFromString(b"\x12\x03Zo\xeb")  # the producer's name, in Latin-1
    graph = m.graph.SerializeToString()
    m.ClearField("graph")
    tensors = b"".join(
        b"\x2a" + varint(len(t) + len(extra)) + t + extra
        for t in (numpy_helper.from_array(rng_of("u").normal(size=500), "spare").SerializeToString(),)
    )
    whole = graph + tensors + extra
    return m.SerializeToString() + b"\x3a" + varint(len(whole)) + whole + extra


def varint(n: int) -> bytes:
    found = bytearray()
    while n > 127:
        found.append(n & 127 | 128)
        n >>= 7
    return bytes([*found, n])


FILES = {
    "plain": lambda: built().SerializeToString(),
    "typed-fields": lambda: typed().SerializeToString(),
    "unknown-fields": unknown,
    "no-weights": lambda: model("(float[2] x) => (float[2] y) { y = Relu(x) }").SerializeToString(),
    "double": lambda: built(dtype=np.float32).SerializeToString(),
    "constant-nodes": lambda: built("k = Constant<value = float[2] {1, 2}>() z = Conv(x, v)").SerializeToString(),
}


@pytest.mark.parametrize("kind", FILES)
def test_written_from_parts(kind, tmp_path):
    path, again = tmp_path / "m.onnx", tmp_path / "again.onnx"
    path.write_bytes(FILES[kind]())
    want = onnx.load_model_from_string(path.read_bytes()).SerializeToString()
    file = open_onnx(path)
    assert bool(file.embedded) == (kind not in ("no-weights",))
    write_model(file.model, again, lambda: "unused", file)
    assert again.read_bytes() == want
    assert open_onnx(path).load().SerializeToString() == want


@pytest.mark.parametrize("kind", ["plain", "typed-fields", "constant-nodes"])
def test_a_file_folds_as_the_model_does(kind, tmp_path):
    path, out = tmp_path / "m.onnx", tmp_path / "out.onnx"
    path.write_bytes(FILES[kind]())
    result = bnfold.fold(onnx.load(path))
    report = export(path, out, verify=False).report
    assert [f.norm for f in report.folded] == [f.norm for f in result.report.folded] == ["n"]
    assert report.bytes_added == result.report.bytes_added
    assert out.read_bytes() == result.model.SerializeToString()


def test_large_weights_stay_in_the_file(tmp_path):
    path = tmp_path / "m.onnx"
    path.write_bytes(built().SerializeToString())
    file = open_onnx(path)
    assert [t.name for t in file.stored] == ["w", "v"]
    assert not any(t.HasField("raw_data") for t in file.stored)
    assert file.model.ByteSize() < 4096


def test_two_graphs_are_merged_as_protobuf_says(tmp_path):
    path = tmp_path / "m.onnx"
    m = built()
    path.write_bytes(m.SerializeToString() + ModelProto(graph=onnx.GraphProto(doc_string="later")).SerializeToString())
    assert read_skeleton(path, lambda t, n: True) is None
    assert open_onnx(path).load() == onnx.load_model_from_string(path.read_bytes())


def test_what_is_cut_short_is_said_as_before(tmp_path):
    """Wherever a file ends, it is a model or it is refused in one line."""
    path, data = tmp_path / "m.onnx", built().SerializeToString()
    for end in sorted({*range(0, 400, 7), *range(400, len(data), 997), len(data) - 1}):
        path.write_bytes(data[:end])
        refused = None
        try:
            found = open_onnx(path).load()
        except bnfold.BnfoldError as e:
            refused = str(e)
        if refused is None:
            assert found == onnx.load_model_from_string(data[:end])
        else:
            assert str(path) in refused
            assert "\n" not in refused


def test_a_length_that_the_shape_does_not_ask_for_is_parsed_whole(tmp_path):
    m = built()
    m.graph.initializer[0].dims[0] += 1
    path: Path = tmp_path / "m.onnx"
    path.write_bytes(m.SerializeToString())
    assert "w" not in [t.name for t in open_onnx(path).stored]
