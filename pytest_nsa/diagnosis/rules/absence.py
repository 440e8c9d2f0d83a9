"""Ranks that never reached what the others wait in: they ended their test, serve the next request, or nothing more is known."""

from __future__ import annotations

from collections import Counter

from pytest_nsa.diagnosis.explain import branches
from pytest_nsa.diagnosis.explain.locations import user_frames
from pytest_nsa.diagnosis.facts import STOPS, all_facts, awaited, last_seen, owning_module, rings
from pytest_nsa.diagnosis.rules.alone import skipped
from pytest_nsa.diagnosis.rules.circles import has_forgotten
from pytest_nsa.diagnosis.rules.exits import is_victim, is_victim_text
from pytest_nsa.diagnosis.rules.groups import members_of_new
from pytest_nsa.diagnosis.verdict import Finding, by_ranks, describe_ranks
from pytest_nsa.evidence.board import NEW_GROUP, Collective
from pytest_nsa.evidence.collectives import lacking
from pytest_nsa.evidence.values import Evidence, RankEvidence


def left_by_choice(evidence: Evidence) -> Finding | None:
    """Find that some ranks skipped the test, or expected it to fail, while the others went on."""
    left = {r.rank: r.xfailed or r.skipped for r in evidence.ranks if r.xfailed is not None or r.skipped is not None}
    others = [r for r in evidence.ranks if r.rank not in left]
    if not left or not others or any(not is_victim(error) for r in others for error in r.exceptions):
        return None
    if any((r.signal and not r.by_us) or r.gone or (r.exit_code and not r.finished) for r in others):
        return None  # the rank that left may have left because of it
    if any(is_victim_text(evidence.ranks[rank].left.get("after", "")) for rank in left):
        return None
    how = "expected to fail" if any(evidence.ranks[rank].xfailed is not None for rank in left) else "skipped"
    return Finding(
        cause="data_dependent_branch", ranks=tuple(left), certain=True, confidence=0.95,
        where=evidence.ranks[min(left)].left.get("where", ""),
        reason=f"{how} on some ranks only ({', '.join(map(str, left))}): {next(iter(left.values()))}",
        facts=all_facts(evidence.ranks),
    )  # fmt: skip


def left_alone(evidence: Evidence) -> Finding | None:
    """Find that some ranks ended their test well while others wait in a collective that they never entered.

    When the finished rank's process ends, the waiting ones see a closed connection: a victim's message, not a cause.
    """
    finished = [r for r in evidence.ranks if r.finished and r.passed]
    left = [r for r in evidence.ranks if r not in finished and awaited(r) is not None]
    if not finished or not left or len(finished) + len(left) < len(evidence.ranks):
        return None
    if evidence.stop == "host_died" and any(not r.is_waiting for r in left):
        return None  # the test may be under way: what is not waited for holds no rank up
    if evidence.stop == "host_died" and any(r.exit_code is None for r in finished):
        return None  # a thread of theirs may make the call yet
    if any(not is_victim(error) for rank in left for error in rank.exceptions):
        return None
    ended_ranks = tuple(r.rank for r in finished)
    waits = {r.rank: c for r in left if (c := awaited(r)) is not None}
    lacks = lacking((c for c in waits.values() if c.peer == -1), ended_ranks, rings(evidence), evidence.members)
    for_them = {rank: c for rank, c in waits.items() if c.peer == -1 and lacks[c.place]}
    if not for_them and all(c.peer == -1 for c in waits.values()):
        return None  # in groups without those that ended their tests: they wait for each other
    for_them = for_them or waits
    missed = for_them[min(for_them)]
    here = tuple(rank for rank, c in sorted(for_them.items()) if c.place == missed.place)
    culprits = tuple(sorted(lacks.get(missed.place, ()))) or ended_ranks
    if missed.op == NEW_GROUP:
        members = members_of_new(missed, evidence.job.world_size)
        culprits = tuple(rank for rank in culprits if rank in members) or culprits
    who = describe_ranks(culprits, evidence.job.world_size)
    ended = "ended its test" if len(culprits) == 1 else "ended their tests"
    if missed.op == NEW_GROUP:
        return Finding(
            cause="init_timeout",
            ranks=culprits,
            where=missed.site,
            reason=f"{who} {ended} without the group that the others wait for",
            certain=True,
            confidence=0.85,
            facts=all_facts(evidence.ranks),
        )
    if missed.is_send or missed.is_receive:
        return _unmatched(evidence, culprits, left)
    if (len(here) == 1 and _is_for_one_rank(evidence, here[0], missed)) or len(here) < len(culprits):
        who_waits = describe_ranks(here, evidence.job.world_size)
        return Finding(
            cause="extra_collective",
            ranks=here,
            where=missed.site,
            reason=f"{who_waits} entered {missed.describe()}, which {who} {ended} without",
            certain=True,
            confidence=0.8,
            facts=all_facts(evidence.ranks),
        )
    why = f"{who} {ended} without {missed.describe()}, in which the others wait ({_why_left(evidence, finished, left)})"
    return skipped(evidence, culprits, missed, why)


def _is_for_one_rank(evidence: Evidence, rank: int, call: Collective) -> bool:
    """Return whether a call, or the line of a caller, is under a condition that is true on one rank."""
    places = {call.site, *(frame.describe() for frame in user_frames(evidence.ranks[rank]))}
    return any(branches.is_for_one_rank(evidence.sources, place) for place in places)


