"""A verdict in the terminal: the culprit, the lines of source with what each rank did, and the folder of the evidence."""

import itertools
import os
import re
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pytest_nsa.diagnosis.causes import CAUSES
from pytest_nsa.diagnosis.rules.exits import is_victim
from pytest_nsa.diagnosis.verdict import SECOND_RUN, Verdict, group_runs
from pytest_nsa.evidence.source import LOCATION, Sources
from pytest_nsa.evidence.stacks import ThreadStack
from pytest_nsa.evidence.values import Evidence, RaisedException, RankEvidence
from pytest_nsa.report.frame import frame_text
from pytest_nsa.report.plain import visible

MOST_LINES = 20
MOST_BECAUSE = 2
MAX_STACK = 4
MAX_SECTION_LINES = 60
MAX_HEAD_LINES = 5
MAX_OUTPUT_LINES = 20  # of each rank's output, after the head; its file has all of it
MAX_LINE = 500
MAX_VICTIM = 160  # characters of the exception of a rank that waited for another
READ_BYTES = 1 << 16
_PLACES = re.compile(r"\s*\[\S*\](:\d+)?")  # a line of gloo's source, or a peer's port: they differ between ranks


def short_path(path: str | Path) -> str:
    """Return a path, relative to the working directory if that is shorter."""
    relative = os.path.relpath(path)
    return relative if not relative.startswith("..") and len(relative) < len(str(path)) else str(path)


def short_place(where: str) -> str:
    """Return ``file:line in function`` with the file's path shortened."""
    here = os.getcwd() + os.sep
    return where.replace(here, "")


def headline(verdict: Verdict) -> str:
    """'HANG: rank 1 of 2, lock_deadlock, at tests/x.py:12 in backward'."""
    where = f", at {short_place(verdict.where)}" if verdict.where else ""
    return visible(f"{verdict.outcome}: {_who(verdict)}, {verdict.cause or 'no cause'}{_sure(verdict)}{where}")


def brief(verdict: Verdict, test_file: Path) -> str:
    """Return the text for pytest's short summary: 'app/step.py:12 lock_deadlock, rank 1 of 2'.

    Pytest cuts the line at the terminal's width, and begins it with the outcome and the test's file.
    """
    match = LOCATION.match(short_place(verdict.where))
    place = "" if match is None else f"{match['file']}:{match['line']} "
    if match is not None and Path(match["file"]).name == test_file.name:
        place = f"{test_file.name}:{match['line']} "
    return visible(f"{place}{verdict.cause or 'no cause'}, {_who(verdict)}{_sure(verdict)}")


def _who(verdict: Verdict) -> str:
    return verdict.culprits() + (f" of {verdict.world_size}" if len(verdict.ranks) == 1 < verdict.world_size else "")


def _sure(verdict: Verdict) -> str:
    return "" if verdict.certain else f" ({verdict.confidence:.0%} sure)"


def lines(verdict: Verdict, evidence: Evidence) -> list[str]:
    """Return the verdict in at most `MOST_LINES` lines: the culprit, the frame of source, why, and what to do."""
    from pytest_nsa.report.divergence import describe_causes  # not before a failure: sessions that pass do without

    out = [headline(verdict), f"  why      {short_place(verdict.reason)}"]
    out += map(short_place, frame_text(verdict, evidence))
    out += map(short_place, describe_causes(verdict))
    out += (f"  again    {short_place(fact.text)}" for fact in verdict.evidence if fact.kind == SECOND_RUN)
    out += (f"  because  {short_place(text)}" for text in verdict.because[:MOST_BECAUSE])
    if verdict.module:
        out.append(f"  module   {verdict.module}")
    if verdict.parameters_missing:
        rest = f" and {len(verdict.parameters_missing) - 2} more" if len(verdict.parameters_missing) > 2 else ""
        out.append(f"  missing  {', '.join(verdict.parameters_missing[:-3:-1])}{rest}")
    if round(verdict.stalled_s, 1):
        until = "when it was last looked at" if evidence.stop == "host_died" else "before it was stopped"
        short = [fact.text for fact in verdict.evidence if fact.kind == "memory" and "may be short" in fact.text]
        out.append(f"  stalled  for {verdict.stalled_s:.1f} s {until}" + "".join(f"; memory: {text}" for text in short))
    last = [f"  do       {verdict.advice}"] if verdict.advice else []
    last += [f"  more     pytest-nsa explain {verdict.cause}"] if verdict.cause in CAUSES else []
    last.append(f"  evidence {short_path(evidence.folder)}{os.sep}")
    return [visible(line) for line in (*out[: MOST_LINES - len(last)], *last)]


