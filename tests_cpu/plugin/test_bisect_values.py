"""``--ranks-bisect NAME=A,B,...``: a failed test with other values of a parameter, after a control."""

from __future__ import annotations

import pytest

from pytest_nsa.testing import ONCE, run_example

SOURCE = """
import os
from pathlib import Path
import pytest
from pytest_nsa import world_size

@world_size(2)
@pytest.mark.parametrize("rate", [0.5])
@pytest.mark.parametrize("name", ["a"])
def test_rate(group, rate, name):
    assert isinstance(rate, float)
    assert rate < 0.3

@world_size(1)
@pytest.mark.parametrize("on", [True])
def test_switch(group, on):
    assert on is False

@world_size(1)
@pytest.mark.parametrize("rate", [1])
def test_comes_and_goes(group, rate):
    flag = Path("flag")
    was_there = flag.exists()
    flag.touch()
    assert was_there

@world_size(1)
def test_without_it(group):
    assert False
"""


def test_each_value_is_tried_after_a_control(pytester: pytest.Pytester) -> None:
    result = run_example(
        pytester, SOURCE, *ONCE, "--ranks-bisect", "rate=0.1,0.25,1", "--ranks-bisect", "on=false,true"
    )
    reasons = {name.partition("[")[0]: v.reason.rpartition("bisect: ")[2] for name, v in result.verdicts.items()}
    assert reasons["test_rate"] == "of rate 0.1, 0.25, 1, 1 fails"
    assert reasons["test_switch"] == "of on false, true, true fails"
    assert reasons["test_comes_and_goes"] == "it passes when it is run again as it is: the failure comes and goes"
    assert "bisect" not in result.verdicts["test_without_it"].reason


@pytest.mark.parametrize("given", ["rate", "rate=", "1=2", "=a"])
def test_what_names_no_value_is_refused(given: str, pytester: pytest.Pytester) -> None:
    result = run_example(pytester, "@world_size(2)\ndef test_it(group): pass", "--ranks-bisect", given)
    assert result.outcomes == {"errors": 1}
    assert f"--ranks-bisect {given}: must be NAME=A,B,..." in result.stdout
