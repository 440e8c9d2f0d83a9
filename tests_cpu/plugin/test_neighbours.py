"""Ranked tests have the same outcomes with other plugins and without: a sample of `nox -s neighbours`."""

from __future__ import annotations

from importlib import metadata

import pytest

from benchmarks.neighbours import KINDS, NEIGHBOURS, Neighbour, compared, run


def is_installed(neighbour: Neighbour) -> bool:
    try:
        return bool(metadata.version(neighbour.distribution))
    except metadata.PackageNotFoundError:
        return False


@pytest.fixture(scope="module")
def without() -> dict[str, str]:
    """Return the outcomes of ranked tests without any other plugin."""
    return run(None)[0]


@pytest.mark.slow
def test_ranked_tests_with_other_plugins(without: dict[str, str]) -> None:
    """Of those that the extra `test` installs."""
    assert without["test_ranked_hang"].startswith("failure: ")
    differ = {}
    there = [n for n in NEIGHBOURS if is_installed(n)]
    for neighbour in there:
        found = compared(neighbour, run(neighbour)[0], without)
        wrong = {kind: found[kind] for kind in KINDS if found[kind] != without[f"test_ranked_{kind}"]}
        if wrong:
            differ[neighbour.distribution, neighbour.what] = wrong
    assert there
    assert differ == {}


@pytest.mark.parametrize(
    ("name", "options"), [("pytest-timeout", ("--timeout-method=thread",)), ("pytest-rerunfailures", ())]
)
def test_a_sample(name: str, options: tuple[str, ...], without: dict[str, str]) -> None:
    pytest.importorskip("pytest_rerunfailures")
    assert compared(Neighbour(name, options), run(Neighbour(name, options))[0], without)["junit"] == "same"
