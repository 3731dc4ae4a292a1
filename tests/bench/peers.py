"""ResNet-50 in one file of 100 MB, folded by bnfold and by its peers: whole processes, in turn.

    pip install -e '.[bench]'
    python tests/bench/peers.py            # a file as torch exported it years ago: Conv, BN, Relu
    python tests/bench/peers.py --dynamo   # torch.onnx.export(dynamo=True, optimize=False), computed biases and all

Prints median seconds, ratios to bnfold, peak memory and how many of the 53 norms each leaves; then how long
onnxruntime takes for one picture before and after, its own graph optimizations switched off and on.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper
from processes import Runs, empty, run, show
from rich.console import Console
from rich.table import Table

LOAD = "import onnx, sys; m = onnx.load(sys.argv[1]); "
SAVE = "; onnx.save(m, sys.argv[2])"
PEERS = {  # what has to be installed, and a program that reads argv[1] and writes argv[2]
    "load and save alone": ("onnx", LOAD[:-2] + SAVE),
    "onnxruntime, BASIC": (
        "onnxruntime",
        "import sys, onnxruntime as ort; o = ort.SessionOptions(); o.optimized_model_filepath = sys.argv[2]; "
        "o.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC; o.log_severity_level = 3; "
        "ort.InferenceSession(sys.argv[1], o, providers=['CPUExecutionProvider'])",
    ),
    "onnxscript": ("onnxscript", LOAD + "import onnxscript.optimizer as f; m = f.optimize(m)" + SAVE),
    "onnxoptimizer": ("onnxoptimizer", LOAD + "import onnxoptimizer as f; m = f.optimize(m)" + SAVE),
    "onnxslim": ("onnxslim", LOAD + "import onnxslim as f; m = f.slim(m)" + SAVE),
    "onnxsim": ("onnxsim", LOAD + "import onnxsim as f; m, _ = f.simplify(m)" + SAVE),
}
SIDE = 224


def resnet(path: Path) -> None:
    """ResNet-50 (He et al., 2015) with random weights, in IR 8 and opset 17, without a framework."""
    rng = np.random.default_rng(0)
    nodes: list[onnx.NodeProto] = []
    tensors: list[onnx.TensorProto] = []

    def constant(name: str, values: np.ndarray) -> str:
        tensors.append(onnx.numpy_helper.from_array(values.astype(np.float32), name))
        return name

    def conv(x: str, inputs: int, outputs: int, kernel: int, stride: int = 1, *, relu: bool = True) -> str:
        k = sum(n.op_type == "Conv" for n in nodes)
        scale = np.sqrt(2 / (inputs * kernel**2))
        w = constant(f"w{k}", scale * rng.standard_normal((outputs, inputs, kernel, kernel), np.float32))
        norm = {"s": rng.uniform(-1, 1.5, outputs), "b": rng.normal(size=outputs), "m": rng.normal(size=outputs)}
        norm["v"] = rng.uniform(0.5, 2, outputs)
        names = [constant(f"{key}{k}", v) for key, v in norm.items()]
        around = {"kernel_shape": [kernel] * 2, "strides": [stride] * 2, "pads": [kernel // 2] * 4}
        nodes.append(helper.make_node("Conv", [x, w], [f"c{k}"], f"conv{k}", **around))
        nodes.append(helper.make_node("BatchNormalization", [f"c{k}", *names], [f"n{k}"], f"bn{k}"))
        return activated(f"n{k}") if relu else f"n{k}"

    def activated(x: str) -> str:
        nodes.append(helper.make_node("Relu", [x], [f"{x}_relu"], f"relu_{x}"))
        return f"{x}_relu"

    x, channels = conv("image", 3, 64, 7, 2), 64
    nodes.append(helper.make_node("MaxPool", [x], ["pool"], "pool", kernel_shape=[3, 3], strides=[2, 2], pads=[1] * 4))
    x = "pool"
    for stage, (blocks, width) in enumerate(zip((3, 4, 6, 3), (64, 128, 256, 512), strict=True)):
        for block in range(blocks):
            stride = 2 if block == 0 and stage else 1
            y = conv(conv(conv(x, channels, width, 1), width, width, 3, stride), width, 4 * width, 1, relu=False)
            short = conv(x, channels, 4 * width, 1, stride, relu=False) if block == 0 else x
            nodes.append(helper.make_node("Add", [y, short], [f"sum{stage}_{block}"], f"add{stage}_{block}"))
            x, channels = activated(f"sum{stage}_{block}"), 4 * width
    nodes.append(helper.make_node("GlobalAveragePool", [x], ["mean"], "mean"))
    nodes.append(helper.make_node("Flatten", ["mean"], ["flat"], "flat"))
    w, b = constant("fc_w", 0.02 * rng.standard_normal((1000, channels))), constant("fc_b", rng.normal(size=1000))
    nodes.append(helper.make_node("Gemm", ["flat", w, b], ["scores"], "fc", transB=1))
    image = helper.make_tensor_value_info("image", TensorProto.FLOAT, ["N", 3, SIDE, SIDE])
    scores = helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["N", 1000])
    graph = helper.make_graph(nodes, "resnet50", [image], [scores], tensors)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)


def exported(path: Path) -> None:
    """torchvision's ResNet-50 by torch's exporter, none of its optimizations on."""
    import torch
    from torchvision.models import resnet50

    torch.onnx.export(
        resnet50().eval(), (torch.randn(2, 3, SIDE, SIDE),), path, dynamo=True, optimize=False, external_data=False
    )


def norms_left(path: Path) -> int:
    """BatchNormalization nodes in a file."""
    return sum(n.op_type == "BatchNormalization" for n in onnx.load(path, load_external_data=False).graph.node)


def latency(path: Path, *, optimized: bool, repeat: int = 20) -> float:
    """The median seconds that onnxruntime takes for one picture."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    if not optimized:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    shape = [n if isinstance(n, int) else 1 for n in session.get_inputs()[0].shape]
    feeds = {session.get_inputs()[0].name: np.random.default_rng(0).standard_normal(shape, np.float32)}
    session.run(None, feeds)
    taken: list[float] = []
    for _ in range(repeat):
        started = time.perf_counter()
        session.run(None, feeds)
        taken.append(time.perf_counter() - started)
    return statistics.median(taken)


