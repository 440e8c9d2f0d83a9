"""A failure on ranks for tools and pytest: its place, phase and text; its lines with labels, for GitHub too; pages of causes."""

import re
import xml.etree.ElementTree as ET

import pytest

from pytest_nsa.cli.main import main
from pytest_nsa.diagnosis.causes import CAUSES
from pytest_nsa.testing import HEADER, run_example
from tests_cpu.plugin.sessions import find_line

SOURCE = """
@pytest.fixture
def broken_on_one(group):
    if group.rank == 1:
        raise ValueError("no data on rank 1")
    dist.barrier()

@world_size(2)
def test_broken_fixture(broken_on_one): pass

@world_size(2)
def test_missing_fixture(nowhere): pass

@pytest.mark.parametrize("n", [1])
def test_fails(group, n):
    assert group.rank == 0  # THERE

@world_size(2)
def test_skips():
    pytest.skip("not here")  # SKIP

def test_lacks(group):
    pytest.importorskip("nothing_of_the_kind")  # LACK

def test_known(group):
    pytest.xfail("issue 12")  # KNOWN
"""


def get_line(marker: str) -> int:
    return find_line(HEADER + SOURCE, f"# {marker}")


def test_an_outcome_is_at_its_line_and_a_fixture_s_failure_is_an_error(pytester: pytest.Pytester) -> None:
    options = ("--tb=short", "--junitxml=junit.xml", "-rs", "-p", "no:capture")
    result = run_example(pytester, SOURCE, *options)
    assert result.outcomes == {"failed": 1, "errors": 2, "skipped": 2, "xfailed": 1}
    assert "test_missing_fixture" not in result.verdicts, "a missing fixture starts no ranks"
    assert "fixture 'nowhere' not found" in result.stdout
    assert "<- rank 0 loses the connection to another rank" in result.stdout, "what a victim raised is a label"
    assert "GLHF" not in result.stdout
    cases = {case.get("name"): case for case in ET.parse(pytester.path / "junit.xml").iter("testcase")}
    assert cases["test_broken_fixture"].find("error") is not None
    assert cases["test_fails[1]"].find("failure") is not None
    assert "rank 1 alone fails" in result.stdout
    skipped = sorted(int(line) for line in re.findall(r"SKIPPED \[1\] test_example\.py:(\d+): ", result.stdout))
    assert skipped == [get_line("SKIP"), get_line("LACK")]
    known = result.verdicts["test_known"]
    assert (known.reason, known.ranks, known.expected) == ("expected to fail: issue 12", (0, 1), True)
    assert known.where == f"test_example.py:{get_line('KNOWN')} in test_known"
    short = run_example(pytester, SOURCE, "--tb=line", "-k", "test_fails").stdout
    place = f"test_example.py:{get_line('THERE')}"
    assert f"{pytester.path}/{place}: {place} assertion, rank 1 of 2" in short


