"""What /proc reports of a process. Reading it disturbs no process; values that a sandbox hides are empty."""

import contextlib
import os
import re
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nsa.trace.secrets import masked_arguments
from pytest_nsa.system.clock import monotonic

MOST = 200  # characters


def command_line(pid: int, most: int = MOST) -> str:
    """Return the first ``most`` characters of a process's command line, as one line and with secrets masked; '' if it has ended."""
    try:
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").rstrip("\0").split("\0")
    except OSError:
        return ""
    return " ".join(" ".join(masked_arguments(arguments)).split())[:most]


REST_S = 0.02
REST_LOOKS = 10
_STATUS = 49  # among the fields of read_stat
LEVELS = 3  # of descendants that are looked at


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessState:
    """A look at a process: state letter, wait channel, CPU seconds (also of its main thread, in the kernel, and of its
    descendants), page faults, bytes written to files and pipes, the commands of its children, how children ended that it has
    not waited for, and its program if that is neither this process's nor a Python.
    """

    state: str
    cpu_s: float
    main_cpu_s: float
    kernel_s: float
    below_cpu_s: float
    faults: int
    written: int
    wchan: str
    children: tuple[str, ...]
    ended: tuple[str, ...]
    rss_mib: float
    program: str = ""


def look_at(pid: int) -> ProcessState | None:
    """Read /proc for ``pid``; None if it has ended."""
    proc = Path("/proc") / str(pid)
    fields = read_stat(pid)
    if not fields:
        return None
    user, kernel = _cpu_seconds(fields)
    children = list_children(pid)
    ended = {child: end for child in children if (end := _read_end(child))}
    return ProcessState(
        state=fields[0],
        cpu_s=user + kernel,
        main_cpu_s=sum(_cpu_seconds(read_stat(f"{pid}/task/{pid}"))),
        kernel_s=kernel,
        below_cpu_s=_read_cpu_seconds(children),
        faults=int(fields[7]),
        written=read_io(proc).get("wchar", 0),
        wchan=read_proc_text(proc / "wchan").strip(),
        children=tuple(_child(command_line(child), command_line(pid)) for child in children if child not in ended),
        ended=tuple(ended.values()),
        rss_mib=round(int(fields[21]) * os.sysconf("SC_PAGE_SIZE") / (1 << 20), 1),
        program=_other_program(proc),
    )


def _other_program(proc: Path) -> str:
    """Return the name of a process's program; '' if it is this process's program, a Python, or cannot be read."""
    try:
        path, own = os.readlink(proc / "exe"), os.readlink("/proc/self/exe")
    except OSError:
        return ""
    name = os.path.basename(path)
    return "" if path == own or name.startswith("python") else name


def read_io(proc: Path) -> dict[str, int]:
    """Return the bytes that a process has read (``rchar``) and written (``wchar``), and more; {} where that cannot be read."""
    return {name: int(number) for name, number in _read_fields(proc / "io").items()}


def count_waits(pid: int) -> int:
    """Return how often the main thread of a process has waited so far: for data, a lock, a timer; 0 where that is hidden."""
    return int(_read_fields(Path(f"/proc/{pid}/status")).get("voluntary_ctxt_switches", 0))


def is_runnable(pid: int) -> bool:
    """Return whether a process runs or waits for a CPU (state R)."""
    return read_stat(pid)[:1] == ["R"]


def began(pid: int) -> int:
    """Return when a process began, in clock ticks since boot; 0 if it has ended. With it, a reused pid can be detected."""
    fields = read_stat(pid)
    return int(fields[19]) if len(fields) > 19 else 0


def is_alive(pid: int, since: int | None = None) -> bool:
    """Return whether a process has not ended; with ``since``, whether it is the one that `began` then."""
    fields = read_stat(pid)
    return fields[:1] not in ([], ["Z"], ["X"]) and since in (None, int(fields[19]))


def has_more_threads(pid: int, count: int) -> bool:
    """Return whether a process has more than ``count`` threads; False where the kernel does not show it."""
    fields = read_stat(pid)
    return len(fields) > 17 and int(fields[17]) > count


def read_stat(process: int | str) -> list[str]:
    """Return the fields of ``stat`` of a process, or of a thread ('PID/task/TID'), from the state on, which follows the command's
    name; [] if it has ended.
    """
    return read_proc_text(Path(f"/proc/{process}/stat")).rpartition(")")[2].split()


def _cpu_seconds(fields: list[str]) -> tuple[float, float]:
    """Return user and kernel seconds from the fields that `read_stat` returns; zeros for []."""
    ticks = [int(field) / os.sysconf("SC_CLK_TCK") for field in fields[11:13]]
    return (ticks[0], ticks[1]) if len(ticks) == 2 else (0.0, 0.0)


def _read_cpu_seconds(pids: list[int], levels: int = LEVELS) -> float:
    """Return the CPU seconds of processes and their descendants."""
    found = sum(sum(_cpu_seconds(read_stat(pid))) for pid in pids)
    return found + sum(_read_cpu_seconds(list_children(pid), levels - 1) for pid in pids) if levels > 1 else found


