"""What other tools left of hangs in public reports gets the right ranks and call, and is never certain and wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_nsa.diagnosis.foreign import judge
from pytest_nsa.foreign.find import read_job
from tests_cpu.foreign.cases import CASES, watchdog


@pytest.mark.parametrize("name", CASES)
def test_a_public_case_is_named(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    for file, text in case.files.items():
        (tmp_path / file).write_text(text)
    job = read_job([tmp_path])
    assert job.kinds
    assert not job.unread
    verdict, _ = judge(job, name)
    labels = " ".join(f"{label.text} {label.file}:{label.line}" for label in verdict.labels)
    assert verdict.ranks == case.ranks, (verdict.cause, verdict.explanation)
    assert verdict.cause in case.causes
    assert case.call in f"{verdict.explanation} {verdict.where} {labels}"


def test_ranks_without_a_line_in_a_log_are_not_taken_for_ranks_that_ended(tmp_path: Path) -> None:
    (tmp_path / "job.log").write_text("".join(watchdog(rank, 9141, "_ALLGATHER_BASE", 19008) for rank in (1, 4)))
    verdict, _ = judge(read_job([tmp_path]), "job")
    assert (verdict.cause, verdict.ranks) == ("missing_collective", (0, 2, 3))
    assert verdict.confidence < 0.5
