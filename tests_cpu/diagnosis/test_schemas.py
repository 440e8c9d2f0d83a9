"""Folders of earlier schemas are read as they were: their verdicts are those that were given then."""

import json
import tarfile
from pathlib import Path

import pytest

from pytest_nsa.cli.main import main
from pytest_nsa.diagnosis.engine import diagnose
from pytest_nsa.diagnosis.verdict import Verdict
from pytest_nsa.evidence.load import load
from tests_cpu.diagnosis.schemas import FOLDER, current


def test_the_schemas_that_are_written_now_are_recorded() -> None:
    assert (FOLDER / current()).is_file(), "a schema number has changed: python -m tests_cpu.diagnosis.schemas"


@pytest.mark.parametrize("archive", sorted(p.name for p in FOLDER.glob("*.tar.xz")))
def test_a_recorded_folder_stays_readable(archive: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with tarfile.open(FOLDER / archive) as packed:
        packed.extractall(tmp_path, filter="data")
    folders = sorted(path.parent for path in tmp_path.glob("*/verdict.json"))
    assert len(folders) == 2
    for folder in folders:
        then = Verdict.from_json(json.loads((folder / "verdict.json").read_text()))
        evidence = load(folder)
        assert evidence.unread == ()
        now = diagnose(evidence)
        assert (now.outcome, now.cause, now.ranks, now.where) == (then.outcome, then.cause, then.ranks, then.where)
        main(["diagnose", str(folder)])
        assert then.cause in capsys.readouterr().out
