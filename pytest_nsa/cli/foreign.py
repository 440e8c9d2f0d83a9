"""`pytest-nsa diagnose` on what other tools left of a job."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from pytest_nsa.diagnosis.foreign import judge, missing_for_more
from pytest_nsa.foreign.find import read_job
from pytest_nsa.report.plain import visible
from pytest_nsa.report.terminal import lines

MOST_UNREAD = 5


def diagnose_foreign(paths: Sequence[Path], *, as_json: bool, sources: bool) -> int | None:
    """Print the kinds of files and the verdict on their job. Return the exit code; None where no file has evidence."""
    job = read_job(paths)
    for text in job.unread[:MOST_UNREAD]:
        print(visible(f"cannot read {text}"), file=sys.stderr)
    if not job.kinds:
        return 2 if job.unread else None
    for kind in job.kinds:
        print(visible(kind), file=sys.stderr if as_json else sys.stdout)
    verdict, evidence = judge(job, str(paths[0]), sources=sources)
    if as_json:
        print(json.dumps(verdict.to_json()))
    else:
        print("\n".join(line for line in lines(verdict, evidence) if not line.startswith("  evidence")))
        if more := missing_for_more(job):
            print(f"  lacks    {more}")
    return int(verdict.failed)
