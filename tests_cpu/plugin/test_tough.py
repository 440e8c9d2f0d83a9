"""Rough faults: each is reported under its cause, nothing is left behind, and the next test passes."""

import os
import re
import signal
from pathlib import Path

import pytest

from pytest_nsa.system import sockets
from pytest_nsa.testing import HEADER, run_example, run_folder
from pytest_nsa.wire.files import read_lines
from tests_cpu.plugin.programs import differences, read_program
from tests_cpu.plugin.sessions import no_process_is_left, start_session, wait_for
from tests_cpu.warm import WarmPython

GOOD = """


def test_good_{}(group):
    import torch

    t = torch.ones(1)
    dist.all_reduce(t)
    assert t == 2"""


def with_a_good_test_after_each(source: str) -> str:
    """Return ``source`` with a test after each fault that passes when nothing is wrong with the session."""
    head, *tests = re.split(r"(?=\n\n\n(?:@pytest.mark.*\n)*def test_)", source.rstrip())
    return head + "".join(test + GOOD.format(number) for number, test in enumerate(tests))


def test_every_fault_is_reported_every_next_test_passes_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = read_program("tough")
    (tmp_path / "test_example.py").write_text(with_a_good_test_after_each(faults.text))
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    result = run_folder(tmp_path)
    assert differences("tough", result) == []
    passed = [verdict for verdict in result.verdicts.values() if not verdict.failed]
    assert len(passed) == len(faults.expected)
    no_process_is_left(tmp_path)
    assert list(temporary.glob("pytest-nsa-*-*")) == []  # not the private folder, which stays
    assert len(result.stdout) < 2_000_000  # the terminal does not get 100 MB of text


HANGS = """
def test_hangs(group):
    if group.rank == 1:
        time.sleep(1000)
    dist.barrier()

def test_after(group): dist.barrier()
"""


def test_pytest_timeout_s_other_method(pytester: pytest.Pytester) -> None:
    """All other tests have its default, a signal."""
    result = run_example(pytester, HANGS, "--timeout=5", "--timeout-method=thread")
    assert result.outcomes == {"passed": 1, "failed": 1}
    verdict = result.verdicts["test_hangs"]
    assert (verdict.outcome, verdict.ranks) == ("HANG", (1,))


def test_a_host_without_descriptors_reports_it_and_recovers(pytester: pytest.Pytester) -> None:
    source = """
import resource
kept = []

def test_before(group): dist.barrier()

def test_take_all():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 8, hard))
    try:
        while True:
            kept.append(open("/dev/null"))
    except OSError:
        pass

def test_none_left(group): dist.barrier()

def test_give_back():
    for file in kept:
        file.close()

def test_after(group): dist.barrier()
"""
    result = run_example(pytester, source)
    assert result.outcomes == {"passed": 4, "failed": 1}
    assert "Too many open files" in result.stdout


@pytest.mark.parametrize("launch", ["fork", "clean"])
def test_a_path_longer_than_a_unix_socket_s(pytester: pytest.Pytester, launch: str) -> None:
    deep = pytester.path.joinpath(*["a_folder_with_a_rather_long_name"] * 10)
    deep.mkdir(parents=True)
    os.chdir(deep)
    (deep / "test_example.py").write_text(HEADER + HANGS)
    done = pytester.runpytest_subprocess(f"--rootdir={deep}", "--timeout=5", f"--ranks-launch={launch}")
    done.assert_outcomes(passed=1, failed=1)
    assert "sleeping" in done.stdout.str()
    assert "test_example.py:8 in test_hangs" in done.stdout.str()


def test_an_interrupt_before_the_first_rank_is_no_failure(warm: WarmPython, pytester: pytest.Pytester) -> None:
    (pytester.path / "conftest.py").write_text(
        "import os, pathlib, time\n"
        "if 'PYTEST_NSA_ZYGOTE_FD' in os.environ:\n"
        "    pathlib.Path('starting').touch()\n"
        "    time.sleep(1000)\n"
    )
    source = HEADER + "@world_size(2)\ndef test_it(group): pass\n"
    process = start_session(warm, pytester.path, source, "--ranks-launch=clean")
    wait_for((pytester.path / "starting").is_file, process)
    process.send_signal(signal.SIGINT)
    text = process.communicate(timeout=30)[0]
    assert process.returncode == pytest.ExitCode.INTERRUPTED
    verdicts = list(read_lines(pytester.path / "artifacts" / "latest" / "verdicts.jsonl"))
    assert [v["outcome"] for v in verdicts] == ["INTERRUPTED"], text
    no_process_is_left(pytester.path)


def test_a_folder_for_temporary_files_may_have_a_long_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / ("long" * 40)
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    listener = sockets.Listener("zygote")
    (made,) = folder.iterdir()
    assert made.stat().st_mode & 0o777 == 0o700
    with sockets.connect(listener.name) as ours, listener.socket.accept()[0] as theirs:
        theirs.sendall(b"x")
        assert ours.recv(8) == b"x"
    listener.close()
    assert not made.exists()
    with pytest.raises(FileNotFoundError):
        sockets.connect(listener.name)
