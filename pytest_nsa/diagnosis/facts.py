"""Facts that several rules cite, each made from evidence in one place."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Mapping, Sequence

from pytest_nsa.diagnosis.verdict import NO_RANK, Fact, Finding, by_ranks
from pytest_nsa.evidence.board import NEW_GROUP, Collective
from pytest_nsa.evidence.collectives import Rings
from pytest_nsa.evidence.stacks import Frame
from pytest_nsa.evidence.values import Evidence, RaisedException, RankEvidence

STOPS = ("departed", "certain", "deadline", "hang_after", "host_died")  # stop reasons with which ranks stalled


def signal_text(number: int) -> str:
    """Return a signal's name: 'SIGKILL' for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def exit_fact(rank: RankEvidence) -> Fact:
    """Return how the rank ended."""
    if rank.signal:
        text = f"ended by {signal_text(rank.signal)}" + (" (sent by us)" if rank.by_us else "")
        text += f": {rank.abort_message[:300]}" if rank.abort_message else ""
    elif rank.exit_code is not None:
        text = f"exited with code {rank.exit_code}" + ("" if rank.finished else " before its test was done")
    else:
        text = "no exit was seen"
    return Fact(rank=rank.rank, kind="exit", file="host.jsonl", text=text)


def exception_fact(rank: RankEvidence, error: RaisedException) -> Fact:
    """Return the first line of an exception and where it was raised."""
    return Fact(
        rank=rank.rank, kind="exception", file=f"rank{rank.rank}/events.jsonl",
        text=f"{error.type}: {error.headline[:300]} at {error.where}",
    )  # fmt: skip


def stack_fact(rank: RankEvidence) -> Fact | None:
    """Return the innermost frames of the rank's last location in its program."""
    stack = rank.last_stack
    if stack is None:
        return None
    file = "stacks.txt" if stack is rank.stack else "events.jsonl"
    text = " <- ".join([frame.describe() for frame in stack.frames if not frame.is_ours][:4])
    return Fact(rank=rank.rank, kind="python_stack", file=f"rank{rank.rank}/{file}", text=text)


def counters_fact(rank: RankEvidence) -> Fact | None:
    """Return the counters of the loops that the rank was in."""
    text = "; ".join(f"{words} at {place}" for place, words in rank.rounds.items())
    return Fact(rank=rank.rank, kind="counters", file=f"rank{rank.rank}/counters.json", text=text) if text else None


def kept_errors_fact(rank: RankEvidence) -> Fact | None:
    """Return the exceptions that the rank's functions had handled and kept in a variable when it stalled."""
    if not rank.kept_errors:
        return None
    text = "; ".join(f"{name} = {error}, raised at {at}" for name, error, at in rank.kept_errors)
    return Fact(rank=rank.rank, kind="handled_exception", file=f"rank{rank.rank}/counters.json", text=text)


def board_fact(rank: RankEvidence) -> Fact | None:
    """Return step, phase, gradients and the collective that the rank is in, from its board."""
    board = rank.board
    if board is None:
        return None
    n = board.numbers
    parts = [f"step {n['step']:.0f}, {board.phase}"]
    if n["gradients_expected"]:
        parts.append(f"{n['gradients']:.0f} of {n['gradients_expected']:.0f} gradients")
    if board.parameter and board.phase == "backward":
        parts.append(f"last {board.parameter}")
    if n.get("gil_late", 0.0) > 0.5:
        parts.append(f"its heartbeat waited {n['gil_late']:.1f} s for the GIL")
    if n.get("nodes", 0.0) >= 1000:
        parts.append(f"{n['nodes']:,.0f} autograd nodes")
    if board.inside:
        parts.append(f"inside {board.inside[-1].describe()}")
    return Fact(rank=rank.rank, kind="board", file=f"rank{rank.rank}/board.bin", text=", ".join(parts))


