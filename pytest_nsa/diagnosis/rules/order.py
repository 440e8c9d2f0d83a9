"""The order of collectives: where ranks' sequences depart, and which rank departs."""

from __future__ import annotations

import itertools
from collections import Counter

from pytest_nsa.diagnosis.facts import all_facts, awaited, last_seen
from pytest_nsa.diagnosis.rules import conditions, source
from pytest_nsa.diagnosis.rules.alone import extra, of_a_shift, of_rounds, skipped
from pytest_nsa.diagnosis.rules.blame import blame, by_program, calls_before, has_left_loop, rings, went_ahead
from pytest_nsa.diagnosis.rules.conditions import are_alternatives
from pytest_nsa.diagnosis.rules.counters import alike, is_before
from pytest_nsa.diagnosis.rules.departures import ENDS_A_JOIN, expected_next
from pytest_nsa.diagnosis.rules.exits import is_victim
from pytest_nsa.diagnosis.rules.following import aligned, swapped
from pytest_nsa.diagnosis.rules.hooks import without_hook
from pytest_nsa.diagnosis.rules.locations import comes_first, user_frames, where_they_part
from pytest_nsa.diagnosis.rules.memberships import of_other_members
from pytest_nsa.diagnosis.rules.origins import Origin, origin_of
from pytest_nsa.diagnosis.rules.reasons import explained, ran_out
from pytest_nsa.diagnosis.rules.rounds import out_of_their_round
from pytest_nsa.diagnosis.rules.shifts import (
    left_out,
    missed_by_comparison,
    parted_before,
    unlike_the_others,
)
from pytest_nsa.diagnosis.verdict import Fact, Finding, by_ranks, describe_ranks
from pytest_nsa.evidence.board import DEFAULT_GROUPS, NEW_GROUP, Collective
from pytest_nsa.evidence.collectives import any_can_complete, by_place, deadlocked, first_departure, waited_for
from pytest_nsa.evidence.values import Evidence, RankEvidence

_OF_SKIPPED = ("skipped_collective", "data_dependent_branch", "hook_deadlock")  # what a skipped call may be
STOPS = ("departed", "certain", "deadline", "hang_after", "host_died")


def departed(evidence: Evidence) -> Finding | None:
    """Find that two ranks entered different collectives at the same place of their group's sequence."""
    calls = rings(evidence)
    entered = first_departure(calls)
    if entered is not None and (
        clashing := of_other_members(evidence)
    ):  # who is in such a group's call has met no other there
        entered = first_departure({r: tuple(c for c in ring if c.group not in clashing) for r, ring in calls.items()})
    if entered is None or _raised_before(evidence, entered):
        return None
    shift = of_a_shift(evidence)
    if shift is not None:
        return shift
    earlier = of_an_earlier_call(evidence, entered)
    if earlier is not None:
        return earlier
    blamed = swapped(evidence, entered) or aligned(evidence, entered) or blame(evidence, entered)
    alone = tuple(r for r in sorted(entered) if r not in blamed[0])
    made_more = {"skipped_collective": alone, "collective_mismatch": blamed[0]}.get(blamed[1], ())
    if made_more and _is_for_them_alone(evidence, entered, made_more):
        return extra(evidence, made_more, entered[made_more[0]], "under a condition that is true on one rank")
    culprits, cause, why = explained(evidence, *blamed, entered)
    why += ran_out(evidence, culprits, cause)
    facts = tuple(
        Fact(
            rank=r,
            kind="collective",
            file=f"rank{r}/board.bin",
            says=f"entered {c.describe()} in step {c.step}",
        )
        for r, c in sorted(entered.items())
    )
    first = entered[culprits[0]] if culprits else next(iter(entered.values()))
    others = next((c for r, c in entered.items() if r not in culprits), first)
    left = Origin(first.site)
    if "skipped_collective" in (cause, blamed[1]) and cause in _OF_SKIPPED:
        # For a call that was skipped, the line to look at is the call that the others are in.
        left = origin_of(evidence, culprits, others)
        if ENDS_A_JOIN in why and (own := _last_of_their_own(evidence, entered, culprits)) is not None:
            left = Origin(own.site, since=f"; the others' own call is the {own.op} at {own.site}")
        why += left.since
    return Finding(
        cause=cause,
        ranks=culprits,
        where=left.where,
        called_from=left.called_from,
        reason=why,
        module="",
        certain=True,
        confidence=0.9 if len(culprits) < len(entered) else 0.6,
        facts=facts + all_facts(evidence.ranks),
    )


