"""The server of `tests_cpu.warm`: it imports torch, pytest and the plugin. Usage: warm_server.py FD"""

import _posixsubprocess
import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import json
import os
import pkgutil
import re
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

sys.path[0] = os.path.dirname(sys.path[0])  # `nsa`, which torch imports, is not tests_cpu/nsa

import _pytest.assertion  # noqa: E402
import _pytest.config  # noqa: E402
import torch  # noqa: E402
import torch._dynamo  # noqa: E402
import torch.distributed  # noqa: E402
import torch.distributed.checkpoint.state_dict  # noqa: E402
import torch.distributed.device_mesh  # noqa: E402
import torch.distributed.fsdp  # noqa: E402
import torch.utils.data  # noqa: E402

PRCTL = ctypes.CDLL(None).prctl
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
# What each session imports, of pytest, of xdist and of Python.
SHARED = (
    *(f"_pytest.{name}" for name in (
        "faulthandler", "helpconfig", "junitxml", "pastebin", "setuponly", "setupplan", "skipping", "threadexception",
        "tracemalloc", "unittest", "unraisableexception", "warnings",
    )),
    "pdb", "xml.dom.minidom", "xml.etree.ElementTree",
)  # fmt: skip


WITHOUT_TORCH = ("multiprocessing.resource_tracker", " -P ")  # in command lines: it would serve them nothing
PLUGINS = ("xdist.plugin", "xdist.dsession", "xdist.looponfail", "pytest_timeout")


