"""The command `pytest-nsa`: `diagnose DIR` reads evidence again, from any machine; `watch` follows a training that runs; `report`
writes the reports of a run that was cut off; `explain CAUSE` prints a cause's page; `clean` deletes old runs.

Exit codes: 0 nothing failed, 1 something did, 2 no evidence there.
"""

import argparse
import difflib
import json
import os
import sys
from collections.abc import Sequence
from importlib import metadata, resources
from pathlib import Path

from pytest_nsa.cli.report import clean, is_live, is_ours, read, report, resolve_own, sources_folder
from pytest_nsa.cli.watch import LaunchedWatcher, VerdictCommand, Watcher, watch
from pytest_nsa.diagnosis.causes import CAUSES
from pytest_nsa.diagnosis.foreign import judge, missing_for_more
from pytest_nsa.evidence.load import find_test_folders
from pytest_nsa.foreign.find import read_job
from pytest_nsa.observe.conclude import make_verdict
from pytest_nsa.observe.finders import find_folder, launched_ranks
from pytest_nsa.report import compare as comparing
from pytest_nsa.report import html
from pytest_nsa.report.plain import visible
from pytest_nsa.report.run import read_decision
from pytest_nsa.report.runs import FINISHED, KEPT, KEPT_FAILED
from pytest_nsa.report.summary import VERDICTS, Entry, read_entries
from pytest_nsa.report.terminal import lines
from pytest_nsa.wire.files import read_object, write_atomically

_SOURCES = (
    "read the Python files of this machine that evidence names, wherever they lie "
    "(default: where this machine made the evidence, those below the root of its tests)"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    arguments = _parser().parse_args(argv)
    try:
        match arguments.command:
            case "diagnose":
                return _diagnose(arguments)
            case "watch":
                return _watch(arguments)
            case "explain":
                return explain(arguments.cause)
            case "report":
                return report(arguments.folders, sources=arguments.sources)
            case "compare":
                sides = [arguments.base, *arguments.repeat_a], [arguments.new, *arguments.repeat_b]
                return compare(*sides)
        return clean(arguments.root, arguments.keep, arguments.keep_failed, dry_run=arguments.dry_run)
    except BrokenPipeError:  # `| head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:  # a folder that cannot be read or written, or has a folder in the place of a file
        print(visible(f"error: {error}"), file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pytest-nsa",
        description="Diagnose tests on ranks from the evidence they left.",
        epilog="Exit codes: 0, or 1 where a verdict is a failure, 2 where the command could not do its work.",
    )
    parser.add_argument("--version", action="version", version=f"pytest-nsa {_version()}")
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("diagnose", help="print the verdict on a test's folder, or on every test of a run")
    command.add_argument(
        "folders", metavar="DIR", type=Path, nargs="+",
        help="as in artifacts/latest or artifacts/latest/SCENARIO, or dumps, logs and stacks that other tools left",
    )  # fmt: skip
    command.add_argument("--json", action="store_true", help="print verdict.json objects, one a line")
    command.add_argument("--html", action="store_true", help="write DIR/report.html again")
    command.add_argument("--sources", action="store_true", help=_SOURCES)
    command.add_argument(
        "--again", action="store_true",
        help="apply the rules of this version, in place of the verdict that the session recorded, with its repository's rules",
    )  # fmt: skip
    command = commands.add_parser(
        "watch",
        help="follow a training with NSA_TRACE_DIR set in its ranks, or any other by its dumps, logs and stacks",
    )
    command.add_argument("pids", metavar="PID", type=int, nargs="*", help="a rank of the training, or its launcher")
    command.add_argument("--run", metavar="DIR", type=Path, help="the folder that NSA_TRACE_DIR names")
    command.add_argument("--json", action="store_true", help="print a JSON object at each change, one a line")
    command.add_argument("--once", action="store_true", help="print what is known now, and exit")
    command.add_argument(
        "--on-verdict",
        metavar="CMD",
        help="run a shell command once per verdict, with the verdict as JSON on its standard input",
    )
    command = commands.add_parser("report", help="write SUMMARY.md and report.html of a run again, as after a SIGKILL")
    command.add_argument("folders", metavar="RUN", type=Path, nargs="+", help="as in artifacts/latest")
    command.add_argument("--sources", action="store_true", help=_SOURCES)
    command = commands.add_parser("compare", help="two runs next to each other; exits with 1 where the second is worse")
    command.add_argument("base", metavar="RUN_A", type=Path, help="the run before, as artifacts/run_...")
    command.add_argument("new", metavar="RUN_B", type=Path, help="the run now, as artifacts/latest")
    command.add_argument(
        "--repeat-a",
        metavar="RUN",
        type=Path,
        action="append",
        default=[],
        help="a repeat of RUN_A: bounds of the noise",
    )
    command.add_argument("--repeat-b", metavar="RUN", type=Path, action="append", default=[], help="a repeat of RUN_B")
    command = commands.add_parser("explain", help="print the page of a cause: an example, how it is known, what to do")
    command.add_argument("cause", metavar="CAUSE", help="as in a verdict, skipped_collective")
    command = commands.add_parser("clean", help="delete finished runs beyond the newest; nothing else in the folder")
    command.add_argument(
        "root", metavar="DIR", type=Path, nargs="?", default=Path("artifacts"), help="default: artifacts"
    )
    command.add_argument("--keep", metavar="N", type=_count, default=KEPT, help=f"the newest (default: {KEPT})")
    command.add_argument(
        "--keep-failed", metavar="N", type=_count, default=KEPT_FAILED,
        help=f"and the newest in which a test failed (default: {KEPT_FAILED})",
    )  # fmt: skip
    command.add_argument("--dry-run", action="store_true", help="print what would be deleted")
    return parser


def _version() -> str:
    try:
        return metadata.version("pytest-nsa")
    except metadata.PackageNotFoundError:
        return "(not installed)"


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r}: must be a number, 0 or more")
    return int(text)


