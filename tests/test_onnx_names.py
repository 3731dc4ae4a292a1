"""What inputs, outputs and the batch of an exported file are called, and that no name is given twice."""

from collections import OrderedDict, namedtuple

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn

from bnfold import export
from bnfold.errors import UsageError
from bnfold.onnx_names import name_values

Pair = namedtuple("Pair", "boxes scores")


class Net(nn.Module):
    """Returns what `shape` makes of a picture and its means."""

    def __init__(self, shape):
        super().__init__()
        self.conv, self.bn, self.shape = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), shape

    def forward(self, x):
        y = self.bn(self.conv(x))
        return self.shape(x, y, y.mean((2, 3)))


RETURNS = {
    "alone": (lambda _x, y, _z: y, ["output"]),
    "tuple": (lambda _x, y, z: (y, z), ["output_0", "output_1"]),
    "list": (lambda _x, y, z: [y, z], ["output_0", "output_1"]),
    "dict": (lambda _x, y, z: {"logits": z, "features": y}, ["logits", "features"]),
    "nested": (lambda _x, y, z: {"a": [y, z], "b": {"c": 2 * z}}, ["a.0", "a.1", "b.c"]),
    "named-tuple": (lambda _x, y, z: Pair(y, z), ["boxes", "scores"]),
    "tuple-of-dicts": (lambda _x, y, z: ({"y": y}, {"z": z}), ["output_0.y", "output_1.z"]),
    "with-nothing": (lambda _x, y, z: {"y": y, "aux": None, "z": z}, ["y", "z"]),
    "names-of-inner-values": (
        lambda _x, y, z: {"mean": y.relu(), "conv2d": z, "relu": z + 1}, ["mean", "conv2d", "relu"]
    ),
    "names-of-the-input": (lambda _x, y, z: {"x": y, "z": z}, ["x_output", "z"]),
    "names-of-weights": (lambda _x, y, z: {"conv.weight": y, "z": z}, ["conv.weight_output", "z"]),
    "one-value-twice": (lambda _x, y, z: {"a": y, "b": y, "c": z}, ["a", "b", "c"]),
    "the-input-too": (lambda x, y, _z: {"a": x, "b": y}, ["a", "b"]),
    "a-weight-too": (lambda _x, y, _z: {"y": y}, ["y"]),
    "the-name-that-another-would-get": (lambda _x, y, z: {"x_output": y, "x": z}, ["x_output", "x_output_2"]),
    "the-name-that-another-would-get-later": (lambda _x, y, z: {"x": z, "x_output": y}, ["x_output_2", "x_output"]),
    "alike-when-joined": (lambda _x, y, z: {"a.b": y, "a": {"b": z}}, ["a.b", "a.b_output"]),
    "no-name": (lambda _x, y, z: {"": y, "z": z}, ["output_0", "z"]),
    "no-text": (lambda _x, y, z: {"\ud800": y, "z": z}, ["output_0", "z"]),
    "odd-text": (lambda _x, y, z: {"a b/c": y, "ü": z}, ["a b/c", "ü"]),
    "numbers": (lambda _x, y, z: {1: y, 2: z}, ["output_1", "output_2"]),
}  # fmt: skip


def checked(path, network, x):
    """The names of the outputs of a valid file that computes what the network does."""
    model = onnx.load(path)
    onnx.checker.check_model(model, full_check=True)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    found = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    with torch.no_grad():
        right = [t for t in torch.utils._pytree.tree_leaves(network(x)) if t is not None]
    for f, r in zip(found, right, strict=True):
        np.testing.assert_allclose(f, r.numpy(), atol=1e-5)
    return [o.name for o in model.graph.output]


@pytest.mark.parametrize("kind", ["module", "program"])
@pytest.mark.parametrize("name", RETURNS)
def test_outputs_are_called_what_the_network_calls_them(name, kind, tmp_path):
    shape, expected = RETURNS[name]
    network, x = Net(shape).eval(), torch.randn(2, 3, 8, 8)
    source = network if kind == "module" else torch.export.export(network, (x,))
    done = export(source, tmp_path / "m.onnx", example_inputs=x if kind == "module" else None)
    assert done.verdict.passed
    assert checked(done.path, network, x) == expected


class Unused(Net):
    """Its second input is read by nothing."""

    def forward(self, x, y):
        return self.bn(self.conv(x)) + 0 * y.sum()


class Two(Net):
    def forward(self, x):
        y = self.bn(self.conv(x))
        return y, y.mean((2, 3))


