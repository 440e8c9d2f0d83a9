"""The sections of a configuration, as frozen dataclasses: fields, types, defaults and limits."""

from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeVar

from nsa.sizes import Branch, Sizes

_Number = TypeVar("_Number", int, float)


def number(default: _Number, *, least: float = 0, above: float | None = None, most: float | None = None) -> _Number:
    """Return a field that must be at least ``least``, or more than ``above``, and at most ``most``."""
    found: _Number = field(default=default, metadata={"least": least, "above": above, "most": most})
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Shape of the transformer. Blocks, stride and window are in tokens (`nsa.Sizes`). ``rope_theta`` is the base of the rotary
    frequencies, rope_theta^(-2i/head_dim); ``norm_eps`` is added to the mean square in every norm.
    """

    vocab_size: int = number(256, least=256)  # bytes are tokens
    dim: int = number(768, least=1)
    n_layers: int = number(12, least=1)
    n_heads: int = number(12, least=1)
    n_kv_heads: int = number(2, least=1)
    head_dim: int = number(64, least=1)
    v_head_dim: int = number(64, least=1)
    compress_block: int = 32
    compress_stride: int = 16
    select_block: int = 64
    n_select: int = 16
    window: int = 512
    compression: Literal["mean", "mlp"] = "mean"
    mlp_hidden: int = number(3712, least=1)
    gate_hidden: int = number(192, least=1)
    attention: Literal["nsa", "dense"] = "nsa"
    backend: Literal["auto", "reference", "sdpa", "math", "cpu", "triton", "flash"] = "auto"
    force_branch: Branch | None = None
    stop_gate_gradient: bool = False
    rope_theta: float = number(10000.0, above=0)
    norm_eps: float = number(1e-6, above=0)

    @property
    def sizes(self) -> Sizes:
        return Sizes(self.compress_block, self.compress_stride, self.select_block, self.n_select, self.window)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """One training run. A step has ``accumulation`` micro-steps of ``batch_size`` sequences of ``seq_len`` tokens per rank. ``lr``
    rises over ``warmup_steps`` and falls to ``min_lr``; ``grad_clip`` bounds the norm of all gradients (0: no bound).
    ``gc_range`` is half open: layers start <= i < end recompute in backward; with ``gc_keep_selection`` they keep which blocks
    they selected. Figures are read from the device, which waits for it, and written every ``log_every`` steps. ``compile`` by
    torch.compile: ``blocks``, each by itself, or the ``step``, which is the whole model in one graph, the loss and, on a CPU,
    the optimizer. ``cuda_graph``: a compiled step is replayed as CUDA graphs.
    """

    steps: int = number(100, least=1)
    batch_size: int = number(1, least=1)
    seq_len: int = number(2048, least=1)
    accumulation: int = number(1, least=1)
    lr: float = number(3e-4, above=0, most=1e6)
    min_lr: float = number(3e-5)
    warmup_steps: int = number(20)
    weight_decay: float = number(0.1)
    grad_clip: float = number(1.0)
    seed: int = number(1234, most=2**63 - 1)  # torch takes no larger one
    dtype: Literal["bf16", "fp32"] = "bf16"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: int = number(0, most=1024)
    gradient_checkpointing: bool = True
    gc_range: tuple[int, int] | None = None
    gc_reentrant: bool = False
    gc_keep_selection: bool = False
    log_every: int = number(1, least=1)
    watchdog_s: float = number(120.0, most=1e9)
    compile: Literal["none", "blocks", "step"] = "none"
    cuda_graph: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """``fineweb_edu`` reads the parquet file, or folder of them, at ``path`` (in a YAML relative to its folder). Bytes are tokens.
    ``shuffle``: documents come in an order that follows from ``train.seed`` and the pass over them. ``validation``: a file or
    folder, of which ``validation_samples`` samples give a held-out loss every ``validate_every`` steps, and after the last.
    ``workers`` processes per rank read batches ahead (0: none). More than
    ``max_bad_rows`` rows that cannot be read end the run.
    """

    dataset: str = "synthetic"
    path: str | None = None
    shuffle: bool = False
    validation: str | None = None
    validation_samples: int = number(64, least=1)
    validate_every: int = number(100, least=1)
    workers: int = number(1, most=1024)
    max_bad_rows: int = number(100)


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelConfig:
    """How ranks share the work; the DDP options keep DDP's own names. ``average``: no wrapper, gradients are averaged by hand
    after backward. ``barrier_after_backward``: the ranks meet in a barrier then. ``no_sync``: accumulation reduces in its last
    micro-step only. ``safe``: every known mitigation at once (`SAFE`), for a run that has to go on tonight.
    """

    mode: Literal["none", "ddp", "fsdp", "average"] = "none"
    backend: Literal["auto", "nccl", "gloo"] = "auto"
    static_graph: bool = False
    find_unused_parameters: bool = False
    broadcast_buffers: bool = True
    gradient_as_bucket_view: bool = True
    bucket_cap_mb: float = number(25.0, above=0, most=1e6)
    no_sync: bool = True
    barrier_after_backward: bool = False
    safe: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceConfig:
    """Which traces a run prints; all off by default. ``mem_dump_every`` and ``stats_every`` are in steps (0: never)."""

    grads: bool = False
    module_bwd: bool = False
    ddp_buckets: bool = False
    mem_dump_every: int = number(0)
    stats_every: int = number(10)


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    """``every`` steps (0: never), and after the last, all that a run needs to go on is written, and the newest ``keep`` stay."""

    every: int = number(0)
    keep: int = number(3, least=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """Everything a run needs. ``source`` is the file that it came from."""

    model: ModelConfig = field(default_factory=ModelConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    data: DataConfig = field(default_factory=DataConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    trace: TraceConfig = field(default_factory=TraceConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    source: str = ""


SECTIONS: dict[str, Any] = {
    f.name: f.default_factory for f in fields(Config) if f.name != "source"
}  # the class of each
