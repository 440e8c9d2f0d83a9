"""Call a function before each start of a process, and add variables to its environment: wrap the methods of subprocess and
multiprocessing that start one. The environment of this process has the variables during a start alone.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Callable, Iterator, Mapping
from typing import Any

RANK_VARIABLES = {"RANK", "WORLD_SIZE", "MASTER_ADDR"}  # any of them in env=: the environment is a rank's


def on_start(
    before: Callable[[], bool], after: Callable[[int], None], variables: Mapping[str, str]
) -> Callable[[], None]:
    """Call ``before`` before each start of a process. If it returns true, the process gets ``variables``, unless it is started with
    an environment that is neither a rank's nor made from this process's; then call ``after`` with its pid.

    Return a function that undoes this.
    """
    from multiprocessing.process import BaseProcess

    popen: Any = subprocess.Popen
    process: Any = BaseProcess
    execute, start = popen._execute_child, process.start

    def execute_child(
        self: Any, args: Any, executable: Any, preexec: Any, close: Any, fds: Any, cwd: Any, env: Any, *more: Any
    ) -> Any:
        if not before():
            return execute(self, args, executable, preexec, close, fds, cwd, env, *more)
        if env is None or RANK_VARIABLES & set(env) or _is_made_from_ours(env):
            env = {**os.environ, **variables} if env is None else {**variables, **env}
        done = execute(self, args, executable, preexec, close, fds, cwd, env, *more)
        after(self.pid)
        return done

    def start_process(self: Any) -> Any:
        if not before():
            return start(self)
        with in_environment(variables):
            done = start(self)
        after(self.pid)
        return done

    popen._execute_child, process.start = execute_child, start_process

    def undo() -> None:
        popen._execute_child, process.start = execute, start

    return undo


def _is_made_from_ours(environment: Mapping[Any, Any]) -> bool:
    return 2 * len(os.environ.keys() & environment.keys()) >= len(os.environ)


@contextlib.contextmanager
def in_environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables in this process's environment for a time."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            # Another thread that starts a process at this time may have set them already, or reset them.
            if value is None or value == variables[name]:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
