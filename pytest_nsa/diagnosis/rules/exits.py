"""The rank itself: killed, raised, exited, never connected; the network that its group needs; its GPU.

A victim's error, which torch raises on a rank after another rank has gone, is never the cause.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable
from dataclasses import replace

from pytest_nsa.diagnosis.facts import (
    all_facts,
    awaited,
    exception_fact,
    exit_fact,
    last_seen,
    make_finding,
    owning_module,
    signal_text,
)
from pytest_nsa.diagnosis.verdict import Finding, describe_ranks
from pytest_nsa.diagnosis.words import late_hint
from pytest_nsa.evidence.board import Collective
from pytest_nsa.evidence.stacks import Frame
from pytest_nsa.evidence.values import CRASHES, STILL_LOOKS, Evidence, RaisedException, RankEvidence
from pytest_nsa.evidence.waiting import FOR_A_DEVICE

# What torch raises on a rank after another rank has gone, always a consequence.
VICTIM_TEXTS = (
    "connection closed by peer", "connection reset by peer", "read error", "write error", "broken pipe",
    "timed out waiting", "timed out after", "socket timeout", "wait timeout", "application timeout",
    "collective operation timeout", "connection refused", "connectfullmesh failed", "rank has terminated",
    "failed to pass monitoredbarrier", "successfully reached monitoredbarrier", "connection was likely closed",
    "eof (this error originated at tensorpipe",
)  # fmt: skip
_GAVE_UP = re.compile(r"(?i)timed out|timeout|failed to pass monitoredbarrier")
_ASSERTIONS = ("AssertionError", "Failed")
MEMORY = ("OutOfMemoryError", "MemoryError")
_MEMORY_TEXTS = ("can't allocate memory", "cannot allocate memory", "out of memory", "failed to allocate")
_LOADER_TEXTS = ("DataLoader worker (pid", "DataLoader timed out after")  # the first is killed, or exited unexpectedly
_CAUGHT = re.compile(r"Caught \w+ in (?P<worker>DataLoader worker process \d+)\.")
_TRACEBACK = re.compile(r'^ *File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)', re.MULTILINE)
LEAVES = ("SystemExit", "Exit")
LATE_FILE = "let the ranks meet between the writing and the reading of the file: what should do so let this rank pass"
_OF_CRASHES = "native code crashed: look at the innermost call of the stack (rank*/fatal.txt), and run it alone"
_ALSO_OF = {
    signal.SIGABRT: "; SIGABRT also follows a C++ exception",
    signal.SIGBUS: "; SIGBUS also follows a full /dev/shm",
}
_OF_A_RANK = re.compile(r"Traceback \(most recent call last\): \(RANK (?=\d+\))")


def is_victim(error: RaisedException) -> bool:
    """Return whether an exception, or one that it was raised from, is torch's report that another rank has gone."""
    texts = ((error.message, error.raised_in), *((message, file) for message, file, _ in error.chain))
    return not _is_of_a_lost_worker(error) and any(reports_a_lost_peer(message, file) for message, file in texts)


def have_own_errors(ranks: Iterable[RankEvidence]) -> bool:
    """Return whether one of some ranks raised an exception that is not a victim's."""
    return any(not is_victim(error) for rank in ranks for error in rank.exceptions)


def _is_of_a_lost_worker(error: RaisedException) -> bool:
    texts = (error.message, *(message for message, *_ in error.chain))
    return error.in_loader or any(text.startswith(_LOADER_TEXTS) for text in texts)


def _is_of_memory(error: RaisedException) -> bool:
    kinds = (error.type, *(kind for *_, kind in error.chain))
    texts = (error.message, *(message for message, *_ in error.chain))
    return any(kind in MEMORY for kind in kinds) or any(part in t.lower() for t in texts for part in _MEMORY_TEXTS)


def _describe_error(error: RaisedException) -> tuple[str, str]:
    """Return an exception's message in one line, and its location. The message of an error in a data loader's worker
    contains the worker's traceback.
    """
    caught = _CAUGHT.match(error.headline)
    if caught is None:
        before = next(((kind, text.strip()) for text, _, kind in error.chain), None)
        after = (
            f", after {before[0]}: {before[1].splitlines()[0][:100] if before[1] else 'no message'}" if before else ""
        )
        return f"{error.type}: {error.headline[:200] or 'no message'}{after}", error.where
    frames = [Frame(m["file"], int(m["line"]), m["function"]) for m in _TRACEBACK.finditer(error.message)]
    where = next((f.describe() for f in reversed(frames) if f.is_user), error.where)
    return f"{error.message.strip().splitlines()[-1][:200]}, in {caught['worker']}", where


