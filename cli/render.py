"""Reports as people read them: rich tables on a terminal, plain lines in a pipe, one JSON object with --json."""

from __future__ import annotations

import json
import os
import re
import sys
from collections import Counter
from collections.abc import Generator
from contextlib import ExitStack, contextmanager, redirect_stdout
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from bnfold.report import Doc, Fold, OutputCheck, Reason, Report, Verdict

WIDTH = 100
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")  # what names in a file could do to a terminal
LONGEST_LIST = 200  # rows of a table on a terminal; --json is complete


class Screen:
    """Progress on stderr while work goes on, the result on stdout at the end.

    What a factory or a library prints meanwhile goes to stderr too: stdout holds the result and nothing else.
    """

    def __init__(self, as_json: bool):
        self._json = as_json
        self._progress: Any = None
        self._task: Any = None
        self._work = ExitStack()

    def __enter__(self) -> Screen:
        self._work.enter_context(redirect_stdout(sys.stderr))
        if sys.stderr.isatty() and not self._json:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

            columns = (BarColumn(bar_width=20), TextColumn("{task.description}"), TimeElapsedColumn())
            progress = Progress(*columns, console=Console(stderr=True), transient=True)
            self._progress = self._work.enter_context(progress)
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self._work.close()

    def warn(self, message: str) -> None:
        """One line on stderr, before the work that it warns of."""
        print(f"bnfold: warning: {message}", file=sys.stderr)

    def step(self, name: str) -> None:
        """Say which step has begun."""
        if self._progress is None:
            return
        if self._task is not None:
            self._progress.remove_task(self._task)
        self._task = self._progress.add_task(name, total=None)

    def show(self, report: Report, planned: bool = False) -> None:
        """Print the report; `planned` words it as what would be done."""
        self._work.close()
        with _to_reader():
            show_report(report, self._json, planned)

    def reasons(self, reasons: dict[Reason, Doc]) -> None:
        """Print what reasons mean."""
        self._work.close()
        with _to_reader():
            if self._json:
                rows = {str(r): {"meaning": d.meaning, "remedy": d.remedy} for r, d in reasons.items()}
                print(json.dumps({"schema": 1, "reasons": rows}, indent=2))
                return
            for r, d in reasons.items():
                print(f"{r}\n  {d.meaning}\n  {d.remedy}")


