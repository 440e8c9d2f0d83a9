"""Options and ini values as pytest declares them: names, forms, defaults and help. `pytest_nsa.settings` reads their values."""

from __future__ import annotations

from typing import Any

import pytest

LAUNCHES = ("auto", "fork", "clean", "cold")
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

    def option(name: str, help: str, **attributes: Any) -> None:
        """Declare ``--ranks-NAME``; its value is ``config.option.nsa_NAME``."""
        group.addoption(f"--ranks-{name}", dest=f"nsa_{name.replace('-', '_')}", help=help, **attributes)

    option("artifacts", "Folder for evidence and reports (default: ini artifacts_dir)", metavar="DIR")
    option(
        "launch",
        "Where ranks come from: fork of this process, a clean child pytest, or a cold interpreter per rank (default: auto)",
        choices=LAUNCHES, default="auto",
    )  # fmt: skip
    option("fsdp-version", "The FSDP version that the fixture fsdp uses (default: 2)", choices=("1", "2"), default="2")
    option(
        "keep",
        "The tests that keep their folders of evidence (default: failed)",
        choices=("failed", "all"),
        default="failed",
    )
    option(
        "descendants",
        "Diagnose ranks that tests start by themselves: report at the test's time limit, at an interrupt and at the end of the "
        "session (default: ini ranks_descendants)",
        choices=DESCENDANTS,
    )
    option(
        "rerun",
        "Run a failed test once more, to find the statement at which its ranks parted: auto, of the first five (default: ini "
        "ranks_rerun)",
        choices=RERUNS,
    )
    option(
        "verbose",
        "Show with a failure all its statements, and the terms that chose its explanation, with their weights",
        action="store_true",
    )
    option(
        "bisect",
        "Run a failed test again with each of these values of its parameter NAME, and name those with which it fails. Without "
        "values: branch tries each branch alone, gc_range halves of the layers",
        action="append", default=[], metavar="NAME[=A,B,...]",
    )  # fmt: skip
    option(
        "bisect-env",
        "Run a failed test again with these variables set in its ranks, and name the fewest that make it pass "
        "(default: ini ranks_bisect_env)",
        nargs="?", const="", metavar="NAME=VALUE,...",
    )  # fmt: skip
    option(
        "pdb-rank",
        "The rank that --pdb and breakpoint() attach to (default: the first that fails; 0)",
        type=int, default=-1, metavar="N",
    )  # fmt: skip
    for (name, default), text in _INI.items():
        _add_ini(parser, name, default, text)


# By name and default. That of a list is in the help, or empty.
_INI: dict[tuple[str, str | bool | tuple[str, ...]], str] = {
    ("ranks_output_limit", "64"): "MB of each rank's output that are kept: its beginning and its end",
    ("ranks_bisect_env", MITIGATIONS): (
        "What --ranks-bisect-env tries: one NAME=VALUE per line (default: variables of NCCL and CUDA)"
    ),
    ("artifacts_dir", "artifacts"): "Folder for evidence and reports",
    ("ranks_artifacts_keep", "20"): (
        "How many finished runs are kept, and with them the 5 newest that failed; others are deleted when a run ends "
        "(0: never)"
    ),
    ("ranks_mask_output", False): (
        "Mask text that looks like a secret in everything that the plugin writes: output, exceptions, sources, test ids "
        "(env.json and arguments of processes are always masked)"
    ),
    ("ranks_marks", False): (
        "Marks of pytest.mark, as pytest.mark.world_size(2), ask for ranks also where nothing imports pytest_nsa"
    ),
    ("ranks_timeout", "300"): "Seconds for a test on ranks that has no limit from pytest-timeout",
    ("ranks_start_timeout", "120"): "Seconds for the ranks to form their group",
    ("ranks_ahead", True): "While a test runs, fork the ranks of the next one, on gloo and CPU",
    ("ranks_check_divergence", False): (
        "Fail a test if its ranks end with different gradients or parameters, which DDP should keep equal"
    ),
    ("ranks_rerun", "auto"): "Run a failed test once more with its control flow recorded: auto, off or all",
    ("ranks_descendants", "off"): "Diagnose ranks that tests start by themselves: off or report",
    ("ranks_descendants_fail", False): (
        "Fail a test that passes although a rank that it has started raised (with ranks_descendants)"
    ),
    (
        "ranks_left_fails",
        False,
    ): "Exit with code 1 if processes that tests have left would keep the session from ending",
    ("ranks_host_plugins", ()): (
        "Plugins that run on the host only, one name per line; !name for one that ranks need although it implements "
        "report hooks"
    ),
    ("ranks_hang_after", "0"): "End a test on a suspicion that has lasted for so many seconds (0: never)",
}


def _add_ini(parser: pytest.Parser, name: str, default: str | bool | tuple[str, ...], help: str) -> None:
    """Declare an ini value, with its default in the help."""
    kinds = {str: "string", bool: "bool", tuple: "linelist"}
    if not isinstance(default, tuple):
        shown = f"default: {str(default).lower()})"
        help = f"{help[:-1]}; {shown}" if help.endswith(")") else f"{help} ({shown}"
    given: Any = list(default) if isinstance(default, tuple) else default
    parser.addini(name, help, type=kinds[type(default)], default=given)  # type: ignore[arg-type]
