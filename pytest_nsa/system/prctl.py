"""What Python lacks of Linux: a child that goes with its parent, the end of a child's group, a hole in a file, C's stdout."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import warnings

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_IOLBF = 1  # stdio.h of glibc and musl
_libc = ctypes.CDLL(None, use_errno=True)
# Python's own wrapper makes an enum of the handler that was there, for which a fork copies fifty pages.
set_handler = getattr(signal.signal, "__wrapped__", signal.signal)


def fork() -> int:
    """`os.fork` without the warning of threads that Python 3.12 has: what forks here has looked which ones run."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def die_with(parent: int, number: int = signal.SIGKILL) -> None:
    """Have the kernel signal this process when the thread that forked it ends; at once if ``parent`` has gone already."""
    _libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


def become_subreaper() -> None:
    """Have the kernel give this process the orphans among its descendants, which would be init's otherwise."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def write_lines_at_once() -> None:
    """Have C's own stdout written line by line, though it is a file: what NCCL prints is lost with a rank that is killed, else."""
    with contextlib.suppress(ValueError):  # a C library that calls it otherwise
        _libc.setvbuf(ctypes.c_void_p.in_dll(_libc, "stdout"), None, _IOLBF, ctypes.c_size_t(0))


def kill_group(pid: int) -> None:
    """SIGKILL a child that leads a process group, and its group. Only for a child that has not been reaped."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):  # in the moment before it has made its own group
        os.kill(pid, signal.SIGKILL)


_FALLOC_FL_KEEP_SIZE, _FALLOC_FL_PUNCH_HOLE = 1, 2


def punch_hole(fd: int, start: int, length: int) -> bool:
    """Give a range of a file back to the file system; it reads as zeros. False where the file system cannot."""
    return _fallocate(fd, _FALLOC_FL_PUNCH_HOLE | _FALLOC_FL_KEEP_SIZE, start, length) == 0


def set_aside(fd: int, length: int) -> int:
    """Give a file space on the disk beyond its end, which stays where it is. Return 0, or the number of the error."""
    return _fallocate(fd, _FALLOC_FL_KEEP_SIZE, 0, length)


def _fallocate(fd: int, mode: int, start: int, length: int) -> int:
    failed = _libc.fallocate(fd, mode, ctypes.c_int64(start), ctypes.c_int64(length)) != 0
    return ctypes.get_errno() if failed else 0
