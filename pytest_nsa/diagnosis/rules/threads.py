"""Threads beside the main one: two that call in one group, of which chance decides which comes first; one that raised, and whose
part the ranks wait for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from pytest_nsa.diagnosis.facts import all_facts
from pytest_nsa.diagnosis.rules.exits import MEMORY, is_victim_text, says_that_another_has_gone
from pytest_nsa.diagnosis.rules.locations import parts_of
from pytest_nsa.diagnosis.verdict import Finding, describe_ranks
from pytest_nsa.evidence.board import Collective
from pytest_nsa.evidence.values import Evidence, RankEvidence


def raced(evidence: Evidence, culprits: tuple[int, ...], entered: Mapping[int, Collective]) -> bool:
    """Return whether a thread beside the main one makes the call of each rank of one side, the culprits or the others, and those
    of the other side have that thread as well, in another call of one group: they would have made the call later. ``entered`` has
    the calls, where they are known; else they are those that ranks are inside of.
    """
    one = [evidence.ranks[rank] for rank in culprits]
    others = [r for r in evidence.ranks if r.rank not in culprits and (r.rank in entered or not r.finished)]
    calls = {
        r.rank: (entered[r.rank],) if r.rank in entered else r.board.inside if r.board is not None else ()
        for r in (*one, *others)
    }
    if not one or not others or not set.intersection(*({c.group for c in made} for made in calls.values())):
        return False
    return _come_later(one, others, calls) or _come_later(others, one, calls)


def _come_later(
    ranks: list[RankEvidence], others: list[RankEvidence], calls: Mapping[int, tuple[Collective, ...]]
) -> bool:
    """Return whether a thread beside the main one makes the call of each of ``ranks``, and the others have that thread as well
    and are in another call.
    """
    if not all(_functions_of(calls[r.rank]) & _functions_beside(r) for r in ranks):
        return False
    functions = _functions_of(calls[ranks[0].rank])
    return all(
        (theirs := functions & _functions_beside(r)) and not theirs & _functions_of(calls[r.rank]) for r in others
    )


def _functions_of(calls: tuple[Collective, ...]) -> set[tuple[str, str]]:
    """Return the functions, by file and name, that have made calls."""
    return {(file, function) for file, _, function in (parts_of(call.site) for call in calls)}


def _functions_beside(rank: RankEvidence) -> set[tuple[str, str]]:
    """Return the user's functions, by file and name, that a rank's threads beside the main one are in, were in when the test
    raised, or raised in.
    """
    frames = [f for stack in (*rank.threads, *rank.fatal) if not stack.is_main for f in stack.frames if f.is_user]
    told = [*(place for e in rank.exceptions for place in e.beside), *(e.where for e in rank.thread_errors if e.where)]
    return {(f.file, f.function) for f in frames} | {
        (file, function) for file, _, function in (parts_of(place) for place in told)
    }


def raised_beside(evidence: Evidence, finding: Finding) -> Finding:
    """Return the finding that a thread or a task of the ranks that hold the others up raised, and its exception was never
    retrieved; else ``finding`` itself.
    """
    found = {rank: error for rank in finding.ranks if (error := _first_error(evidence.ranks[rank])) is not None}
    if not found or (len(found) < len(finding.ranks) and finding.certain):
        return finding
    whose, kind, says, where = found[min(found)]
    culprits = tuple(rank for rank, error in found.items() if error[3] == where)
    who = describe_ranks(culprits, evidence.job.world_size)
    return replace(
        finding, cause="oom" if kind in MEMORY else "rank_exception", ranks=culprits, where=where or finding.where,
        called_from="", module="", rule="threads.raised_beside", facts=finding.facts or all_facts(evidence.ranks),
        reason=f"{whose} of {who} raised {says}, and it was never retrieved: {finding.reason}",
    )  # fmt: skip


def _first_error(rank: RankEvidence) -> tuple[str, str, str, str] | None:
    """Return (whose, type, in words, where) of the first exception of a thread or a task that is no consequence; None for none."""
    errors = [
        (e.whose, e.type, f"{e.type}: {e.headline}", e.where)
        for e in rank.thread_errors
        if not says_that_another_has_gone(e.message, e.raised_in)
    ]
    failed = rank.loop.failed if rank.loop is not None else ()
    errors += [("an asyncio task", says.partition(":")[0], says, at) for says, at in failed if not is_victim_text(says)]
    return errors[0] if errors else None
