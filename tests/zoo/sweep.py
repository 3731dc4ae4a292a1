"""Fold every torchvision and timm architecture that has norms, and see that none is wrong.

    python tests/zoo/sweep.py --out results.jsonl              # all of them: some hours on one core; resumable
    python tests/zoo/sweep.py --out results.jsonl --only 'timm/regnet*' --no-peers
    python tests/zoo/sweep.py --table results.jsonl            # what it found, for a terminal; --markdown for a page

Each architecture is built with random weights, gammas that are negative, zero and tiny among them, folded in a
process of its own and compared in float64 at two batch sizes, every element (`measure.py`). A crash, a hang or a
network that takes all memory costs one row. Which networks, and the one rule that leaves some out (an
architecture above 150 million parameters, unless it is the smallest of its family): `architectures.py`.

Results are one JSON object a line, appended as they come. What is there already is not done again, unless --again,
or --failed for the rows that are not in order. The census of all architectures is kept beside the results.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import resource
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TextIO

os.environ.setdefault("OMP_NUM_THREADS", "1")  # one core per worker

from architectures import Architecture, chosen, read_census
from table import read_results, show

# What every process needs and no one edits during a sweep: imported once, in the process the others are forked from.
PRELOAD = ["torch", "torch.export", "torch._dynamo", "torch.fx.experimental.symbolic_shapes", "torchvision", "timm"]
POLL = 0.1  # seconds
HANGS = 10  # times the limit on CPU time: a machine may be busy with other things


@dataclass(frozen=True)
class Job:
    """One row to compute: `kind` is "fold" or "peers"."""

    kind: str
    found: Architecture


@dataclass
class Running:
    """A job in its process."""

    job: Job
    process: Any
    answer: Connection
    started: float


def perform(job: Job, answer: Connection, timeout: int) -> None:
    """In the process of its own: compute the row and send it back. Exporters print whole programs: not here."""
    resource.setrlimit(resource.RLIMIT_CPU, (timeout, timeout + 5))
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    if job.kind == "fold":
        from measure import measure

        row = measure(job.found) | {"version": version()}
    else:
        from peers import peers

        row = peers(job.found)
    answer.send(row)
    answer.close()


def version() -> str:
    """A digest of bnfold's sources, so that a table of several versions can say so."""
    spec = find_spec("bnfold")
    assert spec is not None
    assert spec.origin is not None
    files = sorted(Path(spec.origin).parent.rglob("*.py"))
    return hashlib.sha256(b"".join(f.read_bytes() for f in files)).hexdigest()[:8]


def outcomes(jobs: Iterable[Job], workers: int, timeout: float, memory: float) -> Iterator[tuple[Job, dict[str, Any]]]:
    """The row of every job, in the order they finish. `timeout` is CPU seconds, `memory` bytes, both per process."""
    methods = multiprocessing.get_all_start_methods()
    context = multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")
    if "forkserver" in methods:
        context.set_forkserver_preload(PRELOAD)
    waiting, running = list(jobs)[::-1], list[Running]()
    while waiting or running:
        while waiting and len(running) < workers:
            running.append(_begin(context, waiting.pop(), timeout))
        time.sleep(POLL)
        for r in list(running):
            row = _outcome(r, timeout, memory)
            if row is not None:
                running.remove(r)
                yield r.job, row


def _begin(context: Any, job: Job, timeout: float) -> Running:
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=perform, args=(job, theirs, int(timeout)), daemon=True)
    process.start()
    theirs.close()
    return Running(job, process, ours, time.monotonic())


def _outcome(r: Running, timeout: float, memory: float) -> dict[str, Any] | None:
    """The row if there is one now: what the process sent, or why it was ended."""
    found, seconds = r.job.found, time.monotonic() - r.started
    lost = {"name": found.name, "family": found.family, "parameters": found.parameters, "norms": found.norms}
    lost["seconds"] = round(seconds, 1)
    try:
        if r.answer.poll():
            row = r.answer.recv()
            r.process.join()
            return row
    except EOFError:
        r.process.join()
        late = r.process.exitcode == -signal.SIGXCPU
        why = f"took more than {timeout:.0f} s" if late else f"the process died, exit code {r.process.exitcode}"
        return lost | _ended(r.job, why)
    size = _resident(r.process.pid)
    why = f"hangs: no result after {seconds:.0f} s" if seconds > HANGS * timeout else ""
    if size > memory:
        why = f"took more than {memory / 2**30:.0f} GiB of memory"
    if not why:
        return None
    r.process.kill()
    r.process.join()
    return lost | _ended(r.job, why)


