"""What every verb reports: what was found, folded, kept and why; one schema for people, Python and JSON."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple, cast

SCHEMA = 1


class Reason(StrEnum):
    """Why a normalization stays. The strings are stable; `explain` and the README are made from REASONS."""

    MULTIPLE_CONSUMERS = "multiple-consumers"
    MODEL_OUTPUT = "model-output"
    MODEL_INPUT = "model-input"
    UNSUPPORTED_OP = "unsupported-op"
    PADDED_SHIFT = "padded-shift"
    NONZERO_SHIFT = "nonzero-shift"
    NEGATIVE_SCALE = "negative-scale"
    NOT_PER_CHANNEL = "not-per-channel"
    UNKNOWN_SHAPE = "unknown-shape"
    UNEQUAL_BRANCHES = "unequal-branches"
    DYNAMIC_PARAMETER = "dynamic-parameter"
    OVERRIDABLE_PARAMETER = "overridable-parameter"
    TRAINING_MODE = "training-mode"
    NOT_FINITE = "not-finite"
    OVERFLOW = "overflow"
    UNDERFLOW = "underflow"
    QUANTIZED_PARAMETER = "quantized-parameter"
    REPEATED_CHANNEL = "repeated-channel"
    SHARED_WEIGHT = "shared-weight"
    BATCH_STATISTICS = "batch-statistics"
    NO_GAIN = "no-gain"
    NOT_EXECUTED = "not-executed"
    NOT_CAPTURED = "not-captured"
    NOT_EXPRESSIBLE = "not-expressible"
    EXCLUDED = "excluded"
    HOOKED = "hooked"


class Doc(NamedTuple):
    """One line on what a reason means, one on what would change it."""

    meaning: str
    remedy: str


REASONS: dict[Reason, Doc] = {
    Reason.MULTIPLE_CONSUMERS: Doc(
        "The value before the norm has other readers, which would see the folded value instead.",
        "Let the norm be the only reader, or accept it: folding would need a second copy of the layer.",
    ),
    Reason.MODEL_OUTPUT: Doc(
        "The value that would change is an output of the model.", "Return the value behind the norm, or drop it."
    ),
    Reason.MODEL_INPUT: Doc(
        "Nothing stands before the norm but the model's input.",
        "Fold the input normalization into the preprocessing, or let an unpadded layer follow.",
    ),
    Reason.UNSUPPORTED_OP: Doc(
        "An operation in between does not commute with a per-channel affine map, or bnfold has no rule for it.",
        "Nonlinear operations (GELU, SiLU, softmax) never commute; report a linear one as a missing rule.",
    ),
    Reason.PADDED_SHIFT: Doc(
        "The following layer pads with zeros (or is transposed), so a shift would be wrong at the borders.",
        "Only a norm without shift folds here; pad before the norm or use a norm behind the layer.",
    ),
    Reason.NONZERO_SHIFT: Doc(
        "An operation in between lets only a pure scale pass, and the norm also shifts.",
        "Move the norm in front of the activation or padding.",
    ),
    Reason.NEGATIVE_SCALE: Doc(
        "An operation in between (ReLU, max pooling) lets only positive scales pass, and a gamma is negative or zero.",
        "Move the norm in front of the activation or pooling.",
    ),
    Reason.NOT_PER_CHANNEL: Doc(
        "The map varies along another dimension than the channels of the neighbouring layer.",
        "A norm over dimension 1 folds into a layer whose channels are dimension 1; check for a missing transpose.",
    ),
    Reason.UNKNOWN_SHAPE: Doc(
        "A shape that decides whether the fold is right is not known.",
        "Export with static channel sizes, or give example inputs.",
    ),
    Reason.UNEQUAL_BRANCHES: Doc(
        "Branches join before (or split behind) the norm and not all of them can take its map.",
        "Put the norm on each branch.",
    ),
    Reason.DYNAMIC_PARAMETER: Doc(
        "A weight, bias or statistic is computed from an input at run time.", "Make it a constant of the model."
    ),
    Reason.OVERRIDABLE_PARAMETER: Doc(
        "The parameter is listed among the graph's inputs, so a caller may override it.",
        "Pass --freeze-initializers if nobody does.",
    ),
    Reason.TRAINING_MODE: Doc(
        "The norm is exported in training mode: it normalises by the batch, its stored statistics have no effect.",
        "Export the model again after model.eval().",
    ),
    Reason.NOT_FINITE: Doc(
        "A statistic or parameter is NaN, infinite, or variance + epsilon is not positive.",
        "Re-estimate the statistics (bnfold recalibrate), or train again from an earlier checkpoint.",
    ),
    Reason.OVERFLOW: Doc(
        "The folded weight or bias would be too large for the type it is stored in.",
        "Store the layer in float32, or rescale it.",
    ),
    Reason.UNDERFLOW: Doc(
        "A folded weight would become zero in the type it is stored in.", "Store the layer in float32, or rescale it."
    ),
    Reason.QUANTIZED_PARAMETER: Doc(
        "The weight is quantized and the map cannot be moved into its scale.", "Fold before quantizing."
    ),
    Reason.REPEATED_CHANNEL: Doc(
        "Channels are repeated between the layer and the norm, and the norm treats the copies differently.",
        "Give each copy its own layer.",
    ),
    Reason.SHARED_WEIGHT: Doc(
        "The layer's parameters serve several places and cannot be given a copy here.",
        "Untie the weights, or let bnfold edit the graph instead of the module tree.",
    ),
    Reason.BATCH_STATISTICS: Doc(
        "The norm has no running statistics: it normalises by the batch even in evaluation.",
        "Train with track_running_stats=True; such a network is unsafe to deploy at other batch sizes.",
    ),
    Reason.NO_GAIN: Doc("Folding would only replace the operation by another one of the same cost.", "Nothing to do."),
    Reason.NOT_EXECUTED: Doc(
        "Evaluation never calls the norm (an auxiliary head, an unused module).", "Remove the unused module."
    ),
    Reason.NOT_CAPTURED: Doc(
        "The part of the model around the norm cannot be captured as a graph.",
        "See the exporter's message; data-dependent control flow is the usual cause.",
    ),
    Reason.NOT_EXPRESSIBLE: Doc(
        "The fold cannot be written into the module tree, and no graph of the whole module is at hand or wanted.",
        "Leave out keep_class=True, or give example inputs: a graph edit can fold it.",
    ),
    Reason.EXCLUDED: Doc("The norm was excluded by --only or --skip.", "Change the pattern."),
    Reason.HOOKED: Doc(
        "A forward hook changes or may change the value between the layer and the norm.", "Remove the hook first."
    ),
}


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a map could not move: the reason, the node that stopped it, and a sentence with the facts."""

    reason: Reason
    at: str
    detail: str


