"""ONNX: norms and constant arithmetic around convolutions, Gemm and MatMul, backward and forward."""

import numpy as np
import pytest
from onnx_models import check, gentle, initializer, model, norm

import bnfold

# ---------------------------------------------------------------------- convolutions

SIZES = {1: "9", 2: "7,6", 3: "5,4,6"}
CONVS = {  # name: (spatial rank, in, out, groups, attributes)
    "1d": (1, 3, 4, 1, ""),
    "1d-equal-channels": (1, 4, 4, 1, ", pads=[1,1]"),
    "2d": (2, 3, 4, 1, ", pads=[1,1,1,1]"),
    "2d-equal-channels": (2, 4, 4, 1, ""),
    "2d-strides-dilations": (2, 3, 5, 1, ", strides=[2,1], dilations=[1,2], pads=[0,1,2,1]"),
    "2d-same-upper": (2, 3, 4, 1, ', strides=[2,2], auto_pad="SAME_UPPER"'),
    "2d-valid": (2, 3, 4, 1, ', auto_pad="VALID"'),
    "2d-two-groups": (2, 4, 6, 2, ""),
    "2d-two-groups-equal": (2, 6, 6, 2, ", pads=[1,1,1,1]"),
    "2d-depthwise": (2, 5, 5, 5, ", pads=[1,1,1,1]"),
    "2d-depthwise-multiplier": (2, 3, 6, 3, ""),
    "2d-one-channel": (2, 1, 1, 1, ""),
    "3d": (3, 2, 5, 1, ""),
    "3d-two-groups": (3, 4, 2, 2, ", strides=[1,2,1]"),
}


def convolution(kind: str, op: str, bias: bool):
    rank, cin, cout, groups, attributes = CONVS[kind]
    if op == "ConvTranspose":
        attributes = attributes.replace(', auto_pad="SAME_UPPER"', "").replace(', auto_pad="VALID"', "")
    shape = (cin, cout // groups) if op == "ConvTranspose" else (cout, cin // groups)
    size, unknown = SIZES[rank], ",".join(f"d{k}" for k in range(rank))
    text = f"""(float[N,{cin},{size}] x) => (float[N,{cout},{unknown}] y) {{
        [conv] c = {op}<group={groups}{attributes}>({"x, w, b" if bias else "x, w"})
        [n] y = BN(c, n)
    }}"""
    more = {"b": (cout,)} if bias else {}
    return model(text, w=(*shape, *[3, 2, 2][:rank]), n=cout, **more)


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "bare"])
@pytest.mark.parametrize("op", ["Conv", "ConvTranspose"])
@pytest.mark.parametrize("kind", CONVS)
def test_norm_behind_a_convolution(kind, op, bias):
    result = check(convolution(kind, op, bias), folded=["n"], nodes=[op])
    assert result.report.folded[0].into == ("conv",)
    assert result.report.folded[0].direction == "backward"
    assert result.report.norms[0].channels == CONVS[kind][2]


FORWARD = {  # name: (groups, out, attributes, op, whether the shift can pass)
    "conv": (1, 5, "", "Conv", True),
    "conv-valid": (1, 5, ', auto_pad="VALID"', "Conv", True),
    "conv-strides-dilations": (1, 4, ", strides=[2,1], dilations=[1,2]", "Conv", True),
    "conv-two-groups": (2, 6, "", "Conv", True),
    "conv-depthwise": (4, 4, "", "Conv", True),
    "conv-depthwise-multiplier": (4, 8, "", "Conv", True),
    "conv-padded": (1, 4, ", pads=[1,1,1,1]", "Conv", False),
    "conv-padded-at-one-end": (1, 4, ", pads=[0,0,0,1]", "Conv", False),
    "conv-same-upper": (1, 4, ', auto_pad="SAME_UPPER"', "Conv", False),
    "conv-same-lower": (1, 4, ', auto_pad="SAME_LOWER"', "Conv", False),
    "transposed": (1, 4, "", "ConvTranspose", False),
    "transposed-two-groups": (2, 6, ", strides=[2,2]", "ConvTranspose", False),
}


