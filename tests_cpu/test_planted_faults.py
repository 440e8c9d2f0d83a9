"""Each fault of ``make plan FAULT=...`` has one verdict on every row that it reaches, and one decision; docs/planted.md has them.

``pytest tests_cpu/test_planted_faults.py -m slow --record`` writes the page's table again.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from conftest import FAULTS
from pytest_nsa import testing
from tests_cpu.plan.scenarios import CPU, TABLE, Scenario

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "planted.md"
# Those of phase 9 train for minutes where a fault spares them.
ROWS = {CPU.find_name(row): row for row in TABLE if row.phase < 9}


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A planted fault: the verdict that each row which it reaches must get, and how the decision begins.

    ``statements`` are the source lines that a verdict may name; any where there are none. ``wrong``: rows whose verdict is another
    by today's rules, and ``because``. ``may_crash``: gloo aborts a rank where its next reduction has another size.
    """

    cause: str
    outcome: str
    everywhere: bool = False
    statements: tuple[str, ...] = ()
    decision: str
    may_crash: bool = False
    wrong: tuple[str, ...] = ()
    because: str = ""

    def ranks(self, row: Scenario, culprit: int = 1) -> list[int]:
        return list(range(row.num_ranks)) if self.everywhere else [culprit]


LOCK = ("with never_released:",)
MISSING = "look in the module that owns them (blocks.4.attn.gate.fc2)"
EXPECTED = {
    "sel_backward_deadlock": Fault(
        cause="lock_deadlock", outcome="HANG", statements=LOCK, decision="fix the backward of branch sel (tests_cpu",
    ),
    "rank1_skips_allreduce": Fault(
        cause="skipped_collective", outcome="HANG", may_crash=True, statements=("dist.all_reduce(figures)",),
        decision="make every rank reach this call the same number of times",
    ),
    "gc_reentrant": Fault(
        cause="ready_twice", outcome="FAIL", everywhere=True, statements=("(loss / len(batches)).backward()",),
        decision="enable static_graph in production",
    ),
    "rank1_killed": Fault(
        cause="rank_died", outcome="CRASH", decision="take out the line that sends the signal", wrong=("gc_reentrant_no_sync",),
        because="the row fails by itself: rank 0 goes on without rank 1 and raises what the row expects",
    ),
    "gate_weight_missing_on_rank1": Fault(
        cause="unused_parameters", outcome="FAIL", decision=f"{MISSING}, on rank 1 alone, for what keeps their gradient from them",
        wrong=("fsdp_blocks", "fsdp_bf16", "manual_averaging"),
        because="FSDP reduces inside of backward: the ranks part in that reduction, before the trace of gradients reports; by hand "
        "a rank skips the reduction of what has no gradient",
    ),
    "sel_backward_deadlock_everywhere": Fault(
        cause="lock_deadlock", outcome="HANG", everywhere=True, statements=LOCK, decision="fix the backward of branch sel (tests",
    ),
    "sel_backward_raises": Fault(
        cause="assertion", outcome="FAIL", everywhere=True,
        statements=('raise RuntimeError("the backward of the selection is broken")',),
        decision="fix the backward of branch sel (tests_cpu/plan/faults.py:",
    ),
    "nsa_backward_deadlock": Fault(
        cause="lock_deadlock", outcome="HANG", everywhere=True, statements=LOCK,
        decision="look at NSA's own backward (tests_cpu/plan/faults.py:",
    ),
    "mlp_backward_deadlock": Fault(
        cause="lock_deadlock", outcome="HANG", everywhere=True, statements=LOCK, decision="look at what both models share",
    ),
    "recomputation_deadlock": Fault(
        cause="lock_deadlock", outcome="HANG", everywhere=True, statements=LOCK,
        decision="look at gradient checkpointing, layers 0 to 5:",
    ),
    "gate_weight_missing": Fault(
        cause="unused_parameters", outcome="FAIL", everywhere=True, decision=f"{MISSING} for what keeps their gradient from them",
    ),
    "inplace_write": Fault(
        cause="assertion", outcome="FAIL", everywhere=True,
        decision="take the write out of the checkpointed region: mul_ writes into input 0 of blocks.1 at tests_cpu/plan/faults.py:",
    ),
}  # fmt: skip


