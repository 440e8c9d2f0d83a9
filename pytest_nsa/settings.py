"""Options and ini values as pytest declares them, and their values and the environment's, resolved once into `Settings`."""

import contextlib
import enum
import os
import socket
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from pytest_nsa.wire.messages import FIXED_VARIABLES

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
    (
        "ranks_timeout",
        "300",
    ): "Seconds for a test on ranks, or a call of `launch`, that has no limit from pytest-timeout",
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


HAS_PROC = os.path.exists("/proc/self/stat")
HAS_RANKS = sys.platform == "linux"  # elsewhere tests on ranks are skipped, and others run as without the plugin
FAKE_GPUS = "NSA_FAKE_GPUS"  # how many GPUs that do not exist are leased: to test leases on a machine without GPUs
FAKE_GPU_MEMORY = 16 << 30  # bytes of each
# Set for a child pytest of ours: the descriptors on which it serves as zygote (its host's; where further hosts connect),
# or the job of a cold rank.
ZYGOTE_FD = "PYTEST_NSA_ZYGOTE_FD"
LISTENER_FD = "PYTEST_NSA_LISTENER_FD"
COLD_JOB = "PYTEST_NSA_COLD_JOB"
COVERAGE = "PYTEST_NSA_COVERAGE"  # the sources that a child measures, where pytest-cov is on


class Mode(enum.Enum):
    """What this pytest process is in a run.

    PLAIN: the only one, or the controller of xdist; WORKER: a worker of xdist; LEADER, FOLLOWER: under an outer launcher, the
    process of rank 0 and the others; CHILD: one that the plugin started, which becomes ranks.
    """

    PLAIN = enum.auto()
    WORKER = enum.auto()
    LEADER = enum.auto()
    FOLLOWER = enum.auto()
    CHILD = enum.auto()


