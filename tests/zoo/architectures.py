"""Every torchvision and timm architecture: which there are, what their builders are told, which the sweep takes.

An architecture is named `torchvision/resnet18` or `timm/levit_128`. A few are also swept as a variant, with a suffix
that says which gammas are positive: `timm/convmixer_768_32+positive`.

The census builds each one on the meta device, which costs no memory, and counts its parameters and norms. The sweep
takes all that contain a norm, but for one rule: **an architecture above 150 million parameters is swept only when it
is the smallest of its family** (a family is the file of timm or torchvision that defines it); the others are listed as
skipped, with that reason.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

MOST_PARAMETERS = 150_000_000

# Norms whose gammas are made positive, by the suffix of the variant.
VARIANTS: Mapping[str, Mapping[str, str]] = {
    "timm/resnetv2_50": {"positive-stem": "stages.0.blocks.0.norm1"},  # behind the stem's max pooling
    "timm/convmixer_768_32": {"positive": "*"},
}

# What torchvision's builders are told. Detectors would resize to 800 pixels, drop what scores low (with random weights
# all there is, and nothing would be left to compare), and fetch a trained backbone.
_CONVOLUTIONS = {"init_weights": False}
_DENSE = {"weights_backbone": None}
_SINGLE_SHOT = {**_DENSE, "score_thresh": 0.0}
_ONE_STAGE = {**_SINGLE_SHOT, "min_size": 64, "max_size": 128}
_TWO_STAGE = {**_DENSE, "box_score_thresh": 0.0, "min_size": 64, "max_size": 128}
OPTIONS: Sequence[tuple[str, Mapping[str, Any]]] = (
    ("googlenet", _CONVOLUTIONS),
    ("inception_v3", _CONVOLUTIONS),
    ("*rcnn_*", _TWO_STAGE),
    ("fcos_*", _ONE_STAGE),
    ("retinanet_*", _ONE_STAGE),
    ("ssd*", _SINGLE_SHOT),
    ("deeplabv3_*", _DENSE),
    ("fcn_*", _DENSE),
    ("lraspp_*", _DENSE),
)


@dataclass(frozen=True)
class Architecture:
    """One network: its name with the suffix of its variant, and what the census found on the meta device."""

    name: str
    family: str
    parameters: int = 0
    norms: int = 0
    skipped: str = ""  # why the sweep leaves it out
    problem: str = ""  # why the census could not build it; the sweep tries again

    @property
    def base(self) -> str:
        """The name without the variant."""
        return self.name.partition("+")[0]


def is_norm(module: nn.Module) -> bool:
    """Whether a module acts by running statistics in evaluation: what bnfold counts."""
    if isinstance(module, _NormBase):
        return module.running_mean is not None and module.running_var is not None
    return type(module).__name__.startswith("Frozen") and hasattr(module, "running_var")


def norms_of(module: nn.Module) -> dict[str, nn.Module]:
    """The norms of the module tree, each under its first name."""
    return {name: m for name, m in module.named_modules() if is_norm(m)}


# ---------------------------------------------------------------------- the list


def names() -> list[str]:
    """All architectures, of both libraries."""
    import timm
    from torchvision import models

    quantized = {n for n in models.list_models() if "quantization" in models.get_model_builder(n).__module__}
    ours = [f"torchvision/{n}" for n in models.list_models() if n not in quantized]
    return ours + [f"timm/{n}" for n in timm.list_models(pretrained=False)]


def family_of(name: str) -> str:
    """The file of the library that defines the architecture."""
    library, _, model = name.partition("/")
    if library == "torchvision":
        from torchvision import models

        return models.get_model_builder(model).__module__.removeprefix("torchvision.models.")
    from timm.models import model_entrypoint

    return model_entrypoint(model).__module__.removeprefix("timm.models.")


def builder(name: str, **options: Any) -> nn.Module:
    """The network with random weights, in training mode, on torch's default device."""
    library, _, model = name.partition("/")
    if library == "torchvision":
        from torchvision import models

        told = next((o for pattern, o in OPTIONS if fnmatchcase(model, pattern)), {})
        return models.get_model(model, weights=None, **told, **options)
    import timm

    return timm.create_model(model, pretrained=False, **options)


def census(name: str) -> Architecture:
    """Parameters and norms of one architecture, counted on the meta device, or on the CPU where that fails."""
    found = Architecture(name, family_of(name))
    for device in ("meta", "cpu"):
        try:
            with warnings.catch_warnings(), torch.device(device):
                warnings.simplefilter("ignore")
                module = builder(name)
        except Exception as e:
            found = replace(found, problem=first_line(e))
            continue
        parameters = sum(p.numel() for p in module.parameters())
        return replace(found, parameters=parameters, norms=len(norms_of(module)), problem="")
    return found


def read_census(path: Path, progress: Callable[[str], None] = lambda _: None) -> list[Architecture]:
    """The census, from the file where it is there already, else taken and written to it (some minutes)."""
    if path.exists():
        return [Architecture(**row) for row in json.loads(path.read_text())]
    rows = []
    for name in names():
        progress(name)
        rows.append(census(name))
    path.write_text(json.dumps([asdict(r) for r in rows], indent=0))
    return rows


def chosen(rows: list[Architecture]) -> list[Architecture]:
    """What contains norms, variants included; what the rule leaves out is marked as skipped.

    The smallest of every family come first, the smallest ahead; then the second of every family, and so on: the first
    hundred already show what there is.
    """
    families: dict[str, list[Architecture]] = {}
    for r in sorted(rows, key=lambda r: (r.parameters, r.name)):
        if r.norms or r.problem:
            families.setdefault(r.family, []).append(r)
    ranked: list[tuple[int, int, Architecture]] = []
    for members in families.values():
        for rank, r in enumerate(members):
            if rank and r.parameters > MOST_PARAMETERS:
                r = replace(r, skipped=f"{r.parameters / 1e6:.0f} M parameters, a smaller one of its family is swept")
            ranked += [(rank, r.parameters, v) for v in (r, *_variants(r))]
    return [r for _, _, r in sorted(ranked, key=lambda row: (*row[:2], row[2].name))]


def _variants(row: Architecture) -> list[Architecture]:
    return [replace(row, name=f"{row.name}+{v}") for v in VARIANTS.get(row.name, ())]


def first_line(e: BaseException) -> str:
    """An exception in one line."""
    lines = [line.strip() for line in str(e).splitlines() if line.strip()]
    return f"{type(e).__name__}: {lines[0] if lines else ''}"[:200]
