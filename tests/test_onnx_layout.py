"""What lies between layers: what a map passes, what it does not and why, against onnx.reference in float64."""

import re

import numpy as np
import pytest
from onnx_models import check, model, norm

from bnfold.transform import plan


def text(body, x="float[2,3,6,5] x", y="float[N,M,H,W] y"):
    return f"({x}) => ({y}) {{ {body} }}"


# ---------------------------------------------------------------------- each operation, both ways, four kinds of map

SHIFT, SIGN = "nonzero-shift", "negative-scale"
KINDS = {  # gamma, whether it shifts
    "any": ([0.7, -1.3, 0.0, 2.0], True),
    "nonnegative": ([0.7, 1e-6, 0.0, 2.0], True),
    "scale": ([0.7, -1.3, 0.0, 2.0], False),
    "positive": ([0.7, 1e-6, 0.4, 2.0], False),
}
PASSES: dict[str, str] = {}
HOMOGENEOUS = {"any": SHIFT, "nonnegative": SHIFT, "scale": SIGN}
MAXIMUM = {"any": SIGN, "scale": SIGN}
SCALES = {"any": SHIFT, "nonnegative": SHIFT}


def nothing(why):
    return dict.fromkeys(KINDS, why)


WAYS = {
    "identity": ("Identity({})", PASSES),
    "dropout": ("Dropout({})", PASSES),
    "cast-to-its-own-type": ("Cast<to=1>({})", PASSES),
    "cast-to-another-type": ("Cast<to=11>({})", nothing("unsupported-op")),
    "relu": ("Relu({})", HOMOGENEOUS),
    "leaky-relu": ("LeakyRelu<alpha=0.2>({})", HOMOGENEOUS),
    "prelu": ("PRelu({}, slopes)", HOMOGENEOUS),
    "absolute-value": ("Abs({})", HOMOGENEOUS),
    "max-pool": ("MaxPool<kernel_shape=[2,2], pads=[0,1,1,0]>({})", MAXIMUM),
    "global-max-pool": ("GlobalMaxPool({})", MAXIMUM),
    "largest": ("ReduceMax<axes=[2,3]>({})", MAXIMUM),
    "average-pool": ("AveragePool<kernel_shape=[2,2], strides=[2,1]>({})", PASSES),
    "average-pool-padding-left-out": ("AveragePool<kernel_shape=[3,3], pads=[1,1,1,1]>({})", PASSES),
    "average-pool-padding-counted": (
        "AveragePool<kernel_shape=[3,3], pads=[1,1,1,1], count_include_pad=1>({})",
        SCALES,
    ),
    "global-average-pool": ("GlobalAveragePool({})", PASSES),
    "mean": ("ReduceMean<axes=[-1,-2]>({})", PASSES),
    "sum": ("ReduceSum({}, last)", SCALES),
    "zeros-around": ("Pad({}, border)", SCALES),
    "zeros-said-to-be": ("Pad({}, border, zero)", SCALES),
    "halves-around": ("Pad({}, border, half)", nothing("padded-shift")),
    "mirrored-border": ('Pad<mode="reflect">({}, border)', PASSES),
    "repeated-border": ('Pad<mode="edge">({}, border)', PASSES),
    "nearest": ('Resize<mode="nearest">({}, , twice)', PASSES),
    "linear": ('Resize<mode="linear">({}, , twice)', PASSES),
    "cubic": ('Resize<mode="cubic">({}, , twice)', nothing("unsupported-op")),
    "swapped-sides": ("Transpose<perm=[0,1,3,2]>({})", PASSES),
    "corner": ("Slice({}, one, many, last)", PASSES),
    "sigmoid": ("Sigmoid({})", nothing("unsupported-op")),
}
GIVEN = {
    "slopes": np.linspace(-0.5, 0.5, 4).reshape(4, 1, 1),
    "border": np.array([0, 0, 1, 0, 0, 0, 1, 2]),
    "twice": np.array([1, 1, 2, 2], np.float32),
    "zero": np.float32(0),
    "half": np.float32(0.5),
    "last": np.array([3]),
    "one": np.array([1]),
    "many": np.array([99]),
}


