"""What a test that used the fixture `launch` gets back."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pytest_nsa.diagnosis.verdict import Verdict


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The verdict on a launched function, and the folder with its evidence."""

    verdict: Verdict
    folder: Path
    world_size: int

    @property
    def passed(self) -> bool:
        """Whether every rank returned."""
        return self.verdict.outcome == "PASS"

    def output(self, rank: int) -> str:
        """Return what a rank wrote to stdout and stderr."""
        path = self.folder / f"rank{rank}" / "output.log"
        return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
