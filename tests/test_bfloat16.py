"""bfloat16 where onnxruntime's CPU has no kernels for it: a model in float32 of the same weights is the oracle."""

import re

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import numpy_helper, parser
from torch import nn

from bnfold import export
from bnfold.errors import UsageError
from bnfold.evaluators import OnnxEvaluator
from bnfold.verification import verify
from bnfold.widening import TYPES

BF16 = np.dtype(ml_dtypes.bfloat16)
SPEECH = "lacks kernels for bfloat16: the candidate computed in float32"

# Graphs in onnx's text form. T is the type, TYPE its number; a literal stands in brackets, for bfloat16 takes its bits.
ROWS = {
    "conv": "g (T[N,2,4,4] x) => (T y) { y = Conv(x, w, b) }",
    "initializer-as-output": "g (T[N,2,4,4] x) => (T y, T[3] b) { y = Conv(x, w, b) }",
    "overridable": "g (T[N,2,4,4] x, T[3,2,3,3] w, T[3] b) => (T y) { y = Conv(x, w, b) }",
    "cast": "g (float[N,2,4,4] x) => (float y) { c = Cast<to=TYPE>(x)  d = Conv(c, w, b)  y = Cast<to=1>(d) }",
    "constants": """g (T[N,2,4,4] x) => (T y) {
        k = Constant<value = T[1] {[2.0]}>()  s = Constant<value = int64[1] {3}>()
        o = ConstantOfShape<value = T[1] {[0.5]}>(s)  a = Conv(x, w, o)  y = Mul(a, k) }""",
    "branches": """g (T[N,2,4,4] x, bool c) => (T[N,3,2,2] y) {
        y = If (c) <then_branch = t () => (T[N,3,2,2] z) <T[3] v = {[1.0], [-2.0], [0.5]}> { z = Conv(x, w, v) },
                    else_branch = e () => (T[N,3,2,2] z) { z = Conv(x, w, b) }> }""",
    "scalar": "g (T[N,2,4,4] x, T s) => (T y) { a = Conv(x, w, b)  y = Mul(a, s) }",
    "window": """g (T[N,2,4,4] x, int64 n) => (T y) {
        a = Conv(x, w, b)  k = HannWindow<output_datatype=TYPE>(n)  y = Mul(a, k) }""",
    "quantized": """g (T[N,2,4,4] x) => (uint8 q) {
        a = Conv(x, w, b)  s = Constant<value = T {[0.5]}>()  q = QuantizeLinear(a, s) }""",
    "many-types": """g (T[N,2,4,4] x, int64[2] i) => (T y, int64[2] j, float[2] f) {
        y = Conv(x, w, b)  j = Neg(i)  f = Cast<to=1>(i) }""",
    "function": """g (T[N,2,4,4] x) => (T y) { a = own.Block<kind=TYPE>(x, w, b)  y = own.Block<kind=TYPE>(a, u, b) }
        <domain: "own", opset_import: ["": 22]>
        Block<kind>(x, w, b) => (y) { k = Cast<to: int = @kind>(x)  y = Conv<pads=[1,1,1,1]>(k, w, b) }""",
}


def literal(value, narrow):
    return str(np.array(float(value), BF16).view(np.uint16)) if narrow else value


def built(text, narrow):
    """The model, its weights rounded to bfloat16 and, unless `narrow`, written as float32."""
    text = re.sub(r"\bT\b", "bfloat16" if narrow else "float", text).replace("TYPE", "16" if narrow else "1")
    text = re.sub(r"\[(-?\d+\.\d+)\]", lambda m: literal(m[1], narrow), text)
    model = parser.parse_model(f'<ir_version: 10, opset_import: ["": 22, "own": 1]> {text}')
    rng = np.random.default_rng(0)
    for name, shape in {"w": (3, 2, 3, 3), "b": (3,), "u": (3, 3, 3, 3)}.items():
        value = rng.standard_normal(shape).astype(BF16)
        if re.search(rf"\b{name}\b", text):
            model.graph.initializer.append(numpy_helper.from_array(value if narrow else np.float32(value), name))
    return model


def feeds():
    rng = np.random.default_rng(1)
    x = rng.standard_normal((2, 2, 4, 4)).astype(BF16)
    return {
        "x": np.float32(x),
        "c": np.array(True),
        "i": np.array([3, -4]),
        "s": np.array(1.5, np.float32),
        "n": np.array(2),
    }


