"""The plan's scenarios as one table that the CPU and the GPU suite share; `running` runs one."""

import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from nsa.config import SAFE_ENVIRONMENT
from pytest_nsa import branch, check_divergence, fails_as, gc_range, gpu, rank_env, scenario, world_size

ROOT = Path(__file__).resolve().parents[2]


LAYERS = 12  # of both configurations
PRODUCTION = "m7c_125m_2xa100_production.yaml"


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A row of the plan. ``overrides`` are fields of the configuration; ``reads_as`` is what its outcome means.

    ``check`` names what is asserted beyond the arrival of every gradient (`health.CHECKS`; "resume" is all of its row). ``on_cpu``
    is what makes the row affordable on a CPU; where that changes what the name says, ``name_on_cpu`` says what is run. The name is
    the test's id; -k finds ``alias``, which was that once, too. ``needs`` is what alone heeds what the row changes ("nccl", "cuda",
    or "buffers" of the model): without it the row is skipped, as it could tell nothing. ``environment`` is its ranks' own.
    """

    phase: int
    name: str
    reads_as: str
    parallel: str = "ddp"
    steps: int = 2
    overrides: dict[str, Any] = field(default_factory=dict)
    on_cpu: dict[str, Any] = field(default_factory=dict)
    name_on_cpu: str = ""
    fails_as: str = ""
    check: str = ""
    uses: int = 1  # of each block in a forward
    needs: str = ""
    environment: dict[str, str] = field(default_factory=dict)
    alias: str = ""

    @property
    def other_names(self) -> set[str]:
        """By what -k finds the row beside its id: its name at the other size, and its alias."""
        return {self.name, self.name_on_cpu, self.alias} - {""}

    @property
    def num_ranks(self) -> int:
        """The number of ranks where a size has no other: 2, and 1 for the scenarios in one process."""
        return 1 if self.parallel == "none" else 2


@dataclass(frozen=True, kw_only=True)
class Size:
    """The size at which a suite runs the table: its configuration, and a scenario's seconds per hundred steps begun.

    ``is_real`` is production's size: each row as its name says. ``settings`` hold for every row that does not set them.
    """

    config: str
    timeout: float
    is_real: bool = False
    on_gpu: bool = False
    settings: dict[str, Any] = field(default_factory=dict)
    num_ranks: int = 2

    def find_name(self, row: Scenario) -> str:
        """Return the scenario's name: of what is run at this size."""
        return row.name if self.is_real else row.name_on_cpu or row.name


# The small model's gradients are 2.4 MB: with small buckets there are several, once DDP has built them again after the first step.
CPU = Size(config="tiny_cpu.yaml", timeout=30, settings={"parallel.bucket_cap_mb": 0.25})
# --real-sizes: for a night, as a step of 2048 tokens takes a core minutes.
REAL_ON_CPU = Size(config=PRODUCTION, timeout=12 * 3600, is_real=True, settings={"train.threads": 1})
GPU = Size(config=PRODUCTION, timeout=300, is_real=True, on_gpu=True)

GPU_MEMORY = "12GiB"  # two ranks of the 125M model with one sequence each, CUDA contexts included

ALL_TRACES = {"trace.grads": True, "trace.module_bwd": True, "trace.ddp_buckets": True, "trace.mem_dump_every": 1}
TWO_TRACES = {"trace.grads": True, "trace.module_bwd": True}

SEEDS: tuple[Scenario, ...] = (
    Scenario(
        phase=1, name="ddp_onestep_trace", alias="onestep", steps=1, overrides=ALL_TRACES,
        reads_as="which parameters are missing, which buckets were reduced",
    ),
    Scenario(
        phase=2, name="ddp_gloo_sanity", alias="gloo", steps=1, overrides={**ALL_TRACES, "parallel.backend": "gloo"},
        reads_as="fails too: autograd or graph; passes: NCCL transport",
    ),
    *(
        Scenario(
            phase=3, name=f"branch_{name}_only", overrides={**TWO_TRACES, "model.force_branch": name},
            reads_as=f"fails alone: the backward of {name}",
        )
        for name in ("cmp", "sel", "win")
    ),
    Scenario(
        phase=4, name="ddp_two_steps", overrides=TWO_TRACES,
        reads_as="plain DDP: the control of the branches, of the static graph and of the mitigations",
    ),
    Scenario(
        phase=4, name="ddp_static_graph", overrides={**TWO_TRACES, "parallel.static_graph": True},
        reads_as="passes where the others fail: a mitigation for production",
    ),
    Scenario(
        phase=5, name="gc_baseline_full", parallel="none", overrides=TWO_TRACES,
        reads_as="checkpointing all layers",
    ),
    Scenario(
        phase=5, name="gc_bisect_layers_0_5", alias="0:6", parallel="none",
        overrides={**TWO_TRACES, "train.gc_range": "0:6"}, reads_as="checkpointing layers 0 to 5",
    ),
    Scenario(
        phase=5, name="gc_bisect_layers_6_11", alias="6:12", parallel="none",
        overrides={**TWO_TRACES, "train.gc_range": "6:12"}, reads_as="checkpointing layers 6 to 11",
    ),
)  # fmt: skip


