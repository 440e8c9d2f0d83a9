"""An entry point that torch loads when it is imported: NSA_TRACE_DIR alone makes a rank leave evidence.

A process with a number from its launcher (RANK) is a rank from its import of torch on. Any other process becomes one when it calls
``init_process_group``: a child of ``mp.spawn``, of a forkserver, of an engine. For a test that starts its ranks by itself, the
plugin sets NSA_TRACE_JOBS, and each job has a folder (`job_folders`).
"""

import functools
import os
import sys
from collections.abc import Callable
from typing import Any

from nsa.trace import job_folders

VARIABLE = "NSA_TRACE_DIR"
_DONE = "_NSA_TRACED"

Begin = Callable[[int, int], None]  # with this process's rank and the world size

_begin: Begin | None = None  # what to call in place of following NSA_TRACE_DIR
_begun_in = 0  # the process that has begun


def autostart() -> None:
    """Trace this process if it is a rank and evidence is requested; else when it forms its first process group."""
    if not (os.environ.get(VARIABLE) or os.environ.get(job_folders.FOLDER)) and _begin is None:
        return
    if job_folders.is_requested():
        job_folders.dump_at_signal()
    rank = os.environ.get("RANK", "")
    is_traced = os.environ.get(_DONE) == _launch(rank)  # as in its children (loaders' workers, compilers)
    if _begin is None and rank.isdecimal() and not is_traced:
        _start(int(rank), int(os.environ.get("WORLD_SIZE") or 1), {})
    _hook_groups()
    if _begin is None:
        _hook_processes()


def hook_forks() -> None:
    """Wrap what makes a fork of this process leave evidence, if its environment requests any. Imports torch.distributed."""
    _hook_groups()
    _hook_processes()


def begin_at_first_group(begin: Begin) -> None:
    """Call ``begin`` before this process forms its first process group, whether torch has been imported or not."""
    global _begin
    _begin = begin
    if "torch.distributed" in sys.modules:
        _hook_groups()


def mark_as_traced() -> None:
    """Mark this process as traced already, or as not to be traced: neither it nor its forks start a trace."""
    global _begun_in
    _begun_in = os.getpid()
    os.environ[_DONE] = _launch(os.environ.get("RANK", ""))


def _launch(rank: str) -> str:
    """Return a text that distinguishes this rank from ranks of other launches, which have another address or port."""
    return f"{rank}@{os.environ.get('MASTER_ADDR', '')}:{os.environ.get('MASTER_PORT', '')}"


def _start(rank: int, world_size: int, given: dict[str, Any]) -> None:
    """Trace this process into the folder that the environment names, if any. If that folder cannot be written to, the training
    runs without evidence.
    """
    folder = os.environ.get(VARIABLE)
    if not folder and not job_folders.is_requested():
        return
    mark_as_traced()
    from nsa.trace.training import trace_training

    try:
        if folder:
            trace_training(folder, rank, world_size)
        else:
            job_folders.begin(rank, world_size, given)
    except OSError as error:
        print(f"nsa: rank {rank} leaves no evidence: {error}", file=sys.stderr)


def _hook_groups() -> None:
    """Wrap ``init_process_group``, once per process, in both modules that have it: a test may have replaced one for a time."""
    import torch.distributed as dist

    if not dist.is_available():
        return
    wrapped: dict[Callable[..., Any], Callable[..., Any]] = {}
    for module in (dist, dist.distributed_c10d):
        original = module.init_process_group
        if not hasattr(original, "_nsa_begins"):
            module.init_process_group = wrapped.setdefault(original, _beginning(original))


def _beginning(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def init_process_group(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        _before_group(args, kwargs)
        return original(*args, **kwargs)

    init_process_group._nsa_begins = True  # type: ignore[attr-defined]
    return init_process_group


def _hook_processes() -> None:
    """Wrap the method with which multiprocessing runs a child, once per process: no hook sees the exceptions of children, and a
    forked child calls no handler of atexit before Python 3.13.
    """
    from multiprocessing.process import BaseProcess

    kind: Any = BaseProcess
    bootstrap = kind._bootstrap
    if hasattr(bootstrap, "_nsa_follows"):
        return

    @functools.wraps(bootstrap)
    def followed(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.run = functools.partial(_run, self.run)
        return bootstrap(self, *args, **kwargs)

    followed._nsa_follows = True  # type: ignore[attr-defined]
    kind._bootstrap = followed


def _run(run: Callable[[], None]) -> None:
    try:
        run()
    except BaseException as error:
        _ended(error)
        raise
    _ended(None)


def _ended(error: BaseException | None) -> None:
    training = sys.modules.get("nsa.trace.training")
    if training is not None and training.current is not None:
        training.current.end_with(error)


def _before_group(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Start the trace, unless it has started: with the rank and world size that the call gives, or the environment."""
    global _begun_in
    if _begun_in == os.getpid():
        return
    given = dict(zip(("backend", "init_method", "timeout", "world_size", "rank", "store"), args, strict=False)) | kwargs
    numbers = [_number(given.get("rank"), "RANK"), _number(given.get("world_size"), "WORLD_SIZE")]
    if min(numbers) < 0:
        return  # init_process_group will refuse it
    if _begin is not None:
        _begun_in = os.getpid()
        _begin(*numbers)
    else:
        _start(numbers[0], numbers[1], given)


def _number(given: Any, variable: str) -> int:
    if isinstance(given, int) and given >= 0:
        return given
    text = os.environ.get(variable, "")
    return int(text) if text.isdecimal() else -1
