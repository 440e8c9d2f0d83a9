"""What other tools left of hangs in public reports gets the right ranks and call, and is never certain and wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_nsa.diagnosis.foreign import judge
from pytest_nsa.foreign.find import read_job
from tests_cpu.foreign.cases import CASES


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
