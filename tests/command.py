"""The command line in this process: a line as typed, and what came of it."""

import io
import json
import shlex
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import NamedTuple

import pytest
from bnfold.cli.main import run

from bnfold.report import Report


class Done(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def json(self) -> dict:
        """The whole of stdout as one object."""
        return json.loads(self.out)

    @property
    def report(self) -> Report:
        return Report.from_json(self.out)


def bnfold(line: str) -> Done:
    """Run a line as typed after `bnfold`, with both outputs caught, in this process."""
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err, pytest.raises(SystemExit) as end:
        run(shlex.split(line))
    return Done(int(end.value.code or 0), out.getvalue(), err.getvalue())


def contents(folder: Path) -> dict[str, bytes]:
    found = {str(p.relative_to(folder)): p for p in folder.rglob("*") if "__pycache__" not in p.parts}
    return {name: p.read_bytes() if p.is_file() else b"" for name, p in found.items()}


def one_line(done: Done) -> str:
    """What stderr says: a single line of ours."""
    assert done.err.startswith("bnfold: ")
    assert done.err.endswith("\n")
    assert done.err.count("\n") == 1, done.err
    return done.err
