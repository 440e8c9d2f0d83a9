"""Write docs/score.md: how often verdicts are right, from the files in benchmarks/results.

python docs/score.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
HEAD = """# Score

How often a verdict names the right ranks, by set of programs. `python docs/score.py` writes this page from benchmarks/results/,
where each file has its date, machine and versions. [The benchmarks of the diagnosis](benchmarks_diagnosis.md) have each set's
command.
"""
PUBLIC = """
## The public set

{programs} programs for torch.distributed on a CPU, each with one fault, its label (ranks, line, cause, statement) and its origin.
Where the fault is on one rank, the program without it is its healthy twin. `python benchmarks/hangs.py` prints the labels, and
scores any tool's answers, which are JSON lines. The rules were written with these programs at hand: the set compares tools. It
does not show how often an unknown program is named.

| tool | programs that it was given | ranks right | line right, of those that have one | wrong and certain |
| --- | ---: | ---: | ---: | ---: |
"""
READERS = """
pytest-nsa runs the programs as tests. {given} of them also run on plain processes, without this plugin and its tracer. They leave
what a job with a flight recorder, a watchdog and a launcher leaves, and the other tools read that. gloo's recorder has no send,
receive, key of a store, monitored barrier or reduction; a rank that holds the GIL in torch leaves no dump. torch's debug server
and py-spy show the stacks to a person; the majority is a fixed rule for them. pytest-timeout shows the stacks of pytest's process.
"""
UNSEEN = """
## Programs that no rule has seen

| set | programs | ranks right | line or statement right | wrong and certain |
| --- | ---: | ---: | ---: | ---: |
"""
STATED = """
## Stated confidence

How sure verdicts on this project's faults are, and how often they are right: each tenth of the files by weights that were fitted
without it, and by all rules.

| stated, from | verdicts | mean of what is stated | right |
| --- | ---: | ---: | ---: |
"""
NOTES = """
What is not here: the programs of the MPI Bugs Initiative are in C, and tools such as MUST, PARCOACH and ISP check MPI calls, not
Python. Their published scores cannot be compared with these.
"""


def read(name: str) -> Any:
    """Return the content of a result's file."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def share(number: int, of: int) -> str:
    """Return '44 of 48 (92%)'."""
    return f"{number} of {of} ({number / of:.0%})" if of else "-"


def list_tools() -> list[str]:
    """Return a row for each tool that has answered the public set."""
    return [
        f"| {tool} | {row['programs']} | {share(row['ranks right'], row['programs'])} "
        f"| {share(row['line right'], row['have a line'])} | {row.get('wrong and certain', 0)} |"
        for tool, row in sorted(read("hangs")["scores"].items(), key=lambda item: -item[1]["ranks right"])
    ]


def list_unseen() -> list[str]:
    """Return a row for each set of programs that the rules had not seen."""
    made, parted, foreign, held = read("generated"), read("first_divergence"), read("foreign"), read("crossvalidation")
    right, n, totals = made["right"], made["with_a_fault"], parted["totals"]
    cases, incidents = foreign["public cases"].values(), foreign["nccl"].values()
    subject, kinds = held["by subject"], read("fault_kinds")["kinds"].values()
    found = sum(incident["found"] == incident["injected"] for incident in incidents)
    return [
        f"| generated in the form of MPI's fault benchmarks | {n} | {share(right['ranks'], n)} | {share(right['line'], n)} "
        f"| {right['wrong and certain']} |",
        f"| generated: a value that makes ranks part 1 to 200 calls later, with the second run | {totals['programs']} | "
        f"| {share(totals['statement'], totals['programs'])} | |",
        f"| this project's faults, each subject held out of the weights, one run | {subject['faults']} "
        f"| {share(subject['right']['ranks'], subject['faults'])} | {share(subject['right']['line'], subject['faults'])} "
        f"| {subject['wrong and certain']} |",
        f"| the ten kinds of fault that NVIDIA's resiliency extension injects without a GPU, and a healthy run | {len(kinds)} "
        f"| {share(sum(kind['right'] for kind in kinds), len(kinds))} | | 0 |",
        f"| dumps of real NCCL jobs, 16 ranks each | {len(incidents)} | {share(found, len(incidents))} | | 0 |",
        f"| public cases of recorder dumps, logs and RAS, made again | {len(cases)} | {share(sum(cases), len(cases))} | | 0 |",
    ]


def list_classes() -> list[str]:
    """Return a row for each class of stated confidence."""
    rows = []
    for of in reversed(read("crossvalidation")["the weights, by file"]["calibration"]):
        name = "certain" if of["from"] == 1 else f"{of['from']:.0%}"
        rows.append(f"| {name} | {of['verdicts']} | {of['stated']:.0%} | {of['right']:.0%} |")
    return rows


def main() -> None:
    """Write the page."""
    classes = STATED + "\n".join(list_classes()) + "\n"
    fewest = min(row["programs"] for row in read("hangs")["scores"].values())
    public = (
        HEAD
        + PUBLIC.format(programs=read("hangs")["programs"])
        + "\n".join(list_tools())
        + "\n"
        + READERS.format(given=fewest)
    )
    (ROOT / "docs" / "score.md").write_text(
        public + UNSEEN + "\n".join(list_unseen()) + "\n" + NOTES + classes, encoding="utf-8"
    )


if __name__ == "__main__":
    main()
