"""Tile sizes: those measured on a GPU like the one at hand (tiles.json, which benchmarks/tune_gpu.py writes), else what fits
every GPU.
"""

import functools
import json
from pathlib import Path
from typing import NamedTuple

import torch
import triton

MEASURED = Path(__file__).with_name("tiles.json")
LONG = 32768  # tokens, from which on tiles measured for "short" sequences are not taken
KERNELS = (
    "compressed", "importance", "sliding", "selected", "compressed_dq", "compressed_dkv", "sliding_dq", "sliding_dkv",
    "selected_backward",
)  # fmt: skip


class Tile(NamedTuple):
    """Rows (query, head), keys, warps and pipeline stages of a program; whether its keys take a loop without masks (2) or not
    (1); whether TMA reads them; the most registers of a thread, where it is fewer than the compiler would take (0: as it likes),
    so that more programs fit a multiprocessor.
    """

    bm: int
    bn: int
    warps: int
    stages: int
    loops: int = 1
    tma: bool = False
    registers: int = 0


class Widths(NamedTuple):
    """A head dim as kernels load it: in parts of d0 and d1 columns (`rows`), the last of them perhaps padded; whole is a power
    of two.
    """

    d: int
    d0: int
    d1: int
    whole: int

    @property
    def is_exact(self) -> bool:
        """Whether nothing is padded, as TMA wants."""
        return self.d0 + self.d1 == self.d


@functools.cache
def widths(d: int) -> Widths:
    """Return how head dim ``d`` is loaded: 192 as 128 + 64, 24 as 16 + 16 (8 of them padding)."""
    d0 = max(16, 1 << (d.bit_length() - 1))
    rest = d - d0
    d1 = max(16, triton.next_power_of_2(rest)) if rest > 0 else 0
    if d1 == d0:  # as wide as one part of twice the width
        d0, d1 = 2 * d0, 0
    return Widths(d, d0, d1, max(16, triton.next_power_of_2(d)))


def tile(kernel: str, q: torch.Tensor, d_v: int, longest: int) -> Tile:
    """Return the tile of a kernel for queries like ``q`` [T, H, Dk], in sequences of ``longest`` tokens at most."""
    return _tile(kernel, q.shape[-1], d_v, q.element_size(), longest < LONG, capability(q.device))


@functools.cache
def _tile(kernel: str, d_k: int, d_v: int, itemsize: int, is_short: bool, on: str) -> Tile:
    table = measured(on)
    for name in (name_of(kernel, d_k, d_v, itemsize), name_of(kernel, *_measured_like(d_k, d_v), itemsize)):
        found = (table.get(f"{name} short") if is_short else None) or table.get(name)
        if found is not None:
            return found
    return fitting(kernel, d_k, d_v, itemsize)


def _measured_like(d_k: int, d_v: int) -> tuple[int, int]:
    """Return the measured head dims whose tiles fit others, too: as wide or wider, and not by more than a power of two."""
    if max(d_k, d_v) <= 64:
        return 64, 64
    return (192, 128) if d_k <= 192 and d_v <= 128 else (d_k, d_v)


def name_of(kernel: str, d_k: int, d_v: int, itemsize: int) -> str:
    """Return the name that tiles.json gives: 'compressed_dkv 192/128 2' are the head dims and the bytes of an element."""
    return f"{kernel} {d_k}/{d_v} {itemsize}"


def capability(device: torch.device) -> str:
    """Return the name that tiles.json gives a GPU: 'sm_90'; '' for what is not a GPU."""
    if device.type != "cuda":
        return ""
    return _capability(device.index if device.index is not None else torch.cuda.current_device())


@functools.cache
def _capability(index: int) -> str:
    return "sm_{}{}".format(*torch.cuda.get_device_capability(index))


@functools.cache
def measured(on: str) -> dict[str, Tile]:
    """Return what tiles.json has for a GPU, by `name_of`, with ' short' behind it for what was measured on shorter sequences."""
    table = json.loads(MEASURED.read_text(encoding="utf-8")) if MEASURED.exists() else {}
    return {name: Tile(*sizes) for name, sizes in table.get(on, {}).items()}


def fitting(kernel: str, d_k: int, d_v: int, itemsize: int) -> Tile:
    """Choose by what the compiler reports for an A100: registers, spills, and at most 163 KiB of shared memory. Tests compile
    them all.
    """
    widest = max(d_k, d_v)
    if itemsize == 4:
        return _exact(kernel, widest)
    is_narrow, is_wide, is_widest = widest <= 64, widest > 128, widest > 192
    if kernel in ("compressed", "sliding"):
        found = Tile(128, 64, 4, 3) if is_narrow else Tile(64 if is_widest else 128, 32 if is_wide else 64, 8, 2)
    elif kernel == "importance":
        found = Tile(128, 64, 4, 3) if is_narrow else Tile(64, 64, 4, 2)
    elif kernel == "selected":
        found = Tile(64, 64, 4, 3 if is_narrow else 2)
    elif kernel in ("compressed_dq", "sliding_dq"):
        found = Tile(64, 64, 4, 3) if is_narrow else Tile(64, 32, 8 if is_wide else 4, 2)
    elif kernel in ("compressed_dkv", "sliding_dkv"):
        found = Tile(64, 64, 4, 2) if is_narrow else Tile(32, 32 if is_wide else 64, 4 if is_wide else 8, 2)
    else:  # selected_backward
        found = Tile(32, 64, 4 if is_narrow else 8, 2 if is_wide else 3)
    # Without masks in the middle, where loops are long; a window's are short.
    return found._replace(
        loops=2 if kernel in ("compressed", "compressed_dq", "compressed_dkv") and not is_widest else 1
    )


def _exact(kernel: str, widest: int) -> Tile:
    """Choose for float32: its products are not Tensor Cores'."""
    if widest > 128 or kernel.startswith("selected"):
        return Tile(16, 16, 4, 1)
    return Tile(32, 32, 8 if kernel.endswith("dkv") else 4, 1)


def keys_at_once(l_sel: int, d_k: int, d_v: int, itemsize: int) -> int:
    """Return how many keys of a selected block a program holds; a block of more is several sub-blocks."""
    size = (d_k + d_v) * itemsize
    most = 64 if size <= 640 else 32 if size <= 1024 else 16
    return min(most, max(16, triton.next_power_of_2(l_sel)))
