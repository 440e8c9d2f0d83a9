"""The way that a decision took through its tree, drawn: a question per box, its answer on the way to the next."""

from __future__ import annotations

import textwrap

from pytest_nsa.diagnosis.decision import Decision
from pytest_nsa.report.markup import Markup, tag

WIDTH, MARGIN, LINE = 560, 14, 17
LETTERS = 70  # of a line in a box
GAP = 34


def way(decision: Decision) -> Markup | None:
    """Return the drawing; None where nothing was asked."""
    if not decision.path:
        return None
    parts: list[Markup] = []
    y = 4
    steps = [_split(step) for step in decision.path]
    for question, answer in steps:
        y = _box(parts, question, y, "box")
        parts.append(tag("path", d=f"M{WIDTH // 2} {y} V{y + GAP - 6}", stroke="var(--ink)", marker_end="url(#way)"))
        parts.append(tag("text", answer[:90], x=WIDTH // 2 + 10, y=y + GAP // 2 + 3, class_="answer"))
        y += GAP
    y = _box(parts, decision.action, y, "box end")
    arrow = tag("path", d="M0 0 L7 3.5 L0 7 z", fill="var(--ink)")
    marker = tag("defs", tag("marker", arrow, id="way", markerWidth=7, markerHeight=7, refX=6, refY=3.5, orient="auto"))
    label = "; ".join(decision.path)
    return tag("svg", marker, *parts, viewBox=f"0 0 {WIDTH} {y + 4}", role="img", aria_label=label, class_="way")


def _split(step: str) -> tuple[str, str]:
    """('does one branch fail?', 'yes: branch_sel_only')."""
    question, mark, answer = step.partition("? ")
    return (f"{question}?", answer) if mark else (step, "")


def _box(parts: list[Markup], text: str, y: int, kind: str) -> int:
    """Draw a box; return where it ends."""
    lines = textwrap.wrap(text, LETTERS)[:4] or [""]
    height = len(lines) * LINE + MARGIN
    parts.append(tag("rect", x=2, y=y, width=WIDTH - 4, height=height, rx=6, class_=kind))
    for number, line in enumerate(lines):
        parts.append(tag("text", line, x=WIDTH // 2, y=y + 19 + number * LINE, text_anchor="middle"))
    return y + height
