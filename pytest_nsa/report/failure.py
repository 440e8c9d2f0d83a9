"""A failure in report.html: cause, ranks and line; the source around the line; stacks, collectives and lanes of all ranks."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from urllib.parse import quote

from pytest_nsa.diagnosis.causes import CAUSES
from pytest_nsa.diagnosis.rules.exits import is_victim
from pytest_nsa.diagnosis.verdict import Verdict
from pytest_nsa.evidence.source import LOCATION
from pytest_nsa.evidence.stacks import Frame
from pytest_nsa.evidence.values import Evidence
from pytest_nsa.report.divergence import divergence_table
from pytest_nsa.report.frame import build_frame, read_code
from pytest_nsa.report.lanes import TRACE, build_trace, call_tables, lanes
from pytest_nsa.report.markup import Markup, row, table, tag
from pytest_nsa.report.summary import RETRY, Entry
from pytest_nsa.report.terminal import consequence, counters_text, excerpt, number_ranks, short_place
from pytest_nsa.wire import masking

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


CONTEXT = 4  # lines of source on either side
SHOWN_FACTS = 12
OUTPUTS = 8  # ranks with output on the page: culprits first


def failure(entry: Entry, evidence: Evidence) -> Markup:
    """Return the section of a test that failed."""
    v, folder = entry.verdict, quote(entry.folder)
    return tag(
        "article",
        tag("h2", entry.name, " ", outcome_tag(v), tag("span", f" {v.duration_s:.1f} s", class_="quiet")),
        _lead(v),
        frame_figure(v, evidence) or source(evidence, v.where),
        divergence_table(v),
        tag("p", short_place(v.reason), class_="why") if v.where != v.first_divergence.get("where") else None,
        tag("ul", *(tag("li", short_place(text)) for text in v.because)) if v.because else None,
        tag("dl", *_facts(v, evidence)),
        _terms(v),
        _section("Where each rank was", stack_tree(evidence, v.ranks) or _seen(evidence)),
        _section("Collectives", *call_tables(evidence)),
        _section("Ranks over time", lanes(evidence, v.ranks)),
        tag("details", tag("summary", "Evidence"), *_evidence(entry)),
        tag("details", tag("summary", "Output of the ranks"), *_outputs(evidence, v)),
        tag(
            "p",
            tag("button", "Open in Perfetto", type="button", data_perfetto=True),
            " ", tag("a", TRACE, href=f"{folder}/{TRACE}"), " ", tag("a", "folder", href=f"{folder}/"), class_="quiet",
        ),
        tag("script", _json(build_trace(evidence)), type="application/json", class_="trace"),
        class_=f"failure {v.outcome}", id=anchor(entry), data_name=entry.name,
    )  # fmt: skip


def anchor(entry: Entry) -> str:
    """Return the section's id, with a prefix, so that it equals no other id of the page."""
    return f"test-{entry.folder}"


def outcome_tag(v: Verdict) -> Markup:
    """Return the outcome in its colour."""
    return tag("span", v.outcome, class_="tag", style=f"color:var(--{v.outcome})")


def _lead(v: Verdict) -> Markup:
    sure = "certain" if v.certain else f"{v.confidence:.0%} sure"
    cause = CAUSES.get(v.cause)
    meaning = f"{v.cause}: {cause.summary}" if cause is not None else v.cause
    where = [" at ", tag("code", short_place(v.where)), _copy(v.where)] if v.where else []
    return tag(
        "p",
        tag("strong", v.culprits(), f" of {v.world_size}"),
        *where,
        f", {sure}. ",
        tag("span", meaning),
        class_="lead",
    )


def _copy(text: str) -> Markup:
    return tag("button", "copy", type="button", class_="copy", data_copy=text, aria_label=f"copy {text}")


def frame_figure(v: Verdict, evidence: Evidence) -> Markup | None:
    """Return the lines that the verdict's labels name with their notes below them; None where ranks only raised."""
    lines = build_frame(v)
    if not lines:
        return None
    parts: list[Markup] = []
    file, last = "", 0
    for of in lines:
        if of.line and of.file != file:
            parts.append(tag("figcaption", short_place(of.file), _copy(f"{of.file}:{of.line}")))
        elif of.line:
            between = range(last + 1, of.line)
            texts = [(n, read_code(evidence, of.file, n)) for n in between] if len(between) <= CONTEXT else []
            parts += [tag("span", f"{n:>5}  {text}", class_="line") for n, text in texts]
            parts += [tag("span", "    ⋮", class_="line")] if len(between) > CONTEXT else []
        file, last = (of.file, of.line) if of.line else (file, last)
        if of.line:
            parts.append(
                tag(
                    "span",
                    f"{of.line:>5}  {read_code(evidence, of.file, of.line)}",
                    class_="line here" if of.is_blamed else "line",
                )
            )
        parts += [tag("span", f"← {note}", class_="note") for note in of.notes]
    return tag("figure", tag("div", *parts, class_="source", tabindex=0), class_="excerpt")


