"""Variables that ranks, or a test, set: those of a rank's environment, of torch, and hash seeds of each rank's own."""

import json

import pytest

from pytest_nsa.settings import resolve
from pytest_nsa.testing import run_example

LIGHT = """
def test_it(ddp):
    torch.nn.Linear(2, 2)(torch.ones(1, 2)).sum().backward()
    if ddp.rank == 1:
        return
    dist.barrier()

@check_divergence
def test_needs_more(ddp): pass
"""
PRINTS = """
def test_it(group):
    print("f\u00fcr alle")
    assert group.rank == 2
"""
WRAPS = """
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


# Each rank reduces its metrics in the order of a set of their names: with other seeds they meet in other orders.
METRICS = """
NAMES = {"loss": 1, "tokens": 2, "norm": 3, "accuracy": 4, "entropy": 5, "clipped": 6}

def reduce_all():
    for name in set(NAMES):
        dist.all_reduce(torch.ones(NAMES[name]))
"""


@pytest.mark.slow
def test_a_bug_by_the_order_of_a_set_is_found_and_can_be_repeated(pytester: pytest.Pytester) -> None:
    source = f"""{METRICS}
def test_forked(group):
    reduce_all()

@hash_seeds(1, 2)
@pytest.mark.timeout(60)
def test_given(group):
    assert os.environ["PYTHONHASHSEED"] == str(group.rank + 1)
    reduce_all()

@hash_seeds
def test_drawn(group):
    seeds = [None, None]
    dist.all_gather_object(seeds, os.environ["PYTHONHASHSEED"])
    assert seeds[0] != seeds[1]

def test_after_it_ranks_are_forked(group):
    assert os.getppid() != int(os.environ["HOST"])  # the zygote's
"""
    pytester.makeconftest("import os\nos.environ.setdefault('HOST', str(os.getpid()))\n")
    result = run_example(pytester, source)
    assert result.outcomes == {"passed": 3, "failed": 1}, result.stdout
    verdict = result.verdicts["test_given"]
    assert verdict.outcome == "HANG"
    # The second calls differ in size, and one earlier call shows no order: a skipped call explains them as well.
    assert verdict.cause in ("collective_mismatch", "skipped_collective")
    assert not verdict.certain
    assert "in reduce_all" in verdict.where
    assert "hash seeds: @hash_seeds(1, 2) starts the ranks with these again" in result.stdout
