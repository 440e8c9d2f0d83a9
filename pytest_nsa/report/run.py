"""What a session writes for the whole run: env.json, lists over all tests, SUMMARY.md, report.html; and a test's traces.log."""

import contextlib
import functools
import json
import os
import platform
import re
import subprocess
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from nsa.trace.secrets import masked_variables
from pytest_nsa.diagnosis.decision import Decision
from pytest_nsa.diagnosis.verdict import Verdict, group_runs
from pytest_nsa.evidence.collectives import parse_ranks
from pytest_nsa.report import summary
from pytest_nsa.settings import step_summary
from pytest_nsa.system.gpu import driver_version, gpu_names
from pytest_nsa.wire.files import append, read_bytes, read_object, read_text, write_atomically, write_json
from pytest_nsa.wire.messages import SCHEMA

# Reports that each rank makes of itself. The lines of buckets name their rank; all others concern the whole test.
_OF_EACH_RANK = ("[GRAD-TRACE]", "[MODULE-BWD]", "  - MISSING: ")
_MISSING = re.compile(r"(?:\[rank ([\d,-]+)\] )?  - MISSING: (\S+)$")


def merge_traces(logs: Mapping[int, Iterable[str]]) -> Iterator[str]:
    """Yield the lines of the merged log, from those of each rank, in the order of the ranks.

    A report that is equal on all ranks is there once. In a report of some ranks, each line begins with their numbers:
    ``[rank 1]   - MISSING: name``.
    """
    ranks: dict[tuple[tuple[str, ...], int], list[int]] = {}  # by report, and how often the rank made it before
    for rank, lines in logs.items():
        seen: Counter[tuple[str, ...]] = Counter()
        for report in _reports(lines):
            ranks.setdefault((report, seen[report]), []).append(rank)
            seen[report] += 1
    for (report, _), of in ranks.items():
        is_of_all = len(of) == len(logs) or not report[0].startswith(_OF_EACH_RANK)
        prefix = "" if is_of_all else f"[rank {listed(of)}] "
        yield from (f"{prefix}{line}" for line in report)


def _reports(lines: Iterable[str]) -> Iterator[tuple[str, ...]]:
    """Yield lines together with the items ("  - ...") that follow them."""
    report: list[str] = []
    for line in lines:
        if report and not line.startswith("  - "):
            yield tuple(report)
            report = []
        report.append(line)
    if report:
        yield tuple(report)


def find_missing(lines: Iterable[str], world_size: int) -> dict[str, str]:
    """Return the parameters that a merged log names as missing, with the ranks: '1', '0,2-7'."""
    found: dict[str, set[int]] = {}
    for match in filter(None, map(_MISSING.match, lines)):
        found.setdefault(match[2], set()).update(parse_ranks(match[1], world_size) if match[1] else range(world_size))
    return {name: listed(ranks) for name, ranks in found.items()}


def listed(ranks: Iterable[int]) -> str:
    """Return '1', '0,1' or '0-5,8'."""
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else ",".join(map(str, run)) for run in group_runs(ranks))


DECISION = "decision.json"
GIT_LIMIT_S = 5.0
_PACKAGES = (
    "pytest", "pytest-timeout", "pytest-xdist", "pytest-nsa", "torch", "numpy", "triton", "pyarrow", "nvidia-nccl-cu12",
    "nvidia-nccl-cu13", "nvidia-cuda-runtime-cu12", "nvidia-cuda-runtime",
)  # fmt: skip


def environment(gpus: int) -> dict[str, Any]:
    """Return versions and machine facts, read without importing any of the packages."""
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        "schema": SCHEMA,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "gpus": gpus,
        **({"gpu": ", ".join(names), "driver": driver_version()} if (names := gpu_names()) else {}),
        **({"revision": found} if (found := _revision()) else {}),
        **versions,
        "variables": _variables(),
    }


def _variables() -> dict[str, Any]:
    """Variables that describe how this run was set up, for env.json, without secrets."""
    prefixes = (
        "NSA_", "TORCH_", "PYTORCH_", "NCCL_", "GLOO_", "OMP_", "CUDA_", "MASTER_", "WORLD_SIZE", "RANK", "PYTEST_ADDOPTS",
    )  # fmt: skip
    shown = {k: v for k, v in sorted(os.environ.items()) if k.startswith(prefixes) or k == "CONFIG"}
    return masked_variables(shown)


