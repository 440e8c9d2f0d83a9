"""The order of collectives: where ranks' sequences depart, and which rank departs."""

from __future__ import annotations

from collections import Counter

from pytest_nsa.diagnosis.exits import is_victim
from pytest_nsa.diagnosis.facts import all_facts, last_seen, owning_module
from pytest_nsa.diagnosis.oddities import oddity, other_path
from pytest_nsa.diagnosis.source import are_alternatives, is_for_a_later_rank, is_past_the_loop
from pytest_nsa.diagnosis.verdict import Fact, Finding, describe_ranks
from pytest_nsa.evidence import Evidence, RankEvidence
from pytest_nsa.watch.board import Collective
from pytest_nsa.watch.sequences import Rings, can_complete, first_departure

NEW_GROUP = "new_group"
_EVEN = ("allreduce", "broadcast", "reduce")
STOPS = ("departed", "certain", "deadline", "hang_after", "host_died")


def _rings(evidence: Evidence) -> Rings:
    return {r.rank: r.board.collectives for r in evidence.ranks if r.board is not None}


def departed(evidence: Evidence) -> Finding | None:
    """Two ranks entered different collectives at the same place of their group's sequence."""
    entered = first_departure(_rings(evidence))
    if entered is None or _raised_before(evidence, entered):
        return None
    culprits, cause, why = _explained(evidence, *_blame(evidence, entered))
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
    skipped = cause == "skipped_collective"
    return Finding(
        cause=cause,
        ranks=culprits,
        # For a call that was skipped, the line to look at is the call that the others are in.
        where=others.site if skipped else first.site,
        reason=why,
        module="",
        certain=True,
        confidence=0.9 if len(culprits) < len(entered) else 0.6,
        facts=facts + all_facts(evidence.ranks),
    )


def _raised_before(evidence: Evidence, entered: dict[int, Collective]) -> bool:
    """Whether a rank had raised by itself when it entered what differs: its teardown's calls are a consequence."""
    return any(
        error.time < c.entered and not is_victim(error)
        for rank, c in entered.items()
        for error in evidence.ranks[rank].exceptions
    )


def waiting_apart(evidence: Evidence) -> Finding | None:
    """Every rank waits, and not in the same collective: the one that is ahead went on without the one behind it."""
    if evidence.stop not in STOPS or not evidence.stood:
        return None
    alive = [r for r in evidence.ranks if not r.finished]
    found = {r.rank: c for r in alive if (c := _awaited(r)) is not None}
    if len(alive) < 2 or not found or any(not r.is_waiting for r in alive):
        return None
    if len(found) < len(alive):
        return _ahead_in_unseen_wait(evidence, alive, found)
    if len({c.place for c in found.values()}) < 2 or any(c.peer != -1 for c in found.values()):
        return None
    if any(can_complete(c, _rings(evidence)) for c in found.values()):
        return None
    facts = all_facts(evidence.ranks)
    shown = "; ".join(f"rank {r} in {c.describe()} in step {c.step}" for r, c in sorted(found.items()))
    ahead = _went_ahead(evidence, found)
    if not ahead:
        ranks = tuple(sorted(found))
        return Finding(
            cause="group_order_deadlock" if _crossed(found) else "collective_mismatch", ranks=ranks,
            where=found[ranks[0]].site, reason=f"the ranks wait in different collectives: {shown}", certain=True,
            confidence=0.85 if _crossed(found) else 0.6, facts=facts,
        )  # fmt: skip
    missed = next(c for r, c in sorted(found.items()) if r not in ahead)
    who = describe_ranks(ahead, evidence.job.world_size)
    why = f"{who} went on without {missed.describe()}, in which the others wait (call skipped): {shown}"
    return _skipped(evidence, ahead, missed, why)


def _explained(evidence: Evidence, culprits: tuple[int, ...], cause: str, why: str) -> tuple[tuple[int, ...], str, str]:
    """Blame, with what is known of the ranks beyond their collectives: steps that went otherwise, other paths, hooks."""
    odd = oddity(evidence)
    if odd is not None and cause in ("skipped_collective", "collective_mismatch", "extra_collective"):
        who = describe_ranks(odd.ranks, evidence.job.world_size)
        return odd.ranks, "skipped_collective", f"{who} made no whole step {odd.step}: {odd.why}. {why}"
    # Who was aborted may have no stack.
    stacks = [r.stack for r in evidence.ranks if r.rank in culprits and r.stack is not None]
    if cause != "skipped_collective" and stacks and all(s.is_in_hook for s in stacks):
        return culprits, "hook_deadlock", f"in a gradient hook, {why}"
    if len(culprits) == len(evidence.ranks):
        return culprits, cause, why
    path = other_path(evidence, culprits)
    if path:
        who = describe_ranks(culprits, evidence.job.world_size)
        return culprits, "data_dependent_branch", f"{who} {path}. {why}"
    return culprits, cause, why