@dataclass(frozen=True, kw_only=True, slots=True)
class OuterLauncher:
    """What torchrun or a SLURM job passes to this process. ``serves_store``: the launcher itself keeps the store; ``attempt``: what
    it calls this start of the ranks.
    """

    rank: int
    world_size: int
    address: str
    port: int
    serves_store: bool
    attempt: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What was requested for a run. Times in seconds; 0 means never."""

    mode: Mode
    artifacts: Path
    launch: str
    fsdp_version: int
    timeout: float
    start_timeout: float
    hang_after: float
    check_divergence: bool
    keep_passed: bool
    keep_runs: int
    mask_output: bool
    traces_lightly: bool
    ahead: bool
    output_limit: int
    debug_rank: int
    backend: str | None
    zygote_fd: int | None
    listener_fd: int | None
    cold_job: Path | None
    gpu_ids: tuple[str, ...]
    fake_gpus: bool
    descendants: str = "off"
    descendants_fail: bool = False
    left_fails: bool = False
    rerun: str = "auto"
    outer: OuterLauncher | None = None
    bisect_env: dict[str, str] = field(default_factory=dict, hash=False)  # what --ranks-bisect-env tries
    bisect: dict[str, tuple[str, ...]] = field(default_factory=dict, hash=False)  # values by name, of --ranks-bisect

    @property
    def gpus(self) -> int:
        """How many GPUs ranks could use."""
        return len(self.gpu_ids)


settings_key = pytest.StashKey[Settings]()


def resolve(config: pytest.Config) -> Settings:
    """Read everything, check it, and keep it on the config. Raises UsageError naming the setting."""
    option, ini = config.getoption("--ranks-artifacts"), config.getini("artifacts_dir")
    directory, source = (option, "--ranks-artifacts") if option is not None else (ini, "ini artifacts_dir")
    backend = os.environ.get("TORCH_BACKEND") or None
    if backend not in (None, "gloo", "nccl"):
        raise pytest.UsageError(f"TORCH_BACKEND={backend!r}: must be gloo or nccl")
    level = os.environ.get("NSA_TRACE_LEVEL") or "full"
    if level not in ("full", "light"):
        raise pytest.UsageError(f"NSA_TRACE_LEVEL={level!r}: must be full or light")
    named_plugins(config)  # a line that cannot be used is refused now, not in the ranks
    outer = outer_launcher(config) if HAS_RANKS else None
    descendants = config.getoption("--ranks-descendants") or _choice(config, "ranks_descendants", DESCENDANTS)
    settings = Settings(
        mode=_choose_mode(config, outer),
        artifacts=(config.rootpath / directory).resolve(),  # pytest refuses '..' in the path of a child's cache
        launch=config.getoption("--ranks-launch"),
        fsdp_version=int(config.getoption("--ranks-fsdp-version")),
        timeout=_number(config, "ranks_timeout", 1, "seconds"),
        start_timeout=_number(config, "ranks_start_timeout", 1, "seconds"),
        hang_after=_number(config, "ranks_hang_after", 0, "seconds"),
        check_divergence=_flag(config, "ranks_check_divergence"),
        ahead=_flag(config, "ranks_ahead"),
        output_limit=_number(config, "ranks_output_limit", 1, "MB", int) << 20,
        debug_rank=config.getoption("--ranks-pdb-rank"),
        bisect_env=_bisect_env(config),
        bisect=_bisect(config),
        keep_runs=_number(config, "ranks_artifacts_keep", 0, "runs (0 keeps all)", int),
        mask_output=_flag(config, "ranks_mask_output"),
        traces_lightly=level == "light",
        keep_passed=config.getoption("--ranks-keep") == "all",
        backend=backend,
        zygote_fd=int(os.environ[ZYGOTE_FD]) if os.environ.get(ZYGOTE_FD) else None,
        listener_fd=int(os.environ[LISTENER_FD]) if os.environ.get(LISTENER_FD) else None,
        cold_job=Path(os.environ[COLD_JOB]) if os.environ.get(COLD_JOB) else None,
        gpu_ids=find_gpus(),
        fake_gpus=bool(os.environ.get(FAKE_GPUS)),
        outer=outer,
        descendants=descendants if HAS_RANKS else "off",
        descendants_fail=_flag(config, "ranks_descendants_fail"),
        left_fails=_flag(config, "ranks_left_fails"),
        rerun=config.getoption("--ranks-rerun") or _choice(config, "ranks_rerun", RERUNS),
    )
    if settings.artifacts.exists() and not settings.artifacts.is_dir():
        raise pytest.UsageError(f"{source} {directory}: is a file; give a folder, or the name of one to be made")
    if settings.artifacts == config.rootpath.resolve():
        raise pytest.UsageError(f"{source} {directory!r}: is the tests' root folder; give a folder for evidence alone")
    if settings.hang_after >= settings.timeout:
        raise pytest.UsageError(
            f"ini ranks_hang_after = {settings.hang_after:g}: must be below ranks_timeout = {settings.timeout:g} to have an effect"
        )
    config.stash[settings_key] = settings
    return settings


def _choose_mode(config: pytest.Config, outer: OuterLauncher | None) -> Mode:
    if is_child_process():
        return Mode.CHILD
    if hasattr(config, "workerinput"):
        return Mode.WORKER
    if outer is not None:
        return Mode.FOLLOWER if outer.rank else Mode.LEADER
    return Mode.PLAIN


def _numbers_of_launch() -> list[str | None]:
    """Return the rank and the number of ranks by torchrun's variables or SLURM's; None for one that is not set."""
    names = [("RANK", "SLURM_PROCID"), ("WORLD_SIZE", "SLURM_NTASKS")]
    return [next((os.environ[name] for name in pair if os.environ.get(name)), None) for pair in names]


def is_launched() -> bool:
    """Return whether variables of torchrun or SLURM may make this process a rank."""
    return bool(os.environ.get("MASTER_ADDR")) and None not in _numbers_of_launch()


def outer_launcher(config: pytest.Config) -> OuterLauncher | None:
    """Return the outer launcher by torchrun's variables, or by MASTER_ADDR and those of SLURM. None without them, with one
    rank that torchrun has not started, and with ``--ranks-launch``.

    Raises UsageError where a variable is wrong, or xdist is on.
    """
    env, numbers = os.environ, _numbers_of_launch()
    if (
        is_child_process()
        or hasattr(config, "workerinput")
        or not is_launched()
        or config.getoption("--ranks-launch") != "auto"
    ):
        return None
    values = [*numbers, env.get("MASTER_PORT", "29500")]
    if not all(value is not None and value.isdecimal() for value in values):
        raise pytest.UsageError(
            f"RANK, WORLD_SIZE, MASTER_PORT = {values}: must be whole numbers; unset RANK to run without"
        )
    if int(values[1] or 1) == 1 and "TORCHELASTIC_RUN_ID" not in env:
        return None  # there are no others: a container or an image has set them
    try:
        socket.getaddrinfo(env["MASTER_ADDR"], None)
    except OSError as error:
        raise pytest.UsageError(
            f"MASTER_ADDR = {env['MASTER_ADDR']}: {error.strerror}; name the host of rank 0, or unset RANK to run without"
        ) from None
    if getattr(config.option, "numprocesses", None):
        raise pytest.UsageError("-n under torchrun or SLURM: each of its processes is a rank already; remove -n")
    return OuterLauncher(
        rank=int(values[0] or 0),
        world_size=int(values[1] or 1),
        address=env["MASTER_ADDR"],
        port=int(values[2] or 0),
        serves_store=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        attempt=f"{env.get('TORCHELASTIC_RUN_ID', '')} {env.get('TORCHELASTIC_RESTART_COUNT', '')}",
    )


def _bisect_env(config: pytest.Config) -> dict[str, str]:
    """Return the variables that ``--ranks-bisect-env`` tries; {} where it is not given. Raises UsageError."""
    given = config.getoption("--ranks-bisect-env")
    if given is None and not config.getini("ranks_bisect_env"):
        return {}
    source = f"--ranks-bisect-env {given}" if given else "ini ranks_bisect_env"
    found: dict[str, str] = {}
    for pair in given.split(",") if given else config.getini("ranks_bisect_env"):
        name, equals, value = pair.strip().partition("=")
        if not equals or not name.isidentifier():
            raise pytest.UsageError(
                f"{source}: {pair.strip()!r}: must be NAME=VALUE, as in --ranks-bisect-env=NCCL_P2P_DISABLE=1"
            )
        if name in FIXED_VARIABLES:
            raise pytest.UsageError(f"{source}: {name}: the plugin sets it; remove it")
        found[name] = value
    if not found:
        raise pytest.UsageError(f"{source}: names no variable; give NAME=VALUE,...")
    return found if given is not None else {}


def _bisect(config: pytest.Config) -> dict[str, tuple[str, ...]]:
    """Return the values that ``--ranks-bisect`` tries, by parameter; () for branches or layers. Raises UsageError."""
    found: dict[str, tuple[str, ...]] = {}
    for given in config.getoption("--ranks-bisect"):
        name, _, text = given.partition("=")
        values = tuple(value.strip() for value in text.split(",") if value.strip())
        if not name.isidentifier() or not (values or given in ("branch", "gc_range")):
            raise pytest.UsageError(
                f"--ranks-bisect {given}: must be NAME=A,B,..., as in --ranks-bisect=branch=cmp,sel,win"
            )
        found[name] = values
    return found


def _choice(config: pytest.Config, name: str, allowed: tuple[str, ...]) -> str:
    text = str(config.getini(name))
    if text not in allowed:
        raise pytest.UsageError(f"ini {name} = {text!r}: must be {', '.join(allowed[:-1])} or {allowed[-1]}")
    return text


def named_plugins(config: pytest.Config) -> tuple[frozenset[str], frozenset[str]]:
    """Return the names that ini ``ranks_host_plugins`` adds to the host's plugins, and those that it removes. Raises UsageError."""
    on_host: set[str] = set()
    in_ranks: set[str] = set()
    for line in config.getini("ranks_host_plugins"):
        name = line.strip().removeprefix("!").strip()
        if not name:
            raise pytest.UsageError(
                f"ini ranks_host_plugins: {line.strip()!r}: must be the name of a plugin, as in allure_pytest, or !name"
            )
        (in_ranks if line.strip().startswith("!") else on_host).add(name)
    if on_host & in_ranks:
        name = min(on_host & in_ranks)
        raise pytest.UsageError(f"ini ranks_host_plugins: has both {name} and !{name}; remove one of them")
    return frozenset(on_host), frozenset(in_ranks)


