"""ranks_descendants ends what multiprocessing would wait for, and nothing that the program ends by itself."""

from __future__ import annotations

import pytest

MANAGER = """
import multiprocessing

def test_keeps_a_manager():
    global manager
    manager = multiprocessing.Manager()
"""


def run(pytester: pytest.Pytester, source: str, *options: str) -> pytest.RunResult:
    pytester.makepyfile(source)
    return pytester.runpytest_subprocess("--ranks-descendants=report", "-p", "no:randomly", *options, timeout=120)


def test_a_manager_keeps_no_session_from_ending(pytester: pytest.Pytester) -> None:
    done = run(pytester, MANAGER, "-o", "ranks_left_fails=true")
    assert done.ret == 0, done.stdout.str()
    assert "keep this session from ending" not in done.stderr.str()