def _skipped(
    evidence: Evidence, culprits: tuple[int, ...], missed: Collective, reason: str, confidence: float = 0.9
) -> Finding:
    """``culprits`` went on without ``missed``; the line to look at is the one where the others wait."""
    culprits, cause, reason = _explained(evidence, culprits, "skipped_collective", reason)
    return Finding(
        cause=cause,
        ranks=culprits,
        where=missed.site,
        reason=reason,
        certain=True,
        confidence=confidence,
        facts=all_facts(evidence.ranks),
    )


def _ahead_in_unseen_wait(
    evidence: Evidence, alive: list[RankEvidence], found: dict[int, Collective]
) -> Finding | None:
    """Some ranks wait inside torch, in a call that the board does not see, in a later step than the others' collective."""
    steps = {r.rank: r.board.numbers["step"] for r in alive if r.board is not None}
    ahead = tuple(rank for rank in sorted(steps) if rank not in found)
    if not ahead or min(steps[rank] for rank in ahead) <= max(steps[rank] for rank in found):
        return None
    missed = found[min(found)]
    who = describe_ranks(ahead, evidence.job.world_size)
    why = f"{who} went on to the next step without {missed.describe()}, in which the others wait (call skipped)"
    return _skipped(evidence, ahead, missed, why, confidence=0.85)


def _awaited(rank: RankEvidence) -> Collective | None:
    return rank.board.waits_in if rank.board is not None else None


def _crossed(found: dict[int, Collective]) -> bool:
    """Whether the ranks wait in different groups and none has entered what another waits in."""
    return len({c.group for c in found.values()}) == len(found)


def _blame(evidence: Evidence, entered: dict[int, Collective]) -> tuple[tuple[int, ...], str, str]:
    """(culprits, cause, reason) for a departure."""
    votes = Counter(c.shape for c in entered.values())
    (winner, most), *rest = votes.most_common()
    if not rest or most > rest[0][1]:  # a majority, on three ranks and more
        culprits = tuple(r for r, c in sorted(entered.items()) if c.shape != winner)
    else:
        early = _left_the_loop_early(evidence, entered)
        if early is not None:
            return early
        culprits = _departs_from_pattern(evidence, entered) or _went_ahead(evidence, entered)
    if not culprits:
        shown = "; ".join(f"rank {r} in {c.describe()}" for r, c in sorted(entered.items()))
        return (
            tuple(sorted(entered)),
            "collective_mismatch",
            f"the ranks are in different collectives: {shown}",
        )
    mine = entered[culprits[0]]
    other = next(c for r, c in entered.items() if r not in culprits)
    who = describe_ranks(culprits, evidence.job.world_size)
    there = next(
        (place for r in entered if r not in culprits if (place := _place_in(evidence.ranks[r], mine.site))), ""
    )
    cause, why = _kind(_before(evidence, culprits[0], mine), mine, other, there or other.site)
    if cause == "collective_mismatch":
        return culprits, cause, f"{who} entered {mine.describe()} where the others entered {other.describe()}{why}"
    if cause == "extra_collective":
        return culprits, cause, f"{who} entered {mine.describe()}, which no round before had"
    told = f"{who} went on without {other.describe()} and entered {mine.describe()}; the others wait in the former"
    return culprits, cause, f"{told} ({why})"


def _kind(before: list[Collective], mine: Collective, other: Collective, others_place: str) -> tuple[str, str]:
    """(cause, why) of ``mine`` in place of ``other``, by the source and by what the rank did in earlier rounds.

    ``others_place`` is where the others are in the function that entered ``mine``.
    """
    if _same_line(mine, other) or are_alternatives(mine.site, other.site):
        return "collective_mismatch", ""
    if is_past_the_loop(mine.site, others_place):
        return "skipped_collective", "ran out of data: it has left the loop that the others are in"
    shapes = [c.shape for c in before]
    if _expected(shapes) is not None:
        usual = {c.site for c in before if c.shape == mine.shape}
        if _expected([*shapes, other.shape]) == mine.shape:
            swapped = mine.site not in usual
            return ("collective_mismatch", ", in another order") if swapped else ("skipped_collective", "call skipped")
        if not usual:
            return ("collective_mismatch", "") if mine.op == other.op else ("extra_collective", "")
    return "skipped_collective", "call skipped"