@dataclass(frozen=True, slots=True)
class Norm:
    """A normalization that was found: its name, the operation that spells it, and its channel count (or None).

    `module` is the torch module it came from, where a file says so and `norm` does not.
    """

    norm: str
    op: str
    channels: int | None = None
    module: str | None = None


@dataclass(frozen=True, slots=True)
class Fold:
    """One map that moved: `norm` into the layers `into`, past the nodes `through`."""

    norm: str | None
    into: tuple[str, ...]
    through: tuple[str, ...]
    direction: str  # "backward", "forward", "both" (scale and shift parted ways) or "merge"
    op: str = ""


@dataclass(frozen=True, slots=True)
class Kept:
    """One normalization that stays, with at least one reason."""

    norm: str
    reasons: tuple[Refusal, ...]
    op: str = ""


@dataclass(frozen=True, slots=True)
class OutputCheck:
    """How far one output of the candidate is from the reference, relative to the range of the reference.

    `floor` is the reference's own rounding error where it was measured; `limit` is what `error` must not exceed.
    """

    name: str
    error: float
    limit: float
    floor: float | None = None
    worst_channel: int | None = None
    worst_index: tuple[int, ...] | None = None
    problem: str = ""  # NaN, Inf, shape or type differences, in words


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether the candidate computes what the reference computes, output by output."""

    passed: bool
    outputs: tuple[OutputCheck, ...]
    providers: tuple[str, ...]
    seeds: tuple[int, ...]
    first_difference: str | None = None
    notes: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return self.passed


@dataclass(frozen=True, slots=True)
class FileInfo:
    """A file read or written: `role` is "source", "output" or "candidate"; `bytes` its size."""

    role: str
    path: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Report:
    """Everything one run found and did. Every norm is in exactly one of `folded` and `kept`, where a plan was made."""

    norms: tuple[Norm, ...] = ()
    folded: tuple[Fold, ...] = ()
    kept: tuple[Kept, ...] = ()
    affine: tuple[Fold, ...] = ()  # plain constant arithmetic that folded
    findings: tuple[dict[str, Any], ...] = ()
    statistics: tuple[dict[str, Any], ...] = ()
    verdict: Verdict | None = None
    files: tuple[FileInfo, ...] = ()
    bytes_added: int = 0  # by weights that were copied because other call sites need the original
    notes: tuple[str, ...] = ()
    contents: dict[str, Any] | None = None  # of a checkpoint that was only looked into: see contents.as_plain

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data, `schema` first; what JSON has no number for is spelled "nan", "inf", "-inf"."""
        return {"schema": SCHEMA, **_plain(dataclasses.asdict(self))}

    def to_json(self, indent: int | None = 2) -> str:
        """The report as one JSON object."""
        return json.dumps(self.to_dict(), indent=indent, allow_nan=False)

    @staticmethod
    def from_json(text: str | bytes) -> Report:
        """Read a report back. Raises ValueError when the text is no report or of another schema version."""
        data = json.loads(text)
        if not isinstance(data, dict) or "schema" not in data:
            raise ValueError("not a bnfold report: the key 'schema' is missing")
        d = cast("dict[str, Any]", data)
        if d["schema"] != SCHEMA:
            raise ValueError(f"the report has schema {d['schema']}; this version reads schema {SCHEMA}")
        try:
            return _report(d)
        except (KeyError, TypeError) as e:
            raise ValueError(f"not a bnfold report of schema {SCHEMA}: {type(e).__name__}: {e}") from e

    def with_(self, **changes: Any) -> Report:
        """A copy with some fields replaced."""
        return dataclasses.replace(self, **changes)


