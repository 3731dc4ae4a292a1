"""Example inputs: as a person writes them, as a file or a network says them, and sizes that stay free."""

import io
import re

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn

import bnfold
from bnfold import verification
from bnfold.errors import InvalidFileError, UsageError
from bnfold.inputs import InputSpec, infer_inputs, inputs_for, parse_inputs, read_arrays


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
    "ids=1x16:int64:0..999": InputSpec((1, 16), "ids", "int64", (0, 999)),
    "1x3x8x8:0..1": InputSpec((1, 3, 8, 8), None, "float32", (0, 1)),
    "8:int8:-128..-1": InputSpec((8,), None, "int8", (-128, -1)),
    "8:float64:-1e3...5": InputSpec((8,), None, "float64", (-1000, 0.5)),
}


@pytest.mark.parametrize("text", SPECS)
def test_spelling(text):
    assert parse_inputs([text]) == (SPECS[text],)


NO_INPUTS = ["1,3", "1x", "x3", "hxw", "1x0x3", "1x-3", "a b=1x3", "=1x3", "1x3:", "", "8:int64:5", "8:int64:0.."]


@pytest.mark.parametrize("text", NO_INPUTS)
def test_what_is_no_input(text):
    with pytest.raises(UsageError, match="expected sizes such as"):
        parse_inputs([text])


IMPOSSIBLE = {
    "8:int64:9..0": "9 is above 0; the smaller one comes first",
    "8:uint8:0..256": "uint8 holds whole numbers from 0 to 255",
    "8:int8:-129..0": "int8 holds whole numbers from -128 to 127",
    "8:int64:0.5..2": "int64 holds whole numbers",
}


@pytest.mark.parametrize("text", IMPOSSIBLE)
def test_values_that_an_input_cannot_have(text):
    with pytest.raises(UsageError, match=re.escape(f"--input {text}: {IMPOSSIBLE[text]}")):
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


# ---------------------------------------------------------------------- values, and arrays from a file


class Words(nn.Module):
    """Takes whole numbers from 100 to 199, scaled pictures, and a keyword that may be left out."""

    def __init__(self):
        super().__init__()
        self.table, self.conv, self.norm = nn.Embedding(200, 4), nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        for _ in range(3):
            self.norm.train()(torch.randn(4, 4, 5, 5) * 2 + 1)

    def forward(self, ids, image, *, scale=None):
        shift = self.table(ids - 100).mean(1)
        out = self.norm(self.conv(image)) + shift[:, :, None, None]
        return out if scale is None else out * scale


RANGES = ["ids=2x6:int64:100..299", "image=2x3x8x8:0..1"]


def test_values_are_as_asked():
    ids, image = inputs_for(Words().eval(), parse_inputs(RANGES)).inputs.values()
    assert ids.min() >= 100
    assert ids.max() > 250  # of 12, so that one of them is in the upper quarter
    assert 0 <= image.min() < 0.1 < 0.9 < image.max() <= 1


def test_made_inputs_of_a_verification_keep_to_the_values(tmp_path, monkeypatch):
    seen = recorded_runs(monkeypatch)
    given = parse_inputs(["ids=2x6:int64:100..299", "image=2x3x8x8:0..1"])
    net = Words().eval()
    net.table = nn.Embedding(200, 4)
    assert bnfold.export(net, tmp_path / "out.onnx", example_inputs=given).verdict.passed
    ids, images = ([np.asarray(b[k]) for b in seen] for k in (0, 1))
    assert len(seen) == 3
    assert {len(i) for i in ids} == {1, 2}
    assert all(i.min() >= 100 and i.max() < 300 for i in ids)
    assert max(i.max() for i in ids) > 200
    assert all(i.min() >= 0 and i.max() <= 1 for i in images)


def recorded_runs(monkeypatch):
    """The batches that a verification compares, as they come."""
    seen = []

    def compare(runs):
        for batch, outputs in runs:
            seen.append(batch)
            yield batch, outputs

    for name in ("given_runs", "_made_runs"):
        original = getattr(verification, name)
        monkeypatch.setattr(verification, name, lambda *a, f=original: compare(f(*a)))
    return seen


IDS = np.random.default_rng(0).integers(100, 300, (3, 6))
IMAGE = np.random.default_rng(1).normal(size=(3, 3, 8, 8))
FILES = {  # what is saved, and whether it is taken by position
    "by-name": ({"image": IMAGE, "ids": IDS}, True),
    "in-order": ((IDS, IMAGE), True),
    "keyword": ({"scale": np.float32([2]), "image": IMAGE, "ids": IDS}, False),
}


def saved(path, arrays):
    np.savez(path, **arrays) if isinstance(arrays, dict) else np.savez(path, *arrays)
    return path


