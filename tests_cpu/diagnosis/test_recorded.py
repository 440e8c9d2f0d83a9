"""The rules on recorded evidence: every planted fault gets its verdict from its folder alone, in milliseconds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import FunctionType

import pytest

from pytest_nsa.diagnosis import words
from pytest_nsa.diagnosis.engine import diagnose
from pytest_nsa.evidence.load import load
from tests_cpu.faults.recorded import unpack
from tests_cpu.faults.test_corpus import MODULES, faults, planted_module


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Path]]:
    """Return the recorded folders by module and test."""
    return {module: unpack(module, tmp_path_factory.mktemp(module)) for module in MODULES}


@pytest.mark.parametrize(("module", "name"), [(m, n) for m in MODULES for n in faults(m)])
def test_the_verdict_from_a_recorded_folder(module: str, name: str, recorded: dict[str, dict[str, Path]]) -> None:
    """The sources that the ranks ran are in no file here: /tests and /repo do not exist."""
    assert name in recorded[module], "record it: pytest tests_cpu/faults -m 'slow or not slow' --record"
    evidence, expected = load(recorded[module][name]), faults(module)[name]
    verdict = diagnose(evidence)
    assert (
        max(len(verdict.ranks), 2) < len(evidence.ranks) or "the others" not in verdict.reason
    )  # there are none, or one
    if expected.miss:
        is_named = (verdict.cause, verdict.ranks) == (expected.cause, expected.ranks)
        assert is_named or not verdict.certain
        assert not (is_named and expected.allows(verdict.where, planted_module(module))), (
            "right by now: take its miss= out"
        )
        pytest.xfail(expected.miss)
    assert (verdict.cause, verdict.ranks) == (expected.cause, expected.ranks), verdict.reason
    assert expected.allows(verdict.where, planted_module(module)), verdict.where
    assert expected.reason in verdict.reason
    assert verdict.rule


def test_without_counters_no_certain_verdict_is_wrong(recorded: dict[str, dict[str, Path]]) -> None:
    """As in a training that is only watched, and where a rank holds the GIL: less is known, and less is certain."""
    for module in MODULES:
        for name, expected in faults(module).items():
            evidence = load(recorded[module][name])
            ranks = tuple(r if r.exceptions else replace(r, counters=()) for r in evidence.ranks)
            verdict = diagnose(replace(evidence, ranks=ranks))
            assert not verdict.certain or (verdict.cause, verdict.ranks) == (expected.cause, expected.ranks), name


def test_a_rank_that_fell_before_the_stop_makes_it_a_crash(recorded: dict[str, dict[str, Path]]) -> None:
    """Gloo aborts a rank that receives an unexpected message: whether the others still waited when they were stopped is chance."""
    evidence = load(recorded["collectives_on_devices"]["test_another_size"])
    assert evidence.stop
    assert diagnose(evidence).outcome == "CRASH"
    late = tuple(replace(r, exit_time=evidence.stop_time + 0.1) for r in evidence.ranks)
    assert diagnose(replace(evidence, ranks=late)).outcome == "HANG"


def test_no_verdict_depends_on_words(recorded: dict[str, dict[str, Path]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Text is never control flow: with empty words each verdict has the same cause, ranks and line."""
    evidence = [load(recorded[m][name]) for m in MODULES for name in list(faults(m))[::3]]
    before = [diagnose(of) for of in evidence]
    empty = {"str": lambda *_, **__: "", "dict[str, float]": lambda *_, **__: {}}
    found = [f for f in vars(words).values() if isinstance(f, FunctionType) and f.__module__ == words.__name__]
    makers = [f for f in found if f.__annotations__["return"] in empty]
    for function in makers:
        monkeypatch.setattr(function, "__code__", empty[function.__annotations__["return"]].__code__)
    after = [diagnose(of) for of in evidence]
    assert len(makers) > 10
    assert [v.reason for v in after] != [v.reason for v in before]
    assert [(v.cause, v.ranks, v.where, v.certain) for v in after] == [
        (v.cause, v.ranks, v.where, v.certain) for v in before
    ]
