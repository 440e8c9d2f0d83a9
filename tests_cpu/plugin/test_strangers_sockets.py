"""Sockets of a session that another user of the machine tries to reach, or to fill."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import time
from pathlib import Path
from typing import IO

import pytest

from pytest_nsa.system import unix_sockets
from pytest_nsa.testing import HEADER
from tests_cpu.plugin.sessions import start_session
from tests_cpu.strangers import needs_root, stranger
from tests_cpu.warm import WarmPython

SOURCE = (
    HEADER
    + """
while not os.path.exists("tried"):  # no test is collected before the other user has tried
    time.sleep(0.01)

@pytest.mark.parametrize("n", range(2))
@world_size(2)
def test_reduces(group, n):
    dist.all_reduce(torch.ones(1))
"""
)


def output_of(session: subprocess.Popen[str]) -> str:
    """Return what a session has printed, once it has ended; one that hangs is killed."""
    try:
        return session.communicate(timeout=120)[0]
    finally:
        session.kill()


def sockets() -> set[str]:
    """Return the addresses that may be this plugin's, as any user sees them."""
    lines = Path("/proc/net/unix").read_text().splitlines()[1:]
    named = {parts[-1].replace("@", "\0", 1) for line in lines if len(parts := line.split()) > 7}
    return {name for name in named if "pytest-nsa" in name} | {
        str(path / "socket") for path in Path("/tmp").glob("pytest-nsa-*")
    }


@pytest.mark.slow
@needs_root
def test_another_user_cannot_fill_the_queue_of_the_zygote(warm: WarmPython, tmp_path: Path) -> None:
    before = sockets()

    def fill(out: IO[str]) -> None:
        held = []
        while not (found := sockets() - before):
            time.sleep(0.001)
        for name in found:
            with contextlib.suppress(OSError):
                for _ in range(300):
                    connection = socket.socket(socket.AF_UNIX)
                    connection.setblocking(False)
                    connection.connect(name)
                    held.append(connection)
        out.write(json.dumps({"names": len(found), "connections": len(held)}) + "\n")
        time.sleep(1000)

    with stranger(fill) as told:
        session = start_session(warm, tmp_path, SOURCE, "-n2", "-p", "xdist")
        tried = json.loads(told.readline())
        (tmp_path / "tried").touch()
        out = output_of(session)
    assert "2 passed" in out
    assert session.returncode == 0
    assert tried["names"]
    assert tried["connections"] == 0


def test_a_folder_for_temporary_files_may_have_a_long_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / ("long" * 40)
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    listener = unix_sockets.Listener("zygote")
    (made,) = folder.iterdir()
    assert made.stat().st_mode & 0o777 == 0o700
    with unix_sockets.connect(listener.name) as ours:
        theirs = unix_sockets.accept(listener.socket)
        assert theirs is not None
        with theirs:
            theirs.sendall(b"x")
            assert ours.recv(8) == b"x"
    listener.close()
    assert not made.exists()
    with pytest.raises(FileNotFoundError):
        unix_sockets.connect(listener.name)