def run_plan(fault: str, folder: Path, *arguments: str, timeout: float = 170) -> tuple[str, dict[str, dict[str, Any]]]:
    """Return SUMMARY.md and the verdicts by scenario of a run of the plan with a fault."""
    options = (
        *testing.ONCE,
        f"--fault={fault}",
        f"--ranks-artifacts={folder}",
        "-o",
        "ranks_hang_after=2.5",
        *arguments,
    )
    done = testing.run_pytest(ROOT, ["tests_cpu/plan/test_plan.py", *options, "-p", "no:cacheprovider"], timeout)
    assert done.ret == 1
    run = folder / "latest"
    assert str(run.resolve() / "SUMMARY.md") in done.stdout.str()
    verdicts = {p.parent.name: json.loads(p.read_text()) for p in run.glob("*/verdict.json")}
    return (run / "SUMMARY.md").read_text(), verdicts


def failing(verdicts: dict[str, dict[str, Any]]) -> list[str]:
    """Return the rows that fail, and were not expected to."""
    return [name for name, v in verdicts.items() if v["outcome"] not in ("PASS", "SKIP") and not v["expected"]]


def source_line(where: str) -> str:
    file, _, rest = where.partition(":")
    return (ROOT / file).read_text().splitlines()[int(rest.split()[0]) - 1].strip()


def is_right(verdict: dict[str, Any], fault: Fault, row: Scenario, culprit: int = 1) -> bool:
    outcomes = {fault.outcome, "CRASH"} if fault.may_crash else {fault.outcome}
    found = verdict["cause"], verdict["ranks"]
    if found != (fault.cause, fault.ranks(row, culprit)) or verdict["outcome"] not in outcomes:
        return False
    return not fault.statements or source_line(verdict["where"]) in fault.statements


def rows_in_words(failing: Sequence[str], ran: Sequence[str]) -> str:
    """Return 'of two ranks all but `a`; in one process `b`, `c`'."""
    parts = []
    for words, ranks in (("of two ranks", 2), ("in one process", 1)):
        group = [name for name in ran if ROWS[name].num_ranks == ranks]
        wrong = [f"`{name}`" for name in group if name in failing]
        right = [f"`{name}`" for name in group if name not in failing]
        if wrong and not right:
            parts.append(f"{words} all {len(wrong)}")
        elif len(wrong) > len(right):
            parts.append(f"{words} all but {', '.join(right)}")
        elif wrong:
            parts.append(f"{words} {', '.join(wrong)}")
    return "; ".join(parts)


def page_row(fault: str, verdicts: dict[str, dict[str, Any]], action: str) -> str:
    ran = [name for name in ROWS if verdicts[name]["outcome"] != "SKIP" and not verdicts[name]["expected"]]
    # Not the lines, nor which of equally sure verdicts comes first.
    advice = re.sub(r":\d+ in ", " in ", action.partition(" (scenario")[0])
    return f"| `{fault}` | {rows_in_words(failing(verdicts), ran)} | {advice} |"


def test_each_fault_is_expected_and_described() -> None:
    from tests_cpu.plan import faults

    assert set(EXPECTED) == set(FAULTS) == {"gc_reentrant", *faults.ON_ONE_RANK, *faults.EVERYWHERE}
    assert [line.split("`")[1] for line in PAGE.read_text().splitlines() if line.startswith("| `")][1:] == list(
        EXPECTED
    )


