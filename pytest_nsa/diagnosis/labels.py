"""What each rank did at which line, as short labels: a report puts them next to the source."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from pytest_nsa.diagnosis.explain.conditions import names_the_rank
from pytest_nsa.diagnosis.explain.keys import get_key
from pytest_nsa.diagnosis.facts import awaited, last_seen, signal_text
from pytest_nsa.diagnosis.rules.activity import find_activity
from pytest_nsa.diagnosis.rules.exits import is_victim
from pytest_nsa.diagnosis.verdict import Finding, Label
from pytest_nsa.evidence.source import LOCATION
from pytest_nsa.evidence.values import Evidence, RankEvidence

MOST_TEXT = 100  # characters of an exception's message
ENDED = "has ended its test"
RAISES = "raises "
CONDITION = "passed this condition"


def make_labels(evidence: Evidence, finding: Finding) -> tuple[Label, ...]:
    """Return the labels of a finding: the line of each rank that did not pass, the line that is blamed, and the condition above it.

    Labels with one text at one line are one label with several ranks. A rank that has ended its test has no line.
    """
    found: dict[tuple[str, str], list[int]] = {}
    for rank in evidence.ranks:
        where, text = _describe_state(rank)
        rounds = rank.rounds.get(where, "")
        found.setdefault((where, f"{text}, {rounds}" if rounds else text), []).append(rank.rank)
    labels = [_label(where, tuple(ranks), text) for (where, text), ranks in found.items()]
    blamed = _label(finding.where, finding.ranks, "")
    if blamed.line and not any((label.file, label.line) == (blamed.file, blamed.line) for label in labels):
        labels.append(blamed)
    return (*_conditions(evidence, finding, labels), *labels)


def _label(where: str, ranks: tuple[int, ...], text: str) -> Label:
    at = LOCATION.match(where)
    return Label(file=at["file"] if at else "", line=int(at["line"]) if at else 0, ranks=ranks, text=text)


def _describe_state(rank: RankEvidence) -> tuple[str, str]:
    """Return the line of a rank, as a location, and what it did there."""
    call = awaited(rank)
    within = f" in {call.describe_payload()}" if call is not None else ""
    if rank.exceptions:
        error = next((e for e in rank.exceptions if not is_victim(e)), None)
        if error is None:
            return rank.exceptions[0].where, f"loses the connection to another rank{within}"
        return error.where, f"{RAISES}{error.type}" + (f": {error.headline[:MOST_TEXT]}" if error.headline else "")
    if rank.fatal_signal:
        return last_seen(rank), f"is ended by {signal_text(rank.fatal_signal)}{within}"
    if rank.exit_code is not None and not rank.finished:
        return last_seen(rank), f"exits with code {rank.exit_code}"
    if rank.skipped is not None or rank.xfailed is not None:
        return str(rank.left.get("where", "")), "leaves the test here"
    if rank.finished:
        return "", ENDED
    if call is not None:
        return last_seen(rank) or call.site, f"waits here: {call.describe_payload()}"
    if rank.waits_for_a_key:
        key = get_key(rank)
        return last_seen(rank), f"waits for a key of a store{f': {key}' if key else ''}"
    activity = find_activity(rank)
    if activity is None:
        return last_seen(rank), "is here"
    return activity.where or last_seen(rank), activity.description


def _conditions(evidence: Evidence, finding: Finding, labels: list[Label]) -> Iterator[Label]:
    """Yield a label for the condition on the rank that is nearest above the line that is blamed, with the ranks inside it."""
    around = evidence.sources.around(finding.where)
    inside = next((s for s in reversed(around) if isinstance(s, ast.If) and names_the_rank(s.test)), None)
    at = LOCATION.match(finding.where)
    if inside is None or at is None:
        return
    first, last = inside.body[0].lineno, inside.body[-1].end_lineno or 0
    ranks = sorted(
        {r for label in labels if label.file == at["file"] and first <= label.line <= last for r in label.ranks}
    )
    if ranks and len(ranks) < evidence.job.world_size:
        yield Label(file=at["file"], line=inside.lineno, ranks=tuple(ranks), text=CONDITION)
