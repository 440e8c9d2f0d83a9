"""Call a function before each start of a process, and add variables to its environment: wrap the methods of subprocess and
multiprocessing that start one.

``os.environ`` of this process never has the variables: a test may compare it, and its threads may copy it at any moment.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.process import BaseProcess
from typing import Any

RANK_VARIABLES = {"RANK", "WORLD_SIZE", "MASTER_ADDR"}  # any of them in env=: the environment is a rank's

_of_forks: dict[str, str] = {}  # what a fork adds to its environment
_this_thread = threading.local()


def on_start(before: Callable[[], bool], variables: Mapping[str, str]) -> Callable[[], None]:
    """Call ``before`` before each start of a process. If it returns true, the process gets ``variables``, unless it is started with
    an environment that is neither a rank's nor made from this process's.

    Return a function that undoes this.
    """
    popen: Any = subprocess.Popen
    process: Any = BaseProcess
    execute, start = popen._execute_child, process.start

    def execute_child(
        self: Any, args: Any, executable: Any, preexec: Any, close: Any, fds: Any, cwd: Any, env: Any, *more: Any
    ) -> Any:
        if not before():
            return execute(self, args, executable, preexec, close, fds, cwd, env, *more)
        if env is not None and (RANK_VARIABLES & set(env) or _is_made_from_ours(env)):
            env = {**variables, **env}
        with _in_environment(variables):
            return execute(self, args, executable, preexec, close, fds, cwd, env, *more)

    def start_process(self: Any) -> Any:
        if not before():
            return start(self)
        with _in_environment(variables):
            return start(self)

    popen._execute_child, process.start = execute_child, start_process

    def undo() -> None:
        popen._execute_child, process.start = execute, start

    return undo


def _is_made_from_ours(environment: Mapping[Any, Any]) -> bool:
    return 2 * len(os.environ.keys() & environment.keys()) >= len(os.environ)


@contextlib.contextmanager
def _in_environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Give variables to the processes that start in the block: a new program inherits C's environment, a fork os.environ.

    No-op within another one: a pytest that a test runs in this process has given its own.
    """
    if getattr(_this_thread, "is_within", False):
        yield
        return
    _this_thread.is_within = True
    _of_forks.update(variables)
    for name, value in variables.items():
        os.putenv(name, value)
    try:
        yield
    finally:
        for name in variables:
            if name in os.environ:
                os.putenv(name, os.environ[name])
            else:
                os.unsetenv(name)
        _of_forks.clear()
        _this_thread.is_within = False


os.register_at_fork(after_in_child=lambda: os.environ.update(_of_forks))
