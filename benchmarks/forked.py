"""What a function prints in a forked process: torch is loaded already, and the function may end its process or hang in it."""

import contextlib
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable


def run_forked(function: Callable[[], object], seconds: float) -> str:
    """Return what ``function`` prints in a process that is killed, with all that it started, at its end or after ``seconds``.

    The process that calls this has one thread.
    """
    with tempfile.TemporaryFile("w+") as output:
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            os.setpgid(0, 0)
            for stream in (1, 2):
                os.dup2(output.fileno(), stream)
            try:
                function()
            except BaseException:  # also SystemExit: the process ends below in any case
                traceback.print_exc()
            finally:
                with contextlib.suppress(OSError):
                    sys.stdout.flush()
                os._exit(0)
        deadline = time.monotonic() + seconds
        while os.waitpid(pid, os.WNOHANG) == (0, 0) and time.monotonic() < deadline:
            time.sleep(0.05)
        with contextlib.suppress(ProcessLookupError):  # also what it started and left
            os.killpg(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)
        output.seek(0)
        return output.read()
