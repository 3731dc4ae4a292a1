"""The kind that goes in comes out: modules, fx GraphModules, ExportedPrograms, with their inputs and outputs."""

from __future__ import annotations

import copy
import io
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.export import Dim, ExportedProgram
from torch_models import (
    EXACT,
    Case,
    Chain,
    Net,
    bn,
    check,
    check_report,
    compare,
    conv,
    image,
    in_double,
    row,
    run,
    snapshot,
    tensor,
)
from torchvision.ops import FrozenBatchNorm2d

import bnfold


def parts(**more: Any) -> dict[str, Any]:
    return {"conv": conv(), "bn": bn(8), **more}


# ---------------------------------------------------------------------- inputs and outputs


class Signature(nn.Module):
    """Positional, optional and keyword-only inputs; a dict of tensors and lists comes out."""

    def __init__(self, functional: bool = False):
        super().__init__()
        self.conv, self.bn, self.functional = conv(), bn(8), functional

    def forward(self, a, b=None, *, c=None):
        y = self.bn(F.conv2d(a, self.conv.weight) if self.functional else self.conv(a))
        return {"y": y, "rest": [a if b is None else b.tanh(), c], "count": 3}


Pair = namedtuple("Pair", "first second")


def nested(self, data, pictures):
    y = self.bn(self.conv(data["image"]) if self.tree else F.conv2d(data["image"], self.conv.weight))
    return Pair(y, (pictures[1].tanh(), None)), data["image"]


NESTED = lambda: ({"image": image()(), "unused": torch.ones(2)}, [image()(), image()()])  # noqa: E731


def in_both_ways(id: str, build: Callable[[bool], nn.Module], inputs: Callable[[], Any], **other: Any) -> list:  # noqa: A002
    """The case folded in the tree, and with a functional layer in the graph."""
    return [
        row(id, lambda: build(True), inputs, "bn", **other),
        row(f"{id}-graph", lambda: build(False), inputs, "bn", same_class=False, **other),
    ]


def layered(rest: Callable) -> Callable[[bool], nn.Module]:
    """A network whose first lines are convolution and norm, the convolution a module or not."""

    def build(tree: bool) -> nn.Module:
        def forward(self, x, *args, **kwargs):
            return rest(self.bn(self.conv(x) if tree else F.conv2d(x, self.conv.weight)), x, *args, **kwargs)

        return Net(forward, **parts())

    return build


@pytest.mark.parametrize(
    "case",
    [
        *in_both_ways("tensor", layered(lambda y, x: y), image()),
        *in_both_ways("tuple", layered(lambda y, x, z: y * z.mean()), lambda: (image()(), image()()), batches=False),
        *in_both_ways("two-outputs", layered(lambda y, x: (y.tanh(), x)), image()),
        *in_both_ways("list-of-outputs", layered(lambda y, x: [y, y.amax(1)]), image()),
        *in_both_ways("output-twice", layered(lambda y, x: (y, y)), image()),
        *in_both_ways("number", layered(lambda y, x, k, flag: y * k if flag else y), lambda: (image()(), 3, True)),
        *in_both_ways("none", layered(lambda y, x, k: y), lambda: (image()(), None)),
        *in_both_ways("scalar", layered(lambda y, x, k: y + k), lambda: (image()(), torch.tensor(2.0))),
        *in_both_ways("positions", lambda tree: Signature(not tree), lambda: (image()(), image()())),
        *in_both_ways("keywords", lambda tree: Signature(not tree), lambda: {"c": image()(), "a": image()()}),
        *in_both_ways("batch-of-one", layered(lambda y, x: y), image(batch=1)),
        *in_both_ways(
            "batch-of-one-and-another-input",
            layered(lambda y, x, z: y * z),
            lambda: (image(batch=1)(), torch.randn(6)),
            batches=False,
        ),
        *in_both_ways("nested", lambda tree: Net(nested, **parts(), tree=tree), NESTED),
        *in_both_ways("masked", layered(lambda y, x: y[y > 0.5]), image()),
        *in_both_ways(
            "squeezed", layered(lambda y, x: y.amax((2, 3), keepdim=True).squeeze()), image(batch=1), batches=False
        ),
        *in_both_ways("reshaped-by-size", layered(lambda y, x: y.reshape(x.shape[0], x.size(1), -1)), image()),
    ],
)
def test_inputs_and_outputs(case: Case):
    """In both results the containers, types and values are those of the network, at another batch size too."""
    check(case)


