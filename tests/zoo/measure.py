"""Fold one architecture and judge the result by what torch itself computes, in float64, element by element."""

from __future__ import annotations

import copy
import hashlib
import resource
import sys
import time
import traceback
from collections import Counter
from typing import Any

import torch
from architectures import Architecture, first_line, norms_of
from networks import Ready, ready
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import bnfold

# Of an output's range. A fold rounds each weight once more and sums in another order: float64 leaves 1e-16 of that at
# a layer, most networks 1e-14 at the end. Deep ones, with channels that hardly vary in front of a norm that magnifies
# them, magnify their rounding as well. How much is measured, where it matters: a network whose parameters all change
# in the last bit moves by its floor; a fold may move it by LUCK floors, for it makes other errors of that size (up to
# 5 floors were seen). No floor excuses more than MOST: a network that is that sensitive cannot be judged, and fails.
LIMITS = {torch.float64: 1e-11, torch.float32: 3e-5}
LUCK = 30
MOST = {torch.float64: 1e-7, torch.float32: 1e-3}

LOST = ("unsupported-op", "unknown-shape", "not-captured")  # reasons that would say bnfold falls short


def measure(found: Architecture) -> dict[str, Any]:
    """One row of the results. Whatever goes wrong is in it: `status` is ok, wrong, failed (bnfold) or unbuilt."""
    torch.set_num_threads(1)
    start = time.process_time()
    row: dict[str, Any] = {"name": found.name, "family": found.family, "parameters": found.parameters}
    try:
        net = ready(found.name)
    except Exception as e:
        return row | {"status": "unbuilt", "problem": first_line(e), "seconds": time.process_time() - start}
    row["parameters"] = sum(p.numel() for p in net.module.parameters())
    row |= {"norms": len(norms_of(net.module)), "input": net.shape, "dtype": str(net.dtype).removeprefix("torch.")}
    built = time.process_time()
    try:
        row |= judged(net)
    except Exception as e:
        where = traceback.extract_tb(e.__traceback__)[-1]
        row |= {"status": "failed", "problem": first_line(e), "where": f"{where.filename}:{where.lineno}"}
    return row | {
        "build_seconds": round(built - start, 1),
        "seconds": round(time.process_time() - built, 1),
        "peak_gb": round(peak_memory() / 2**30, 2),
    }


def judged(net: Ready) -> dict[str, Any]:
    """Fold a network; compare it where it was folded and at another batch size. Raises only what `fold` raises."""
    module, batches = net.module, (net.inputs(2), net.inputs(1))
    want = [watched(module, x) for x in batches]
    if not compared(want[0][1]):
        return {"status": "unbuilt", "problem": "its outputs are empty or constant: nothing to compare"}
    before = fingerprint(module)
    result = bnfold.fold(module, batches[0])
    wrong = [] if fingerprint(module) == before else ["the argument was changed"]
    row = accounts(result.report)
    row["class"] = "same" if type(result.model) is type(module) else type(result.model).__name__
    wrong += miscounted(module, result.report)
    for size, x, (_, reference) in zip(("sweep", "other"), batches, want, strict=True):
        try:
            calls, got = watched(result.model, x)
        except Exception as e:
            wrong.append(f"at the {size} batch: {first_line(e)}")
            continue
        error = difference(got, reference)
        row["error"] = max(error, row.get("error", 0.0))
        if not error <= LIMITS[net.dtype]:
            row["floor"] = floor(module, x, reference)
            if not error <= min(LUCK * row["floor"], MOST[net.dtype]):
                wrong.append(f"at the {size} batch: off by {error:.1e} of the range, the floor is {row['floor']:.1e}")
        if size == "sweep":
            row |= {"run_before": want[0][0], "run_after": calls}
    still = sum(n for reason, n in row["reasons"].items() if reason != "not-executed")
    if row.get("run_after", still) > still:
        wrong.append(f"{row['run_after']} norms still run, {still} are said to be kept")
    return row | ({"status": "wrong", "problem": "; ".join(wrong)} if wrong else {"status": "ok"})


def floor(module: nn.Module, inputs: Any, want: Any) -> float:
    """How far the outputs move when every parameter and statistic goes to a neighbouring float; at its worst of two."""
    moves = []
    for seed in range(2):
        generator = torch.Generator().manual_seed(seed)
        moved = copy.deepcopy(module)
        for value in (*moved.parameters(), *moved.buffers()):
            if value.is_floating_point():
                towards = torch.randn(value.shape, generator=generator, dtype=value.dtype).sign() * float("inf")
                value.data.copy_(torch.nextafter(value.data, towards))
        moves.append(difference(watched(moved, inputs)[1], want))
    return max(moves)


