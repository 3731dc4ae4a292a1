"""ONNX: values and initializers that several readers share, names that must survive, names that are taken."""

import numpy as np
import pytest
from onnx import TensorProto, helper
from onnx_models import check, initializer, model, ops

import bnfold

# ---------------------------------------------------------------------- shared initializers

HEAD = "(float[N,3,6,5] x) => (float[N,4,4,3] y, float[N,4,4,3] z)"
SHARED = {  # nodes, folded, kept, whether the original weight w must stay as it was
    "weight-with-a-bare-conv": ("c = Conv(x, w) [n] y = BN(c, n) z = Conv(x, w)", ["n"], {}, True),
    "weight-bare-conv-first": ("z = Conv(x, w) c = Conv(x, w) [n] y = BN(c, n)", ["n"], {}, True),
    "weight-with-two-norms": ("c = Conv(x, w) [n] y = BN(c, n) d = Conv(x, w) [p] z = BN(d, p)", ["n", "p"], {}, False),
    "bias-with-a-bare-conv": ("c = Conv(x, w, b) [n] y = BN(c, n) z = Conv(x, v, b)", ["n"], {}, False),
    "norm-shared": ("c = Conv(x, w) [n] y = BN(c, n) d = Conv(x, v) [p] z = BN(d, n)", ["n", "p"], {}, False),
    "norm-shared-with-one-that-stays": (
        "c = Conv(x, w) [n] y = BN(c, n) d = Conv(x, v) e = Sigmoid(d) [p] z = BN(e, n)",
        ["n"],
        {"p": "unsupported-op"},
        False,
    ),
    "weight-behind-identity": ("u = Identity(w) c = Conv(x, u) [n] y = BN(c, n) z = Conv(x, u)", ["n"], {}, True),
    "weight-and-bias-of-one-node": ("c = Conv(x, w, n_b) [n] y = BN(c, n) z = Conv(x, v, n_b)", ["n"], {}, False),
}


@pytest.mark.parametrize("kind", SHARED)
def test_shared_initializers(kind):
    nodes, folded, kept, intact = SHARED[kind]
    m = model(f"{HEAD} {{ {nodes} }}", w=(4, 3, 3, 3), v=(4, 3, 3, 3), b=(4,), n=4, p=4)
    result = check(m, folded=folded, kept=kept)
    if intact:
        np.testing.assert_array_equal(initializer(result.model, "w"), initializer(m, "w"))
        assert result.report.bytes_added == 4 * 4 * 3 * 3 * 3


def test_copies_count_only_where_the_original_stays():
    """Both readers fold, so one of them takes the original over; a shared bias that leaves with its norm counts not."""
    nodes = "c = Conv(x, w) [n] y = BN(c, n) d = Conv(x, w) [p] z = BN(d, p)"
    result = check(model(f"{HEAD} {{ {nodes} }}", w=(4, 3, 3, 3), n=4, p=4), folded=["n", "p"], nodes=["Conv", "Conv"])
    assert sum(len(t.raw_data) for t in result.model.graph.initializer) == 2 * (4 * 108 + 4 * 4)
    m = model("(float[N,3,6,5] x) => (float[N,4,4,3] y) { c = Conv(x, w, n_b) [n] y = BN(c, n) }", w=(4, 3, 3, 3), n=4)
    result = check(m, folded=["n"], nodes=["Conv"])
    assert result.report.bytes_added == 0
    assert len(result.model.graph.initializer) == 2


