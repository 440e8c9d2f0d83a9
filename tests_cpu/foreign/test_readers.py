"""Readers of foreign evidence: forms of one fact, several kinds together, and files by hostile hands."""

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pytest_nsa.cli.main import main
from pytest_nsa.diagnosis.foreign import judge
from pytest_nsa.foreign.find import read_job
from tests_cpu.foreign.cases import CASES, PY_SPY, dump, entry, watchdog


class Harmful:
    """Creates a file where a pickle of it is loaded without care."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return (os.mkdir, (str(self.path),))


def write(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        (folder / name).write_text(text)
    return folder


def test_a_pickle_that_names_a_global_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "dump_0").write_bytes(pickle.dumps({"entries": [Harmful(tmp_path / "made")], "version": "2.10"}))
    assert main(["diagnose", str(tmp_path)]) == 2
    assert not (tmp_path / "made").exists()
    assert "mkdir" in capsys.readouterr().err


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x04" + b"\xff" * 50, pickle.dumps({"entries": [{"process_group": ("0",), "collective_seq_id": "x"}]}),
        pickle.dumps({"entries": [{"input_sizes": [["a"]], "profiling_name": "nccl:all_reduce"}]}), b"{" * 100_000, b"{}",
        json.dumps({"entries": [{"profiling_name": "nccl:x", "collective_seq_id": 1e400}]}).encode(),
        pickle.dumps({"pg_config": {"0": {"ranks": "[[[["}}, "entries": []}), b"\x1b[31m" * 1000, b"\0" * 5000,
    ],
    ids=range(9),
)  # fmt: skip
def test_a_damaged_file_is_named_or_ignored(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "dump_3").write_bytes(data)
    job = read_job([tmp_path])
    assert len(job.unread) <= 1
    assert not job.statements


def test_dumps_as_pickles_and_as_json_are_one_job(tmp_path: Path) -> None:
    for name, text in CASES["backward_of_a_batch_norm"].files.items():
        write(tmp_path, **{f"{name}.json": text})
        (tmp_path / name).write_bytes(pickle.dumps(json.loads(text)))
    job = read_job([tmp_path])
    assert [len(rank.calls) for rank in job.ranks.values()] == [1, 1]
    assert job.kinds == ["4 flight recorder dumps, version 2.10, ranks 0 to 1, with stacks"]


def test_stacks_give_the_line_that_dumps_lack(tmp_path: Path) -> None:
    write(tmp_path, **CASES["one_rank_without_a_gather"].files)
    inner = "sleep (/job/data.py:9)"
    write(tmp_path, **{"stack_0.txt": PY_SPY.format(pid=1, state="idle", inner=inner, line="load (/job/train.py:90)")})
    verdict, _ = judge(read_job([tmp_path]), "job")
    assert verdict.ranks == (0,)
    assert verdict.where == "/job/data.py:9 in sleep"


def test_stacks_alone_name_the_rank_that_waits_elsewhere(tmp_path: Path) -> None:
    lines = ["step (/job/train.py:40)", "step (/job/train.py:40)", "evaluate (/job/train.py:71)"]
    for rank, line in enumerate([*lines, lines[0]]):
        text = PY_SPY.format(
            pid=rank + 1, state="idle", inner="barrier (torch/distributed/distributed_c10d.py:9)", line=line
        )
        write(tmp_path, **{f"stack_{rank}.txt": text})
    verdict, _ = judge(read_job([tmp_path]), "job")
    assert (verdict.ranks, verdict.where, verdict.certain) == ((2,), "/job/train.py:71 in evaluate", False)


def test_counters_alone_are_never_certain(tmp_path: Path) -> None:
    members = {"0": [0, 1, 2, 3]}
    for rank in range(4):
        done = 7 if rank == 2 else 9
        write(tmp_path, **{f"dump_{rank}": dump([entry("all_reduce", done + 1)], {"0": (10, done)}, members)})
    verdict, _ = judge(read_job([tmp_path]), "job")
    assert (verdict.ranks, verdict.certain) == ((2,), False)


def make_dumps(*entries: list[dict[str, Any]], done: int = 1) -> dict[str, str]:
    """Return a dump per rank; a rank without entries leaves none. No dump has the members of a group."""
    return {f"dump_{r}": dump(of, {of[0]["process_group"][0]: (1, done)}, {}) for r, of in enumerate(entries) if of}


DONE = {"state": "completed"}
ALL_TO_ALL = entry("all_to_all", 1) | DONE


@pytest.mark.parametrize(
    ("files", "found"),
    [
        # Calls that ended are compared, too: no backend notices another type of the same size.
        (
            make_dumps([ALL_TO_ALL], [ALL_TO_ALL], [ALL_TO_ALL | {"input_dtypes": ["Int"]}]),
            ("collective_mismatch", (2,), True),
        ),
        # Each rank may give another number of rows, and a dump has no splits.
        (make_dumps([ALL_TO_ALL], [ALL_TO_ALL | {"input_sizes": [[9, 2]]}]), ("unknown", (), False)),
        # Only the root of a scatter has inputs.
        (
            make_dumps(
                [entry("scatter", 1) | DONE | {"output_sizes": [[4]]}],
                [entry("scatter", 1) | DONE | {"input_sizes": [], "output_sizes": [[4]]}],
            ),
            ("unknown", (), False),
        ),
        # A group of one rank alone does not wait: of two ranks, both are in it.
        (
            make_dumps([entry("all_reduce", 1, group="1")], [entry("all_reduce", 1, group="2")], done=0),
            ("group_order_deadlock", (0, 1), False),
        ),
        # A library aborts a rank because of another one.
        (
            make_dumps([ALL_TO_ALL], [ALL_TO_ALL], [ALL_TO_ALL | {"input_dtypes": ["Int"]}])
            | {"launcher.log": "  rank      : 0 (local_rank: 0)\n  exitcode  : -6 (pid: 7)\n"},
            ("collective_mismatch", (2,), True),
        ),
        # No rank waits, and one has left no dump.
        (make_dumps([entry("all_reduce", 1) | DONE], [], [entry("all_reduce", 1) | DONE]), ("unknown", (1,), False)),
    ],
    ids=["another type", "other rows", "a scatter", "two groups", "aborted", "no dump"],
)
def test_what_dumps_show_without_a_call_that_waits(
    files: dict[str, str], found: tuple[object, ...], tmp_path: Path
) -> None:
    verdict, _ = judge(read_job([write(tmp_path, **files)]), "job")
    assert (verdict.cause, verdict.ranks, verdict.certain) == found


@pytest.mark.parametrize("prefix", ["", "[rank{r}]:", "{r}: ", "[default{r}]:", "\x1b[36m(RayWorker pid=9)\x1b[0m "])
def test_a_watchdog_s_line_is_read_behind_any_prefix(prefix: str, tmp_path: Path) -> None:
    write(tmp_path, log="".join(watchdog(r, 19, "ALLREDUCE", 8, prefix.format(r=r)) for r in (0, 2)))
    verdict, _ = judge(read_job([tmp_path / "log"]), "job")
    assert verdict.ranks == (1,)


def test_the_dump_of_torch_s_own_recorder_is_read(tmp_path: Path) -> None:
    code = (
        "import os, sys, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo', init_method=f'file://{sys.argv[1]}/store', rank=0, world_size=1)\n"
        "hook = getattr(torch._C._distributed_c10d, 'FlightRecorderHook', None)\n"
        "attached = hook and hook.attach(dist.group.WORLD)\n"
        "dist.all_reduce(torch.ones(3))\n"
        "open(sys.argv[1] + '/dump_0', 'wb').write(torch._C._distributed_c10d._dump_fr_trace())\n"
    )
    environment = {**os.environ, "TORCH_FR_BUFFER_SIZE": "100"}
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, env=environment, timeout=100)
    (call,) = read_job([tmp_path / "dump_0"]).ranks[0].calls
    assert (call.op, call.number, call.dtype, call.count) == ("allreduce", 1, "float32", 3)
    assert any(frame.function == "<module>" for frame in call.frames)


def of_hook(op: str, number: int, *, is_p2p: bool = False, group: str = "0") -> dict[str, Any]:
    """Return an entry of torch's FlightRecorderHook, which retires a call as soon as it has begun, and knows no peer."""
    found = entry(op, number, group=group, line=10 + number)
    return {
        **found,
        "profiling_name": f"c10d:{op}",
        "p2p_seq_id": number,
        "is_p2p": is_p2p,
        "retired": True,
        "thread_id": "7",
    }


