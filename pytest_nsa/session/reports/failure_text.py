"""A failure's text as an entry of pytest's traceback, coloured as pytest colours its own; a hang's line while the run goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from _pytest._code import code
from _pytest._io import TerminalWriter

from pytest_nsa.diagnosis.verdict import Verdict
from pytest_nsa.report.plain import visible
from pytest_nsa.report.terminal import brief


class ReprEntryNative(code.ReprEntryNative):
    """Lines of text: the headline and errors in red, source lines in bold.

    It has its base's name, by which pytest and xdist restore a report from JSON; the restored entry has no colour.
    """

    def toterminal(self, tw: TerminalWriter) -> None:
        """Write the lines."""
        for number, line in enumerate("".join(self.lines).splitlines(keepends=True)):
            is_error = number == 0 or line.startswith("E ")
            tw.write(line, red=is_error, bold=is_error or line.startswith((">", "---")))


def hang_line(verdict: Verdict, item: pytest.Item) -> str:
    """Return 'HANG [1.2 s] app/step.py:12 lock_deadlock, rank 1 of 2: test_steps'."""
    after = f" [{verdict.stalled_s:.1f} s]" if verdict.stalled_s else ""
    return visible(f"  HANG{after} {brief(verdict, Path('.'))}: {item.name}")


class HangLines:
    """Registered where the terminal is: in the pytest process, under xdist in the controller."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Write the line of a hang below pytest's progress letter."""
        line = getattr(report, "nsa_hang", "")
        terminal: Any = self._config.pluginmanager.get_plugin("terminalreporter")
        if line and terminal is not None:
            writer = self._config.get_terminal_writer()
            terminal.ensure_newline()
            if writer.width_of_current_line:  # letters under xdist
                terminal.write("\n")
            terminal.write_line(line[: writer.fullwidth] if terminal.isatty else line)