def _diagnose(arguments: argparse.Namespace) -> int:
    first, *others = arguments.folders
    if not (first.is_dir() and find_test_folders(first)):
        ended = read_object(first / FINISHED)
        has_passed = bool(read_entries(first)) and ended.get("failed") == 0 and not ended.get("interrupted")
        if has_passed and not (arguments.json or arguments.html):
            print("no test failed; of tests that pass, --ranks-keep=all keeps the evidence", file=sys.stderr)
            return 0
        code = diagnose_foreign(arguments.folders, as_json=arguments.json, sources=arguments.sources)
        if code is not None:
            return code
        print(
            f"error: {str(first)!r}: no evidence here; give the folder of a run or a test, or dumps, logs and stacks of a job",
            file=sys.stderr,
        )
        return 2
    own = resolve_own(first) if arguments.html else first
    if own is None:
        return 2
    first = own
    folders = find_test_folders(first)
    unread = [path.name for path in sorted(first.iterdir()) if path.is_dir() and not os.access(path, os.R_OK | os.X_OK)]
    if unread:
        print(visible(f"skipped, as they may not be read: {', '.join(unread)}"), file=sys.stderr)
    failed = are_running = False
    entries = []
    for folder in folders:
        evidence = read(folder, *others, sources=arguments.sources)
        if evidence is None:
            continue
        name_of_test = visible(evidence.job.scenario or evidence.job.nodeid)
        if is_live(evidence):
            state = "this is its state now" if evidence.was_stalled else "its ranks make progress"
            print(f"{name_of_test}: it is still running; {state}", file=sys.stderr)
            if not evidence.was_stalled:
                are_running = True
                continue
        below = sources_folder(evidence, requested=arguments.sources)
        verdict = make_verdict(evidence, again=arguments.again or bool(others), below=below)
        failed = failed or verdict.failed
        name = str(folder.relative_to(first))
        entries.append(Entry(folder=name, verdict=verdict))
        if arguments.json:
            print(json.dumps(verdict.to_json()))
        elif verdict.failed or verdict.expected:
            print(f"{name_of_test}\n" + "\n".join(lines(verdict, evidence)) + "\n")
        else:
            print(f"{name_of_test}\n{verdict.outcome}\n")
    if arguments.html:
        write_atomically(
            first / "report.html", html.render(first, entries, read_decision(first, entries), interrupted=False)
        )
        print(visible(str(first / "report.html")), file=sys.stderr)
    if not entries and not are_running:
        return 2
    return int(failed)


