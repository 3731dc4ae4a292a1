"""`fold` and `plan`: the engine behind one call, for every kind of model."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from .errors import BrokenStatisticsError
from .folding import make_plan
from .graphs.port import Graph, open_graph
from .planning import Plan, Selection
from .report import Folded, Refusal, Report


def fold(
    model: Any,
    example_inputs: Any = None,
    *,
    only: str | Iterable[str] | None = None,
    skip: str | Iterable[str] | None = None,
    merge: bool = True,
    freeze_initializers: bool = False,
    respect_inputs: bool = False,
    keep_broken: bool = False,
    keep_class: bool = False,
) -> Folded:
    """Fold every normalization that is a fixed affine map into its neighbours. The argument is not changed.

    Args:
        model: An onnx.ModelProto, a path to one, an nn.Module (fx GraphModule included) or an ExportedProgram.
        example_inputs: For a module: a tuple of positional inputs (or one tensor, or a dict of keywords), as
            `torch.export` takes them. Batch 2 or more keeps the batch dimension free; a batch of 1 is doubled. Without
            them, inputs are inferred; where none fits, the module's fx trace is folded as far as that goes without
            shapes.
        only: Shell-style name patterns; other norms are kept with reason `excluded`.
        skip: Patterns of norms to keep.
        merge: Whether parallel branches may become one convolution.
        freeze_initializers: Treat ONNX initializers that are also graph inputs as constants.
        respect_inputs: Never do so, not even where an old exporter listed every initializer.
        keep_broken: Keep norms with broken statistics (reason `not-finite`) instead of raising.
        keep_class: For a module: allow only what its module tree can express, so that its class stays.

    Returns:
        The folded model, of the kind that was given (a module folded by a graph edit is a GraphModule), in eval
        mode, and the report.

    Raises:
        BrokenStatisticsError: a norm has NaN or infinite statistics, or variance + epsilon is not positive.
        UsageError: a pattern matches nothing, example inputs are missing or do not fit, or the kind is unknown.

    A module that torch.export cannot capture is folded inside the children that can be; norms outside them are kept
    with reason `not-captured` and the exporter's first line.
    """
    graph = open_graph(
        model, example_inputs, freeze_initializers=freeze_initializers, respect_inputs=respect_inputs,
        keep_class=keep_class,
    )  # fmt: skip
    plan_ = planned(graph, only=only, skip=skip, merge=merge, keep_broken=keep_broken)
    folded, added = graph.apply(plan_)
    return Folded(folded, plan_.report.with_(bytes_added=added))


def plan(
    model: Any,
    example_inputs: Any = None,
    *,
    only: str | Iterable[str] | None = None,
    skip: str | Iterable[str] | None = None,
    merge: bool = True,
    freeze_initializers: bool = False,
    respect_inputs: bool = False,
    keep_class: bool = False,
) -> Report:
    """What `fold` would do with the same arguments: a dry run that changes nothing and accepts broken statistics."""
    graph = open_graph(
        model, example_inputs, freeze_initializers=freeze_initializers, respect_inputs=respect_inputs,
        keep_class=keep_class, dry=True,
    )  # fmt: skip
    return planned(graph, only=only, skip=skip, merge=merge, keep_broken=True).report


def planned(
    graph: Graph,
    *,
    only: str | Iterable[str] | None = None,
    skip: str | Iterable[str] | None = None,
    merge: bool = True,
    keep_broken: bool = False,
) -> Plan:
    """The plan for an opened graph, made again until the graph objects to none of its folds."""
    program = graph.lift()
    if program.broken and not keep_broken:
        raise BrokenStatisticsError(
            f"broken statistics: {'; '.join(program.broken)}. Re-estimate them, or pass keep_broken=True "
            "(--keep-broken) to leave these norms as they are"
        )
    selection = Selection(_patterns(only), _patterns(skip))
    refused: dict[int, Refusal] = {}
    while True:
        plan_ = make_plan(program, selection, refused, merge)
        objections = graph.objections(plan_)
        if not objections:
            return dataclasses.replace(plan_, report=plan_.report.with_(notes=graph.notes))
        refused.update(objections)


def _patterns(given: str | Iterable[str] | None) -> tuple[str, ...]:
    if given is None:
        return ()
    return (given,) if isinstance(given, str) else tuple(given)
