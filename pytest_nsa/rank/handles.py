"""The objects that fixtures return on ranks: the group, DDP, FSDP, the tracer. Imported in ranks alone, as it imports torch."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from nsa.trace.ddp_buckets import BucketTrace
from nsa.trace.gradients import GradientTrace
from nsa.trace.module_backward import ModuleBackwardTrace
from pytest_nsa import marks
from pytest_nsa.rank.context import RankContext

WrapByHook = Callable[["nn.Module", str, dict[str, Any]], "nn.Module | None"]


def _no_hook(model: nn.Module, parallel: str, options: dict[str, Any]) -> nn.Module | None:
    return None


@dataclass(frozen=True, kw_only=True)
class Group:
    """The process group that this rank is in. ``device`` is where its tensors go: 'cpu' or 'cuda:0'."""

    rank: int
    world_size: int
    device: str
    backend: str

    def barrier(self) -> None:
        """Wait for all ranks."""
        dist.barrier()


@dataclass(frozen=True, kw_only=True)
class DDP(Group):
    """A group, and a method that wraps models in DistributedDataParallel."""

    static_graph: bool
    wrap_by_hook: WrapByHook = field(default=_no_hook, repr=False, compare=False)

    def wrap(self, model: nn.Module, **options: Any) -> nn.Module:
        """Return ``model`` on this rank's device, in DDP. ``options`` are DDP's own; the mark static_graph sets its default."""
        wrapped = self.wrap_by_hook(model, "ddp", options)
        if wrapped is not None:
            return wrapped
        settings: dict[str, Any] = {"static_graph": self.static_graph, **options}
        if self.device != "cpu":
            settings.setdefault("device_ids", [torch.device(self.device).index])
        return DistributedDataParallel(model.to(self.device), **settings)


@dataclass(frozen=True, kw_only=True)
class FSDP(Group):
    """A group, and a method that shards models: FSDP2 (`fully_shard`), or FSDP1 with ``--ranks-fsdp-version 1``."""

    version: int
    wrap_by_hook: WrapByHook = field(default=_no_hook, repr=False, compare=False)

    def wrap(
        self, model: nn.Module, *, blocks: list[nn.Module] | None = None, version: int | None = None, **options: Any
    ) -> nn.Module:
        """Return ``model`` sharded over the group, each of ``blocks`` a unit (default: the items of its ModuleLists).

        ``options`` are those of fully_shard or of FullyShardedDataParallel.
        """
        wrapped = self.wrap_by_hook(model, "fsdp", options)
        if wrapped is not None:
            return wrapped
        model = model.to(self.device)
        if blocks is None:
            blocks = [child for m in model.modules() if isinstance(m, nn.ModuleList) for child in m]
        if (version or self.version) == 1:
            return self._wrap1(model, blocks, options)
        if self.device == "cpu" and not hasattr(torch.cpu.Stream, "record_event"):
            raise RuntimeError(
                f"fully_shard of torch {torch.__version__} does not run on CPU; use --ranks-fsdp-version 1"
            )
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        options.setdefault("mesh", init_device_mesh(self.device.partition(":")[0], (self.world_size,)))
        for block in blocks:
            fully_shard(block, **options)
        fully_shard(model, **options)
        return model

    def _wrap1(self, model: nn.Module, blocks: list[nn.Module], options: dict[str, Any]) -> nn.Module:
        from torch.distributed.fsdp import FullyShardedDataParallel
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy

        if blocks:
            options.setdefault("auto_wrap_policy", ModuleWrapPolicy({type(block) for block in blocks}))
        options.setdefault("device_id", torch.device(self.device))
        options.setdefault("use_orig_params", True)
        return FullyShardedDataParallel(model, **options)


@dataclass
class Trace:
    """Records a training step: ``with trace(model): step()``. What it prints goes to the rank's output and traces.log."""

    rank: int
    kinds: tuple[str, ...]
    step: int = 0
    buckets: list[tuple[int, str]] = field(default_factory=list)
    _gradients: GradientTrace | None = None
    _modules: ModuleBackwardTrace | None = None
    _bucketed: list[Any] = field(default_factory=list)

    @contextmanager
    def __call__(self, model: nn.Module) -> Iterator[Trace]:
        """Trace one step of ``model`` (wrapped or not); the report is printed when the block ends, however it ends."""
        self.step += 1
        if "grads" in self.kinds:
            self._gradients = GradientTrace(model)
        if "module_bwd" in self.kinds:
            self._modules = ModuleBackwardTrace(model)
            self._modules.reset(self.step)
        if "ddp_buckets" in self.kinds and isinstance(model, DistributedDataParallel) and model not in self._bucketed:
            buckets = BucketTrace(self.rank)
            buckets.attach(model)
            self.buckets = buckets.buckets
            self._bucketed.append(model)
        raised: BaseException | None = None
        try:
            yield self
        except BaseException as error:
            raised = error
            raise
        finally:
            if self._gradients is not None:
                self._gradients.close()
                has_failed = raised is not None and (not self._gradients.arrived or _is_of_a_backward(raised))
                self._gradients.report(self.step, has_failed=has_failed)
            if self._modules is not None:
                self._modules.close()
                self._modules.report(self.step)

    def missing_gradients(self) -> list[str]:
        """Return names of parameters for which the gradient did not arrive in the last traced step.

        Raises RuntimeError if gradients are not traced, or not counted (FSDP1 with ``use_orig_params``).
        """
        if self._gradients is None:
            raise RuntimeError(
                "trace: gradients are not traced; use @trace_kinds('grads') and `with trace(model): ...` first"
            )
        return self._gradients.missing()

    def modules_not_reached(self) -> list[str]:
        """Return names of modules where backward did not run in the last traced step."""
        if self._modules is None:
            raise RuntimeError(
                "trace: module backwards are not traced; use @trace_kinds('module_bwd') and `with trace(model): ...` first"
            )
        return self._modules.not_reached()


