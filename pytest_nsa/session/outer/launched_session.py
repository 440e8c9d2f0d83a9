"""A session of a pytest process that hosts one rank of every test, as leader or as follower."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_nsa.session.outer.attachment import Attachment
from pytest_nsa.session.outer.hooks import OuterHooks
from pytest_nsa.session.ranked_session import RankedSession, needs_ranks, only_lists
from pytest_nsa.settings import OuterLauncher, Settings


class LaunchedSession(RankedSession):
    """Under torchrun or SLURM."""

    def __init__(self, config: pytest.Config, settings: Settings, *, is_late: bool) -> None:
        assert settings.outer is not None
        self.outer: OuterLauncher = settings.outer
        super().__init__(config, settings)
        if is_late:
            self.hooks.pytest_sessionstart()

    def make_group(self) -> Attachment:
        """Return the part of this process among the others of the launcher."""
        self.attachment = Attachment(self.outer)
        return self.attachment

    def register(self) -> None:
        """Register the hooks of this mode."""
        self.register_hang_lines()
        self.hooks = OuterHooks(self.config, self.settings, self.outer, self.attachment)
        self.config.pluginmanager.register(self.hooks, "nsa-outer")

    def finish_collection(self, session: pytest.Session) -> None:
        """Decide whether this process is a follower: only where a test runs on ranks."""
        super().finish_collection(session)
        self.hooks.begin(session, has_ranks=self.wants_ranks(session))
        self.writes_reports = self.attachment.leads
        self.signals.defers = self.hooks.follows
        self.signals.take()

    def start(self, session: pytest.Session) -> None:
        """Start the clock before this process has connections, then what tests on ranks need."""
        if not only_lists(self.config):
            self.hooks.start_clock()
        super().start(session)
        self.hooks.note_run()

    def start_ranks(self, session: pytest.Session) -> None:
        """Start the launcher, then meet the other processes, and agree on the tests."""
        super().start_ranks(session)
        self.attachment.meet([item.nodeid for item in session.items if needs_ranks(item)])

    def begin_item(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
        """Leave a test to the leader where it runs there alone."""
        super().begin_item(item, nextitem)
        return True if self.hooks.leaves_to_leader(item) else None

    def take_limit(self, item: pytest.Item, limit: Any) -> bool | None:
        """Note the limit for the clock."""
        self.hooks.bound(item, limit.timeout)
        return super().take_limit(item, limit)
