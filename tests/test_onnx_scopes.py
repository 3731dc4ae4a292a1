"""ONNX: norms inside If, Loop, Scan and model-local functions; captures; names that mean something else inside."""

import numpy as np
import pytest
from onnx import AttributeProto, TensorProto, helper, numpy_helper
from onnx_models import arrays_of, by_onnxruntime, check, initializer, list_inputs, model, ops

import bnfold

X = np.random.default_rng(1).normal(size=(2, 3, 6, 5)).astype(np.float32)
W = {"w": (4, 3, 3, 3), "n": 4}


# Such files run in onnxruntime, whose own rounding is then part of the difference; the checker does not take them.
HIDING = {"checked": False, "oracle": by_onnxruntime, "limit": 2e-5}


def both(m, **expected):
    """Check with the condition true and false."""
    for q in (True, False):
        result = check(m, {"x": X, "q": np.array(q)}, **expected)
    return result


def inner(m, *path: str):
    """The graph of the first If, Loop or Scan, and so on down the path of attribute names."""
    graph = m.graph
    for name in path:
        graph = next(a.g for n in graph.node for a in n.attribute if a.name == name)
    return graph


def give(graph, **arrays):
    """Store initializers in an inner graph."""
    for name, values in arrays_of(np.float32, **arrays).items():
        graph.initializer.append(numpy_helper.from_array(values, name))


