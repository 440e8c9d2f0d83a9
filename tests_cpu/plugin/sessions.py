"""Sessions of pytest that a test starts, waits for and sends signals to, and that must leave no process."""

import contextlib
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pytest_nsa.diagnosis.verdict import Verdict
from pytest_nsa.testing import read_result
from tests_cpu.sockets import free_port
from tests_cpu.warm import WarmPython

PYTEST = ("-m", "pytest", "-p", "no:cacheprovider", "-p", "no:randomly")
SLURM = ("SLURM_PROCID", "SLURM_NTASKS")  # a rank's number, and how many there are


def start_session(warm: WarmPython, folder: Path, source: str, *options: str) -> subprocess.Popen[str]:
    """Run pytest over ``source`` in ``folder``, in a process group of its own. Signals end it, even if ignored here."""
    (folder / "test_example.py").write_text(source)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return warm.popen(*PYTEST, "--rootdir", str(folder), *options, cwd=folder, **pipes, start_new_session=True)


def run_under_torchrun(warm: WarmPython, folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run pytest in ``folder`` on two ranks of torchrun's; they write junit.xml."""
    launcher = ("-m", "torch.distributed.run", "--nproc_per_node=2", "--master_port", str(free_port()))
    options = ("--junitxml=junit.xml", *options)
    return warm.call(*launcher, *PYTEST, *options, cwd=folder, stderr=subprocess.STDOUT, timeout=150, nursery=True)


def start_slurm_task(
    warm: WarmPython, folder: Path, rank: int, port: int, *options: str, names: tuple[str, str] = SLURM
) -> subprocess.Popen[str]:
    """Start pytest in ``folder`` as one of two tasks of a SLURM job that exports MASTER_ADDR and MASTER_PORT."""
    numbers = {names[0]: str(rank), names[1]: "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return warm.popen(*PYTEST, *options, cwd=folder, env={**os.environ, **numbers}, **pipes)


def run_under_slurm(
    warm: WarmPython, folder: Path, *options: str, rank_1: tuple[str, ...] = (), names: tuple[str, str] = SLURM
) -> list[tuple[int, str]]:
    """Run pytest as two tasks of SLURM's, with more options for rank 1's; return the exit code and output of each."""
    port = free_port()
    follower = start_slurm_task(warm, folder, 1, port, *options, *rank_1, names=names)
    leader = start_slurm_task(warm, folder, 0, port, *options, names=names)
    texts = [leader.communicate(timeout=150)[0], follower.communicate(timeout=30)[0]]
    return [(leader.returncode, texts[0]), (follower.returncode, texts[1])]


def wait_for(
    condition: Callable[[], object], process: subprocess.Popen[str] | None = None, limit_s: float = 90
) -> None:
    """Wait for ``condition``, and while ``process`` runs."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert process is None or process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, f"it has not come within {limit_s:.0f} s"
        time.sleep(0.05)


def list_processes(folder: Path) -> dict[int, str]:
    """Return the command lines of the processes, except this one, with a working directory in ``folder``, by their ids.

    A process that ends has no command line any more, and its directory for a moment longer.
    """
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        if entry.name == str(os.getpid()):
            continue  # pytester has changed this process's own directory
        try:
            if Path(os.readlink(entry / "cwd")).is_relative_to(folder) and (line := (entry / "cmdline").read_text()):
                found[int(entry.name)] = line.replace("\0", " ")
        except OSError:
            continue
    return found


def no_process_is_left(folder: Path) -> None:
    """Assert that no process is left in ``folder``, within the time that the kernel and the last process take."""
    with contextlib.suppress(AssertionError):
        wait_for(lambda: not list_processes(folder), limit_s=20)
    assert list_processes(folder) == {}


def read_verdicts(folder: Path) -> dict[str, Verdict]:
    """Return the verdicts of the latest run in ``folder``, by test."""
    return read_result(folder, pytest.RunResult(1, [], [], 0)).verdicts


def find_line(text: str, marked: str) -> int:
    """Return the number of the first line of ``text`` with ``marked`` in it."""
    return next(number for number, line in enumerate(text.splitlines(), 1) if marked in line)
