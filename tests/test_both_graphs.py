"""Torch and ONNX, the same network: both readers find the same norms, fold and keep the same, and write one result.

`python tests/test_both_graphs.py [PATTERN]` prints the table. A file exported by torch says of each node which module
it came from, so norms are matched by module. Weights are matched by nothing but their values: those that run in the
folded program (seen by torch's dispatcher) and those that layers of the folded file read must be the same collection,
each array within one ulp of its partner. All values are random, so no array is another's partner by chance. For the
weights only norms are folded: plain arithmetic differs between the graphs (ONNX writes an attention's scale as a Mul).
"""

from __future__ import annotations

import logging
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from onnx import ModelProto, numpy_helper
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._python_dispatch import TorchDispatchMode

import bnfold
from bnfold import Report
from bnfold.report import Folded

timm = pytest.importorskip("timm")
models = pytest.importorskip("torchvision.models")

Array = np.ndarray
Outcome = dict[str, str]  # what became of each norm, by module: "" (folded) or the reasons it stays

# Families of torchvision and timm, each by a small member; the side of the picture it is given.
QUICK = {"torchvision.resnet18": 64, "torchvision.shufflenet_v2_x0_5": 64, "timm.ese_vovnet19b_dw": 64,
         "timm.fastvit_t8": 64, "timm.inception_next_atto": 64}  # fmt: skip
LONG = {
    "torchvision.densenet121": 64, "torchvision.googlenet": 64, "torchvision.inception_v3": 96,
    "torchvision.mnasnet0_5": 64, "torchvision.mobilenet_v2": 64, "torchvision.mobilenet_v3_small": 64,
    "torchvision.regnet_y_400mf": 64, "torchvision.vgg11_bn": 64, "timm.convmixer_768_32": 64,
    "timm.cspdarknet53": 64, "timm.dla34": 64, "timm.dpn68": 64, "timm.efficientformer_l1": 224,
    "timm.efficientnet_b0": 64, "timm.ghostnet_100": 64, "timm.hrnet_w18_small": 64, "timm.levit_128s": 224,
    "timm.mixnet_s": 64, "timm.mobileone_s0": 64, "timm.mobilevit_xxs": 64, "timm.nextvit_small": 64,
    "timm.repghostnet_050": 64, "timm.repvgg_a0": 64, "timm.repvit_m0_9": 64, "timm.res2net50_26w_4s": 64,
    "timm.resnetv2_50": 64, "timm.skresnet18": 64, "timm.visformer_tiny": 224,
}  # fmt: skip


# ---------------------------------------------------------------------- a network and its two graphs


def made(name: str) -> nn.Module:
    """The network with random statistics: gamma negative, zero and tiny, variances 1e-12 and 1e6 among them.

    Epsilon is a double in torch and a float32 in ONNX: it is set to what both can say.
    """
    library, _, model = name.partition(".")
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        module = timm.create_model(model) if library == "timm" else getattr(models, model)(weights=None)
    generator = torch.Generator().manual_seed(1)
    for m in module.modules():
        if isinstance(m, _NormBase):
            draw = lambda t: torch.randn(t.shape, generator=generator)  # noqa: E731
            m.eps = float(np.float32(m.eps))
            m.running_mean.copy_(0.3 * draw(m.running_mean))
            m.running_var.copy_((0.5 * draw(m.running_var)).exp())
            m.weight.data.copy_(draw(m.weight))
            m.bias.data.copy_(draw(m.bias))
            m.running_var[:2] = torch.tensor([1e-12, 1e6])
            m.weight.data[:4] = torch.tensor([-1e-3, 1.5, 0.0, 1e-6])
    return module.eval()


