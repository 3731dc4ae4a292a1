"""What a sweep found, as a table: a line per architecture, totals by reason, and what must hold."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LOST = ("unsupported-op", "unknown-shape", "not-captured")  # reasons that say bnfold falls short, not algebra
LOST_LIMIT = 0.02  # of all norms


@dataclass(frozen=True)
class Expectation:
    """How many norms a named architecture has, and how many at most are left; reasons that may keep more."""

    name: str
    norms: int | None
    left: int
    argued: tuple[str, ...] = ()


# The norms left where all that algebra allows is folded.
EXPECTED = (
    Expectation("timm/repvgg_a0", None, 0),
    Expectation("timm/mobileone_s4", None, 0),
    Expectation("timm/repvit_m0_9", None, 0),
    Expectation("timm/repghostnet_050", None, 0),
    Expectation("timm/fastvit_t8", None, 0),
    Expectation("timm/levit_128", 64, 0),
    Expectation("timm/mixnet_s", 49, 0),
    Expectation("timm/visformer_tiny", 28, 0),
    Expectation("timm/inception_next_tiny", 22, 0),
    Expectation("timm/nextvit_small", 61, 0),
    Expectation("torchvision/densenet121", 121, 62),
    Expectation("timm/densenet121", 121, 62),
    Expectation("timm/resnetv2_50", 49, 17),
    Expectation("timm/resnetv2_50+positive-stem", 49, 16),
    Expectation("timm/convmixer_768_32", 65, 64),
    Expectation("timm/convmixer_768_32+positive", 65, 32),
)


def read_results(path: Path) -> dict[str, dict[str, Any]]:
    """Rows by name; of several lines on one architecture the last counts, key by key for folds and peers."""
    found: dict[str, dict[str, Any]] = {}
    if not path.exists():
        return found
    for text in path.read_text().splitlines():
        row = json.loads(text)
        old = found.get(row["name"], {})
        mine = {k: v for k, v in old.items() if (k in ("onnx", "jit")) == (row["kind"] == "fold") or k == "name"}
        found[row["name"]] = mine | {k: v for k, v in row.items() if k != "kind"}
    return found


def judge(expected: Expectation, row: Mapping[str, Any] | None) -> str:
    """Empty when the row is as expected, else what is not."""
    if row is None:
        return "not swept"
    if row.get("status") != "ok":
        return f"{row.get('status')}: {row.get('problem', '')}"
    if expected.norms is not None and row["norms"] != expected.norms:
        return f"{row['norms']} norms, expected {expected.norms}"
    left = sum(n for reason, n in row["reasons"].items() if reason not in expected.argued)
    return "" if left <= expected.left else f"{row['kept']} left, expected {expected.left}: {counted(row['reasons'])}"


def counted(reasons: Mapping[str, int]) -> str:
    return ", ".join(f"{n} {reason}" for reason, n in reasons.items())


@dataclass(frozen=True)
class Totals:
    """Sums over the rows that were folded."""

    rows: int
    norms: int
    folded: int
    kept: int
    reasons: Counter[str]

    @property
    def lost(self) -> float:
        """The share of norms that a shortcoming of bnfold keeps."""
        return sum(self.reasons[r] for r in LOST) / max(self.norms, 1)


def totals(rows: Mapping[str, Mapping[str, Any]]) -> Totals:
    """Over all architectures, variants left out so that nothing counts twice."""
    done = [r for name, r in rows.items() if "reasons" in r and "+" not in name]
    reasons: Counter[str] = Counter()
    for r in done:
        reasons.update(r["reasons"])
    calls = sum(r["folded"] + r["kept"] for r in done)
    return Totals(len(done), calls, sum(r["folded"] for r in done), sum(r["kept"] for r in done), reasons)


# ---------------------------------------------------------------------- for people

WIDTH = 180  # at least: a narrower terminal wraps names
COLUMNS = ("architecture", "M", "norms", "left", "why", "onnx", "jit", "error", "s", "GiB", "result", "input")


def cells(name: str, row: Mapping[str, Any]) -> tuple[str, ...]:
    """One line of the table."""
    size = f"{row.get('parameters', 0) / 1e6:.1f}"
    peers = tuple(
        "failed" if str(row.get(k, "")).startswith("failed") else str(row.get(k, "")) for k in ("onnx", "jit")
    )
    start = (name, size, str(row.get("norms", "")))
    if "reasons" not in row:
        return (*start, "", f"{row.get('status', 'not swept')}: {row.get('problem', '')}", *peers, *[""] * 5)
    why = counted(row["reasons"]) if row["status"] == "ok" else f"{row['status']}: {row.get('problem', '')}"
    error = f"{row['error']:.0e}" if "error" in row else ""
    kind = "same class" if row["class"] == "same" else "graph"
    return (*start, str(row["kept"]), why, *peers, error, str(row["seconds"]), str(row["peak_gb"]), kind, row["input"])


def summary(rows: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What the table comes to, a line each."""
    t = totals(rows)
    statuses = Counter(str(r["status"]) for r in rows.values() if "status" in r)
    lines = [
        f"{t.rows} architectures, {t.norms} norms: {t.folded} folded, {t.kept} kept",
        "rows: " + counted(statuses),
        *(f"  {reason}: {n} ({n / max(t.norms, 1):.2%})" for reason, n in t.reasons.most_common()),
        f"{' + '.join(LOST)}: {t.lost:.2%} of all norms (at most {LOST_LIMIT:.0%})",
    ]
    for peer, title in (("onnx", "torch.onnx.export"), ("jit", "torch.jit.freeze")):
        both = [r for n, r in rows.items() if isinstance(r.get(peer), int) and "reasons" in r and "+" not in n]
        failed = sum(str(r.get(peer, "")).startswith("failed") for r in rows.values())
        if both or failed:
            ours, left = sum(r["kept"] for r in both), sum(r[peer] for r in both)
            lines.append(
                f"{title}: leaves {left} norms in {len(both)} networks where bnfold leaves {ours}; {failed} failed"
            )
    errors = sorted(r["error"] for r in rows.values() if "error" in r and r["dtype"] == "float64")
    if errors:
        lines.append(f"error: median {errors[len(errors) // 2]:.0e}, worst {errors[-1]:.0e} of the range, in float64")
    versions = Counter(r["version"] for r in rows.values() if "version" in r)
    if len(versions) > 1:
        lines.append(f"made by {len(versions)} versions of bnfold: {counted(versions)}")
    return lines