class One(Net):
    def forward(self, x):
        return self.bn(self.conv(x))


@pytest.mark.parametrize(("network", "expected"), [(One(None), ["output"]), (Two(None), ["output_0", "output_1"])])
def test_outputs_of_a_script(network, expected, tmp_path):
    network, x = network.eval(), torch.randn(2, 3, 8, 8)
    done = export(torch.jit.trace(network, x), tmp_path / "m.onnx", example_inputs=x)
    assert checked(done.path, network, x) == expected


class Loose(OrderedDict):
    """What a library returns that told torch how to take it apart, and not what the parts are called."""


torch.utils._pytree.register_pytree_node(
    Loose,
    lambda o: (list(o.values()), list(o.keys())),
    lambda values, keys: Loose(zip(keys, values, strict=True)),
    serialized_type_name="tests.Loose",
)


def test_parts_without_names(tmp_path):
    network, x = Net(lambda _x, y, z: Loose(y=y, z=z)).eval(), torch.randn(2, 3, 8, 8)
    done = export(network, tmp_path / "m.onnx", example_inputs=x)
    assert checked(done.path, network, x) == ["conv2d", "mean"]


@pytest.mark.parametrize(
    ("inputs", "outputs", "says"),
    [
        (["a", "a"], [], "--input-name a: something else is called so"),
        ([], ["conv.weight"], "--output-name conv.weight: something else"),
        ([], ["y"], "--output-name y: something else"),
        (["y"], [], "--input-name y: something else"),
        ([""], [], "--input-name '': no name that ONNX can hold"),
        ([], ["\udcff"], "no name that ONNX can hold"),
        (["a", "b", "c"], [], "--input-name: 3 given, but the model's inputs number 2"),
    ],
)
@pytest.mark.parametrize("kind", ["module", "script"])
def test_names_that_cannot_be_given(inputs, outputs, says, kind, tmp_path):
    network, given = Unused(None).eval(), (torch.randn(2, 3, 8, 8), torch.randn(2, 3))
    source = network if kind == "module" else torch.jit.trace(network, given)
    if kind == "script" and outputs == ["conv.weight"]:
        pytest.skip("the older exporter may fold it")
    with pytest.raises(UsageError) as caught:
        export(source, tmp_path / "m.onnx", example_inputs=given, input_names=inputs, output_names=outputs)
    assert says in str(caught.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("asked", [("image", "logits"), ("conv2d", "mean"), ("output", "x")])
def test_names_that_are_asked_for(asked, tmp_path):
    network, x = Net(RETURNS["alone"][0]).eval(), torch.randn(2, 3, 8, 8)
    done = export(network, tmp_path / "m.onnx", example_inputs=x, input_names=asked[:1], output_names=asked[1:])
    assert checked(done.path, network, x) == [asked[1]]
    assert onnx.load(done.path).graph.input[0].name == asked[0]


def test_names_inside_a_branch():
    """A branch reads what is outside it by name."""
    text = """<ir_version: 8, opset_import: ["": 17]> g (bool c, float[2] x) => (float[2] y, float[2] z) {
        a = Neg(x)  y = If (c) <then_branch = t () => (float[2] p) { p = Abs(a) },
                                else_branch = e () => (float[2] q) { q = Neg(a) }>  z = Abs(x) }"""
    model = onnx.parser.parse_model(text)
    name_values(model, ["ask", "a"], ["p", "q"])
    onnx.checker.check_model(model, full_check=True)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    p, q = session.run(["p", "q"], {"ask": np.array(True), "a": np.float32([-1, 2])})
    np.testing.assert_array_equal(p, [1, 2])
    np.testing.assert_array_equal(q, [1, 2])


class Fixed(Net):
    def forward(self, x):
        return self.bn(self.conv(x)).reshape(2, -1)


@pytest.mark.parametrize("static", [False, True])
def test_a_batch_that_cannot_be_free_is_said(static, tmp_path):
    done = export(Fixed(None).eval(), tmp_path / "m.onnx", example_inputs=torch.randn(2, 3, 8, 8), static=static)
    said = [n for n in done.report.notes if "the batch is fixed at 2" in n]
    assert len(said) == (not static)
    assert onnx.load(done.path).graph.input[0].type.tensor_type.shape.dim[0].dim_value == 2


def test_a_free_batch_is_not_said(tmp_path):
    done = export(One(None).eval(), tmp_path / "m.onnx", example_inputs=torch.randn(2, 3, 8, 8))
    assert not any("batch" in n for n in done.report.notes)
