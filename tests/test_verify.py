"""verify: what passes, what fails, what is refused, and that nothing given to it changes."""

import copy
import dataclasses
import math
import subprocess
import sys
import textwrap

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import numpy_helper, parser
from torch import nn

from bnfold.errors import InvalidFileError, UsageError
from bnfold.report import Report, Verdict
from bnfold.verify import verify

CPU = "CPUExecutionProvider"


def seeded(seed=0):
    return np.random.default_rng(seed)


def onnx_model(text, ir=8, opset=17, **constants):
    """A model from onnx's text form; `constants` become initializers."""
    model = parser.parse_model(f'<ir_version: {ir}, opset_import: ["": {opset}]> {text}')
    model.graph.initializer.extend(numpy_helper.from_array(v, n) for n, v in constants.items())
    return model


WEIGHT = seeded().standard_normal((4, 3, 3, 3)).astype(np.float32)
BIAS = seeded(1).standard_normal(4).astype(np.float32)
CONV = "g (float[N,3,H,W] x) => (float[N,4,H,W] y) { c = Conv<pads=[1,1,1,1]>(x, w, b)  y = Relu(c) }"


def conv(weight=WEIGHT, bias=BIAS, text=CONV):
    return onnx_model(text, w=weight, b=bias)


def scaled(array, channel, factor):
    array = array.copy()
    array[channel] *= factor
    return array


def identity(type_, output="y", shape="[N,4]", op="Identity"):
    return onnx_model(f"g ({type_}{shape} x) => ({type_}{shape} {output}) {{ {output} = {op}(x) }}")


def graph(body, outputs="float[N,M] y", **constants):
    """A model from [N,M] to [N,M]."""
    return onnx_model(f"g (float[N,8] x) => ({outputs}) {{ {body} }}", **constants)


def f32(*values):
    return np.array(values, np.float32)


# --- ONNX against ONNX ------------------------------------------------------------------------------------------------

SHIFT = f32(0.3, -0.2, 0.5).reshape(1, 3, 1, 1)
SHIFTED = "g (float[N,3,H,W] x) => (float[N,4,H,W] y) { s = Add(x, t)  y = Conv<pads=[1,1,1,1]>(s, w) }"
PADDED = "g (float[N,3,H,W] x) => (float[N,4,H,W] y) { y = Conv<pads=[1,1,1,1]>(x, w, b) }"
SMALL = f32(1, 1, 1, 1, 1, 1, 1e-4, 0)

