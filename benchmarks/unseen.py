"""The sets of faults that were written by authors who had not read the rules: what a verdict got right as each set came.

benchmarks/results/unseen.jsonl has a line per set, written by hand once its files had run. `cause_and_ranks`, `ranks` and `line`
count the faults of which these were right at first, `lines` those that have a line, `end_...` the same by later rules. Of `healthy`
programs some were `ended` (a false verdict) or `announced`. A field that was not counted is absent. `python benchmarks/unseen.py`
writes the table of docs/benchmarks_diagnosis.md.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "benchmarks_diagnosis.md"
RESULTS = ROOT / "benchmarks" / "results" / "unseen.jsonl"
START, END = "<!-- unseen -->\n", "<!-- end of unseen -->"
Rows = Sequence[dict[str, Any]]


def sets() -> list[dict[str, Any]]:
    """Return the sets, in the order in which they came."""
    return [json.loads(line) for line in RESULTS.read_text(encoding="utf-8").splitlines()]


def table(rows: Rows) -> str:
    """Return a row per series of sets, and one of all."""
    series: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        series.setdefault(row["series"], []).append(row)
    lines = [
        "| sets | came on | faults | cause and ranks | ranks | line | cause and ranks, later rules | healthy: ended, announced |",
        "| --- | --- | ---: | --- | --- | --- | --- | --- |",
    ]
    lines += [_line(name, some) for name, some in series.items()]
    return "\n".join([*lines, _line("all", rows)]) + "\n"


def _line(name: str, rows: Rows) -> str:
    days = sorted({row["date"] for row in rows})
    healthy = sum(row.get("healthy", 0) for row in rows)
    seen = [row for row in rows if "healthy" in row]
    announced = sum(row["announced"] for row in seen) if all("announced" in row for row in seen) else "–"
    calm = f"{sum(row['ended'] for row in seen)}, {announced} of {healthy}"
    cells = [
        name, days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}", str(sum(row["faults"] for row in rows)),
        _share(rows, "cause_and_ranks", "faults"), _share(rows, "ranks", "faults"), _share(rows, "line", "lines"),
        _share(rows, "end_cause_and_ranks", "faults"), calm if healthy else "",
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def _share(rows: Rows, right: str, of: str) -> str:
    """Return '97 of 114 (85%)' over the sets of which it was counted."""
    counted = [row for row in rows if right in row]
    if not counted:
        return ""
    found, total = sum(row[right] for row in counted), sum(row[of] for row in counted)
    return f"{found} of {total} ({found / total:.0%})"


def page_with(text: str) -> str:
    """Return docs/benchmarks_diagnosis.md with the table of the sets in its place."""
    before, _, rest = text.partition(START)
    return before + START + table(sets()) + END + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(page_with(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
