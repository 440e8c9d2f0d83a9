"""What other tools left of hangs in public reports gets the right ranks and call, and is never certain and wrong."""

from pathlib import Path

import pytest

from pytest_nsa.diagnosis.foreign import judge
from pytest_nsa.foreign.find import read_job
from tests_cpu.foreign.cases import CASES, watchdog


@pytest.mark.parametrize("name", CASES)
def test_a_public_case_is_named(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    for file, text in case.files.items():
        (tmp_path / file).write_text(text)
    job = read_job([tmp_path])
    assert job.kinds
    assert not job.unread
    verdict, _ = judge(job, name)
    labels = " ".join(f"{label.text} {label.file}:{label.line}" for label in verdict.labels)
    assert verdict.ranks == case.ranks, (verdict.cause, verdict.explanation)
    assert verdict.cause in case.causes
    assert case.call in f"{verdict.explanation} {verdict.where} {labels}"


def test_ranks_without_a_line_in_a_log_are_not_taken_for_ranks_that_ended(tmp_path: Path) -> None:
    (tmp_path / "job.log").write_text("".join(watchdog(rank, 9141, "_ALLGATHER_BASE", 19008) for rank in (1, 4)))
    verdict, _ = judge(read_job([tmp_path]), "job")
    assert (verdict.cause, verdict.ranks) == ("missing_collective", (0, 2, 3))
    assert verdict.confidence < 0.5


REPORTS = [watchdog(rank, 12, "ALLREDUCE", 1024) for rank in range(4)]
CUT = REPORTS[1].partition("24, NumelOut")[0]  # 'NumelIn=10'
RAISED = '[rank2]: Traceback (most recent call last):\n[rank2]:   File "a.py", line 1, in f\n[rank2]: ValueError: bad batch\n'
IN_PARTS = [report.replace(", OpType", ", \nOpType").replace("NumelIn", "Nume\nlIn") for report in REPORTS]


@pytest.mark.parametrize(
    ("log", "cause", "ranks"),
    [
        ([REPORTS[0], *REPORTS[2:], CUT], "transport_stuck", (0, 1, 2, 3)),
        ([REPORTS[0], CUT, "\n", RAISED, REPORTS[3]], "rank_exception", (2,)),
        ([*IN_PARTS[:3], IN_PARTS[3].replace("1024", "7")], "collective_mismatch", (3,)),
    ],
    ids=["cut at the end", "cut before another line", "broken into three parts"],
)
def test_a_line_that_is_not_whole(log: list[str], cause: str, ranks: tuple[int, ...], tmp_path: Path) -> None:
    (tmp_path / "job.log").write_text("".join(log))
    verdict, _ = judge(read_job([tmp_path]), "job")
    assert (verdict.cause, verdict.ranks) == (cause, ranks)


RAISED_BY = "[rank{}]: Traceback (most recent call last):\n[rank{}]: {}\n"
PARAMS = "RuntimeError: DDP expects same model across all ranks, but Rank {} has {} params, while rank {} has inconsistent {}"
PARAMS += " params."


@pytest.mark.parametrize(
    ("errors", "cause", "ranks"),
    [
        (
            {1: "RuntimeError: eof (this error originated at tensorpipe/transport/shm/connection_impl.cc:259)"},
            "unknown",
            (),
        ),
        ({1: "RuntimeError: Rank 1 successfully reached monitoredBarrier, but received errors"}, "unknown", ()),
        (
            {0: PARAMS.format(0, 4, 1, 2), 1: PARAMS.format(1, 2, 0, 4), 2: PARAMS.format(2, 4, 1, 2)},
            "collective_mismatch",
            (1,),
        ),
    ],
    ids=["a lost peer", "a monitored barrier", "other models"],
)
def test_what_an_exception_states_of_other_ranks(
    errors: dict[int, str], cause: str, ranks: tuple[int, ...], tmp_path: Path
) -> None:
    (tmp_path / "job.log").write_text("".join(RAISED_BY.format(r, r, text) for r, text in errors.items()))
    verdict, _ = judge(read_job([tmp_path]), "job")
    assert (verdict.cause, verdict.ranks) == (cause, ranks)


def test_what_most_ranks_raise_is_not_certain(tmp_path: Path) -> None:
    text = (
        "torch.distributed.DistNetworkError: The server socket has failed to listen: EADDRINUSE, address already in use"
    )
    (tmp_path / "job.log").write_text("".join(RAISED_BY.format(r, r, text) for r in (0, 2)) + "[rank1]: waits\n")
    verdict, _ = judge(read_job([tmp_path]), "job")
    assert (verdict.ranks, verdict.certain) == ((0, 2), False)
