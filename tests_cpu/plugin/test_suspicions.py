"""What is announced while a test still runs, and when, and what a run leaves beside the verdict."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_nsa.observe import progress
from pytest_nsa.testing import run_example
from pytest_nsa.wire.files import read_lines

FIFO = "import subprocess; os.mkfifo('f'); subprocess.Popen('sleep 8; echo > f', shell=True); open('f').read()"
STANDS = """
@pytest.mark.timeout({timeout})
def test_stands(group):
    if group.rank == 1:
        {waits}
    dist.barrier()
"""


@pytest.mark.parametrize("options", [(), pytest.param(("-p", "xdist", "-n", "1"), marks=pytest.mark.slow)])
def test_a_suspicion_is_announced_and_the_test_keeps_its_time(
    pytester: pytest.Pytester, options: tuple[str, ...]
) -> None:
    result = run_example(pytester, STANDS.format(timeout=60, waits=FIFO), *options)
    assert result.outcomes == {"passed": 1}
    assert "test_stands: io_stuck on rank 1 at test_example.py:" in result.stdout
    left = re.search(r"\(a suspicion; the test has (\d+) s left\)", result.stdout)
    assert int(left[1]) < 60


def test_a_suspicion_ends_a_test_where_it_may(pytester: pytest.Pytester) -> None:
    result = run_example(
        pytester, STANDS.format(timeout=60, waits="os.read(os.pipe()[0], 1)"), "-o", "ranks_hang_after=5"
    )
    verdict = result.verdicts["test_stands"]
    assert (verdict.outcome, verdict.cause, verdict.ranks) == ("HANG", "io_stuck", (1,))
    assert not verdict.certain
    assert verdict.duration_s < 30
    native = [fact.text for fact in verdict.evidence if fact.kind == "native_stack"]
    assert len(native) == 2  # of each rank: what py-spy saw, or why there is nothing
    assert "sockets" in (result.folder("test_stands") / "host.jsonl").read_text()
    suspected = list(read_lines(result.folder("test_stands") / "suspicions.jsonl"))
    assert [(s["cause"], s["ranks"]) for s in suspected] == [("io_stuck", [1])]
    assert 3 <= suspected[0]["stalled_s"] <= 5


TRAINS = """
def test_skips(ddp):
    model = ddp.wrap(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)))
    for step in range(4):
        model(torch.ones(2, 4)).sum().backward()
        if not (ddp.rank == 1 and step == 2):
            dist.all_reduce(torch.ones(1))
"""


def test_the_report_draws_and_traces(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "step.md"))
    for name, value in (("SERVER_URL", "https://github.com"), ("REPOSITORY", "me/repo"), ("SHA", "abc")):
        monkeypatch.setenv(f"GITHUB_{name}", value)
    result = run_example(pytester, TRAINS)
    assert result.verdicts["test_skips"].cause == "skipped_collective"
    step = (tmp_path / "step.md").read_text()
    assert "skipped_collective" in step
    assert re.findall(r"\]\(([^)]*)\)", step) == ["https://github.com/me/repo/blob/abc/test_example.py#L11"], step
    page = (result.run / "report.html").read_text()
    assert page.count("rank 1 ◀") == 1
    assert page.count(">rank 0<") + page.count("rank 0 ") >= 1
    assert "not entered by every rank" in page or "var(--FAIL)" in page
    assert re.findall(r"https?://[^\"'<]+", page) == ["https://ui.perfetto.dev"], "that a button opens"
    trace = json.loads((result.folder("test_skips") / "perfetto.json").read_text())
    slices = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    assert {e["pid"] for e in slices} == {0, 1}
    assert any(e["name"] == "backward" for e in slices)
    assert any(e["name"].startswith("allreduce #") for e in slices)
    arrows: dict[int, set[int]] = {}
    for event in trace["traceEvents"]:
        if event["ph"] in "sf":
            arrows.setdefault(event["id"], set()).add(event["pid"])
    assert {0, 1} in arrows.values(), "an arrow from one rank's collective to the other's"


RECORDED = """
pytestmark = pytest.mark.skipif(not hasattr(torch._C._distributed_c10d, "_dump_fr_trace_json"), reason="as torch 2.6")
"""


def test_the_flight_recorder_is_dumped_where_it_records(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "100")
    result = run_example(
        pytester, RECORDED + STANDS.format(timeout=60, waits="os.read(os.pipe()[0], 1)"), "-o", "ranks_hang_after=2"
    )
    if result.outcomes == {"skipped": 1}:
        pytest.skip("the recorder of this torch is NCCL's alone")
    recorded = json.loads((result.folder("test_stands") / "rank0" / "flight_recorder.json").read_text())
    assert recorded["entries"][-1]["profiling_name"] == "gloo:barrier"


def board(step: int, line: str) -> Any:
    """Return as much of a board as `progress.Past` needs."""
    return SimpleNamespace(numbers={"step": step}, line=line, blocked=None)


def test_a_pause_may_last_twice_as_long_as_the_longest_at_its_place() -> None:
    past = progress.Past()
    past.moved(0, board(0, "train.py:8 in save"), board(0, "train.py:9 in save"), 18.0)
    assert past.limit(3.0, "train.py:12 in save") == 36.0
    assert past.limit(3.0, "train.py:12 in load") == 3.0


def test_a_stall_is_longer_than_five_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(progress, "monotonic", lambda: now)
    past = progress.Past()
    for step in range(6):
        past.moved(0, board(step, ""), board(step + 1, ""), 0.0)
        now += 2.0
    assert past.limit(3.0, "train.py:1 in step") == 10.0
