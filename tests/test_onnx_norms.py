"""ONNX: what counts as a norm, in every opset and spelling; types and ranges; statistics that are broken."""

import numpy as np
import pytest
from onnx_models import BF16, add_initializers, check, gentle, initializer, model, norm

import bnfold

CONV_NORM = "(float[N,3,6,5] x) => (float[N,4,4,3] y) {{ c = Conv(x, w) [n] y = {0} }}"
ARRAYS = {"w": (4, 3, 3, 3), "n": 4}


def conv_norm(spelling: str, opset: int, **options):
    return model(CONV_NORM.format(spelling), opset=opset, **{**ARRAYS, **options})


# ---------------------------------------------------------------------- BatchNormalization by opset

FOLDS = {  # spelling, opset
    "opset-1": ("BN<is_test=1, epsilon: float=0.001>(c, n)", 1),
    "opset-1-default-epsilon": ("BN<is_test=1>(c, n)", 1),
    "opset-6": ("BN<is_test=1, spatial=1>(c, n)", 6),
    "opset-7": ("BN(c, n)", 7),
    "opset-8-momentum": ("BN<momentum: float=0.5, spatial=1>(c, n)", 8),
    "opset-9": ("BN(c, n)", 9),
    "opset-13-epsilon": ("BN<epsilon: float=0.01>(c, n)", 13),
    "opset-14": ("BN(c, n)", 14),
    "opset-14-inference": ("BN<training_mode=0>(c, n)", 14),
    "opset-15": ("BN(c, n)", 15),
    "opset-22": ("BN(c, n)", 22),
    "epsilon-zero": ("BN<epsilon: float=0.0>(c, n)", 17),
    "epsilon-large": ("BN<epsilon: float=2.5>(c, n)", 17),
}


@pytest.mark.parametrize("kind", FOLDS)
def test_inference_form_folds(kind):
    spelling, opset = FOLDS[kind]
    checked = opset > 1  # the checker knows no consumed_inputs-free form of opset 1
    check(conv_norm(spelling, opset), folded=["n"], nodes=["Conv"], checked=checked)


TRAINS = {
    "opset-1": ("[n] y = BN(c, n)", 1),
    "opset-6": ("[n] y = BN<is_test=0>(c, n)", 6),
    "opset-14": ("[n] y, rm, rv = BN<training_mode=1>(c, n)", 14),
    "opset-15": ("[n] y, rm, rv = BN<training_mode=1>(c, n)", 15),
    "opset-15-one-output": ("[n] y = BN<training_mode=1>(c, n)", 15),
    "opset-9-five-outputs": ("[n] y, m2, v2, m3, v3 = BN(c, n)", 9),
    "opset-7-two-outputs": ("[n] y, m2 = BN(c, n)", 7),
}


@pytest.mark.parametrize("kind", TRAINS)
def test_training_form_stays(kind):
    spelling, opset = TRAINS[kind]
    m = model(CONV_NORM.replace("[n] y = {0}", spelling).format(), opset=opset, **ARRAYS)
    check(m, kept={"n": "training-mode"}, nodes=["Conv", "BatchNormalization"], checked=False)


def test_outputs_of_an_inference_norm_that_somebody_reads():
    """Opset 6 with is_test=1 has no other outputs to offer; whoever reads them keeps the norm."""
    text = CONV_NORM.replace(
        "[n] y = {0}", "[n] q, r, s, t, u = BN<is_test=1>(c, n) y = Add<broadcast=1, axis=1>(q, r)"
    )
    assert [k.norm for k in bnfold.plan(model(text.format(), opset=6, **ARRAYS)).kept] == ["n"]


@pytest.mark.parametrize("opset", [1, 6, 7, 8])
def test_one_value_per_element_before_opset_9(opset):
    """With spatial=0 the parameters have the shape of a sample: no layer's channels."""
    is_test = "is_test=1, " if opset < 7 else ""
    arrays = {k: v.reshape(4, 4, 3) for k, v in norm("n", 48).items()}
    m = model(CONV_NORM.format(f"BN<{is_test}spatial=0>(c, n)"), opset=opset, w=(4, 3, 3, 3), **arrays)
    check(m, kept={"n": "not-per-channel"}, checked=opset > 1)