def _revision() -> str:
    """Return the commit of the repository that the tests run in, with '+' where files of it are changed; '' outside of one."""
    command = ["git", "describe", "--always", "--abbrev=12", "--dirty=+", "--exclude=*"]
    try:
        done = subprocess.run(command, text=True, capture_output=True, check=False, timeout=GIT_LIMIT_S)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def write_environment(run: Path, gpus: int) -> None:
    """Write env.json, once per run, when it begins."""
    if not (run / "env.json").exists():
        write_json(run / "env.json", environment(gpus), indent=1)


def write_verdict(folder: Path, verdict: Verdict) -> None:
    """Write verdict.json, and result.txt with the outcome in one word: XFAIL for a failure that was expected."""
    write_json(folder / "verdict.json", verdict.to_json(), indent=1)
    write_atomically(folder / "result.txt", ("XFAIL" if verdict.expected else verdict.outcome) + "\n")


def read_verdict(folder: Path) -> Verdict | None:
    """Return the verdict that a folder of evidence records; None without a whole one."""
    try:
        return Verdict.from_json(read_object(folder / "verdict.json"))
    except (ValueError, TypeError, AttributeError):
        return None


def write_reports(
    run: Path, gpus: int, decide: summary.Decide, *, interrupted: bool, left: Decision | None = None
) -> tuple[list[summary.Entry], Decision]:
    """Write the files about the whole run; return its verdicts and decision. ``left``: the decision, if it is known already.

    Reads only files, so it can be repeated.
    """
    # Imported late: most processes of a suite write no report.
    from pytest_nsa.report import html

    entries = summary.read_entries(run)
    decision = left or summary.make_decision(entries, decide)
    write_json(run / DECISION, decision.to_json(), indent=1)
    write_environment(run, gpus)
    _write_lists(run, entries)
    render = functools.partial(
        summary.render,
        entries,
        decision,
        read_object(run / "env.json"),
        interrupted=interrupted,
        not_run=summary.not_run(run, entries),
    )
    write_atomically(run / "SUMMARY.md", render())
    shown = step_summary()
    if shown is not None:
        with contextlib.suppress(OSError):
            append(shown, render(blob=_repository_url()).encode(errors="backslashreplace"))
    write_atomically(run / "report.html", html.render(run, entries, decision, interrupted=interrupted))
    return entries, decision


def _repository_url() -> str:
    """Return the URL of this commit's files, by the variables of GitHub Actions; '' if one is not set."""
    parts = [os.environ.get(name, "") for name in ("GITHUB_SERVER_URL", "GITHUB_REPOSITORY", "GITHUB_SHA")]
    return f"{parts[0]}/{parts[1]}/blob/{parts[2]}" if all(parts) else ""


def read_decision(run: Path, entries: list[summary.Entry]) -> Decision:
    """Return the decision that the run wrote; without one, the decision by its verdicts."""
    try:
        return Decision.from_json(json.loads(read_bytes(run / DECISION)))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return summary.make_decision(entries)


def _write_lists(run: Path, entries: list[summary.Entry]) -> None:
    """Write all_missing_params.txt, with lines 'scenario parameter rank=0,1', and ddp_buckets.txt, over all scenarios."""
    missing, buckets = [], []
    for entry in entries:
        lines = read_text(run / entry.folder / "traces.log").splitlines() if entry.folder else []
        buckets += [f"{entry.name} {line}\n" for line in lines if line.startswith("[DDP] ")]
        found = find_missing(lines, entry.verdict.world_size)
        missing += [f"{entry.name} {name} rank={ranks}\n" for name, ranks in found.items()]
        # Without the logs the ranks are unknown.
        missing += [f"{entry.name} {name}\n" for name in entry.verdict.parameters_missing if name not in found]
    write_atomically(run / "all_missing_params.txt", "".join(missing))
    write_atomically(run / "ddp_buckets.txt", "".join(buckets))
