"""A thread or a task of a rank that raised, and that the ranks wait for."""

from __future__ import annotations

from dataclasses import replace

from pytest_nsa.diagnosis.facts import all_facts
from pytest_nsa.diagnosis.rules.exits import MEMORY, is_victim_text, says_that_another_has_gone
from pytest_nsa.diagnosis.verdict import Finding, describe_ranks
from pytest_nsa.evidence.values import Evidence, RankEvidence


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
