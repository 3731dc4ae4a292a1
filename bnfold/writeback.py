"""A folded network goes back into a checkpoint of the kind it came from: other weights, everything else as it was.

The same wrapper, the same keys and prefixes, each entry that folding does not change the stored one. What changes is
the network's weights: those of layers are folded, norms lose their entries, layers that need a bias gain one. Only what
the module's own tree can express is folded, and a note beside a file of weights says how the class has to be changed
for them (`notes.apply_note`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from .checkpoint import Origin, load_detailed
from .errors import UsageError
from .exporter import judged
from .files import check_output, staged
from .inputs import inputs_for, trials_for
from .notes import Note
from .recognition import Reading
from .report import FileInfo, Report
from .transform import planned

FOLDABLE = ("state-dict", "module")


def fold_checkpoint(
    source: Path,
    target: Path,
    reading: Reading,
    example_inputs: Any,
    selection: Mapping[str, Any],
    checks: Mapping[str, Any],
    *,
    force: bool = False,
    in_place: bool = False,
) -> Report:
    """Fold the network in a checkpoint and write the checkpoint again; raises as `export` does.

    Whether the target may be written has been checked.

    The target's suffix decides on safetensors; otherwise its kind is that of the source. `selection` and `checks` are
    those of `exporter.judged` and `transform.planned`.
    """
    from .graphs.torch_open import open_torch

    note_file = note_path(target)
    check_output(note_file, None, force=force or in_place, in_place=False)
    step = checks["progress"] or (lambda _: None)
    step(f"loading {source.name}")
    loaded = load_detailed(source, reading)
    origin = loaded.origin
    if loaded.kind not in FOLDABLE or origin is None:
        raise UsageError(f"{source} holds a {loaded.kind}, which is not written back: `bnfold export` makes it ONNX")
    safe = _is_safetensors(target, origin)
    if safe and loaded.kind == "module":
        raise UsageError(f"{source} holds a network, and safetensors only weights: pass -o with another ending")
    if origin.kind == "sharded" and not safe:
        raise UsageError(f"{source} is in several files: pass -o with a .safetensors ending, which is written as one")
    network, bare = loaded.model, loaded.kind == "state-dict"
    if bare:
        network.eval()  # its training flag is the factory's, not a fact about the checkpoint
    given = inputs_for(network, example_inputs)
    step("folding")
    graph: Any = open_torch(network, given.inputs, keep_class=True)
    plan = planned(graph, **selection)
    note: Note = graph.note(plan)
    before = dict(network.state_dict())
    folded, added = graph.apply(plan)
    report = plan.report.with_(bytes_added=added, notes=(*loaded.notes, *given.notes, *plan.report.notes))
    trials = replace(trials_for(network, example_inputs, given.inputs), batches=(given.inputs,))
    report = judged(network, folded, report, target, {**checks, "trials": trials})
    size = source.stat().st_size
    step("writing")
    with ExitStack() as placed:
        temporary = placed.enter_context(staged(target))
        if bare:
            weights = rewritten(origin, before, folded.state_dict(), note)
            _write_weights(origin, weights, temporary, as_safetensors=safe)
            placed.enter_context(staged(note_file)).write_text(note.to_json())
        else:
            _write_torch(origin, _with_inner(origin, folded), temporary)
    files = FileInfo("source", str(source), size), FileInfo("output", str(target), target.stat().st_size)
    notes = (*report.notes, f"{note_file.name} says how the class changes: bnfold.apply_note") if bare else report.notes
    return report.with_(files=files, notes=notes)


def note_path(target: Path) -> Path:
    """Where the note of a file of folded weights is."""
    return target.with_name(f"{target.name}.json")


def rewritten(origin: Origin, before: Mapping[str, Any], after: Mapping[str, Any], note: Note) -> dict[str, Any]:
    """The stored weights with those of the folded network in their places.

    `before` and `after` are state dicts of the network, unfolded and folded. A stored tensor that folding does not
    change is kept as the object it is; one that changes takes the stored type.
    """
    import torch

    old = origin.weights
    new: dict[str, Any] = OrderedDict() if isinstance(old, OrderedDict) else {}
    added = [k for k in after if k not in before]
    for key, value in old.items():
        name = key.removeprefix(origin.prefix) if key in origin.keys else None
        if name is None or name not in before:
            new[key] = value
        elif name in after:
            same = not isinstance(value, torch.Tensor) or torch.equal(after[name], before[name])
            new[key] = value if same else after[name].to(value.dtype)
        layer, _, leaf = (name or "").rpartition(".")
        bias = f"{layer}.bias".lstrip(".")
        if leaf == "weight" and layer in note.biases and bias in added:
            new[origin.prefix + bias] = after[bias].to(value.dtype)
            added.remove(bias)
    for name in added:  # of children that take their parent's place
        new[origin.prefix + name] = after[name]
    if (versions := getattr(old, "_metadata", None)) is not None and isinstance(new, OrderedDict):
        gone = {f"{origin.prefix}{path}" for path, left in note.replaced.items() if not left}
        vars(new)["_metadata"] = OrderedDict((k, v) for k, v in versions.items() if k not in gone)
    return new


# ---------------------------------------------------------------------- files


def _is_safetensors(target: Path, origin: Origin) -> bool:
    suffix = target.suffix.lower()
    return suffix == ".safetensors" or (origin.kind == "safetensors" and suffix not in (".pt", ".pth", ".bin"))


def _write_weights(origin: Origin, weights: dict[str, Any], path: Path, *, as_safetensors: bool) -> None:
    if not as_safetensors:
        _write_torch(origin, _with_inner(origin, weights), path)
        return
    import torch
    from safetensors.torch import save_file

    tensors = {k: v.detach().contiguous() for k, v in weights.items() if isinstance(v, torch.Tensor)}
    places = [(t.untyped_storage().data_ptr(), t.storage_offset()) for t in tensors.values()]
    if len(set(places)) < len(places):  # the format does not allow tensors to share memory
        tensors = {k: v.clone() for k, v in tensors.items()}
    save_file(tensors, path, metadata=dict(origin.metadata) or None)


def _write_torch(origin: Origin, value: Any, path: Path) -> None:
    import torch

    torch.save(value, path, _use_new_zipfile_serialization=not origin.is_legacy)


def _with_inner(origin: Origin, value: Any) -> Any:
    """The checkpoint with another value where the weights were."""
    if origin.wrapper is not None:
        setattr(origin.wrapper[0], origin.wrapper[1], value)
        value = origin.wrapper[0]
    if not origin.where:
        return value
    holder = origin.stored
    for key in origin.where[:-1]:
        holder = holder[key]
    holder[origin.where[-1]] = value
    return origin.stored
