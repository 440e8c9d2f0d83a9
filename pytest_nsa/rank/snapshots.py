"""Snapshots that a rank compares with: syrupy's are recorded for the host, which writes them; inline-snapshot's are refused."""

from __future__ import annotations

import sys
from typing import Any, NoReturn

import pytest

from nsa.trace.frames import call_site
from pytest_nsa.evidence.snapshots import FILE, Snapshot, as_record
from pytest_nsa.rank.context import current_rank
from pytest_nsa.wire.files import LARGEST as LARGEST_FILE
from pytest_nsa.wire.files import append_line

LARGEST = LARGEST_FILE // 2  # bytes of snapshots per rank and test: the host reads the whole file


def carry_snapshots(config: pytest.Config) -> None:
    """Write each comparison with a syrupy snapshot to ``snapshots.jsonl`` at once; the host writes syrupy's files.

    So the host knows which snapshots are used even if a rank hangs later.
    """
    comparison: Any = getattr(sys.modules.get("syrupy.assertion"), "SnapshotAssertion", None)
    compare = getattr(comparison, "_assert", None)
    if getattr(config, "_syrupy", None) is None or compare is None:  # the host refuses tests of a version without it
        return

    def compare_and_record(self: Any, data: Any) -> bool:
        index, extension = self.index, self.extension
        extension.write_immediately = False  # versions that have it would write from each rank
        passed: bool = compare(self, data)
        rank = current_rank()
        if rank is not None:
            snapshot = _snapshot(self.executions[self.num_executions - 1], index, type(extension))
            append_line(rank.folder / FILE, as_record(snapshot))
            if (rank.folder / FILE).stat().st_size > LARGEST:
                _fail(
                    snapshot.name, f"a test's snapshots have at most {LARGEST >> 20} MiB: compare parts, or checksums"
                )
        return passed

    comparison._assert = compare_and_record


def _fail(name: str, problem: str) -> NoReturn:
    pytest.fail(f"snapshot {name!r}: {problem}", pytrace=False)


def _snapshot(result: Any, index: int | str, extension: type) -> Snapshot:
    """Return a comparison of syrupy as a record. Fails the test if the host cannot load the extension."""
    value = result.asserted_data if result.created or result.updated else None
    if "<locals>" in extension.__qualname__:
        _fail(
            result.snapshot_name,
            f"the extension {extension.__name__} is made inside a function, where the host, which keeps the snapshots, "
            "cannot find it: define it at the top level of a module",
        )
    return Snapshot(
        name=result.snapshot_name,
        location=result.snapshot_location,
        index=index,
        extension=f"{extension.__module__}:{extension.__qualname__}",
        where=call_site(2),
        matched=bool(result.success and value is None),
        is_new=bool(result.created),
        value=value,
    )


def unwritten_inline_snapshots() -> str:
    """Return, after a test's body, the error for snapshot() calls without the right value; '' without any.

    inline-snapshot writes values into the source at the end of the host's session, which does not know a rank's values. Its own
    message promises that they are written, so its counts are reset.
    """
    module = sys.modules.get("inline_snapshot._global_state")
    if module is None:
        return ""
    state = module.state()
    is_unwritten = state.missing_values or state.incorrect_values
    state.missing_values = state.incorrect_values = 0
    return (
        "inline-snapshot: a snapshot() has no value, or not the one of this rank, and ranks write none: write it by hand, or "
        "create it in a test without ranks"
        if is_unwritten
        else ""
    )