def _ended(job: Job, why: str) -> dict[str, Any]:
    if job.kind == "peers":
        return {"onnx": f"failed: {why}", "jit": f"failed: {why}"}
    return {"status": "ended", "problem": why}


def _resident(pid: int) -> int:
    """Bytes of memory that a process holds, where the system says so; else 0."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


# ---------------------------------------------------------------------- the command


def main() -> int:
    args = arguments()
    if args.table:
        return show(Path(args.table), markdown=args.markdown)
    out = Path(args.out)
    rows = chosen(read_census(census_of(out), lambda name: print(f"census: {name}", end="\033[K\r", file=sys.stderr)))
    jobs = todo(rows, out, args)
    known = read_results(out)
    with out.open("a") as file:
        for row in rows:
            if row.skipped and wanted(row, args.only) and row.name not in known:
                write(file, {"kind": "fold", "name": row.name, "family": row.family, "parameters": row.parameters,
                             "norms": row.norms, "status": "skipped", "problem": row.skipped})  # fmt: skip
        results = outcomes(jobs, args.workers, args.timeout, args.memory * 2**30)
        for k, (job, row) in enumerate(results, 1):
            write(file, {"kind": job.kind, **row})
            print(f"[{k}/{len(jobs)}] {line(job, row)}", flush=True)
    return 0


def arguments() -> argparse.Namespace:
    """The command line."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="results, one JSON object a line; appended to")
    parser.add_argument("--table", metavar="RESULTS", help="show the results of a sweep instead of running one")
    parser.add_argument("--markdown", action="store_true", help="the table as markdown")
    parser.add_argument("--only", metavar="PATTERN", default="*", help="shell-style, of names like timm/levit_128")
    parser.add_argument("--limit", type=int, metavar="N", help="stop after N, every family's smallest first")
    parser.add_argument("--workers", type=int, default=1, metavar="N", help="processes at a time (default 1)")
    parser.add_argument("--peers", action=argparse.BooleanOptionalAction, default=True, help="count what others leave")
    parser.add_argument("--fold", action=argparse.BooleanOptionalAction, default=True, help="--no-fold: only the peers")
    parser.add_argument("--again", action="store_true", help="also what has a result already")
    parser.add_argument("--failed", action="store_true", help="also what has a result that is not in order")
    parser.add_argument("--timeout", type=float, default=180, metavar="SECONDS", help="CPU time for one architecture")
    parser.add_argument("--memory", type=float, default=8, metavar="GIB", help="for one process")
    args = parser.parse_args()
    if not args.out and not args.table:
        parser.error("give --out to run a sweep, or --table to show one")
    return args


def census_of(out: Path) -> Path:
    """Where the census lies."""
    return out.with_suffix(".census.json")


def todo(rows: list[Architecture], out: Path, args: argparse.Namespace) -> list[Job]:
    """Jobs that have no result yet (or whose result is to be had again): all folds, then all peers."""
    known = read_results(out)
    rows = [r for r in rows if not r.skipped and wanted(r, args.only)][: args.limit]

    def missing(r: Architecture, key: str) -> bool:
        row = known.get(r.name, {})
        return args.again or key not in row or (args.failed and row.get("status") != "ok")

    folds = [Job("fold", r) for r in rows if args.fold and missing(r, "status")]
    plain = [r for r in rows if "+" not in r.name]  # a variant's signs matter to no peer
    return folds + [Job("peers", r) for r in plain if args.peers and missing(r, "onnx")]


def wanted(row: Architecture, pattern: str) -> bool:
    return fnmatchcase(row.name, pattern)


def write(file: TextIO, row: dict[str, Any]) -> None:
    file.write(json.dumps(row) + "\n")
    file.flush()


def line(job: Job, row: dict[str, Any]) -> str:
    """A row for who watches."""
    if job.kind == "peers":
        return f"{row['name']}: onnx {row['onnx']}, jit {row['jit']}"
    if row["status"] != "ok":
        return f"{row['name']}: {row['status'].upper()} {row.get('problem', '')}"
    kept = ", ".join(f"{n} {reason}" for reason, n in row["reasons"].items())
    return (
        f"{row['name']}: {row['norms']} norms, {row['kept']} left ({kept}); {row['error']:.0e}, {row['seconds']:.0f} s"
    )


if __name__ == "__main__":
    sys.exit(main())
