"""Ranks that use up their file descriptors, or replace themselves by another program: named as what they do, or not at all."""

from __future__ import annotations

import pytest

from pytest_nsa.testing import run_example

SOURCE = """
import resource

KEPT = []


def open_all(kept):
    resource.setrlimit(resource.RLIMIT_NOFILE, (128, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    while True:
        kept.append(open(os.devnull))


@world_size(2)
def test_keeps_them(group):
    with pytest.raises(OSError):
        open_all(KEPT)


@world_size(2)
def test_raises(group):
    if group.rank == 1:
        open_all([])
    dist.barrier()


@world_size(2)
@pytest.mark.timeout(5)
def test_waits(group):
    kept = []
    with pytest.raises(OSError):
        open_all(kept)
    if group.rank == 1:
        threading.Event().wait()
    dist.barrier()


@world_size(2)
@pytest.mark.timeout(5)
def test_another_program(group):
    if group.rank == 1:
        os.execv("/bin/sleep", ["sleep", "60"])
    dist.barrier()
"""


def test_what_a_rank_has_used_up_hides_nothing(pytester: pytest.Pytester) -> None:
    result = run_example(pytester, SOURCE)
    assert result.outcomes == {"passed": 1, "failed": 3}
    assert {name: (v.cause, v.ranks) for name, v in result.verdicts.items() if v.cause} == {
        "test_raises": ("rank_exception", (1,)),
        "test_waits": ("lock_deadlock", (1,)),
        "test_another_program": ("rank_exited", (1,)),
    }
    assert result.verdicts["test_raises"].reason.startswith("OSError: [Errno 24] Too many open files")
    assert "gil_held" not in result.stdout
