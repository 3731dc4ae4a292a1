"""The callable that builds a network, as a command line names it: `package.module:callable` or `path/net.py:callable`.

A checkpoint of bare weights does not say which network they belong to; the factory does. Whatever a person's own code
raises while it is imported or called comes back as one line that names the factory.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import UsageError, first_line

if TYPE_CHECKING:
    from torch import nn


def parse_factory_args(items: Sequence[str]) -> dict[str, Any]:
    """Keyword arguments from "key=value": the value is JSON or True, False, None where it reads so, else text."""
    args: dict[str, Any] = {}
    for item in items:
        key, equals, text = item.partition("=")
        if not equals or not key.isidentifier():
            raise UsageError(f"--factory-arg {item!r} is not of the form key=value, e.g. num_classes=10")
        words = {"True": True, "False": False, "None": None}
        args[key] = words.get(text, text)
        with suppress(ValueError):
            args[key] = json.loads(text)
    return args


def _with_colon(spec: str) -> str:
    """How a factory is written, from what was."""
    if spec.endswith(".py"):
        return f"name what to call in it, {spec}:Net"
    if re.fullmatch(r"\w+(\.\w+)+", spec):
        return f"did you mean {':'.join(spec.rsplit('.', 1))}?"
    return "write package.module:callable or net.py:Net"


def resolve_factory(spec: str) -> Callable[..., Any]:
    """The callable that "package.module:attribute.attribute" or "path/net.py:attribute" names, else a UsageError."""
    target, colon, attributes = spec.rpartition(":")
    if not colon or not target or not attributes:
        raise UsageError(f"--factory {spec!r} has no module or no callable; {_with_colon(spec)}")
    value: Any = _import(spec, target)
    for part in attributes.split("."):
        if not hasattr(value, part):
            close = difflib.get_close_matches(part, dir(value), 3)
            hint = f"did you mean {' or '.join(close)}?" if close else "check the spelling"
            raise UsageError(f"--factory {spec!r}: {target} has no {part!r}; {hint}")
        value = getattr(value, part)
    if not callable(value):
        raise UsageError(
            f"--factory {spec!r} is no callable but a {type(value).__name__}; name what builds the network"
        )
    return value


def _import(spec: str, target: str) -> Any:
    file = Path(target).resolve() if target.endswith(".py") else None
    if file and not file.is_file():
        raise UsageError(f"--factory {spec!r}: no such file {file}; check the path")
    importlib.invalidate_caches()
    try:
        with importable(file.parent if file else Path.cwd()):
            if not file:
                return importlib.import_module(target)
            found = importlib.util.spec_from_file_location(f"_bnfold_factory_{file.stem}", file)
            assert found
            assert found.loader
            module = sys.modules[found.name] = importlib.util.module_from_spec(found)
            found.loader.exec_module(module)
            return module
    except ModuleNotFoundError as error:
        if not file and error.name and f"{target}.".startswith(f"{error.name}."):
            raise UsageError(
                f"--factory {spec!r}: no module {error.name!r} in {Path.cwd()}, PYTHONPATH or what is installed; "
                "run where it is, or set PYTHONPATH"
            ) from None
        raise UsageError(
            f"--factory {spec!r}: importing {target} failed ({first_line(error)}); mend it first"
        ) from error
    except (Exception, SystemExit) as error:
        raise UsageError(
            f"--factory {spec!r}: importing {target} failed ({first_line(error)}); mend it first"
        ) from error


def build_network(factory: str | Callable[..., Any], args: Mapping[str, Any]) -> tuple[nn.Module, str]:
    """The network that a factory returns, and the factory's name for messages. Raises UsageError when it fails."""
    import torch
    from torch import nn

    build = resolve_factory(factory) if isinstance(factory, str) else factory
    name = factory if isinstance(factory, str) else getattr(factory, "__qualname__", repr(factory))
    try:
        with importable(Path.cwd()):
            network = build(**args)
    except (Exception, SystemExit) as error:
        raise UsageError(f"the factory {name} failed ({first_line(error)}); check it and each --factory-arg") from error
    if not isinstance(network, nn.Module):
        raise UsageError(f"the factory {name} returned a {type(network).__name__}; it must return a torch.nn.Module")
    if any(t.is_meta for t in network.state_dict().values() if isinstance(t, torch.Tensor)):
        raise UsageError(f"the factory {name} built the network on the meta device; let it build on the CPU")
    return network, name


@contextmanager
def importable(folder: Path) -> Iterator[None]:
    """Let modules in a folder be imported, as `python -m` lets those in the current one."""
    entry = str(folder)
    absent = entry not in sys.path
    if absent:
        sys.path.insert(0, entry)
    try:
        yield
    finally:
        if absent:
            with suppress(ValueError):
                sys.path.remove(entry)