def is_victim_text(message: str) -> bool:
    """Return whether a text is what torch raises when another rank has gone."""
    return any(phrase in message.lower() for phrase in VICTIM_TEXTS)


def reports_a_lost_peer(message: str, raised_in: str) -> bool:
    """Return whether torch, which raised in a file, reports a lost connection."""
    from_torch = "/torch/" in raised_in or "/nsa/trace/" in raised_in or not raised_in
    return from_torch and is_victim_text(message)


def init_timeout(evidence: Evidence) -> Finding | None:
    """Find that the group never formed."""
    if evidence.stop != "start":
        return None
    absent = [r for r in evidence.ranks if r.board is None or r.board.phase == "start"]
    here = [r for r in absent if r.board is not None]
    # All ranks wait in rendezvous, unless some never reached it.
    culprits = [r for r in absent if r.board is None] or (absent if len(absent) < len(evidence.ranks) else here)
    where, reason = last_seen(culprits[0]) if culprits else "", "the process group was not formed in time"
    waits = next((r for r in evidence.ranks if r not in culprits and r.is_waiting and last_seen(r)), None)
    # A rank that never connected counts only where another rank waits for it.
    if culprits and not where and waits is not None:
        where = last_seen(waits)
        who = describe_ranks(tuple(r.rank for r in culprits), evidence.job.world_size)
        reason += f": {who} never connected, and rank {waits.rank} waits for it at {where}"
    return Finding(
        cause="init_timeout", ranks=tuple(r.rank for r in culprits), where=where, reason=reason, confidence=0.7,
        facts=all_facts(evidence.ranks),
    )  # fmt: skip


def rank_died(evidence: Evidence) -> Finding | None:
    """Find that a signal that we did not send ended a rank; if several, the first."""
    dead = deaths(evidence)
    if not dead:
        return None
    rank = dead[0]
    name = signal_text(rank.signal)
    board = rank.board
    at = f" in {board.phase} of step {board.numbers['step']:.0f}" if board is not None and board.numbers["step"] else ""
    seen = board.numbers.get("line_time", 0.0) if board is not None and rank.stack is None else 0.0
    ago = (
        f"; it was last seen at {board.line}, {max(0.0, rank.exit_time - seen):.2f} s before" if board and seen else ""
    )
    sender = _find_sender(evidence, rank)
    reason = f"rank {rank.rank} was ended by {name}{sender}{at}{ago}"
    if rank.abort_message:
        reason += f": {rank.abort_message[:200]}"
    found = make_finding(evidence, "rank_died", [rank], reason, 0.95, certain=True, facts=(exit_fact(rank),))
    if sender:
        return replace(found, advice="take out the line that sends the signal, or let the test expect it")
    if rank.oom_kills:
        reason = f"rank {rank.rank} was ended by {name}, as its control group has no memory left{at}{ago}"
        return make_finding(evidence, "oom", [rank], reason, 0.95, facts=(exit_fact(rank),))
    if rank.signal not in CRASHES:
        return found
    return replace(found, advice=_OF_CRASHES + _ALSO_OF.get(signal.Signals(rank.signal), ""))


def _find_sender(evidence: Evidence, rank: RankEvidence) -> str:
    """Return which rank sent the signal that ended a rank, and where another one did; '' where none did."""
    found = evidence.find_sender(rank.rank)
    if found is None:
        return ""
    sender, where = found
    return ", sent by itself" if sender == rank.rank else f", sent by rank {sender}; it sent the signal at {where}"


def deaths(evidence: Evidence) -> list[RankEvidence]:
    """Return the ranks that a signal ended which the host did not send, the first one first; without those that a backend
    aborted because another rank let them wait, or had gone.
    """
    dead = (r for r in evidence.ranks if r.fatal_signal and not is_victim_text(r.abort_message))
    return sorted(dead, key=lambda r: r.exit_time)