def test_one_value_per_element_that_is_one_per_channel():
    """spatial=0 with equal values over each channel is an ordinary norm, and one that takes up a Mul keeps its form."""
    wide = {k: np.broadcast_to(v.reshape(4, 1, 1), (4, 4, 3)).copy() for k, v in norm("n", 4).items()}
    m = model(CONV_NORM.format("BN<spatial=0>(c, n)"), opset=8, w=(4, 3, 3, 3), **wide)
    check(m, folded=["n"], nodes=["Conv"])
    m = model(
        "(float[N,4,4,3] x) => (float[N,4,4,3] y) { a = Sigmoid(x) [k] b = Mul(a, k) "
        "[n] c = BN<spatial=0>(b, n) y = Sigmoid(c) }",
        opset=8, k=(4, 1, 1), **wide,
    )  # fmt: skip
    check(m, affine=["k"], kept={"n": "unsupported-op"})


RANKS = {
    "gemm": ("(float[N,4] x) => (float[N,5] y) { c = Gemm(x, w) [n] y = BN(c, n) }", (4, 5)),
    "conv1d": ("(float[N,4,9] x) => (float[N,5,7] y) { c = Conv(x, w) [n] y = BN(c, n) }", (5, 4, 3)),
    "conv3d": ("(float[N,4,3,4,5] x) => (float[N,5,2,3,4] y) { c = Conv(x, w) [n] y = BN(c, n) }", (5, 4, 2, 2, 2)),
}


@pytest.mark.parametrize("kind", RANKS)
def test_norm_of_every_rank(kind):
    text, shape = RANKS[kind]
    check(model(text, w=shape, n=5), folded=["n"])


def test_norm_of_a_vector_has_one_channel():
    m = model("(float[6] x) => (float[6] y) { a = Sigmoid(x) [k] b = Mul(a, k) [n] y = BN(b, n) }", k=(), n=1)
    check(m, affine=["k"], kept={"n": "unsupported-op"}, limit=2e-6)


# ---------------------------------------------------------------------- norms spelled as arithmetic

SPELLINGS = {  # nodes behind c, by which y follows; mean and friends are initializers
    "sub-div-mul-add": (
        "e = Add(var, eps) r = Sqrt(e) a = Sub(c, mean) b = Div(a, r) d = Mul(b, gamma) y = Add(d, beta)"
    ),
    "swapped": "e = Add(eps, var) r = Sqrt(e) a = Sub(c, mean) b = Div(a, r) d = Mul(gamma, b) y = Add(beta, d)",
    "reciprocal": (
        "e = Add(var, eps) q = Sqrt(e) r = Reciprocal(q) a = Sub(c, mean) b = Mul(a, r) d = Mul(b, gamma) "
        "y = Add(d, beta)"
    ),
    "power": (
        "e = Add(var, eps) r = Pow(e, minus_half) a = Sub(c, mean) b = Mul(a, r) d = Mul(b, gamma) y = Add(d, beta)"
    ),
    "one-over": (
        "e = Add(var, eps) q = Sqrt(e) r = Div(one, q) a = Sub(c, mean) b = Mul(r, a) "
        "d = Mul(b, gamma) y = Add(d, beta)"
    ),
    "scale-then-shift": (
        "e = Add(var, eps) q = Sqrt(e) r = Div(gamma, q) t = Mul(mean, r) u = Sub(beta, t) b = Mul(c, r) y = Add(b, u)"
    ),
    "without-affine": "e = Add(var, eps) r = Sqrt(e) a = Sub(c, mean) y = Div(a, r)",
    "add-of-minus-mean": "e = Add(var, eps) r = Sqrt(e) z = Neg(mean) a = Add(c, z) b = Div(a, r) y = Mul(b, gamma)",
    "through-constants": (
        "half = Constant<value_float=-0.5>() e = Add(var, eps) p = Pow(e, half) r = Identity(p) "
        "a = Sub(c, mean) b = Mul(a, r) y = Add(b, beta)"
    ),
}


