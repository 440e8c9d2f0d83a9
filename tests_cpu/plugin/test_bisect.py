"""Further runs of a failed test: on other values or variables (a bisection), and a second one that names where its ranks parted."""

import json
from pathlib import Path

import pytest

from pytest_nsa.cli.main import main
from pytest_nsa.testing import ExampleResult, run_example
from pytest_nsa.wire.files import read_lines
from tests_cpu.plugin.sessions import find_line

VALUES = """
from pathlib import Path

@gc_range("0:12")
@world_size(1)
def test_layers(group, gc_range):
    assert not gc_range.start <= 7 < gc_range.end

@gc_range("0:12")
@world_size(1)
def test_two_layers(group, gc_range):
    assert not {3, 8} & set(range(gc_range.start, gc_range.end))

@gc_range("0:12")
def test_no_layer(group, gc_range):
    if group.rank == 1:
        os.kill(os.getpid(), 9)
    dist.barrier()

@gc_range("2:4")
@world_size(1)
def test_refuses_no_layer(group, gc_range):
    if gc_range.start == gc_range.end:
        os._exit(3)
    assert gc_range.end < 4

@gc_range("0:4")
@world_size(1)
def test_together(group, gc_range):
    assert not (gc_range.start == 0 and gc_range.end == 4)

@world_size(1)
def test_branches(group, branch):
    assert branch not in (None, "sel")

@pytest.mark.parametrize("rate", [0.5])
@pytest.mark.parametrize("name", ["a"])
def test_rate(group, rate, name):
    assert isinstance(rate, float)
    assert rate < 0.3

@world_size(1)
@pytest.mark.parametrize("on", [True])
def test_switch(group, on):
    assert on is False

@world_size(1)
@pytest.mark.parametrize("rate", [1])
def test_comes_and_goes(group, rate):
    flag = Path("flag")
    was_there = flag.exists()
    flag.touch()
    assert was_there

@world_size(1)
def test_without_it(group):
    assert False
"""


def test_each_value_layer_and_branch_is_tried_after_a_control(pytester: pytest.Pytester) -> None:
    names = ("gc_range", "branch", "rate=0.1,0.25,1", "on=false,true")
    result = run_example(pytester, VALUES, *(f"--ranks-bisect={name}" for name in names))
    found = {name.partition("[")[0]: v.reason.partition("bisect: ")[2] for name, v in result.verdicts.items()}
    beginnings = {
        "test_layers": "layer 7 fails alone, as gc_range 7:8",
        "test_two_layers": "layers 3 and 8 fail alone, as gc_range 3:4 and 8:9",
        "test_no_layer": "fails without any layer, as gc_range 0:0, too",
        "test_refuses_no_layer": "layer 3 fails alone, as gc_range 3:4; without any layer it fails",
        "test_together": "fails with layers 0:4, and with neither half alone",
        "test_branches": "of the branches cmp, sel, win, sel fails alone",
        "test_rate": "of rate 0.1, 0.25, 1, 1 fails",
        "test_switch": "of on false, true, true fails",
        "test_comes_and_goes": "it passes when it is run again as it is: the failure comes and goes",
        "test_without_it": "",
    }
    assert {name: found[name][: len(text)] if text else found[name] for name, text in beginnings.items()} == beginnings
    assert result.outcomes == {"failed": len(beginnings)}


TRAPPED = """
import os

@rank_env(KIND="b", SET_BY_MARK="1")
def test_needs_two(group):
    assert os.environ["SET_BY_MARK"] == "1"
    assert os.environ.get("FIRST") == "1" and os.environ.get("THIRD") == "x"

def test_needs_one(group):
    if os.environ.get("SECOND") != "1" and group.rank == 1:
        os.kill(os.getpid(), 9)
    dist.barrier()

@world_size(1)
def test_helpless(group):
    assert False

@world_size(1)
def test_comes_and_goes(group, pytestconfig):
    flag = pytestconfig.rootpath / "ran"
    was = flag.exists()
    flag.touch()
    assert was

@world_size(1)
def test_they_exclude_each_other(group):
    assert [n for n in ("FIRST", "SECOND", "THIRD") if n in os.environ] == ["SECOND"]
"""


