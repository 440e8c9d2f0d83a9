"""What every benchmark does with its figures: add the machine and the versions, print them, keep them where ``--json`` names."""

from __future__ import annotations

import argparse
import os
import platform
import time
from pathlib import Path
from typing import Any

import torch

from nsa.trace.strict_json import to_json


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """Return a parser of a benchmark's options with ``--json``."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    return parser


def environment() -> dict[str, Any]:
    """Return the machine and versions that figures belong to."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "device": gpu or platform.processor() or platform.machine(), "cores": os.cpu_count(), "torch": torch.__version__,
        "python": platform.python_version(), "date": time.strftime("%Y-%m-%d"),
    }  # fmt: skip


def keep(figures: dict[str, Any], path: Path | None) -> None:
    """Print ``figures`` and the environment as JSON; write them to ``path``, if any."""
    text = to_json({**figures, **environment()}, indent=1)
    print(text)
    if path is not None:
        path.write_text(text + "\n", encoding="utf-8")