@pytest.mark.parametrize("name", WAYS)
def test_operations_that_keep_the_channels(name):
    """Between a layer and a norm, and between a norm and a layer."""
    op, stays = WAYS[name]
    nodes, outputs, arrays, folded, kept = [], [], {}, [], {}
    back = "Cast<to=1>" if "another" in name else "Identity"
    for kind, (gamma, shifts) in KINDS.items():
        nodes += [f"c_{kind} = Conv(x, w) p_{kind} = {op.format(f'c_{kind}')} i_{kind} = {back}(p_{kind})"]
        nodes += [f"[behind_{kind}] y_{kind} = BN(i_{kind}, b_{kind})"]
        nodes += [f"[front_{kind}] a_{kind} = BN(x, f_{kind}) q_{kind} = {op.format(f'a_{kind}')}"]
        nodes += [f"j_{kind} = {back}(q_{kind}) z_{kind} = Conv(j_{kind}, w)"]
        outputs += [f"float[N,4,h,w] y_{kind}, float[N,4,i,v] z_{kind}"]
        for side in "bf":
            more = {} if shifts else {"b": np.zeros(4), "m": np.zeros(4)}
            arrays |= norm(f"{side}_{kind}", 4, s=np.array(gamma), **more)
        for end in ("behind", "front"):
            if kind in stays:
                kept[f"{end}_{kind}"] = stays[kind]
            else:
                folded.append(f"{end}_{kind}")
    given = {k: v for k, v in GIVEN.items() if k in op}
    m = model(
        f"(float[2,4,5,6] x) => ({', '.join(outputs)}) {{ {' '.join(nodes)} }}", w=(4, 4, 1, 1), **given, **arrays
    )
    check(m, folded=folded, kept=kept)


# ---------------------------------------------------------------------- operations on channels

