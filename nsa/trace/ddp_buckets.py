"""A DDP communication hook that reports each bucket and then reduces it exactly as DDP does without a hook."""

# DDP compares a hook's annotations with classes, so they must not be postponed to strings here.
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from nsa.trace import logger

Listener = Callable[[dist.GradBucket], None]


@dataclass
class BucketHook:
    """State of the hook: the group, and who wants to hear of buckets."""

    group: dist.ProcessGroup
    listeners: list[Listener] = field(default_factory=list)


def _reduce(state: BucketHook, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    for listener in state.listeners:
        listener(bucket)
    # DDP multiplies by 1/n before it sums; dividing would round differently when n is no power of two.
    buffer = bucket.buffer().mul_(1.0 / state.group.size())
    work = dist.all_reduce(buffer, group=state.group, async_op=True)
    assert work is not None
    return work.get_future().then(lambda future: future.value()[0])


def ensure_hook(ddp: DistributedDataParallel) -> BucketHook | None:
    """The hook of ``ddp``, registered on first use; None where a hook of somebody else's is there already."""
    state = getattr(ddp, "_nsa_bucket_hook", None)
    if state is None and not getattr(ddp, "_comm_hooks", None) and getattr(ddp, "mixed_precision", None) is None:
        state = BucketHook(ddp.process_group)
        ddp.register_comm_hook(state, _reduce)
        ddp._nsa_bucket_hook = state
    return state


class BucketTrace:
    """Logs ``[DDP] rank=0 bucket_elems=1048576 dtype=torch.float32`` for each bucket."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.buckets: list[tuple[int, str]] = []

    def attach(self, ddp: DistributedDataParallel) -> bool:
        """Listen to ``ddp``'s buckets; False, and a line that says so, when its hook is somebody else's."""
        state = ensure_hook(ddp)
        if state is None:
            logger.warning("[DDP] rank=%d buckets are not traced: another communication hook is registered", self.rank)
            return False
        state.listeners.append(self._saw)
        return True

    def _saw(self, bucket: dist.GradBucket) -> None:
        buffer = bucket.buffer()
        self.buckets.append((buffer.numel(), str(buffer.dtype)))
        logger.info("[DDP] rank=%d bucket_elems=%d dtype=%s", self.rank, buffer.numel(), buffer.dtype)
