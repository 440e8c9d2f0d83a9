"""The registry of causes agrees with the rules, the documentation and the planted faults; a rule that fails is reported."""

import importlib
import pkgutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from pytest_nsa.diagnosis import engine, rules
from pytest_nsa.diagnosis.causes import CAUSES
from pytest_nsa.diagnosis.verdict import NO_RANK, Finding
from pytest_nsa.evidence.load import load
from pytest_nsa.evidence.values import Evidence
from pytest_nsa.testing import run_example
from tests_cpu.diagnosis.test_evidence import make_folder
from tests_cpu.faults.rows import read_rows

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "docs"))
cause_pages = __import__("cause_pages")
# The closed list of the plan: other tools read these names.
NAMES = """
skipped_collective extra_collective collective_mismatch group_order_deadlock p2p_unmatched
missing_collective rank_exception rank_exited rank_died rank_stopped oom init_timeout network_unusable lock_deadlock
infinite_loop sleeping native_busy device_busy gil_held io_stuck child_process dataloader_stuck compiling
transport_stuck ready_twice unused_parameters static_graph_changed data_dependent_branch
hook_deadlock backward_deadlock silent_divergence nan_loss slow graph_explosion straggler assertion
unknown
"""
RULE = {"evidence": "Evidence", "return": "Finding | None"}
# Not planted here: a test's body cannot cut a transport; unknown is what remains; tests_gpu/test_faults.py has the GPU's.
NOT_IN_THE_CORPUS = {"transport_stuck", "unknown", "device_busy"}


def test_each_cause_of_the_plan_is_there() -> None:
    assert set(CAUSES) >= set(NAMES.split()), "other tools read these names in verdict.json"


def test_the_documentation_lists_the_registry() -> None:
    text = cause_pages.LIST.read_text(encoding="utf-8")
    assert cause_pages.list_with(text) == text, "run python docs/cause_pages.py, which writes it again"
    assert {page.stem for page in cause_pages.PAGES} == set(CAUSES)
    for page in cause_pages.PAGES:
        assert page.read_text(encoding="utf-8").startswith(f"# {page.stem}\n")


def test_every_rule_is_applied() -> None:
    """A rule is a public function of the evidence alone that returns a finding or None."""
    modules = [
        importlib.import_module(f"{rules.__name__}.{info.name}") for info in pkgutil.iter_modules(rules.__path__)
    ]
    written = {
        function
        for module in modules
        for name, function in vars(module).items()
        if not name.startswith("_") and getattr(function, "__annotations__", None) == RULE
        if function.__module__ == module.__name__
    }
    assert len(written) > 30
    assert written == {*engine.RULES, *engine.SUSPICIONS, *engine.OF_THE_PASSED} - {engine.refused}


def test_what_is_announced_is_decided_in_the_order_of_the_verdict() -> None:
    assert [*engine.SUSPICIONS] == [rule for rule in engine.RULES if rule in engine.SUSPICIONS]


def test_each_cause_is_named_by_the_code_of_a_rule() -> None:
    """A cause that the corpus cannot have lost its rule once, and nothing else noticed."""
    package = Path(engine.__file__).resolve().parents[1]
    sources = [p for p in package.rglob("*.py") if p.name != "causes.py"]
    text = "".join(p.read_text(encoding="utf-8") for p in sources)
    assert [name for name in CAUSES if f'"{name}"' not in text] == []


def test_every_cause_is_planted() -> None:
    planted = {row.cause for row in read_rows()}
    assert planted == set(CAUSES) - NOT_IN_THE_CORPUS


def test_a_rule_that_raises_is_a_fact_and_the_next_one_is_applied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(evidence: Evidence) -> Finding | None:
        raise KeyError("beat_age_s")

    def inventive(evidence: Evidence) -> Finding | None:
        return Finding(cause="gremlins", ranks=(0,), reason="")

    def sound(evidence: Evidence) -> Finding | None:
        return Finding(cause="oom", ranks=(1,), reason="it has no memory")

    evidence = load(make_folder(tmp_path / "t"))
    monkeypatch.setattr(engine, "RULES", (broken, inventive, sound))
    verdict = engine.diagnose(evidence)
    assert (verdict.cause, verdict.outcome, verdict.rule) == ("oom", "FAIL", "test_causes.sound")
    told = [fact.text for fact in verdict.evidence if fact.rank == NO_RANK]
    assert told[0].startswith("rule test_causes.broken failed: KeyError: 'beat_age_s' (test_causes.py:")
    assert told[1] == "rule test_causes.inventive failed: 'gremlins' is not a cause of the registry"
    monkeypatch.setattr(engine, "RULES", (broken,))
    verdict = engine.diagnose(evidence)
    assert verdict.cause == "unknown"
    assert any("rule test_causes.broken failed" in fact.text for fact in verdict.evidence)
    monkeypatch.setattr(engine, "SUSPICIONS", (broken,))
    assert engine.suspect(evidence) is None  # a test that still runs is not ended


def test_a_rule_that_raises_fails_no_test_that_passed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(evidence: Evidence) -> Finding | None:
        raise ZeroDivisionError

    monkeypatch.setattr(engine, "OF_THE_PASSED", (broken,))
    evidence = load(make_folder(tmp_path / "t"))
    passed = replace(evidence, ranks=tuple(replace(r, finished=True, passed=True) for r in evidence.ranks))
    verdict = engine.diagnose(passed)
    assert verdict.outcome == "PASS"
    assert "rule test_causes.broken failed: ZeroDivisionError" in verdict.evidence[0].text


def test_a_broken_rule_neither_ends_nor_hides_a_test(pytester: pytest.Pytester) -> None:
    """As a user meets it: a slow healthy test passes, a failing one gets its verdict, and the run reports the rule."""
    pytester.makeconftest(
        """
from pytest_nsa.diagnosis import engine, rules
from pytest_nsa.diagnosis.rules import calls

def departed(evidence):
    raise IndexError("no such collective")

departed.__module__ = calls.__name__
engine.RULES = (departed, *engine.RULES)
engine.SUSPICIONS = (departed, *engine.SUSPICIONS)
"""
    )
    result = run_example(
        pytester,
        """
import time
import torch.distributed as dist

@world_size(2)
def test_slow(group):
    if group.rank == 1:
        time.sleep(2.5)
    dist.barrier()

@world_size(2)
def test_raises(group):
    if group.rank == 1:
        raise ValueError("mine")
    dist.barrier()
""",
    )
    assert result.outcomes == {"passed": 1, "failed": 1}
    verdict = result.verdicts["test_raises"]
    assert (verdict.cause, verdict.ranks, verdict.rule) == ("rank_exception", (1,), "exits.rank_raised")
    assert "rule calls.departed failed: IndexError: no such collective" in result.stdout