def failure(verdict: Verdict, evidence: Evidence, *, verbose: bool = False) -> str:
    """Return what the test's report shows: the verdict, then each different failure of the ranks once.

    ``verbose``: with all statements, and the terms that chose the explanation.
    """
    parts = ["\n".join(lines(verdict, evidence)), *failures_of_ranks(verdict, evidence)]
    if verbose:
        terms = [f"  {weight:+.1f}  {text}" for text, weight in verdict.terms.items()]
        parts += ["\n".join(["--- all statements ---", *verdict.because, *terms])] if verdict.because or terms else []
    notes = {note for rank in evidence.ranks for note in rank.notes}
    if evidence.job.hash_seeds:
        notes.add(
            f"hash seeds: @hash_seeds({', '.join(map(str, evidence.job.hash_seeds))}) starts the ranks with these again"
        )
    parts += sorted(notes)
    return visible("\n\n".join(parts))


def failures_of_ranks(verdict: Verdict, evidence: Evidence) -> list[str]:
    """Return each different failure of the ranks once, culprits first, below a line with its ranks."""
    return [visible(f"--- {number_ranks(ranks)} ---\n{body}") for ranks, body in _failures(evidence, verdict)]


def number_ranks(ranks: list[int]) -> str:
    """'rank 3', 'ranks 0-3', 'ranks 0, 2-5'."""
    runs = group_runs(ranks)
    text = ", ".join(str(r[0]) if len(r) == 1 else f"{r[0]}{', ' if len(r) == 2 else '-'}{r[-1]}" for r in runs)
    return f"rank{'s' if len(ranks) > 1 else ''} {text}"


def _failures(evidence: Evidence, verdict: Verdict) -> Iterator[tuple[list[int], str]]:
    """Yield the ranks' failure texts, equal ones together, culprits first.

    Equal texts have the same error at the same lines; arguments may differ, as they may contain the rank.
    """
    grouped: dict[str, tuple[list[int], str]] = {}
    is_all_that_is_known = verdict.rule == "exits.only_victims"
    for rank in sorted(evidence.ranks, key=lambda r: (r.rank not in verdict.ranks, r.rank)):
        for key, text in _list_failures(rank, in_full=is_all_that_is_known):
            grouped.setdefault(key, ([], text))[0].append(rank.rank)
    yield from grouped.values()


def _list_failures(rank: RankEvidence, *, in_full: bool) -> Iterator[tuple[str, str]]:
    """Yield the texts of a rank's failures, each after the part of it that equal ones have in common.

    ``in_full``: also those that are a consequence of another rank's failure.
    """
    if not in_full and rank.exceptions and all(map(is_victim, rank.exceptions)):
        return  # the frame of source shows where it was
    for entry in rank.reports:
        if entry["report"].get("outcome") == "failed":
            subtest = _subtest(entry["report"])
            yield f"{subtest}\n{_error_lines(entry['text'])}", f"{subtest}\n{entry['text']}".lstrip("\n")
    if not rank.reports and rank.exceptions:
        text = _traceback(rank.exceptions[0], rank.sources)
        yield text, text


def _subtest(report: Mapping[str, Any]) -> str:
    """Return a subtest's description as pytest's own headline has it, '[sub] (i=1)'; '' for other reports."""
    context = report.get("_subtest.context")
    if not isinstance(context, dict):
        return ""
    message, given = context.get("msg"), context.get("kwargs")
    parts = [f"[{message}]"] if message is not None else []
    if isinstance(given, dict) and given:
        parts.append(f"({', '.join(f'{name}={value}' for name, value in given.items())})")
    return " ".join(parts) or "(<subtest>)"


def consequence(error: RaisedException) -> str:
    """Return, in one line, the exception that a rank raised because another one failed; its folder has all of it."""
    first = _PLACES.sub("", error.message.partition("\n")[0]).partition(". ")[0].strip()
    return f"ended at {short_place(error.where)}: {error.type}: {first[:MAX_VICTIM]}"


def _traceback(error: RaisedException, sources: Sources) -> str:
    """Return an exception as Python prints it; only its line if its stack is unknown."""
    frames = [frame for frame in reversed(error.frames) if not frame.is_ours]
    if not frames:
        return f"{error.type}: {error.message}\n  at {error.where}"
    text = ["Traceback (most recent call last):"]
    for frame in frames:
        text.append(f'  File "{short_path(frame.file)}", line {frame.line}, in {frame.function}')
        text += [f"    {line}" for line in [sources.line(frame.file, frame.line)] if line]
    return "\n".join([*text, f"{error.type}: {error.message}"])


def _error_lines(text: str) -> str:
    """Return the lines of pytest's failure text that name the error and its place; for an exception group, those with a bar."""
    lines = text.splitlines()
    return "\n".join(
        [line for line in lines if line.startswith(("E ", ">")) or line.lstrip().startswith("|")] + lines[-1:]
    )


