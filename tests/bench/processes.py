"""Whole processes side by side: seconds, ratios and the most memory each had."""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table


@dataclass
class Runs:
    """What one command took: seconds, and the most memory of its own in bytes. `note` is what it left undone."""

    name: str
    note: str = ""
    seconds: list[float] = field(default_factory=list)
    memory: int = 0

    @property
    def median(self) -> float:
        """The median of the seconds."""
        return statistics.median(self.seconds)


def run(runs: Runs, command: Sequence[str], output: Path, *, required: bool = True) -> None:
    """Run a command and flush what it wrote to the disk; add what that took."""
    started = time.perf_counter()
    compiled = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}  # as an installed package is
    process = subprocess.Popen(
        command, env=compiled, stdout=subprocess.DEVNULL, stderr=None if required else subprocess.DEVNULL
    )
    while process.poll() is None:
        runs.memory = max(runs.memory, peak(process.pid))
        time.sleep(0.005)
    if process.returncode:
        if not required:
            runs.note = "failed"
            return
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


def show(title: str, commands: Sequence[Runs]) -> None:
    """Print a table, ratios to the first command, and each run below it."""
    table = Table(title=title)
    for column in ("command", "median", "ratio", "peak memory", ""):
        table.add_column(column, justify="left" if column in ("command", "") else "right")
    for c in commands:
        if not c.seconds:
            table.add_row(c.name, "-", "-", "-", c.note)
            continue
        ratio, memory = c.median / commands[0].median, c.memory / 1e6
        table.add_row(c.name, f"{c.median:.2f} s", f"{ratio:.2f}", f"{memory:.0f} MB", c.note)
    console = Console()
    console.print(table)
    for c in commands:
        console.print(f"{c.name}: {', '.join(f'{s:.2f}' for s in c.seconds)} s", highlight=False)
