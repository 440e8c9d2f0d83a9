"""report.html: one self-contained file. First the sentence, then the failures, then a table of all tests, folded."""

import contextlib
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

from pytest_nsa.diagnosis.decision import Decision, choose_noun, count
from pytest_nsa.evidence.load import load
from pytest_nsa.evidence.values import Evidence
from pytest_nsa.report.failure import anchor, failure, outcome_tag
from pytest_nsa.report.lanes import TRACE, lanes, write_trace
from pytest_nsa.report.markup import Markup, document, file, row, table, tag
from pytest_nsa.report.runs import ANNOUNCEMENTS
from pytest_nsa.report.summary import Entry, way
from pytest_nsa.report.terminal import short_place
from pytest_nsa.wire.files import read_lines

SHOWN = 40  # announcements
COLUMNS = ("test", "result", "cause", "rank", "where", "time")  # of the table of all tests
DETAILED = 20  # failures with all details; further ones are in the table and in their folders


def render(run: Path, entries: list[Entry], decision: Decision, *, interrupted: bool) -> str:
    """Return the whole page. Reads the folders of ``entries`` under ``run``, and writes a trace into each."""
    failed = [e for e in entries if e.verdict.failed]
    script = file("report.js")
    evidence = {e.folder: found for e in entries if e.folder and (found := _read(run, e)) is not None}
    body = tag(
        "body",
        tag("a", "to the table of all tests", href="#all", class_="skip"),
        tag(
            "header",
            tag("p", tag("strong", "INTERRUPTED"), ": what follows is what had run until then.")
            if interrupted
            else None,
            tag("h1", _title(entries, decision)),
            *_decided(failed, decision, choose_noun(e.verdict for e in entries)),
            tag("p", *_counts(entries), class_="counts"),
            _table(entries, failed, decision),
        ),
        tag(
            "main",
            *_failures(failed, evidence),
            _decision(decision) if failed else None,
            _announcements(run),
            _all(entries, evidence),
        ),
        tag("script", script),
    )
    return document(run.name, body, script)


def _read(run: Path, entry: Entry) -> Evidence | None:
    try:
        evidence = load(run / entry.folder)
    except (OSError, ValueError):
        return None
    with contextlib.suppress(OSError):  # a folder that can only be read
        write_trace(run / entry.folder, evidence)
    return evidence


def _title(entries: list[Entry], decision: Decision) -> str:
    """Return the page's title: how many tests fail, or the decision if no test fails."""
    failed = sum(e.verdict.failed for e in entries)
    if not failed:
        return short_place(decision.sentence)
    noun = choose_noun(e.verdict for e in entries)
    where = "" if noun == "scenario" else " on ranks"  # pytest counts further tests
    return f"{failed} of {count(len(entries), noun)}{where} fail{'s' if failed == 1 else ''}"


def _decided(failed: list[Entry], decision: Decision, noun: str) -> Iterator[Markup | None]:
    """Yield a plan's decision: before all else, as a phone's first screen has no more. Of tests, each failure has its advice."""
    if failed and noun != "scenario":
        return
    if failed:
        yield tag("h2", "Decision")
    sure = f" ({decision.confidence:.0%} sure)" if decision.confidence < 1 else None
    yield tag("p", f"{decision.action[:1].upper()}{decision.action[1:]}", sure, class_="action")
    yield tag("p", short_place(decision.sentence), class_="sentence") if failed else None
    yield tag("p", decision.readiness) if decision.readiness else None


def _table(entries: list[Entry], failed: list[Entry], decision: Decision) -> Markup | None:
    """Return a row per failure, or where a plan has factors per scenario; a click on a failure's name opens it."""
    if not failed:
        return None
    more = decision.columns()
    rows = []
    for entry in sorted(entries, key=lambda e: not e.verdict.failed) if more else failed:
        v = entry.verdict
        is_shown = entry.folder and entry in failed[:DETAILED]
        name = tag("a", entry.name, href=f"#{anchor(entry)}") if is_shown else entry.name
        who, where = v.culprits() if v.failed and v.ranks else "", tag("code", short_place(v.where)) if v.where else ""
        further = [cells.get(entry.name, "") for cells in more.values()]
        rows.append(row([outcome_tag(v), " ", name], who, v.cause, where, *further, f"{v.duration_s:.1f}"))
    keys = tag("p", "j and k: the next failure, and the one before", class_="quiet keys") if len(failed) > 1 else None
    return tag(
        "div",
        table((choose_noun(e.verdict for e in entries), "rank", "cause", "where", *more, "seconds"), rows, "list"),
        keys,
    )


