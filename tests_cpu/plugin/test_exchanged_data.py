"""What ranks did for each other before they failed: data that they exchanged, a time limit, a file that another rank wrote late."""

from __future__ import annotations

import pytest

from pytest_nsa.diagnosis.causes import CAUSES
from pytest_nsa.testing import run_example

ALIKE = """
@world_size(2)
def test_sums(group):
    total = torch.tensor(float(group.rank))
    dist.all_reduce(total)
    assert total == 2

@world_size(2)
def test_neighbours(group):
    value = torch.empty(3)
    work = dist.isend(torch.ones(3), 1 - group.rank)
    dist.recv(value, 1 - group.rank)
    work.wait()
    torch.ones(2) + value

@world_size(2)
def test_alone(group):
    assert len("abc") == 4
"""


def test_an_advice_follows_from_what_ranks_exchanged(pytester: pytest.Pytester) -> None:
    """As in a test of one process: only where no rank had anything of another."""
    verdicts = run_example(pytester, ALIKE).verdicts
    assert {v.cause for v in verdicts.values()} == {"assertion"}
    as_of_one = {name for name, v in verdicts.items() if v.advice == CAUSES["assertion"].advice}
    assert as_of_one == {"test_alone"}


LATE = """
import datetime

def compute(seconds):
    x, end = torch.ones(64, 64), time.monotonic() + seconds
    while time.monotonic() < end:
        x = x @ x / 64

@world_size(3)
def test_loads(group):
    dist.barrier()
    compute(9 if group.rank == 2 else 0)  # longer than the host waits for the others of a rank that failed
    try:
        dist.monitored_barrier(timeout=datetime.timedelta(seconds=1), wait_all_ranks=True)
    except RuntimeError:
        raise ValueError("other ranks did not load") from None

@world_size(2)
def test_prepares(group):
    side = dist.new_group(timeout=datetime.timedelta(seconds=1))
    compute(9 if group.rank == 0 else 0)
    try:
        dist.all_reduce(torch.ones(2), group=side)
    except RuntimeError as error:
        raise OSError("no data") from error
"""


@pytest.mark.slow
def test_a_rank_at_work_that_missed_a_time_limit_is_late(pytester: pytest.Pytester) -> None:
    """That its loop has no end was not observed."""
    verdicts = run_example(pytester, LATE).verdicts
    found = {name: (v.outcome, v.cause, v.ranks) for name, v in verdicts.items()}
    assert found == {"test_loads": ("SLOW", "straggler", (2,)), "test_prepares": ("SLOW", "straggler", (0,))}


WRITTEN = """
def wait_for(path):
    while not path.exists():
        time.sleep(0.01)

@world_size(2)
def test_reads_at_once(group, tmp_path):
    if group.rank == 0:
        wait_for(tmp_path / "has read")
        (tmp_path / "shard").write_text("1 2 3")
    else:
        try:
            (tmp_path / "shard").read_text()
        finally:
            (tmp_path / "has read").touch()
    dist.barrier()

@world_size(2)
def test_reads_what_a_thread_writes(group, tmp_path):
    def write():
        wait_for(tmp_path / "has read")
        (tmp_path / "index").write_text("1 2 3")

    if group.rank == 0:
        threading.Thread(target=write).start()
    dist.barrier()
    if group.rank == 1:
        try:
            torch.load(tmp_path / "index")
        except OSError as error:
            (tmp_path / "has read").touch()
            raise ValueError("no index") from error
    dist.barrier()

@world_size(2)
def test_reads_what_nobody_writes(group, tmp_path):
    if group.rank == 1:
        (tmp_path / "never").read_text()
    dist.barrier()
"""


def test_a_file_that_was_written_after_it_was_not_found(pytester: pytest.Pytester) -> None:
    verdicts = run_example(pytester, WRITTEN).verdicts
    assert {(v.cause, v.ranks) for v in verdicts.values()} == {("rank_exception", (1,))}
    late = {name for name, v in verdicts.items() if v.advice != CAUSES["rank_exception"].advice}
    assert late == {"test_reads_at_once", "test_reads_what_a_thread_writes"}


KEPT = """
def read(group):
    error = None
    for attempt in range(3):
        try:
            return int("1" if group.rank or attempt else "one")
        except ValueError as caught:
            error = caught
            if group.rank == 0:
                break
    while error is not None:
        time.sleep(0.05)

@world_size(2)
@pytest.mark.timeout(60)
def test_waits_after_an_error(group):
    read(group)
    dist.barrier()

@world_size(3)
@pytest.mark.timeout(60)
def test_skips_after_an_error(group):
    failed = None
    for step in range(4):
        try:
            if (group.rank, step) == (1, 2):
                raise OSError("part 2 is truncated")
            dist.all_reduce(torch.ones(2))
        except OSError as error:
            failed = error
        dist.broadcast(torch.ones(3), 0)
"""


def test_an_exception_that_was_handled_and_kept_is_stated(pytester: pytest.Pytester) -> None:
    verdicts = run_example(pytester, KEPT, "-o", "ranks_hang_after=4").verdicts
    found = {name: (v.cause, v.ranks) for name, v in verdicts.items()}
    assert found["test_waits_after_an_error"] == ("sleeping", (0,))
    assert found["test_skips_after_an_error"] == ("skipped_collective", (1,))
    kept = {name: [f.rank for f in v.evidence if f.kind == "handled_exception"] for name, v in verdicts.items()}
    assert kept == {"test_waits_after_an_error": [0], "test_skips_after_an_error": [1]}
    assert "part 2 is truncated" in verdicts["test_skips_after_an_error"].reason


GROUPS = """
@world_size(3)
@pytest.mark.timeout(60)
def test_a_ring_of_odd_length(group):
    there, back = dist.new_group(), dist.new_group()
    following, previous = (group.rank + 1) % 3, (group.rank - 1) % 3
    for turn in range(2):
        if group.rank % 2 == 0:
            dist.send(torch.ones(5), following, group=there)
            dist.recv(torch.ones(5), previous, group=back)
        else:
            dist.recv(torch.ones(5), previous, group=there)
            dist.send(torch.ones(5), following, group=back)

@world_size(2)
@pytest.mark.timeout(60)
def test_an_answer_in_the_group_of_questions(group):
    questions, answers = dist.new_group(), dist.new_group()
    for step in range(4):
        if group.rank == 0:
            dist.send(torch.ones(2), 1, group=questions)
            dist.recv(torch.ones(2), 1, group=answers)
        else:
            dist.recv(torch.ones(2), 0, group=questions)
            dist.send(torch.ones(2), 0, group=questions if step == 2 else answers)
"""


def test_two_halves_of_a_message_that_fit_but_for_their_groups(pytester: pytest.Pytester) -> None:
    verdicts = run_example(pytester, GROUPS).verdicts
    assert {v.cause for v in verdicts.values()} == {"p2p_unmatched"}
    assert all(v.advice != CAUSES["p2p_unmatched"].advice for v in verdicts.values())
    assert set(verdicts["test_a_ring_of_odd_length"].ranks) <= {0, 2}
