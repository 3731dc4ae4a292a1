"""Modules without example inputs, and modules that torch.export cannot capture as a whole."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn
from torch_models import EXACT, Chain, bn, compare, conv, image, randomise, run, snapshot

import bnfold
from bnfold.errors import UsageError


def Net(forward, **children) -> nn.Module:
    """A class of its own with this forward, so that fx sees its parameters by name."""
    net = type("Net", (nn.Module,), {"forward": forward})()
    for name, child in children.items():
        net.add_module(name, child)
    return net


def same(inputs: int = 4, outputs: int = 4) -> nn.Module:
    """A convolution that keeps the sizes."""
    return conv(inputs, outputs, padding=1)


def block(inputs: int = 4, outputs: int = 8, **options) -> nn.Module:
    return Chain(conv=conv(inputs, outputs, **options), bn=bn(outputs), act=nn.ReLU())


def positive(y: torch.Tensor) -> torch.Tensor:
    """What torch.export cannot follow."""
    return y if y.sum() > 0 else -y


def reasons(report: bnfold.Report) -> dict[str, str]:
    return {k.norm: str(k.reasons[0].reason) for k in report.kept}


def folded(report: bnfold.Report) -> list[str]:
    return [f.norm for f in report.folded if f.norm]


def double(module: nn.Module) -> nn.Module:
    randomise(module, torch.Generator().manual_seed(7))
    return module.eval().double()


def check(module: nn.Module, inputs, given=None) -> bnfold.Report:
    """Fold with the inputs given (none by default) and compare on those named; the argument stays as it was."""
    before = snapshot(module)
    result = bnfold.fold(module, given)
    assert snapshot(module) == before
    compare(run(result.model, inputs), run(module, inputs), EXACT)
    assert type(result.model) is type(module) or isinstance(module, torch.fx.GraphModule)
    return result.report


# ---------------------------------------------------------------------- without example inputs


def two(side: int = 8, rank: int = 4) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(3)
    shape = (2, 4, side, side)[:rank]
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))


def after_both(s, x, y):
    return s.a(x) + s.b(y)


TRACED = {
    # Two inputs, so that no single shape can be inferred.
    "modules": (lambda: Net(after_both, a=block(), b=block()), ["a.bn", "b.bn"], {}),
    "functions": (
        lambda: Net(lambda s, x, y: s.bn(s.conv(torch.cat([x, y], 1))).relu(), conv=conv(8, 6), bn=bn(6)),
        ["bn"],
        {},
    ),
    "methods": (
        lambda: Net(lambda s, x, y: s.bn(s.conv(x).relu().mul(0.5).add(0.25)) + y, conv=same(), bn=bn(4)),
        [],
        {"bn": "not-expressible"},  # the norm and the arithmetic become one, which no module is
    ),
    "pooled-and-flat": (
        lambda: Net(
            lambda s, x, y: s.fc(s.bn(s.pool(s.conv(x))).flatten(1)) + y.sum(),
            conv=same(), pool=nn.AdaptiveAvgPool2d(1), bn=bn(4), fc=nn.Linear(4, 3),
        ),
        ["bn"],
        {},
    ),
    "forward-through-a-view": (
        lambda: Net(
            flat_by_view,
            pool=nn.AdaptiveAvgPool2d(1), bn=bn(4), fc=nn.Linear(4, 3),
        ),
        ["bn"],
        {},
    ),
    "in-place": (
        lambda: Net(
            lambda s, x, y: s.bn2(s.conv2(s.act(s.bn1(s.conv1(x))))) + y,
            conv1=same(), bn1=bn(4), act=nn.ReLU(inplace=True), conv2=same(), bn2=bn(4),
        ),
        ["bn1", "bn2"],
        {},
    ),
    "augmented-assignment": (
        lambda: Net(augmented, act=nn.Sigmoid(), bn=bn(4), conv2=conv(4, 3)),
        [],
        {"bn": "not-expressible"},  # an Identity in the norm's place would let it write into what the norm read
    ),
    "padding-mode": (
        lambda: Net(
            lambda s, x, y: s.conv2(s.bn(s.act(x * y))),
            act=nn.Sigmoid(), bn=bn(4), conv2=nn.Conv2d(4, 3, 3, padding=1, padding_mode="reflect"),
        ),
        ["bn"],
        {},
    ),
    "functional-norm-of-a-subclass": (
        lambda: Net(
            lambda s, x, y: nn.functional.batch_norm(
                s.conv(x), s.bn.running_mean, s.bn.running_var, s.bn.weight, s.bn.bias, False, 0.1, s.bn.eps
            ) + y,
            conv=same(), bn=bn(4),
        ),
        [],
        {"bn": "not-expressible"},
    ),
    "a-norm-called-twice": (
        lambda: Net(lambda s, x, y: s.bn(s.conv(x)) + s.bn(s.conv(y)), conv=same(), bn=bn(4)),
        [],
        {"bn": "shared-weight", "bn#2": "shared-weight"},
    ),
    "a-hook-that-scales": (
        lambda: hooked(Net(after_both, a=block(), b=block())),
        ["b.bn"],
        {"a.bn": "hooked"},
    ),
    "a-branch-that-a-default-decides": (
        lambda: Net(with_mask, conv=same(), bn=bn(4), other=bn(4)), ["bn"], {"other": "not-executed"}
    ),
    "a-default-argument": (
        lambda: Net(with_default, conv=same(), bn=bn(4)),
        ["bn"],
        {},
    ),
}  # fmt: skip


def flat_by_view(self, x, y):
    z = self.pool(self.bn(x * y))
    return self.fc(z.view(z.size(0), -1))


def augmented(self, x, y):
    z = self.act(x * y)
    w = self.bn(z)
    w += 1.0
    return self.conv2(w), z


def with_mask(self, x, y, mask=None):
    z = self.bn(self.conv(x)) + y
    return z if mask is None else self.other(z)


def if_a_tensor(self, x, y):
    z = self.conv(x)
    return (self.bn(z) if isinstance(z, torch.Tensor) else z) + y


def if_of_a_type(self, x, y):
    z = self.conv(x)
    return (z if z.dtype is torch.float64 else self.bn(z)) + y


def with_default(self, x, y, scale=None):
    z = self.bn(self.conv(x)) + y
    return z if scale is None else z * scale


def hooked(net: nn.Module) -> nn.Module:
    net.a.conv.register_forward_hook(lambda m, given, out: out.sigmoid())
    return net


@pytest.mark.parametrize(("build", "names", "kept"), TRACED.values(), ids=TRACED)
def test_traced(build, names, kept):
    module = double(build())
    report = check(module, two())
    assert folded(report) == names
    assert reasons(report) == kept
    assert any("its fx trace was folded" in n for n in report.notes)
    compare(run(bnfold.fold(module).model, two(5)), run(module, two(5)), EXACT)  # nothing was made for one size


LINE = {
    # A norm over (batch, channels) or over (batch, channels, length): the same module.
    "linear": (lambda: Net(lambda s, x, y: s.bn(s.fc(x + y)), fc=nn.Linear(8, 4), bn=nn.BatchNorm1d(4)), 3),
    "conv1d": (lambda: Net(lambda s, x, y: s.bn(s.conv(x)) + y, conv=nn.Conv1d(4, 4, 1), bn=nn.BatchNorm1d(4)), 3),
    "resized": (
        lambda: Net(
            lambda s, x, y: s.bn(nn.functional.interpolate(s.conv(x), scale_factor=2)) + y.sum(),
            conv=same(), bn=bn(4),
        ),
        4,
    ),
}  # fmt: skip


@pytest.mark.parametrize(("build", "rank"), LINE.values(), ids=LINE)
def test_what_needs_shapes(build, rank):
    """Kept without example inputs, folded with them where it can be."""
    module = double(build())
    report = check(module, two(rank=rank))
    assert reasons(report) == {"bn": "unknown-shape"}
    if rank == 4:
        assert folded(bnfold.fold(module, two()).report) == ["bn"]


def test_a_graph_module_stays_one():
    module = torch.fx.symbolic_trace(double(Net(after_both, a=block(), b=block())))
    report = check(module, two())
    assert folded(report) == ["a.bn", "b.bn"]
    assert isinstance(bnfold.fold(module).model, torch.fx.GraphModule)


def test_what_cannot_be_traced_either():
    module = double(Net(lambda s, x, y: s.bn(s.conv(x)) if y.sum() > 0 else x, conv=conv(), bn=bn(8)))
    with pytest.raises(UsageError, match=r"pass --input.*nor can it be traced.*symbolically traced"):
        bnfold.fold(module)


@pytest.mark.parametrize(
    ("forward", "said"),
    [(if_of_a_type, "the module asks for the dtype of a value"), (if_a_tensor, "Net calls isinstance")],
)
def test_questions_without_an_answer(forward, said):
    """A value of the trace is of no type and kind, so that the branch for it would be a guess."""
    with pytest.raises(UsageError, match=said):
        bnfold.fold(double(Net(forward, conv=same(), bn=bn(4))))


def test_inferred_inputs_are_named():
    module = double(Chain(conv=conv(), bn=bn(8)))
    assert "input 2x4x224x224 was inferred" in bnfold.fold(module).report.notes[0]


# ---------------------------------------------------------------------- in parts


def at_the_end(self, x):
    return positive(self.body(x))


def in_between(self, x):
    return self.tail(positive(self.body(x)))


def outside(self, x):
    return positive(self.bn(self.body(x)))


def by_turns(self, x):
    for layer in self.layers:
        x = positive(layer(x))
    return x


def at_two_sizes(self, x):
    return positive(self.body(x).mean((2, 3)) + self.body(x[:, :, :5, :5]).mean((2, 3)))


def sometimes(self, x):
    y = self.body(x)
    return self.other(y) if y.sum() > 1e9 else y


def reading(self, x):
    y = positive(self.body(x))
    return y * self.body.bn.weight.reshape(1, -1, 1, 1)


def tied(self, x):
    return positive(self.body(x)) + self.other(x)


def sharing() -> nn.Module:
    net = Net(tied, body=block(4, 8), other=Chain())
    net.other.conv = net.body.conv
    return net


def beside(self, x):
    return self.script(positive(self.body(x)))


def a_little(self, x):
    return positive(self.body(x)) + 1e-4 * self.body.conv.weight.mean()


def into_it(self, given):
    given["y"] = self.bn(self.conv(given["x"]))


def through_a_dictionary(self, x):
    given = {"x": x}
    self.body(given)
    return positive(given["y"])


def counting(net: nn.Module) -> nn.Module:
    """A buffer that every run changes: the runs are the caller's, not bnfold's."""
    net.register_buffer("calls", torch.zeros(()))
    net.register_forward_pre_hook(lambda m, given: m.calls.add_(1) and None)
    net.register_forward_hook(lambda m, given, out: out * m.calls)
    return net


def storing() -> nn.Module:
    def forward(self, x):
        y = self.body(x)
        return positive(y) + self.stored.pop().mean()

    net = Net(forward, body=block())
    net.stored = []
    net.body.register_forward_hook(lambda m, given, out: net_of(m).append(out))
    net.body.store = net.stored
    return net


def net_of(body: nn.Module) -> list:
    return body.store


def tying() -> nn.Module:
    net = Net(tied, body=block(4, 8, bias=False), other=Chain(conv=conv(4, 8, bias=False)))
    net.other.conv.weight = net.body.conv.weight
    return net


def merging() -> nn.Module:
    branches = Net(
        lambda s, x: torch.relu(s.bn3(s.conv3(x)) + s.bn1(s.conv1(x))),
        conv3=nn.Conv2d(4, 8, 3, padding=1), bn3=bn(8), conv1=nn.Conv2d(4, 8, 1), bn1=bn(8),
    )  # fmt: skip
    return Net(at_the_end, body=branches)


PARTS = {
    "the-rest-in-python": (lambda: Net(at_the_end, body=block()), ["body.bn"], {}),
    "two-parts": (lambda: Net(in_between, body=block(), tail=block(8, 4)), ["body.bn", "tail.bn"], {}),
    "a-norm-outside": (lambda: Net(outside, body=block(), bn=bn(8)), ["body.bn"], {"bn": "not-captured"}),
    # Nothing in the part takes it, and what lies beyond is not captured.
    "at-the-border": (
        lambda: Net(at_the_end, body=Chain(bn=bn(4), act=nn.ReLU())), [], {"body.bn": "not-captured"}
    ),
    "nested": (
        lambda: Net(at_the_end, body=Net(in_between, body=block(), tail=block(8, 4))),
        ["body.body.bn", "body.tail.bn"],
        {},
    ),
    "in-a-list": (
        lambda: Net(by_turns, layers=nn.ModuleList([block(4, 4), block(4, 4)])),
        ["layers.0.bn", "layers.1.bn"],
        {},
    ),
    "called-at-two-sizes": (lambda: Net(at_two_sizes, body=block()), ["body.bn"], {}),
    "not-executed": (
        lambda: Net(sometimes, body=block(), other=block(8, 8)), ["body.bn"], {"other.bn": "not-executed"}
    ),
    "read-from-outside": (lambda: Net(reading, body=block()), [], {"body.bn": "not-expressible"}),
    "tied-to-the-outside": (tying, ["body.bn"], {}),
    "branches": (merging, ["body.bn3", "body.bn1"], {}),  # each into its layer: merging takes a graph
    "counting": (lambda: counting(Net(at_the_end, body=block())), ["body.bn"], {}),
    "reading-what-a-hook-stored": (storing, ["body.bn"], {}),
    "through-a-dictionary": (
        lambda: Net(through_a_dictionary, body=Net(into_it, conv=conv(), bn=bn(8))), [], {"body.bn": "not-captured"}
    ),
    "a-layer-that-others-hold": (sharing, ["body.bn"], {}),
    "beside-a-script": (
        lambda: Net(beside, body=block(), script=torch.jit.script(block(8, 8).eval().double())), ["body.bn"], {}
    ),
    "a-little-of-a-weight": (lambda: Net(a_little, body=block()), [], {"body.bn": "not-expressible"}),
    "no-norm": (lambda: Net(at_the_end, body=Chain(conv=conv())), [], {}),
}  # fmt: skip


@pytest.mark.parametrize(("build", "names", "kept"), PARTS.values(), ids=PARTS)
def test_in_parts(build, names, kept):
    module, inputs = double(build()), image()().double()
    report = check(module, inputs, inputs)
    assert folded(report) == names
    assert reasons(report) == kept
    everything = folded(report) + list(reasons(report))
    assert len(everything) == len(set(everything)) == len(report.norms)
    assert any("torch.export cannot capture Net" in n for n in report.notes)


def test_the_exporters_first_line_is_the_reason():
    module = double(Net(outside, body=block(), bn=bn(8)))
    (kept,) = bnfold.plan(module, image()().double()).kept
    (why,) = kept.reasons
    assert why.at == "bn"
    assert why.detail.startswith("torch.export cannot capture Net: ")
    assert "\n" not in why.detail


def test_bytes_added_for_a_weight_that_is_tied_to_the_outside():
    module, inputs = double(tying()), image()().double()
    result = bnfold.fold(module, inputs)
    assert result.report.bytes_added == module.body.conv.weight.nbytes
    untouched = bnfold.fold(module, inputs, skip="body.bn")
    assert untouched.report.bytes_added == 0
    assert untouched.model.other.conv.weight is untouched.model.body.conv.weight


def test_selection_goes_by_full_names():
    module, inputs = double(Net(in_between, body=block(), tail=block(8, 4))), image()().double()
    report = bnfold.fold(module, inputs, only="tail.*").report
    assert folded(report) == ["tail.bn"]
    assert reasons(report) == {"body.bn": "excluded"}


def test_broken_statistics_go_by_full_names():
    module = double(Net(at_the_end, body=block()))
    module.body.bn.running_var[3] = float("nan")
    with pytest.raises(bnfold.BnfoldError, match=r"body\.bn: variance\[3\] = nan"):
        bnfold.fold(module, image()().double())


def in_regions(self, x):
    y = self.conv(x)
    with torch.enable_grad():
        z = self.bn(y)
        with torch.autocast("cpu", enabled=False):
            return z.relu(), self.other(x)


def under_autocast(self, x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return self.bn(self.conv(x))


@pytest.mark.parametrize("exported", [False, True], ids=["module", "program"])
def test_regions_without_effect_in_inference(exported):
    module, x = double(Net(in_regions, conv=conv(), bn=bn(8), other=conv())), image()().double()
    with torch.no_grad():
        want = module(x)
    result = bnfold.fold(torch.export.export(module, (x,))) if exported else bnfold.fold(module, x)
    assert folded(result.report) == ["bn"]
    compare(run(result.model.module() if exported else result.model, x), want, EXACT)


def test_a_region_in_another_type_is_not_entered():
    module, x = Net(under_autocast, conv=conv(), bn=bn(8)).eval(), image()()
    result = bnfold.fold(module, x)
    (kept,) = result.report.kept
    assert kept.reasons[0].reason == "not-captured"
    assert kept.reasons[0].detail == "it stands in a nested graph"
    assert torch.equal(result.model(x), module(x))


def test_detection_network():
    """torchvision's detectors take lists of pictures and select boxes: the backbone is a part."""
    models = pytest.importorskip("torchvision.models.detection")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = models.ssdlite320_mobilenet_v3_large(weights=None, weights_backbone=None, num_classes=4)
    module = double(module)
    pictures = ([torch.rand(3, 320, 320, dtype=torch.float64, generator=torch.Generator().manual_seed(1))],)
    result = bnfold.fold(module, pictures)
    kinds = Counter(reasons(result.report).values())
    assert len(folded(result.report)) == len(result.report.norms), kinds
    assert type(result.model) is type(module)
    features = torch.randn(2, 3, 320, 320, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    compare(run(result.model.backbone, features), run(module.backbone, features), EXACT)
