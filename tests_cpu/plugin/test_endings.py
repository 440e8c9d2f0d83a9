"""However a session ends, by signals or SIGKILL of host, zygote and ranks: its verdicts, SUMMARY.md and report.html are written, or
what was seen until then is on disk and `pytest-nsa diagnose` reports it; no process is left.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pytest_nsa.cli.main import main
from pytest_nsa.diagnosis.verdict import Verdict
from pytest_nsa.evidence.board import BoardReader
from pytest_nsa.system.procfs import list_children
from pytest_nsa.testing import HEADER, run_example
from pytest_nsa.wire.files import read_lines
from tests_cpu.plugin.sessions import no_process_is_left, read_verdicts, start_session, wait_for
from tests_cpu.warm import WarmPython

TERM, HUP, QUIT, INT = signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGINT
HANGS = """
def test_before(group): pass

def test_moment(group):
    open(f"moment{group.rank}", "w").close()
    if group.rank == 1:
        time.sleep(1000)
    dist.barrier()
"""
BETWEEN = """
def test_before(group): pass

def test_moment():
    open("moment0", "w").close()
    time.sleep(1000)
"""
REPORTS = """
def test_before(group): pass
"""
# The decision delays the reports.
DECIDES = """
import time

def pytest_nsa_decide(verdicts):
    open("moment0", "w").close()
    time.sleep(2)
    return None
"""
OTHER_ENDS = """
import time

def pytest_sessionfinish():
    open("moment0", "w").close()
    time.sleep(1000)
