"""What a mutant is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """One change of one file below `bnfold/`: a text that occurs once, and what stands there instead."""

    name: str  # what is broken
    file: str
    text: str
    instead: str

    def applied(self, source: str) -> str | None:
        """The source with the text replaced; None where it does not occur exactly once."""
        return source.replace(self.text, self.instead) if source.count(self.text) == 1 else None