IF = """(float[N,3,6,5] x, bool q) => (float[N,4,4,3] y) {{ {before}
    y = If(q) <
        then_branch = yes () => (float[N,4,4,3] t) {{ {yes} }},
        else_branch = no () => (float[N,4,4,3] e) {{ {no} }}
    >
}}"""
NO = "g = Conv(x, u) e = Sigmoid(g)"
IFS = {  # before, yes, no, folded, kept, nodes after
    "all-inside": ("", "c = Conv(x, w) [n] t = BN(c, n)", NO, ["n"], {}, ["If", "Conv", "Conv", "Sigmoid"]),
    "both-branches": (
        "", "c = Conv(x, w) [n] t = BN(c, n)", "d = Conv(x, u) [p] e = BN(d, p)", ["n", "p"], {},
        ["If", "Conv", "Conv"],
    ),
    "weight-shared-by-both": (
        "", "c = Conv(x, w) [n] t = BN(c, n)", "d = Conv(x, w) [p] e = BN(d, p)", ["n", "p"], {},
        ["If", "Conv", "Conv"],
    ),
    "weight-also-outside": (
        "k = Conv(x, w) l = Sigmoid(k)", "c = Conv(x, w) [n] t = BN(c, n)", "e = Sigmoid(l)", ["n"], {},
        ["Conv", "Sigmoid", "If", "Conv", "Sigmoid"],
    ),
    "conv-outside-norm-inside": (
        "c = Conv(x, w)", "[n] t = BN(c, n)", "e = Sigmoid(c)", [], {"n": "multiple-consumers"}, None,
    ),
    "conv-outside-norms-in-both": (
        "c = Conv(x, w)", "[n] t = BN(c, n)", "[p] e = BN(c, p)", [],
        {"n": "multiple-consumers", "p": "multiple-consumers"}, None,
    ),
    "norm-outside-result-captured": (
        "c = Conv(x, w) [n] a = BN(c, n)", "t = Sigmoid(a)", "e = Relu(a)", ["n"], {},
        ["Conv", "If", "Sigmoid", "Relu"],
    ),
    "conv-captured-past-the-norm": (
        "c = Conv(x, w) [n] a = BN(c, n)", "t = Sigmoid(a)", "e = Relu(c)", [], {"n": "multiple-consumers"}, None,
    ),
    "norm-in-front-captured": (
        "[m] a = BN(x, m)", "t = Conv(a, w)", "e = Conv(a, u)", [], {"m": "multiple-consumers"}, None,
    ),
    "norm-and-conv-inside-from-capture": (
        "", "[m] a = BN(x, m) t = Conv(a, w)", NO, ["m"], {}, ["If", "Conv", "Conv", "Sigmoid"],
    ),
    "norm-parameters-by-nodes-outside": (
        "n_v2 = Identity(n_v)", "c = Conv(x, w) [n] t = BatchNormalization(c, n_s, n_b, n_m, n_v2)", NO, ["n"], {},
        ["If", "Conv", "Conv", "Sigmoid"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", IFS)
def test_norms_and_branches(kind):
    before, yes, no, folded, kept, after = IFS[kind]
    m = model(IF.format(before=before, yes=yes, no=no), u=(4, 3, 3, 3), m=3, p=4, **W)
    both(m, folded=folded, kept=kept, nodes=after)


def test_a_weight_that_only_a_branch_reads_is_changed_where_it_is():
    m = model(IF.format(before="", yes="c = Conv(x, w) [n] t = BN(c, n)", no="e = Identity(z)"), z=(2, 4, 4, 3), **W)
    result = both(m, folded=["n"])
    assert {t.name for t in result.model.graph.initializer} == {"w", "z"}
    assert not np.array_equal(initializer(result.model, "w"), initializer(m, "w"))
    assert result.report.bytes_added == 0


def test_weights_of_the_branch_itself():
    m = model(IF.format(before="", yes="c = Conv(x, wi) [n] t = BN(c, ni)", no=NO), u=(4, 3, 3, 3))
    give(inner(m, "then_branch"), wi=(4, 3, 3, 3), ni=4)
    result = both(m, folded=["n"])
    assert [t.name for t in inner(result.model, "then_branch").initializer] == ["wi", "c_bias"]
    assert [t.name for t in result.model.graph.initializer] == ["u"]


def test_the_same_names_mean_other_weights_in_each_branch():
    text = IF.format(before="", yes="c = Conv(x, wi) [n] t = BN(c, ni)", no="d = Conv(x, wi) [p] e = BN(d, ni)")
    m = model(text)
    for branch, seed in (("then_branch", 0), ("else_branch", 1)):
        rng = np.random.default_rng(seed)
        give(inner(m, branch), wi=rng.normal(size=(4, 3, 3, 3)), ni_s=rng.uniform(1, 2, 4), ni_b=rng.normal(size=4),
             ni_m=rng.normal(size=4), ni_v=rng.uniform(1, 2, 4))  # fmt: skip
    result = both(m, folded=["n", "p"], nodes=["If", "Conv", "Conv"])
    for branch in ("then_branch", "else_branch"):
        assert inner(result.model, branch).initializer[0].name == "wi"
        assert len(inner(result.model, branch).initializer) == 2


def test_an_inner_initializer_hides_an_outer_one():
    """The weight inside is the inner one, the outer one stays; onnxruntime reads such files so."""
    m = model(
        IF.format(before="k = Conv(x, w) k2 = Sigmoid(k)", yes="c = Conv(x, w) [n] t = BN(c, n)", no="e = Sigmoid(k2)"),
        **W,
    )
    give(inner(m, "then_branch"), w=np.random.default_rng(7).normal(size=(4, 3, 3, 3)), n_v=np.full(4, 4.0))
    result = both(m, folded=["n"], **HIDING)
    np.testing.assert_array_equal(initializer(result.model, "w"), initializer(m, "w"))
    assert [t.name for t in inner(result.model, "then_branch").initializer] == ["w", "c_bias"]


def test_an_inner_initializer_hides_an_outer_value():
    m = model(
        IF.format(before="w = Sigmoid(w0) k = Conv(x, w)", yes="c = Conv(x, w) [n] t = BN(c, n)", no="e = Sigmoid(k)"),
        w0=(4, 3, 3, 3), n=4,
    )  # fmt: skip
    give(inner(m, "then_branch"), w=(4, 3, 3, 3))
    both(m, folded=["n"], **HIDING)


def test_an_initializer_of_the_middle_hides_the_outer_one_from_the_innermost():
    m = model(
        """(float[N,3,6,5] x, bool q) => (float[N,4,4,3] y) {
            k = Conv(x, w)
            y = If(q) <
                then_branch = yes () => (float[N,4,4,3] t) {
                    t = If(q) <
                        then_branch = yes2 () => (float[N,4,4,3] t2) { c = Conv(x, w) [n] t2 = BN(c, n) },
                        else_branch = no2 () => (float[N,4,4,3] e2) { e2 = Sigmoid(k) }
                    >
                },
                else_branch = no () => (float[N,4,4,3] e) { e = Relu(k) }
            >
        }""",
        **W,
    )
    give(inner(m, "then_branch"), w=np.random.default_rng(7).normal(size=(4, 3, 3, 3)))
    result = both(m, folded=["n"], **HIDING)
    np.testing.assert_array_equal(initializer(result.model, "w"), initializer(m, "w"))
    assert ops(result.model) == ["Conv", "If", "If", "Conv", "Sigmoid", "Relu"]


def test_overridable_is_the_outer_one_only():
    m = model(IF.format(before="k = Conv(x, w)", yes="c = Conv(x, w) [n] t = BN(c, n)", no="e = Sigmoid(k)"), **W)
    list_inputs(m, "w")
    both(m, kept={"n": "overridable-parameter"})
    give(inner(m, "then_branch"), w=np.random.default_rng(7).normal(size=(4, 3, 3, 3)))
    both(m, folded=["n"], **HIDING)


def test_nested_twice():
    m = model(
        """(float[N,3,6,5] x, bool q) => (float[N,4,4,3] y) {
            y = If(q) <
                then_branch = yes () => (float[N,4,4,3] t) {
                    b = Conv(x, w) [o] b2 = BN(b, n)
                    t = If(q) <
                        then_branch = yes2 () => (float[N,4,4,3] t2) {
                            c = Conv(x, u) [n] d = BN(c, p) t2 = Mul(d, b2)
                        },
                        else_branch = no2 () => (float[N,4,4,3] e2) { e2 = Sigmoid(b2) }
                    >
                },
                else_branch = no () => (float[N,4,4,3] e) { f = Conv(x, w) e = Relu(f) }
            >
        }""",
        u=(4, 3, 3, 3), p=4, **W,
    )  # fmt: skip
    result = both(m, folded=["o", "n"], nodes=["If", "Conv", "If", "Conv", "Mul", "Sigmoid", "Conv", "Relu"])
    np.testing.assert_array_equal(initializer(result.model, "w"), initializer(m, "w"))


# ---------------------------------------------------------------------- Loop and Scan


LOOP = """(float[N,4,6,5] x, int64 trips, bool q) => (float[N,4,6,5] y, float[T,N,4,6,5] all) {{
    y, all = Loop(trips, q, x) <
        body = step (int64 i, bool go, float[N,4,6,5] h) => (bool on, float[N,4,6,5] h2, float[N,4,6,5] seen) {{
            on = Identity(go) {0}
        }}
    >
}}"""
LOOPS = {  # body, folded, kept, nodes in the body
    "conv-norm": ("c = Conv<pads=[1,1,1,1]>(h, w) [n] b = BN(c, n) h2 = Sigmoid(b) seen = Relu(h2)", ["n"], {}),
    "norm-on-the-carried-value": ("[n] b = BN(h, n) h2 = Sigmoid(b) seen = Identity(h2)", [], {"n": "model-input"}),
    "norm-is-the-carried-value": ("c = Conv<pads=[1,1,1,1]>(h, w) [n] h2 = BN(c, n) seen = Sigmoid(h2)", ["n"], {}),
    "conv-is-seen": ("seen = Conv<pads=[1,1,1,1]>(h, w) [n] h2 = BN(seen, n)", [], {"n": "model-output"}),
}


@pytest.mark.parametrize("kind", LOOPS)
def test_norms_in_loops(kind):
    body, folded, kept = LOOPS[kind]
    m = model(LOOP.format(body), w=(4, 4, 3, 3), n=4)
    x = np.random.default_rng(1).normal(size=(2, 4, 6, 5)).astype(np.float32)
    feeds = {"x": x, "trips": np.array(3), "q": np.array(True)}
    if kind == "norm-on-the-carried-value":
        assert [k.norm for k in bnfold.plan(m).kept] == ["n"]
        assert bnfold.fold(m).model.SerializeToString() == m.SerializeToString()
        return
    check(m, feeds, folded=folded, kept=kept, limit=1e-5)  # three rounds, each passing on the error of the last


def test_the_initial_value_of_a_loop_variable_is_no_constant():
    """An initializer that is an input of the body as well is only a default: the loop sets it each time."""
    m = model(LOOP.format("c = Conv<pads=[1,1,1,1]>(x, h) [n] b = BN(c, n) h2 = Mul(h, two) seen = Sigmoid(b)")
              .replace("float[N,4,6,5] h)", "float[4,4,3,3] h)").replace("float[N,4,6,5] h2", "float[4,4,3,3] h2")
              .replace("(float[N,4,6,5] y,", "(float[4,4,3,3] y,").replace("trips, q, x", "trips, q, w"),
              w=(4, 4, 3, 3), n=4, two=np.float32(2))  # fmt: skip
    give(inner(m, "body"), h=np.ones((4, 4, 3, 3)))
    inner(m, "body").value_info.append(helper.make_tensor_value_info("c", TensorProto.FLOAT, ["N", 4, 6, 5]))
    report = bnfold.plan(m)
    assert [str(r.reason) for k in report.kept for r in k.reasons[:1]] == ["dynamic-parameter"]
    assert bnfold.fold(m).model.SerializeToString() == m.SerializeToString()


def test_norms_in_scans():
    m = model(
        """(float[T,N,3] x, float[N,4] h0) => (float[N,4] h, float[T,N,4] ys) {
            h, ys = Scan<num_scan_inputs=1,
                body = step (float[N,4] s, float[N,3] e) => (float[N,4] s2, float[N,4] y) {
                    a = Gemm(e, w) [n] b = BN(a, n) y = Sigmoid(b) s2 = Add(s, y)
                }
            >(h0, x)
        }""",
        w=(3, 4), n=4,
    )  # fmt: skip
    rng = np.random.default_rng(0)
    feeds = {"x": rng.normal(size=(5, 2, 3)).astype(np.float32), "h0": rng.normal(size=(2, 4)).astype(np.float32)}
    check(m, feeds, folded=["n"], nodes=["Scan", "Gemm", "Sigmoid", "Add"])


# ---------------------------------------------------------------------- functions

NORM = """
    s = Constant<value_floats=[-1.5, 0.5, 2.0, 1e-6]>() b = Constant<value_floats=[0.1, 0.0, -3.0, 1.0]>()
    m = Constant<value_floats=[0.5, -0.25, 1.0, 0.0]>() v = Constant<value_floats=[1e-12, 2.0, 1e6, 0.5]>()
"""
WEIGHT = "k = Constant<value_ints=[4, 3, 2, 2]>() one = Constant<value = float[1] {1.5}>() w = Expand(one, k)"
CALL = '(float[N,3,6,5] x) => (float[N,4,5,4] y) {{ {0} }} <domain: "acme", opset_import: ["" : 17]> Block {1}'
FUNCTIONS = {  # main graph, function, folded, kept, nodes after
    "all-inside": (
        "y = acme.Block(x)",
        f"(a) => (r) {{ {NORM} {WEIGHT} c = Conv(a, w) [n] r = BatchNormalization(c, s, b, m, v) }}",
        ["n"], {}, ["Block", "Constant", "Constant", "Conv"],
    ),
    "called-twice": (
        "y0 = acme.Block(x) y1 = acme.Block(x) y = Add(y0, y1)",
        f"(a) => (r) {{ {NORM} {WEIGHT} c = Conv(a, w) [n] r = BatchNormalization(c, s, b, m, v) }}",
        ["n"], {}, ["Block", "Block", "Add", "Constant", "Constant", "Conv"],
    ),
    "weight-is-an-argument": (
        "y = acme.Block(x, w)", f"(a, w) => (r) {{ {NORM} c = Conv(a, w) [n] r = BatchNormalization(c, s, b, m, v) }}",
        [], {"n": "unknown-shape"}, None,
    ),
    "norm-is-an-argument": (
        "y = acme.Block(x, n_s)",
        f"(a, s0) => (r) {{ {NORM} {WEIGHT} c = Conv(a, w) [n] r = BatchNormalization(c, s0, b, m, v) }}",
        [], {"n": "dynamic-parameter"}, None,
    ),
    "epsilon-is-an-attribute": (
        "y = acme.Block<eps: float=0.5>(x)",
        f"<eps>(a) => (r) {{ {NORM} {WEIGHT} c = Conv(a, w) "
        f"[n] r = BatchNormalization<epsilon: float=@eps>(c, s, b, m, v) }}",
        [], {"n": "dynamic-parameter"}, None,
    ),
    "conv-also-returned": (
        "y, z = acme.Block(x)",
        f"(a) => (r, c) {{ {NORM} {WEIGHT} c = Conv(a, w) [n] r = BatchNormalization(c, s, b, m, v) }}",
        [], {"n": "model-output"}, None,
    ),
    "conv-outside": (
        "c = Conv(x, w2) y = acme.Block(c)", f"(a) => (r) {{ {NORM} [n] r = BatchNormalization(a, s, b, m, v) }}",
        [], {"n": "unknown-shape"}, None,
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_norms_in_functions(kind):
    main, function, folded, kept, after = FUNCTIONS[kind]
    m = model(CALL.format(main, function), w=(4, 3, 2, 2), w2=(4, 3, 2, 2), n=4)
    check(m, folded=folded, kept=kept, nodes=after)


def test_a_branch_inside_a_function():
    m = model(
        f"""(float[N,3,6,5] x, bool q) => (float[N,4,5,4] y) {{ y = acme.Block(x, q) }}
        <domain: "acme", opset_import: ["" : 17]> Block (a, p) => (r) {{ {NORM} {WEIGHT}
            r = If(p) <then_branch = yes () => (t) {{ c = Conv(a, w) [n] t = BatchNormalization(c, s, b, m, v) }},
                       else_branch = no () => (e) {{ d = Conv(a, w) e = Sigmoid(d) }}>
        }}"""
    )
    result = both(m, folded=["n"], checked=False)
    assert ops(result.model) == ["Block", "Constant", "Constant", "Expand", "If", "Conv", "Conv", "Sigmoid"]


def test_functions_that_call_each_other():
    m = model(
        f"""(float[N,3,6,5] x) => (float[N,4,5,4] y) {{ y = acme.Outer(x) }}
        <domain: "acme", opset_import: ["" : 17, "acme" : 1]> Outer (a) => (r) {{ b = acme.Inner(a) r = Sigmoid(b) }}
        <domain: "acme", opset_import: ["" : 17]> Inner (a) => (r) {{ {NORM} {WEIGHT}
            c = Conv(a, w) [n] r = BatchNormalization(c, s, b, m, v) }}"""
    )
    check(m, folded=["n"])


def test_a_function_of_another_opset():
    """The function says opset 7, where five outputs are the training form; the model says 17."""
    text = CALL.format(
        "y = acme.Block(x)",
        f"(a) => (r) {{ {NORM} {WEIGHT} c = Conv(a, w) [n] r, m2, v2 = BatchNormalization(c, s, b, m, v) }}",
    )
    m = model(text.replace('opset_import: ["" : 17]> Block', 'opset_import: ["" : 9]> Block'))
    report = bnfold.plan(m)
    assert [str(r.reason) for k in report.kept for r in k.reasons] == ["training-mode"]


MATRICES = {"gemm": ("Gemm(a, w)", ["Constant", "Constant", "Gemm"]), "matmul": ("MatMul(g, w)", None)}


@pytest.mark.parametrize("kind", MATRICES)
def test_matrix_products_in_functions(kind):
    """Nothing is known of shapes inside a function but what its own nodes say: a Gemm's result is a matrix."""
    product, after = MATRICES[kind]
    m = model(
        f"""(float[N,4] x) => (float[N,4] y) {{ y = acme.Block(x) }}
        <domain: "acme", opset_import: ["" : 17]> Block (a) => (r) {{
            w = Constant<value = float[4,4] {{1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16}}>()
            s = Constant<value_floats=[2.0, 1.0, -1.0, 0.0]>() z = Constant<value_floats=[1.0, 1.0, 1.0, 1.0]>()
            {"g = Identity(a)" if kind == "matmul" else ""} d = {product}
            [n] r = BatchNormalization(d, s, z, s, z) }}"""
    )
    if after:
        check(m, folded=["n"], nodes=["Block", *after])
    else:
        check(m, kept={"n": "unknown-shape"})


def test_a_function_that_declares_its_values():
    m = model(
        f"""(float[N,4,6] x) => (float[N,4,6] y) {{ y = acme.Block(x) }}
        <domain: "acme", opset_import: ["" : 17]> Block (a) => (r) {{ {NORM}
            e = Identity(a) [k] d = Mul(e, s1) [n] f = BatchNormalization(d, s, b, m, v) r = Sigmoid(f) }}""".replace(
            "[k]", "s1 = Constant<value_float=2.0>() [k]"
        )
    )
    check(m, kept={"n": "unknown-shape"})
    for name in ("e", "d", "a"):
        m.functions[0].value_info.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", 4, 6]))
    result = check(m, affine=["k"], kept={"n": "model-input"})
    assert [v.name for v in result.model.functions[0].value_info] == ["e", "a"]


def test_before_ir_4_constants_of_inner_graphs_are_nodes():
    m = model(
        IF.format(before="", yes="c = Conv(x, w) [n] t = BN(c, n)", no="e = Relu(z)"),
        ir=3,
        opset=8,
        z=(2, 4, 4, 3),
        **W,
    )
    result = both(m, folded=["n"], nodes=["If", "Constant", "Conv", "Relu"])
    assert {t.name for t in result.model.graph.initializer} == {"w", "z"}


def test_a_matmul_in_a_function_gets_its_bias_from_a_constant_node():
    m = model(
        """(float[N,4] x) => (float[N,4] y) { y = acme.Block(x) }
        <domain: "acme", opset_import: ["" : 17]> Block (a) => (r) {
            w = Constant<value = float[4,4] {1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16}>()
            s = Constant<value_floats=[2.0, 1.0, -1.0, 0.0]>() z = Constant<value_floats=[1.0, 1.0, 1.0, 1.0]>()
            c = Gemm(a, w) [n] b = BatchNormalization(c, s, z, s, z) e = Sigmoid(c) d = MatMul(b, w) r = Add(d, e) }"""
    )
    result = check(m, folded=["n"])
    assert ops(result.model) == ["Block", "Constant", "Constant", "Constant", "Gemm", "Sigmoid", "MatMul", "Add", "Add"]


# ---------------------------------------------------------------------- graphs that are not looked into


def test_what_a_list_of_graphs_mentions_is_captured():
    """No op of ONNX's own has an attribute of several graphs, and onnx-graphsurgeon does not read them."""
    m = model(
        "(float[N,3,6,5] x) => (float[N,4,4,3] y, float z) { c = Conv(x, w) [n] y = BN(c, n) z = acme.Switch(x) }", **W
    )
    assert [f.norm for f in bnfold.plan(m).folded] == ["n"]
    branch = helper.make_graph(
        [helper.make_node("Relu", ["c"], ["r"])], "branch", [], [helper.make_empty_tensor_value_info("r")]
    )
    attribute = AttributeProto(name="branches", type=AttributeProto.GRAPHS)
    attribute.graphs.append(branch)
    m.graph.node[2].attribute.append(attribute)
    report = bnfold.plan(m)
    assert [str(r.reason) for k in report.kept for r in k.reasons[:1]] == ["multiple-consumers"]
    attribute.graphs[0].node[0].input[0] = "w"
    m.graph.node[2].attribute[0].CopyFrom(attribute)
    result = bnfold.fold(m)
    np.testing.assert_array_equal(initializer(result.model, "w"), initializer(m, "w"))
    assert len(result.report.folded) == 1


def test_what_training_mentions_stays():
    m = model("(float[N,3,6,5] x) => (float[N,4,4,3] y) { c = Conv(x, w) [n] y = BN(c, n) }", **W)
    info = m.training_info.add()
    info.algorithm.name = "step"
    info.algorithm.node.append(helper.make_node("Identity", ["w"], ["w_new"]))
    info.algorithm.node.append(helper.make_node("Identity", ["w_new"], ["c_bias"]))
    info.algorithm.output.append(helper.make_empty_tensor_value_info("w_new"))
    info.update_binding.add(key="w", value="w_new")
    info.update_binding.add(key="n_m", value="w_new")
    result = check(m, folded=["n"], checked=False)
    for name in ("w", "n_m"):
        np.testing.assert_array_equal(initializer(result.model, name), initializer(m, name))
    assert result.model.training_info == m.training_info
    assert "c_bias" not in {t.name for t in result.model.graph.initializer}
