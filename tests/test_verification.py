"""verify: what passes, what fails, what is refused, and that nothing given to it changes."""

import copy
import dataclasses
import math
import subprocess
import sys
import textwrap

import ml_dtypes
import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper, parser
from torch import nn

from bnfold.errors import InvalidFileError, UsageError
from bnfold.report import Report, Verdict
from bnfold.verification import verify


def f32(*values):
    return np.array(values, np.float32)


def model(body, x="float[N,8] x", y="float[N,8] y", *, ir=8, opset=17, empty=0, **constants):
    """A graph in onnx's text form; `constants` become initializers, `empty` unnamed outputs of the last node."""
    built = parser.parse_model(f'<ir_version: {ir}, opset_import: ["": {opset}]> g ({x}) => ({y}) {{ {body} }}')
    built.graph.initializer.extend(numpy_helper.from_array(np.asarray(v), n) for n, v in constants.items())
    built.graph.node[-1].output.extend([""] * empty)
    return built


def scaled(array, channel, factor):
    array = array.copy()
    array[channel] *= factor
    return array


WEIGHT = np.random.default_rng(0).standard_normal((4, 3, 3, 3)).astype(np.float32)
BIAS = np.random.default_rng(1).standard_normal(4).astype(np.float32)
SHIFT = f32(0.3, -0.2, 0.5).reshape(1, 3, 1, 1)
IMAGE, MAPS = "float[N,3,H,W] x", "float[N,4,H,W] y"
TWO = "float[N,8] y, float[N,8] z"
SAME_CONV = "y = Conv<pads=[1,1,1,1]>(x, w, b)"
OLD_NORM = "r = Relu(x)  y = BatchNormalization(r, s, s, s, s)"


def conv(weight=WEIGHT, bias=BIAS, x=IMAGE):
    return model(SAME_CONV, x, MAPS, w=weight, b=bias)


def typed(name, factor, type_):
    return model("y = Mul(x, s)", f"{name}[N,4] x", f"{name}[N,4] y", s=np.array([factor], type_))


def judged(reference, candidate, passes, problem="", **options):
    """The verdict, which must be as expected and survive being written and read."""
    verdict = verify(reference, candidate, **options)
    assert verdict.passed is passes, verdict
    problems = [o.problem for o in verdict.outputs if o.problem]
    assert any(problem in p for p in problems) if problem else not problems, problems
    report = Report(verdict=verdict)
    assert Report.from_json(report.to_json()) == report
    return verdict


# --- ONNX against ONNX: reference, candidate, passes, words in the problem -------------------------------------------

