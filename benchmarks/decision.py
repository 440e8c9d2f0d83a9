"""The plan's decision over tables of verdicts with planted faults: how often it names what was planted, and how often another.

    python benchmarks/decision.py            # 300 tables; writes benchmarks/results/decision.json

A fault needs one factor of the plan or two, each of which some row shows to be needed; a third of the tables have two faults. Any
phases run; some rows are SLOW, skipped or killed. No rank is started.
"""

import argparse
import json
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pytest_nsa.diagnosis.verdict import Verdict
from tests_cpu.plan.decision import Run, decide, find_faults
from tests_cpu.plan.factors import Factor, Facts, factors, facts_by_name
from tests_cpu.plan.scenarios import CPU, TABLE

RESULTS = Path(__file__).parent / "results" / "decision.json"
SURE = 0.5
SLOW, SKIPPED, KILLED = 0.06, 0.05, 0.02  # shares of the rows
PHASES = (
    range(1, 6),
    range(1, 7),
    range(1, 8),
    range(1, 9),
    range(1, 9),
    range(1, 10),
    (1, 2, 3, 4, 5, 7),
    (3, 4, 5, 7, 8),
)
CAUSES = (("lock_deadlock", "HANG", "a.py:3 in f"), ("nan_loss", "FAIL", "b.py:7 in g"))


@dataclass(frozen=True, kw_only=True)
class Planted:
    """A table of verdicts, and the factors that each cause in it needs."""

    verdicts: dict[str, Verdict]
    needs: dict[str, tuple[Factor, ...]]


def tables(number: int, seed: int) -> Iterator[Planted]:
    """Yield tables in which something fails because of what was planted."""
    chance = random.Random(seed)
    facts, every = facts_by_name(False), factors(False)
    rows = {CPU.find_name(row): row for row in TABLE}
    kinds = _kinds(every, list(facts.values()))
    while number:
        count = 2 if chance.random() < 1 / 3 else 1
        faults = []
        for cause, _, _ in CAUSES[:count]:
            faults.append((cause, [chance.choice(kind) for kind in chance.sample(kinds, chance.choice((1, 1, 2)))]))
        ends = {cause: (outcome, where) for cause, outcome, where in CAUSES}
        phases = chance.choice(PHASES)
        verdicts = {}
        for name, row in rows.items():
            if row.phase not in phases:
                continue
            failing = [cause for cause, needs in faults if all(f.has(facts[name]) for f in needs)]
            world, odds = row.num_ranks, chance.random()
            common = {"nodeid": name, "scenario": name, "world_size": world, "confidence": 0.95}
            if row.fails_as:
                verdicts[name] = Verdict(outcome="FAIL", cause=row.fails_as, expected=True, **common)
            elif odds < SLOW:
                verdicts[name] = Verdict(outcome="SLOW", cause="slow", ranks=tuple(range(world)), **common)
            elif odds < SLOW + SKIPPED:
                verdicts[name] = Verdict(outcome="SKIP", **common)
            elif odds < SLOW + SKIPPED + KILLED:
                verdicts[name] = Verdict(outcome="CRASH", cause="rank_died", ranks=(0,), **common)
            elif failing:
                outcome, where = ends[failing[0]]
                verdicts[name] = Verdict(outcome=outcome, cause=failing[0], where=where, ranks=(0,), **common)
            else:
                verdicts[name] = Verdict(outcome="PASS", **common)
        passing = [facts[name] for name, v in verdicts.items() if v.outcome == "PASS"]
        is_seen = {cause for cause, _ in faults} <= {v.cause for v in verdicts.values()}
        if is_seen and all(_is_shown(factor, needs, passing) for _, needs in faults for factor in needs):
            number -= 1
            yield Planted(verdicts=verdicts, needs={cause: tuple(needs) for cause, needs in faults})


def _is_shown(factor: Factor, needs: list[Factor], passing: list[Facts]) -> bool:
    """Return whether a row passes for want of this factor alone: without one nothing shows that it is needed."""
    return any(not factor.has(row) and all(f.has(row) for f in needs if f is not factor) for row in passing)


def _kinds(every: tuple[Factor, ...], rows: list[Facts]) -> list[list[Factor]]:
    """Return the factors that rows differ in, by what they read: so that a field with many values is drawn no more often."""
    kinds: dict[tuple[str, ...], list[Factor]] = {}
    for factor in every:
        if 0 < sum(map(factor.has, rows)) < len(rows):
            kinds.setdefault(factor.fields, []).append(factor)
    return list(kinds.values())


def judge(planted: Planted) -> str:
    """Return 'exact', 'part' (right, with less or more than one possibility), 'open' (at most `SURE`), or 'wrong'."""
    run = Run(planted.verdicts)
    fault = next(fault for fault in find_faults(run) if fault.cause in planted.needs)
    decision = decide(planted.verdicts)
    rows = list(run.facts.values())
    needs = planted.needs[fault.cause]
    true = [all(f.has(row) for f in needs) for row in rows]
    classes = run.wide(fault.why.needed)
    named = [c[0] for c in classes if len(c) == 1]
    is_whole = named and len(named) == len(classes) and not fault.why.possible
    if is_whole and [all(f.has(row) for f in named) for row in rows] == true:
        return "exact"
    if decision.confidence <= SURE:
        return "open"
    follows = all(f.has(row) for f in named for row, is_true in zip(rows, true, strict=True) if is_true)
    return "part" if follows else "wrong"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tables", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    found = Counter(map(judge, tables(options.tables, options.seed)))
    figures = {
        "tables": options.tables,
        "seed": options.seed,
        **{k: found[k] for k in ("exact", "part", "open", "wrong")},
    }
    print(figures)
    RESULTS.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
