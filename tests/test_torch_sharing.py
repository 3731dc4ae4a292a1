"""Values, not modules: what is used in two places gets a copy of its own or stays, and nothing is written in place."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch_models import EXACT, Case, Chain, Net, bn, check, compare, image, in_double, row, run
from torchvision.ops import FrozenBatchNorm2d

import bnfold


def conv(inputs: int = 4, outputs: int = 4, **options) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 3, **options)


def two_of_each(forward: Callable, change: Callable | None = None, **options) -> nn.Module:
    """Two convolutions and two norms, wired by `forward` and tied by `change`."""
    m = Net(forward, c1=conv(**options), c2=conv(**options), b1=bn(4), b2=bn(4))
    if change is not None:
        change(m)
    return m


def tie_weights(m):
    m.c2.weight = m.c1.weight


def tie_biases(m):
    m.c2.bias = m.c1.bias


def share_storage(m):
    m.c2.weight = nn.Parameter(m.c1.weight.data)


def same_conv(m):
    m.c2 = m.c1


def same_norm(m):
    m.b2 = m.b1


@pytest.mark.parametrize(
    "case",
    [
        row(
            "block-twice",
            lambda: Net(lambda s, x: s.b(s.c(s.b(s.c(x)))), c=conv(), b=bn(4)),
            image(),
            "b b#2",
            same_class=False,
        ),
        row(
            "block-twice-in-a-row",
            lambda: (lambda c, b: nn.Sequential(c, b, nn.Tanh(), c, b))(conv(), bn(4)),
            image(),
            "1 1#2",
            same_class=False,
        ),
        row(
            "conv-twice",
            lambda: Net(lambda s, x: s.b2(s.c(s.b1(s.c(x)).tanh())), c=conv(), b1=bn(4), b2=bn(4)),
            image(),
            "b1 b2",
            same_class=False,
        ),
        row(
            "conv-twice-one-norm",
            lambda: Net(lambda s, x: s.c(s.b(s.c(x)).tanh()), c=conv(), b=bn(4)),
            image(),
            "b",
            same_class=False,
        ),
        row(
            "norm-twice",
            lambda: Net(lambda s, x: s.b(s.c2(s.b(s.c1(x)).tanh())), c1=conv(), c2=conv(), b=bn(4)),
            image(),
            "b b#2",
            same_class=False,
        ),
        row(
            "frozen-twice",
            lambda: Net(lambda s, x: s.b(s.c2(s.b(s.c1(x)).tanh())), c1=conv(), c2=conv(), b=FrozenBatchNorm2d(4)),
            image(),
            "b b#2",
            same_class=False,
        ),
        row(
            "norm-three-times-one-stays",
            lambda: Net(lambda s, x: s.b(s.c(s.b(s.c(s.b(x).tanh())))), c=conv(), b=bn(4)),
            image(),
            "b#2 b#3",
            {"b": "model-input unsupported-op"},
            same_class=False,
        ),
        row(
            "two-inputs",
            lambda: Net(lambda s, x, y: s.b(s.c(x)) - s.b(s.c(y)).tanh(), c=conv(), b=bn(4)),
            lambda: (image()(), image()()),
            "b b#2",
            same_class=False,
        ),
        row(
            "tied-weights",
            lambda: two_of_each(lambda s, x: s.b1(s.c1(x)).tanh() + s.b2(s.c2(x)).sigmoid(), tie_weights),
            image(),
            "b1 b2",
            same_class=False,
        ),
        row(
            "tied-weights-one-norm",
            lambda: two_of_each(lambda s, x: s.b1(s.c1(x)).tanh() + s.c2(s.b2(x)).sigmoid(), tie_weights, bias=False),
            image(),
            "b1 b2",
            same_class=False,
        ),
        row(
            "tied-biases",
            lambda: two_of_each(lambda s, x: s.b1(s.c1(x)).tanh() + s.b2(s.c2(x)).sigmoid(), tie_biases),
            image(),
            "b1 b2",
            same_class=False,
        ),
        row(
            "shared-storage",
            lambda: two_of_each(lambda s, x: s.b1(s.c1(x)).tanh() + s.b2(s.c2(x)).sigmoid(), share_storage),
            image(),
            "b1 b2",
        ),
        row(
            "conv-under-two-names",
            lambda: two_of_each(lambda s, x: s.b2(s.c2(s.b1(x)).tanh()), same_conv),
            image(),
            "b1",
            {"b2": "unsupported-op model-output"},
        ),
        row(
            "conv-under-two-names-both-called",
            lambda: two_of_each(lambda s, x: s.b2(s.c2(s.b1(s.c1(x)).tanh())), same_conv),
            image(),
            "b1 b2",
            same_class=False,
        ),
        row(
            "norm-under-two-names",
            lambda: two_of_each(lambda s, x: s.c2(s.b2(s.c1(x)).tanh()), same_norm),
            image(),
            "b1",
        ),
        row(
            "norm-under-two-names-both-called",
            lambda: two_of_each(lambda s, x: s.b2(s.c2(s.b1(s.c1(x)).tanh())), same_norm),
            image(),
            "b1 b1#2",
            same_class=False,
        ),
        row("layers-listed-twice", lambda: _listed_twice(), image(), "b"),
    ],
)
def test_modules_and_weights_used_twice(case: Case):
    check(case)


WEIGHT, BIAS = 4 * 4 * 4 * 9, 4 * 4  # bytes of a convolution


COPIES = {  # name: network, folded, kept, bytes that are there twice
    "two-convs-share-a-weight": (
        lambda: two_of_each(lambda s, x: s.b1(s.c1(x)).tanh() + s.c2(x).sigmoid(), tie_weights),
        "b1", {"b2": "not-executed"}, WEIGHT,
    ),
    "and-both-fold": (
        lambda: two_of_each(lambda s, x: s.b1(s.c1(x)).tanh() + s.b2(s.c2(x)).sigmoid(), tie_weights),
        "b1 b2", {}, WEIGHT,
    ),
    "two-convs-share-a-bias": (
        lambda: two_of_each(lambda s, x: s.b1(s.c1(x)).tanh() + s.b2(s.c2(x)).sigmoid(), tie_biases), "b1 b2", {}, BIAS
    ),
    "one-conv-under-two-norms": (
        lambda: Net(lambda s, x: (s.b1(s.c(x)), s.b2(s.c(x.abs()))), c=conv(), b1=bn(4), b2=bn(4)),
        "b1 b2", {}, WEIGHT + BIAS,
    ),
    "one-output-under-two-norms": (
        lambda: two_of_each(lambda s, x: (lambda y: s.b1(y).tanh() + s.b2(y).sigmoid())(s.c1(x))),
        "", {"b1": "multiple-consumers unsupported-op", "b2": "multiple-consumers unsupported-op"}, 0,
    ),
    "conv-called-twice": (lambda: Net(lambda s, x: s.c(s.b(s.c(x)).tanh()), c=conv(), b=bn(4)), "b", {}, WEIGHT + BIAS),
    "norm-called-three-times": (
        lambda: Net(lambda s, x: s.b(s.c1(x)).tanh() + s.b(s.c2(x)).sigmoid() + s.b(s.c3(x)).sin(),
                    c1=conv(), c2=conv(), c3=conv(), b=bn(4)),
        "b b#2 b#3", {}, 0,
    ),
    "conv-whose-output-is-returned": (
        lambda: Net(lambda s, x: (lambda y: (s.b(y), y))(s.c(x)), c=conv(), b=bn(4)),
        "", {"b": "model-output model-output"}, 0,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", COPIES)
def test_copies_are_counted(name):
    """A call site that needs weights of its own gets them, and the report says how many bytes that adds."""
    build, folded, kept, added = COPIES[name]
    case = Case(name, build, image(), tuple(folded.split()), kept, same_class=added == 0 and "three" not in name)
    assert check(case).bytes_added == added


def test_a_table_tied_to_the_output_layer_is_counted():
    def build():
        m = Net(
            lambda s, i: s.fc(s.b(s.table(i)).tanh()),
            table=nn.Embedding(10, 8),
            b=nn.BatchNorm1d(8),
            fc=nn.Linear(8, 10),
        )
        m.fc.weight = m.table.weight
        return m

    case = Case("tied", build, lambda: torch.arange(6), ("b",), same_class=False)
    assert check(case).bytes_added == 4 * 10 * 8


def _listed_twice() -> nn.Module:
    m = Net(lambda s, x: s.features(x), c=conv(), b=bn(4))
    m.features = nn.Sequential(m.c, m.b, nn.Tanh())
    return m


def twice(self, x):
    y = self.c(x)
    return self.b(y).sigmoid() * y.sigmoid()


def returned(self, x):
    y = self.c(x)
    return self.b(y), y


def shape_only(self, x):
    y = self.c(x)
    z = self.b(y)
    return z.reshape(y.shape[0], -1).reshape_as(y) + torch.zeros_like(y) + y.new_ones(z.shape)


def norm_read_twice(self, x):
    y = self.b(self.c(x))
    return y.tanh() * y.sigmoid(), y


def in_two_halves(self, x):
    y = self.b(self.c(x)).flatten(2)
    return y.softmax(2), y.permute(0, 2, 1)


@pytest.mark.parametrize(
    "case",
    [
        row(
            "conv-output-used-twice",
            lambda: Net(twice, c=conv(), b=bn(4)),
            image(),
            kept={"b": "multiple-consumers unsupported-op"},
        ),
        row(
            "conv-output-returned",
            lambda: Net(returned, c=conv(), b=bn(4)),
            image(),
            kept={"b": "model-output model-output"},
        ),
        row("only-its-shape-is-read", lambda: Net(shape_only, c=conv(), b=bn(4)), image(), "b"),
        row("norm-output-used-twice", lambda: Net(norm_read_twice, c=conv(), b=bn(4)), image(), "b"),
        row("norm-output-used-twice-behind-a-view", lambda: Net(in_two_halves, c=conv(), b=bn(4)), image(), "b"),
    ],
)
def test_values_used_twice(case: Case):
    check(case)


# ---------------------------------------------------------------------- in place

ACTIVATIONS = {  # the exporter has functional forms of the first group, and rewrites the program for the second
    "rectifiers": lambda: [nn.ReLU(True), nn.ReLU6(True), nn.LeakyReLU(0.1, True), nn.Hardtanh(inplace=True)],
    "smooth": lambda: [nn.SiLU(True), nn.ELU(inplace=True), nn.Hardswish(True), nn.Hardsigmoid(True), nn.Mish(True)],
    "thresholds": lambda: [nn.Threshold(0.1, 0.2, True), nn.RReLU(inplace=True), nn.CELU(inplace=True)],
    "dropout": lambda: [nn.Dropout(0.5, True), nn.Dropout2d(0.5, True), nn.AlphaDropout(0.5, True)],
}


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_activations_in_place(kind):
    """Each between a norm that folds and the next convolution."""

    def build():
        layers = [part for act in ACTIVATIONS[kind]() for part in (conv(padding=1), bn(4), act)]
        return nn.Sequential(*layers)

    count = len(ACTIVATIONS[kind]())
    check(Case(kind, build, image(), tuple(str(3 * k + 1) for k in range(count))))


def residual(self, x):
    out = self.b2(self.c2(torch.relu(self.b1(self.c1(x)))))
    out += x
    return out.relu_()


def downsampled(self, x):
    out, identity = self.b2(self.c2(x)), self.b1(self.c1(x))
    out += identity
    return out.relu_()


def slice_after(self, x):
    y = self.b(self.c(x))
    y[:, :2].tanh_()
    return y


def slice_of_the_input_before(self, x):
    y = self.c(x)
    z = self.b(y[:, :2])
    y[:, :2].sigmoid_()
    return z, y


def set_before(self, x):
    y = self.c(x)
    y[:, 0] = 0.5
    return self.b(y)


def add_before(self, x):
    y = self.c(x)
    y += 1
    return self.b(y)


def clamped(self, x):
    y = self.b(self.c(x))
    y.clamp_(-1, 1)
    y.masked_fill_(y > 0.5, 0.25)
    return y.mul_(2).sub_(1)


def through_dropout(self, x):
    y = self.drop(self.c(x))
    z = self.b(y)
    return z.sigmoid_() * 2


@pytest.mark.parametrize(
    "case",
    [
        row("residual", lambda: two_of_each(residual, padding=1), image(), "b1 b2"),
        row("residual-downsampled", lambda: two_of_each(downsampled), image(), "b1 b2", same_class=False),
        row("slice-of-the-output", lambda: Net(slice_after, c=conv(), b=bn(4)), image(), "b"),
        row("slice-of-the-input", lambda: Net(slice_of_the_input_before, c=conv(), b=bn(2)), image(), kept={"b": "*"}),
        row(
            "set-before",
            lambda: Net(set_before, c=conv(), b=bn(4)),
            image(),
            kept={"b": "unsupported-op model-output"},
        ),
        row("add-before", lambda: Net(add_before, c=conv(), b=bn(4)), image(), "b", same_class=False),
        row("clamped", lambda: Net(clamped, c=conv(), b=bn(4)), image(), "b"),
        row(
            "dropout-returns-its-argument",
            lambda: Net(through_dropout, c=conv(), b=bn(4), drop=nn.Dropout()),
            image(),
            "b",
        ),
    ],
)
def test_in_place_behind_a_layer(case: Case):
    check(case)


def scaled_output(self, x):
    y = self.b(x)
    y.mul_(2)
    return self.c(y)


def scaled_view(self, x):
    y = self.b(x)
    y.view(y.shape[0], 4, -1).mul_(2)
    return self.c(y)


def scaled_behind_dropout(self, x):
    y = self.drop(self.b(x))
    y.mul_(2)
    return self.c(y)


def input_overwritten(self, x):
    h = x.tanh()
    y = self.b(h)
    h.relu_()
    return self.c(y)


def base_of_the_input_overwritten(self, x):
    h = x.tanh()
    y = self.b(h.view(h.shape))
    h.mul_(3)
    return self.c(y), h


def users_input_overwritten(self, x):
    y = self.b(x)
    x.mul_(3)
    return self.c(y)


@pytest.mark.parametrize(
    "forward",
    [scaled_output, scaled_view, scaled_behind_dropout, input_overwritten, base_of_the_input_overwritten],
    ids=lambda f: f.__name__,
)
def test_in_place_in_front_of_a_layer(forward):
    """With Identity for the norm its output would be its input, and the operation write into that: a graph is right."""
    build = lambda: Net(forward, c=conv(), b=bn(4), drop=nn.Dropout())  # noqa: E731
    check(Case(forward.__name__, build, image(), ("b",), same_class=False))


def test_a_model_that_writes_into_its_input_still_does():
    case = Case("writes", lambda: Net(users_input_overwritten, c=conv(), b=bn(4)), image(), dtype=torch.float64)
    given = in_double(case.given())
    result = bnfold.fold(case.make().double(), given)
    assert torch.equal(given, in_double(case.given())), "the example inputs were overwritten"
    ours, theirs = given.clone(), given.clone()
    compare(run(result.model, ours), run(case.make().double(), theirs), EXACT)
    assert torch.equal(ours, theirs)
    assert [f.norm for f in result.report.folded] == ["b"]


class Counter(nn.Module):
    """Counts its calls in a buffer."""

    def __init__(self, functional: bool):
        super().__init__()
        self.c, self.b, self.functional = conv(), bn(4), functional
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls.add_(1)
        y = nn.functional.conv2d(x, self.c.weight) if self.functional else self.c(x)
        return self.b(y) * self.calls


@pytest.mark.parametrize("functional", [False, True], ids=["tree", "graph"])
def test_buffers_that_change(functional):
    """Folding runs the network; the result starts where the argument stands, and goes on counting."""
    case = Case("counter", lambda: Counter(functional), image(), ("b",), same_class=not functional)
    check(case)
    result = bnfold.fold(case.make(), case.given())
    assert float(result.model.state_dict()["calls"]) == 0
    run(result.model, case.given())
    assert float(result.model.state_dict()["calls"]) == 1


def test_a_weight_that_changes_is_no_constant():
    def forward(self, x):
        self.w.add_(1.0)
        return self.b2(nn.functional.conv2d(self.b1(self.c1(x)), self.w))

    build = lambda: Net(forward, c1=conv(), b1=bn(4), w=torch.randn(4, 4, 3, 3), b2=bn(4))  # noqa: E731
    check(Case("mutated", build, image(), ("b1",), {"b2": "dynamic-parameter model-output"}))


def test_the_result_takes_other_weights():
    """Same class, same names: `functional_call` and `load_state_dict` work on what came back."""
    case = Case("weights", lambda: Chain(c=conv(bias=False), b=bn(4), last=conv()), image())
    folded = bnfold.fold(case.make(), case.given()).model
    assert set(folded.state_dict()) == {"c.weight", "c.bias", "last.weight", "last.bias"}
    x, twin = image()(), {k: v.clone() for k, v in folded.state_dict().items()}
    assert torch.equal(functional_call(folded, twin, (x,)), folded(x))
    folded.load_state_dict(twin)


class WithoutBias(nn.Conv2d):
    """A layer that takes a bias, and forgets it."""

    def forward(self, x):
        return nn.functional.conv2d(x, self.weight)


def overwriting(s, x):
    t = x * 1
    u = s.b1(t)
    u -= 1
    return s.c1(u) + t


@pytest.mark.parametrize(
    ("build", "reason", "detail"),
    [
        (
            lambda: Net(lambda s, x: s.b1(s.c1(x)) + nn.functional.conv2d(x, s.c1.weight), c1=conv(), b1=bn(4)),
            "shared-weight",
            "the weight of c1 is used in more than one place",
        ),
        (
            lambda: two_of_each(lambda s, x: s.b1(s.c1(x)), tie_weights),
            "shared-weight",
            "the weight of c1 is used in more than one place",
        ),
        (
            lambda: Net(lambda s, x: s.b1(s.c2(s.b1(s.c1(x)).tanh())), c1=conv(), c2=conv(), b1=bn(4)),
            "not-expressible",
            "b1 is not a module of its own, called once",
        ),
        (
            lambda: Chain(c1=WithoutBias(4, 4, 3, bias=False), b1=bn(4)),
            "not-expressible",
            "conv2d (WithoutBias) ignores a bias",
        ),
        (
            lambda: Net(overwriting, b1=bn(4), c1=nn.Conv2d(4, 4, 1)),
            "not-expressible",
            "an in-place operation would write into what b1 reads",
        ),
    ],
    ids=[
        "read-by-a-function",
        "tied-to-a-layer-that-is-not-called",
        "norm-called-twice",
        "bias-ignored",
        "overwritten",
    ],
)
def test_what_the_class_cannot_hold(build, reason, detail):
    """Known from what the module holds and calls, before it is tried."""
    case = Case("kept", build, image(), dtype=torch.float64)
    module, x = case.make().double(), in_double(case.given())
    result = bnfold.fold(module, x, keep_class=True)
    first = next(k for k in result.report.kept if k.norm == "b1").reasons[0]
    assert (first.reason, first.detail) == (reason, detail)
    compare(run(result.model, x), run(module, x), EXACT)
