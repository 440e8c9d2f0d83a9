"""Programs with the verdict of each test behind its `def`: `# -> sleeping 1 here`.

`passes`, or an outcome (HANG, if it is given), the cause and the ranks; `?` stands for any. Further words: `certain`, `uncertain`;
`here`, where a line that ends with `# HERE` is the verdict's or the caller's (of the same test, or `# HERE test_name`); `by RULE`;
`in MODULE`; `with KIND` of evidence; behind a colon, a part of reason or advice. A file is a session of pytest. Its comments
`# options: ...` and `# slow` are those of the session. Tests run on two ranks, or as many as `world_size` names.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from pytest_nsa.diagnosis.verdict import Verdict
from pytest_nsa.testing import ExampleResult, run_folder
from pytest_nsa.wire.files import read_lines

FOLDER = Path(__file__).parent
_SPEC = re.compile(r"\s*def (test_\w+)\(.*?# -> (.*)")
_HERE = re.compile(r"# HERE ?(test_\w+)?$")
_OUTCOMES = ("HANG", "FAIL", "CRASH", "SLOW", "SKIP")


@dataclass(frozen=True, slots=True)
class Program:
    """A file of programs: its text, the options of its session, and the words and lines of each test."""

    text: str
    options: tuple[str, ...]
    is_slow: bool
    expected: dict[str, str]
    lines: dict[str, set[int]]


def read_program(name: str) -> Program:
    """Read a file of programs."""
    text = (FOLDER / f"{name}.py").read_text(encoding="utf-8")
    expected: dict[str, str] = {}
    lines: dict[str, set[int]] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if spec := _SPEC.fullmatch(line):
            expected[spec[1]] = spec[2]
        elif here := _HERE.search(line):
            lines.setdefault(here[1] or next(reversed(expected)), set()).add(number)
    options = re.search(r"^# options: (.*)", text, re.M)
    return Program(text, tuple(options[1].split()) if options else (), "\n# slow\n" in text, expected, lines)


def run_program(name: str, folder: Path) -> ExampleResult:
    """Run the tests of a file in ``folder``; the evidence of those that pass is kept."""
    program = read_program(name)
    (folder / "test_example.py").write_text(program.text, encoding="utf-8")
    return run_folder(folder, "--ranks-keep=all", *program.options)


def differences(name: str, result: ExampleResult) -> list[str]:
    """Return what is not as the file has it: each test that did not run, or has another verdict."""
    program = read_program(name)
    found = []
    for test, words in program.expected.items():
        verdicts = {n: v for n, v in result.verdicts.items() if n.rpartition("::")[2].partition("[")[0] == test}
        found += [f"{test}: has no verdict"] if not verdicts else []
        for nodeid, verdict in verdicts.items():
            wrong = _differs(words, program.lines.get(test, set()), verdict) or _is_announced(words, nodeid, result)
            told = f"{verdict.outcome} {verdict.cause} {verdict.ranks} at {verdict.where}: {verdict.explanation}; {verdict.advice}"
            found += [f"{nodeid}: -> {words}; {wrong}: {told}"] if wrong else []
    return found


def _differs(text: str, lines: set[int], verdict: Verdict) -> str:
    """Return the first word that is not true of a verdict, '' where all are."""
    if text.startswith("passes"):
        return "" if verdict.outcome in ("PASS", *(["SKIP"] if text.endswith("skips") else [])) else "passes"
    head, _, says = text.partition(": ")
    words = head.split()
    if words[0] in _OUTCOMES and words.pop(0) != verdict.outcome:
        return "outcome"
    cause, ranks, *more = words
    places = {int(n) for place in (verdict.where, verdict.called_from) for n in re.findall(r"example\.py:(\d+)", place)}
    values = iter(more)
    holds = {"cause": cause in ("?", verdict.cause), "ranks": ranks in ("?", ",".join(map(str, verdict.ranks)))}
    for word in values:
        holds[word] = {
            "certain": lambda: verdict.certain,
            "uncertain": lambda: not verdict.certain and verdict.confidence < 0.95,
            "here": lambda: bool(places & lines),
            "by": lambda: verdict.rule == next(values),
            "in": lambda: verdict.module == next(values),
            "with": lambda: next(values) in {fact.kind for fact in verdict.evidence},
        }[word]()
    labels = " ".join(label.text for label in verdict.labels)
    holds["says"] = says in f"{verdict.explanation} {verdict.advice} {labels}"
    return ", ".join(word for word, is_true in holds.items() if not is_true) or ("" if verdict.failed else "fails")


def _is_announced(words: str, nodeid: str, result: ExampleResult) -> str:
    """Return the causes that were announced of a test that passes: at most that a rank sleeps."""
    if not words.startswith("passes"):
        return ""
    announced = read_lines(result.folder(nodeid) / "suspicions.jsonl")
    return ", ".join({line["cause"] for line in announced} - {"sleeping"})