def _is_of_a_backward(error: BaseException) -> bool:
    """Return whether an exception left a backward, or another exception did that it was raised for."""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    before = error.__cause__ or error.__context__
    return any(f.f_code.co_name == "_engine_run_backward" for f in frames) or (
        before is not None and _is_of_a_backward(before)
    )


def _find_hook(ctx: RankContext) -> WrapByHook:
    """Return a function that calls the hook pytest_nsa_wrap_model."""
    config = ctx.config
    if config is None:
        return _no_hook

    def wrap_by_hook(model: nn.Module, parallel: str, options: dict[str, Any]) -> nn.Module | None:
        wrapped: nn.Module | None = config.hook.pytest_nsa_wrap_model(
            config=config, model=model, parallel=parallel, device=ctx.device, options=options
        )
        return wrapped

    return wrap_by_hook


def make_group(ctx: RankContext) -> Group:
    """Return the fixture `group` of a rank."""
    return Group(rank=ctx.rank, world_size=ctx.job.world_size, device=ctx.device, backend=ctx.job.backend)


def make_ddp(ctx: RankContext) -> DDP:
    """Return the fixture `ddp` of a rank."""
    return DDP(**vars(make_group(ctx)), static_graph=ctx.job.static_graph, wrap_by_hook=_find_hook(ctx))


def make_fsdp(ctx: RankContext) -> FSDP:
    """Return the fixture `fsdp` of a rank."""
    return FSDP(**vars(make_group(ctx)), version=ctx.job.fsdp_version, wrap_by_hook=_find_hook(ctx))


def make_trace(ctx: RankContext) -> Trace:
    """Return the fixture `trace` of a rank."""
    return Trace(rank=ctx.rank, kinds=ctx.job.traces or marks.TRACES)


def by_name(ctx: RankContext) -> dict[str, Any]:
    """Return the arguments that a function run by `launch` can take, by name."""
    return {
        "rank": ctx.rank, "world_size": ctx.job.world_size, "device": ctx.device, "group": make_group(ctx),
        "ddp": make_ddp(ctx), "fsdp": make_fsdp(ctx), "trace": make_trace(ctx), "artifacts": Path(ctx.job.folder),
    }  # fmt: skip
