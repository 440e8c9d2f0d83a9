"""Memory of this process, by /proc: its present size, and its peak since a moment."""

from __future__ import annotations

import os

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
