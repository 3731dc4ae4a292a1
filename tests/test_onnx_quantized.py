"""ONNX: weights stored as integers. Maps move into their scales; an integer weight never becomes a float one."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto
from onnx_models import Array, check, every_node, gentle, initializer, model, norm, ops, rng_of

import bnfold

HEAD = "(float[N,3,6,5] x) => (float[N,4,4,3] y)"
CONV = f"{HEAD} {{ w = DequantizeLinear<axis = 0>(q, s, z) c = Conv(x, w, b) [n] y = BN(c, n) }}"
FLAT = "(float[N,6] x) => (float[N,4] y)"


def integers(*shape: int, low: int = -127, high: int = 127, dtype: type = np.int8) -> Array:
    return rng_of(f"q{shape}").integers(low, high, shape, endpoint=True).astype(dtype)


def scales(count: int = 4) -> Array:
    return rng_of("scales").uniform(0.002, 0.01, count).astype(np.float32)


def quantized(*shape, axis: int | None = 0, low=-127, high=127, dtype: type = np.int8, point=0) -> dict[str, Array]:
    """Integers, their scales along an axis (None: one for all), and zero points."""
    count = () if axis is None else shape[axis]
    s = scales(1).reshape(()) if axis is None else scales(shape[axis])
    return {"q": integers(*shape, low=low, high=high, dtype=dtype), "s": s, "z": np.full(count, point, dtype)}


def weight_types(m) -> set[int]:
    """Element types of what convolutions and products read, seen through what is computed from constants."""
    produced = {o: n for n in every_node(m) for o in n.output}
    types = {t.name: t.data_type for t in m.graph.initializer}

    def root(name: str) -> str:
        while name in produced and produced[name].op_type in ("DequantizeLinear", "Transpose", "Identity"):
            name = produced[name].input[0]
        return name

    return {types[root(n.input[1])] for n in every_node(m) if n.op_type in ("Conv", "Gemm", "MatMul", "ConvTranspose")}


W = (4, 3, 3, 3)
N = norm("n", 4, s=np.array([-0.7, 0.0, 1.3, -2.1]))
FOLDS = {
    # A gamma of the norm is zero, another negative: integers set to the zero point, and mirrored.
    "per-channel": (CONV, {**quantized(*W), "b": (4,), **N}),
    "unsigned": (CONV, {**quantized(*W, low=1, high=255, dtype=np.uint8, point=128), "b": (4,), **N}),
    "sixteen-bits": (CONV, {**quantized(*W, low=-30000, high=30000, dtype=np.int16), "b": (4,), **N, "opset": 21}),
    "no-zero-point": (
        f"{HEAD} {{ w = DequantizeLinear<axis = 0>(q, s) c = Conv(x, w) [n] y = BN(c, n) }}", {**quantized(*W), **N}
    ),
    "one-scale-becomes-four": (CONV, {**quantized(*W, axis=None), "b": (4,), **N}),
    "one-scale-becomes-four-about-a-point": (
        CONV, {**quantized(*W, axis=None, low=1, high=255, dtype=np.uint8, point=128), "b": (4,), **N}
    ),
    "grouped": (
        "(float[N,4,6,5] x) => (float[N,4,4,3] y) "
        "{ w = DequantizeLinear<axis = 0>(q, s, z) c = Conv<group = 2>(x, w) [n] y = BN(c, n) }",
        {**quantized(4, 2, 3, 3), **N},
    ),
    "transposed": (
        "(float[N,3,4,3] x) => (float[N,4,6,5] y) "
        "{ w = DequantizeLinear<axis = 1>(q, s, z) c = ConvTranspose(x, w) [n] y = BN(c, n) }",
        {**quantized(3, 4, 3, 3, axis=1), **N},
    ),
    "gemm": (
        f"{FLAT} {{ w = DequantizeLinear<axis = 0>(q, s, z) c = Gemm<transB = 1>(x, w, b) [n] y = BN(c, n) }}",
        {**quantized(4, 6), "b": (4,), **N},
    ),
    "gemm-behind-a-transpose": (
        f"{FLAT} {{ v = DequantizeLinear<axis = 0>(q, s, z) w = Transpose(v) c = Gemm(x, w, b) [n] y = BN(c, n) }}",
        {**quantized(4, 6), "b": (4,), **N},
    ),
    "matmul": (
        f"{FLAT} {{ w = DequantizeLinear(q, s, z) c = MatMul(x, w) [n] y = BN(c, n) }}",
        {**quantized(6, 4, axis=1), **N},
    ),
    # The bias was a sum of integers; with a shift in it there is no integer for it.
    "quantized-bias": (
        f"{HEAD} {{ w = DequantizeLinear<axis = 0>(q, s, z) b = DequantizeLinear<axis = 0>(bq, bs) "
        "c = Conv(x, w, b) [n] y = BN(c, n) }",
        {**quantized(*W), "bq": np.array([500, -700, 30, 0], np.int32), "bs": scales(), **N},
    ),
    "bias-with-one-scale": (
        f"{HEAD} {{ w = DequantizeLinear<axis = 0>(q, s, z) b = DequantizeLinear(bq, bs) "
        "c = Conv(x, w, b) [n] y = BN(c, n) }",
        {**quantized(*W), "bq": np.array([500, -700, 30, 0], np.int32), "bs": np.float32(0.01), **N},
    ),
    "thirty-two-bits": (
        CONV, {**quantized(*W, axis=None, dtype=np.int32), "b": (4,), **N},
    ),
    "forward-by-one-factor": (
        f"{HEAD} {{ r = Relu(x) [a] a = Mul(r, k) w = DequantizeLinear<axis = 0>(q, s, z) y = Conv(a, w) }}",
        {**quantized(*W), "k": np.float32(-0.5)},
    ),
    "forward-depthwise": (
        "(float[N,4,6,5] x) => (float[N,4,4,3] y) { r = Relu(x) [n] a = BN(r, n) "
        "w = DequantizeLinear<axis = 0>(q, s, z) y = Conv<group = 4>(a, w) }",
        {**quantized(4, 1, 3, 3), **N},
    ),
    "forward-along-the-scales": (
        "(float[N,4,6,5] x) => (float[N,3,4,3] y) { r = Relu(x) [n] a = BN(r, n) "
        "w = DequantizeLinear<axis = 1>(q, s, z) y = Conv(a, w) }",
        {**quantized(3, 4, 3, 3, axis=1), **N},
    ),
}  # fmt: skip


@pytest.mark.parametrize(("text", "given"), FOLDS.values(), ids=FOLDS)
def test_folds(text, given):
    m = model(text, **given)
    result = check(m, folded=["n"] if "[n]" in text else [], affine=[] if "[n]" in text else ["a"])
    assert not {"BatchNormalization", "Mul"} & set(ops(result.model))
    assert weight_types(result.model) == weight_types(m)
    assert TensorProto.FLOAT not in weight_types(m)


def with_lowest(*shape: int) -> Array:
    q = integers(*shape)
    q[0, 0] = -128
    return q


STAYS = {
    "lowest-has-no-opposite": (
        CONV,
        {**quantized(*W), "q": with_lowest(*W), "b": (4,), **norm("n", 4, s=np.array([-1.0, 1, 1, 1]))},
        "quantized-parameter",
        "-128 has no opposite",
    ),
    "one-scale-in-opset-12": (
        CONV.replace("<axis = 0>", ""), {**quantized(*W, axis=None), "b": (4,), **N, "opset": 12},
        "quantized-parameter", "no scales along an axis",
    ),
    "forward-across-the-scales": (
        "(float[N,3,6,5] x) => (float[N,4,4,3] y) { r = Relu(x) [n] a = BN(r, n) "
        "w = DequantizeLinear<axis = 0>(q, s, z) y = Conv(a, w) }",
        {**quantized(*W), "n": 3}, "quantized-parameter", "its scales run along dimension 0",
    ),
    "below-the-normal-numbers": (
        CONV, {**quantized(*W), "b": (4,), **gentle("n", 4), "n_s": np.full(4, 1e-37, np.float32)},
        "underflow", "below",
    ),
    "beyond-the-largest": (
        CONV, {**quantized(*W), "b": (4,), **gentle("n", 4), "n_s": np.full(4, 3e38, np.float32)},
        "overflow", "scale",
    ),
    "scale-that-is-no-number": (
        CONV, {**quantized(*W), "s": np.array([0.1, np.nan, 0.1, 0.1], np.float32), "b": (4,), **N},
        "not-finite", "a scale",
    ),
    "blocks": (
        f"{FLAT} {{ w = DequantizeLinear<axis = 0, block_size = 3>(q, s, z) c = MatMul(x, w) [n] y = BN(c, n) }}",
        {"q": integers(6, 4), "s": scales(8).reshape(2, 4), "z": np.zeros((2, 4), np.int8), **N, "opset": 21},
        "quantized-parameter", "DequantizeLinear",
    ),
    "reshaped": (
        f"{HEAD} {{ v = DequantizeLinear<axis = 0>(q, s, z) w = Reshape(v, to) c = Conv(x, w) [n] y = BN(c, n) }}",
        {**quantized(4, 27), "to": np.array(W), **N}, "quantized-parameter", "computed from integers",
    ),
    "table": (
        "(int64[N,5] i) => (float[N,5,4] y) { w = DequantizeLinear<axis = 0>(q, s, z) e = Gather(w, i) "
        "a = Transpose<perm = [0,2,1]>(e) [n] b = BN(a, n) y = Transpose<perm = [0,2,1]>(b) }",
        {**quantized(7, 4), **N}, "quantized-parameter", "its table",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("text", "given", "reason", "said"), STAYS.values(), ids=STAYS)
def test_stays(text, given, reason, said):
    m = model(text, **given)
    result = check(m, kept={"n": reason})
    assert any(said in r.detail for r in result.report.kept[0].reasons)


def test_integers_stay_as_they_were_where_no_scale_is_negative():
    m = model(CONV, **quantized(*W), b=(4,), **gentle("n", 4))
    result = check(m, folded=["n"], nodes=["DequantizeLinear", "Conv"])
    np.testing.assert_array_equal(initializer(result.model, "q"), initializer(m, "q"))
    scale = (gentle("n", 4)["n_s"] / np.sqrt(gentle("n", 4)["n_v"].astype(np.float32) + np.float32(1e-5))).astype(float)
    np.testing.assert_allclose(initializer(result.model, "s"), initializer(m, "s") * scale, rtol=1e-6)


def test_a_weight_that_another_layer_reads_keeps_its_scales():
    text = (
        "(float[N,3,6,5] x) => (float[N,4,4,3] y, float[N,4,4,3] v) "
        "{ w = DequantizeLinear<axis = 0>(q, s, z) c = Conv(x, w) [n] y = BN(c, n) v = Conv(x, w) }"
    )
    m = model(text, **quantized(*W), **N)
    result = check(m, folded=["n"])
    assert ops(result.model).count("DequantizeLinear") == 2
    for name in ("q", "s", "z"):
        np.testing.assert_array_equal(initializer(result.model, name), initializer(m, name))
    assert result.report.bytes_added == 4 * 27 + 4 * 4  # mirrored integers, and scales


def test_inside_a_branch():
    text = (
        "(bool p, float[2,3,6,5] x) => (float[2,4,4,3] y) { w = DequantizeLinear<axis = 0>(q, s, z) y = If(p) <"
        "then_branch = t () => (float[2,4,4,3] a) { c = Conv(x, w) [n] a = BN(c, n) },"
        "else_branch = e () => (float[2,4,4,3] b) { b = Conv(x, w) }> }"
    )
    m = model(text, **quantized(*W), **N)
    result = check(m, folded=["n"])
    assert ops(result.model).count("DequantizeLinear") == 2


def test_zero_points_that_do_not_go_with_the_scales():
    m = model(CONV, **{**quantized(*W), "z": np.zeros(3, np.int8)}, b=(4,), **N)
    (kept,) = bnfold.plan(m).kept
    assert kept.reasons[0].reason == "quantized-parameter"
