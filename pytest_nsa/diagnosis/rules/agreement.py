"""What the calls that meet must agree on, where a test ended well all the same: no backend compares it, and wrong numbers arrive.

Of every operation the element type; of those that have them the reduction and the root; element counts where the operation fixes
them; of two halves of a message the type, and a buffer that the message fits into.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping

from pytest_nsa.diagnosis.explain.choose import explain
from pytest_nsa.diagnosis.facts import all_facts, rings
from pytest_nsa.diagnosis.rules.circles import has_forgotten
from pytest_nsa.diagnosis.verdict import Finding, by_ranks
from pytest_nsa.evidence.board import ANY, NEW_GROUP, Collective
from pytest_nsa.evidence.collectives import by_place, first_departure
from pytest_nsa.evidence.values import Evidence

Calls = Mapping[int, Collective]  # of one place, or the two halves of a message, by rank
# Lists of tensors in them may differ in size from rank to rank.
_UNEVEN = ("reduce_scatter", "alltoall", "allgather_coalesced", "allgather_into_tensor_coalesced")
_EVEN_AFTER_ALL = ("reduce_scatter_single", "reduce_scatter_tensor")
_BYTES = ("uint8", "int8")
_SIZES = {
    "float64": 8,
    "int64": 8,
    "complex64": 8,
    "complex128": 16,
    "float32": 4,
    "int32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int16": 2,
}


def wrong_numbers(evidence: Evidence) -> Finding | None:
    """Find a test that passed though ranks gave different types, counts or reductions to a call."""
    entered = first_departure(rings(evidence))
    if entered is not None and len({c.op for c in entered.values()}) == 1:
        found = explain(evidence, entered)
        return _found(evidence, entered, found.candidate.ranks if found is not None else tuple(sorted(entered)))
    for calls in _in_order(evidence):
        if len({_terms(c, calls) for c in calls.values()}) > 1:
            return _found(evidence, calls, _odd_ones(evidence, calls))
    for halves in _messages(evidence):
        if not _fit(*halves.values()):
            return _found(evidence, halves, _changed(evidence, halves) or tuple(sorted(halves)))
    return None


def _found(evidence: Evidence, calls: Calls, culprits: tuple[int, ...]) -> Finding:
    shown = by_ranks({r: f"in {c.describe()}" for r, c in calls.items()}, evidence.job.world_size)
    return Finding(
        cause="collective_mismatch", ranks=culprits, where=calls[culprits[0]].site,
        reason=f"the ranks exchanged numbers of different kinds, which no backend notices: {shown}",
        certain=True, confidence=0.9, facts=all_facts(evidence.ranks),
    )  # fmt: skip


def _in_order(evidence: Evidence) -> Iterator[Calls]:
    """Yield the calls of each place that all ranks of its group have entered by the same operation, in their order."""
    found = by_place({rank: [c for c in ring if c.peer == -1] for rank, ring in rings(evidence).items()})
    for place in sorted(found, key=lambda place: (place[1], place[0])):
        calls = found[place]
        first = next(iter(calls.values()))
        if first.op != NEW_GROUP and len(calls) == first.size and len({c.op for c in calls.values()}) == 1:
            yield dict(sorted(calls.items()))


def _terms(call: Collective, calls: Calls) -> tuple[object, ...]:
    """Return what must be equal on all ranks."""
    return call.dtype, call.reduction, call.root, _count(call, calls)


def _count(call: Collective, calls: Calls) -> int:
    """Return how many elements one rank has in the call; 0 where ranks may have as many as they like."""
    if call.op == "gather":  # the root's entry is the sum over its list
        is_root = calls.get(call.root) is call
        return call.count // call.size if is_root and call.count % call.size == 0 else call.count
    if call.op == "all_to_all_single" or call.op == "alltoall_base":
        return 0 if any(c.note.startswith("gives") for c in calls.values()) else call.count
    if call.op.startswith(_EVEN_AFTER_ALL):
        return call.count
    return 0 if call.op.startswith(_UNEVEN) else call.count


def _odd_ones(evidence: Evidence, calls: Calls) -> tuple[int, ...]:
    """Return the ranks that gave something else than most; else those that gave something else than before; else all of them."""
    terms = {rank: _terms(c, calls) for rank, c in calls.items()}
    (usual, most), *rest = Counter(terms.values()).most_common()
    if most > rest[0][1]:
        return tuple(rank for rank, term in terms.items() if term != usual)
    return _changed(evidence, calls) or tuple(sorted(calls))


def _changed(evidence: Evidence, calls: Calls) -> tuple[int, ...]:
    """Return the ranks that gave something else than the last time, where all others gave the same as then; else ()."""
    changed: list[int] = []
    kept: list[int] = []
    for rank, call in calls.items():
        alike = (c for c in evidence.ranks[rank].collectives if c.index < call.index)
        before = [c for c in alike if (c.op, c.group, c.peer) == (call.op, call.group, call.peer)]
        last = next((c for c in reversed(before) if c.way == call.way), before[-1] if before else None)
        if last is not None:
            given, usual = ((c.dtype, c.count, c.reduction, c.root) for c in (call, last))
            (kept if given == usual else changed).append(rank)
    return tuple(changed) if kept and len(kept) + len(changed) == len(calls) else ()


def _messages(evidence: Evidence) -> Iterator[Calls]:
    """Yield sender's and receiver's call of each message: between two ranks, in a group and of a tag, they pair in their order."""
    halves: defaultdict[tuple[object, ...], tuple[list[Collective], list[Collective]]] = defaultdict(lambda: ([], []))
    if any(map(has_forgotten, evidence.ranks)):
        return
    takers = {(r.rank, c.group) for r in evidence.ranks for c in r.collectives if c.peer == ANY}
    for rank in evidence.ranks:
        for call in (c for c in rank.collectives if c.peer >= 0):
            way = (rank.rank, call.peer) if call.is_send else (call.peer, rank.rank)
            if (way[1], call.group) not in takers:
                halves[(*way, call.group, call.note)][not call.is_send].append(call)
    for (sender, receiver, *_), (sent, taken) in halves.items():
        for one, other in zip(sent, taken, strict=False):
            yield {sender: one, receiver: other}  # type: ignore[dict-item]


def _fit(sent: Collective, taken: Collective) -> bool:
    """Return whether a message is read as what was sent. Bytes may stand for any type of as many bytes, as pickled objects do."""
    if sent.dtype == taken.dtype:
        return sent.count <= taken.count
    if not {sent.dtype, taken.dtype} & {*_BYTES}:
        return False
    sizes = [c.count * _SIZES.get(c.dtype, 1) for c in (sent, taken)]
    return sizes[0] <= sizes[1]