WEIGHT, BIAS = 4 * 4 * 3 * 3 * 3, 4 * 4  # bytes
COPIES = {  # nodes, folded, kept, bytes that are there twice
    "two-convs-share-a-weight": ("c = Conv(x, w, b) [n] y = BN(c, n) z = Conv(x, w, b2)", ["n"], {}, WEIGHT),
    "and-both-fold": ("c = Conv(x, w) [n] y = BN(c, n) d = Conv(x, w) [p] z = BN(d, p)", ["n", "p"], {}, WEIGHT),
    "two-convs-share-a-bias": (
        "c = Conv(x, w, b) [n] y = BN(c, n) d = Conv(x, v, b) [p] z = BN(d, p)", ["n", "p"], {}, BIAS),
    "one-conv-under-two-norms": (
        "c = Conv(x, w, b) [n] y = BN(c, n) a = Abs(x) d = Conv(a, w, b) [p] z = BN(d, p)", ["n", "p"], {},
        WEIGHT + BIAS),
    "one-output-under-two-norms": (
        "c = Conv(x, w, b) [n] y = BN(c, n) [p] z = BN(c, p)", [],
        {"n": "multiple-consumers", "p": "multiple-consumers"}, 0),
    "norm-called-three-times": (
        "c = Conv(x, w) [n] y = BN(c, n) d = Conv(x, v) [p] e = BN(d, n) f = Conv(x, u) [q] g = BN(f, n) z = Mul(e, g)",
        ["n", "p", "q"], {}, 0),
    "conv-whose-output-is-returned": ("z = Conv(x, w, b) [n] y = BN(z, n)", [], {"n": "model-output"}, 0),
}  # fmt: skip


@pytest.mark.parametrize("kind", COPIES)
def test_bytes_added_by_copies(kind):
    nodes, folded, kept, added = COPIES[kind]
    arrays = {"w": (4, 3, 3, 3), "v": (4, 3, 3, 3), "u": (4, 3, 3, 3), "b": (4,), "b2": (4,), "n": 4, "p": 4}
    given = {k: v for k, v in arrays.items() if f" {k})" in nodes or f" {k}," in nodes}
    result = check(model(f"{HEAD} {{ {nodes} }}", **given), folded=folded, kept=kept)
    assert result.report.bytes_added == added


def test_bytes_added_by_a_tied_table():
    """An embedding that is also the output layer's weight."""
    m = model(
        "(int64[6] i) => (float[6,10] y) { e = Gather(w, i) [n] a = BN(e, n) t = Sigmoid(a) y = Gemm<transB=1>(t, w) }",
        w=(10, 8), n=8,
    )  # fmt: skip
    result = check(m, {"i": np.arange(6)}, folded=["n"])
    assert result.report.bytes_added == 4 * 10 * 8
    np.testing.assert_array_equal(initializer(result.model, "w"), initializer(m, "w"))


def test_weight_is_an_output():
    m = model(
        "(float[N,3,6,5] x) => (float[N,4,4,3] y, float[4,3,3,3] w) { c = Conv(x, w) [n] y = BN(c, n) }",
        w=(4, 3, 3, 3),
        n=4,
    )
    result = check(m, folded=["n"], nodes=["Conv"])
    np.testing.assert_array_equal(initializer(result.model, "w"), initializer(m, "w"))


def test_bias_is_an_output():
    m = model(
        "(float[N,4] x) => (float[N,5] y, float[5] b) { c = Gemm(x, w, b) [n] y = BN(c, n) }", w=(4, 5), b=(5,), n=5
    )
    result = check(m, folded=["n"], nodes=["Gemm"])
    np.testing.assert_array_equal(initializer(result.model, "b"), initializer(m, "b"))


def test_norm_parameters_are_an_output():
    m = model("(float[N,4] x) => (float[N,5] y, float[5] n_v) { c = Gemm(x, w) [n] y = BN(c, n) }", w=(4, 5), n=5)
    result = check(m, folded=["n"], nodes=["Gemm"])
    assert [t.name for t in result.model.graph.initializer][:1] == ["w"]
    np.testing.assert_array_equal(initializer(result.model, "n_v"), initializer(m, "n_v"))


def test_one_array_is_all_four_parameters():
    m = model(
        "(float[N,4] x) => (float[N,5] y) { c = Gemm(x, w, q) [n] y = BatchNormalization(c, q, q, q, q) }",
        w=(4, 5), q=np.float32([0.5, 1, 2, 3, 1e-3]),
    )  # fmt: skip
    result = check(m, folded=["n"], nodes=["Gemm"])
    assert len(result.model.graph.initializer) == 2


