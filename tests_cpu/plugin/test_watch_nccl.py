"""What NCCL's own service reports of a job, in the form of `ncclras -f json` of NCCL 2.28 to 2.30; no NCCL runs here."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_nsa.cli.nccl import NcclService, communicators, describe, read_answer


def answer(counts: dict[int, int], missing: tuple[int, ...] = ()) -> dict[str, Any]:
    """Return an answer of one communicator: AllReduce calls by rank, and the ranks that do not answer."""
    return {
        "nccl_version": "2.28.9", "timestamp": "2026-11-23 08:00:00", "communicators_count": 1,
        "communicators": [{
            "hash": "0xabc", "size": len(counts) + len(missing), "missing_ranks_count": len(missing),
            "ranks": [
                {"rank": rank, "host": "node5", "pid": 100 + rank, "cuda_dev": rank, "status": {"init_state": 0},
                 "collective_counts": {"AllReduce": n, "Broadcast": 1}}
                for rank, n in counts.items()
            ],
            "missing_ranks": [
                {"rank": rank, "host": "node6", "pid": 100 + rank, "status": {"unresponsive": True, "considered_dead": rank == 9}}
                for rank in missing
            ],
        }],
    }  # fmt: skip


def lines(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    return describe(communicators(before), communicators(now))


def test_a_rank_that_is_behind_is_named_once_nothing_moves() -> None:
    behind = answer({0: 7, 1: 7, 2: 5, 3: 7})
    assert lines(behind, behind) == [
        "NCCL: communicator 0xabc of 4 ranks: rank 2 (node5, GPU 2, pid 102) is 2 AllReduce behind, and nothing moves"
    ]
    assert lines(answer({0: 6, 1: 6, 2: 5, 3: 6}), behind) == []  # a skew that comes and goes is work
    assert lines(answer({0: 7, 1: 7}), answer({0: 7, 1: 7})) == []


def test_ranks_that_do_not_answer_are_named_at_once() -> None:
    assert lines(answer({0: 7}), answer({0: 8}, missing=(4, 9))) == [
        "NCCL: communicator 0xabc of 3 ranks: rank 4 (node6, pid 104) does not answer",
        "NCCL: communicator 0xabc of 3 ranks: rank 9 (node6, pid 109) is dead",
    ]


def test_the_comma_that_2_28_9_leaves_out_is_repaired() -> None:
    whole = json.dumps(answer({0: 7}, missing=(4,)), indent=1)
    broken = whole.replace('"pid": 104,', '"pid": 104')
    assert broken != whole
    with pytest.raises(ValueError, match="delimiter"):
        json.loads(broken)
    assert read_answer(broken) == json.loads(whole)
    assert read_answer("NCCL has no job here") is None


NAMES = st.sampled_from(["communicators", "ranks", "rank", "missing_ranks", "collective_counts", "status", "hash"])
LEAVES = st.none() | st.integers() | st.text(max_size=5)


@settings(deadline=None)
@given(st.recursive(LEAVES, lambda v: st.lists(v, max_size=3) | st.dictionaries(NAMES, v, max_size=4)))
def test_answers_of_other_forms_are_passed_over(value: Any) -> None:
    found = communicators(value if isinstance(value, dict) else {"communicators": value})
    assert isinstance(describe(found, found), list)


def test_the_program_is_asked_and_never_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program of that name that answers, and one that hangs; without any the service is silent."""
    program = tmp_path / "ncclras"
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{json.dumps(answer({0: 3, 1: 2}))}\nEND\n")
    program.chmod(0o700)
    monkeypatch.setattr("pytest_nsa.cli.nccl.AGAIN_S", 0.0)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    service = NcclService()
    deadline = time.monotonic() + 30
    while not service.lines and time.monotonic() < deadline:
        service.look()
        time.sleep(0.01)
    service.close()
    assert service.lines == [
        "NCCL: communicator 0xabc of 2 ranks: rank 1 (node5, GPU 1, pid 101) is 1 AllReduce behind, and nothing moves"
    ]
    program.write_text("#!/bin/sh\nexec sleep 1000\n")
    hanging = NcclService()
    hanging.look()
    hanging.look()
    assert hanging.lines == []
    hanging.close()
    monkeypatch.setenv("PATH", "/nowhere")
    without = NcclService()
    without.look()
    without.close()
    assert without.lines == []
