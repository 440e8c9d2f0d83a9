"""Tests on ranks behave as pytest's users expect: outcomes, fixtures, reports. Tests without ranks have no overhead."""

import os
import signal
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import pytest

from pytest_nsa.testing import run_example
from tests_cpu.plugin.sessions import no_process_is_left

EVERYDAY = """
def test_pass(group, tmp_path, tmp_path_factory):
    (tmp_path / f"{group.rank}.txt").write_text("x")
    dist.barrier()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["0.txt", "1.txt"]
    assert tmp_path_factory.mktemp("more").is_dir()
    total = torch.tensor([group.rank + 1.0])
    dist.all_reduce(total)
    assert total.item() == 3
    print("passed on", group.rank)

@world_size(3)
def test_three(group):
    assert (group.world_size, dist.get_world_size(), os.environ["WORLD_SIZE"]) == (3, 3, "3")

def test_default_is_two_ranks(group):
    assert group.world_size == 2

@world_size(1)
def test_mark_alone():
    assert dist.get_world_size() == torch.get_num_threads() == 1

@pytest.mark.parametrize("x", [1, 2])
def test_parametrized(group, x):
    assert x in (1, 2)

def test_all_skip(group):
    pytest.skip("not today")

def test_some_skip(group):
    if group.rank == 1:
        pytest.skip("only me")

@pytest.mark.xfail(reason="known")
def test_xfail_mark(group): assert group.rank == 5

@pytest.mark.filterwarnings("error")
def test_warning_is_an_error(group):
    import warnings
    warnings.warn("careful")

def test_warning_is_printed(group):
    import warnings
    warnings.warn("careful in ranks")
    assert group.rank == 9

def test_assertion_is_explained(group):
    found = {"rank": group.rank, "list": [1, 2, 3]}
    assert found["list"] == [1, 2, 4]

def test_output(group, capsys, record_property):
    print("captured")
    assert capsys.readouterr().out == "captured\\n"
    record_property("answer", 42)
    print(f"printed by rank {group.rank}")
    assert group.rank == 0

class TestClass:
    @pytest.fixture
    def made(self, group): return group.rank * 10

    def test_method(self, made, group): assert made == 10 * group.rank

def test_plain(): assert "RANK" not in os.environ
"""


def test_everyday_outcomes(pytester: pytest.Pytester) -> None:
    result = run_example(pytester, EVERYDAY, "-rA", "--junitxml=report.xml")
    assert result.outcomes == {"passed": 8, "failed": 5, "skipped": 1, "xfailed": 1, "warnings": 2}
    assert result.verdicts["test_warning_is_an_error"].failed
    assert "UserWarning: careful in ranks" in result.stdout
    assert "At index 2 diff: 3 != 4" in result.stdout
    text = result.stdout
    for rank in range(2):  # once, in the report of a test that passes
        assert text.partition("= PASSES =")[2].count(f"Captured output of rank {rank} call") == 1
        assert text.count(f"passed on {rank}") == 1
    assert "not today" in text
    some = result.verdicts["test_some_skip"]
    assert (some.outcome, some.ranks) == ("FAIL", (1,))
    assert "skipped on some ranks only (1): only me" in some.reason
    # An equal failure on two ranks is shown once, with pytest's own explanation.
    assert text.count("E       assert [1, 2, 3] == [1, 2, 4]") == 1
    assert "--- ranks 0, 1 ---" in text
    assert result.verdicts["test_assertion_is_explained"].cause == "assertion"
    assert "output of rank 1" in text
    assert "printed by rank 1" in text
    assert result.verdicts["test_xfail_mark"].expected
    assert "test_xfail_mark: FAIL" not in text  # an expected failure is not in the closing diagnosis
    cases = {c.get("name"): c for c in ElementTree.parse(pytester.path / "report.xml").iter("testcase")}
    properties = {p.get("name"): p.get("value") for p in cases["test_output"].iter("property")}
    assert properties["answer"] == "42"
    assert properties["nsa.verdict"].startswith("FAIL: rank 1 of 2, assertion")


SPINS = """
import os, threading
def pytest_collection_modifyitems():
    if "PYTEST_NSA_ZYGOTE_FD" not in os.environ:  # a thread that only the host has
        def run(rest=threading.Event()):
            while not rest.wait(0.001): pass
        threading.Thread(target=run, daemon=True).start()
"""


