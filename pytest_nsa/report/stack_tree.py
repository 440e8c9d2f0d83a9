"""All ranks' last stacks as one tree: each frame once, with the ranks that are in it, and a branch where ranks differ."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from pytest_nsa.evidence.stacks import Frame
from pytest_nsa.evidence.values import Evidence
from pytest_nsa.report.markup import Markup, tag
from pytest_nsa.report.terminal import counters_text, number_ranks, short_place

MOST_BRANCHES = 5  # of a frame; the others, with the fewest ranks, share one line
FOREIGN = 1  # frames of libraries in a row that are shown; more are folded


@dataclass
class Node:
    """A frame and the frames that it called. ``ranks`` are in it; it is the innermost frame of the ranks in ``ended``."""

    frame: Frame | None
    ranks: list[int] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)
    calls: list[Node] = field(default_factory=list)
    rounds: dict[str, list[int]] = field(default_factory=dict)  # counters of its loops ('step = 3'), and the ranks

    def child(self, frame: Frame) -> Node:
        """Return the node of a frame that this one called; add it if it is new."""
        for node in self.calls:
            if node.frame == frame:
                return node
        self.calls.append(Node(frame))
        return self.calls[-1]


def merge(evidence: Evidence) -> Node:
    """Return the tree of the ranks that left a stack."""
    root = Node(None)
    for rank in evidence.ranks:
        if rank.stack is None:
            continue
        node, rounds = root, rank.rounds
        node.ranks.append(rank.rank)
        for frame in reversed([f for f in rank.stack.test_frames if not f.is_ours]):
            node = node.child(frame)
            node.ranks.append(rank.rank)
            if words := rounds.get(frame.describe()):
                node.rounds.setdefault(words, []).append(rank.rank)
        node.ended.append(rank.rank)
    return root


def stack_tree(evidence: Evidence, culprits: Iterable[int]) -> Markup | None:
    """Return the tree, outermost frame first, the culprits' branch marked; None where no rank left a stack."""
    root = merge(evidence)
    if not root.ranks:
        return None
    return tag("ol", *_items(root, frozenset(culprits)), class_="tree")


def _items(node: Node, culprits: frozenset[int]) -> Iterator[Markup]:
    """Yield the frames below a node; a chain without branches stays on one level."""
    calls = sorted(node.calls, key=lambda n: (not culprits & set(n.ranks), -len(n.ranks)))
    for child in calls[:MOST_BRANCHES]:
        parts = len(calls) > 1
        yield tag("li", *_chain(child, culprits, parts=parts), class_="branch" if parts else None)
    left = [rank for child in calls[MOST_BRANCHES:] for rank in child.ranks]
    if left:
        yield tag("li", tag("span", f"{number_ranks(left)}: {len(calls) - MOST_BRANCHES} other places", class_="quiet"))


def _chain(node: Node, culprits: frozenset[int], *, parts: bool) -> Iterator[Markup]:
    """Yield the frames up to the first branch; then the list of branches."""
    is_culprits = bool(culprits & set(node.ranks))
    if parts:
        who = tag("span", number_ranks(node.ranks), class_="who culprit" if is_culprits else "who")
        yield tag("div", who)
    foreign: list[Markup] = []
    while True:
        shown = _frame(node, is_culprits=is_culprits)
        if node.frame is not None and node.frame.is_user:
            yield from _folded(foreign)
            foreign = []
            yield shown
        else:
            foreign.append(shown)
        if len(node.calls) != 1 or node.ended:
            break
        node = node.calls[0]
    yield from _folded(foreign)
    if node.ended and node.calls:
        yield tag("div", tag("span", f"{number_ranks(node.ended)}: here", class_="who"))
    if node.calls:
        yield tag("ol", *_items(node, culprits))


def _folded(frames: list[Markup]) -> Iterator[Markup]:
    """Yield frames of libraries: a few unchanged, many inside an element that unfolds."""
    if len(frames) <= FOREIGN:
        yield from frames
    else:
        yield tag("details", tag("summary", f"{len(frames)} frames of libraries"), *frames)


def _frame(node: Node, *, is_culprits: bool) -> Markup:
    frame = node.frame
    assert frame is not None
    kind = ("user culprit" if is_culprits else "user") if frame.is_user else "foreign"
    shown = short_place(frame.describe())
    inside = shown if frame.is_user else shown.rpartition("/site-packages/")[2]
    place = tag("code", inside, title=None if inside == shown else shown)
    rounds = counters_text(node.rounds) if node.rounds else ""
    return tag("div", place, tag("span", f" {rounds}", class_="quiet") if rounds else "", class_=f"frame {kind}")