def exported(program: torch.export.ExportedProgram) -> ModelProto:
    """The network as a file, as it is: torch's exporter would fold norms itself."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.onnx.export(program, dynamo=True, optimize=False, verbose=False).model_proto
    finally:
        logging.disable(level)


# ---------------------------------------------------------------------- what the reports say


def of_module(report: Report) -> Outcome:
    """By module; a norm that evaluation never calls is in no file."""
    kept = {k.norm: " ".join(r.reason for r in k.reasons) for k in report.kept}
    return {n.norm: kept.get(n.norm, "") for n in report.norms if kept.get(n.norm) != "not-executed"}


def of_file(report: Report) -> Outcome:
    kept = {k.norm: " ".join(r.reason for r in k.reasons) for k in report.kept}
    return {str(n.module): kept.get(n.norm, "") for n in report.norms}


# ---------------------------------------------------------------------- weights


class Weights(TorchDispatchMode):
    """The weights and biases that layers run with; matrices as [in, out], whose bias may be added apart."""

    PLACES: ClassVar = {"convolution": (1, 2), "addmm": (2, 0), "mm": (1,), "add": (1,), "add_": (1,)}

    def __init__(self, module: nn.Module):
        super().__init__()
        self.stored = {t.untyped_storage().data_ptr() for t in (*module.parameters(), *module.buffers())}
        self.found: list[Array] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        op = func._schema.name.removeprefix("aten::")
        for k in self.PLACES.get(op, ()):
            value = args[k]
            known = isinstance(value, torch.Tensor) and value.untyped_storage().data_ptr() in self.stored
            if known and (value.dim() == 1 or op not in ("add", "add_")):
                self.found.append(value.detach().numpy())
        return func(*args, **(kwargs or {}))


def weights_of_module(module: nn.Module, x: torch.Tensor) -> list[Array]:
    with torch.no_grad(), Weights(module) as seen:
        module(x)
    return seen.found


def weights_of_file(m: ModelProto) -> list[Array]:
    """Weights and biases of the layers; a matrix may stand transposed, a bias in an Add of its own."""
    stored = {t.name: t for t in m.graph.initializer}
    known = {o: n for n in m.graph.node for o in n.output}
    readers = Counter(name for n in m.graph.node for name in n.input)

    def array(name: str) -> Array | None:
        if name in stored:
            return numpy_helper.to_array(stored[name])
        node = known.get(name)
        inner = array(node.input[0]) if node is not None and node.op_type in ("Transpose", "Identity") else None
        return inner if inner is None or node.op_type == "Identity" else inner.T

    found: list[Array | None] = []
    for n in m.graph.node:
        if n.op_type in ("Conv", "ConvTranspose"):
            found += map(array, n.input[1:])
        elif n.op_type == "Gemm":
            weight = array(n.input[1])
            transposed = any(a.name == "transB" and a.i for a in n.attribute)
            found += [weight.T if transposed and weight is not None else weight, *map(array, n.input[2:])]
        elif n.op_type == "MatMul":
            weight = array(n.input[1])
            found.append(weight)
            users = [u for u in m.graph.node if n.output[0] in u.input]
            if weight is not None and readers[n.output[0]] == 1 and users[0].op_type == "Add":
                found += map(array, users[0].input)
    return [a for a in found if a is not None and a.dtype == np.float32]


def worst_ulp(ours: list[Array], theirs: list[Array]) -> float:
    """The farthest that a value is from its partner's, infinite where the collections do not pair up."""
    if Counter(a.shape for a in ours) != Counter(a.shape for a in theirs):
        return np.inf
    pairs = zip(sorted(ours, key=_place), sorted(theirs, key=_place), strict=True)
    return max((float(ulps(a, b).max(initial=0)) for a, b in pairs), default=0.0)


def _place(a: Array) -> tuple[tuple[int, ...], float]:
    """An order in which an ulp here and there changes nothing."""
    return a.shape, float(np.abs(a.astype(np.float64)).sum())


def ulps(a: Array, b: Array) -> Array:
    """How many float32 values lie between two."""

    def place(x: Array) -> Array:
        bits = x.view(np.int32).astype(np.int64)
        return np.where(bits < 0, -(bits & 0x7FFFFFFF), bits)

    return np.abs(place(np.ascontiguousarray(a)) - place(np.ascontiguousarray(b)))


# ---------------------------------------------------------------------- side by side


