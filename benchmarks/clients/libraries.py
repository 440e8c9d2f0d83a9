"""Libraries on two ranks, as their users run them, under torchrun, and in a ranked test; run by ../clients.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import library_bodies
import pytest

from pytest_nsa import world_size

NAMES = (*(body.__name__ for body in library_bodies.BODIES), *library_bodies.SHIPPED)


@pytest.fixture(autouse=True)
def _on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")


@pytest.mark.parametrize("name", NAMES)
def test_torchrun(name: str) -> None:
    script = Path(library_bodies.__file__)
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script), name]
    done = subprocess.run(
        words, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]


@world_size(2)
@pytest.mark.parametrize("name", NAMES)
def test_on_ranks(name: str, group: Any) -> None:
    if name in library_bodies.SHIPPED:
        library_bodies.accelerate_script(name)
    else:
        getattr(library_bodies, name)()
