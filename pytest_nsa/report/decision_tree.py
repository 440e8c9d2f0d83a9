"""The tree of a decision as a drawing: a box per question, its exits below it, the path taken; for SUMMARY.md in Mermaid."""

from __future__ import annotations

import itertools
import re
import textwrap
from collections.abc import Sequence
from typing import NamedTuple

from pytest_nsa.diagnosis.decision import Decision
from pytest_nsa.report.markup import Markup, tag
from pytest_nsa.report.plain import visible

WIDTH, MARGIN, LINE = 400, 14, 17  # as wide as a phone
ANSWER = 30  # letters of an answer next to an arrow
LETTERS = 52  # of a line in a box
GAP = 34
MOST = 30  # questions that are drawn


def way(decision: Decision) -> Markup | None:
    """Return the drawing: the whole tree if the decision has one, else the questions of its path; None for one question or none."""
    if len(decision.path) < 2 and not decision.tree:
        return None
    drawing = _Drawing()
    questions = _questions(decision)
    for text, exits, answer, more in questions:
        faint = "" if answer is not None else " unasked"
        drawing.box(text, f"box{faint}")
        for exit_ in exits:
            drawing.exit(exit_, "exit taken" if exit_ == decision.taken and answer is not None else f"exit{faint}")
        for step in more:
            drawing.line(step, "answer")
        if decision.taken in exits and answer is not None and decision.taken:
            drawing.y += 6
            drawing.box(decision.action, "box end")
            drawing.y += GAP // 2
        elif text != questions[-1].text or not decision.taken:
            drawing.arrow(answer)
    if not decision.taken:
        drawing.box(decision.action, "box end")
    return drawing.svg("; ".join(decision.path))


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


class _Drawing:
    """The parts drawn so far, and the y coordinate of the next one."""

    def __init__(self) -> None:
        self.parts: list[Markup] = []
        self.y = 4

    def box(self, text: str, kind: str) -> None:
        """Draw a box with text, over the whole width."""
        lines = textwrap.wrap(text, LETTERS)[:4] or [""]
        height = len(lines) * LINE + MARGIN
        self.parts.append(tag("rect", x=2, y=self.y, width=WIDTH - 4, height=height, rx=6, class_=kind))
        self._text(lines, WIDTH // 2, self.y + 19, kind, anchor="middle")
        self.y += height

    def exit(self, text: str, kind: str) -> None:
        """Draw an exit of the question above: an elbow, and what it leads to."""
        self.parts.append(tag("path", d=f"M18 {self.y} v13 h14", class_=kind))
        self.line(text, kind)

    def line(self, text: str, kind: str) -> None:
        """Draw a line of text below the last part; long text takes several lines."""
        lines = textwrap.wrap(text, LETTERS)[:3] or [""]
        self._text(lines, 38, self.y + 17, kind)
        self.y += len(lines) * LINE + 3

    def arrow(self, answer: str | None) -> None:
        """Draw the arrow to the next question, with the answer that leads there; faint if it was not taken."""
        kind = "answer" if answer is not None else "answer unasked"
        stroke = "var(--ink)" if answer is not None else "var(--line)"
        x, lines = WIDTH // 2, textwrap.wrap(answer or "", ANSWER)[:4] or [""]
        height = GAP + (len(lines) - 1) * LINE
        self.parts.append(tag("path", d=f"M{x} {self.y} V{self.y + height - 6}", stroke=stroke, marker_end="url(#way)"))
        self._text(lines, x + 10, self.y + GAP // 2 + 3, kind)
        self.y += height

    def svg(self, label: str) -> Markup:
        """Return the whole drawing."""
        arrow = tag("path", d="M0 0 L7 3.5 L0 7 z", fill="var(--ink)")
        marker = tag("marker", arrow, id="way", markerWidth=7, markerHeight=7, refX=6, refY=3.5, orient="auto")
        box = f"0 0 {WIDTH} {self.y + 4}"
        return tag("svg", tag("defs", marker), *self.parts, viewBox=box, role="img", aria_label=label, class_="way")

    def _text(self, lines: Sequence[str], x: int, y: int, kind: str, anchor: str = "start") -> None:
        for number, line in enumerate(lines):
            self.parts.append(tag("text", line, x=x, y=y + number * LINE, text_anchor=anchor, class_=kind))
