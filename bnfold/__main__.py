"""`python -m bnfold` is the same program as `bnfold`."""

from bnfold.cli.main import run

run()
