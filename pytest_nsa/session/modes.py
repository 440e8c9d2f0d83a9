"""What the hooks of `plugin` do in this process, by its mode."""

import pytest

from pytest_nsa.session.ranked_session import ChildSession, RankedSession, WorkerSession
from pytest_nsa.settings import Mode, resolve


def begin(config: pytest.Config, *, is_late: bool) -> RankedSession:
    """Resolve the settings, and return the session of this process's mode. Raises UsageError.

    ``is_late``: the session has started.
    """
    settings = resolve(config)
    match settings.mode:
        case Mode.CHILD:
            return ChildSession(config, settings)
        case Mode.WORKER:
            return WorkerSession(config, settings)
        case Mode.LEADER | Mode.FOLLOWER:
            from pytest_nsa.session.outer.hooks import LaunchedSession

            return LaunchedSession(config, settings, is_late=is_late)
    return RankedSession(config, settings)
