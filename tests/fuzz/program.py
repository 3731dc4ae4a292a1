"""A network as data: a list of named steps, each reading values by name. It is drawn, built, judged, shrunk, printed.

A step's name is its kind and a number that no other step of the program has (`conv3`); its result has the step's name,
several results have `_0`, `_1` … behind it. Arrays are drawn from generators seeded by these names, so that taking a
step out changes no array of another one. Every option has a default, so that an option can be left out.
"""

from __future__ import annotations

import dataclasses
import random
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol


class UnfitError(Exception):
    """The step does not go with the shapes of what it reads."""


@dataclass(frozen=True)
class Step:
    """One operation; `options` are plain data."""

    name: str
    reads: tuple[str, ...]
    options: Mapping[str, Any]

    @property
    def kind(self) -> str:
        """The name without its number."""
        return kind_of(self.name)

    def get(self, key: str, default: Any = None) -> Any:
        """An option, or its default."""
        return self.options.get(key, default)

    def __repr__(self) -> str:
        return f"Step({self.name!r}, {self.reads!r}, {dict(self.options)!r})"


@dataclass(frozen=True)
class Program:
    """A network on one input `x` of the given shape; `settings` say how it is written down."""

    shape: tuple[int, ...]
    steps: tuple[Step, ...]
    outputs: tuple[str, ...]
    settings: Mapping[str, Any]

    def __str__(self) -> str:
        steps = "".join(f"\n        {s!r}," for s in self.steps)
        settings = dict(self.settings)
        return f"Program(\n    {self.shape!r},\n    ({steps}\n    ),\n    {self.outputs!r},\n    {settings!r},\n)"


def kind_of(name: str) -> str:
    """`max_pool12_1`, `max_pool12.1`, `parts.max_pool12#2` -> `max_pool`: the kind of step it belongs to."""
    return re.split(r"[.#]", name.removeprefix("parts."))[0].rstrip("0123456789_")


class Builder(Protocol):
    """What turns steps into a network, one at a time, and knows the shapes of all values."""

    shapes: dict[str, tuple[int, ...]]

    def add(self, step: Step) -> list[str]:
        """Append the step; the names of its results. Raises UnfitError and changes nothing when it does not fit."""
        ...


class Drawing:
    """A program being drawn. `emit` tries a step and forgets it when it does not fit."""

    def __init__(self, r: random.Random, builder: Builder, table: Mapping[str, Callable[[Drawing, str], Any]]):
        self.r, self.builder, self.table = r, builder, table
        self.steps: list[Step] = []
        self.values = ["x"]

    def emit(self, kind: str, *reads: str, **options: Any) -> str:
        """The first result of a new step, or its first operand when the step does not fit."""
        return self.emit_all(kind, *reads, **options)[0]

    def emit_all(self, kind: str, *reads: str, **options: Any) -> list[str]:
        """All results of a new step."""
        step = Step(f"{kind}{len(self.steps)}", reads, {k: v for k, v in options.items() if v is not None})
        try:
            found = self.builder.add(step)
        except UnfitError:
            return [reads[0]]
        self.steps.append(step)
        self.values += found
        return found

    def shape(self, value: str) -> tuple[int, ...]:
        """The shape a value has in the program as it is drawn."""
        return self.builder.shapes[value]

    def recent(self) -> str:
        """The last value, or one of those before it."""
        return self.values[-1] if self.chance(0.6) else self.r.choice(self.values[-4:])

    def chance(self, p: float) -> bool:
        """Whether something of that probability happens."""
        return self.r.random() < p

    def grow(self, kinds: Mapping[str, float], count: int) -> None:
        """So many steps or motifs, drawn by weight."""
        names, weights = list(kinds), list(kinds.values())
        for name in self.r.choices(names, weights, k=count):
            self.table[name](self, self.recent())

    def finish(self, shape: tuple[int, ...], settings: Mapping[str, Any]) -> Program:
        """The program. Its outputs: the last value, as a rule all that nothing reads, now and then any other."""
        outputs = [self.values[-1]]
        if self.chance(0.15):
            outputs.append(self.r.choice(self.values[1:]))
        if self.chance(0.8):
            read = {v for s in self.steps for v in s.reads}
            outputs += [v for v in self.values if v not in read]
        return Program(shape, tuple(self.steps), tuple(dict.fromkeys(outputs)), settings)


