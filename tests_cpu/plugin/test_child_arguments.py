"""A child pytest of the session writes to no file that the session writes to."""

from __future__ import annotations

import json

import pytest

from pytest_nsa.testing import HEADER, read_result, run_example, start_pytest

LOGS = """
import logging

@pytest.fixture(autouse=True)
def logged(request):
    logging.getLogger("mine").warning("logged by %s", request.node.name)

def test_first(): pass
def test_second(): pass

@world_size(2)
def test_ranks(group): dist.barrier()

def test_last(): pass
"""
MODES = ["clean", "cold"]


@pytest.mark.parametrize("mode", MODES)
def test_the_log_of_the_session_is_kept(pytester: pytest.Pytester, mode: str) -> None:
    pytester.makeini("[pytest]\nlog_file = of_ini.log\nlog_file_level = INFO\naddopts = --debug=of_addopts.log\n")
    result = run_example(pytester, LOGS, f"--ranks-launch={mode}", "-p", "no:randomly")
    assert result.outcomes == {"passed": 4}
    log = (pytester.path / "of_ini.log").read_text()
    assert "\0" not in log
    for name in ("test_first", "test_second", "test_last"):
        assert log.count(f"logged by {name}") == 1
    debug = (pytester.path / "of_addopts.log").read_text()
    assert debug.startswith("versions pytest-")
    assert "pytest_unconfigure" in debug


WRITES = """
import argparse

def pytest_addoption(parser):
    parser.addoption("--note-to", type=argparse.FileType("w"))
    parser.addoption("--trend-json", dest="trend")
    parser.addoption("--kind")

def pytest_configure(config):
    if config.option.trend:
        open(config.option.trend, "w").close()

def pytest_runtest_logreport(report): pass
"""


@pytest.mark.parametrize("mode", MODES)
def test_options_of_installed_plugins_that_write_are_not_repeated(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    installed = pytester.path / "lib" / "site-packages"
    installed.mkdir(parents=True)
    (installed / "notes.py").write_text(WRITES)
    monkeypatch.setenv("PYTHONPATH", str(installed), prepend=":")
    monkeypatch.setenv("PYTEST_ADDOPTS", "-p notes --trend-json trend.json")
    pytester.makeconftest('def pytest_addoption(parser): parser.addoption("--result-name")')
    source = """
def test_first(request):
    for option in (request.config.option.note_to, open(request.config.option.trend, "w")):
        print("kept", file=option, flush=True)

@world_size(2)
def test_ranks(group, request):
    assert request.config.getoption("--kind") == "a"
    assert request.config.getoption("--result-name") == "b"
"""
    (pytester.path / "test_example.py").write_text(HEADER + source)
    options = ["--note-to", "notes.txt", "--kind", "a", "--result-name=b", "--report-log=log.jsonl"]
    done = start_pytest(pytester.path, [f"--ranks-launch={mode}", *options, "-p", "no:randomly"], 120)
    result = read_result(pytester.path, done)
    assert result.outcomes == {"passed": 2}
    assert (pytester.path / "notes.txt").read_text() == "kept\n"
    assert (pytester.path / "trend.json").read_text() == "kept\n"
    reports = [json.loads(line) for line in (pytester.path / "log.jsonl").read_text().splitlines()]
    assert sum(report.get("when") == "call" for report in reports) == 2
