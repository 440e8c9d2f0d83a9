"""Payloads that do not match: element types, counts, reductions and roots."""

from __future__ import annotations

import re
import signal
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace

from pytest_nsa.diagnosis.explain.choose import explain
from pytest_nsa.diagnosis.facts import (
    all_facts,
    awaited,
    exception_fact,
    find_awaited,
    has_lost_calls,
    last_seen,
    rings,
)
from pytest_nsa.diagnosis.rules.calls import explain_calls
from pytest_nsa.diagnosis.rules.exits import deaths, have_own_errors
from pytest_nsa.diagnosis.verdict import Finding, by_ranks
from pytest_nsa.evidence.board import ANY, NEW_GROUP, Collective
from pytest_nsa.evidence.collectives import Rings, first_departure, in_sequence
from pytest_nsa.evidence.values import Evidence, RankEvidence

_SPLITS = re.compile(r"gives (\d+(?:,\d+)*) takes (\d+(?:,\d+)*)$")
_PARAMETERS = re.compile(r"(?i)rank (\d+) has (?:inconsistent )?(\d+) params")  # of torch's message
_ANOTHER_SIZE = "Received data size doesn't match expected size"  # gloo's message
NOTE = 96  # bytes of a note on the board, where a longer one is cut


def received_another_size(evidence: Evidence) -> Finding | None:
    """Find that gloo received a message of another size than a call expects, though the recorded calls agree."""
    rank = next(iter(deaths(evidence)), None)
    if rank is None or _ANOTHER_SIZE not in rank.abort_message:
        return None
    call = awaited(rank)
    at = f" in {call.describe()}" if call is not None else ""
    reason = f"gloo aborted rank {rank.rank}{at}: it received a message of another size than the call expects, "
    reason += "although the recorded calls agree"
    return Finding(
        cause="collective_mismatch", reason=reason, confidence=0.6, facts=all_facts(evidence.ranks),
        ranks=evidence.members(call.process_group) if call is not None else tuple(r.rank for r in evidence.ranks),
        where=call.site if call is not None else last_seen(rank),
        advice="look for calls that are not recorded: of a backend's object, or in C++",
    )  # fmt: skip


def aborted(evidence: Evidence) -> Finding | None:
    """Find that gloo aborted a rank in a receive, because the sender gave something else."""
    if evidence.job.backend not in ("", "gloo"):  # NCCL's watchdog aborts waiting ranks, too
        return None
    for rank in evidence.ranks:
        at = awaited(rank)
        if rank.fatal_signal != signal.SIGABRT or at is None:
            continue
        if at.is_receive and 0 <= at.peer < len(evidence.ranks):
            other = _unexpected_size(evidence, rank, at)
            if other is not None:
                return other
    return None


def aborted_in_different_calls(evidence: Evidence) -> Finding | None:
    """Find that gloo aborted ranks in a group's call while others are in a call that DDP makes by itself, which is
    counted separately.
    """
    ended = [r for r in evidence.ranks if r.fatal_signal == signal.SIGABRT]
    if not ended or have_own_errors(evidence.ranks):
        return None
    waits = find_awaited(evidence.ranks)
    groups, process_groups = {c.group for c in waits.values()}, {c.process_group for c in waits.values()}
    if len(waits) < len(evidence.ranks) or len(groups) != 2 or len(process_groups) != 1:
        return None
    return explain_calls(evidence, waits)


def _unexpected_size(evidence: Evidence, rank: RankEvidence, at: Collective) -> Finding | None:
    """Find that a rank receives a message of another size or type than it expects."""
    for calls in _messages(evidence):
        mine, sent = calls.get(rank.rank), calls.get(at.peer)
        if mine is None or sent is None or mine.index != at.index or mine.shape[2:4] == sent.shape[2:4]:
            continue
        reason = f"gloo aborted rank {rank.rank} in {at.describe()}: rank {at.peer} was in {sent.describe()}"
        return replace(_differing(evidence, calls, _odd_end(evidence, calls)), reason=reason, certain=False)
    return None


def models_differ(evidence: Evidence) -> Finding | None:
    """Find the ranks that gave DDP a model with another number of parameters than most ranks, as torch states on each rank."""
    counts: dict[int, int] = {}
    raised = [(rank, error) for rank in evidence.ranks for error in rank.exceptions]
    for _, error in raised:
        for rank, number in _PARAMETERS.findall(error.message):
            counts[int(rank)] = int(number)
    (usual, most), *others = Counter(counts.values()).most_common() or [(0, 0)]
    if not others:
        return None
    is_tie = most == others[0][1]
    culprits = tuple(sorted(rank for rank, number in counts.items() if is_tie or number != usual))
    where = next((e.where for rank, e in raised if rank.rank in culprits), raised[0][1].where)
    shown = by_ranks(
        {rank: f"gave DDP a model of {number} parameters" for rank, number in sorted(counts.items())},
        evidence.job.world_size,
    )
    return Finding(
        cause="collective_mismatch", ranks=culprits, where=where, reason=f"the models differ: {shown}",
        certain=not is_tie, confidence=0.9, facts=tuple(exception_fact(rank, e) for rank, e in raised),
    )  # fmt: skip


