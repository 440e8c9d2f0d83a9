"""Runs that can start no ranks, by the machine, its torch, its system or a broken child; and a relative folder for evidence."""

import json
import os
import sys
from pathlib import Path

import pytest

from pytest_nsa.testing import HEADER, run_example, run_pytest
from tests_cpu.namespaces import NETWORK, in_namespace
from tests_cpu.warm import WarmPython

SOURCE = """
@scenario("first")
def test_a(group): pass

@scenario("second")
def test_b(group): pass
"""
BROKEN_IN_THE_CHILD = """
import os
if "PYTEST_NSA_ZYGOTE_FD" in os.environ:
    raise RuntimeError("no licence for a second process")
"""


def test_that_no_ranks_could_be_started_is_the_decision(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(BROKEN_IN_THE_CHILD)
    result = run_example(pytester, SOURCE, "--ranks-launch=clean")
    assert result.outcomes == {"failed": 2}
    for verdict in result.verdicts.values():
        assert (verdict.cause, verdict.rule) == ("unknown", "engine.refused")
        assert "no licence for a second process" in verdict.explanation
        assert verdict.advice.startswith("fix what kept the ranks from starting")
        assert verdict.time_to_verdict_s < 3600  # before, it was the time since 1970
    decision = json.loads((result.run / "decision.json").read_text())
    assert decision["sentence"].startswith("The ranks could not be started: ")
    assert decision["sentence"].endswith("2 of 2 scenarios did not run.")
    assert decision["action"].startswith("fix what kept the ranks from starting")
    assert decision["path"] == ["could the ranks be started? no, of 2 of 2 scenarios"]


@pytest.mark.parametrize(
    "how",
    [
        pytest.param(("-p", "xdist", "-n", "2"), id="xdist", marks=pytest.mark.slow),
        pytest.param(("--ranks-launch=clean",), id="clean", marks=pytest.mark.slow),
        pytest.param((), id="fork"),
    ],
)
def test_a_folder_beside_the_tests_is_one_path_for_all_processes(
    pytester: pytest.Pytester, how: tuple[str, ...]
) -> None:
    """With pytest's cache on, as users have it: pytest refuses a cache folder with '..' in it."""
    inner = pytester.mkdir("inner")
    (inner / "test_example.py").write_text(HEADER + SOURCE)
    done = run_pytest(inner, ["--ranks-artifacts", "../evidence", f"--rootdir={inner}", *how], 120)
    done.assert_outcomes(passed=2)
    assert (pytester.path / "evidence" / "latest" / "first" / "result.txt").read_text() == "PASS\n"


TWO_TESTS = """
import pytest
from pytest_nsa import world_size

def test_on_ranks(group): pass

def test_else(): pass
"""


@pytest.mark.own_python
@pytest.mark.parametrize(
    ("version", "says"),
    [
        ("", "tests on ranks need torch, which {python} does not have: install torch>=2.6"),
        ("2.4.1", "tests on ranks need torch 2.6 or newer, and {python} has 2.4.1: upgrade it"),
    ],
    ids=["missing", "old"],
)
def test_a_test_on_ranks_reports_it(pytester: pytest.Pytester, version: str, says: str) -> None:
    # A test cannot remove an interpreter's own packages: it changes what Python finds of torch.
    pytester.makeconftest(
        f"""
        import importlib.metadata, importlib.util
        version_of, find = importlib.metadata.version, importlib.util.find_spec

        def version(name):
            if name == "torch" and not {version!r}:
                raise importlib.metadata.PackageNotFoundError(name)
            return {version!r} if name == "torch" else version_of(name)

        importlib.metadata.version = version
        importlib.util.find_spec = lambda name, *more: None if name == "torch" else find(name, *more)
        """
    )
    pytester.makepyfile(test_example=TWO_TESTS)
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    result.assert_outcomes(passed=1, errors=1)
    assert says.format(python=sys.executable) in result.stdout.str()
    assert "Traceback" not in result.stdout.str()
    assert not Path(pytester.path, "artifacts").exists()


def test_a_loopback_interface_that_is_down_is_named_in_a_line(warm: WarmPython, tmp_path: Path) -> None:
    (tmp_path / "test_example.py").write_text(
        "from pytest_nsa import world_size\n\n@world_size(2)\ndef test_a(group): pass\n"
    )
    done = warm.call(*in_namespace(NETWORK, "true", "pytest", "-p", "no:cacheprovider", "-q"), cwd=tmp_path)
    assert "FAIL: ranks 0 and 1, network_unusable" in done.stdout
    assert (
        "no network interface has the address 127.0.0.1: the loopback interface is down (ip link set lo up)"
        in done.stdout
    )


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
SIX_TESTS = """
import pytest
from pytest_nsa import cores, world_size

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
    (pytester.path / "test_example.py").write_text(SIX_TESTS)
    done = run_pytest(pytester.path, ["-rs", *options], 120)
    done.assert_outcomes(passed=1, xfailed=1, skipped=4)
    done.stdout.fnmatch_lines("SKIPPED [[]4]*: ranks and their evidence need Linux, and this is darwin")
    assert not (pytester.path / "artifacts").exists()
