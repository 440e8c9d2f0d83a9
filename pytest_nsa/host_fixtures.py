"""Fixtures that the host makes once; the ranks get their values: a folder, a data set, a server's address.

Every other fixture of a test on ranks is made in each rank, for that test alone, whatever its scope.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

_MARK = "__nsa_host_fixture__"


def host_fixture(*, scope: str = "session", name: str | None = None) -> Callable[[Callable[..., Any]], Any]:
    """Declare a fixture that is made on the host; every rank gets its value::

        @host_fixture(scope="session")
        def corpus(tmp_path_factory):
            path = tmp_path_factory.mktemp("corpus") / "text.bin"
            path.write_bytes(...)
            return path

    The value must be a Path, or what JSON can hold; tests on the host get it unchanged.
    """

    def declare(function: Callable[..., Any]) -> Any:
        setattr(function, _MARK, True)
        return pytest.fixture(scope=scope, name=name)(function)  # type: ignore[call-overload]

    return declare


def _definitions(item: pytest.Function) -> dict[str, Any]:
    """Return the host fixtures among those that a test uses, by name."""
    found = {name: definitions[-1] for name, definitions in item._fixtureinfo.name2fixturedefs.items() if definitions}
    return {name: d for name, d in found.items() if getattr(d.func, _MARK, False)}


def make_host_values(item: pytest.Function) -> dict[str, Any]:
    """Return the values of a test's host fixtures in a form that JSON can hold, made on the host in the test's setup.

    Raises TypeError for a value that is neither a Path nor what JSON can hold.
    """
    values = {}
    for name in _definitions(item):
        value = item._request.getfixturevalue(name)
        encoded = {"path": str(value)} if isinstance(value, Path) else {"value": value}
        try:
            json.dumps(encoded)
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"host_fixture {name!r}: its value must be a Path, or what JSON can hold: {error}"
            ) from None
        values[name] = encoded
    return values


def take_host_values(item: pytest.Item, values: dict[str, Any]) -> None:
    """In a rank, let the host fixtures return the host's values; the fixtures that they alone use are not made here."""
    if not values:
        return
    assert isinstance(item, pytest.Function)
    for name, definition in _definitions(item).items():
        encoded = values[name]
        value = Path(encoded["path"]) if "path" in encoded else encoded["value"]
        definition.func, definition.argnames = _returning(value), ()
    item.fixturenames[:] = made_in_ranks(item)


def _returning(value: Any) -> Callable[[], Any]:
    """Return a fixture function that still counts as the host's: ranks that are reused take the next test's value."""

    def taken() -> Any:
        return value

    setattr(taken, _MARK, True)
    return taken


def made_in_ranks(item: pytest.Function) -> list[str]:
    """Return the fixtures that each rank makes, in pytest's order: without those that host fixtures alone use."""
    info = item._fixtureinfo
    needed, todo = set(), [*info.initialnames]
    while todo:
        name = todo.pop()
        if name in needed:
            continue
        needed.add(name)
        definition = info.name2fixturedefs[name][-1] if info.name2fixturedefs.get(name) else None
        if definition is not None and not getattr(definition.func, _MARK, False):
            todo += definition.argnames
    return [name for name in item.fixturenames if name in needed]