@pytest.mark.parametrize("shifts", [True, False], ids=["shift", "scale-only"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "bare"])
@pytest.mark.parametrize("kind", FORWARD)
def test_norm_in_front_of_a_convolution(kind, bias, shifts):
    groups, out, attributes, op, uniform = FORWARD[kind]
    shape = (4, out // groups) if op == "ConvTranspose" else (out, 4 // groups)
    parameters = norm("n", 4) if shifts else norm("n", 4, m=np.zeros(4), b=np.zeros(4))
    more = {"b": (out,)} if bias else {}
    m = model(
        f"""(float[N,4,6,5] x) => (float[N,{out},h,w] y) {{
            [n] s = BN(x, n)
            [conv] y = {op}<group={groups}{attributes}>({"s, k, b" if bias else "s, k"})
        }}""",
        k=(*shape, 3, 2),
        **parameters,
        **more,
    )
    if uniform or not shifts:
        result = check(m, folded=["n"], nodes=[op])
        assert result.report.folded[0].direction == "forward"
        assert len(result.model.graph.node[0].input) == 2 + (bias or shifts)
    else:
        check(m, kept={"n": "padded-shift"}, nodes=["BatchNormalization", op])


def test_a_scale_folds_under_padding_and_its_shift_stays():
    m = model(
        """(float[N,3,6,5] x) => (float[N,4,6,5] y) {
            [shift] a = Sub(x, mean)
            [scale] b = Div(a, std)
            [conv] y = Conv<pads=[1,1,1,1]>(b, w)
        }""",
        mean=(3, 1, 1),
        std=np.array([0.2, 0.3, 0.5]).reshape(1, 3, 1, 1),
        w=(4, 3, 3, 3),
    )
    check(m, affine=["scale"], nodes=["Sub", "Conv"])


# ---------------------------------------------------------------------- Gemm

GEMM_C = {"absent": None, "vector": (5,), "row": (1, 5), "column": (6, 1), "matrix": (6, 5), "one": (1,), "scalar": ()}


@pytest.mark.parametrize("c", GEMM_C)
@pytest.mark.parametrize("scaled", [True, False], ids=["alpha-beta", "plain"])
@pytest.mark.parametrize("case", ["behind", "behind-A", "behind-B", "behind-AB", "before", "before-B"])
def test_norm_and_gemm(case, scaled, c):
    """A and B are the transposed operands. In front of a transposed A, the norm acts on another dimension."""
    a, b, backward = "A" in case, "B" in case, "behind" in case
    shape = GEMM_C[c]
    attributes = f"transA={int(a)}, transB={int(b)}" + (", alpha=0.75, beta=-1.5" if scaled else "")
    operands = "w" if shape is None else "w, c"
    nodes = (
        f"[g] z = Gemm<{attributes}>(x, {operands}) [n] y = BN(z, n)"
        if backward
        else f"[n] z = BN(x, n) [g] y = Gemm<{attributes}>(z, {operands})"
    )
    m = model(
        f"(float[{'4,6' if a else '6,4'}] x) => (float[6,5] y) {{ {nodes} }}",
        w=(5, 4) if b else (4, 5),
        n=5 if backward else 4,
        **({} if shape is None else {"c": shape}),
    )
    result = check(m, folded=["n"], nodes=["Gemm"])
    gemm = result.model.graph.node[0]
    assert not [x for x in gemm.attribute if x.name == "beta"]
    assert scaled == bool([x for x in gemm.attribute if x.name == "alpha"])


def test_norm_over_the_other_dimension_of_a_gemm_stays():
    m = model(
        "(float[4,6] x) => (float[6,5] y) { [n] z = BN(x, n) [g] y = Gemm<transA=1>(z, w) }",
        w=(4, 5), n=6,
    )  # fmt: skip
    check(m, kept={"n": "not-per-channel"})


def test_gemm_with_a_constant_first_operand():
    m = model("(float[4,5] x) => (float[6,5] y) { [g] z = Gemm(a, x) [n] y = BN(z, n) }", a=(6, 4), n=5)
    check(m, kept={"n": "dynamic-parameter"}, nodes=["Gemm", "BatchNormalization"])


def test_gemm_with_a_computed_bias():
    m = model("(float[N,4] x, float[5] c) => (float[N,5] y) { [g] z = Gemm(x, w, c) [n] y = BN(z, n) }", w=(4, 5), n=5)
    check(m, kept={"n": "dynamic-parameter"})


@pytest.mark.parametrize(
    ("flag", "shape"), [("broadcast=1", (5,)), ("broadcast=0", (6, 5)), ("alpha: float=1.0", (6, 5))]
)
def test_gemm_of_opset_6_says_whether_it_broadcasts(flag, shape):
    m = model(
        f"(float[6,4] x) => (float[6,5] y) {{ [g] z = Gemm<{flag}>(x, w, c) [n] y = BN<is_test=1>(z, n) }}",
        opset=6, w=(4, 5), c=shape, n=5,
    )  # fmt: skip
    result = check(m, folded=["n"], nodes=["Gemm"])
    assert initializer(result.model, "c").shape == shape


# ---------------------------------------------------------------------- MatMul

MATMUL = {  # name: (text, initializers, nodes after)
    "bare": ("[m] a = MatMul(x, w) [n] y = BN(a, n)", {}, ["MatMul", "Add"]),
    "add": ("[m] a = MatMul(x, w) [b] c = Add(a, b) [n] y = BN(c, n)", {"b": (5,)}, ["MatMul", "Add"]),
    "add-swapped": ("[m] a = MatMul(x, w) [b] c = Add(b, a) [n] y = BN(c, n)", {"b": (5,)}, ["MatMul", "Add"]),
    "add-row": ("[m] a = MatMul(x, w) [b] c = Add(a, b) [n] y = BN(c, n)", {"b": (1, 5)}, ["MatMul", "Add"]),
    "add-scalar": ("[m] a = MatMul(x, w) [b] c = Add(a, b) [n] y = BN(c, n)", {"b": ()}, ["MatMul", "Add"]),
    "add-full": ("[m] a = MatMul(x, w) [b] c = Add(a, b) [n] y = BN(c, n)", {"b": (6, 5)}, ["MatMul", "Add"]),
    "sub": ("[m] a = MatMul(x, w) [b] c = Sub(a, b) [n] y = BN(c, n)", {"b": (5,)}, ["MatMul", "Add"]),
}


@pytest.mark.parametrize("kind", MATMUL)
def test_norm_behind_a_matmul(kind):
    text, arrays, after = MATMUL[kind]
    m = model(f"(float[6,4] x) => (float[6,5] y) {{ {text} }}", w=(4, 5), n=5, **arrays)
    check(m, folded=["n"], affine=["b"] if kind == "sub" else [], nodes=after)


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "bare"])
def test_norm_in_front_of_a_matmul(bias):
    text = "[m] a = MatMul(s, w) y = Add(a, b)" if bias else "[m] y = MatMul(s, w)"
    m = model(
        f"(float[N,4] x) => (float[N,5] y) {{ [n] s = BN(x, n) {text} }}",
        w=(4, 5),
        n=4,
        **({"b": (5,)} if bias else {}),
    )
    check(m, folded=["n"], nodes=["MatMul", "Add"])


