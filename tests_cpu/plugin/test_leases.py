"""GPUs and cores are lent to one test at a time: between xdist workers, between runs, and after a holder's death."""

import json
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_nsa.session import needs as requested
from pytest_nsa.session.needs import Needs
from pytest_nsa.settings import resolve
from pytest_nsa.system import gpu
from pytest_nsa.system.leases import Broker
from pytest_nsa.testing import ExampleResult, run_example

NOTE = """
import json

def note(artifacts, group, began):
    seen = {"gpus": os.environ["CUDA_VISIBLE_DEVICES"].split(","), "cores": sorted(os.sched_getaffinity(0)),
            "began": began, "ended": time.monotonic()}
    (artifacts / f"note{group.rank}.json").write_text(json.dumps(seen))
"""


@pytest.fixture
def lease_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("NSA_FAKE_GPUS", "4")
    return tmp_path / "pytest-nsa"


def notes(result: ExampleResult) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in result.run.glob("*/note0.json")]


def test_no_gpu_is_lent_twice(pytester: pytest.Pytester, lease_folder: Path) -> None:
    source = (
        NOTE
        + """
@pytest.mark.parametrize("n", [pytest.param(n, marks=[world_size(n), gpu]) for n in (1, 2, 4, 1, 2, 1, 4, 2)])
def test_it(group, n, artifacts):
    began = time.monotonic()
    time.sleep(0.2)  # the time in which another test could do wrong
    dist.barrier()
    assert len(os.environ["CUDA_VISIBLE_DEVICES"].split(",")) == n
    note(artifacts, group, began)
"""
    )
    result = run_example(pytester, source, "-n3", "-p", "xdist")
    assert result.outcomes == {"passed": 8}
    used: dict[str, list[tuple[float, float]]] = {}
    for entry in notes(result):
        for name in entry["gpus"]:
            used.setdefault(name, []).append((entry["began"], entry["ended"]))
    assert sorted(used) == ["0", "1", "2", "3"]
    for times in used.values():
        assert all(one[1] <= other[0] for one, other in pairwise(sorted(times)))


