"""The figures of a training's steps: one line per step in ``metrics.jsonl``, and on the terminal."""

import time
from pathlib import Path

from nsa.config import Config
from nsa.trace.strict_json import to_json
from nsa.training.trainer import StepResult


class Metrics:
    """The metrics of a run, on rank 0. Every line is flushed, so that a killed run loses at most its current line."""

    def __init__(self, folder: Path, config: Config) -> None:
        self.config = config
        path = folder / "metrics.jsonl"
        self._file = path.open("a+", encoding="utf-8", buffering=1)
        self._file.seek(max(0, self._file.tell() - 1))
        if self._file.read() not in ("", "\n"):  # an incomplete line: its writer was killed
            self._file.write("\n")

    def add(self, result: StepResult) -> str:
        """Write a step; return the line for the terminal."""
        rate = result.tokens / max(result.seconds, 1e-9)
        fields = {
            "step": result.step, "loss": result.loss, "grad_norm": result.grad_norm, "lr": result.lr,
            "tokens": result.tokens, "tokens_per_s": rate, "peak_mib": result.peak_mib, "gates": result.gates,
            "time": time.time(),
        }  # fmt: skip
        held_out = result.validation_loss
        if held_out is not None:
            fields["validation_loss"] = held_out
        self._file.write(to_json(fields) + "\n")
        gates = " ".join(f"{name} {mean:.2f}" for name, mean in result.gates.items())
        line = (
            f"step {result.step}/{self.config.train.steps} loss {result.loss:.4f} lr {result.lr:.2e} "
            f"tokens/s {rate:.0f} peak {result.peak_mib:.0f} MiB "
            f"{f'gates {gates} ' if gates else ''}{'' if held_out is None else f'validation {held_out:.4f}'}"
        )
        return line.rstrip()

    def close(self) -> None:
        self._file.close()
