"""Verdicts to decision: one sentence on a whole run. A repository that has a plan supplies its own
(`pytest_nsa_decide`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from pytest_nsa.diagnosis.verdict import Verdict

SCHEMA = 1
REFUSED = "engine.refused"  # the rule that no rank was started by
MOST_NAMED = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """The decision on a run: what is wrong, what to do, and the steps that led there.

    A plan may add a confidence (0 to 1), ``hypotheses`` as rows of (hypothesis, state, grounds), and one line on
    whether the system under test is ready, with the criteria. ``tree`` is the plan's whole tree as (question, exits
    ...) in the order of the questions; ``taken`` is the exit that was taken. Each step of ``path`` begins with its
    question. ``factors`` is a table for the reports: the names of its columns, then a row per scenario, which begins
    with its name.
    """

    sentence: str
    action: str
    path: tuple[str, ...]
    confidence: float = 1.0
    hypotheses: tuple[tuple[str, ...], ...] = ()
    readiness: str = ""
    tree: tuple[tuple[str, ...], ...] = ()
    taken: str = ""
    factors: tuple[tuple[str, ...], ...] = ()

    def columns(self) -> dict[str, dict[str, str]]:
        """Return the further columns of a table of scenarios: per name, the cells by scenario; not those that are empty."""
        names, *rows = self.factors or ((),)
        found = {name: {row[0]: row[i] for row in rows if len(row) > i} for i, name in enumerate(names) if i}
        return {name: cells for name, cells in found.items() if any(cells.values())}

    def to_json(self) -> dict[str, Any]:
        """Return the object that decision.json holds; without ``factors`` where a plan has none."""
        found = asdict(self)
        return {"schema": SCHEMA, **{name: value for name, value in found.items() if value or name != "factors"}}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Decision:
        """Build it from what `to_json` returned; keys of a later schema are ignored. Raises KeyError for one that is missing."""
        return cls(
            sentence=str(data["sentence"]),
            action=str(data["action"]),
            path=tuple(map(str, data["path"])),
            confidence=float(data.get("confidence", 1.0)),
            hypotheses=tuple(tuple(map(str, row)) for row in data.get("hypotheses", ())),
            readiness=str(data.get("readiness", "")),
            tree=tuple(tuple(map(str, row)) for row in data.get("tree", ())),
            taken=str(data.get("taken", "")),
            factors=tuple(tuple(map(str, row)) for row in data.get("factors", ())),
        )


def decide(verdicts: Mapping[str, Verdict]) -> Decision:
    """Return the decision that the verdicts support: on the most frequent cause, by its verdict with the highest confidence."""
    failed = {name: v for name, v in verdicts.items() if v.failed}
    if not verdicts:
        return Decision(
            sentence="Nothing was run on ranks.", action="run the tests", path=("nothing was run on ranks",)
        )
    if not failed:
        return nothing_wrong(verdicts)
    refused = without_ranks(verdicts)
    if refused is not None:
        return refused
    name, first = surest(most_frequent(failed))
    action, step = choose_advice(failed, name, first)
    return Decision(sentence=sentence(verdicts, failed, name, first), action=action, path=(step,))


def nothing_wrong(verdicts: Mapping[str, Verdict]) -> Decision:
    """Return the decision on a run without failures."""
    counts = [
        (sum(v.outcome == "PASS" for v in verdicts.values()), "passed"),
        (sum(v.expected for v in verdicts.values()), "failed as expected"),
        (sum(v.outcome == "SKIP" for v in verdicts.values()), "skipped"),
    ]
    counted = ", ".join(f"{number} {word}" for number, word in counts if number)
    text = f"Nothing is wrong: of {_counted(verdicts)}, {counted}."
    return Decision(sentence=text, action="nothing to do", path=("nothing failed",))


def without_ranks(verdicts: Mapping[str, Verdict]) -> Decision | None:
    """Return the decision where every failure is that no ranks could be started, so that nothing is known of the tests;
    else None.
    """
    failed = [v for v in verdicts.values() if v.failed]
    if not failed or any(v.rule != REFUSED for v in failed):
        return None
    reason = failed[0].reason
    return Decision(
        sentence=f"{reason[:1].upper()}{reason[1:]}. {len(failed)} of {_counted(verdicts)} did not run.",
        action="fix what kept the ranks from starting, and run again: nothing is known about the tests",
        path=(f"could the ranks be started? no, of {len(failed)} of {_counted(verdicts)}",),
    )


def with_failures(decision: Decision, verdicts: Mapping[str, Verdict], others: Mapping[str, str]) -> Decision:
    """Return the decision on a run in which pytest counts failures that no verdict explains: ``others``, with their
    reasons.
    """
    if not others:
        return decision
    named = [f"{name}: {reason}" for name, reason in others.items()]
    shown = "; ".join(named[:MOST_NAMED])
    more = f", and {len(others) - MOST_NAMED} more" if len(others) > MOST_NAMED else ""
    path = (*decision.path, f"did tests fail that have no failing verdict? yes, {len(others)}: {shown}{more}")
    no_verdict = f"{'has no verdict' if len(others) == 1 else 'have no verdict, the first'}: {named[0]}"
    if any(v.failed for v in verdicts.values()):
        return replace(
            decision, sentence=f"{decision.sentence} {count(len(others), 'more failure')} {no_verdict}", path=path
        )
    rest = f" Of {_counted(verdicts)} on ranks, none failed." if verdicts else ""
    # Whether what was tested is ready cannot be decided by the verdicts alone.
    return replace(
        decision,
        sentence=f"{count(len(others), 'failure')} {no_verdict}.{rest}",
        action="read what pytest prints of it",
        path=path,
        readiness="",
    )


def most_frequent(failed: Mapping[str, Verdict]) -> dict[str, Verdict]:
    """Return the verdicts of the most frequent cause; among equals, the cause that occurred first."""
    causes = [v.cause for v in failed.values()]
    most = max(causes, key=causes.count)
    return {name: v for name, v in failed.items() if v.cause == most}


def surest(failed: Mapping[str, Verdict]) -> tuple[str, Verdict]:
    """Return the verdict with the highest confidence; among equals, the first."""
    return max(failed.items(), key=lambda entry: entry[1].confidence)


def sentence(verdicts: Mapping[str, Verdict], failed: Mapping[str, Verdict], name: str, first: Verdict) -> str:
    """State what is wrong: the number of failures by cause, and the scenario, rank, line, cause and first reason of ``first``."""
    where = f" at {first.where}" if first.where else ""
    share = f"{len(failed)} of {_counted(verdicts)} fail{'s' if len(failed) == 1 else ''}"
    cause = f" ({first.cause})" if first.cause else ""
    culprits = first.culprits() if first.ranks else ""
    counts = Counter(v.cause or "no cause" for v in failed.values()).most_common()
    if len(counts) > 1:
        shown = ", ".join(f"{name} {n}" for name, n in counts[:5])
        shown += f" and {len(counts) - 5} more" if len(counts) > 5 else ""
        share += f", of {len(counts)} causes: {shown}"
    elif len(failed) > 1:
        share += ", all with this cause"
    subject = f"{name} ends in {first.outcome}{cause}" + (f" on {culprits}" if culprits else "")
    return f"{subject}{where}: {first.reason.partition('; ')[0].rstrip('.')}. {share}."


def choose_advice(failed: Mapping[str, Verdict], name: str, first: Verdict) -> tuple[str, str]:
    """Return the advice for the verdict ``first``, and the step of the path that led to it."""
    causes = sorted({v.cause for v in failed.values() if v.cause})
    step = f"do the verdicts name one cause? {'yes' if len(causes) == 1 else 'no'}: {', '.join(causes) or 'none'}"
    if len(causes) > 1:
        same = sum(v.cause == first.cause for v in failed.values())
        step += f"; the advice is for {first.cause}, {same} of {len(failed)}"
    if not first.advice:
        return "read the verdicts below", step
    return (
        f"{first.advice} ({'scenario' if first.scenario else 'test'} {name}, {first.culprits()}, {first.where or 'no line known'})",
        step,
    )


def count(n: int, noun: str) -> str:
    """'1 test', '2 tests'."""
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def _counted(verdicts: Mapping[str, Verdict]) -> str:
    """'1 test', '2 scenarios'."""
    return count(len(verdicts), choose_noun(verdicts.values()))


def choose_noun(verdicts: Iterable[Verdict]) -> str:
    """'scenario' where all verdicts are of scenarios, else 'test'."""
    return "scenario" if all(v.scenario for v in verdicts) else "test"