def test_a_call_that_two_recorders_have_is_one_call(tmp_path: Path) -> None:
    """With the hook attached, gloo's own entry of a call comes behind the hook's, with another number."""
    both = [of_hook("allreduce", 1), {**entry("all_reduce", 3), "profiling_name": "gloo:all_reduce"}]
    write(tmp_path, dump_0=dump([*both, of_hook("send", 1, is_p2p=True)], {}, {"0": [0, 1]}))
    calls = [(call.op, call.number, call.peer) for call in read_job([tmp_path]).ranks[0].calls]
    assert calls == [("allreduce", 3, -1), ("send", 1, 1)]


@pytest.mark.parametrize("members", [[0, 1], [0, 1, 2]], ids=["pair", "three"])
def test_a_send_and_its_receive_are_no_mismatch(members: list[int], tmp_path: Path) -> None:
    """The hook's entries alone, as of a backend without a recorder: rank 1 has received, and does not come to the reduction."""
    group = {"0": members}
    write(tmp_path, dump_0=dump([of_hook("send", 1, is_p2p=True), of_hook("allreduce", 1)], {}, group))
    write(tmp_path, dump_1=dump([of_hook("recv", 1, is_p2p=True)], {}, group))
    if len(members) == 3:
        write(tmp_path, dump_2=dump([of_hook("allreduce", 1)], {}, group))
    verdict, _ = judge(read_job([tmp_path]), "job")
    assert (verdict.ranks, verdict.certain) == ((1,), False)
    assert "mismatch" not in verdict.cause


def test_one_command_prints_kinds_verdict_and_what_is_lacking(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, **CASES["one_more_shard"].files)
    assert main(["diagnose", str(tmp_path / "job.log")]) == 1
    printed = capsys.readouterr().out
    assert printed.startswith("1 log with watchdog\nHANG: rank 7 of 8, collective_mismatch")
    assert "lacks" in printed
    assert main(["diagnose", "--json", str(tmp_path)]) == 1
    assert json.loads(capsys.readouterr().out)["ranks"] == [7]


def test_a_long_log_is_read_line_by_line(tmp_path: Path) -> None:
    log = tmp_path / "job.log"
    with log.open("w") as file:
        for _ in range(200):
            file.write("INFO step done, Error rate 0.1 " + "x" * 100_000 + "\n")
        file.write(watchdog(0, 3, "ALLREDUCE", 8))
    assert read_job([log]).ranks[0].calls[0].number == 3
