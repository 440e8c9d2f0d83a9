"""Which ranks depart where calls differ: by majority, by the pattern of their own earlier calls, by their place in the program."""

from __future__ import annotations

import itertools
from collections import Counter

from pytest_nsa.diagnosis.explain.choose import Edit, explain_sides, sides_of
from pytest_nsa.diagnosis.rules.conditions import are_alternatives
from pytest_nsa.diagnosis.rules.counters import are_in_one_round, lead
from pytest_nsa.diagnosis.rules.departures import LEFT_BEHIND, Departure, expected_next, is_new_call, kind_of
from pytest_nsa.diagnosis.rules.locations import (
    frames_where_paths_part,
    line_in,
    recomputes,
    user_frames,
    where_calls_part,
    where_they_part,
)
from pytest_nsa.diagnosis.rules.shifts import first_apart
from pytest_nsa.diagnosis.rules.source import have_a_common_loop, is_here, is_in_retries, share_a_loop
from pytest_nsa.diagnosis.rules.visits import (
    counts_of_rounds,
    is_same_line,
    leaves_out_one,
    rounds_since,
    visits_through,
)
from pytest_nsa.diagnosis.verdict import by_ranks, describe_ranks
from pytest_nsa.evidence.board import NEW_GROUP, Collective
from pytest_nsa.evidence.collectives import Rings
from pytest_nsa.evidence.stacks import Frame
from pytest_nsa.evidence.values import Evidence, RankEvidence

_LATEST = 64  # calls of a rank that are looked at


def rings(evidence: Evidence) -> Rings:
    return {r.rank: r.board.collectives for r in evidence.ranks if r.board is not None}


def blame(evidence: Evidence, entered: dict[int, Collective]) -> tuple[tuple[int, ...], str, str]:
    """Return (culprits, cause, reason) for a departure."""
    votes = Counter(c.shape for c in entered.values())
    (winner, most), *rest = votes.most_common()
    if not rest or most > rest[0][1]:  # a majority, on three ranks and more
        culprits = tuple(r for r, c in sorted(entered.items()) if c.shape != winner)
    else:
        found = by_program(evidence, entered)
        if found is not None:
            return found
        early = _left_the_loop_early(evidence, entered)
        if early is not None:
            return early
        culprits = (
            _goes_on_or_came_round(evidence, entered)
            or _came_sooner(evidence, entered)
            or _departs_from_pattern(evidence, entered)
            or went_ahead(evidence, entered)
        )
        culprits = _past_a_known_call(evidence, entered, culprits) or culprits
        visited = _visits_otherwise(evidence, entered) if not culprits else None
        if visited is not None:
            return visited
    if not culprits:
        shown = by_ranks({r: f"in {c.describe()}" for r, c in entered.items()}, evidence.job.world_size)
        return (
            tuple(sorted(entered)),
            "collective_mismatch",
            f"the ranks are in different collectives: {shown}",
        )
    mine = entered[culprits[0]]
    others = [r for r in entered if r not in culprits]
    with_stacks = [r for r in others if evidence.ranks[r].counters or evidence.ranks[r].last_stack is not None]
    with_stacks.sort(key=lambda r: not evidence.ranks[r].counters)  # who was aborted left none, or no stack either
    another = _of_its_role(evidence, culprits[0], with_stacks, entered) or (with_stacks or others)[0]
    other = entered[another]
    who = describe_ranks(culprits, evidence.job.world_size)
    parted = where_they_part(evidence.sources, evidence.ranks[culprits[0]], mine, evidence.ranks[another], other)
    calls = _made_by_both(evidence, culprits[0], mine, another, other)
    ahead = lead(evidence.sources, evidence.ranks[culprits[0]], evidence.ranks[another])
    together = are_in_one_round(evidence.sources, evidence.ranks[culprits[0]], evidence.ranks[another])
    before = of_group_before(evidence, culprits[0], mine)
    cause, why = kind_of(before, calls, mine, other, parted, ahead, in_one_round=together)
    if cause == "skipped_collective" and _tries_again(evidence, culprits[0], mine, other):
        cause, why = "extra_collective", "in another attempt of a loop that tries again after an error"
    is_known = not is_new_call(before, mine)
    # In one round with the others, it is on the way to their call.
    if (
        cause == "extra_collective"
        and is_known
        and ahead != 0
        and why != LEFT_BEHIND
        and _came_sooner(evidence, entered) == culprits
    ):
        cause, why = "skipped_collective", "it came after fewer of them than in each round before"
    earlier = (
        first_apart(evidence, culprits, other) if cause == "collective_mismatch" and is_same_line(mine, other) else None
    )
    if earlier is not None:
        there, here = earlier
        parted = where_calls_part(evidence, here, there)
        kind, told = kind_of(
            of_group_before(evidence, culprits[0], here), calls_before(evidence, culprits[0], here), here, there, parted
        )
        if kind == "extra_collective":
            why = f"{who} entered {here.describe()}, {told or 'which no round before had'}"
            return culprits, kind, f"{why}, where the others entered {there.describe()}; one call apart since then"
    if cause == "skipped_collective" and all(_is_finalizer(evidence.ranks[r]) for r in culprits):
        cause, why = "extra_collective", "in a finalizer (__del__), which runs when the last reference goes"
    if cause == "collective_mismatch":
        return culprits, cause, f"{who} entered {mine.describe()} where the others entered {other.describe()}{why}"
    if cause == "extra_collective":
        where_others = f"where the others entered {other.describe()}"
        return culprits, cause, f"{who} entered {mine.describe()}, {why or 'which no round before had'}, {where_others}"
    told = f"{who} went on without {other.describe()} and entered {mine.describe()}; the others wait in the former"
    return culprits, cause, f"{told} ({why})"


