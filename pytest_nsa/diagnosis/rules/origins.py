"""Where ranks went apart, which may be before the call in which they stall."""

from __future__ import annotations

from dataclasses import dataclass

from pytest_nsa.diagnosis.explain.locations import where_ways_part
from pytest_nsa.diagnosis.rules.rounds import first_left_out
from pytest_nsa.diagnosis.rules.shifts import first_apart
from pytest_nsa.diagnosis.verdict import describe_ranks
from pytest_nsa.evidence.board import Collective
from pytest_nsa.evidence.values import Evidence


@dataclass(frozen=True, slots=True)
class Origin:
    """The line of a call that ranks left out, the line that called its function, where that is known, and since when in words."""

    where: str
    called_from: str = ""
    since: str = ""


def origin_of(evidence: Evidence, culprits: tuple[int, ...], missed: Collective) -> Origin:
    """Return where the culprits left the others' way: at ``missed``, in which these wait; or before it, at a call that was taken
    for the next one, which was like it, or at one of another group in the same round.
    """
    apart = first_apart(evidence, culprits, missed)
    if apart is not None:
        theirs, mine = apart
        there, here = where_ways_part(theirs.way, mine.way)
        who = describe_ranks(culprits, evidence.job.world_size)
        since = f"; one call apart since {theirs.op} #{theirs.sequence}, which the others entered at {there}, {who} at {here}"
        return Origin(theirs.site, there if len(theirs.way) > 1 and there != theirs.site else "", since)
    first = first_left_out(evidence, culprits[0], missed) if culprits else None
    if first is not None and first != missed.way:
        since = f"; in its rounds so far that follows the call at {first[0]}, which it left out too"
        return Origin(first[0], first[1] if len(first) > 1 else "", since)
    return Origin(missed.site)
