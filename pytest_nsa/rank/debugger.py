"""A debugger in a rank, at the host's terminal: post mortem under --pdb, and wherever a rank's code calls breakpoint()."""

import contextlib
import pdb  # noqa: T100
import socket
from types import FrameType, TracebackType
from typing import Any

import pytest
from _pytest.debugging import pytestPDB

from nsa.trace.events import record
from pytest_nsa.rank.context import RankContext, current_rank
from pytest_nsa.system import sockets

ANY_RANK = -1


class RankPdb(pdb.Pdb):
    """pdb with a socket to the host as its terminal. Quitting ends the session, as in pytest's own pdb."""

    def __init__(self, ctx: RankContext, connection: socket.socket) -> None:
        reader, writer = connection.makefile("r"), connection.makefile("w")
        super().__init__(stdin=reader, stdout=writer, nosigint=True)
        self.prompt = f"(Pdb, rank {ctx.rank}) "
        self._ctx, self._connection = ctx, connection

    def do_quit(self, arg: str) -> bool | None:
        """End the test and the session."""
        record(self._ctx.folder, event="quit_debugger")
        return super().do_quit(arg)

    do_q = do_exit = do_quit

    def do_continue(self, arg: str) -> bool | None:
        """Continue the test and return the terminal to the host."""
        result = super().do_continue(arg)
        self._hang_up()
        return result

    do_c = do_cont = do_continue

    def post_mortem(self, traceback: TracebackType | None) -> None:
        """Look at where an exception was raised."""
        self.reset()
        self.interaction(None, traceback)
        self._hang_up()

    def _hang_up(self) -> None:
        for end in (self.stdout, self.stdin):
            end.close()
        self._connection.close()


class _NoDebugger:
    """The debugger of breakpoint() on a rank that was not chosen: the rank continues, and waits in its next collective."""

    def set_trace(self, frame: FrameType | None = None) -> None:
        """No-op."""


def install() -> None:
    """Let breakpoint(), pdb.set_trace() and pytest.set_trace() of this process use the host's terminal."""
    pytestPDB._init_pdb = classmethod(lambda cls, method, *args, **kwargs: _for_breakpoint())  # type: ignore[assignment]


def _for_breakpoint() -> Any:
    ctx = current_rank()
    assert ctx is not None
    chosen = 0 if ctx.job.debug_rank == ANY_RANK else ctx.job.debug_rank
    if ctx.rank != chosen:
        return _NoDebugger()
    connection = _connect(ctx)
    if connection is None:
        raise RuntimeError("breakpoint(): this rank has no terminal, as its host is an xdist worker; run without -n")
    return RankPdb(ctx, connection)


def post_mortem(ctx: RankContext, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
    """Under --pdb: show a failure to the user, unless another rank was chosen or has the terminal."""
    if ctx.job.debug_rank not in (ANY_RANK, ctx.rank):
        return
    connection = _connect(ctx)
    if connection is None:
        return
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the terminal is another rank's for this test
        RankPdb(ctx, connection).post_mortem(excinfo._excinfo[2] if excinfo._excinfo else None)


def _connect(ctx: RankContext) -> socket.socket | None:
    return sockets.connect(ctx.job.debugger) if ctx.job.debugger else None
