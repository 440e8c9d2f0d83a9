"""Exceptions behind which other ranks wait: of a rank that is blocked in its cleanup, of a thread, or of a task."""

from __future__ import annotations

from dataclasses import replace

from pytest_nsa.diagnosis.explain.source import is_unwinding_line
from pytest_nsa.diagnosis.facts import all_facts
from pytest_nsa.diagnosis.rules.exits import LEAVES, MEMORY, is_victim_text, reports_a_lost_peer
from pytest_nsa.diagnosis.verdict import Finding, describe_ranks
from pytest_nsa.evidence.source import Sources
from pytest_nsa.evidence.values import Evidence, RankEvidence

# Raised to end a generator, a loop or a task: its cleanup is part of its work.
_ENDS = ("GeneratorExit", "StopIteration", "StopAsyncIteration", "CancelledError")


def in_cleanup(evidence: Evidence, finding: Finding) -> Finding:
    """Return the finding that ranks raised, where some are blocked while their exception unwinds; else ``finding``."""
    found = [r for r in evidence.ranks if not r.finished and not r.exceptions and _unwinds(evidence.sources, r)]
    alive = [r for r in evidence.ranks if not r.finished]
    if not found or len(found) == len(alive) > 1 or evidence.moved_at_stop or not evidence.was_stalled:
        return finding
    first = found[0].handles
    assert first is not None
    culprits = tuple(r.rank for r in found if r.handles is not None and r.handles.at == first.at)
    kind = first.type.rpartition(".")[2]
    cause = "rank_exited" if kind in LEAVES else "oom" if kind in MEMORY else "rank_exception"
    who = describe_ranks(culprits, evidence.job.world_size)
    reason = f"{who} raised {first.text}, and is blocked in its cleanup ({first.inside}): {finding.reason}"
    return replace(
        finding, cause=cause, ranks=culprits, where=first.at or first.inside, called_from="", module="", reason=reason,
        rule="unwinding.in_cleanup", facts=finding.facts or all_facts(evidence.ranks),
    )  # fmt: skip


def _unwinds(sources: Sources, rank: RankEvidence) -> bool:
    """Return whether a rank's own exception propagates after its cleanup; false where torch reported that another rank
    has gone.
    """
    handled = rank.handles
    if handled is None or handled.type in _ENDS or is_victim_text(handled.text):
        return False
    return is_unwinding_line(sources, handled.inside)


def raised_in_a_thread(evidence: Evidence, finding: Finding) -> Finding:
    """Return the finding that a thread or a task of the awaited ranks raised and its exception was never retrieved;
    else ``finding``.
    """
    found = {rank: error for rank in finding.ranks if (error := _first_error(evidence.ranks[rank])) is not None}
    if not found or (len(found) < len(finding.ranks) and finding.certain):
        return finding
    owner, kind, text, where = found[min(found)]
    culprits = tuple(rank for rank, error in found.items() if error[3] == where)
    who = describe_ranks(culprits, evidence.job.world_size)
    return replace(
        finding, cause="oom" if kind in MEMORY else "rank_exception", ranks=culprits, where=where or finding.where,
        called_from="", module="", rule="unwinding.raised_in_a_thread", facts=finding.facts or all_facts(evidence.ranks),
        reason=f"{owner} of {who} raised {text}, and it was never retrieved: {finding.reason}",
    )  # fmt: skip


def _first_error(rank: RankEvidence) -> tuple[str, str, str, str] | None:
    """Return (thread or task, type, message, location) of the first exception of a thread or a task that is not a
    consequence; None without one.
    """
    errors = [
        (e.owner, e.type, f"{e.type}: {e.headline}", e.where)
        for e in rank.thread_errors
        if not reports_a_lost_peer(e.message, e.raised_in)
    ]
    failed = rank.loop.failed if rank.loop is not None else ()
    errors += [("an asyncio task", text.partition(":")[0], text, at) for text, at in failed if not is_victim_text(text)]
    return errors[0] if errors else None
