"""Variables of the environment that would change what ranks leave, or that choose it."""

from __future__ import annotations

import json

import pytest

from pytest_nsa.settings import resolve
from pytest_nsa.testing import run_example

LIGHT = """
@world_size(2)
def test_it(ddp):
    torch.nn.Linear(2, 2)(torch.ones(1, 2)).sum().backward()
    if ddp.rank == 1:
        return
    dist.barrier()

@check_divergence
@world_size(2)
def test_needs_more(ddp): pass
"""
PRINTS = """
@world_size(2)
def test_it(group):
    print("f\u00fcr alle")
    assert group.rank == 2
"""
WRAPS = """
@world_size(2)
def test_it(ddp):
    model = ddp.wrap(torch.nn.Linear(2, 2))
    model(torch.ones(1, 2)).sum().backward()
    assert ddp.rank
"""


@pytest.mark.parametrize(
    ("name", "value", "source", "cause", "ranks", "shown"),
    [
        (
            "NSA_TRACE_LEVEL",
            "light",
            LIGHT,
            "skipped_collective",
            (1,),
            "check_divergence needs what NSA_TRACE_LEVEL=light",
        ),
        ("PYTHONIOENCODING", "ascii", PRINTS, "assertion", (0, 1), "f\u00fcr alle"),
        ("TORCH_DISTRIBUTED_DEBUG", "DETAIL", WRAPS, "assertion", (0,), "DEBUG=DETAIL crashes DDP on gloo"),
    ],
    ids=["light evidence", "an encoding", "a debug level that would crash the ranks"],
)
def test_the_verdict_is_the_same(
    pytester: pytest.Pytester,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    value: str,
    source: str,
    cause: str,
    ranks: tuple[int, ...],
    shown: str,
) -> None:
    monkeypatch.setenv(name, value)
    result = run_example(pytester, source)
    assert (result.verdicts["test_it"].cause, result.verdicts["test_it"].ranks) == (cause, ranks)
    assert shown in result.stdout
    beats = (result.folder("test_it") / "heartbeat_rank0.jsonl").read_text().splitlines()
    assert ({json.loads(line)["modules_entered"] for line in beats} == {0}) == (source is not WRAPS)


def test_a_level_that_does_not_exist_is_refused(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NSA_TRACE_LEVEL", "none")
    with pytest.raises(pytest.UsageError, match="NSA_TRACE_LEVEL='none': must be full or light"):
        resolve(pytester.parseconfig())
