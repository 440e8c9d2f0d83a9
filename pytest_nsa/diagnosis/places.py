"""Where two ranks stand to each other in the program, by their stacks: in which function their ways part, and at which lines."""

from __future__ import annotations

from pytest_nsa.evidence import RankEvidence
from pytest_nsa.watch.stacks import Frame


def where_they_part(one: RankEvidence, site: str, other: RankEvidence, other_site: str) -> tuple[str, str]:
    """Where two ranks stand in the innermost function that both are in, by their stacks, else by the sites of their calls."""
    paths = [user_frames(one), user_frames(other)]
    parted = ("", "")
    for a, b in zip(*paths, strict=False):
        if (a.file, a.function) != (b.file, b.function):
            break
        parted = (a.describe(), b.describe())
        if a.line != b.line:
            return parted
    there, here = _place_in(other, site), _place_in(one, other_site)
    return (site, there) if there else (here or site, other_site)


def user_frames(rank: RankEvidence) -> list[Frame]:
    """The outermost first."""
    return [f for f in reversed(rank.stack.frames) if f.is_user] if rank.stack is not None else []


def _place_in(rank: RankEvidence, site: str) -> str:
    """Where a rank is in the function of ``site``, by its stack; '' where it is not in it."""
    file, function = site.partition(":")[0], site.rpartition(" in ")[2]
    frames = rank.stack.frames if rank.stack is not None else ()
    return next((f.describe() for f in frames if (f.file, f.function) == (file, function)), "")


def lines_where_paths_part(ranks: list[RankEvidence]) -> list[int] | None:
    """The lines of the ranks in the innermost function that all of them are in, where those differ."""
    paths = [user_frames(rank) for rank in ranks]
    for frames in zip(*paths, strict=False):
        if len({(f.file, f.function) for f in frames}) > 1:
            return None
        lines = [f.line for f in frames]
        if len(set(lines)) > 1:
            return lines
    return None


def comes_first(place: str, other: str) -> bool:
    """Whether ``place`` is an earlier line of the function that ``other`` is in."""
    (file, line, function), (other_file, other_line, other_function) = _parts(place), _parts(other)
    return (file, function) == (other_file, other_function) and 0 < line < other_line


def _parts(place: str) -> tuple[str, int, str]:
    at, _, function = place.rpartition(" in ")
    file, _, line = at.rpartition(":")
    return file, int(line) if line.isdigit() else 0, function


def recomputes(rank: RankEvidence) -> bool:
    """Whether a rank runs a part of its forward a second time, for gradient checkpointing: that is no round of a loop."""
    return rank.stack is not None and any("torch/utils/checkpoint.py" in f.file for f in rank.stack.frames)
