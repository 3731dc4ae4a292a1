"""What planning ends in: edits that name sites, the report that describes them; and which norms were selected."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from .affine import Affine
from .errors import UsageError
from .report import Report
from .weights import NewWeights


@dataclass(frozen=True, slots=True, eq=False)
class SetLinear:
    """Give the Linear at `site` new parameters."""

    site: int
    new: NewWeights


@dataclass(frozen=True, slots=True, eq=False)
class SetScale:
    """Make the Scale at `site` compute `map`."""

    site: int
    map: Affine


@dataclass(frozen=True, slots=True)
class Bypass:
    """Take the Scale at `site` out. Backward folds keep its output's name, others ("forward", "both") its input's."""

    site: int
    direction: str


@dataclass(frozen=True, slots=True)
class Merge:
    """The Sum at `site` goes: the Linear at `base`, with its new parameters, computes it; `dropped` sites go too."""

    site: int
    base: int
    dropped: tuple[int, ...]


Edit = SetLinear | SetScale | Bypass | Merge


def _moved(edit: Edit, by: int) -> Edit:
    """The edit in a program whose sites are numbered otherwise."""
    site = edit.site + by
    if isinstance(edit, Merge):
        return Merge(site, edit.base + by, tuple(d + by for d in edit.dropped))
    return dataclasses.replace(edit, site=site)


@dataclass(frozen=True, slots=True)
class Plan:
    """Edits in the order of their sites, the report that describes them, and which scales went into which site."""

    edits: tuple[Edit, ...]
    report: Report
    taken: Mapping[int, tuple[int, ...]]

    def part(self, first: int, count: int) -> Plan:
        """The edits at `count` sites from `first` on, for a program that consists of those."""
        inside = range(first, first + count)
        edits = tuple(_moved(e, -first) for e in self.edits if e.site in inside)
        taken = {k - first: tuple(s - first for s in v) for k, v in self.taken.items() if k in inside}
        return Plan(edits, self.report, taken)

    def contributors(self, site: int) -> tuple[int, ...]:
        """The scales whose maps the site took in, directly or through a scale that moved on."""
        return self.taken.get(site, ())


@dataclass(frozen=True, slots=True)
class Selection:
    """Which norms may fold, by name patterns in shell style."""

    only: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()

    def allows(self, name: str) -> bool:
        """Whether the name is selected."""
        chosen = not self.only or any(fnmatchcase(name, p) for p in self.only)
        return chosen and not any(fnmatchcase(name, p) for p in self.skip)

    def check(self, names: Sequence[str]) -> None:
        """Raise UsageError for a pattern that matches nothing: it is a typing error more often than not."""
        for p in (*self.only, *self.skip):
            if not any(fnmatchcase(n, p) for n in names):
                near = difflib.get_close_matches(p, dict.fromkeys(names), 3, 0.4) or list(dict.fromkeys(names))[:3]
                hint = f"; the closest are {', '.join(near)}" if near else "; the model has none"
                raise UsageError(f"the pattern {p!r} matches no normalization{hint}")
