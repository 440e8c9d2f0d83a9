"""Which code is the user's: one rule on the rank and in a folder that it leaves, wherever packages are."""

import threading
from pathlib import Path

import pluggy
import pytest
import torch

from nsa.trace.frames import LIBRARIES, UNUSUAL_LIBRARIES, is_user_file
from pytest_nsa.evidence.stacks import Frame, Origin, parse_dump
from pytest_nsa.testing import run_example

FILES = [
    ("/home/me/src/train.py", True),
    ("/home/me/site-packages.py", True),
    ("/usr/lib/python3/dist-packages/torch/nn/modules/module.py", False),
    ("/opt/spark/python/lib/site-packages/yaml/reader.py", False),
    ("/opt/bazel/external/pip/site-packages/lightning/pytorch/trainer.py", False),
    ("/data/site-packages/nsa/model/attention.py", True),
    ("/data/site-packages/nsa/trace/board.py", False),
    ("/data/site-packages/pytest_nsa/rank/process.py", False),
    (f"/tmp/torchinductor_me/ab/c{'a2' * 25}b.py", False),
    ("<frozen importlib._bootstrap>", False),
    ("<string>", False),
    (threading.__file__, False),
    (torch.__file__, False),
    (pytest.__file__, False),
    (pluggy.__file__, False),
    (__file__, True),
]


@pytest.mark.parametrize(("file", "is_users"), FILES)
def test_the_rank_and_the_reader_decide_alike(file: str, is_users: bool) -> None:
    assert is_user_file(file) is is_users
    assert Frame(file, 1, "f").is_user is is_users
    assert Origin(libraries=UNUSUAL_LIBRARIES).frame(file, 1, "f").is_user is is_users


def test_a_framework_that_is_installed_as_editable_is_no_user_code() -> None:
    for module in (torch, pytest, pluggy):
        assert str(Path(module.__file__).parent) + "/" in LIBRARIES
    places = (("/src/pytorch/torch/nn/f.py", 3, "f"), ("/src/me.py", 9, "g"))
    lines = (f'  File "{file}", line {line} in {function}' for file, line, function in places)
    dump = "\n".join(["Thread 0x1 (most recent call first):", *lines])
    (stack,) = parse_dump(dump, Origin(libraries=("/src/pytorch/torch/",)))
    assert stack.user_frame.describe() == "/src/me.py:9 in g"
    (earlier,) = parse_dump(dump)  # a folder without this fact
    assert earlier.user_frame is earlier.frames[0]


PACKAGE = """
import torch.distributed as dist

def average(tensor, is_wanted):
    if is_wanted:
        dist.all_reduce(tensor)
"""
SOURCE = """
import syncing

@pytest.mark.timeout(8)
def test_it(group):
    for step in range(3):
        dist.barrier()
        if group.rank == 0:
            syncing.average(torch.ones(1), step == 2)  # HERE
    dist.barrier()
"""


def test_a_verdict_does_not_change_with_where_packages_are(pytester: pytest.Pytester) -> None:
    found = []
    for folder in ("vendor/site-packages", "vendor/lib/python3.11/site-packages"):
        package = pytester.path / folder
        package.mkdir(parents=True)
        (package / "syncing.py").write_text(PACKAGE)
        verdict = run_example(pytester, SOURCE, "-o", f"pythonpath={folder}").verdicts["test_it"]
        found.append((verdict.cause, verdict.ranks, verdict.where, verdict.confidence, verdict.reason))
    lines = (pytester.path / "test_example.py").read_text().splitlines()
    line = next(n for n, text in enumerate(lines, 1) if text.endswith("# HERE"))
    assert found[0][:3] == ("extra_collective", (0,), f"test_example.py:{line} in test_it")
    assert found[0] == found[1]
