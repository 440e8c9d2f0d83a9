"""``python -m nsa.train``: train a configuration, alone or under torchrun.

`EXIT_CODES` has the exit codes.
"""

import argparse
import errno
import os
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nsa.config import Config, ConfigError, as_yaml, environment_help, load_config, unknown_variables
from nsa.data import open_source, open_validation
from nsa.trace.files import find_writer
from nsa.training import saved

USAGE_ERROR, NOT_FINITE, INTERRUPTED = 2, 3, 130
WAIT_S = 30.0  # for ranks of an earlier start, if a run is resumed
NOT_WRITABLE = frozenset({
    errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EISDIR, errno.ENOTDIR,
})  # fmt: skip
EXIT_CODES = {
    0: "done",
    USAGE_ERROR: "a setting or file that cannot be used, or a disk that is full: one line names it",
    NOT_FINITE: "a loss or gradient is NaN or infinite: one line names the step and a checkpoint before it",
    75: "stopped by SIGTERM, or without its launcher, with a checkpoint: start it again with --resume auto",
    INTERRUPTED: "interrupted, or without a reader of its output",
}
RESULTS = """\
Results:
  DIR/metrics.jsonl has a line per step: loss, learning rate, tokens per second. `pytest-nsa diagnose DIR --html` draws the losses.
  DIR/checkpoints/ has what --resume goes on from."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns its exit code."""
    arguments = _parse(argv)
    path = arguments.config or os.environ.get("CONFIG")
    try:
        if not path:
            raise ConfigError(
                "no configuration: give --config PATH, or CONFIG=PATH, as in --config configs/tiny_cpu.yaml"
            )
        config = load_config(path, **_overrides(arguments))
        if arguments.print_config:
            print(as_yaml(config), end="")
            return 0
        return _train(config, arguments)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE_ERROR
    except BrokenPipeError:  # `| head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        print("error: the reader of the output ended; what was written so far is kept", file=sys.stderr)
        return INTERRUPTED
    except OSError as error:
        if error.errno not in NOT_WRITABLE:
            raise
        what = error.filename or f"the results in {arguments.out or 'artifacts'}"
        print(
            f"error: {error.strerror}: {what} cannot be written; what was written before is kept: make room, or give another "
            "folder with --out", file=sys.stderr,
        )  # fmt: skip
        return USAGE_ERROR
    except KeyboardInterrupt:
        print("error: interrupted; what was written so far is kept", file=sys.stderr)
        return INTERRUPTED


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    codes = "\n".join(f"  {code:<4} {meaning}" for code, meaning in EXIT_CODES.items())
    parser = argparse.ArgumentParser(
        prog="python -m nsa.train",
        description="Train a Native Sparse Attention transformer; alone, or one rank of several under torchrun.",
        epilog=f"Environment variables (stronger than the YAML, weaker than options):\n{environment_help()}\n\n"
        f"Exit codes:\n{codes}\n\n{RESULTS}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", metavar="PATH", help="YAML file (default: the variable CONFIG)")
    parser.add_argument(
        "--dataset",
        metavar="NAME",
        help="synthetic, fineweb_edu (data.path), or a file or folder: parquet, JSON lines (.jsonl), text",
    )
    parser.add_argument("--steps", type=int, metavar="N", help="how many steps, instead of train.steps")
    parser.add_argument("--ddp", choices=("0", "1"), help="1: --parallel ddp; 0: --parallel none")
    parser.add_argument("--parallel", choices=("none", "ddp", "fsdp", "average"), help="how ranks share the work")
    parser.add_argument("--safe", action="store_true", help="every known mitigation at once, for a run that must go on")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), help="default: train.device")
    parser.add_argument(
        "--out", metavar="DIR", help="where metrics, checkpoints and traces go (default: artifacts/train_TIME)"
    )
    parser.add_argument(
        "--save-every",
        type=int,
        metavar="K",
        help="checkpoint every K steps, and the last (default: checkpoint.every; 0: never)",
    )
    parser.add_argument(
        "--resume", default="none", metavar="auto|none|PATH", help="go on from a checkpoint (default: none)"
    )
    parser.add_argument(
        "--print-config",
        action="store_true",
        help="print every field, as the YAML, the variables and the options set it, and train nothing",
    )
    parser.add_argument(
        "--set", metavar="SECTION.KEY=VALUE", action="append", default=[], dest="settings",
        help="any field of the configuration, as in --set train.lr=3e-4; the value as in YAML; may be repeated",
    )  # fmt: skip
    arguments = parser.parse_args(argv)
    for setting in arguments.settings:
        if not re.fullmatch(r"\w+\.\w+=.*", setting, re.S):
            parser.error(f"--set {setting}: must be SECTION.KEY=VALUE, as in --set train.lr=3e-4")
    if arguments.steps is not None and arguments.steps < 1:
        parser.error(f"--steps {arguments.steps}: must be at least 1")
    if arguments.save_every is not None and arguments.save_every < 0:
        parser.error(f"--save-every {arguments.save_every}: must be 0 or more")
    if arguments.ddp and arguments.parallel and (arguments.ddp == "1") != (arguments.parallel == "ddp"):
        parser.error(f"--ddp {arguments.ddp} and --parallel {arguments.parallel} contradict each other; give one")
    return arguments