def test_inputs_are_inferred():
    folded = bnfold.fold(Chain(conv=conv(3, 4), bn=bn(4)).eval())
    assert [f.norm for f in folded.report.folded] == ["bn"]


# ---------------------------------------------------------------------- fx GraphModules and wrappers


def traced(module: nn.Module) -> fx.GraphModule:
    return fx.symbolic_trace(module)


class Graphed(nn.Module):
    """As fx can trace it: no *args."""

    def __init__(self, functional: bool):
        super().__init__()
        self.conv, self.bn, self.act, self.functional = conv(), bn(8), nn.Tanh(), functional

    def forward(self, x):
        y = F.conv2d(x, self.conv.weight, self.conv.bias) if self.functional else self.conv(x)
        return self.act(self.bn(y))


@pytest.mark.parametrize("functional", [False, True], ids=["layer", "functional-layer"])
def test_graph_module(functional):
    case = Case("fx", lambda: traced(Graphed(functional)).double(), image(dtype=torch.float64), ("bn",))
    module = case.make()
    before = snapshot(module)
    result = bnfold.fold(module, case.given())
    assert snapshot(module) == before
    assert isinstance(result.model, fx.GraphModule)
    check_report(case, result.report)
    x = image(batch=3, dtype=torch.float64)()
    compare(result.model(x), case.make()(x), EXACT)
    assert not any(isinstance(m, nn.BatchNorm2d) for m in result.model.modules())


@pytest.mark.parametrize(
    "case",
    [
        row("compiled", lambda: torch.compile(Chain(**parts()).eval(), backend="eager"), image(), "_orig_mod.bn"),
        row("data-parallel", lambda: nn.DataParallel(Chain(**parts())), image(), "module.bn"),
        row("sequential", lambda: nn.Sequential(conv(), bn(8), nn.Tanh()), image(), "1"),
        row(
            "nested-sequential",
            lambda: nn.Sequential(nn.Sequential(conv(), bn(8)), nn.Sequential(conv(8, 8), bn(8))),
            image(),
            "0.1 1.1",
        ),
    ],
)
def test_wrappers(case: Case):
    check(case)


def test_modules_made_in_inference_mode():
    case = Case("inference", lambda: Chain(**parts()), image(), ("bn",))
    with torch.inference_mode():
        module, x = case.make(), case.given()
        check_report(case, bnfold.fold(module, x).report)
    check_report(case, bnfold.fold(module, x).report)


# ---------------------------------------------------------------------- what can be done with the result


@pytest.mark.parametrize("functional", [False, True], ids=["tree", "graph"])
def test_the_result_is_a_module_like_any_other(functional):
    """eval, deepcopy, state_dict, saving; and folding it again finds nothing and changes nothing."""
    case = Case("result", lambda: Graphed(functional), image())
    folded = bnfold.fold(case.make(), case.given()).model
    x = case.given()
    output = folded.eval()(x)
    twin = copy.deepcopy(folded)
    assert torch.equal(twin(x), output)
    assert not twin.eval().training
    file = io.BytesIO()
    torch.save(folded.state_dict(), file)
    file.seek(0)
    for p in twin.parameters():
        p.data.zero_()
    twin.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(twin(x), output)
    again = bnfold.fold(folded, x)
    assert again.report.norms == ()
    assert torch.equal(again.model(x), output)
    assert [k for k in again.model.state_dict() if "norm" in k or "running" in k] == []


def test_a_folded_graph_has_no_training_mode():
    folded = bnfold.fold(Graphed(functional=True).eval(), image()()).model
    with pytest.raises(NotImplementedError, match="no training mode"):
        folded.train()


def test_folding_does_not_depend_on_history():
    """The same argument gives the same weights, bit for bit."""
    case = Case("again", lambda: Graphed(functional=False), image())
    one, two = (bnfold.fold(case.make(), case.given()).model.state_dict() for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(one.values(), two.values(), strict=True))


