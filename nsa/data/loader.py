"""Batches read ahead by torch's DataLoader in processes that know nothing of GPUs or process groups."""

import os
import signal
import threading
from collections.abc import Iterator

from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from nsa.config import Config, ConfigError
from nsa.data.packing import Batch, Position, Source, batches

AHEAD = 4  # batches per rank


class _Batches(IterableDataset["Batch | ConfigError"]):
    def __init__(self, source: Source, position: Position, size: int, rank: int, world_size: int) -> None:
        self.arguments = (source, position, size, rank, world_size)

    def __iter__(self) -> Iterator[Batch | ConfigError]:
        worker = get_worker_info()
        part, parts = (0, 1) if worker is None else (worker.id, worker.num_workers)
        try:
            yield from batches(*self.arguments, part, parts)
        except ConfigError as error:  # as a value: raised in a process it would come with that process's traceback
            yield error


def _obey_the_rank_alone(worker: int) -> None:
    """SIGTERM and Ctrl-C are for the rank, which wants its data until it has saved; from the rank, SIGTERM ends this process."""
    os.setpgid(0, 0)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def listen() -> None:
        while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
            pass
        os._exit(0)

    threading.Thread(target=listen, name="nsa-loader-sigterm", daemon=True).start()


class Loader:
    """This rank's batches from ``position`` on, some of them read ahead by ``data.workers`` processes (0: by none).

    Make it before CUDA is initialised and before the process group is: its processes are forks, and a fork that holds a
    group's connections would hide from the other ranks that this one has died.
    """

    def __init__(self, config: Config, source: Source, position: Position, rank: int, world_size: int) -> None:
        dataset = _Batches(source, position, config.train.batch_size, rank, world_size)
        workers = config.data.workers
        ahead = max(1, AHEAD // workers) if workers else None
        self._loader = DataLoader(
            dataset, batch_size=None, num_workers=workers, prefetch_factor=ahead,
            multiprocessing_context="fork" if workers else None, worker_init_fn=_obey_the_rank_alone,
        )  # fmt: skip
        self._batches = iter(self._loader)  # starts the processes

    def take(self) -> Batch:
        """Return the next batch. Raises what reading raised: ConfigError for data that cannot be used."""
        batch = next(self._batches)
        if isinstance(batch, ConfigError):
            raise batch
        return batch

    def close(self) -> None:
        """End the processes."""
        stop = getattr(self._batches, "_shutdown_workers", None)
        if stop is not None:
            stop()
