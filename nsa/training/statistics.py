"""Statistics of the model's parts: gates, selected blocks, fallbacks of the kernels, dtypes."""

import csv
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nsa.kernels.dispatch import counters
from nsa.model.attention import Gate, NSAAttention
from nsa.sizes import BRANCHES
from nsa.trace import logger
from nsa.trace.names import plain_name
from nsa.trace.strict_json import to_json

# A branch whose mean gate lies below this in every layer has died out.
COLLAPSED = 0.02
SATURATED = 0.01  # a gate that is closer to 0 or 1 gets almost no gradient
SELECTION_FIELDS = ("step", "layer", "blocks_mean", "distance_mean", "entropy", "share_initial", "share_local")


class GateStatistics:
    """Mean, standard deviation and saturated share of each gate over batch, tokens and heads, from the last forward.

    A forward only stores the gates; the figures are computed when they are read, which waits for the device.
    """

    def __init__(self, model: nn.Module) -> None:
        self._last: dict[str, torch.Tensor] = {}  # [..., H, 3]
        self._died: set[tuple[str, str]] = set()
        self._listens = True
        for name, module in model.named_modules():
            if isinstance(module, Gate):
                module.register_forward_hook(self._hook(plain_name(name)))

    def _hook(self, name: str) -> Callable[[nn.Module, Any, torch.Tensor], None]:
        def saw(module: nn.Module, args: Any, gates: torch.Tensor) -> None:
            if self._listens:
                self._last[name] = gates.detach()

        return saw

    def listen(self, on: bool) -> None:
        """Store the gates of forwards from now on, or stop: then the figures stay those of the last stored forward."""
        self._listens = on

    def means(self) -> dict[str, float]:
        """Return the mean gate of each branch over all layers; {} for a model without gates."""
        if not self._last:
            return {}
        mean = torch.stack([_flat(gates).mean(0) for gates in self._last.values()]).mean(0).tolist()
        return dict(zip(BRANCHES, mean, strict=True))

    def write(self, path: Path, step: int) -> None:
        """Append a line to ``gate_health.jsonl``: the figures per layer; warn, once, about a gate that has died out."""
        layers = {
            name: dict(zip(("mean", "std", "saturated"), _figures(gates).tolist(), strict=True))
            for name, gates in self._last.items()
        }
        means = self.means()
        collapsed = [branch for branch, mean in means.items() if mean < COLLAPSED]
        died = {
            (n, b)
            for n, found in layers.items()
            for b, mean in zip(BRANCHES, found["mean"], strict=True)
            if mean < COLLAPSED
        }
        for name, branch in sorted(died - self._died):
            logger.warning("[gates] step %d: the gate of branch %s has died out in %s", step, branch, name)
        self._died |= died
        with path.open("a", encoding="utf-8") as file:
            file.write(to_json({"step": step, "means": means, "collapsed": collapsed, "layers": layers}) + "\n")


def _flat(gates: torch.Tensor) -> torch.Tensor:
    return gates.float().flatten(0, -2)


def _figures(gates: torch.Tensor) -> torch.Tensor:
    """Return [3, 3]: mean, standard deviation and saturated share, a column per branch."""
    flat = _flat(gates)
    saturated = (flat.sub(0.5).abs() > 0.5 - SATURATED).float()
    return torch.stack([flat.mean(0), flat.std(0), saturated.mean(0)])


class SelectionStatistics:
    """Statistics of the selected blocks, one row per layer, of all forwards since `listen`; `write` waits for the device."""

    def __init__(self, model: nn.Module) -> None:
        self._layers = [(plain_name(n), m) for n, m in model.named_modules() if isinstance(m, NSAAttention)]
        # Of each layer: queries, picks of a first block, and picks by distance in blocks, int64 [blocks].
        self._seen: dict[str, tuple[int, Any, Any]] = {}

    def listen(self, on: bool) -> None:
        """Gather statistics of the forwards from now on, or stop."""
        if on:
            self._seen = {}
        for name, layer in self._layers:
            layer.selection_listener = self._saw(name, layer.sizes.select_block) if on else None

    def _saw(self, name: str, l_sel: int) -> Callable[[torch.Tensor], None]:
        # Called for each micro-batch. A recomputation counts it once more, which changes no mean.
        def gather(chosen: torch.Tensor) -> None:
            S, n_blocks = chosen.shape[1], chosen.shape[3]
            own = (torch.arange(S, device=chosen.device) // l_sel)[:, None, None]
            distance = (own - torch.arange(n_blocks, device=chosen.device)).clamp(min=0).expand(chosen.shape[1:])
            picks = chosen.sum(0)
            found = picks.new_zeros(n_blocks).index_add(0, distance.flatten(), picks.flatten())
            queries, first, before = self._seen.get(name, (0, 0, 0))
            self._seen[name] = queries + chosen[..., 0].numel(), first + picks[..., 0].sum(), before + found

        return gather

    def rows(self) -> dict[str, dict[str, float]]:
        """Return what `SELECTION_FIELDS` names, by layer."""
        return {name: _selection_figures(*seen) for name, seen in self._seen.items()}

    def write(self, path: Path, step: int) -> None:
        """Append the gathered rows to ``k_stats.csv``."""
        new = not path.exists()
        with path.open("a", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, SELECTION_FIELDS)
            if new:
                writer.writeheader()
            for name, row in self.rows().items():
                writer.writerow({"step": step, "layer": name, **{k: f"{v:.4f}" for k, v in row.items()}})


def _selection_figures(queries: int, first: torch.Tensor, by_distance: torch.Tensor) -> dict[str, float]:
    picks = by_distance.double().cpu()
    shares = picks / picks.sum().clamp(min=1)
    return {
        "blocks_mean": float(picks.sum()) / queries,
        "distance_mean": float(shares @ torch.arange(len(shares), dtype=shares.dtype)),
        "entropy": float(torch.special.entr(shares).sum()),  # in nats, of the distance of the selected blocks
        "share_initial": int(first) / max(1.0, float(picks.sum())),
        "share_local": float(shares[:2].sum()),
    }


def write_fallbacks(path: Path) -> None:
    """Write ``fallback_counters.csv``: which backend was requested, which served, why, how often."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("asked", "used", "reason", "calls"))
        writer.writerows((*choice, calls) for choice, calls in sorted(counters.items()))


def write_dtypes(path: Path, model: nn.Module, of_the_step: Mapping[str, str]) -> None:
    """Write ``dtypes_report.txt``: the lines of ``of_the_step``; name, dtype, shape and device of every parameter and buffer."""
    lines = [f"# {what}: {dtype}\n" for what, dtype in of_the_step.items()]
    rows = [(plain_name(n), t) for n, t in (*model.named_parameters(), *model.named_buffers())]
    lines += [f"{n}  {t.dtype}  {tuple(t.shape)}  {t.device}\n" for n, t in rows]
    path.write_text("".join(lines), encoding="utf-8")
