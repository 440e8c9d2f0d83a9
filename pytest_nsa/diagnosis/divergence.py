"""What the recorded control flow of a run's ranks adds to its verdict: the statement at which they parted."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from pytest_nsa.diagnosis.labels import CONDITION
from pytest_nsa.diagnosis.verdict import NO_RANK, SECOND_RUN, Label, Verdict, describe_ranks
from pytest_nsa.evidence.source import LOCATION, is_below
from pytest_nsa.evidence.values import Evidence, Fact, RankEvidence
from pytest_nsa.flow.align import COLLECTIVES, KEYS, MESSAGES
from pytest_nsa.flow.first import (
    FirstDivergence,
    find_first,
    find_last_decision,
    find_owed,
    find_unended,
    list_other_values,
    passes_a_call,
)
from pytest_nsa.flow.read import FILE, Flow, read_flow
from pytest_nsa.flow.reasons import LEFT, shorten

# The rules that choose an explanation by weights, where ranks are in different collectives. Who waits for a message or a key, and
# who sends or sets it, part by right.
BY_WEIGHTS = ("calls.", "absence.", "groups.", "hooks.")
FOR_ONE = ("p2p_unmatched", "missing_collective")  # one rank owes a message or a key
UNKNOWN = "unknown"
SURE = 0.7  # the rules, by what the ranks did in earlier rounds
RAISES = "raises "
_EXCEPTIONS = ("rank_exception", "assertion")
LIKELY = 0.8  # that the ranks which the second run shows are to blame, where no majority did otherwise


def find_divergence(evidence: Evidence, verdict: Verdict, *, below: Path | None = None) -> FirstDivergence | None:
    """Return where the ranks of a run with a verdict parted first; None where they did not, or where it cannot be seen.

    Only sources ``below`` a folder are read (None: any).
    """
    try:
        found = _find(evidence, verdict, below)
    except (LookupError, ValueError, TypeError, AttributeError, RecursionError):
        return None  # a log that its recorder did not write so: a folder is untrusted
    return found and found.below(evidence.job.root)


def _find(evidence: Evidence, verdict: Verdict, below: Path | None) -> FirstDivergence | None:
    read = [read_flow(rank.folder / FILE, rank.rank) for rank in evidence.ranks]
    flows = [flow for flow in read if flow is not None]
    if len(flows) < 2:
        return None
    if below is not None:
        for frame in (frame for flow in flows for frame in flow.frames.values()):
            frame.file = frame.file if is_below(frame.file, below) else ""
    present = [rank for rank in verdict.ranks if rank in {flow.rank for flow in flows}]
    found = _compare(evidence, verdict, flows, present)
    if verdict.cause == "lock_deadlock":  # what would have ended the wait is nearer than where others went on
        return find_unended(flows, evidence.members, present) or found
    return found


def _compare(
    evidence: Evidence, verdict: Verdict, flows: Sequence[Flow], present: Sequence[int]
) -> FirstDivergence | None:
    """Return where ranks parted from each other."""
    if verdict.cause == "silent_divergence":
        return next(list_other_values(flows, evidence.members, present), None)
    waiting = [rank for rank in evidence.ranks if not rank.finished]
    kinds = COLLECTIVES
    kinds |= KEYS if any(rank.waits_for_a_key for rank in waiting) else frozenset()
    peers = {rank.rank: rank.board.blocked.peer for rank in waiting if rank.board is not None and rank.board.blocked}
    kinds |= MESSAGES if any(peer >= 0 for peer in peers.values()) else frozenset()
    stuck = _stuck(evidence)
    for_one = {rank.rank for rank in waiting if rank.waits_for_a_key or peers.get(rank.rank, -1) != -1}
    if for_one and -1 in peers.values():
        # A rank that skipped the collective of others waits later, for a message or a key that these would have given it.
        skipped = find_first(flows, evidence.members, stuck, is_wanted=passes_a_call)
        if skipped is not None:
            return skipped
    found = find_first(flows, evidence.members, [] if kinds & KEYS else stuck, kinds)
    # Who sends and who receives part by right; two ends of a message that differ are its arguments.
    if for_one and (found is None or found.kind != "argument"):
        latest = [(flow.rank, calls[-1]) for flow in flows for calls in flow.calls.values() if calls]
        awaited = [(rank, call) for rank, call in latest if rank in for_one and call.kind in MESSAGES | {"wait"}]
        owed = find_owed(flows, evidence.members, awaited, verdict.ranks, by_peer=verdict.confidence < SURE)
        found = None if found is not None and found.is_by_rank else found
        is_decided = found is not None and found.kind in ("branch", "loop")
        if owed is not None and (found is None or not is_decided or owed.where == found.where):
            found = owed
    is_known = verdict.certain or not _is_open(verdict)
    if found is None and verdict.cause in ("assertion", "rank_died", *FOR_ONE) and len(present) < len(flows):
        # All calls fit, or the ranks' parts hide which does not: what the ranks to blame did otherwise than all others.
        # An assertion compares values, so a value that differs explains it, too.
        others = list_other_values(flows, evidence.members, present)
        decided = (other for other in others if verdict.cause == "assertion" or other.kind in ("branch", "loop"))
        found = next((replace(other, is_alone=False) for other in decided if not other.is_by_role), None)
    if found is not None or verdict.outcome != "HANG" or verdict.cause in _EXCEPTIONS or not is_known:
        return found
    return find_last_decision(flows, evidence.members, present)


def _is_open(verdict: Verdict) -> bool:
    """Return whether the rules chose a verdict by weights, or have none."""
    return verdict.rule.startswith(BY_WEIGHTS) or verdict.cause == UNKNOWN


def _stuck(evidence: Evidence) -> list[Sequence[int]]:
    """Return the ranks of each call in which a rank waits; none where no rank waits."""
    found: list[Sequence[int]] = []
    for rank in evidence.ranks:
        call = rank.board.blocked if rank.board is not None and not rank.finished else None
        if call is not None:
            found.append((rank.rank, call.peer) if call.peer >= 0 else (*evidence.members(call.group), rank.rank))
    return found


def add_divergence(verdict: Verdict, evidence: Evidence, *, below: Path | None = None) -> Verdict:
    """Return a failed run's verdict with the divergence that its recorded control flow shows, if it was recorded.

    Only sources ``below`` a folder are read (None: any).
    """
    found = find_divergence(evidence, verdict, below=below) if verdict.failed else None
    return verdict if found is None else with_divergence(verdict, found, is_same=True)


def compare_runs(verdict: Verdict, first: Evidence, second: Evidence, again: Verdict) -> Verdict:
    """Return the verdict on a run with the divergence that its second run shows, or with a sentence about the second run."""
    if not again.failed:
        return _with_fact(
            verdict, "the second run passed: the failure depends on timing, or on what an earlier test left"
        )
    found = find_divergence(second, again)
    is_same = _ends(first) == _ends(second)
    if found is None:
        if not is_same and (again.cause, again.ranks, again.where) != (verdict.cause, verdict.ranks, verdict.where):
            return _with_fact(
                verdict, f"the second run ended elsewhere: {again.cause} on {again.culprits()} at {again.where}"
            )
        return verdict
    return with_divergence(verdict, found, is_same=is_same)


def with_divergence(verdict: Verdict, found: FirstDivergence, *, is_same: bool) -> Verdict:
    """Return a verdict with a divergence. Cause, ranks and line follow from it, where the verdict's were chosen by weights.

    Where a rank that owes a message or a key did otherwise, the line follows: that of the missing call is the consequence.
    """
    labels = tuple(label for label in verdict.labels if label.text not in (CONDITION, ""))
    at_lines = {(label.file, label.line, rank) for label in labels for rank in label.ranks}
    follow = tuple(
        label for label in _labels_of_next(found) if (label.file, label.line, label.ranks[0]) not in at_lines
    )
    shown = (*_labels(found), *follow, *labels)
    lines = {(label.file, label.line) for label in shown}
    blamed = tuple(label for label in verdict.labels if not label.text and (label.file, label.line) not in lines)
    changed = replace(verdict, first_divergence=found.to_json(), labels=(*shown, *blamed))
    its_own = verdict.ranks if verdict.ranks in found.outcomes.values() else ()
    is_unsure = verdict.confidence < SURE
    in_role = found.in_role if is_unsure else ()  # earlier rounds may show what was skipped
    parted = tuple(sorted({rank for ranks in found.outcomes.values() for rank in ranks}))
    # Ranks that did not part are no cause; without a minority both sides may be.
    either = parted if is_unsure and (verdict.cause == UNKNOWN or not {*parted} & {*verdict.ranks}) else ()
    to_blame = found.exceptional or found.raising or in_role or found.unlike_others or its_own or either
    # A rank that owes a call, by its own rounds, or by the rules. Rounds that explain a wait within a rank are not alone.
    is_by_rounds = bool(found.outcome_before) and found.is_alone and is_unsure
    owes = parted if is_by_rounds else its_own if verdict.cause in FOR_ONE else ()
    if owes and not found.is_by_role:
        others = "in its round before" if found.outcome_before else "the others"
        is_same_rank = owes == verdict.ranks
        return replace(
            changed,
            labels=shown,
            cause=verdict.cause if verdict.cause in FOR_ONE else FOR_ONE[0],
            ranks=owes,
            where=found.where,
            confidence=verdict.confidence if is_same_rank else LIKELY,
            reason=f"{describe_ranks(owes, verdict.world_size)} did otherwise than {others} at `{found.statement}`",
            because=(verdict.reason, *verdict.because) if is_same_rank else (),
            terms=verdict.terms if is_same_rank else {},
            advice="begin the awaited call on this path, too, or make the other rank wait for fewer",
            called_from="",
        )
    raised_later = _raised_later(verdict, found, to_blame)
    is_inferred = verdict.cause in FOR_ONE and not verdict.certain  # who owes a message
    if not (_is_open(verdict) or is_inferred or raised_later) or not found.is_alone or not to_blame:
        return changed
    is_known = is_same and bool(found.exceptional) and not is_inferred
    return replace(
        changed,
        labels=shown,
        cause=_cause(found, verdict, to_blame),
        ranks=to_blame,
        where=found.where,
        certain=is_known,
        confidence=1.0 if is_known else verdict.confidence if to_blame == verdict.ranks else LIKELY,
        reason=_reason(found),
        because=(f"then {verdict.reason}",) if raised_later else (),
        advice=_advice(found),
        called_from="",
        terms={},
    )


def _reason(found: FirstDivergence) -> str:
    if not found.within:
        return f"the ranks parted at `{found.statement}`"
    place, _, statement = found.within.partition(": ")
    package = place.partition(":")[0].rpartition("-packages/")[2].partition("/")[0].removesuffix(".py")
    return f"the ranks parted at `{statement}` of {package}, called here"


def _raised_later(verdict: Verdict, found: FirstDivergence, ranks: tuple[int, ...]) -> bool:
    """Return whether the ranks to blame raised after they had made other calls than the others: that difference came first."""
    raised_there = any(found.then.get(rank, ("", ""))[1].startswith(RAISES) for rank in ranks)
    is_exception = verdict.cause in _EXCEPTIONS and verdict.ranks == ranks
    is_first = found.kind in ("branch", "callee", "loop") and not set(ranks) & set(found.raised_before)
    return is_exception and is_first and not raised_there


def _with_fact(verdict: Verdict, text: str) -> Verdict:
    return replace(verdict, evidence=(*verdict.evidence, Fact(rank=NO_RANK, kind=SECOND_RUN, file="", text=text)))


def _ends(evidence: Evidence) -> list[tuple[object, ...]]:
    """Return the last call of each rank, and its latest exception: what two runs of a test that fails alike have in common."""
    return [_end(rank) for rank in evidence.ranks]


def _end(rank: RankEvidence) -> tuple[object, ...]:
    call = rank.collectives[-1] if rank.collectives else None
    raised = rank.exceptions[-1].type if rank.exceptions else ""
    return (rank.finished, raised, *((call.op, call.group, call.sequence, call.site) if call is not None else ()))


_OPPOSITE = {"skipped_collective": "extra_collective", "extra_collective": "skipped_collective"}


def _cause(found: FirstDivergence, verdict: Verdict, to_blame: tuple[int, ...]) -> str:
    """Return the cause: what one side skipped, the other has made once more."""
    if to_blame == found.in_role and to_blame != verdict.ranks:
        return "extra_collective"
    if verdict.cause not in (*_OPPOSITE, UNKNOWN, *_EXCEPTIONS):
        return verdict.cause
    if found.kind == "argument":
        return "collective_mismatch"
    if found.kind == "loop":
        return "skipped_collective" if found.outcomes.get(LEFT) == to_blame else "extra_collective"
    if verdict.cause in (UNKNOWN, *_EXCEPTIONS):
        return "extra_collective" if to_blame == found.inside else "skipped_collective"
    return verdict.cause if to_blame == verdict.ranks else _OPPOSITE[verdict.cause]


_REDUCIBLE = re.compile(r"-?[\d.]|['\"]|tensor |(True|False|None|inf|nan)$|(bfloat|float|int|bool)\d* ")
_DOES = {
    "true": "decides true",
    "false": "decides false",
    LEFT: "leaves the loop",
    "another pass": "makes another pass",
}


def _labels(found: FirstDivergence) -> tuple[Label, ...]:
    """Return a label for each side: what it did at the statement, and by which values."""
    at = LOCATION.match(found.where)
    if at is None:
        return ()
    sides = []
    for outcome, ranks in found.outcomes.items():
        values = {name: list(dict.fromkeys(of[r] for r in ranks if r in of)) for name, of in found.values.items()}
        shown = ", ".join(f"{name} = {' or '.join(map(shorten, of[:3]))}" for name, of in values.items() if of)
        text = _DOES.get(outcome, outcome) + (f": {shown}" if shown else "")
        alike = tuple(sorted((*ranks, *found.others.get(outcome, ()))))
        sides.append(Label(file=at["file"], line=int(at["line"]), ranks=alike, text=text))
    if found.outcome_before:
        shown = ", ".join(f"{name} = {shorten(text)}" for name, text in found.values_before.items())
        does = _DOES.get(found.outcome_before, found.outcome_before)
        text = f"{does} in its round before" + (f": {shown}" if shown else "")
        sides.append(Label(file=at["file"], line=int(at["line"]), ranks=sides[0].ranks, text=text))
    return tuple(sides)


def _labels_of_next(found: FirstDivergence) -> tuple[Label, ...]:
    """Return a label for what ranks did next: the call that they began there, or the exception that they raised."""
    by_place: dict[tuple[str, str], list[int]] = {}
    for rank, followed in found.then.items():
        if followed[1] not in found.outcomes:  # else its side has that label
            by_place.setdefault(followed, []).append(rank)
    places = ((LOCATION.match(where), text, tuple(ranks)) for (where, text), ranks in by_place.items())
    return tuple(
        Label(file=at["file"], line=int(at["line"]), ranks=ranks, text=text)
        for at, text, ranks in places
        if at is not None
    )


def _advice(found: FirstDivergence) -> str:
    if found.kind == "argument":
        return "give the call the same arguments on every rank of its group"
    if found.kind == "exception" or any(text.startswith(RAISES) for _, text in found.then.values()):
        return "handle the exception on all ranks alike, or let it end the test"
    # Without a name that the statement reads: what a function returned to it.
    values = {name: tuple(of.values()) for name, of in found.values.items()}
    values = values or {step.name: step.values for step in found.because[:1]}
    names = [name for name in values if "rank" not in name.lower()]
    set_by = {step.name: step.statement.partition("=")[2] for step in reversed(found.because)}
    # The one from which the others follow.
    first = next((n for n in names if not any(o in set_by.get(n, "") for o in names if o != n)), next(iter(names), ""))
    # A container or an object cannot be reduced; a role is chosen by the number of the rank on purpose.
    if first and not found.in_role and all(map(_REDUCIBLE.match, values[first])):
        return f"decide by a value that all ranks share: reduce or broadcast `{first}` first"
    if found.in_role:
        return "let every rank of the group take this branch, or move its calls out of it"
    return "let every rank of the group make the same calls here"
