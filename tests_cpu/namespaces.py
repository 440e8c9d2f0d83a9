"""Modules in a new namespace, in which they have the rights of root: what `unshare -Ur` does, in a fork of the warm process."""

import shutil
import subprocess

import pytest

MOUNT, NETWORK, USER = 0x20000, 0x40000000, 0x10000000  # of unshare(2)
_PROGRAM = """
import ctypes, os, pathlib, runpy, subprocess, sys

kinds, command, *sys.argv = sys.argv[1:]
user, group = os.getuid(), os.getgid()
assert ctypes.CDLL(None).unshare(int(kinds)) == 0
mine = pathlib.Path("/proc/self")
(mine / "setgroups").write_text("deny")
(mine / "uid_map").write_text(f"0 {user} 1")
(mine / "gid_map").write_text(f"0 {group} 1")
subprocess.run(command, shell=True, check=True)
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


def in_namespace(kind: int, command: str, module: str, *arguments: str) -> tuple[str, ...]:
    """Return Python's arguments to run a shell's ``command``, then the module, in a new namespace; skip where none can be made."""
    letter = {MOUNT: "m", NETWORK: "n"}[kind]
    asked = ["unshare", f"-Ur{letter}", "true"]
    if shutil.which("unshare") is None or subprocess.run(asked, check=False, capture_output=True).returncode:
        pytest.skip(f"needs a new namespace ({' '.join(asked[:2])})")
    return ("-c", _PROGRAM, str(kind | USER), command, module, *arguments)