CHANNELS = {  # name: (body, channels of the norm, what becomes of it)
    "depth-to-space": ("c = Conv(x, w8) p = DepthToSpace<blocksize=2>(c) [n] y = BN(p, n)", 2, "folds"),
    "depth-to-space-channels-first": (
        'c = Conv(x, w8) p = DepthToSpace<blocksize=2, mode="CRD">(c) [n] y = BN(p, n)', 2, "folds"),
    "space-to-depth": ("[n] a = BN(x, n) p = SpaceToDepth<blocksize=2>(a) y = Conv(p, w16)", 4, "folds"),
    "in-front-of-depth-to-space": (
        "[n] a = BN(x, n) p = DepthToSpace<blocksize=2>(a) y = Conv(p, w0)", 4, "not-per-channel"),
    "channel-shuffle": (
        "c = Conv(x, w8) r = Reshape(c, split) t = Transpose<perm=[0,2,1,3,4]>(r) p = Reshape(t, whole) "
        "[n] y = BN(p, n)", 8, "folds"),
    "some-channels": ("c = Conv(x, w8) p = Slice(c, from, to, at) [n] y = BN(p, n)", 3, "folds"),
    "every-other-channel-in-front": ("[n] a = BN(x, n) p = Slice(a, zero, end, at, two) y = Conv(p, w2)", 4, "folds"),
    "channels-by-index": ("c = Conv(x, w8) p = Gather<axis=1>(c, pick) [n] y = BN(p, n)", 3, "folds"),
    "channels-by-index-in-front": ("[n] a = BN(x, n) p = Gather<axis=1>(a, pick) y = Conv(p, w3)", 4, "folds"),
    "a-channel-twice": ("c = Conv(x, w8) p = Gather<axis=1>(c, again) [n] y = BN(p, n)", 3, "repeated-channel"),
    "a-channel-twice-in-front": ("[n] a = BN(x, n) p = Gather<axis=1>(a, again) y = Conv(p, w3)", 4, "folds"),
    "flatten-one-position": ("c = Conv(x, w8) g = GlobalAveragePool(c) f = Flatten(g) [n] y = BN(f, n)", 8, "folds", 2),
    "flatten-positions": ("c = Conv(x, w1) f = Flatten(c) [n] y = BN(f, n)", 24, "not-per-channel", 2),
    "flatten-positions-in-front": ("[n] a = BN(x, n) f = Flatten(a) y = Gemm(f, fc)", 4, "folds", 2),
    "squeeze": ("c = Conv(x, w8) g = ReduceMean<axes=[3]>(c) f = Squeeze(g, three) [n] y = BN(f, n)", 8, "folds", 3),
    "unsqueeze-in-front": (
        "g = ReduceMean<axes=[3], keepdims=0>(x) [n] a = BN(g, n) u = Unsqueeze(a, three) y = Conv(u, w4)", 4, "folds"),
    "mean-without-its-dimensions": (
        "[n] a = BN(x, n) g = ReduceMean<axes=[2,3], keepdims=0>(a) y = Gemm(g, few)", 4, "folds", 2),
    "concat": ("a = Conv(x, w1) b = Conv(x, w8) c = Concat<axis=1>(a, b) [n] y = BN(c, n)", 9, "folds"),
    "concat-one-refuses": (
        "a = Sigmoid(x) b = Conv(x, w8) c = Concat<axis=1>(b, a) [n] y = BN(c, n)", 12, "unsupported-op"),
    "concat-one-is-constant": ("a = Conv(x, w1) c = Concat<axis=1>(a, k) [n] y = BN(c, n)", 3, "unsupported-op"),
    "concat-one-is-constant-in-front": ("[n] b = BN(x, n) c = Concat<axis=1>(b, k) y = Conv(c, w6)", 4, "folds"),
    "concat-one-part-in-front": (
        "a = Sigmoid(x) [n] b = BN(x, n) c = Concat<axis=1>(a, b, a, a) y = Conv(c, w16)", 4, "folds"),
    "split-one-part": ("c = Conv(x, w8) p, q = Split<axis=1>(c, parts) [n] y = BN(p, n) z = Sigmoid(q)", 3, "folds"),
    "split-in-front": ("[n] a = BN(x, n) p, q = Split<axis=1>(a, halves) y = Conv(p, w2) z = Conv(q, w2)", 4, "folds"),
    "split-in-front-one-refuses": (
        "[n] a = BN(x, n) p, q = Split<axis=1>(a, halves) y = Conv(p, w2) z = Sigmoid(q)", 4, "unsupported-op"),
    "sum": ("a = Conv(x, w8) t = Sigmoid(x) b = Conv(t, w8) c = Add(a, b) [n] y = BN(c, n)", 8, "folds"),
    "sum-of-three": (
        "a = Conv(x, w8) t = Sigmoid(x) b = Conv(t, w8) e = Sin(t) d = Conv(e, v8) c = Sum(a, b, d) [n] y = BN(c, n)",
        8, "folds"),
    "embedding": ("e = Gather(table, i) [n] y = BN(e, n)", 5, "folds", 2),
    "embedding-of-a-sequence": ("e = Gather(table, ii) t = Transpose<perm=[0,2,1]>(e) [n] y = BN(t, n)", 5, "folds", 3),
}  # fmt: skip
OPERANDS = {
    "w6": (3, 6, 1, 1), "k": (2, 2, 4, 6),
    "w0": (3, 1, 1, 1), "w1": (1, 4, 1, 1), "w8": (8, 4, 1, 1), "v8": (8, 4, 1, 1), "w16": (3, 16, 1, 1),
    "w2": (3, 2, 1, 1), "w3": (2, 3, 1, 1), "w4": (3, 4, 1, 1), "fc": (96, 3), "few": (4, 3), "table": (7, 5),
    "split": np.array([0, 2, 4, 4, 6]), "whole": np.array([0, 8, 4, 6]), "from": np.array([2]), "to": np.array([5]),
    "at": np.array([1]), "zero": np.array([0]), "end": np.array([9]), "two": np.array([2]), "three": np.array([3]),
    "pick": np.array([3, 1, 0]), "again": np.array([0, 2, 0]), "parts": np.array([3, 5]), "halves": np.array([2, 2]),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANNELS)
def test_operations_on_channels(name):
    body, channels, becomes, *rank = CHANNELS[name]
    read = set(re.findall(r"\w+", body))
    used = {k: v for k, v in OPERANDS.items() if k in read}
    x = "int64[4] i" if "i" in read else "int64[2,4] ii" if "ii" in read else "float[2,4,4,6] x"
    dims = ",".join("NCHW"[: rank[0] if rank else 4])
    outputs = ", ".join(f"float[{dims}] {y.lower()}" for y in "YZ" if f" {y.lower()} = " in body)
    m = model(f"({x}) => ({outputs}) {{ {body} }}", n=channels, **used)
    if becomes == "folds":
        check(m, folded=["n"])
    else:
        check(m, kept={"n": becomes})


GATES = {  # a product with a gate per channel, by whether the norm shifts: what becomes of it
    "behind": ("c = Conv(x, w) {gate} p = Mul(c, s) [n] y = BN(p, n)", SHIFT, "folds"),
    "behind-both-of-one-value": (
        "c = Conv(x, w) g = GlobalAveragePool(c) s = Sigmoid(g) p = Mul(c, s) [n] y = BN(p, n)",
        SHIFT, "multiple-consumers"),
    "in-front": ("{gate} [n] a = BN(x, n) p = Mul(s, a) y = Conv<pads=[0,1,0,1]>(p, w)", SHIFT, "folds"),
    "the-gate-is-from-the-norm": (
        "c = Conv(x, w) [n] a = BN(c, n) g = GlobalAveragePool(a) s = Sigmoid(g) y = Mul(a, s)", "folds", "folds"),
}  # fmt: skip


