"""Under torchrun and SLURM each process is a rank: all run the same tests, and rank 0's process reports those on ranks; of those on
no ranks of ours, each process runs them, nothing that fails is hidden, and a test past its limit ends though its main thread is in
native code.
"""

import re
import signal
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from pytest_nsa.testing import HEADER, run_example
from tests_cpu.plugin.sessions import read_verdicts, run_under_slurm, run_under_torchrun, start_slurm_task
from tests_cpu.sockets import free_port
from tests_cpu.warm import WarmPython

SOURCE = """
@pytest.mark.parametrize("n", range(2))
@world_size(2)
def test_passes(group, n):
    total = torch.tensor(group.rank + 1.0)
    dist.all_reduce(total)
    assert total.item() == 3
    print("said by", group.rank)

def test_takes_the_launcher_s_number(group): assert group.world_size == 2

@world_size(2)
def test_fails_on_rank_1(group):
    assert group.rank == 0
    dist.barrier()

@world_size(2)
def test_dies_on_rank_1(group):
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()

@world_size(2)
def test_skips_a_collective(group):
    if group.rank != 1:
        dist.all_reduce(torch.ones(1))
    dist.barrier()

@world_size(3)
def test_of_another_size(group): pass

@world_size(2)
def test_foreseen(group): pytest.xfail("known")

def test_in_every_process(): pass

@world_size(2)
def test_after(group): dist.barrier()
"""


@pytest.fixture(autouse=True)
def asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have each suite ask for ranks before it is collected, as by a conftest.py that imports the plugin."""
    monkeypatch.setenv("PYTEST_ADDOPTS", "-o ranks_marks=true")


@pytest.mark.parametrize("launcher", ["torchrun", pytest.param("slurm", marks=pytest.mark.slow)])
def test_one_process_reports_the_tests_on_ranks(warm: WarmPython, pytester: pytest.Pytester, launcher: str) -> None:
    (pytester.path / "test_example.py").write_text(HEADER + SOURCE)
    if launcher == "torchrun":
        done = run_under_torchrun(warm, pytester.path, "-rs")
        code, text = done.returncode, done.stdout
    else:
        (code, text), follower = run_under_slurm(warm, pytester.path, "-rs")
        assert follower == (1, "")
    assert code == 1
    assert text.count("test session starts") == 1
    assert "3 failed, 5 passed, 1 skipped, 1 xfailed" in text
    assert "FAIL: rank 1 of 2, rank_exception" in text
    assert "CRASH: rank 1 of 2, rank_died" in text
    assert "HANG: rank 1 of 2, skipped_collective" in text
    assert "needs 3 ranks, and the launcher has started 2" in text
    folder = next((pytester.path / "artifacts" / "latest").glob("*test_fails_on_rank_1*"))
    assert (folder / "rank1" / "board.bin").is_file()
    assert "assert 1 == 0" in (folder / "rank1" / "reports.jsonl").read_text()


@pytest.mark.slow
def test_exit_first_ends_all(warm: WarmPython, pytester: pytest.Pytester) -> None:
    (pytester.path / "test_example.py").write_text(HEADER + SOURCE)
    (code, text), (of_follower, _) = run_under_slurm(warm, pytester.path, "-x")
    assert "1 failed, 3 passed" in text
    assert (code, of_follower) == (1, 1)


@pytest.mark.slow
def test_a_process_with_other_tests_is_refused_with_the_difference(warm: WarmPython, pytester: pytest.Pytester) -> None:
    (pytester.path / "test_example.py").write_text(HEADER + SOURCE)
    lacks = ("--deselect=test_example.py::test_after",)
    (code, text), (of_follower, _) = run_under_slurm(warm, pytester.path, rank_1=lacks)
    assert (code, of_follower) == (pytest.ExitCode.USAGE_ERROR,) * 2
    assert (
        "rank 1's process collected other tests on ranks than rank 0's: it lacks test_example.py::test_after; "
        "give all the same checkout and arguments" in text
    )


@pytest.mark.slow
def test_a_process_that_dies_ends_the_test_on_all(warm: WarmPython, pytester: pytest.Pytester) -> None:
    source = """
@world_size(2)
def test_loses_a_node(group, artifacts):
    if group.rank == 1:
        os.kill(int(os.environ["FOLLOWER"]), signal.SIGKILL)  # the pytest process, and with it this rank
    dist.barrier()

