"""What the driver reports of the GPUs: at a stall, their load and memory; and the errors that it logs (Xid).

Read by NVML if the package nvidia-ml-py is installed (the extra ``gpu``), else by the program nvidia-smi, which reports no errors.
"""

import contextlib
import functools
import re
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pytest_nsa.system.clock import monotonic
from pytest_nsa.system.procfs import read_proc_text

LIMIT_S = 5.0
FREED_S, FREED_POLL_S = 10.0, 0.05
SLACK = 256 << 20  # bytes that the driver may keep of a process that has ended
_DRIVER = Path("/proc/driver/nvidia")
_FIELDS = ("index", "utilization.gpu", "memory.used", "memory.total", "temperature.gpu", "pstate")


@functools.cache
def nvml() -> Any:
    """Return the package pynvml, initialised; None without it, or without a driver."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml


def driver_version() -> str:
    """Return the version of NVIDIA's driver; '' without one."""
    found = re.search(r"Kernel Module.*?(\d+(?:\.\d+)+)", read_proc_text(_DRIVER / "version"))
    return found[1] if found else ""


def gpu_names() -> list[str]:
    """Return the model of each GPU as the driver names it; [] without one."""
    names = []
    for path in sorted((_DRIVER / "gpus").glob("*/information")):
        found = re.search(r"^Model:\s*(.+)$", read_proc_text(path), re.M)
        names += [found[1].strip()] if found else []
    return names


def look_at_gpus() -> list[dict[str, Any]]:
    """Return a dictionary per GPU (percent, MiB, °C); [] if neither NVML nor nvidia-smi answers."""
    library = nvml()
    if library is not None:
        with contextlib.suppress(library.NVMLError):
            return [_look_at(library, index) for index in range(library.nvmlDeviceGetCount())]
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    try:
        done = subprocess.run(
            [tool, f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits"], text=True, capture_output=True,
            timeout=LIMIT_S, check=False,
        )  # fmt: skip
    except (subprocess.TimeoutExpired, OSError):
        return []
    rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines()]
    return [dict(zip(_FIELDS, row, strict=True)) for row in rows if len(row) == len(_FIELDS)]


def memory_used(names: Sequence[str]) -> dict[str, int]:
    """Return the bytes in use on each GPU, by its index or UUID; without those that NVML does not know, {} without NVML."""
    library, found = nvml(), {}
    for name in names if library is not None else ():
        with contextlib.suppress(library.NVMLError):
            device = (
                library.nvmlDeviceGetHandleByIndex(int(name))
                if name.isdecimal()
                else library.nvmlDeviceGetHandleByUUID(name)
            )
            found[name] = int(library.nvmlDeviceGetMemoryInfo(device).used)
    return found


def wait_until_freed(before: Mapping[str, int], seconds: float) -> dict[str, int]:
    """Wait until each GPU has at most `SLACK` bytes more in use than ``before``: a killed process's memory is freed after its exit.

    Return, by GPU, the bytes that are in use beyond ``before`` if that has not happened after ``seconds``; else {}.
    """
    deadline = monotonic() + seconds
    while True:
        now = memory_used(list(before))
        above = {name: used - before[name] for name, used in now.items() if used > before[name] + SLACK}
        if not above or monotonic() >= deadline:
            return above
        time.sleep(FREED_POLL_S)


def _look_at(library: Any, index: int) -> dict[str, Any]:
    device = library.nvmlDeviceGetHandleByIndex(index)
    memory = library.nvmlDeviceGetMemoryInfo(device)
    values = (
        index, library.nvmlDeviceGetUtilizationRates(device).gpu, memory.used >> 20, memory.total >> 20,
        library.nvmlDeviceGetTemperature(device, library.NVML_TEMPERATURE_GPU),
        f"P{library.nvmlDeviceGetPerformanceState(device)}",
    )  # fmt: skip
    return dict(zip(_FIELDS, map(str, values), strict=True))


class XidWatch:
    """Collects the errors that the driver logs of the GPUs from now on. Without NVML no errors can be read."""

    def __init__(self) -> None:
        self._library = nvml()
        self._events: Any = None
        if self._library is None:
            return
        with contextlib.suppress(self._library.NVMLError):  # a driver, or a virtual GPU, without such events
            self._events = self._library.nvmlEventSetCreate()
            for index in range(self._library.nvmlDeviceGetCount()):
                device = self._library.nvmlDeviceGetHandleByIndex(index)
                self._library.nvmlDeviceRegisterEvents(
                    device, self._library.nvmlEventTypeXidCriticalError, self._events
                )

    def read(self) -> list[dict[str, int]]:
        """Return ``{"gpu": index, "xid": number}`` for each error since the last call, oldest first."""
        found: list[dict[str, int]] = []
        while self._events is not None:
            try:
                event = self._library.nvmlEventSetWait_v2(self._events, 0)
                found.append({"gpu": self._library.nvmlDeviceGetIndex(event.device), "xid": int(event.eventData)})
            except self._library.NVMLError:  # no event is left
                break
        return found

    def close(self) -> None:
        """Free the set of events."""
        if self._events is not None:
            with contextlib.suppress(self._library.NVMLError):
                self._library.nvmlEventSetFree(self._events)
            self._events = None
