"""The quick product of rows and scales, bit by bit, against the one that is proved in test_rounding."""

from __future__ import annotations

import dataclasses
import warnings

import numpy as np
import pytest
from test_weights import LAYOUTS, layer_of, maps, near_ties, solved

from bnfold import scaling, weights
from bnfold.report import Reason
from bnfold.rounding import BFLOAT16, FLOAT16, FLOAT32, FLOAT64, FloatFormat, round_product
from bnfold.scaling import scale_rows
from bnfold.weights import NewWeights

EVERY = [FLOAT32, FLOAT16, BFLOAT16, FLOAT64]


@pytest.fixture(autouse=True)
def _no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def bits(a: np.ndarray) -> list[int]:
    return a.view(f"u{a.itemsize}").reshape(-1).tolist()


def check(fmt, rows: np.ndarray, *factors: np.ndarray) -> Reason | None:
    out = np.full(rows.shape, 7, rows.dtype)
    reason = scale_rows(fmt, rows, factors, out)
    if reason is None:
        assert bits(out) == bits(fmt.pack(round_product(fmt, fmt.unpack(rows), *factors)))
    return reason


def tiny(rng, n: int) -> np.ndarray:
    """Numbers around the smallest normal and the smallest subnormal one of float32, and zeros."""
    return np.ldexp(rng.uniform(-2, 2, n), rng.integers(-151, -123, n)).astype(np.float32) * rng.integers(0, 2, n)


