"""traces.log of a whole test, merged from the logs of its ranks, and the missing gradients that it names.

A report that is equal on all ranks is there once. In a report of some ranks, each line begins with their numbers:
``[rank 1]   - MISSING: name``.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from pytest_nsa.diagnosis.verdict import group_runs
from pytest_nsa.evidence.collectives import parse_ranks

# Reports that each rank makes of itself. The lines of buckets name their rank; all others concern the whole test.
_OF_EACH_RANK = ("[GRAD-TRACE]", "[MODULE-BWD]", "  - MISSING: ")
_MISSING = re.compile(r"(?:\[rank ([\d,-]+)\] )?  - MISSING: (\S+)$")


def merge(logs: Mapping[int, Iterable[str]]) -> Iterator[str]:
    """Yield the lines of the merged log, from those of each rank, in the order of the ranks."""
    ranks: dict[tuple[tuple[str, ...], int], list[int]] = {}  # by report, and how often the rank made it before
    for rank, lines in logs.items():
        seen: Counter[tuple[str, ...]] = Counter()
        for report in _reports(lines):
            ranks.setdefault((report, seen[report]), []).append(rank)
            seen[report] += 1
    for (report, _), of in ranks.items():
        is_of_all = len(of) == len(logs) or not report[0].startswith(_OF_EACH_RANK)
        prefix = "" if is_of_all else f"[rank {listed(of)}] "
        yield from (f"{prefix}{line}" for line in report)


def _reports(lines: Iterable[str]) -> Iterator[tuple[str, ...]]:
    """Yield lines together with the items ("  - ...") that follow them."""
    report: list[str] = []
    for line in lines:
        if report and not line.startswith("  - "):
            yield tuple(report)
            report = []
        report.append(line)
    if report:
        yield tuple(report)


def find_missing(lines: Iterable[str], world_size: int) -> dict[str, str]:
    """Return the parameters that a merged log names as missing, with the ranks: '1', '0,2-7'."""
    found: dict[str, set[int]] = {}
    for match in filter(None, map(_MISSING.match, lines)):
        found.setdefault(match[2], set()).update(parse_ranks(match[1], world_size) if match[1] else range(world_size))
    return {name: listed(ranks) for name, ranks in found.items()}


def listed(ranks: Iterable[int]) -> str:
    """Return '1', '0,1' or '0-5,8'."""
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else ",".join(map(str, run)) for run in group_runs(ranks))