def test_matmul_before_opset_7_gets_an_add_that_says_it_broadcasts():
    m = model(
        "(float[6,4] x) => (float[6,5] y) { [m] a = MatMul(x, w) [n] y = BN<is_test=1>(a, n) }", opset=6, w=(4, 5), n=5
    )
    result = check(m, folded=["n"], nodes=["MatMul", "Add"])
    assert result.model.graph.node[1].attribute[0].name == "broadcast"
    m = model(
        "(float[N,4,7] x) => (float[N,5,7] y) { [m] a = MatMul(w, x) [n] y = BN<is_test=1>(a, n) }",
        opset=6,
        w=(5, 4),
        n=5,
    )
    check(m, kept={"n": "unsupported-op"})


def test_norm_behind_a_batched_matmul_and_transpose():
    m = model(
        "(float[N,7,4] x) => (float[N,5,7] y) { a = MatMul(x, w) t = Transpose<perm=[0,2,1]>(a) [n] y = BN(t, n) }",
        w=(4, 5), n=5,
    )  # fmt: skip
    check(m, folded=["n"], nodes=["MatMul", "Add", "Transpose"])


@pytest.mark.parametrize("shape", [(5,), (1, 1, 5), (7, 5), (2, 7, 1)], ids=str)
def test_bias_of_a_batched_matmul(shape):
    m = model(
        "(float[2,7,4] x) => (float[2,5,7] y) { a = MatMul(x, w) c = Add(a, b) t = Transpose<perm=[0,2,1]>(c) "
        "[n] y = BN(t, n) }",
        w=(4, 5), b=shape, n=5,
    )  # fmt: skip
    check(m, folded=["n"], nodes=["MatMul", "Add", "Transpose"])