@pytest.mark.slow
def test_tests_whose_memory_does_not_fit_do_not_meet(
    pytester: pytest.Pytester, lease_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A test that names no memory has the GPU of 16 GiB alone."""
    monkeypatch.setenv("NSA_FAKE_GPUS", "1")
    source = f"""
@pytest.mark.parametrize("n", [pytest.param(n, marks=m) for n, m in enumerate((gpu(memory="9GiB"), gpu, gpu(memory="9000MiB")))])
@world_size(1)
def test_it(group, n):
    from pathlib import Path
    inside = Path({str(tmp_path)!r}) / "inside"
    inside.mkdir()  # fails while another is here
    time.sleep(0.2)  # the time in which another could come
    inside.rmdir()
"""
    assert run_example(pytester, source, "-n3", "-p", "xdist").outcomes == {"passed": 3}


def test_parts_fit_or_are_refused(tmp_path: Path) -> None:
    broker = Broker(folder=tmp_path, kind="gpu", names="0")
    lease = broker.lease(1, share=False, holder="a test", report=print, parts=3, of=4)
    assert broker._take(1, False, "next", 2, 4) is None
    assert broker._take(1, False, "next") is None
    beside = broker._take(1, False, "next", 1, 4)
    beside.release()
    lease.release()
    assert broker._take(1, False, "next") is not None


@pytest.mark.parametrize(
    ("needs", "reason"),
    [
        ("count=5", "needs 5 GPUs, and this machine shows 4"),
        ("memory='17GiB'", "needs 17GiB on a GPU, and the smallest here has 16 GiB"),
    ],
)
def test_more_than_the_machine_has_is_a_reason_to_skip(
    pytester: pytest.Pytester, lease_folder: Path, needs: str, reason: str
) -> None:
    result = run_example(pytester, f"@gpu({needs})\n@world_size(1)\ndef test_it(group): pass", "-rs")
    assert result.outcomes == {"skipped": 1}
    assert reason in result.stdout


# A host that holds three of four GPUs, or a rank that lives on after its host.
HOLDER = """
import sys, time
from pathlib import Path
from pytest_nsa.system.leases import Broker, hold_while_alive
folder = Path(sys.argv[1])
folder.mkdir(exist_ok=True)
lease = Broker(folder=folder, kind="gpu", names="0123").lease(3, share=False, holder="a_long_test", report=print)
if sys.argv[2] == "rank":
    held = hold_while_alive(lease.in_use)
    lease.release()  # as the kernel does when the host dies
print("held", flush=True)
time.sleep(1000)
"""


def start_holder(folder: Path, kind: str) -> subprocess.Popen[str]:
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(folder), kind], stdout=subprocess.PIPE, text=True)
    assert holder.stdout.readline() == "held\n"
    return holder


def test_a_test_that_waits_names_the_holder_whose_death_frees_it(pytester: pytest.Pytester, lease_folder: Path) -> None:
    holder = start_holder(lease_folder, "host")
    (pytester.path / "test_example.py").write_text(
        "from pytest_nsa import *\n@gpu\n@world_size(2)\ndef test_it(group): pass\n"
    )
    run = subprocess.Popen(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, cwd=pytester.path,
    )  # fmt: skip
    line = next(line for line in run.stdout if "waits for" in line)
    assert line.startswith("nsa: test_example.py::test_it waits for 2 of 4 gpus, ")
    assert line.endswith(f"held by a_long_test (process {holder.pid})\n")
    holder.kill()
    holder.communicate()
    assert "1 passed" in run.communicate(timeout=60)[0]


def test_a_killed_host_whose_rank_lives_on_keeps_its_gpus(tmp_path: Path) -> None:
    rank = start_holder(tmp_path, "rank")
    broker = Broker(folder=tmp_path, kind="gpu", names="0123")
    assert broker._take(2, share=False, holder="next") is None
    rank.kill()
    rank.communicate()
    assert broker.lease(4, share=False, holder="next", report=print).names == tuple("0123")


def test_a_class_keeps_its_gpus_while_it_keeps_its_ranks(pytester: pytest.Pytester, lease_folder: Path) -> None:
    """A skipped test gives back the GPUs of the ranks that stayed for it; ranks have the cores that were lent."""
    source = (
        NOTE
        + """
@reuse
class TestShared:
    @pytest.mark.parametrize("n", [0, 1, pytest.param(2, marks=pytest.mark.skip)])
    @gpu(count=1)
    def test_it(self, group, n, artifacts):
        (artifacts / "pid").write_text(str(os.getpid()))
        note(artifacts, group, 0)

@gpu(count=4)
@cores(1)
def test_all(group):
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1,2,3"
    assert len(os.sched_getaffinity(0)) == 1
"""
    )
    result = run_example(pytester, source)
    assert result.outcomes == {"passed": 3, "skipped": 1}
    assert [entry["gpus"] for entry in notes(result)] == [["0"]] * 2


class Driver:
    """In NVML's place: GPU 0 has what ``used`` names next in use, a UUID always 5 GiB; there is no other GPU."""

    class NVMLError(Exception):
        pass

    def __init__(self, *used: int) -> None:
        self.used = list(used)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        if index:
            raise self.NVMLError
        return str(index)

    def nvmlDeviceGetHandleByUUID(self, name: str) -> str:
        return name

    def nvmlDeviceGetMemoryInfo(self, device: str) -> SimpleNamespace:
        gib = 5 if device.startswith("GPU-") else self.used.pop(0) if len(self.used) > 1 else self.used[0]
        return SimpleNamespace(used=gib << 30)


def test_memory_of_a_gpu_is_waited_for_and_what_stays_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(1, 9, 9, 1)
    monkeypatch.setattr(gpu, "nvml", lambda: driver)
    before = gpu.memory_used(["0", "1", "GPU-7"])
    assert before == {"0": 1 << 30, "GPU-7": 5 << 30}
    assert gpu.wait_until_freed(before, 60) == {}
    assert driver.used == [1]  # both looks before found it in use
    driver.used = [4]
    assert gpu.wait_until_freed(before, 0) == {"0": 3 << 30}


def test_without_nvml_no_memory_is_waited_for() -> None:
    if gpu.nvml() is not None:
        pytest.skip("NVML is here")
    assert gpu.memory_used(["0"]) == gpu.wait_until_freed({"0": 1}, 60) == {}


def test_a_gpu_is_given_back_once_its_memory_is_free(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    driver = Driver(1, 8, 1, 1, 6)
    monkeypatch.setattr(gpu, "nvml", lambda: driver)
    monkeypatch.setattr(requested, "default_folder", lambda: tmp_path)
    settings = replace(resolve(request.config), fake_gpus=0, gpu_ids=("0",))
    ours, reported = requested.Resources(request.config, settings), []
    monkeypatch.setattr(ours, "_report", reported.append)
    needs = Needs(world_size=1, backend="gloo", device="cpu", gpus=1)
    names = ours.take(needs, "a test")["gpu"].names
    ours.release()
    assert (names, driver.used) == (("0",), [1, 6])  # the second look found it free
    monkeypatch.setattr(requested, "FREED_S", 0.0)
    ours.take(needs, "another test")
    ours.release()
    assert reported == ["GPU 0 has 5120 MiB more in use than before its test, 0 s after the test"]
