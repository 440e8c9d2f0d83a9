"""Hooks that a repository may implement, and how reports show their results."""

import json
from pathlib import Path

import pytest

from pytest_nsa.testing import HEADER, ExampleResult, run_example, run_folder

SOURCE = """
@scenario("warm_up", reads_as="the link <between> nodes")
def test_fails(group):
    assert group.rank == 0

def test_passes(group):
    pass
"""


def test_a_repository_decides_over_a_run(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(
        """
from pytest_nsa.diagnosis.decision import Decision

def pytest_nsa_decide(verdicts):
    failed = [name for name, verdict in verdicts.items() if verdict.failed]
    return Decision(sentence=f"Our plan: {failed}.", action="call the network team", path=("is it the link? yes",))
"""
    )
    result = run_example(pytester, SOURCE)
    assert "Our plan: ['warm_up']." in result.stdout
    summary = (result.run / "SUMMARY.md").read_text()
    assert summary.startswith("Our plan: ['warm_up'].")
    assert "**Call the network team.**" in summary
    assert "1. is it the link? yes" in summary
    assert "- the plan reads it as: the link &#60;between> nodes" in summary
    page = (result.run / "report.html").read_text()
    assert "<dt>the plan reads it as</dt><dd>the link &lt;between&gt; nodes</dd>" in page
    decision = json.loads((result.run / "decision.json").read_text())
    assert decision == {
        "schema": 1, "sentence": "Our plan: ['warm_up'].", "action": "call the network team", "path": ["is it the link? yes"],
        "confidence": 1.0, "hypotheses": [], "readiness": "", "tree": [], "taken": "",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("raise LookupError('no such row')", "LookupError: no such row"),
        ("return 'all is well'", "TypeError: returned 'all is well': must be a Decision of pytest_nsa, or None"),
    ],
)
def test_one_that_fails_costs_no_report(pytester: pytest.Pytester, body: str, message: str) -> None:
    pytester.makeconftest(f"def pytest_nsa_decide(verdicts):\n    {body}\n")
    result = run_example(pytester, SOURCE)
    assert result.outcomes == {"passed": 1, "failed": 1}
    assert f"pytest_nsa_decide failed: {message}" in result.stdout
    assert "warm_up ends in FAIL (assertion) on rank 1" in result.stdout
    assert "do the verdicts name one cause? yes: assertion" in (result.run / "SUMMARY.md").read_text()


DOWNSTREAM_CONFTEST = Path(__file__).resolve().parents[2] / "examples" / "downstream" / "tests" / "conftest.py"
DOWNSTREAM = """
class Own(torch.nn.Linear):
    def parallelize(self, parallel, device):
        self.wrapped_for = parallel
        return self

@scenario("licence")
@pytest.mark.timeout(20)
def test_licence_goes(group, artifacts):
    if group.rank == 1:
        (artifacts / "licence1.txt").write_text("the seat of rank 1 went to another job")
        time.sleep(1000)
    dist.barrier()

def test_its_variables(group):
    assert os.environ["SMALL_TRANSFORMER_CACHE"].endswith(f"cache-of-rank-{group.rank}")

def test_wraps_itself(ddp, fsdp):
    assert ddp.wrap(Own(2, 2)).wrapped_for == "ddp"
    assert fsdp.wrap(Own(2, 2)).wrapped_for == "fsdp"
    assert type(ddp.wrap(torch.nn.Linear(2, 2))).__name__ == "DistributedDataParallel"

@scenario("license")
@world_size(2)
def test_of_no_scenario(): pass

@fails_as("licence_lost")
@pytest.mark.timeout(20)
def test_foreseen(group, artifacts):
    if group.rank == 0:
        (artifacts / "licence0.txt").write_text("gone")
        time.sleep(1000)
    dist.barrier()
"""


