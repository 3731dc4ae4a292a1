"""A small network and its files, as bytes: what tests of reading checkpoints share."""

import io
import json
import zipfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bnfold.checkpoint import load
from bnfold.errors import BnfoldError, InvalidFileError


class Net(nn.Module):
    def __init__(self, channels: int = 4):
        super().__init__()
        self.conv = nn.Conv2d(3, channels, 3)
        self.bn = nn.BatchNorm2d(channels)

    def forward(self, x):
        return self.bn(self.conv(x))


def net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    network = Net()
    network(torch.randn(8, 3, 8, 8) * 3 + 1)  # running statistics of its own
    return network.eval()


WEIGHTS = net().state_dict()


def saved(value: Any, **options: Any) -> bytes:
    torch.save(value, buffer := io.BytesIO(), **options)
    return buffer.getvalue()


def old(value: Any) -> bytes:
    return saved(value, _use_new_zipfile_serialization=False)


def zipped(members: dict[str, bytes | str], **options: Any) -> bytes:
    with zipfile.ZipFile(buffer := io.BytesIO(), "w", **options) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return buffer.getvalue()


@cache
def exported() -> dict[str, bytes]:
    """The members of a good exported program with a dynamic batch and height."""
    shapes = {"x": {0: torch.export.Dim.AUTO, 2: torch.export.Dim.AUTO}}
    program = torch.export.export(net(), (torch.randn(2, 3, 8, 8),), dynamic_shapes=shapes)
    torch.export.save(program, buffer := io.BytesIO())
    with zipfile.ZipFile(buffer) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def older(members: dict[str, bytes], **changed: Any) -> dict[str, bytes]:
    """The program in the layout that torch wrote before 2.8."""
    x = torch.randn(2, 3, 8, 8)
    weights = {k: v if k in dict(net().named_buffers()) else nn.Parameter(v) for k, v in WEIGHTS.items()}
    parts = {"state_dict": weights, "constants": {}, "example_inputs": ((x,), {}), **changed}
    document = next(data for name, data in members.items() if name.endswith("models/model.json"))
    version = json.loads(document)["schema_version"]
    return {
        "version": f"{version['major']}.{version['minor']}".encode(),
        "serialized_exported_program.json": document,
        **{f"serialized_{name}.pt": saved(value) for name, value in parts.items()},
    }


def refusal(file: Path, error: type[BnfoldError] = InvalidFileError, **options: Any) -> str:
    """The message, which is one line and names the file (or the factory)."""
    with pytest.raises(error) as caught:
        load(file, **options)
    message = str(caught.value)
    assert "\n" not in message
    assert str(file) in message or "factory" in message
    return message