def in_float32(model, given):
    """What onnxruntime makes of the model without optimizations."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(None, {i.name: given[i.name] for i in session.get_inputs()})


def test_every_attribute_that_names_a_type_is_known():
    named = {
        a.name
        for schema in onnx.defs.get_all_schemas_with_history()
        for a in schema.attributes.values()
        if a.type == onnx.defs.OpSchema.AttrType.INT and re.search(r"TensorProto|(?i:data ?type)", a.description)
    }
    assert named - {"axis"} <= TYPES


@pytest.mark.parametrize("text", ROWS.values(), ids=ROWS)
def test_it_computes_what_the_same_weights_compute_in_float32(text):
    narrow, wide = built(text, True), built(text, False)
    before = narrow.SerializeToString()
    mine = OnnxEvaluator(narrow, "candidate")
    outputs = mine.run({i.name: feeds()[i.name] for i in mine.inputs})
    expected = in_float32(wide, feeds())
    assert SPEECH in mine.note
    assert [n for n, _ in outputs] == [o.name for o in narrow.graph.output]
    for (_, actual), declared, right in zip(outputs, narrow.graph.output, expected, strict=True):
        if declared.type.tensor_type.elem_type == onnx.TensorProto.BFLOAT16:
            assert actual.dtype == BF16
            right = right.astype(BF16)
        np.testing.assert_array_equal(actual, right)
    assert narrow.SerializeToString() == before


def test_inputs_are_rounded_as_their_type_says():
    narrow = OnnxEvaluator(built(ROWS["conv"], True), "candidate")
    x = np.random.default_rng(1).standard_normal((2, 2, 4, 4)).astype(np.float32)
    assert narrow.inputs[0].dtype == BF16
    np.testing.assert_array_equal(narrow.run((x,))[0][1], narrow.run((x.astype(BF16),))[0][1])


def test_an_inner_value_is_of_its_own_type():
    text = "g (T[N,2,4,4] x) => (T y) { a = Conv(x, w, b)  y = Sigmoid(a) }"
    watched = OnnxEvaluator(built(text, True), "candidate", watch=["a"]).run((feeds()["x"],))
    assert [(n, a.dtype) for n, a in watched] == [("y", BF16), ("a", BF16)]


def test_weights_in_another_file(tmp_path):
    model = built(ROWS["conv"], True)
    expected = OnnxEvaluator(model, "candidate").run((feeds()["x"],))[0][1]
    onnx.save(model, tmp_path / "m.onnx", save_as_external_data=True, location="m.data", size_threshold=0)
    for watch in ((), ("y",)):
        outputs = OnnxEvaluator(tmp_path / "m.onnx", "candidate", watch=watch).run((feeds()["x"],))
        np.testing.assert_array_equal(outputs[0][1], expected)


def test_a_model_whose_bfloat16_runs_is_run_as_it_is():
    text = "g (T[4] x) => (float[4] y) { y = Cast<to=1>(x) }"
    assert OnnxEvaluator(built(text, True), "candidate").note == ""


@pytest.mark.parametrize("text", ["d = Identity(x)", "c = Conv(f, w, b)  d = Cast<to=11>(f)"], ids=["alone", "beside"])
def test_another_missing_kernel_is_named(text):
    """onnxruntime's CPU has no convolution of float64."""
    text = f"g (double[N,2,4,4] x) => (double y) {{ f = Cast<to=TYPE>(x)  {text}  k = Cast<to=11>(w)  y = Conv(d, k) }}"
    with pytest.raises(UsageError, match=r"CPUExecutionProvider cannot run it: .*Conv.*choose another provider"):
        OnnxEvaluator(built(text, True), "candidate")


# --- from end to end ----------------------------------------------------------------------------------------------


NORM = """g (T[N,2,4,4] x) => (T y) { a = Conv(x, w, b)  y = BatchNormalization(a, g, b, m, v) }"""


def normed(gamma):
    model = built(NORM, True)
    values = {"g": gamma, "m": [0.5, -1.0, 2.0], "v": [0.25, 1.0, 4.0]}
    model.graph.initializer.extend(numpy_helper.from_array(np.array(a, BF16), n) for n, a in values.items())
    return model


def test_an_onnx_file_is_folded_and_verified(tmp_path):
    onnx.save(normed([1.5, -0.25, 0.0]), tmp_path / "m.onnx")
    done = export(tmp_path / "m.onnx", tmp_path / "out.onnx")
    nodes = [n.op_type for n in onnx.load(tmp_path / "out.onnx").graph.node]
    assert nodes == ["Conv"]
    assert done.verdict.passed
    assert any(SPEECH in n for n in done.verdict.notes)
    assert any("the reference computed" in n for n in done.verdict.notes)


