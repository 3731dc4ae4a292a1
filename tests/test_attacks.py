"""Inputs that were thought up to break bnfold, and did not: what folds is right, what stays has its reason."""

from __future__ import annotations

import copy
import itertools
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import ModelProto, TensorProto, numpy_helper
from onnx_models import Array, close, evaluate, initializer, model, norm, ops, random_feeds, rng_of
from onnx_models import check as check_onnx
from torch import nn
from torch.nn import functional
from torch_models import EXACT, Chain, bn, compare, conv, randomise, run, snapshot

import bnfold
from bnfold.refolding import fold_file

# ---------------------------------------------------------------------- modules in parts, and from their trace


def Net(forward: Callable[..., Any], **children: Any) -> nn.Module:
    """A class of its own with this forward."""
    net = type("Net", (nn.Module,), {"forward": forward})()
    for name, child in children.items():
        setattr(net, name, child)
    return net


def same(inputs: int = 4, outputs: int = 4, **options: Any) -> nn.Module:
    return conv(inputs, outputs, padding=1, **options)


def block() -> nn.Module:
    return Chain(conv=same(), bn=bn(4), act=nn.ReLU())


def picture(batch: int = 2, side: int = 7, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, 4, side, side + 1, generator=generator, dtype=torch.float64)


def positive(y: torch.Tensor) -> torch.Tensor:
    """What torch.export cannot follow."""
    return y if y.sum() > 0 else -y


def folded_once(module: nn.Module, given: Any, others: Sequence[Any]) -> bnfold.Report:
    """Fold in float64; the argument stays as it was, every norm is reported once, and all inputs agree."""
    before = snapshot(module)
    result = bnfold.fold(module, given)
    assert snapshot(module) == before, "the argument was changed"
    report = result.report
    names = [f.norm for f in report.folded if f.norm] + [k.norm for k in report.kept]
    assert sorted(names) == sorted(n.norm for n in report.norms)
    assert len(names) == len(set(names))
    for inputs in others:
        want = run(copy.deepcopy(module), copy.deepcopy(inputs))
        compare(run(copy.deepcopy(result.model), copy.deepcopy(inputs)), want, EXACT)
    return report


def prepared(module: nn.Module) -> nn.Module:
    randomise(module, torch.Generator().manual_seed(7))
    return module.double().eval()


def outcome(report: bnfold.Report) -> tuple[list[str], dict[str, str]]:
    kept = {k.norm: str(k.reasons[0].reason) for k in report.kept}
    return [f.norm for f in report.folded if f.norm], kept


def through(s, x):
    return positive(s.body(x))


def with_hook(where: str, hook: str, function: Callable[..., Any], **options: Any) -> nn.Module:
    net = Net(through, body=block())
    getattr(net.get_submodule(where), hook)(function, **options)
    return net


def shared_norm() -> nn.Module:
    norm = bn(4)
    return Net(lambda s, x: positive(s.a(x)) + s.b(x), a=Chain(conv=same(), bn=norm), b=Chain(conv=same(), bn=norm))


def shared_block() -> nn.Module:
    shared = block()
    return Net(lambda s, x: positive(s.outer(x)) + s.again(x), outer=Net(through, body=shared), again=shared)


def tied_bias() -> nn.Module:
    body = Chain(bn=bn(4), conv=conv(4, 4, 1), tail=bn(4))
    net = Net(lambda s, x: positive(s.body(x)) + s.bias.reshape(1, -1, 1, 1), body=body)
    net.bias = body.conv.bias
    return net


def in_place_on_a_result(s, x):
    y = s.body(x)
    y.mul_(2)
    return positive(y) + s.body(x)


def in_place_on_what_a_part_reads(s, x):
    y = s.body(x)
    y += 1
    z = s.tail(y)
    y.relu_()
    return positive(z) + y


def overwriting_what_a_norm_read(s, x):
    y = x * 1
    z = positive(s.body(y))
    y.zero_()
    return z


def collecting(s, x):
    seen: list[torch.Tensor] = []
    y = s.body(s.body(x, seen), seen)
    return positive(y) + seen[0] + len(seen)


def experts(s, x):
    return torch.stack([s.e[k % 2](t[None])[0] if float(t.sum()) < 1e9 else t for k, t in enumerate(x)])