ONE = {"trace.grads": True}
REENTRANT = {"train.gc_reentrant": True}
UNUSED = {"parallel.find_unused_parameters": True}
STATIC = {"parallel.static_graph": True}


def _with_ddp(uses: int, reentrant: bool, ddp: str, fails_as: str = "") -> Scenario:
    """Return a cell of the table of DDP modes by activation checkpointing."""
    options = {"plain": {}, "find_unused": UNUSED, "static": STATIC}[ddp]
    kind = "reentrant" if reentrant else "nonreentrant"
    return Scenario(
        phase=6, name=f"gc_{kind}_{ddp}_{'once' if uses == 1 else 'twice'}", alias=f"{kind}-{ddp}-{uses}", uses=uses,
        overrides={**ONE, **options, **(REENTRANT if reentrant else {})}, fails_as=fails_as,
        check="" if fails_as == "silent_divergence" else "gradients",  # the plugin must find it
        reads_as="the gradients are those of one process; reentrant checkpointing is what breaks DDP",
    )  # fmt: skip


# What each combination does to the gradients, as torch 2.13 behaves.
CHECKPOINTING = (
    *(_with_ddp(uses, False, ddp) for uses in (1, 2) for ddp in ("plain", "find_unused", "static")),
    _with_ddp(1, True, "plain"), _with_ddp(1, True, "static"), _with_ddp(2, True, "static"),
    _with_ddp(1, True, "find_unused", "ready_twice"), _with_ddp(2, True, "find_unused", "ready_twice"),
    _with_ddp(2, True, "plain", "silent_divergence"),
)  # fmt: skip


def _mitigation(name: str, reads_as: str, parallel: str = "ddp", **rest: Any) -> Scenario:
    overrides = {**TWO_TRACES, **rest.pop("overrides", {})}
    return Scenario(phase=7, name=name, parallel=parallel, reads_as=reads_as, overrides=overrides, **rest)


# Checkpointing's own questions, one by one, in one process: the tree asks them where backward fails there.
ALONE = (
    Scenario(
        phase=6, name="gc_reentrant_one_process", alias="reentrant-alone", parallel="none", overrides={**ONE, **REENTRANT},
        check="gradients", reads_as="fails where gc_baseline_full passes: the reentrant form",
    ),
    Scenario(
        phase=6, name="gc_boundaries", parallel="none", overrides=ONE, check="boundaries", steps=1,
        reads_as="fails: checkpointing one layer changes its gradients",
    ),
    Scenario(
        phase=6, name="gc_inplace_writes", parallel="none", overrides=ONE, check="inplace", steps=1,
        reads_as="fails: a checkpointed region writes into what it did not make",
    ),
)  # fmt: skip


def _shaped(layers: int, seq_len: int, name: str) -> dict[str, Any]:
    """Return a row's fields for a shape that its name tells: ``name`` with its {shape}, at a sixteenth of the length on a CPU."""
    short = seq_len // 16
    return {
        "name": name.format(shape=f"{layers}x{seq_len}"),
        "name_on_cpu": name.format(shape=f"{layers}x{short}"), "on_cpu": {"train.seq_len": short},
    }  # fmt: skip


def _safe(layers: int, seq_len: int) -> Scenario:
    sizes = {"model.n_layers": layers, "train.seq_len": seq_len, "parallel.safe": True}
    return Scenario(
        phase=7, overrides={**ONE, **sizes}, reads_as="passes: one of the mitigations, taken alone above",
        environment=SAFE_ENVIRONMENT, **_shaped(layers, seq_len, "safe_mode_{shape}"),
    )  # fmt: skip


