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
The program without its fault is its healthy twin, the control: a tool that names anything in it raises a false alarm.
`python benchmarks/hangs.py` prints the labels, and scores any tool's answers, which are JSON lines. The rules were written with
these programs at hand: the set compares tools. It does not show how often an unknown program is named.

| tool | programs given | ranks right | line right, of those that have one | wrong and certain | false alarms, of twins |
| --- | ---: | ---: | ---: | ---: | ---: |
"""
READERS = """
pytest-nsa runs the programs as tests. {given} of them also run on plain processes, without this plugin and its tracer. They leave
what a job with a flight recorder, a watchdog and a launcher leaves, and the other tools read that. gloo's recorder has no send,
receive, key of a store, monitored barrier or reduction; a rank that holds the GIL in torch leaves no dump.

- An analyzer of dumps names the ranks that it prints as missing or as culprits; of several such statements of torch's, that with
  the fewest ranks counts. NVRx is NVIDIA's resiliency extension (commit d8686d9 of August 2026).
- Both analyzers end with a KeyError on gloo's dumps of torch 2.13, for which entries name the default group '0' and the list of
  groups names it ''. The benchmark mends that in the dumps.
- Of the dumps of NCCL jobs below, NVRx's analyzer names the ranks in {nvrx}, torch's in {torch}.
- torch's debug server shows the same stacks, and runs torch's analyzer on live dumps: its answers are those of these two rows,
  except for three programs in which a rank holds the GIL, as it reads that rank's dump, too. On gloo its page of dumps ends with
  the same KeyError.
- py-spy shows the stacks to a person, too; the majority is a fixed rule for them.
- pytest-timeout shows the stacks of pytest's process, and names none of the ranks.
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
# Tool, true positives, true negatives, false positives, false negatives, and errors (no answer): of the early suite of about 190
# programs, from the README of github.com/mquinson/MBI.
PUBLISHED = (
    ("MUST 1.6", 83, 79, 10, 15, 12),
    ("McSimGrid 3.27", 77, 76, 16, 17, 13),
    ("Aislinn 3.12", 64, 64, 16, 20, 35),
    ("ISP 0.3.1", 69, 70, 32, 20, 8),
    ("CIVL 1.20", 13, 18, 28, 1, 139),
    ("PARCOACH 1", 18, 80, 8, 90, 3),
)
MPI = """
## Published scores of tools for MPI

[The README of the MPI Bugs Initiative](https://github.com/mquinson/MBI) states these, of its early suite of about 190 programs.
They cannot be compared with the scores above. The programs are in C and call MPI; some of their faults (memory windows,
persistent requests, leaks, data races on buffers) have no counterpart here. Some of the tools run no program, or try all its
schedules. A program counts as found without the right rank, line or cause.

| tool | found | missed | healthy, none reported | false alarms | no answer | recall | precision |
| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |
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
        f"| {share(row['line right'], row['have a line'])} | {row.get('wrong and certain', 0)} "
        f"| {share(row.get('false alarms', 0), row.get('twins', 0))} |"
        for tool, row in sorted(read("hangs")["scores"].items(), key=lambda item: -item[1]["ranks right"])
    ]


def count_named(by: str) -> str:
    """Return of how many of the NCCL jobs a tool names the injected ranks."""
    jobs = read("foreign")["nccl"].values()
    return share(sum(job[by] == job["injected"] for job in jobs), len(jobs))


def list_published() -> list[str]:
    """Return a row for each tool for MPI."""
    return [
        f"| {tool} | {found} | {missed} | {healthy} | {alarms} | {errors} "
        f"| {found / (found + missed):.0%} | {found / (found + alarms):.0%} |"
        for tool, found, healthy, alarms, missed, errors in PUBLISHED
    ]


def list_unseen() -> list[str]:
    """Return a row for each set of programs that the rules had not seen."""
    made, parted, foreign, held = read("generated"), read("first_divergence"), read("foreign"), read("crossvalidation")
    right, n, totals = made["right"], made["with_a_fault"], parted["totals"]
    cases = foreign["public cases"].values()
    subject, kinds = held["by subject"], read("fault_kinds")["kinds"].values()
    blind = json.loads((RESULTS / "unseen.jsonl").read_text(encoding="utf-8").splitlines()[-1])
    return [
        f"| the latest set by an author who had not read the rules ({blind['date']}), with the second run | {blind['faults']} "
        f"| {share(blind['ranks'], blind['faults'])} | {share(blind['line'], blind['lines'])} | {blind['wrong_and_certain']} |",
        f"| generated in the form of MPI's fault benchmarks | {n} | {share(right['ranks'], n)} | {share(right['line'], n)} "
        f"| {right['wrong and certain']} |",
        f"| generated: a value that makes ranks part 1 to 200 calls later, with the second run | {totals['programs']} | "
        f"| {share(totals['statement'], totals['programs'])} | |",
        f"| this project's faults, each subject held out of the weights, one run | {subject['faults']} "
        f"| {share(subject['right']['ranks'], subject['faults'])} | {share(subject['right']['line'], subject['faults'])} "
        f"| {subject['wrong and certain']} |",
        f"| the ten kinds of fault that NVIDIA's resiliency extension injects without a GPU, and a healthy run | {len(kinds)} "
        f"| {share(sum(kind['right'] for kind in kinds), len(kinds))} | | 0 |",
        f"| dumps of real NCCL jobs, 16 ranks each | {len(foreign['nccl'])} | {count_named('found')} | | 0 |",
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
        + READERS.format(given=fewest, nvrx=count_named("by NVRx's analyzer"), torch=count_named("by torch's analyzer"))
    )
    (ROOT / "docs" / "score.md").write_text(
        public + UNSEEN + "\n".join(list_unseen()) + "\n" + classes + MPI + "\n".join(list_published()) + "\n",
        encoding="utf-8",
    )


if __name__ == "__main__":
    main()
