"""Seeds for the fuzz tests: a share for every run, and as many more as `pytest -m fuzz --graphs N` asks for."""

from __future__ import annotations

import pytest

# ONNX and torch graphs, and damaged model files. A torch graph costs ten times as much as an ONNX graph: it is
# exported, and its module tree is tried.
SHARE = {"onnx": 1920, "torch": 80, "files": 1000}
CHUNK = {"onnx": 480, "torch": 40, "files": 500}
GRAPHS = 2000  # of --graphs N, how many are the shares above


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Chunks of seeds, so that several processes share them."""
    back_end = metafunc.module.__name__.rpartition("test_")[2]
    if "seeds" not in metafunc.fixturenames or back_end not in SHARE:
        return
    asked = metafunc.config.getoption("--graphs")
    more = asked * SHARE[back_end] // GRAPHS
    start, size = SHARE[back_end], CHUNK[back_end]
    rows = [_chunk(k, min(k + size, start)) for k in range(0, start, size)]
    rows += [_chunk(k, min(k + size, start + more), pytest.mark.fuzz) for k in range(start, start + more, size)]
    metafunc.parametrize("seeds", rows)


def _chunk(first: int, end: int, *marks: pytest.MarkDecorator) -> object:
    return pytest.param(range(first, end), id=f"{first}-{end - 1}", marks=marks)
