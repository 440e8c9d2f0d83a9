"""``python -m nsa.export CHECKPOINT FILE.safetensors``: the weights of a checkpoint, without pickles, for other programs."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from nsa.config import ConfigError, ModelConfig


def export(checkpoint: Path, target: Path) -> int:
    """Write the weights of ``checkpoint`` (a step_* folder) to ``target``; returns how many tensors.

    The file's metadata has the step and, as JSON, the model's configuration. Raises ConfigError for a damaged checkpoint, and
    for a file that cannot be written.
    """
    import torch

    from nsa.training.checkpoint import load_model

    try:
        from safetensors import SafetensorError
        from safetensors.torch import save_file
    except ImportError:
        raise ConfigError("export needs safetensors; pip install 'pytest-nsa[export]'") from None
    if target.is_dir():
        raise ConfigError(f"{target}: is a folder; give the file to write, as in {target / 'weights.safetensors'}")
    model, described = load_model(checkpoint)
    weights: dict[str, torch.Tensor] = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    metadata = {"step": str(described.step), "model": json.dumps(dataclasses.asdict(ModelConfig(**described.model)))}
    partial = target.with_name(target.name + ".partial")
    try:
        save_file(weights, partial, metadata=metadata)
    except SafetensorError as error:  # of a full disk, too
        raise ConfigError(f"{target} cannot be written: {error}") from None
    partial.replace(target)
    return len(weights)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m nsa.export", description=__doc__)
    parser.add_argument("checkpoint", type=Path, help="a step_* folder")
    parser.add_argument("target", type=Path, help="the file to write")
    arguments = parser.parse_args(argv)
    try:
        count = export(arguments.checkpoint, arguments.target)
    except (ConfigError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{arguments.target}: {count} tensors")
    return 0


if __name__ == "__main__":
    sys.exit(main())