@pytest.mark.parametrize("kind", SPELLINGS)
def test_arithmetic_over_statistics_is_one_norm(kind):
    m = model(
        f"(float[N,3,6,5] x) => (float[N,4,4,3] y) {{ c = Conv(x, w) {SPELLINGS[kind]} }}",
        w=(4, 3, 3, 3), eps=np.float32(1e-3), minus_half=np.float32(-0.5), one=np.float32(1),
        **{k.replace("n_", {"s": "gamma", "b": "beta", "m": "mean", "v": "var"}[k[-1]])[:-1]: v.reshape(4, 1, 1)
           for k, v in gentle("n", 4).items()},
    )  # fmt: skip
    result = bnfold.fold(m)
    assert len(result.report.norms) == 1
    assert result.report.norms[0].op == "arithmetic"
    assert result.report.norms[0].channels == 4
    check(m, folded=[result.report.norms[0].norm], nodes=["Conv"], limit=2e-6)


def test_batch_renormalization_stores_the_deviation():
    """In evaluation it divides by the running deviation, of which there is no root to see but in its name."""
    m = model(
        "(float[N,3,6,5] x) => (float[N,4,4,3] y) { c = Conv(x, w) t = Transpose<perm=[0,3,2,1]>(c) "
        "a = Sub(t, mean) b = Div(a, deviation) d = Mul(gamma, b) e = Add(d, beta) "
        "y = Transpose<perm=[0,3,2,1]>(e) }",
        w=(4, 3, 3, 3), mean=(4,), gamma=np.array([0.7, -1.3, 0.0, 1e-6]), beta=(4,),
        deviation=np.array([1e-3, 1e3, 0.5, 2.0]),
    )  # fmt: skip
    assert bnfold.plan(m).norms == ()
    for t in m.graph.initializer:
        t.name = t.name.replace("deviation", "bn.running_std")
    m.graph.node[3].input[1] = "bn.running_std"
    result = check(m, folded=["a"], nodes=["Conv", "Transpose", "Transpose"])
    assert result.report.norms[0].op == "arithmetic"


def test_norm_spelled_as_arithmetic_that_stays_is_named_once():
    m = model(
        f"(float[N,4,4,3] x) => (float[N,4,4,3] z) {{ c = Sigmoid(x) {SPELLINGS['sub-div-mul-add']} z = Sigmoid(y) }}",
        eps=np.float32(1e-3), gamma=(4, 1, 1), beta=(4, 1, 1), mean=(4, 1, 1), var=np.full((4, 1, 1), 0.5, np.float32),
    )  # fmt: skip
    check(m, kept={"a": "unsupported-op"})


def test_norm_spelled_as_arithmetic_takes_up_another():
    m = model(
        f"(float[N,4,4,3] x) => (float[N,4,4,3] z) {{ x1 = Sigmoid(x) "
        f"[n] c = BN(x1, n) {SPELLINGS['sub-div-mul-add']} z = Sigmoid(y) }}",
        eps=np.float32(1e-3), gamma=(4, 1, 1), beta=(4, 1, 1), mean=(4, 1, 1), var=np.full((4, 1, 1), 0.5, np.float32),
        **{k: v.astype(np.float32) for k, v in gentle("n", 4).items()},
    )  # fmt: skip
    result = check(m, folded=["n"], kept={"a": "unsupported-op"}, nodes=["Sigmoid", "Mul", "Add", "Sigmoid"])
    assert [n.output[0] for n in result.model.graph.node] == ["x1", "a", "y", "z"]


# ---------------------------------------------------------------------- element types

TYPES = {"float16": (np.float16, "float16"), "bfloat16": (BF16, "bfloat16"), "double": (np.float64, "double")}