def process_fact(rank: RankEvidence) -> Fact | None:
    """Return state, CPU share and wait channel from /proc."""
    if not rank.process:
        return None
    p = rank.process
    text = f"state {p['state']}, {100 * p['cpu_share']:.0f}% CPU" + (
        f", waits in {p['wchan']}" if p["wchan"] not in ("", "0") else ""
    )
    if p.get("unread_bytes") or p.get("unsent_bytes"):
        text += f", {p['unread_bytes']} bytes unread and {p['unsent_bytes']} unsent in {p['sockets']} sockets"
    return Fact(rank=rank.rank, kind="process", file="host.jsonl", text=text)


def native_fact(rank: RankEvidence) -> Fact | None:
    """Return the innermost native frame, or why it could not be read."""
    if not rank.native_symbol and not rank.native_absent:
        return None
    if not rank.native_symbol:
        return Fact(
            rank=rank.rank, kind="native_stack", file="host.jsonl", text=f"no native frames: {rank.native_absent}"
        )
    return Fact(rank=rank.rank, kind="native_stack", file=f"rank{rank.rank}/native.txt", text=rank.native_symbol)


def in_backward(evidence: Evidence, ranks: Sequence[int]) -> RankEvidence | None:
    """Return the first of ``ranks`` (of all ranks where it is empty) that did not leave its last backward; None where
    all did.
    """
    of = [r for r in evidence.ranks if r.rank in ranks] or evidence.ranks
    return next((r for r in of if r.board is not None and r.board.phase == "backward"), None)


def parameters_missing(evidence: Evidence, ranks: Sequence[int] = ()) -> tuple[str, ...]:
    """Return the parameters that got no gradient: in the backward that one of ``ranks`` did not leave, by its board;
    else after any backward of any rank, by the trace where it was requested.
    """
    stalled = in_backward(evidence, ranks)
    if stalled is not None:
        return stalled.missing
    found = (step.names for rank in evidence.ranks for step in rank.gradients_missing)
    return tuple(dict.fromkeys(name for names in found for name in names))


def missing_fact(rank: RankEvidence) -> Fact | None:
    """Return the parameters that got no gradient in a backward that ended."""
    if not rank.gradients_missing:
        return None
    first = rank.gradients_missing[0]
    text = f"after the backward of step {first.step} no gradient had arrived for {few(first.names)}"
    return Fact(rank=rank.rank, kind="gradients_missing", file=f"rank{rank.rank}/events.jsonl", text=text)


FEW = 5  # names that a text states
ENOUGH = 0.8  # share of all memory below which no rank stalls for lack of it


def memory_fact(evidence: Evidence) -> Fact | None:
    """Return the memory that the ranks held when they stalled, and whether it explains the stall; None where it is
    unknown.
    """
    ranks = [rank for rank in evidence.ranks if "rss_mib" in rank.process]
    if not ranks:
        return None
    text = by_ranks({rank.rank: f"held {_held(rank)}" for rank in ranks}, evidence.job.world_size)
    limit = min((rank.memory_mib for rank in ranks if rank.memory_mib), default=0.0)
    shares = [_share_of_gpu(rank) for rank in ranks]
    if limit and len(ranks) == len(evidence.ranks) and None not in shares:
        host = sum(rank.process["rss_mib"] for rank in ranks) / limit
        most = max(host, *(share or 0.0 for share in shares))
        text += f", of {limit:,.0f} MiB here: {'memory is not short' if most < ENOUGH else 'memory may be short'}"
    return Fact(rank=NO_RANK, kind="memory", file="host.jsonl", text=text)


def _held(rank: RankEvidence) -> str:
    on_gpu = _on_gpu(rank)
    more = f", and on its GPU {on_gpu[0]:,.0f} MiB of {on_gpu[1]:,.0f} reserved" if on_gpu else ""
    return f"{rank.process['rss_mib']:,.0f} MiB{more}"


def _share_of_gpu(rank: RankEvidence) -> float | None:
    """Return the share of its GPU's memory that a rank has reserved: 0 without a GPU, None where the total is unknown."""
    on_gpu, total = _on_gpu(rank), rank.gpu.get("memory.total")
    if not on_gpu:
        return 0.0
    return on_gpu[1] / total if isinstance(total, int | float) and total else None


