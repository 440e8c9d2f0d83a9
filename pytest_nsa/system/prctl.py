"""Linux functions that Python lacks: let a child die with its parent, kill its group, punch a hole into a file, set C's stdout."""

import contextlib
import ctypes
import os
import signal
import warnings

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_IOLBF = 1  # stdio.h of glibc and musl
_libc = ctypes.CDLL(None, use_errno=True)
# Python's wrapper makes an enum of the previous handler, for which a fork copies fifty pages.
set_handler = getattr(signal.signal, "__wrapped__", signal.signal)


def fork() -> int:
    """`os.fork` without Python 3.12's warning about threads: the callers have checked them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def die_with(parent: int, number: int = signal.SIGKILL) -> None:
    """Have the kernel signal this process when the thread that forked it ends; at once if ``parent`` has ended already."""
    _libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


def become_subreaper() -> None:
    """Adopt the orphans among the descendants of this process, which init would adopt otherwise."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def write_lines_at_once() -> None:
    """Set C's stdout to write line by line, though it is a file: otherwise NCCL's output is lost when a rank is killed."""
    with contextlib.suppress(ValueError):  # a C library with another name for it
        _libc.setvbuf(ctypes.c_void_p.in_dll(_libc, "stdout"), None, _IOLBF, ctypes.c_size_t(0))


def kill_group(pid: int) -> None:
    """SIGKILL a child that leads a process group, and its group. Only for a child that has not been reaped."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):  # for a child that has not made its group yet
        os.kill(pid, signal.SIGKILL)


_FALLOC_FL_KEEP_SIZE, _FALLOC_FL_PUNCH_HOLE = 1, 2


def punch_hole(fd: int, start: int, length: int) -> bool:
    """Free the disk space of a range of a file, which then reads as zeros. Return False if the file system cannot."""
    return _fallocate(fd, _FALLOC_FL_PUNCH_HOLE | _FALLOC_FL_KEEP_SIZE, start, length) == 0


def reserve_space(fd: int, length: int) -> int:
    """Reserve disk space for a file without changing its size. Return 0, or the number of the error."""
    return _fallocate(fd, _FALLOC_FL_KEEP_SIZE, 0, length)


def _fallocate(fd: int, mode: int, start: int, length: int) -> int:
    failed = _libc.fallocate(fd, mode, ctypes.c_int64(start), ctypes.c_int64(length)) != 0
    return ctypes.get_errno() if failed else 0
