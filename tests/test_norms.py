"""Running statistics as an affine map, and what is said of broken ones."""

from __future__ import annotations

import warnings
from decimal import Decimal, getcontext

import numpy as np
import pytest

from bnfold.norms import Broken, normalization_map

INF, NAN = np.inf, np.nan
getcontext().prec = 60


@pytest.fixture(autouse=True)
def _no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def arrays(*rows):
    return [None if r is None else np.asarray(r, float) for r in rows]


VALUES = {  # mean, variance, epsilon, gamma, beta
    "everyday": ([0.5, -2], [1, 3], 1e-5, [1.5, 0.3], [0.1, 4]),
    "no gamma": ([0.5, -2], [1, 3], 1e-5, None, [0.1, 4]),
    "no beta": ([0.5, -2], [1, 3], 1e-5, [1.5, 0.3], None),
    "neither": ([0.5, -2], [1, 3], 1e-5, None, None),
    "negative, zero and tiny gamma": ([1, 2, 3], [1, 2, 3], 1e-3, [-1, 0, 1e-30], [1, 0, -1]),
    "variances far out": ([1, 2, 3, 4], [1e-12, 1e6, 2.7e8, 0], 1e-5, [1, -1, 1, 2], [0, 0, 0, 0]),
    "smallest variance, epsilon 0": ([1], [5.6e-45], 0.0, [1], [0]),
    "subnormal variance": ([1], [5e-324], 0.0, [1], [0]),
    "negative variance under epsilon": ([1], [-1e-6], 1e-5, [1], [0]),
    "mean cancels beta": ([3], [1], 0.0, [2], [6]),
    "one number": (1.5, 4.0, 1e-5, 2.0, 1.0),
    "two dimensions": ([[1, 2], [3, 4]], [[1, 2], [3, 4]], 1e-5, [[1, -1], [2, 0]], [[0, 0], [1, 1]]),
    "no channels": ([], [], 1e-5, [], []),
}


@pytest.mark.parametrize(("mean", "variance", "epsilon", "gamma", "beta"), VALUES.values(), ids=VALUES)
def test_map(mean, variance, epsilon, gamma, beta):
    """Within a few roundings of the definition, in 60 digits; variance + epsilon as float64 has it."""
    given = arrays(mean, variance, gamma, beta)
    result = normalization_map(given[0], given[1], epsilon, given[2], given[3])
    assert not isinstance(result, Broken)
    scale, shift = result
    assert scale.shape == shift.shape == given[0].shape
    for index in np.ndindex(given[0].shape):
        m, g, b = (Decimal(0 if a is None else float(a[index])) for a in (given[0], *given[2:]))
        g = Decimal(1) if given[2] is None else g
        right = g / Decimal(float(given[1][index] + epsilon)).sqrt()
        assert abs(Decimal(float(scale[index])) - right) <= 4 * Decimal(2) ** -53 * abs(right)
        size = abs(m * right) + abs(b)
        assert abs(Decimal(float(shift[index])) - (b - m * right)) <= 6 * Decimal(2) ** -53 * size


BROKEN = {  # mean, variance, epsilon, gamma, beta: what is said
    "mean": ([0, NAN], [1, 1], 1e-5, [1, 1], [0, 0], "mean[1] = nan"),
    "variance nan": ([0, 0], [NAN, 1], 1e-5, [1, 1], [0, 0], "variance[0] = nan"),
    "variance inf": ([0, 0], [1, INF], 1e-5, [1, 1], [0, 0], "variance[1] = inf"),
    "gamma": ([0, 0], [1, 1], 1e-5, [-INF, 1], [0, 0], "gamma[0] = -inf"),
    "beta": ([0, 0], [1, 1], 1e-5, None, [0, NAN], "beta[1] = nan"),
    "negative": ([0, 0], [1, -1], 1e-5, None, None, "variance[1] + epsilon = -0.99999"),
    "minus infinity": ([0], [-INF], 1e-5, None, None, "variance[0] = -inf"),
    "zero": ([0], [0], 0.0, None, None, "variance[0] + epsilon = 0"),
    "zero sum": ([0], [-1e-5], 1e-5, None, None, "variance[0] + epsilon = 0"),
    "several": ([NAN, 0], [1, -2], 0.0, [1, INF], None, "mean[0] = nan, gamma[1] = inf, variance[1] + epsilon = -2"),
    "many": ([NAN] * 7, [1] * 7, 0.0, None, None,
             "mean[0] = nan, mean[1] = nan, mean[2] = nan, mean[3] = nan and 3 more"),
    "four": ([NAN] * 4, [1] * 4, 0.0, None, None, "mean[0] = nan, mean[1] = nan, mean[2] = nan, mean[3] = nan"),
    "two dimensions": ([[0, 0], [0, NAN]], [[1, 1], [1, 1]], 0.0, None, None, "mean[1, 1] = nan"),
}  # fmt: skip


@pytest.mark.parametrize(("mean", "variance", "epsilon", "gamma", "beta", "detail"), BROKEN.values(), ids=BROKEN)
def test_broken(mean, variance, epsilon, gamma, beta, detail):
    m, v, g, b = arrays(mean, variance, gamma, beta)
    assert normalization_map(m, v, epsilon, g, b) == Broken(detail)
