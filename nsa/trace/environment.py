"""``env.json`` of a training: versions, devices, variables and the revision of the code; secrets are masked."""

import json
import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from nsa.trace.events import SCHEMA
from nsa.trace.files import write_atomically
from nsa.trace.secrets import masked_arguments, masked_variables

_PACKAGES = ("pytest-nsa", "torch", "triton", "numpy", "pyarrow", "flash-attn")
_PREFIXES = ("NSA_", "TORCH", "PYTORCH_", "NCCL_", "GLOO_", "CUDA_", "OMP_", "SLURM_", "TRITON_", "HF_")
_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "CONFIG")


def variables(environ: dict[str, str]) -> dict[str, str]:
    """Return the variables that affect a run, with secrets masked."""
    shown = {name: value for name, value in sorted(environ.items()) if name.startswith(_PREFIXES) or name in _NAMES}
    return masked_variables(shown)


def revision() -> str:
    """Return the git revision of this code, with ``+`` if it was changed; '' outside of a repository."""
    here = Path(__file__).parent
    try:
        command = ["git", "-C", str(here), "describe", "--always", "--abbrev=12", "--dirty=+", "--exclude=*"]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def environment() -> dict[str, Any]:
    """Return versions, devices, command and variables: what a run's figures depend on."""
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    gpus = (
        [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    )
    return {
        "schema": SCHEMA,
        "python": platform.python_version(), "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cores": os.cpu_count(), "gpus": gpus, "versions": versions, "revision": revision(),
        "command": masked_arguments(sys.argv), "variables": variables(dict(os.environ)),
    }  # fmt: skip


def write_environment(path: Path, **more: Any) -> None:
    """Write `environment` as JSON, with ``more`` fields."""
    write_atomically(path, json.dumps({**environment(), **more}, indent=1) + "\n", follow=True)