@pytest.mark.slow
def test_the_fewest_variables_that_make_a_test_pass(pytester: pytest.Pytester) -> None:
    result = run_example(pytester, TRAPPED, "--ranks-bisect-env", "FIRST=1,SECOND=1,THIRD=x,FOURTH=1")
    assert result.outcomes == {"failed": 5}
    reasons = {name: verdict.reason.rpartition("bisect: ")[2] for name, verdict in result.verdicts.items()}
    assert reasons["test_needs_two"].startswith("passes with FIRST=1 and THIRD=x, all of them (")
    assert reasons["test_needs_one"].startswith("passes with SECOND=1 alone (")
    assert reasons["test_helpless"] == "fails with each of FIRST, SECOND, THIRD, FOURTH, and with all (6 runs)"
    assert reasons["test_comes_and_goes"].startswith("it passes when it is run again as it is")
    assert reasons["test_they_exclude_each_other"] == "passes with SECOND=1; not with all at once (6 runs)"
    # What was tried is in no list.
    assert len({line["folder"] for line in read_lines(result.run / "verdicts.jsonl")}) == 5
    before = (result.run / "SUMMARY.md").read_text()
    assert main(["report", str(result.run)]) == 1  # made anew, from the folders
    summary = (result.run / "SUMMARY.md").read_text()
    assert summary.splitlines()[0] == before.splitlines()[0]
    assert list(result.folder("test_needs_two").glob("bisect-env*/rank0/output.log"))


def test_nothing_is_tried_where_nothing_could_be_told(pytester: pytest.Pytester) -> None:
    source = """
@world_size(1)
def test_fails(group): assert False

@world_size(1)
@fails_as("assertion")
def test_expected(group): assert False
"""
    result = run_example(pytester, source, "--ranks-bisect-env", "NCCL_P2P_DISABLE=1,CUDA_LAUNCH_BLOCKING=1")
    assert result.outcomes == {"failed": 1, "xfailed": 1}
    assert result.verdicts["test_fails"].reason.endswith(
        "bisect: none of NCCL_P2P_DISABLE, CUDA_LAUNCH_BLOCKING has an effect on gloo and cpu"
    )
    assert "bisect" not in result.verdicts["test_expected"].reason


AGAIN = ("--ranks-rerun", "auto")
PARTS = """
    @world_size(3)
    def test_it(group):
        best = 9.0
        for epoch in range(4):
            local = 5.0 - epoch + 4 * (group.rank == 1 and epoch == 2)
            if local > best:  # HERE
                break
            best = local
            dist.all_reduce(torch.ones(2))
        dist.barrier()
"""


def get_line(folder: Path) -> int:
    return find_line((folder / "test_example.py").read_text(), "# HERE")


def second_runs(result: ExampleResult) -> list[Path]:
    return sorted(result.run.glob("*/bisect-flow"))


