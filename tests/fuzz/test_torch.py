"""Random torch modules, in float64: what bnfold makes of them computes what they computed."""

from __future__ import annotations

from .checks import check
from .torch_drawing import draw
from .torch_judge import judge, text

# How many folds of 40 modules must have used a rule: far less than half of the mean.
EXPECTED: dict[str, int] = {
    "norm backward": 20, "norm forward": 10, "norm merge": 1, "backward Linear": 20, "forward Linear": 8,
    "backward Carry": 1, "forward Scale": 1, "through": 5, "into conv": 30, "into linear": 4, "affine forward": 6,
    "spelling batch_norm": 24, "spelling arithmetic": 4, "spelling instance_norm": 2,
    "kept model-output": 5, "kept multiple-consumers": 3, "kept nonzero-shift": 2,
}  # fmt: skip


def test_random_modules(seeds: range) -> None:
    check(seeds, draw, judge, text, EXPECTED if len(seeds) >= 40 else {})