"""
MOMENTS_OF_OURS = {"a hang": (HANGS, ""), "between tests on ranks": (BETWEEN, ""), "the reports": (REPORTS, DECIDES)}
MOMENTS = {**MOMENTS_OF_OURS, "another plugin's end": (REPORTS, OTHER_ENDS)}


def has_come(folder: Path, moment: str) -> bool:
    """Return whether the session has reached ``moment``, and has the verdict of test_before: another worker may run it."""
    verdicts = folder / "artifacts" / "latest" / "verdicts.jsonl"
    files = ("moment0", "moment1") if moment == "a hang" else ("moment0",)
    return (
        all((folder / name).exists() for name in files) and verdicts.exists() and "test_before" in verdicts.read_text()
    )


def end(
    warm: WarmPython, folder: Path, moment: str, sent: list[signal.Signals], *arguments: str, group: bool = False
) -> subprocess.Popen[str]:
    """Run a session, send it signals at ``moment``, 0.3 s apart, and wait until it and all of its processes have ended."""
    tests, conftest = MOMENTS[moment]
    (folder / "conftest.py").write_text(conftest)
    process = start_session(warm, folder, HEADER + tests, *arguments)
    wait_for(lambda: has_come(folder, moment), process)
    send = os.killpg if group else os.kill
    send(process.pid, sent[0])
    for number in sent[1:]:
        time.sleep(0.3)  # the time between two signals is what is tested
        with contextlib.suppress(ProcessLookupError):  # it has ended by an earlier one
            send(process.pid, number)
    print(process.communicate(timeout=90)[0])
    no_process_is_left(folder)
    return process


def check(folder: Path, process: subprocess.Popen[str], moment: str, sent: signal.Signals) -> None:
    run = folder / "artifacts" / "latest"
    summary = (run / "SUMMARY.md").read_text()
    assert "1 PASS." in summary  # test_before
    assert (run / "report.html").read_text().endswith("</html>\n")
    if moment == "the reports":  # they are written all the same, and no test was interrupted
        assert process.returncode == 0
        return
    assert process.returncode == (2 if sent == INT else 128 + sent)
    assert summary.startswith("INTERRUPTED")
    if moment == "a hang":
        assert "INTERRUPTED" in (next(run.glob("*test_moment*")) / "result.txt").read_text()


SAMPLE = {("a hang", (TERM,), "2"), ("a hang", (HUP, HUP, TERM), "0"), ("the reports", (TERM, INT), "0")}
CASES = [
    pytest.param(moment, sent, workers, marks=() if (moment, sent, workers) in SAMPLE else pytest.mark.slow)
    for moment in MOMENTS_OF_OURS
    for sent in ((TERM,), (HUP,), (QUIT,), (INT,), (TERM, TERM), (HUP, HUP, TERM), (INT, INT), (TERM, INT))
    for workers in ("0", "2")
]


@pytest.mark.timeout(170)
@pytest.mark.parametrize(("moment", "sent", "workers"), CASES)
def test_a_signal_ends_a_session_with_its_reports(
    warm: WarmPython, tmp_path: Path, moment: str, sent: tuple[signal.Signals, ...], workers: str
) -> None:
    process = end(warm, tmp_path, moment, [*sent], "-n", workers)
    # Of several, the first that is not SIGINT (Ctrl-C) gives the exit code.
    check(tmp_path, process, moment, next((s for s in sent if s != INT), INT))


@pytest.mark.timeout(170)
@pytest.mark.parametrize("sent", [TERM, INT])
def test_a_signal_ends_what_another_plugin_does_at_the_session_s_end(
    warm: WarmPython, tmp_path: Path, sent: signal.Signals
) -> None:
    process = end(warm, tmp_path, "another plugin's end", [sent], "-n", "0")
    assert process.returncode == (2 if sent == INT else 128 + sent)
    assert "1 PASS." in (tmp_path / "artifacts" / "latest" / "SUMMARY.md").read_text()


@pytest.mark.timeout(100)
def test_a_signal_during_collection_leaves_no_process(warm: WarmPython, tmp_path: Path) -> None:
    process = start_session(warm, tmp_path, "import time\nopen('moment0', 'w').close()\ntime.sleep(1000)\n")
    wait_for((tmp_path / "moment0").exists, process)
    process.send_signal(TERM)
    process.communicate(timeout=60)
    no_process_is_left(tmp_path)


@pytest.mark.timeout(170)
@pytest.mark.parametrize("workers", ["0", pytest.param("2", marks=pytest.mark.slow)])
def test_a_killed_run_is_reported_later_and_the_next_session_notices(
    warm: WarmPython, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: str
) -> None:
    end(warm, tmp_path, "a hang", [signal.SIGKILL], "-n", workers, group=workers != "0")
    run = (tmp_path / "artifacts" / "latest").resolve()
    assert not (run / "SUMMARY.md").exists()
    (tmp_path / "test_example.py").write_text(HEADER + REPORTS)
    again = warm.call("-m", "pytest", "-p", "no:cacheprovider", cwd=tmp_path)
    said = f"artifacts/{run.name} was cut off: pytest-nsa report artifacts/{run.name} writes its SUMMARY.md"
    assert said in again.stdout
    monkeypatch.chdir(tmp_path)
    assert main(["report", f"artifacts/{run.name}"]) == 1
    summary = (run / "SUMMARY.md").read_text()
    assert summary.startswith("INTERRUPTED")
    assert "1 PASS." in summary  # test_before
    assert (run / "report.html").read_text().endswith("</html>\n")
    assert main(["report", str(run)]) == 1
    assert (run / "SUMMARY.md").read_text().partition("\n")[2] in summary  # the same text


@pytest.mark.slow
@pytest.mark.parametrize("to", ["torchrun", "the process group"])
def test_a_signal_under_torchrun_ends_all_processes_with_the_leader_s_reports(tmp_path: Path, to: str) -> None:
    (tmp_path / "test_example.py").write_text(HEADER + HANGS)
    options = ("-p", "no:cacheprovider", "-p", "no:randomly", "-q", "--rootdir", str(tmp_path))
    process = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m", "pytest", *options],
        cwd=tmp_path, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    run = tmp_path / "artifacts" / "latest"
    wait_for(lambda: has_come(tmp_path, "a hang") and list(run.glob("*test_moment*/rank*/stall.json")), process)
    if to == "torchrun":
        process.send_signal(TERM)
    else:
        os.killpg(process.pid, TERM)
    output = process.communicate(timeout=60)[0]
    assert process.returncode != 0
    summary = (run / "SUMMARY.md").read_text()
    assert "test_moment ends in INTERRUPTED" in summary, output
    assert "interrupted by SIGTERM" in summary
    assert (run / "report.html").is_file()
    assert "gil_held" not in summary  # a process that ends at once would leave its rank silent
    no_process_is_left(tmp_path)


SLEEPS = """
def test_waits(group):
    if group.rank == 1:
        time.sleep(1000)
    dist.barrier()