def again(s, x, times=2):
    y = s.body(x)
    return positive(y) if times == 0 else s(y, times - 1)


PARTS = {
    "a-norm-in-two-parts": (shared_norm, ["a.bn", "b.bn"], {}),
    "a-block-inside-a-part-and-outside": (shared_block, ["outer.body.bn"], {}),
    "a-bias-that-the-parent-reads": (tied_bias, ["body.bn", "body.tail"], {}),
    "result-changed-in-place": (lambda: Net(in_place_on_a_result, body=block()), ["body.bn"], {}),
    "operand-changed-in-place": (
        lambda: Net(in_place_on_what_a_part_reads, body=block(), tail=Chain(bn=bn(4), c=conv(4, 4, 1))),
        ["body.bn", "tail.bn"],
        {},
    ),
    "operand-overwritten": (
        lambda: Net(overwriting_what_a_norm_read, body=Chain(bn=bn(4), c=conv(4, 4, 1))), ["body.bn"], {}
    ),
    "list-argument": (
        lambda: Net(collecting, body=Net(lambda s, x, o: (o.append(x), s.bn(s.conv(x)))[1], conv=same(), bn=bn(4))),
        ["body.bn"],
        {},
    ),
    "keywords-that-differ": (
        lambda: Net(
            lambda s, x: positive(s.body(x) + s.body(x, k=3.0)),
            body=Net(lambda s, x, k=1.0: s.bn(s.conv(x)) * k, conv=same(), bn=bn(4)),
        ),
        ["body.bn"],
        {},
    ),
    "a-flag-that-leaves-the-norm-out": (
        lambda: Net(
            lambda s, x: positive(s.body(x, skip=False) + s.body(x, skip=True)),
            body=Net(lambda s, x, skip: s.conv(x) if skip else s.bn(s.conv(x)), conv=same(), bn=bn(4)),
        ),
        [],
        {"body.bn": "not-expressible"},
    ),
    "first-layer-by-index": (
        lambda: Net(lambda s, x: positive(s.body(x)) + s.body[0](x), body=nn.Sequential(same(), bn(4))),
        [],
        {"body.1": "not-expressible"},
    ),
    "counting-norms": (
        lambda: Net(lambda s, x: positive(s.body(x)) * sum(type(m) is bn for m in s.modules()), body=block()),
        [],
        {"body.bn": "not-expressible"},
    ),
    "recursion": (lambda: Net(again, body=block()), ["body.bn"], {}),
    "experts": (
        lambda: Net(experts, e=nn.ModuleList(block() for _ in range(3))),
        ["e.0.bn", "e.1.bn"],
        {"e.2.bn": "not-executed"},
    ),
    "hook-on-the-parent": (
        lambda: with_hook("", "register_forward_hook", lambda _m, _a, out: out * 2), ["body.bn"], {}
    ),
    "hook-with-keywords-on-a-part": (
        lambda: with_hook(
            "body", "register_forward_pre_hook", lambda _m, a, k: ((a[0] * 2,), k), with_kwargs=True
        ),
        ["body.bn"],
        {},
    ),
}  # fmt: skip


@pytest.mark.parametrize(("build", "names", "kept"), PARTS.values(), ids=PARTS)
def test_in_parts(build, names, kept):
    pictures = [picture(), picture(1, 7, 1), picture(3, 9, 2)]
    assert outcome(folded_once(prepared(build()), pictures[0], pictures)) == (names, kept)


def taking_one_from_a_norm(s, x, y):
    t = x + y
    u = s.bn(t)
    u -= 1
    return s.conv(u) + t


def adding_to_an_operand(s, x, y):
    z = s.conv(x)
    same_one = z
    z += y
    return s.bn(same_one) + z


def centred(s, x, y):
    z = s.bn(s.conv(x))
    return z - z.mean(1, keepdim=True) + y


