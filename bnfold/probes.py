"""Inputs that can find faults, made from seeds: noise, wide noise with an offset, impulses at borders on a constant.

Shapes are what the models declare. Where they leave sizes open, the first sizes on which the reference runs are taken.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import BnfoldError, UsageError
from .evaluators import DTYPES, Array, Batch, Dim, Evaluator, InputSpec, Outputs, is_float
from .inputs import BELOW
from .inputs import InputSpec as Wanted
from .sessions import first_line

SIZES = (64, 32, 224, 96, 128, 512)  # for the dims that a model leaves open, until it runs
BATCH = 2

Shape = Sequence[int | str | None] | Wanted  # or all that a person says of the input
Shapes = Mapping[str, Shape] | Sequence[Shape]


def given_runs(original: Evaluator, batches: Iterable[Any]) -> Iterator[tuple[Batch, Outputs]]:
    """Each batch that was given, with what the reference computes from it."""
    if isinstance(batches, Mapping) or hasattr(batches, "shape"):
        raise UsageError("batches: expected a sequence of batches, got a single one; put it into a list")
    for i, given in enumerate(batches):
        batch = given if isinstance(given, Mapping) else tuple(given) if isinstance(given, list | tuple) else (given,)
        try:
            yield batch, original.run(batch)
        except BnfoldError:
            raise
        except Exception as e:
            raise UsageError(f"the reference does not run on batch {i} ({describe(batch)}): {first_line(e)}") from e


def made_runs(
    original: Evaluator, candidate: Evaluator, shapes: Shapes | None, seeds: tuple[int, ...]
) -> Iterator[tuple[Batch, Outputs]]:
    """One batch for each seed, of the first sizes on which the reference runs."""
    specs = _specs(original, candidate, shapes)
    names = [s.name for s in specs]
    # By position unless both know the names: a parameter of `forward` and an ONNX input are often called differently.
    if original.inputs is None:
        by_name = isinstance(shapes, Mapping) and set(names) == set(shapes)
    else:
        by_name = _knows(original, names) and _knows(candidate, names)
    sizes = list(SIZES)
    for i, seed in enumerate(seeds):
        batch: Batch = ()
        error: Exception | None = None
        tried: set[tuple[tuple[int, ...], ...]] = set()
        for count, size in product((1, BATCH) if i == 1 else (BATCH, 1), tuple(sizes)):
            resolved = tuple(_resolve(specs, size, count))
            if resolved in tried:
                continue
            tried.add(resolved)
            rng = np.random.default_rng(seed)
            arrays = tuple(_values(rng, s, shape, i % 3) for s, shape in zip(specs, resolved, strict=True))
            batch = dict(zip(names, arrays, strict=True)) if by_name else arrays
            try:
                outputs = original.run(batch)
            except BnfoldError:
                raise
            except Exception as e:
                error = error or e
                continue
            sizes.sort(key=lambda s, good=size: s != good)
            yield batch, outputs
            break
        else:
            said = first_line(error) if error else "no inputs"
            raise UsageError(
                f"the reference does not run on made-up inputs, last {describe(batch)}: {said}; "
                "pass example inputs or their shapes (--input)"
            ) from error


def _knows(model: Evaluator, names: Sequence[str]) -> bool:
    return model.inputs is not None and {i.name for i in model.inputs} <= set(names)


def _specs(original: Evaluator, candidate: Evaluator, shapes: Shapes | None) -> list[InputSpec]:
    """The inputs to make: as the reference declares them, else the candidate, with `shapes` in place of theirs.

    A dim that the candidate fixes and the reference leaves open gets the candidate's size.
    """
    declared = original.inputs if original.inputs is not None else candidate.inputs
    if shapes is not None:
        specs = _with_shapes(declared, shapes, original)
    elif declared is not None:
        specs = list(declared)
    else:
        raise UsageError("the models do not say what inputs they take: pass example inputs or shapes (--input)")
    others = candidate.inputs or ()
    named = {o.name: o for o in others}
    for i, spec in enumerate(specs):
        other = named.get(spec.name) or (others[i] if len(others) == len(specs) else None)
        if other is not None and len(other.shape) == len(spec.shape):
            pairs = zip(spec.shape, other.shape, strict=True)
            specs[i] = replace(spec, shape=tuple(b if isinstance(b, int) and not _fixed(a) else a for a, b in pairs))
    return specs


def _with_shapes(declared: Sequence[InputSpec] | None, shapes: Shapes, original: Evaluator) -> list[InputSpec]:
    if declared is None:
        items = shapes.items() if isinstance(shapes, Mapping) else ((f"input{i}", s) for i, s in enumerate(shapes))
        return [_undeclared(name, shape, original.float_type) for name, shape in items]
    known = [d.name for d in declared]
    if not isinstance(shapes, Mapping):
        if len(shapes) != len(known):
            raise UsageError(f"shapes: {len(shapes)} given, the model has {len(known)} inputs ({', '.join(known)})")
        shapes = dict(zip(known, shapes, strict=True))
    if unknown := [n for n in shapes if n not in known]:
        raise UsageError(f"shapes: no input is called {', '.join(unknown)}; the model has {', '.join(known)}")
    return [_like(d, shapes.get(d.name, d.shape)) for d in declared]


def _like(spec: InputSpec, wanted: Shape) -> InputSpec:
    """The input with what a person says of it; the type that the model declares stands."""
    if not isinstance(wanted, Wanted):
        return replace(spec, shape=tuple(wanted))
    return replace(spec, shape=wanted.shape, values=wanted.values)


def _undeclared(name: str, wanted: Shape, float_type: np.dtype[Any]) -> InputSpec:
    spec = _like(InputSpec(name, float_type, ()), wanted)
    if isinstance(wanted, Wanted) and wanted.dtype != "float32":  # which a person need not have said
        return replace(spec, dtype=DTYPES.get(wanted.dtype))
    return spec


def _fixed(d: Dim) -> bool:
    return isinstance(d, int) and d >= 0


def _resolve(specs: Sequence[InputSpec], size: int, batch: int) -> Iterator[tuple[int, ...]]:
    """Sizes for all dims. A free first dim is the batch; free dims of integer sequences are an eighth of the others;
    equal symbols get equal sizes.
    """
    symbols: dict[str, int] = {}
    ordered = sorted(specs, key=_sequence, reverse=True)  # they decide what a shared symbol is
    for first in (True, False):
        for spec in ordered:
            for d in spec.shape[:1] if first else spec.shape[1:]:
                if isinstance(d, str):
                    low, high = spec.bounds.get(d, (1, 2**31))
                    symbols.setdefault(d, min(max(_free(spec, first, size, batch), low), high))
    for spec in specs:
        yield tuple(
            d if _fixed(d) else symbols[d] if isinstance(d, str) else _free(spec, axis == 0, size, batch)  # pyright: ignore[reportReturnType]
            for axis, d in enumerate(spec.shape)
        )


def _free(spec: InputSpec, first: bool, size: int, batch: int) -> int:
    if first:
        return batch
    return size // 8 if _sequence(spec) else size


def _sequence(spec: InputSpec) -> bool:
    return spec.dtype is not None and spec.dtype.kind in "iub" and len(spec.shape) < 3


def _values(rng: np.random.Generator, spec: InputSpec, shape: tuple[int, ...], kind: int) -> Array:
    if spec.dtype is None:
        raise UsageError(f"input {spec.name} is no tensor of numbers: pass example inputs")
    if not is_float(spec.dtype):
        least, most = (int(v) for v in spec.values or (0, 1 if spec.dtype == np.bool_ else BELOW - 1))
        values = rng.integers(least, min(most, 2**63 - 1), shape, endpoint=True)
    elif spec.values is not None:
        least, most = spec.values
        spread = [rng.uniform(0, 1, shape), rng.integers(0, 2, shape), (_impulses(rng, shape) + 1) / 2][kind]
        values = least + (most - least) * spread
    elif kind == 2:
        values = _impulses(rng, shape)
    else:
        noise = rng.standard_normal(shape)
        values = noise if kind == 0 else np.clip(3 * noise + 1, -10, 10)
    return np.asarray(values).astype(spec.dtype)


def _impulses(rng: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.float64]:
    """A constant for each channel, on which a wrong bias shows, and ones at the corners and the middles of the edges,
    on which a wrong border shows.
    """
    spatial = shape[2:] if len(shape) > 2 else shape[1:]
    lead = shape[: len(shape) - len(spatial)]
    values = np.broadcast_to(rng.uniform(0.25, 1.0, (*lead, *(1,) * len(spatial))), shape).copy()
    for spot in product(*((0, n // 2, n - 1) for n in spatial)):
        if any(p in (0, n - 1) for p, n in zip(spot, spatial, strict=True)):
            values[(..., *spot)] = rng.choice((-1.0, 1.0), lead)
    return values


def describe(batch: Batch) -> str:
    """The shapes of a batch, for messages."""
    named = batch.items() if isinstance(batch, Mapping) else enumerate(batch)
    sized = [f"{n}: {'x'.join(map(str, v.shape)) or 'scalar'}" for n, v in named if hasattr(v, "shape")]
    return ", ".join(sized) or "no arrays"