def by_program(evidence: Evidence, entered: dict[int, Collective]) -> tuple[tuple[int, ...], str, str] | None:
    """Return the finding of two sides, as many ranks in each, where the program tells which of them is ahead."""
    sides = sides_of(entered)
    found = explain_sides(evidence, sides, entered) if sides is not None else None
    if found is None or found.is_assumed:
        return None
    n = evidence.job.world_size
    others = tuple(r for r in sorted(entered) if r not in found.ranks)
    who, mine, theirs = describe_ranks(found.ranks, n), entered[found.ranks[0]], entered[others[0]]
    if found.edit is Edit.EXTRA:
        told = f"{who} entered {mine.describe()}, where {describe_ranks(others, n)} entered {theirs.describe()}"
    else:
        wait = f"{describe_ranks(others, n)} wait{'' if len(others) > 1 else 's'} in the former (call skipped)"
        told = f"{who} went on without {theirs.describe()} and entered {mine.describe()}; {wait}"
    return found.ranks, found.edit.value, f"{told}: {'; '.join(found.terms)}"


def _goes_on_or_came_round(evidence: Evidence, entered: dict[int, Collective]) -> tuple[int, ...]:
    """Return the ranks that have come round a loop past the others' call, or have gone on in it once more: which is not known."""
    sides = sides_of(entered)
    found = explain_sides(evidence, sides, entered) if sides is not None else None
    return found.ranks if found is not None and found.is_assumed else ()


def _of_its_role(evidence: Evidence, rank: int, others: list[int], entered: dict[int, Collective]) -> int | None:
    """Return the rank to compare another one with, where the first of ``others`` is in the other branch of an ``if``, as a driver
    and its workers are: one that is not. None where the first will do, or all are there.
    """
    sources, one = evidence.sources, evidence.ranks[rank]
    seen: set[object] = set()  # of thousands of ranks, most are at the same few lines
    for other in others:
        at = tuple(f.describe() for f in user_frames(evidence.ranks[other]))
        if at in seen:
            continue
        seen.add(at)
        parted = where_they_part(sources, one, entered[rank], evidence.ranks[other], entered[other])
        if not are_alternatives(sources, parted.here, parted.there):
            return other if len(seen) > 1 else None
    return None


