"""Which of the networks and state dicts in a checkpoint to take, and what their keys are called without wrappers.

Works on what torch loaded and on what `contents` read without torch: how a tensor and a network look is the caller's.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .errors import some_of

# Where training scripts put the weights, best first, and what wrappers put in front of every key.
WRAPPERS = ("state_dict", "model_state_dict", "model_state", "model", "net", "network", "module", "params", "weights")
PREFIXES = ("module.", "_orig_mod.", "model.", "net.", "network.", "backbone.")
EMA = re.compile(r"(^|_)(ema|swa|averaged)(_|$)")
DEEPEST = 2  # keys above a set of weights


class NotChosenError(ValueError):
    """The checkpoint does not hold the weights that were asked for, or leaves open which; the text says so."""


@dataclass(frozen=True, slots=True)
class Weights:
    """A network or a state dict in a checkpoint, and the keys that lead to it."""

    where: tuple[str, ...]
    value: Any

    @property
    def path(self) -> str:
        """The keys as `--key` takes them: "model.state_dict", "" at the top."""
        return ".".join(self.where)

    @property
    def is_averaged(self) -> bool:
        """Whether it goes by a name that averages of weights go by."""
        return any(map(EMA.search, self.where))

    @property
    def is_known(self) -> bool:
        """Whether all its keys are ones that training scripts use for weights."""
        return all(k in WRAPPERS or EMA.search(k) for k in self.where)


@dataclass(frozen=True, slots=True)
class Looks:
    """How to tell what a value is."""

    is_tensor: Callable[[Any], bool]
    is_network: Callable[[Any], bool]


def sets_of_weights(value: Any, looks: Looks, where: tuple[str, ...] = ()) -> Iterator[Weights]:
    """Networks and state dicts at the top or up to two keys below it, those under well-known keys first."""
    if looks.is_network(value):
        yield Weights(where, value)
    elif isinstance(value, Mapping) and all(isinstance(k, str) for k in value):
        inner = list[Weights]()
        if len(where) < DEEPEST:
            parts = [(k, v) for k, v in value.items() if isinstance(v, Mapping) or looks.is_network(v)]
            for key, part in sorted(parts, key=lambda kv: _rank(kv[0])):
                inner += sets_of_weights(part, looks, (*where, key))
        if not inner and any(map(looks.is_tensor, value.values())):
            inner = [Weights(where, value)]
        yield from inner


def _rank(key: str) -> int:
    return WRAPPERS.index(key) if key in WRAPPERS else len(WRAPPERS)


def choose(found: Iterable[Weights], key: str | None = None, *, ema: bool = False) -> tuple[Weights, list[str]]:
    """The set to use, and notes on what was decided: the one called `key`, else the raw one before an average.

    With `ema` the average is taken. Raises NotChosenError.
    """
    found = list(found)
    if key is not None:
        chosen = next((f for f in found if f.path == key), None)
        if chosen is None:
            close = difflib.get_close_matches(key, [f.path for f in found], 1)
            hint = f"did you mean '{close[0]}'?" if close else f"it holds {some_of(_paths(found))}"
            raise NotChosenError(f"no weights under the key '{key}'; {hint}")
        return chosen, [f"weights taken from '{key}'"] if key else []
    known = [f for f in found if f.is_known]
    averaged = [f for f in known if f.is_averaged]
    raw = [f for f in known if not f.is_averaged]
    if ema and not averaged:
        inside = next((f for f in raw if isinstance(f.value, Mapping) and any(map(_is_average, stacks(f.value)))), None)
        if inside is None:
            raise NotChosenError(f"no averaged weights (ema); it holds {some_of(_paths(found))}; leave out --ema")
        return inside, [f"weights taken from '{inside.path}'"] if inside.where else []
    if ema:
        notes = [f"the raw copy under '{raw[0].path}' is not used"] if raw else []
        return averaged[0], [f"averaged weights taken from '{averaged[0].path}'", *notes]
    if not known and len(found) > 1:
        raise NotChosenError(f"several sets of weights ({some_of(_paths(found))}); name one with --key")
    chosen = (raw or averaged or found)[0]
    notes = [f"weights taken from '{chosen.path}'"] if chosen.where else []
    if raw and averaged:
        notes.append(f"the averaged copy under '{averaged[0].path}' is not used (--ema takes it)")
    return chosen, notes


@dataclass(frozen=True, slots=True)
class Prefix:
    """What stands in front of the `keys` to use; `unused` are keys of another copy, `strange` those of neither."""

    text: str
    keys: tuple[str, ...]
    unused: tuple[str, ...]
    strange: tuple[str, ...]


def prefix_of(keys: Iterable[str], wanted: Iterable[str], *, ema: bool = False) -> Prefix:
    """The stack of wrapper prefixes without which the most keys are wanted ones; the raw copy's before an average's."""
    keys, wanted = list(keys), set(wanted)

    def worth(stack: str) -> tuple[bool, int, bool]:
        right = _is_average(stack) == ema
        return right or not ema, sum(k.removeprefix(stack) in wanted for k in keys if k.startswith(stack)), right

    found = stacks(keys)
    best = max(found, key=worth)
    other = [s for s in found if s and not best.startswith(s)]
    mine, unused, strange = list[str](), list[str](), list[str]()
    for key in keys:
        below = [s for s in other if key.startswith(s)]
        if key.startswith(best) and (key.removeprefix(best) in wanted or not below):
            mine.append(key)
        elif any(_is_average(s) or key.removeprefix(s) in wanted for s in below):
            unused.append(key)
        else:
            strange.append(key)
    return Prefix(best, tuple(mine), tuple(unused), tuple(strange))


def stacks(keys: Iterable[str]) -> list[str]:
    """All stacks of prefixes that wrappers and averages put in front of keys: "" and, say, "model.", "model_ema."."""
    found = {"": None}
    for key in keys:
        stack = ""
        while (dot := key.find(".", len(stack))) > 0 and _wraps(part := key[len(stack) : dot + 1]):
            stack += part
            found[stack] = None
    return list(found)


def _wraps(part: str) -> bool:
    return part in PREFIXES or bool(EMA.search(part[:-1]))


def _is_average(stack: str) -> bool:
    return any(EMA.search(part) for part in stack.split("."))


def _paths(found: Iterable[Weights]) -> list[str]:
    return [f"'{f.path}'" if f.where else "weights without a key" for f in found] or ["no weights"]
