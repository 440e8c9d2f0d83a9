"""Memory of this process, by /proc: its present size, and its peak since a moment; what the kernel ended for memory."""

from __future__ import annotations

import os
import re
from pathlib import Path

_STATUS = 1 << 14  # bytes; the file has a tenth of it
_RESET_PEAK = b"5"  # proc(5): clear_refs


class AddedMemory:
    """The memory that this process adds from now on.

    A fork begins with its parent's pages, so only the added memory can be compared between two runs of a test.
    """

    def __init__(self) -> None:
        try:
            fd = os.open("/proc/self/clear_refs", os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                os.write(fd, _RESET_PEAK)
            finally:
                os.close(fd)
        except OSError:  # a kernel without it, or a sandbox: only the peak since the start is known
            self._began: float | None = None
        else:
            self._began = _mib(b"VmRSS:")

    def peaks(self) -> dict[str, float]:
        """Return ``peak_mib``, the peak, and ``added_mib``, the peak less the size at the beginning; unknown values are omitted."""
        peak = _mib(b"VmHWM:")
        if peak is None:
            return {}
        return {"peak_mib": peak} | (
            {} if self._began is None else {"added_mib": round(max(0.0, peak - self._began), 1)}
        )


def _mib(field: bytes) -> float | None:
    try:
        fd = os.open("/proc/self/status", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        _, found, rest = os.read(fd, _STATUS).partition(field)
    except OSError:
        return None
    finally:
        os.close(fd)
    return round(int(rest.split(None, 1)[0]) / 1024, 1) if found else None


_CGROUPS = Path("/sys/fs/cgroup")
_OOM_KILLS = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)


def count_oom_kills() -> int:
    """Return how many processes of this one's control group the kernel has ended for memory; 0 where it does not count them."""
    try:
        groups = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    except OSError:
        return 0
    total = 0
    for _, controllers, path in groups:
        files = {"": f"{path}/memory.events", "memory": f"memory{path}/memory.oom_control"}
        if controllers in files:
            try:
                text = (_CGROUPS / files[controllers].lstrip("/")).read_text()
            except OSError:
                continue
            total += sum(map(int, _OOM_KILLS.findall(text)))
    return total
