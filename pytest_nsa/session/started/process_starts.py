"""Call a function before each start of a process: wrap the methods of subprocess and multiprocessing that start one."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping
from typing import Any

RANK_VARIABLES = {"RANK", "WORLD_SIZE", "MASTER_ADDR"}  # any of them in env=: the environment is a rank's


def on_start(before: Callable[[], bool], variables: Mapping[str, str]) -> Callable[[], None]:
    """Call ``before`` before each start of a process; if it returns true, add ``variables`` to an environment made for a rank.

    Return a function that undoes this.
    """
    from multiprocessing.process import BaseProcess

    popen: Any = subprocess.Popen
    process: Any = BaseProcess
    execute, start = popen._execute_child, process.start

    def execute_child(
        self: Any, args: Any, executable: Any, preexec: Any, close: Any, fds: Any, cwd: Any, env: Any, *more: Any
    ) -> Any:
        if before() and env is not None and RANK_VARIABLES & set(env):
            env = {**variables, **env}
        return execute(self, args, executable, preexec, close, fds, cwd, env, *more)

    def start_process(self: Any) -> Any:
        before()
        return start(self)

    popen._execute_child, process.start = execute_child, start_process

    def undo() -> None:
        popen._execute_child, process.start = execute, start

    return undo