@pytest.mark.parametrize("shifts", [True, False], ids=["shift", "scale-only"])
@pytest.mark.parametrize("name", GATES)
def test_products_with_a_gate(name, shifts):
    """Squeeze and excitation: a scale passes one of the factors, a shift does not."""
    body, *becomes = GATES[name]
    body = body.format(gate="g = GlobalAveragePool(x) s = Sigmoid(g)")
    given = norm("n", 4) if shifts else norm("n", 4, b=np.zeros(4), m=np.zeros(4))
    m = model(f"(float[2,4,5,6] x) => (float[N,C,H,W] y) {{ {body} }}", w=(4, 4, 1, 3), **given)
    outcome = becomes[0 if shifts else 1]
    check(m, folded=["n"]) if outcome == "folds" else check(m, kept={"n": outcome})


def test_one_summand_lets_a_shift_pass_and_no_scale():
    body = "t = Sigmoid(x) [n] a = BN<epsilon: float=0.0>(x, n) s = Add(a, t) y = Conv(s, w)"
    given = norm("n", 4, s=np.full(4, 1.5), v=np.full(4, 2.25))
    header = "(float[2,4,5,6] x) => (float[N,C,H,W] y)"
    check(model(f"{header} {{ {body} }}", w=(4, 4, 1, 3), **given), folded=["n"])
    check(model(f"{header} {{ {body} }}", w=(4, 4, 1, 3), n=4), kept={"n": "unequal-branches"})


def test_channels_resampled_into_as_many():
    """4 * 1.2 is 4 too, of other channels."""
    m = model(
        text("[conv] c = Conv(x, w) p = Resize<mode=\"nearest\">(c, , s) [n] y = BN(p, n)"),
        w=(4, 3, 1, 1), n=4, s=np.array([1, 1.2, 2, 1], np.float32),
    )  # fmt: skip
    check(m, kept={"n": "not-per-channel"})


def test_slices_of_an_unknown_number_of_channels_stay():
    m = model(
        "(float[N,C,H,W] x) => (float[N,3,H,W] y) { [n] b = BN(x, n) s = Slice(b, st, en, ax) y = Conv(s, w) }",
        w=(3, 2, 1, 1), n=4, st=np.array([1]), en=np.array([3]), ax=np.array([1]),
    )  # fmt: skip
    check(
        m, {"x": np.random.default_rng(0).standard_normal((2, 4, 3, 3)).astype(np.float32)}, kept={"n": "model-input"}
    )


def test_slopes_that_are_computed():
    """`c` as slopes of itself makes a square, which no scale passes."""
    body = "c = Conv(x, w) p = PRelu(c, c) [n] y = BN(p, n)"
    scales = norm("n", 4, s=np.full(4, 1.5), b=np.zeros(4), m=np.zeros(4))
    check(model(text(body), w=(4, 3, 1, 1), **scales), kept={"n": "unsupported-op"})


@pytest.mark.parametrize(
    ("op", "opset", "stays"),
    [
        ("Dropout(c, half, yes)", 17, True),
        ("Dropout(c, half, no)", 17, False),
        ("Dropout(c, half, asked)", 17, True),
        ("Dropout<is_test=0>(c)", 6, True),
        ("Dropout<is_test=1>(c)", 6, False),
        ("Dropout(c)", 7, False),
    ],
)
def test_a_dropout_that_drops_is_not_passed(op, opset, stays):
    """What is dropped is zero behind the norm as well as in front of it only where the norm does not shift."""
    given = {"half": np.float32(0.5)} if "half" in op else {}
    given |= {n: np.array(n == "yes") for n in ("yes", "no") if n in op}
    m = model(
        f"(float[2,3,5,6] x{', bool asked' * ('asked' in op)}) => (float[2,4,5,6] y) "
        f"{{ c = Conv(x, w) d = {op} [n] y = BN{'<is_test=1>' * (opset < 7)}(d, n) }}",
        opset=opset, w=(4, 3, 1, 1), n=4, **given,
    )  # fmt: skip
    report = plan(m)
    assert [k.norm for k in report.kept] == ["n"] * stays
    assert [f.norm for f in report.folded] == ["n"] * (not stays)
    assert [str(k.reasons[0].reason) for k in report.kept] == ["unsupported-op"] * stays


