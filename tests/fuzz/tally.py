"""What the folds of many programs went through: a generator that stops exercising a rule must be noticed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import bnfold

from .program import Program, kind_of

# What the kinds of step, of both back ends, are to the engine.
RECORDS = {
    kind: record
    for record, kinds in {
        "Linear": "conv conv_transpose gemm matmul matmul_left embed linear",
        "Scale": "norm arithmetic_norm constant neg",
        "Carry": "abs adaptive_pool average_pool clone dropout global_average_pool global_max_pool identity leaky_relu "
        "max_pool mean pad prelu reduce relu resize",
        "Permute": "transpose permute movedim",
        "Reshape": "depth_to_space flatten pixel_shuffle regroup reshape shuffle space_to_depth squeeze tokens "
        "unsqueeze view",
        "Concat": "cat concat",
        "Take": "chunk cut gather index_select narrow select slice split split_with_sizes",
        "Sum": "add sub sum",
        "Product": "mul product",
    }.items()
    for kind in kinds.split()
}


@dataclass
class Tally:
    """Counts by rule, and the worst error seen."""

    graphs: int = 0
    rules: Counter[str] = field(default_factory=Counter)
    worst: float = 0.0  # of the output's range, where nothing large cancels
    cancelling: int = 0
    folded_twice: int = 0

    def count(self, program: Program, report: bnfold.Report) -> None:
        """Count each rule once for each fold that used it."""
        self.graphs += 1
        for f in report.folded:
            self._fold("norm", f)
        for f in report.affine:
            self._fold("affine", f)
        for k in report.kept:
            self.rules.update({f"kept {r.reason}" for r in k.reasons})
        self.rules["kept"] += len(report.kept)

    def _fold(self, what: str, f: bnfold.report.Fold) -> None:
        self.rules[what] += 1
        self.rules[f"{what} {f.direction}"] += 1
        self.rules["through"] += bool(f.through)
        if f.norm is not None:
            self.rules[f"spelling {f.op}"] += 1
        through, into = {kind_of(n) for n in f.through}, {kind_of(n) for n in f.into}
        self.rules.update({f"through {k}" for k in through} | {f"into {k}" for k in into})
        records = {RECORDS.get(k, "") for k in through | into}
        self.rules.update({f"{f.direction} {r}" for r in records if r and what == "norm"})

    def missing(self, expected: Mapping[str, int]) -> dict[str, int]:
        """Expected rules that were seen less often than asked for, and how often they were."""
        return {rule: self.rules[rule] for rule, least in expected.items() if self.rules[rule] < least}
