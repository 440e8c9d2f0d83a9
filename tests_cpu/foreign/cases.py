"""What public reports of hangs contain, made again by hand from the figures in them: files by name, and the right answer."""

import json
from dataclasses import dataclass, field
from typing import Any

Entry = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Case:
    """Files of a job, and the ranks and the word of the call that a verdict must name. ``causes``: any of them is right."""

    origin: str
    ranks: tuple[int, ...]
    call: str
    causes: tuple[str, ...]
    files: dict[str, str] = field(default_factory=dict)


def entry(op: str, number: int, *, size: int = 8, group: str = "0", state: str = "scheduled", line: int = 0) -> Entry:
    """Return an entry of a recorder's dump."""
    frames = [{"name": "all_reduce", "filename": "/usr/lib/python3.11/site-packages/torch/distributed/c.py", "line": 3}]
    frames += [{"name": "step", "filename": "/job/train.py", "line": line}] if line else []
    return {
        "pg_id": int(group), "process_group": (group, "default_pg" if group == "0" else "undefined"), "collective_seq_id": number,
        "p2p_seq_id": 0, "profiling_name": f"nccl:{op}", "input_sizes": [[size]], "input_dtypes": ["Float"], "state": state,
        "frames": frames, "time_created_ns": number * 1000, "is_p2p": False,
    }  # fmt: skip


def dump(entries: list[Entry], counts: dict[str, tuple[int, int]], members: dict[str, list[int]]) -> str:
    """Return a recorder's dump as JSON; ``counts`` are (enqueued, completed) by group."""
    status = {
        group: {"last_enqueued_collective": e, "last_started_collective": e, "last_completed_collective": c}
        for group, (e, c) in counts.items()
    }
    config = {g: {"name": g, "desc": "default_pg" if g == "0" else "", "ranks": str(of)} for g, of in members.items()}
    return json.dumps({"version": "2.10", "pg_config": config, "pg_status": status, "entries": entries})


def watchdog(rank: int, number: int, op: str, count: int, prefix: str = "") -> str:
    """Return a watchdog's line of torch 2.5 and later."""
    who = f"[PG ID 0 PG GUID 0(default_pg) Rank {rank}]"
    return (
        f"{prefix}[E1003 10:11:12.123456 ProcessGroupNCCL.cpp:632] {who} Watchdog caught collective operation timeout: "
        f"WorkNCCL(SeqNum={number}, OpType={op}, NumelIn={count}, NumelOut={count}, Timeout(ms)=600000) ran for 600029 "
        f"milliseconds before timing out.\n"
    )


def counts_line(rank: int, enqueued: int, completed: int) -> str:
    """Return the line in which a watchdog states its counters."""
    return (
        f"[rank{rank}]:[E1003 10:11:13 ProcessGroupNCCL.cpp:1785] [PG ID 0 PG GUID 0(default_pg) Rank {rank}] Exception (either an "
        f"error or timeout) detected by watchdog at work: {completed + 1}, last enqueued NCCL work: {enqueued}, last completed "
        f"NCCL work: {completed}.\n"
    )


ANALYZER = """{message}
internal record id: 31116
group info: 0:default_pg
collective: nccl:{name}
{details}
input sizes: [[{size}]]
output sizes: [[{size}]]
world size: {world}
expected ranks: {expected}
collective state: scheduled
collective stack trace:
 all_reduce at /usr/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py:2501
 step at /job/train.py:88
"""
OLD = "[Rank {rank}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum={n}, OpType={op}, TensorShape=[{size}], Timeout(ms)=1800000) ran for 1800120 milliseconds before timing out.\n"  # noqa: E501
OF_NCCL = (
    "node1:{pid}:{pid} [{rank}] NCCL INFO ncclCommInitRank comm 0x55d{rank} rank {rank} nranks 4 cudaDev {rank} busId 1000 commId "
    "0xabc - Init COMPLETE\n"
    "node1:{pid}:{pid} [{rank}] NCCL INFO {op}: opCount {n} sendbuff 0x7f00 recvbuff 0x7f10 count {count} datatype 7 op 0 root 0 "
    "comm 0x55d{rank} [nranks=4] stream 0x55e\n"
)
PY_SPY = """Process {pid}: python train.py
Python v3.11.7 (/usr/bin/python3.11)

Thread {pid} ({state}): "MainThread"
    {inner}
    {line}
    <module> (/job/train.py:140)
"""
RAS = """Communicator 0x1234 (32 ranks)
  WARNING: collective operation counts differ
  30 ranks have launched up to operation 640
  2 ranks have launched up to operation 641
    Rank 5 -- GPU 5 managed by process 11 on node a
    Rank 13 -- GPU 5 managed by process 12 on node b
"""