TRACED = {
    "arbitrary-keywords": (lambda s, x, y, **_: s.bn(s.conv(x)) + y, ["bn"], {}),
    "training-branch": (lambda s, x, y: s.conv(x) if s.training else s.bn(s.conv(x)) + y, ["bn"], {}),
    "in-place-on-a-bypassed-norm": (taking_one_from_a_norm, [], {"bn": "not-expressible"}),
    "in-place-under-two-names": (adding_to_an_operand, [], {"bn": "multiple-consumers"}),
    "less-its-mean": (centred, ["bn"], {}),
    "einsum": (lambda s, x, y: torch.einsum("bchw,bdhw->bcd", s.bn(s.conv(x)), y), ["bn"], {}),
    "stacked": (lambda s, x, y: torch.stack([s.bn(s.conv(x)), y]), ["bn"], {}),
    "another-batch-norm-in-training": (
        lambda s, x, y: functional.batch_norm(s.conv(x), s.bn.running_mean, s.bn.running_var, training=True) + y,
        [],
        {"bn": "training-mode"},
    ),
    "weight-read-by-a-function": (
        lambda s, x, y: s.bn(s.conv(x)) + functional.conv2d(y, s.conv.weight, padding=1), [], {"bn": "shared-weight"}
    ),
    "parameters-of-the-norm-read": (
        lambda s, x, y: s.bn(s.conv(x)) * s.bn.weight.sum() + y, [], {"bn": "not-expressible"}
    ),
    "through-half-precision": (lambda s, x, y: s.bn(s.conv(x).half().double()) + y, [], {"bn": "unsupported-op"}),
}  # fmt: skip


@pytest.mark.parametrize(("forward", "names", "kept"), TRACED.values(), ids=TRACED)
def test_traced(forward, names, kept):
    module = prepared(Net(forward, conv=same() if forward is not taking_one_from_a_norm else conv(4, 4, 1), bn=bn(4)))
    inputs = [(picture(b, n, k), picture(b, n, k + 10)) for k, (b, n) in enumerate([(2, 8), (3, 9), (1, 5)])]
    assert outcome(folded_once(module, None, inputs)) == (names, kept)


# ---------------------------------------------------------------------- ONNX: integers, and differences


def odd(name: str, channels: int) -> dict[str, Array]:
    """A norm with negative, zero and large scales."""
    some = {"s": [-0.7, 0, 1.3, -2.1], "v": [1.7, 1e-12, 1e6, 0.3], "b": [0.4, 0, -1.1, 0.3]}
    return norm(name, channels, **{k: np.resize(v, channels) for k, v in some.items()})


def stored(*shape: int, axis: int | None = 0, dtype: type = np.int8, low: int = -127, high: int = 127, point: Any = 0):
    """Integers `q`, scales `s` and zero points `z` along an axis (None: one of each)."""
    count = () if axis is None else (shape[axis],)
    q = rng_of(f"q{shape}").integers(low, high, shape, endpoint=True).astype(dtype)
    s = rng_of("scales").uniform(0.002, 0.01, count).astype(np.float32)
    return {"q": q, "s": s, "z": np.full(count, point, dtype)}


