"""Ranks that never reached the others' call: they ended their test, serve the next request, or nothing more is known."""

from __future__ import annotations

from collections.abc import Collection

from pytest_nsa.diagnosis.explain.edits import Calls
from pytest_nsa.diagnosis.explain.messages import END, ended
from pytest_nsa.diagnosis.facts import STOPS, all_facts, awaited, find_awaited, make_finding, rings
from pytest_nsa.diagnosis.rules.exits import have_own_errors, is_victim_text
from pytest_nsa.diagnosis.rules.groups import members_of_new
from pytest_nsa.diagnosis.rules.messages import finding_of_messages
from pytest_nsa.diagnosis.verdict import Finding, describe_ranks
from pytest_nsa.evidence.board import NEW_GROUP
from pytest_nsa.evidence.collectives import lacking
from pytest_nsa.evidence.values import Evidence, RankEvidence
from pytest_nsa.evidence.waiting import computes, is_in_engine


def left_by_choice(evidence: Evidence) -> Finding | None:
    """Find that ranks expected the test to fail, or that some of them did, or skipped it, while the others went on."""
    left = {r.rank: r.xfailed or r.skipped for r in evidence.ranks if r.xfailed is not None or r.skipped is not None}
    others = [r for r in evidence.ranks if r.rank not in left]
    expected = next((r for r in evidence.ranks if r.xfailed is not None), None)
    if expected is not None and not others:
        return Finding(
            cause="assertion", ranks=tuple(left), certain=True, confidence=0.95, where=expected.left.get("where", ""),
            reason=f"expected to fail: {expected.xfailed}", facts=all_facts(evidence.ranks),
        )  # fmt: skip
    if not left or not others or have_own_errors(others):
        return None
    if any(r.fatal_signal or r.gone or (r.exit_code and not r.finished) for r in others):
        return None  # it may be the reason why the other rank left
    if any(is_victim_text(evidence.ranks[rank].left.get("after", "")) for rank in left):
        return None
    how = "skipped" if expected is None else "expected to fail"
    return Finding(
        cause="data_dependent_branch", ranks=tuple(left), certain=True, confidence=0.95,
        where=evidence.ranks[min(left)].left.get("where", ""),
        reason=f"{how} on some ranks only ({', '.join(map(str, left))}): {next(iter(left.values()))}",
        advice="decide this from what all ranks know, so that all of them leave the test or none",
        facts=all_facts(evidence.ranks),
    )  # fmt: skip


def left_alone(evidence: Evidence) -> Finding | None:
    """Find that some ranks passed while others wait in a call that the former never entered.

    When the finished rank's process ends, the waiting ranks see a closed connection: that error is a consequence, not a
    cause.
    """
    entered = find_left_ranks(evidence)
    return None if entered is None else find_absence(evidence, entered)


def find_absence(evidence: Evidence, entered: Calls, among: Collection[int] = ()) -> Finding | None:
    """Return the finding that explains why ranks wait in ``entered`` while others ended their test without it.

    ``among``: the ranks that it may name, () for all.
    """
    missed = next((c for c in entered.values() if c.op == NEW_GROUP), None)
    if missed is None:
        return finding_of_messages(evidence, entered, among)
    n, members = evidence.job.world_size, members_of_new(missed, evidence.job.world_size)
    gone = tuple(rank for rank, c in entered.items() if c.op == END)
    culprits = tuple(rank for rank in gone if rank in members) or gone
    end = "ended its test" if len(culprits) == 1 else "ended their tests"
    return Finding(
        cause="init_timeout", ranks=culprits, where=missed.site, certain=True, confidence=0.85, facts=all_facts(evidence.ranks),
        reason=f"{describe_ranks(culprits, n)} {end} without the group that the others wait for",
    )  # fmt: skip


def find_left_ranks(evidence: Evidence) -> Calls | None:
    """Return, by rank, the call that it waits in or that it passed, where each rank does one of the two and both occur.

    A rank that lost its connection elsewhere shows nothing: DDP's reducer may wait for a call that was not recorded.
    """
    finished = [r for r in evidence.ranks if r.finished and r.passed]
    left = [r for r in evidence.ranks if r not in finished and awaited(r) is not None]
    others = [r for r in evidence.ranks if r not in finished and r not in left]
    if not finished or not left or not all(r.exceptions for r in others):
        return None
    if evidence.stop == "host_died" and any(not r.is_waiting for r in left):
        return None  # the test may be in progress: no rank waits for this one
    if evidence.stop == "host_died" and any(r.exit_code is None for r in finished):
        return None  # one of their threads may still make the call
    if have_own_errors((*left, *others)):
        return None
    waits = find_awaited(left)
    of_all = [c for c in waits.values() if c.peer == -1]
    lacks = lacking(of_all, [r.rank for r in finished], rings(evidence), evidence.members)
    if len(of_all) == len(waits) and not any(lacks.values()):
        return None  # in groups without the ranks that ended: the members wait for each other
    return waits | {r.rank: ended(r) for r in finished}


def not_entered(evidence: Evidence) -> Finding | None:
    """Find that others wait in a collective that a rank never entered, and nothing more is known of its location."""
    if evidence.stop not in STOPS or not evidence.was_stalled:
        return None
    waiting = [r for r in evidence.ranks if r.is_waiting]
    absent = [r for r in evidence.ranks if not r.is_waiting and not _may_wait_in_backward(r)]
    if not waiting or not absent:
        return None
    who = describe_ranks(tuple(r.rank for r in absent), evidence.job.world_size)
    board = waiting[0].board
    inside = board.inside[0] if board is not None and board.inside else None
    missed = inside.describe() if inside is not None else "a collective"
    cause = "init_timeout" if inside is not None and inside.op == NEW_GROUP else "missing_collective"
    return make_finding(evidence, cause, absent, f"{who} never entered {missed}, in which the others wait", 0.6)


def _may_wait_in_backward(rank: RankEvidence) -> bool:
    """Return whether a rank is idle in a backward: it may wait in a reduction that was not recorded."""
    return rank.stack is not None and is_in_engine(rank.stack.frames) and not computes(rank.process)
