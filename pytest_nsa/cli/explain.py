"""`pytest-nsa explain CAUSE`: the page of a cause, as the documentation has it."""

from __future__ import annotations

import difflib
import sys
from importlib import resources
from pathlib import Path

from pytest_nsa.diagnosis.causes import CAUSES

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
