"""The zoo sweep in small: thirty fast architectures of distinct families on every run; the rest under `pytest -m zoo`.

All of them go through what the sweep does (`measure.py`): float64, every element, two batch sizes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

pytest.importorskip("timm")
pytest.importorskip("torchvision")

from architectures import Architecture, census, chosen, family_of, names
from measure import measure
from sweep import Job, outcomes
from table import EXPECTED, Expectation, judge

# Name -> norms that stay, by their first reason.
FAST: Mapping[str, Mapping[str, int]] = {
    "timm/test_resnet": {},
    "timm/test_byobnet": {},
    "timm/starnet_s050": {},
    "timm/test_efficientnet": {},
    "timm/fasternet_t0": {},
    "timm/lcnetv2_small": {},
    "timm/cspnext_tiny": {},
    "timm/resnetv2_18": {"multiple-consumers": 9},  # in front of a ReLU, where the shortcut leaves
    "timm/test_coatnet": {},
    "timm/dla46x_c": {},
    "timm/ese_vovnet19b_slim_dw": {},
    "torchvision/shufflenet_v2_x0_5": {},
    "timm/legacy_seresnet18": {},
    "timm/cs3darknet_focus_s": {},
    "timm/regnetx_002": {},
    "timm/inception_next_atto": {},
    "timm/resnest14d": {},
    "timm/hgnetv2_b0": {},
    "timm/skresnet18": {},
    "timm/mobilenetv3_small_050": {},
    "timm/cpubone_nano": {},
    "torchvision/mobilenet_v2": {},
    "timm/visformer_tiny": {},
    "torchvision/lraspp_mobilenet_v3_large": {},
    "timm/efficientvit_b0": {},
    "timm/fastvit_t8": {},
    "timm/mobilevit_xxs": {},
    "timm/swiftformer_xs": {},
    "timm/repghostnet_050": {},
    "timm/xcit_nano_12_p8_224": {"unsupported-op": 12},  # between a GELU and a padded convolution
}


@pytest.mark.parametrize("name", FAST)
def test_fast(name: str):
    row = measure(Architecture(name, family_of(name)))
    assert row["status"] == "ok", row
    assert row["norms"] > 0
    assert row["reasons"] == FAST[name], row["both"]


def test_the_fast_ones_are_of_distinct_families():
    assert len(FAST) == len({family_of(name) for name in FAST}) == 30


@pytest.mark.zoo
@pytest.mark.parametrize("expected", EXPECTED, ids=lambda e: e.name)
def test_named(expected: Expectation):
    assert judge(expected, in_its_own_process(Architecture(expected.name, ""))) == ""


@pytest.fixture(scope="session")
def everything() -> dict[str, Architecture]:
    """All that the sweep would do, and what it leaves out."""
    return {r.name: r for r in chosen([census(name) for name in names()])}


@pytest.mark.zoo
@pytest.mark.parametrize("name", names())
def test_all(name: str, everything: dict[str, Architecture]):
    if name not in everything:
        return  # no norms
    if everything[name].skipped:
        pytest.skip(everything[name].skipped)
    row = in_its_own_process(everything[name])
    assert row["status"] == "ok", row


def in_its_own_process(found: Architecture) -> dict[str, Any]:
    """The row of one architecture, with the limits of the sweep."""
    [(_, row)] = outcomes([Job("fold", found)], workers=1, timeout=600, memory=12 * 2**30)
    return row
