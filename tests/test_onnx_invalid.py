"""ONNX: files that are wrong give a BnfoldError with the place, never another exception, never a worse file."""

from __future__ import annotations

import random

import numpy as np
import onnx
import pytest
from onnx import AttributeProto, ModelProto, TensorProto, helper, numpy_helper
from onnx_models import by_onnxruntime, every_node, list_inputs, model, random_feeds

import bnfold

CONV = "(float[N,3,5,4] x) => (float[N,4,4,3] y) { [conv] c = Conv(x, w, b) [n] y = BN(c, n) }"
ARRAYS = {"w": (4, 3, 2, 2), "b": (4,), "n": 4}


def edited(change, text=CONV, **arrays):
    m = model(text, **{**ARRAYS, **arrays})
    change(m)
    return m


def node(m: ModelProto, name: str):
    return next(n for n in every_node(m) if n.name == name)


def attribute(name, key, value):
    return lambda m: node(m, name).attribute.append(helper.make_attribute(key, value))


def untyped(m: ModelProto) -> None:
    node(m, "conv").attribute.append(AttributeProto(name="group", i=1))


WRONG = {  # what is wrong with the model, and what the message says
    "dangling-input": (lambda m: node(m, "conv").input.__setitem__(1, "gone"), "reads 'gone', which nothing computes"),
    "unsorted": (lambda m: m.graph.node.insert(0, m.graph.node.pop()), "reads 'c', which is computed only after it"),
    "cycle": (lambda m: node(m, "conv").input.__setitem__(0, "y"), "reads 'y', which is computed only after it"),
    "defined-twice": (lambda m: m.graph.node.append(m.graph.node[0]), "'c' is defined twice"),
    "value-and-initializer": (lambda m: node(m, "n").output.__setitem__(0, "w"), "'w' is defined twice"),
    "output-missing": (lambda m: node(m, "n").output.__setitem__(0, "q"), "its output 'y' is computed by none"),
    "no-inputs": (lambda m: node(m, "conv").ClearField("input"), "Conv 'conv': it has 0 operands, not 2 to 3"),
    "norm-without-variance": (lambda m: node(m, "n").input.pop(), "it has 4 operands, not 5 to 5"),
    "left-out-operand": (lambda m: node(m, "n").input.__setitem__(3, ""), "cannot do without is left out"),
    "group-of-wrong-type": (attribute("conv", "group", 1.5), "its attribute group is a FLOAT, not of AttrType.INT"),
    "epsilon-of-wrong-type": (attribute("n", "epsilon", 1), "its attribute epsilon is a INT, not of AttrType.FLOAT"),
    "attribute-without-type": (untyped, "attribute 'group' of Conv 'conv' has no type"),
    "groups-do-not-divide": (attribute("conv", "group", 3), "does not go with 3 groups"),
    "no-groups": (attribute("conv", "group", 0), "does not go with 0 groups"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_the_message_names_the_place(kind):
    change, text = WRONG[kind]
    m = edited(change)
    with pytest.raises(bnfold.BnfoldError, match=text.replace("(", r"\(").replace(")", r"\)")) as e:
        bnfold.fold(m)
    assert "\n" not in str(e.value)
    with pytest.raises(bnfold.BnfoldError):
        bnfold.plan(m)


MISFITS = {  # arrays that do not go together, and what the message says
    "input-channels": ({"w": (4, 2, 2, 2)}, "has 2 input channels, its input has 3"),
    "bias-length": ({"b": (3,)}, r"its bias b has shape \(3,\), not \(4,\)"),
    "norm-length": ({"n": 3}, r"parameters of shape \(3,\)"),
    "norm-lengths-differ": ({"n_v": (3,)}, r"parameters of shapes \(4,\)"),
    "norm-matrix": ({"n_s": (4, 1), "n_b": (4, 1), "n_m": (4, 1), "n_v": (4, 1)}, r"parameters of shapes \(4, 1\)"),
    "norm-scalar": ({"n_s": (), "n_b": (), "n_m": (), "n_v": ()}, r"parameters of shapes \(\)"),
    "weight-rank": ({"w": (4, 3)}, r"a weight w of shape \(4, 3\)"),
    "integer-statistics": ({"n_v": np.arange(4, dtype=np.int32)}, "is not of a floating-point type"),
}


@pytest.mark.parametrize("kind", MISFITS)
def test_shapes_and_types_that_do_not_go_together(kind):
    arrays, text = MISFITS[kind]
    given = {**ARRAYS, **arrays}
    if any(k.startswith("n_") for k in arrays):
        whole = model(CONV, **ARRAYS)
        given = {t.name: numpy_helper.to_array(t) for t in whole.graph.initializer} | given
        del given["n"]
    with pytest.raises(bnfold.BnfoldError, match=text):
        bnfold.fold(model(CONV, **given))


def test_no_model_at_all(tmp_path):
    for data in (b"", b"\x00\x01\x02", b"not a model"):
        (tmp_path / "m.onnx").write_bytes(data)
        with pytest.raises(bnfold.BnfoldError):
            bnfold.fold(tmp_path / "m.onnx")
    with pytest.raises(bnfold.BnfoldError):
        bnfold.fold(tmp_path / "missing.onnx")
    assert not bnfold.fold(ModelProto()).report.norms


# ---------------------------------------------------------------------- random mutations

BASES = [
    lambda: model(CONV, **ARRAYS),
    lambda: model(CONV.replace("Conv", "ConvTranspose").replace("4,3] y", "6,5] y"), w=(3, 4, 2, 2), b=(4,), n=4),
    lambda: model("(float[N,4] x) => (float[N,5] y) { [g] c = Gemm<transB=1, alpha=0.5>(x, w, b) [n] y = BN(c, n) }",
                  w=(5, 4), b=(1,), n=5),
    lambda: model("(float[N,4] x) => (float[N,5] y) { [m] a = MatMul(x, w) [k] c = Add(a, b) [n] y = BN(c, n) }",
                  w=(4, 5), b=(5,), n=5),
    lambda: model("""(float[N,4,6] x) => (float[N,5,5] y) { [t] t = Transpose<perm=[1,2,0]>(w0) [p] a = BN(x, p)
                  [conv] c = Conv(a, t) e = Add(v, eps) r = Sqrt(e) d = Sub(c, mean) [f] f = Div(d, r)
                  [h] y = Mul(f, g) }""",
                  w0=(2, 5, 4), v=np.ones((5, 1), np.float32), mean=(5, 1), g=(5, 1), eps=np.float32(1e-3), p=4),
    lambda: model("""(float[N,3,5,4] x, bool q) => (float[N,4,4,3] y) { y = If(q) <
                  then_branch = yes () => (float[N,4,4,3] t) { [conv] c = Conv(x, w, b) [n] t = BN(c, n) },
                  else_branch = no () => (float[N,4,4,3] e) { d = Conv(x, w, b) e = Relu(d) }> }""", **ARRAYS),
    lambda: model("""(float[N,4] x) => (float[N,4] y) { y = acme.Block(x) }
                  <domain: "acme", opset_import: ["" : 17]> Block (a) => (r) {
                  s = Constant<value_floats=[2.0, 1.0, -1.0, 0.0]>() z = Constant<value_floats=[1.0, 1.0, 1.0, 1.0]>()
                  w = Constant<value = float[4,4] {1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16}>()
                  [g] c = Gemm(a, w) [n] r = BatchNormalization(c, s, z, s, z) }"""),
    lambda: model(CONV.replace("(c, n)", "<spatial=1>(c, n)"), opset=8, ir=3, **ARRAYS),
    lambda: model("""(float[N,4,4,3] x) => (float[N,4,4,3] y) {
                  s = Sigmoid(x) [k] c = Mul(s, k) [n] d = BN(c, n) [i] y = Identity(d) }""", k=(4, 1, 1), n=4),
    lambda: model("(float[N,4,3] x) => (float[N,12] y) { [n] a = BN(x, n) [f] b = Flatten(a) [g] y = Gemm(b, w) }",
                  w=(12, 12), n=4),
]  # fmt: skip


def mutate(m: ModelProto, rng: random.Random) -> None:
    """Change one thing, anywhere."""
    nodes = list(every_node(m)) or [m.graph.node.add(op_type="Relu", input=["x"], output=["y"])]
    names = [name for n in nodes for name in (*n.input, *n.output)] + ["", "nowhere"]
    n, t = rng.choice(nodes), rng.choice(list(m.graph.initializer) or [TensorProto()])
    graph = m.graph
    match rng.randrange(20):
        case 0 if n.input:
            n.input[rng.randrange(len(n.input))] = rng.choice(names)
        case 1 if n.output:
            n.output[rng.randrange(len(n.output))] = rng.choice(names)
        case 2 if n.input:
            n.input.pop(rng.randrange(len(n.input)))
        case 3:
            n.input.append(rng.choice(names))
        case 4:
            n.op_type = rng.choice(
                [*(other.op_type for other in nodes), "Conv", "Gemm", "Add", "Transpose", "Nonsense", "Reshape"]
            )
        case 5 if graph.node:
            graph.node.pop(rng.randrange(len(graph.node)))
        case 6 if len(graph.node) > 1:
            graph.node.insert(0, graph.node.pop(rng.randrange(len(graph.node))))
        case 7 if n.attribute:
            a = rng.choice(list(n.attribute))
            a.CopyFrom(helper.make_attribute(a.name, rng.choice([0, 7, -1, 0.5, [2, 0], [1.0], "text", t])))
        case 8:
            key = rng.choice(
                ["group", "epsilon", "perm", "axis", "transA", "pads", "alpha", "spatial", "training_mode", "nonsense"]
            )
            n.attribute.append(
                helper.make_attribute(key, rng.choice([0, 1, 2, -1, 0.5, [1, 0], [1, 1, 1, 1], "SAME_UPPER"]))
            )
        case 9 if graph.initializer:
            graph.initializer.remove(t)
        case 10 if t.dims:
            t.dims[rng.randrange(len(t.dims))] = rng.choice([0, 1, 2, 3, 5, -1, 10**12])
        case 11:
            t.data_type = rng.choice([0, 1, 6, 7, 10, 11, 16, 17, 99])
        case 12:
            t.raw_data = rng.choice(
                [b"", t.raw_data[:-3], t.raw_data * 2, bytes(rng.randrange(256) for _ in t.raw_data)]
            )
        case 13:
            t.dims[:] = rng.choice([[], [1], [4, 1], [*t.dims, 1], list(reversed(t.dims))])
        case 14 if graph.input:
            v = rng.choice([*graph.input, *graph.output])
            v.type.CopyFrom(
                helper.make_tensor_type_proto(
                    rng.choice([1, 7, 10, 11]), rng.choice([None, [], [2, 4], ["N", 3, 5, 4]])
                )
            )
        case 15:
            v = helper.make_tensor_value_info(
                rng.choice(names), rng.choice([1, 7]), rng.choice([[], [2, 3], [1, 9, 9, 9], None])
            )
            graph.value_info.append(v)
        case 16:
            m.opset_import[0].version = rng.choice([1, 6, 7, 9, 13, 14, 15, 22, 99, 0])
        case 17:
            m.ir_version = rng.choice([0, 3, 4, 8, 99])
        case 18:
            n.domain = rng.choice(["ai.onnx", "acme", "elsewhere"])
        case 19 if graph.initializer:
            list_inputs(m, t.name)


def accepted(m: ModelProto) -> bool:
    try:
        onnx.checker.check_model(m, full_check=True)
    except Exception:
        return False
    return True


def mutant(seed: int) -> ModelProto:
    rng = random.Random(seed)
    m = rng.choice(BASES)()
    for _ in range(rng.choice([1, 1, 2, 3])):
        mutate(m, rng)
    return m


def judge(seed: int) -> str:
    """Fold a mutant. What the checker accepted must be accepted after, and compute the same where it runs."""
    m = mutant(seed)
    before = m.SerializeToString(deterministic=True)
    try:
        found = bnfold.fold(m, keep_broken=True)
    except bnfold.BnfoldError:
        return "refused"
    finally:
        assert m.SerializeToString(deterministic=True) == before
    if not accepted(m):
        return "tolerated"
    assert accepted(found.model), found.report
    try:
        feeds = random_feeds(m)
        expected = by_onnxruntime(m, feeds)
    except Exception:
        return "accepted"
    for e, f in zip(expected, by_onnxruntime(found.model, feeds), strict=True):
        if e.dtype.kind == "f" and np.isfinite(e).all():  # float32 of onnxruntime on both sides
            np.testing.assert_allclose(f, e, rtol=1e-3, atol=1e-4 * np.abs(e).max(initial=0))
    return "ran"


@pytest.mark.parametrize("block", [*range(4), *(pytest.param(k, marks=pytest.mark.fuzz) for k in range(4, 67))])
def test_mutants(block):
    outcomes = [judge(seed) for seed in range(150 * block, 150 * (block + 1))]
    assert {"refused", "ran"} <= set(outcomes), "the mutations are too tame or too wild to show anything"
