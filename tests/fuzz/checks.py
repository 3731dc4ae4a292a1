"""What both fuzz tests do: judge the program of every seed, shrink the first that fails, see that rules are used."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

from .program import Judge, Program, shrunk
from .tally import Tally


def check(
    seeds: range,
    draw: Callable[[int], Program],
    judge: Callable[[Program, Tally], object],
    text: Callable[[Program], str],
    expected: Mapping[str, int],
) -> None:
    """Fail with a small program for the first seed whose fold is wrong, or with the rules that went unused."""
    tally = Tally()
    for seed in seeds:
        program = draw(seed)
        if judge(program, tally) is not None:
            report(seed, program, judge, text)  # type: ignore[arg-type]
    assert tally.worst < 1e-11, "of the range of an output in which nothing large cancels"
    missing = tally.missing(expected)
    assert not missing, f"rules that {len(seeds)} graphs used less often than they should: {missing}"


def report(seed: int, program: Program, judge: Judge, text: Callable[[Program], str]) -> None:
    """Fail with the seed and the smallest program that fails alike."""
    small, failure = shrunk(program, judge)
    pytest.fail(f"seed {seed}: {failure.what}\n{failure.detail}\n{text(small)}", pytrace=False)
