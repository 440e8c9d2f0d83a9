"""The events of a job that another process than its ranks observes, a line of JSON each."""

from pathlib import Path

# Bound at import: a test may replace the functions of time.
from time import time as wall_clock

from pytest_nsa.system.disk_space import ignore_full_disk
from pytest_nsa.wire.files import append_line


def note(log: Path, event: str, /, **facts: object) -> None:
    """Append an event, at the present time unless ``facts`` have another; no-op on a full disk."""
    with ignore_full_disk():
        append_line(log, {"event": event, "time": wall_clock(), **facts})
