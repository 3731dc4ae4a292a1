"""Fold a torch program and judge what came out, in float64."""

from __future__ import annotations

import traceback
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch_models import run, snapshot

import bnfold

from .onnx_judge import report_problems
from .program import Failure, Program
from .tally import Tally
from .torch_network import Network, build, given

LIMIT = 1e-11  # of the range of a channel
# Where large terms cancel in a channel, its range is no measure of what float64 can do. Then the parameters themselves
# say it (Monte Carlo arithmetic; Parker, 1997): every rounding is a relative change of some factor by 1e-16 at most,
# so that the network's response to random changes of all its parameters by NUDGE, scaled down, shows how far a few
# hundred roundings can move an output.
NUDGE, ROUNDINGS = 1e-9, 1e-13


def judge(program: Program, tally: Tally | None = None) -> Failure | None:
    """What is wrong with the fold of a program. Raises UnfitError for one that is no network."""
    build(program)
    try:
        return next(_problems(program, tally), None)
    except Exception as e:
        return Failure(f"crash: {type(e).__name__}", "".join(traceback.format_exception(e)[-4:]))


def _problems(program: Program, tally: Tally | None) -> Iterator[Failure]:
    module = build(program)
    x = given(program.shape, program.settings)
    before, data = snapshot(module), x.clone()
    result = bnfold.fold(module, x)
    if snapshot(module) != before:
        yield Failure("the argument was changed", "")
    if not torch.equal(x, data):
        yield Failure("the example input was changed", "")
    yield from report_problems(result.report)
    for feed in (x, *_others(program)):
        yield from _numbers(program, result.model, feed, tally)
    if program.settings.get("again"):
        yield from _again(program, module, result, x)
    if tally is not None:
        tally.count(program, result.report)


def _others(program: Program) -> Iterator[Tensor]:
    """Inputs of other batch sizes, where the network runs on them."""
    for batch in (1, 3):
        feed = given((batch, *program.shape[1:]), program.settings, turn=batch)
        try:
            run(build(program), feed)
        except (RuntimeError, ValueError):
            continue
        yield feed


def _numbers(program: Program, folded: nn.Module, feed: Tensor, tally: Tally | None) -> Iterator[Failure]:
    kept = feed.clone()
    got, want = run(folded, feed), run(build(program), feed)
    if not torch.equal(feed, kept):
        yield Failure("the folded model writes into its input", "")
    response: list[Tensor] | None = None
    for k, (g, w) in enumerate(zip(got, want, strict=True)):
        if g.shape != w.shape:
            yield Failure("an output has another shape", f"{tuple(w.shape)} became {tuple(g.shape)}")
            return
        if not torch.isfinite(w).all():
            continue  # the network itself overflows float64
        error, range_ = _by_channel((g - w).abs()), _by_channel(w.abs())
        wrong = ~(error <= LIMIT * range_)
        if wrong.any():
            response = response or _response(program, feed, want)
            wrong = ~(error <= (LIMIT * range_).maximum(response[k]))
            if tally is not None:
                tally.cancelling += 1
        elif tally is not None:
            tally.worst = max(tally.worst, float(error.max() / range_.max().clamp_min(1e-300)))
        if wrong.any():
            channel = int(wrong.reshape(-1).nonzero()[0])
            yield Failure(
                "wrong numbers",
                f"output {program.outputs[k]}, channel {channel}, batch {len(feed)}: off by "
                f"{float(error.reshape(-1)[channel]):.2e} on a range of {float(range_.reshape(-1)[channel]):.2e}",
            )
            return


def _by_channel(t: Tensor) -> Tensor:
    """The largest element of each channel, dimension 1 where there is one."""
    axes = [a for a in range(t.dim()) if a != 1]
    return t.amax(axes) if t.dim() > 1 else t


def _response(program: Program, feed: Tensor, want: list[Tensor]) -> list[Tensor]:
    """How far relative changes by ROUNDINGS of all parameters move each channel."""
    found = [_by_channel(torch.zeros_like(w)) for w in want]
    for trial in range(3):
        g = torch.Generator().manual_seed(trial)
        nudged: Network = build(program)
        for p in (*nudged.parameters(), *nudged.buffers()):
            if p.is_floating_point():
                signs = torch.randint(0, 2, p.shape, generator=g, dtype=torch.float64) * 2 - 1
                p.data.mul_(1 + NUDGE * signs)
        moved = [_by_channel((a - b).abs()) for a, b in zip(run(nudged, feed), want, strict=True)]
        found = [f.maximum(m * (ROUNDINGS / NUDGE)) for f, m in zip(found, moved, strict=True)]
    return found


def _again(program: Program, module: nn.Module, result: bnfold.report.Folded, x: Tensor) -> Iterator[Failure]:
    """The same tensors and report when folded again; folding the folded model changes nothing that counts."""
    second = bnfold.fold(module, x)
    if second.report != result.report or not _same_state(second.model, result.model):
        yield Failure("a second run gives another model", "")
    twice = bnfold.fold(result.model, x)
    for failure in _numbers(program, twice.model, x, None):
        yield Failure(f"folded twice: {failure.what}", failure.detail)


def _same_state(a: nn.Module, b: nn.Module) -> bool:
    ours, theirs = a.state_dict(), b.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[k], theirs[k]) for k in ours)


def text(program: Program) -> str:
    """The program to paste into a test."""
    return str(program)