def test_bias_of_a_weight_on_the_left():
    m = model(
        "(float[N,4,7] x) => (float[N,5,7] y) { a = MatMul(w, x) [b] c = Add(a, b) [n] y = BN(c, n) }",
        w=(5, 4),
        b=(5, 1),
        n=5,
    )
    check(m, folded=["n"], affine=["b"], nodes=["MatMul", "Add"])


def test_norm_over_dimension_1_of_a_batched_matmul_stays():
    """Linear then BatchNorm1d on [N, L, C] normalises L, even where L equals C."""
    m = model("(float[N,5,4] x) => (float[N,5,5] y) { a = MatMul(x, w) [n] y = BN(a, n) }", w=(4, 5), n=5)
    check(m, kept={"n": "not-per-channel"})


def test_norm_over_the_rows_of_a_weight_on_the_left():
    m = model("(float[N,4,7] x) => (float[N,5,7] y) { [m] a = MatMul(w, x) [n] y = BN(a, n) }", w=(5, 4), n=5)
    result = check(m, folded=["n"], nodes=["MatMul", "Add"])
    assert initializer(result.model, "a_bias").shape == (5, 1)


def test_norm_in_front_of_a_weight_on_the_left():
    m = model("(float[N,4,7] x) => (float[N,5,7] y) { [n] a = BN(x, n) [m] y = MatMul(w, a) }", w=(5, 4), n=4)
    check(m, folded=["n"], nodes=["MatMul", "Add"])


def test_matmul_by_a_stack_of_weights_stays():
    m = model("(float[3,6,4] x) => (float[3,6,5] y) { a = MatMul(x, w) [n] y = BN(a, n) }", w=(3, 4, 5), n=6)
    check(m, kept={"n": "unsupported-op"})


# ---------------------------------------------------------------------- arithmetic with constants