@dataclass(frozen=True, slots=True)
class Folded:
    """A folded model, of the same kind as the argument, and the report."""

    model: Any
    report: Report = field(repr=False)


def _plain(x: Any) -> Any:
    if isinstance(x, dict):
        return {k: _plain(v) for k, v in cast("dict[str, Any]", x).items()}
    if isinstance(x, list | tuple):
        return [_plain(v) for v in cast("list[Any]", x)]
    if isinstance(x, float) and not math.isfinite(x):
        return str(x)
    return x


def _report(d: dict[str, Any]) -> Report:
    verdict = d.get("verdict")
    return Report(
        norms=tuple(Norm(**n) for n in d["norms"]),
        folded=tuple(_fold(f) for f in d["folded"]),
        kept=tuple(Kept(k["norm"], tuple(_refusal(r) for r in k["reasons"]), k["op"]) for k in d["kept"]),
        affine=tuple(_fold(f) for f in d["affine"]),
        findings=tuple(d["findings"]),
        statistics=tuple(d["statistics"]),
        verdict=None if verdict is None else _verdict(verdict),
        files=tuple(FileInfo(**f) for f in d["files"]),
        bytes_added=d["bytes_added"],
        notes=tuple(d["notes"]),
        contents=d.get("contents"),
    )


def _fold(f: dict[str, Any]) -> Fold:
    return Fold(f["norm"], tuple(f["into"]), tuple(f["through"]), f["direction"], f["op"])


def _refusal(r: dict[str, Any]) -> Refusal:
    return Refusal(Reason(r["reason"]), r["at"], r["detail"])


def _verdict(v: dict[str, Any]) -> Verdict:
    return Verdict(
        v["passed"],
        tuple(_check(o) for o in v["outputs"]),
        tuple(v["providers"]),
        tuple(v["seeds"]),
        v["first_difference"],
        tuple(v["notes"]),
    )


def _check(o: dict[str, Any]) -> OutputCheck:
    index = o["worst_index"]
    return OutputCheck(
        o["name"],
        float(o["error"]),
        float(o["limit"]),
        None if o["floor"] is None else float(o["floor"]),
        o["worst_channel"],
        None if index is None else tuple(index),
        o["problem"],
    )