@world_size(2)
@pytest.mark.parametrize("n", range(2))
def test_later(group, n): dist.barrier()
"""
    (pytester.path / "test_example.py").write_text(HEADER + source)
    (pytester.path / "conftest.py").write_text("import os\nos.environ['FOLLOWER'] = str(os.getpid())\n")
    (code, text), (of_follower, _) = run_under_slurm(warm, pytester.path)
    assert (code, of_follower) == (1, -signal.SIGKILL)
    assert "CRASH: rank 1 of 2, rank_died" in text
    later = [v for name, v in read_verdicts(pytester.path).items() if name.startswith("test_later")]
    assert [v.cause for v in later] == ["unknown"] * 2  # not waited for again
    assert all("rank 1's process was lost in test_example.py::test_loses_a_node" in v.reason for v in later)


def test_what_a_process_waits_for_is_printed(warm: WarmPython, pytester: pytest.Pytester) -> None:
    (pytester.path / "test_example.py").write_text(HEADER + "@world_size(2)\ndef test_it(group): pass\n")
    leader = start_slurm_task(warm, pytester.path, 0, free_port())
    found = next((line for line in leader.stdout if "waits for rank 1's process to collect its tests" in line), "")
    leader.kill()
    leader.communicate(timeout=30)
    assert found


def test_xdist_under_a_launcher_is_refused(warm: WarmPython, pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test_it(): pass")
    process = start_slurm_task(warm, pytester.path, 0, free_port(), "-n2")
    assert "-n under torchrun or SLURM: each of its processes is a rank already" in process.communicate(timeout=60)[0]
    assert process.returncode == pytest.ExitCode.USAGE_ERROR


def test_a_world_of_one_is_no_launcher_s_and_an_unknown_host_is_refused(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container that sets RANK=0 and WORLD_SIZE=1."""
    source = "@world_size(2)\ndef test_it(group): dist.barrier()\n"
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "256.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert run_example(pytester, source).outcomes == {"passed": 1}
    monkeypatch.setenv("WORLD_SIZE", "2")
    result = run_example(pytester, source)
    assert result.returncode == pytest.ExitCode.USAGE_ERROR
    assert "MASTER_ADDR = 256.0.0.1: " in result.stderr
    assert "unset RANK to run without" in result.stderr


# As Megatron-LM's suite: one group for a session, by env://, which ends behind a barrier.
CONFTEST = """
import pytest, torch, torch.distributed as dist

@pytest.fixture(scope="session")
def pg():
    dist.init_process_group("gloo")
    yield dist.group.WORLD
    dist.barrier()
    dist.destroy_process_group()
"""
RANK = 'RANK = int(os.environ.get("RANK", os.environ.get("SLURM_PROCID")))\n'


def results(folder: Path) -> dict[str, dict[str, str]]:
    """Return what became of each test, by testsuite."""
    found: dict[str, dict[str, str]] = {}
    for suite in ET.parse(folder / "junit.xml").getroot():
        cases = {case.get("name", ""): "passed" for case in suite.iter("testcase")}
        cases |= {
            case.get("name", ""): part.tag
            for case in suite.iter("testcase")
            for part in case
            if part.tag in ("failure", "error")
        }
        found[suite.get("name", "")] = cases
    return found


def write(pytester: pytest.Pytester, source: str) -> None:
    (pytester.path / "conftest.py").write_text(CONFTEST)
    (pytester.path / "test_example.py").write_text(HEADER + RANK + source)


def test_what_fails_on_rank_1_alone_is_shown(warm: WarmPython, pytester: pytest.Pytester) -> None:
    write(
        pytester,
        """
def test_shard(): assert RANK < 1, "wrong shard on this rank"

def test_other(): pass
""",
    )
    done = run_under_torchrun(warm, pytester.path)
    assert done.returncode == 1
    assert "AssertionError: wrong shard on this rank" in done.stdout
    assert "1 failed, 1 passed" in done.stdout
    assert results(pytester.path) == {
        "pytest": {"test_shard": "passed", "test_other": "passed"},
        "pytest rank 1": {"test_shard": "failure", "test_other": "passed"},
    }
    assert not (pytester.path / "artifacts").exists()


MIXED = """
def test_all_reduce(pg):
    x = torch.ones(1)
    dist.all_reduce(x)
    assert x.item() == 2

def test_shard():
    print("a word of rank", RANK)
    assert RANK < 1, "wrong shard on this rank"

@world_size(2)
def test_marked(group): dist.barrier()
"""


