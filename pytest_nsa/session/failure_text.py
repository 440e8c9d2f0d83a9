"""A failure's text as an entry of pytest's traceback, coloured as pytest colours its own."""

from __future__ import annotations

from _pytest._code import code
from _pytest._io import TerminalWriter


class ReprEntryNative(code.ReprEntryNative):
    """Lines of text: the headline and errors in red, source lines in bold.

    It has the name of its base, by which pytest and xdist restore a report from JSON: as the base, without colour.
    """

    def toterminal(self, tw: TerminalWriter) -> None:
        """Write the lines."""
        for number, line in enumerate("".join(self.lines).splitlines(keepends=True)):
            is_error = number == 0 or line.startswith("E ")
            tw.write(line, red=is_error, bold=is_error or line.startswith((">", "---")))