def accounts(report: bnfold.Report) -> dict[str, Any]:
    """The report in numbers: reasons by the first refusal of each norm that stays, and the ones that need a look."""
    first = Counter(str(k.reasons[0].reason) if k.reasons else "none" for k in report.kept)
    stops = [
        [k.norm, *(f"{r.reason} at {r.at}: {r.detail}" for r in k.reasons)]
        for k in report.kept
        if any(r.reason in LOST for r in k.reasons)
    ]
    return {
        "folded": sum(f.norm is not None for f in report.folded),
        "merged": sum(f.direction == "merge" for f in report.folded),
        "kept": len(report.kept),
        "reasons": dict(first.most_common()),
        "both": dict(Counter(" + ".join(r.reason for r in k.reasons) for k in report.kept).most_common()),
        "stops": stops,
        "bytes_added": report.bytes_added,
        "notes": list(report.notes),
    }


def miscounted(module: nn.Module, report: bnfold.Report) -> list[str]:
    """Norms of the tree that the report does not have exactly once, or with no reason; further calls are `name#2`.

    The report may also have norms without running statistics, to say that they stay.
    """
    said = Counter([f.norm for f in report.folded if f.norm is not None] + [k.norm for k in report.kept])
    wrong = [f"{name} is reported {n} times" for name, n in said.items() if n > 1]
    tree, modules = norms_of(module), {name.partition("#")[0] for name in said}
    by_batch = {name for name, m in module.named_modules() if isinstance(m, _NormBase)} - tree.keys()
    missing, extra = sorted(tree.keys() - modules), sorted(modules - tree.keys() - by_batch)
    if missing:
        wrong.append(f"{len(missing)} norms are not reported, first {missing[0]}")
    if extra:
        wrong.append(f"{len(extra)} norms are reported that the module tree does not have, first {extra[0]}")
    return wrong + [f"{k.norm} is kept without a reason" for k in report.kept if not k.reasons]


class Norms(TorchDispatchMode):
    """Counts normalizations by running statistics as they run."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "batch_norm" in func._schema.name:
            given = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | (kwargs or {})
            self.count += not (given.get("training") or given.get("train"))
        return func(*args, **(kwargs or {}))


def watched(module: nn.Module, inputs: Any) -> tuple[int, Any]:
    """How many norms run, and the outputs; the inputs are copied, for a network may write into them."""
    copies = pytree.tree_map(lambda t: t.clone() if isinstance(t, torch.Tensor) else t, inputs)
    with torch.no_grad(), Norms() as norms:
        outputs = module(*copies) if isinstance(copies, tuple) else module(copies)
    return norms.count, outputs


def compared(outputs: Any) -> int:
    """How many elements there are by which a wrong fold could show."""
    floats = [t for t in pytree.tree_leaves(outputs) if isinstance(t, torch.Tensor) and t.is_floating_point()]
    return sum(t.numel() for t in floats if t.numel() and t.max() > t.min())


def difference(got: Any, want: Any) -> float:
    """The largest distance of any element, relative to the range of its tensor; infinite where structure differs."""
    (ours, shape), (theirs, expected) = pytree.tree_flatten(got), pytree.tree_flatten(want)
    if shape != expected:
        return float("inf")
    return max((_distance(a, b) for a, b in zip(ours, theirs, strict=True)), default=0.0)


def _distance(a: Any, b: Any) -> float:
    if not isinstance(b, torch.Tensor):
        return 0.0 if a == b else float("inf")
    if a.shape != b.shape or a.dtype != b.dtype or not torch.isfinite(a).all():
        return float("inf")
    if not b.is_floating_point():
        return 0.0 if torch.equal(a, b) else float("inf")
    if not b.numel():
        return 0.0
    spread = float(b.max() - b.min()) or float(b.abs().max()) or 1.0
    return float((a - b).abs().max()) / spread


def fingerprint(module: nn.Module) -> str:
    """The state dict, byte by byte, and the modules with their modes."""
    digest = hashlib.blake2b()
    for name, value in module.state_dict().items():
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.contiguous().reshape(-1).view(torch.uint8).numpy())
    for name, m in module.named_modules(remove_duplicate=False):
        digest.update(f"{name} {id(m)} {m.training}".encode())
    return digest.hexdigest()


def peak_memory() -> int:
    """The largest resident size of this process so far, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