def test_initializers_that_nothing_reads_stay():
    m = model("(float[N,4] x) => (float[N,5] y) { c = Gemm(x, w) [n] y = BN(c, n) }", w=(4, 5), n=5, unused=(3,), n2=2)
    result = check(m, folded=["n"], nodes=["Gemm"])
    assert {"unused", "n2_s", "n2_b", "n2_m", "n2_v"} < {t.name for t in result.model.graph.initializer}


# ---------------------------------------------------------------------- shared values

CONV = "(float[N,3,6,5] x) => (float[N,4,4,3] y{0}) {{ [conv] c = Conv(x, w) [n] {1} }}"
READERS = {  # further outputs, nodes, folded, kept, nodes after
    "relu": (", float[N,4,4,3] z", "y = BN(c, n) z = Relu(c)", [], {"n": "multiple-consumers"}, None),
    "output": (", float[N,4,4,3] c", "y = BN(c, n)", [], {"n": "model-output"}, None),
    "two-norms": (
        ", float[N,4,4,3] z", "y = BN(c, n) [p] z = BN(c, p)", [],
        {"n": "multiple-consumers", "p": "multiple-consumers"}, None,
    ),
    "same-op-twice": ("", "a = BN(c, n) y = Add(a, a)", ["n"], {}, ["Conv", "Add"]),
    "norm-output-read-twice": (
        ", float[N,4,4,3] z", "a = BN(c, n) y = Relu(a) z = Sigmoid(a)", ["n"], {}, ["Conv", "Relu", "Sigmoid"],
    ),
    "norm-output-is-an-output-and-read": (
        ", float[N,4,4,3] z", "y = BN(c, n) z = Sigmoid(y)", ["n"], {}, ["Conv", "Sigmoid"],
    ),
    "shape-only-reader": (", int64[4] z", "y = BN(c, n) z = Shape(c)", ["n"], {}, ["Conv", "Shape"]),
    "size-only-reader": (", int64 z", "y = BN(c, n) z = Size(c)", ["n"], {}, ["Conv", "Size"]),
    "type-only-reader": (", float[4] z", "y = BN(c, n) z = CastLike(n_i, c)", ["n"], {}, ["Conv", "CastLike"]),
    "type-only-reader-at-run": (
        ", float[N,3,6,5] z", "y = BN(c, n) i = Cast<to=7>(x) z = CastLike(i, c)", ["n"], {},
        ["Conv", "Cast", "CastLike"],
    ),
    "random-of-its-shape": (
        ", float[N,4,4,3] z", "y = BN(c, n) r = RandomNormalLike<seed: float=1.0>(c) z = Mul(r, n_zero)", ["n"], {},
        ["Conv", "RandomNormalLike", "Mul"],
    ),
    "shape-of-both": (
        ", int64[4] z", "y = BN(c, n) s = Shape(c) t = Shape(y) z = Add(s, t)", ["n"], {},
        ["Conv", "Shape", "Shape", "Add"],
    ),
    "reshape-by-own-shape": (
        "", "a = BN(c, n) s = Shape(c) y = Reshape(a, s)", ["n"], {}, ["Conv", "Shape", "Reshape"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", READERS)
def test_readers_of_the_values_around_a_norm(kind):
    outputs, nodes, folded, kept, after = READERS[kind]
    m = model(
        CONV.format(outputs, nodes), w=(4, 3, 3, 3), n=4, p=4, n_i=np.arange(4, dtype=np.int32), n_zero=np.float32(0)
    )
    check(m, folded=folded, kept=kept, nodes=after)


def test_shape_readers_between_the_nodes_of_an_arithmetic_norm():
    m = model(
        """(float[N,3,6,5] x) => (float[N,4,4,3] y, int64[4] s1, int64[4] s2, int64[4] s3) {
            c = Conv(x, w) a = Sub(c, mean) s1 = Shape(a) r = Sqrt(var) b = Div(a, r) s2 = Shape(b)
            d = Mul(b, gamma) s3 = Shape(d) y = Add(d, beta) }""",
        w=(4, 3, 3, 3), mean=(4, 1, 1), gamma=(4, 1, 1), beta=(4, 1, 1), var=np.full((4, 1, 1), 0.5, np.float32),
    )  # fmt: skip
    check(m, folded=["a"], nodes=["Conv", "Shape", "Shape", "Shape"])


def test_shape_readers_of_a_norm_that_folds_forward():
    m = model(
        "(float[N,3,6,5] x) => (float[N,4,4,3] y, int64[4] s) { [n] a = BN(x, n) s = Shape(a) y = Conv(a, w) }",
        w=(4, 3, 3, 3), n=3,
    )  # fmt: skip
    check(m, folded=["n"], nodes=["Shape", "Conv"])


def test_shape_readers_of_arithmetic_that_changes():
    """Values inside an arithmetic norm that takes up another go; who reads their shape reads the input's instead."""
    m = model(
        """(float[N,4,4,3] x) => (float[N,4,4,3] z, int64[4] s1, int64[4] s2) {
            x1 = Sigmoid(x) a = Sub(x1, mean) r = Sqrt(var) b = Div(a, r) s1 = Shape(b)
            d = Mul(b, gamma) s2 = Shape(d) y = Add(d, beta) [n] e = BN(y, n) z = Sigmoid(e) }""",
        mean=(4, 1, 1), gamma=(4, 1, 1), beta=(4, 1, 1), var=np.full((4, 1, 1), 0.5, np.float32), n=4,
    )  # fmt: skip
    folded = [f.norm for f in bnfold.plan(m).folded]
    kept = {k.norm: "unsupported-op" for k in bnfold.plan(m).kept}
    assert len(folded) == len(kept) == 1
    check(m, folded=folded, kept=kept)


@pytest.mark.parametrize("read", ["a", "b"])
@pytest.mark.parametrize("nodes", ["{a} {b}", "{b} {a}"])
def test_shape_readers_of_layers_that_are_merged(nodes, read):
    convs = nodes.format(a="a = Conv<pads=[1,1,1,1]>(x, w)", b="b = Conv(x, v)")
    m = model(
        f"(float[N,3,5,4] x) => (float[N,4,5,4] y, int64[4] s) {{ {convs} s = Shape({read}) d = Add(a, b) "
        f"[n] y = BN(d, n) }}",
        w=(4, 3, 3, 3), v=(4, 3, 1, 1), n=4,
    )  # fmt: skip
    check(m, folded=[f.norm for f in bnfold.fold(m).report.folded])


def test_the_same_conv_output_goes_to_a_norm_twice():
    m = model(
        "(float[N,3,6,5] x) => (float[N,4,4,3] y) { c = Conv(x, w) [n] a = BN(c, n) y = Mul(a, c) }",
        w=(4, 3, 3, 3),
        n=4,
    )
    check(m, kept={"n": "multiple-consumers"})


# ---------------------------------------------------------------------- names

TAKEN = ["y_bias", "c_bias", "w_folded", "w_folded_2", "y_unbiased", "c_unbiased", "conv_bias", "y_add", "b_folded"]


@pytest.mark.parametrize("op", ["Conv(x, w)", "ConvTranspose(x, w)", "Gemm(x, w)", "MatMul(x, w)"])
def test_generated_names_avoid_those_that_are_taken(op):
    shape, size = ((4, 4, 2, 2), "N,4,5,6") if "Conv" in op else ((4, 4), "N,4")
    outer = ",".join(["N", "4", "h", "w"][: size.count(",") + 1])
    text = " ".join(f"t{k} = Identity({name})" for k, name in enumerate(TAKEN))
    outputs = ", ".join(f"float[1] t{k}" for k in range(len(TAKEN)))
    m = model(
        f"(float[{size}] x) => (float[{outer}] y, float[{outer}] z, {outputs}) {{ {text} [conv] c = {op} "
        f"[n] y = BN(c, n) z = {op} }}",
        w=shape, n=4, **dict.fromkeys(TAKEN, (1,)),
    )  # fmt: skip
    result = check(m, folded=["n"])
    for name in TAKEN:
        np.testing.assert_array_equal(initializer(result.model, name), initializer(m, name))


def test_generated_names_avoid_names_of_nodes_inner_values_and_functions():
    m = model(
        """(float[N,4] x, bool q) => (float[N,4] y, float[N,4] z) {
            [y_bias] c = MatMul(x, w) [n] y = BN(c, n)
            z = If(q) <then_branch = g1 () => (float[N,4] y_unbiased) { y_unbiased = acme.F(x) },
                       else_branch = g2 () => (float[N,4] c_bias) { c_bias = Relu(x) }>
        }
        <domain: "acme", opset_import: ["" : 17]> F (a) => (c_unbiased) { c_unbiased = Neg(a) }""",
        w=(4, 4), n=4,
    )  # fmt: skip
    check(m, folded=["n"])


def test_nodes_without_names_are_known_by_their_outputs():
    m = model(
        "(float[N,3,6,5] x) => (float[N,4,4,3] y) { c = Conv(x, w) a = BN(c, n) y = Sigmoid(a) }", w=(4, 3, 3, 3), n=4
    )
    result = check(m, folded=["a"], nodes=["Conv", "Sigmoid"])
    assert result.report.folded[0].into == ("c",)
    assert all(not n.name for n in result.model.graph.node)


@pytest.mark.parametrize("nodes", ["y = BN(c, n)", "y = BN(c, n) z = Sigmoid(y)"])
def test_the_name_of_an_output_survives(nodes):
    outputs = ", float[N,4,4,3] z" if "z =" in nodes else ""
    m = model(CONV.format(outputs, nodes), w=(4, 3, 3, 3), n=4)
    for name in ("c", "y"):
        m.graph.value_info.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", 4, 4, 3]))
    result = check(m, folded=["n"])
    assert result.model.graph.node[0].output == ["y"]
    assert [v.name for v in result.model.graph.value_info] == ["y"]


def test_the_name_of_an_input_survives():
    m = model("(float[N,3,6,5] x) => (float[N,4,4,3] y) { [n] a = BN(x, n) y = Conv(a, w) }", w=(4, 3, 3, 3), n=3)
    m.graph.value_info.append(helper.make_tensor_value_info("a", TensorProto.FLOAT, ["N", 3, 6, 5]))
    result = check(m, folded=["n"])
    assert result.model.graph.node[0].input[0] == "x"
    assert not result.model.graph.value_info


def test_selection_is_by_node_name():
    nodes = "c = Conv(x, w) [block1_n] y = BN(c, n) d = Conv(x, v) [block2_n] z = BN(d, p)"
    m = model(f"{HEAD} {{ {nodes} }}", w=(4, 3, 3, 3), v=(4, 3, 3, 3), n=4, p=4)
    check(m, folded=["block1_n"], kept={"block2_n": "excluded"}, only="block1*")
    check(m, folded=["block2_n"], kept={"block1_n": "excluded"}, skip=["block1*"])
    with pytest.raises(bnfold.BnfoldError, match="matches no normalization"):
        bnfold.fold(m, only="blok*")


def test_module_names_from_torch_metadata():
    m = model("(float[N,3,6,5] x) => (float[N,4,4,3] y) { c = Conv(x, w) [node_7] y = BN(c, n) }", w=(4, 3, 3, 3), n=4)
    entry = m.graph.node[1].metadata_props.add()
    entry.key, entry.value = "pkg.torch.onnx.name_scopes", "['', 'layer1', 'layer1.bn', 'batch_norm']"
    assert bnfold.plan(m).norms[0].module == "layer1.bn"
    for text in ("7", "not python", "{}", "[]", "['']", "[1, 2]"):
        entry.value = text
        assert bnfold.plan(m).norms[0].module is None
        assert ops(bnfold.fold(m).model) == ["Conv"]


def test_of_a_norms_parameters_only_the_one_that_is_shared_stays():
    m = model(f"{HEAD} {{ c = Conv(x, w) [n] y = BN(c, n) z = Conv(x, v, n_b) }}", w=(4, 3, 3, 3), v=(4, 3, 3, 3), n=4)
    result = check(m, folded=["n"])
    names = {t.name for t in result.model.graph.initializer}
    assert {"w", "v", "n_b"} < names
    assert len(names) == 4
