"""The relative location of two ranks in the program, by their stacks: the function in which they diverge, and the lines."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pytest_nsa.diagnosis.rules.roles import where_they_meet
from pytest_nsa.diagnosis.rules.source import (
    are_of_one_function,
    end_of_with,
    has_a_comprehension,
    is_called_first,
    is_endless_generator,
    is_here,
    is_in_loop,
    line_that_ends,
    loops_of,
    share_a_loop,
)
from pytest_nsa.evidence.board import Collective
from pytest_nsa.evidence.source import Sources, file_name
from pytest_nsa.evidence.stacks import Frame, ThreadStack
from pytest_nsa.evidence.values import RankEvidence


@dataclass(frozen=True, slots=True)
class Parting:
    """The locations of two ranks in the innermost function that both are in, and its source where it was kept.

    ``in_loop``: the call of that function is in a loop; ``below`` and ``other_below``: what it calls on the one and on the
    other rank does. ``fork`` is the line that has called one function on the one, and another on the other, if they part so;
    ``by_one_name``: two of one name, methods of two classes.
    """

    here: str
    there: str
    sources: Sources
    in_loop: bool = False
    below: bool = False
    other_below: bool = False
    fork: str = ""
    by_one_name: bool = False
    called_first: bool | None = None  # whether `fork` calls the one's function before the other's, as `f` in `g(f())`

    @property
    def turned(self) -> Parting:
        """Seen from the other."""
        first = not self.called_first if self.called_first is not None else None
        return Parting(
            self.there, self.here, self.sources, self.in_loop, self.other_below, self.below, called_first=first
        )

    @property
    def comes_first(self) -> bool:
        """Whether the one is at an earlier line than the other, or at what one line calls first."""
        return self.called_first if self.called_first is not None else comes_first(self.sources, self.here, self.there)

    @property
    def goes_round(self) -> bool:
        """Whether a loop may bring both to the same lines again, or it is not known."""
        return (
            self.in_loop or share_a_loop(self.sources, self.here, self.there) or not is_here(self.sources, self.there)
        )


def where_they_part(
    sources: Sources, one: RankEvidence, call: Collective, other: RankEvidence, other_call: Collective
) -> Parting:
    """By their stacks; of a rank that left none, as its process has ended, by the lines that led to its call; else by the sites of
    their calls.
    """
    site, other_site = call.site, other_call.site
    mine, others = user_frames(one), user_frames(other)
    mine, others = _aligned(mine or _frames_of(call, others), others or _frames_of(other_call, mine))
    common, parted = _common(sources, mine, others)
    is_in_call = bool(mine and others) and (mine[-1].describe(), others[-1].describe()) == (site, other_site)
    if not parted and is_in_call and common == min(len(mine), len(others)):
        # One is in a callback: they part in the library that calls it.
        whole, others_whole = _aligned(_all_frames(one), _all_frames(other))
        depth, parted = _common(sources, whole, others_whole)
        if parted:
            mine, others, common = whole, others_whole, depth
    in_loop = _any_in_loop(sources, mine[:common], mine[common:])
    meeting = where_they_meet(one, mine, other, others, common) if parted else None
    if meeting is not None:
        depth, other_depth = meeting
        again, parted_there = _common(sources, mine[depth:], others[other_depth:])
        if parted_there:
            in_loop = in_loop or any(
                _any_in_loop(sources, path[common:to], path[to:]) for path, to in ((mine, depth), (others, other_depth))
            )
            found = _parting(sources, mine[depth:], others[other_depth:], again)
            return replace(found, in_loop=found.in_loop or in_loop)
    if parted:
        return _parting(sources, mine, others, common)
    there, here = _place_in(other, site), _place_in(one, other_site)
    fork, by_one_name = _fork(sources, *_aligned(_all_frames(one), _all_frames(other)))
    first = _is_called_first(sources, mine, others, common)
    if there:
        return Parting(site, there, sources, in_loop, fork=fork, by_one_name=by_one_name, called_first=first)
    return Parting(here or site, other_site, sources, in_loop, fork=fork, by_one_name=by_one_name, called_first=first)


def _parting(sources: Sources, mine: list[Frame], others: list[Frame], common: int) -> Parting:
    """Return where two paths part that share their ``common`` outermost frames."""
    in_loop = _any_in_loop(sources, mine[:common], mine[common:])
    below, other_below = (_any_in_loop(sources, path[common + 1 :]) for path in (mine, others))
    return Parting(mine[common].describe(), others[common].describe(), sources, in_loop, below, other_below)


def _fork(sources: Sources, mine: list[Frame], others: list[Frame]) -> tuple[str, bool]:
    """Return the user's line that has called two functions of the user's, one on each rank, and whether these have one name; ''
    where they do not part so.
    """
    depth = next((i for i, (a, b) in enumerate(zip(mine, others, strict=False)) if a != b), 0)
    # A call by functools (singledispatch, partial) is the line's own.
    caller = next((f for f in mine[:depth][::-1] if not f.file.endswith("/functools.py")), None)
    if caller is None or not (caller.is_user and mine[depth].is_user and others[depth].is_user):
        return "", False
    if are_of_one_function(sources, mine[depth].describe(), others[depth].describe()):
        return "", False
    return caller.describe(), mine[depth].function == others[depth].function


def _is_called_first(sources: Sources, mine: list[Frame], others: list[Frame], common: int) -> bool | None:
    """Return whether the innermost line that both paths share calls the one's next function before the other's."""
    names = [path[common].function if len(path) > common else "" for path in (mine, others)]
    return is_called_first(sources, mine[common - 1].describe(), names[0], names[1]) if common else None


def user_frames(rank: RankEvidence) -> list[Frame]:
    """Return those of the test, the outermost first: what called pytest is not part of it.

    One that leaves a ``with`` is past its body, whatever line Python names for it. Those of a thread that the main one has joined,
    or waits for a result of, follow the main one's.
    """
    found, inner = [], ""
    joining = main_thread_that_joins(rank)
    outer = joining.frames if joining is not None else ()
    stack = rank.last_stack
    for frame in (*(stack.frames if stack is not None else ()), *outer):
        if "/_pytest/" in frame.file:
            break
        if frame.is_user:
            leaves = inner in ("__exit__", "__aexit__")
            found.append(
                replace(frame, line=end_of_with(rank.sources, frame.describe()) or frame.line) if leaves else frame
            )
        inner = frame.function
    return found[::-1]


def line_of_its_loop(rank: RankEvidence) -> str:
    """Return the line that would end the loop which does not end, of the innermost function that is in one: in which line of it the
    rank was found is chance. That is its condition; of a ``while True`` the first ``if`` that leaves it. '' where no loop is known.
    Who takes what a generator without an end yields does not end, and not the generator.
    """
    frames = [f for f in rank.stack.frames if f.is_user][:4] if rank.stack is not None else []
    for frame in [f for f in frames if not is_endless_generator(rank.sources, f.describe())][:3] or frames[:1]:
        loops = loops_of(rank.sources, frame.describe())
        loop = next((loop for loop in reversed(loops) if isinstance(loop, ast.While)), loops[-1] if loops else None)
        if loop is not None:
            return replace(frame, line=line_that_ends(loop)).describe()
    return ""


def main_thread_that_joins(rank: RankEvidence) -> ThreadStack | None:
    """Return the main thread of a rank, where it waits for the thread that shows what the rank does; else None."""
    main = next((t for t in rank.threads if t.is_main), None)
    is_apart = main is not None and rank.last_stack is rank.stack is not main
    return main if main is not None and is_apart and main.waits_for_a_thread else None


def _frames_of(call: Collective, known: list[Frame]) -> list[Frame]:
    """Return the frames of a call, outermost first, by the lines that led to it; its callers' files are those of known frames. One
    without callers was made in the outermost function, or by a version that recorded none.
    """
    file, line, function = parts_of(call.site)
    if not call.callers:
        is_outermost = bool(known) and (known[0].file, known[0].function) == (file, function)
        return [Frame(file, line, function, known[0].is_own)] if is_outermost else []
    files = {file_name(parts_of(call.site)[0]): parts_of(call.site)[0], **{file_name(f.file): f.file for f in known}}
    own = {f.file for f in known if f.is_own}
    places = map(parts_of, reversed(call.way))
    found = [(files.get(file_name(file), file), line, function) for file, line, function in places]
    return [Frame(file, line, function, file in own) for file, line, function in found]


def _all_frames(rank: RankEvidence) -> list[Frame]:
    """Return the frames of a rank's main thread, outermost first, without our own."""
    frames = stack.frames if (stack := rank.last_stack) is not None else ()
    return [frame for frame in frames if not frame.is_ours][::-1]


