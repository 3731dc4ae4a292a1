"""The table of mutants fits the source; with `-m mutants`, the suite catches every one."""

from __future__ import annotations

import subprocess
import sys

import pytest

from .run import ROOT
from .table import MUTANTS


@pytest.mark.parametrize("mutant", MUTANTS, ids=[m.name for m in MUTANTS])
def test_text_occurs_once(mutant):
    changed = mutant.applied((ROOT / "bnfold" / mutant.file).read_text())
    assert changed is not None, f"not once in {mutant.file}: {mutant.text}"
    compile(changed, mutant.file, "exec")
    assert mutant.text != mutant.instead


def test_names_are_unique():
    assert len({m.name for m in MUTANTS}) == len(MUTANTS) >= 40


@pytest.mark.mutants
def test_all_are_killed():
    assert subprocess.run([sys.executable, "-m", "tests.mutants"], cwd=ROOT, check=False).returncode == 0