@pytest.mark.parametrize("kind", FILES)
def test_real_inputs(kind, tmp_path, monkeypatch):
    arrays, by_position = FILES[kind]
    seen = recorded_runs(monkeypatch)
    given = read_arrays(saved(tmp_path / "x.npz", arrays))
    done = bnfold.export(Words().eval(), tmp_path / "out.onnx", example_inputs=given)
    assert done.verdict.passed
    assert done.report.kept == ()
    assert "inputs are those in x.npz" in done.report.notes
    first, *made = seen
    assert isinstance(first, tuple) == by_position
    ids = first[0] if by_position else first["ids"]
    assert np.array_equal(ids, IDS)
    assert len(made) == 3
    assert not any("given inputs only" in n for n in done.verdict.notes)


def test_an_array_alone_may_have_any_name(tmp_path):
    for name, save in {"x.npy": lambda p: np.save(p, IMAGE), "x.npz": lambda p: np.savez(p, pictures=IMAGE)}.items():
        save(tmp_path / name)
        (inputs,) = inputs_for(Conv().eval(), read_arrays(tmp_path / name)).inputs
        assert inputs.dtype == torch.float32  # numpy's own type is float64
        assert inputs.shape == (3, 3, 8, 8)


def test_real_inputs_for_every_kind_of_model(tmp_path, monkeypatch):
    file, net = saved(tmp_path / "x.npz", {"image": IMAGE}), Conv().eval()
    bnfold.export(net, tmp_path / "net.onnx", example_inputs=(torch.randn(2, 3, 8, 8),), verify=False)
    torch.jit.script(net).save(tmp_path / "script.pt")
    program = torch.export.export(net, (torch.randn(2, 3, 8, 8),), dynamic_shapes=({0: torch.export.Dim("n")},))
    torch.export.save(program, tmp_path / "net.pt2")
    for name in ("net.onnx", "script.pt", "net.pt2"):
        seen = recorded_runs(monkeypatch)
        done = bnfold.export(tmp_path / name, tmp_path / "out.onnx", example_inputs=read_arrays(file), force=True)
        assert done.verdict is not None, name
        assert done.verdict.passed, name
        if done.report.folded:
            values = seen[0]["image"] if isinstance(seen[0], dict) else seen[0][0]
            assert np.array_equal(np.asarray(values, np.float32), IMAGE.astype(np.float32)), name


def test_where_made_inputs_do_not_run_the_given_ones_do(tmp_path):
    """Half of what is made is negative, and the first row of a table is 0."""

    class Steps(Conv):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(6, 4)

        def forward(self, image, angle):
            return super().forward(image) + self.table((angle * 10).long())[..., None, None]

    file = saved(tmp_path / "x.npz", {"image": IMAGE, "angle": np.full(3, 0.5)})
    done = bnfold.export(Steps().eval(), tmp_path / "out.onnx", example_inputs=read_arrays(file))
    assert done.verdict.passed
    assert any(n.startswith("compared on the given inputs only: ") for n in done.verdict.notes)


def pickled(path):
    np.save(path, np.array([{"a": 1}], dtype=object), allow_pickle=True)


def no_numbers(path):
    np.savez(path, image=np.array(["a", "b"]))


NO_ARRAYS = {
    "missing": (lambda path: None, InvalidFileError, "no such file"),
    "text": (lambda path: path.write_text("1 2 3"), InvalidFileError, "neither .npz nor .npy"),
    "pickled": (pickled, InvalidFileError, "cannot be read as arrays (ValueError: Object arrays cannot be loaded"),
    "cut": (lambda path: path.write_bytes(npz_bytes()[:-40]), InvalidFileError, "cut short or damaged"),
    "empty": (lambda path: np.savez(path), InvalidFileError, "holds no arrays"),
    "a-model": (lambda path: torch.save({}, path), InvalidFileError, "holds x/data.pkl"),
    "other-names": (lambda path: np.savez(path, img=IMAGE, ids=IDS), UsageError, "img is no argument of Words.forward"),
    "texts": (no_numbers, UsageError, "image holds <U1, of which torch makes no tensor"),
    "another-size": (lambda path: np.savez(path, ids=IDS, image=IMAGE[:, :2]), UsageError, "does not run on inputs"),
}


def npz_bytes():
    file = io.BytesIO()
    np.savez(file, image=IMAGE)
    return file.getvalue()


@pytest.mark.parametrize("kind", NO_ARRAYS)
def test_files_that_are_no_inputs(kind, tmp_path):
    write, error, said = NO_ARRAYS[kind]
    path = tmp_path / "x.npz"
    write(path)
    path = path.with_suffix(".npz.npy") if kind == "pickled" else path
    with pytest.raises(error, match=re.escape(said)):
        bnfold.export(Words().eval(), tmp_path / "out.onnx", example_inputs=read_arrays(path))
    assert not (tmp_path / "out.onnx").exists()
