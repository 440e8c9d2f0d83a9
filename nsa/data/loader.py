"""Batches read ahead by torch's DataLoader in processes of their own, which know nothing of GPUs or process groups."""

from __future__ import annotations

from collections.abc import Iterator

from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from nsa.config import Config
from nsa.data.packing import Batch, Position, Source, batches


class _Batches(IterableDataset[Batch]):
    def __init__(self, source: Source, position: Position, size: int, rank: int, world_size: int) -> None:
        self.arguments = (source, position, size, rank, world_size)

    def __iter__(self) -> Iterator[Batch]:
        worker = get_worker_info()
        part, parts = (0, 1) if worker is None else (worker.id, worker.num_workers)
        return batches(*self.arguments, part, parts)


class Loader:
    """This rank's batches from ``position`` on, ``data.prefetch`` of them read ahead by ``data.workers`` processes (0: by none).

    Make it before CUDA is initialised and before the process group is: its processes are forks, and a fork that holds a
    group's connections would hide from the other ranks that this one has died.
    """

    def __init__(self, config: Config, source: Source, position: Position, rank: int, world_size: int) -> None:
        dataset = _Batches(source, position, config.train.batch_size, rank, world_size)
        workers = config.data.workers
        ahead = max(1, config.data.prefetch // workers) if workers else None
        self._loader = DataLoader(
            dataset, batch_size=None, num_workers=workers, prefetch_factor=ahead,
            multiprocessing_context="fork" if workers else None,
        )  # fmt: skip
        self._batches = iter(self._loader)  # starts the processes

    def take(self) -> Batch:
        """The next batch. Raises what reading raised: ConfigError for data that cannot be used."""
        return next(self._batches)

    def close(self) -> None:
        """End the processes."""
        stop = getattr(self._batches, "_shutdown_workers", None)
        if stop is not None:
            stop()