def main() -> None:
    """Measure and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dynamo", action="store_true", help="the file that torch.onnx.export(dynamo=True) writes")
    parser.add_argument("--repeat", type=int, default=5, help="runs of each command (default 5)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        source, output = Path(name) / "resnet50.onnx", Path(name) / "out"
        (exported if arguments.dynamo else resnet)(source)
        out = output / "out.onnx"
        commands = {"bnfold fold --no-verify": [sys.executable, "-m", "bnfold", "fold", str(source), "-o", str(out),
                                                "--no-verify"]}  # fmt: skip
        for peer, (package, program) in PEERS.items():
            if find_spec(package):
                commands[peer] = [sys.executable, "-c", program, str(source), str(out)]
        runs = {name: Runs(name) for name in commands}
        kept = Path(name) / "folded.onnx"
        for _ in range(arguments.repeat):
            for name, command in commands.items():
                empty(output)
                run(runs[name], command, output, required=name.startswith("bnfold"))
                if out.exists():
                    runs[name].note = f"{norms_left(out)} norms left"
                if name.startswith("bnfold"):
                    out.replace(kept)
        kind = "as the exporter writes it" if arguments.dynamo else "Conv, BN, Relu"
        show(
            f"ResNet-50, {source.stat().st_size / 1e6:.0f} MB, {norms_left(source)} norms, {kind}", list(runs.values())
        )
        table = Table("onnxruntime", "before", "after", "ratio", title="one picture, median of 20")
        for optimized in (False, True):
            before, after = (latency(p, optimized=optimized) for p in (source, kept))
            row = f"{1e3 * before:.1f} ms", f"{1e3 * after:.1f} ms", f"{after / before:.2f}"
            table.add_row("all optimizations" if optimized else "no optimizations", *row)
        Console().print(table)


if __name__ == "__main__":
    main()