def _flag(config: pytest.Config, name: str) -> bool:
    try:
        return bool(config.getini(name))
    except (ValueError, pytest.UsageError) as error:  # pytest's message does not name the setting
        raise pytest.UsageError(f"ini {name}: {error}: must be true or false") from None


def _number(config: pytest.Config, name: str, lowest: int, of: str, kind: type[float] = float) -> Any:
    """Return an ini value as a number of ``kind``; ``of``: what it counts. Raises UsageError where it is below ``lowest``."""
    text = str(config.getini(name))
    with contextlib.suppress(ValueError):
        if (value := kind(text)) >= lowest:
            return value
    whole = "whole " if kind is int else ""
    raise pytest.UsageError(f"ini {name} = {text!r}: must be a {whole}number of {of}, at least {lowest}")


def find_gpus() -> tuple[str, ...]:
    """Return what CUDA_VISIBLE_DEVICES may name, without importing torch: what it names now, else the NVIDIA device files.

    Raises UsageError where NSA_FAKE_GPUS is not a number.
    """
    fake = os.environ.get(FAKE_GPUS)
    if fake:
        if not fake.isdecimal() or not 0 < int(fake) <= 64:
            raise pytest.UsageError(f"{FAKE_GPUS}={fake!r}: must be a number of GPUs from 1 to 64")
        return tuple(str(i) for i in range(int(fake)))
    found = len([p for p in Path("/dev").glob("nvidia[0-9]*") if p.name[6:].isdigit()])
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return tuple(str(i) for i in range(found))
    named = [v.strip() for v in visible.split(",") if v.strip() and v.strip() != "-1"]
    return tuple(named[:found])


def is_child_process() -> bool:
    """Return whether this process is a child pytest of ours: a zygote, or a cold rank."""
    return bool(os.environ.get(ZYGOTE_FD) or os.environ.get(COLD_JOB))


def child_environment(**extra: str) -> dict[str, str]:
    """Return the environment for a child pytest of ours, without what makes this process an xdist worker."""
    mine = {
        k: v
        for k, v in os.environ.items()
        if not k.startswith("PYTEST_XDIST") and k not in (ZYGOTE_FD, LISTENER_FD, COLD_JOB)
    }
    mine.pop("PYTEST_CURRENT_TEST", None)
    return {**mine, **extra}


def is_on_github() -> bool:
    """Return whether a workflow of GitHub Actions runs this process."""
    return os.environ.get("GITHUB_ACTIONS") == "true"


def step_summary() -> Path | None:
    """Return the file whose text GitHub shows with a CI step; None elsewhere."""
    name = os.environ.get("GITHUB_STEP_SUMMARY")
    return Path(name) if name else None


def coverage_of_child() -> str:
    """Return what a child pytest of ours is to measure, as its parent requested; '' for nothing."""
    return os.environ.get(COVERAGE, "")