@pytest.mark.parametrize(
    ("options", "conftest", "shown"),
    [
        (("--ranks-launch=fork",), "", "ranks are forked from this process"),
        (("--ranks-launch=clean",), "", "a clean child pytest"),
        pytest.param(("--ranks-launch=cold",), "", "a new interpreter per rank", marks=pytest.mark.slow),
        ((), SPINS, "a clean child pytest (other threads run here"),
        (
            (),
            "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()",
            "forked from this process",
        ),
    ],
    ids=["fork", "clean", "cold", "a thread runs", "a thread rests"],
)
def test_every_way_to_start_ranks(
    pytester: pytest.Pytester, options: tuple[str, ...], conftest: str, shown: str
) -> None:
    pytester.makeconftest(conftest)
    source = "def test_a(group): dist.barrier()\ndef test_b(group): assert group.rank == 0\n"
    result = run_example(pytester, source, *options, "--junitxml=r.xml", "--strict-config")
    assert result.outcomes == {"passed": 1, "failed": 1}
    assert result.verdicts["test_b"].ranks == (1,)
    assert shown in result.stdout
    assert len(list(ElementTree.parse(pytester.path / "r.xml").iter("testcase"))) == 2


def test_a_zygote_that_dies_costs_one_test(pytester: pytest.Pytester) -> None:
    source = """
def test_a(group):
    import subprocess
    subprocess.Popen(["sleep", "1000"])
    dist.barrier()
    if group.rank == 0:
        os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(1000)

@pytest.fixture
def made(group): return group.rank

def test_b(group, made): assert made == group.rank
"""
    result = run_example(pytester, source)
    assert result.outcomes == {"passed": 1, "failed": 1}
    assert "the process that starts the ranks has ended" in result.verdicts["test_a"].reason
    no_process_is_left(pytester.path)
    assert "test_a" in (result.run / "SUMMARY.md").read_text()


def test_a_process_that_a_test_leaves_does_not_hold_the_session(pytester: pytest.Pytester) -> None:
    source = """
def test_a(group): pass

def test_b():
    pid = os.fork()
    if pid == 0:
        time.sleep(600)
    open("left.txt", "w").write(str(pid))
"""
    assert run_example(pytester, source, "-s", "-W", "ignore:This process:DeprecationWarning").outcomes == {"passed": 2}
    left = int((pytester.path / "left.txt").read_text())
    os.kill(left, signal.SIGKILL)  # still there: the session has not waited for it


def test_importing_the_plugin_and_the_command_imports_no_rules_and_no_torch_before_they_are_needed() -> None:
    """The rules come with the first verdict, the page with the report; the command does without torch."""
    late = "('torch', 'nsa', 'pytest_nsa.diagnosis.engine', 'pytest_nsa.report.html', 'pytest_nsa.cli')"
    code = (
        f"import sys, pytest_nsa.plugin; print([m for m in {late} if m in sys.modules]); "
        "import pytest_nsa.cli.main; print('torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, check=True)
    assert result.stdout == "[]\nFalse\n"


def test_ranks_start_without_a_terminal_and_are_bounded_without_pytest_timeout(pytester: pytest.Pytester) -> None:
    source = "@world_size(2)\ndef test_a(group):\n    if group.rank: time.sleep(1000)\n    dist.barrier()\n"
    without = ("-p", "no:timeout", "-p", "no:terminal")
    result = run_example(pytester, source, *without, "-o", "ranks_timeout=4", "--junitxml=r.xml")
    assert result.verdicts["test_a"].cause == "sleeping"


def test_ranked_fixtures_outside_ranks_name_what_to_do(pytester: pytest.Pytester) -> None:
    result = run_example(pytester, "def test_a(trace): pass\n")
    assert result.outcomes == {"errors": 1}
    assert "the fixture 'trace' is for tests on ranks" in result.stdout
    assert "add @pytest.mark.world_size(2)" in result.stdout


LEAVES = """
import threading
from concurrent.futures import ThreadPoolExecutor

def test_leaves_a_thread(group):
    if group.rank == 1:
        threading.Thread(target=threading.Event().wait, name="uploader").start()

def test_leaves_idle_and_daemon_threads(group):
    pool = ThreadPoolExecutor(2)
    assert pool.submit(int, "1").result() == 1
    threading.Thread(target=threading.Event().wait, daemon=True).start()
"""


def test_a_thread_that_is_no_daemon_is_reported(pytester: pytest.Pytester) -> None:
    result = run_example(pytester, LEAVES)
    assert result.outcomes == {"passed": 2, "warnings": 1}
    assert "rank 1 left the thread uploader at" in result.stdout
    assert "it is no daemon: a process of torchrun would wait for it" in " ".join(result.stdout.split())