def _place_in(rank: RankEvidence, site: str) -> str:
    """Where a rank is in the function of ``site``, by its stack; '' where it is not in it."""
    file, function = site.partition(":")[0], site.rpartition(" in ")[2]
    frames = rank.stack.frames if rank.stack is not None else ()
    return next((f.describe() for f in frames if (f.file, f.function) == (file, function)), "")


def _same_line(a: Collective, b: Collective) -> bool:
    return a.site.rpartition(" in ")[0] == b.site.rpartition(" in ")[0]


def _before(evidence: Evidence, rank: int, at: Collective) -> list[Collective]:
    """What a rank entered in the same group before ``at``, as far as its ring goes back."""
    board = evidence.ranks[rank].board
    return [c for c in (board.collectives if board else ()) if c.group == at.group and c.sequence < at.sequence]


def _expected(shapes: list[tuple[str, str, str, int]]) -> tuple[object, ...] | None:
    """The shape that should come next: what followed the longest earlier run that equals the latest one."""
    best: tuple[int, tuple[object, ...]] | None = None
    for end in range(len(shapes) - 1, 0, -1):
        length = 0
        while length < end and shapes[end - 1 - length] == shapes[-1 - length]:
            length += 1
        if length and (best is None or length > best[0]):
            best = (length, shapes[end])
    return best[1] if best is not None else None


def _left_the_loop_early(evidence: Evidence, entered: dict[int, Collective]) -> tuple[tuple[int, ...], str, str] | None:
    """Ranks that made fewer steps and have gone on to something else, while the others are in a further step's backward.

    Uneven batches look so. Where the same place of earlier rounds saw both calls, nobody can say who is right: all are
    named then. None when this is not the picture.
    """
    steps = {rank: c.step for rank, c in entered.items()}
    behind = tuple(rank for rank, step in steps.items() if step < max(steps.values()))
    ahead = [rank for rank in entered if rank not in behind]
    if not behind or entered[behind[0]].phase == "backward" or any(entered[r].phase != "backward" for r in ahead):
        return None
    mine, other = entered[behind[0]], entered[ahead[0]]
    before = _before(evidence, behind[0], mine)
    shapes = [c.shape for c in before]
    followers = {shapes[i + 1] for i in range(len(shapes) - 1) if shapes[i] == shapes[-1]}
    who = describe_ranks(behind, evidence.job.world_size)
    told = f"{who} made {mine.step} steps and entered {mine.describe()}, while step {other.step} of the others reduces gradients"
    if shapes and mine.shape not in shapes and mine.shape[1] != other.shape[1]:
        return behind, "skipped_collective", f"{told} (ran out of data: uneven batches)"
    if {mine.shape, other.shape} <= followers:
        return (
            tuple(sorted(entered)),
            "collective_mismatch",
            f"{told}: uneven batches, or a call skipped before that step",
        )
    return None


def _departs_from_pattern(evidence: Evidence, entered: dict[int, Collective]) -> tuple[int, ...]:
    """The ranks whose call is not what the pattern of their own earlier calls expects; () where it expects nothing."""
    departing = []
    for rank, collective in entered.items():
        expected = _expected([c.shape for c in _before(evidence, rank, collective)])
        if expected is None:
            return ()
        if expected != collective.shape:
            departing.append(rank)
    return tuple(sorted(departing)) if len(departing) < len(entered) else ()


def _went_ahead(evidence: Evidence, entered: dict[int, Collective]) -> tuple[int, ...]:
    """The ranks that are further in the program: in a later step, round a loop, or at a later line of the same function."""
    ranks = sorted(entered)
    steps = {r: entered[r].step for r in ranks}
    if len(set(steps.values())) > 1:
        return tuple(r for r in ranks if steps[r] == max(steps.values()))
    # A rank that has come back to a line where it was before has gone round a loop, past where the others are.
    again = tuple(r for r in ranks if entered[r].site in {c.site for c in _before(evidence, r, entered[r])})
    if again and len(again) < len(ranks):
        return again
    lines = _lines_where_paths_part([evidence.ranks[r] for r in ranks])
    if lines is None:
        return ()
    return tuple(r for r, line in zip(ranks, lines, strict=True) if line == max(lines))