def _counts(entries: list[Entry]) -> Iterator[Markup]:
    found = Counter((e.verdict.outcome, e.verdict.expected) for e in entries)
    for (outcome, expected), n in sorted(found.items(), key=lambda pair: (pair[0][0] in ("PASS", "SKIP"), pair[0])):
        yield tag("span", tag("b", n), f" {outcome}{' as expected' if expected else ''}", class_=f"chip {outcome}")


def _failures(failed: list[Entry], evidence: dict[str, Evidence]) -> Iterator[Markup]:
    first: dict[tuple[object, ...], str] = {}  # the first test of each outcome, cause, ranks and line
    for entry in failed[:DETAILED]:
        v = entry.verdict
        like = first.setdefault((v.outcome, v.cause, v.ranks, v.where), entry.name)
        if entry.folder in evidence:
            whole = failure(entry, evidence[entry.folder])
            alike = "" if like == entry.name else f" as {like}"
            head = tag("summary", tag("b", entry.name), " ", outcome_tag(v), alike)
            # All have one name, so that a browser closes one when it opens another.
            yield tag("details", head, whole, class_="one", name="failure", open=entry is failed[0])
        else:
            state = "Its evidence cannot be read." if entry.folder else "Its folder was not kept."
            name = tag("h2", entry.name, " ", outcome_tag(entry.verdict))
            yield tag(
                "article",
                name,
                tag("p", short_place(entry.verdict.reason)),
                tag("p", state, class_="quiet"),
                class_="failure",
            )
    if len(failed) > DETAILED:
        yield tag("p", f"{len(failed) - DETAILED} more failures are in the table below, with their folders.")


def _decision(decision: Decision) -> Markup | None:
    drawn = way(decision)
    rows = [row(*cells) for cells in decision.hypotheses]
    if drawn is None and not rows:
        return None
    listed = [tag("h3", "Hypotheses"), table(("hypothesis", "state", "rests on"), rows)] if rows else None
    return tag("section", tag("h2", "How it was decided"), drawn, listed)


def _announcements(run: Path) -> Markup | None:
    """Return what was announced while tests ran, and when; announcements are no verdicts."""
    found = [a for a in read_lines(run / ANNOUNCEMENTS) if isinstance(a.get("text"), str)][:SHOWN]
    rows = []
    for announced in found:
        at = announced.get("time")
        shown = time.strftime("%H:%M:%S", time.localtime(at)) if isinstance(at, int | float) and 0 < at < 1e11 else ""
        rows.append(tag("li", tag("time", shown), " ", short_place(announced["text"])))
    return tag("section", tag("h2", "Announced while it ran"), tag("ol", *rows, class_="announced")) if rows else None


def _all(entries: list[Entry], evidence: dict[str, Evidence]) -> Markup:
    """Return a row per test, failures first; the evidence of a passing test is folded."""
    ordered = sorted(entries, key=lambda e: not e.verdict.failed)
    outcomes = sorted({e.verdict.outcome for e in entries})
    tools = tag(
        "div",
        tag("label", "search ", tag("input", type="search", id="search", placeholder="test, cause, file")),
        tag("label", "only ", tag("select", tag("option", "all", value=""), *(tag("option", o) for o in outcomes), id="only")),
        class_="tools",
    )  # fmt: skip
    head = tag("tr", *(tag("th", tag("button", n, type="button", class_="sort"), scope="col") for n in COLUMNS))
    rows = (_row(e, evidence.get(e.folder)) for e in ordered)
    listed = tag("table", tag("thead", head), tag("tbody", *rows), id="tests")
    return tag("section", tag("h2", "All tests"), tools, listed, id="all")


def _row(entry: Entry, evidence: Evidence | None) -> Markup:
    v = entry.verdict
    shown_ranks = ", ".join(map(str, v.ranks[:8])) + (" …" if len(v.ranks) > 8 else "") if v.failed else ""
    name: Markup
    if v.failed and entry.folder:
        name = tag("a", entry.name, href=f"#{anchor(entry)}")
    elif evidence is not None:
        trace = tag("p", tag("a", TRACE, href=f"{quote(entry.folder)}/{TRACE}"), class_="quiet")
        name = tag("details", tag("summary", entry.name), lanes(evidence, ()), trace)
    else:
        name = tag("span", entry.name)
    cells = (
        (name, entry.name),
        (Markup(outcome_tag(v) + (" (expected)" if v.expected else "")), v.outcome),
        (tag("span", v.cause), v.cause),
        (tag("span", shown_ranks), shown_ranks),
        (tag("code", short_place(v.where)) if v.where else tag("span"), v.where),
        (tag("span", f"{v.duration_s:.1f} s"), f"{v.duration_s:09.2f}"),
    )
    shown = (
        tag("td", text, data_label=title, data_sort=key) for (text, key), title in zip(cells, COLUMNS, strict=True)
    )
    return tag("tr", *shown, data_outcome=v.outcome)