@pytest.mark.slow
@pytest.mark.timeout(590)
@pytest.mark.parametrize("name", EXPECTED)
def test_a_fault_has_one_verdict_on_each_row_and_one_decision(
    name: str, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    fault = EXPECTED[name]
    # Three rows at a time, most of which wait: a rank that gets no CPU for long is not to be taken for one that is stalled.
    phases = ("--phases", "1-8", "-m", "slow or not slow", "-p", "xdist", "-n", "3", "-o", "ranks_hang_after=6")
    _, verdicts = run_plan(name, tmp_path, *phases, timeout=580)
    assert set(verdicts) == set(ROWS)
    for row, verdict in verdicts.items():
        word = "XFAIL" if verdict["expected"] else verdict["outcome"]
        assert (tmp_path / "latest" / row / "result.txt").read_text() == word + "\n"
    decision = json.loads((tmp_path / "latest" / "decision.json").read_text())
    assert decision["action"].startswith(fault.decision), decision["path"]
    row = page_row(name, verdicts, decision["action"])
    page = PAGE.read_text(encoding="utf-8")
    if pytestconfig.getoption("--record"):
        lines = [row if line.startswith(f"| `{name}` ") else line for line in page.splitlines()]
        PAGE.write_text("\n".join(lines) + "\n", encoding="utf-8")
    else:
        assert row in page.splitlines()
    wrong = {row for row in failing(verdicts) if not is_right(verdicts[row], fault, ROWS[row])}
    assert wrong == set(fault.wrong), {row: (verdicts[row]["cause"], verdicts[row]["where"]) for row in wrong}
    if wrong:  # strict: a row that is named right by now, or another one that is not, fails above
        pytest.xfail(f"{len(wrong)} rows: {fault.because}")


@pytest.mark.slow
@pytest.mark.timeout(590)
@pytest.mark.parametrize(("ranks", "culprit"), [(2, 0), (4, 0), (4, 3)])
@pytest.mark.parametrize("name", ["sel_backward_deadlock", "rank1_skips_allreduce", "rank1_killed"])
def test_a_fault_is_named_on_whichever_rank_it_is(name: str, ranks: int, culprit: int, tmp_path: Path) -> None:
    rows = ("--phases", "1-5", "-m", "slow or not slow")
    more = ("--plan-ranks", str(ranks), "--fault-rank", str(culprit), "-o", "ranks_hang_after=6")
    _, verdicts = run_plan(name, tmp_path, *rows, *more, timeout=580)
    assert failing(verdicts)
    for row in failing(verdicts):
        assert is_right(verdicts[row], EXPECTED[name], ROWS[row], culprit), (row, verdicts[row]["reason"])


def test_a_fault_s_rank_is_one_that_the_plan_has(tmp_path: Path) -> None:
    command = ["tests_cpu/plan/test_plan.py", "--collect-only", "-q", "--plan-ranks", "3", "--fault-rank", "3"]
    done = testing.run_pytest(ROOT, [*command, "-p", "no:cacheprovider"], 120)
    assert done.ret == pytest.ExitCode.USAGE_ERROR
    done.stderr.fnmatch_lines(["*--fault-rank 3: the plan has ranks 0 to 2 (--plan-ranks 3)*"])


def test_the_plan_s_own_example(tmp_path: Path) -> None:
    """A gradient that never arrives, on all ranks, where backward ends: arrived=194 missing=1."""
    summary, verdicts = run_plan("gate_weight_missing", tmp_path, "--phases", "1-5", "-m", "slow or not slow")
    name = "blocks.4.attn.gate.fc2.weight"
    assert set(failing(verdicts)) == set(verdicts)
    for row, verdict in verdicts.items():
        assert is_right(verdict, EXPECTED["gate_weight_missing"], ROWS[row])
        assert (verdict["parameters_missing"], verdict["module"]) == ([name], "blocks.4.attn.gate.fc2")
        traces = (tmp_path / "latest" / row / "traces.log").read_text()
        assert f"[GRAD-TRACE] after_backward_step1 arrived=194 missing=1\n  - MISSING: {name}\n" in traces
    listed = (tmp_path / "latest" / "all_missing_params.txt").read_text().splitlines()
    assert listed == [
        f"{row} {name} rank={'0,1' if of.num_ranks > 1 else '0'}" for row, of in ROWS.items() if row in verdicts
    ]
    assert (
        "**Look in the module that owns them (blocks.4.attn.gate.fc2) for what keeps their gradient from them"
        in summary
    )
    assert f"are the same parameters missing every time? yes: {name}" in summary
    assert "| a step leaves parameters unused | confirmed |" in summary
    assert "| checkpointing and the custom backward do not go together | not tested |" in summary  # every row fails
    assert "gradients are missing in 10 of them" in summary
