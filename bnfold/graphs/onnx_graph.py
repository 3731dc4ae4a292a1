"""An ONNX model behind the engine's port: lifted to a Program, edited in place on a copy of its ModelProto.

Nothing makes a round trip through another representation, so what is not edited cannot be lost.
"""

from __future__ import annotations

from collections.abc import Mapping

from onnx import ModelProto

from ..onnx_files import OnnxFile
from ..ops import Program
from ..planning import Plan
from ..report import Refusal
from .onnx_data import Aside, NoDraft, Rewriting, Stretch, stretches
from .onnx_index import Index
from .onnx_lift import Lifted, lift
from .onnx_scopes import read_scopes
from .onnx_writer import Writer
from .sites import carry_out


class OnnxGraph:
    """`lift()` describes the model, `apply(plan)` returns an edited copy. A ModelProto given is never changed.

    A model on disk (OnnxFile) was read for this graph alone, so that its proto is the one that is edited. Its external
    data is read as far as it is asked for, and rewritten as `rewriting` says; without it, only a dry run is possible.
    """

    def __init__(
        self,
        source: ModelProto | OnnxFile,
        *,
        freeze_initializers: bool = False,
        respect_inputs: bool = False,
        rewriting: Rewriting | Aside | None = None,
    ):
        if isinstance(source, OnnxFile):
            self._model = source.model
        else:
            self._model = ModelProto()
            self._model.CopyFrom(source)
        overridable, self._listed, self.notes = _overridable(self._model, freeze_initializers, respect_inputs)
        scopes = read_scopes(self._model)
        stored: dict[int, Stretch] = {}
        if isinstance(source, OnnxFile) and (source.external or source.stored):
            index = Index(self._model, scopes)
            room = rewriting.draft if isinstance(rewriting, Rewriting) else NoDraft.instead
            stored = stretches(source, lambda name: index.readers(scopes[0], name) == 1, room)
        self._rewriting = rewriting
        self._lifted: Lifted = lift(scopes, overridable, stored)

    def lift(self) -> Program:
        """The model as records."""
        return self._lifted.program

    def objections(self, plan: Plan) -> Mapping[int, Refusal]:
        """None: every plan can be written into the file."""
        return {}

    def apply(self, plan: Plan) -> tuple[ModelProto, int]:
        """The edited model, and the bytes added by weights whose original other nodes still need."""
        writer = Writer(self._model, self._lifted, self._listed, self._rewriting)
        carry_out(plan, self._lifted.program, self._lifted.sites, writer)
        added = writer.finish()
        if self._rewriting is not None:
            self._rewriting.finish(self._model)
        return self._model, added


def _overridable(
    model: ModelProto, freeze: bool, respect: bool
) -> tuple[frozenset[str], frozenset[str], tuple[str, ...]]:
    """Initializers a caller may override, those listed as inputs without meaning it, and what to say about them.

    From IR 4 on an initializer that is also a graph input can be overridden. Old exporters list *every* initializer
    without meaning it; onnxruntime then folds nothing. So: all listed, or IR 3: constants; only some: an interface.
    """
    inputs = {i.name for i in model.graph.input}
    initializers = {t.name for t in model.graph.initializer}
    listed = inputs & initializers
    if not listed:
        return frozenset(), frozenset(), ()
    if respect:
        return frozenset(listed), frozenset(), ()
    if freeze:
        return frozenset(), frozenset(listed), ("initializers that are also graph inputs were frozen, as asked",)
    if listed == initializers or model.ir_version < 4:
        note = "every initializer is listed as a graph input (an old exporter's habit): taken as constants"
        return frozenset(), frozenset(listed), (note,)
    return frozenset(listed), frozenset(), ()
