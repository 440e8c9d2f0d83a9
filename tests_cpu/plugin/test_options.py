"""Options by their names: one prefix, and the names until 0.2, which --help does not show."""

from __future__ import annotations

import re
from typing import Any

import pytest

OLD: dict[str, tuple[list[str], Any]] = {
    "artifacts": (["kept"], "kept"),
    "bisect-gc": ([], True),
    "bisect-branch": ([], True),
    "bisect-env": (["A=1"], "A=1"),
    "pdb-rank": (["1"], 1),
}


@pytest.mark.parametrize("prefix", ["--", "--ranks-"])
@pytest.mark.parametrize("name", OLD)
def test_an_option_is_read_by_both_names(pytester: pytest.Pytester, name: str, prefix: str) -> None:
    values, expected = OLD[name]
    option = "=".join([f"{prefix}{name}", *values])
    config = pytester.parseconfig(option)
    assert config.getoption(f"--ranks-{name}") == config.getoption(f"--{name}") == expected


def test_without_an_option_its_default_is_read(pytester: pytest.Pytester) -> None:
    config = pytester.parseconfig()
    assert [config.getoption(f"--{name}") for name in OLD] == [None, False, False, None, -1]


def test_help_shows_one_prefix(pytester: pytest.Pytester) -> None:
    text = pytester.runpytest_subprocess("--help").stdout.str()
    section = text.partition("tests on ranks (pytest-nsa):\n")[2].partition("\n\n")[0]
    shown = re.findall(r"^  (--[\w-]+)", section, re.M)
    assert {f"--ranks-{name}" for name in OLD} < set(shown)
    assert all(option.startswith("--ranks-") for option in shown), shown
