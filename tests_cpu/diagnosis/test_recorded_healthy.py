"""Healthy programs inside their longest pause, replayed: nothing that the rules make of them ends a test or names a new cause.

A pause of more than 3 s in which others wait may be announced, as a suspicion (`observe/observer`): those that were, when the
program was recorded, are in its `asked.json`.
"""

import json
import tarfile
from pathlib import Path

import pytest

from pytest_nsa.diagnosis import engine
from pytest_nsa.diagnosis.engine import suspect
from pytest_nsa.diagnosis.verdict import Finding
from pytest_nsa.evidence.load import load
from pytest_nsa.evidence.values import Evidence
from pytest_nsa.observe.observer import AnnounceDelay
from tests_cpu.faults.questions import read_past
from tests_cpu.faults.recorded import HEALTHY, unpack_healthy


def recorded_tests() -> list[tuple[str, str]]:
    """Return (module, test) of each recorded moment."""
    found = set()
    for archive in HEALTHY.glob("*.tar.xz"):
        with tarfile.open(archive) as packed:
            found |= {(archive.name.removesuffix(".tar.xz"), name.partition("/")[0]) for name in packed.getnames()}
    return sorted(found)


@pytest.fixture(scope="session")
def moments(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Path]]:
    """Return the recorded folders by module and test."""
    modules = sorted({module for module, _ in recorded_tests()})
    return {module: unpack_healthy(module, tmp_path_factory.mktemp(module)) for module in modules}


def decided(folder: Path) -> tuple[Finding | None, bool, bool]:
    """Return what the rules suspect, whether it would be announced, and whether it would be announced as work."""
    evidence = load(folder)
    found = suspect(evidence)
    if found is None:
        return None, False, False
    facts = json.loads((folder / "asked.json").read_text(encoding="utf-8"))
    waits = [seconds for rank, seconds in facts["waits"].items() if int(rank) in found.ranks]
    delay = AnnounceDelay()
    is_due = delay.is_due(found, evidence, read_past(facts), min(waits, default=facts["longest_wait"]))
    return found, is_due, delay.at_work


@pytest.mark.parametrize(("module", "name"), recorded_tests())
def test_a_healthy_program_in_its_longest_pause_is_not_blamed(
    module: str, name: str, moments: dict[str, dict[str, Path]]
) -> None:
    found, is_due, at_work = decided(moments[module][name])
    if found is not None:
        assert not found.ends_the_test, found
        announced = json.loads((moments[module][name] / "asked.json").read_text(encoding="utf-8"))["announced"]
        assert not is_due or at_work or [found.cause, list(found.ranks)] in announced, found


def test_a_rule_that_blames_whoever_is_waited_for_is_noticed(
    moments: dict[str, dict[str, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def eager(evidence: Evidence) -> Finding | None:
        slow = tuple(r.rank for r in evidence.ranks if not r.is_waiting)
        return Finding(cause="skipped_collective", ranks=slow, where="", reason="", confidence=0.9, certain=True)

    monkeypatch.setattr(engine, "SUSPICIONS", (eager,))
    blamed = [decided(folder)[0] for folders in moments.values() for folder in folders.values()]
    assert blamed
    assert all(found is not None and found.ends_the_test for found in blamed)