def _last_of_their_own(
    evidence: Evidence, entered: dict[int, Collective], culprits: tuple[int, ...]
) -> Collective | None:
    """Return the last call that the others made in their own code, and not in a forward or a backward of DDP's."""
    rank = next((r for r in sorted(entered) if r not in culprits), None)
    calls = evidence.ranks[rank].collectives if rank is not None else ()
    return next((c for c in reversed(calls) if c.phase == "body" and c.op != NEW_GROUP), None)


def of_an_earlier_call(evidence: Evidence, entered: dict[int, Collective]) -> Finding | None:
    """Find that some ranks left a call out before, or at, the one in which ranks differ, and met the others in it all the same."""
    found = parted_before(evidence, entered)
    if found is None:
        return None
    ranks, missed, made = found
    who = describe_ranks(ranks, evidence.job.world_size)
    why = f"{who} went on without {missed.describe()}, and met the others in it by {made.describe()} (call skipped)"
    return skipped(evidence, ranks, missed, why)


def met_another_call(evidence: Evidence) -> Finding | None:
    """Find that ranks met in two calls that are alike, and one of them raised, or was ended, over what it got from the other."""
    ends = [e.time for r in evidence.ranks for e in r.exceptions if not is_victim(e)]
    ends += [r.exit_time for r in evidence.ranks if r.signal and not r.by_us]
    if not ends:
        return None
    calls = {r: [c for c in ring if c.peer == -1 and c.entered < min(ends)] for r, ring in rings(evidence).items()}
    latest = {place: found for place, found in by_place(calls).items() if len(found) == len(evidence.members(place[0]))}
    for group in sorted({place[0] for place in latest}):
        place = max(p for p in latest if p[0] == group)
        found = (
            of_an_earlier_call(evidence, latest[place]) if len({c.shape for c in latest[place].values()}) == 1 else None
        )
        if found is not None:
            return found
    return None


def _raised_before(evidence: Evidence, entered: dict[int, Collective]) -> bool:
    """Return whether a rank had raised by itself when it entered what differs: its teardown's calls are a consequence."""
    return any(
        error.time < c.entered and not is_victim(error)
        for rank, c in entered.items()
        for error in evidence.ranks[rank].exceptions
    )


def waiting_apart(evidence: Evidence) -> Finding | None:
    """Find that every rank waits, and not in the same collective: the one that is ahead went on without the one behind it."""
    if evidence.stop not in (*STOPS, "left_alone") or not evidence.was_stalled:
        return None
    alive = [r for r in evidence.ranks if not r.finished]
    found = {r.rank: c for r in alive if (c := awaited(r)) is not None}
    entered = rings(evidence)
    if any(not r.is_waiting for r in alive):
        # Whatever these ranks do: they are left out where the others wait for each other alone.
        found = deadlocked(
            {r.rank: found[r.rank] for r in alive if r.is_waiting and r.rank in found}, entered, evidence.members
        )
        alive = [r for r in alive if r.rank in found]
    if len(alive) < 2 or not found:
        return None
    if len(found) < len(alive):
        return _ahead_in_unseen_wait(evidence, alive, found)
    if len({c.place for c in found.values()}) < 2 or any(c.peer != -1 for c in found.values()):
        return None
    if any_can_complete(found.values(), entered):
        return None
    finding = found_apart(evidence, found)
    awaited_by_some = waited_for(found, entered, evidence.members)
    if finding is not None and not awaited_by_some & set(finding.ranks) and 2 <= len(awaited_by_some) < len(found):
        # A rank that no other rank waits for is not what holds them up.
        finding = found_apart(evidence, {rank: c for rank, c in found.items() if rank in awaited_by_some}) or finding
    return finding