def splits_differ(evidence: Evidence) -> Finding | None:
    """Find an all-to-all exchange in which a rank gives another more, or fewer, rows than that rank takes."""
    calls: dict[tuple[str, int], dict[int, Collective]] = {}
    for rank, ring in rings(evidence).items():
        for call in ring:
            if _SPLITS.match(call.note):
                calls.setdefault(call.place, {})[rank] = call
    for (group, _), entered in sorted(calls.items(), key=lambda item: min(c.entered for c in item[1].values())):
        wrong = list(_wrong_splits(evidence.members(group), {rank: _splits(c.note) for rank, c in entered.items()}))
        if not wrong:
            continue
        counts = Counter(rank for giver, taker, _, _ in wrong for rank in (giver, taker))
        # The ranks in most of the pairs; among equals, those with the rarest split.
        alike = Counter(c.note for c in entered.values())
        blamed = {rank: (count, -alike[entered[rank].note]) for rank, count in counts.items()}
        culprits = tuple(sorted(rank for rank, by in blamed.items() if by == max(blamed.values())))
        shown = "; ".join(
            f"rank {giver} gives {gives} to rank {taker}, which takes {takes}"
            for giver, taker, gives, takes in wrong[:4]
        )
        call = entered[culprits[0]]
        return Finding(
            cause="collective_mismatch", ranks=culprits, where=call.site,
            reason=f"the split sizes of {call.op} #{call.sequence} do not agree: {shown} (rows)",
            certain=len(culprits) == 1, confidence=0.9, facts=all_facts(evidence.ranks),
        )  # fmt: skip
    return None


def _splits(note: str) -> tuple[list[int], list[int]]:
    """Return the rows that go to each rank of the group, and the rows that come from each; empty where the note was
    cut.
    """
    found = _SPLITS.match(note) if len(note) < NOTE else None
    return ([*map(int, found[1].split(","))], [*map(int, found[2].split(","))]) if found is not None else ([], [])


def _wrong_splits(
    members: tuple[int, ...], splits: dict[int, tuple[list[int], list[int]]]
) -> Iterator[tuple[int, int, int, int]]:
    """Yield giver, taker, rows given and rows taken, where the two numbers differ."""
    n = len(members)
    for i, giver in enumerate(members):
        for j, taker in enumerate(members):
            gives, takes = splits.get(giver, ([], []))[0], splits.get(taker, ([], []))[1]
            if len(gives) == len(takes) == n and gives[j] != takes[i]:
                yield giver, taker, gives[j], takes[i]


Calls = Mapping[int, Collective]  # by rank, the calls of one place or of one message
# Their lists of tensors, or rows, may differ in size between ranks.
_UNEVEN = (
    "reduce_scatter",
    "alltoall",
    "all_to_all",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "all_gather_single_coalesced",
)
_EVEN = ("reduce_scatter_single", "reduce_scatter_tensor")
_BYTES = ("uint8", "int8")
_SIZES = {  # in bytes; 1 where a type is not listed
    "float64": 8, "int64": 8, "complex64": 8, "complex128": 16, "float32": 4, "int32": 4, "float16": 2, "bfloat16": 2, "int16": 2,
}  # fmt: skip


def wrong_numbers(evidence: Evidence) -> Finding | None:
    """Find that ranks gave different types, counts or reductions to a call that ended, though the test passed."""
    made = rings(evidence)
    ended = {c.place for ring in made.values() for c in ring if c.left > 0}
    made = {rank: tuple(c for c in ring if c.place in ended) for rank, ring in made.items()}
    entered = first_departure(made)
    if entered is not None and len({c.op for c in entered.values()}) == 1:
        found = explain(evidence, entered)
        if found is not None:
            finding = _differing(evidence, entered, found.candidate.ranks)
            return replace(finding, certain=found.is_certain, confidence=round(found.probability, 2))
    for calls in _in_order(made):
        if len({_terms(c, calls) for c in calls.values()}) > 1:
            return _differing(evidence, calls, _odd_ones(evidence, calls))
    for calls in _messages(evidence):
        if not _fit(*calls.values()):
            return _differing(evidence, calls, _odd_end(evidence, calls))
    return None


