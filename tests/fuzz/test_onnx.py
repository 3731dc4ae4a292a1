"""Random ONNX graphs of several opsets and types: what bnfold makes of them computes what they computed.

`pytest -m fuzz --graphs 20000` runs 20,000 further graphs (see conftest.py for the share of torch).
"""

from __future__ import annotations

from .checks import check
from .onnx_judge import judge, text
from .onnx_network import draw

# Every rule, and how many folds of 480 graphs must have used it: half of the fewest that eight such chunks had.
EXPECTED: dict[str, int] = {
    # Directions, and what they moved.
    "affine": 19, "affine backward": 8, "affine forward": 10, "norm": 461, "norm backward": 319, "norm both": 3,
    "norm forward": 99, "norm merge": 22,
    # Spellings of norms.
    "spelling BatchNormalization": 353, "spelling arithmetic": 72,
    # Records passed or absorbed into, by direction.
    "backward Carry": 38, "backward Concat": 13, "backward Linear": 316, "backward Permute": 12,
    "backward Product": 1, "backward Reshape": 8, "backward Scale": 1, "backward Sum": 7, "backward Take": 14,
    "both Carry": 2, "both Linear": 3, "both Sum": 3, "forward Carry": 7, "forward Concat": 1,
    "forward Linear": 77, "forward Product": 2, "forward Reshape": 13, "forward Scale": 15,
    # Kinds of node passed.
    "through abs": 1, "through add": 36, "through average_pool": 3, "through concat": 14, "through cut": 3,
    "through dropout": 1, "through flatten": 8, "through gather": 4, "through gemm": 2,
    "through global_average_pool": 2, "through global_max_pool": 1, "through identity": 1,
    "through leaky_relu": 1, "through max_pool": 1, "through pad": 3, "through prelu": 1, "through product": 5,
    "through reduce": 4, "through regroup": 1, "through relu": 8, "through resize": 6, "through split": 8,
    "through sum": 5, "through tokens": 2, "through transpose": 15, "through unsqueeze": 1, "through view": 1,
    # Layers and scales that took maps in.
    "into arithmetic_norm": 2, "into constant": 3, "into conv": 339, "into conv_transpose": 13, "into embed": 10,
    "into gemm": 51, "into matmul": 26, "into norm": 12,
    # Reasons.
    "kept model-input": 26, "kept model-output": 91, "kept multiple-consumers": 76, "kept negative-scale": 5,
    "kept nonzero-shift": 32, "kept not-executed": 8, "kept not-per-channel": 19, "kept padded-shift": 11,
    "kept unequal-branches": 13, "kept unknown-shape": 2, "kept unsupported-op": 8,
}  # fmt: skip


def test_random_graphs(seeds: range) -> None:
    check(seeds, draw, judge, text, EXPECTED if len(seeds) >= 480 else {})
