"""Generated tests on two ranks, against plain pytest on the body of each rank: the worst rank decides, marks apply to the whole."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from pytest_nsa.testing import run_example, run_folder
from tests_cpu.plugin.sessions import run_under_torchrun
from tests_cpu.warm import WarmPython

# One file for both: under plain pytest a death is an exception that no mark names.
CASES = """
import itertools, os, signal, unittest
import pytest

RANK, PLAIN = int(os.environ.get("RANK", -1)), "PLAIN" in os.environ

class Died(Exception): pass

def act(phase, case):
    where, ranks, how = case[:3]
    if phase != where or int(os.environ["RANK"]) not in ranks:
        return
    if how == "raises":
        raise ValueError(phase)
    assert how != "asserts"
    if how == "skips":
        pytest.skip("as a test")
    if how == "xfails":
        pytest.xfail("as a test")
    if PLAIN:
        raise Died
    os._exit(3) if how == "exits" else os.kill(os.getpid(), signal.SIGKILL)

@pytest.fixture
def around(case):
    act("setup", case)
    yield
    act("teardown", case)

MARKS = {
    "": (), "any": pytest.mark.xfail, "value": pytest.mark.xfail(raises=ValueError), "strict": pytest.mark.xfail(strict=True),
    "matches": pytest.mark.xfail(raises=(KeyError, ValueError), strict=True),
    "elsewhere": pytest.mark.xfail("int(os.environ.get('RANK', 1)) == 0", reason="on rank 0", raises=ValueError),
}
HOWS = {"setup": ("raises", "asserts"), "call": ("raises", "asserts", "exits", "killed"), "teardown": ("raises", "exits")}
ALL = [(phase, ranks, how, mark) for phase in HOWS for how in HOWS[phase] for ranks in ((1,), (0, 1)) for mark in MARKS]
ALL += [(phase, (0, 1), how, mark) for phase in ("setup", "call") for how in ("skips", "xfails") for mark in ("", "strict")]
ALL += [("never", (), "", mark) for mark in MARKS]
ALL += [("call", (0, 1), "raises", mark, "added") for mark in MARKS] + [("never", (), "", mark, "added") for mark in MARKS]

def named(case):
    return "-".join(["".join(map(str, part)) if isinstance(part, tuple) else part or "none" for part in case])

@pytest.mark.world_size(2)
@pytest.mark.parametrize("case", [pytest.param(c, marks=() if c[4:] else MARKS[c[3]], id=named(c)) for c in ALL])
def test_it(around, case, request):
    if case[4:] and MARKS[case[3]]:
        request.node.add_marker(MARKS[case[3]])
    act("call", case)
"""
CONFTEST = """
import json, os
from pytest_nsa.rank.context import current_rank
def pytest_runtest_logreport(report):
    if current_rank() is not None:
        return
    with open(os.environ["REPORTS"] + os.environ.get("RANK", ""), "a") as file:
        file.write(json.dumps([report.nodeid.partition("::")[2], report.when, report.outcome, hasattr(report, "wasxfail"),
                               str(report.longrepr)[:20]]) + "\\n")
