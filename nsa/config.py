"""Configuration: strict YAML into the dataclasses of `nsa.sections`, and the one place that reads ``NSA_*`` variables.

Precedence, lowest first: the defaults there, the YAML file, environment variables, explicit overrides. All four are read as text:
a field's type decides what its text means, so that 6:12 is no number to the base 60, and 1e-4 is one.
Nothing here imports torch, so that a bad value is refused before anything expensive starts.
"""

import dataclasses
import difflib
import functools
import importlib.util
import math
import os
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from nsa.sections import SECTIONS, Config, ModelConfig, ParallelConfig
from nsa.sizes import check_sizes
from nsa.trace import job_folders

__all__ = ["Config", "ConfigError", "ModelConfig", "ParallelConfig", "load_config"]

MOST_SHOWN = 80  # characters of a value
ON, OFF = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
Values = dict[str, dict[str, Any]]  # by section and field


class ConfigError(ValueError):
    """A setting that cannot be used. The message is one line: what, its value, and the right form."""


# What safe mode sets: conservative kernels, no gradient through the gates, and DDP in its plainest form.
SAFE: dict[str, dict[str, Any]] = {
    "model": {"backend": "math", "stop_gate_gradient": True},
    "train": {"gc_reentrant": False, "gc_keep_selection": False, "compile": "none", "cuda_graph": False},
    "parallel": {
        "find_unused_parameters": True, "static_graph": False, "broadcast_buffers": False, "gradient_as_bucket_view": False,
        "bucket_cap_mb": 2.0, "barrier_after_backward": True,
    },
}  # fmt: skip
SAFE_ENVIRONMENT = {"NCCL_P2P_DISABLE": "1"}


@dataclass(frozen=True, slots=True)
class Variable:
    """An environment variable: which field it sets, and what it does (shown by ``--help``)."""

    target: str
    form: str
    effect: str


VARIABLES: dict[str, Variable] = {
    "NSA_TRACE_GRADS": Variable("trace.grads", "0|1", "which parameters' gradients arrived, after each backward"),
    "NSA_TRACE_MODULE_BWD": Variable("trace.module_bwd", "0|1", "which modules' backward ran, and which did not"),
    "NSA_TRACE_DDP_BUCKETS": Variable("trace.ddp_buckets", "0|1", "log each DDP bucket before it is reduced"),
    "NSA_GC_RANGE": Variable("train.gc_range", "start:end", "checkpoint only layers start <= i < end, as in 0:6"),
    "NSA_DDP_STATIC_GRAPH": Variable("parallel.static_graph", "0|1", "DDP with static_graph"),
    "NSA_FORCE_BRANCH": Variable("model.force_branch", "cmp|sel|win", "one branch alone"),
    "NSA_MEM_DUMP_EVERY": Variable("trace.mem_dump_every", "N", "memory report every N steps (0: never)"),
    "NSA_TRACE_DIR": Variable("", "path", "where any training leaves evidence for pytest-nsa watch and diagnose"),
    "NSA_TRACE_FLOW": Variable("", "0|1", "record the ranks' control flow, by which diagnose finds where they part"),
    "NSA_TRACE_LEVEL": Variable("", "full|light", "light: evidence of collectives and a heartbeat alone"),
    "NSA_USE_FA2": Variable("", "0|1", "flash-attn for the branches that can use it"),
    "TORCH_BACKEND": Variable("parallel.backend", "nccl|gloo", "the process group's backend"),
    "CONFIG": Variable("", "path", "the YAML file, as --config"),
}