def found_apart(evidence: Evidence, found: dict[int, Collective]) -> Finding | None:
    """Find which of the ranks that wait in ``found`` holds the others up, or that they are in a circle."""
    facts = all_facts(evidence.ranks)
    in_steps = any(c.step for c in found.values())
    shown = by_ranks(
        {r: f"in {c.describe()}" + (f" in step {c.step}" if in_steps else "") for r, c in found.items()},
        evidence.job.world_size,
    )
    crossed = len({c.process_group for c in found.values()}) > 1
    if crossed:
        shown += _members(evidence, found)
    shift = of_a_shift(evidence)
    if shift is not None:
        return shift
    # The reducer does not name its group: 'ddp' may be any.
    is_one_group = len({c.process_group for c in found.values()} - {"ddp"}) == 1
    found_by_program = by_program(evidence, found) if is_one_group else None
    if found_by_program is not None:
        ranks, cause, why = found_by_program
        made = extra if cause == "extra_collective" else skipped
        missed = found[ranks[0]] if cause == "extra_collective" else next(c for r, c in found.items() if r not in ranks)
        return made(evidence, ranks, missed, f"{why}: {shown}")
    # What DDP does by itself is counted apart, so that it does not depart from what the others call.
    by_itself = len({c.group for c in found.values()}) > 1
    behind_all = _of_the_last(evidence, found, shown) if by_itself else None
    if behind_all is not None:
        return behind_all
    omitted = left_out(evidence, found) if crossed else None
    if omitted is not None:
        who = describe_ranks(omitted[0], evidence.job.world_size)
        why = f"{who} left {omitted[1].describe()} out, in which another rank waits (call skipped): {shown}"
        return skipped(evidence, *omitted, why)
    compared = missed_by_comparison(evidence, found) if crossed else None
    if compared is not None:
        who = describe_ranks(compared[0], evidence.job.world_size)
        why = f"{who} went on without {compared[1].describe()}, which other ranks made before the call that they are in, too"
        return skipped(evidence, *compared, f"{why} (call skipped): {shown}")
    is_choice = crossed and _chose_otherwise(evidence, found)
    by_rounds = of_rounds(evidence, out_of_their_round(evidence, found), shown) if crossed and not is_choice else None
    if by_rounds is not None:
        return by_rounds
    # Who takes the groups in another order than so far is known by its own calls.
    departing = _departs_over_groups(evidence, found) if crossed else ()
    apart = departing or (_minority(found) if crossed else ())
    unhooked = without_hook(evidence, apart, found)
    # Where most are in no hook, it is the few who made one call more.
    if unhooked is not None and 2 * len(apart) > len(found):
        hooked = tuple(r for r in sorted(found) if r not in apart)
        return extra(evidence, hooked, unhooked, f"which the others went on without: {shown}")
    if unhooked is not None:
        who = describe_ranks(apart, evidence.job.world_size)
        why = f"{who} went on without {unhooked.describe()}, which the others make in a gradient hook (call skipped): {shown}"
        return skipped(evidence, apart, unhooked, why)
    if 2 * len(departing) > len(found):  # the program itself has changed the order: none of them is another's victim
        departing = tuple(sorted(found)) if len({c.place for c in found.values()}) == len(found) else departing
    if departing and len(departing) < len(found) and _have_gone_past(evidence, departing, found):
        ahead = departing
    else:
        ahead = () if departing or is_choice else went_ahead(evidence, found)
    if not ahead:
        ranks = departing or (
            (unlike_the_others(evidence, found) or _minority(found)) if crossed else tuple(sorted(found))
        )
        return Finding(
            cause="group_order_deadlock" if crossed else "collective_mismatch", ranks=ranks,
            where=found[ranks[0]].site, reason=f"the ranks wait in different collectives: {shown}", certain=True,
            confidence=0.85 if crossed else 0.6, facts=facts,
        )  # fmt: skip
    behind = tuple(r for r in sorted(found) if r not in ahead)
    has_left = all(has_left_loop(evidence, found, r, behind[0]) for r in ahead) if behind else False
    # Only members of a group that others wait in can have gone on without its call.
    members = {member for r in behind for member in evidence.members(found[r].process_group)}
    ahead = tuple(r for r in ahead if r in members) or ahead
    is_for_them = any(is_for_one_rank(evidence, r, found[r]) for r in behind)
    is_theirs_alone = _is_for_them_alone(evidence, found, behind)
    if is_theirs_alone or (not has_left and (len(behind) < len(ahead) or is_for_them)):
        return extra(evidence, behind, found[behind[0]], f"which the others went on without: {shown}")
    missed = next(c for r, c in sorted(found.items()) if r not in ahead)
    who = describe_ranks(ahead, evidence.job.world_size)
    why = f"{who} went on without {missed.describe()}, in which the others wait (call skipped): {shown}"
    return skipped(evidence, ahead, missed, why)