@pytest.mark.parametrize("functional", [False, True], ids=["tree", "graph"])
def test_flags_of_parameters_stay(functional):
    module = Graphed(functional)
    module.conv.weight.requires_grad_(False)
    folded = bnfold.fold(module.eval(), image()()).model
    assert [n for n, p in folded.named_parameters() if not p.requires_grad] == ["conv.weight"]


def test_plan_is_the_report_of_fold():
    case = Case("plan", lambda: Chain(**parts(), b2=bn(8), act=nn.Tanh(), b3=bn(8)), image())
    module = case.make()
    before = snapshot(module)
    plan = bnfold.plan(module, case.given())
    assert snapshot(module) == before
    assert plan == bnfold.fold(module, case.given()).report


# ---------------------------------------------------------------------- ExportedPrograms

DECOMPOSED = {"as-exported": None, "core-aten": ()}  # arguments of run_decompositions


class Constants(nn.Module):
    """Weights that are a buffer outside the state dict and a plain attribute."""

    def __init__(self):
        super().__init__()
        self.bn = bn(8)
        self.register_buffer("w", torch.randn(8, 4, 3, 3), persistent=False)
        self.k = torch.randn(8, 8, 1, 1)

    def forward(self, x):
        return self.bn(F.conv2d(F.conv2d(x, self.w), self.k.to(x.dtype)))


class Writing(nn.Module):
    """Changes its input and a buffer."""

    def __init__(self):
        super().__init__()
        self.conv, self.bn = conv(), bn(8)
        self.register_buffer("n", torch.zeros(1))

    def forward(self, x):
        x.mul_(2)
        self.n.add_(1)
        return self.bn(self.conv(x)) + self.n


def tied() -> nn.Module:
    m = Net(lambda s, x: s.bn(s.conv(x)) + s.other(x), **parts(other=conv()))
    m.other.weight = m.conv.weight
    return m


PROGRAMS = [
    row("conv", lambda: Chain(conv=conv(bias=False), bn=bn(8), act=nn.ReLU(True)), image(), "bn"),
    row(
        "twice", lambda: Net(lambda s, x: s.bn(s.conv(s.bn(s.conv(x)))), conv=conv(4, 4), bn=bn(4)), image(), "bn bn#2"
    ),
    row(
        "linear",
        lambda: Chain(
            fc=nn.Linear(4, 8, bias=False),
            b1=nn.BatchNorm1d(8),
            act=nn.ReLU(True),
            last=nn.Linear(8, 4),
            b2=nn.BatchNorm1d(4),
        ),
        tensor(3, 4),
        "b1 b2",
    ),
    row(
        "linear-3d",
        lambda: Net(lambda s, x: s.bn(s.fc(x).transpose(1, 2)), fc=nn.Linear(4, 8), bn=nn.BatchNorm1d(8)),
        tensor(3, 5, 4),
        "bn",
    ),
    row("in-front", lambda: Chain(bn=nn.BatchNorm1d(4), fc=nn.Linear(4, 8)), tensor(3, 4), "bn"),
    row("transposed", lambda: Chain(up=nn.ConvTranspose2d(4, 6, 3, groups=2, bias=False), bn=bn(6)), image(), "bn"),
    row("frozen", lambda: Chain(conv=conv(), bn=FrozenBatchNorm2d(8)), image(), "bn"),
    row("instance", lambda: Chain(conv=conv(), bn=nn.InstanceNorm2d(8, track_running_stats=True)), image(), "bn"),
    row(
        "instance-statistics",
        lambda: Chain(conv=conv(), bn=nn.InstanceNorm2d(8)),
        image(),
        kept={"bn": "batch-statistics"},
    ),
    row(
        "batch-statistics",
        lambda: Chain(conv=conv(), bn=bn(8, track_running_stats=False)),
        image(),
        kept={"bn": "batch-statistics"},
    ),
    row(
        "taken-by-another",
        lambda: Chain(b1=bn(4), b2=bn(4), act=nn.Sigmoid()),
        image(),
        "b1",
        {"b2": "model-input unsupported-op"},
        left=0,
    ),
    row("kept", lambda: Chain(bn=bn(4), act=nn.Sigmoid()), image(), kept={"bn": "model-input unsupported-op"}),
    row("constants", Constants, image(), "bn"),
    row("writes", Writing, image(), "bn"),
    row("tied", tied, image(), "bn"),
    row("keywords", lambda: Signature(), lambda: {"c": image()(), "a": image()()}, "bn"),
]


