"""From a folder of evidence to its verdict: by the rules, or as the folder records it."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, TYPE_CHECKING

from pytest_nsa.diagnosis.facts import in_backward
from pytest_nsa.diagnosis.verdict import Verdict
from pytest_nsa.evidence.figures import read_figures
from pytest_nsa.evidence.load import load, with_sources
from pytest_nsa.evidence.source import LOCATION, record_sources
from pytest_nsa.evidence.values import Evidence
from pytest_nsa.observe.host_log import note
from pytest_nsa.report.run import read_verdict, write_verdict
from pytest_nsa.report.traces import merge
from pytest_nsa.system.clock import wall_clock
from pytest_nsa.system.disk_space import ignore_full_disk
from pytest_nsa.wire.files import replacing, write_atomically

if TYPE_CHECKING:
    from pytest_nsa.diagnosis.engine import Rule


def conclude(
    folder: Path, rules: Sequence[Rule] = (), *, keep: bool = True, given: Evidence | None = None
) -> tuple[Verdict, Evidence]:
    """Diagnose a test's folder and write verdict and merged logs into it, unless the test passed and is not kept.

    ``rules`` are a repository's own. ``given``: the evidence of a session that has ended, as it was read.
    """
    # Not before the first verdict: processes of a suite that make none, and the zygote, do without the rules.
    from pytest_nsa.diagnosis.engine import diagnose

    began = wall_clock()
    evidence = _read(folder) if given is None else given
    verdict = diagnose(evidence, rules)
    verdict = replace(verdict, figures=_figures(evidence))
    if verdict.failed and given is None:
        evidence = with_label_sources(evidence, verdict)
    known = evidence.stop_time or max((r.exit_time for r in evidence.ranks), default=0.0) or began
    if verdict.failed and given is None:  # from the stop, or without one from the end of the last rank, to here
        verdict = replace(verdict, time_to_verdict_s=round(max(0.0, wall_clock() - known), 3))
    if keep or verdict.failed:
        with ignore_full_disk():
            write_verdict(folder, verdict)
            _merge_logs(folder, evidence, verdict)
    return verdict, evidence


def with_label_sources(evidence: Evidence, verdict: Verdict) -> Evidence:
    """Return evidence of this session with the functions that a verdict's lines are in, also kept in its folder."""
    at = LOCATION.match(verdict.where)
    places = [(label.file, label.line) for label in verdict.labels if label.line]
    places += [(at["file"], int(at["line"]))] if at is not None else []
    files = [(f"{Path(evidence.job.root, file)}", line) for file, line in places]  # an absolute path stays one
    return replace(evidence, sources=record_sources(evidence.folder, files, evidence.sources))


def make_verdict(evidence: Evidence, *, again: bool = False, below: Path | None = None) -> Verdict:
    """Return the verdict that the folder of evidence records: a session had rules that this process may lack.

    Without one, or ``again``, return that of the package's rules. ``below``: where sources may be read; None: anywhere.
    """
    from pytest_nsa.diagnosis.divergence import add_divergence
    from pytest_nsa.diagnosis.engine import diagnose

    verdict = (None if again else read_verdict(evidence.folder)) or diagnose(evidence)
    # That of a second run has no divergence: the first run's has it.
    return verdict if verdict.first_divergence else add_divergence(verdict, evidence, below=below)


def _read(folder: Path) -> Evidence:
    evidence = load(folder)
    if _note_files_that_appeared(evidence):
        evidence = load(folder)
    return evidence if all(rank.passed for rank in evidence.ranks) else with_sources(evidence)


def _note_files_that_appeared(evidence: Evidence) -> bool:
    """Note in host.jsonl which files that ranks did not find exist now, and when they were written. Return whether any do."""
    found = {(rank.rank, error.missing) for rank in evidence.ranks for error in rank.exceptions if error.missing}
    has_any = False
    for rank, path in sorted(found):
        with contextlib.suppress(OSError, ValueError):
            note(evidence.folder / "host.jsonl", "appeared", rank=rank, path=path, written=os.lstat(path).st_mtime)
            has_any = True
    return has_any


def _figures(evidence: Evidence) -> dict[str, float]:
    try:
        return read_figures(evidence)
    except (ValueError, TypeError, LookupError, ArithmeticError):
        return {}  # what a test has recorded or written costs no verdict


def _merge_logs(folder: Path, evidence: Evidence, verdict: Verdict) -> None:
    """Write output.log and traces.log of the whole test from those of the ranks, and copy each rank's stack dump.

    A backward that did not end printed no list of missing gradients: traces.log gets it from the board, in the tracer's form.
    """
    several = len(evidence.ranks) > 1
    stalled = in_backward(evidence, verdict.ranks) if verdict.failed else None
    logs: dict[int, Iterable[str]] = {rank.rank: _lines(rank.folder / "traces.log") for rank in evidence.ranks}
    if stalled is not None:
        listed = (f"  - MISSING: {name}" for name in stalled.missing)
        logs[stalled.rank] = itertools.chain(logs[stalled.rank], listed)
    with _open_text(folder / "traces.log") as traces:
        traces.writelines(f"{line}\n" for line in merge(logs))
    with _open_text(folder / "output.log") as output:
        for rank in evidence.ranks:
            prefix = f"[rank {rank.rank}] " if several else ""
            output.writelines(f"{prefix}{line}\n" for line in _lines(rank.folder / "output.log"))
            dump = rank.folder / "stacks.txt"
            if dump.is_file() and dump.stat().st_size:
                text = dump.read_text(encoding="utf-8", errors="replace")
                write_atomically(folder / f"watchdog_stackdump_rank{rank.rank}.txt", text)


@contextlib.contextmanager
def _open_text(path: Path) -> Iterator[IO[str]]:
    with replacing(path) as fd, open(fd, "w", encoding="utf-8", closefd=False) as file:
        yield file


def _lines(path: Path) -> Iterator[str]:
    if path.is_file():
        with path.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                yield line.rstrip("\n")
