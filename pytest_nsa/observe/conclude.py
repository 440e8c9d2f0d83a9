"""From a folder of evidence to its verdict: by the rules, or as the folder records it."""

from __future__ import annotations

import contextlib
import itertools
import os
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from pytest_nsa.diagnosis.facts import in_backward
from pytest_nsa.diagnosis.verdict import Verdict
from pytest_nsa.evidence.load import load, with_sources
from pytest_nsa.evidence.shapes import is_number
from pytest_nsa.evidence.source import LOCATION, record_sources
from pytest_nsa.evidence.values import Evidence, RankEvidence
from pytest_nsa.observe.host_log import note
from pytest_nsa.report.run import merge_traces, read_verdict, write_verdict
from pytest_nsa.system.clock import wall_clock
from pytest_nsa.system.disk_space import ignore_full_disk
from pytest_nsa.wire.files import read_lines, replacing, write_atomically

if TYPE_CHECKING:
    from pytest_nsa.diagnosis.engine import Rule

METRICS = "metrics.jsonl"  # of a training in the test's folder
MOST = 40  # figures of a test


def read_figures(evidence: Evidence) -> dict[str, float]:
    """Return those of these figures that are known:

    - ``steps``, ``step_ms`` (the median over the steps, of the slowest rank), its quartiles ``step_ms_low`` and ``step_ms_high``;
    - ``peak_mib``, ``added_mib`` (beyond what a rank had at its start), ``peak_gpu_mib``: the largest of any rank;
    - ``loss`` (the last), ``tokens_per_s`` (the median);
    - ``ready_orders``: in how many orders the gradients of a step became ready on the ranks, if that trace was requested;
    - ``property.NAME``: numbers that the test recorded with `record_property`.
    """
    found: dict[str, float] = {}
    steps = step_times(evidence)
    if len(steps) > 1:
        low, middle, high = (
            statistics.quantiles(steps, n=4) if len(steps) > 2 else (min(steps), sum(steps) / 2, max(steps))
        )
        found |= {"steps": len(steps), "step_ms": 1e3 * middle, "step_ms_low": 1e3 * low, "step_ms_high": 1e3 * high}
    for name in ("peak_mib", "added_mib", "peak_gpu_mib"):
        peaks = [rank.peaks[name] for rank in evidence.ranks if rank.peaks.get(name)]
        if peaks:
            found[name] = max(peaks)
    metrics = list(read_lines(evidence.folder / METRICS))
    losses, rates = ([line[name] for line in metrics if is_number(line.get(name))] for name in ("loss", "tokens_per_s"))
    if losses:
        found["loss"] = losses[-1]
    if len(rates) > 1:
        found["tokens_per_s"] = statistics.median(rates[1:])  # the first step builds and compiles
    orders = ready_orders(evidence)
    if orders:
        found["ready_orders"] = orders
    for name, value in _properties(evidence.ranks[0]) if evidence.ranks else ():
        found[f"property.{name}"] = value
    return {name: round(float(value), 6) for name, value in itertools.islice(found.items(), MOST)}


def ready_orders(evidence: Evidence) -> int:
    """Return in how many orders gradients became ready on the ranks, in the step with the most orders; 0 if unknown."""
    orders = [rank.ready_orders for rank in evidence.ranks]
    steps = set.intersection(*map(set, orders)) if len(orders) > 1 else set()
    return max((len({order[step] for order in orders}) for step in steps), default=0)


def step_times(evidence: Evidence) -> list[float]:
    """Return the seconds of each step that all ranks finished, on its slowest rank; not of the first, which builds and compiles."""
    by_step: dict[int, list[float]] = {}
    for rank in evidence.ranks:
        starts: dict[int, float] = {}
        for beat in rank.heartbeats:
            starts.setdefault(beat["step"], beat["time"])
        for (step, begin), (following, end) in itertools.pairwise(sorted(starts.items())):
            if step > 1 and following == step + 1:
                by_step.setdefault(step, []).append(end - begin)
    return [max(times) for times in by_step.values() if len(times) == len(evidence.ranks)]


def _properties(rank: RankEvidence) -> list[tuple[str, float]]:
    pairs: list[Any] = [pair for entry in rank.reports for pair in entry["report"].get("user_properties") or ()]
    pairs = [pair for pair in pairs if isinstance(pair, list | tuple) and len(pair) == 2 and is_number(pair[1])]
    return [(str(name)[:80], float(value)) for name, value in pairs]


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
        traces.writelines(f"{line}\n" for line in merge_traces(logs))
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