def test_the_verdict_names_the_statement_and_its_values(
    pytester: pytest.Pytester, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run_example(pytester, PARTS, *AGAIN)
    verdict = result.verdicts["test_it"]
    found = verdict.first_divergence
    line = get_line(pytester.path)
    assert (verdict.outcome, verdict.ranks, verdict.certain) == ("HANG", (1,), True)
    assert verdict.where == found["where"]
    assert found["where"] == f"test_example.py:{line} in test_it"
    assert (found["kind"], found["outcomes"]) == ("branch", {"false": [0, 2], "true": [1]})
    assert found["values"]["local"] == {"0": "3.0", "1": "7.0", "2": "3.0"}
    assert f"test_example.py:{line - 1} in test_it" in found["because"][0]["where"]
    assert len(second_runs(result)) == 1
    page = (result.run / "report.html").read_text()
    assert 'class="excerpt diverged"' in page
    # With --sources, as the home folder is the tests' root here.
    capsys.readouterr()
    main(["diagnose", "--sources", "--json", str(second_runs(result)[0])])
    assert json.loads(capsys.readouterr().out)["first_divergence"]["outcomes"] == found["outcomes"]


def test_a_failure_that_does_not_come_again_stays_one(pytester: pytest.Pytester) -> None:
    source = """
        import os
        def test_it(group):
            was = os.path.exists("was_here")
            dist.barrier()
            open("was_here", "w").close()
            if group.rank and not was:
                raise RuntimeError("the first time")
            dist.barrier()
    """
    result = run_example(pytester, source, *AGAIN)
    verdict = result.verdicts["test_it"]
    assert (verdict.outcome, verdict.cause, verdict.ranks) == ("FAIL", "rank_exception", (1,))
    assert [fact.kind for fact in verdict.evidence if fact.kind == "second_run"] == ["second_run"]
    assert verdict.first_divergence == {}
    assert result.outcomes == {"failed": 1}


RAISES = """
    @pytest.mark.parametrize("number", range(6))
    def test_it(group, number):
        if group.rank:
            raise RuntimeError(number)
        dist.barrier()
"""
ALIKE = "def test_it(group): assert group.world_size == 3"


@pytest.mark.parametrize(
    ("source", "options", "runs"),
    [
        (PARTS.replace("@world_size(3)", "@world_size(3)\n    @rerun(False)"), AGAIN, 0),
        (PARTS, ("--ranks-rerun", "off"), 0),
        (PARTS, (*AGAIN, "--pdb"), 0),
        (RAISES, AGAIN, 5),
        (ALIKE, AGAIN, 0),
    ],
    ids=["mark", "option", "pdb", "the first five of a session", "alike on all ranks"],
)
def test_how_many_tests_run_again(source: str, options: tuple[str, ...], runs: int, pytester: pytest.Pytester) -> None:
    result = run_example(pytester, source, *options)
    assert all(verdict.failed for verdict in result.verdicts.values())
    assert len(second_runs(result)) == runs


DRIFTS = """
        @world_size(3)
        @check_divergence
        def test_it(ddp):
            torch.manual_seed(0)
            model = ddp.wrap(torch.nn.Linear(4, 1))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for step in range(3):
                optimizer.zero_grad()
                loss = model(torch.randn(2, 4)).sum()
                loss.backward()
                scale = 2.0 if (ddp.rank, step) == (1, 1) else 1.0
                if scale > 1:  # HERE
                    with torch.no_grad():
                        model.module.weight.mul_(scale)
                optimizer.step()
"""
LOADS = """
        @check_divergence
        def test_it(ddp):
            model = ddp.wrap(torch.nn.Linear(4, 2))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for step in range(3):
                model(torch.ones(2, 4)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                if step == 1 and ddp.rank == 0:  # HERE
                    model.module.load_state_dict({k: v / 2 for k, v in model.module.state_dict().items()})
"""


ASSERTS = """
        @world_size(3)
        def test_it(group):
            weight = torch.zeros(1)
            for gradient in (1.0, 2.0 + group.rank):
                total = torch.tensor([gradient])
                dist.all_reduce(total)
                if gradient > 3:  # HERE
                    continue
                weight += total
            largest = weight.clone()
            dist.all_reduce(largest, dist.ReduceOp.MAX)
            assert torch.equal(weight, largest)
"""
KILLS = """
        import os
        def test_it(group):
            strikes = 0
            for step in range(4):
                strikes += group.rank == 1 and step != 1
                if strikes > 2:  # HERE
                    os.kill(os.getpid(), 9)
                dist.barrier()
"""


@pytest.mark.parametrize(
    ("source", "cause", "ranks", "above", "sides"),
    [
        (DRIFTS, "silent_divergence", (1,), (0, 1), [[0, 2], [1]]),
        (LOADS, "silent_divergence", (0, 1), (0,), [[0], [1]]),
        (ASSERTS, "assertion", (2,), (0,), [[0, 1], [2]]),
        (KILLS, "rank_died", (1,), (0,), [[0], [1]]),
    ],
    ids=["drifts", "loads", "asserts", "kills"],
)
def test_a_failure_leads_to_the_statement_that_one_rank_executed_otherwise(
    source: str,
    cause: str,
    ranks: tuple[int, ...],
    above: tuple[int, ...],
    sides: list[list[int]],
    pytester: pytest.Pytester,
) -> None:
    result = run_example(pytester, source, *AGAIN)
    verdict = result.verdicts["test_it"]
    assert (verdict.cause, verdict.ranks) == (cause, ranks)
    line = get_line(pytester.path)
    found = verdict.first_divergence
    assert found["where"] in [f"test_example.py:{line - n} in test_it" for n in above]
    assert sorted(found["outcomes"].values()) == sides
    assert found["statement"] in result.stdout


PADS = """
    def gather(rows):
        flat = rows.flatten()
        parts = [torch.empty_like(flat) for _ in range(3)]
        dist.all_gather(parts, flat)

    def pad(rank, step):
        width = 8 if (rank, step) == (1, 2) else 4  # HERE
        rows = torch.zeros(2, width)
        return rows

    @world_size(3)
    def test_it(group):
        for step in range(4):
            gather(pad(group.rank, step))
"""


def test_the_sizes_of_a_call_lead_to_the_line_that_chose_them(pytester: pytest.Pytester) -> None:
    result = run_example(pytester, PADS, *AGAIN)
    verdict, line = result.verdicts["test_it"], get_line(pytester.path)
    assert (verdict.cause, verdict.ranks) == ("collective_mismatch", (1,))
    found = verdict.first_divergence
    assert (found["kind"], found["values"]["flat"]["1"]) == ("argument", "float32 [16]")
    chain = [(step["name"], step["values"][1], step["where"].partition(" in ")[0]) for step in found["because"]]
    assert chain == [
        ("flat", "float32 [16]", f"test_example.py:{line - 5}"),
        ("rows", "float32 [2, 8]", f"test_example.py:{line + 7}"),
        ("rows", "float32 [2, 8]", f"test_example.py:{line + 1}"),
        ("width", "8", f"test_example.py:{line}"),
    ]
