"""Example inputs: as a person writes them, as a file or a network says them, and sizes that stay free."""

import onnx
import onnxruntime
import pytest
import torch
from torch import nn

import bnfold
from bnfold.errors import UsageError
from bnfold.inputs import InputSpec, infer_inputs, inputs_for, parse_inputs


class Conv(nn.Module):
    """Runs on images of any size."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)

    def forward(self, image):
        return self.norm(self.conv(image)).relu()


class Two(Conv):
    def forward(self, image, mask):
        return super().forward(image) * mask


class Square(Conv):
    def forward(self, image):
        if image.shape[2] != image.shape[3]:
            raise ValueError("square images only")
        return super().forward(image)


class Wide(Conv):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(64, 5)

    def forward(self, image):
        return self.head(super().forward(image))


def onnx_shapes(path):
    model = onnx.load(path)
    return [
        [d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim]
        for v in (*model.graph.input, *model.graph.output)
    ]


SPECS = {
    "1x3x224x224": InputSpec((1, 3, 224, 224)),
    "image=1x3xHxW": InputSpec((1, 3, "H", "W"), "image"),
    "NxLENGTHx8:float16": InputSpec(("N", "LENGTH", 8), None, "float16"),
    "ids=1x16:int64": InputSpec((1, 16), "ids", "int64"),
    "scalar:int64": InputSpec((), None, "int64"),
}


@pytest.mark.parametrize("text", SPECS)
def test_spelling(text):
    assert parse_inputs([text]) == (SPECS[text],)


@pytest.mark.parametrize("text", ["1,3", "1x", "x3", "hxw", "1x0x3", "1x-3", "a b=1x3", "=1x3", "1x3:", ""])
def test_what_is_no_input(text):
    with pytest.raises(UsageError, match="expected sizes such as"):
        parse_inputs([text])


FREE = {  # module, inputs, and the shapes in the file
    "height-and-width": (Conv, ["1x3xHxW"], [["batch", 3, "H", "W"], ["batch", 4, "H", "W"]]),
    "all-but-the-channels": (Conv, ["Bx3xHxW"], [["B", 3, "H", "W"], ["B", 4, "H", "W"]]),
    "one": (Conv, ["1x3xHx40"], [["batch", 3, "H", 40], ["batch", 4, "H", 40]]),
    "by-name": (
        Two, ["mask=2x1xHxW", "image=2x3xHxW"],
        [["batch", 3, "H", "W"], ["batch", 1, "H", "W"], ["batch", 4, "H", "W"]],
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", FREE)
def test_letters_stay_free(kind, tmp_path):
    make, texts, shapes = FREE[kind]
    done = bnfold.export(make().eval(), tmp_path / "out.onnx", example_inputs=parse_inputs(texts))
    assert done.verdict.passed
    assert onnx_shapes(done.path) == shapes
    session = onnxruntime.InferenceSession(done.path)
    sizes = {i.name: [n if isinstance(n, int) else 48 for n in i.shape] for i in session.get_inputs()}
    assert session.run(None, {n: torch.randn(s).numpy() for n, s in sizes.items()})[0].shape[:2] == (48, 4)


def test_a_letter_in_a_script(tmp_path):
    torch.jit.script(Conv().eval()).save(tmp_path / "net.pt")
    done = bnfold.export(tmp_path / "net.pt", tmp_path / "out.onnx", example_inputs=parse_inputs(["Nx3xHxW"]))
    assert onnx_shapes(done.path)[0] == ["N", 3, "H", "W"]
    assert "free sizes were tried with 2x3x224x256" in done.report.notes


def test_sizes_that_must_agree_are_tried_equal():
    given = inputs_for(Square().eval(), parse_inputs(["1x3xHxW"]))
    assert given.inputs[0].shape == (1, 3, 224, 224)


def test_a_size_that_cannot_stay_free_is_said(tmp_path):
    done = bnfold.export(Wide().eval(), tmp_path / "out.onnx", example_inputs=parse_inputs(["1x3xHxW"]))
    assert onnx_shapes(done.path)[0][2:] == ["H", 64]
    assert [n for n in done.report.notes if "could not keep it free" in n] == [
        "W of input image is 64: the exporter could not keep it free"
    ]


def test_static_pins_letters_too(tmp_path):
    done = bnfold.export(Conv().eval(), tmp_path / "out.onnx", example_inputs=parse_inputs(["1x3xHxW"]), static=True)
    assert onnx_shapes(done.path)[0] == [1, 3, 224, 256]


def test_letters_for_what_cannot_be_guessed():
    with pytest.raises(UsageError, match=r"ran on none of the inputs tried \(2x224x256x288,"):
        inputs_for(Conv().eval(), parse_inputs(["NxCxHxW"]))


LAYERS = {  # the first layer, and the shape that is tried first
    "image": (nn.Conv2d(3, 4, 3), "2x3x224x224"),
    "grouped": (nn.Conv2d(6, 4, 3, groups=2), "2x6x224x224"),
    "transposed": (nn.ConvTranspose2d(3, 4, 3), "2x3x224x224"),
    "signal": (nn.Conv1d(2, 4, 3), "2x2x1024"),
    "volume": (nn.Conv3d(1, 4, 3), "2x1x16x16x16"),
    "vector": (nn.Linear(7, 4), "2x7"),
    "tokens": (nn.Embedding(9, 4), "2x16"),
}


@pytest.mark.parametrize("scripted", [False, True], ids=["module", "script"])
@pytest.mark.parametrize("kind", LAYERS)
def test_the_first_layer_tells(kind, scripted):
    layer, shape = LAYERS[kind]
    if scripted and kind == "grouped":
        pytest.skip("a scripted layer does not keep its number of groups")
    network = nn.Sequential(nn.Identity(), layer)
    given = infer_inputs(torch.jit.script(network) if scripted else network)
    assert given.notes == (f"input {shape} was inferred; pass --input for another",)
