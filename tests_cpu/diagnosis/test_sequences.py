"""Sequences of collectives: what must be equal, and what can still complete."""

from dataclasses import replace
from pathlib import Path

import pytest

from nsa.trace.board import Board
from pytest_nsa.diagnosis.engine import diagnose
from pytest_nsa.diagnosis.rules.calls import find_origin
from pytest_nsa.evidence.board import Collective
from pytest_nsa.evidence.collectives import any_can_complete, first_departure, waits_in_different_calls
from pytest_nsa.evidence.load import load
from tests_cpu.diagnosis.test_evidence import make_folder

BASE = Collective(
    index=0, op="allreduce", group="0", sequence=1, dtype="float32", count=4, site="a.py:1 in f", step=1, phase="body",
    peer=-1, size=2, entered=1.0, left=0.0,
)  # fmt: skip


def entered(**changes: object) -> Collective:
    return replace(BASE, **changes)  # type: ignore[arg-type]


def test_a_call_is_described_with_the_library_that_makes_it() -> None:
    call = entered(callers="metrics/sync.py:2 in gather < sync.py:6 in compute << b.py:3 in g < b.py:9 in main")
    assert call.way == ("a.py:1 in f", "b.py:3 in g", "b.py:9 in main")
    assert call.lines == ("metrics/sync.py:2 in gather", "sync.py:6 in compute", *call.way)
    assert call.describe() == "allreduce #1 (float32 x 4) at a.py:1 in f by metrics/sync.py:2 in gather"
    assert entered(callers="metrics/sync.py:2 in gather << ").way == ("a.py:1 in f",)


def test_equal_sequences_do_not_depart() -> None:
    ring = (entered(), entered(sequence=2, op="barrier"))
    assert first_departure({0: ring, 1: ring}) is None
    assert first_departure({0: ring, 1: ring[:1]}) is None


def test_the_first_difference_is_found_whatever_the_group() -> None:
    mine = (entered(), entered(sequence=2), entered(sequence=3, op="barrier"))
    yours = (entered(), entered(sequence=2, dtype="float64"), entered(sequence=3))
    found = first_departure({0: mine, 1: yours})
    assert found is not None
    assert {rank: c.dtype for rank, c in found.items()} == {0: "float32", 1: "float64"}


def test_uneven_operations_may_differ_in_payload() -> None:
    for op in ("gather", "scatter", "alltoall", "all_to_all_single"):
        assert first_departure({0: (entered(op=op, count=8),), 1: (entered(op=op, count=4),)}) is None
    assert first_departure({0: (entered(op="gather"),), 1: (entered(op="scatter"),)}) is not None


def test_sends_and_receives_are_no_collectives() -> None:
    assert first_departure({0: (entered(op="send", peer=1),), 1: (entered(op="recv", peer=0),)}) is None


def test_a_collective_that_all_entered_can_complete() -> None:
    c = entered(group="1", size=2)
    assert any_can_complete([c], {0: (c,), 1: (c,), 2: ()})
    assert not any_can_complete([c], {0: (c,), 1: (), 2: ()})


def test_two_subgroups_at_work_do_not_wait_apart() -> None:
    a, b = entered(group="a"), entered(group="b")
    rings = {0: (a,), 1: (a,), 2: (b,), 3: (b,)}
    assert waits_in_different_calls({0: a, 1: a, 2: b, 3: b}, rings) is None


def test_two_groups_in_opposite_order_wait_apart() -> None:
    a, b = entered(group="a"), entered(group="b")
    assert waits_in_different_calls({0: a, 1: b}, {0: (a,), 1: (b,)}) == {0: a, 1: b}
    assert waits_in_different_calls({0: a, 1: None}, {0: (a,), 1: ()}) is None


def looping(rank: int, skips: tuple[int, int]) -> list[Collective]:
    """Return rounds of allreduce and broadcast at two lines of one loop; ``skips`` is (rank, round) of a missing broadcast."""
    ring: list[Collective] = []
    for round_ in range(4):
        ring.append(entered(sequence=len(ring) + 1, index=len(ring), site="a.py:3 in f", step=0))
        if (rank, round_) != skips:
            ring.append(entered(sequence=len(ring) + 1, index=len(ring), op="broadcast", site="a.py:5 in f", step=0))
    return ring


@pytest.mark.parametrize("culprit", [0, 1])
@pytest.mark.parametrize("round_", [0, 1, 2])
def test_a_loop_without_steps_blames_the_rank_that_skipped(tmp_path: Path, culprit: int, round_: int) -> None:
    """Its next call is at an earlier line than the one that the other rank waits in: lines alone would name the other rank. In a
    first round, and without the source, nothing shows which rank is right. Nor does anything show whether it skipped one call or
    made another once more.
    """
    stop = {"event": "stop", "time": 9, "reason": "departed", "stalled_s": 1.2}
    folder = make_folder(tmp_path / "t", events=[stop])
    stuck = 2 * round_ + 2  # the sequence number at which the ranks diverge
    for rank in (0, 1):
        board = Board(folder / f"rank{rank}" / "board.bin", rank=rank, world_size=2)
        for c in looping(rank, (culprit, round_))[:stuck]:
            index = board.enter(c.op, c.group, c.sequence, c.dtype, c.count, c.site, size=2)
            if c.sequence < stuck:
                board.leave(index)
    verdict = diagnose(load(folder))
    assert not verdict.certain
    if round_:
        assert (verdict.outcome, verdict.ranks) == ("HANG", (culprit,))
        assert verdict.cause in ("skipped_collective", "extra_collective")


@pytest.mark.parametrize(("cut", "is_judged"), [("", True), ("…", False)])
def test_of_a_group_whose_ranks_were_cut_off_its_members_are_not_judged(
    tmp_path: Path, cut: str, is_judged: bool
) -> None:
    stop = {"event": "stop", "time": 9, "reason": "hang_after", "stalled_s": 4.0}
    folder = make_folder(tmp_path / "t", 3, [stop])
    for rank, members in enumerate(("0,1", "1,2", "0,2")):  # each waits for one that makes another group
        board = Board(folder / f"rank{rank}" / "board.bin", rank=rank, world_size=3)
        board.leave(board.enter("allreduce", "0", 1, "float32", 4, "a.py:1 in f", size=3))
        index = board.enter("new_group", "0", 2, "", 0, f"a.py:{3 + rank} in f", size=2, note=f"1: {members}{cut}")
        board.number("blocked_in", index + 1)
    verdict = diagnose(load(folder))
    assert (verdict.rule == "groups.groups_differ") is is_judged, verdict.rule


def test_a_call_of_a_group_that_has_the_culprits_alone_as_members_is_its_own_origin(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "t", world_size=3)
    for rank in range(3):
        board = Board(folder / f"rank{rank}" / "board.bin", rank=rank, world_size=3)
        board.leave(board.enter("new_group", "0", 1, "", 0, "a.py:1 in f", size=2, note="1: 0,1"))
        for n in range(2 * (rank < 2)):
            board.enter("allreduce", "1", n + 1, "float32", 4, "a.py:5 in f", size=2)
    evidence = load(folder)
    missed = evidence.ranks[0].collectives[-1]
    assert find_origin(evidence, (0, 1), missed).where == "a.py:5 in f"
