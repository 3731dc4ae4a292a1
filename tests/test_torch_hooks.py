"""What is attached to modules: forward hooks, and weights that are computed when they are read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch_models import Case, Chain, bn, check, compare, conv, image, row, run

import bnfold


def hooked(at: str, hook: Callable, pre: bool = False) -> Callable[[], nn.Module]:
    """Convolution, norm, tanh; the hook on one of them."""

    def build():
        m = Chain(conv=conv(), bn=bn(8), act=nn.Tanh())
        part = m.get_submodule(at)
        (part.register_forward_pre_hook if pre else part.register_forward_hook)(hook)
        return m

    return build


def cube(module, inputs, output):
    return output**3


def triple(module, inputs, output):
    return output * 3


def watch(module, inputs, output):
    assert output.dim() == 4


def cube_before(module, inputs):
    return (inputs[0] ** 3,)


def watch_before(module, inputs):
    assert inputs[0].dim() == 4


@pytest.mark.parametrize(
    "case",
    [
        row("changes-the-layer", hooked("conv", cube), image(), kept={"bn": "hooked unsupported-op"}),
        row(
            "changes-the-norms-input",
            hooked("bn", cube_before, pre=True),
            image(),
            kept={"bn": "hooked unsupported-op"},
        ),
        row("changes-the-norm", hooked("bn", cube), image(), "bn", same_class=False),
        row("changes-the-layers-input", hooked("conv", cube_before, pre=True), image(), "bn"),
        row("changes-what-follows", hooked("act", cube), image(), "bn"),
        row("scales-the-layer", hooked("conv", triple), image(), "bn", same_class=False),
        row("watches-the-layer", hooked("conv", watch), image(), "bn"),
        row("watches-the-norm", hooked("bn", watch), image(), "bn"),
        row("watches-the-norms-input", hooked("bn", watch_before, pre=True), image(), "bn"),
        row("watches-the-network", hooked("", watch), image(), "bn"),
    ],
)
def test_forward_hooks(case: Case):
    check(case)


@pytest.mark.parametrize("at", ["conv", "bn", "act", ""])
def test_hooks_that_watch_come_along(at):
    """On the result too, the norm's on what stands in its place."""
    case = Case("watched", hooked(at, watch), image())
    module, seen = case.make(), []
    module.get_submodule(at).register_forward_hook(lambda m, i, o: seen.append(o.detach()))
    result = bnfold.fold(module, case.given())
    seen.clear()
    output = run(result.model, case.given())
    assert len(seen) == 1
    assert not result.report.notes
    if at:
        run(module, case.given())
        if at != "conv":
            compare(seen[0], seen[1].double(), 1e-5)
    else:
        assert torch.equal(seen[0], output)


def test_a_graph_says_that_hooks_are_not_called():
    case = Case("lost", hooked("bn", cube), image())
    report = bnfold.fold(case.make(), case.given()).report
    assert any("hooks" in note for note in report.notes)


# ---------------------------------------------------------------------- weights that are computed


class Symmetric(nn.Module):
    def forward(self, w):
        return (w + w.transpose(2, 3)) / 2


def old_weight_norm() -> nn.Module:
    with pytest.warns(FutureWarning):
        return Chain(conv=nn.utils.weight_norm(conv()), bn=bn(8))


def parametrized(at: str, name: str, how: nn.Module) -> nn.Module:
    m = Chain(conv=conv(), bn=bn(8))
    parametrize.register_parametrization(m.get_submodule(at), name, how)
    return m


def pruned() -> nn.Module:
    m = Chain(conv=conv(), bn=bn(8))
    prune.random_unstructured(m.conv, "weight", 0.5)
    return m


@pytest.mark.parametrize(
    "case",
    [
        row("old-weight-norm", old_weight_norm, image(), "bn"),
        row("weight-norm", lambda: Chain(conv=parametrizations.weight_norm(conv()), bn=bn(8)), image(), "bn"),
        row(
            "weight-norm-transposed",
            lambda: Chain(up=parametrizations.weight_norm(nn.ConvTranspose2d(4, 6, 3, 2), dim=1), bn=bn(6)),
            image(),
            "bn",
        ),
        row("spectral-norm", lambda: Chain(conv=parametrizations.spectral_norm(conv()), bn=bn(8)), image(), "bn"),
        row("old-spectral-norm", lambda: Chain(conv=nn.utils.spectral_norm(conv()), bn=bn(8)), image(), "bn"),
        row(
            "orthogonal",
            lambda: Chain(
                fc=nn.Flatten(), lin=parametrizations.orthogonal(nn.Linear(4 * 7 * 8, 6)), bn=nn.BatchNorm1d(6)
            ),
            image(),
            "bn",
        ),
        row("symmetric", lambda: parametrized("conv", "weight", Symmetric()), image(), "bn"),
        row("bias", lambda: parametrized("conv", "bias", nn.Softplus()), image(), "bn"),
        row("pruned", pruned, image(), "bn"),
    ],
)
def test_computed_weights(case: Case):
    """The graph holds the folded weight; the argument keeps what its weights are computed from."""
    check(replace(case, same_class=False))


def test_a_parametrized_norm():
    check(Case("gamma", lambda: parametrized("bn", "weight", nn.Softplus()), image(), ("bn",)))