def test_the_short_summary_of_a_hang_fits_80_columns(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("CI", raising=False)  # with it pytest cuts nothing
    pytester.mkpydir("app").joinpath("loop.py").write_text(
        "import torch\nimport torch.distributed as dist\n\n\ndef step(rank):\n    if rank == 0:\n"
        "        dist.all_reduce(torch.ones(1))\n"
    )
    source = (
        "from app.loop import step\n@world_size(2)\ndef test_step(group):\n    step(group.rank)\n    dist.barrier()\n"
    )
    result = run_example(pytester, source)
    summary = result.stdout.partition("short test summary info")[2].splitlines()[1]
    cause = result.verdicts["test_step"].cause
    assert summary.removesuffix("...") == f"HANG test_example.py::test_step - app/loop.py:7 {cause}, rank 0 of 2"
    assert len(summary) <= 80
    line = next(line for line in result.stdout.splitlines() if line.startswith("  HANG ["))
    assert re.match(rf"  HANG \[\d+\.\d s\] app/loop\.py:7 {cause}, rank 0 of 2", line), line
    assert len(line) <= 80
    assert result.stdout.index(line) < result.stdout.index("= FAILURES =")


def test_a_failure_is_listed_once(pytester: pytest.Pytester) -> None:
    """By pytest's short summary; where that is switched off, by ours."""
    for options, listed in (((), 0), (("-rN",), 1)):
        result = run_example(pytester, SOURCE, "-k", "test_fails or test_missing", *options)
        closing = result.stdout.partition("= nsa diagnosis =")[2].partition("short test summary")[0]
        assert closing.count("test_example.py::test_fails[1]: FAIL: rank 1 of 2, assertion") == listed
        assert "test_missing_fixture: fixture 'nowhere' not found" in closing


def test_what_ranks_record_is_in_the_junit_file_under_their_rank(pytester: pytest.Pytester) -> None:
    source = """
def test_records(group, record_property, record_testsuite_property, request):
    record_property("loss", 0.5)
    record_property("memory", 100 + group.rank)
    record_testsuite_property("torch", "2")
    record_testsuite_property("device", f"cpu:{group.rank}")
    request.addfinalizer(lambda: record_property("late", group.rank))
"""
    for launch in ("fork", "clean"):
        result = run_example(pytester, source, "--junitxml=junit.xml", f"--ranks-launch={launch}")
        assert result.outcomes["passed"] == 1, result.stdout
        suite = ET.parse(pytester.path / "junit.xml").find("testsuite")
        of_the_suite = {p.get("name"): p.get("value") for p in suite.findall("properties/property")}
        assert of_the_suite == {"torch": "2", "device": "cpu:0", "rank1.device": "cpu:1"}
        of_the_test = {p.get("name"): p.get("value") for p in suite.findall("testcase/properties/property")}
        assert of_the_test == {"loss": "0.5", "memory": "100", "late": "0", "rank1.memory": "101", "rank1.late": "1"}


def test_a_rank_that_a_plugin_fails_by_its_report_alone_has_a_cause(pytester: pytest.Pytester) -> None:
    """As pytest-memray does for a limit: there is no exception."""
    checks = """
import os, pytest

@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if call.when == "call" and "leaks" in item.name and os.environ.get("RANK") == "1":
        report.outcome, report.longrepr = "failed", "left 2 sockets open"
    return report
"""
    pytester.makepyfile(checks=checks)
    source = """
def test_leaks(group): group.barrier()

@pytest.mark.xfail(strict=True)
def test_passes_against_expectation(group): group.barrier()
"""
    result = run_example(pytester, source, "-p", "checks")
    verdict = result.verdicts["test_leaks"]
    assert (verdict.cause, verdict.ranks, verdict.where) == ("assertion", (1,), "test_example.py:6 in test_leaks")
    assert "left 2 sockets open" in verdict.reason
    strict = result.verdicts["test_passes_against_expectation"]
    assert (strict.cause, strict.ranks, strict.reason) == ("", (), "")


@pytest.mark.skipif(not hasattr(pytest, "Subtests"), reason="pytest before 9 has no subtests")
def test_each_subtest_is_at_its_line_and_has_its_description(pytester: pytest.Pytester) -> None:
    source = """
def test_parts(group, subtests):
    for i in range(3):
        with subtests.test(msg="part", i=i):
            assert i != 1
            assert not (i == 2 and group.rank == 1)
    group.barrier()
"""
    text = run_example(pytester, source).stdout
    first = find_line(HEADER + source, "i != 1")
    for headline, place in (
        ("--- ranks 0, 1 ---\n[part] (i=1)\n", first), ("--- rank 1 ---\n[part] (i=2)\n", first + 1)
    ):  # fmt: skip
        assert f"test_example.py:{place}: AssertionError" in text.partition(headline)[2].partition("--- ")[0]


def test_pytest_exit_in_a_rank_ends_the_session(pytester: pytest.Pytester) -> None:
    source = """
    def test_exits(group):
        if group.rank == 1:
            pytest.exit("no data", returncode=7)
        dist.barrier()

    def test_after(): pass
    """
    result = run_example(pytester, source)
    assert result.returncode == 7
    assert "_pytest.outcomes.Exit: no data" in result.stdout
    assert "passed" not in result.outcomes
    assert result.verdicts["test_exits"].ranks == (1,)


def test_exceptions_that_cannot_be_inherited_or_shown_have_their_verdict(pytester: pytest.Pytester) -> None:
    source = """
    import dataclasses, subprocess

    @dataclasses.dataclass(frozen=True)
    class Frozen(Exception):
        code: int

    class Final(Exception):
        def __init_subclass__(cls): raise RuntimeError("final")

    class WithReport(Exception):
        report = property(lambda self: 3)

    class Asks(Exception):
        def __getattr__(self, name): return self.__dict__["data"][name]

    def asks():
        error = Asks("x")
        error.data = {}
        return error

    MAKERS = [
        lambda: subprocess.CalledProcessError(1, "make"), lambda: Frozen(3), lambda: Final("x"), lambda: WithReport("x"), asks
    ]

    @pytest.mark.parametrize("number", range(5))
    def test_raises(group, number):
        raise MAKERS[number]()

    @pytest.mark.xfail(raises=subprocess.CalledProcessError)
    def test_of_a_type(group):
        raise subprocess.CalledProcessError(1, "make")
    """
    pytest.importorskip("pytest_rerunfailures", reason="the extra 'test' has it")
    result = run_example(pytester, source, "-p", "rerunfailures", "--reruns", "1", "--only-rerun", "AssertionError")
    assert result.outcomes == {"failed": 5, "xfailed": 1}
    assert {v.cause for name, v in result.verdicts.items() if "raises" in name} == {"assertion"}
    assert all(text in result.stdout for text in ("CalledProcessError: ", "Frozen", "Final: x", "WithReport: x"))


HANGS = """
import torch, torch.distributed as dist
from pytest_nsa import world_size

def mean(x):
    dist.all_reduce(x)

@world_size(3)
def test_skips(group):
    for step in range(4):
        if group.rank != 1 or step != 2:
            mean(torch.ones(5))
    dist.barrier()

def test_asserts(group):
    assert group.rank > 5
"""


def test_each_side_has_a_label_at_its_line(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    result = run_example(pytester, HANGS, "--ranks-verbose")
    lines = (pytester.path / "test_example.py").read_text().splitlines()
    verdict = result.verdicts["test_skips"]
    found = {(lines[label.line - 1].strip(), label.ranks, label.text) for label in verdict.labels}
    assert ("dist.barrier()", (1,), "waits here: barrier #4, step = 3") in found
    assert ("dist.all_reduce(x)", (0, 2), "waits here: allreduce #4 (float32 x 5)") in found
    assert len(verdict.reason.split()) <= 15
    assert verdict.because
    assert set(verdict.because) <= set(result.stdout.splitlines())
    frame = [line for line in result.stdout.splitlines() if " | " in line and "<- " in line]
    assert any(
        re.fullmatch(r" +\d+ \| dist\.barrier\(\) +<- rank 1 waits here: barrier #4, step = 3", line) for line in frame
    )
    assert "  more     pytest-nsa explain skipped_collective" in result.stdout
    annotated = re.findall(r"^::(\w+) file=test_example\.py,line=(\d+),", result.stdout, re.M)
    blamed = verdict.where.partition(":")[2].partition(" ")[0]
    assert ("error", blamed) in annotated
    assert sum(level == "error" and line == blamed for level, line in annotated) == 1
    assert len(annotated) >= 3


def test_ranks_that_only_raise_keep_pytest_s_form(pytester: pytest.Pytester) -> None:
    result = run_example(pytester, HANGS, "-k", "asserts")
    assert result.verdicts["test_asserts"].ranks == (0, 1)
    assert "<- " not in result.stdout
    assert ">       assert group.rank > 5" in result.stdout or ">   assert group.rank > 5" in result.stdout


def test_each_cause_has_a_page_and_a_name_that_is_none_gets_the_nearest_ones(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in CAUSES:
        assert main(["explain", name]) == 0
        assert capsys.readouterr().out.startswith(f"# {name}\n")
    assert main(["explain", "../skipped_colective"]) == 2
    assert "skipped_collective" in capsys.readouterr().err