def _overrides(arguments: argparse.Namespace) -> dict[str, Any]:
    given = {
        "data.dataset": arguments.dataset or None, "train.steps": arguments.steps, "checkpoint.every": arguments.save_every,
        "parallel.safe": arguments.safe or None, "train.device": arguments.device,
        "parallel.mode": arguments.parallel or {"1": "ddp", "0": "none"}.get(arguments.ddp),
    }  # fmt: skip
    overrides = {field: value for field, value in given.items() if value is not None}
    for setting in arguments.settings:
        field, _, text = setting.partition("=")
        if field in overrides:
            raise ConfigError(f"--set {setting}: another option, or another --set, sets {field} too; give one")
        overrides[field] = text
    return overrides


def _train(config: Config, arguments: argparse.Namespace) -> int:
    # Without torch, which takes seconds to import: what can be refused is refused first.
    rank, world_size, local_rank = launched_ranks()
    launcher = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else 0  # of torchrun
    if world_size > 1 and config.parallel.mode == "none":
        raise ConfigError(
            f"{world_size} ranks with --parallel none would train {world_size} unrelated models; use --ddp 1"
        )
    source, validation = open_source(config), open_validation(config)  # before any group starts: a bad file is refused
    _boot_lines(config, arguments, rank)

    if arguments.out and arguments.resume == "none":
        saved.refuse_trained(Path(arguments.out))
    elif arguments.out:
        wait_for_earlier_ranks(Path(arguments.out).absolute(), WAIT_S, quiet=rank != 0)
    resumed = saved.find(_checkpoints(arguments), arguments.resume, verify=rank == 0)
    if resumed is None and arguments.resume == "auto" and rank == 0:
        _print(f"[train] resume=auto: no checkpoint in {_checkpoints(arguments)}, starting at step 1")
    if resumed is not None:
        saved.refuse_other_data(resumed, config)
        saved.refuse_another_model(resumed, config)
        for line in saved.other_settings(resumed, config) if rank == 0 else ():
            _print(f"[train] resume: {line}")

    from nsa.training.run import NotFiniteError, train

    try:
        return train(config, (rank, world_size, local_rank), arguments.out, source, validation, resumed, launcher)
    except NotFiniteError as error:  # of all ranks: one speaks
        if rank == 0:
            print(f"error: {error}", file=sys.stderr)
        return NOT_FINITE


def wait_for_earlier_ranks(folder: Path, limit_s: float, *, quiet: bool = False) -> None:
    """Wait until no live rank writes to a run's folder, such as those of a launcher that was killed: they end at their next step.

    After ``limit_s`` seconds the run goes on, and its folder is refused.
    """
    deadline, is_known = time.monotonic() + limit_s, quiet
    while pids := sorted(filter(None, map(find_writer, folder.glob("rank*")))):
        if time.monotonic() > deadline:
            return
        if not is_known:
            who = f"process {pids[0]}" if len(pids) == 1 else f"processes {', '.join(map(str, pids))}"
            _print(
                f"[train] resume: waits up to {limit_s:.0f} s until {who} of an earlier start, still in {folder}, ended"
            )
            is_known = True
        time.sleep(0.1)


def launched_ranks() -> tuple[int, int, int]:
    """Return (rank, world size, local rank) as the launcher set them; (0, 1, 0) without one. ConfigError for half a set."""
    if "RANK" not in os.environ and "WORLD_SIZE" not in os.environ:
        return 0, 1, 0
    try:
        found = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), int(os.environ.get("LOCAL_RANK", "0"))
    except (KeyError, ValueError):
        seen = " ".join(f"{name}={os.environ.get(name)!r}" for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
        raise ConfigError(f"{seen}: must be whole numbers, as torchrun sets them") from None
    if not 0 <= found[0] < found[1]:
        raise ConfigError(
            f"RANK={found[0]} WORLD_SIZE={found[1]}: RANK must be from 0 to WORLD_SIZE - 1, as torchrun sets them"
        )
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing and found[1] > 1:
        raise ConfigError(f"RANK and WORLD_SIZE are set, {' and '.join(missing)} not: start the ranks with torchrun")
    return found


def _checkpoints(arguments: argparse.Namespace) -> Path:
    if arguments.resume == "auto" and not arguments.out:
        raise ConfigError(
            "--resume auto: which run? give its folder with --out DIR, or a checkpoint with --resume PATH"
        )
    return Path(arguments.out or "") / "checkpoints"


def _boot_lines(config: Config, arguments: argparse.Namespace, rank: int) -> None:
    if rank != 0:
        return
    _print(f"[boot] loading config {config.source}")
    for line in [f"warning: {text}" for text in unknown_variables()] or ["ok"]:
        _print(f"[env-guard] {line}")
    _print(f"[train] dataset={config.data.dataset} tokenizer=byte")
    _print(f"[train] gradient_checkpointing={checkpointing_text(config)}")
    if arguments.steps:
        _print(f"[trace] overriding steps to {arguments.steps}")


def checkpointing_text(config: Config) -> str:
    """Return ``off``, ``on`` or ``on range=0:6``, as the boot line has it."""
    if not config.train.gradient_checkpointing:
        return "off"
    return "on" if config.train.gc_range is None else f"on range={config.train.gc_range[0]}:{config.train.gc_range[1]}"


def _print(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