"""


def outcomes(path: Path) -> dict[str, dict[str, str]]:
    """Return the outcome of each phase of each test: passed, failed, skipped, xfailed, xpassed, or xpassed strictly."""
    found: dict[str, dict[str, str]] = {}
    for line in path.read_text().splitlines():
        name, when, outcome, is_expected, text = json.loads(line)
        if is_expected:
            outcome = {"skipped": "xfailed", "passed": "xpassed"}[outcome]
        if text.startswith("[XPASS(strict)]"):
            outcome = "xpassed strictly"
        found.setdefault(name, {})[when] = outcome
    return found


def folded(ranks: list[Mapping[str, str]], phases: tuple[str, ...]) -> str:
    """Return the outcome of some phases on all ranks: the worst, and expected only if each failure was."""
    seen = [rank[phase] for rank in ranks for phase in phases if phase in rank]
    order = ("failed", "xfailed", "xpassed strictly", "xpassed", "skipped", "passed")
    return next((outcome for outcome in order if outcome in seen), "")


def run_plain(folder: Path, rank: int) -> dict[str, dict[str, str]]:
    environment = {**os.environ, "RANK": str(rank), "PLAIN": "1", "REPORTS": str(folder / "plain")}
    off = [part for name in ("nsa", "cacheprovider", "randomly") for part in ("-p", f"no:{name}")]
    arguments = (*off, "-q", "--tb=no", "--rootdir", str(folder))
    subprocess.run([sys.executable, "-m", "pytest", *arguments], cwd=folder, env=environment, check=False, timeout=100,
                   capture_output=True)  # fmt: skip
    return outcomes(folder / f"plain{rank}")


def run_on_ranks(warm: WarmPython, folder: Path, how: str) -> dict[str, dict[str, str]]:
    """Run the cases on ranks; return what the pytest process that reports has reported."""
    if how == "torchrun":
        run_under_torchrun(warm, folder, "-q", "--tb=no", "--rootdir", str(folder))
        return outcomes(folder / "ranks0")  # the leader reports
    assert run_folder(folder, "-q", "--tb=no", "-n", how).returncode == 1
    return outcomes(folder / "ranks")


@pytest.mark.timeout(175)
@pytest.mark.parametrize(
    "how", ["0", pytest.param("2", marks=pytest.mark.slow), pytest.param("torchrun", marks=pytest.mark.slow)]
)
def test_an_outcome_is_that_of_plain_pytest_on_the_worst_rank(
    warm: WarmPython, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    (tmp_path / "test_cases.py").write_text(CASES)
    (tmp_path / "conftest.py").write_text(CONFTEST)
    monkeypatch.setenv("REPORTS", str(tmp_path / "ranks"))
    plain = [run_plain(tmp_path, rank) for rank in range(2)]
    found = run_on_ranks(warm, tmp_path, how)
    assert len(found) == len(plain[0]) > 100
    wrong = {}
    for name, phases in found.items():
        for part in (("setup", "call"), ("teardown",)):
            wanted = folded([rank[name] for rank in plain], part)
            if folded([phases], part) != wanted:
                wrong[name, part] = (folded([phases], part), wanted)
    assert wrong == {}


def test_a_hang_is_not_hidden_by_the_expected_failure_of_another_rank(pytester: pytest.Pytester) -> None:
    result = run_example(
        pytester,
        """
        @pytest.mark.timeout(8)
        @pytest.mark.xfail(raises=ValueError)
        @pytest.mark.parametrize("waits", ["for nobody", "for the rank that raised"])
        def test_it(group, waits):
            if group.rank == 0:
                raise ValueError
            threading.Event().wait() if waits == "for nobody" else dist.barrier()

        def test_leaves_alone(group):
            if group.rank == 0:
                pytest.xfail("not on rank 0")
            dist.barrier()

        @pytest.mark.xfail(raises=ValueError)
        def test_unexpected(group):
            if group.rank == 1:
                while not os.path.exists("raised"):
                    time.sleep(0.01)
                raise KeyError("unexpected")
            open("raised", "w").close()
            raise ValueError("expected")

        @fails_as("assertion")
        @pytest.mark.parametrize("other", ["passes", "dies", "fails in teardown"])
        def test_cause(group, other, request):
            if group.rank == 1 and other == "fails in teardown":
                request.addfinalizer(lambda: 1 / 0)
            if group.rank == 1 and other == "dies":
                os.abort()
            assert group.rank
        """,
    )
    expected = {name: v.expected for name, v in result.verdicts.items()}
    assert expected == {
        "test_it[for nobody]": False, "test_it[for the rank that raised]": True, "test_leaves_alone": False,
        "test_unexpected": False,
        "test_cause[passes]": True, "test_cause[dies]": False, "test_cause[fails in teardown]": False,
    }  # fmt: skip
    # Two reports of the last: its body and its teardown.
    assert (result.outcomes["xfailed"], result.outcomes["failed"], result.outcomes["errors"]) == (2, 5, 1)
    verdict = result.verdicts["test_unexpected"]  # about the exception that came second
    assert (verdict.ranks, verdict.reason.partition(" (")[0]) == ((1,), "KeyError: 'unexpected'")
    assert verdict.where.startswith("test_")


def test_pytest_exit_on_one_rank_hides_no_failure_of_another(pytester: pytest.Pytester) -> None:
    result = run_example(
        pytester,
        """
        def test_it(group):
            if group.rank == 1:
                pytest.exit("enough", returncode=0)
            assert False
        def test_later(group): pass
        """,
        "--junitxml=out.xml",
    )
    assert (result.returncode, result.outcomes) == (1, {"failed": 1})
    assert 'tests="1"' in (pytester.path / "out.xml").read_text()


def test_a_verdict_that_a_test_does_not_read_fails_it(pytester: pytest.Pytester) -> None:
    result = run_example(
        pytester,
        """
        def raises(rank):
            raise ValueError(f"on rank {rank}")
        def returns(rank): pass

        @pytest.mark.parametrize("read", ["nothing", "passed", "verdict", "output"])
        def test_it(launch, read):
            outcome = launch(raises, timeout=20)
            if read == "output":
                assert outcome.output(0)
            elif read != "nothing":
                assert getattr(outcome, read) is not None

        def test_passes(launch):
            launch(returns, timeout=20)
        """,
    )
    assert result.outcomes == {"passed": 5, "errors": 2}
    assert {v.outcome for v in result.verdicts.values()} == {"FAIL"}


@pytest.mark.parametrize(
    "decorated",
    [
        "@world_size(2)\ndef test_it(): pass",
        "@world_size(1, 2, group=None)\nclass TestIt:\n    def test_it(self): pass",
    ],
    ids=["function", "class"],
)
def test_a_decorated_test_fails_without_the_plugin(pytester: pytest.Pytester, decorated: str) -> None:
    result = run_example(pytester, decorated, "-p", "no:nsa")
    assert result.returncode == 1
    assert set(result.outcomes) <= {"errors", "warnings"}
    assert "fixture 'pytest_nsa_plugin' not found" in result.stdout