def test_beside_a_marked_test_the_others_run_in_every_process(warm: WarmPython, pytester: pytest.Pytester) -> None:
    write(pytester, MIXED)
    done = run_under_torchrun(warm, pytester.path, "--timeout=60")
    assert done.returncode == 1
    # Rank 0's process reports, and rank 1's what fails in it alone.
    assert done.stdout.count("test session starts") == 1
    assert "[rank 1] FAILED test_example.py::test_shard" in done.stdout
    assert "[rank 1] E       AssertionError: wrong shard on this rank" in done.stdout
    assert "[rank 1] a word of rank 1" in done.stdout
    assert "[rank 1] 1 failed here, of 3" in done.stdout
    assert "3 passed" in done.stdout
    assert results(pytester.path) == {
        "pytest": {"test_all_reduce": "passed", "test_shard": "passed", "test_marked": "passed"},
        "pytest rank 1": {"test_all_reduce": "passed", "test_shard": "failure"},
    }


def test_a_test_past_its_limit_ends_with_rank_line_and_cause(warm: WarmPython, pytester: pytest.Pytester) -> None:
    write(
        pytester,
        """
def test_first(pg): dist.barrier()

def test_loss(pg):
    loss = torch.tensor([1.0 + RANK])
    assert loss.item() < 1.5, "loss differs"  # of rank 1; rank 0 waits in native code
    dist.all_reduce(loss)

def test_next(pg): dist.barrier()
""",
    )
    done = run_under_torchrun(warm, pytester.path, "--timeout=8")
    assert done.returncode == 1
    line = (HEADER + RANK).count("\n") + 6
    # Rank 1 is in the next test, with a limit that is over in the same moment: either clock may be the first.
    verdict = re.escape(f"FAIL: rank 1 of 2, rank_exception, at test_example.py:{line} in test_loss")
    assert re.search(rf"^\[rank [01]\] {verdict}", done.stdout, re.M), done.stdout
    ended = r"ended (at its time limit of 8 s|with the others)"
    assert re.search(rf"^\[rank 0\] HANG test_example.py::test_loss: {ended}", done.stdout, re.M), done.stdout
    assert "[rank 1] E       AssertionError: loss differs" in done.stdout
    assert "exitcode  : 1" in done.stdout
    assert results(pytester.path) == {
        "pytest": {"test_first": "passed", "test_loss": "failure"},
        "pytest rank 1": {"test_first": "passed", "test_loss": "failure", "test_next": "failure"},
    }
    run = pytester.path / "artifacts" / "latest"
    assert "rank_exception" in (run / "SUMMARY.md").read_text()
    assert (run / "report.html").is_file()


def test_a_rank_that_hangs_when_the_other_is_done_is_ended(warm: WarmPython, pytester: pytest.Pytester) -> None:
    write(
        pytester,
        """
import ctypes

def test_native():
    mutex, lock = (ctypes.c_char * 64)(), ctypes.CDLL(None).pthread_mutex_lock
    for _ in range(1 + RANK):
        lock(mutex)  # no signal interrupts the second call
""",
    )
    done = run_under_torchrun(warm, pytester.path, "--timeout=3")
    assert done.returncode == 1
    assert "[rank 1] HANG test_example.py::test_native: ended at its time limit of 3 s" in done.stdout
    assert results(pytester.path) == {"pytest": {"test_native": "passed"}, "pytest rank 1": {"test_native": "failure"}}


@pytest.mark.slow
def test_a_process_that_dies_leaves_what_it_had_reported(warm: WarmPython, pytester: pytest.Pytester) -> None:
    write(
        pytester,
        """
def test_first(): assert RANK == 1, "a failure before"

def test_dies():
    if RANK == 0:
        os.kill(os.getpid(), signal.SIGKILL)
""",
    )
    done = run_under_torchrun(warm, pytester.path)
    assert done.returncode == 1
    assert "[rank 0] FAILED test_example.py::test_first" in done.stdout
    assert "AssertionError: a failure before" in done.stdout
    assert "[rank 0] CRASH test_example.py::test_dies: its process has ended" in done.stdout
    assert results(pytester.path)["pytest"] == {"test_first": "failure", "test_dies": "failure"}


@pytest.mark.slow
def test_a_group_by_env_shares_the_port_with_ours_where_no_launcher_keeps_a_store(
    warm: WarmPython, pytester: pytest.Pytester
) -> None:
    """Rank 0's process serves both on MASTER_PORT."""
    write(pytester, MIXED.replace("RANK < 1", "True"))
    ranks = run_under_slurm(warm, pytester.path, "--timeout=60", names=("RANK", "WORLD_SIZE"))
    assert [code for code, _ in ranks] == [0, 0], ranks
    assert "3 passed" in ranks[0][1]
