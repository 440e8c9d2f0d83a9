"""The ranks that other analyzers of flight recorder dumps name: torch's, and that of NVIDIA's resiliency extension (NVRx)."""

import contextlib
import importlib.util
import os
import pickle
import runpy
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

from pytest_nsa.foreign.texts import read_analysis

# Importable from version 0.6 of nvidia-resiliency-ext on.
HAS_NVRX = importlib.util.find_spec("nvidia_resiliency_ext") is not None


@contextlib.contextmanager
def copied(folder: Path, prefix: str) -> Iterator[Path]:
    """Copy the dumps of our own ranks, for which both analyzers end with a KeyError on gloo: the dump's list of groups names the
    default one '', and its entries name it '0'. That is mended, so that what is compared is what an analyzer finds.
    """
    with tempfile.TemporaryDirectory() as copies:
        for dump in folder.glob(f"{prefix}*"):
            try:
                recorded = pickle.loads(dump.read_bytes())
            except (EOFError, pickle.UnpicklingError):  # its rank was killed while it wrote
                continue
            groups = recorded.get("pg_config", {})
            if "" in groups:
                groups["0"] = {**groups.pop(""), "name": "0"}
            Path(copies, dump.name).write_bytes(pickle.dumps(recorded))
        yield Path(copies)


def ask_torch(folder: Path, prefix: str) -> list[int]:
    """Return the ranks of the statement of torch's analyzer that names the fewest."""
    options = ("-p", prefix, "--allow-incomplete-ranks", "--print_stack_trace")
    stated = read_analysis(_run("torch.distributed.flight_recorder.fr_trace", str(folder), *options))
    return list(min((of.ranks for of in stated), key=len, default=()))


def ask_nvrx(folder: Path, prefix: str) -> list[int]:
    """Return the ranks in the last column of NVRx's table: those that miss in a group, and hang by its own reading."""
    module = "nvidia_resiliency_ext.attribution.trace_analyzer.fr_attribution"
    text = _run(module, "--fr-path", str(folder), "-p", f"{prefix}*", "--emit-stdout")
    last = [line.split("|")[-1] for line in text.splitlines() if line.count("|") >= 5]
    return sorted({int(word) for column in last for word in column.split(",") if word.strip().isdigit()})


def _run(module: str, *arguments: str) -> str:
    def run() -> None:
        sys.argv[1:] = arguments
        runpy.run_module(module, run_name="__main__")

    return run_forked(run, 120)


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
