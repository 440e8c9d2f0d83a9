"""Options and ini values as pytest declares them: names, forms, defaults and help. `pytest_nsa.settings` reads their values."""

from __future__ import annotations

import argparse

import pytest

LAUNCHES = ("auto", "fork", "clean", "cold")
UNMARKED = ("all", "leader")
DESCENDANTS = ("off", "report", "end")
# What --ranks-bisect-env tries where nothing else is named: variables that a library reads as a group forms or a GPU is first used.
MITIGATIONS = (
    "NCCL_P2P_DISABLE=1", "NCCL_SHM_DISABLE=1", "NCCL_IB_DISABLE=1", "NCCL_NVLS_ENABLE=0", "TORCH_NCCL_BLOCKING_WAIT=1",
    "CUDA_LAUNCH_BLOCKING=1",
)  # fmt: skip


def add_options(parser: pytest.Parser) -> None:
    """Declare options and ini values."""
    group = parser.getgroup("nsa", "tests on ranks (pytest-nsa)")
    group.addoption(
        "--ranks-artifacts",
        dest="artifacts",
        metavar="DIR",
        help="Folder for evidence and reports (default: ini artifacts_dir)",
    )
    group.addoption(
        "--ranks-launch", choices=LAUNCHES, default="auto",
        help="Where ranks come from: fork of this process, a clean child pytest, or a cold interpreter per rank (default: auto)",
    )  # fmt: skip
    group.addoption(
        "--ranks-fsdp-version",
        choices=("1", "2"),
        default="2",
        help="What the fixture fsdp wraps with (default: 2)",
    )
    group.addoption(
        "--ranks-keep",
        choices=("failed", "all"),
        default="failed",
        help="Whose folders to keep (default: failed)",
    )
    group.addoption(
        "--ranks-descendants", choices=DESCENDANTS,
        help="Diagnose ranks that tests start by themselves: report at the test's time limit, at an interrupt and at "
        "the end of the session; end: also end what a test leaves running (default: ini ranks_descendants)",
    )  # fmt: skip
    group.addoption(
        "--ranks-bisect-gc", dest="bisect_gc", action="store_true",
        help="Run a failed test that takes the fixture gc_range again on halves of its layers, and name the layer",
    )  # fmt: skip
    group.addoption(
        "--ranks-bisect-branch", dest="bisect_branch", action="store_true",
        help="Run a failed test that takes the fixture branch again on each branch alone, and name the one that fails",
    )  # fmt: skip
    group.addoption(
        "--ranks-bisect-env", dest="bisect_env", nargs="?", const="", metavar="NAME=VALUE,...",
        help="Run a failed test again with these variables set in its ranks, and name the fewest that make it pass "
        "(default: ini ranks_bisect_env)",
    )  # fmt: skip
    group.addoption(
        "--ranks-pdb-rank",
        dest="pdb_rank",
        type=int,
        default=-1,
        metavar="N",
        help="The rank that --pdb and breakpoint() attach to (default: the first that fails; 0)",
    )
    # Names of an earlier version: accepted, and not shown by --help.
    for old, form in (
        ("--artifacts", {}), ("--bisect-gc", {"action": "store_true"}), ("--bisect-branch", {"action": "store_true"}),
        ("--bisect-env", {"nargs": "?", "const": ""}), ("--pdb-rank", {"type": int, "default": -1}),
    ):  # fmt: skip
        group.addoption(old, dest=old.removeprefix("--").replace("-", "_"), help=argparse.SUPPRESS, **form)
    parser.addini("ranks_output_limit", "What is kept of each rank's output: head and tail, in MB", default="64")
    parser.addini(
        "ranks_bisect_env", "What --ranks-bisect-env tries: NAME=VALUE a line (default: what NCCL and CUDA know)",
        type="linelist", default=list(MITIGATIONS),
    )  # fmt: skip
    parser.addini("artifacts_dir", "Folder for evidence and reports", default="artifacts")
    parser.addini(
        "ranks_artifacts_keep",
        "How many finished runs are kept, with the 5 newest that failed; older ones are deleted at the end of a run (0: never)",
        default="20",
    )
    parser.addini(
        "ranks_artifacts_mode",
        "Permissions of a run's folder, in octal: 0755 lets others read what it holds",
        default="0700",
    )
    parser.addini(
        "ranks_mask_output",
        "Mask what has the form of a secret in all that is written of ranks, too: output, exceptions, sources, tests' ids "
        "(in env.json and in arguments of processes it always is)",
        type="bool", default=False,
    )  # fmt: skip
    parser.addini("ranks_timeout", "Seconds for a test on ranks that pytest-timeout does not bound", default="300")
    parser.addini("ranks_start_timeout", "Seconds for the ranks to form their group", default="120")
    parser.addini(
        "ranks_ahead", "While a test runs, fork the ranks of the next one, on gloo and CPU", type="bool", default=True
    )
    parser.addini(
        "ranks_check_divergence",
        "Fail a test whose ranks end with different gradients or parameters though DDP keeps them equal",
        type="bool", default=False,
    )  # fmt: skip
    parser.addini(
        "ranks_descendants",
        "Diagnose ranks that tests start by themselves: off, report or end (as --ranks-descendants)",
        default="off",
    )
    parser.addini(
        "ranks_left_fails",
        "Fail a session that processes of its tests would have kept from ending (exit code 1)",
        type="bool", default=False,
    )  # fmt: skip
    parser.addini(
        "ranks_unmarked",
        "Under torchrun or SLURM, which processes run the tests without ranks: all, or the leader (rank 0's)",
        default="all",
    )
    parser.addini(
        "ranks_host_plugins",
        "Plugins that run on the host only: a name a line; !name for one that ranks need although it implements hooks of reports",
        type="linelist", default=[],
    )  # fmt: skip
    parser.addini(
        "ranks_hang_after",
        "End a test on a suspicion that has lasted for so many seconds (0: never)",
        default="0",
    )