Raised = list[tuple[RankEvidence, RaisedException]]


def first_exceptions(evidence: Evidence) -> Raised:
    """Return each rank's first exception, the earliest first, without those of victims, which may raise again in a teardown."""
    firsts = [(rank, min(rank.exceptions, key=lambda e: e.time)) for rank in evidence.ranks if rank.exceptions]
    found = [(rank, error) for rank, error in firsts if not is_victim(error)]
    return sorted(found, key=lambda pair: pair[1].time)


def rank_raised(evidence: Evidence) -> Finding | None:
    """Find the first exception that is not a consequence: `oom`, `rank_exception`, or `assertion` where no rank waited
    for another, and the test itself or all ranks raised it.
    """
    found = first_exceptions(evidence)
    if not found:
        return None
    first_rank, error = found[0]
    if any(r.exit_time <= error.time and r is not first_rank for r in deaths(evidence)):
        return None  # an exception after a death may be its consequence
    same = [(r, e) for r, e in found if (e.type, e.file, e.line) == (error.type, error.file, error.line)]
    failed = _failed_in_a_checkpoint(error)
    culprits = tuple(sorted(failed or (r.rank for r, _ in same)))
    others = [r for r in evidence.ranks if r.rank not in {s.rank for s, _ in same}]
    waited = [r.rank for r in others if (r.by_us and r.is_waiting) or any(is_victim(e) for e in r.exceptions)]
    cause = _choose_cause(error, is_ordinary=not waited and not failed, of_all=len(same) == len(evidence.ranks))
    if cause == "assertion":
        first_rank, error = min(same, key=lambda pair: pair[0].rank)  # which of them was first is chance
    reason, where = _describe_error(error)
    if failed:
        who = describe_ranks(culprits, evidence.job.world_size)
        reason = f"{failed[culprits[0]]} on {who}, for which every rank raises {error.type}"
    if error.file and where == error.where and not Frame(error.file, error.line, error.function).is_user:
        where = last_seen(first_rank) or where  # no line of the test is known: at the test
    reason += late_hint(error.message)
    is_late = error.missing in first_rank.appeared
    if is_late:
        after = max(0.0, first_rank.appeared[error.missing] - error.time)
        reason += f"; that file was written {after:.1f} s later: the rank read it before its writer was done"
    if waited:
        reason += f" ({describe_ranks(tuple(waited), evidence.job.world_size)} waited)"
    later = [(r, e) for r, e in found if r in others]
    advice = _advice_on_a_failure(evidence, same, later) if cause == "assertion" else ""
    # What ranks compare after an exchange may be wrong because of one of them.
    is_shared = cause == "assertion" and not others and any(_list_earlier_exchanges(r, e) for r, e in same)
    return Finding(
        cause=cause, ranks=culprits, where=where, reason=reason, certain=not is_shared, confidence=0.95,
        module=owning_module(first_rank) if cause == "rank_exception" and first_rank.board else "",
        advice=LATE_FILE if is_late else advice,
        facts=tuple(exception_fact(r, e) for r, e in same) + all_facts(tuple(others)),
    )  # fmt: skip


def _choose_cause(error: RaisedException, *, is_ordinary: bool, of_all: bool) -> str:
    """Return the cause that an exception belongs to. ``is_ordinary``: no rank waited for one that raised it."""
    if error.type in LEAVES:
        return "rank_exited"
    if _is_of_memory(error):
        return "oom"
    if _is_of_a_lost_worker(error):
        return "dataloader_stuck"
    if is_ordinary and (of_all or error.type in _ASSERTIONS):
        return "assertion"  # of no rank in particular
    return "rank_exception"


def _advice_on_a_failure(evidence: Evidence, same: Raised, later: Raised) -> str:
    """Return what to compare after an ordinary failure: of ranks at one line (``same``), and of others that raised ``later``."""
    ranks = tuple(sorted(r.rank for r, _ in same))
    if len(ranks) < len(evidence.ranks):
        who, fails = describe_ranks(ranks, evidence.job.world_size), "fails" if len(ranks) == 1 else "fail"
        # A rank that another one does not wait for goes on, and may fail at another line.
        lines = " and ".join(f"rank {r.rank} at {e.where}" for r, e in later[:2])
        where_else = f"{who} {fails} here first, {lines} later" if later else f"{who} alone {fails}"
        return f"{where_else}: look at what differs there, its data, seed or state"
    if len({(e.message.partition("\n")[0], e.chain) for _, e in same}) > 1:
        return "all ranks fail here, with different errors or values: compare them, and what the test computes"
    latest = [call for rank, error in same for call in _list_earlier_exchanges(rank, error)[-1:]]
    if not latest:
        return ""
    lines = " and ".join(dict.fromkeys(f"{c.op} at {' called at '.join(c.way[:2])}" for c in latest[:2]))
    return f"no rank differs: all fail alike, after they exchanged data (the latest: {lines}); look at what each rank gave there"


