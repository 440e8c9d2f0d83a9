"""Memory of this process, as /proc has it: what it holds, and the most that it has held since a moment."""

from __future__ import annotations

from pathlib import Path

_RESET_PEAK = b"5"  # proc(5): clear_refs


class AddedMemory:
    """The memory that this process takes from now on.

    A fork begins with its parent's pages, many or few: what two runs of a test can be compared by is what it adds.
    """

    def __init__(self) -> None:
        try:
            Path("/proc/self/clear_refs").write_bytes(_RESET_PEAK)
        except OSError:  # a kernel without it, or a sandbox: the peak since the start is all that is known
            self._began: float | None = None
        else:
            self._began = _mib(b"VmRSS:")

    def peaks(self) -> dict[str, float]:
        """Return ``peak_mib``, the most that was held, and ``added_mib``, how much more that is than at the beginning; unknown
        values are omitted.
        """
        peak = _mib(b"VmHWM:")
        if peak is None:
            return {}
        return {"peak_mib": peak} | (
            {} if self._began is None else {"added_mib": round(max(0.0, peak - self._began), 1)}
        )


def _mib(field: bytes) -> float | None:
    try:
        lines = Path("/proc/self/status").read_bytes().splitlines()
    except OSError:
        return None
    found = next((line.split()[1] for line in lines if line.startswith(field)), None)
    return None if found is None else round(int(found) / 1024, 1)