def _differing(evidence: Evidence, calls: Calls, culprits: tuple[int, ...]) -> Finding:
    """Return the finding that ranks gave different arguments to one exchange; not certain where all are named."""
    shown = by_ranks({r: f"in {c.describe()}" for r, c in calls.items()}, evidence.job.world_size)
    return Finding(
        cause="collective_mismatch", ranks=culprits, where=calls[culprits[0]].site,
        reason=f"the ranks gave different arguments, which no backend notices: {shown}",
        certain=len(culprits) < len(calls), confidence=0.9, facts=all_facts(evidence.ranks),
    )  # fmt: skip


def _in_order(made: Rings) -> Iterator[Calls]:
    """Yield, in their order, the calls of each place that all ranks of a group entered by the same operation."""
    for calls in in_sequence(made):
        first = next(iter(calls.values()))
        if first.op != NEW_GROUP and len(calls) == first.size and len({c.op for c in calls.values()}) == 1:
            yield calls


def _terms(call: Collective, calls: Calls) -> tuple[object, ...]:
    """Return the properties of a call that must be equal on all ranks."""
    return call.dtype, call.reduction, call.root, _count(call, calls)


def _count(call: Collective, calls: Calls) -> int:
    """Return the number of elements that one rank has in the call; 0 where ranks are free to choose it."""
    if call.op == "gather":  # the root's entry is the sum over its list
        is_root = calls.get(call.root) is call
        return call.count // call.size if is_root and call.count % call.size == 0 else call.count
    if call.op == "all_to_all_single" or call.op == "alltoall_base":
        return 0 if any(c.note.startswith("gives") for c in calls.values()) else call.count
    if call.op.startswith(_EVEN):
        return call.count
    return 0 if call.op.startswith(_UNEVEN) else call.count


def _odd_ones(evidence: Evidence, calls: Calls) -> tuple[int, ...]:
    """Return the ranks that gave something else than most; else those that gave something else than before; else all."""
    terms = {rank: _terms(c, calls) for rank, c in calls.items()}
    (usual, most), *rest = Counter(terms.values()).most_common()
    if most > rest[0][1]:
        return tuple(sorted(rank for rank, term in terms.items() if term != usual))
    return _changed(evidence, calls) or tuple(sorted(calls))


def _odd_end(evidence: Evidence, calls: Calls) -> tuple[int, ...]:
    """Return the rank of a message that carries another payload than all other messages at its line, where the other's line
    has no other payload; else both ranks.
    """
    odd: list[int] = []
    usual: list[int] = []
    for rank, call in calls.items():
        alike = {
            (c.dtype, c.count) for r in evidence.ranks for c in r.collectives if c.lines == call.lines and c is not call
        }
        (usual if alike <= {(call.dtype, call.count)} else odd).append(rank)
    return tuple(odd) if len(odd) == 1 and usual else tuple(sorted(calls))


def _changed(evidence: Evidence, calls: Calls) -> tuple[int, ...]:
    """Return the ranks that gave something else than at the last call, where all others gave the same as then; else ()."""
    changed: list[int] = []
    kept: list[int] = []
    for rank, call in calls.items():
        alike = (c for c in evidence.ranks[rank].collectives if c.index < call.index)
        before = [c for c in alike if (c.op, c.group, c.peer) == (call.op, call.group, call.peer)]
        last = next((c for c in reversed(before) if c.lines == call.lines), before[-1] if before else None)
        if last is not None:
            given, usual = ((c.dtype, c.count, c.reduction, c.root) for c in (call, last))
            (kept if given == usual else changed).append(rank)
    return tuple(changed) if kept and len(kept) + len(changed) == len(calls) else ()


def _messages(evidence: Evidence) -> Iterator[Calls]:
    """Yield the sender's and the receiver's call of each message. Messages between two ranks, in one group and with one
    tag, pair in their order.
    """
    queues: defaultdict[tuple[object, ...], tuple[list[Collective], list[Collective]]] = defaultdict(lambda: ([], []))
    if has_lost_calls(evidence):
        return
    takers = {(r.rank, c.group) for r in evidence.ranks for c in r.collectives if c.peer == ANY}
    for rank in evidence.ranks:
        for call in (c for c in rank.collectives if c.peer >= 0):
            way = (rank.rank, call.peer) if call.is_send else (call.peer, rank.rank)
            if (way[1], call.group) not in takers:
                queues[(*way, call.group, call.note)][not call.is_send].append(call)
    for (sender, receiver, *_), (sent, taken) in queues.items():
        for one, other in zip(sent, taken, strict=False):
            yield {sender: one, receiver: other}  # type: ignore[dict-item]


def _fit(sent: Collective, taken: Collective) -> bool:
    """Return whether a receive reads a message as it was sent. Bytes may hold any type of the same size, as pickled
    objects do.
    """
    if sent.dtype == taken.dtype:
        return sent.count <= taken.count
    if not {sent.dtype, taken.dtype} & {*_BYTES}:
        return False
    sizes = [c.count * _SIZES.get(c.dtype, 1) for c in (sent, taken)]
    return sizes[0] <= sizes[1]