def test_a_wrong_file_does_not_pass():
    verdict = verify(normed([1.5, -0.25, 1.0]), normed([1.5, 0.25, 1.0]))
    assert not verdict.passed


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.bn, self.fc = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, 5)
        nn.init.normal_(self.bn.running_mean)
        nn.init.uniform_(self.bn.running_var, 0.5, 2)
        nn.init.normal_(self.bn.weight)

    def forward(self, x):
        return self.fc(torch.relu(self.bn(self.conv(x))).mean((2, 3)))


def network():
    torch.manual_seed(0)
    return Net().bfloat16().eval()


@pytest.mark.parametrize("kind", ["module", "program", "traced", "scripted"])
def test_a_network_is_written_as_the_opset_that_has_bfloat16(tmp_path, kind):
    x = torch.randn(2, 3, 9, 9).bfloat16()
    made = {
        "module": lambda n: n,
        "program": lambda n: torch.export.export(n, (x,)),
        "traced": lambda n: torch.jit.trace(n, x),
        "scripted": torch.jit.script,
    }
    done = export(made[kind](network()), tmp_path / "m.onnx", example_inputs=None if kind == "program" else (x,))
    model = onnx.load(tmp_path / "m.onnx")
    onnx.checker.check_model(model, full_check=True)
    assert model.opset_import[0].version == 22
    assert "BatchNormalization" not in [n.op_type for n in model.graph.node]
    assert {t.data_type for t in model.graph.initializer} >= {onnx.TensorProto.BFLOAT16}
    assert "written as opset 22, the first in which ONNX convolves bfloat16" in done.report.notes
    assert done.verdict.passed
    assert any(SPEECH in n for n in done.verdict.notes)


class Inside(Net):
    """bfloat16 within, float32 without."""

    def forward(self, x):
        return self.bn(self.conv(x.bfloat16())).float()


class InsideOfFloat(Net):
    def forward(self, x):
        return self.bn(self.conv(x.bfloat16()).float())


class Autocast(Net):
    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            y = self.conv(x)
        return self.bn(y.float())


def made(kind):
    torch.manual_seed(0)
    network = kind().eval()
    if kind is Inside:
        return network.bfloat16()
    if kind is InsideOfFloat:
        network.conv.bfloat16()
    return network


@pytest.mark.parametrize("kind", [Inside, InsideOfFloat, Autocast])
def test_wider_outputs_of_bfloat16(kind, tmp_path):
    """Judged by the type they were computed in, and written as the opset that has it."""
    done = export(made(kind), tmp_path / "m.onnx", example_inputs=torch.randn(2, 3, 9, 9))
    assert onnx.load(done.path).opset_import[0].version == 22
    assert done.verdict.passed
    assert [o.limit for o in done.verdict.outputs] == [0.1]


def test_a_wider_output_of_an_onnx_file(tmp_path):
    model = normed([1.5, -0.25, 0.0])
    node = onnx.helper.make_node("Cast", ["n"], ["y"], to=1)
    model.graph.node[1].output[0] = "n"
    model.graph.node.append(node)
    model.graph.output[0].type.tensor_type.elem_type = 1
    onnx.save(model, tmp_path / "m.onnx")
    assert export(tmp_path / "m.onnx", tmp_path / "out.onnx").verdict.passed


def test_float32_alone_is_judged_as_float32():
    shifted = normed([1.5, -0.25, 0.0])
    wide = built(NORM, False)
    values = {"g": [1.5, -0.25, 0.0], "m": [0.5, -1.0, 2.0], "v": [0.25, 1.0, 4.0]}
    wide.graph.initializer.extend(numpy_helper.from_array(np.float32(a), n) for n, a in values.items())
    other = onnx.ModelProto()
    other.CopyFrom(wide)
    gamma = next(t for t in other.graph.initializer if t.name == "g")
    gamma.CopyFrom(numpy_helper.from_array(np.float32([1.5 * 1.003, -0.25, 0.0]), "g"))
    assert not verify(wide, other).passed
    assert verify(shifted, normed([1.5 * 1.003, -0.25, 0.0])).passed


def test_another_opset_when_asked_for(tmp_path):
    done = export(network(), tmp_path / "m.onnx", example_inputs=(torch.randn(2, 3, 9, 9).bfloat16(),), opset=23)
    assert onnx.load(tmp_path / "m.onnx").opset_import[0].version == 23
    assert not any("opset" in n for n in done.report.notes)
