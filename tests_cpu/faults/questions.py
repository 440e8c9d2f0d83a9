"""The moment at which the host asks what is wrong with a healthy program: kept while it runs, replayed without running it.

The host asks again and again while a rank waits or is slow (`Observer`). Of each test the moment is kept in which the
longest wait was the longest: inside the program's longest pause. `asked.json` has what the host knew besides the evidence, and what
it had announced.
"""

from __future__ import annotations

import json
import shutil
from collections import deque
from collections.abc import Mapping
from pathlib import Path

from pytest_nsa.observe.observer import Observer
from pytest_nsa.observe.progress import Past, ProgressWatch
from pytest_nsa.wire.files import read_lines
from tests_cpu.faults.recorded import FILES

FOLDER = "asked"  # in a test's folder
CONFTEST = "from tests_cpu.faults.questions import keep_questions\n\nkeep_questions()\n"


def keep_questions() -> None:
    """Keep the latest of the longest waits at which this process asks."""
    ask = Observer._ask

    def asked(self: Observer, alive: Mapping[int, int]) -> None:
        ask(self, alive)  # first, as it keeps the sources that it reads
        facts = self.folder / FOLDER / "asked.json"
        if not facts.exists() or json.loads(facts.read_text())["longest_wait"] <= self.watch.longest_wait:
            _copy(self.folder, self.watch)

    Observer._ask = asked  # type: ignore[method-assign]


def _copy(folder: Path, watch: ProgressWatch) -> None:
    kept = folder / FOLDER
    shutil.rmtree(kept, ignore_errors=True)
    for file in {file for pattern in FILES for file in folder.glob(pattern)}:
        copy = kept / file.relative_to(folder)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, copy)
    past = watch.past
    facts = {
        "longest_wait": watch.longest_wait, "waits": {rank: watch.measure_stall(rank) for rank in watch.boards},
        "steps": [*past._steps], "pauses": past._longest,
        "announced": [[s["cause"], s["ranks"]] for s in read_lines(folder / "suspicions.jsonl") if "cause" in s],
    }  # fmt: skip
    (kept / "asked.json").write_text(json.dumps(facts))


def read_past(facts: dict[str, object]) -> Past:
    """Return the steps and pauses that a job had had."""
    past = Past()
    past._steps, past._longest = deque(facts["steps"], maxlen=64), dict(facts["pauses"])  # type: ignore[call-overload]
    return past
