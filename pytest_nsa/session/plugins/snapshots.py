"""Pass the syrupy snapshots that ranks compared with to the host's session, which counts them as used and writes new values."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from pytest_nsa.evidence.snapshots import by_snapshot
from pytest_nsa.evidence.values import Evidence
from pytest_nsa.marks import named

# The attributes of syrupy's session and comparison that are used here. Versions 4.6 to 7 have them.
_SESSION = ("queue_snapshot_write", "ran_item", "register_request", "update_snapshots")
_COMPARISON = ("_assert", "executions", "extension", "index", "num_executions")


def not_carried(item: pytest.Item) -> Iterator[str]:
    """Yield an error message for a ranked test with snapshots that cannot be passed to the host. The run then updates no snapshot,
    as syrupy would delete these.
    """
    session = getattr(item.config, "_syrupy", None)
    if session is None or "snapshot" not in getattr(item, "fixturenames", ()):
        return
    compare = getattr(sys.modules.get("syrupy.assertion"), "SnapshotAssertion", None)
    missing = [n for n in _SESSION if not hasattr(session, n)] + [n for n in _COMPARISON if not hasattr(compare, n)]
    if missing:
        item.config.option.update_snapshots = False
        yield (
            f"{named(item)}: takes 'snapshot', and this version of syrupy has no {missing[0]}, by which "
            "ranks hand their snapshots over; this run updates none: install a version from 4.6 to 7, or compare in a test without "
            "ranks"
        )


def take_over(item: pytest.Function, evidence: Evidence, *, passed: bool) -> None:
    """Give syrupy's session each snapshot that ranks compared with, once.

    Values are written if the test ``passed``, as all ranks agree on them then. Of a test that failed nothing is written, but its
    snapshots count as used.
    """
    session = getattr(item.config, "_syrupy", None)
    found = by_snapshot({rank.rank: rank.snapshots for rank in evidence.ranks})
    if session is None or not found:
        return
    from syrupy.assertion import AssertionResult, SnapshotAssertion
    from syrupy.location import PyTestLocation

    place = PyTestLocation(item)
    made: dict[str, Any] = {}
    for of_ranks in found.values():
        snapshot = next(iter(of_ranks.values()))
        if snapshot.extension not in made:
            made[snapshot.extension] = SnapshotAssertion(
                session=session,
                extension_class=_class(snapshot.extension),
                test_location=place,
                update_snapshots=session.update_snapshots,
            )
        assertion = made[snapshot.extension]
        is_written = passed and snapshot.value is not None
        if is_written:
            session.queue_snapshot_write(
                extension=assertion.extension, test_location=place, data=snapshot.value, index=snapshot.index
            )
        assertion.executions[len(assertion.executions)] = AssertionResult(
            snapshot_location=snapshot.location,
            snapshot_name=snapshot.name,
            asserted_data=snapshot.value,
            recalled_data=None,
            created=is_written and snapshot.is_new,
            updated=is_written and not snapshot.is_new,
            success=is_written or all(s.matched for s in of_ranks.values()),
            exception=None,
            test_location=place,
        )


def _class(name: str) -> Any:
    """Return the class that a rank named 'module:name'; import its module if necessary."""
    module, _, path = name.partition(":")
    found: Any = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    return found