def source(evidence: Evidence, where: str) -> Markup | None:
    """Return the lines around a location, the line itself marked; None where the source was not kept."""
    match = LOCATION.match(where)
    if match is None:
        return None
    line = int(match["line"])
    # A verdict's path is relative to the tests' root.
    names = (match["file"], f"{evidence.job.root.rstrip('/')}/{match['file']}")
    found = next((s for s in evidence.sources.snippets if s.file in names and s.first <= line <= s.last), None)
    if found is None:
        return None
    texts = found.text.split("\n")
    first, last = max(found.first, line - CONTEXT), min(found.last, line + CONTEXT)
    rows = [
        tag("span", f"{n:>5}  {texts[n - found.first]}\n", class_="line here" if n == line else "line")
        for n in range(first, last + 1)
    ]
    title = tag("figcaption", short_place(where), " ", _copy(f"{match['file']}:{line}"))
    return tag("figure", title, tag("pre", *rows, class_="source", tabindex=0), class_="excerpt")


def _facts(v: Verdict, evidence: Evidence) -> Iterator[Markup]:
    is_one_machine = len({rank.machine for rank in evidence.ranks}) <= 1
    pairs: list[tuple[str, object]] = [
        ("do", v.advice),
        ("run again", RETRY.get(v.retry) if v.retry != "never" else None),
        ("called from", short_place(v.called_from)),
        ("module", v.module),
        ("on", "" if is_one_machine else "; ".join(v.machines)),
        (
            "stalled",
            f"for {v.stalled_s:.1f} s; the verdict took {v.time_to_verdict_s:.1f} s more" if v.stalled_s else "",
        ),
        ("missing", ", ".join(v.parameters_missing[:-6:-1]) + (" …" if len(v.parameters_missing) > 5 else "")),
        ("the plan reads it as", v.reads_as),
        ("group", ", ".join(part for part in (v.backend or "made by the test", v.parallel) if part != "none")),
    ]
    for name, value in pairs:
        if value:
            yield tag("dt", name)
            yield tag("dd", str(value))


def _terms(v: Verdict) -> Markup | None:
    """Return the terms that chose the explanation with their weights, folded."""
    rows = [row(text, f"{weight:+.1f}") for text, weight in v.terms.items()]
    return tag("details", tag("summary", "How we know"), table(("term", "weight"), rows)) if rows else None


def _seen(evidence: Evidence) -> list[Markup]:
    """Return, if there is no stack, the lines on the boards and the exceptions of the ranks, equal ones once."""
    places: dict[str, list[int]] = {}
    for rank in evidence.ranks:
        for error in rank.exceptions[:1]:
            raised = f"{error.type}: {error.headline} at {short_place(error.where)}"
            places.setdefault(consequence(error) if is_victim(error) else raised, []).append(rank.rank)
        if not rank.exceptions and rank.board is not None and rank.board.line and not rank.passed:
            places.setdefault(f"last seen at {short_place(rank.board.line)}", []).append(rank.rank)
    return [tag("p", tag("strong", number_ranks(ranks), class_="who"), " ", text) for text, ranks in places.items()]


def _section(title: str, *body: Markup | list[Markup] | None) -> Markup | None:
    return tag("section", tag("h3", title), *body) if any(body) else None


def _evidence(entry: Entry) -> Iterator[Markup]:
    facts = [f for f in entry.verdict.evidence if f.rank >= 0] + [f for f in entry.verdict.evidence if f.rank < 0]
    rows = []
    for fact in facts[:SHOWN_FACTS]:
        link = tag("a", fact.file, href=f"{quote(entry.folder)}/{quote(fact.file)}") if fact.file else None
        who = f"rank {fact.rank}" if fact.rank >= 0 else ""
        rows.append(
            tag(
                "li",
                tag("strong", f"{who} {fact.kind.replace('_', ' ')}".strip()),
                " ",
                short_place(fact.text),
                " ",
                link,
            )
        )
    yield tag("ul", *rows)
    if len(facts) > SHOWN_FACTS:
        yield tag("p", f"{len(facts) - SHOWN_FACTS} more in verdict.json", class_="quiet")


def _outputs(evidence: Evidence, v: Verdict) -> Iterator[Markup]:
    for rank in sorted(evidence.ranks, key=lambda r: (r.rank not in v.ranks, r.rank))[:OUTPUTS]:
        text = excerpt(rank.folder / "output.log")
        if text:
            yield tag("h4", f"rank {rank.rank}")
            yield tag("pre", text)


def _json(value: object) -> Markup:
    """Return JSON for a script element, escaped so that nothing in it can end the element."""
    return Markup(
        json.dumps(masking.value(value), separators=(",", ":")).replace("<", "\\u003c").replace("&", "\\u0026")
    )