def _visits_otherwise(evidence: Evidence, entered: dict[int, Collective]) -> tuple[tuple[int, ...], str, str] | None:
    """Return the finding that of two sides which one line has called, as it calls hooks or callbacks in turn, the one has left out
    the others' call: in each of its visits to that line it came first.
    """
    sides = _by_shape(entered)
    if len(sides) != 2:
        return None
    one, other = (entered[side[0]] for side in sides)
    shared = list(
        itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one.way[::-1], other.way[::-1], strict=False))
    )
    through = tuple(place for place, _ in shared)[::-1]
    if not through:
        return None
    for mine, theirs in (sides, sides[::-1]):
        rank, call, missed = mine[0], entered[mine[0]], entered[theirs[0]]
        *visits, latest = visits_through([*calls_before(evidence, rank, call), call], through)
        usual = [(missed.op, missed.way), latest[-1]]
        if visits and latest == usual[1:] and all(visit[:2] == usual for visit in visits):
            who = describe_ranks(mine, evidence.job.world_size)
            told = f"{who} went on without {missed.describe()}, which came first whenever {through[0]} called the two"
            return mine, "skipped_collective", f"{told}, and entered {call.describe()} (call skipped)"
    return None


def _by_shape(entered: dict[int, Collective]) -> list[tuple[int, ...]]:
    """Return the ranks of each side: those whose calls have one shape, in the order in which ``entered`` has them."""
    sides: dict[object, tuple[int, ...]] = {}
    for rank, call in entered.items():
        sides[call.shape] = (*sides.get(call.shape, ()), rank)
    return list(sides.values())


def _tries_again(evidence: Evidence, rank: int, mine: Collective, other: Collective) -> bool:
    """Return whether a rank makes its latest call again, from a loop that tries again after an error and that others have left."""
    calls = calls_before(evidence, rank, mine)
    if not calls or (calls[-1].way, calls[-1].shape) != (mine.way, mine.shape):
        return False
    loops = [f for f in user_frames(evidence.ranks[rank]) if is_in_retries(evidence.sources, f.describe())]
    return bool(loops) and not any(line_in(other, f.describe()) for f in loops)


def _is_finalizer(rank: RankEvidence) -> bool:
    return rank.stack is not None and any(f.function == "__del__" and f.is_user for f in rank.stack.frames)


def of_group_before(evidence: Evidence, rank: int, at: Collective) -> list[Collective]:
    """Return what a rank entered in the same group before ``at``, as far as its ring goes back."""
    return [c for c in evidence.ranks[rank].collectives if c.group == at.group and c.sequence < at.sequence]


def calls_before(evidence: Evidence, rank: int, at: Collective) -> list[Collective]:
    """Return what a rank entered before ``at``, of all groups, sends and receives too."""
    return [c for c in evidence.ranks[rank].collectives if c.index < at.index and c.op != NEW_GROUP]


def _made_by_both(evidence: Evidence, rank: int, mine: Collective, another: int, other: Collective) -> list[Collective]:
    """Return a rank's calls up to the latest before ``mine`` that another rank has made before ``other``, too.

    The two have met in each call of this group. Of other groups, and in what DDP does by itself, the rank may be further already.
    """
    calls = calls_before(evidence, rank, mine)
    met = max((i for i, c in enumerate(calls) if c.group == mine.group and c.peer == -1), default=-1)
    theirs = calls_before(evidence, another, other)
    met_there = max((i for i, c in enumerate(theirs) if c.group == other.group and c.peer == -1), default=-1)
    since = {(c.op, c.way) for c in theirs[met_there + 1 :]}
    both = [i for i, c in enumerate(calls) if i <= met or (c.op, c.way) in since]
    return calls[: both[-1] + 1] if both else []


