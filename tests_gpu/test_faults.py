"""Faults planted on a GPU: the verdicts on a kernel that does not end, a wild address, memory that is not there."""

import subprocess
import sys

import pytest

import pytest_nsa
from pytest_nsa.system import gpu
from pytest_nsa.testing import ExampleResult, run_example

# torch is not imported here: `pytester` removes modules that a test has imported, and torch cannot be imported twice.
pytestmark = [pytest_nsa.gpu, pytest.mark.timeout(120)]
GPU = """
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(25)]
SECOND = 1_500_000_000  # cycles, at least

@world_size(2)
"""


def run(pytester: pytest.Pytester, body: str) -> ExampleResult:
    return run_example(pytester, GPU + body, "-p", "pytest_nsa.plugin")


@pytest.mark.parametrize("waits", ["torch.cuda.synchronize()", "x.sum().item()"])
def test_a_kernel_that_does_not_end(pytester: pytest.Pytester, waits: str) -> None:
    result = run(
        pytester,
        f"""
def test_spins(group):
    x = torch.ones(8, device=group.device)
    for step in range(3):
        if group.rank == 1 and step == 1:
            torch.cuda._sleep(60 * SECOND)
            {waits}  # HERE
        dist.all_reduce(x)
""",
    )
    verdict = result.verdicts["test_spins"]
    assert (verdict.cause, verdict.ranks) == ("device_busy", (1,))
    assert verdict.outcome in ("HANG", "SLOW")
    line = next(
        n for n, text in enumerate((pytester.path / "test_example.py").read_text().splitlines(), 1) if "HERE" in text
    )
    assert f"test_example.py:{line}" in verdict.where
    assert "100% busy" in verdict.reason
    assert any(label.ranks == (0,) and "waits here" in label.text for label in verdict.labels)


def test_a_kernel_of_some_seconds_is_not_talked_about(pytester: pytest.Pytester) -> None:
    result = run(
        pytester,
        """
def test_computes(group):
    x = torch.ones(8, device=group.device)
    if group.rank == 1:
        torch.cuda._sleep(4 * SECOND)
        torch.cuda.synchronize()
    dist.all_reduce(x)
    assert x.eq(2).all()
""",
    )
    assert result.outcomes == {"passed": 1}
    assert "has not moved" not in result.stdout
    assert "device_busy" not in result.stdout


def test_a_wild_address(pytester: pytest.Pytester) -> None:
    """The error surfaces at a later line: the verdict reports that, and what the driver logged."""
    pytester.makepyfile(
        wild="""
        import triton
        import triton.language as tl

        @triton.jit
        def store(X, far):
            tl.store(X + far, 1.0)
        """
    )
    result = run(
        pytester,
        """
def test_writes(group):
    import wild
    x = torch.ones(8, device=group.device)
    dist.all_reduce(x)
    if group.rank == 1:
        wild.store[(1,)](x, 1 << 40)
        x.sum().item()  # HERE
    dist.all_reduce(x)
""",
    )
    verdict = result.verdicts["test_writes"]
    assert (verdict.cause, verdict.ranks) == ("rank_exception", (1,))
    assert "illegal memory access" in verdict.reason
    assert "CUDA_LAUNCH_BLOCKING=1" in verdict.reason
    pytest.importorskip("pynvml")
    assert [fact.text for fact in verdict.evidence if fact.kind == "xid"][:1] == [
        "GPU 0: Xid 31, a kernel's access to an address that is not mapped"
    ]


def test_memory_that_is_not_there(pytester: pytest.Pytester) -> None:
    result = run(
        pytester,
        """
def test_takes(group):
    if group.rank == 1:
        torch.empty(1 << 44, device=group.device)  # HERE
    dist.all_reduce(torch.ones(8, device=group.device))
""",
    )
    verdict = result.verdicts["test_takes"]
    assert (verdict.cause, verdict.ranks) == ("oom", (1,))
    assert verdict.machines[0].endswith("GPU 0")


def test_a_skipped_collective_of_cuda_tensors(pytester: pytest.Pytester) -> None:
    """The ranks use gloo, as they share the GPU."""
    result = run(
        pytester,
        """
def test_skips(group):
    x = torch.ones(8, device=group.device)
    for step in range(4):
        dist.all_reduce(x)
        if not (step == 1 and group.rank == 1):
            dist.broadcast(x, src=0)
        x.sum().item()
""",
    )
    verdict = result.verdicts["test_skips"]
    assert (verdict.cause, verdict.ranks) == ("skipped_collective", (1,))


def test_memory_of_a_killed_process_is_free_before_its_gpu_is_lent_again() -> None:
    pytest.importorskip("pynvml")
    before = gpu.memory_used(["0"])
    code = "import torch; x = torch.ones(2 << 30, device='cuda'); torch.cuda.synchronize(); print('there', flush=True); input()"
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "there\n"
    assert gpu.memory_used(["0"])["0"] > before["0"] + gpu.SLACK
    child.kill()
    child.wait()
    assert gpu.wait_until_freed(before, gpu.FREED_S) == {}
