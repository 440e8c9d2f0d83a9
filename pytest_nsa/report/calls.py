"""The table of collectives: a row per rank, a column per number; a missing or differing call is marked."""

from __future__ import annotations

from collections.abc import Iterator

from pytest_nsa.evidence.board import Collective
from pytest_nsa.evidence.values import Evidence
from pytest_nsa.report.markup import Markup, tag
from pytest_nsa.report.terminal import number_ranks

COLUMNS = 10  # the last of a group
MOST_GROUPS = 6

Column = dict[int, Collective]  # by rank


def make_columns(evidence: Evidence) -> dict[str, dict[int, Column]]:
    """Return collectives by group, number and rank; sends and receives are excluded, as they pair by peer and tag."""
    found: dict[str, dict[int, Column]] = {}
    for rank in evidence.ranks:
        for c in rank.collectives:
            if c.peer == -1:
                found.setdefault(c.group, {}).setdefault(c.sequence, {})[rank.rank] = c
    return found


def is_whole(column: Column) -> bool:
    """Return whether all ranks of the group made the call, with equal operation and arguments."""
    first = next(iter(column.values()))
    return len(column) >= first.size and len({c.shape for c in column.values()}) == 1


def call_tables(evidence: Evidence) -> Iterator[Markup]:
    """Yield a table per group in which ranks differ, else the one of the group that was used last."""
    groups = make_columns(evidence)
    uneven = [name for name, columns in groups.items() if not all(map(is_whole, columns.values()))]
    latest = max(groups, key=lambda n: max(c.entered for col in groups[n].values() for c in col.values()), default=None)
    for name in uneven[:MOST_GROUPS] or ([latest] if latest is not None else []):
        yield _table(evidence, name, groups[name])
    if len(uneven) > MOST_GROUPS:
        yield tag("p", f"{len(uneven) - MOST_GROUPS} other groups differ, too.", class_="quiet")


def _table(evidence: Evidence, group: str, columns: dict[int, Column]) -> Markup:
    numbers = sorted(columns)[-COLUMNS:]
    members = [r for r in evidence.members(group) if r < len(evidence.ranks)]
    rows: dict[tuple[str, ...], list[int]] = {}
    cells: dict[tuple[str, ...], list[Markup]] = {}
    for rank in members:
        row = [_cell(columns[n], rank) for n in numbers]
        key = tuple(str(cell) for cell in row)
        rows.setdefault(key, []).append(rank)  # equal rows once: 64 ranks have two or three different ones
        cells[key] = row
    head = tag("tr", tag("th", "rank", scope="col"), *(tag("th", f"#{n}", scope="col") for n in numbers))
    body = [
        tag("tr", tag("th", number_ranks(ranks).partition(" ")[2], scope="row"), *cells[key])
        for key, ranks in rows.items()
    ]
    caption = f"collectives of {'the default group' if group in ('', 'default', '0') else f'group {group}'}"
    return tag(
        "div",
        tag("table", tag("caption", caption), tag("thead", head), tag("tbody", *body), class_="calls"),
        class_="scroll",
    )


def _cell(column: Column, rank: int) -> Markup:
    usual = _usual(column)
    c = column.get(rank)
    if c is None:
        return tag("td", "not entered", class_="hole", title=f"rank {rank} did not enter it")
    odd = c.shape != usual.shape
    state = "inside" if c.is_inside else ""
    label = [c.op, tag("br"), tag("small", f"{c.dtype} × {c.count}" if c.dtype else "")]
    if c.is_inside:
        label.append(tag("small", " waits", class_="waits"))
    return tag("td", *label, class_=f"{'odd ' if odd else ''}{state}".strip() or None, title=c.describe())


def _usual(column: Column) -> Collective:
    """Return the call that most ranks made at this place."""
    shapes = [c.shape for c in column.values()]
    most = max(shapes, key=shapes.count)
    return next(c for c in column.values() if c.shape == most)


def find_waits(evidence: Evidence) -> dict[int, set[int]]:
    """Return, by rank, the ranks that it waits for: members of the group of its call that have not entered this call."""
    groups = make_columns(evidence)
    found: dict[int, set[int]] = {}
    for rank in evidence.ranks:
        for c in rank.board.inside if rank.board is not None and not rank.finished else ():
            if c.peer >= 0:
                found.setdefault(rank.rank, set()).add(c.peer)
            elif c.peer == -1:
                there = groups[c.group].get(c.sequence, {})
                missing = {m for m in evidence.members(c.group) if m not in there or there[m].shape != c.shape}
                if missing:
                    found.setdefault(rank.rank, set()).update(missing - {rank.rank})
    return found
