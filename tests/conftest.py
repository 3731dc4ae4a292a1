"""What all tests share: one thread per process, so that parallel runs do not fight for two cores; options."""

import os

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    """How many random graphs `pytest -m fuzz` runs beyond those of every run."""
    parser.addoption("--graphs", type=int, default=20_000, help="random graphs for -m fuzz (default: 20000)")
