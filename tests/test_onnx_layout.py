"""What lies between layers: what a map passes, what it does not and why, against onnx.reference in float64."""

import numpy as np
import pytest
from onnx_models import check, model, norm


def text(body, x="float[2,3,6,5] x", y="float[N,M,H,W] y"):
    return f"({x}) => ({y}) {{ {body} }}"


def between(op, **constants):
    """conv -> op -> norm."""
    return model(text(f"[conv] c = Conv(x, w) [op] p = {op} [n] y = BN(p, n)"), w=(4, 3, 1, 1), n=4, **constants)


PASS = {
    "average pool": "AveragePool<kernel_shape=[2,2]>(c)",
    "average pool, padding not counted": "AveragePool<kernel_shape=[3,3], pads=[1,1,1,1]>(c)",
    "global average pool": "GlobalAveragePool(c)",
    "mean over space": "ReduceMean<axes=[2,3]>(c)",
    "mirrored border": 'Pad<mode="reflect">(c, p1)',
    "repeated border": 'Pad<mode="edge">(c, p1)',
    "nearest": 'Resize<mode="nearest">(c, , twice)',
    "linear": 'Resize<mode="linear">(c, , twice)',
}
CONSTANTS = {
    "p1": np.array([0, 0, 1, 1, 0, 0, 1, 1]),
    "twice": np.array([1, 1, 2, 2], np.float32),
    "floor": np.array([1, 1.2, 2, 1], np.float32),
}


def used(op):
    return {k: v for k, v in CONSTANTS.items() if f"{k})" in op}


@pytest.mark.parametrize("op", PASS.values(), ids=PASS)
def test_any_map_passes(op):
    check(between(op, **used(op)), folded=["n"])


STAY = {
    "relu": ("Relu(c)", "nonzero-shift"),
    "max pool": ("MaxPool<kernel_shape=[2,2]>(c)", "negative-scale"),
    "average pool, padding counted": (
        "AveragePool<kernel_shape=[3,3], pads=[1,1,1,1], count_include_pad=1>(c)", "nonzero-shift"),
    "zero border": ("Pad(c, p1)", "nonzero-shift"),
    "channels resampled into as many": ('Resize<mode="nearest">(c, , floor)', "not-per-channel"),
    "cubic": ('Resize<mode="cubic">(c, , twice)', "unsupported-op"),
}  # fmt: skip


@pytest.mark.parametrize(("op", "reason"), STAY.values(), ids=STAY)
def test_what_a_map_does_not_pass(op, reason):
    negative = norm("n", 4, s=np.array([-1.0, 1.0, 2.0, 0.5], np.float32))
    m = model(text(f"[conv] c = Conv(x, w) [op] p = {op} [n] y = BN(p, n)"), w=(4, 3, 1, 1), **negative, **used(op))
    check(m, kept={"n": reason})


def test_slices_of_an_unknown_number_of_channels_stay():
    m = model(
        "(float[N,C,H,W] x) => (float[N,3,H,W] y) { [n] b = BN(x, n) s = Slice(b, st, en, ax) y = Conv(s, w) }",
        w=(3, 2, 1, 1), n=4, st=np.array([1]), en=np.array([3]), ax=np.array([1]),
    )  # fmt: skip
    check(
        m, {"x": np.random.default_rng(0).standard_normal((2, 4, 3, 3)).astype(np.float32)}, kept={"n": "model-input"}
    )


def test_integers_are_not_negated_in_floating_point():
    m = model("(int64[2,3] x) => (int64[2,3] y) { a = Neg(x) y = Neg(a) }")
    check(m, {"x": np.arange(6).reshape(2, 3)}, nodes=["Neg", "Neg"])


MERGES = {
    "one by one beside three by three": "a = Conv<pads=[1,1,1,1]>(x, w) b = Conv(x, v) y = Add(a, b)",
    "the value itself": "a = Conv<pads=[1,1,1,1]>(x, w) y = Add(x, a)",
    "row beside square": "a = Conv<pads=[1,1,1,1]>(x, w) b = Conv<pads=[0,1,0,1]>(x, r) y = Add(a, b)",
    "dilated beside five by five": (
        "a = Conv<pads=[2,2,2,2]>(x, f) b = Conv<pads=[2,2,2,2], dilations=[2,2]>(x, w) y = Add(a, b)"
    ),
    "strided": "a = Conv<pads=[1,1,1,1], strides=[2,2]>(x, w) b = Conv<strides=[2,2]>(x, v) y = Add(a, b)",
}
KERNELS = {"w": (3, 3, 3, 3), "v": (3, 3, 1, 1), "r": (3, 3, 1, 3), "f": (3, 3, 5, 5)}


def branches(body):
    return model(text(body), **{k: v for k, v in KERNELS.items() if f", {k})" in body})


@pytest.mark.parametrize("body", MERGES.values(), ids=MERGES)
def test_parallel_branches_become_one_layer(body):
    result = check(branches(body), folded=[None], nodes=["Conv"])
    assert [f.direction for f in result.report.folded] == ["merge"]


APART = {
    "other padding": "a = Conv<pads=[1,1,1,1]>(x, w) b = Conv<pads=[0,0,2,2]>(x, w) y = Add(a, b)",
    "row beside column": "a = Conv<pads=[0,1,0,1]>(x, r) b = Conv<pads=[1,0,1,0]>(x, k) y = Add(a, b)",
    "another value": "s = Sigmoid(x) a = Conv(x, v) b = Conv(s, v) y = Add(a, b)",
    "a branch that is read elsewhere": "a = Conv(x, v) b = Conv(x, v) c = Add(a, b) y = Mul(c, b)",
    "strides that differ": "a = Conv<pads=[1,1,1,1]>(x, w) b = Conv<strides=[2,2], pads=[3,2,3,2]>(x, v) y = Add(a, b)",
}


@pytest.mark.parametrize("body", APART.values(), ids=APART)
def test_branches_that_do_not_fit_stay_apart(body):
    kernels = {**KERNELS, "k": (3, 3, 3, 1)}
    m = model(text(body), **{k: v for k, v in kernels.items() if f", {k})" in body})
    result = check(m)
    assert not [f for f in result.report.folded if f.direction == "merge"]


def test_a_repvgg_block_is_one_convolution():
    body = (
        "a = Conv<pads=[1,1,1,1]>(x, w) [n3] a1 = BN(a, n) b = Conv(x, v) [n1] b1 = BN(b, m) [n0] i = BN(x, o)"
        " s = Add(a1, b1) t = Add(s, i) y = Relu(t)"
    )
    m = model(text(body), w=(3, 3, 3, 3), v=(3, 3, 1, 1), n=3, m=3, o=3)
    check(m, folded=["n3", "n1", "n0", None, None], nodes=["Conv", "Relu"])


def test_merging_can_be_turned_off():
    import bnfold

    m = branches(MERGES["the value itself"])
    assert bnfold.fold(m, merge=False).model == m