def sections(evidence: Evidence) -> Iterator[tuple[str, str]]:
    """Yield report sections: each rank's output, and its stack if it was stopped or crashed; equal stacks once."""
    stacks: dict[str, list[RankEvidence]] = {}
    for rank in evidence.ranks:
        output = excerpt(rank.folder / "output.log")
        if output:
            yield f"output of rank {rank.rank}", visible(output)
        stack = _stack_text(rank)
        if stack:
            stacks.setdefault(stack, []).append(rank)
    for stack, ranks in stacks.items():
        rounds = {f"> {visible(short_place(place))}": words for place, words in _list_rounds(ranks).items()}
        lines = [f"{line}   {rounds[line]}" if line in rounds else line for line in stack.splitlines()]
        yield f"stack of {number_ranks([rank.rank for rank in ranks])}", visible("\n".join(lines))


def _list_rounds(ranks: list[RankEvidence]) -> dict[str, str]:
    """Return the counters of the loops that ranks are in, in words, by location."""
    values: dict[str, dict[str, list[int]]] = {}
    for rank in ranks:
        for place, words in rank.rounds.items():
            values.setdefault(place, {}).setdefault(words, []).append(rank.rank)
    return {place: words for place, parse_ranks in values.items() if (words := counters_text(parse_ranks))}


def counters_text(parse_ranks: dict[str, list[int]]) -> str:
    """Return the counters of several ranks as text: 'step = 3', or 'step = 3 on ranks 0-2; step = 4 on rank 3'; '' for more than
    `MAX_STACK` different texts. ``parse_ranks``: the ranks by text.
    """
    if len(parse_ranks) > MAX_STACK:
        return ""
    return (
        next(iter(parse_ranks))
        if len(parse_ranks) == 1
        else "; ".join(f"{s} on {number_ranks(r)}" for s, r in parse_ranks.items())
    )


def _stack_text(rank: RankEvidence) -> str:
    """Return each thread's frames down to where pytest called the test; the whole dump is in the rank's folder.

    '' for a rank in which pytest reports a failure. Idle threads are omitted.
    """
    threads = [thread for thread in rank.threads or rank.fatal if not thread.is_ours]
    if any(frame.function == "pytest_runtest_makereport" for thread in threads for frame in thread.frames):
        return ""
    shown = [t for t in threads if t.is_main or t.user_frame is not None or not t.waits_for_work]
    if len(shown) == 1 and sum(f.is_user for f in shown[0].test_frames) <= 1 and shown[0].user_frame is not None:
        return ""  # the frame of source has its line
    return visible("\n\n".join("\n".join(frame_lines(thread)[:MAX_SECTION_LINES]) for thread in shown))


def frame_lines(thread: ThreadStack) -> list[str]:
    """Return a thread's frames down to where the test was called, the user's own marked, and torch's folded."""
    found: list[str] = []
    frames = [f for f in thread.test_frames if not f.is_ours]
    for is_torch, run in itertools.groupby(frames, key=lambda f: "/site-packages/torch/" in f.file):
        several = list(run)
        if is_torch and len(several) > 1:
            found.append(f"  {len(several)} frames of torch, from {several[-1].function}")
        else:
            found += [("> " if f.is_user else "  ") + short_place(f.describe()) for f in several]
    return found


def excerpt(path: Path) -> str:
    """Return the head and tail of a rank's output, with long lines cut; '' without any."""
    try:
        status = path.lstat()  # in a folder of unknown origin a link may lead anywhere
    except OSError:
        return ""
    if not stat.S_ISREG(status.st_mode) or not status.st_size:
        return ""
    size = status.st_size
    with path.open("rb") as file:
        if size > 2 * READ_BYTES:
            lines = _split_lines(file.read(READ_BYTES))
            file.seek(size - READ_BYTES)
            rest = _split_lines(file.read(READ_BYTES))[1:]  # the first has lost its beginning
            omitted = f"most of {size >> 10} KiB"
        else:
            lines = _split_lines(file.read(2 * READ_BYTES))
            rest = lines[MAX_HEAD_LINES:]
            omitted = f"{len(rest) - MAX_OUTPUT_LINES} lines"
            if len(rest) <= MAX_OUTPUT_LINES:
                return "\n".join(lines)
    middle = f"... {omitted} omitted, in {short_path(path)}"
    return "\n".join([*lines[:MAX_HEAD_LINES], middle, *rest[-MAX_OUTPUT_LINES:]])


def _split_lines(data: bytes) -> list[str]:
    return [line[:MAX_LINE] for line in data.decode(errors="replace").splitlines()]