# ---------------------------------------------------------------------- judging and shrinking


@dataclass(frozen=True)
class Failure:
    """What is wrong with a fold: a category that shrinking preserves, and the facts."""

    what: str
    detail: str


Judge = Callable[[Program], "Failure | None"]


def shrunk(program: Program, judge: Judge, seconds: float = 60.0) -> tuple[Program, Failure]:
    """The smallest program found that fails as this one does.

    Delta debugging, one change at a time: whole tails and single steps are taken out (their readers read what they
    read), options and settings are left out, outputs and dimensions made fewer, until nothing helps or time is up.
    """
    failure = judge(program)
    assert failure is not None, "only a program that fails can be shrunk"
    end, progress = time.monotonic() + seconds, True
    while progress:
        progress = False
        for candidate in _smaller(program):
            if time.monotonic() > end:
                return program, failure
            found = _tried(judge, candidate)
            if found is not None and found.what == failure.what:
                program, failure, progress = candidate, found, True
                break
    return program, failure


def _tried(judge: Judge, program: Program) -> Failure | None:
    try:
        return judge(program)
    except UnfitError:
        return None


def _smaller(p: Program) -> Iterator[Program]:
    if len(p.outputs) > 1:
        yield from (dataclasses.replace(p, outputs=(o,)) for o in p.outputs)
    used = _reached(p)
    if len(used) < len(p.steps):
        yield dataclasses.replace(p, steps=used)
    for k in reversed(range(len(p.steps))):
        for stand_in in dict.fromkeys(p.steps[k].reads):
            yield _without(p, k, stand_in)
    for k, step in enumerate(p.steps):
        for key in step.options:
            fewer = {a: v for a, v in step.options.items() if a != key}
            steps = (*p.steps[:k], dataclasses.replace(step, options=fewer), *p.steps[k + 1 :])
            yield dataclasses.replace(p, steps=steps)
        if len(step.reads) > 1:
            for j in range(len(step.reads)):
                reads = step.reads[:j] + step.reads[j + 1 :]
                steps = (*p.steps[:k], dataclasses.replace(step, reads=reads), *p.steps[k + 1 :])
                yield dataclasses.replace(p, steps=steps)
    for key in p.settings:
        yield dataclasses.replace(p, settings={a: v for a, v in p.settings.items() if a != key})
    for axis, size in enumerate(p.shape):
        if size > 1:
            yield dataclasses.replace(p, shape=(*p.shape[:axis], size - 1, *p.shape[axis + 1 :]))


def _reached(p: Program) -> tuple[Step, ...]:
    """The steps that the outputs depend on."""
    needed, kept = set(p.outputs), []
    for s in reversed(p.steps):
        if any(v == s.name or v.rpartition("_")[0] == s.name for v in needed):
            kept.append(s)
            needed.update(s.reads)
    return tuple(reversed(kept))


def _without(p: Program, k: int, stand_in: str) -> Program:
    """The program without its k-th step, whose readers read `stand_in`."""
    gone = p.steps[k].name

    def renamed(value: str) -> str:
        return stand_in if value == gone or value.rpartition("_")[0] == gone else value

    steps = [dataclasses.replace(s, reads=tuple(map(renamed, s.reads))) for s in (*p.steps[:k], *p.steps[k + 1 :])]
    outputs = tuple(dict.fromkeys(map(renamed, p.outputs)))
    return dataclasses.replace(p, steps=tuple(steps), outputs=outputs)