def faults(rows: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What must not be: wrong results, and expectations that do not hold."""
    wrong = [f"WRONG {name}: {r['problem']}" for name, r in rows.items() if r.get("status") == "wrong"]
    judged = ((e.name, judge(e, rows.get(e.name))) for e in EXPECTED)
    missed = [f"EXPECTED {name}: {problem}" for name, problem in judged if problem]
    lost = totals(rows).lost
    return wrong + missed + ([f"LOST {lost:.2%} of all norms, at most {LOST_LIMIT:.0%}"] if lost > LOST_LIMIT else [])


def show(path: Path, *, markdown: bool = False) -> int:
    """Print the table; 1 when something is in it that must not be."""
    rows = dict(sorted(read_results(path).items()))
    body = [cells(name, row) for name, row in rows.items()]
    bad = faults(rows)
    if markdown:
        for line in (COLUMNS, ["---"] * len(COLUMNS), *body):
            print("| " + " | ".join(c.replace("|", "\\|") for c in line) + " |")
        print("", *(f"- {line}" for line in [*summary(rows), *bad]), sep="\n")
        return bool(bad)
    from rich.console import Console
    from rich.table import Table

    console = Console(width=max(Console().width, WIDTH))
    table = Table(title=f"{path.name}: {len(rows)} architectures", box=None)
    for title in COLUMNS:
        table.add_column(title, no_wrap=title != "why")
    for line in body:
        table.add_row(*line)
    console.print(table)
    for line in summary(rows):
        console.print(line, highlight=False)
    for line in bad:
        console.print(line, style="bold red", highlight=False)
    return bool(bad)
