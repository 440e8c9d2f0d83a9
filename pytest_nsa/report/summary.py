"""SUMMARY.md: one sentence on what is wrong, the table, the path through the plan's tree, the verdicts; and the tree as HTML."""

import itertools
import re
import stat
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from pytest_nsa.diagnosis.decision import Decision, decide
from pytest_nsa.diagnosis.verdict import NO_RANK, Fact, Verdict, stated
from pytest_nsa.evidence.source import LOCATION
from pytest_nsa.report.markup import Markup, tag
from pytest_nsa.report.plain import cell, code, inline, markdown, visible
from pytest_nsa.report.terminal import short_place
from pytest_nsa.wire.files import read_lines, read_object

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


VERDICTS = "verdicts.jsonl"
SCENARIOS = "scenarios.json"  # the table of the repository's plan, where it has one
RETRY = {"never": "it will end the same way", "once": "it may have passed", "elsewhere": "on other machines"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """A verdict and the name of its folder in the run ('' when the folder was not kept)."""

    folder: str
    verdict: Verdict

    @property
    def name(self) -> str:
        """The scenario, or the test's id."""
        return self.verdict.scenario or self.verdict.nodeid


def read_entries(run: Path) -> list[Entry]:
    """Return the verdicts of a run, in their order; of a test that ran again, the last verdict."""
    entries: dict[str, Entry] = {}
    for data in read_lines(run / VERDICTS):
        try:
            verdict = Verdict.from_json(data)
        except (ValueError, TypeError, AttributeError):
            continue  # an incomplete line: the writer was killed
        name = data.get("folder")
        folder = name if isinstance(name, str) and _is_test_folder(run, name) else ""
        entries[verdict.scenario or verdict.nodeid] = Entry(folder=folder, verdict=verdict)
    return list(entries.values())


def _is_test_folder(run: Path, name: str) -> bool:
    """Return whether a name is that of a folder directly in the run: a path, or a link, may lead elsewhere."""
    try:
        return Path(name).name == name != ".." and stat.S_ISDIR((run / name).lstat().st_mode)
    except (OSError, ValueError):  # no such folder, or an invalid name
        return False


Decide = Callable[[Mapping[str, Verdict]], Decision]


def make_decision(entries: list[Entry], decide: Decide = decide) -> Decision:
    """Return the decision over a run's scenarios; over all its tests if it ran no scenarios, or if only other tests failed."""
    everything = {e.name: e.verdict for e in entries}
    scenarios = {name: v for name, v in everything.items() if v.scenario}
    others_failed = any(v.failed for v in everything.values() if not v.scenario)
    if scenarios and (not others_failed or any(v.failed for v in scenarios.values())):
        return decide(scenarios)
    return decide(everything)


def not_run(run: Path, entries: list[Entry]) -> list[str]:
    """Return the scenarios of the plan's table that have no verdict in this run."""
    ran = {entry.name for entry in entries}
    return [name for name in read_object(run / SCENARIOS) if name not in ran]


def render(
    entries: list[Entry],
    decision: Decision,
    env: dict[str, Any],
    *,
    interrupted: bool,
    not_run: Sequence[str] = (),
    blob: str | None = None,
) -> str:
    """Return the text of SUMMARY.md; ``not_run`` are scenarios that did not run.

    ``blob``: for a page that is read elsewhere, the URL of the repository's files, or ''. Tests then have no links to their
    folders, and lines link to the files.
    """
    out = [markdown(decision.sentence), ""]
    if interrupted:
        out = ["INTERRUPTED: what follows is what had run until then.", "", *out]
    sure = f" ({decision.confidence:.0%} sure)" if decision.confidence < 1 else ""
    heading = "Decision" if any(entry.verdict.scenario for entry in entries) else "What to do"
    out += [f"## {heading}", "", f"**{_sentence_case(markdown(decision.action) + sure)}**", ""]
    out += _table(entries, decision, blob)
    if not_run:
        out += ["", f"Not run, of the plan's scenarios: {markdown(', '.join(not_run))}."]
    out += ["", *(f"{number}. {markdown(step)}" for number, step in enumerate(decision.path, 1))]
    drawn = mermaid(decision)
    if drawn:
        out += [
            "",
            "<details><summary>The tree, with the path taken</summary>",
            "",
            "```mermaid",
            *drawn,
            "```",
            "",
            "</details>",
        ]
    if decision.readiness:
        out += ["", markdown(decision.readiness)]
    if decision.hypotheses:
        out += ["", "## Hypotheses", "", "| hypothesis | state | rests on |", "| --- | --- | --- |"]
        out += ["| " + " | ".join(cell(inline(text)) for text in row) + " |" for row in decision.hypotheses]
    failed = [entry for entry in entries if entry.verdict.failed]
    if failed:
        out += ["", "## Verdicts"]
    for entry in failed:
        out += ["", *_verdict(entry, blob)]
    out += ["", "## Environment", "", "| | |", "| --- | --- |"]
    out += [
        f"| {cell(inline(str(key)))} | {cell(inline(str(value)))} |"
        for key, value in env.items()
        if key != "schema" and not isinstance(value, dict)
    ]
    variables = env.get("variables")
    if isinstance(variables, dict):
        out += [f"| {code(str(k))} | {code(str(v))} |" for k, v in variables.items()]
    return "\n".join(out) + "\n"


def _table(entries: list[Entry], decision: Decision, blob: str | None) -> list[str]:
    """Return the table: every scenario of a plan and its factors, else the failed tests and the number of the others."""
    has_plan = any(entry.verdict.scenario for entry in entries)
    names = ["scenario" if has_plan else "test", "result", "cause", "rank", "where", "parameters missing", "seconds"]
    if not has_plan:
        names.remove("parameters missing")
    more = decision.columns() if has_plan else {}
    shown = entries if has_plan else [entry for entry in entries if entry.verdict.failed or entry.verdict.expected]
    others = Counter(entry.verdict.outcome for entry in entries if entry not in shown)
    heads = [*names, *(cell(inline(name)) for name in more)]
    rows = ["| " + " | ".join(heads) + " |", "| " + " | ".join("---" for _ in heads) + " |"] if shown else []
    for entry in shown:
        cells = _cells(entry, blob)
        further = [inline(cells_of.get(entry.name, "")) for cells_of in more.values()]
        rows.append("| " + " | ".join(cell(text) for text in (*(cells[name] for name in names), *further)) + " |")
    if others:
        counted = ", ".join(f"{n} {outcome}" for outcome, n in sorted(others.items()))
        rows += ["", f"Not in the table: {counted}."] if shown else [f"{counted}."]
    return rows


def _cells(entry: Entry, blob: str | None) -> dict[str, str]:
    v, name = entry.verdict, inline(entry.name)
    name = f"[{name}]({quote(entry.folder)}/)" if entry.folder and blob is None else name
    return {
        "scenario": name,
        "test": name,
        "result": v.outcome + (" (expected)" if v.expected else ""),
        "cause": inline(v.cause),
        "rank": ", ".join(map(str, v.ranks)) if v.failed else "",
        "where": _linked(short_place(v.where), blob),
        "parameters missing": str(len(v.parameters_missing)) if v.parameters_missing else "",
        "seconds": f"{v.duration_s:.1f}",
    }


def _linked(where: str, blob: str | None) -> str:
    """Return a location; for a file of the repository, with a link to its line."""
    match = LOCATION.match(where)
    if not blob or match is None or match["file"].startswith(("/", "..")):
        return code(where)
    return f"[{code(where)}]({blob}/{quote(match['file'])}#L{match['line']})"


def _verdict(entry: Entry, blob: str | None) -> list[str]:
    from pytest_nsa.report.divergence import describe_causes  # for a failure alone

    v = entry.verdict
    group = ", ".join(markdown(part) for part in (v.backend, v.parallel) if part not in ("", "none"))
    out = [
        f"### {markdown(entry.name)}: {v.outcome}",
        "",
        f"- ranks: {v.culprits()} of {v.world_size}{f' ({group})' if group else ''}",
    ]
    out.append(f"- cause: {code(v.cause)}, {'certain' if v.certain else f'{v.confidence:.0%} sure'}")
    if v.where:
        out.append(f"- where: {code(short_place(v.where))}" + (f", module {code(v.module)}" if v.module else ""))
        if v.called_from:
            out.append(f"- called from: {code(short_place(v.called_from))}")
    if v.machines:
        out.append(f"- on: {markdown('; '.join(v.machines))}")
    out.append(f"- why: {markdown(v.reason)}")
    for label in v.labels:
        at = f"{code(short_place(f'{label.file}:{label.line}'))}: " if label.line else ""
        out.append(f"- {at}{inline(stated(label.ranks, label.text, v.world_size))}")
    out += (f"- {inline(short_place(' '.join(line.split())))}" for line in describe_causes(v))
    out += (f"- because {markdown(text)}" for text in v.because)
    if v.parameters_missing:
        # Last first: backward goes from the model's end, so these are the ones that were due next.
        shown = ", ".join(code(p) for p in v.parameters_missing[:-6:-1])
        rest = len(v.parameters_missing) - 5
        out.append(
            f"- gradients that never arrived, the next one first: {shown}" + (f" and {rest} more" if rest > 0 else "")
        )
    if v.stalled_s:
        out.append(f"- stalled for {v.stalled_s:.1f} s; the verdict took {v.time_to_verdict_s:.1f} s more")
    out.append(f"- do: {markdown(v.advice)}")
    if v.retry in RETRY:
        out.append(f"- run again: {RETRY[v.retry]}")
    if v.reads_as:
        out.append(f"- the plan reads it as: {markdown(v.reads_as)}")
    out += [
        f"- {_evidence_link(entry.folder, fact, blob)}: {inline(short_place(fact.text))}"
        for fact in [fact for fact in v.evidence if fact.rank != NO_RANK][:8]
    ]
    out += [
        "- " + markdown(f"{fact.kind.replace('_', ' ')}: {fact.text}") for fact in v.evidence if fact.rank == NO_RANK
    ]
    return out


def _evidence_link(folder: str, fact: Fact, blob: str | None) -> str:
    """Return rank and kind of a fact, with a relative link to its file where a browser shows that as text."""
    words = inline(f"rank {fact.rank}, {fact.kind.replace('_', ' ')}")
    is_text = fact.file.endswith((".txt", ".log", ".json", ".jsonl"))
    return f"[{words}]({quote(folder)}/{quote(fact.file)})" if folder and is_text and blob is None else words


def _sentence_case(text: str) -> str:
    return text[:1].upper() + text[1:] + ("" if text.endswith(".") else ".")
