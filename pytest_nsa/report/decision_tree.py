"""The tree of a decision: a list of questions with their exits and the path taken; for SUMMARY.md in Mermaid."""

from __future__ import annotations

import itertools
import re
from typing import NamedTuple

from pytest_nsa.diagnosis.decision import Decision
from pytest_nsa.report.markup import Markup, tag
from pytest_nsa.report.plain import visible

MOST = 30  # questions that are shown


def way(decision: Decision) -> Markup | None:
    """Return the whole tree if the decision has one, else the questions of its path; None for one question or none."""
    if len(decision.path) < 2 and not decision.tree:
        return None
    items = []
    for text, exits, answer, more in _questions(decision):
        shown = (
            tag("strong", name, class_="taken") if name == decision.taken and answer is not None else name
            for name in exits
        )
        below = [tag("li", child) for child in (*shown, *more)]
        replied = tag("em", f" {answer}", class_="answer") if answer else None
        faint = "unasked" if answer is None else None
        items.append(tag("li", text, replied, tag("ul", *below) if below else None, class_=faint))
    return tag("ol", *items, tag("li", tag("strong", decision.action)), class_="way")


def mermaid(decision: Decision) -> list[str]:
    """Return the tree as lines of a Mermaid flowchart, which GitHub and GitLab draw; [] if the decision has no tree."""
    if not decision.tree:
        return []
    lines = ["flowchart TD"]
    taken: list[str] = []
    for number, (text, exits, answer, _) in enumerate(_questions(decision)):
        lines.append(f"  q{number}{{{_quoted(text)}}}")
        if number:
            lines.append(f"  q{number - 1} --> q{number}")
        if answer is not None:
            taken.append(f"q{number}")
        for index, exit_ in enumerate(exits):
            lines.append(f"  q{number} --> e{number}_{index}[{_quoted(exit_)}]")
            if exit_ == decision.taken and answer is not None:
                taken.append(f"e{number}_{index}")
    return [*lines, "  classDef taken stroke-width:3px", f"  class {','.join(taken)} taken"] if taken else lines


class _Question(NamedTuple):
    """A question, its exits, its answer (None if it was not asked), and the further steps of the path until the next question."""

    text: str
    exits: tuple[str, ...]
    answer: str | None
    more: list[str]


def _questions(decision: Decision) -> list[_Question]:
    """Return the questions of the tree, else those of the path; at most `MOST`."""
    steps = [_split(step) for step in decision.path]
    if not decision.tree:
        return [_Question(question, (), answer, []) for question, answer in steps[:MOST]]
    found: list[_Question] = []
    known = {row[0] for row in decision.tree if row}
    for row in decision.tree:
        if not row:
            continue
        at = next((i for i, (question, _) in enumerate(steps) if question == row[0]), None)
        behind = [] if at is None else itertools.takewhile(lambda step: step[0] not in known, steps[at + 1 :])
        more = [f"{question} {answer}" for question, answer in behind]
        found.append(_Question(row[0], tuple(row[1:]), None if at is None else steps[at][1], more))
    return found[:MOST]


def _split(step: str) -> tuple[str, str]:
    """Return question and answer: ('does one branch fail?', 'yes: branch_sel_only')."""
    question, mark, answer = step.partition("? ")
    return (f"{question}?", answer) if mark else (step, "")


def _quoted(text: str) -> str:
    """Return text in Mermaid's quotes, without characters that are markup in Mermaid or HTML."""
    return '"' + re.sub(r'["<>`#&]', "'", visible(" ".join(text.split()))) + '"'
