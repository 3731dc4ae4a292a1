"""How long and how much memory a large model takes, beside `cp` of its data file.

    python tests/bench/large.py --gigabytes 2.5

Makes a chain of Conv 1x1 (2048 -> 2048), BN and ReLU whose weights are external data, folds it and copies its data, in
turn, each in a process of its own and followed by a sync, and prints medians, their ratio, and peak memory.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper
from processes import Runs, empty, run, show

CHANNELS = 2048
PAGE = 4096


def make_chain(folder: Path, layers: int) -> Path:
    """Write `chain.onnx` and `chain.bin`, layer by layer: seeded weights, statistics of every sign and size."""
    rng = np.random.default_rng(0)
    weight = (rng.standard_normal((CHANNELS, CHANNELS), np.float32) / np.sqrt(CHANNELS)).astype(np.float32)
    graph = onnx.GraphProto(name="chain")
    graph.input.append(helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", CHANNELS, 1, 1]))
    value = "x"
    with (folder / "chain.bin").open("wb") as data:

        def external(name: str, values: np.ndarray) -> str:
            data.seek(-(-data.tell() // PAGE) * PAGE)
            place = {"location": "chain.bin", "offset": str(data.tell()), "length": str(values.nbytes)}
            data.write(values.tobytes())
            tensor = graph.initializer.add(name=name, data_type=TensorProto.FLOAT, dims=values.shape)
            tensor.data_location = TensorProto.EXTERNAL
            for key, text in place.items():
                tensor.external_data.add(key=key, value=text)
            return name

        for k in range(layers):
            weights = np.roll(weight, k).reshape(CHANNELS, CHANNELS, 1, 1)  # cheap, and no two layers alike
            spread, shift = rng.uniform(0.5, 2, CHANNELS), rng.standard_normal(CHANNELS)
            norm = {"s": rng.uniform(-1.5, 1.5, CHANNELS), "b": shift, "m": shift[::-1], "v": spread}
            names = [external(f"{key}{k}", v.astype(np.float32)) for key, v in norm.items()]
            graph.node.append(helper.make_node("Conv", [value, external(f"w{k}", weights)], [f"c{k}"], f"conv{k}"))
            graph.node.append(helper.make_node("BatchNormalization", [f"c{k}", *names], [f"n{k}"], f"norm{k}"))
            graph.node.append(helper.make_node("Relu", [f"n{k}"], [f"y{k}"], f"relu{k}"))
            value = f"y{k}"
    graph.output.append(helper.make_tensor_value_info(value, TensorProto.FLOAT, ["N", CHANNELS, 1, 1]))
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, folder / "chain.onnx")
    return folder / "chain.onnx"


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=2.5, help="size of the external data (default 2.5)")
    parser.add_argument("--repeat", type=int, default=5, help="runs of each command (default 5)")
    parser.add_argument("--folder", type=Path, help="where to work (default: a temporary folder)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        layers = max(round(arguments.gigabytes * 1e9 / (4 * CHANNELS * CHANNELS)), 1)
        source = make_chain(folder, layers)
        data, output = folder / "chain.bin", folder / "out"
        fold = [sys.executable, "-m", "bnfold", "fold", str(source), "-o", str(output / "out.onnx"), "--no-verify"]
        copies, folds = Runs("cp of the data file"), Runs("bnfold fold --no-verify")
        for _ in range(arguments.repeat):
            empty(output)
            run(copies, ["cp", str(data), str(output / data.name)], output)
            empty(output)
            run(folds, fold, output)
        size = data.stat().st_size / 1e9
        show(f"{layers} x (Conv, BN, ReLU), {size:.1f} GB of external data; each with a sync", [copies, folds])


if __name__ == "__main__":
    main()
