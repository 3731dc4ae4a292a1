"""The fuzzer itself: its evaluation is right, it sees a broken rule, and what it reports is small."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch.nn.functional as F
from torch import from_numpy

from bnfold.graphs import onnx_layout

from .arrays import generator_of
from .evaluation import magnitude, run
from .onnx_judge import judge, text
from .onnx_network import draw
from .onnx_nodes import build
from .program import Failure, Program, Step, shrunk

POOLS = {
    "max": (
        Step("max_pool1", ("x",), {"kernel": [3], "strides": [2], "pads": [1]}),
        lambda x: F.max_pool2d(x, 3, 2, 1),
    ),
    "max-dilated": (
        Step("max_pool1", ("x",), {"kernel": [2], "dilations": [2]}),
        lambda x: F.max_pool2d(x, 2, 1, 0, 2),
    ),
    "max-ceil": (
        Step("max_pool1", ("x",), {"kernel": [2], "strides": [2], "ceil_mode": True}),
        lambda x: F.max_pool2d(x, 2, 2, ceil_mode=True),
    ),
    "average": (
        Step("average_pool1", ("x",), {"kernel": [3], "pads": [1]}),
        lambda x: F.avg_pool2d(x, 3, 1, 1, count_include_pad=False),
    ),
    "average-counting": (
        Step("average_pool1", ("x",), {"kernel": [3], "pads": [1], "count_include_pad": True}),
        lambda x: F.avg_pool2d(x, 3, 1, 1),
    ),
    "average-counting-ceil": (
        Step("average_pool1", ("x",), {"kernel": [3], "strides": [2], "pads": [1], "count_include_pad": True,
                                       "ceil_mode": True}),
        lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True),
    ),
    "upsample": (
        Step("resize1", ("x",), {}),
        lambda x: F.interpolate(x, scale_factor=2.0, mode="nearest"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", POOLS)
def test_evaluation_agrees_with_torch(name):
    step, expected = POOLS[name]
    settings = {"opset": 9} if name == "upsample" else {}
    model = build(Program((2, 3, 5, 6), (step,), (step.name,), settings))
    x = generator_of(name).normal(size=(2, 3, 5, 6))
    np.testing.assert_allclose(run(model, {"x": x})[0], expected(from_numpy(x)).numpy(), rtol=1e-13)


def test_magnitude_bounds_every_value():
    for seed in range(60):
        program = draw(seed)
        model = build(program)
        shape, ids = program.shape, program.settings.get("ids")
        rng = generator_of(str(seed))
        x = rng.integers(0, 5, shape) if ids else rng.normal(size=shape)
        for value, bound in zip(run(model, {"x": x}), magnitude(model, {"x": x}), strict=True):
            assert (np.abs(value) <= bound * (1 + 1e-9)).all(), seed


def test_a_broken_rule_is_found_and_reported_small(monkeypatch):
    monkeypatch.setattr(onnx_layout, "_HOMOGENEOUS", frozenset())
    seed = next(s for s in range(500) if judge(draw(s)) is not None)
    small, failure = shrunk(draw(seed), judge)
    assert failure.what == "wrong numbers"
    assert len(small.steps) <= 3
    assert {s.kind for s in small.steps} & {"relu", "leaky_relu", "prelu", "abs"}
    assert eval(str(small), {"Program": Program, "Step": Step}) == small, "it can be pasted into a test"
    assert text(small).count("BatchNormalization") + text(small).count("Mul") + text(small).count("Add")


def test_shrinking_keeps_what_fails_and_nothing_else():
    steps = (
        Step("conv0", ("x",), {"kernel": [3], "pads": [1], "bias": True}),
        Step("relu1", ("conv0",), {}),
        Step("norm2", ("relu1",), {"style": "wild", "epsilon": 0.0}),
        Step("add3", ("norm2", "conv0"), {}),
    )
    program = Program((2, 4, 5, 6), steps, ("add3", "norm2"), {"opset": 11, "free": "batch"})

    def fails(p: Program) -> Failure | None:
        build(p)
        wild = any(s.kind == "norm" and s.get("style") == "wild" for s in p.steps)
        return Failure("wild", "") if wild else None

    small, _ = shrunk(program, fails)
    assert small == Program((1, 1, 1, 1), (Step("norm2", ("x",), {"style": "wild"}),), ("norm2",), {})


def test_models_are_valid_in_every_opset():
    seen = set()
    for seed in range(80):
        program = draw(seed)
        onnx.checker.check_model(build(program), full_check=True)
        seen.add(program.settings["opset"])
    assert seen == {9, 11, 13, 17, 20, 22}