@contextmanager
def _to_reader() -> Generator[None]:
    """Print on stdout; whoever reads it may stop early (`| head`), which is no error."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what Python flushes at its end


def show_error(message: str, code: int, as_json: bool, report: Report | None) -> None:
    """One line on stderr; with --json the object on stdout says it too, beside the report so far."""
    from bnfold.report import Report

    with _to_reader():
        if as_json:
            error = {"message": message, "exit_code": int(code)}
            found = (report or Report()).to_dict()
            print(json.dumps({**found, "error": error}, indent=2, allow_nan=False))
        elif report is not None:
            show_report(report, False, planned=False)
    print(_clean(f"bnfold: {message}"), file=sys.stderr)


def show_report(report: Report, as_json: bool, planned: bool) -> None:
    """The whole report on stdout."""
    if as_json:
        print(report.to_json())
        return
    if sys.stdout.isatty():
        _pretty(report, planned)
    else:
        _plain(report, planned)


# ---------------------------------------------------------------------- plain lines


def _clean(text: str) -> str:
    """The text with control characters, and what is no text, spelled out."""
    return CONTROL.sub(lambda m: ascii(m[0])[1:-1], text)


def _say(line: str) -> None:
    print(_clean(line))


def _marked(text: str) -> str:
    """The text as rich prints it: as it is."""
    from rich.markup import escape

    return escape(_clean(text))


def _plain(report: Report, planned: bool) -> None:
    for note in report.notes:
        _say(f"note: {note}")
    if report.contents is not None:
        for line in (*_overview(report.contents), *_listing(report.contents)):
            _say(line)
    elif _folding(report):
        _say(_summary(report, planned))
    fate, other = ("would fold", "would stay") if planned else ("folded", "kept  ")
    for f in report.folded:
        _say(f"{fate}  {f.norm or f.op}  ->  {_into(f)}")
    for f in report.affine:
        _say(f"{fate}  {f.norm} (constant {f.op})  ->  {_into(f)}")
    for k in report.kept:
        for r in k.reasons:
            _say(f"{other}  {k.norm}  {r.reason}: {r.detail} [{r.at}]")
    if report.verdict is not None:
        for o in report.verdict.outputs:
            _say(f"output  {o.name}  {_numbers(o)}")
        _say(_judgement(report.verdict))
    for line in _files(report):
        _say(line)


FORMATS = {
    "torch": "a file of torch.save", "safetensors": "a safetensors file", "sharded": "a checkpoint in several files",
    "torchscript": "a TorchScript archive",
}  # fmt: skip


def _overview(contents: dict[str, Any]) -> list[str]:
    """What a checkpoint is and holds, in a few lines."""
    lines = [f"{FORMATS.get(contents['format'], contents['format'])}"]
    for found in contents["sets"]:
        types = Counter(t["dtype"] for t in found["tensors"].values())
        kinds = ", ".join(f"{n} {dtype}" for dtype, n in types.most_common())
        where = f"under '{found['key']}': " if found["key"] else ""
        norms = _counted(len(found["norms"]), "normalization")
        lines.append(f"{where}{found['kind']}, {_counted(len(found['tensors']), 'tensor')} ({kinds}), {norms}")
    if not contents["sets"]:
        lines.append("no weights")
    lines += [f"{key}: {what}" for key, what in contents["others"].items()]
    if asked := contents["asks_for"]:
        more = f" and {len(asked) - 3} more" if len(asked) > 3 else ""
        lines.append(f"reading it whole would run {', '.join(asked[:3])}{more}")
    return lines


def _listing(contents: dict[str, Any], limit: int | None = None) -> list[str]:
    """Every tensor and every norm of every set of weights."""
    lines: list[str] = []
    for found in contents["sets"]:
        start = f"{found['key']}: " if len(contents["sets"]) > 1 else ""
        lines += [f"tensor  {start}{k}  {t['dtype']} {t['shape']}" for k, t in found["tensors"].items()]
        lines += [f"norm    {start}{n['norm']}  {_counted(n['channels'], 'channel')}" for n in found["norms"]]
    if limit is None or len(lines) <= limit:
        return lines
    return [*lines[:limit], f"… {len(lines) - limit} more, see --json"]


def _folding(report: Report) -> bool:
    """Whether the report is about norms at all, and not of two models that were compared."""
    return bool(report.norms or report.affine or report.files or report.verdict is None)


def _summary(report: Report, planned: bool) -> str:
    verb = "would fold" if planned else "folded"
    constant = f", {_counted(len(report.affine), 'constant operation')} {verb}" if report.affine else ""
    if not report.norms:
        return f"no normalizations{constant}"
    ops = Counter(n.op for n in report.norms)
    kinds = ", ".join(f"{n} {op}" for op, n in ops.most_common())
    norms = sum(f.norm is not None for f in report.folded)
    merged = len(report.folded) - norms
    branches = (
        f", {_counted(merged, 'sum')} of parallel branches {'would merge' if planned else 'merged'}" if merged else ""
    )
    fates = f"{norms} {verb}, {len(report.kept)} {'would stay' if planned else 'kept'}"
    return f"{_counted(len(report.norms), 'normalization')} ({kinds}): {fates}{constant}{branches}"


def _counted(n: int, noun: str) -> str:
    return f"{n} {noun}{'' if n == 1 else 's'}"


def _into(f: Fold) -> str:
    way = f" through {', '.join(f.through)}" if f.through else ""
    return f"{', '.join(f.into)} ({f.direction}{way})"


def _numbers(o: OutputCheck) -> str:
    if o.problem:
        return o.problem
    floor = "" if o.floor is None else f", original's own {o.floor:.1e}"
    return f"error {o.error:.1e} of its range (limit {o.limit:.1e}{floor})"


def _judgement(v: Verdict) -> str:
    where = ", ".join(p.removesuffix("ExecutionProvider") for p in v.providers)
    on = f" on onnxruntime {where}" if where else ""
    return f"{'equivalent' if v.passed else 'NOT equivalent'}{on}" + "".join(f"; {n}" for n in v.notes)


def _files(report: Report) -> list[str]:
    source = next((f for f in report.files if f.role == "source"), None)
    lines: list[str] = []
    for f in report.files:
        if f.role == "source":
            continue
        before = f" (source {_size(source.bytes)})" if source is not None else ""
        lines.append(f"wrote {f.path}  {_size(f.bytes)}{before}")
    if report.bytes_added:
        lines.append(f"{_size(report.bytes_added)} were added by weights that other layers still need as they were")
    return lines


def _size(n: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if n < 1000 or unit == "GB":
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1000
    raise AssertionError


# ---------------------------------------------------------------------- a terminal


def _pretty(report: Report, planned: bool) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    console.width = min(console.width, WIDTH)
    for note in report.notes:
        console.print(f"[dim]{_marked(note)}[/dim]", soft_wrap=True)
    if report.folded or report.affine:
        _table(console, _folds(report, planned))
    if report.kept:
        _table(console, _kept(report, planned))
    if report.contents is not None:
        for line in (*_listing(report.contents, LONGEST_LIST), *_overview(report.contents)):
            console.print(_marked(line), soft_wrap=True)
    elif _folding(report):
        console.print(f"[bold]{_marked(_summary(report, planned))}[/bold]", soft_wrap=True)
    if (v := report.verdict) is not None:
        if v.outputs:
            _table(console, _outputs(v))
        console.print(f"[bold {'green' if v.passed else 'red'}]{_marked(_judgement(v))}[/]", soft_wrap=True)
    for line in _files(report):
        console.print(_marked(line), soft_wrap=True)


def _new_table(title: str, *columns: str) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for c in columns:
        table.add_column(c, overflow="fold")
    return table


def _table(console: Console, table: Table) -> None:
    console.print(table)


def _folds(report: Report, planned: bool) -> Table:

    table = _new_table("would fold" if planned else "folded", "normalization", "into", "direction", "through")
    rows = [*report.folded, *report.affine]
    for f in rows[:LONGEST_LIST]:
        table.add_row(_marked(f.norm or f.op), _marked(", ".join(f.into)), f.direction, _marked(", ".join(f.through)))
    if len(rows) > LONGEST_LIST:
        table.add_row(f"… {len(rows) - LONGEST_LIST} more, see --json", "", "", "")
    return table


def _kept(report: Report, planned: bool) -> Table:

    table = _new_table("would stay" if planned else "kept", "normalization", "reason", "at", "")
    for k in report.kept[:LONGEST_LIST]:
        for i, r in enumerate(k.reasons):
            table.add_row(
                _marked(k.norm) if i == 0 else "", f"[yellow]{r.reason}[/yellow]", _marked(r.at), _marked(r.detail)
            )
    if len(report.kept) > LONGEST_LIST:
        table.add_row(f"… {len(report.kept) - LONGEST_LIST} more, see --json", "", "", "")
    return table


def _outputs(v: Verdict) -> Table:

    table = _new_table("verification", "output", "error", "limit", "original's own", "")
    for o in v.outputs:
        floor = "" if o.floor is None else f"{o.floor:.1e}"
        table.add_row(_marked(o.name), f"{o.error:.1e}", f"{o.limit:.1e}", floor, _marked(o.problem))
    return table