def _list_earlier_exchanges(rank: RankEvidence, error: RaisedException) -> list[Collective]:
    """Return the calls by which a rank received data of other ranks before it raised, oldest first."""
    calls = (c for c in rank.collectives if c.left > 0 and c.entered < error.time and c.size > 1)
    return [c for c in calls if c.count and not c.is_send]


def _failed_in_a_checkpoint(error: RaisedException) -> dict[int, str]:
    """Return the ranks on which a distributed checkpoint failed, with the exception of each; {} for other exceptions.

    Where one rank cannot save or load its part, torch raises on all of them.
    """
    if error.type != "CheckpointException":
        return {}
    found = {}
    for part in _OF_A_RANK.split(error.message)[1:]:
        number, _, text = part.partition(")")
        lines = [line for line in text.splitlines() if line.strip()]
        found[int(number)] = lines[-1].strip()[:200] if lines else "an exception"
    return found


def rank_gone(evidence: Evidence) -> Finding | None:
    """Find that a rank of a training under `watch` has gone, and how it ended was not observed."""
    gone = [r for r in evidence.ranks if r.gone and not r.finished and not r.exceptions]
    if not gone or evidence.was_ended_at_a_stall:
        return None
    if any(r.fatal_signal for r in gone):
        return rank_died(evidence)
    reason = f"the process of rank {gone[0].rank} is gone without an exit code: killed, or ended by os._exit"
    return make_finding(evidence, "rank_died", gone, reason, 0.8, certain=True)


def rank_exited(evidence: Evidence) -> Finding | None:
    """Find that a rank's process exited before its test ended."""
    gone = [r for r in evidence.ranks if r.exit_code is not None and not r.finished and not r.exceptions]
    if not gone:
        return None
    rank = min(gone, key=lambda r: r.exit_time)
    reason = f"rank {rank.rank} exited with code {rank.exit_code} before its test ended"
    return make_finding(evidence, "rank_exited", [rank], reason, 0.95, certain=True, facts=(exit_fact(rank),))


def rank_replaced(evidence: Evidence) -> Finding | None:
    """Find that a rank has replaced its process by another program (`os.exec`)."""
    replaced = [r for r in evidence.ranks if r.process.get("program") and not r.finished]
    if not replaced:
        return None
    rank = replaced[0]
    reason = f"rank {rank.rank} runs the program {rank.process['program']} in place of its test, by os.exec"
    where = rank.board.line if rank.board is not None else ""  # the process has no Python stack
    return make_finding(evidence, "rank_exited", [rank], reason, 0.9, where=where)


def _by_time(evidence: Evidence) -> list[tuple[RankEvidence, RaisedException]]:
    """Return the exceptions of all ranks, the earliest first."""
    return sorted(((r, e) for r in evidence.ranks for e in r.exceptions), key=lambda pair: pair[1].time)


