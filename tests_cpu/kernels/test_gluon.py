"""The kernels in Gluon, on a simulated machine: against float64, with every order of what runs at the same time."""

from __future__ import annotations

import importlib.util
import math
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from nsa.kernels.triton import branches, sequences, strided_overlapped
from nsa.kernels.triton.tiles import Tile
from tests_cpu.kernels import gluon_simulated as simulated

SYNCHRONIZES = re.compile(r"\s+(mbarrier\.(wait|arrive|expect)\(|fence_async_shared\(\))")
SOURCE = Path(strided_overlapped.__file__)


@pytest.fixture
def seeds(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Run launched kernels on the simulated machine; the first number is the seed of what comes first."""
    found = [int(torch.randint(1 << 30, ()))]

    def launch(kernel: Any, grid: tuple[int, ...], like: torch.Tensor, *arguments: Any, **settings: Any) -> None:
        del settings["num_warps"]
        simulated.run(kernel, grid, *arguments, seed=found[0], **settings)

    monkeypatch.setattr(branches, "launch", launch)
    yield found
    print(f"seed {found[0]}")


def attended(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, places: branches.Places, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return output [S, H, Dv] and log-sum-exp [S, H] of one sequence, in float64."""
    k, v = (x.double().repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    t, n = torch.arange(len(q))[:, None], torch.arange(len(k))[None]
    seen = (n * places.stride + places.offset <= t) & (t - n < places.window)
    s = (torch.einsum("thd,nhd->htn", q.double(), k) * scale).masked_fill(~seen, -math.inf)
    lse = s.logsumexp(-1)
    p = (s - lse.nan_to_num(neginf=0.0)[..., None]).exp()
    return torch.einsum("htn,nhd->thd", p, v), lse.T


def assert_attends(
    lengths: list[int], H: int, G: int, d_k: int, d_v: int, places: branches.Places, bn: int, stages: int
) -> None:
    """Compare output and log-sum-exp of a batch, or of a pack where lengths differ."""
    l, d = (places.offset + 1, places.stride) if not places.is_window else (8, 4)
    ends = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    cpu = torch.device("cpu")
    if len(set(lengths)) > 1:
        rows = sequences.pack(ends, l, d, 16, 1 << 20, cpu)
    else:
        rows = sequences.batch(len(lengths), lengths[0], l, d, 16, 1 << 20, cpu)
    keys = [n if places.is_window else max(0, (n - l) // d + 1) for n in lengths]
    q = torch.randn(ends[-1], H, d_k).half()
    k, v = torch.randn(sum(keys), G, d_k).half(), torch.randn(sum(keys), G, d_v).half()
    out, lse = torch.full((ends[-1], H, d_v), math.nan).half(), torch.full((ends[-1], H), math.nan)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(branches, "tile", lambda *_: Tile(128, bn, 4, stages, overlapped=True))
        monkeypatch.setattr(branches.strided, "strided_forward", None)  # what serves is Gluon's
        branches.strided_forward(q, k, v, rows, places, 0.2, out, lse)
    for i in range(len(lengths)):
        mine, first = slice(ends[i], ends[i + 1]), sum(keys[:i])
        of_keys = slice(first, first + keys[i])
        wanted, sums = attended(q[mine], k[of_keys], v[of_keys], places, 0.2)
        # A probability is rounded to 11 bits, and so is the output; sums are exact to float32's 24 bits.
        torch.testing.assert_close(out[mine].double(), wanted, rtol=2**-10, atol=2**-11 * float(v.abs().max()))
        torch.testing.assert_close(lse[mine].double(), sums, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("lengths", "H", "G", "d_k", "d_v", "places", "bn", "stages"),
    [
        ([100], 8, 2, 32, 16, branches.window(20), 16, 3),
        ([150, 150], 4, 2, 48, 32, branches.window(64), 32, 2),
        ([90, 5, 40], 32, 1, 32, 16, branches.window(33), 16, 2),
        ([300], 8, 2, 48, 32, branches.compression(8, 4), 16, 3),
        ([300, 300], 6, 1, 32, 32, branches.compression(16, 8), 16, 2),
        ([100, 7, 400], 8, 1, 48, 16, branches.compression(8, 4), 32, 3),
    ],
    ids=str,
)
def test_the_window_and_the_compressed_branch(
    seeds: list[int],
    lengths: list[int],
    H: int,
    G: int,
    d_k: int,
    d_v: int,
    places: branches.Places,
    bn: int,
    stages: int,
) -> None:
    assert_attends(lengths, H, G, d_k, d_v, places, bn, stages)


def test_the_plain_kernel_serves_what_the_overlapped_one_does_not() -> None:
    tile, (q, k, v) = Tile(128, 64, 4, 3, overlapped=True), (torch.zeros(64, n, 32).half() for n in (4, 2, 2))
    assert branches.can_overlap(tile, 2, q, k, v)
    assert not branches.can_overlap(tile._replace(overlapped=False), 2, q, k, v)
    assert not branches.can_overlap(tile, 2, q, k[:0], v[:0])  # nothing to describe
    assert not branches.can_overlap(tile, 256, q, k, v)  # more heads than rows
    assert not branches.can_overlap(tile, 2, q.float(), k.float(), v.float())
    assert not branches.can_overlap(tile, 2, q[..., :20], k[..., :20], v)  # 20 columns would be padded
    assert not branches.can_overlap(tile, 2, q, k, torch.zeros(64, 2, 48).half())  # values in two parts


def without(line: int, folder: Path) -> ModuleType:
    """Return the kernels' module without a line of it."""
    lines = SOURCE.read_text(encoding="utf-8").splitlines()
    lines[line] = re.sub(r"\S.*", "pass", lines[line])
    path = folder / "changed.py"
    path.write_text("\n".join(lines), encoding="utf-8")
    spec = importlib.util.spec_from_file_location("changed", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "line", [i for i, text in enumerate(SOURCE.read_text(encoding="utf-8").splitlines()) if SYNCHRONIZES.match(text)]
)
def test_every_synchronization_is_needed(
    seeds: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, line: int
) -> None:
    """A kernel without it reads early, overwrites or waits for ever, in one of some orders."""
    monkeypatch.setattr(branches, "strided_overlapped", without(line, tmp_path))

    def run_in_many_orders() -> None:
        for _ in range(20):
            seeds[0] += 1000
            assert_attends([200], 8, 2, 48, 32, branches.compression(8, 4), 16, 2)

    with pytest.raises((simulated.Hazard, AssertionError)):
        run_in_many_orders()
