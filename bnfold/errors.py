"""What bnfold raises. Every message is one line: the file, node or key, what was found, what to do."""

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

AGAIN = "copy or download it again"
FLOAT_FIRST = "fold the float network, then quantize that"


class BnfoldError(Exception):
    """Base of all errors bnfold raises on purpose.

    `exit_code` is what the command line returns for it; `report` is the Report so far, where there is one.
    """

    exit_code = 1

    def __init__(self, message: str, report: Any = None):
        super().__init__(message)
        self.report = report


class UsageError(BnfoldError):
    """The call itself is wrong: a bad option, a missing factory or input, a wrong input shape, an absent provider."""

    exit_code = 2


class NotEquivalentError(BnfoldError):
    """The candidate does not compute what the reference computes."""

    exit_code = 3


class RemainingNormsError(BnfoldError):
    """Normalizations remain although every one was required to fold."""

    exit_code = 4


class InvalidFileError(BnfoldError):
    """A file is missing, unreadable, unsafe or invalid, its keys do not fit, or an output cannot be written."""

    exit_code = 6


class BrokenStatisticsError(InvalidFileError):
    """Running statistics are NaN, infinite, or variance + epsilon is not positive: no right result exists."""


class CaptureError(BnfoldError):
    """A module cannot be turned into a graph; the message carries the exporter's first line."""

    exit_code = 2


@contextmanager
def about(path: Path | None, *caught: type[BnfoldError], raised: type[BnfoldError] | None = None) -> Generator[None]:
    """Let errors of these types name the file that the network came from; `raised` is the type they become."""
    try:
        yield
    except caught as error:
        if path is None:
            raise
        raise (raised or type(error))(f"{path}: {error}", error.report) from error


def first_line(error: BaseException) -> str:
    """The type of an error and the first line of what it says, for a message of ours that stays one line."""
    first = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {first[:200]}".rstrip(": ")


def some_of(names: Iterable[Any]) -> str:
    """The first three of the names, and how many more there are."""
    shown = [str(n) for n in names]
    return ", ".join(shown[:3]) + (f" and {len(shown) - 3} more" if len(shown) > 3 else "")