ONNX = {
    "equal": (conv(), conv(), True, ""),
    "float32 noise": (conv(), conv(WEIGHT * np.float32(1 + 1e-6)), True, ""),
    "1 % in one channel": (conv(), conv(scaled(WEIGHT, 2, 1.01)), False, ""),
    "wrong bias in one channel": (conv(), conv(bias=BIAS + f32(0, 0.01, 0, 0)), False, ""),
    "a shift moved through padding is wrong at the border only": (
        model("s = Add(x, t)  y = Conv<pads=[1,1,1,1]>(s, w)", IMAGE, MAPS, w=WEIGHT, t=SHIFT),
        conv(bias=(WEIGHT * SHIFT).sum((1, 2, 3))),
        False,
        "",
    ),
    "NaN": (model("a = Abs(x)  y = Sqrt(a)"), model("y = Sqrt(x)"), False, "nan at ["),
    "NaN missing": (model("y = Sqrt(x)"), model("a = Abs(x)  y = Sqrt(a)"), False, "the reference has nan"),
    "NaN in both": (model("y = Sqrt(x)"), model("y = Sqrt(x)"), True, ""),
    "Inf for a number": (model("y = Identity(x)"), model("y = Div(x, z)", z=f32(0)), False, "inf at ["),
    "Inf of the other sign": (model("y = Div(x, z)", z=f32(0)), model("y = Div(x, z)", z=f32(-0.0)), False, "inf at ["),
    "Inf in both": (model("y = Div(x, z)", z=f32(0)), model("y = Div(x, z)", z=f32(0)), True, ""),
    "a fault beside Inf": (
        model("y = Div(x, z)", z=f32(0, 1, 1, 1, 1, 1, 1, 1)),
        model("y = Div(x, z)", z=f32(0, 1, 1, 1.01, 1, 1, 1, 1)),
        False,
        "",
    ),
    "shape": (model("y = Identity(x)"), model("y = Concat<axis=0>(x, x)", y="float[M,8] y"), False, "shape [4, 8]"),
    "type": (model("y = Identity(x)"), model("y = Cast<to=10>(x)", y="float16[N,8] y"), False, "type float16"),
    "an output fewer": (model("y = Relu(x) z = Neg(x)", y=TWO), model("y = Relu(x)"), False, "candidate has no such"),
    "an output more": (model("y = Relu(x)"), model("y = Relu(x) z = Neg(x)", y=TWO), False, "reference has no such"),
    "outputs exchanged": (
        model("y = Relu(x) z = Neg(x)", y=TWO),
        model("y = Relu(x) z = Neg(x)", y="float[N,8] z, float[N,8] y"),
        False,
        "",
    ),
    "the second output": (model("y = Relu(x) z = Neg(x)", y=TWO), model("y = Relu(x) z = Abs(x)", y=TWO), False, ""),
    "zero against noise": (model("y = Sub(x, x)"), model("y = Mul(x, s)", s=f32(1e-7)), True, ""),
    "zero against numbers": (model("y = Sub(x, x)"), model("y = Mul(x, s)", s=f32(1e-2)), False, ""),
    "1 % of tiny outputs": (model("y = Mul(x, s)", s=f32(1e-9)), model("y = Mul(x, s)", s=f32(1.01e-9)), False, ""),
    "nothing in an output": (
        model("y = Slice(x, i, i)", y="float[M,8] y", i=[0]),
        model("y = Slice(x, i, i)", y="float[M,8] y", i=[0]),
        True,
        "",
    ),
    "float16 noise": (typed("float16", 1, "f2"), typed("float16", 1.002, "f2"), True, ""),
    "float16 fault": (typed("float16", 1, "f2"), typed("float16", 1.05, "f2"), False, ""),
    "float64 noise": (typed("double", 1, "f8"), typed("double", 1 + 1e-12, "f8"), True, ""),
    "float64 fault": (typed("double", 1, "f8"), typed("double", 1 + 1e-7, "f8"), False, ""),
    "bfloat16": (
        model("y = Identity(x)", "bfloat16[N,4] x", "bfloat16[N,4] y"),
        model("y = Identity(x)", "bfloat16[N,4] x", "bfloat16[N,4] y"),
        True,
        "",
    ),
    "integers": (typed("int64", 2, "i8"), typed("int64", 2, "i8"), True, ""),
    "integers that differ": (typed("int64", 2, "i8"), typed("int64", 3, "i8"), False, ""),
    "booleans that differ": (
        model("y = Identity(x)", "bool[N,4] x", "bool[N,4] y"),
        model("y = Not(x)", "bool[N,4] x", "bool[N,4] y"),
        False,
        "",
    ),
    "equal symbols are equal sizes": (
        model("y = Add(x, z)", "float[N,C] x, float[N,C] z", "float[N,C] y"),
        model("y = Add(z, x)", "float[N,C] x, float[N,C] z", "float[N,C] y"),
        True,
        "",
    ),
    "inputs in another order": (
        model("y = Sub(x, z)", "float[N,8] x, float[N,1] z"),
        model("y = Sub(x, z)", "float[N,1] z, float[N,8] x"),
        True,
        "",
    ),
    "inputs and outputs renamed": (
        model("y = Sub(x, z)", "float[N,8] x, float[N,1] z"),
        model("y2 = Sub(x2, z2)", "float[N,8] x2, float[N,1] z2", "float[N,8] y2"),
        True,
        "",
    ),
    "an unused input dropped": (model("y = Relu(x)", "float[N,8] x, float[N,1] z"), model("y = Relu(x)"), True, ""),
    "overridable initializers are no inputs": (
        model("y = Mul(x, s)", "float[N,3] x, float[3] s", "float[N,3] y", s=f32(1, 2, 3)),
        model("y = Mul(x, s)", "float[N,3] x", "float[N,3] y", s=f32(1, 2, 3)),
        True,
        "",
    ),
    "the candidate fixes the batch": (conv(), conv(x="float[1,3,H,W] x"), True, ""),
    "sequences": (
        model("y = SplitToSequence(x)", y="seq(float[1,8]) y"),
        model("y = SplitToSequence(x)", y="seq(float[1,8]) y"),
        True,
        "",
    ),
    "empty output names end onnxruntime's process": (
        model(OLD_NORM, "float[N,2,H] x", "float[N,2,H] y", opset=9, ir=4, empty=4, s=f32(1, 2)),
        model(OLD_NORM, "float[N,2,H] x", "float[N,2,H] y", opset=9, ir=4, s=f32(1, 2)),
        True,
        "",
    ),
}


