"""A call that goes to ranks by pickle, as it would go to processes that a test starts: for `spawn` and `elastic`."""

import io
import os
import pickle
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import current_process
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
import torch.multiprocessing

from pytest_nsa import marked
from pytest_nsa.evidence.load import load
from pytest_nsa.observe.conclude import with_label_sources
from pytest_nsa.rank.context import current_rank
from pytest_nsa.report import terminal
from pytest_nsa.session.launch import Launch
from pytest_nsa.wire.files import write_atomically

_running: list[Launch] = []  # of the test that runs
_RUNS = 2  # a call that fails runs once more


@dataclass(frozen=True)
class Returned:
    """What ranks returned, by rank; for a call that failed ``report`` has its verdict, and ``ranks`` those to blame."""

    values: dict[int, Any]
    report: str = ""
    ranks: tuple[int, ...] = ()


class _Copies(pickle.Pickler):
    """Refuses tensors in shared memory, of which a rank would have a copy."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.is_shared():
            raise pickle.PicklingError("a tensor in shared memory")
        return NotImplemented


def _pickle(content: Any, *, copies: bool, readers: int) -> tuple[list[bytes], object]:
    """Return a pickle for each reader, or one for all, and what keeps the memory that they name.

    Without ``copies`` readers share the memory of tensors, by files that count the pickles.
    """
    if copies:
        data = io.BytesIO()
        _Copies(data).dump(content)
        return [data.getvalue()], None
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    made: list[bytes] = []
    picklers = []  # the memo of each has the tensors, also those that an object made for its pickle
    try:
        while not made or (len(made) < readers and b"rebuild_storage_filename" in made[0]):
            data = io.BytesIO()
            picklers.append(ForkingPickler(data))
            picklers[-1].dump(content)
            made.append(data.getvalue())
    finally:
        torch.multiprocessing.set_sharing_strategy(before)
    return made, picklers


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let each test that is not on ranks yet request the fixture `launch`."""
    for item in items:
        if isinstance(item, pytest.Function) and not marked.is_ranked(item) and "launch" not in item.fixturenames:
            item.fixturenames.append("launch")


@pytest.fixture(autouse=True)
def calls_on_ranks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run the calls of this test on ranks."""
    if current_rank() is not None or "launch" not in request.fixturenames:
        yield
        return
    _running.append(request.getfixturevalue("launch"))
    yield
    _running.pop()


def run(
    function: Any, arguments: Sequence[Any], world_size: int, *, takes_rank: bool, copies: bool = False
) -> Returned | None:
    """Call a function on ranks; None where it must run in processes: outside of a test, and where it is no pickle of values.

    With ``takes_rank`` its first argument is the rank. With ``copies`` it has copies of tensors, else the tensors' memory. Ranks
    have this process's variables and working directory.
    """
    if not _running or current_rank() is not None or not callable(function):
        return None
    content = dict(os.environ), os.getcwd(), bytes(current_process().authkey), function, tuple(arguments)
    try:
        pickles, kept = _pickle(content, copies=copies, readers=_RUNS * world_size)
    except Exception:  # whatever the reduction of an argument raises: a queue, a lock, a local function
        return None
    with tempfile.TemporaryDirectory() as folder:
        for number, data in enumerate(pickles):
            write_atomically(Path(folder, f"call{number}"), data)
        given = {"folder": folder, "takes_rank": takes_rank}
        outcome = _running[-1](call_function, world_size=world_size, backend=None, arguments=given, reruns=True)
        files = {rank: Path(folder, f"{rank}.pickle") for rank in range(world_size)}
        values = {rank: pickle.loads(path.read_bytes()) for rank, path in files.items() if path.exists()}
    del kept
    if outcome.passed:
        return Returned(values)
    verdict = outcome.verdict
    return Returned(values, terminal.failure(verdict, with_label_sources(load(outcome.folder), verdict)), verdict.ranks)


def call_function(rank: int, folder: str, takes_rank: bool) -> None:
    """Call what `run` has pickled, on a rank; its value is pickled."""
    context = current_rank()
    is_second = context is not None and context.job.flow
    own = Path(folder, f"call{_RUNS * rank + is_second}")
    path = own if own.exists() else Path(folder, "call0")
    variables, here, key, function, arguments = pickle.loads(path.read_bytes())
    os.environ.update(variables)
    os.chdir(here)
    current_process().authkey = key  # for a manager of the test's
    value = function(rank, *arguments) if takes_rank else function(*arguments)
    write_atomically(Path(folder, f"{rank}.pickle"), pickle.dumps(value))