def list_children(pid: int) -> list[int]:
    """Return the process ids of a process's children, whichever thread started them; [] where the kernel does not list them."""
    found: list[int] = []
    with contextlib.suppress(OSError):  # the process ends
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += map(int, read_proc_text(task / "children").split())
    return found


def open_files(pid: int) -> list[str]:
    """Return the targets of a process's descriptors, '/tmp/x', 'pipe:[123]'; [] if the kernel does not show them."""
    found: list[str] = []
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):  # it has just been closed
                found.append(os.readlink(f"/proc/{pid}/fd/{name}"))
    return found


def list_written_files(pid: int) -> list[tuple[Path, str, int]]:
    """Return (descriptor in /proc, target, flags of open(2)) of the files that a process has open to write; [] where hidden."""
    found: list[tuple[Path, str, int]] = []
    with contextlib.suppress(OSError):
        for name in sorted(os.listdir(f"/proc/{pid}/fd"), key=int):
            path = Path(f"/proc/{pid}/fd/{name}")
            flags = int(_read_fields(Path(f"/proc/{pid}/fdinfo/{name}")).get("flags", "0"), 8)
            with contextlib.suppress(OSError):  # it has just been closed
                if flags & os.O_ACCMODE != os.O_RDONLY:
                    found.append((path, os.readlink(path), flags))
    return found


def _read_end(pid: int) -> str:
    """Return how a process ended that its parent has not waited for; '' if it runs."""
    fields = read_stat(pid)
    return how_it_ended(read_status(fields)) if fields[:1] == ["Z"] else ""


def read_status(fields: Sequence[str]) -> int:
    """Return the wait status of a process by the fields of its `read_stat`; 0 while it runs, and where the kernel hides it."""
    return int(fields[_STATUS]) if len(fields) > _STATUS else 0


def how_it_ended(status: int) -> str:
    """Return 'exit code N' or 'signal N' for the wait status of a process, which is 0 where the kernel hides it."""
    code = os.waitstatus_to_exitcode(status)
    return f"signal {-code}" if code < 0 else f"exit code {code}"


def _child(command: str, parents: str) -> str:
    """Return the command of a child process; 'a fork of it' if it has its parent's command line."""
    return "a fork of it" if command == parents else command


def catches(pid: int, number: int) -> bool:
    """Return whether a process has its own handler for a signal; False where the kernel does not show it."""
    caught = _read_fields(Path(f"/proc/{pid}/status")).get("SigCgt", "0")
    return bool(int(caught, 16) >> (number - 1) & 1)


def difference(before: ProcessState, after: ProcessState, elapsed: float) -> dict[str, Any]:
    """Return the changes between two looks at a process, with ``elapsed`` seconds between them, as facts for the evidence."""
    facts = asdict(after)
    facts["wants_cpu"] = before.state == after.state == "R"  # it may get little of it on a busy machine
    facts["cpu_share"] = round((after.cpu_s - before.cpu_s) / elapsed, 3)
    facts["main_cpu_share"] = round((after.main_cpu_s - before.main_cpu_s) / elapsed, 3)
    facts["below_cpu_share"] = round(max(0.0, after.below_cpu_s - before.below_cpu_s) / elapsed, 3)
    facts["written_per_s"] = round((after.written - before.written) / elapsed, 1)
    # A share of its CPU time.
    facts["kernel_share"] = round((after.kernel_s - before.kernel_s) / max(after.cpu_s - before.cpu_s, 0.01), 3)
    facts["faults_per_s"] = round((after.faults - before.faults) / elapsed, 1)
    return facts


def restless_threads() -> list[str]:
    """Return the names of this process's other threads that are not idle within `REST_LOOKS` looks.

    A thread that is idle in a system call holds no lock that a forked child would wait for in vain; a running thread may.
    """
    names = {t.native_id: t.name for t in threading.enumerate()}
    now = _thread_activity()
    restless = list(now)
    for _ in range(REST_LOOKS):
        if not restless:
            break
        time.sleep(REST_S)
        before, now = now, _thread_activity()
        restless = [thread for thread in now if now[thread] != before.get(thread)]
    return [names.get(thread, f"native thread {thread}") for thread in restless]


def _thread_activity() -> dict[int, tuple[str, ...]]:
    """Return state and context switches of each thread except the main one; values that always differ if /proc hides them."""
    found = {}
    for task in Path("/proc/self/task").glob("*"):
        if task.name == str(os.getpid()):
            continue
        status = _read_fields(task / "status")
        switches = (status.get("voluntary_ctxt_switches"), status.get("nonvoluntary_ctxt_switches"))
        state = status.get("State", "?")[:1]
        resting = state in "SI" and None not in switches
        found[int(task.name)] = (state, *map(str, switches)) if resting else (str(monotonic()),)
    return found


def _read_fields(path: Path) -> dict[str, str]:
    """Return the fields of a file with lines 'NAME: VALUE'; {} if it cannot be read."""
    pairs = (line.partition(":") for line in read_proc_text(path).splitlines())
    return {name: value.strip() for name, _, value in pairs}


def read_proc_text(path: Path) -> str:
    """Return the text of a file of the kernel; '' if it cannot be read."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


_STATUS_BYTES = 1 << 14  # bytes; the file has a tenth of it
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
        _, found, rest = os.read(fd, _STATUS_BYTES).partition(field)
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