def serve(fd: int) -> None:
    """Fork for each request; send the child's pid at once, and its exit code when it has ended."""
    torch.set_num_threads(1)
    for name in SHARED:
        with contextlib.suppress(ModuleNotFoundError):  # of another pytest
            importlib.import_module(name)
    _import_plugins()
    gc.freeze()  # else each session collects all objects of these imports, five times at its end
    sock = socket.socket(fileno=fd)
    running: dict[int, int] = {}  # ids of processes by descriptors that can be read when they have ended
    while True:
        ready = select.select([sock, *running], [], [])[0]
        for ended in [number for number in running if number in ready]:
            pid = running.pop(ended)
            os.close(ended)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            sock.sendall(json.dumps({"pid": pid, "code": code}).encode() + b"\n")
        if sock not in ready:
            continue
        request, fds = _receive(sock)
        pid = os.fork()
        if pid == 0:
            PRCTL(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            sock.close()
            _become(request, fds)
        for number in fds:
            os.close(number)
        running[os.pidfd_open(pid)] = pid
        sock.sendall(json.dumps({"pid": pid}).encode() + b"\n")


def _import_plugins() -> None:
    """Import what each session imports of its plugins, by the import hook of pytest's assertions, as a session does."""
    config = _pytest.config.get_config()
    if not hasattr(type(config), "inicfg"):  # pytest 8.4 makes it as it parses
        config.inicfg = {}
    hook = _pytest.assertion.install_importhook(config)
    hook.mark_rewrite("pytest_nsa", *(name.partition(".")[0] for name in PLUGINS))
    package = importlib.import_module("pytest_nsa")
    modules = [info.name for info in pkgutil.walk_packages(package.__path__, "pytest_nsa.")]
    for name in (*PLUGINS, *(name for name in modules if not name.endswith("__main__"))):
        importlib.import_module(name)
    config._ensure_unconfigure()


@contextlib.contextmanager
def _exit_handlers() -> Iterator[None]:
    """Report an exception, wait for threads and run exit handlers at the end, as the interpreter does."""
    try:
        yield
    except SystemExit:
        raise
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        raise SystemExit(1) from None
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()


class Nursery:
    """A child that stays what this process is now, and forks the Pythons that this process starts: with torch imported, too."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair()
        if os.fork() == 0:
            self._socket.close()
            self._serve(theirs)
        theirs.close()
        self._owner, self._answers = os.getpid(), self._socket.makefile()
        self._plain = _posixsubprocess.fork_exec
        subprocess._USE_POSIX_SPAWN = False  # type: ignore[attr-defined]  # Python 3.13 would start most by it
        _posixsubprocess.fork_exec = subprocess._fork_exec = self._fork_exec  # type: ignore[attr-defined]

    def _serve(self, sock: socket.socket) -> NoReturn:
        """Fork for each request. The child's parent ends at once, so that its grandparent adopts it."""
        PRCTL(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        while True:
            request, fds = _receive(sock)
            middle = os.fork()
            if middle == 0:
                middle = os.getpid()
                child = os.fork()
                if child == 0:
                    sock.close()
                    while os.getppid() == middle:
                        time.sleep(0.001)
                    _become(request, fds)
                sock.sendall(b"%d" % child)
                os._exit(0)
            for number in fds:
                os.close(number)
            os.waitpid(middle, 0)
            sock.sendall(b"\n")

    def _fork_exec(
        self, args: Sequence[Any], executables: Any, close_fds: bool, kept: Any, cwd: Any, env: Any, *rest: Any
    ) -> int:
        """Do what ``_posixsubprocess.fork_exec`` does, which is below subprocess and multiprocessing."""
        stdin, _, _, stdout, _, stderr, _, errors, _, session = rest[:10]
        words = [os.fsdecode(word) for word in args]
        is_plain = words[0] != sys.executable or any(word in " ".join(words) for word in WITHOUT_TORCH)
        if is_plain or os.getpid() != self._owner or callable(rest[15]):
            return self._plain(args, executables, close_fds, kept, cwd, env, *rest)
        numbers = [0, 1, 2, *(number for number in kept if number != errors)]
        fds = [
            number if fd == -1 else fd for number, fd in zip(numbers, (stdin, stdout, stderr), strict=False)
        ] + numbers[3:]
        variables = dict(os.fsdecode(line).split("=", 1) for line in (_environment_of_c() if env is None else env))
        request = {
            "python": words[1:], "fds": numbers, "env": variables, "cwd": os.fsdecode(cwd or os.getcwd()), "session": bool(session),
            "nursery": True,
        }  # fmt: skip
        PRCTL(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        socket.send_fds(self._socket, [json.dumps(request).encode() + b"\n"], fds)
        answer = self._answers.readline()
        PRCTL(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        return int(answer)


def _environment_of_c() -> Iterator[bytes]:
    """Yield the variables that a new program inherits: os.putenv sets them, and not those of os.environ."""
    lines = ctypes.POINTER(ctypes.c_char_p).in_dll(ctypes.CDLL(None), "environ")
    number = 0
    while (line := lines[number]) is not None:
        yield line
        number += 1


def _receive(sock: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Return a request and its descriptors; exit when the other end has gone."""
    data, fds, _, _ = socket.recv_fds(sock, 1 << 20, 100)
    while not data.endswith(b"\n"):
        more = sock.recv(1 << 20)
        if not more:
            os._exit(0)
        data += more
    return json.loads(data), fds


def _interpret(arguments: list[str]) -> int:
    """Do what ``python ARGUMENTS`` does: -m MODULE, -c CODE or a file; -u or -B before it."""
    while arguments[0] in ("-u", "-B"):
        if arguments[0] == "-u":
            sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
        arguments = arguments[1:]
    kind = arguments[0] if arguments[0] in ("-m", "-c") else ""
    what, *rest = arguments[1:] if kind else arguments
    sys.argv = [kind if kind == "-c" else what, *rest]
    if any(name.startswith("NSA_TRACE_") for name in os.environ):
        importlib.import_module("nsa.trace.autostart").autostart()  # as the import of torch does
    with _exit_handlers():
        if (kind, what) == ("-m", "pytest") and re.search(r"(?:^| )-n ?\d", " ".join(rest)):
            Nursery()  # of xdist's workers
        if kind == "-m":
            runpy.run_module(what, run_name="__main__", alter_sys=True)
        elif kind == "-c":
            main = sys.modules["__main__"] = types.ModuleType("__main__")
            exec(compile(what, "<string>", "exec"), vars(main))
        else:
            sys.path[0] = os.path.dirname(os.path.abspath(what))
            runpy.run_path(what, run_name="__main__")
    return 0


def _take(fds: list[int], numbers: list[int]) -> None:
    """Give the descriptors these numbers; close all others but the standard ones."""
    away = [fcntl.fcntl(fd, fcntl.F_DUPFD, 200) for fd in fds]
    for fd, number in zip(away, numbers, strict=True):
        os.dup2(fd, number)
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) not in numbers:
            with contextlib.suppress(OSError):  # the one that listed
                os.close(int(name))


def _become(request: dict[str, Any], fds: list[int]) -> NoReturn:
    """Run the request in this process, and exit."""
    code = 70
    try:
        _take(fds, request["fds"])
        os.chdir(request["cwd"])
        os.environ.clear()
        os.environ.update(request["env"])
        os.environ.pop("TORCH_DEVICE_BACKEND_AUTOLOAD", None)
        tempfile.tempdir = None  # TMPDIR names another one
        sys.path[0] = request["cwd"]
        named = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        sys.path[1:1] = [folder for folder in named if folder and folder not in sys.path]
        sys.dont_write_bytecode = False  # plugins are rewritten once, not in each session
        if request.get("session"):
            os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        signal.signal(signal.SIGQUIT, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if request.get("nursery"):
            Nursery()
        code = _interpret(request["python"])
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    serve(int(sys.argv[1]))
