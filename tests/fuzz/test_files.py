"""Model files with bytes lost, changed, added or repeated: a model comes out, or one line that says what is wrong."""

from __future__ import annotations

import random
import resource
import shutil
import signal
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import onnx
import pytest

from bnfold.errors import InvalidFileError
from bnfold.refolding import fold_file

SIZES = {"w": (8, 3, 7, 7), "b": (8,)}  # the weight is large enough to be left in its file
NORM = "[n] y = BatchNormalization(c, s, t, m, v)"
BODIES = {
    "embedded": f"c = Conv(x, w, b) {NORM}",
    "external": f"c = Conv(x, w, b) {NORM}",
    "nested": f"y = If(q) <then_branch = yes () => (float[N,8,H,W] y) {{ c = Conv(x, w, b) {NORM} }}, "
    "else_branch = no () => (float[N,8,H,W] e) { d = Conv(x, w, b) e = Relu(d) }>",
}
GROWTH = 300 << 20  # bytes of memory that no file of some kilobytes may ask for


def model(kind: str) -> onnx.ModelProto:
    """A convolution and its norm."""
    inputs = "float[N,3,H,W] x" + (", bool q" if kind == "nested" else "")
    text = f'<ir_version: 8, opset_import: ["" : 17]> net ({inputs}) => (float[N,8,A,B] y) {{ {BODIES[kind]} }}'
    m, r = onnx.parser.parse_model(text), random.Random(kind)
    for name, dims in {**SIZES, **dict.fromkeys("stmv", (8,))}.items():
        size = 8 if len(dims) == 1 else 8 * 3 * 7 * 7
        m.graph.initializer.append(
            onnx.helper.make_tensor(name, onnx.TensorProto.FLOAT, dims, [r.uniform(0.5, 2) for _ in range(size)])
        )
    for t in m.graph.initializer:  # as every writer has them
        t.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(t), t.name))
    return m


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder for each kind, with a file `net.onnx`."""
    made: dict[str, Path] = {}
    for kind in BODIES:
        made[kind] = tmp_path_factory.mktemp(kind)
        external = {"save_as_external_data": True, "location": "net.bin", "size_threshold": 64}
        onnx.save(model(kind), made[kind] / "net.onnx", **(external if kind == "external" else {}))
    return made


def damaged(data: bytes, r: random.Random) -> bytes:
    """The bytes with one to three places damaged."""
    for _ in range(r.choice([1, 1, 2, 3])):
        a, b = sorted(r.randrange(len(data) + 1) for _ in range(2))
        b = min(b, a + r.choice([1, 1, 2, 8, 64]))
        piece = data[a:b]
        match r.randrange(8):
            case 0:
                data = data[:a]
            case 1:
                piece = b""
            case 2:
                piece = piece * 2
            case 3:
                piece = r.randbytes(len(piece))
            case 4:
                piece = b"\xff" * len(piece)  # lengths and counts as large as they can be
            case 5:
                piece = bytes(len(piece))
            case 6:
                piece += r.randbytes(r.randrange(1, 12))
            case _:
                piece = bytes(c ^ (1 << r.randrange(8)) for c in piece)
        data = data[:a] + piece + data[b:]
        if not data:
            return b"\0"
    return data


def outcome(folder: Path, originals: dict[str, Path], seed: int) -> str:
    """Fold a damaged copy. What is written can be read; what is refused leaves nothing."""
    r = random.Random(seed)
    kind = r.choice(list(BODIES))
    for file in originals[kind].iterdir():
        shutil.copy(file, folder)
    victim = r.choice(sorted(p.name for p in originals[kind].iterdir()))
    (folder / victim).write_bytes(damaged((folder / victim).read_bytes(), r))
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    try:
        fold_file(folder / "net.onnx", folder / "out.onnx", verify=False, keep_broken=True)
    except InvalidFileError as e:
        message: str | None = str(e)
    else:
        message = None
    if message is not None:
        assert "\n" not in message
        assert {p.name: p.read_bytes() for p in folder.iterdir()} == before
        return "refused"
    onnx.load(folder / "out.onnx")
    assert {p.name: p.read_bytes() for p in folder.iterdir() if p.name in before} == before
    return "written"


@contextmanager
def time_limit(seconds: int) -> Generator[None]:
    """Raise TimeoutError in the block when it takes longer."""

    def expired(*_: object) -> None:
        raise TimeoutError(f"no end after {seconds} s")

    before = signal.signal(signal.SIGALRM, expired)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.filterwarnings("ignore:Ignoring unknown external data")
def test_damaged_files(seeds: range, originals: dict[str, Path], tmp_path: Path) -> None:
    outcomes: set[str] = set()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for seed in seeds:
        folder = tmp_path / str(seed)
        folder.mkdir()
        try:
            with time_limit(30):
                outcomes.add(outcome(folder, originals, seed))
        except Exception as e:
            raise AssertionError(f"seed {seed}") from e
        shutil.rmtree(folder)
    assert outcomes == {"refused", "written"}
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10 < GROWTH
