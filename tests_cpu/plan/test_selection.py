"""How scenarios are chosen on the command line: by the plan's names, and by phase."""

import re
from pathlib import Path

from pytest_nsa import testing
from pytest_nsa.diagnosis.decision import Decision
from pytest_nsa.diagnosis.verdict import Verdict
from pytest_nsa.wire.files import append_line, write_json
from tests_cpu.plan.scenarios import CPU, TABLE

ROOT = Path(__file__).resolve().parents[2]


def collected(*arguments: str) -> list[str]:
    """Return the ids of the tests that pytest would run."""
    options = ["--collect-only", "-q", "-m", "slow or not slow", "-p", "no:cacheprovider"]
    done = testing.run_pytest(ROOT, [*options, *arguments], 100)
    return re.findall(r"^tests_\S+::\S+$", done.stdout.str(), re.M)


def test_scenarios_are_chosen_by_their_names_and_by_their_other_names() -> None:
    """By its id, by its alias, and by its name at production's size."""
    names = "branch_sel_only or 0:6 or onestep or one_process_12x2048_no_gc"
    found = collected("tests_cpu/plan", "--phases", "all", "-k", names)
    expected = {"branch_sel_only", "gc_bisect_layers_0_5", "ddp_onestep_trace", "one_process_12x128_no_gc"}
    assert set(found) == {f"tests_cpu/plan/test_plan.py::test_scenario[{name}]" for name in expected}


def test_phases_choose_scenarios_and_no_other_tests() -> None:
    found = collected("tests_cpu/plan", "--phases", "3")
    assert [name.partition("[")[2] for name in found] == ["branch_cmp_only]", "branch_sel_only]", "branch_win_only]"]
    everything = collected("tests_cpu/plan", "--phases", "all")
    assert everything == [f"tests_cpu/plan/test_plan.py::test_scenario[{CPU.find_name(row)}]" for row in TABLE]


def test_the_row_that_the_last_decision_names_is_followed(tmp_path: Path) -> None:
    run = tmp_path / "latest"
    run.mkdir()
    follow = ("tests_cpu/plan", "--phases", "all", "--plan-follow", "--ranks-artifacts", str(tmp_path))
    assert collected(*follow) == []  # refused: nothing is named
    slow = Verdict(scenario="branch_cmp_only", nodeid="t", outcome="SLOW", cause="slow")
    append_line(run / "verdicts.jsonl", slow.to_json())
    action = "look; run manual_averaging (--phases 7 -k manual_averaging) to decide"
    write_json(run / "decision.json", Decision(sentence="", action=action, path=()).to_json())
    names = [name.partition("[")[2] for name in collected(*follow)]
    assert names == ["branch_cmp_only]", "manual_averaging]"]
