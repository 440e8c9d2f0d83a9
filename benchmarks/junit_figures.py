"""Outcome and seconds of every test of a junit file, with device, versions and date, as JSON.

python benchmarks/junit_figures.py JUNIT EXIT_CODE OUT
"""

from __future__ import annotations

import json
import platform
import sys
import time
from pathlib import Path
from xml.etree import ElementTree

import torch


def outcome(case: ElementTree.Element) -> str:
    """Return passed, failure, error or skipped."""
    return next((tag for tag in ("failure", "error", "skipped") if case.find(tag) is not None), "passed")


def main(junit: str, exit_code: str, out: str) -> None:
    """Read the junit file; print and keep its figures."""
    cases = list(ElementTree.parse(junit).iter("testcase"))
    figures = {
        "date": time.strftime("%Y-%m-%d"), "torch": torch.__version__, "cuda": torch.version.cuda,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else None, "gpus": torch.cuda.device_count(),
        "python": platform.python_version(), "exit_code": int(exit_code),
        "tests": [{"name": c.get("name"), "outcome": outcome(c), "seconds": float(c.get("time") or 0)} for c in cases],
    }  # fmt: skip
    text = json.dumps(figures, indent=1) + "\n"
    Path(out).write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main(*sys.argv[1:])