def test_integers_are_not_negated_in_floating_point():
    m = model("(int64[2,3] x) => (int64[2,3] y) { a = Neg(x) y = Neg(a) }")
    check(m, {"x": np.arange(6).reshape(2, 3)}, nodes=["Neg", "Neg"])


# ---------------------------------------------------------------------- scale and shift part ways

PARTED = {  # name: (body, kept or None): neither way lets both pass, each lets one
    "the shift into one summand, the scale into a padded layer": (
        "c = Conv(x, w) s = Add(c, z) [n] a = BN(s, n) y = Conv<pads=[1,1,1,1]>(a, v)", None),
    "the shift above a reshape, the scale into a padded layer": (
        "f = Gemm(q, fc) r = Reshape(f, whole) s = Add(r, z) [n] a = BN(s, n) y = Conv<pads=[1,1,1,1]>(a, v)", None),
    "the scale through a ReLU, the shift through a sum": (
        "c = Conv(x, w) r = Relu(c) [n] a = BN(r, n) s = Add(a, z) y = Conv(s, v)", None),
    "the sum goes into a padded layer": (
        "c = Conv(x, w) r = Relu(c) [n] a = BN(r, n) s = Add(a, z) y = Conv<pads=[1,1,1,1]>(s, v)", "nonzero-shift"),
    "the sum is read by an activation": (
        "c = Conv(x, w) r = Relu(c) [n] a = BN(r, n) s = Add(a, z) y = Sigmoid(s)", "nonzero-shift"),
}  # fmt: skip


@pytest.mark.parametrize("name", PARTED)
def test_scale_and_shift_part_ways(name):
    body, why = PARTED[name]
    given = {"w": (4, 4, 1, 1), "v": (4, 4, 3, 3), "fc": (5, 80), "whole": np.array([2, 4, 4, 5])}
    used = {k: v for k, v in given.items() if f" {k})" in body}
    gammas = norm("n", 4, s=np.array([0.7, 1e-3, 0.4, 2.0]))
    inputs = [f"float[2,4,4,5] {v}" for v in "xz" if f"({v}," in body or f" {v})" in body]
    inputs += ["float[2,5] q"] if "(q," in body else []
    m = model(f"({', '.join(inputs)}) => (float[N,C,H,W] y) {{ {body} }}", **used, **gammas)
    if why is not None:
        check(m, kept={"n": why})
        return
    result = check(m, folded=["n"])
    assert "BatchNormalization" not in [n.op_type for n in result.model.graph.node]
    assert result.report.folded[0].direction == "both"


def test_a_channel_that_is_scaled_to_nothing_cannot_shift_first():
    body = "c = Conv(x, w) s = Add(c, z) [n] a = BN(s, n) y = Conv<pads=[1,1,1,1]>(a, v)"
    text_ = f"(float[2,4,4,5] x, float[2,4,4,5] z) => (float[N,C,H,W] y) {{ {body} }}"
    m = model(text_, w=(4, 4, 1, 1), v=(4, 4, 3, 3), **norm("n", 4, s=np.array([0.7, 0.0, 0.4, 2.0]), b=np.ones(4)))
    check(m, kept={"n": "padded-shift"})


# ---------------------------------------------------------------------- parallel branches

MERGES = {
    "one by one beside three by three": "a = Conv<pads=[1,1,1,1]>(x, w) b = Conv(x, v) y = Add(a, b)",
    "the value itself": "a = Conv<pads=[1,1,1,1]>(x, w) y = Add(x, a)",
    "row beside square": "a = Conv<pads=[1,1,1,1]>(x, w) b = Conv<pads=[0,1,0,1]>(x, r) y = Add(a, b)",
    "dilated beside five by five": (
        "a = Conv<pads=[2,2,2,2]>(x, f) b = Conv<pads=[2,2,2,2], dilations=[2,2]>(x, w) y = Add(a, b)"
    ),
    "strided": "a = Conv<pads=[1,1,1,1], strides=[2,2]>(x, w) b = Conv<strides=[2,2]>(x, v) y = Add(a, b)",
    "depthwise beside dense": "a = Conv<pads=[1,1,1,1]>(x, w) b = Conv<pads=[1,1,1,1], group=3>(x, g) y = Add(a, b)",
    "depthwise one by one": "a = Conv<pads=[1,1,1,1], group=3>(x, g) b = Conv<group=3>(x, d) y = Add(b, a)",
    "a pure scale": "a = Conv<pads=[1,1,1,1]>(x, w) b = Mul(x, k) y = Add(b, a)",
    "five of one kind": (
        "a = Conv<pads=[1,1,1,1]>(x, w) b = Conv<pads=[1,1,1,1]>(x, w) c = Conv(x, v) s = Add(a, b) t = Add(c, x) "
        "y = Add(s, t)"
    ),
}
KERNELS = {
    "w": (3, 3, 3, 3), "v": (3, 3, 1, 1), "r": (3, 3, 1, 3), "f": (3, 3, 5, 5), "g": (3, 1, 3, 3), "d": (3, 1, 1, 1),
    "k": (3, 1, 1),
}  # fmt: skip