def _on_gpu(rank: RankEvidence) -> tuple[float, float] | None:
    """Return the memory, in MiB, that CUDA's allocator had allocated and reserved, by the latest heartbeat that reports
    it.
    """
    for beat in reversed(rank.heartbeats):
        if beat.get("cuda_reserved_mib") is not None:
            return beat.get("cuda_allocated_mib") or 0.0, beat["cuda_reserved_mib"]
    return None


def few(names: Iterable[str]) -> str:
    """Return the first `FEW` names, and the number of further ones."""
    shown = list(names)
    return ", ".join(shown[:FEW]) + (f" and {len(shown) - FEW} more" if len(shown) > FEW else "")


def all_facts(ranks: tuple[RankEvidence, ...]) -> tuple[Fact, ...]:
    """Return every rank's location, which every verdict on a stall cites."""
    kinds = stack_fact, counters_fact, kept_errors_fact, board_fact, missing_fact, process_fact, native_fact
    return tuple(fact for rank in ranks for kind in kinds if (fact := _made(kind, rank)) is not None)


def _made(kind: Callable[[RankEvidence], Fact | None], rank: RankEvidence) -> Fact | None:
    """Return a fact; None where the evidence for it is malformed, so that no verdict fails by one fact."""
    try:
        return kind(rank)
    except (TypeError, ValueError, LookupError, ArithmeticError):
        return None


def last_seen(rank: RankEvidence) -> str:
    """Return the best-known line of a rank: its stack's user frame, else the line of its phase, else the last recorded
    line.
    """
    frame = user_frame(rank)
    if frame is not None:
        return frame.describe()
    board = rank.board
    if board is None:
        return ""
    # In a phase of the model, the line that began it: a forward that is recomputed in backward has another line.
    if board.phase in ("forward", "backward", "optimizer") and board.phase_line:
        return board.phase_line
    last = board.collectives[-1] if board.collectives else None
    return last.site if last is not None and last.entered > board.numbers.get("line_time", 0.0) else board.line


def make_finding(
    evidence: Evidence, cause: str, ranks: Sequence[RankEvidence], reason: str, confidence: float, *, certain: bool = False,
    where: str = "", module: str | None = None, facts: tuple[Fact, ...] = (),
) -> Finding:  # fmt: skip
    """Return a finding on ranks, by default at the location and in the module of the first, with every rank's facts."""
    return Finding(
        cause=cause, ranks=tuple(r.rank for r in ranks), reason=reason, confidence=confidence, certain=certain,
        where=where or last_seen(ranks[0]), module=owning_module(ranks[0]) if module is None else module,
        facts=(*facts, *all_facts(evidence.ranks)),
    )  # fmt: skip


def user_frame(rank: RankEvidence) -> Frame | None:
    """Return the innermost line of the user's code in the rank's stack."""
    return rank.stack.user_frame if rank.stack is not None else None


def owning_module(rank: RankEvidence) -> str:
    """Return the module that a backward is in ('blocks.4.attn'); else the module that was entered last.

    That is the module whose gradients came last. If it has all of them, it is that of the next parameter: a backward goes from the
    last module to the first.
    """
    board = rank.board
    if board is None:
        return ""
    if board.phase == "backward" and board.parameter:
        owner, names, missing = _owner(board.parameter), rank.parameter_names, set(rank.missing)
        is_complete = not any(name.startswith(f"{owner}.") for name in missing)
        before = names[: names.index(board.parameter)] if is_complete and board.parameter in names else ()
        return _owner(next((name for name in reversed(before) if name in missing), board.parameter))
    return board.module


def _owner(parameter: str) -> str:
    owner = parameter.rpartition(".")[0]  # the module that holds the parameter, usually a Linear
    return owner.rpartition(".")[0] if owner.count(".") >= 2 else owner