"""
MOVES = """
def test_waits(group):
    while True:
        dist.all_reduce(torch.ones(1))
"""


def tree(pid: int) -> list[int]:
    """Return the ids of a process and all below it: host, zygote, ranks."""
    return [pid, *(below for child in list_children(pid) for below in tree(child))]


def kill(session: subprocess.Popen[str], which: slice = slice(None)) -> None:
    """SIGKILL host, zygote and ranks, or some of them, and wait for the host's end."""
    for pid in tree(session.pid)[which]:
        os.kill(pid, signal.SIGKILL)
    session.wait(60)


@pytest.fixture
def session(warm: WarmPython, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[str]]:
    (tmp_path / "test_example.py").write_text(HEADER + getattr(request, "param", SLEEPS))
    command = ("-m", "pytest", "-p", "no:cacheprovider", "--rootdir", str(tmp_path))
    process = warm.popen(*command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    yield process
    if process.poll() is None:
        process.kill()
    process.wait()


@pytest.fixture
def diagnosed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[[], Verdict]:
    """Return a function that diagnoses what a session has left."""

    def diagnose() -> Verdict:
        assert main(["diagnose", str(tmp_path / "artifacts" / "latest"), "--json"]) == 1
        printed = capsys.readouterr()
        assert printed.err == ""
        return Verdict.from_json(json.loads(printed.out))

    return diagnose


KILLED = {"host": slice(1), "zygote": slice(1, 2), "all": slice(None), "zygote and ranks": slice(1, None)}


@pytest.mark.parametrize(
    "killed", [pytest.param(k, marks=pytest.mark.slow if k in ("all", "zygote and ranks") else ()) for k in KILLED]
)
def test_who_is_killed(
    tmp_path: Path, session: subprocess.Popen[str], diagnosed: Callable[[], Verdict], killed: str
) -> None:
    run = tmp_path / "artifacts" / "latest"
    wait_for(lambda: list(run.glob("*test_waits*/suspicions.jsonl")), session)
    assert len(tree(session.pid)) == 4
    kill(session, KILLED[killed])
    verdict = diagnosed()
    assert (verdict.outcome, verdict.cause, verdict.ranks) == ("HANG", "sleeping", (1,))
    assert verdict.where.startswith("test_example.py:")
    assert ("the ranks were lost" in verdict.explanation) == killed.startswith("zygote")


@pytest.mark.parametrize("moment", ["job.json", "rank1/board.bin", "rank1/stall.json", "stall"])
def test_all_are_killed_at(
    tmp_path: Path, session: subprocess.Popen[str], diagnosed: Callable[[], Verdict], moment: str
) -> None:
    """At earlier moments less is known: then the cause is unknown, and no other one."""
    run = tmp_path / "artifacts" / "latest"

    def seen() -> bool:
        folder = next(iter(run.glob("*test_waits*")), run)
        if moment == "stall":
            return any(line["event"] == "stall" for line in read_lines(folder / "host.jsonl"))
        if moment.endswith("board.bin"):  # the file is there, empty, before its rank is
            return BoardReader(folder / moment).read() is not None
        return (folder / moment).exists()

    wait_for(seen, session)
    kill(session)
    verdict = diagnosed()
    assert verdict.cause in {"sleeping"} | ({"unknown"} if moment != "stall" else set()), verdict
    assert verdict.outcome != "PASS"


@pytest.mark.parametrize("session", [MOVES], indirect=True)
def test_all_are_killed_while_they_move(
    tmp_path: Path, session: subprocess.Popen[str], diagnosed: Callable[[], Verdict]
) -> None:
    """A rank that is in the middle of a collective at that moment is not blocked in it."""
    run = tmp_path / "artifacts" / "latest"

    def both_have_reduced() -> bool:
        boards = [BoardReader(path).read() for path in run.glob("*test_waits*/rank*/board.bin")]
        return len(boards) == 2 and all(b is not None and b.numbers["collectives_entered"] > 100 for b in boards)

    wait_for(both_have_reduced, session)
    kill(session)
    verdict = diagnosed()
    assert (verdict.outcome, verdict.cause) == ("FAIL", "unknown")
    assert "was killed while they made progress; rank 0 at test_example.py:" in verdict.explanation


@pytest.mark.slow
def test_a_link_that_goes_down_is_the_transport(tmp_path: Path) -> None:
    """A rank takes down the loopback of a network namespace of its own: packets are lost without an error."""
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-n", "true"], check=False).returncode:
        pytest.skip("no network namespace can be made here")
    if shutil.which("ip") is None:
        pytest.skip("no `ip` command: iproute2 is not installed")
    (tmp_path / "test_example.py").write_text(
        HEADER
        + """
import subprocess

@pytest.mark.timeout(60)
def test_reduces(group):
    dist.all_reduce(torch.ones(1))
    if group.rank == 0:
        subprocess.run(["ip", "link", "set", "lo", "down"], check=True)
    dist.all_reduce(torch.ones(1 << 20))
"""
    )
    pytest_command = f"exec {sys.executable} -m pytest -p no:cacheprovider --rootdir . -o ranks_hang_after=3"
    done = subprocess.run(
        ["unshare", "-n", "sh", "-c", f"ip link set lo up && {pytest_command}"],
        cwd=tmp_path, text=True, capture_output=True, timeout=120, check=False,
    )  # fmt: skip
    print(done.stdout, done.stderr)
    verdict = read_verdicts(tmp_path)["test_reduces"]
    assert (verdict.outcome, verdict.cause, verdict.ranks) == ("HANG", "transport_stuck", (0, 1))
    assert "test_example.py:13" in verdict.where
    assert "bytes unsent" in verdict.explanation


SENDERS = """
def test_by_itself(group):
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()

def test_by_another_rank(group):
    pids = [None, None]
    dist.all_gather_object(pids, os.getpid())
    if group.rank == 0:
        os.kill(pids[1], 0)
        os.kill(pids[1], signal.SIGTERM)
    dist.barrier()

def test_by_a_process(group):
    if group.rank == 1:
        subprocess.run(["kill", "-KILL", str(os.getpid())])
    dist.barrier()
"""
FILLS_MEMORY = """
from pytest_nsa import world_size

def test_fills_memory(group):
    if group.rank == 1:
        [b"x" * (64 << 20) for _ in range(64)]
"""


def test_the_sender_of_a_signal(pytester: pytest.Pytester) -> None:
    result = run_example(pytester, "import signal, subprocess\n" + SENDERS)
    assert {name: (v.cause, v.ranks) for name, v in result.verdicts.items()} == dict.fromkeys(
        ("test_by_itself", "test_by_another_rank", "test_by_a_process"), ("rank_died", (1,))
    )
    assert {name: v.reason.partition("SIG")[2] for name, v in result.verdicts.items()} == {
        "test_by_itself": "KILL, sent by itself",
        "test_by_another_rank": "TERM, sent by rank 0",
        "test_by_a_process": "KILL",
    }


@pytest.fixture
def little_memory() -> Iterator[Path]:
    """Yield the folder of a control group with 1,500 MiB, below this process's."""
    groups = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    found = next((path for _, controllers, path in groups if controllers == "memory"), None)
    folder = Path(f"/sys/fs/cgroup/memory{found}/nsa_little_memory_{os.getpid()}")
    try:
        folder.mkdir()
        (folder / "memory.limit_in_bytes").write_text(str(1500 << 20))
    except OSError as error:
        pytest.skip(f"needs control groups of version 1 that it may make: {error}")
    yield folder
    folder.rmdir()


def test_the_kernel_ends_a_rank_for_memory(pytester: pytest.Pytester, little_memory: Path) -> None:
    pytester.makepyfile(FILLS_MEMORY)
    command = f"echo $$ > {little_memory}/cgroup.procs; exec {sys.executable} -m pytest -p no:cacheprovider -o ranks_rerun=off"
    done = subprocess.run(["sh", "-c", command], cwd=pytester.path, timeout=120, check=False)
    assert done.returncode == pytest.ExitCode.TESTS_FAILED
    (verdict,) = read_verdicts(pytester.path).values()
    assert (verdict.outcome, verdict.cause, verdict.ranks) == ("FAIL", "oom", (1,))