@pytest.mark.parametrize("how", DECOMPOSED)
@pytest.mark.parametrize("case", PROGRAMS)
def test_exported_program(case: Case, how: str):
    """One comes back; it runs, is saved and loaded, and folds no further. The argument is untouched."""
    module, given = case.make().double(), in_double(case.given())
    want = run(case.make().double(), clones(given))
    program = exported(module, given)
    if DECOMPOSED[how] is not None:
        program = program.run_decompositions(*DECOMPOSED[how])
    before = portrait(program)
    result = bnfold.fold(program)
    assert portrait(program) == before
    check_report(case, result.report)
    assert isinstance(result.model, ExportedProgram)
    for folded in (result.model, saved_and_loaded(result.model)):
        compare(run(folded.module(), clones(given)), want, EXACT)
    left = sum("_norm" in str(n.target) for n in result.model.graph.nodes if n.op == "call_function")
    assert left == (len(case.kept) if case.left is None else case.left)
    if how == "as-exported":
        assert [f for f in bnfold.fold(result.model).report.folded if f.norm] == []


def exported(module: nn.Module, given: Any, **options: Any) -> ExportedProgram:
    args, kwargs = ((), given) if isinstance(given, dict) else ((given,), {})
    return torch.export.export(module, args, kwargs, **options)


def clones(given: Any) -> Any:
    return torch.utils._pytree.tree_map(lambda t: t.clone() if isinstance(t, torch.Tensor) else t, given)


def portrait(program: ExportedProgram) -> tuple:
    """All of a program that a fold could change."""
    tensors = {**program.state_dict, **{k: v for k, v in program.constants.items() if isinstance(v, torch.Tensor)}}
    raw = {k: (v.requires_grad, v.detach().numpy().tobytes()) for k, v in tensors.items()}
    return program.graph_module.code, str(program.graph_signature), raw, str(program.range_constraints)


def saved_and_loaded(program: ExportedProgram) -> ExportedProgram:
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    return torch.export.load(file)


@pytest.mark.parametrize("strict", [False, True], ids=["non-strict", "strict"])
def test_a_program_with_a_free_batch(strict):
    case = Case("free", lambda: Chain(**parts(act=nn.ReLU(True), c2=conv(8, 8), b2=bn(8))), image(), ("bn", "b2"))
    program = exported(
        case.make().double(), in_double(case.given()), dynamic_shapes=({0: Dim("batch")},), strict=strict
    )
    result = bnfold.fold(program)
    check_report(case, result.report)
    assert set(result.model.state_dict) == {"conv.weight", "conv.bias", "c2.weight", "c2.bias"}
    x = in_double(image(batch=5)())
    compare(result.model.module()(x), case.make().double()(x), EXACT)
    assert str(result.model.range_constraints) == str(program.range_constraints)


@pytest.mark.parametrize("how", DECOMPOSED)
def test_a_program_exported_in_training_mode(how):
    """Its norms normalise by the batch: they stay, and are named."""
    case = Case("training", lambda: Chain(**parts()), image(), kept={"bn": "training-mode"}, train=True)
    program = exported(case.make(), case.given())
    if DECOMPOSED[how] is not None:
        program = program.run_decompositions(*DECOMPOSED[how])
    result = bnfold.fold(program)
    check_report(case, result.report)
    x = case.given()
    assert torch.equal(result.model.module()(x), program.module()(x))


def test_a_loaded_program_folds_like_the_module():
    """The names come from the file, the weights are the same bits."""
    case = Case("loaded", lambda: Chain(**parts(c2=conv(8, 8), b2=FrozenBatchNorm2d(8))), image(), ("bn", "b2"))
    module = bnfold.fold(case.make(), case.given())
    program = bnfold.fold(saved_and_loaded(exported(case.make(), case.given())))
    check_report(case, program.report)
    assert {f.norm: f.into for f in program.report.folded} == {f.norm: f.into for f in module.report.folded}
    theirs = module.model.state_dict()
    assert all(torch.equal(v, theirs[k]) for k, v in program.model.state_dict.items())
