"""What a session with ranks changes for the tests beside them, and for pytest's own options: nothing."""

import sys

import pytest

from pytest_nsa.testing import run_example, run_folder

PLAIN = """
import asyncio
import concurrent.futures
import contextlib
import multiprocessing

fork = multiprocessing.get_context("fork")
pool = concurrent.futures.ProcessPoolExecutor(1)


@world_size(2)
def test_a_ranked(): pass


def waits(has_begun):
    has_begun.set()
    threading.Event().wait()


def test_a_fork_ends_by_the_signal():
    has_begun = fork.Event()
    process = fork.Process(target=waits, args=(has_begun,))
    process.start()
    has_begun.wait()
    process.terminate()
    process.join()
    assert process.exitcode == -signal.SIGTERM


def test_asyncio_takes_the_interrupt():
    async def interrupted():
        asyncio.get_running_loop().call_soon(os.kill, os.getpid(), signal.SIGINT)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return "ended well"

    assert asyncio.run(interrupted()) == "ended well"


def test_a_handler_calls_the_one_before_it():
    before, seen = signal.getsignal(signal.SIGTERM), []

    def handler(number, frame):
        seen.append(number)
        if callable(before):
            before(number, frame)

    signal.signal(signal.SIGTERM, handler)
    try:
        os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert seen == [signal.SIGTERM]


def test_a_pool_of_the_module():
    assert pool.submit(abs, -1).result() == 1


def test_all_children_are_ended():
    for pid in map(int, open(f"/proc/self/task/{os.getpid()}/children").read().split()):
        os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):  # the pool has waited for it
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


@world_size(2)
def test_z_ranked(): pass
"""


@pytest.mark.parametrize("descendants", ["off", "report"])
def test_plain_tests_find_signals_and_children_as_they_are(pytester: pytest.Pytester, descendants: str) -> None:
    options = ("-o", f"ranks_descendants={descendants}", "-o", "ranks_left_fails=true")
    result = run_example(pytester, PLAIN, *options)
    assert (result.outcomes["passed"], result.returncode) == (7, 0)
    assert "another one serves since" in result.stdout
    assert "would keep this session" not in result.stderr


MOCKED = """
import subprocess
from torch.distributed import distributed_c10d


def test_mocked(monkeypatch):
    calls = []
    monkeypatch.setattr(dist, "init_process_group", lambda *a, **k: calls.append(a))
    subprocess.run(["true"], check=True)
    dist.init_process_group("gloo", rank=0, world_size=1)
    assert len(calls) == 1


def test_real(tmp_path):
    distributed_c10d.init_process_group("gloo", rank=0, world_size=1, init_method=f"file://{tmp_path / 'store'}")
    assert dist.is_initialized()
    dist.destroy_process_group()
"""


def test_a_mock_of_a_group_is_gone_with_its_test(pytester: pytest.Pytester) -> None:
    result = run_example(pytester, MOCKED, "-o", "ranks_descendants=report")
    assert result.outcomes == {"passed": 2}


def test_a_mark_may_come_late_a_path_have_an_at_sign_and_an_exit_be_expected(pytester: pytest.Pytester) -> None:
    pytester.makeconftest("""
        import pytest

        @pytest.hookimpl(wrapper=True)
        def pytest_collection_modifyitems(items):
            found = yield
            for item in items:
                item.add_marker(pytest.mark.world_size(2))
            return found
    """)
    pytester.mkdir("pkg@2").joinpath("test_at.py").write_text(
        "import sys, pytest\nimport torch.distributed as dist\ndef test_fails(): assert 1 == 2\n"
        "def test_passes(): assert dist.get_world_size() == 2\n"
        "@pytest.mark.xfail(raises=SystemExit)\ndef test_exits(): sys.exit(3)\n"
    )
    result = run_folder(pytester.path, "-o", "ranks_marks=true")
    assert result.outcomes == {"failed": 1, "passed": 1, "xfailed": 1}


@pytest.mark.parametrize("launch", ["clean", pytest.param("cold", marks=pytest.mark.slow)])
def test_ranks_have_the_interpreter_s_options(pytester: pytest.Pytester, launch: str) -> None:
    pytester.makepyfile("""
        import sys, pytest

        @pytest.mark.world_size(2)
        def test_options():
            if __debug__ or not sys.flags.dev_mode:
                pytest.fail(str(sys.flags))
    """)
    done = pytester.run(sys.executable, "-O", "-X", "dev", "-m", "pytest", f"--ranks-launch={launch}", timeout=120)
    assert done.ret == 0


def test_a_module_that_the_ranks_cannot_import_is_named(pytester: pytest.Pytester) -> None:
    pytester.mkdir("lib").joinpath("only_of_the_host.py").write_text("")
    pytester.makepyfile(
        test_it="import only_of_the_host, pytest, pytest_nsa\n@pytest.mark.world_size(2)\ndef test_it(): pass"
    )
    pytester.makepyfile(run="import sys, pytest\nsys.path.append('lib')\nsys.exit(pytest.main(sys.argv[1:]))")
    done = pytester.run(sys.executable, "run.py", "--ranks-launch=clean", timeout=120)
    assert "a new `python -m pytest`: ModuleNotFoundError: No module named 'only_of_the_host'" in done.stdout.str()
    (log,) = pytester.path.glob("artifacts/run_*/zygote.log")
    assert "plugin is not registered" not in log.read_text()
