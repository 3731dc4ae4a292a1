"""All mutants. One that computes the same (a check that another check repeats) has no place here."""

from __future__ import annotations

from .engine import FOLDING, RULES
from .mutant import Mutant
from .numbers import MERGING, WEIGHTS
from .onnx_graph import ONNX, SITES
from .torch_graph import TORCH

MUTANTS: list[Mutant] = [*RULES, *FOLDING, *WEIGHTS, *MERGING, *SITES, *ONNX, *TORCH]