def _left_the_loop_early(evidence: Evidence, entered: dict[int, Collective]) -> tuple[tuple[int, ...], str, str] | None:
    """Ranks that made fewer steps and have gone on to something else, while the others are in a further step's backward.

    Uneven batches look so. Where the same place of earlier rounds saw both calls, it is not known which rank is right: all are
    named then. None when this is not the picture.
    """
    steps = {rank: c.step for rank, c in entered.items()}
    behind = tuple(rank for rank, step in steps.items() if step < max(steps.values()))
    ahead = [rank for rank in entered if rank not in behind]
    if not behind or entered[behind[0]].phase == "backward" or any(entered[r].phase != "backward" for r in ahead):
        return None
    mine, other = entered[behind[0]], entered[ahead[0]]
    before = of_group_before(evidence, behind[0], mine)
    shapes = [c.shape for c in before]
    followers = {shapes[i + 1] for i in range(len(shapes) - 1) if shapes[i] == shapes[-1]}
    who = describe_ranks(behind, evidence.job.world_size)
    told = f"{who} made {mine.step} steps and entered {mine.describe()}, while step {other.step} of the others reduces gradients"
    parted = where_they_part(evidence.sources, evidence.ranks[behind[0]], mine, evidence.ranks[ahead[0]], other)
    departure = Departure(before, _made_by_both(evidence, behind[0], mine, ahead[0], other), mine, other, parted)
    if len(behind) == 1 and departure.is_for_its_rank_alone:
        return behind, "extra_collective", f"{told}: a call that its condition leaves to this rank alone"
    if shapes and mine.shape not in shapes and mine.shape[1] != other.shape[1]:
        if departure.is_in_its_statement or departure.is_on_the_way:
            return behind, "extra_collective", f"{told}: a call that no round before had"
        if (parted.in_loop or share_a_loop(evidence.sources, parted.here, parted.there)) and not parted.has_left:
            return behind, "extra_collective", f"{told}: a call that no round before had"
        return behind, "skipped_collective", f"{told} (it made fewer steps, and left the loop)"
    if {mine.shape, other.shape} <= followers:
        now, last = rounds_since(before, mine, other)
        if now == last:
            who = describe_ranks(tuple(ahead), evidence.job.world_size)
            parted = where_they_part(evidence.sources, evidence.ranks[ahead[0]], other, evidence.ranks[behind[0]], mine)
            if leaves_out_one(calls_before(evidence, ahead[0], other), parted, mine, other):
                why = f"{who} went on without {mine.describe()}, which the others make after as many steps as last time"
                return tuple(ahead), "skipped_collective", f"{why} (call skipped)"
            why = f"{who} entered {other.describe()}, a step more than last time, where the others entered {mine.describe()}"
            return tuple(ahead), "extra_collective", why
        if now < last:
            return behind, "skipped_collective", f"{told} (it made fewer steps, and left the loop)"
        return (
            tuple(sorted(entered)),
            "collective_mismatch",
            f"{told}: uneven batches, or a call skipped before that step",
        )
    return None


def _departs_from_pattern(evidence: Evidence, entered: dict[int, Collective]) -> tuple[int, ...]:
    """Return the ranks whose call is not what the pattern of their own earlier calls expects; () where it expects nothing."""
    departing = []
    for rank, collective in entered.items():
        expected = expected_next([c.shape for c in of_group_before(evidence, rank, collective)])
        if expected is None:
            return ()
        if expected != collective.shape:
            departing.append(rank)
    return tuple(sorted(departing)) if len(departing) < len(entered) else ()


def _past_a_known_call(
    evidence: Evidence, entered: dict[int, Collective], culprits: tuple[int, ...]
) -> tuple[int, ...]:
    """Return the ranks that are a round ahead of ``culprits``, which wait in a call that earlier rounds have had: it was left out,
    not made once more.
    """
    others = tuple(r for r in sorted(entered) if r not in culprits)
    if not culprits or not others:
        return ()
    call = entered[culprits[0]]
    by = lead(evidence.sources, evidence.ranks[culprits[0]], evidence.ranks[others[0]])
    return others if by == -1 and not is_new_call(of_group_before(evidence, culprits[0], call), call) else ()


def _came_sooner(evidence: Evidence, entered: dict[int, Collective]) -> tuple[int, ...]:
    """Return the ranks of the two sides whose call came after fewer of the others' than in each round before, which had as many."""
    sides = _by_shape(entered)
    if len(sides) != 2:
        return ()
    for mine, theirs in (sides, sides[::-1]):
        call, other = entered[mine[0]], entered[theirs[0]]
        now, *earlier = counts_of_rounds(of_group_before(evidence, mine[0], call), call, other)
        if earlier and len(set(earlier)) == 1 and 0 < now < earlier[0]:
            return mine
    return ()


