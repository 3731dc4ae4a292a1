"""Does the candidate compute what the reference computes? Both run on the same inputs; every output is compared.

An error is a distance relative to the range of the output, max |reference|, on each batch by itself: float32 noise
is 1e-6 of the range through a dozen layers and up to 4e-5 in real models, a fault of 1 % in one channel of one layer
is 7e-3 of it (less where a small gamma damps the channel: what stays below the tolerance is not found). Relative to
single elements near zero both are unbounded.

Unfused float32 is no ground truth: where a running mean cancels most of a convolution, the *original* is off by 1e-3
and the folded model is right. A torch reference therefore runs in float64 as well. With

    E0 = distance(original, float64)    the floor: rounding errors of the original itself
    E1 = distance(candidate, float64)   the error that is judged

the candidate passes when E1 <= max(tolerance, 4 E0): two roundings of one computation differ in luck, by small
factors. Where E0 is so large that float64 seems to compute something else, and where there is no float64 copy, the
candidate is compared with the original directly, at the tolerance of the coarsest type in which either computes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import zip_longest
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import BnfoldError, UsageError
from .evaluators import (
    Array,
    Batch,
    Evaluator,
    Outputs,
    evaluator,
    is_float,
    is_onnx,
)
from .probes import Shapes, describe, given_runs, made_runs
from .report import OutputCheck, Verdict
from .saturation import (
    LEAST_RANGE,
    Saturated,
    clipped,
    invertible_outputs,
    saturated_outputs,
    undone,
)
from .sessions import CPU, check_providers, first_line

TOLERANCES = {  # of the range; float32 stands between noise (4e-5) and a 1 % fault (7e-3), the others by their epsilon
    "float64": 1e-9,
    "complex128": 1e-9,
    "float32": 1e-4,
    "complex64": 1e-4,
    "float16": 2e-2,
    "bfloat16": 1e-1,
}
SEEDS = (0, 1, 2)  # of the inputs that are made
TIES = 1e-3  # share of integers and booleans that may differ: a near-tie under argmax or a threshold goes either way
# How much unluckier than the original the candidate may round. Of 1000 right folds of random nets whose scales span 12
# decades 13 were unluckier, all with floors above 1e-5; six torchvision networks with random statistics stay below
# 1.3, at floors up to 7e-7.
LUCK = 4.0
UNTRUSTED = 1e-2  # a larger floor: float64 takes another branch, or the original is mostly rounding error
CHANNEL_SLACK, CHANNEL_RANGE = 20.0, 1e-2
SMALLEST = {"float64": 2.0**-1022, "complex128": 2.0**-1022, "float16": 2.0**-14}  # normal numbers; else 2**-126


def verify(
    reference: Any,
    candidate: Any,
    batches: Iterable[Any] | None = None,
    *,
    providers: Sequence[str] = (CPU,),
    tolerance: float | None = None,
    shapes: Shapes | None = None,
    seeds: Sequence[int] | None = None,
) -> Verdict:
    """Compare two models: each an nn.Module (judged in evaluation mode, on a copy), an ExportedProgram, a ModelProto,
    its bytes, or the path of an .onnx file.

    Args:
        reference: What is right. An ONNX reference runs on the CPU, where the CPU has kernels for it.
        candidate: What is judged. An ONNX candidate runs on each provider in turn.
        batches: Inputs: tuples in positional order, dicts by name, or single arrays.
        providers: onnxruntime providers.
        tolerance: The limit for every output, in place of the one that follows from the types and from the floor.
        shapes: Shapes of the inputs, by name or in order, where the models do not declare them; a string is a free
            dim. An `inputs.InputSpec` says type and values too.
        seeds: What more inputs are made from, one batch for each: in turn noise, wide noise with an offset, and
            impulses at corners and borders on a constant; the second with batch size 1 where that is free, the others
            with 2.
            Left out, `SEEDS` without `batches` and none with them. Where batches were given too, made ones on which
            the reference does not run are left out, and a note says so.

    Floating-point outputs are judged relative to their range (see the module), and where a float64 reference is at
    hand, channel by channel too. Of an integer or boolean output, `error` is the share of elements that differ, and
    1e-3 may: near-ties under an argmax go either way, while an output of fewer than 1000 elements has to be equal. NaN
    and infinity must stand where the reference has them, infinity with the same sign. Shapes, types and the number of
    outputs must agree.

    Raises:
        UsageError: no inputs to run on, inputs that do not fit, a provider that this onnxruntime does not have.
        InvalidFileError: onnxruntime cannot load a model.

    """
    if tolerance is not None and not tolerance >= 0:  # nor NaN, which every comparison would fail
        raise UsageError(f"--tolerance {tolerance}: expected a share of an output's range, 0 or more")
    if is_onnx(reference) or is_onnx(candidate):
        check_providers(providers)
    ends = _Ends(reference, candidate)
    watch = [s.before for s in ends.saturated]
    original = _reference(reference, providers, () if ends.undo else watch)
    used = tuple(providers) if is_onnx(candidate) else ()
    candidates = [evaluator(candidate, "candidate", p, watch) for p in used] or [evaluator(candidate, "candidate")]
    seeds = tuple(seeds if seeds is not None else SEEDS if batches is None else ())
    judge = _Float64(original)
    worst: list[OutputCheck] = []
    notes: dict[str, None] = {e.note: None for e in (original, *candidates)}
    runs = itertools.chain(
        () if batches is None else given_runs(original, batches),
        _made_runs(original, candidates[0], shapes, seeds, None if batches is None else notes),
    )
    for batch, expected in runs:
        exact = judge.run(batch, expected)
        expected, exact = ends.with_before(expected), None if exact is None else ends.with_before(exact)
        for c in candidates:
            actual = ends.looked_at(_run_candidate(c, batch))
            results = (expected[: len(expected) - len(watch)], actual[: len(actual) - len(watch)])
            names = _names(*results, is_onnx(reference), is_onnx(candidate), notes)
            names += [f"{s.before} (before {s.op})" for s in ends.saturated]
            halves = original.halves | c.halves
            checks = _compare(names, expected, exact, actual, tolerance, {s.output for s in ends.saturated}, halves)
            worst = [_worse(*pair) for pair in zip_longest(worst, checks)]
            if exact is not None and any(c.floor is None and not c.problem for c in checks):
                notes["where float64 is more than 1e-2 off the reference, the reference is the judge"] = None
    if not worst:
        raise UsageError("nothing was compared: no batch, no seed, or a model that returns no tensor")
    notes[judge.note] = None
    return Verdict(
        passed=all(_passes(c) for c in worst),
        outputs=tuple(worst),
        providers=used or ((CPU,) if is_onnx(reference) else ()),
        seeds=seeds,
        notes=tuple(n for n in notes if n),
    )


class _Ends:
    """Outputs that a saturation ends, which are judged before it too.

    `undo` says that the reference is no ONNX model and does not show what went in: that is computed from its outputs.
    """

    def __init__(self, reference: Any, candidate: Any):
        self.undo = is_onnx(candidate) and not is_onnx(reference)
        self.saturated: tuple[Saturated, ...] = ()
        if self.undo:
            self.saturated = invertible_outputs(candidate)
        elif is_onnx(candidate):
            self.saturated = saturated_outputs(reference, candidate)

    def with_before(self, outputs: Outputs) -> Outputs:
        """What the reference returns, and behind it what went into its saturations."""
        if not self.undo:
            return outputs
        results = dict(enumerate(array for _, array in outputs))
        missing = np.zeros(0)  # an output that is missing differs in any case
        return [*outputs, *((s.before, undone(s, results.get(s.place, missing))) for s in self.saturated)]

    def looked_at(self, outputs: Outputs) -> Outputs:
        """What the candidate returns, of what goes into saturations as much as the reference tells."""
        if not self.undo or not self.saturated:
            return outputs
        first = len(outputs) - len(self.saturated)
        watched = [(n, clipped(s, a)) for s, (n, a) in zip(self.saturated, outputs[first:], strict=True)]
        return [*outputs[:first], *watched]


def _made_runs(
    original: Evaluator,
    candidate: Evaluator,
    shapes: Shapes | None,
    seeds: tuple[int, ...],
    notes: dict[str, None] | None,
) -> Iterator[tuple[Batch, Outputs]]:
    """Made inputs; where they are only an addition to others (`notes`), none need fit."""
    if not seeds:
        return
    try:
        yield from made_runs(original, candidate, shapes, seeds)
    except UsageError as e:
        if notes is None:
            raise
        notes[f"compared on the given inputs only: {e}"] = None


# --- running ----------------------------------------------------------------------------------------------------------


def _reference(reference: Any, providers: Sequence[str], watch: Sequence[str]) -> Evaluator:
    """The reference on the CPU; on another provider that was asked for where the CPU lacks a kernel (bfloat16)."""
    others = [p for p in providers if p != CPU]
    try:
        return evaluator(reference, "reference", watch=watch)
    except UsageError:
        if not is_onnx(reference) or not others:
            raise
        return evaluator(reference, "reference", others[0], watch)


def _run_candidate(candidate: Evaluator, batch: Batch) -> Outputs:
    try:
        return candidate.run(batch)
    except BnfoldError:
        raise
    except Exception as e:
        raise UsageError(
            f"the candidate does not run on {describe(batch)}, on which the reference runs: {first_line(e)}; "
            "if it is made for other inputs, pass them (--input)"
        ) from e


class _Float64:
    """The reference in float64, for as long as that works; `note` says what became of it."""

    def __init__(self, original: Evaluator) -> None:
        self.note = "compared with the reference in its own precision"
        self._original = original
        self._exact: Evaluator | None = None
        self._wanted = True

    def run(self, batch: Batch, expected: Outputs) -> Outputs | None:
        """What the reference computes in float64, or None."""
        if not self._wanted or all(a.dtype in (np.float64, np.complex128) for _, a in expected):
            return None
        try:
            self._exact = self._exact or self._original.in_float64()
            exact = self._exact.run(batch) if self._exact is not None else None
            problem = "" if exact is None or _same_form(exact, expected) else "its outputs have other shapes"
        except Exception as e:
            exact, problem = None, first_line(e)
        if exact is None or problem:
            self._wanted = False
            self.note += f"; in float64 it does not run: {problem}" if problem else ""
            return None
        self.note = "compared with the reference run in float64"
        return exact


def _same_form(a: Outputs, b: Outputs) -> bool:
    return [x.shape for _, x in a] == [x.shape for _, x in b]


# --- comparing --------------------------------------------------------------------------------------------------------


def _names(
    expected: Outputs, actual: Outputs, by_reference: bool, by_candidate: bool, notes: dict[str, None]
) -> list[str]:
    """A name for each output: an ONNX file's where there is one, since a module's outputs have none."""
    ours, theirs = [n for n, _ in expected], [n for n, _ in actual]
    if by_reference and by_candidate and len(ours) == len(theirs) and ours != theirs:
        notes[f"outputs are named {', '.join(theirs)} in the candidate, {', '.join(ours)} in the reference"] = None
    first, second = (theirs, ours) if by_candidate and not by_reference else (ours, theirs)
    return first + second[len(first) :]


def _compare(
    names: list[str],
    expected: Outputs,
    exact: Outputs | None,
    actual: Outputs,
    tolerance: float | None,
    saturated: Collection[str],
    halves: Collection[str],
) -> list[OutputCheck]:
    checks: list[OutputCheck] = []
    for i, name in enumerate(names):
        if i >= len(actual) or i >= len(expected):
            who = "candidate" if i >= len(actual) else "reference"
            checks.append(OutputCheck(name, math.inf, 0.0, problem=f"the {who} has no such output"))
            continue
        truth = exact[i][1] if exact is not None else None
        least = LEAST_RANGE if name in saturated else 0.0
        checks.append(_check(name, expected[i][1], truth, actual[i][1], tolerance, least, halves))
    return checks


def _check(
    name: str,
    original: Array,
    exact: Array | None,
    actual: Array,
    tolerance: float | None,
    least: float,
    halves: Collection[str],
) -> OutputCheck:
    floating = is_float(original.dtype)
    base = tolerance if tolerance is not None else TOLERANCES.get(original.dtype.name, 1e-4) if floating else TIES
    if problem := _mismatch(original, actual):
        return OutputCheck(name, math.inf, base, problem=problem)
    if not original.size:
        return OutputCheck(name, 0.0, base, None if exact is None else 0.0)
    finite = np.isfinite(original) if floating else np.ones(original.shape, bool)
    total = np.max if floating else np.mean

    floor: float | None = None
    distance = _distance(original, actual, finite, original.dtype, least)
    if exact is not None and (not floating or bool(np.isfinite(exact[finite]).all())):
        own = float(total(_distance(exact, original, finite, original.dtype, least)))
        if own <= max(UNTRUSTED, base):
            floor, distance = own, _distance(exact, actual, finite, original.dtype, least)
    if floor is None and tolerance is None and floating:  # nothing measured what 16 bits inside do to a wider output
        base = max([base, *(TOLERANCES[h] for h in halves)])
    error = float(total(distance))
    limit = base if tolerance is not None or floor is None else max(base, LUCK * floor)
    index = tuple(int(i) for i in np.unravel_index(int(np.argmax(distance)), distance.shape)) if error else None
    channel = index[1] if index is not None and len(index) > 1 else None
    problem = ""
    if floating and floor is not None and exact is not None and error <= limit:
        problem, channel, index = _check_channels(exact, finite, distance, base, floor) or ("", channel, index)
    return OutputCheck(name, error, limit, floor, channel, index, problem)


def _mismatch(original: Array, actual: Array) -> str:
    """What rules out a comparison of numbers."""
    if original.dtype != actual.dtype:
        return f"type {actual.dtype.name}, the reference has {original.dtype.name}"
    if original.shape != actual.shape:
        return f"shape {list(actual.shape)}, the reference has {list(original.shape)}"
    if not is_float(original.dtype):
        return ""
    nan = np.isnan(original) != np.isnan(actual)
    infinite = (np.isinf(original) | np.isinf(actual)) & (original != actual)
    if not (wrong := nan | infinite).any():
        return ""
    at = tuple(int(i) for i in np.argwhere(wrong)[0])
    return f"{actual[at]} at {list(at)}, the reference has {original[at]} ({int(wrong.sum())} of {wrong.size} such)"


def _distance(
    truth: Array, value: Array, finite: NDArray[np.bool_], dtype: np.dtype[Any], least: float
) -> NDArray[np.float64]:
    """Element by element: |value - truth| relative to the range of the truth (`least` or more); 0 or 1 for integers.

    An output that is zero throughout (or below the smallest normal number of its type) is judged absolutely.
    """
    if not is_float(dtype):
        return (truth != value).astype(np.float64)
    t, v = _wide(truth, finite), _wide(value, finite)
    with np.errstate(over="ignore"):
        return np.abs(v - t) / max(_range(t, dtype), least)


def _range(truth: Array, dtype: np.dtype[Any]) -> float:
    largest = float(np.abs(truth).max())
    return largest if largest >= SMALLEST.get(dtype.name, 2.0**-126) else 1.0


def _wide(values: Array, finite: NDArray[np.bool_]) -> Array:
    """In float64, with zeros where the original is not finite (and the candidate therefore neither)."""
    return np.where(finite, values.astype(np.complex128 if values.dtype.kind == "c" else np.float64), 0.0)


def _check_channels(
    exact: Array, finite: NDArray[np.bool_], distance: NDArray[np.float64], base: float, floor: float
) -> tuple[str, int, tuple[int, ...]] | None:
    """A fault that hides in a channel of small range, or None. Channels lie along axis 1.

    A channel's own limit is 20 tolerances of its own range, taken as 1 % of the output's at least: 2e-5 of the output's
    range in float32, above the noise of a well-conditioned network (1.4e-6). Where noise leaks from large channels
    into small ones by cancellation, float64 has measured it: four floors always pass.
    """
    if exact.ndim < 2 or exact.shape[1] < 2:
        return None
    others = tuple(a for a in range(exact.ndim) if a != 1)
    size = np.abs(_wide(exact, finite))
    relative = np.maximum(size.max(axis=others) / (size.max() or 1.0), CHANNEL_RANGE)
    limits = np.maximum(CHANNEL_SLACK * base * relative, LUCK * floor)
    errors = distance.max(axis=others)
    c = int(np.argmax(errors / np.maximum(limits, 1e-300)))
    if errors[c] <= limits[c]:
        return None
    inside = distance[:, c]
    at = [int(i) for i in np.unravel_index(int(np.argmax(inside)), inside.shape)]
    text = f"channel {c}, of small range, is off by {errors[c]:.1e}; for a channel like it {limits[c]:.1e} may be"
    return text, c, (at[0], c, *at[1:])


def _passes(check: OutputCheck) -> bool:
    return not check.problem and check.error <= check.limit


def _worse(a: OutputCheck | None, b: OutputCheck | None) -> OutputCheck:
    """The check that says more against the candidate."""

    def badness(c: OutputCheck | None) -> tuple[bool, bool, float]:
        return (False, False, -1.0) if c is None else (bool(c.problem), not _passes(c), c.error / max(c.limit, 1e-300))

    worse = b if badness(b) > badness(a) else a
    assert worse is not None  # one of the two batches had this output
    return worse