def _aligned(mine: list[Frame], others: list[Frame]) -> tuple[list[Frame], list[Frame]]:
    """Return both paths from the outermost frame that both have: a dump of a deep stack is cut off at its outer end."""
    if not (mine and others):
        return mine, others
    if mine[0] in others:
        return mine, others[others.index(mine[0]) :]
    return (mine[mine.index(others[0]) :], others) if others[0] in mine else (mine, others)


def _place_in(rank: RankEvidence, site: str) -> str:
    """Return where a rank is in the function of ``site``, by its stack; '' where it is not in it."""
    places = [frame.describe() for frame in (rank.stack.frames if rank.stack is not None else ())]
    return next((place for place in places if are_of_one_function(rank.sources, place, site)), "")


def _common(sources: Sources, *paths: list[Frame]) -> tuple[int, tuple[Frame, ...]]:
    """Return how many outermost frames the paths share, and the next ones where these are of one function; () where they are
    not.
    """
    depth = 0
    for frames in zip(*paths, strict=False):
        if len(set(frames)) > 1:
            first, *more = (frame.describe() for frame in frames)
            return depth, frames if all(are_of_one_function(sources, first, place) for place in more) else ()
        depth += 1
    return depth, ()


def _any_in_loop(sources: Sources, frames: list[Frame], inner: Sequence[Frame] = ()) -> bool:
    """Return whether a loop makes the call of one of the frames; the first of the ``inner`` ones is what the last has called."""
    called = [*(frame.function for frame in (*frames, *inner)[1:]), ""]
    return any(
        is_in_loop(sources, frame.describe()) or has_a_comprehension(sources, frame.describe(), function)
        for frame, function in zip(frames, called, strict=False)
    )