def went_ahead(evidence: Evidence, entered: dict[int, Collective]) -> tuple[int, ...]:
    """Return the ranks that are further in the program: in a later step, round a loop, or at a later line of the same function."""
    ranks = sorted(entered)
    frames = frames_where_paths_part([evidence.ranks[r] for r in ranks], [entered[r] for r in ranks])
    apart = dict(zip(ranks, frames, strict=False))
    by_line = _have_come_anew(evidence, entered, apart) or _further_down(evidence, entered, apart)
    if by_line:
        return by_line
    steps = {r: entered[r].step for r in ranks}
    if len(set(steps.values())) > 1 and min(steps.values()) > 0:  # who has made none does not train: another role
        fewest = tuple(r for r in ranks if steps[r] == min(steps.values()))
        most = tuple(r for r in ranks if steps[r] == max(steps.values()))
        # In a loop around both, the others may have come round to the inner one again.
        ended = all(has_left_loop(evidence, entered, r, most[0], for_good=True) for r in fewest)
        return fewest if ended else most
    # A rank that has come back to a line where it was before has gone round a loop, past where the others are.
    again = tuple(
        r
        for r in ranks
        if entered[r].site in {c.site for c in of_group_before(evidence, r, entered[r])}
        and not recomputes(evidence.ranks[r])
    )
    if again and len(again) < len(ranks):
        others = tuple(r for r in ranks if r not in again)
        return others if all(has_left_loop(evidence, entered, r, again[0]) for r in others) else again
    last = max((frame.line for frame in frames), default=0)
    return tuple(r for r, frame in apart.items() if frame.line == last)


def _have_come_anew(evidence: Evidence, entered: dict[int, Collective], apart: dict[int, Frame]) -> tuple[int, ...]:
    """Return the ranks that are in the function in which the ranks part for another time: their latest call was at a later line of
    it, and no loop leads back. They have gone past what the others, further down in it, wait in. ``apart`` has its frames.
    """
    anew = []
    for rank, frame in apart.items():
        calls = calls_before(evidence, rank, entered[rank])
        line = line_in(calls[-1], frame.describe()) if calls else 0
        before = _at(frame, line)
        is_known = line > frame.line and is_here(evidence.sources, before)
        if is_known and not have_a_common_loop(evidence.sources, before, frame.describe()):
            anew.append(rank)
    return tuple(anew) if len(anew) < len(apart) else ()


def _further_down(evidence: Evidence, entered: dict[int, Collective], apart: dict[int, Frame]) -> tuple[int, ...]:
    """Return the ranks that are furthest in the function in which the ranks part, where all of them have made the same call last,
    but for those of the statement that each is at; whatever step they count.
    """
    latest = []
    for rank, frame in apart.items():
        calls = calls_before(evidence, rank, entered[rank])
        others = [c for c in calls[-_LATEST:] if line_in(c, frame.describe()) != frame.line]
        latest += others[-1:]
    if not latest or len(latest) < len(entered) or len({(c.op, c.way) for c in latest}) > 1 or not latest[0].callers:
        return ()
    frames = list(apart.values())
    at = line_in(latest[0], frames[0].describe())  # a loop leads from there to the lines before it
    if at and not all(have_a_common_loop(evidence.sources, _at(f, at), f.describe()) for f in frames):
        return ()
    places = {rank: (0 < frame.line <= at, frame.line) for rank, frame in apart.items()}
    return tuple(rank for rank, place in places.items() if place == max(places.values()))


def _at(frame: Frame, line: int) -> str:
    return f"{frame.file}:{line} in {frame.function}"


def has_left_loop(
    evidence: Evidence, entered: dict[int, Collective], rank: int, other: int, *, for_good: bool = False
) -> bool:
    """Return whether a rank is past a loop that the other one is in; ``for_good``: and no loop around both leads back."""
    ranks, sources = evidence.ranks, evidence.sources
    parted = where_they_part(sources, ranks[rank], entered[rank], ranks[other], entered[other])
    returns = for_good and (parted.in_loop or have_a_common_loop(sources, parted.here, parted.there))
    return parted.has_left and not returns
