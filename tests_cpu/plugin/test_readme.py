"""The test on the README's first screen gives the verdict that the page shows below it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pytest_nsa.testing import run_folder

README = Path(__file__).resolve().parents[2] / "README.md"


def test_the_first_example_prints_what_the_page_shows(tmp_path: Path) -> None:
    program, shown = re.findall(r"^```(?:python)?\n(.*?)^```", README.read_text(encoding="utf-8"), re.M | re.S)[:2]
    (tmp_path / "test_epochs.py").write_text(program, encoding="utf-8")
    result = run_folder(tmp_path, "--ranks-rerun", "auto", "test_epochs.py")
    printed = result.stdout.splitlines()
    assert [line for line in shown.splitlines() if line not in printed] == []
    assert result.returncode == pytest.ExitCode.TESTS_FAILED