def _of_the_last(evidence: Evidence, found: dict[int, Collective], shown: str) -> Finding | None:
    """Find by the loops' counters that all others have gone past the call in which the last ranks wait: these made it alone, where
    they are fewer than the other members of its group, or no rank has made one like it before; else those left it out. So they
    did where its group is the one that the program has made and not called in yet: it was made for calls.
    """
    kinds = alike(evidence, found, sorted(found))
    least = [a for a in kinds if not any(is_before(evidence, b[0], a[0], found) for b in kinds if b is not a)]
    further = [kind for kind in kinds if kind not in least]
    last = tuple(sorted(itertools.chain.from_iterable(least)))
    if not further or len({found[r].place for r in last}) != 1 or _chose_otherwise(evidence, found):
        return None
    if not all(is_before(evidence, a[0], b[0], found) for a in least for b in further):
        return None
    call, others = found[last[0]], frozenset(itertools.chain.from_iterable(further))
    made = [c for r in found for c in calls_before(evidence, r, found[r])]
    passed = tuple(r for r in evidence.members(call.process_group) if r in others)
    is_new = all((c.op, c.way) != (call.op, call.way) for c in made)
    is_first = _unused_groups(evidence) == {call.group}
    if passed and all(_makes_it_next(evidence, r, found[r], call) for r in passed):
        who = describe_ranks(last, evidence.job.world_size)
        why = f"{who} entered {call.describe()} before a call of another group, after which the others make it in each round"
        return Finding(
            cause="group_order_deadlock", ranks=last, where=call.site, reason=f"{why}: {shown}", certain=True, confidence=0.85,
            facts=all_facts(evidence.ranks),
        )  # fmt: skip
    if len(last) < len(passed) or (is_new and not is_first and len(last) == len(passed)):
        return extra(evidence, last, call, f"which the others have gone past: {shown}")
    if not passed:
        return None
    who = describe_ranks(passed, evidence.job.world_size)
    why = f"{who} went on without {call.describe()}, in which others wait (call skipped): {shown}"
    return skipped(evidence, passed, call, why)


def _makes_it_next(evidence: Evidence, rank: int, waits: Collective, call: Collective) -> bool:
    """Return whether a rank has made a call of another group, like ``call``, each time after one like that which it waits in."""
    if call.process_group == waits.process_group:
        return False
    made = calls_before(evidence, rank, waits)
    at = [i for i, c in enumerate(made) if (c.group, c.op, c.way) == (waits.group, waits.op, waits.way)]
    rounds = [made[i + 1 : j] for i, j in itertools.pairwise([*at, len(made)])]
    return bool(rounds) and all(any((c.group, c.shape) == (call.group, call.shape) for c in r) for r in rounds)


def _unused_groups(evidence: Evidence) -> set[str]:
    """Return the groups that the program has made and no rank has completed a call of."""
    made = {name for rank in evidence.ranks for name in rank.groups if name not in DEFAULT_GROUPS}
    return made - {
        c.group for rank in evidence.ranks for c in rank.collectives if not c.is_inside and c.op != NEW_GROUP
    }


def _ahead_in_unseen_wait(
    evidence: Evidence, alive: list[RankEvidence], found: dict[int, Collective]
) -> Finding | None:
    """Find that some ranks wait inside torch, in a call that the board does not see, in a later step than the others'
    collective. A suspicion: a rank may make steps by itself, to warm up or to evaluate.
    """
    steps = {r.rank: r.board.numbers["step"] for r in alive if r.board is not None}
    ahead = tuple(rank for rank in sorted(steps) if rank not in found)
    if not ahead or min(steps[rank] for rank in ahead) <= max(steps[rank] for rank in found):
        return None
    missed = found[min(found)]
    who = describe_ranks(ahead, evidence.job.world_size)
    why = f"{who} went on to the next step without {missed.describe()}, in which the others wait (call skipped)"
    return skipped(evidence, ahead, missed, why, confidence=0.7, certain=False)


