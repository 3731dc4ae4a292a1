"""Models whose weights lie in data files: folded without being loaded, and what a fold does not touch copied as it is.

The oracle is the same model folded in memory, which `test_onnx_*` prove against float64, and the old files' own bytes.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import ModelProto, TensorProto
from onnx_models import BF16, differences, evaluate, gentle, model, random_feeds

import bnfold
from bnfold import exporter, onnx_output, ranges, weights
from bnfold.errors import InvalidFileError, NotEquivalentError, RemainingNormsError, UsageError
from bnfold.exporter import export
from bnfold.graphs import onnx_data
from bnfold.graphs.onnx_graph import OnnxGraph
from bnfold.onnx_files import OnnxFile, open_onnx
from bnfold.refolding import fold_file
from bnfold.report import Reason
from bnfold.transform import planned

FILLER = 0xA5  # what stands between the tensors of our data files
Places = Mapping[str, tuple[str, int]]  # file and offset of a tensor


# ---------------------------------------------------------------------- models on disk


def save(m: ModelProto, path: Path, places: Places, **entries: str) -> Path:
    """Write a model with the data of these initializers at these places, and filler around them."""
    stored = ModelProto()
    stored.CopyFrom(m)
    found: dict[str, bytearray] = {}
    for t in stored.graph.initializer:
        if t.name not in places:
            continue
        (location, offset), data = places[t.name], t.raw_data
        content = found.setdefault(location, bytearray())
        content.extend(bytes([FILLER]) * max(offset + len(data) + 3 - len(content), 0))
        content[offset : offset + len(data)] = data
        t.ClearField("raw_data")
        t.data_location = TensorProto.EXTERNAL
        for key, value in {"location": location, "offset": str(offset), "length": str(len(data)), **entries}.items():
            t.external_data.add(key=key, value=value)
    for location, content in found.items():
        (path.parent / location).parent.mkdir(parents=True, exist_ok=True)
        (path.parent / location).write_bytes(content)
    onnx.save(stored, path)
    return path


def everything_in(m: ModelProto, file: str = "weights.bin", alignment: int = 64) -> Places:
    """All initializers in one file, one behind the other."""
    places, end = {}, 0
    for t in m.graph.initializer:
        places[t.name] = (file, -(-end // alignment) * alignment)
        end = places[t.name][1] + len(t.raw_data)
    return places


def entries(m: ModelProto) -> dict[str, dict[str, str]]:
    """What the model says of its external tensors."""
    return {
        t.name: {e.key: e.value for e in t.external_data}
        for t in m.graph.initializer
        if t.data_location == TensorProto.EXTERNAL
    }


def bare(path: Path) -> ModelProto:
    return onnx.load(path, load_external_data=False)


def whole(path: Path) -> ModelProto:
    return onnx.load(path)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def check_same(path: Path, source: ModelProto) -> None:
    """The file holds what folding the source in memory gives, and computes what the source computes."""
    expected, found = bnfold.fold(source).model, whole(path)
    onnx.checker.check_model(str(path), full_check=True)
    where = [d for d in differences(expected, found) if "data_location" not in d and "external_data" not in d]
    assert where == []
    feeds = random_feeds(source)
    for a, b in zip(evaluate(source, feeds), evaluate(found, feeds), strict=True):
        np.testing.assert_allclose(b, a, rtol=0, atol=1e-5 * np.abs(a).max())


NET = "(float[N,6,9,8] x) => (float[N,9] y) {{ c = Conv<pads=[1,1,1,1]>(x, w{}) [n] b = BN(c, n) r = Relu(b) "
NET += "[m] d = BN(r, m) e = Conv(d, v, u) g = GlobalAveragePool(e) f = Flatten(g) y = Gemm<transB=1>(f, z, k) }}"


def net(bias: bool = True) -> ModelProto:
    """A backward and a forward fold, with and without biases, and a layer that nothing touches."""
    given = {"w": (12, 6, 3, 3), "n": 12, "v": (30, 12, 3, 3), "u": (30,), "z": (9, 30), "k": (9,)}
    return model(NET.format(", a" if bias else ""), **given, **gentle("m", 12), **({"a": (12,)} if bias else {}))


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    """A few rows at a time, so that small models take the way of large ones."""
    monkeypatch.setattr(weights, "BLOCK", 200)
    monkeypatch.setattr(onnx_data, "EMBEDDED", 256)


# ---------------------------------------------------------------------- what the output is


LAYOUTS = {
    "one file": lambda m: everything_in(m),
    "page aligned": lambda m: everything_in(m, alignment=4096),
    "odd offsets": lambda m: {k: (f, 7 * n + 5) for n, (k, (f, _)) in enumerate(everything_in(m).items())},
    "two files": lambda m: {
        k: ("b.bin" if k in "wuz" else "sub/a.bin", o) for k, (_, o) in everything_in(m, alignment=32).items()
    },
    "a file for each tensor": lambda m: {t.name: (f"{t.name}.bin", 16) for t in m.graph.initializer},
    "only the weights": lambda m: {k: p for k, p in everything_in(m).items() if k in "wvz"},
    "only the norms": lambda m: {k: p for k, p in everything_in(m).items() if k[0] in "nm"},
}


def spread(places: Places, m: ModelProto) -> Places:
    """The same order with room for every tensor."""
    result, ends = {}, {}
    for name, (file, offset) in places.items():
        size = len(next(t for t in m.graph.initializer if t.name == name).raw_data)
        start = ends.get(file, 0)
        offset = offset if offset >= start else start + 5
        result[name], ends[file] = (file, offset), offset + size
    return result


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_a_fold_keeps_files_offsets_and_what_it_does_not_touch(layout, bias, tmp_path):
    source = net(bias)
    places = spread(LAYOUTS[layout](source), source)
    (tmp_path / "in").mkdir()
    (tmp_path / "out").mkdir()
    path = save(source, tmp_path / "in/net.onnx", places)
    before = contents(tmp_path / "in")
    report = fold_file(path, tmp_path / "out/net.onnx")
    assert len(report.folded) == 2
    assert report.verdict
    assert contents(tmp_path / "in") == before
    check_same(tmp_path / "out/net.onnx", source)

    new = bare(tmp_path / "out/net.onnx")
    for name, entry in entries(new).items():
        assert (entry["location"], int(entry["offset"])) == places[name], "offsets are kept"
    told = {e["location"] for e in entries(new).values()}
    assert set(contents(tmp_path / "out")) == {"net.onnx", *told}
    touched = {"w", "a", "v", "u"}
    for location in told:
        old, now = (np.frombuffer((tmp_path / d / location).read_bytes(), np.uint8) for d in ("in", "out"))
        assert len(old) == len(now)
        may = np.zeros(len(old), bool)
        for name, (file, offset) in places.items():
            if file == location and name in touched:
                may[offset : offset + len(next(t for t in source.graph.initializer if t.name == name).raw_data)] = True
        assert not (old != now)[~may].any(), "untouched bytes are identical"


@pytest.mark.parametrize("dtype", [np.float16, BF16], ids=str)
def test_half_types(dtype, tmp_path):
    text = "(T[N,6,9,8] x) => (T[N,12,9,8] y) { c = Conv<pads=[1,1,1,1]>(x, w) y = BN(c, n) }"
    text = text.replace("T[", "bfloat16[" if dtype == BF16 else "float16[")
    source = model(text, dtype=dtype, w=(12, 6, 3, 3), **gentle("n", 12))
    path = save(source, tmp_path / "net.onnx", everything_in(source))
    fold_file(path, tmp_path / "out.onnx", verify=False)
    assert not differences(bnfold.fold(source).model.graph.initializer[0], embedded(whole(tmp_path / "out.onnx")))


def embedded(m: ModelProto) -> TensorProto:
    first = m.graph.initializer[0]
    first.ClearField("external_data")
    first.ClearField("data_location")
    return first


SHARED = {
    "by two layers": (
        "(float[N,6,9,8] x) => (float[N,6,9,8] y, float[N,6,9,8] z) "
        "{ c = Conv<pads=[1,1,1,1]>(x, w) [n] y = BN(c, n) z = Conv<pads=[1,1,1,1]>(x, w) }"
    ),
    "by two layers that fold": (
        "(float[N,6,9,8] x) => (float[N,6,9,8] y, float[N,6,9,8] z) "
        "{ c = Conv<pads=[1,1,1,1]>(x, w) [n] y = BN(c, n) d = Conv<pads=[1,1,1,1]>(y, w) [m] z = BN(d, m) }"
    ),
    "with an output": (
        "(float[N,6,9,8] x) => (float[N,6,9,8] y, float[6,6,3,3] w) "
        "{ c = Conv<pads=[1,1,1,1]>(x, w) [n] y = BN(c, n) }"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SHARED)
def test_a_weight_that_others_read_gets_a_copy_at_the_end(case, tmp_path):
    source = model(
        SHARED[case], w=(6, 6, 3, 3), **gentle("n", 6), **(gentle("m", 6) if "(d, m)" in SHARED[case] else {})
    )
    places = everything_in(source, alignment=128)
    path = save(source, tmp_path / "net.onnx", places)
    old = (tmp_path / "weights.bin").read_bytes()
    report = fold_file(path, tmp_path / "out.onnx")
    check_same(tmp_path / "out.onnx", source)
    new = (tmp_path / "out.onnx.data").read_bytes()
    if case != "by two layers that fold":  # there the last one has the old place for itself
        assert report.bytes_added == 6 * 6 * 9 * 4
        assert new[: len(old)] == old
    appended = [int(e["offset"]) for e in entries(bare(tmp_path / "out.onnx")).values() if int(e["offset"]) >= len(old)]
    assert appended
    assert all(offset % 128 == 0 for offset in appended), "aligned as the others are"


def test_two_names_for_the_same_bytes(tmp_path):
    text = "(float[N,6,9,8] x) => (float[N,6,9,8] y, float[N,6,9,8] z) "
    text += "{ c = Conv<pads=[1,1,1,1]>(x, w) y = BN(c, n) z = Conv<pads=[1,1,1,1]>(x, v) }"
    source = model(text, w=(6, 6, 3, 3), **gentle("n", 6))
    source.graph.initializer.add().CopyFrom(source.graph.initializer[0])
    source.graph.initializer[-1].name = "v"
    path = save(source, tmp_path / "net.onnx", {"w": ("weights.bin", 0), "v": ("weights.bin", 0)})
    fold_file(path, tmp_path / "out.onnx")
    check_same(tmp_path / "out.onnx", source)


def test_a_merge_that_changes_the_kernels_size(tmp_path):
    text = "(float[N,8,9,8] x) => (float[N,8,9,8] y) { a = Conv<pads=[1,1,1,1]>(x, w) b = Conv(x, v) "
    text += "[n] c = BN(a, n) [m] d = BN(b, m) y = Add(c, d) }"
    source = model(text, w=(8, 8, 3, 3), v=(8, 8, 1, 1), n=8, m=8)
    path = save(source, tmp_path / "net.onnx", everything_in(source))
    report = fold_file(path, tmp_path / "out.onnx")
    assert any(f.norm is None for f in report.folded)
    check_same(tmp_path / "out.onnx", source)
    assert set(entries(bare(tmp_path / "out.onnx"))) == {"w"}


def test_a_weight_behind_a_transpose_joins_the_data(tmp_path):
    text = "(float[N,20] x) => (float[N,30] y) { t = Transpose(w) c = MatMul(x, t) y = BN(c, n) }"
    source = model(text, w=(30, 20), **gentle("n", 30))
    path = save(source, tmp_path / "net.onnx", everything_in(source))
    fold_file(path, tmp_path / "out.onnx")
    check_same(tmp_path / "out.onnx", source)
    assert [e["offset"] for e in entries(bare(tmp_path / "out.onnx")).values()] != []


def test_where_nothing_folds_the_files_come_back(tmp_path):
    source = net()
    (tmp_path / "out").mkdir()
    path = save(source, tmp_path / "net.onnx", everything_in(source), checksum="0123")
    fold_file(path, tmp_path / "out/net.onnx", only=["*"], skip=["n", "m"])
    assert contents(tmp_path / "out") == {k: v for k, v in contents(tmp_path).items() if "/" not in k}


def test_a_checksum_of_a_file_that_changed_goes(tmp_path):
    source = net()
    places = {"w": ("a.bin", 0), "z": ("b.bin", 0)}
    path = save(source, tmp_path / "net.onnx", places, checksum="0123")
    fold_file(path, tmp_path / "out.onnx")
    found = entries(bare(tmp_path / "out.onnx"))
    assert "checksum" not in found["w"]
    assert found["z"]["checksum"] == "0123"


@pytest.mark.parametrize("missing", ["offset", "length"])
def test_what_the_model_leaves_out(missing, tmp_path):
    source = net()
    path = save(source, tmp_path / "net.onnx", {"w": ("w.bin", 0)})
    stored = bare(path)
    for t in stored.graph.initializer:
        for entry in [e for e in t.external_data if e.key == missing]:
            t.external_data.remove(entry)
    onnx.save(stored, path)
    fold_file(path, tmp_path / "out.onnx", verify=missing == "length")
    check_same(tmp_path / "out.onnx", source)


# ---------------------------------------------------------------------- what is read


def test_only_what_a_fold_touches_is_read(tmp_path, monkeypatch):
    source = net()
    places = everything_in(source, alignment=4096)
    path = save(source, tmp_path / "net.onnx", places)
    seen: list[tuple[int, int]] = []
    read = ranges.Places.read

    def spy(self, offset, out):
        seen.append((offset, out.nbytes))
        read(self, offset, out)

    monkeypatch.setattr(ranges.Places, "read", spy)
    fold_file(path, tmp_path / "out.onnx", verify=False)
    of = {name: [n for o, n in seen if offset <= o < offset + 4096 * 4] for name, (_, offset) in places.items()}
    assert of["w"]
    assert max(of["w"]) < 12 * 6 * 9 * 4, "in slices of rows"
    z = places["z"][1]
    assert not [o for o, n in seen if n > 1024 and z <= o < z + 9 * 30 * 4], "an untouched weight is not read"


def test_a_dry_run_says_the_same_and_writes_nothing(tmp_path):
    source = net()
    path = save(source, tmp_path / "net.onnx", everything_in(source))
    before = contents(tmp_path)
    report = planned(OnnxGraph(open_onnx(path))).report
    assert report == bnfold.plan(source)
    assert contents(tmp_path) == before


def test_loaded_whole_it_is_the_same_model(tmp_path):
    source = net()
    path = save(source, tmp_path / "net.onnx", everything_in(source))
    assert not differences(source, bnfold.load(path))


def test_a_refusal_in_the_last_rows_gives_the_place_back(tmp_path):
    """The fold that overflows is barred when its first rows were written already."""
    source = model(
        "(float16[N,6,9,8] x) => (float16[N,90,9,8] y) { c = Conv<pads=[1,1,1,1]>(x, w) [n] y = BN(c, n) }",
        dtype=np.float16, w=np.ones((90, 6, 3, 3)), **gentle("n", 90),
    )  # fmt: skip
    gamma = next(t for t in source.graph.initializer if t.name == "n_s")
    values = onnx.numpy_helper.to_array(gamma).copy()
    values[-1] = 60000
    gamma.raw_data = values.tobytes()
    next(t for t in source.graph.initializer if t.name == "w").raw_data = np.full(
        (90, 6, 3, 3), 9, np.float16
    ).tobytes()
    path = save(source, tmp_path / "net.onnx", everything_in(source))
    report = fold_file(path, tmp_path / "out.onnx", verify=False)
    assert [k.reasons[0].reason for k in report.kept] == [Reason.OVERFLOW]
    assert (tmp_path / "out.onnx.data").read_bytes() == (tmp_path / "weights.bin").read_bytes()


# ---------------------------------------------------------------------- names and old files


def test_names_of_data_files(tmp_path):
    source = net()
    (tmp_path / "out").mkdir()
    path = save(source, tmp_path / "net.onnx", everything_in(source))
    two = save(source, tmp_path / "two.onnx", {"w": ("w.bin", 0), "z": ("z.bin", 0)})

    def made(source: Path, output: str, **options) -> set[str]:
        before = set(contents(tmp_path))
        fold_file(source, tmp_path / output, verify=False, **options)
        return set(contents(tmp_path)) - before

    assert made(path, "out/a.onnx") == {"out/a.onnx", "out/weights.bin"}
    assert made(path, "out/b.onnx") == {"out/b.onnx", "out/b.onnx.data"}, "another model has the name"
    assert made(path, "c.onnx") == {"c.onnx", "c.onnx.data"}, "the source has the name"
    assert made(two, "d.onnx") == {"d.onnx", "d.onnx.data", "d.onnx.data.2"}
    assert made(path, "c.onnx", force=True) == {"c.onnx.data.2"}, "the old output needs its own until the end"
    assert not (tmp_path / "c.onnx.data").exists()
    assert made(path, "c.onnx", force=True) == {"c.onnx.data"}
    check_same(tmp_path / "c.onnx", source)
    check_same(tmp_path / "out/a.onnx", source)


def test_in_place(tmp_path):
    source = net()
    path = save(source, tmp_path / "net.onnx", everything_in(source))
    fold_file(path, in_place=True)
    assert set(contents(tmp_path)) == {"net.onnx", "net.onnx.data"}
    check_same(path, source)
    assert not fold_file(path, in_place=True).folded
    assert set(contents(tmp_path)) == {"net.onnx", "net.onnx.data.2"}
    check_same(path, source)


def test_data_of_another_model_is_not_removed(tmp_path):
    source = net()
    path = save(source, tmp_path / "net.onnx", everything_in(source))
    save(source, tmp_path / "other.onnx", everything_in(source))
    fold_file(path, in_place=True)
    assert set(contents(tmp_path)) == {"net.onnx", "net.onnx.data", "other.onnx", "weights.bin"}
    check_same(path, source)
    assert not differences(source, bnfold.load(tmp_path / "other.onnx"))


def test_an_output_in_place_of_one_that_uses_the_sources_data(tmp_path):
    source = net()
    path = save(source, tmp_path / "net.pb", everything_in(source))
    shutil.copy(path, tmp_path / "out.onnx")
    fold_file(path, tmp_path / "out.onnx", force=True)
    assert set(contents(tmp_path)) == {"net.pb", "weights.bin", "out.onnx", "out.onnx.data"}


def test_a_model_that_is_its_own_data_file(tmp_path):
    """Nonsense that can be read: it must not remove the output with the old data."""
    source = net()
    path = save(source, tmp_path / "net.onnx", {"w": ("w.bin", 0)})
    assert path.stat().st_size > 12 * 6 * 9 * 4
    _rename(path, "net.onnx")
    fold_file(path, in_place=True, verify=False)
    assert set(contents(tmp_path)) == {"net.onnx", "net.onnx.data", "w.bin"}
    whole(path)


# ---------------------------------------------------------------------- results that one file cannot hold


def test_what_is_too_large_for_one_file_becomes_external(tmp_path, monkeypatch):
    source = model("(float[N,600] x) => (float[N,8] y) { c = MatMul(x, w) y = BN(c, n) }", w=(600, 8), **gentle("n", 8))
    monkeypatch.setattr(onnx_output, "LARGEST_FILE", 5000)
    done = export(source, tmp_path / "net.onnx")
    assert done.verdict
    assert set(contents(tmp_path)) == {"net.onnx", "net.onnx.data"}
    check_same(tmp_path / "net.onnx", source)
    (place,) = entries(bare(tmp_path / "net.onnx")).values()
    assert int(place["offset"]) % 4096 == 0
    monkeypatch.setattr(onnx_output, "LARGEST_FILE", 50)
    with pytest.raises(InvalidFileError, match="over 2 GB without its tensors"):
        export(source, tmp_path / "other.onnx")
    assert set(contents(tmp_path)) == {"net.onnx", "net.onnx.data"}


def test_a_message_that_protobuf_cannot_write_counts_as_too_large(tmp_path, monkeypatch):
    from google.protobuf.message import EncodeError

    class Large:
        graph = onnx.GraphProto()

        def SerializeToString(self):
            raise EncodeError("Failed to serialize proto")

    with pytest.raises(InvalidFileError):
        onnx_output.write_model(Large(), tmp_path / "net.onnx", lambda: "net.onnx.data")  # pyright: ignore


# ---------------------------------------------------------------------- what goes wrong


def _outside(tmp_path: Path) -> Path:
    (tmp_path / "in").mkdir()
    source = net()
    path = save(source, tmp_path / "in/net.onnx", {"w": ("w.bin", 0)})
    (tmp_path / "in/w.bin").rename(tmp_path / "w.bin")
    return path


def _rename(path: Path, location: str) -> None:
    m = bare(path)
    m.graph.initializer[0].external_data[0].value = location
    onnx.save(m, path)


@pytest.mark.parametrize("kind", ["climbing", "absolute", "link"])
def test_data_outside_the_models_folder_is_refused(kind, tmp_path):
    path = _outside(tmp_path)
    if kind == "link":
        (tmp_path / "in/w.bin").symlink_to(tmp_path / "w.bin")
    else:
        _rename(path, "../w.bin" if kind == "climbing" else str(tmp_path / "w.bin"))
    before = contents(tmp_path)
    with pytest.raises(InvalidFileError, match="unsafe"):
        fold_file(path, tmp_path / "out.onnx")
    assert contents(tmp_path) == before


@pytest.mark.parametrize(
    ("dims", "says"), [([12, 6, 3, 4], "asks for"), ([2**40, 2**40], "asks for"), ([12, 6, 3], "asks for")], ids=str
)
def test_a_shape_that_does_not_go_with_the_data(dims, says, tmp_path):
    path = save(net(), tmp_path / "net.onnx", {"w": ("w.bin", 0)})
    m = bare(path)
    del m.graph.initializer[0].dims[:]
    m.graph.initializer[0].dims.extend(dims)
    onnx.save(m, path)
    with pytest.raises(InvalidFileError, match=says):
        fold_file(path, tmp_path / "out.onnx")


@pytest.mark.parametrize(
    ("options", "error"),
    [({"require_all": True, "skip": ["n"]}, RemainingNormsError), ({"only": ["nothing"]}, UsageError)],
    ids=["require-all", "pattern"],
)
def test_an_error_leaves_nothing_behind(options, error, tmp_path):
    path = save(net(), tmp_path / "net.onnx", everything_in(net()))
    before = contents(tmp_path)
    with pytest.raises(error):
        fold_file(path, tmp_path / "out.onnx", **options)
    assert contents(tmp_path) == before
    assert len(list(tmp_path.iterdir())) == 2


def test_a_fold_that_fails_its_check_is_not_written(tmp_path, monkeypatch):
    path = save(net(), tmp_path / "net.onnx", everything_in(net()))
    before = contents(tmp_path)
    scale = weights.scale_rows

    def wrong(fmt, rows, factors, out):
        reason = scale(fmt, rows, factors, out)
        out *= np.float32(1.1)
        return reason

    monkeypatch.setattr(weights, "scale_rows", wrong)
    with pytest.raises(NotEquivalentError):
        fold_file(path, in_place=True)
    assert contents(tmp_path) == before


def test_data_that_cannot_be_read_any_more(tmp_path, monkeypatch):
    path = save(net(), tmp_path / "net.onnx", everything_in(net()))

    def open_then_cut(path: Path) -> OnnxFile:
        file = open_onnx(path)
        os.truncate(tmp_path / "weights.bin", 100)
        return file

    monkeypatch.setattr(exporter, "open_onnx", open_then_cut)
    with pytest.raises(InvalidFileError, match=r"weights\.bin"):
        fold_file(path, tmp_path / "out.onnx")
    assert set(contents(tmp_path)) == {"net.onnx", "weights.bin"}


CRASHES = Path(__file__).with_name("crashes.py")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the child is forked")
def test_kills_and_full_disks_leave_the_old_state(tmp_path):
    """Kills at ten points of a fold in place, and files that must not grow beyond five sizes; see crashes.py."""
    source = net()
    save(source, tmp_path / "net.onnx", everything_in(source))
    done = subprocess.run([sys.executable, CRASHES, tmp_path], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [k["died"] for k in found["kills"]] == [True] * 10
    assert [k["state"] for k in found["kills"]] == ["old"] * 8 + ["new"] * 2
    once, twice = ["net.onnx", "net.onnx.data"], ["net.onnx", "net.onnx.data.2"]
    assert [k["afterwards"] for k in found["kills"]] == [once] * 8 + [twice] * 2, "what was left over is gone"
    for limit in found["limits"]:
        assert (limit["code"], limit["state"], limit["files"]) == (6, "old", found["before"])