@pytest.mark.parametrize(("reference", "candidate", "passes", "problem"), ONNX.values(), ids=ONNX)
def test_onnx_against_onnx(reference, candidate, passes, problem):
    before = reference.SerializeToString(), candidate.SerializeToString()
    verdict = judged(reference, candidate, passes, problem)
    assert verdict.providers == ("CPUExecutionProvider",)
    assert verdict.seeds == (0, 1, 2)
    assert (reference.SerializeToString(), candidate.SerializeToString()) == before


def test_where_the_largest_error_sits():
    x = np.zeros((2, 3, 5, 5), np.float32)
    x[1, 0, 4, 2] = 1.0
    weight = WEIGHT.copy()
    weight[2, 0, 1, 1] += 0.5
    (check,) = judged(conv(), conv(weight), False, batches=[x]).outputs
    assert (check.name, check.worst_channel, check.worst_index) == ("y", 2, (1, 2, 4, 2))
    output = nn.functional.conv2d(*map(torch.from_numpy, (x, WEIGHT, BIAS)), padding=1)
    assert check.error == pytest.approx(0.5 / output.abs().max().item(), rel=1e-5)
    assert check.limit == 1e-4
    assert check.floor is None


def test_renamed_outputs_are_mentioned():
    notes = verify(model("y = Relu(x)"), model("q = Relu(x)", y="float[N,8] q")).notes
    assert any("named q" in n for n in notes)


@pytest.mark.parametrize(("share", "passes"), [(0.0005, True), (0.002, False)])
def test_few_integers_may_differ_as_ties_do(share, passes):
    x = np.arange(20_000, dtype=np.int64).reshape(2, -1)
    flip = (x < share * x.size).astype(np.int64)
    plain = model("y = Identity(x)", "int64[N,M] x", "int64[N,M] y")
    other = model("y = Add(x, f)", "int64[N,M] x", "int64[N,M] y", f=flip)
    (check,) = judged(plain, other, passes, batches=[x]).outputs
    assert check.error == pytest.approx(share)


def test_a_tolerance_replaces_all_limits():
    other = conv(scaled(WEIGHT, 2, 1.001))
    assert not verify(conv(), other)
    assert judged(conv(), other, True, tolerance=0.01).outputs[0].limit == 0.01
    assert not verify(conv(), conv(WEIGHT * np.float32(1 + 1e-6)), tolerance=1e-9)
    assert verify(conv(), conv(), tolerance=0.0)