@pytest.mark.parametrize("op", ["conv", "gemm", "matmul"])
@pytest.mark.parametrize("kind", TYPES)
def test_parameters_keep_their_type(kind, op):
    dtype, word = TYPES[kind]
    text, shape = {
        "conv": ("(T[N,4,5,6] x) => (T[N,5,4,4] y) { c = Conv(x, w) [n] y = BN(c, n) }", (5, 4, 2, 3)),
        "gemm": ("(T[N,4] x) => (T[N,5] y) { c = Gemm(x, w, b) [n] y = BN(c, n) }", (4, 5)),
        "matmul": ("(T[N,4] x) => (T[N,5] y) { c = MatMul(x, w) [n] y = BN(c, n) }", (4, 5)),
    }[op]
    arrays = {k: v.astype(dtype) for k, v in gentle("n", 5).items()}
    m = model(text.replace("T[", f"{word}["), opset=22, dtype=dtype, w=shape, b=(5,), **arrays)
    if op != "gemm":
        m.graph.initializer.remove(next(t for t in m.graph.initializer if t.name == "b"))
    result = check(m, folded=["n"])
    assert {t.data_type for t in result.model.graph.initializer} == {m.graph.initializer[0].data_type}


MIXED = {"half": np.float16, "bfloat16": BF16}


@pytest.mark.parametrize("kind", MIXED)
def test_parameters_of_a_wider_type_than_the_activations(kind):
    """Opset 15: scale and bias may differ in type from the input, mean and variance from both."""
    word = {"half": "float16", "bfloat16": "bfloat16"}[kind]
    arrays = gentle("n", 4)
    wide = {k: v.astype(np.float32 if k[-1] in "sb" else np.float64) for k, v in arrays.items()}
    m = model(
        f"({word}[N,3,6,5] x) => ({word}[N,4,4,3] y) {{ c = Conv(x, w) "
        f"[n] y = BN(c, n) }}", opset=22, dtype=MIXED[kind], w=(4, 3, 3, 3),
    )  # fmt: skip
    add_initializers(m, wide)
    result = check(m, folded=["n"], nodes=["Conv"])
    assert {t.data_type for t in result.model.graph.initializer} == {m.graph.initializer[0].data_type}


# ---------------------------------------------------------------------- what a type cannot hold

RANGES = {  # dtype, weights, gammas, variances, reason
    "float16-overflow": (np.float16, 300.0, 300.0, 1.0, "overflow"),
    "float32-overflow": (np.float32, 1e25, 1.0, 1e-30, "overflow"),
    "float16-underflow": (np.float16, 1e-3, 1.0, 60000.0**2, "underflow"),
    "float32-underflow": (np.float32, 1e-30, 1e-20, 1.0, "underflow"),
}


@pytest.mark.parametrize("kind", RANGES)
def test_a_result_the_type_cannot_hold_keeps_the_norm(kind):
    dtype, weight, gamma, variance, reason = RANGES[kind]
    word = np.dtype(dtype).name.replace("float32", "float")
    ones = np.ones(2)
    arrays = norm("n", 2, s=gamma * ones, v=variance * ones, m=0 * ones, b=ones)
    stored = {
        k: v.astype(np.float32 if kind == "float16-underflow" and k[-1] in "mv" else dtype) for k, v in arrays.items()
    }
    m = model(
        f"({word}[N,2,3,3] x) => ({word}[N,2,2,2] y) {{ c = Conv(x, w) [n] y = BN<epsilon: float=0.0>(c, n) }}",
        w=np.full((2, 2, 2, 2), weight, dtype), **stored,
    )  # fmt: skip
    check(m, kept={"n": reason}, nodes=["Conv", "BatchNormalization"])


def test_a_bias_the_type_cannot_hold_keeps_the_norm():
    arrays = norm("n", 2, s=np.array([1.0, 2.0]), v=np.ones(2), m=np.zeros(2), b=np.zeros(2))
    m = model(
        "(float16[N,2,3,3] x) => (float16[N,2,2,2] y) { c = Conv(x, w, b) [n] y = BN(c, n) }", dtype=np.float16,
        w=(2, 2, 2, 2), b=np.array([1.0, 60000.0]), **arrays,
    )  # fmt: skip
    check(m, kept={"n": "overflow"})


