"""A DDP communication hook that reports each bucket and then reduces it exactly as DDP does without a hook."""

# DDP compares a hook's annotations with classes, so they must not be postponed to strings here.
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from nsa.trace import logger
from nsa.trace.calls.arguments import asynchronous_sum
from nsa.trace.wrapped import watch_wraps

Listener = Callable[[dist.GradBucket], None]


@dataclass
class BucketHook:
    """State of the hook: the group, the listeners of buckets, and a hook that the user has registered after ours."""

    group: dist.ProcessGroup
    listeners: list[Listener] = field(default_factory=list)
    user_hook: Callable[[Any, dist.GradBucket], torch.futures.Future[torch.Tensor]] | None = None
    user_state: Any = None
    kept_views: bool = False

    def __deepcopy__(self, memo: Any) -> None:
        """A copy of the model has its own reducer, without hooks."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


def _reduce(state: BucketHook, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    for listener in state.listeners:
        listener(bucket)
    if state.user_hook is not None:
        return state.user_hook(state.user_state, bucket)
    # To the bit what DDP does without a hook: it multiplies a gradient by 1/n as it copies it into the bucket, but
    # divides one that lives in the bucket already. These round differently when n is not a power of two.
    buffer, n = bucket.buffer(), state.group.size()
    if n > 1:
        buffer = buffer.div_(n) if state.kept_views else buffer.mul_(1.0 / n)
    work = state.group.allreduce([buffer], asynchronous_sum())  # as DDP calls it, without what `dist.all_reduce` checks
    return work.get_future().then(lambda future: future.value()[0])


def ddp_models_in(root: torch.nn.Module) -> list[DistributedDataParallel]:
    """Return the DDP modules of ``root``, itself included: a library may wrap DDP in its own module."""
    return [module for module in root.modules() if isinstance(module, DistributedDataParallel)]


def ensure_hook(ddp: DistributedDataParallel) -> BucketHook | None:
    """Return the hook of ``ddp``, registered on first use; None if it has another hook already."""
    state = getattr(ddp, "_nsa_bucket_hook", None)
    if state is None and not getattr(ddp, "_comm_hooks", None) and getattr(ddp, "mixed_precision", None) is None:
        state = BucketHook(ddp.process_group)
        try:
            ddp.register_comm_hook(state, _reduce)
        except RuntimeError:  # it has one of torch's builtin hooks, which Python cannot see
            return None
        ddp._nsa_bucket_hook = state
    return state


def give_way_to_user_hooks() -> None:
    """Let our hook call a hook that the user registers later: DDP accepts only one."""
    register = DistributedDataParallel.register_comm_hook

    def register_comm_hook(self: DistributedDataParallel, state: Any, hook: Any) -> None:
        ours = getattr(self, "_nsa_bucket_hook", None)
        if ours is None or hook is _reduce:
            register(self, state, hook)
        else:
            ours.user_state, ours.user_hook = state, hook

    builtin = DistributedDataParallel._register_builtin_comm_hook

    def register_builtin_comm_hook(self: DistributedDataParallel, hook_type: Any) -> None:
        ours = getattr(self, "_nsa_bucket_hook", None)
        if ours is None:
            builtin(self, hook_type)
        elif hook_type == dist.BuiltinCommHookType.FP16_COMPRESS:
            ours.user_state, ours.user_hook = ours.group, fp16_compress_hook
        else:
            ours.user_state, ours.user_hook = None, None  # a plain all-reduce, as ours

    DistributedDataParallel.register_comm_hook = register_comm_hook
    DistributedDataParallel._register_builtin_comm_hook = register_builtin_comm_hook


def hook_new_models() -> None:
    """Register the hook with each DDP model that is made from now on, where no module's call is observed. Once per process."""
    models: WeakSet[DistributedDataParallel] = WeakSet()
    backward = torch.autograd.backward

    def hook(ddp: DistributedDataParallel) -> None:
        if ensure_hook(ddp) is not None:
            models.add(ddp)

    @functools.wraps(backward)
    def noted_backward(*args: Any, **kwargs: Any) -> None:
        for model in models:
            note_kept_gradients(model)
        backward(*args, **kwargs)

    watch_wraps(None, hook)
    torch.autograd.backward = noted_backward
    give_way_to_user_hooks()


def note_kept_gradients(root: torch.nn.Module) -> None:
    """Note, before a backward, whether gradients of the last one are still views of DDP's buckets."""
    state = getattr(root, "_nsa_bucket_hook", None)
    if state is not None:
        first = next((p for p in root.parameters() if p.requires_grad), None)
        state.kept_views = root.gradient_as_bucket_view and first is not None and first.grad is not None


class BucketTrace:
    """Logs ``[DDP] rank=0 bucket_elems=1048576 dtype=torch.float32`` for each bucket."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.buckets: list[tuple[int, str]] = []

    def attach(self, ddp: DistributedDataParallel) -> bool:
        """Listen to ``ddp``'s buckets; if it has another hook, log a warning and return False."""
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