def test_onnx_needs_no_torch(tmp_path):
    onnx.save(conv(), tmp_path / "a.onnx")
    code = f"""
        import sys
        from bnfold.verification import verify
        assert verify({str(tmp_path / "a.onnx")!r}, open({str(tmp_path / "a.onnx")!r}, "rb").read())
        assert "torch" not in sys.modules
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)


@pytest.mark.parametrize("empty", [0, 4])
def test_external_data_is_found_beside_the_path(tmp_path, empty):
    norm = model(OLD_NORM, "float[N,2,H] x", "float[N,2,H] y", opset=9, ir=4, empty=empty, s=f32(1, 2))
    path = tmp_path / "model.onnx"
    onnx.save(copy.deepcopy(norm), path, save_as_external_data=True, location="model.bin", size_threshold=0)
    assert (tmp_path / "model.bin").exists()
    judged(norm, path, True)
    judged(str(path), norm, True)
    (tmp_path / "model.bin").unlink()
    with pytest.raises(InvalidFileError, match=r"candidate .*model\.onnx: onnxruntime cannot load it"):
        verify(norm, path)


# --- torch ------------------------------------------------------------------------------------------------------------


def randomize(module, seed=0):
    """Weights and statistics as after training; gammas of both signs."""
    g = torch.Generator().manual_seed(seed)
    for m in module.modules():
        if isinstance(m, nn.BatchNorm2d):
            sign = torch.randint(0, 2, (m.num_features,), generator=g) * 2 - 1
            m.weight.data = (torch.rand(m.num_features, generator=g) + 0.5) * sign
            m.bias.data = torch.randn(m.num_features, generator=g)
            m.running_mean.copy_(torch.randn(m.num_features, generator=g))
            m.running_var.copy_(torch.rand(m.num_features, generator=g) + 0.5)
        elif isinstance(m, nn.Conv2d | nn.Linear):
            m.weight.data = torch.randn(m.weight.shape, generator=g) / math.sqrt(m.weight[0].numel())
    return module


def norm_net():
    return randomize(nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 4, 3)))


def folded(conv_, norm):
    """The two layers as one, in float64 and rounded once."""
    scale = norm.weight.double() / torch.sqrt(norm.running_var.double() + norm.eps)
    bias = conv_.bias.double() if conv_.bias is not None else 0.0
    result = nn.Conv2d(conv_.in_channels, conv_.out_channels, conv_.kernel_size, padding=conv_.padding)
    result.weight.data = (conv_.weight.double() * scale.view(-1, 1, 1, 1)).float()
    result.bias.data = (norm.bias.double() + scale * (bias - norm.running_mean.double())).float()
    return result


def folded_net(net):
    return nn.Sequential(folded(net[0], net[1]), net[2], net[3])


IMAGES = [("N", 3, 9, 9)]


def test_folded_module_passes_below_its_floor():
    net = norm_net().eval()
    verdict = judged(net, folded_net(net), True, shapes=IMAGES)
    (check,) = verdict.outputs
    assert check.name == "output"
    assert 0 < check.floor < 1e-6
    assert check.error < 1e-6
    assert verdict.providers == ()
    assert any("float64" in n for n in verdict.notes)


def test_unfolded_bias_fails():
    net = norm_net().eval()
    wrong = folded_net(net)
    wrong[0].bias.data[3] += 0.02
    judged(net, wrong, False, shapes=IMAGES)


class Deep(nn.Module):
    """Twelve residual layers, outputs of very different ranges."""

    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1, bias=False) for _ in range(12))
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(12))

    def forward(self, x):
        for c, n in zip(self.convs, self.norms, strict=True):
            x = torch.relu(n(c(x))) + 0.1 * x
        return x * torch.logspace(-3, 3, 8, dtype=x.dtype).view(1, -1, 1, 1)


@pytest.mark.parametrize(("factor", "passes"), [(1.0, True), (1.01, False)])
@pytest.mark.parametrize("seed", range(3))
def test_noise_through_twelve_layers_passes_and_one_percent_in_one_channel_fails(seed, factor, passes):
    net = randomize(Deep(), seed).eval()
    other = copy.deepcopy(net)
    for i in range(12):
        other.convs[i], other.norms[i] = folded(net.convs[i], net.norms[i]), nn.Identity()
    with torch.no_grad():
        other.convs[5].weight[3] *= factor
    verdict = verify(net, other, shapes=[(2, 8, 9, 9)])
    assert verdict.passed is passes, verdict
    assert (verdict.outputs[0].error < 3e-6) is passes


class Ranges(nn.Module):
    """Channels whose ranges lie five decades apart."""

    def __init__(self, fault=1.0):
        super().__init__()
        self.scale = nn.Parameter(
            torch.tensor([1e3, 30.0, 1e-2]).view(1, 3, 1) * torch.tensor([1, fault, 1]).view(1, 3, 1)
        )

    def forward(self, x):
        return x * self.scale


@pytest.mark.parametrize(("fault", "passes"), [(1 + 1e-6, True), (1.003, False)])
def test_a_fault_in_a_channel_of_small_range_is_found(fault, passes):
    verdict = judged(Ranges(), Ranges(fault), passes, "" if passes else "channel 1, of small range", shapes=[(2, 3, 9)])
    assert verdict.outputs[0].error < verdict.outputs[0].limit  # of the whole output's range
    assert passes or verdict.outputs[0].worst_index[1] == verdict.outputs[0].worst_channel == 1


def test_noise_that_leaks_into_a_small_channel_passes():
    """Channel 1 is a difference of large numbers: its rounding errors are large relative to its own range."""

    class Cancelling(nn.Module):
        def forward(self, x):
            a, b = x * 1000.0, x * 999.99
            return torch.stack([a, a - b], 1)

    class Reordered(nn.Module):
        def forward(self, x):
            a, b = x.double() * 1000.0, x.double() * 999.99
            return torch.stack([a, a - b], 1).to(x.dtype)

    judged(Cancelling(), Reordered(), True, shapes=[(2, 50)])


def test_an_ill_conditioned_original_is_no_ground_truth():
    """The running mean cancels the convolution: the original is off by 1e-3 and the folded module right."""
    layer, norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
    norm.running_mean.fill_(1e4)
    layer.bias.data.fill_(1e4)
    net = nn.Sequential(layer, norm).eval()
    (check,) = judged(net, nn.Sequential(folded(layer, norm)), True, shapes=IMAGES).outputs
    assert check.floor > 1e-4
    assert check.error < 1e-5
    assert check.limit == 4 * check.floor
    wrong = folded(layer, norm)
    wrong.weight.data[1] *= 1.1
    judged(net, nn.Sequential(wrong), False, shapes=IMAGES)


def test_float64_that_takes_another_branch_is_no_judge():
    class Branching(nn.Module):
        def __init__(self, factor=1.0):
            super().__init__()
            self.factor = factor

        def forward(self, x):
            return x * (1.0 if x.dtype == torch.float32 else 2.0) * self.factor

    verdict = judged(Branching(), Branching(), True, shapes=[(2, 8)])
    assert verdict.outputs[0].floor is None
    assert any("reference is the judge" in n for n in verdict.notes)
    judged(Branching(), Branching(1.01), False, shapes=[(2, 8)])


def test_a_module_that_does_not_run_in_float64_is_compared_directly():
    class Mixed(nn.Module):
        def forward(self, x):
            return x @ torch.eye(8)

    verdict = judged(Mixed(), Mixed(), True, shapes=[(2, 8)])
    assert verdict.outputs[0].floor is None
    assert any("in float64 it does not run" in n for n in verdict.notes)


def test_a_module_in_training_is_judged_in_evaluation_and_left_alone():
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5), nn.Linear(7, 7)).train()
    seen = []
    net[3].register_forward_hook(lambda *_: seen.append(torch.rand(1)))  # uses torch's random state
    state = copy.deepcopy(net.state_dict())
    x = torch.randn(2, 3, 9, 9, requires_grad=True)
    kept = x.detach().clone()
    torch_random, numpy_random = torch.get_rng_state(), np.random.get_state()[1].copy()
    judged(net, copy.deepcopy(net).eval(), True, batches=[x, (x,), [x]])
    assert seen
    assert all(m.training for m in net.modules())
    assert all(torch.equal(v, state[k]) for k, v in net.state_dict().items())
    assert all(p.grad is None for p in net.parameters())
    assert torch.equal(x, kept)
    assert torch.equal(torch.get_rng_state(), torch_random)
    assert np.array_equal(np.random.get_state()[1], numpy_random)


def test_a_module_that_writes_into_its_input_does_not_change_the_batch():
    class InPlace(nn.Module):
        def forward(self, x):
            return x.add_(1)

    x = np.ones((2, 8), np.float32)
    judged(InPlace(), model("y = Add(x, o)", o=f32(1)), True, batches=[x, torch.from_numpy(x)])
    assert (x == 1).all()


@dataclasses.dataclass
class Result:
    first: torch.Tensor
    rest: list


def test_outputs_are_found_in_structures():
    class Structured(nn.Module):
        def forward(self, x):
            return {"a": Result(x, [x + 1, None, "text"]), "b": (x * 2, 3)}

    verdict = judged(Structured(), Structured(), True, shapes=[(2, 8)])
    assert [o.name for o in verdict.outputs] == ["a.first", "a.rest.0", "b.0"]
    plain = model(
        "a = Identity(x) b = Add(x, o) c = Mul(x, t)", y="float[N,8] a, float[N,8] b, float[N,8] c", o=f32(1), t=f32(2)
    )
    assert [o.name for o in judged(Structured(), plain, True).outputs] == ["a", "b", "c"]


def test_an_onnx_candidate_says_what_the_module_takes():
    net = nn.Conv2d(3, 4, 3, padding=1)
    net.weight.data, net.bias.data = torch.from_numpy(WEIGHT), torch.from_numpy(BIAS)
    verdict = judged(net, conv(), True)
    assert verdict.outputs[0].name == "y"
    assert verdict.outputs[0].floor is not None
    judged(net, conv().SerializeToString(), True)
    judged(conv(), net, True)
    judged(net, conv(scaled(WEIGHT, 1, 1.01)), False)


@pytest.mark.parametrize(
    ("type_", "name", "own"), [(torch.float16, "float16", np.float16), (torch.bfloat16, "bfloat16", ml_dtypes.bfloat16)]
)
def test_half_types(type_, name, own):
    class Identity(nn.Module):
        def forward(self, x):
            return x.clone()

    plain = model("y = Identity(x)", f"{name}[N,4] x", f"{name}[N,4] y")
    judged(Identity(), plain, True)
    judged(Identity(), plain, True, batches=[torch.randn(2, 4).to(type_), np.ones((2, 4), own)])
    layer = nn.Linear(8, 8).to(type_)
    worse = copy.deepcopy(layer)
    worse.weight.data *= 1.5
    (check,) = judged(layer, copy.deepcopy(layer), True, shapes=[("N", 8)]).outputs
    assert 0 < check.floor < 1e-2
    judged(layer, worse, False, shapes=[("N", 8)])


def test_integer_inputs_are_small_and_short():
    table = nn.Embedding(8, 3)
    gather = model(
        "y = Gather(t, x)", "int64[batch,sequence] x", "float[batch,sequence,3] y", t=table.weight.detach().numpy()
    )
    judged(table, gather, True)
    other = scaled(table.weight.detach().numpy(), 5, 1.01)
    judged(table, model("y = Gather(t, x)", "int64[B,S] x", "float[B,S,3] y", t=other), False)


def test_dict_batches_go_by_name():
    class Two(nn.Module):
        def forward(self, x, z):
            return x - z

    batch = {"z": np.ones((2, 1)), "x": torch.randn(2, 8)}  # the file's types are float32
    subtract = model("y = Sub(x, z)", "float[N,8] x, float[N,1] z")
    judged(subtract, subtract, True, batches=[batch])
    batch["z"] = batch["z"].astype(np.float32)
    judged(Two(), subtract, True, batches=[batch, (batch["x"], batch["z"])])
    judged(subtract, Two(), True)
    judged(Two(), Two(), True, shapes={"z": (2, 1), "x": (2, 8)})
    judged(
        model("y = Relu(x)"),
        model("y2 = Relu(x2)", "float[N,8] x2", "float[N,8] y2"),
        True,
        batches=[{"x": f32(*range(8)).reshape(1, 8)}],
    )


class Keyword(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = norm_net()

    def forward(self, x, k=2, *, shift=None):
        return {"a": self.net(x) * k, "b": x + shift}


def test_exported_programs():
    net = Keyword().eval()
    batch = torch.export.Dim("batch", min=2, max=16)
    free = {"x": {0: batch, 2: torch.export.Dim("height", min=5, max=20)}, "k": None, "shift": {0: batch}}
    example = torch.randn(3, 3, 9, 9)
    kwargs = {"shift": torch.ones(3, 1, 1, 1)}
    program = torch.export.export(net, (example, 2), kwargs, dynamic_shapes=free)
    state = {k: v.clone() for k, v in program.state_dict.items()}
    verdict = judged(program, program, True)
    assert [o.name for o in verdict.outputs] == ["a", "b"]
    assert all(o.floor is not None for o in verdict.outputs)
    judged(program, program, True, batches=[(torch.randn(5, 3, 9, 9), torch.ones(5, 1, 1, 1))])
    judged(program, program, True, batches=[{"shift": torch.ones(5, 1, 1, 1), "x": torch.randn(5, 3, 9, 9)}])
    assert all(torch.equal(v, state[k]) for k, v in program.state_dict.items())
    worse = copy.deepcopy(net)
    with torch.no_grad():
        worse.net[0].weight[2] *= 1.05
    judged(program, torch.export.export(worse, (example, 2), kwargs, dynamic_shapes=free), False)


def test_sizes_that_depend_on_each_other_are_those_of_the_sample():
    class Halves(nn.Module):
        def forward(self, x):
            return x[:, 0::2] + x[:, 1::2]

    half = torch.export.Dim("half", min=2, max=50)
    program = torch.export.export(Halves(), (torch.randn(3, 10),), dynamic_shapes={"x": {1: 2 * half}})
    judged(program, program, True)


# --- inputs -----------------------------------------------------------------------------------------------------------


class Recorder(nn.Module):
    """Keeps what it is called with, for shapes that it accepts."""

    def __init__(self, accepts=lambda x: True):
        super().__init__()
        self.accepts, self.calls = accepts, []

    def __deepcopy__(self, memo):
        return self

    def double(self):
        raise RuntimeError("no float64 copy")

    def forward(self, x):
        if not self.accepts(x):
            raise ValueError(f"cannot take {tuple(x.shape)}")
        self.calls.append(x.clone())
        return x


@pytest.mark.parametrize(
    ("shape", "accepts", "expected"),
    [
        ((None, 3, None, None), lambda x: True, [(2, 3, 64, 64), (1, 3, 64, 64), (2, 3, 64, 64)]),
        (("N", 3, "H", "W"), lambda x: x.shape[2] >= 75, [(2, 3, 224, 224), (1, 3, 224, 224), (2, 3, 224, 224)]),
        (("N", 3, "H", 5), lambda x: len(x) == 1, [(1, 3, 64, 5)] * 3),
        ((7, 3), lambda x: True, [(7, 3)] * 3),
        (("N", "N"), lambda x: True, [(2, 2), (1, 1), (2, 2)]),
        ((), lambda x: True, [()] * 3),
    ],
    ids=["free", "large enough", "batch of one only", "fixed", "one symbol", "scalar"],
)
def test_made_up_sizes(shape, accepts, expected):
    recorder = Recorder(accepts)
    verify(recorder, nn.Identity(), shapes=[shape])
    assert [tuple(x.shape) for x in recorder.calls] == expected


def test_made_up_values():
    recorder = Recorder()
    verify(recorder, nn.Identity(), shapes=[("N", 3, 8, 8)], seeds=(0, 1, 2))
    noise, wide, impulses = recorder.calls
    assert noise.std() == pytest.approx(1.0, abs=0.1)
    assert wide.mean() == pytest.approx(1.0, abs=0.5)
    assert 2 < wide.abs().max() <= 10
    inside = impulses[:, :, 1:-1, 1:-1]
    assert (inside == inside[:, :, :1, :1]).all()
    assert ((inside >= 0.25) & (inside < 1)).all()
    assert (impulses[:, :, (0, 0, -1, -1, 0, 4), (0, -1, 0, -1, 4, 0)].abs() == 1).all()
    again = Recorder()
    verify(again, nn.Identity(), shapes=[("N", 3, 8, 8)])
    assert all(torch.equal(a, b) for a, b in zip(recorder.calls, again.calls, strict=True))


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_providers_that_are_not_there():
    with pytest.raises(UsageError, match=r"no provider NoSuchProvider; available: .*CPUExecutionProvider"):
        verify(conv(), conv(), providers=("NoSuchProvider",))
    with pytest.raises(UsageError, match="expected a sequence of names"):
        verify(conv(), conv(), providers="CPUExecutionProvider")


def broken(tmp_path, content):
    path = tmp_path / "broken.onnx"
    path.write_bytes(content)
    return path


FILES = {
    "missing": (lambda p: p / "nowhere.onnx", r"candidate .*nowhere\.onnx: no such file"),
    "not ONNX": (lambda p: broken(p, b"\x00junk"), r"candidate .*broken\.onnx: cannot be read as an ONNX model"),
    "cut short": (lambda p: broken(p, conv().SerializeToString()[:-40]), r"broken\.onnx: cannot be read"),
    "empty": (lambda p: broken(p, b""), r"broken\.onnx: onnxruntime cannot load it"),
    "bytes": (lambda p: b"\x00junk", r"candidate: cannot be read as an ONNX model"),
    "unknown operation": (lambda p: model("y = NoSuchOp(x)"), "candidate: onnxruntime cannot load it"),
}


@pytest.mark.parametrize(("make", "message"), FILES.values(), ids=FILES)
def test_files_that_cannot_be_loaded(tmp_path, make, message):
    with pytest.raises(InvalidFileError, match=message) as e:
        verify(conv(), make(tmp_path))
    assert "\n" not in str(e.value)


SQUARE = model("y = MatMul(x, w)", "float[N,M] x", "float[N,4] y", w=np.ones((3, 4), np.float32))
X = np.ones((2, 8), np.float32)
USAGE = {
    "no inputs known": (nn.ReLU(), nn.ReLU(), {}, r"pass example inputs or shapes \(--input\)"),
    "no size fits": (SQUARE, SQUARE, {}, r"made-up inputs, last x: 1x512: .*--input"),
    "no size fits the candidate": (
        model("y = Relu(x)", "float[N,M] x"),
        SQUARE,
        {},
        "candidate does not run on x: 2x64",
    ),
    "a batch that does not fit": (SQUARE, SQUARE, {"batches": [X]}, r"reference does not run on batch 0 \(0: 2x8\)"),
    "too many values": (SQUARE, SQUARE, {"batches": [(X, X)]}, r"the batch has 2 values, the model 1 inputs \(x\)"),
    "a name missing": (
        model("y = Add(x, z)", "float[N,8] x, float[N,8] z"),
        model("y = Add(x, z)", "float[N,8] x, float[N,8] z"),
        {"batches": [{"x": X, "w": X}]},
        "the batch lacks z; it has x, w",
    ),
    "one array for batches": (SQUARE, SQUARE, {"batches": X}, "put it into a list"),
    "no batches": (SQUARE, SQUARE, {"batches": []}, "nothing was compared"),
    "no seeds": (conv(), conv(), {"seeds": ()}, "nothing was compared"),
    "no outputs": (nn.Module(), nn.Module(), {"shapes": []}, "does not run"),
    "shape of an unknown input": (SQUARE, SQUARE, {"shapes": {"q": (2, 3)}}, "no input is called q; the model has x"),
    "too many shapes": (SQUARE, SQUARE, {"shapes": [(2, 3), (2, 3)]}, r"2 given, the model has 1 inputs \(x\)"),
    "text": (
        model("y = Identity(x)", "string[N] x", "string[N] y"),
        model("y = Identity(x)", "string[N] x", "string[N] y"),
        {},
        "input x is no tensor of numbers",
    ),
    "a kernel the provider lacks": (
        conv(),
        model("y = Conv(x, w)", "double[N,3,H,W] x", "double[N,4,H,W] y", w=WEIGHT.astype(np.float64)),
        {},
        "candidate: CPUExecutionProvider cannot run it: .*Conv.*another provider",
    ),
    "something else": (conv(), 3, {}, "candidate: cannot run a int; pass an nn.Module"),
}


@pytest.mark.parametrize(("reference", "candidate", "options", "message"), USAGE.values(), ids=USAGE)
def test_usage(reference, candidate, options, message):
    with pytest.raises(UsageError, match=message) as e:
        verify(reference, candidate, **options)
    assert "\n" not in str(e.value)


def test_shapes_settle_what_the_file_leaves_open():
    judged(SQUARE, SQUARE, True, shapes=[("N", 3)])
    judged(SQUARE, SQUARE, True, shapes={"x": (5, 3)})


def test_strings_are_compared():
    text = model("y = Identity(x)", "string[N] x", "string[N] y")
    assert isinstance(judged(text, text, True, batches=[np.array(["a", "b"])]), Verdict)


def saturating(bias):
    """A sigmoid far down its tail, where a rounding error of its input is large beside the output's range."""
    constants = {"w": np.full((8, 8), 1e-3, np.float32), "b": np.full(8, bias, np.float32)}
    return model("z = MatMul(x, w)  s = Add(z, b)  y = Sigmoid(s)", **constants)


