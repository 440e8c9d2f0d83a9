"""``python -m pytest_nsa diagnose DIR``: read a folder of evidence again, from this machine or another, and say the verdict.

Exit codes: 0 nothing failed, 1 something did, 2 no evidence there.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from pytest_nsa.diagnosis.diagnose import diagnose
from pytest_nsa.evidence import find_test_folders, load
from pytest_nsa.report.text import lines


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="pytest-nsa", description="Diagnose tests on ranks from the evidence they left."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("diagnose", help="say the verdict on a test's folder, or on every test of a run")
    command.add_argument("folder", metavar="DIR", type=Path, help="as in artifacts/latest or artifacts/latest/SCENARIO")
    command.add_argument("--json", action="store_true", help="print verdict.json objects, one a line")
    arguments = parser.parse_args(argv)
    try:
        return _diagnose(arguments)
    except BrokenPipeError:  # `| head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _diagnose(arguments: argparse.Namespace) -> int:
    folders = find_test_folders(arguments.folder)
    if not folders:
        print(
            f"error: {str(arguments.folder)!r}: no evidence here (no job.json); give a run's or a test's folder",
            file=sys.stderr,
        )
        return 2
    failed = False
    for folder in folders:
        evidence = load(folder)
        verdict = diagnose(evidence)
        failed = failed or verdict.failed
        if arguments.json:
            print(json.dumps(verdict.to_json()))
        elif verdict.failed:
            print(f"{verdict.scenario or verdict.nodeid}\n" + "\n".join(lines(verdict, evidence)) + "\n")
        else:
            print(f"{verdict.scenario or verdict.nodeid}\n{verdict.outcome}\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
