"""Options and ini values as pytest declares them: names, forms, defaults and help. `pytest_nsa.settings` reads their values."""

from __future__ import annotations

import pytest

LAUNCHES = ("auto", "fork", "clean", "cold")
UNMARKED = ("all", "leader")
DESCENDANTS = ("off", "report")
RERUNS = ("auto", "off", "all")
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
        dest="nsa_artifacts",
        metavar="DIR",
        help="Folder for evidence and reports (default: ini artifacts_dir)",
    )
    group.addoption(
        "--ranks-launch", dest="nsa_launch", choices=LAUNCHES, default="auto",
        help="Where ranks come from: fork of this process, a clean child pytest, or a cold interpreter per rank (default: auto)",
    )  # fmt: skip
    group.addoption(
        "--ranks-fsdp-version",
        dest="nsa_fsdp_version",
        choices=("1", "2"),
        default="2",
        help="The FSDP version that the fixture fsdp uses (default: 2)",
    )
    group.addoption(
        "--ranks-keep",
        dest="nsa_keep",
        choices=("failed", "all"),
        default="failed",
        help="The tests that keep their folders of evidence (default: failed)",
    )
    group.addoption(
        "--ranks-descendants", dest="nsa_descendants", choices=DESCENDANTS,
        help="Diagnose ranks that tests start by themselves: report at the test's time limit, at an interrupt and at "
        "the end of the session (default: ini ranks_descendants)",
    )  # fmt: skip
    group.addoption(
        "--ranks-rerun", dest="nsa_rerun", choices=RERUNS,
        help="Run a failed test once more, to find the statement at which its ranks parted: auto, of the first five (default: ini "
        "ranks_rerun)",
    )  # fmt: skip
    group.addoption(
        "--ranks-verbose", dest="nsa_verbose", action="store_true",
        help="Show with a failure all its statements, and the terms that chose its explanation, with their weights",
    )  # fmt: skip
    group.addoption(
        "--ranks-bisect", dest="nsa_bisect", action="append", default=[], metavar="NAME[=A,B,...]",
        help="Run a failed test again with each of these values of its parameter NAME, and name those with which it fails. Without "
        "values: branch tries each branch alone, gc_range halves of the layers",
    )  # fmt: skip
    group.addoption(
        "--ranks-bisect-env", dest="nsa_bisect_env", nargs="?", const="", metavar="NAME=VALUE,...",
        help="Run a failed test again with these variables set in its ranks, and name the fewest that make it pass "
        "(default: ini ranks_bisect_env)",
    )  # fmt: skip
    group.addoption(
        "--ranks-pdb-rank",
        dest="nsa_pdb_rank",
        type=int,
        default=-1,
        metavar="N",
        help="The rank that --pdb and breakpoint() attach to (default: the first that fails; 0)",
    )
    _add_ini(
        parser, "ranks_output_limit", "MB of each rank's output that are kept: its beginning and its end", default="64"
    )
    _add_ini(
        parser,
        "ranks_bisect_env", "What --ranks-bisect-env tries: one NAME=VALUE per line (default: variables of NCCL and CUDA)",
        type="linelist", default=list(MITIGATIONS),
    )  # fmt: skip
    _add_ini(parser, "artifacts_dir", "Folder for evidence and reports", default="artifacts")
    _add_ini(
        parser,
        "ranks_artifacts_keep",
        "How many finished runs are kept, and with them the 5 newest that failed; others are deleted when a run ends (0: never)",
        default="20",
    )
    _add_ini(
        parser,
        "ranks_artifacts_mode",
        "Permissions of a run's folder, in octal: with 0755 other users can read it",
        default="0700",
    )
    _add_ini(
        parser,
        "ranks_mask_output",
        "Mask text that looks like a secret in everything that the plugin writes: output, exceptions, sources, test ids "
        "(env.json and arguments of processes are always masked)",
        type="bool", default=False,
    )  # fmt: skip
    _add_ini(
        parser,
        "ranks_marks",
        "Marks of pytest.mark, as pytest.mark.world_size(2), ask for ranks also where nothing imports pytest_nsa",
        type="bool", default=False,
    )  # fmt: skip
    _add_ini(
        parser, "ranks_timeout", "Seconds for a test on ranks that has no limit from pytest-timeout", default="300"
    )
    _add_ini(parser, "ranks_start_timeout", "Seconds for the ranks to form their group", default="120")
    _add_ini(
        parser,
        "ranks_ahead",
        "While a test runs, fork the ranks of the next one, on gloo and CPU",
        type="bool",
        default=True,
    )
    _add_ini(
        parser,
        "ranks_check_divergence",
        "Fail a test if its ranks end with different gradients or parameters, which DDP should keep equal",
        type="bool", default=False,
    )  # fmt: skip
    _add_ini(
        parser,
        "ranks_rerun",
        "Run a failed test once more with its control flow recorded: auto, off or all (as --ranks-rerun)",
        default="auto",
    )
    _add_ini(
        parser,
        "ranks_descendants",
        "Diagnose ranks that tests start by themselves: off or report (as --ranks-descendants)",
        default="off",
    )
    _add_ini(
        parser,
        "ranks_descendants_fail",
        "Fail a test that passes although a rank that it has started raised (with ranks_descendants)",
        type="bool", default=False,
    )  # fmt: skip
    _add_ini(
        parser,
        "ranks_left_fails",
        "Exit with code 1 if processes that tests have left would have kept the session from ending",
        type="bool", default=False,
    )  # fmt: skip
    _add_ini(
        parser,
        "ranks_unmarked",
        "Under torchrun or SLURM, which processes run the tests without ranks: all, or leader, the one of rank 0",
        default="all",
    )
    _add_ini(
        parser,
        "ranks_host_plugins",
        "Plugins that run on the host only, one name per line; !name for one that ranks need although it implements report hooks",
        type="linelist", default=[],
    )  # fmt: skip
    _add_ini(
        parser,
        "ranks_hang_after",
        "End a test on a suspicion that has lasted for so many seconds (0: never)",
        default="0",
    )


def _add_ini(
    parser: pytest.Parser, name: str, help: str, *, default: str | bool | list[str], type: str = "string"
) -> None:
    """Declare an ini value, with its default in the help; that of a list is in ``help``, or empty."""
    if not isinstance(default, list):
        shown = f"default: {str(default).lower()})"
        help = f"{help[:-1]}; {shown}" if help.endswith(")") else f"{help} ({shown}"
    parser.addini(name, help, type=type, default=default)  # type: ignore[arg-type]