CASES = {
    "normal": lambda rng: (rng.normal(size=(40, 50)), rng.normal(size=(40, 1))),
    "both sides": lambda rng: (rng.normal(size=(40, 50)), rng.normal(size=(40, 1)), rng.normal(size=(1, 50))),
    "few bits": lambda rng: (rng.integers(-99, 99, (40, 50)), np.ldexp(rng.integers(1, 99, (40, 1)), -30)),
    "zero scales": lambda rng: (rng.normal(size=(40, 50)), rng.normal(size=(40, 1)) * rng.integers(0, 2, (40, 1))),
    "zero weights": lambda rng: (rng.normal(size=(40, 50)) * rng.integers(0, 2, (40, 50)), rng.normal(size=(40, 1))),
    "subnormal results": lambda rng: (tiny(rng, 2000).reshape(40, 50), rng.uniform(1, 2, (40, 1))),
    "small times small": lambda rng: (tiny(rng, 2000).reshape(40, 50) * 2.0**60, 2.0**-60 * rng.uniform(1, 2, (40, 1))),
    "far scales": lambda rng: (rng.normal(size=(40, 50)), np.full((40, 1), 2.0**-1060), np.full((1, 50), 2.0**1020)),
    "near the largest": lambda rng: (rng.uniform(1, 2, (40, 50)) * 2.0**127, rng.uniform(0.5, 0.9999, (40, 1)) * 0.99),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("piece", [1 << 15, 64, 7])
def test_float32_is_rounded_as_it_is_proved(case, piece, monkeypatch):
    monkeypatch.setattr(scaling, "PIECE", piece)
    rows, *factors = CASES[case](np.random.default_rng(len(case)))
    assert check(FLOAT32, rows.astype(np.float32), *(f.astype(np.float64) for f in factors)) is None


@pytest.mark.parametrize("count", [2, 3])
def test_near_ties(count):
    n = 40000
    rows, *factors = near_ties(np.random.default_rng(count), FLOAT32, n, count)
    twice = np.prod([rows, *factors], axis=0).astype(np.float32)
    assert (twice != round_product(FLOAT32, rows, *factors)).sum() > n / 50, "where two roundings differ from one"
    assert check(FLOAT32, rows.astype(np.float32), *factors) is None


@pytest.mark.parametrize("kept", [2, 12, 20])
def test_near_ties_of_subnormal_results(kept):
    """Products that keep so many bits: their midpoints lie elsewhere than those of normal numbers."""
    coarse = FloatFormat("coarse", kept, -1022, 1.0)
    rows, scale = near_ties(np.random.default_rng(kept), coarse, 4000, 2)
    scale = scale * 2.0 ** (kept - 150)  # a unit in the last place of the result is the least float32
    twice = (rows * scale).astype(np.float32)
    assert (twice != round_product(FLOAT32, rows, scale)).sum() > 40
    assert check(FLOAT32, rows.astype(np.float32), scale) is None


@pytest.mark.parametrize("fmt", EVERY, ids=lambda f: f.name)
def test_all_types(fmt):
    rng = np.random.default_rng(0)
    rows = fmt.pack(round_product(fmt, rng.normal(size=(3, 40, 5, 7))))
    assert check(fmt, rows, rng.normal(size=(3, 40, 1, 1)), rng.normal(size=(3, 1, 5, 1))) is None


REFUSED = {
    "overflow": (2.0**127, 4.0, Reason.OVERFLOW),
    "just overflow": (FLOAT32.max_finite, 1 + 2.0**-24, Reason.OVERFLOW),
    "underflow": (2.0**-126, 2.0**-60, Reason.UNDERFLOW),
    "far underflow": (1.0, 1e-320, Reason.UNDERFLOW),
    "nan": (np.nan, 2.0, Reason.NOT_FINITE),
    "infinity": (-np.inf, 2.0, Reason.NOT_FINITE),
    "infinity times zero": (np.inf, 0.0, Reason.NOT_FINITE),
    "nothing wrong": (2.0**-126, 0.0, None),
    "a subnormal weight may go": (2.0**-130, 2.0**-60, None),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("at", [0, 999])
def test_what_does_not_fit(case, at, monkeypatch):
    monkeypatch.setattr(scaling, "PIECE", 100)
    weight, scale, reason = REFUSED[case]
    rows, factor = np.ones((1000, 3), np.float32), np.ones((1000, 1))
    rows[at, 1], factor[at] = weight, scale
    assert check(FLOAT32, rows, factor) is reason


# ---------------------------------------------------------------------- in slices


@pytest.mark.parametrize("fmt", EVERY, ids=lambda f: f.name)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("sides", ["pre", "post", "both"])
def test_slices_give_the_same_bits(fmt, layout, sides, monkeypatch):
    rng = np.random.default_rng([len(str(layout)), len(sides), fmt.precision])
    layer = layer_of(layout, rng, fmt, bias=True)
    pre = maps(rng, layer.in_channels, fmt) if sides != "post" else None
    post = maps(rng, layer.out_channels, fmt) if sides != "pre" else None
    whole = solved(layer, pre, post)
    assert isinstance(whole, NewWeights)
    for block in (1, 20, 61):
        monkeypatch.setattr(weights, "BLOCK", block)
        sliced = solved(layer, pre, post)
        assert isinstance(sliced, NewWeights)
        assert (sliced.weight is None) == (whole.weight is None)
        if sliced.weight is not None and whole.weight is not None:
            assert bits(sliced.weight) == bits(whole.weight)
        assert sliced.bias is not None
        assert whole.bias is not None
        assert bits(sliced.bias) == bits(whole.bias)


def test_a_table_in_slices(monkeypatch):
    rng = np.random.default_rng(0)
    layer = layer_of(LAYOUTS["matmul"], rng, FLOAT32, bias=False)
    table = dataclasses.replace(layer, index_input=True, in_axis=0)
    whole = solved(table, None, maps(rng, 6, FLOAT32))
    monkeypatch.setattr(weights, "BLOCK", 6)
    rng = np.random.default_rng(0)
    layer_of(LAYOUTS["matmul"], rng, FLOAT32, bias=False)
    sliced = solved(table, None, maps(rng, 6, FLOAT32))
    assert isinstance(whole, NewWeights)
    assert isinstance(sliced, NewWeights)
    assert whole.weight is not None
    assert sliced.weight is not None
    assert bits(whole.weight) == bits(sliced.weight)


def test_the_first_refusal_in_order_is_the_one(monkeypatch):
    rng = np.random.default_rng(0)
    layer = layer_of(LAYOUTS["gemm"], rng, FLOAT16, bias=False)
    scale = np.ones(6)
    scale[2], scale[5] = 2.0**-60, 2.0**60
    monkeypatch.setattr(weights, "BLOCK", 7)
    refusal = solved(layer, None, (scale, np.zeros(6)), rank=2)
    assert not isinstance(refusal, NewWeights)
    assert refusal.reason is Reason.UNDERFLOW
