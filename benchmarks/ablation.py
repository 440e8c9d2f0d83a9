"""What each function of the rules decides on the recorded faults, and how many verdicts are right without what only one file needs.

    python benchmarks/ablation.py --json benchmarks/results/ablation.json --crossvalidation benchmarks/results/crossvalidation.json

Ablation: each function is replaced by one that returns False, None or nothing, and the programs that call it (the faults of
tests_cpu/faults, and a part of the generated programs) are diagnosed again. A verdict depends on the function where its cause, its
ranks or its line change. The functions of words.py are not among them: a test holds that they decide nothing.

Cross-validation: the faults are parted by program (ten parts; the cases of one function are one program) and by subject (a part
is a file). The weights are fitted without a tenth of the programs, or of the files. Every function on which verdicts of a part
alone depend is replaced, all at once. Then the faults of the part are diagnosed again. A function that one part needs would not
exist without it. For the weights by themselves, no function is replaced.
"""

import importlib
import json
import pkgutil
import statistics
import sys
import tempfile
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any, TypeVar
from unittest.mock import patch

import fit
from figures import parser_of

from pytest_nsa.diagnosis import explain, rules
from pytest_nsa.diagnosis.engine import diagnose
from pytest_nsa.diagnosis.explain import choose
from pytest_nsa.evidence.values import Evidence
from tests_cpu.faults.rows import faults

Fault = tuple[str, str]  # a file and a test in it
Answer = tuple[str, tuple[int, ...], str]  # cause, ranks, line
PARTS = 10  # of the programs, and of the files
SAMPLE = 4  # one of so many generated programs is taken
Key = TypeVar("Key", bound=Hashable)


def functions() -> dict[str, FunctionType]:
    """Return the functions and methods of the rules and of the model, by 'package.module.name'."""
    found: dict[str, FunctionType] = {}
    for package in (explain, rules):
        for info in pkgutil.iter_modules(package.__path__):
            module = importlib.import_module(f"{package.__name__}.{info.name}")
            short = f"{package.__name__.rpartition('.')[2]}.{info.name}"
            for name, value in vars(module).items():
                own = getattr(value, "__wrapped__", value)
                if isinstance(own, FunctionType) and own.__module__ == module.__name__:
                    found[f"{short}.{name}"] = own
                elif isinstance(value, type) and value.__module__ == module.__name__:
                    found |= {f"{short}.{name}.{key}": own for key, own in _methods(value)}
    return found


def _methods(kind: type) -> Iterator[tuple[str, FunctionType]]:
    for key, value in vars(kind).items():
        own = value.fget if isinstance(value, property) else value.func if isinstance(value, cached_property) else value
        if isinstance(own, FunctionType) and own.__module__ == kind.__module__ and not key.startswith("__"):
            yield key, own


def nothing(function: FunctionType) -> CodeType | None:
    """Return the code of a function that answers nothing, of the same type; None where there is no such answer."""
    says = str(function.__annotations__.get("return", ""))
    answers = {"bool": "False", "str": "''", "int": "0"}
    if function.__code__.co_freevars:
        return None
    if says in answers:
        answer = answers[says]
    elif "None" in says:
        answer = "None"
    elif says.startswith(("list", "Sequence", "tuple[int, ...]", "tuple[str, ...]", "tuple[Fact, ...]", "Iterator")):
        answer = "()"
    elif says.startswith(("set", "frozenset")):
        answer = "set()"
    elif says.startswith(("dict", "Mapping")):
        answer = "{}"
    else:
        return None
    names: dict[str, Any] = {}
    exec(f"def answers_nothing(*a, **k): return {answer}", names)
    return names["answers_nothing"].__code__  # type: ignore[no-any-return]


@contextmanager
def without(*replaced: FunctionType) -> Iterator[None]:
    """Replace the code of functions."""
    codes = [f.__code__ for f in replaced]
    try:
        for function in replaced:
            code = nothing(function)
            assert code is not None
            function.__code__ = code
        yield
    finally:
        for function, code in zip(replaced, codes, strict=True):
            function.__code__ = code


def answer(evidence: Evidence) -> Answer:
    """Return what the engine says of a fault."""
    verdict = diagnose(evidence)
    return verdict.cause, verdict.ranks, verdict.where


