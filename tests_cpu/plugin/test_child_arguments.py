"""A child pytest of the session writes to no file that the session writes to."""

from __future__ import annotations

import json

import pytest

from pytest_nsa.testing import HEADER, read_result, start_pytest

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
SOURCE = """
import logging

@pytest.fixture(autouse=True)
def logged(request):
    logging.getLogger("mine").warning("logged by %s", request.node.name)

def test_first(request):
    for option in (request.config.option.note_to, open(request.config.option.trend, "w")):
        print("kept", file=option, flush=True)

def test_second(): pass

@world_size(2)
def test_ranks(group, request):
    dist.barrier()
    assert request.config.getoption("--kind") == "a"
    assert request.config.getoption("--result-name") == "b"

def test_last(): pass
"""


@pytest.mark.parametrize("mode", ["clean", "cold"])
def test_logs_and_files_of_plugins_options_are_kept(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """Options of installed plugins that write are not repeated, and those that a test reads are."""
    installed = pytester.path / "lib" / "site-packages"
    installed.mkdir(parents=True)
    (installed / "notes.py").write_text(WRITES)
    monkeypatch.setenv("PYTHONPATH", str(installed), prepend=":")
    monkeypatch.setenv("PYTEST_ADDOPTS", "-p notes --trend-json trend.json")
    pytester.makeconftest('def pytest_addoption(parser): parser.addoption("--result-name")')
    pytester.makeini("[pytest]\nlog_file = of_ini.log\nlog_file_level = INFO\naddopts = --debug=of_addopts.log\n")
    (pytester.path / "test_example.py").write_text(HEADER + SOURCE)
    options = ["--note-to", "notes.txt", "--kind", "a", "--result-name=b", "--report-log=log.jsonl"]
    done = start_pytest(pytester.path, [f"--ranks-launch={mode}", *options, "-p", "no:randomly"], 120)
    assert read_result(pytester.path, done).outcomes == {"passed": 4}
    text = {path.name: path.read_text() for path in pytester.path.iterdir() if path.is_file()}
    assert "\0" not in text["of_ini.log"]
    assert [text["of_ini.log"].count(f"logged by test_{name}") for name in ("first", "second", "last")] == [1, 1, 1]
    assert text["of_addopts.log"].startswith("versions pytest-")
    assert "pytest_unconfigure" in text["of_addopts.log"]
    assert (text["notes.txt"], text["trend.json"]) == ("kept\n", "kept\n")
    reports = [json.loads(line) for line in text["log.jsonl"].splitlines()]
    assert sum(report.get("when") == "call" for report in reports) == 4