ARITHMETIC = {  # expression in c (a convolution's result) and k, the shape of k
    "mul": ("Mul(c, k)", (4, 1, 1)),
    "mul-swapped": ("Mul(k, c)", (4, 1, 1)),
    "mul-full-rank": ("Mul(c, k)", (1, 4, 1, 1)),
    "mul-scalar": ("Mul(c, k)", ()),
    "mul-one": ("Mul(k, c)", (1,)),
    "add": ("Add(c, k)", (4, 1, 1)),
    "add-swapped": ("Add(k, c)", (1, 4, 1, 1)),
    "sub": ("Sub(c, k)", (4, 1, 1)),
    "constant-minus-x": ("Sub(k, c)", (4, 1, 1)),
    "scalar-minus-x": ("Sub(k, c)", ()),
    "div": ("Div(c, k)", (4, 1, 1)),
    "div-scalar": ("Div(c, k)", ()),
}


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "bare"])
@pytest.mark.parametrize("op", ["Conv", "ConvTranspose"])
@pytest.mark.parametrize("kind", ARITHMETIC)
def test_arithmetic_behind_a_convolution(kind, op, bias):
    expression, shape = ARITHMETIC[kind]
    m = model(
        f"(float[N,4,5,6] x) => (float[N,4,h,w] y) {{ c = {op}<group=2>({'x, w, b' if bias else 'x, w'}) "
        f"[k] y = {expression} }}",
        w=(4, 2, 3, 2), k=shape, **({"b": (4,)} if bias else {}),
    )  # fmt: skip
    check(m, affine=["k"], nodes=[op])


STAYS = {  # expression, shape of k: arithmetic that is no per-channel map of a convolution's result
    "constant-over-x": ("Div(k, c)", (4, 1, 1)),
    "along-height-of-equal-length": ("Mul(c, k)", (4, 1)),
    "along-width-of-equal-length": ("Add(c, k)", (4,)),
    "full-map": ("Add(c, k)", (4, 4, 4)),
    "enlarges-the-batch": ("Mul(c, k)", (2, 4, 1, 1)),
    "enlarges-the-rank": ("Add(c, k)", (1, 1, 4, 1, 1)),
    "enlarges-the-channels": ("Mul(c, k)", (4, 1, 1)),
    "zero-divisor": ("Div(c, k)", np.zeros((4, 1, 1), np.float32)),
    "infinite": ("Add(c, k)", np.full((4, 1, 1), np.inf, np.float32)),
}


@pytest.mark.parametrize("kind", STAYS)
def test_arithmetic_that_stays(kind):
    expression, shape = STAYS[kind]
    batch = "1" if "enlarges" in kind else "N"
    dims = {"enlarges-the-batch": "2,4,4,4", "enlarges-the-rank": "1,1,4,4,4"}.get(kind, f"{batch},4,4,4")
    channels = 1 if kind == "enlarges-the-channels" else 4
    m = model(
        f"(float[{batch},3,6,6] x) => (float[{dims}] y) {{ c = Conv(x, w) [k] y = {expression} }}",
        w=(channels, 3, 3, 3), k=shape,
    )  # fmt: skip
    check(m, nodes=["Conv", expression[:3]])


def test_a_batch_of_unknown_size_is_not_taken_for_a_constants():
    m = model(
        "(float[N,3,6,6] x) => (float[N,4,4,4] y) { c = Conv(x, w) y = Mul(c, k) }", w=(4, 3, 3, 3), k=(2, 4, 1, 1)
    )
    check(m, nodes=["Conv", "Mul"])


def test_sizes_of_minus_one_are_unknown_ones():
    """Some exporters write -1: two of them are not the same size, nor that of a constant."""
    m = model("(float[-1,4] x) => (float[-1,4] y) { s = Sigmoid(x) [k] y = Mul(s, k) }", k=(2, 4))
    check(m, {"x": np.ones((2, 4), np.float32)}, nodes=["Sigmoid", "Mul"], checked=False)
    m = model("(float[-1,3,-1,-1] x) => (float[-1,4,-1] y) { c = Conv(x, w) r = Flatten<axis=2>(c) [n] y = BN(r, n) }",
              w=(4, 3, 2, 2), n=4)  # fmt: skip
    assert len(bnfold.plan(m).norms) == 1


def test_integer_arithmetic_is_left_alone():
    m = model(
        "(int32[N,4] x) => (int32[N,4] y) { a = Mul(x, k) y = Add(a, k) }", k=np.arange(4, dtype=np.int32)
    )  # fmt: skip
    check(m, nodes=["Mul", "Add"])