IMAGE, W = "(float[N,3,6,5] x) => (float[N,4,4,3] y)", (4, 3, 3, 3)
SQUARE = "(float[N,4,6,5] x) => (float[N,4,4,3] y)"
TAIL = "c = Conv(x, w, b) [n] y = BN(c, n)"
BOTH = (
    "(bool p, float[2,3,6,5] x) => (float[2,4,4,3] y) {{ {} y = If(p) <"
    "then_branch = t () => (float[2,4,4,3] g) {{ {} c = Conv(x, w) [n] g = BN(c, n) }},"
    "else_branch = e () => (float[2,4,4,3] h) {{ {} h = Conv(x, w) }}> }}"
)
INTEGERS = {
    "negative-axis": (f"{IMAGE} {{ w = DequantizeLinear<axis = -4>(q, s, z) {TAIL} }}", stored(*W)),
    "along-a-tap": (f"{IMAGE} {{ w = DequantizeLinear<axis = -1>(q, s, z) {TAIL} }}", stored(*W, axis=3), True),
    "default-axis-of-a-square": (
        f"{SQUARE} {{ w = DequantizeLinear(q, s, z) {TAIL} }}", stored(4, 4, 3, 3, axis=1), True
    ),
    "one-scale-in-a-vector": (
        f"{IMAGE} {{ w = DequantizeLinear(q, s, z) {TAIL} }}",
        {**stored(*W, axis=None), "s": np.full(1, 0.004, np.float32), "z": np.zeros(1, np.int8)},
    ),
    "points-that-differ": (
        f"{IMAGE} {{ w = DequantizeLinear<axis = 0>(q, s, z) {TAIL} }}",
        {**stored(*W, dtype=np.uint8, low=0, high=100), "z": np.array([50, 60, 70, 128], np.uint8)},
    ),
    "point-at-the-end": (
        f"{IMAGE} {{ w = DequantizeLinear<axis = 0>(q, s, z) {TAIL} }}",
        stored(*W, dtype=np.uint8, low=0, high=255, point=255),
        True,
    ),
    "thirty-two-bits": (
        f"{IMAGE} {{ w = DequantizeLinear<axis = 0>(q, s) {TAIL} }}",
        {**stored(*W, dtype=np.int32, low=1 - 2**31, high=2**31 - 1), "s": np.full(4, 1e-9, np.float32)},
    ),
    "transposed-twice": (
        f"{IMAGE} {{ v = DequantizeLinear<axis = -1>(q, s, z) u = Transpose<perm = [3,0,1,2]>(v) "
        f"w = Transpose<perm = [0,1,3,2]>(u) {TAIL} }}",
        stored(3, 3, 3, 4, axis=3),
    ),
    "transposed-and-an-output": (
        "(float[N,3,6,5] x) => (float[N,4,4,3] y, float[4,3,3,3] w) { u = DequantizeLinear<axis = 1>(q, s, z) "
        f"w = Transpose<perm = [1,0,2,3]>(u) {TAIL} }}",
        stored(3, 4, 3, 3, axis=1),
    ),
    "integers-are-an-output": (
        "(float[N,3,6,5] x) => (float[N,4,4,3] y, int8[4,3,3,3] q, float[4] s) "
        f"{{ w = DequantizeLinear<axis = 0>(q, s, z) {TAIL} }}",
        stored(*W),
    ),
    "scale-is-the-bias-too": (
        f"{IMAGE} {{ w = DequantizeLinear<axis = 0>(q, s, z) c = Conv(x, w, s) [n] y = BN(c, n) }}", stored(*W)
    ),
    "integers-computed": (
        f"{IMAGE} {{ r = Reshape(q, k) w = DequantizeLinear<axis = 0>(r, s, z) {TAIL} }}",
        {**stored(4, 27), "k": np.array(W)},
    ),
    "cast-behind": (f"{IMAGE} {{ v = DequantizeLinear<axis = 0>(q, s, z) w = Cast<to = 1>(v) {TAIL} }}",
                    stored(*W), True),
    "negative-scales": (
        f"{IMAGE} {{ w = DequantizeLinear<axis = 0>(q, s, z) {TAIL} }}",
        {**stored(*W), "s": np.array([-0.01, 0.01, -0.02, 0.03], np.float32)},
    ),
    "depthwise-transposed": (
        "(float[N,4,4,3] x) => (float[N,4,6,5] y) { w = DequantizeLinear<axis = 0>(q, s, z) "
        "c = ConvTranspose<group = 4>(x, w, b) [n] y = BN(c, n) }",
        stored(4, 1, 3, 3),
    ),
    "grouped-transposed": (
        "(float[N,4,4,3] x) => (float[N,4,6,5] y) { w = DequantizeLinear<axis = 1>(q, s, z) "
        "c = ConvTranspose<group = 2>(x, w, b) [n] y = BN(c, n) }",
        stored(4, 2, 3, 3, axis=1),
        True,
    ),
    "gemm-with-factors": (
        "(float[6,N] x) => (float[N,4] y) { w = DequantizeLinear<axis = 0>(q, s, z) "
        "c = Gemm<transA = 1, transB = 1, alpha = -1.5, beta = 0.5>(x, w, b) [n] y = BN(c, n) }",
        stored(4, 6),
    ),
    "weight-on-the-left": (
        "(float[N,6,5] x) => (float[N,4,5] y) { u = DequantizeLinear<axis = 1>(q, s, z) w = Transpose(u) "
        "c = MatMul(w, x) [n] y = BN(c, n) }",
        stored(6, 4, axis=1),
    ),
    "first-file-format": (
        f"{IMAGE} {{ w = DequantizeLinear(q, s, z) {TAIL} }}", {**stored(*W, axis=None), "ir": 3, "opset": 13}
    ),
    "transpose-in-both-branches": (
        BOTH.format("u = DequantizeLinear(q, s, z)", *["w = Transpose<perm = [1,0,2,3]>(u)"] * 2),
        stored(3, 4, 3, 3, axis=None),
    ),
    "dequantized-in-both-branches": (
        BOTH.format("", *["w = DequantizeLinear<axis = 0>(q, s, z)"] * 2), stored(*W)
    ),
    "a-difference-of-itself": (
        "(float[N,4,6,5] x) => (float[N,4,6,5] y) { w = DequantizeLinear<axis = 0>(q, s, z) "
        "c = Conv<pads = [1,1,1,1]>(x, w) d = Conv<pads = [1,1,1,1]>(x, w) e = Sub(c, d) [n] y = BN(e, n) }",
        stored(4, 4, 3, 3),
    ),
}  # fmt: skip


