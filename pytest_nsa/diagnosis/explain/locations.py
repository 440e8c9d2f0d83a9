"""Locations in stacks: the user's frames, the line of an endless loop, the lines at which two call paths diverge."""

from __future__ import annotations

import ast
from dataclasses import replace

from pytest_nsa.diagnosis.explain.source import find_loops, line_that_ends
from pytest_nsa.evidence.board import Collective
from pytest_nsa.evidence.source import file_name
from pytest_nsa.evidence.stacks import Frame
from pytest_nsa.evidence.values import RankEvidence


def user_frames(rank: RankEvidence) -> list[Frame]:
    """Return the test's frames, outermost first, without the frames that called pytest."""
    found = []
    stack = rank.last_stack
    for frame in stack.frames if stack is not None else ():
        if "/_pytest/" in frame.file:
            break
        if frame.is_user:
            found.append(frame)
    return found[::-1]


def line_of_its_loop(rank: RankEvidence) -> str:
    """Return the line that would end the innermost function's endless loop; '' where no loop is known.

    The sampled line inside the loop is arbitrary. The line returned is the loop's condition, or, for a ``while True``,
    the first ``if`` that leaves it.
    """
    frames = [f for f in rank.stack.frames if f.is_user] if rank.stack is not None else []
    for frame in frames[:3]:
        loops = find_loops(rank.sources, frame.describe())
        loop = next((loop for loop in reversed(loops) if isinstance(loop, ast.While)), loops[-1] if loops else None)
        if loop is not None:
            return replace(frame, line=line_that_ends(loop)).describe()
    return ""


def find_line(call: Collective, place: str) -> int:
    """Return the line, in the function of ``place``, that led to a call; 0 where none is known."""
    file, _, function = split_place(place)
    for at_file, line, at_function in map(split_place, call.way):
        if (file_name(at_file), at_function) == (file_name(file), function):
            return line
    return 0


def diverging_lines(one: tuple[str, ...], other: tuple[str, ...]) -> tuple[str, str]:
    """Return the outermost lines at which the paths to two calls diverge; the calls' own lines where the paths are
    equal.
    """
    pairs = zip(reversed(one), reversed(other), strict=False)
    return next(((a, b) for a, b in pairs if a != b), (one[0], other[0]))


def split_place(place: str) -> tuple[str, int, str]:
    """Return file, line and function of a location; the line is 0 where the location has none."""
    at, _, function = place.rpartition(" in ")
    file, _, line = at.rpartition(":")
    return file, int(line) if line.isdigit() else 0, function
