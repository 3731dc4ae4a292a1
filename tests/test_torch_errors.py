"""What cannot be folded at all: one line that says what was found and what to do, and an argument left as it was."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn
from torch_models import Chain, Net, bn, conv, image, snapshot

import bnfold
from bnfold.errors import UsageError


def block() -> nn.Module:
    return Chain(conv=conv(), bn=bn(8)).eval()


def locked() -> nn.Module:
    m = block()
    m.lock = threading.Lock()
    return m


def said_of(caught) -> str:
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 500
    return message


@pytest.mark.parametrize(
    ("build", "inputs", "said"),
    [
        pytest.param(
            block, torch.randn(2, 3, 8, 8), r"Chain .* shape \(2, 3, 8, 8\).*4 channels, but got 3", id="channels"
        ),
        pytest.param(block, torch.randn(2, 4), r"shape \(2, 4\)", id="rank"),
        pytest.param(block, torch.randn(2, 4, 2, 2), r"shape \(2, 4, 2, 2\).*[Kk]ernel size", id="too-small"),
        pytest.param(block, torch.ones(2, 4, 8, 8, dtype=torch.int64), r"RuntimeError: Input type", id="integers"),
        pytest.param(block, torch.randn(2, 4, 8, 8).double(), r"RuntimeError: Input type", id="other-precision"),
        pytest.param(block, (image()(), image()()), r"takes 2 positional arguments but 3 were given", id="too-many"),
        pytest.param(block, (), r"missing 1 required positional argument", id="none"),
        pytest.param(block, {"picture": image()()}, r"unexpected keyword argument 'picture'", id="keyword"),
        pytest.param(locked, image()(), r"Chain cannot be copied.*lock", id="cannot-be-copied"),
        pytest.param(
            lambda: Chain(conv=nn.LazyConv2d(8, 3), bn=nn.LazyBatchNorm2d()),
            image()(),
            r"conv \(LazyConv2d\) has no weights yet: run a batch",
            id="lazy",
        ),
    ],
)
def test_inputs_that_do_not_fit(build, inputs, said):
    module = build()
    before = snapshot(module) if "Lazy" not in type(next(module.children())).__name__ else None
    with pytest.raises(UsageError, match=said) as caught:
        bnfold.fold(module, inputs)
    said_of(caught)
    assert before is None or snapshot(module) == before


def test_a_module_on_the_meta_device():
    with pytest.raises(UsageError, match=r"conv\.weight is on the meta device, a shape without values") as caught:
        bnfold.fold(block().to("meta"), image()())
    said_of(caught)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        pytest.param(3, "cannot fold a int", id="number"),
        pytest.param(None, "cannot fold a NoneType", id="none"),
        pytest.param(nn.Conv2d, "cannot fold a type", id="class"),
        pytest.param(block().state_dict(), "cannot fold a OrderedDict", id="state-dict"),
        pytest.param(torch.zeros(3), "cannot fold a Tensor", id="tensor"),
        pytest.param(lambda x: x, "cannot fold a function", id="function"),
    ],
)
def test_what_is_no_model(model, said):
    with pytest.raises(UsageError, match=f"{said}: expected an nn.Module") as caught:
        bnfold.fold(model, image()())
    said_of(caught)


def test_torchscript():
    with pytest.warns(FutureWarning):
        script = torch.jit.trace(block(), image()())
    with pytest.raises(UsageError, match=r"TorchScript.*pass the nn.Module it was made from") as caught:
        bnfold.fold(script, image()())
    said_of(caught)


def test_patterns_that_match_nothing():
    with pytest.raises(UsageError, match="'bn3' matches no normalization; the closest are bn") as caught:
        bnfold.fold(block(), image()(), skip="bn3")
    said_of(caught)


def test_inputs_that_cannot_be_guessed():
    module = Net(lambda s, x: s.bn(x["image"]), bn=bn(4)).eval()
    with pytest.raises(UsageError, match="pass --input"):
        bnfold.fold(module)