def comes_first(sources: Sources, place: str, other: str) -> bool:
    """Return whether ``place`` is an earlier line of the function that ``other`` is in."""
    return 0 < parts_of(place)[1] < parts_of(other)[1] and are_of_one_function(sources, place, other)


def line_in(call: Collective, place: str) -> int:
    """Return the line of the function of ``place`` that led to a call; 0 where none is known to have."""
    file, _, function = parts_of(place)
    for at_file, line, at_function in map(parts_of, call.way):
        if (file_name(at_file), at_function) == (file_name(file), function):
            return line
    return 0


def where_ways_part(one: tuple[str, ...], other: tuple[str, ...]) -> tuple[str, str]:
    """Return the outermost lines of two ways to a call that differ; the calls' own where none does."""
    pairs = zip(reversed(one), reversed(other), strict=False)
    return next(((a, b) for a, b in pairs if a != b), (one[0], other[0]))


def parts_of(place: str) -> tuple[str, int, str]:
    """Return file, line and function of a location; the line is 0 where it names none."""
    at, _, function = place.rpartition(" in ")
    file, _, line = at.rpartition(":")
    return file, int(line) if line.isdigit() else 0, function


def recomputes(rank: RankEvidence) -> bool:
    """Return whether a rank runs a part of its forward a second time, for gradient checkpointing: that is not a round of a loop."""
    return rank.stack is not None and any("torch/utils/checkpoint.py" in f.file for f in rank.stack.frames)