# id: (reference, candidate, passes, words in the problem of the first output that has one)
ONNX = {
    "equal": (conv(), conv(), True, ""),
    "rounding noise": (conv(), conv(WEIGHT * np.float32(1 + 1e-6)), True, ""),
    "1 % in one channel": (conv(), conv(scaled(WEIGHT, 2, 1.01)), False, ""),
    "wrong bias in one channel": (conv(), conv(bias=BIAS + f32(0, 0.01, 0, 0)), False, ""),
    # A shift moved through a padded convolution is right everywhere but at the border.
    "border only": (
        onnx_model(SHIFTED, w=WEIGHT, t=SHIFT),
        onnx_model(PADDED, w=WEIGHT, b=(WEIGHT * SHIFT).sum((1, 2, 3))),
        False,
        "",
    ),
    "NaN": (graph("y = Sqrt(a) a = Abs(x)".replace("y = Sqrt(a) a = Abs(x)", "a = Abs(x) y = Sqrt(a)")), graph("y = Sqrt(x)"), False, "nan at"),
    "NaN in both": (graph("y = Sqrt(x)"), graph("y = Sqrt(x)"), True, ""),
    "NaN in the reference only": (graph("y = Sqrt(x)"), graph("a = Abs(x) y = Sqrt(a)"), False, "reference has nan"),
    "Inf of the other sign": (graph("y = Div(x, z)", z=f32(0)), graph("y = Div(x, z)", z=f32(-0.0)), False, "inf at"),
    "Inf in both": (graph("y = Div(x, z)", z=f32(0)), graph("y = Div(x, z)", z=f32(0)), True, ""),
    "Inf for a number": (graph("y = Identity(x)"), graph("y = Div(x, z)", z=f32(0)), False, "inf at"),
    "finite beside Inf": (
        graph("y = Div(x, z)", z=f32(0, 1, 1, 1, 1, 1, 1, 1)),
        graph("y = Div(x, z)", z=f32(0, 1, 1, 1.01, 1, 1, 1, 1)),
        False,
        "",
    ),
    "shape": (graph("y = Identity(x)"), graph("y = Concat<axis=0>(x, x)"), False, "shape [4, 8], the reference has [2"),
    "rank": (graph("y = Identity(x)"), graph("y = Flatten<axis=0>(x)"), False, "shape [1, 16]"),
    "type": (graph("y = Identity(x)"), graph("y = Cast<to=10>(x)", "float16[N,M] y"), False, "type float16"),
    "one output fewer": (
        graph("y = Relu(x) z = Neg(x)", "float[N,M] y, float[N,M] z"),
        graph("y = Relu(x)"),
        False,
        "the candidate has no such output",
    ),
    "one output more": (
        graph("y = Relu(x)"),
        graph("y = Relu(x) z = Neg(x)", "float[N,M] y, float[N,M] z"),
        False,
        "the reference has no such output",
    ),
    "outputs exchanged": (
        graph("y = Relu(x) z = Neg(x)", "float[N,M] y, float[N,M] z"),
        graph("y = Relu(x) z = Neg(x)", "float[N,M] z, float[N,M] y"),
        False,
        "",
    ),
    "zero output": (graph("y = Sub(x, x)"), graph("y = Sub(x, x)"), True, ""),
    "zero against noise": (graph("y = Sub(x, x)"), graph("y = Mul(x, e)", e=f32(1e-7)), True, ""),
    "zero against numbers": (graph("y = Sub(x, x)"), graph("y = Mul(x, e)", e=f32(1e-2)), False, ""),
    "tiny outputs are judged by their range": (
        graph("y = Mul(x, e)", e=f32(1e-9)),
        graph("y = Mul(x, e)", e=f32(1.01e-9)),
        False,
        "",
    ),
    "empty output": (graph("y = Slice(x, a, a)", a=np.int64([0])), graph("y = Slice(x, a, a)", a=np.int64([0])), True, ""),
    "float16 noise": (identity("float16"), onnx_model("g (float16[N,4] x) => (float16[N,4] y) { y = Mul(x, s) }", s=np.float16([1.002])), True, ""),
    "float16 fault": (identity("float16"), onnx_model("g (float16[N,4] x) => (float16[N,4] y) { y = Mul(x, s) }", s=np.float16([1.05])), False, ""),
    "double noise": (identity("double"), onnx_model("g (double[N,4] x) => (double[N,4] y) { y = Mul(x, s) }", s=np.float64([1 + 1e-12])), True, ""),
    "double fault": (identity("double"), onnx_model("g (double[N,4] x) => (double[N,4] y) { y = Mul(x, s) }", s=np.float64([1 + 1e-7])), False, ""),
    "bfloat16": (identity("bfloat16"), identity("bfloat16"), True, ""),
    "integers": (identity("int64"), identity("int64"), True, ""),
    "integers off by one": (identity("int64"), onnx_model("g (int64[N,4] x) => (int64[N,4] y) { y = Add(x, o) }", o=np.int64([0, 0, 0, 1])), False, ""),
    "booleans": (identity("bool"), identity("bool", op="Not"), False, ""),
    "symbolic sizes are shared": (
        onnx_model("g (float[N,C] x, float[N,C] z) => (float[N,C] y) { y = Add(x, z) }"),
        onnx_model("g (float[N,C] x, float[N,C] z) => (float[N,C] y) { y = Add(z, x) }"),
        True,
        "",
    ),
    "inputs in another order": (
        onnx_model("g (float[N,3] x, float[N,1] z) => (float[N,3] y) { y = Sub(x, z) }"),
        onnx_model("g (float[N,1] z, float[N,3] x) => (float[N,3] y) { y = Sub(x, z) }"),
        True,
        "",
    ),
    "an unused input dropped": (
        onnx_model("g (float[N,3] x, float[N,1] z) => (float[N,3] y) { y = Relu(x) }"),
        onnx_model("g (float[N,3] x) => (float[N,3] y) { y = Relu(x) }"),
        True,
        "",
    ),
    "overridable initializers are not fed": (
        onnx_model("g (float[N,3] x, float[3] s) => (float[N,3] y) { y = Mul(x, s) }", s=f32(1, 2, 3)),
        onnx_model("g (float[N,3] x) => (float[N,3] y) { y = Mul(x, s) }", s=f32(1, 2, 3)),
        True,
        "",
    ),
    "the candidate fixes the batch": (
        conv(),
        conv(text=CONV.replace("float[N,3,H,W] x", "float[1,3,H,W] x")),
        True,
        "",
    ),
    "sequences": (
        onnx_model("g (float[4,3] x) => (seq(float[1,3]) y) { y = SplitToSequence(x) }"),
        onnx_model("g (float[4,3] x) => (seq(float[1,3]) y) { y = SplitToSequence(x) }"),
        True,
        "",
    ),
    # onnxruntime 1.32 ends the process on these empty names.
    "old norm with empty output names": (
        onnx_model("g (float[N,2,H] x) => (float[N,2,H] y) { r = Relu(x)  y,,,, = BatchNormalization(r, a, a, a, a) }".replace("y,,,,", "y"), opset=9, ir=4, a=f32(1, 2)),
        onnx_model("g (float[N,2,H] x) => (float[N,2,H] y) { r = Relu(x)  y = BatchNormalization(r, a, a, a, a) }", opset=9, ir=4, a=f32(1, 2)),
        True,
        "",
    ),
}
