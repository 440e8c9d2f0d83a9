"""Options by their names: one prefix, also for their values in the configuration, where other plugins have theirs."""

from __future__ import annotations

import re

import pytest


def test_options_and_their_values_have_our_prefix(pytester: pytest.Pytester) -> None:
    text = pytester.runpytest_subprocess("--help").stdout.str()
    section = text.partition("tests on ranks (pytest-nsa):\n")[2].partition("\n\n")[0]
    shown = re.findall(r"^  (--[\w-]+)", section, re.M)
    assert len(shown) > 5
    assert all(option.startswith("--ranks-") for option in shown), shown
    with_plugin, without = pytester.parseconfig(), pytester.parseconfig("-p", "no:nsa")
    added = vars(with_plugin.option).keys() - vars(without.option).keys()
    assert len(added) == len(shown)
    assert all(name.startswith("nsa_") for name in added), added
