"""Configuration: strict YAML into the dataclasses of `nsa.sections`, and the one place that reads ``NSA_*`` variables.

Precedence, lowest first: the defaults there, the YAML file, environment variables, explicit overrides.
Nothing here imports torch, so that a bad value is refused before anything expensive starts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nsa.convert import ConfigError, convert, did_you_mean, field_names, parse_layer_range, shown, switch
from nsa.sections import BRANCHES, SECTIONS, Branch, Config, ModelConfig, ParallelConfig
from nsa.trace import job_folders
from nsa.validate import check_model, validate

__all__ = [
    "BRANCHES",
    "Branch",
    "Config",
    "ConfigError",
    "ModelConfig",
    "ParallelConfig",
    "load_config",
    "parse_layer_range",
    "validate",
]

MOST_TEXT = 256 << 10  # bytes of a configuration
MOST_PROBLEM = 200  # characters of what is wrong with it

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
        with file.open("rb") as opened:
            data = opened.read(MOST_TEXT + 1)
        text = data.decode()
    except UnicodeError:
        raise ConfigError(f"{where}: not text in UTF-8; {example}") from None
    except OSError as error:
        raise ConfigError(f"{where}: {error.strerror or error}; {example}") from None
    if len(data) > MOST_TEXT:
        raise ConfigError(f"{where}: has more than {MOST_TEXT >> 10} KiB; give a YAML file")
    tree = _parse(text, where)
    if tree is None:
        tree = {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{where}: must hold sections ({', '.join(SECTIONS)}), got {type(tree).__name__}")
    values: dict[str, dict[str, Any]] = {name: {} for name in SECTIONS}
    _merge_tree(values, tree, where)
    # The path is relative to the file that names it, so that it holds wherever the program is started.
    if values["data"].get("path"):
        values["data"]["path"] = os.path.normpath(file.parent / values["data"]["path"])
    _merge_environment(values, os.environ)
    _merge_overrides(values, overrides)
    return _build(values, str(path))


def _parse(text: str, where: str) -> Any:
    import yaml

    from nsa import yaml_text

    try:
        return yaml_text.parse(text)
    except (yaml.YAMLError, ValueError) as error:
        # ValueError: a date that there is not, a number of thousands of digits.
        raise ConfigError(f"{where}: not valid YAML: {' '.join(str(error).split())[:MOST_PROBLEM]}") from None
    except RecursionError:
        raise ConfigError(f"{where}: nested too deeply; a configuration has sections, and keys in them") from None


def as_yaml(config: Config) -> str:
    """Return every field as a YAML that `load_config` reads to an equal configuration, from any folder."""
    import yaml

    tree = {name: dataclasses.asdict(getattr(config, name)) for name in SECTIONS}
    if config.train.gc_range is not None:
        tree["train"]["gc_range"] = "{}:{}".format(*config.train.gc_range)
    if config.data.path is not None:
        tree["data"]["path"] = os.path.abspath(config.data.path)
    return yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)


def model_config(entries: Any, where: str) -> ModelConfig:
    """Return the model of a section's keys and values, each checked. Raises ConfigError."""
    values: dict[str, dict[str, Any]] = {name: {} for name in SECTIONS}
    _merge_tree(values, {"model": entries}, where)
    shape = ModelConfig(**values["model"])
    check_model(shape)
    return shape


def value_of(text: str, where: str) -> Any:
    """Return what YAML reads ``text`` as; numbers such as 3e-4, which YAML 1.1 takes for text, too. Raises ConfigError."""
    value = _parse(text, where)
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            return float(value)
    return value


def environment_help() -> str:
    """Return the variables, one per line, for ``--help``."""
    width = max(len(f"{name}={v.form}") for name, v in VARIABLES.items())
    return "\n".join(f"  {f'{name}={v.form}':<{width}}  {v.effect}" for name, v in VARIABLES.items())


def config_path_from_environment() -> str | None:
    """Return the value of ``CONFIG``, if set."""
    return os.environ.get("CONFIG") or None


def unknown_variables() -> list[str]:
    """Return a warning for each ``NSA_*`` variable that is not read: usually a typing error."""
    # pytest-nsa sets its own in a program that a test starts.
    known = {*VARIABLES, job_folders.FOLDER, job_folders.HOST}
    unknown = sorted(k for k in os.environ if k.startswith("NSA_") and k not in known)
    return [f"{name} is not a variable of this program{did_you_mean(name, VARIABLES)}" for name in unknown]


def _merge_tree(values: dict[str, dict[str, Any]], tree: Mapping[str, Any], where: str) -> None:
    for section, entries in tree.items():
        if section not in SECTIONS:
            raise ConfigError(f"{where}: unknown section {shown(section)}{did_you_mean(str(section), SECTIONS)}")
        if not isinstance(entries, Mapping):
            raise ConfigError(f"{where}: section {section!r} must hold key: value pairs, got {shown(entries)}")
        names = field_names(SECTIONS[section])
        for key, value in entries.items():
            if key not in names:
                raise ConfigError(f"{where}: unknown key {section}.{key}{did_you_mean(str(key), names)}")
            values[section][key] = convert(SECTIONS[section], key, value, f"{where}: {section}.{key}")


def _merge_environment(values: dict[str, dict[str, Any]], environ: Mapping[str, str]) -> None:
    for name, variable in VARIABLES.items():
        text = environ.get(name, "")
        if text == "":
            continue
        if name == "NSA_USE_FA2":
            values["model"].update(_use_flash(text, values["model"].get("backend")))
            continue
        if not variable.target:
            continue
        section, key = variable.target.split(".")
        values[section][key] = convert(SECTIONS[section], key, text, f"{name}={shown(text)}", from_text=True)
        if name == "NSA_GC_RANGE":
            values["train"]["gradient_checkpointing"] = True


def _use_flash(text: str, backend: str | None) -> dict[str, Any]:
    """Return what NSA_USE_FA2 changes in the model's section: 1 requires flash-attn, 0 takes it out where the file names it."""
    if not switch(text, f"NSA_USE_FA2={shown(text)}"):
        return {"backend": "auto"} if backend == "flash" else {}
    import importlib.util

    if importlib.util.find_spec("flash_attn") is None:
        raise ConfigError("NSA_USE_FA2='1': flash-attn is not installed; install it, or set NSA_USE_FA2=0")
    return {"backend": "flash"}


def _merge_overrides(values: dict[str, dict[str, Any]], overrides: Mapping[str, Any]) -> None:
    owners: dict[str, list[str]] = {}
    for section, cls in SECTIONS.items():
        for key in field_names(cls):
            owners.setdefault(key, []).append(section)
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
        if section not in SECTIONS or key not in field_names(SECTIONS[section]):
            known = [f"{holder}.{field}" for field, found in owners.items() for holder in found]
            hint = did_you_mean(
                f"{holders[0]}.{key}" if "." in name and holders else name, known if "." in name else owners
            )
            raise ConfigError(f"override: unknown key {name!r}{hint}")
        values[section][key] = convert(SECTIONS[section], key, value, f"override {name}={shown(value)}")


def _build(values: dict[str, dict[str, Any]], source: str) -> Config:
    if values["parallel"].get("safe"):
        for section, fields in SAFE.items():
            values[section].update(fields)
    config = Config(source=source, **{name: cls(**values[name]) for name, cls in SECTIONS.items()})
    validate(config)
    return config