def awaited(rank: RankEvidence) -> Collective | None:
    """Return the call that a rank waits in; None where it is in none."""
    return rank.board.awaited_call if rank.board is not None else None


def find_awaited(ranks: Iterable[RankEvidence]) -> dict[int, Collective]:
    """Return, by rank, the call that each of some ranks waits in; without those that are in none."""
    return {rank.rank: call for rank in ranks if (call := awaited(rank)) is not None}


def doing(rank: RankEvidence) -> str:
    """Return the rank's call or location in words."""
    call = awaited(rank)
    if call is not None:
        return f"in {call.describe()}"
    return "at the end of its test" if rank.finished else f"at {last_seen(rank)}"


def rings(evidence: Evidence) -> Rings:
    """Return the calls that each rank entered, oldest first, as far as its board holds them."""
    return {r.rank: r.board.collectives for r in evidence.ranks if r.board is not None}


def has_lost_calls(evidence: Evidence) -> bool:
    """Return whether a rank's ring has lost its first calls, so that counts do not cover the whole program."""
    return any(rank.collectives and rank.collectives[0].index > 0 for rank in evidence.ranks)


def list_earlier_calls(evidence: Evidence, rank: int, at: Collective) -> list[Collective]:
    """Return the calls that a rank entered before ``at``, in all groups, including sends and receives."""
    return [c for c in evidence.ranks[rank].collectives if c.index < at.index and c.op != NEW_GROUP]


# NVIDIA's catalogue of Xid errors: those that a program causes, and those that the machine causes.
_XIDS = {
    13: "a kernel's illegal instruction or address", 31: "a kernel's access to an address that is not mapped",
    43: "a program's work was stopped", 45: "a program's work was cleaned up", 48: "memory with an error that cannot be corrected",
    63: "a row of memory was remapped", 64: "a row of memory could not be remapped", 74: "NVLink",
    79: "the GPU has fallen off the bus",
    94: "a contained memory error", 95: "an uncontained memory error", 119: "the GPU's own processor does not answer",
    120: "the GPU's own processor", 154: "the GPU needs to be reset or drained",
}  # fmt: skip
_OF_THE_MACHINE = frozenset({48, 63, 64, 74, 79, 94, 95, 119, 120, 154})


def xid_facts(evidence: Evidence) -> tuple[Fact, ...]:
    """Return what the driver logged about the GPUs while the test ran."""
    found = ((f"GPU {gpu}: Xid {xid}", _XIDS.get(xid, "see NVIDIA's catalogue")) for gpu, xid in evidence.xids)
    return tuple(
        Fact(rank=NO_RANK, kind="xid", file="host.jsonl", text=f"{error}, {meaning}") for error, meaning in found
    )


def is_of_the_machine(evidence: Evidence) -> bool:
    """Return whether the driver logged an error that the program did not cause."""
    return any(xid in _OF_THE_MACHINE for _, xid in evidence.xids)


def racing(evidence: Evidence, entered: Mapping[int, Collective]) -> tuple[int, ...]:
    """Return the ranks that make their call of a group in a side thread, without waiting for it, where the others make theirs
    in the main thread: such calls have no order.

    () where a side of the ranks has both kinds of threads, which cannot explain the difference; and without stacks.
    """
    aside = tuple(sorted(rank for rank, call in entered.items() if call.side_thread))
    kinds: dict[object, set[int]] = {}
    for call in entered.values():
        kinds.setdefault((call.place, call.shape), set()).add(call.side_thread)
    is_mixed = any(len(threads) > 1 for threads in kinds.values())
    if is_mixed or len({call.process_group for call in entered.values()}) != 1 or len(aside) == len(entered):
        return ()
    stacks = ([*evidence.ranks[rank].threads, *evidence.ranks[rank].fatal] for rank in aside)
    mains = [thread for threads in stacks for thread in threads if thread.is_main]  # an aborted rank may have none
    is_awaited = any(main.waits_for_a_thread or main.runs_a_loop for main in mains)
    return aside if mains and not is_awaited else ()