def test_mul_takes_up_a_norm_and_an_add_is_inserted():
    """The norm cannot take up a Mul along the width, so it goes the other way: two operations for three."""
    m = model(
        "(float[N,4,5,6] x) => (float[N,4,5,6] y) { s = Sigmoid(x) [k] a = Mul(s, k) [n] b = BN(a, n) y = Sigmoid(b) }",
        k=(1, 1, 1, 6), n=4,
    )  # fmt: skip
    result = check(m, folded=["n"], nodes=["Sigmoid", "Mul", "Add", "Sigmoid"])
    assert [n.name for n in result.model.graph.node if n.op_type == "Mul"] == ["k"]
    assert initializer(result.model, "a_mul").shape == (1, 4, 1, 6)


@pytest.mark.parametrize("expression", ["Mul(s, k)", "Add(s, k)", "Sub(k, s)", "Div(s, k)"])
def test_a_norm_takes_up_arithmetic(expression):
    m = model(
        f"(float[N,4,5,6] x) => (float[N,4,5,6] y) {{ s = Sigmoid(x) [k] a = {expression} [n] c = BN(a, n) "
        f"y = Sigmoid(c) }}",
        k=(4, 1, 1), n=4,
    )  # fmt: skip
    check(m, affine=["k"], kept={"n": "unsupported-op"}, nodes=["Sigmoid", "BatchNormalization", "Sigmoid"])


# ---------------------------------------------------------------------- several norms

CHAINS = {  # nodes, folded in order of the file, nodes after
    "two-in-a-row": ("c = Conv(x, w) [n] a = BN(c, n) [p] y = BN(a, p)", ["n", "p"], ["Conv"]),
    "both-sides": ("[n] a = BN(x, n) c = Conv(a, w) [p] y = BN(c, p)", ["n", "p"], ["Conv"]),
    "two-in-front": ("[n] a = BN(x, n) [p] b = BN(a, p) y = Conv(b, w)", ["n", "p"], ["Conv"]),
    "two-on-each-side": (
        "[n] a = BN(x, n) [p] b = BN(a, p) c = Conv(b, w) [q] d = BN(c, q) [r] y = BN(d, r)",
        ["n", "p", "q", "r"],
        ["Conv"],
    ),
    "between-two-convs": ("c = Conv(x, w) [n] a = BN(c, n) y = Conv(a, v)", ["n"], ["Conv", "Conv"]),
    "norm-scale-norm": ("c = Conv(x, w) [n] a = BN(c, n) [k] b = Mul(a, k) [p] y = BN(b, p)", ["n", "p"], ["Conv"]),
}


@pytest.mark.parametrize("kind", CHAINS)
def test_several_norms_around_one_layer(kind):
    nodes, folded, after = CHAINS[kind]
    m = model(
        f"(float[N,4,7,6] x) => (float[N,4,h,w] y) {{ {nodes} }}",
        w=(4, 4, 3, 3), v=(4, 4, 2, 2), k=(4, 1, 1),
        **{k: v.astype(np.float32) for name in "npqr" for k, v in gentle(name, 4).items()},
    )  # fmt: skip
    check(m, folded=folded, affine=["k"] if "scale" in kind else [], nodes=after)


def test_a_norm_in_front_is_taken_up_by_every_reader_or_stays():
    text = """(float[N,3,6,6] x) => (float[N,4,4,4] y, float[N,2,4,4] z) {{
        [n] a = BN(x, n) y = Conv(a, w) z = Conv{0}(a, v) }}"""
    arrays = {"w": (4, 3, 3, 3), "v": (2, 3, 3, 3), "n": 3}
    check(model(text.format(""), **arrays), folded=["n"], nodes=["Conv", "Conv"])
    padded = model(text.format("<pads=[1,1,1,1], strides=[2,2]>").replace("float[N,2,4,4]", "float[N,2,3,3]"), **arrays)
    check(padded, kept={"n": "padded-shift"})