def doing(rank: RankEvidence) -> str:
    """Return what a rank is in or at, in words."""
    call = awaited(rank)
    if call is not None:
        return f"in {call.describe()}"
    return "at the end of its test" if rank.finished else f"at {last_seen(rank)}"


def _members(evidence: Evidence, found: dict[int, Collective]) -> str:
    """Return which ranks the groups of ``found`` have, but for that of all."""
    said = ""
    for group in sorted({c.group for c in found.values()} - set(DEFAULT_GROUPS)):
        said += f"; group {group} has {describe_ranks(evidence.members(group), evidence.job.world_size)}"
    return said


def _minority(found: dict[int, Collective]) -> tuple[int, ...]:
    """Return the ranks that are not where most are; all, where there is no such place."""
    (place, most), *rest = Counter(c.place for c in found.values()).most_common()
    if not rest or 2 * most <= len(found):
        return tuple(sorted(found))
    return tuple(r for r, c in sorted(found.items()) if c.place != place)


def _chose_otherwise(evidence: Evidence, found: dict[int, Collective]) -> bool:
    """Return whether two ranks are in the two branches of one ``if``, or all in one line of a loop in an order of values: neither
    has gone past the other.
    """
    shared = set.intersection(*(_places(evidence.ranks[r], c) for r, c in found.items()))
    if any(source.is_in_order_of_values(evidence.sources, place) for place in shared):
        return True
    numbers = Counter(frozenset(_places(evidence.ranks[r], c)) for r, c in found.items())
    places = [
        p for p, number in numbers.items() for _ in range(min(number, 2))
    ]  # of many at the same, two stand for all
    return any(
        are_alternatives(evidence.sources, a, b)
        for one, other in itertools.combinations(places, 2)
        for a in one
        for b in other
    )


def _departs_over_groups(evidence: Evidence, found: dict[int, Collective]) -> tuple[int, ...]:
    """Return the ranks whose call is not what their own calls of all groups so far expect next, but a call that they know."""
    departing = []
    for rank, collective in found.items():
        calls = evidence.ranks[rank].collectives
        shapes = [c.shape for c in calls if c.index < collective.index and c.peer == -1]
        expected = expected_next(shapes)
        if expected is None or collective.shape not in shapes:
            return ()
        if expected != collective.shape and expected[0] != collective.shape[0]:
            departing.append(rank)
    return tuple(sorted(departing)) if len(departing) < len(found) else ()


def is_for_one_rank(evidence: Evidence, rank: int, collective: Collective) -> bool:
    """Return whether a call, or the line of a caller, is under a condition that is true on one rank."""
    return any(
        conditions.is_for_one_rank(evidence.sources, place) for place in _places(evidence.ranks[rank], collective)
    )


def _is_for_them_alone(evidence: Evidence, entered: dict[int, Collective], ranks: tuple[int, ...]) -> bool:
    """Return whether one rank's call is under a condition that is true on one rank, and the others' are not, nor in its other
    branch.
    """
    others = [r for r in entered if r not in ranks]
    if len(ranks) != 1 or not others or not is_for_one_rank(evidence, ranks[0], entered[ranks[0]]):
        return False
    return not _chose_otherwise(evidence, entered) and not any(is_for_one_rank(evidence, r, entered[r]) for r in others)


def _have_gone_past(evidence: Evidence, ranks: tuple[int, ...], found: dict[int, Collective]) -> bool:
    """Return whether ranks are on a later line of the program than all others, and no loop leads back."""
    parted = [
        where_they_part(evidence.sources, evidence.ranks[r], found[r], evidence.ranks[o], other)
        for r in ranks
        for o, other in found.items()
        if o not in ranks
    ]
    return all(comes_first(p.sources, p.there, p.here) and not p.goes_round for p in parted)


def _places(rank: RankEvidence, collective: Collective) -> set[str]:
    """Return the lines that a rank is in, from its test down to a call."""
    return {collective.site, *(frame.describe() for frame in user_frames(rank))}