@pytest.fixture(scope="module")
def hooked(tmp_path_factory: pytest.TempPathFactory) -> ExampleResult:
    """A run of tests beside the conftest.py of examples/downstream, which implements every hook."""
    folder = tmp_path_factory.mktemp("hooked")
    (folder / "conftest.py").write_text(DOWNSTREAM_CONFTEST.read_text())
    (folder / "test_example.py").write_text(HEADER + DOWNSTREAM)
    return run_folder(folder, "-o", "ranks_hang_after=2")


def test_every_hook_has_its_effect(hooked: ExampleResult) -> None:
    assert hooked.outcomes == {"passed": 2, "failed": 1, "errors": 1, "xfailed": 1}
    lost = hooked.verdicts["test_licence_goes"]
    assert (lost.cause, lost.ranks, lost.retry) == ("licence_lost", (1,), "once")
    assert lost.rule == "conftest.licence_lost"
    assert lost.advice == "free a seat and run it again"
    assert lost.reads_as == "the licence server"
    assert any(f.text == "the seat of rank 1 went to another job" and f.file == "licence1.txt" for f in lost.evidence)
    assert "The licence server failed, so nothing is known of the model." in hooked.stdout
    assert "scenario('license'): the plan's table has licence, one_step, soak" in hooked.stdout
    assert "Not run, of the plan's scenarios: one_step, soak." in (hooked.run / "SUMMARY.md").read_text()


def test_without_the_plugin_its_hooks_are_no_error(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(DOWNSTREAM_CONFTEST.read_text())
    pytester.makepyfile("def test_plain(): pass")
    result = pytester.runpytest_subprocess("-p", "no:nsa")
    result.assert_outcomes(passed=1)


@pytest.mark.parametrize(
    ("hook", "body", "message"),
    [
        ("causes", "return [1]", "1: give pairs of a Cause and a function"),
        (
            "causes",
            "from pytest_nsa.diagnosis.causes import CAUSES\n    return [(CAUSES['sleeping'], print)]",
            "'sleeping' is a cause already",
        ),
        ("scenarios", "return {'a b': ''}", "'a b': takes one name of letters"),
    ],
)
def test_what_a_hook_gets_wrong_is_said_before_any_rank_runs(
    pytester: pytest.Pytester, hook: str, body: str, message: str
) -> None:
    pytester.makeconftest(f"def pytest_nsa_{hook}(config):\n    {body}\n")
    result = run_example(pytester, SOURCE)
    assert result.returncode == pytest.ExitCode.USAGE_ERROR
    assert f"pytest_nsa_{hook}: {message}" in result.stderr
    assert not result.verdicts


def test_a_variable_that_is_no_text_is_named(pytester: pytest.Pytester) -> None:
    pytester.makeconftest("def pytest_nsa_environment(config, rank, world_size): return {'LAYERS': 5}")
    result = run_example(pytester, "@world_size(2)\ndef test_variables(group): pass")
    reason = result.verdicts["test_variables"].reason
    assert "pytest_nsa_environment: TypeError: 'LAYERS': 5: the names and values of variables must be texts" in reason


def test_hooks_that_raise_late_cost_no_verdict(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(
        """
        import time
        def pytest_nsa_collect_evidence(folder, pids): raise LookupError("no such switch")
        def pytest_nsa_environment(config, rank, world_size): return {"RANK": "7"} if rank else {}
        """
    )
    source = """
    def test_variables(group): pass
    """
    result = run_example(pytester, source)
    assert result.outcomes == {"errors": 1}
    verdict = result.verdicts["test_variables"]
    assert (verdict.cause, verdict.ranks) == ("rank_exception", (1,))
    assert "RANK: the plugin numbers the ranks; remove it" in verdict.explanation
    assert "pytest_nsa_collect_evidence failed: LookupError: no such switch" in result.stdout


@pytest.mark.slow
def test_the_limit_does_not_count_the_start(pytester: pytest.Pytester) -> None:
    pytester.makeconftest("import time\ndef pytest_nsa_environment(config, rank, world_size): time.sleep(4.5)")
    source = """
    @pytest.mark.timeout(8)
    def test_after_a_slow_start(group): time.sleep(4.5)
    """
    assert run_example(pytester, source).outcomes == {"passed": 1}