@dataclass(frozen=True)
class Comparison:
    """One architecture through both graphs."""

    name: str
    torch: Outcome
    onnx: Outcome
    merged: tuple[int, int]
    arrays: int
    ulp: float

    @property
    def same(self) -> bool:
        return self.torch == self.onnx and self.merged[0] == self.merged[1]


def compared(name: str, side: int) -> Comparison:
    module = made(name)
    x = torch.randn(2, 3, side, side, generator=torch.Generator().manual_seed(2))
    program = torch.export.export(module, (x,))
    file = exported(program)
    reports = bnfold.plan(module, x), bnfold.plan(file)
    ours, theirs = (norms_alone(program, bnfold.plan(program)), norms_alone(file, reports[1]))
    merged = tuple(sum(f.norm is None for f in r.report.folded) for r in (ours, theirs))
    weights = weights_of_module(ours.model.module(), x), weights_of_file(theirs.model)
    return Comparison(
        name, of_module(reports[0]), of_file(reports[1]), merged, len(weights[0]), worst_ulp(*weights)
    )  # fmt: skip


def norms_alone(model: Any, report: Report) -> Folded:
    """The model with its norms folded and nothing else."""
    return bnfold.fold(model, only=[n.norm for n in report.norms])


@pytest.mark.parametrize(
    ("name", "side"),
    [*QUICK.items(), *(pytest.param(*row, marks=pytest.mark.zoo) for row in LONG.items())],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_both_graphs_agree(name, side):
    found = compared(name, side)
    assert found.torch == found.onnx
    assert found.merged[0] == found.merged[1]
    assert found.torch, "no norm was found"
    assert found.arrays > len(found.torch) / 2, "the weights were not found"
    assert found.ulp <= 1


ROWS: dict[str, Callable[[list[Array]], list[Array]]] = {
    "nothing": lambda a: a,
    "an-ulp": lambda a: [np.nextafter(a[0], np.float32(9)), *a[1:]],
    "their-order": lambda a: a[::-1],
    "two-ulp": lambda a: [np.nextafter(np.nextafter(a[0], np.float32(9)), np.float32(9)), *a[1:]],
    "one-value": lambda a: [a[0], a[1] * np.float32(1.01), *a[2:]],
    "one-left-out": lambda a: a[1:],
    "one-transposed": lambda a: [a[0].T, *a[1:]],
}


@pytest.mark.parametrize("change", ROWS)
def test_what_a_comparison_of_weights_sees(change):
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=s).astype(np.float32) for s in ((4, 3), (5,), (4, 3), (2, 3, 3, 3))]
    found = worst_ulp(arrays, ROWS[change](arrays))
    assert found == {"nothing": 0, "an-ulp": 1, "their-order": 0, "two-ulp": 2}.get(change, found)
    assert change in ("nothing", "an-ulp", "their-order", "two-ulp") or found > 2


# ---------------------------------------------------------------------- the table


def table(pattern: str = "*") -> Iterator[str]:
    """A line for each architecture."""
    yield f"{'architecture':32} {'norms':>5} {'folded':>6} {'kept':>5} {'merged':>6}  same  ulp {'arrays':>6} seconds"
    for name, side in (QUICK | LONG).items():
        if fnmatch(name, pattern):
            start = time.monotonic()
            c = compared(name, side)
            folded, kept = (sum(bool(why) is stays for why in c.torch.values()) for stays in (False, True))
            yield (
                f"{name:32} {len(c.torch):5} {folded:6} {kept:5} {c.merged[0]:6}  {'yes' if c.same else 'NO ':4} "
                f"{c.ulp:4.0f} {c.arrays:6} {time.monotonic() - start:7.1f}"
            )
            for norm in sorted(n for n in c.torch.keys() | c.onnx.keys() if c.torch.get(n) != c.onnx.get(n)):
                yield f"    {norm}: torch {c.torch.get(norm)!r}, onnx {c.onnx.get(norm)!r}"


if __name__ == "__main__":
    torch.set_num_threads(1)
    for line in table(*sys.argv[1:2]):
        print(line, flush=True)
