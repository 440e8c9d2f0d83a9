"""The fixture `launch`: run a function on ranks from outside, and read the verdict that a test gets back."""

import inspect
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pytest_nsa.diagnosis.verdict import Verdict
from pytest_nsa.marks import BACKENDS, MAX_WORLD_SIZE
from pytest_nsa.rank.context import current_rank
from pytest_nsa.report.terminal import headline
from pytest_nsa.session.folders import safe_name
from pytest_nsa.session.items import runner_key, timeout_key
from pytest_nsa.system.clock import wall_clock
from pytest_nsa.wire.messages import Job, plain_nodeid


class Outcome:
    """The verdict on a launched function, and the folder with its evidence.

    A test that reads neither ``verdict`` nor ``passed`` of a function that failed fails at its end.
    """

    def __init__(self, *, verdict: Verdict, folder: Path, world_size: int) -> None:
        self._verdict, self.folder, self.world_size = verdict, folder, world_size
        self._is_read = False

    @property
    def verdict(self) -> Verdict:
        """What the ranks did."""
        self._is_read = True
        return self._verdict

    @property
    def passed(self) -> bool:
        """Whether every rank returned."""
        return self.verdict.outcome == "PASS"

    @property
    def is_unread_failure(self) -> bool:
        """Whether the function failed and the test has not looked."""
        return self._verdict.failed and not self._is_read

    def output(self, rank: int) -> str:
        """Return what a rank wrote to stdout and stderr."""
        path = self.folder / f"rank{rank}" / "output.log"
        return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


failed_key = pytest.StashKey[bool]()
launched_key = pytest.StashKey[list[Verdict]]()

Launch = Callable[..., Outcome]


def launching(request: pytest.FixtureRequest) -> Iterator[Launch]:
    """Yield the value of the fixture `launch`; at the test's end, keep or remove what its ranks left."""
    outcomes: list[Outcome] = []
    verdicts: list[Verdict] = []
    request.node.stash[launched_key] = verdicts

    def run(
        function: Callable[..., Any],
        *,
        world_size: int = 2,
        timeout: float | None = None,
        backend: str | None = "gloo",
        arguments: dict[str, Any] | None = None,
        reruns: bool = False,
    ) -> Outcome:
        __tracebackhide__ = True
        runner = request.config.stash[runner_key]
        outer = request.node.stash.get(timeout_key, None)
        if timeout is None:
            timeout = runner.settings.timeout if outer is None else min(runner.settings.timeout, 0.8 * outer)
        _check(function, world_size, timeout, outer, arguments or {})
        if backend not in (*BACKENDS, None):
            raise ValueError(
                f"launch({function.__qualname__}, backend={backend!r}): must be one of {', '.join(BACKENDS)}, None"
            )
        nodeid = plain_nodeid(request.node.nodeid)
        folder = runner.folder.test_folder(safe_name(runner.shown_id(request.session, nodeid)), range(world_size))
        job = Job(
            nodeid=nodeid,
            folder=str(folder),
            root=str(request.config.rootpath),
            world_size=world_size,
            backend=backend or "",
            timeout=timeout,
            function=f"{function.__module__}:{function.__qualname__}",
            arguments=arguments or {},
            fsdp_version=runner.settings.fsdp_version,
            created=wall_clock(),
        )
        verdict, folder = runner.run_function(request.node, job, reruns=reruns)
        verdicts.append(verdict)
        outcomes.append(Outcome(verdict=verdict, folder=folder, world_size=world_size))
        return outcomes[-1]

    yield run
    runner = request.config.stash[runner_key]
    failed = request.node.stash.get(failed_key, False)
    unread = next((o for o in outcomes if o.is_unread_failure), None) if not failed else None
    if failed or unread is not None:
        # The planted fault of a test that passes is not a failure of the run; of one that fails it is evidence.
        for outcome in outcomes:
            runner.recorder.add(outcome.folder, outcome.verdict)
    elif not runner.settings.keep_passed:
        for outcome in outcomes:
            shutil.rmtree(outcome.folder, ignore_errors=True)
    if unread is not None:
        pytest.fail(f"launch: {headline(unread.verdict)}: the test did not read outcome.verdict", pytrace=False)


def _check(function: Any, world_size: int, timeout: float, outer: float | None, arguments: dict[str, Any]) -> None:
    name = getattr(function, "__qualname__", repr(function))
    if current_rank() is not None:
        raise RuntimeError(
            f"launch({name}): called on a rank; a test with `launch` takes no world_size, ddp, fsdp or group"
        )
    if "<locals>" in name or "<lambda>" in name or "." in name:
        raise ValueError(
            f"launch({name}): the function must be at the top level of its module, so that ranks find it by name"
        )
    if (
        inspect.iscoroutinefunction(function)
        or inspect.isgeneratorfunction(function)
        or inspect.isasyncgenfunction(function)
    ):
        raise ValueError(
            f"launch({name}): a call does not run its body; give a plain function, which may call asyncio.run"
        )
    if type(world_size) is not int or not 1 <= world_size <= MAX_WORLD_SIZE:
        raise ValueError(f"launch({name}, world_size={world_size!r}): must be from 1 to {MAX_WORLD_SIZE}")
    if type(timeout) not in (int, float) or not timeout > 0:
        raise ValueError(f"launch({name}, timeout={timeout!r}): must be a number of seconds above 0")
    if outer is not None and timeout >= outer:
        raise ValueError(f"launch({name}, timeout={timeout:g}): must be below the test's own timeout of {outer:g} s")
    if not isinstance(arguments, dict):
        raise ValueError(f"launch({name}, arguments={arguments!r}): must be a dict, as in {{'steps': 3}}")
    try:
        json.dumps(arguments)
    except (TypeError, ValueError) as error:
        raise ValueError(f"launch({name}, arguments=...): only values that JSON can hold: {error}") from None
    unknown = ", ".join(sorted(arguments.keys() - inspect.signature(function).parameters.keys()))
    if unknown:
        raise ValueError(f"launch({name}, arguments=...): the function has no parameter {unknown}")


def find_artifacts(request: pytest.FixtureRequest) -> Path:
    """Return the value of the fixture `artifacts`."""
    rank = current_rank()
    if rank is not None:
        return Path(rank.job.folder)
    runner = request.config.stash[runner_key]
    return runner.folder.test_folder(safe_name(runner.shown_id(request.session, plain_nodeid(request.node.nodeid))))
