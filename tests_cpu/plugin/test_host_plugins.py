"""Plugins that act on outcomes run on the host only, in every launch mode; fixtures of theirs work in ranks."""

import json
import os
from collections import Counter

import pytest

from pytest_nsa.testing import HEADER, ExampleResult, read_result, run_example, start_pytest

LAUNCHES = ["auto", *(pytest.param(mode, marks=pytest.mark.slow) for mode in ("clean", "cold"))]
ACTS = """
import os
from pathlib import Path
import pytest

def note(text):
    with (Path(__file__).parent / "calls").open("a") as file:
        print(os.getpid(), os.environ.get("RANK", "host"), text, file=file)

class Reporter:
    def pytest_sessionstart(self): note("sessionstart")
    def pytest_collectreport(self): note("collectreport")
    def pytest_runtest_logstart(self): note("logstart")
    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        item.timed = True
        return (yield)
    def pytest_runtest_setup(self, item):
        assert item.timed
        note("setup")
    def pytest_runtest_makereport(self, item): note("makereport")
    def pytest_runtest_logreport(self, report): note(f"report {report.when}")
    def pytest_runtest_logfinish(self): note("logfinish")
    def pytest_sessionfinish(self): note("sessionfinish")

def pytest_configure(config):
    config.pluginmanager.register(Reporter())
"""
RANKED_AND_PLAIN = """
def test_ranked(group): dist.barrier()

def test_plain(): pass
"""


def run(pytester: pytest.Pytester, plugin: str, source: str, *arguments: str) -> ExampleResult:
    """Run an example with a plugin, a module in its folder."""
    (pytester.path / "acts.py").write_text(plugin)
    return run_example(pytester, source, "-p", "acts", *arguments)


