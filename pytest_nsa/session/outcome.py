"""What a test that used the fixture `launch` gets back."""

from __future__ import annotations

from pathlib import Path

from pytest_nsa.diagnosis.verdict import Verdict


class Outcome:
    """The verdict on a launched function, and the folder with its evidence.

    A test that reads neither ``verdict`` nor ``passed`` of a function that failed fails at its end.
    """

    def __init__(self, *, verdict: Verdict, folder: Path, world_size: int) -> None:
        self._verdict, self.folder, self.world_size = verdict, folder, world_size
        self._is_read = False

    @property
    def verdict(self) -> Verdict:
        """What the ranks did."""
        self._is_read = True
        return self._verdict

    @property
    def passed(self) -> bool:
        """Whether every rank returned."""
        return self.verdict.outcome == "PASS"

    @property
    def is_unread_failure(self) -> bool:
        """Whether the function failed and the test has not looked."""
        return self._verdict.failed and not self._is_read

    def output(self, rank: int) -> str:
        """Return what a rank wrote to stdout and stderr."""
        path = self.folder / f"rank{rank}" / "output.log"
        return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
