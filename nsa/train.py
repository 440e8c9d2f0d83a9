"""``python -m nsa.train``: train a configuration, alone or under torchrun.

Exit codes: 0 done, 2 a setting or file that cannot be used (one line says which), 130 interrupted.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nsa.config import (
    Config,
    ConfigError,
    config_path_from_environment,
    environment_help,
    load_config,
    unknown_variables,
)

if TYPE_CHECKING:
    from nsa.parallel import RankInfo

USAGE_ERROR = 2
INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns its exit code."""
    arguments = _parse(argv)
    path = arguments.config or config_path_from_environment()
    try:
        if not path:
            raise ConfigError(
                "no configuration: give --config PATH, or CONFIG=PATH, as in --config configs/tiny_cpu.yaml"
            )
        config = load_config(path, **_overrides(arguments))
        return _train(config, arguments)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE_ERROR
    except KeyboardInterrupt:
        print("error: interrupted; what was written so far is kept", file=sys.stderr)
        return INTERRUPTED


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m nsa.train",
        description="Train a Native Sparse Attention transformer; alone, or one rank of several under torchrun.",
        epilog=f"Environment variables (stronger than the YAML, weaker than options):\n{environment_help()}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", metavar="PATH", help="YAML file (default: the variable CONFIG)")
    parser.add_argument(
        "--dataset", metavar="NAME", help="synthetic, fineweb_edu (data.path), or a parquet file or folder"
    )
    parser.add_argument("--steps", type=int, metavar="N", help="how many steps, instead of train.steps")
    parser.add_argument("--ddp", choices=("0", "1"), help="1: --parallel ddp; 0: --parallel none")
    parser.add_argument("--parallel", choices=("none", "ddp", "fsdp"), help="how ranks share the work")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), help="default: train.device")
    parser.add_argument(
        "--out",
        metavar="DIR",
        help="where metrics, checkpoints and traces go (default: artifacts/train_TIME)",
    )
    parser.add_argument(
        "--save-every", type=int, default=0, metavar="K", help="checkpoint every K steps (default: 0, never)"
    )
    parser.add_argument(
        "--resume", default="none", metavar="auto|none|PATH", help="go on from a checkpoint (default: none)"
    )
    arguments = parser.parse_args(argv)
    if arguments.steps is not None and arguments.steps < 1:
        parser.error(f"--steps {arguments.steps}: must be at least 1")
    if arguments.save_every < 0:
        parser.error(f"--save-every {arguments.save_every}: must be 0 or more")
    if arguments.ddp and arguments.parallel and (arguments.ddp == "1") != (arguments.parallel == "ddp"):
        parser.error(f"--ddp {arguments.ddp} and --parallel {arguments.parallel} contradict each other; give one")
    return arguments


def _overrides(arguments: argparse.Namespace) -> dict[str, Any]:
    overrides: dict[str, Any] = {}
    if arguments.dataset:
        overrides["data.dataset"] = arguments.dataset
    if arguments.steps:
        overrides["train.steps"] = arguments.steps
    if arguments.device:
        overrides["train.device"] = arguments.device
    if arguments.parallel or arguments.ddp:
        overrides["parallel.mode"] = arguments.parallel or ("ddp" if arguments.ddp == "1" else "none")
    return overrides


def _train(config: Config, arguments: argparse.Namespace) -> int:
    from nsa import checkpoint
    from nsa.data import open_source
    from nsa.parallel import choose_backend, choose_device, launched_ranks

    rank, world_size, local_rank = launched_ranks()
    if world_size > 1 and config.parallel.mode == "none":
        raise ConfigError(
            f"{world_size} ranks with --parallel none would train {world_size} unrelated models; use --ddp 1"
        )
    device = choose_device(config.train.device, local_rank)
    backend = choose_backend(config.parallel.backend, device, world_size)
    source = open_source(config, rank, world_size)  # before any group starts: a bad file is refused here
    if arguments.resume not in ("none", "auto"):
        checkpoint.find(Path(), arguments.resume)

    import torch

    from nsa.parallel import RankInfo

    if config.train.threads and device.type == "cpu":
        torch.set_num_threads(config.train.threads)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    info = RankInfo(rank=rank, world_size=world_size, local_rank=local_rank, device=device)
    _boot_lines(config, arguments, rank)
    if config.parallel.mode != "none":
        _join(backend, world_size)
    try:
        return _loop(config, arguments, info, source, _folder(arguments.out, info))
    finally:
        if config.parallel.mode != "none":
            torch.distributed.destroy_process_group()


def _join(backend: str, world_size: int) -> None:
    import torch.distributed as dist

    from nsa.parallel import join_group

    if world_size == 1:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    else:
        join_group(backend)