def called(evidence: Evidence, codes: dict[CodeType, str]) -> tuple[Answer, set[str]]:
    """Return the answer, and the names of the functions that led to it."""
    seen: set[CodeType] = set()

    def profile(frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            seen.add(frame.f_code)

    sys.setprofile(profile)
    try:
        found = answer(evidence)
    finally:
        sys.setprofile(None)
    return found, {codes[code] for code in seen if code in codes}


def decided(recorded: Mapping[Key, Evidence]) -> dict[str, set[Key]]:
    """Return the programs that depend on each function that can be replaced."""
    known = functions()
    codes = {f.__code__: name for name, f in known.items()}
    before, callers = {}, defaultdict(list)
    for fault, evidence in recorded.items():
        before[fault], names = called(evidence, codes)
        for name in names:
            callers[name].append(fault)
    found = {}
    for name, function in known.items():
        if nothing(function) is not None:
            with without(function):
                found[name] = {f for f in callers[name] if answer(recorded[f]) != before[f]}
    return found


CONFIDENCES = (0.0, 0.5, 0.7, 0.8, 0.9, 0.97, 1.0)  # the lowest of each class; 1: certain


def share_of_few(numbers: Mapping[str, int]) -> float:
    """Return the share of functions on which one verdict depends, or none."""
    return round(sum(n <= 1 for n in numbers.values()) / len(numbers), 4)


def tenth_of_programs(fault: Fault) -> str:
    """Return the part of a fault; all cases of one function are in one part."""
    module, test = fault
    return _tenth(f"{module}.{test.partition('[')[0]}")


def tenth_of_files(fault: Fault) -> str:
    """Return the part of a fault; all faults of one file are in one part."""
    return _tenth(fault[0])


def subject(fault: Fault) -> str:
    """Return the file, which holds the faults of one subject."""
    return fault[0]


def _tenth(name: str) -> str:
    return str(zlib.crc32(name.encode()) % PARTS)


def tables_without(
    of: Iterable[Fault], rows: Sequence[fit.Row], tenth_of: Callable[[Fault], str]
) -> dict[str, fit.Weights]:
    """Return, for each tenth of the faults, the weights that are fitted without it."""
    tenths = set(map(tenth_of, of))
    return {
        tenth: fit.fitted([row for row in rows if row.fault is None or tenth_of(row.fault) != tenth])
        for tenth in sorted(tenths)
    }


def crossvalidated(
    recorded: dict[Fault, Evidence],
    depend: dict[str, set[Fault]],
    tables: Mapping[str, fit.Weights],
    part_of: Callable[[Fault], str],
    tenth_of: Callable[[Fault], str],
) -> dict[str, Any]:
    """Return how many verdicts are right where each part is diagnosed without the functions that it alone needs, and by weights
    that were fitted without the tenth that holds the part.
    """
    known = functions()
    right, certain, wrong = Counter[str](), 0, []
    stated: list[tuple[float, bool]] = []
    for part, tenth in sorted({(part_of(fault), tenth_of(fault)) for fault in recorded}):
        alone = [known[name] for name, needs in depend.items() if needs and {part_of(f) for f in needs} == {part}]
        with without(*alone), patch.object(choose, "weights", lambda table=tables[tenth]: table):
            for (module, name), evidence in ((f, e) for f, e in recorded.items() if part_of(f) == part):
                verdict, wants = diagnose(evidence), faults(module)[name]
                is_named = wants.names(verdict.cause, verdict.ranks)
                right.update(
                    {
                        "cause": verdict.cause == wants.cause,
                        "ranks": verdict.ranks == wants.ranks,
                        "cause and ranks": is_named,
                        "line": is_named and wants.allows(verdict.where),
                    }
                )
                certain += verdict.certain and not is_named
                if verdict.cause:
                    stated.append((1.0 if verdict.certain else verdict.confidence, is_named))
                if not is_named:
                    wrong.append(f"{module}.{name}: {verdict.cause} {list(verdict.ranks)}")
    return {
        "faults": len(recorded),
        "right": dict(right),
        "share": {key: round(count / len(recorded), 4) for key, count in right.items()},
        "wrong and certain": certain,
        "wrong": sorted(wrong),
        "calibration": calibrate(stated),
    }


def calibrate(stated: Iterable[tuple[float, bool]]) -> list[dict[str, float]]:
    """Return by classes of the stated confidence: its mean, the share that is right, and how many verdicts there are."""
    classes: dict[float, list[tuple[float, bool]]] = {}
    for confidence, is_right in stated:
        lowest = max(bound for bound in CONFIDENCES if confidence >= bound)
        classes.setdefault(lowest, []).append((confidence, is_right))
    return [
        {
            "from": lowest, "verdicts": len(of), "stated": round(statistics.mean(c for c, _ in of), 3),
            "right": round(sum(is_right for _, is_right in of) / len(of), 3),
        }
        for lowest, of in sorted(classes.items())
    ]  # fmt: skip


def main() -> None:
    """Measure both on the recorded faults, print and keep them."""
    parser = parser_of(__doc__)
    parser.add_argument("--crossvalidation", type=Path, help="write the cross-validation here")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        programs = fit.programs(Path(folder))
        recorded = {p.fault: p.evidence for p in programs if p.fault is not None}
        depend = decided(recorded)
        generated = [p.evidence for p in programs if p.fault is None][::SAMPLE]
        more = decided(dict(enumerate(generated)))
        numbers = {name: len(needs) for name, needs in sorted(depend.items())}
        numbers_of_both = {name: n + len(more[name]) for name, n in numbers.items()}
        figures = {
            "faults": len(recorded), "functions": len(functions()), "replaced": len(depend),
            "share of one or none": share_of_few(numbers), "generated programs": len(generated),
            "share of one or none, with those": share_of_few(numbers_of_both),
            "by_function": {name: [n, len(more[name])] for name, n in numbers.items()},
        }  # fmt: skip
        rows = fit.rows(programs)
        by_program, by_file = (tables_without(recorded, rows, of) for of in (tenth_of_programs, tenth_of_files))
        validation = {
            "by program": crossvalidated(recorded, depend, by_program, tenth_of_programs, tenth_of_programs),
            "by subject": crossvalidated(recorded, depend, by_file, subject, tenth_of_files),
            "the weights, by file": crossvalidated(recorded, {}, by_file, tenth_of_files, tenth_of_files),
        }
    print(json.dumps({**figures, "by_function": ..., "cross-validated": validation}, indent=1, default=str))
    for path, value in ((arguments.json, figures), (arguments.crossvalidation, validation)):
        if path is not None:
            path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
