"""What the README says is true: its commands are CI's, its table of reasons is the program's, its names exist."""

import re
from pathlib import Path

import bnfold
from bnfold.report import REASONS

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def reasons_table():
    rows = "\n".join(f"| `{r}` | {d.meaning} | {d.remedy} |" for r, d in REASONS.items())
    return f"| reason | what it means | what to do |\n|---|---|---|\n{rows}"


def test_the_table_of_reasons_is_generated():
    found = re.search(r"<!-- reasons -->\n(.*?)\n<!-- /reasons -->", README, re.DOTALL)
    assert found is not None
    assert found[1] == reasons_table(), "run `python tests/test_readme.py`"


def test_ci_runs_the_commands():
    for marker in ("main-command", "test-command"):
        assert re.search(rf"<!-- {marker} -->\n```sh\n.+\n```", README)
        assert marker in (ROOT / ".ci" / "run").read_text()


def test_every_public_name_is_importable():
    assert len(bnfold.__all__) <= 12
    for name in bnfold.__all__:
        assert callable(getattr(bnfold, name))


if __name__ == "__main__":
    text = re.sub(r"(<!-- reasons -->\n).*?(<!-- /reasons -->)",
                  lambda m: f"{m[1]}{reasons_table()}\n{m[2]}", README, flags=re.DOTALL)  # fmt: skip
    (ROOT / "README.md").write_text(text)
