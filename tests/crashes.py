"""Kill a fold in place at ten points, and let it run into a limit on the size of files: `crashes.py FOLDER`.

FOLDER holds net.onnx with its data. Prints, as JSON, what was left each time. A process of its own, because it forks.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import onnxruntime
from onnx import load

from bnfold import weights
from bnfold.errors import InvalidFileError
from bnfold.refolding import fold_file

weights.BLOCK = 200
STEPS = ("pwrite", "copy_file_range", "fsync", "chmod", "rename", "replace", "unlink", "rmdir", "mkdir", "open")
"""What changes a file system, or is on the way to that."""


def counted(act: Callable[[int, str], None]) -> None:
    """Call `act` with the number and name of each step, before it is taken."""
    count = 0

    def patched(name: str, step: Callable) -> Callable:
        def call(*args, **kwargs):
            nonlocal count
            act(count, name)
            count += 1
            return step(*args, **kwargs)

        return call

    for name in STEPS:
        setattr(os, name, patched(name, getattr(os, name)))


def child(work: Callable[[], int]) -> int:
    """Run work in a forked process; its wait status."""
    pid = os.fork()
    if pid == 0:
        code = 70
        try:
            code = work()
        finally:
            os._exit(code)
    return os.waitpid(pid, 0)[1]


def fold(folder: Path) -> int:
    try:
        fold_file(folder / "net.onnx", in_place=True, verify=False)
    except InvalidFileError as e:
        return e.exit_code
    return 0


def state(folder: Path, old: bytes, new: bytes) -> str:
    """Which model is there; it must be whole, with its data."""
    path = folder / "net.onnx"
    load(path)
    onnxruntime.InferenceSession(path)
    found = path.read_bytes()
    return "old" if found == old else "new" if found == new else "neither"


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def main(given: Path) -> None:
    old = (given / "net.onnx").read_bytes()
    before = names(given)
    work = given.parent / f"{given.name}-crashes"

    def fresh() -> Path:
        shutil.rmtree(work, ignore_errors=True)
        return shutil.copytree(given, work)

    def record(folder: Path) -> int:
        steps: list[str] = []
        counted(lambda _, name: steps.append(name))
        code = fold(folder)
        (given / "steps").write_text(" ".join(steps))
        return code

    folder = fresh()
    assert child(lambda: record(folder)) == 0
    steps = (given / "steps").read_text().split()
    (given / "steps").unlink()
    new = (folder / "net.onnx").read_bytes()
    data, model = steps.index("rename"), steps.index("replace")  # the moments that count are around these
    early = [data * k // 5 for k in range(5)]
    kills, limits = [], []
    for point in (*early, data, data + 1, model, model + 1, len(steps) - 3):

        def die(n: int, _: str, point: int = point) -> None:
            if n == point:
                os.kill(os.getpid(), signal.SIGKILL)

        folder = fresh()
        status = child(lambda die=die, folder=folder: (counted(die), fold(folder))[1])
        found = {"died": os.WIFSIGNALED(status), "point": point, "step": steps[point], "state": state(folder, old, new)}
        found["files"] = names(folder)
        assert child(lambda folder=folder: fold(folder)) == 0
        state(folder, old, new)
        kills.append(found | {"afterwards": names(folder)})
    sizes = sorted(p.stat().st_size for p in given.iterdir())
    for limit in (0, 100, sizes[0] // 2, sizes[-1] // 2, sizes[-1] - 1):
        folder = fresh()

        def limited(folder: Path = folder, limit: int = limit) -> int:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
            return fold(folder)

        status = child(limited)
        code = os.waitstatus_to_exitcode(status)
        limits.append({"limit": limit, "code": code, "state": state(folder, old, new), "files": names(folder)})
    shutil.rmtree(work)
    print(json.dumps({"before": before, "kills": kills, "limits": limits}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