SATURATED = {
    "rounding in the tail passes": (-12.0, -12.0 * (1 + 4e-5), True),
    "a fault before the sigmoid fails": (-12.0, -12.2, False),
}


@pytest.mark.parametrize(("ours", "theirs", "passes"), SATURATED.values(), ids=SATURATED)
def test_saturated_outputs_are_judged_before_the_saturation(ours, theirs, passes):
    verdict = verify(saturating(ours), saturating(theirs))
    assert [o.name for o in verdict.outputs] == ["y", "s (before Sigmoid)"]
    assert verdict.passed is passes


class Ending(nn.Module):
    """The module whose file `saturating` is, or one that ends in another function."""

    def __init__(self, bias, end=torch.sigmoid):
        super().__init__()
        self.linear, self.end = nn.Linear(8, 8), end
        nn.init.constant_(self.linear.weight, 1e-3)
        nn.init.constant_(self.linear.bias, bias)

    def forward(self, x):
        return self.end(self.linear(x))


@pytest.mark.parametrize(("ours", "theirs", "passes"), SATURATED.values(), ids=SATURATED)
def test_what_goes_into_a_modules_sigmoid_is_told_by_its_output(ours, theirs, passes):
    verdict = verify(Ending(ours), saturating(theirs))
    assert [o.name for o in verdict.outputs] == ["y", "s (before Sigmoid)"]
    assert verdict.passed is passes