CASES = {
    "a_terminal_broke_the_lines": Case(
        origin="open-r1#620", ranks=(0,), call="broadcast", causes=("missing_collective",),
        files={"job.log": "".join(
            (line := watchdog(rank, 4, "BROADCAST", 112))[:165] + "\n" + line[165:] for rank in range(1, 7)
        )},
    ),
    "size_of_one_among_128": Case(
        origin="pytorch#140563", ranks=(22, 110), call="all_gather_base", causes=("collective_mismatch",),
        files={"fr.txt": ANALYZER.format(
            message="Collective sequence number: 4 has errors", name="_all_gather_base", size=1025, world=128,
            expected="{0, 22, 110}",
            details="error msg: " + ", ".join(f"Culprit rank {r}; Error type: SIZE_OR_SYNTAX_MISMATCH" for r in (22, 110)),
        )},
    ),
    "backward_of_a_batch_norm": Case(
        origin="pytorch#151666", ranks=(0, 1), call="allreduce", causes=("collective_mismatch",),
        files={
            "dump_0": dump([entry("all_reduce", 9, size=40)], {"0": (9, 8)}, {"0": [0, 1]}),
            "dump_1": dump([entry("all_reduce", 9, size=16)], {"0": (9, 8)}, {"0": [0, 1]}),
        },
    ),
    "five_missing_ranks": Case(
        origin="pytorch#140969", ranks=(3, 4, 5, 6, 7), call="all_reduce", causes=("missing_collective",),
        files={"fr.log": ANALYZER.format(
            message="Not all ranks joining collective, sequence number: 31117", name="all_reduce", size=8, world=8,
            expected="{0, 1, 2, 3, 4, 5, 6, 7}", details="missing ranks: {3, 4, 5, 6, 7}",
        )},
    ),
    "one_rank_without_a_gather": Case(
        origin="DSpark-2x-DGX-Spark#117", ranks=(0,), call="allgather", causes=("skipped_collective", "missing_collective"),
        files={
            "dump_0": dump([entry("all_reduce", 7, state="completed")], {"0": (7, 7)}, {"0": [0, 1]}),
            "dump_1": dump([entry("_all_gather_base", 8, line=51)], {"0": (8, 7)}, {"0": [0, 1]}),
        },
    ),
    "one_more_shard": Case(
        origin="sglang#33289", ranks=(7,), call="allreduce", causes=("collective_mismatch",),
        files={"job.log": "".join(
            watchdog(r, 19, "ALLREDUCE", 161600 if r == 7 else 145440, f"[rank{r}]:") for r in range(8)
        )},
    ),
    "two_ranks_ahead": Case(
        origin="nccl#1911", ranks=(5, 13), call="operation 641", causes=("missing_collective",), files={"ras.txt": RAS},
    ),
    "another_operation_by_op_counts": Case(
        origin="rccl#429", ranks=(2,), call="allgather", causes=("collective_mismatch", "extra_collective", "skipped_collective"),
        files={"nccl.log": "".join(
            OF_NCCL.format(pid=100 + r, rank=r, op="AllGather" if r == 2 else "AllReduce", n="28c", count=1024) for r in range(4)
        )},
    ),
    "another_size_by_op_counts": Case(
        origin="nccl#296", ranks=(3,), call="broadcast", causes=("collective_mismatch",),
        files={f"nccl.{r}.log": OF_NCCL.format(pid=7, rank=r, op="Broadcast", n="53", count=53 if r == 3 else 25503912)
               for r in range(4)},
    ),
    "uneven_data": Case(
        origin="pytorch#141069", ranks=(0,), call="allreduce", causes=("missing_collective", "skipped_collective"),
        files={"stderr.log": "".join(watchdog(r, 19, "ALLREDUCE", 2048, f"{r}: ") for r in (1, 2, 3))},
    ),
    "enqueued_far_ahead": Case(
        origin="axolotl#3476", ranks=(0,), call="scatter", causes=("missing_collective",),
        files={"rank_1.log": watchdog(1, 13, "SCATTER", 4096) + counts_line(1, 855, 12)},
    ),
    "text_only_batches": Case(
        origin="ms-swift#9655", ranks=(2,), call="allgather", causes=("missing_collective", "skipped_collective"),
        files={"out.log": "".join(
            f"\x1b[31m{OLD.format(rank=r, n=41, op='_ALLGATHER_BASE', size=512)}\x1b[0m" for r in (0, 1, 3)
        )},
    ),
    "a_broadcast_before": Case(
        origin="vllm#23448", ranks=(1,), call="broadcast", causes=("missing_collective", "skipped_collective", "device_busy"),
        files={
            "dump_0.json": dump([entry("broadcast", 5730, line=12)], {"0": (5730, 5729)}, {"0": [0, 1]}),
            "dump_1.json": dump([entry("broadcast", 5729, state="completed")], {"0": (5729, 5729)}, {"0": [0, 1]}),
        },
    ),
    "one_in_its_data_loader": Case(
        origin="pytorch#87995", ranks=(0,), call="train.py:90 in load",
        causes=("missing_collective", "dataloader_stuck", "io_stuck"),
        files={
            **{f"py-spy_{r}.txt": PY_SPY.format(
                pid=100 + r, state="active", inner="all_reduce (torch/distributed/distributed_c10d.py:2501)",
                line="step (/job/train.py:88)",
            ) for r in (1, 2, 3)},
            "py-spy_0.txt": PY_SPY.format(
                pid=100, state="idle", inner="_try_get_data (torch/utils/data/dataloader.py:1132)", line="load (/job/train.py:90)",
            ),
        },
    ),
    "one_rank_in_an_exchange": Case(
        origin="prime-rl#3186", ranks=(13,), call="all_to_all", causes=("missing_collective", "skipped_collective"),
        files={"job.log": "".join(watchdog(r, 77, "ALLTOALL_BASE", 64, f"node1: [rank{r}]: ") for r in range(16) if r != 13)},
    ),
    "a_monitored_barrier": Case(
        origin="trl#6913", ranks=(1, 3), call="monitoredBarrier", causes=("missing_collective",),
        files={"log.txt": "[rank0]: RuntimeError: [Rank 0]: Ranks 1, 3 failed to pass monitoredBarrier in 30000 ms\n"},
    ),
    "an_exception_of_one_rank": Case(
        origin="TRT-LLM#13267", ranks=(3,), call="KeyError", causes=("rank_exception",),
        files={"job.log": watchdog(0, 5, "ALLREDUCE", 8, "[rank0]:") + watchdog(1, 5, "ALLREDUCE", 8, "[rank1]:")
               + "[rank3]: Traceback (most recent call last):\n[rank3]:   File \"/job/train.py\", line 9, in step\n"
               + "[rank3]: KeyError: 'stage 3'\n"},
    ),
    "a_killed_rank": Case(
        origin="torchrun's summary", ranks=(1,), call="signal 9", causes=("rank_died",),
        files={"job.log": "Root Cause (first observed failure):\n[0]:\n  time      : 2026-10-03_10:11:12\n  host      : a\n"
               "  rank      : 1 (local_rank: 1)\n  exitcode  : -9 (pid: 117)\n"},
    ),
}  # fmt: skip
