"""What folding did to a module's tree, so that somebody's own class can be made to fit the folded weights."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import InvalidFileError, UsageError

if TYPE_CHECKING:
    from torch import nn

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Note:
    """Changes of a module tree, by the paths of its modules.

    `replaced` are the modules that held a norm, with the names of the children that stay of each (none: it became an
    Identity); `biases` the layers that had no bias and have one now.
    """

    replaced: Mapping[str, tuple[str, ...]]
    biases: tuple[str, ...]

    def to_json(self) -> str:
        """The note as one JSON object."""
        replaced = {path: list(names) for path, names in self.replaced.items()}
        return json.dumps({"schema": SCHEMA, "replaced": replaced, "biases": list(self.biases)}, indent=2) + "\n"

    @staticmethod
    def from_json(text: str | bytes) -> Note:
        """Read a note back. Raises ValueError when the text is none."""
        data = json.loads(text)
        if not isinstance(data, dict) or data.get("schema") != SCHEMA:
            raise ValueError(f"not a note of bnfold of schema {SCHEMA}")
        try:
            return Note({str(k): tuple(v) for k, v in data["replaced"].items()}, tuple(data["biases"]))
        except (KeyError, TypeError, AttributeError) as e:
            raise ValueError(f"not a note of bnfold: {type(e).__name__}: {e}") from e

    @staticmethod
    def joined(parts: Iterable[tuple[str, Note]]) -> Note:
        """The notes of children as one of the module that holds them at the paths."""
        parts = list(parts)
        replaced = {f"{path}.{name}": left for path, note in parts for name, left in note.replaced.items()}
        return Note(replaced, tuple(f"{path}.{name}" for path, note in parts for name in note.biases))


def apply_note(module: nn.Module, note: Note | str | os.PathLike[str]) -> nn.Module:
    """Make a module of the original class take the state dict of its folded twin; it is changed, and returned.

        net = bnfold.apply_note(Net(), "folded.pt.json")
        net.load_state_dict(torch.load("folded.pt", weights_only=True))

    `note` may be the path of the file that `bnfold fold` wrote beside the checkpoint. Added biases are zero. Raises
    InvalidFileError when that file is no note, UsageError when the note is not of such a module.
    """
    import torch
    from torch import nn

    from .graphs.torch_tree import replace_module, stand_in

    if not isinstance(note, Note):
        try:
            note = Note.from_json(Path(note).read_bytes())
        except (OSError, ValueError) as e:
            raise InvalidFileError(f"{note}: {e}") from None
    modules: dict[str, Any] = dict(module.named_modules(remove_duplicate=False))
    strange = [p for p in (*note.replaced, *note.biases) if p not in modules]
    if strange:
        raise UsageError(f"the note is not of a {type(module).__name__}: it has no module {strange[0]!r}")
    for path in note.biases:
        layer = modules[path]
        weight = layer.weight
        channels = getattr(layer, "out_channels", None) or weight.shape[0]
        layer.bias = nn.Parameter(weight.new_zeros(channels), requires_grad=weight.requires_grad)
    with torch.no_grad():
        for path, names in note.replaced.items():
            replace_module(modules, modules[path], stand_in(modules[path], names))
    return module
