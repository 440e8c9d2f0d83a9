"""What ranks gave to a collective and what it expects: sizes and dtypes that do not fit."""

from __future__ import annotations

import signal
from collections import Counter

from pytest_nsa.diagnosis.facts import all_facts
from pytest_nsa.diagnosis.rules.blame import blame, rings
from pytest_nsa.diagnosis.verdict import Finding
from pytest_nsa.evidence.board import UNEVEN
from pytest_nsa.evidence.collectives import first_departure
from pytest_nsa.evidence.values import Evidence

_EVEN = ("allreduce", "broadcast", "reduce")


def aborted(evidence: Evidence) -> Finding | None:
    """Find that gloo aborted a rank inside an exchange in which each may give as much as it likes: something else was expected."""
    if evidence.job.backend not in ("", "gloo"):  # NCCL's watchdog ends the ranks that wait in the same way
        return None
    for rank in evidence.ranks:
        at = rank.board.waits_in if rank.board is not None else None
        if rank.signal != signal.SIGABRT or rank.by_us or at is None or not at.op.startswith(UNEVEN):
            continue
        entered = {n: c for n, ring in rings(evidence).items() for c in ring if c.place == at.place}
        if len(entered) < at.size:
            continue
        sizes = Counter((c.dtype, c.count) for c in entered.values()).most_common()
        odd = tuple(n for n, c in sorted(entered.items()) if (c.dtype, c.count) != sizes[0][0])
        clear = len(sizes) > 1 and sizes[0][1] > sizes[1][1]
        shown = "; ".join(
            f"rank {n} gave {c.dtype} x {c.count}" + (f", {c.note}" if c.note else "")
            for n, c in sorted(entered.items())
        )
        return Finding(
            cause="collective_mismatch", ranks=odd if clear else tuple(sorted(entered)), where=at.site,
            reason=f"gloo aborted rank {rank.rank} inside {at.op} #{at.sequence}: others expected something else ({shown})",
            certain=True, confidence=0.7, facts=all_facts(evidence.ranks),
        )  # fmt: skip
    return None


def wrong_numbers(evidence: Evidence) -> Finding | None:
    """Find a test that passed though ranks reduced or broadcast different dtypes or shapes: what was sent were other numbers."""
    entered = first_departure(rings(evidence))
    if entered is None or len({c.op for c in entered.values()}) > 1 or next(iter(entered.values())).op not in _EVEN:
        return None
    culprits, _, _ = blame(evidence, entered)
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
