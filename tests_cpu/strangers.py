"""Another user of the machine: what it does is done by a child process with that user's id. Only root can make one."""

import contextlib
import os
import shutil
import signal
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import pytest

NUMBER = 60_317  # a user that has nothing else on the machine

needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can run a process as another user")


@contextlib.contextmanager
def stranger(body: Callable[[IO[str]], object], user: int = NUMBER) -> Iterator[IO[str]]:
    """Run ``body`` in a process of the other user, and yield what it writes; it is killed at the end."""
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(ours)
            os.setsid()
            if user != os.getuid():
                os.setgroups([])
                os.setgid(user)
                os.setuid(user)
            with open(theirs, "w", encoding="utf-8", buffering=1) as out:
                body(out)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    os.close(theirs)
    try:
        with open(ours, encoding="utf-8") as told:
            yield told
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


@contextlib.contextmanager
def shared_folder(mode: int = 0o755) -> Iterator[Path]:
    """Yield a folder of ours that other users reach, as a folder for temporary files of a test is not."""
    folder = Path(tempfile.mkdtemp(prefix="nsa-shared-"))
    folder.chmod(mode)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)
