"""Failures that pytest counts and that have no verdict: the closing sentence of a run names them."""

import json
import os
from dataclasses import replace

import pytest

from pytest_nsa.diagnosis.decision import decide, with_failures
from pytest_nsa.diagnosis.verdict import Verdict
from pytest_nsa.testing import ExampleResult, run_example
from tests_cpu.strangers import NUMBER, needs_root, shared_folder

PASSES = """
def test_passes(group): pass
"""


def sentence(result: ExampleResult) -> str:
    """Return the first line of the diagnosis, which is that of SUMMARY.md and decision.json, too."""
    found = json.loads((result.run / "decision.json").read_text())["sentence"]
    assert isinstance(found, str)
    assert found in result.stdout
    return found


KILLS = """
def test_kills_its_host(group):
    if group.rank == 0:
        os.kill(int(open("host").read()), signal.SIGKILL)
    time.sleep(1000)
"""


@pytest.mark.slow
def test_the_test_of_a_killed_worker_has_a_verdict(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(
        "import os, pathlib\n"
        "def pytest_runtest_setup(item):\n"
        "    path = pathlib.Path('host')\n"
        "    if item.name == 'test_kills_its_host' and not path.exists():  # ranks come later\n"
        "        path.write_text(str(os.getpid()))\n"
    )
    result = run_example(pytester, PASSES + KILLS, "-p", "xdist", "-n2")
    assert result.outcomes == {"failed": 1, "passed": 1}
    verdict = result.verdicts["test_kills_its_host"]
    assert verdict.outcome != "PASS"
    assert "the process that ran the ranks was killed" in verdict.reason
    assert sentence(result).startswith("test_example.py::test_kills_its_host ends in ")
    assert "1 of 2 tests fails" in sentence(result)
    assert (result.folder("test_kills_its_host") / "verdict.json").is_file()


DAMAGES = """
def test_damages(artifacts):
    (artifacts / "job.json").write_text('{"nodeid": "test_example.py::test_damages", "world_size": "two"}')
    raise AssertionError("after it")
"""


def test_a_folder_that_cannot_be_read_leaves_its_failure_without_a_verdict(pytester: pytest.Pytester) -> None:
    result = run_example(pytester, PASSES + DAMAGES)
    assert result.outcomes == {"failed": 1, "passed": 1}
    assert sentence(result).startswith(
        "1 failure has no verdict: test_example.py::test_damages: AssertionError: after it."
    )


OTHERS = """
@pytest.mark.xfail(strict=True)
def test_passes_though_it_should_fail(group): pass

@pytest.fixture
def broken(): raise OSError("no such [host]")

def test_has_a_broken_fixture(broken): pass

def test_fails(): assert 1 == 2

@pytest.mark.flaky(reruns=1)
@pytest.mark.parametrize("runs", [[]])
def test_passes_the_second_time(runs):
    runs.append(1)
    assert len(runs) == 2
"""


def test_failures_without_a_verdict_are_named(pytester: pytest.Pytester) -> None:
    pytest.importorskip("pytest_rerunfailures", reason="the extra 'test' has it")
    pytester.makepyfile(test_later="import nowhere_to_be_found")
    options = ("-p", "rerunfailures", "--continue-on-collection-errors", "test_example.py", "test_later.py")
    result = run_example(pytester, PASSES + OTHERS, *options)
    assert result.outcomes == {"failed": 2, "errors": 2, "passed": 2, "rerun": 1}
    assert sentence(result) == (
        "4 failures have no verdict, the first: test_later.py: ModuleNotFoundError: "
        "No module named 'nowhere_to_be_found'. Of 2 tests on ranks, none failed."
    )
    summary = (result.run / "SUMMARY.md").read_text()  # type: ignore[operator]
    assert "test_passes_though_it_should_fail: [XPASS(strict)]; " in summary
    assert "test_has_a_broken_fixture: OSError: no such [host]; " in summary
    assert "test_fails: assert 1 == 2" in summary
    assert "test_passes_the_second_time" not in summary
    assert json.loads((result.run / "run.json").read_text())["failed"] == 4  # type: ignore[operator]


def test_a_failure_with_a_verdict_comes_first(pytester: pytest.Pytester) -> None:
    source = """
    def test_fails_before(): assert 1 == 2

    @world_size(1)
    def test_fails(group): raise KeyError("x")

    @pytest.fixture
    def broken():
        yield
        raise OSError("late")

    def runs(): pass
    def test_launches(launch, broken): launch(runs, world_size=1)
    def fails(): raise KeyError("y")
    def test_launches_what_fails(launch):
        assert launch(fails, world_size=1).verdict.outcome == "PASS"
    """
    result = run_example(pytester, source)
    assert result.outcomes == {"failed": 3, "passed": 1, "errors": 1}
    assert sentence(result).startswith("test_example.py::test_fails ends in FAIL")
    assert sentence(result).endswith(
        "2 of 2 tests fail, all with this cause. 2 more failures have no verdict, the first: "
        "test_example.py::test_fails_before: assert 1 == 2"
    )


@needs_root
def test_leases_that_another_user_holds_back_are_named(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    with shared_folder() as shared:
        folder = shared / "pytest-nsa"
        folder.mkdir(mode=0o777)
        os.chown(folder, NUMBER, NUMBER)
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(shared))
        source = PASSES + "\n@world_size(2)\n@pytest.mark.cores(1)\ndef test_leases(group): pass\n"
        result = run_example(pytester, source)
    assert result.outcomes == {"failed": 1, "passed": 1}
    assert sentence(result).startswith("1 failure has no verdict: test_example.py::test_leases: ")
    assert str(folder) in sentence(result)


def one_verdict() -> dict[str, Verdict]:
    return {"a": Verdict(nodeid="a", outcome="PASS", scenario="a")}


def test_what_is_ready_is_not_known_where_a_failure_has_no_verdict() -> None:
    decision = replace(decide(one_verdict()), readiness="ready")
    assert with_failures(decision, one_verdict(), {}) == decision
    found = with_failures(decision, one_verdict(), {str(n): "why" for n in range(7)})
    assert not found.readiness
    assert found.path[-1].endswith("4: why, and 2 more")
    assert with_failures(decide({}), {}, {"x": "why"}).sentence == "1 failure has no verdict: x: why."