@pytest.mark.parametrize("row", INTEGERS.values(), ids=INTEGERS)
def test_weights_stored_as_integers(row):
    text, given, stays = (*row, False)[:3]
    m = model(text, **given, **({"b": (4,)} if "b)" in text else {}), **odd("n", 4))
    expected = {"kept": {"n": "quantized-parameter"}} if stays else {"folded": ["n"]}
    check_onnx(m, limit=2e-6, **expected)


HEAD = "(float[N,4,6,5] x) => (float[N,4,6,5] y)"
C, D = "c = Conv<pads = [1,1,1,1]>(x, w, b)", "d = Conv(x, v)"
DIFFERENCES = {
    "less-itself": (f"{HEAD} {{ {C} [n] f = BN(c, n) d = Sub(f, f) y = Add(d, x) }}", "n", ["Conv", "Sub", "Add"]),
    "identity-less-layer": (f"{HEAD} {{ {C} e = Sub(x, c) [n] y = BN(e, n) }}", "n", ["Conv"]),
    "norm-less-layer": (f"{HEAD} {{ {C} [n] f = BN(x, n) y = Sub(f, c) }}", "n", ["Conv"]),
    "nested": (f"{HEAD} {{ {C} {D} [k] g = BN(d, k) e = Sub(c, g) f = Sub(x, e) [n] y = BN(f, n) }}", "kn", ["Conv"]),
    "norms-on-both": (
        f"{HEAD} {{ {C} [n] f = BN(c, n) {D} [k] g = BN(d, k) e = Sub(g, f) [h] y = BN(e, h) }}", "nkh", ["Conv"]
    ),
    "times-minus-one": (f"{HEAD} {{ {C} m = Neg(c) {D} e = Sub(d, m) [n] y = BN(e, n) }}", "n", ["Conv"]),
    "several-operands": (f"{HEAD} {{ {C} {D} e = Sum(c, d, x) f = Sub(x, e) [n] y = BN(f, n) }}", "n", ["Conv"]),
    "of-integers": (
        "(int64[N,4,6,5] x, int64[N,4,6,5] z) => (float[N,4,6,5] y) "
        "{ d = Sub(x, z) f = Cast<to = 1>(d) [n] g = BN(f, n) y = Conv(g, v) }",
        "n",
        ["Sub", "Cast", "Conv"],
    ),
    "less-its-mean": (
        f"{HEAD} {{ {C} [n] f = BN(c, n) g = ReduceMean<axes = [1]>(f) y = Sub(f, g) }}",
        "n",
        ["Conv", "ReduceMean", "Sub"],
    ),
    "one-channel-less-four": (
        f"{HEAD} {{ {C} d = Conv(x, u) e = Sub(d, c) [n] y = BN(e, n) }}",
        "",
        ["Conv", "Conv", "Sub", "BatchNormalization"],
    ),
    "sizes-that-broadcast": (
        f"(float[N,4,6,5] x, float[6,5] z) => (float[N,4,6,5] y) {{ {C} e = Sub(z, c) [n] y = BN(e, n) }}",
        "",
        ["Conv", "Sub", "BatchNormalization"],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("text", "names", "nodes"), DIFFERENCES.values(), ids=DIFFERENCES)
def test_differences(text, names, nodes):
    shapes = {"w": (4, 4, 3, 3), "b": (4,), "v": (4, 4, 1, 1), "u": (1, 4, 1, 1)}
    arrays = {k: shape for k, shape in shapes.items() if re.search(rf"\b{k}\b", text.partition("{")[2])}
    norms: dict[str, Array] = {}
    for name in "nkh":
        norms |= odd(name, 4) if f"[{name}]" in text else {}
    m = model(text, **arrays, **norms)
    before, result = m.SerializeToString(), bnfold.fold(m)
    assert m.SerializeToString() == before
    assert sorted(f.norm for f in result.report.folded if f.norm) == sorted(names)
    assert ops(result.model) == nodes
    onnx.checker.check_model(result.model, full_check=True)
    for batch in (2, 3):
        feeds = random_feeds(m, batch)
        close(evaluate(m, feeds), evaluate(result.model, feeds), 2e-6)


# ---------------------------------------------------------------------- files

SIZE = 8 * 8 * 3 * 3 * 4
Layout = dict[str, tuple[str, int]]


def two_layers() -> ModelProto:
    """Two layers on one input, the first of them with a norm; a constant of two numbers."""
    return model(
        "(float[N,8,6,5] x) => (float[N,8,4,3] y, float[N,8,4,3] z, float[2] t) "
        "{ c = Conv(x, w, b) [n] y = BN(c, n) z = Conv(x, v, b) t = Identity(k) }",
        w=(8, 8, 3, 3), v=(8, 8, 3, 3), b=(8,), k=(2,), **odd("n", 8),
    )  # fmt: skip


def laid_out(folder: Path, layout: Layout, m: ModelProto | None = None) -> Path:
    """The model with some of its tensors at given places of data files; where they overlap, the last one wins."""
    m = two_layers() if m is None else m
    data: dict[str, bytearray] = {}
    for name, (location, offset) in layout.items():
        tensor = next(t for t in m.graph.initializer if t.name == name)
        raw = numpy_helper.to_array(tensor).tobytes()
        file = data.setdefault(location, bytearray())
        file.extend(bytes(max(0, offset + len(raw) - len(file))))
        file[offset : offset + len(raw)] = raw
        tensor.ClearField("raw_data")
        tensor.data_location = TensorProto.EXTERNAL
        for key, value in {"location": location, "offset": offset, "length": len(raw)}.items():
            tensor.external_data.add(key=key, value=str(value))
    for location, raw in data.items():
        (folder / location).parent.mkdir(parents=True, exist_ok=True)
        (folder / location).write_bytes(raw)
    (folder / "m.onnx").write_bytes(m.SerializeToString())
    return folder / "m.onnx"


def with_an_empty_tensor(folder: Path) -> Path:
    m = two_layers()
    m.graph.initializer.append(numpy_helper.from_array(np.zeros((0, 4), np.float32), "e"))
    m.graph.node.append(onnx.helper.make_node("Identity", ["e"], ["f"]))
    m.graph.output.append(onnx.helper.make_tensor_value_info("f", TensorProto.FLOAT, [0, 4]))
    return laid_out(folder, {"w": ("m.data", 0), "e": ("m.data", 1000)}, m)


def with_equal_weights(folder: Path) -> Path:
    m = two_layers()
    next(t for t in m.graph.initializer if t.name == "v").CopyFrom(numpy_helper.from_array(initializer(m, "w"), "v"))
    return laid_out(folder, {"w": ("m.data", 0), "v": ("m.data", 0)}, m)


PLACES: dict[str, Callable[[Path], Path]] = {
    "no alignment": lambda d: laid_out(d, {"w": ("m.data", 1), "b": ("m.data", SIZE + 1)}),
    "in a folder below": lambda d: laid_out(d, {"w": ("sub/dir/m.data", 0), "v": ("m.data", 3)}),
    "the same bytes": with_equal_weights,
    "a small one across two large ones": lambda d: laid_out(
        d, {"w": ("m.data", 0), "v": ("m.data", SIZE), "k": ("m.data", SIZE - 4)}
    ),
    "an empty one inside another": with_an_empty_tensor,
    "odd names": lambda d: laid_out(d, {"w": ("ü -", 0), "v": (".hidden.part/data", 0)}),
}


@pytest.mark.parametrize("in_place", [False, True], ids=["beside", "in place"])
@pytest.mark.parametrize("build", PLACES.values(), ids=PLACES)
def test_places_of_external_data(build, in_place, tmp_path):
    source = build(tmp_path)
    original, old = onnx.load(source), {f: f.read_bytes() for f in tmp_path.rglob("*") if f.is_file()}
    report = fold_file(source, in_place=in_place)
    assert [f.norm for f in report.folded] == ["n"]
    result = onnx.load(source if in_place else tmp_path / "m.folded.onnx")
    feeds = random_feeds(original)
    close(evaluate(original, feeds), evaluate(result, feeds), 2e-6)
    if not in_place:
        assert all(f.read_bytes() == content for f, content in old.items())


def test_one_data_file_under_two_names(tmp_path):
    source = laid_out(tmp_path, {"w": ("a.data", 0), "v": ("b.data", 0)}, None)
    (tmp_path / "b.data").unlink()
    os.link(tmp_path / "a.data", tmp_path / "b.data")
    shared = (tmp_path / "a.data").read_bytes()
    fold_file(source)
    assert (tmp_path / "a.data").read_bytes() == shared
    result = onnx.load(tmp_path / "m.folded.onnx")
    assert initializer(result, "v").tobytes() == shared
    assert initializer(result, "w").tobytes() != shared


Field = tuple[int, bytes]


def fields(message: bytes) -> list[Field]:
    """A message in pieces: the number of each field, and its bytes with the tag. Numbers and strings only."""
    found: list[Field] = []
    at = 0
    while at < len(message):
        start = at
        tag, at = number(message, at)
        value, at = number(message, at)
        at += value if tag & 7 == 2 else 0
        found.append((tag >> 3, message[start:at]))
    return found


def number(message: bytes, at: int) -> tuple[int, int]:
    result = 0
    for shift in itertools.count(0, 7):
        result |= (message[at] & 127) << shift
        at += 1
        if message[at - 1] < 128:
            return result, at
    raise AssertionError


def encoded(value: int) -> bytes:
    low, high = value & 127, value >> 7
    return bytes([low | 128]) + encoded(high) if high else bytes([low])


def framed(key: int, payload: bytes) -> bytes:
    return encoded(key << 3 | 2) + encoded(len(payload)) + payload


def inner(field: bytes) -> bytes:
    _, at = number(field, 0)
    return field[number(field, at)[1] :]


GRAPH, INITIALIZER, RAW = 7, 5, 9


def in_tensors(change: Callable[[list[Field]], list[Field]]) -> Callable[[list[Field]], list[Field]]:
    """A change of each initializer, as one of the graph."""

    def changed(field: Field) -> Field:
        return INITIALIZER, framed(INITIALIZER, b"".join(f for _, f in change(fields(inner(field[1])))))

    return lambda graph: [changed(f) if f[0] == INITIALIZER else f for f in graph]


FORMS: dict[str, Callable[[list[Field]], list[Field]]] = {
    "weights first": lambda g: sorted(g, key=lambda f: f[0] != INITIALIZER),
    "weights among nodes": lambda g: sorted(g, key=lambda f: len(f[1]) % 7),
    "data given twice": in_tensors(lambda t: [(RAW, framed(RAW, b"old")), *t]),
    "type given twice": in_tensors(lambda t: [(2, bytes([2 << 3, 7])), *t]),
    "documented weights": in_tensors(lambda t: [*t, (12, framed(12, b"text"))]),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_forms_of_a_model_file(form, tmp_path):
    """Weights that are left in the file make no difference to the bytes that are written."""
    top = fields(two_layers().SerializeToString())
    parts = [framed(GRAPH, b"".join(f for _, f in form(fields(inner(f))))) if n == GRAPH else f for n, f in top]
    source = tmp_path / "m.onnx"
    source.write_bytes(b"".join(parts))
    whole = onnx.load(source)
    fold_file(source, verify=False)
    assert (tmp_path / "m.folded.onnx").read_bytes() == bnfold.fold(whole).model.SerializeToString()
