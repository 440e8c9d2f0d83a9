"""A cold rank: a new interpreter that collects the tests itself, then becomes the one rank it was started for."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from pytest_nsa.spawn.zygote import by_nodeid
from pytest_nsa.system.prctl import write_lines_at_once
from pytest_nsa.wire.messages import Job


class ColdSession:
    """Registered where the environment names a job: replaces the test loop."""

    def __init__(self, spec: Path) -> None:
        self.spec = spec

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        from pytest_nsa.rank.process import EXIT_FAILED, RankProcess, seed_alike

        data = json.loads(self.spec.read_text(encoding="utf-8"))
        job = Job.from_json(data["job"])
        code = EXIT_FAILED
        try:
            seed_alike(job.seed)
            write_lines_at_once()
            rank = RankProcess(
                data["rank"], job.group_spec, Path(job.folder) / "store", by_nodeid(session.items), ports=data["ports"]
            )
            code = rank.run(job)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
