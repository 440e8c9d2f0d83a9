"""From an item to the job that its ranks are given."""

from __future__ import annotations

import inspect
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from pytest_nsa import marked
from pytest_nsa.session.bisect import Variation
from pytest_nsa.session.needs import Needs, read_tracing
from pytest_nsa.settings import Settings
from pytest_nsa.system.clock import wall_clock
from pytest_nsa.system.leases import Lease
from pytest_nsa.wire.messages import Job, plain_nodeid


def make_job(
    item: pytest.Function,
    folder: Path,
    needs: Needs,
    leases: Mapping[str, Lease],
    settings: Settings,
    *,
    timeout: float,
    values: dict[str, Any],
    tried: Variation | None,
    readings: Mapping[str, str],
    next_needs: Needs | None,
    debugger: str,
) -> Job:
    """Build the job of a collected test, whose evidence goes to ``folder``.

    ``values`` are those of host fixtures; ``tried`` is what a bisection changes; ``readings`` maps a plan's scenarios to what
    their failures mean. Ranks that are reused stay if the next test needs the same (``next_needs``). ``debugger`` is the name
    of the socket that lends the terminal, or ''.
    """
    name = get_scenario(item, tried)
    return Job(
        nodeid=plain_nodeid(item.nodeid),
        scenario=name,
        reads_as=marked.option(item, "scenario", "reads_as", readings.get(name, "")) if name else "",
        folder=str(folder),
        root=str(item.config.rootpath),
        timeout=timeout,
        created=wall_clock(),
        seed=random.SystemRandom().getrandbits(64) if tried is None or tried.seed is None else tried.seed,
        values=values,
        overrides=dict(tried.fixtures) if tried is not None else {},
        tmp=_temporary_folder(item),
        world_size=needs.world_size,
        backend=needs.backend,
        device=needs.device,
        flow=tried is not None and tried.flow,
        reuse=needs.reuse,
        environment=needs.environment,
        fresh_group=bool(needs.reuse) and marked.option(item, "reuse", "group") == "fresh",
        stay=bool(needs.reuse) and needs == next_needs,
        gpus=",".join(leases["gpu"].names) if "gpu" in leases else "",
        cores=",".join(leases["core"].names) if "core" in leases else "",
        in_use=tuple(path for lease in leases.values() for path in lease.in_use),
        debugger=debugger,
        debug_rank=settings.debug_rank,
        body=_get_file(item),
        hash_seeds=marked.get_hash_seeds(item, needs.world_size),
        **read_tracing(item, settings),
    )


def _get_file(item: pytest.Function) -> str:
    """Return the file that defines the test's function; for a method of a base class, it may be in an installed package."""
    code = getattr(inspect.unwrap(item.function), "__code__", None)
    return code.co_filename if code is not None else ""


def get_scenario(item: pytest.Function, tried: Variation | None) -> str:
    """Return the scenario that a test is; '' for any other test, and for a run of a bisection."""
    name: str = "" if tried is not None else marked.value(item, "scenario", "")
    return name


def _temporary_folder(item: pytest.Function) -> str:
    """Return a folder for the ranks' tmp_path, made by pytest's own factory; '' if the test takes none and cannot request one
    by `request`.

    Its name is short: tests put Unix sockets into tmp_path, and the path of one has 107 characters.
    """
    if not any(fixture == "request" or fixture.startswith("tmp") for fixture in item.fixturenames):
        return ""
    return str(item.config._tmp_path_factory.mktemp("ranks"))  # type: ignore[attr-defined]
