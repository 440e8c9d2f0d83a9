"""Writes the list of causes in docs/causes/README.md, from the registry: `python docs/list_causes.py`."""

from __future__ import annotations

from pathlib import Path

PAGE = Path(__file__).with_name("causes") / "README.md"


def page_with(text: str) -> str:
    """Return the page with its chapters, names and summaries in the registry's order; what is above them stays."""
    from pytest_nsa.diagnosis.causes import CAUSES

    chapters: dict[str, list[str]] = {}
    for cause in CAUSES.values():
        chapters.setdefault(cause.chapter, []).append(f"- [{cause.name}]({cause.name}.md): {cause.summary}")
    above = text.partition("\n## ")[0].rstrip()
    return "\n\n".join([above, *(f"## {chapter}\n\n" + "\n".join(rows) for chapter, rows in chapters.items())]) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page_with(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