def branches(body):
    return model(text(body), **{k: v for k, v in KERNELS.items() if f", {k})" in body})


@pytest.mark.parametrize("body", MERGES.values(), ids=MERGES)
def test_parallel_branches_become_one_layer(body):
    scales = ["b"] if "Mul" in body else []
    result = check(branches(body), folded=[None] * body.count("Add"), affine=scales, nodes=["Conv"])
    assert {f.direction for f in result.report.folded} == {"merge"}


APART = {
    "other padding": "a = Conv<pads=[1,1,1,1]>(x, w) b = Conv<pads=[0,0,2,2]>(x, w) y = Add(a, b)",
    "row beside column": "a = Conv<pads=[0,1,0,1]>(x, r) b = Conv<pads=[1,0,1,0]>(x, k) y = Add(a, b)",
    "another value": "s = Sigmoid(x) a = Conv(x, v) b = Conv(s, v) y = Add(a, b)",
    "a branch that is read elsewhere": "a = Conv(x, v) b = Conv(x, v) c = Add(a, b) y = Mul(c, b)",
    "more connections": "a = Conv<pads=[1,1,1,1], group=3>(x, g) b = Conv(x, v) y = Add(a, b)",
    "strides that differ": "a = Conv<pads=[1,1,1,1]>(x, w) b = Conv<strides=[2,2], pads=[3,2,3,2]>(x, v) y = Add(a, b)",
}


@pytest.mark.parametrize("body", APART.values(), ids=APART)
def test_branches_that_do_not_fit_stay_apart(body):
    kernels = {**KERNELS, "k": (3, 3, 3, 1)}
    m = model(text(body), **{k: v for k, v in kernels.items() if f", {k})" in body})
    result = check(m)
    assert not [f for f in result.report.folded if f.direction == "merge"]


@pytest.mark.parametrize(
    ("values", "nodes", "given"),
    [
        # One result is a single position, the same for each of the other's.
        ("float[N,3,4,4] x) => (float[N,3,4,4] y", "a = Conv(x, w) b = Conv(x, v) y = Add(a, b)",
         {"w": (3, 3, 4, 4), "v": (3, 3, 1, 1)}),
        # The value is one channel, the same for each of the layer's.
        ("float[N,1,4,4] x) => (float[N,3,4,4] y", "a = Conv<pads=[1,1,1,1]>(x, w) y = Add(a, x)", {"w": (3, 1, 3, 3)}),
    ],
    ids=["positions", "channels"],
)  # fmt: skip
def test_branches_that_are_broadcast_stay_apart(values, nodes, given):
    result = check(model(f"({values}) {{ {nodes} }}", **given))
    assert not result.report.folded


def test_branches_whose_sum_overflows_stay_apart():
    large = np.full((3, 3, 1, 1), 6e4)
    m = model(
        "(float16[2,3,6,5] x) => (float16[N,M,H,W] y) { a = Conv(x, v) b = Conv(x, u) y = Add(a, b) }",
        dtype=np.float16, v=large, u=large,
    )  # fmt: skip
    assert not check(m).report.folded


def test_a_maximum_whose_place_is_read_stays():
    """A scale of zero would make all places equal."""
    m = model(
        "(float[2,3,6,5] x) => (float[N,M,H,W] y, int64[N,M,H,W] places) "
        "{ c = Conv(x, w) p, places = MaxPool<kernel_shape=[2,2]>(c) [n] y = BN(p, n) }",
        w=(4, 3, 1, 1), **norm("n", 4, s=np.array([0.7, 0.0, 0.4, 2.0])),
    )  # fmt: skip
    check(m, kept={"n": "unsupported-op"})


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