def calls(pytester: pytest.Pytester) -> list[list[str]]:
    """Process, rank and what it noted."""
    path = pytester.path / "calls"
    return [line.split(maxsplit=2) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.parametrize("mode", LAUNCHES)
def test_a_plugin_that_reports_does_so_on_the_host_only(pytester: pytest.Pytester, mode: str) -> None:
    result = run(pytester, ACTS, RANKED_AND_PLAIN, "-v", f"--ranks-launch={mode}")
    assert result.outcomes == {"passed": 2}
    noted = calls(pytester)
    assert len({(process, rank) for process, rank, _ in noted}) == 1
    counts = Counter(what for _, _, what in noted)
    assert {what: n for what, n in counts.items() if not what.startswith("report")} == {
        "sessionstart": 1, "collectreport": counts["collectreport"], "logstart": 2, "setup": 2, "makereport": 6, "logfinish": 2,
        "sessionfinish": 1,
    }  # fmt: skip
    assert [counts[f"report {when}"] for when in ("setup", "call", "teardown")] == [2, 2, 2]
    assert "nsa: on the host only: " in result.stdout
    assert " acts" in result.stdout


NOTES = ACTS.partition("class Reporter")[0]


CONFTEST = (
    NOTES
    + """
@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    os.environ["PREPARED"] = "yes"  # for the body
    return (yield)

@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    report = yield
    setattr(item, f"report_of_{report.when}", report)  # for fixtures
    return report

def pytest_runtest_logreport(report): note(report.when)

@pytest.fixture
def sees_outcome(request):
    yield
    assert request.node.report_of_call.failed
    note("failed")
"""
)


@pytest.mark.parametrize("mode", LAUNCHES)
def test_a_conftest_reports_on_the_host_and_prepares_every_rank(pytester: pytest.Pytester, mode: str) -> None:
    pytester.makeconftest(CONFTEST)
    source = """
def test_ranked(group, sees_outcome):
    dist.barrier()
    assert os.environ["PREPARED"] == "no"
"""
    result = run_example(pytester, source, f"--ranks-launch={mode}")
    assert result.outcomes == {"failed": 1}
    assert "assert 'yes' == 'no'" in result.stdout
    noted = Counter((rank, what) for _, rank, what in calls(pytester))
    assert noted == {
        ("host", "setup"): 1, ("host", "call"): 1, ("host", "teardown"): 1, ("0", "failed"): 1, ("1", "failed"): 1,
    }  # fmt: skip


@pytest.mark.parametrize("mode", LAUNCHES)
def test_no_child_reports_the_end_of_a_session_that_ran_no_test(
    pytester: pytest.Pytester, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """An installed plugin would replace the report that the host has written; a conftest.py may end what it has started."""
    installed = tmp_path_factory.mktemp("installed")
    (installed / "ends.py").write_text(NOTES + "def pytest_sessionfinish(): note('installed')")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(installed), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setattr("pytest_nsa.testing.run_pytest", start_pytest)
    pytester.makeconftest(NOTES + "def pytest_sessionfinish(): note('conftest')")
    result = run_example(pytester, RANKED_AND_PLAIN, "-p", "ends", f"--ranks-launch={mode}")
    assert result.outcomes == {"passed": 2}
    assert (installed / "calls").read_text().split()[1:] == ["host", "installed"]
    assert len(calls(pytester)) == (2 if mode == "clean" else 1)


HIDDEN = """
import pytest
from acts_notes import note
def pytest_runtest_makereport(item): note("makereport")
"""


@pytest.mark.parametrize("mode", LAUNCHES)
@pytest.mark.parametrize(
    ("plugin", "lines", "ranks"),
    [
        (HIDDEN, [], {"host", "0", "1"}),
        (HIDDEN, ["acts", "not_loaded"], {"host"}),
        (ACTS, ["!acts"], {"host", "0", "1"}),
    ],
    ids=["unnamed", "added", "kept"],
)
def test_the_setting_adds_names_and_keeps_others(
    pytester: pytest.Pytester, mode: str, plugin: str, lines: list[str], ranks: set[str]
) -> None:
    (pytester.path / "acts_notes.py").write_text(NOTES)
    pytester.makeini("[pytest]\nranks_host_plugins =\n" + "".join(f"    {line}\n" for line in lines))
    result = run(pytester, plugin, RANKED_AND_PLAIN, f"--ranks-launch={mode}")
    assert result.outcomes == {"passed": 2}
    assert {rank for _, rank, what in calls(pytester) if what == "makereport"} == ranks


def test_the_setting_takes_a_conftest_by_its_path(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(CONFTEST)
    source = "@world_size(2)\ndef test_ranked(group): assert 'PREPARED' not in os.environ"
    assert run_example(pytester, source, "-o", "ranks_host_plugins=conftest.py").outcomes == {"passed": 1}
    result = run_example(pytester, source, "-o", "ranks_host_plugins=!conftest.py")
    assert result.outcomes == {"failed": 1}
    assert {rank for _, rank, what in calls(pytester) if what == "call"} == {"host", "0", "1"}


DEPENDENCY = """
@pytest.mark.dependency()
def test_a(group): dist.barrier()

@pytest.mark.dependency(depends=["test_a"])
def test_after_ranked(group): dist.barrier()

@pytest.mark.dependency(depends=["test_a"])
def test_plain_after_ranked(): pass

@pytest.mark.dependency()
def test_fails(group): assert False

@pytest.mark.dependency(depends=["test_fails"])
def test_skipped(group): dist.barrier()

def test_asks_by_itself(group, request):
    from pytest_dependency import depends
    depends(request, ["test_a"])
"""


@pytest.mark.parametrize("mode", LAUNCHES)
def test_a_test_depends_on_ranked_tests_and_ranked_tests_on_others(pytester: pytest.Pytester, mode: str) -> None:
    pytest.importorskip("pytest_dependency", reason="the extra 'test' has it")
    result = run_example(pytester, DEPENDENCY, "-p", "dependency", f"--ranks-launch={mode}", "-rs")
    assert result.outcomes == {"passed": 3, "failed": 2, "skipped": 1}
    assert "test_skipped depends on test_fails" in result.stdout
    verdict = result.verdicts["test_asks_by_itself"]
    assert verdict.reason.startswith(
        "Failed: pytest_dependency.depends(): a rank does not know the outcomes of other tests"
    )


OUTCOMES = """
def test_passes(group): dist.barrier()

def test_fails(group): assert group.rank == 0

@pytest.mark.xfail(strict=True)
def test_foreseen(group): assert False

def test_skips(group): pytest.skip("planned")
"""
EXPECTED = {"test_passes": "passed", "test_fails": "failed", "test_foreseen": "skipped", "test_skips": "skipped"}


STEPS = """
import allure

def test_steps(group):
    allure.dynamic.title("on ranks")
    with allure.step(f"a step of rank {group.rank}"):
        dist.barrier()
    allure.attach("text", "name")
"""


@pytest.mark.parametrize("mode", [*LAUNCHES, pytest.param("xdist", marks=pytest.mark.slow)])
def test_allure_has_one_result_for_a_test(pytester: pytest.Pytester, mode: str) -> None:
    pytest.importorskip("allure_pytest", reason="the extra 'test' has it")
    how = ("-p", "xdist", "-n", "2") if mode == "xdist" else (f"--ranks-launch={mode}",)
    arguments = ("-p", "allure_pytest", "--alluredir=results", "--clean-alluredir", *how)
    run_example(pytester, OUTCOMES + STEPS, *arguments)
    folder = pytester.path / "results"
    results = [json.loads(path.read_text()) for path in folder.glob("*-result.json")]
    assert {r["name"]: r["status"] for r in results} == {**EXPECTED, "test_steps": "passed"}
    assert len(results) == len(EXPECTED) + 1
    assert not list(folder.glob("*-attachment*"))


BOXED = """
def test_plain():
    with open("plain", "a") as file:
        print(os.getpid(), file=file)

@pytest.mark.forked
def test_ranked(group, artifacts): dist.barrier()

def body(group): dist.barrier()

def test_launches(launch): assert launch(body).verdict.outcome == "PASS"

def test_the_host(request):
    with open("plain", "a") as file:
        print(os.getppid(), file=file)
"""


@pytest.mark.parametrize("arguments", [(), pytest.param(("-p", "xdist", "-n1"), marks=pytest.mark.slow)])
def test_forked_forks_plain_tests_and_no_ranked_one(pytester: pytest.Pytester, arguments: tuple[str, ...]) -> None:
    pytest.importorskip("pytest_forked", reason="the extra 'test' has it")
    result = run_example(pytester, BOXED, "-p", "pytest_forked", "--forked", *arguments)
    # Versions of pytest-forked report a plain test's own success as a crash (1.7 under pytest 9); that it forks is what counts.
    assert "test_ranked" not in result.stdout.partition("short test summary info")[2]
    assert "test_launches" not in result.stdout.partition("short test summary info")[2]
    assert result.outcomes.get("passed", 0) >= 2
    forked, host = (pytester.path / "plain").read_text().split()
    assert forked != host


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