def _watch(arguments: argparse.Namespace) -> int:
    # resolve() raises for a cycle of links.
    folders = {Path(os.path.realpath(arguments.run))} if arguments.run else set()
    launched: dict[tuple[int, ...], LaunchedWatcher] = {}
    for pid in arguments.pids:
        if found := find_folder(pid):
            folders.add(found)
        elif ranks := launched_ranks(pid):
            launched[tuple(ranks.values())] = LaunchedWatcher(ranks, pid)
        else:
            why = "is another user's" if Path(f"/proc/{pid}").exists() and not is_ours(Path(f"/proc/{pid}")) else ""
            why = why or "is neither a rank nor the launcher of ranks (no board, no RANK)"
            print(f"error: process {pid} {why}: start its training with NSA_TRACE_DIR=DIR", file=sys.stderr)
            return 2
    watchers = [*map(Watcher, sorted(folders)), *launched.values()]
    if not watchers:
        print("error: give --run DIR, or the process id of a rank or launcher", file=sys.stderr)
        return 2
    command = VerdictCommand(arguments.on_verdict) if arguments.on_verdict else None
    return watch(watchers, as_json=arguments.json, once=arguments.once, command=command)


IN_A_CHECKOUT = Path(__file__).parents[2] / "docs" / "causes"


def explain(name: str) -> int:
    """Print the page of a cause. Return 2 for a name that is no cause, after a line with the nearest names."""
    page = _read_page(name) if name in CAUSES else ""
    if not page:
        near = difflib.get_close_matches(name, CAUSES, n=3) or sorted(CAUSES)
        print(f"error: {name!r}: no cause of that name has a page; there is {', '.join(near)}", file=sys.stderr)
        return 2
    print(page.rstrip())
    return 0


def _read_page(name: str) -> str:
    shipped = resources.files("pytest_nsa").joinpath("causes", f"{name}.md")
    for page in (shipped, IN_A_CHECKOUT / f"{name}.md"):
        if page.is_file():
            return page.read_text(encoding="utf-8")
    return ""


MOST_UNREAD = 5


def diagnose_foreign(paths: Sequence[Path], *, as_json: bool, sources: bool) -> int | None:
    """Print the kinds of files and the verdict on their job. Return the exit code; None where no file has evidence."""
    job = read_job(paths)
    for text in job.unread[:MOST_UNREAD]:
        print(visible(f"cannot read {text}"), file=sys.stderr)
    if not job.kinds:
        return 2 if job.unread else None
    for kind in job.kinds:
        print(visible(kind), file=sys.stderr if as_json else sys.stdout)
    verdict, evidence = judge(job, str(paths[0]), sources=sources)
    if as_json:
        print(json.dumps(verdict.to_json()))
    else:
        print("\n".join(line for line in lines(verdict, evidence) if not line.startswith("  evidence")))
        if more := missing_for_more(job):
            print(f"  lacks    {more}")
    return int(verdict.failed)


def compare(base: list[Path], new: list[Path]) -> int:
    """Print what differs between two runs, the first of each side; the others are repeats.

    Return 1 if something is worse, 2 if a folder is no run, else 0.
    """
    for folder in (*base, *new):
        if not (folder / VERDICTS).is_file():
            print(
                f"error: {str(folder)!r}: no run here (no {VERDICTS}); give a run's folder, as artifacts/latest",
                file=sys.stderr,
            )
            return 2
    sides = [[{e.name: e.verdict for e in read_entries(folder)} for folder in side] for side in (base, new)]
    for folder, entries in zip((*base, *new), (*sides[0], *sides[1]), strict=True):
        if not entries:
            print(f"error: {str(folder)!r}: its {VERDICTS} has no verdict that can be read", file=sys.stderr)
            return 2
    found = comparing.compare(*sides)
    names = (_name(base[0]), _name(new[0]))
    tests = len({*sides[0][0], *sides[1][0]})
    print(visible(comparing.as_markdown(found, names, tests)), end="")
    return int(any(d.kind == "worse" for d in found))


def _name(folder: Path) -> str:
    return folder.resolve().name