def _folder(out: str | None, info: RankInfo) -> Path:
    """The run's folder, the same on all ranks: rank 0's clock names it."""
    if out:
        folder = Path(out)
    else:
        import torch
        import torch.distributed as dist

        stamp = torch.tensor([int(time.time())], device=info.device)
        if info.world_size > 1:
            dist.broadcast(stamp, src=0)
        folder = Path("artifacts") / time.strftime("train_%Y%m%d_%H%M%S", time.localtime(stamp.item()))
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"--out {str(folder)!r}: cannot be made ({error.strerror}); give a folder that can be written"
        ) from None
    return folder


def _boot_lines(config: Config, arguments: argparse.Namespace, rank: int) -> None:
    if rank != 0:
        return
    _say(f"[boot] loading config {config.source}")
    for warning in unknown_variables():
        _say(f"[env-guard] warning: {warning}")
    _say("[env-guard] ok")
    _say(f"[train] dataset={config.data.dataset} tokenizer={config.data.tokenizer}")
    _say(f"[train] gradient_checkpointing={checkpointing_text(config)}")
    if arguments.steps:
        _say(f"[trace] overriding steps to {arguments.steps}")


def checkpointing_text(config: Config) -> str:
    """``off``, ``on`` or ``on range=0:6``, as the boot line has it."""
    if not config.train.gradient_checkpointing:
        return "off"
    return "on" if config.train.gc_range is None else f"on range={config.train.gc_range[0]}:{config.train.gc_range[1]}"


def _say(line: str) -> None:
    print(line, flush=True)


def _listen_to_traces(folder: Path, rank: int) -> None:
    """`nsa.trace` speaks on stdout and in traces.log; on ranks above 0 only of what belongs to a rank."""
    trace_log = logging.getLogger("nsa.trace")
    trace_log.setLevel(logging.INFO)
    trace_log.propagate = False
    handlers: list[logging.Handler] = [logging.StreamHandler(sys.stdout)]
    handlers.append(
        logging.FileHandler(folder / ("traces.log" if rank == 0 else f"traces_rank{rank}.log"), encoding="utf-8")
    )
    for handler in handlers:
        handler.setFormatter(logging.Formatter("%(message)s"))
        if rank != 0:
            handler.addFilter(lambda record: record.getMessage().startswith("[DDP]"))
        trace_log.addHandler(handler)


def _loop(config: Config, arguments: argparse.Namespace, info: RankInfo, source: Any, folder: Path) -> int:
    from nsa import checkpoint
    from nsa.data import Prefetcher
    from nsa.trace.training import trace_training
    from nsa.trace.watchdog import Watchdog
    from nsa.trainer import Trainer

    _listen_to_traces(folder, info.rank)
    traces = trace_training(folder, info.rank, info.world_size, config.parallel.mode.upper())
    trainer = Trainer(config, info, folder)
    batches = 0
    resumed = checkpoint.find(folder / "checkpoints", arguments.resume)
    if resumed is not None:
        trainer.steps_done, batches = checkpoint.load(resumed, trainer.model, trainer.optimizer)
        if info.rank == 0:
            _say(f"[train] resumed from {resumed} after step {trainer.steps_done}")
    elif arguments.resume == "auto" and info.rank == 0:
        _say(f"[train] resume=auto: no checkpoint in {folder / 'checkpoints'}, starting at step 1")
    prefetcher = Prefetcher(source, config.data.prefetch, skip=batches)
    watchdog = Watchdog(folder, info.rank, config.train.watchdog_s)
    metrics = (folder / "metrics.jsonl").open("a", encoding="utf-8") if info.rank == 0 else None
    try:
        while trainer.steps_done < config.train.steps:
            watchdog.feed()
            traces.board.phase("data")
            micro = [prefetcher.take() for _ in range(config.train.accumulation)]
            batches += len(micro)
            result = trainer.step(micro)
            rate = result.tokens / result.seconds
            if metrics is not None:
                line = {
                    "step": result.step, "loss": result.loss, "lr": result.lr, "tokens": result.tokens,
                    "tokens_per_s": rate, "peak_mib": result.peak_mib, "gates": result.gates, "time": time.time(),
                }  # fmt: skip
                metrics.write(json.dumps(line) + "\n")
                metrics.flush()
                gates = " ".join(f"{name} {mean:.2f}" for name, mean in result.gates.items())
                _say(
                    f"[train] step {result.step}/{config.train.steps} loss {result.loss:.4f} lr {result.lr:.2e} "
                    f"tokens/s {rate:.0f} peak {result.peak_mib:.0f} MiB gates {gates or '-'}"
                )
            if arguments.save_every and result.step % arguments.save_every == 0:
                saved = checkpoint.save(
                    folder / "checkpoints", result.step, trainer.model, trainer.optimizer, batches, info.rank
                )
                if saved is not None:
                    _say(f"[train] saved {saved}")
        if info.rank == 0:
            _say(f"[train] done after step {trainer.steps_done}; everything is in {folder}{os.sep}")
        return 0
    finally:
        watchdog.close()
        prefetcher.close()
        traces.end(sys.exception())
        if metrics is not None:
            metrics.close()


if __name__ == "__main__":
    sys.exit(main())
