"""A rank that raised, and has come no further than its own cleanup: a ``finally``, an ``__exit__``, an ``except`` that raises.

What it is blocked in there, and what the others wait for, follow from the exception.
"""

from __future__ import annotations

from dataclasses import replace

from pytest_nsa.diagnosis.explain.source import is_unwound_at
from pytest_nsa.diagnosis.facts import all_facts
from pytest_nsa.diagnosis.rules.exits import LEAVES, MEMORY, is_victim_text
from pytest_nsa.diagnosis.verdict import Finding, describe_ranks
from pytest_nsa.evidence.source import Sources
from pytest_nsa.evidence.values import Evidence, RankEvidence

# Raised to end a generator, a loop or a task, whose cleanup is part of its work.
_ENDS = ("GeneratorExit", "StopIteration", "StopAsyncIteration", "CancelledError")


def in_cleanup(evidence: Evidence, finding: Finding) -> Finding:
    """Return the finding that ranks raised, where some are blocked while their exception unwinds; else ``finding`` itself."""
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
    reason = f"{who} raised {first.says}, and has not come further than its cleanup ({first.inside}): {finding.reason}"
    return replace(
        finding, cause=cause, ranks=culprits, where=first.at or first.inside, called_from="", module="", reason=reason,
        rule="unwinding.in_cleanup", facts=finding.facts or all_facts(evidence.ranks),
    )  # fmt: skip


def _unwinds(sources: Sources, rank: RankEvidence) -> bool:
    """Return whether a rank's own exception goes on once its cleanup is done; not where torch said that another rank has gone."""
    handled = rank.handles
    if handled is None or handled.type in _ENDS or is_victim_text(handled.says):
        return False
    return is_unwound_at(sources, handled.inside)
