"""The server of `tests_cpu.warm`: it imports torch, pytest and the plugin. Usage: warm_server.py FD"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
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
import sys
import threading
import traceback
import types
from collections.abc import Iterator
from typing import Any, NoReturn

import _pytest.assertion
import _pytest.config
import execnet.gateway_base
import execnet.gateway_io
import pytest
import torch
import torch._dynamo
import torch.distributed
import torch.distributed.checkpoint.state_dict
import torch.distributed.device_mesh
import torch.distributed.fsdp
import torch.utils.data

PR_SET_PDEATHSIG = 1
# What each session imports, of pytest, of xdist and of Python.
SHARED = (
    *(f"_pytest.{name}" for name in (
        "faulthandler", "helpconfig", "junitxml", "pastebin", "setuponly", "setupplan", "skipping", "threadexception",
        "tracemalloc", "unittest", "unraisableexception", "warnings",
    )),
    "pdb", "xml.dom.minidom", "xml.etree.ElementTree",
)  # fmt: skip


PLUGINS = ("xdist.plugin", "xdist.dsession", "xdist.looponfail", "pytest_timeout")


def serve(fd: int) -> None:
    """Fork for each request; send the child's pid at once, and its exit code when it has ended."""
    torch.set_num_threads(1)
    for name in SHARED:
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
        data, fds, _, _ = socket.recv_fds(sock, 1 << 20, 3)
        if not data:
            return
        while not data.endswith(b"\n"):
            data += sock.recv(1 << 20)
        pid = os.fork()
        if pid == 0:
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            sock.close()
            for number in running:
                os.close(number)
            _become(json.loads(data), fds)
        for number in fds:
            os.close(number)
        running[os.pidfd_open(pid)] = pid
        sock.sendall(json.dumps({"pid": pid}).encode() + b"\n")


def _import_plugins() -> None:
    """Import what each session imports of its plugins, by the import hook of pytest's assertions, as a session does."""
    sys.path[0] = os.path.dirname(sys.path[0])  # `nsa` is not tests_cpu/nsa
    config = _pytest.config.get_config()
    hook = _pytest.assertion.install_importhook(config)
    hook.mark_rewrite("pytest_nsa", *(name.partition(".")[0] for name in PLUGINS))
    package = importlib.import_module("pytest_nsa")
    modules = [info.name for info in pkgutil.walk_packages(package.__path__, "pytest_nsa.")]
    for name in (*PLUGINS, *(name for name in modules if not name.endswith("__main__"))):
        importlib.import_module(name)
    config._ensure_unconfigure()


def _run(module: str) -> int:
    """Run a module's ``main`` as ``python -m`` would."""
    with _exit_handlers():
        return int(importlib.import_module(module).main())


@contextlib.contextmanager
def _exit_handlers() -> Iterator[None]:
    """Wait for threads and run exit handlers at the end, as the interpreter does."""
    try:
        yield
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()


class Worker:
    """A worker of xdist, forked before its session begins. Has what execnet uses of a `subprocess.Popen`."""

    def __init__(self) -> None:
        (to_read, stdin), (stdout, to_write) = os.pipe(), os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.dup2(to_read, 0)
            os.dup2(to_write, 1)
            os.closerange(3, max(to_read, stdin, stdout, to_write) + 1)
            self._serve()
        os.close(to_read)
        os.close(to_write)
        self.stdin, self.stdout = os.fdopen(stdin, "wb", buffering=0), os.fdopen(stdout, "rb")

    def _serve(self) -> NoReturn:
        """Take the session's environment, then do what ``python -c`` does with execnet's first line."""
        code = 1
        try:
            environment = sys.stdin.readline()
            if environment:  # else the session ended without a use for this worker
                os.environ.clear()
                os.environ.update(json.loads(environment))
                sys.argv = ["-c"]
                with _exit_handlers():
                    exec(eval(sys.stdin.readline()), {"__name__": "__main__"})
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)

    def start(self) -> Worker:
        """Begin, with the environment that this process has now."""
        self.stdin.write(json.dumps(dict(os.environ)).encode() + b"\n")
        return self

    def wait(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)


def _prepare_workers(arguments: list[str]) -> None:
    """Fork the workers that ``-n`` requests; execnet starts others itself, as in place of one that crashed."""
    text = " ".join(arguments)
    number = re.search(r"(?:^| )-n ?(\d+)", text)
    workers = [Worker() for _ in range(int(number[1]) if number else 0)]
    plain = execnet.gateway_io.Popen2IOMaster.__init__

    def init(self: Any, args: list[str], execmodel: Any) -> None:
        if not workers or args != [sys.executable, "-u", "-c", execnet.gateway_io.popen_bootstrapline]:
            plain(self, args, execmodel)
            return
        self.popen = worker = workers.pop().start()
        execnet.gateway_base.Popen2IO.__init__(self, worker.stdin, worker.stdout, execmodel=execmodel)

    execnet.gateway_io.Popen2IOMaster.__init__ = init


def _run_pytest(arguments: list[str]) -> int:
    _prepare_workers(arguments)
    return int(pytest.console_main())


def _interpret(arguments: list[str], *, session: bool) -> int:
    """Do what ``python ARGUMENTS`` does: -m MODULE, -c CODE or a file; with ``session``, in a process group of its own."""
    if session:
        os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    added = [
        folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder and folder not in sys.path
    ]
    sys.path[1:1] = added
    kind = arguments[0] if arguments[0] in ("-m", "-c") else ""
    what, *rest = arguments[1:] if kind else arguments
    sys.argv = [kind if kind == "-c" else what, *rest]
    if (kind, what) == ("-m", "pytest"):
        return _run_pytest(rest)
    with _exit_handlers():
        if kind == "-m":
            runpy.run_module(what, run_name="__main__", alter_sys=True)
        elif kind == "-c":
            main = sys.modules["__main__"] = types.ModuleType("__main__")
            exec(compile(what, "<string>", "exec"), vars(main))
        else:
            sys.path[0] = os.path.dirname(os.path.abspath(what))
            runpy.run_path(what, run_name="__main__")
    return 0


def _become(request: dict[str, Any], fds: list[int]) -> None:
    """Run the request in this process, and exit: it never returns."""
    code = 70
    try:
        for number, fd in zip((1, 2, 0), fds, strict=False):
            os.dup2(fd, number)
            os.close(fd)
        os.chdir(request["cwd"])
        os.environ.clear()
        os.environ.update(request["env"])
        os.environ.pop("TORCH_DEVICE_BACKEND_AUTOLOAD", None)
        sys.path[0] = request["cwd"]
        sys.dont_write_bytecode = False  # plugins are rewritten once, not in each session
        if "python" in request:
            code = _interpret(request["python"], session=request["session"])
        else:
            sys.argv = [request["program"], *request["arguments"]]
            code = _run_pytest(request["arguments"]) if request["program"] == "pytest" else _run(request["program"])
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1 if "python" in request else code
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    serve(int(sys.argv[1]))