def _unmatched(evidence: Evidence, finished: tuple[int, ...], left: list[RankEvidence]) -> Finding:
    """Find sends and receives without their other half: first those whose peer has ended its test."""
    waits = {r.rank: c for r in left if (c := awaited(r)) is not None}
    alone = {rank: c for rank, c in waits.items() if c.peer in finished} or waits
    for rank, call in alone.items():
        half = _made_fewer(evidence, rank, call) if call.peer in finished else None
        if half is not None:
            who = describe_ranks((call.peer,), evidence.job.world_size)
            waits_in = f"{describe_ranks((rank,), evidence.job.world_size)} waits in {call.describe()}"
            reason = f"{who} has made {half.describe()} less often than others have at this line, and ended its test; {waits_in}"
            return Finding(
                cause="p2p_unmatched", ranks=(call.peer,), where=half.site, called_from=next(iter(half.way[1:]), ""),
                reason=reason, certain=True, confidence=0.85, facts=all_facts(evidence.ranks),
            )  # fmt: skip
    ended = ", which ended its test without the other half"
    told = by_ranks(
        {rank: f"waits in {c.describe()}{ended if c.peer in finished else ''}" for rank, c in alone.items()},
        evidence.job.world_size,
    )
    ranks, where = tuple(sorted(alone)), alone[min(alone)].site
    peers = tuple(sorted({c.peer for c in alone.values()}))
    if len(peers) < len(ranks) and set(peers) <= set(finished):  # the fewer left, rather than that all others went on
        made = [c for c in evidence.ranks[peers[0]].collectives if c.peer in alone and not c.is_inside]
        ranks, where = peers, made[-1].site if made else where
    return Finding(
        cause="p2p_unmatched", ranks=ranks, where=where, reason=told, is_permanent=True,
        confidence=0.75, facts=all_facts(evidence.ranks),
    )  # fmt: skip


def _made_fewer(evidence: Evidence, waiter: int, call: Collective) -> Collective | None:
    """Return the latest half that the peer of a call made for the waiter, where it made fewer at that line than each other rank
    that made any, while the waiter has tried as often as another rank did at its own; else None.
    """
    if any(map(has_forgotten, evidence.ranks)):
        return None
    made = Counter((r.rank, c.site) for r in evidence.ranks for c in r.collectives if c.peer != -1)
    halves = [
        c
        for c in evidence.ranks[call.peer].collectives
        if c.peer == waiter and c.is_send != call.is_send and not c.is_inside
    ]
    if not halves:
        return None
    at_line = [n for (rank, site), n in made.items() if site == halves[-1].site and rank != call.peer]
    tried = [n for (rank, site), n in made.items() if site == call.site and rank != waiter]
    is_fewer = bool(at_line) and made[call.peer, halves[-1].site] < min(at_line)
    return halves[-1] if is_fewer and tried and made[waiter, call.site] <= max(tried) else None


def _why_left(evidence: Evidence, finished: list[RankEvidence], left: list[RankEvidence]) -> str:
    """Fewer steps than the others, and none that went otherwise: it left its loop."""
    steps = {r.rank: r.board.numbers["step"] for r in evidence.ranks if r.board is not None}
    fewer = max(steps.get(r.rank, 0.0) for r in finished) < min(steps.get(r.rank, 0.0) for r in left)
    return "it made fewer steps" if fewer else "call skipped"


def not_entered(evidence: Evidence) -> Finding | None:
    """Find that others wait in a collective that a rank never entered, and nothing more is known of its location."""
    if evidence.stop not in STOPS or not evidence.was_stalled:
        return None
    waiting = [r for r in evidence.ranks if r.is_waiting]
    absent = [r for r in evidence.ranks if not r.is_waiting]
    if not waiting or not absent:
        return None
    who = describe_ranks(tuple(r.rank for r in absent), evidence.job.world_size)
    board = waiting[0].board
    inside = board.inside[0] if board is not None and board.inside else None
    missed = inside.describe() if inside is not None else "a collective"
    return Finding(
        cause="init_timeout" if inside is not None and inside.op == NEW_GROUP else "missing_collective",
        ranks=tuple(r.rank for r in absent),
        where=last_seen(absent[0]),
        module=owning_module(absent[0]),
        reason=f"{who} never entered {missed}, in which the others wait",
        confidence=0.6,
        facts=all_facts(evidence.ranks),
    )


def left_out_of_a_request(evidence: Evidence) -> Finding | None:
    """Find the ranks that read from the process that started them, without the call that all others wait in.

    They have ended a request without it: who waits for their answer sends no other. That one of them got no request is as
    possible, and rarer, so the finding is not certain.
    """
    alive = [r for r in evidence.ranks if not r.finished]
    idle = [r for r in alive if r.process.get("reads_from_parent") and not r.is_waiting]
    waits = {r.rank: call for r in alive if r not in idle and (call := awaited(r)) is not None}
    if not idle or not waits or len(idle) + len(waits) < len(alive):
        return None
    missed = next(iter(waits.values()))
    made = all(any(c.site == missed.site and c.left > 0 for c in r.collectives) for r in idle)
    if missed.peer != -1 or not made or any(call.place != missed.place for call in waits.values()):
        return None
    n = evidence.job.world_size
    culprits = tuple(r.rank for r in idle)
    starter = f"process that started {'it' if len(idle) == 1 else 'them'}"
    reason = (
        f"{describe_ranks(culprits, n)} went on without {missed.describe()}, which earlier requests had, to read the next one from "
        f"the {starter} ({last_seen(idle[0])}); the others wait in the call"
    )
    return skipped(evidence, culprits, missed, reason, confidence=0.8, certain=False)