@pytest.mark.parametrize(("ours", "theirs", "passes"), [(1.5, 1.5, True), (1.5, 1.53, False), (9.0, 9.0, True)])
def test_what_goes_into_a_modules_tanh(ours, theirs, passes):
    constants = {"w": np.full((8, 8), 1e-3, np.float32), "b": np.full(8, theirs, np.float32)}
    candidate = model("z = MatMul(x, w)  s = Add(z, b)  y = Tanh(s)", **constants)
    verdict = verify(Ending(ours, torch.tanh), candidate)
    assert [o.name for o in verdict.outputs] == ["y", "s (before Tanh)"]
    assert verdict.passed is passes


def test_a_saturation_of_an_output_that_the_module_lacks():
    two = model("z = MatMul(x, w)  y = Add(z, b)  t = Sigmoid(z)", y="float[N,8] y, float[N,8] t",
                w=np.full((8, 8), 1e-3, np.float32), b=np.full(8, 1.0, np.float32))  # fmt: skip
    verdict = verify(Ending(1.0, lambda x: x), two)
    assert not verdict.passed


@pytest.mark.filterwarnings("ignore:.*weight_norm")
def test_a_module_that_caches_a_computed_weight():
    """torch does not copy such a tensor; the old weight_norm keeps one."""
    module = nn.Sequential(nn.utils.weight_norm(nn.Linear(8, 8)), nn.BatchNorm1d(8)).eval()
    assert verify(module, module, shapes=[("N", 8)]).passed


@pytest.mark.parametrize("tolerance", [-1.0, float("nan")])
def test_a_tolerance_that_is_none(tolerance):
    with pytest.raises(UsageError, match="--tolerance"):
        verify(conv(), conv(), tolerance=tolerance)
