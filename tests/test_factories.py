"""The factory and its arguments, as a command line names them."""

import sys
from pathlib import Path

import pytest
import torch
from checkpoints import refusal
from torch import nn

from bnfold.checkpoint import load
from bnfold.errors import UsageError
from bnfold.factories import parse_factory_args, resolve_factory

ARGS = {
    "integer": ("n=10", 10),
    "float": ("x=1e-3", 1e-3),
    "json-word": ("b=true", True),
    "json-null": ("b=null", None),
    "python-word": ("b=False", False),
    "python-none": ("b=None", None),
    "list": ("d=[2, 3]", [2, 3]),
    "object": ('d={"a": 1}', {"a": 1}),
    "quoted": ('s="10"', "10"),
    "text": ("name=resnet18", "resnet18"),
    "text-with-equals": ("s=a=b", "a=b"),
    "text-like-a-number": ("s=007", "007"),
    "nothing": ("s=", ""),
}


@pytest.mark.parametrize("name", ARGS)
def test_factory_argument(name):
    item, value = ARGS[name]
    assert list(parse_factory_args([item]).values()) == [value]
    assert [type(v) for v in parse_factory_args([item]).values()] == [type(value)]


@pytest.mark.parametrize("item", ["n", "=3", "a-b=3", ""])
def test_factory_argument_refused(item):
    with pytest.raises(UsageError, match="key=value"):
        parse_factory_args([item])


MODULE = """
import torch
from sibling_net import CHANNELS
class Net(torch.nn.Conv2d):
    def __init__(self, channels=CHANNELS):
        super().__init__(3, channels, 3)
class zoo:
    small = staticmethod(lambda: Net(1))
TABLE = {}
"""
SPECS = {
    "no-colon": ("torchvision.models", "has no module or no callable"),
    "no-attribute": ("torch:", "has no module or no callable"),
    "no-module": ("nowhere_net:Net", "no module 'nowhere_net'"),
    "no-submodule": ("torch.nowhere:Net", "no module 'torch.nowhere'"),
    "no-file": ("nowhere/net.py:Net", "no such file"),
    "misspelt": ("factory_net:Nett", "has no 'Nett'; did you mean Net"),
    "misspelt-in-file": ("factory_net.py:zoo.smal", "has no 'smal'; did you mean small"),
    "not-callable": ("factory_net:TABLE", "no callable but a dict"),
    "broken": ("broken_net:Net", "importing broken_net failed (ZeroDivisionError"),
    "broken-import": ("needing_net:Net", "importing needing_net failed (ModuleNotFoundError: No module named 'nowhere"),
    "exiting": ("exiting_net.py:Net", "importing exiting_net.py failed (SystemExit"),
    "syntax": ("syntax_net:Net", "importing syntax_net failed (SyntaxError"),
}


@pytest.fixture
def code(tmp_path, monkeypatch):
    texts = {
        "factory_net": MODULE,
        "sibling_net": "CHANNELS = 5",
        "broken_net": "1 / 0",
        "needing_net": "import nowhere_net",
        "exiting_net": "raise SystemExit(2)",
        "syntax_net": "def",
    }
    for name, text in texts.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name in texts:
        sys.modules.pop(name, None)


@pytest.mark.parametrize("name", SPECS)
def test_factory_refused(name, code):
    spec, says = SPECS[name]
    with pytest.raises(UsageError) as caught:
        resolve_factory(spec)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("spec", ["factory_net:Net", "factory_net.py:Net", "{code}/factory_net.py:zoo.small"])
def test_factory_resolved(spec, code):
    before = list(sys.path)
    assert resolve_factory(spec.format(code=code))().weight.shape[0] in (1, 5)
    assert sys.path == before


def test_factory_with_arguments(code):
    torch.save(nn.Conv2d(3, 7, 3).state_dict(), "w.pt")
    assert load("w.pt", factory="factory_net:Net", factory_args={"channels": 7}).weight.shape[0] == 7
    assert "the network of factory_net:Net, 2 shapes differ" in refusal(Path("w.pt"), factory="factory_net:Net")
