"""Every reason there is, produced by the smallest model that gives it: what stopped the norm, and in which words.

The models go through the assertions of `onnx_models` and `torch_models`, so that each row also shows that the model
computes what it did before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_models
import pytest
import torch
import torch_models
from onnx import ModelProto
from onnx_models import list_inputs, model
from torch import nn
from torch_models import Case, Chain, Net, bn, conv, image

import bnfold
from bnfold import Reason, Report


@dataclass(frozen=True)
class Stays:
    """A model in which the norm `n` stays, and what the report must say: the node that stopped it, and the facts."""

    reason: Reason
    report: Callable[[str], Report]  # the model's, once it is seen that `n` stays for the reason and no number changed
    at: str
    facts: str


def onnx_file(text: str, folded: tuple[str, ...] = (), options: Mapping[str, Any] | None = None, **given: Any):
    """A model in text form, its norm `n` on four channels unless `given` says otherwise."""
    return checked(lambda: model(text, **{"n": 4, "w": (4, 3, 3, 3), **given}), folded, options)


def checked(build: Callable[[], ModelProto], folded: tuple[str, ...] = (), options: Mapping[str, Any] | None = None):
    """The report on an ONNX model."""

    def report(reason: str) -> Report:
        return onnx_models.check(build(), folded=folded, kept={"n": reason}, **(options or {})).report

    return report


def torch_module(build: Callable[[], nn.Module], kept: str, **case: Any) -> Callable[[str], Report]:
    """The report on a module; `kept` are all the reasons of its norm `n`, backward before forward."""
    return lambda reason: torch_models.check(Case(reason, build, image(), kept={"n": kept}, **case))


def a_listed_initializer() -> ModelProto:
    m = model("(float[N,3,6,5] x) => (float[N,4,4,3] y) { c = Conv(x, w) [n] y = BN(c, n) }", w=(4, 3, 3, 3), n=4)
    list_inputs(m, "n_v")
    return m


def of_half_precision(weight: float, gamma: float) -> Callable[[str], Report]:
    ones = np.ones(2)
    return onnx_file(
        "(float16[N,2,3,3] x) => (float16[N,2,2,2] y) { [conv] c = Conv(x, w) [n] y = BN(c, n) }",
        dtype=np.float16, w=np.full((2, 2, 2, 2), weight),
        **onnx_models.norm("n", 2, s=gamma * ones, v=ones, m=0 * ones, b=0 * ones),
    )  # fmt: skip


def negative(**given: np.ndarray) -> dict[str, Any]:
    """A norm with a negative scale and without a shift."""
    gamma, none = np.array([1.0, -0.7, 2.0, 0.5]), np.zeros(4)
    return onnx_models.norm("n", 4, s=gamma, b=none, m=none, **given)


class Branching(nn.Module):
    """A norm in one branch on data."""

    def __init__(self):
        super().__init__()
        self.n = bn(4)

    def forward(self, x):
        return torch.cond(x.sum() > 0, lambda x: self.n(x), lambda x: x.tanh(), (x,))


def left_as_it_is(build: Callable[[], nn.Module], **case: Any) -> Callable[[str], Report]:
    """The report on a module that `check` cannot judge: the result computes the very same, NaN in its place."""

    def report(reason: str) -> Report:
        made = Case(reason, build, image(), **case)
        module, inputs = made.make(), made.given()
        result = bnfold.fold(module, inputs, **made.options)
        for x in (inputs, 100 * inputs, -100 * inputs):
            theirs, ours = (torch_models.run(m, x) for m in (module, result.model))
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
        return result.report

    return report


class LeakyNorm(nn.BatchNorm2d):
    def forward(self, x):
        return nn.functional.leaky_relu(super().forward(x))


def broken(m: Any) -> None:
    m.n.running_var[3:] = -1


def tied() -> nn.Module:
    m = Net(lambda s, x: s.n(s.conv(x)) + s.other(x).tanh(), conv=conv(), other=conv(), n=bn(8))
    m.other.weight = m.conv.weight
    return m


def hooked() -> nn.Module:
    m = Chain(conv=conv(), n=bn(8))
    m.conv.register_forward_hook(lambda module, inputs, output: output**3)
    return m


IMAGE = "(float[N,3,6,5] x) => (float[N,4,4,3] y)"
SAME = "(float[N,4,6,5] x) => (float[N,4,6,5] y)"
STAYS = (
    # The layer in front, or what stands in its place.
    Stays(Reason.MULTIPLE_CONSUMERS, onnx_file(
        "(float[N,3,6,5] x) => (float[N,4,4,3] y, float[N,4,4,3] z) "
        "{ [conv] c = Conv(x, w) [n] y = BN(c, n) [act] z = Sigmoid(c) }"),
        "conv", "its output is read by n, act"),
    Stays(Reason.MODEL_OUTPUT, onnx_file(
        "(float[N,3,6,5] x) => (float[N,4,4,3] y, float[N,4,4,3] c) { c = Conv(x, w) [n] y = BN(c, n) }"),
        "c", "c is an output of the model"),
    Stays(Reason.MODEL_INPUT, onnx_file(f"{SAME} {{ [n] a = BN(x, n) y = Sigmoid(a) }}"),
        "x", "nothing stands before it but x"),
    Stays(Reason.UNSUPPORTED_OP, onnx_file(f"{IMAGE} {{ c = Conv(x, w) [act] a = Sigmoid(c) [n] y = BN(a, n) }}"),
        "act", "Sigmoid does not let a per-channel map pass"),
    Stays(Reason.NOT_PER_CHANNEL, onnx_file(
        "(float[N,4,7] x) => (float[N,4,5] y) { [fc] c = MatMul(x, w) [n] y = BN(c, n) }", w=(7, 5)),
        "fc", "the map varies along dimension 1, the layer's channels are dimension 2"),
    Stays(Reason.REPEATED_CHANNEL, onnx_file(
        "(float[N,3,6,5] x) => (float[N,4,4,3] y) "
        "{ c = Conv(x, w) [pick] t = Gather<axis=1>(c, k) [n] y = BN(t, n) }", k=np.array([0, 1, 1, 3])),
        "pick", "a channel is taken twice"),
    Stays(Reason.UNEQUAL_BRANCHES, onnx_file(
        "(float[N,4,6,5] x, float[N,4,6,5] z) => (float[N,4,6,5] y) { [n] a = BN(x, n) [join] y = Add(a, z) }"),
        "join", "only one summand is scaled"),
    # What lies between.
    Stays(Reason.NONZERO_SHIFT, onnx_file(f"{IMAGE} {{ c = Conv(x, w) [act] a = Relu(c) [n] y = BN(a, n) }}"),
        "act", "only a pure scale passes here, and the map also shifts"),
    Stays(Reason.NEGATIVE_SCALE, onnx_file(
        f"{IMAGE} {{ c = Conv(x, w) [act] a = Relu(c) [n] y = BN(a, n) }}", **negative()),
        "act", "only positive scales pass here"),
    Stays(Reason.PADDED_SHIFT, onnx_file(
        f"{SAME} {{ [n] a = BN(x, n) [conv] y = Conv<pads=[1,1,1,1]>(a, w) }}", w=(4, 4, 3, 3)),
        "conv", "taps are missing at the borders, so a shift is not uniform there"),
    Stays(Reason.UNKNOWN_SHAPE, onnx_file(
        "(float[N,3,H,W] x) => (float[N,C,L] y) { c = Conv(x, w) [view] r = Reshape(c, k) [n] y = BN(r, n) }",
        w=(4, 3, 1, 1), k=np.array([2, -1, 4])),
        "view", "cannot follow the channels from"),
    Stays(Reason.NO_GAIN, onnx_file(
        "(float[N,4] x) => (float[N,5] y, float[N,6] z) { [n] a = BN(x, n) y = MatMul(a, v) z = MatMul(a, w) }",
        v=(4, 5), w=(4, 6)),
        "n", "an operation of the same cost would have to be added elsewhere"),
    # Parameters.
    Stays(Reason.DYNAMIC_PARAMETER, onnx_file(
        "(float[N,3,6,5] x, float[4,3,3,3] k) => (float[N,4,4,3] y) { [conv] c = Conv(x, k) [n] y = BN(c, n) }"),
        "conv", "its weight k is an input"),
    Stays(Reason.OVERRIDABLE_PARAMETER, checked(a_listed_initializer),
        "n", "its variance n_v is also a graph input a caller may set"),
    Stays(Reason.QUANTIZED_PARAMETER, onnx_file(
        "(int64[3] i) => (float[3,4] y) { v = DequantizeLinear(q, k) [look] e = Gather(v, i) [n] y = BN(e, n) }",
        opset=21, q=np.arange(16, dtype=np.int8).reshape(4, 4), k=np.float32(0.1)),
        "look", "its table v is stored as integers"),
    Stays(Reason.OVERFLOW, of_half_precision(weight=300.0, gamma=300.0), "conv", "does not fit into float16"),
    Stays(Reason.UNDERFLOW, of_half_precision(weight=1e-4, gamma=1e-4), "conv", "becomes zero in float16"),
    Stays(Reason.NOT_FINITE, left_as_it_is(
        lambda: Chain(conv=conv(), n=bn(8)), prepare=broken, options={"keep_broken": True}),
        "n", "variance[3] + epsilon = -0.99999"),
    Stays(Reason.TRAINING_MODE, onnx_file(f"{IMAGE} {{ c = Conv(x, w) [n] y, m, v = BN<training_mode=1>(c, n) }}"),
        "n", "training_mode is 1"),
    Stays(Reason.BATCH_STATISTICS, torch_module(
        lambda: Chain(conv=conv(), n=bn(8, track_running_stats=False)), "batch-statistics"),
        "n", "it normalises by the batch's statistics, in evaluation too"),
    # Modules, and what the caller asked for.
    Stays(Reason.SHARED_WEIGHT, torch_module(tied, "shared-weight", options={"keep_class": True}),
        "n", "the weight of conv is used in more than one place"),
    Stays(Reason.NOT_EXPRESSIBLE, torch_module(
        lambda: Chain(conv=conv(), n=LeakyNorm(8)), "not-expressible", options={"keep_class": True}),
        "n", "n (LeakyNorm) does more than normalise"),
    Stays(Reason.NOT_EXECUTED, torch_module(
        lambda: Net(lambda s, x: s.conv(x), conv=conv(), n=bn(3)), "not-executed"),
        "n", "evaluation never calls it"),
    Stays(Reason.NOT_CAPTURED, left_as_it_is(Branching),
        "true_graph_0", "it stands in a nested graph"),
    Stays(Reason.HOOKED, torch_module(hooked, "hooked model-output"),
        "pow_1", "a forward hook on conv computes pow"),
    Stays(Reason.EXCLUDED, onnx_file(
        f"{IMAGE} {{ [conv] c = Conv(x, w) [n] y = BN(c, n) }}", options={"skip": "n"}),
        "n", "not selected by --only / --skip"),
)  # fmt: skip


@pytest.mark.parametrize("case", STAYS, ids=lambda c: str(c.reason))
def test_reason(case: Stays):
    report = case.report(str(case.reason))
    (kept,) = report.kept
    assert kept.norm == "n"
    why = next((r for r in kept.reasons if r.reason is case.reason), None)
    assert why is not None, kept
    assert why.at == case.at
    assert case.facts in why.detail


def test_the_table_is_whole():
    """A reason that no model gives is none."""
    assert [c.reason for c in STAYS] == sorted({c.reason for c in STAYS}, key=[c.reason for c in STAYS].index)
    assert {c.reason for c in STAYS} == set(Reason)
