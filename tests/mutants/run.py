"""Run the tests against each mutant: `python -m tests.mutants [--jobs N] [PATTERN ...]`.

The package and its tests are copied to a temporary folder, one text is replaced, and the tests of the broken part run,
fast ones first, until one fails. They must pass on the unbroken source. A mutant that survives, or whose text is no
longer there, makes the exit status 1.

What tests import besides bnfold is imported once, here; every run of the tests is a fork of this process.
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from .mutant import Mutant
from .table import MUTANTS

ROOT = Path(__file__).parents[2]
COPIED = ("bnfold", "cli", "tests", "pyproject.toml")
SHARED = ("pytest", "onnx.reference", "onnx.parser", "onnxruntime", "onnx_graphsurgeon", "torch", "torchvision")
LIMIT = 600.0  # seconds for one stage; a mutant that takes longer hangs

# Stages of test files for each part, most telling ones first; the first entry whose prefix fits counts. In front of
# them all runs the file named like the broken one, where there is one.
ENGINE = ("test_affine.py", "test_rules.py", "test_norms.py", "test_folding.py", "test_weights.py")
STAGES: dict[str, tuple[tuple[str, ...], ...]] = {
    "graphs/onnx_writer": (
        ("test_onnx_sharing.py", "test_onnx_layers.py"),
        ("test_onnx_*.py",),
        ("fuzz/test_onnx.py",),
    ),
    "graphs/onnx_": (("test_onnx_*.py",), ("fuzz/test_onnx.py",)),
    "graphs/torch_": (
        ("test_torch_sharing.py", "test_torch_modules.py"),
        ("test_torch_layers.py", "test_torch_layout.py", "test_torch_norms.py"),
        ("fuzz/test_torch.py",),
        ("test_torch_*.py",),
    ),
    "graphs/": (("test_onnx_norms.py", "test_onnx_layers.py"), ("fuzz/test_onnx.py",), ("test_torch_*.py",)),
    "merging.py": (("test_onnx_layout.py",), ENGINE, ("fuzz/test_onnx.py",), ("test_onnx_*.py",)),
    "rounding.py": (ENGINE,),
    "": (ENGINE, ("test_onnx_layout.py",), ("fuzz/test_onnx.py",), ("test_onnx_*.py",)),
}  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """How a mutant fared: killed by a test, survived, or gone from the source."""

    mutant: Mutant
    verdict: str
    by: str
    seconds: float

    def __str__(self) -> str:
        return f"{self.verdict:<9} {self.mutant.name:<36} {self.seconds:5.0f} s  {self.by}"


def attempt(mutant: Mutant) -> Outcome:
    """Run the tests of the mutant's part, stage by stage, until one fails."""
    start = time.monotonic()
    changed = mutant.applied((ROOT / "bnfold" / mutant.file).read_text())
    if changed is None:
        return Outcome(mutant, "GONE", f"its text does not occur once in {mutant.file}", 0)
    by = None
    for stage in _stages(mutant):
        by = by or failing_test(stage, mutant.file, changed)
    return Outcome(mutant, "SURVIVED" if by is None else "killed", by or "", time.monotonic() - start)


def failing_test(patterns: Sequence[str], file: str = "", source: str = "") -> str | None:
    """The first test that fails in a copy of the project, with one file's source replaced; None when all pass."""
    with tempfile.TemporaryDirectory(prefix="mutant") as folder:
        copy = Path(folder)
        for name in COPIED:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, copy / name)  # compiled tests too: what is not touched keeps its date
            else:
                shutil.copy(ROOT / name, copy)
        if file:
            (copy / "bnfold" / file).write_text(source)
        paths = [str(p) for pattern in patterns for p in sorted((copy / "tests").glob(pattern))]
        process = multiprocessing.get_context("fork").Process(target=_run_tests, args=(folder, paths))
        process.start()
        process.join(LIMIT)
        if process.is_alive():
            process.kill()
            return "no end"
        if process.exitcode == 0:
            return None
        printed = (copy / "printed.txt").read_text()
    failed = re.search(r"^(?:FAILED|ERROR) (?:tests/)?(.*?)(?: - |$)", printed, re.MULTILINE)
    return failed[1] if failed else f"pytest exits with {process.exitcode}: {printed[-300:]}"


def _run_tests(folder: str, paths: list[str]) -> None:
    """In a process of its own: pytest on the copy in the folder."""
    import pytest

    os.chdir(folder)
    sys.path.insert(0, folder)
    sys.dont_write_bytecode = True
    with Path("printed.txt").open("w") as printed:
        os.dup2(printed.fileno(), 1)
        os.dup2(printed.fileno(), 2)
        # How long something takes says nothing about a mutant where several run at a time.
        status = pytest.main(["-x", "-q", "--tb=line", "-p", "no:cacheprovider", "-k", "not seconds", *paths])
        sys.stdout.flush()
    os._exit(int(status))


def _stages(mutant: Mutant) -> list[tuple[str, ...]]:
    stages = [(f"test_{Path(mutant.file).stem}.py",)]
    stages += next(v for k, v in STAGES.items() if mutant.file.startswith(k))
    return [s for s in stages if any(any((ROOT / "tests").glob(pattern)) for pattern in s)]


def main(arguments: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description="Run the tests against each mutant.")
    parser.add_argument("patterns", nargs="*", metavar="PATTERN", help="names in shell style (default: all)")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) // 2), help="mutants at a time")
    given = parser.parse_args(arguments)
    chosen = [m for m in MUTANTS if not given.patterns or any(fnmatchcase(m.name, p) for p in given.patterns)]
    os.environ["OMP_NUM_THREADS"] = "1"
    for name in SHARED:
        importlib.import_module(name)
    bad: list[Outcome] = []
    with ThreadPoolExecutor(given.jobs) as pool:
        stages = list(dict.fromkeys(stage for m in chosen for stage in _stages(m)))
        for stage, by in zip(stages, pool.map(failing_test, stages), strict=True):
            if by is not None:
                print(f"{' '.join(stage)} fail without a mutant: {by}")
                return 2
        for outcome in pool.map(attempt, chosen):
            print(outcome, flush=True)
            bad += [] if outcome.verdict == "killed" else [outcome]
    print(f"{len(chosen) - len(bad)} of {len(chosen)} mutants killed")
    return int(bool(bad) or not chosen)


if __name__ == "__main__":
    sys.exit(main())