def test_one_fold_too_many_does_not_take_the_others_with_it():
    """The second norm overflows the weight; the first still folds."""
    m = model(
        "(float16[N,2,3,3] x) => (float16[N,2,2,2] y) { c = Conv(x, w) [n] a = BN(c, n) [p] y = BN(a, p) }",
        dtype=np.float16, w=np.full((2, 2, 2, 2), 100.0),
        **norm("n", 2, s=2 * np.ones(2), v=np.ones(2), b=np.zeros(2), m=np.zeros(2)),
        **norm("p", 2, s=1000 * np.ones(2), v=np.ones(2), b=np.zeros(2), m=np.zeros(2)),
    )  # fmt: skip
    check(m, folded=["n"], kept={"p": "overflow"}, nodes=["Conv", "BatchNormalization"])


# ---------------------------------------------------------------------- broken statistics

BROKEN = {  # parameter, channel, value, what the message says
    "nan-variance": ("v", 2, np.nan, "variance[2] = nan"),
    "negative-variance": ("v", 1, -0.5, "variance[1] + epsilon = -0.49999"),
    "infinite-mean": ("m", 0, np.inf, "mean[0] = inf"),
    "nan-gamma": ("s", 3, np.nan, "gamma[3] = nan"),
    "infinite-beta": ("b", 3, -np.inf, "beta[3] = -inf"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_broken_statistics_raise_and_say_where(kind):
    key, channel, value, text = BROKEN[kind]
    arrays = {k: v.astype(np.float32) for k, v in norm("n", 4).items()}
    arrays[f"n_{key}"][channel] = value
    m = model(CONV_NORM.format("BN(c, n)"), w=(4, 3, 3, 3), **arrays)
    with pytest.raises(bnfold.BnfoldError) as e:
        bnfold.fold(m)
    assert type(e.value).__name__ == "BrokenStatisticsError"
    assert f"n: {text}" in str(e.value)
    assert "\n" not in str(e.value)
    check(m, kept={"n": "not-finite"}, nodes=["Conv", "BatchNormalization"], keep_broken=True)
    assert [k.norm for k in bnfold.plan(m).kept] == ["n"]


def test_every_broken_norm_is_named():
    arrays = {k: v.astype(np.float32) for name in "np" for k, v in norm(name, 4).items()}
    arrays["n_v"][0] = arrays["p_m"][1] = np.nan
    m = model(
        "(float[N,3,6,5] x) => (float[N,4,4,3] y) { c = Conv(x, w) [n] a = BN(c, n) [p] y = BN(a, p) }",
        w=(4, 3, 3, 3),
        **arrays,
    )
    with pytest.raises(bnfold.BnfoldError, match=r"n: variance\[0\] = nan; p: mean\[1\] = nan"):
        bnfold.fold(m)


def test_a_variance_below_zero_that_epsilon_lifts():
    arrays = norm("n", 4, v=np.array([-1e-6, 0.0, 1e-12, 1.0]))
    m = model(CONV_NORM.format("BN(c, n)"), w=(4, 3, 3, 3), **arrays)
    check(m, folded=["n"], nodes=["Conv"])


def test_default_epsilon_is_that_of_the_float32_attribute():
    """At variance 0 the scale is 1 / sqrt(epsilon): 1e-5 and float32(1e-5) differ by 1e-8 there."""
    ones = np.ones(4)
    arrays = norm("n", 4, s=ones, v=0 * ones, m=0 * ones, b=0 * ones)
    m = model("(double[N,3,6,5] x) => (double[N,4,4,3] y) { c = Conv(x, w) [n] y = BN(c, n) }", dtype=np.float64,
              w=(4, 3, 3, 3), **arrays)  # fmt: skip
    result = check(m, folded=["n"])
    ratio = initializer(result.model, "w") / initializer(m, "w")
    np.testing.assert_allclose(ratio, 1 / np.sqrt(np.float64(np.float32(1e-5))), rtol=1e-15)


# ---------------------------------------------------------------------- shapes that are not known

UNKNOWN = {  # inputs and outputs, nodes, folds or the reason
    "rank": ("(float[] x) => (float[] y)", "[n] a = BN(x, n) y = Sigmoid(a)", "unknown-shape"),
    "rank-behind-a-conv": ("(float[] x) => (float[] y)", "c = Conv(x, w) [n] y = BN(c, n)", None),
    "symbols": ("(float[N,3,H,W] x) => (float[N,4,h,w2] y)", "c = Conv(x, w) [n] y = BN(c, n)", None),
    "minus-one": ("(float[-1,3,-1,-1] x) => (float[-1,4,-1,-1] y)", "c = Conv(x, w) [n] y = BN(c, n)", None),
    "nothing-but-rank": ("(float[?,?,?,?] x) => (float[?,?,?,?] y)", "c = Conv(x, w) [n] y = BN(c, n)", None),
}


@pytest.mark.parametrize("kind", UNKNOWN)
def test_unknown_shapes(kind):
    header, nodes, reason = UNKNOWN[kind]
    m = model(f"{header} {{ {nodes} }}", w=(4, 3, 3, 3), n=3 if reason else 4)
    feeds = {"x": np.random.default_rng(0).normal(size=(2, 3, 5, 6)).astype(np.float32)}
    if reason:
        check(m, feeds, kept={"n": reason}, checked=False)
    else:
        check(m, feeds, folded=["n"], nodes=["Conv"], checked=False)


# ---------------------------------------------------------------------- what only looks like a norm

LAYER_NORM = (
    "u = ReduceMean<axes=[-1]>(c) d = Sub(c, u) q = Mul(d, d) v = ReduceMean<axes=[-1]>(q) e = Add(v, eps) r = Sqrt(e) "
    "h = Div(d, r) g = Mul(h, gamma) b = Add(g, beta) "
)
NO_NORMS = {  # c is a convolution's result with as many positions as channels; y follows
    "layer-norm": LAYER_NORM + "y = Sigmoid(b)",
    "layer-norm-in-front-of-a-layer": LAYER_NORM + "y = MatMul(b, square)",
    "layer-norm-op": "y = LayerNormalization<axis=-1>(c, gamma, beta)",
    "instance-norm": "i = InstanceNormalization(c, gamma, beta) s = Mul(i, column) y = Add(s, column)",
    "group-norm": (
        "r = Reshape(c, groups) i = InstanceNormalization(r, pair, pair) b = Reshape(i, whole) s = Mul(b, column) "
        "y = Add(s, column)"
    ),
    "prelu-by-hand": "p = Relu(c) m = Neg(c) q = Relu(m) s = Mul(q, column) y = Sub(p, s)",
    "one-over": "y = Div(column, c)",
    "scale-along-the-width": "y = Mul(c, gamma)",
    "shift-along-the-height": "y = Add(c, rows)",
}


@pytest.mark.parametrize("kind", NO_NORMS)
def test_what_only_looks_like_a_norm(kind):
    """No norm is found, and nothing changes."""
    given = {
        "eps": np.float32(1e-5), "gamma": (4,), "beta": (4,), "column": (4, 1, 1), "rows": (4, 1), "pair": (2,),
        "square": (4, 4), "groups": np.array([0, 2, -1]), "whole": np.array([2, 4, 4, 4]),
    }  # fmt: skip
    used = {k: v for k, v in given.items() if f"{k})" in NO_NORMS[kind] or f"{k}," in NO_NORMS[kind]}
    m = model(f"(float[2,3,6,6] x) => (float[N,C,H,W] y) {{ c = Conv(x, w) {NO_NORMS[kind]} }}", w=(4, 3, 3, 3), **used)
    assert check(m).report.norms == ()


def test_a_norm_behind_a_layer_norm_goes_into_its_scale_and_shift():
    m = model(
        f"(float[2,4,4] c) => (float[2,4,4] y) {{ {LAYER_NORM} [n] y = BN(b, n) }}",
        eps=np.float32(1e-5), gamma=(4,), beta=(4,), n=4,
    )  # fmt: skip
    result = check(m, folded=["n"], affine=["g"], limit=2e-6)
    assert [n.op_type for n in result.model.graph.node[-2:]] == ["Mul", "Add"]
