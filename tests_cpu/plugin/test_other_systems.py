"""Systems other than Linux: the plugin loads, tests on ranks are skipped, others run. They are simulated on Linux."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pytest_nsa.testing import run_pytest

# Python imports it at its start. What reads sys.platform for files of this Linux is imported first.
OTHER_SYSTEM = """
import asyncio, multiprocessing, os, platform, select, signal, socket, subprocess, sys, sysconfig
sysconfig.get_config_vars()
sys.platform = "darwin"
for module, names in {
    signal: ("SIGRTMIN", "SIGRTMAX"),
    select: ("epoll", "POLLRDHUP"),
    os: ("O_PATH", "memfd_create", "pidfd_open", "posix_fallocate", "sched_getaffinity", "sched_setaffinity"),
}.items():
    for name in names:
        delattr(module, name)
"""
SOURCE = """
import pytest
from pytest_nsa import cores, world_size

@world_size(2)
def test_on_ranks(group): pass

@cores(1)
@world_size(1)
def test_on_a_core(group): pass

def test_that_launches(launch): pass

def test_with_evidence(artifacts): pass

@pytest.mark.timeout(30)
def test_plain(tmp_path): assert tmp_path.is_dir()

@pytest.mark.xfail(strict=True)
def test_fails(): raise AssertionError("as it shall")
"""


@pytest.mark.parametrize("options", [("--ranks-descendants=report",), ("-p", "xdist", "-n1")], ids=" ".join)
def test_only_tests_on_ranks_are_skipped(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, options: tuple[str, ...]
) -> None:
    (tmp_path / "sitecustomize.py").write_text(OTHER_SYSTEM)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    (pytester.path / "test_example.py").write_text(SOURCE)
    done = run_pytest(pytester.path, ["-rs", *options], 120)
    done.assert_outcomes(passed=1, xfailed=1, skipped=4)
    done.stdout.fnmatch_lines("SKIPPED [[]4]*: ranks and their evidence need Linux, and this is darwin")
    assert not (pytester.path / "artifacts").exists()