def load_config(path: str | os.PathLike[str], **overrides: Any) -> Config:
    """Read a YAML file, then the environment, then ``overrides``; check everything.

    An override names a field of one section (``steps=3``), a dotted field (``**{"train.steps": 3}``) or a section
    (``model={"n_layers": 2}``). Raises ConfigError, one line, for any key or value that cannot be used.
    """
    file, where, example = Path(path), f"config {str(path)!r}", "give a YAML file, as in configs/tiny_cpu.yaml"
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeError:
        raise ConfigError(f"{where}: not text in UTF-8; {example}") from None
    except OSError as error:
        raise ConfigError(f"{where}: {error.strerror or error}; {example}") from None
    tree = _parse(text, where) or {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{where}: must hold sections ({', '.join(SECTIONS)}), got {type(tree).__name__}")
    values: Values = {name: {} for name in SECTIONS}
    _merge_tree(values, tree, where)
    # The path is relative to the file that names it, so that it holds wherever the program is started.
    for key in ("path", "validation"):
        if values["data"].get(key):
            values["data"][key] = os.path.normpath(file.parent / values["data"][key])
    _merge_environment(values, os.environ)
    _merge_overrides(values, overrides)
    if values["parallel"].get("safe"):
        for section, fields in SAFE.items():
            values[section].update(fields)
    config = Config(source=str(path), **{name: cls(**values[name]) for name, cls in SECTIONS.items()})
    check_model(config.model)
    _check_training(config)
    return config


def _parse(text: str, where: str) -> Any:
    """Return a YAML text as mappings, lists and texts. ConfigError also for a key that is there twice."""
    import yaml

    class Loader(yaml.BaseLoader):
        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
            for i, key in enumerate(keys):
                if key in keys[:i]:
                    raise yaml.YAMLError(f"the key {shown(key)} is there twice{node.start_mark}")
            found: dict[Any, Any] = super().construct_mapping(node, deep)
            return found

    try:
        return yaml.load(text, Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{where}: not valid YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise ConfigError(f"{where}: nested too deeply") from None


def as_yaml(config: Config) -> str:
    """Return every field as a YAML that `load_config` reads to an equal configuration, from any folder."""
    import yaml

    tree = {name: dataclasses.asdict(getattr(config, name)) for name in SECTIONS}
    if config.train.gc_range is not None:
        tree["train"]["gc_range"] = "{}:{}".format(*config.train.gc_range)
    for key in ("path", "validation"):
        if tree["data"][key] is not None:
            tree["data"][key] = os.path.abspath(tree["data"][key])
    return yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)


def model_config(entries: Any, where: str) -> ModelConfig:
    """Return the model of a section's keys and values, each checked. Raises ConfigError."""
    values: Values = {name: {} for name in SECTIONS}
    _merge_tree(values, {"model": entries}, where)
    shape = ModelConfig(**values["model"])
    check_model(shape)
    return shape


def environment_help() -> str:
    """Return the variables, one per line, for ``--help``."""
    width = max(len(f"{name}={v.form}") for name, v in VARIABLES.items())
    return "\n".join(f"  {f'{name}={v.form}':<{width}}  {v.effect}" for name, v in VARIABLES.items())


def unknown_variables() -> list[str]:
    """Return a warning for each ``NSA_*`` variable that is not read: usually a typing error."""
    # pytest-nsa sets its own in a program that a test starts.
    known = {*VARIABLES, job_folders.FOLDER, job_folders.HOST}
    unknown = sorted(k for k in os.environ if k.startswith("NSA_") and k not in known)
    return [f"{name} is not a variable of this program{_did_you_mean(name, VARIABLES)}" for name in unknown]


# --- from the four sources to fields ----------------------------------------------------------------------------------


def _merge_tree(values: Values, tree: Mapping[str, Any], where: str) -> None:
    for section, entries in tree.items():
        if section not in SECTIONS:
            raise ConfigError(f"{where}: unknown section {shown(section)}{_did_you_mean(str(section), SECTIONS)}")
        if not isinstance(entries, Mapping):
            raise ConfigError(f"{where}: section {section!r} must hold key: value pairs, got {shown(entries)}")
        names = [f.name for f in dataclasses.fields(SECTIONS[section])]
        for key, value in entries.items():
            if key not in names:
                raise ConfigError(f"{where}: unknown key {section}.{key}{_did_you_mean(str(key), names)}")
            values[section][key] = convert(section, key, value, f"{where}: {section}.{key}")


def _merge_environment(values: Values, environ: Mapping[str, str]) -> None:
    for name, variable in VARIABLES.items():
        text = environ.get(name, "")
        if text == "":
            continue
        if name == "NSA_USE_FA2":
            values["model"].update(_use_flash(text, values["model"].get("backend")))
        elif variable.target:
            section, key = variable.target.split(".")
            values[section][key] = convert(section, key, text, f"{name}={shown(text)}")
        if name == "NSA_GC_RANGE":
            values["train"]["gradient_checkpointing"] = True


def _use_flash(text: str, backend: str | None) -> dict[str, Any]:
    """Return what NSA_USE_FA2 changes in the model's section: 1 requires flash-attn, 0 takes it out where the file names it."""
    if not switch(text, f"NSA_USE_FA2={shown(text)}"):
        return {"backend": "auto"} if backend == "flash" else {}
    if importlib.util.find_spec("flash_attn") is None:
        raise ConfigError("NSA_USE_FA2='1': flash-attn is not installed; install it, or set NSA_USE_FA2=0")
    return {"backend": "flash"}


def _merge_overrides(values: Values, overrides: Mapping[str, Any]) -> None:
    owners: dict[str, list[str]] = {}
    for section, cls in SECTIONS.items():
        for field in dataclasses.fields(cls):
            owners.setdefault(field.name, []).append(section)
    for name, value in overrides.items():
        if name in SECTIONS:
            _merge_tree(values, {name: value}, "override")
            continue
        section, _, key = name.rpartition(".")
        holders = owners.get(key, [])
        if not section and len(holders) > 1:
            those = " or ".join(f"{holder}.{key}" for holder in holders)
            raise ConfigError(f"override: {key!r} is a key of several sections; give {those}")
        section = section or next(iter(holders), "")
        if section not in holders:
            known = [f"{holder}.{field}" for field, found in owners.items() for holder in found]
            near = f"{holders[0]}.{key}" if holders else name
            raise ConfigError(f"override: unknown key {name!r}{_did_you_mean(near, known if '.' in name else owners)}")
        values[section][key] = convert(section, key, value, f"override {name}={shown(value)}")


def convert(section: str, key: str, value: Any, where: str) -> Any:
    """Return a text, or a value of Python, as a field's type and within its limits. Raises ConfigError."""
    kinds, limits = _field(section, key)
    text = _as_text(value)
    if text in ("null", "~", "None") and type(None) in kinds:
        return None
    kind = next(k for k in kinds if k is not type(None))
    if typing.get_origin(kind) is Literal:
        for choice in typing.get_args(kind):
            if str(choice) == text:
                return choice
        choices = ", ".join(map(str, typing.get_args(kind)))
        raise _refusal(where, f"must be one of {choices}", value)
    if typing.get_origin(kind) is tuple:
        return _layers(text, value, where)
    if kind is bool:
        return switch(text, where)
    if kind in (int, float):
        return _number(kind, text, value, where, limits)
    if not text:
        raise _refusal(where, "must be text, and not empty", value)
    return text


@functools.cache
def _field(section: str, key: str) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """Return the types that a field may have, and its limits."""
    kind = typing.get_type_hints(SECTIONS[section])[key]
    (field,) = (f for f in dataclasses.fields(SECTIONS[section]) if f.name == key)
    is_union = typing.get_origin(kind) in (types.UnionType, typing.Union)
    return typing.get_args(kind) if is_union else (kind,), field.metadata


def _as_text(value: Any) -> str:
    """Return a value of Python as YAML has it; '' for one that no field takes."""
    if isinstance(value, str):
        return value
    if isinstance(value, tuple) and len(value) == 2:
        return f"{value[0]}:{value[1]}"
    return str(value) if value is None or isinstance(value, bool | int | float) else ""


def switch(text: str, where: str) -> bool:
    """Return what a text switches, in any case; ConfigError for another text."""
    if text.lower() in (*ON, *OFF):
        return text.lower() in ON
    raise ConfigError(f"{where}: must be 0 or 1 (or true, yes, on; false, no, off)")


def _layers(text: str, value: Any, where: str) -> tuple[int, int]:
    """Return 'start:end', half open, as numbers."""
    start, colon, end = text.partition(":")
    if not colon or not start.strip().isdecimal() or not end.strip().isdecimal():
        raise _refusal(where, "must be start:end in whole layers, as in '0:6' (layers 0 to 5)", value)
    if int(start) >= int(end):
        raise _refusal(where, "the range must go up, as in '0:6' (layers 0 to 5)", value)
    return int(start), int(end)


def _number(kind: type, text: str, value: Any, where: str, limits: Mapping[str, Any]) -> int | float:
    try:
        found: int | float = int(text, 0) if kind is int else float(text)
    except ValueError:
        what = "a whole number" if kind is int else "a number"
        raise _refusal(where, f"must be {what}", value) from None
    if kind is float and not math.isfinite(found):
        raise _refusal(where, "must be a finite number", value)
    least, above, most = (limits.get(name) for name in ("least", "above", "most"))
    if above is not None and found <= above:
        raise _refusal(where, f"must be more than {above}", value)
    if above is None and least is not None and found < least:
        raise _refusal(where, f"must be {f'at least {least}' if least else '0 or more'}", value)
    if most is not None and found > most:
        raise _refusal(where, f"must be at most {most:g}", value)
    return found


def _refusal(where: str, wanted: str, value: Any) -> ConfigError:
    return ConfigError(f"{where}: {wanted}, got {shown(value)}")


def _did_you_mean(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(known)}"


def shown(value: Any) -> str:
    """Return ``repr(value)`` for a message, 80 characters at most."""
    text = repr(value)
    return text if len(text) <= MOST_SHOWN else f"{text[: MOST_SHOWN - 3]}..."


# --- what fields must be to each other --------------------------------------------------------------------------------


def check_model(m: ModelConfig) -> None:
    """Check a model's shape. Raises ConfigError naming the field."""
    if m.n_heads % m.n_kv_heads:
        raise ConfigError(f"model.n_heads={m.n_heads}: must be a multiple of n_kv_heads={m.n_kv_heads}")
    if m.head_dim % 2:
        raise ConfigError(f"model.head_dim={m.head_dim}: must be even (rotary position embedding)")
    try:
        check_sizes(**m.sizes._asdict())
    except ValueError as error:
        raise ConfigError(f"model.{error}") from None


def _check_training(config: Config) -> None:
    """Check what the fields of a training must be to each other, and to the model."""
    t, m = config.train, config.model
    if t.min_lr > t.lr:
        raise ConfigError(f"train.min_lr={t.min_lr:g}: must not exceed train.lr={t.lr:g}, from which it is reached")
    if t.seq_len < m.compress_block:
        raise ConfigError(
            f"train.seq_len={t.seq_len}: shorter than one compression block (model.compress_block={m.compress_block})"
        )
    if t.gc_reentrant and t.gc_keep_selection:
        raise ConfigError("train.gc_keep_selection: needs non-reentrant checkpointing; set train.gc_reentrant: false")
    if t.gc_range is not None and t.gc_range[1] > m.n_layers:
        given = "{}:{}".format(*t.gc_range)
        raise ConfigError(
            f"gc_range({given!r}): the model has {m.n_layers} layers; the largest range is '0:{m.n_layers}'"
        )
    against = (
        (config.parallel.mode == "fsdp", "parallel.mode: fsdp, whose units are gathered one by one"),
        (t.gradient_checkpointing and t.gc_reentrant, "train.gc_reentrant"),
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