MITIGATIONS = (
    _mitigation("find_unused_parameters", "passes: some parameter gets no gradient", overrides=UNUSED),
    _mitigation(
        "nccl_p2p_disabled", "passes: the link between GPUs", needs="nccl", check="nccl",
        environment={"NCCL_P2P_DISABLE": "1", "NCCL_DEBUG": "INFO"},  # which tells that it was heeded
    ),
    _mitigation(
        "synchronous", "passes: launches that overtake each other", needs="cuda",
        environment={"CUDA_LAUNCH_BLOCKING": "1", "TORCH_NCCL_BLOCKING_WAIT": "1", "TORCH_SHOW_CPP_STACKTRACES": "1"},
    ),
    _mitigation("conservative_kernels", "passes: a kernel", overrides={"model.backend": "math"}),
    _mitigation("stop_gate_gradient", "passes: the gates' backward", overrides={"model.stop_gate_gradient": True}),
    _mitigation(
        "buckets_2mb", "passes: the size of a reduction", overrides={"parallel.bucket_cap_mb": 2.0}, check="buckets", steps=3,
        on_cpu={"parallel.bucket_cap_mb": 0.05}, name_on_cpu="buckets_50kb",
    ),
    _mitigation(
        "no_buffer_broadcast", "passes: buffers", needs="buffers", overrides={"parallel.broadcast_buffers": False},
    ),
    _mitigation("no_bucket_view", "passes: gradients that live in buckets", overrides={"parallel.gradient_as_bucket_view": False}),
    *(_safe(layers, seq_len) for layers, seq_len in ((12, 2048), (2, 512))),
    _mitigation("manual_averaging", "passes: DDP's reducer", parallel="average"),
    _mitigation("barrier_after_backward", "passes: ranks that drift", overrides={"parallel.barrier_after_backward": True}),
    _mitigation("vanilla_attention", "passes where NSA fails: NSA is at fault", overrides={"model.attention": "dense"}),
    _mitigation("accumulation", "fails: no_sync", overrides={"train.accumulation": 2}),
    _mitigation("fsdp_blocks", "passes where DDP fails: DDP's reducer", parallel="fsdp"),
    _mitigation(
        "fsdp_bf16", "as above, in production's dtypes", parallel="fsdp",
        overrides={"train.dtype": "bf16", "train.lr": 1e-4, "train.min_lr": 1e-5},
    ),
    _mitigation(
        "gc_reentrant_no_sync", "fails as without no_sync: it is no workaround", fails_as="ready_twice",
        overrides={**REENTRANT, **UNUSED, "train.accumulation": 2},
    ),
    _mitigation("gc_keep_selection", "recomputation selects nothing twice", overrides={"train.gc_keep_selection": True}),
)  # fmt: skip


def _in_one_process(layers: int, seq_len: int, checkpointing: bool) -> Scenario:
    sizes = {"model.n_layers": layers, "train.seq_len": seq_len, "train.gradient_checkpointing": checkpointing}
    return Scenario(
        phase=8, parallel="none", overrides={**TWO_TRACES, **sizes}, reads_as="fails: backward, without any other rank",
        **_shaped(layers, seq_len, "one_process_{shape}_" + ("gc" if checkpointing else "no_gc")),
    )  # fmt: skip


def _long(name: str, steps: int, parallel: str, reads_as: str, check: str = "stability", **overrides: Any) -> Scenario:
    return Scenario(
        phase=9, name=name, steps=steps, check=check, parallel=parallel, reads_as=reads_as,
        overrides={"trace.mem_dump_every": 10, **overrides},
        on_cpu={"model.n_layers": 1 if steps == 100 else 2, "train.seq_len": 64, "trace.mem_dump_every": 5 if steps == 100 else 10},
    )  # fmt: skip


STABILITY = (
    _long("stability_100", 100, "ddp", "fails: what a hundred steps bring out", **{"trace.mem_dump_every": 5}),
    _long("fsdp_synthetic_200", 200, "fsdp", "fails: memory grows, a loss is no number, a gate dies"),
    _long("fsdp_fineweb_300", 300, "fsdp", "fails where fsdp_synthetic_200 passes: the data", **{"data.dataset": "fineweb_edu"}),
    _long(
        "fsdp_diagnosed_500", 500, "fsdp", "fails: what five hundred steps bring out, all traces on, or a file that they leave",
        "diagnosed",
        **{**ALL_TRACES, "trace.mem_dump_every": 10},
    ),
    Scenario(
        phase=9, name="sequence_4096", check="criteria", overrides={**TWO_TRACES, "train.seq_len": 4096},
        on_cpu={"train.seq_len": 256}, name_on_cpu="sequence_256", reads_as="fails: the length of a sequence, or its memory",
    ),
    Scenario(
        phase=9, name="batch_4", check="criteria", overrides={**TWO_TRACES, "train.batch_size": 4},
        reads_as="fails: several sequences a rank, or their memory",
    ),
    Scenario(
        phase=9, name="fsdp_sequence_4096", parallel="fsdp", check="criteria", overrides={**TWO_TRACES, "train.seq_len": 4096},
        on_cpu={"train.seq_len": 256}, name_on_cpu="fsdp_sequence_256", reads_as="fails where sequence_4096 passes: FSDP",
    ),
    Scenario(
        phase=9, name="fsdp_batch_4", parallel="fsdp", check="criteria", overrides={**TWO_TRACES, "train.batch_size": 4},
        reads_as="fails where batch_4 passes: FSDP",
    ),
    Scenario(
        phase=9, name="checkpoint_resume", check="resume", reads_as="fails: a run that is killed does not go on as it was",
        on_cpu={"model.n_layers": 2, "train.seq_len": 64},
    ),
    Scenario(
        phase=9, name="data_under_load", steps=20, check="data", on_cpu={"model.n_layers": 2},
        overrides={"data.dataset": "fineweb_edu"}, reads_as="fails: the model waits for its data",
    ),
)  # fmt: skip

