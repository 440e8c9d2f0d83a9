"""What the fields of a configuration must be to each other."""

from __future__ import annotations

from nsa.convert import ConfigError, parse_layer_range
from nsa.sections import Config, ModelConfig, TrainConfig


def validate(config: Config) -> None:
    """Check what fields must be to each other. Raises ConfigError naming the field."""
    check_model(config.model)
    _check_limits(config)
    _check_checkpointing(config.train, config.model)
    _check_compile(config)
    m, t = config.model, config.train
    if t.seq_len < m.l:
        raise ConfigError(
            f"train.seq_len={t.seq_len}: shorter than one compression block (model.l={m.l}); use at least {m.l}"
        )
    if config.trace.mem_dump_every < 0:
        raise ConfigError(f"NSA_MEM_DUMP_EVERY={config.trace.mem_dump_every}: must be 0 (never) or a number of steps")


def check_model(m: ModelConfig) -> None:
    """Check a model's shape. Raises ConfigError naming the field."""
    sizes = (
        "dim",
        "n_layers",
        "n_heads",
        "n_kv_heads",
        "d_k",
        "d_v",
        "l",
        "d",
        "l_sel",
        "w",
        "mlp_hidden",
        "gate_hidden",
    )
    for name in sizes:
        if getattr(m, name) < 1:
            raise ConfigError(f"model.{name}={getattr(m, name)}: must be at least 1")
    if m.n_heads % m.n_kv_heads:
        raise ConfigError(f"model.n_heads={m.n_heads}: must be a multiple of n_kv_heads={m.n_kv_heads}")
    if m.vocab_size < 256:
        raise ConfigError(f"model.vocab_size={m.vocab_size}: must be at least 256 (the tokenizer's tokens are bytes)")
    if m.d_k % 2:
        raise ConfigError(f"model.d_k={m.d_k}: must be even (rotary position embedding)")
    for name in ("l", "l_sel"):
        if getattr(m, name) % m.d:
            raise ConfigError(f"model.{name}={getattr(m, name)}: must be a multiple of the stride d={m.d}")
    if m.n_sel < 3:
        raise ConfigError(
            f"model.n_sel={m.n_sel}: must be at least 3 (1 initial and 2 local blocks are always selected)"
        )


def _check_limits(config: Config) -> None:
    """Numbers that have a least value."""
    t, data, kept = config.train, config.data, config.checkpoint
    limits = (
        ("train.threads", t.threads, 0), ("train.warmup_steps", t.warmup_steps, 0), ("train.steps", t.steps, 1),
        ("train.batch_size", t.batch_size, 1), ("train.accumulation", t.accumulation, 1), ("train.log_every", t.log_every, 1),
        ("train.max_skips", t.max_skips, 1),
        ("data.prefetch", data.prefetch, 1), ("data.workers", data.workers, 0), ("data.max_bad_rows", data.max_bad_rows, 0),
        ("checkpoint.every", kept.every, 0), ("checkpoint.keep", kept.keep, 1),
    )  # fmt: skip
    for name, value, least in limits:
        if value < least:
            raise ConfigError(f"{name}={value}: must be {'0 or more' if least == 0 else f'at least {least}'}")
    model, parallel = config.model, config.parallel
    not_negative = (
        ("train.min_lr", t.min_lr), ("train.weight_decay", t.weight_decay), ("train.grad_clip", t.grad_clip),
        ("train.watchdog_s", t.watchdog_s), ("trace.stats_every", config.trace.stats_every),
    )  # fmt: skip
    positive = (
        ("train.lr", t.lr), ("model.norm_eps", model.norm_eps), ("model.rope_theta", model.rope_theta),
        ("parallel.bucket_cap_mb", parallel.bucket_cap_mb),
    )  # fmt: skip
    for name, number in not_negative:
        if number < 0:
            raise ConfigError(f"{name}={number:g}: must be 0 or more")
    for name, number in positive:
        if number <= 0:
            raise ConfigError(f"{name}={number:g}: must be more than 0")
    most = (  # beyond which torch or the system fails, in their words or by a signal
        ("train.threads", t.threads, 1024), ("data.workers", data.workers, 1024), ("data.prefetch", data.prefetch, 2**16),
        ("train.watchdog_s", t.watchdog_s, 1e9), ("train.lr", t.lr, 1e6), ("parallel.bucket_cap_mb", parallel.bucket_cap_mb, 1e6),
    )  # fmt: skip
    for name, number, largest in most:
        if number > largest:
            raise ConfigError(f"{name}={number}: must be at most {largest:g}")
    if t.min_lr > t.lr:
        raise ConfigError(f"train.min_lr={t.min_lr:g}: must not exceed train.lr={t.lr:g}, from which it is reached")
    if not 0 <= t.seed < 2**63:
        raise ConfigError(f"train.seed={t.seed}: must be from 0 to 2**63 - 1")


def _check_checkpointing(t: TrainConfig, m: ModelConfig) -> None:
    if t.gc_reentrant and t.gc_keep_selection:
        raise ConfigError("train.gc_keep_selection: needs non-reentrant checkpointing; set train.gc_reentrant: false")
    if t.gc_range is not None:
        start, end = t.gc_range
        try:
            parse_layer_range(f"{start}:{end}", m.n_layers)
        except ConfigError as error:
            raise ConfigError(f"gc_range({str(error).partition(': ')[0]}): {str(error).partition(': ')[2]}") from None


def _check_compile(config: Config) -> None:
    """What a compiled step, and a captured one, cannot be combined with."""
    t, data = config.train, config.data
    against = (
        (config.parallel.mode == "fsdp", "parallel.mode: fsdp, whose units are gathered one by one"),
        (t.gradient_checkpointing and t.gc_reentrant, "train.gc_reentrant"),
        (data.boundaries, "data.boundaries, whose documents differ in number and length from batch to batch"),
        (config.trace.module_bwd, "NSA_TRACE_MODULE_BWD, whose hooks a graph cannot hold"),
    )
    for holds, what in against:
        if t.compile == "step" and holds:
            raise ConfigError(f"train.compile='step': is not possible with {what}; use blocks")
    uncaptured = (
        (t.compile != "step", f"train.compile: {t.compile}; set it to step"),
        (config.parallel.mode == "ddp", "parallel.mode: ddp, which reduces gradients while backward runs; use average"),
        (
            t.accumulation > 1,
            f"train.accumulation={t.accumulation}: a replay writes over the gradients of the one before",
        ),
    )
    for holds, what in uncaptured:
        if t.cuda_graph and holds:
            raise ConfigError(f"train.cuda_graph: is not possible with {what}")