def gave_up(evidence: Evidence) -> Finding | None:
    """Find the ranks that another one waited for until its time limit, which entered its call later, or never."""
    errors = _by_time(evidence)
    first = next(((rank, error) for rank, error in errors if _gave_up(error)), None)
    # That a connection broke may be recorded before the time limit that broke it.
    if first is None or not all(is_victim(error) for _, error in errors if error.time <= first[1].time):
        return None
    rank, time = first[0], first[1].time
    call = awaited(rank)
    if call is None or call.peer != -1:
        return None
    # A rank that is farther ahead has entered it, though its ring may no longer have it.
    passed = {
        r.rank: 0.0
        for r in evidence.ranks
        for c in r.collectives
        if c.group == call.group and c.sequence > call.sequence
    }
    entered = passed | {r.rank: c.entered for r in evidence.ranks for c in r.collectives if c.place == call.place}
    members = evidence.members(call.group)
    late = [evidence.ranks[n] for n in members if entered.get(n, time) >= time]
    if not late or len(late) == len(members):
        return None
    after = (
        f"{min(times) - time:.1f} s later"
        if (times := [entered[r.rank] for r in late if r.rank in entered])
        else "never"
    )
    who = describe_ranks(tuple(r.rank for r in late), evidence.job.world_size)
    return Finding(
        cause="straggler", ranks=tuple(r.rank for r in late), where=last_seen(late[0]),
        reason=f"rank {rank.rank} gave up {call.describe()} after {time - call.entered:.1f} s; {who} entered it {after}",
        confidence=0.7, facts=tuple(exception_fact(r, e) for r, e in errors),
    )  # fmt: skip


def _gave_up(error: RaisedException) -> bool:
    """Return whether an exception, or one that it was raised from, is torch's report of a time limit."""
    return any(_GAVE_UP.search(text) for text in (error.message, *(message for message, *_ in error.chain)))


def only_victims(evidence: Evidence) -> Finding | None:
    """Find that nothing but lost connections was reported; the earliest report is nearest to the cause."""
    errors = [(r, e) for r in evidence.ranks for e in r.exceptions]
    aborted = [r for r in evidence.ranks if r.fatal_signal]
    if not (errors or aborted) or evidence.stop == "host_died":  # what killed the host may have killed a rank as well
        return None
    if not errors:
        rank = min(aborted, key=lambda r: r.exit_time)
        reason = f"rank {rank.rank} was aborted: {rank.abort_message[:200]} (no rank is known to have exited before)"
        return make_finding(evidence, "rank_died", [rank], reason, 0.3, facts=(exit_fact(rank),))
    rank, error = min(errors, key=lambda pair: pair[1].time)
    return Finding(
        cause="rank_exception", ranks=(rank.rank,), where=error.where,
        reason=f"{error.type}: {error.headline[:200]} (the first report of a lost connection; no rank is known to have exited)",
        confidence=0.3, facts=tuple(exception_fact(r, e) for r, e in errors),
    )  # fmt: skip


def unusable(evidence: Evidence) -> Finding | None:
    """Find that the first exception is about a network that cannot be used, as the rank checked when it raised."""
    errors = _by_time(evidence)
    if not errors or not errors[0][1].network:
        return None
    first = errors[0][1]
    same = [(r, e) for r, e in errors if e.network]
    frame = Frame(first.file, first.line, first.function)
    ranks = tuple(sorted({r.rank for r, _ in same}))
    return Finding(
        cause="network_unusable", ranks=ranks, where=frame.describe() if frame.is_user else "", reason=first.network,
        certain=True, confidence=0.95,
        facts=tuple(exception_fact(r, e) for r, e in same)
        + all_facts(tuple(r for r in evidence.ranks if r.rank not in ranks)),
    )  # fmt: skip


BUSY = 50  # percent
# Functions of torch that return when the device has completed its work.
_SYNCHRONIZES = re.compile(r"/torch/(cuda|xpu|accelerator)/(__init__|streams)\.py$")


def waits_for_its_device(rank: RankEvidence) -> str:
    """Return in words that a rank waits for its GPU to complete its work; '' where nothing shows that.

    Its main thread stays in one native call: torch's `synchronize`, or a line that needs a result from the device.
    """
    stack, n = rank.stack, rank.board.numbers if rank.board is not None else {}
    if stack is None or not stack.frames or n.get("still_looks", 0.0) < STILL_LOOKS or n.get("still_moves", 0.0) > 1:
        return ""
    frame = stack.frames[0]
    by_call = frame.function == "synchronize" and bool(_SYNCHRONIZES.search(frame.file))
    busy = str(rank.gpu.get("utilization.gpu", ""))
    if not by_call:
        line = rank.sources.line(frame.file, frame.line) if frame.is_user else ""
        idle = busy.isdecimal() and int(busy) < BUSY
        if idle or "GPU" not in rank.machine or not FOR_A_DEVICE.search(line):
            return ""
    share = f" ({busy}% busy)" if busy.isdecimal() else ""
    return f"waits for its GPU{share} to complete earlier work"
