"""ONNX: parameters that are constant without being initializers, and initializers that are not constant."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx_models import add_initializers, arrays_of, check, initializer, list_inputs, model, norm, ops, random_feeds

import bnfold

# ---------------------------------------------------------------------- constant expressions

WEIGHTS = {  # nodes that make w, of shape (4, 3, 2, 2), and the initializers they read
    "identity": ("w = Identity(w0)", {"w0": (4, 3, 2, 2)}),
    "identity-twice": ("w1 = Identity(w0) w = Identity(w1)", {"w0": (4, 3, 2, 2)}),
    "cast": ("w = Cast<to=1>(w0)", {"w0": np.linspace(-1, 1, 48).reshape(4, 3, 2, 2).astype(np.float16)}),
    "cast-from-double": ("w = Cast<to=1>(w0)", {"w0": np.linspace(-1, 1, 48).reshape(4, 3, 2, 2)}),
    "cast-from-integer": ("w = Cast<to=1>(w0)", {"w0": np.arange(-20, 28, dtype=np.int8).reshape(4, 3, 2, 2)}),
    "cast-like-constant": (
        "w = CastLike(w0, one)",
        {"w0": np.linspace(-1, 1, 48).reshape(4, 3, 2, 2).astype(np.float16), "one": np.ones(1, np.float32)},
    ),
    "cast-like-input": (
        "w = CastLike(w0, x)",
        {"w0": np.linspace(-1, 1, 48).reshape(4, 3, 2, 2).astype(np.float16)},
    ),
    "transpose": ("w = Transpose<perm=[1,0,2,3]>(w0)", {"w0": (3, 4, 2, 2)}),
    "reshape": ("w = Reshape(w0, shape)", {"w0": (12, 4), "shape": np.array([4, 3, 2, 2])}),
    "unsqueeze": ("w1 = Unsqueeze(w0, axes) w = Concat<axis=3>(w1, w1)", {"w0": (4, 3, 2), "axes": np.array([3])}),
    "squeeze": ("w = Squeeze(w0, axes)", {"w0": (1, 4, 3, 2, 2), "axes": np.array([0])}),
    "expand": ("w = Expand(w0, shape)", {"w0": (4, 3, 1, 2), "shape": np.array([4, 3, 2, 2])}),
    "slice": (
        "w = Slice(w0, start, end, axis)",
        {"w0": (9, 3, 2, 2), "start": np.array([2]), "end": np.array([6]), "axis": np.array([0])},
    ),
    "concat": ("w = Concat<axis=0>(w0, w1)", {"w0": (1, 3, 2, 2), "w1": (3, 3, 2, 2)}),
    "gather": ("w = Gather<axis=0>(w0, rows)", {"w0": (6, 3, 2, 2), "rows": np.array([5, 0, 0, 2])}),
    "split": ("w, rest = Split<axis=0>(w0, parts)", {"w0": (7, 3, 2, 2), "parts": np.array([4, 3])}),
    "pad": ("w = Pad(w0, pads)", {"w0": (4, 3, 1, 2), "pads": np.array([0, 0, 1, 0, 0, 0, 0, 0])}),
    "where": ("w = Where(mask, w0, w1)", {"mask": np.eye(2) > 0, "w0": (4, 3, 2, 2), "w1": (4, 3, 2, 2)}),
    "arithmetic": (
        "d = Mul(w0, w0) e = ReduceSum<keepdims=1>(d, axes) r = Sqrt(e) v = Div(w0, r) w = Mul(v, g)",
        {"w0": (4, 3, 2, 2), "axes": np.array([1, 2, 3]), "g": (4, 1, 1, 1)},
    ),
    "constant-of-shape": (
        "o = ConstantOfShape<value = float[1] {1.5}>(shape) w = Mul(o, g)",
        {"shape": np.array([4, 3, 2, 2]), "g": (4, 1, 1, 1)},
    ),
    "shape-of-constant": (
        "s = Shape(w1) w = Reshape(w0, s)",
        {"w0": (48,), "w1": (4, 3, 2, 2)},
    ),
}


@pytest.mark.parametrize("kind", WEIGHTS)
def test_weight_is_computed_from_constants(kind):
    nodes, arrays = WEIGHTS[kind]
    m = model(
        f"(float[N,3,5,4] x) => (float[N,4,4,3] y) {{ {nodes} c = Conv(x, w, b) [n] y = BN(c, n) }}",
        b=(4,),
        n=4,
        **arrays,
    )
    result = check(m, folded=["n"], nodes=["Conv"])
    assert len(result.model.graph.initializer) == 2


BIASES = {  # nodes that make b, of shape (4,)
    "constant-floats": "b = Constant<value_floats=[1.0, -2.0, 0.5, 0.0]>()",
    "constant-tensor": "b = Constant<value = float[4] {1, -2, 0.5, 0}>()",
    "constant-float": "f = Constant<value_float=1.5>() s = Constant<value_ints=[4]>() b = Expand(f, s)",
    "constant-int": (
        "i = Constant<value_int=4>() z = Constant<value_ints=[0]>() s = Unsqueeze(i, z) b = ConstantOfShape(s)"
    ),
    "constant-of-shape-default": "s = Constant<value_ints=[4]>() b = ConstantOfShape(s)",
    "torch-unoptimized": (
        "z = Constant<value_int=0>() f = CastLike(z, x) s = Shape(w) i0 = Constant<value_ints=[0]>() "
        "i1 = Constant<value_ints=[1]>() d = Slice(s, i0, i1) b = Expand(f, d)"
    ),
    "torch-unoptimized-cast": (
        "z = Constant<value_float=0.25>() f = Cast<to=1>(z) s = Shape<start=0, end=1>(w) b = Expand(f, s)"
    ),
    "shape-of-the-input": (
        "s = Shape(x) i = Constant<value_ints=[1]>() d = Gather(s, i) e = Constant<value_ints=[1]>() "
        "u = Add(d, e) b = ConstantOfShape(u)"
    ),
    "size": (
        "k = Constant<value = float[2,2] {1, 2, 3, 4}>() s = Size(k) z = Constant<value_ints=[0]>() "
        "u = Unsqueeze(s, z) b = ConstantOfShape(u)"
    ),
    "range": (
        "a = Constant<value_float=0.0>() e = Constant<value_float=4.0>() d = Constant<value_float=1.0>() "
        "b = Range(a, e, d)"
    ),
    "rounded-at-run": (
        "v = Constant<value_floats=[0.7, 0.1, 0.3, 0.6]>() t = Constant<value_float=10.0>() p = Mul(v, t) b = Floor(p)"
    ),
    "compared-at-run": (
        "v = Constant<value_floats=[0.7, 0.1, 0.3, 0.6]>() t = Constant<value_float=10.0>() p = Mul(v, t) "
        "f = Constant<value_floats=[7.0, 2.0, 3.5, 5.0]>() q = GreaterOrEqual(p, f) b = Cast<to=1>(q)"
    ),
    "sequence": "v = Constant<value_floats=[0.7, 0.1]>() q = SequenceConstruct(v, v) b = ConcatFromSequence<axis=0>(q)",
}


@pytest.mark.parametrize("kind", BIASES)
def test_bias_is_computed_from_constants(kind):
    static = "x) => (float[2,4,4,3] y)" if kind == "shape-of-the-input" else None
    head = f"(float[2,3,5,4] {static}" if static else "(float[N,3,5,4] x) => (float[N,4,4,3] y)"
    m = model(f"{head} {{ {BIASES[kind]} c = Conv(x, w, b) [n] y = BN(c, n) }}", w=(4, 3, 2, 2), n=4)
    at_run = {"rounded-at-run": [7.0, 1.0, 3.0, 6.0], "compared-at-run": [1.0, 0.0, 0.0, 1.0]}
    if kind in at_run:  # 0.7f * 10 is 7 in float32 and below it in float64
        result = bnfold.fold(m)
        zero = bnfold.fold(model(f"{head} {{ c = Conv(x, w, b) [n] y = BN(c, n) }}", w=(4, 3, 2, 2), n=4,
                                 b=np.array(at_run[kind])))  # fmt: skip
        np.testing.assert_array_equal(
            numpy_helper.to_array(result.model.graph.initializer[-1]), initializer(zero.model, "b")
        )
        return
    if kind == "sequence":  # values that are no tensors are not followed
        check(m, kept={"n": "dynamic-parameter"})
        return
    result = check(m, folded=["n"], nodes=["Conv"])
    assert len(result.model.graph.initializer) == 2


STATISTICS = {
    "identity": "v = Identity(n_v)",
    "exp-of-log": "v = Exp(l)",
    "cast": "v = Cast<to=1>(h)",
    "squeeze-slice": "t = Slice(wide, i0, i1) v = Squeeze(t, i0)",
}


@pytest.mark.parametrize("kind", STATISTICS)
def test_statistics_are_computed_from_constants(kind):
    m = model(
        f"(float[N,3,5,4] x) => (float[N,4,4,3] y) {{ {STATISTICS[kind]} c = Conv(x, w) "
        f"[n] y = BatchNormalization(c, n_s, n_b, n_m, v) }}",
        w=(4, 3, 2, 2), n=4, l=(4,), h=np.array([0.5, 1.25, 2, 3], np.float16), wide=np.ones((3, 4), np.float32),
        i0=np.array([0]), i1=np.array([1]),
    )  # fmt: skip
    result = check(m, folded=["n"], nodes=["Conv"])
    assert not [t.name for t in result.model.graph.initializer if t.name in ("n_s", "n_b", "n_m")]


DYNAMIC = {  # nodes that make b depend on an input, and what the report says
    "input": ("b = Identity(d)", "computed at run time by Identity"),
    "input-itself": ("q = Identity(d)", "b is an input"),
    "random": ("b = RandomNormal<shape=[4]>()", "computed at run time by RandomNormal"),
    "random-like-a-constant": ("b = RandomNormalLike(b0)", "computed at run time by RandomNormalLike"),
    "unknown-shape": ("s = Shape<start=0, end=1>(d) b = ConstantOfShape(s)", "computed at run time by ConstantOfShape"),
    "foreign": ("b = acme.Make(b0)", "computed at run time by Make"),
    "dropout": ("b = Dropout(b0, half, yes)", "computed at run time by Dropout"),
}


@pytest.mark.parametrize("kind", DYNAMIC)
def test_parameters_that_are_not_constant(kind):
    nodes, text = DYNAMIC[kind]
    extra = ", float[4] b" if kind == "input-itself" else ""
    m = model(
        f"(float[N,3,5,4] x, float[M] d{extra}) => (float[N,4,4,3] y) {{ {nodes} c = Conv(x, w, b) [n] y = BN(c, n) }}",
        w=(4, 3, 2, 2), b0=(4,), n=4, half=np.float32(0.5), yes=np.array(True),
    )  # fmt: skip
    report = bnfold.plan(m)
    assert [(k.norm, r.reason) for k in report.kept for r in k.reasons[:1]] == [("n", "dynamic-parameter")]
    assert text in report.kept[0].reasons[0].detail
    assert bnfold.fold(m).model.SerializeToString() == m.SerializeToString()


def test_weight_from_a_quantized_one():
    m = model(
        "(float[N,3,5,4] x) => (float[N,4,4,3] y) { w = DequantizeLinear<axis=0>(q, s) c = Conv(x, w) "
        "[n] y = BN(c, n) }",
        opset=21, q=np.arange(-20, 28, dtype=np.int8).reshape(4, 3, 2, 2), s=(4,), n=4,
    )  # fmt: skip
    check(m, folded=["n"], nodes=["DequantizeLinear", "Conv"])


def test_sparse_weight_stays():
    m = model("(float[N,3,5,4] x) => (float[N,4,5,4] y) { c = Conv(x, w) [n] y = BN(c, n) }", n=4)
    m.graph.value_info.append(helper.make_tensor_value_info("c", TensorProto.FLOAT, ["N", 4, 5, 4]))
    values = numpy_helper.from_array(np.arange(1, 7, dtype=np.float32), "w")
    places = numpy_helper.from_array(np.array([0, 2, 3, 5, 8, 11]), "places")
    m.graph.sparse_initializer.append(helper.make_sparse_tensor(values, places, [4, 3, 1, 1]))
    report = bnfold.plan(m)
    assert "sparse" in report.kept[0].reasons[0].detail
    assert bnfold.fold(m).model.SerializeToString() == m.SerializeToString()


def test_constants_of_types_no_rule_reads_are_no_obstacle():
    m = model("(float[N,3,5,4] x) => (float[N,4,4,3] y) { c = Conv(x, w) [n] y = BN(c, n) }", w=(4, 3, 2, 2), n=4)
    for kind in (
        TensorProto.STRING,
        TensorProto.INT4,
        TensorProto.FLOAT8E4M3FN,
        TensorProto.COMPLEX64,
        TensorProto.BOOL,
    ):
        name = f"unused_{kind}"
        values = [b"a", b"b"] if kind == TensorProto.STRING else [1, 0]
        m.graph.initializer.append(helper.make_tensor(name, kind, [2], values))
    check(m, folded=["n"], nodes=["Conv"])


def test_attributes_that_are_no_text_are_no_obstacle():
    m = model(
        "(float[N,3,5,4] x) => (float[N,4,4,3] z) { c = Conv(x, w) [n] y = BN(c, n) z = acme.Engine(y) }",
        w=(4, 3, 2, 2),
        n=4,
    )
    m.graph.node[2].attribute.append(helper.make_attribute("blob", b"\xff\x00\xfe"))
    result = bnfold.fold(m)
    assert ops(result.model) == ["Conv", "Engine"]
    assert result.model.graph.node[1].attribute[0].s == b"\xff\x00\xfe"


# ---------------------------------------------------------------------- initializers that a caller may override

CONV_NORM = "(float[N,3,5,4] x) => (float[N,4,4,3] y) { c = Conv(x, w, b) [n] y = BN(c, n) }"
ARRAYS = {"w": (4, 3, 2, 2), "b": (4,), "n": 4}
ALL = ["w", "b", "n_s", "n_b", "n_m", "n_v"]


@pytest.mark.parametrize("name", ALL)
def test_one_listed_initializer_is_an_interface(name):
    m = model(CONV_NORM, **ARRAYS)
    list_inputs(m, name)
    result = check(m, kept={"n": "overridable-parameter"}, nodes=["Conv", "BatchNormalization"])
    assert name in result.report.kept[0].reasons[0].detail


@pytest.mark.parametrize("name", ALL)
def test_frozen_initializers_fold(name):
    m = model(CONV_NORM, **ARRAYS)
    list_inputs(m, name)
    result = check(m, folded=["n"], nodes=["Conv"], freeze_initializers=True)
    assert [i.name for i in result.model.graph.input] == ["x"]
    assert "frozen" in result.report.notes[0]


@pytest.mark.parametrize("ir", [4, 8])
def test_every_initializer_listed_means_none_is_an_interface(ir):
    m = model(CONV_NORM, ir=ir, opset=11, **ARRAYS)
    list_inputs(m, *ALL)
    result = check(m, folded=["n"], nodes=["Conv"])
    assert [i.name for i in result.model.graph.input] == ["x"]
    assert "every initializer" in result.report.notes[0]
    check(m, kept={"n": "overridable-parameter"}, respect_inputs=True)


def test_respected_inputs_win_over_frozen_ones():
    m = model(CONV_NORM, **ARRAYS)
    list_inputs(m, "w")
    check(m, kept={"n": "overridable-parameter"}, respect_inputs=True, freeze_initializers=True)


def test_a_listed_initializer_elsewhere_stays_one():
    m = model(
        "(float[N,3,5,4] x) => (float[N,4,4,3] z) { c = Conv(x, w, b) [n] y = BN(c, n) z = Mul(y, k) }",
        k=(4, 1, 1),
        **ARRAYS,
    )
    list_inputs(m, "k")
    feeds = {**random_feeds(m), "k": np.float32([[[2]], [[3]], [[4]], [[5]]])}
    result = check(m, feeds, folded=["n"], nodes=["Conv", "Mul"])
    assert [i.name for i in result.model.graph.input] == ["x", "k"]
    assert not result.report.notes


def test_what_is_computed_from_a_listed_initializer_is_no_constant():
    m = model(CONV_NORM.replace("c = Conv(x, w, b)", "v = Identity(w) c = Conv(x, v, b)"), **ARRAYS)
    list_inputs(m, "w")
    check(m, kept={"n": "overridable-parameter"})


def test_ir_3_lists_every_initializer_of_the_result():
    m = model(CONV_NORM.replace("w, b", "w"), ir=3, opset=8, w=(4, 3, 2, 2), n=4)
    result = check(m, folded=["n"], nodes=["Conv"])
    assert [i.name for i in result.model.graph.input] == ["x", "w", "c_bias"] or [
        i.name for i in result.model.graph.input
    ] == ["x", "w", "y_bias"]
    assert {t.name for t in result.model.graph.initializer} < {i.name for i in result.model.graph.input}


def test_ir_3_knows_no_interface_of_initializers():
    m = model(CONV_NORM, ir=3, opset=8, **ARRAYS)
    m.graph.input.pop()
    check(m, folded=["n"], nodes=["Conv"], checked=False)


def test_ir_3_a_bias_that_grows_is_listed_with_its_new_shape():
    m = model(
        "(float[N,4] x) => (float[N,5] y) { c = Gemm(x, w, b) [n] y = BN(c, n) }", ir=3, opset=8, w=(4, 5), b=(1,), n=5
    )
    m.graph.value_info.append(helper.make_tensor_value_info("b", TensorProto.FLOAT, [1]))
    result = check(m, folded=["n"], nodes=["Gemm"])
    entry = next(i for i in result.model.graph.input if i.name == "b")
    assert [d.dim_value for d in entry.type.tensor_type.shape.dim] == [5]


def test_a_bias_that_grows_takes_its_value_info_with_it():
    m = model("(float[N,4] x) => (float[N,5] y) { c = Gemm(x, w, b) [n] y = BN(c, n) }", w=(4, 5), b=(1,), n=5)
    m.graph.value_info.append(helper.make_tensor_value_info("b", TensorProto.FLOAT, [1]))
    check(m, folded=["n"], nodes=["Gemm"])


def test_constants_that_cannot_be_read():
    m = model(CONV_NORM, **ARRAYS)
    m.graph.initializer[0].raw_data = b"\x00" * 5
    with pytest.raises(bnfold.BnfoldError, match="'w' cannot be read"):
        bnfold.fold(m)
    m = model(CONV_NORM, **ARRAYS)
    onnx.external_data_helper.set_external_data(m.graph.initializer[0], "missing.bin")
    m.graph.initializer[0].data_location = TensorProto.EXTERNAL
    m.graph.initializer[0].ClearField("raw_data")
    with pytest.raises(bnfold.BnfoldError, match="'w' cannot be read"):
        bnfold.fold(m)


@pytest.mark.parametrize("field", ["float_data", "raw_data"])
@pytest.mark.parametrize("word", ["float", "float16", "bfloat16"])
def test_values_stored_in_typed_fields(field, word):
    kinds = {"float": TensorProto.FLOAT, "float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16}
    m = model(f"({word}[N,3,5,4] x) => ({word}[N,4,4,3] y) {{ c = Conv(x, w, b) [n] y = BN(c, n) }}", opset=22)
    for name, values in arrays_of(np.float64, w=(4, 3, 2, 2), b=(4,), **norm("n", 4)).items():
        tensor = helper.make_tensor(name, kinds[word], values.shape, np.clip(values, -6e4, 6e4).ravel().tolist())
        if field == "raw_data":
            tensor = numpy_helper.from_array(numpy_helper.to_array(tensor), name)
        m.graph.initializer.append(tensor)
    result = check(m, folded=["n"], nodes=["Conv"])
    assert all(not len(t.float_data) and not len(t.int32_data) for t in result.model.graph.initializer)


def test_initializers_added_by_hand_are_found():
    """A model without any initializer of its own: everything is a Constant node."""
    m = model("(float[N,3,5,4] x) => (float[N,4,4,3] y) { c = Conv(x, w) [n] y = BN(c, n) }")
    for k, (name, values) in enumerate(arrays_of(np.float32, w=(4, 3, 2, 2), n=4).items()):
        m.graph.node.insert(k, helper.make_node("Constant", [], [name], value=numpy_helper.from_array(values)))
    result = check(m, folded=["n"], nodes=["Conv"])
    assert len(result.model.graph.initializer) == 2
    bare = model("(float[N,3,5,4] x) => (float[N,4,4,3] y) { c = Conv(x, w) [n] y = BN(c, n) }")
    with pytest.raises(bnfold.BnfoldError, match="which nothing computes"):
        bnfold.fold(bare)
    add_initializers(bare, arrays_of(np.float32, w=(4, 3, 2, 2), n=4))
    check(bare, folded=["n"])
