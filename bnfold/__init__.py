"""bnfold: fold batch normalization out of PyTorch and ONNX networks, verified, with a reason for every norm left.

The names below are imported on first use, so that ONNX-only work never pays for importing torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .checkpoint import load as load
    from .errors import BnfoldError as BnfoldError
    from .exporter import export as export
    from .notes import apply_note as apply_note
    from .report import Reason as Reason
    from .report import Report as Report
    from .report import Verdict as Verdict
    from .transform import fold as fold
    from .transform import plan as plan
    from .verification import verify as verify

_HOME = {
    "BnfoldError": "errors",
    "Reason": "report",
    "Report": "report",
    "Verdict": "report",
    "apply_note": "notes",
    "export": "exporter",
    "fold": "transform",
    "load": "checkpoint",
    "plan": "transform",
    "verify": "verification",
}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'bnfold' has no attribute {name!r}")
    value = getattr(import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