def _lines_where_paths_part(ranks: list[RankEvidence]) -> list[int] | None:
    """The lines of the ranks in the innermost function that all of them are in, where those differ."""
    stacks = [r.stack for r in ranks]
    paths = [[f for f in reversed(s.frames) if f.is_user] if s is not None else [] for s in stacks]
    for frames in zip(*paths, strict=False):
        if len({(f.file, f.function) for f in frames}) > 1:
            return None
        lines = [f.line for f in frames]
        if len(set(lines)) > 1:
            return lines
    return None


def left_alone(evidence: Evidence) -> Finding | None:
    """Some ranks ended their test well while others wait in a collective that they never entered.

    When the finished rank's process ends, the waiting ones see a closed connection: a victim's message, not a cause.
    """
    finished = [r for r in evidence.ranks if r.finished and r.passed]
    left = [r for r in evidence.ranks if r not in finished and _awaited(r) is not None]
    if not finished or not left or len(finished) + len(left) < len(evidence.ranks):
        return None
    if any(not is_victim(error) for rank in left for error in rank.exceptions):
        return None
    missed = _awaited(left[0])
    assert missed is not None
    culprits = tuple(r.rank for r in finished)
    who = describe_ranks(culprits, evidence.job.world_size)
    if missed.op == NEW_GROUP:
        return Finding(
            cause="init_timeout",
            ranks=culprits,
            where=missed.site,
            reason=f"{who} ended its test without the group that the others wait for",
            certain=True,
            confidence=0.85,
            facts=all_facts(evidence.ranks),
        )
    if missed.op.startswith(("send", "recv")):
        return Finding(
            cause="p2p_unmatched",
            ranks=(left[0].rank,),
            where=missed.site,
            reason=f"rank {left[0].rank} waits in {missed.op}, and {who} ended its test without the other half",
            certain=True,
            confidence=0.85,
            facts=all_facts(evidence.ranks),
        )
    if is_for_a_later_rank(missed.site) or len(left) < len(finished):
        who_waits = describe_ranks(tuple(r.rank for r in left), evidence.job.world_size)
        return Finding(
            cause="extra_collective",
            ranks=tuple(r.rank for r in left),
            where=missed.site,
            reason=f"{who_waits} entered {missed.describe()}, which {who} ended its test without",
            certain=True,
            confidence=0.8,
            facts=all_facts(evidence.ranks),
        )
    why = f"{who} ended its test without {missed.describe()}, in which the others wait ({_why_left(evidence, finished, left)})"
    return _skipped(evidence, culprits, missed, why)


def _why_left(evidence: Evidence, finished: list[RankEvidence], left: list[RankEvidence]) -> str:
    """Fewer steps than the others, and none that went otherwise: its data came to an end."""
    steps = {r.rank: r.board.numbers["step"] for r in evidence.ranks if r.board is not None}
    fewer = max(steps.get(r.rank, 0.0) for r in finished) < min(steps.get(r.rank, 0.0) for r in left)
    return "ran out of data: uneven batches" if fewer else "call skipped"


def not_entered(evidence: Evidence) -> Finding | None:
    """Others wait in a collective that a rank never entered, and nothing more is known of where it stands."""
    if evidence.stop not in STOPS or not evidence.stood:
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


def wrong_numbers(evidence: Evidence) -> Finding | None:
    """A test that passed though ranks reduced or broadcast different dtypes or shapes: what was sent were other numbers."""
    entered = first_departure(_rings(evidence))
    if entered is None or len({c.op for c in entered.values()}) > 1 or next(iter(entered.values())).op not in _EVEN:
        return None
    culprits, _, _ = _blame(evidence, entered)
    shown = "; ".join(f"rank {r} in {c.describe()}" for r, c in sorted(entered.items()))
    return Finding(
        cause="collective_mismatch",
        ranks=culprits,
        where=entered[culprits[0]].site,
        reason=f"the ranks exchanged numbers of different kinds, which no backend notices: {shown}",
        certain=True,
        confidence=0.9,
        facts=all_facts(evidence.ranks),
    )
