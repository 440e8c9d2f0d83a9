"""Keep --snapshot-update from deleting syrupy snapshots that a ranked test has not reached."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest

from pytest_nsa.session.items import Ranked, verdict_key
from pytest_nsa.session.launch import failed_key


class UnreachedSnapshots:
    """Registered on every host: a snapshot that a ranked test has not reached may be in use, so it is not deleted."""

    @pytest.hookimpl(wrapper=True)  # before syrupy's own
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> Generator[None, Any, Any]:
        """Report to syrupy as skipped: a test that did not pass on its ranks; after a usage error all tests, as none was run."""
        ran_item: Any = getattr(getattr(session.config, "_syrupy", None), "ran_item", None)
        items = getattr(session, "items", ())  # a session that collected nothing has none
        for item in items if ran_item is not None else ():
            if exitstatus == pytest.ExitCode.USAGE_ERROR or (isinstance(item, Ranked) and _is_unreached(item)):
                ran_item(item.nodeid, "skipped")
        return (yield)


def _is_unreached(item: pytest.Item) -> bool:
    """Return whether a ranked test did not pass. A test that this xdist worker has not run, another worker runs."""
    verdict = item.stash.get(verdict_key, None)
    was_run = verdict is not None or item.stash.get(failed_key, False)
    return (verdict is None or verdict.outcome != "PASS") and (was_run or not hasattr(item.config, "workerinput"))
