"""Count the batches that torch's data loaders deliver, as progress of the rank, and the loaders that are exhausted."""

from typing import Any

from torch.utils.data import dataloader

from nsa.trace.board import Board


def count_batches(board: Board) -> None:
    """Count on ``board`` each batch of a DataLoader of this process, and each iterator that is exhausted."""
    iterator: Any = dataloader._BaseDataLoaderIter
    following = iterator.__next__

    def counted(self: Any) -> Any:
        __tracebackhide__ = True
        try:
            batch = following(self)
        except StopIteration:
            board.add("loaders_ended")
            raise
        board.add("batches")
        board.add("progress")
        return batch

    iterator.__next__ = counted
