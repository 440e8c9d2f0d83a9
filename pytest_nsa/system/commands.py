"""The command lines of processes, for evidence, with secrets masked."""

from __future__ import annotations

from pathlib import Path

from nsa.trace.secrets import masked_arguments

MOST = 200  # characters


def command_line(pid: int, most: int = MOST) -> str:
    """Return the first ``most`` characters of a process's command line, with secrets masked; '' if it has ended."""
    try:
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").rstrip("\0").split("\0")
    except OSError:
        return ""
    return " ".join(masked_arguments(arguments)).strip()[:most]