TABLE = (
    *SEEDS, *CHECKPOINTING, *ALONE, *MITIGATIONS,
    *(_in_one_process(layers, seq_len, gc) for layers, seq_len in ((2, 512), (12, 2048)) for gc in (True, False)),
    *STABILITY,
)  # fmt: skip


# Of the table DDP x checkpointing, what `make test` runs on a CPU: a cell per outcome; `make plan PHASES=all` runs them all.
SAMPLED_CELLS = (
    "gc_nonreentrant_plain_once", "gc_nonreentrant_static_twice", "gc_reentrant_find_unused_once", "gc_reentrant_plain_twice",
    "gc_boundaries", "gc_inplace_writes",
)  # fmt: skip

# Rows of phase 9 that run in `make slow`, not in `make test`.
LEFT_OUT = ("fsdp_sequence_4096", "fsdp_batch_4", "checkpoint_resume")


# What one variable each adds to any scenario of several ranks (NSA_WITH_DDP_STATIC_GRAPH=1), for --bisect-mitigations: what a
# production run could live with.
BY_VARIABLE = {
    f"NSA_WITH_{row.name.upper()}": row
    for row in TABLE
    if row.name in (
        "ddp_static_graph", "find_unused_parameters", "conservative_kernels", "stop_gate_gradient", "no_bucket_view",
        "barrier_after_backward", "manual_averaging",
    )
}  # fmt: skip


# Variables of what a row sets, or leaves as its suite's configuration has it; a value exported for another run must not decide it.
ROW_DECIDES = ("CONFIG", "NSA_FORCE_BRANCH", "NSA_GC_RANGE", "NSA_DDP_STATIC_GRAPH")


def ignored_variables() -> list[str]:
    """Return a sentence on each of `ROW_DECIDES` that is set."""
    found = [(name, os.environ.get(name, "")) for name in ROW_DECIDES]
    return [f"{name}={value} is set, and not used: a scenario decides it" for name, value in found if value]


def read_settings(row: Scenario, size: Size) -> dict[str, Any]:
    """Return the fields of the configuration that a row has at a size."""
    return {
        "parallel.mode": row.parallel, "train.steps": row.steps, "train.batch_size": 1, "data.dataset": "synthetic",
        **size.settings, **row.overrides, **({} if size.is_real else row.on_cpu),
    }  # fmt: skip


def rows(size: Size) -> list[Any]:
    """Return the scenarios as parameters of a test, with their marks."""
    return [pytest.param(row, id=size.find_name(row), marks=_marks(row, size)) for row in TABLE]


def _marks(row: Scenario, size: Size) -> list[pytest.MarkDecorator]:
    limit = size.timeout * math.ceil(row.steps / 100)
    if not size.is_real and (row.steps >= 100 or row.check == "resume"):
        limit *= 3  # on a machine that is busy otherwise, too
    marks = [
        scenario(size.find_name(row), reads_as=row.reads_as), pytest.mark.timeout(limit),
        world_size(size.num_ranks if row.num_ranks > 1 else 1),
    ]  # fmt: skip
    if row.parallel == "ddp":
        marks.append(check_divergence)
    if row.fails_as:
        marks.append(fails_as(row.fails_as))
    if "parallel.backend" in row.overrides:
        marks.append(pytest.mark.backend(row.overrides["parallel.backend"]))
    facts = read_settings(row, size)
    if "model.force_branch" in facts:
        marks.append(branch(facts["model.force_branch"]))
    if facts.get("train.gradient_checkpointing", True) and row.uses == 1:
        marks.append(gc_range(facts.get("train.gc_range", f"0:{facts.get('model.n_layers', LAYERS)}")))
    if row.environment:
        marks.append(rank_env(**row.environment))
    if size.on_gpu:
        marks.append(gpu(memory=GPU_MEMORY))
    if size.is_real and row.steps > 100:
        marks.append(pytest.mark.long)
    if not size.is_real and (
        row.steps > 100 or row.name in LEFT_OUT or (row.phase == 6 and row.name not in SAMPLED_CELLS)
    ):
        marks.append(pytest.mark.slow)
    return [*marks, pytest.mark.phase(row.phase)]
