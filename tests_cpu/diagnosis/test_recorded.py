"""The rules on recorded evidence: every fault gets the verdict of its row from its folder alone, in milliseconds."""

from dataclasses import replace
from pathlib import Path
from types import FunctionType

import pytest

from pytest_nsa.diagnosis import words
from pytest_nsa.diagnosis.engine import diagnose
from pytest_nsa.evidence.load import load
from tests_cpu.faults.recorded import unpack
from tests_cpu.faults.rows import faults, list_archives

ARCHIVES = list_archives()


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Path]]:
    """Return the recorded folders by archive and test."""
    return {archive: unpack(archive, tmp_path_factory.mktemp("archive")) for archive in ARCHIVES}


@pytest.mark.parametrize(("archive", "name"), [(a, n) for a in ARCHIVES for n in faults(a)])
def test_the_verdict_from_a_recorded_folder(archive: str, name: str, recorded: dict[str, dict[str, Path]]) -> None:
    """The sources that the ranks ran are in no file here: /tests and /repo do not exist."""
    evidence, expected = load(recorded[archive][name]), faults(archive)[name]
    verdict = diagnose(evidence)
    assert (
        max(len(verdict.ranks), 2) < len(evidence.ranks) or "the others" not in verdict.explanation
    )  # there are none, or one
    if expected.miss:
        is_named = expected.names(verdict.cause, verdict.ranks)
        assert is_named or not verdict.certain
        assert not (is_named and expected.allows(verdict.where)), "right by now: remove its miss"
        pytest.xfail(expected.miss)
    assert expected.names(verdict.cause, verdict.ranks), verdict.reason
    assert expected.allows(verdict.where), verdict.where
    assert expected.reason in verdict.explanation
    assert verdict.rule


def test_without_counters_no_certain_verdict_is_wrong(recorded: dict[str, dict[str, Path]]) -> None:
    """As in a training that is only watched, and where a rank holds the GIL: less is known, and less is certain."""
    for archive in ARCHIVES:
        for name, expected in faults(archive).items():
            evidence = load(recorded[archive][name])
            ranks = tuple(r if r.exceptions else replace(r, counters=()) for r in evidence.ranks)
            verdict = diagnose(replace(evidence, ranks=ranks))
            assert not verdict.certain or expected.names(verdict.cause, verdict.ranks), name


def test_a_rank_that_fell_before_the_stop_makes_it_a_crash(recorded: dict[str, dict[str, Path]]) -> None:
    """Gloo aborts a rank that receives an unexpected message: whether the others still waited when they were stopped is chance."""
    evidence = load(recorded["collectives_on_devices"]["test_another_size"])
    assert evidence.stop
    assert diagnose(evidence).outcome == "CRASH"
    late = tuple(replace(r, exit_time=evidence.stop_time + 0.1) for r in evidence.ranks)
    assert diagnose(replace(evidence, ranks=late)).outcome == "HANG"


def test_no_verdict_depends_on_words(recorded: dict[str, dict[str, Path]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Text is never control flow: with empty words each verdict has the same cause, ranks and line."""
    evidence = [load(recorded[a][name]) for a in ARCHIVES for name in list(faults(a))[::3]]
    before = [diagnose(of) for of in evidence]
    empty = {"str": lambda *_, **__: "", "dict[str, float]": lambda *_, **__: {}}
    found = [f for f in vars(words).values() if isinstance(f, FunctionType) and f.__module__ == words.__name__]
    makers = [f for f in found if f.__annotations__["return"] in empty]
    for function in makers:
        monkeypatch.setattr(function, "__code__", empty[function.__annotations__["return"]].__code__)
    after = [diagnose(of) for of in evidence]
    assert len(makers) > 10
    assert [v.explanation for v in after] != [v.explanation for v in before]
    assert [(v.cause, v.ranks, v.where, v.certain) for v in after] == [
        (v.cause, v.ranks, v.where, v.certain) for v in before
    ]
