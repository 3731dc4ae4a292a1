"""How long and how much memory a large model takes, beside `cp` of its data file.

    python tests/bench/large.py --gigabytes 2.5

Makes a chain of Conv 1x1 (2048 -> 2048), BN and ReLU whose weights are external data, folds it and copies its data, in
turn, each in a process of its own and followed by a sync, and prints medians, their ratio, and peak memory.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper
from rich.console import Console
from rich.table import Table

CHANNELS = 2048
PAGE = 4096


@dataclass
class Runs:
    """What one command took: seconds, and the most memory of its own in bytes."""

    name: str
    seconds: list[float] = field(default_factory=list)
    memory: int = 0

    @property
    def median(self) -> float:
        """The median of the seconds."""
        return statistics.median(self.seconds)


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


def run(runs: Runs, command: Sequence[str], output: Path) -> None:
    """Run a command and flush what it wrote to the disk; add what that took."""
    started = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    while process.poll() is None:
        runs.memory = max(runs.memory, peak(process.pid))
        time.sleep(0.005)
    if process.returncode:
        sys.exit(f"{runs.name} failed")
    for file in output.iterdir():
        subprocess.run(["sync", str(file)], check=True)
    runs.seconds.append(time.perf_counter() - started)


def peak(pid: int) -> int:
    """The most memory a process has had at once, which Linux keeps a record of. (`ru_maxrss` counts its parent's.)"""
    with suppress(OSError, StopIteration):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) * 1024
    return 0


def empty(folder: Path) -> Path:
    """The folder, empty, with nothing of it left to be written."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    os.sync()
    return folder


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
        show(layers, data.stat().st_size, copies, folds)


def show(layers: int, size: int, *commands: Runs) -> None:
    """Print the table, and each run below it."""
    table = Table(title=f"{layers} x (Conv, BN, ReLU), {size / 1e9:.1f} GB of external data; each followed by a sync")
    for column in ("command", "median", "ratio", "peak memory"):
        table.add_column(column, justify="left" if column == "command" else "right")
    for c in commands:
        ratio, memory = c.median / commands[0].median, c.memory / 1e6
        table.add_row(c.name, f"{c.median:.2f} s", f"{ratio:.2f}", f"{memory:.0f} MB")
    console = Console()
    console.print(table)
    for c in commands:
        console.print(f"{c.name}: {', '.join(f'{s:.2f}' for s in c.seconds)} s", highlight=False)


if __name__ == "__main__":
    main()
