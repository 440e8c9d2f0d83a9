"""The kernels in Gluon, on a simulated machine: against float64, with every order of what runs at the same time."""

from __future__ import annotations

import importlib.util
import itertools
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from nsa.kernels import blocks, reference
from nsa.kernels.triton import (
    block_schedule,
    branches,
    importance_overlapped,
    selection_forward_tma,
    selection_schedule,
    sequences,
    strided_overlapped,
)
from nsa.kernels.triton.tiles import Tile
from tests_cpu.kernels import gluon_simulated as simulated

SYNCHRONIZES = re.compile(r"\s+(mbarrier\.(wait|arrive|expect)\(|fence_async_shared\(\))")


@pytest.fixture
def seeds(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Run launched kernels on the simulated machine; the first number is the seed of what comes first."""
    found = [int(torch.randint(1 << 30, ()))]

    def launch(kernel: Any, grid: tuple[int, ...], like: torch.Tensor, *arguments: Any, **settings: Any) -> None:
        del settings["num_warps"]
        simulated.run(kernel, grid, *arguments, seed=found[0], **settings)

    for module in (branches, block_schedule, selection_schedule):
        monkeypatch.setattr(module, "launch", launch)
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
        monkeypatch.setattr(branches, "tile", lambda *_: Tile(128, bn, 4, stages, gluon=True))
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


def assert_finds_blocks(
    lengths: list[int], H: int, G: int, d_k: int, sizes: tuple[int, int, int], stages: int, *, ranges: bool = False
) -> None:
    """Compare the importance of a batch's blocks, or of a pack's where lengths differ; with ``ranges``, in several launches."""
    (l, d, l_sel), ends = sizes, [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    parts, places = 1 << 40 if ranges else 1, branches.compression(l, d)
    if len(set(lengths)) > 1:
        rows = sequences.pack(ends, l, d, l_sel, parts, torch.device("cpu"))
    else:
        rows = sequences.batch(len(lengths), lengths[0], l, d, l_sel, parts, torch.device("cpu"))
    keys = [blocks.num_compressed(n, l, d) for n in lengths]
    q, k = torch.randn(ends[-1], H, d_k).half(), torch.randn(sum(keys), G, d_k).half()
    values = torch.zeros(sum(keys), G, 1)
    sums, wanted = torch.empty(ends[-1], H), []
    for i in range(len(lengths)):
        mine, of_keys = slice(ends[i], ends[i + 1]), slice(sum(keys[:i]), sum(keys[: i + 1]))
        sums[mine] = attended(q[mine], k[of_keys], values[of_keys], places, 0.2)[1]
        exact = (x[None].double() for x in (q[mine], k[of_keys], values[of_keys]))
        wanted.append(reference.compressed(*exact, l=l, d=d, l_sel=l_sel, scale=0.2)[1][0])
    selection = selection_schedule.Selection(l_sel, 4, blocks.num_selection(max(lengths), l_sel))
    found = torch.zeros(ends[-1], G, selection.n_blocks)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(block_schedule, "tile", lambda *_: Tile(128, 64, 4, stages, gluon=True))
        monkeypatch.setattr(block_schedule.importance, "block_importance", None)  # what serves is Gluon's
        for at in rows.ranges:
            part = found[at.first : at.end]
            block_schedule.block_importance(q, k, d_k, sums, rows, at, places, selection, l, 0.2, part)
    for i, expected in enumerate(wanted):
        part = found[ends[i] : ends[i + 1]]
        torch.testing.assert_close(part[..., : expected.shape[-1]].double(), expected, rtol=2**-9, atol=1e-4 * H / G)
        assert not part[..., expected.shape[-1] :].any()


@pytest.mark.parametrize(
    ("lengths", "H", "G", "d_k", "sizes", "stages", "ranges"),
    [
        ([700], 8, 2, 48, (8, 4, 16), 3, False),
        ([400, 400], 16, 1, 32, (8, 4, 16), 2, False),
        ([700, 9, 120], 12, 2, 48, (8, 4, 16), 4, False),
        ([300], 6, 1, 32, (4, 1, 8), 2, False),
        ([500], 8, 1, 32, (16, 8, 16), 3, True),
        ([300, 80], 4, 1, 32, (8, 4, 16), 3, True),
    ],
    ids=str,
)
def test_the_importance_of_blocks(
    seeds: list[int],
    lengths: list[int],
    H: int,
    G: int,
    d_k: int,
    sizes: tuple[int, int, int],
    stages: int,
    ranges: bool,
) -> None:
    assert_finds_blocks(lengths, H, G, d_k, sizes, stages, ranges=ranges)


def listed(
    picks: torch.Tensor, rows: sequences.Sequences, at: sequences.Range, l_sel: int, n_blocks: int, piece: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the lists and the items of a range as `lists` makes them, of picks [T, G, n_sel]."""
    entries: list[int] = []
    items: list[list[int]] = []
    G, n_sel = picks.shape[1:]
    table = [[i * rows.longest, rows.longest, 0, 0, at.lo, at.hi] for i in range(at.count)]
    for b, (s0, _, _, _, lo, hi, *_rest) in enumerate(table if at.table is None else at.table.tolist()):
        for g in range(G):
            mine = picks[s0 + lo : s0 + hi, g]
            for j in range(n_blocks):
                found = [(lo + t) * n_sel + pick for t, pick in (mine == j).nonzero().tolist()]
                pieces = [found[i : i + piece] for i in range(0, len(found), piece)]
                for some in pieces:
                    items.append([b * G + g, j, len(entries), len(entries) + len(some)])
                    entries += some
    return torch.tensor(entries, dtype=torch.int32), torch.tensor([*items, [-1, 0, 0, 0]], dtype=torch.int32)


def assert_attends_to_picks(
    lengths: list[int], H: int, G: int, d_k: int, d_v: int, l_sel: int, stages: int, *, ranges: bool = False
) -> None:
    """Merge the parts of a batch's queries, or of a pack's where lengths differ, and compare output and log-sum-exp."""
    ends, n_sel, scale = [sum(lengths[:i]) for i in range(len(lengths) + 1)], 4, 0.2
    parts = 1 << 40 if ranges else 1
    if len(set(lengths)) > 1:
        rows = sequences.pack(ends, 32, 16, l_sel, parts, torch.device("cpu"))
    else:
        rows = sequences.batch(len(lengths), lengths[0], 32, 16, l_sel, parts, torch.device("cpu"))
    q, k, v = (torch.randn(ends[-1], *size).half() for size in ((H, d_k), (G, d_k), (G, d_v)))
    selection = selection_schedule.Selection.of(max(lengths), l_sel, n_sel, q, d_v)
    picks = torch.full((ends[-1], G, selection.n_sel), -1)
    chosen = []
    for i, n in enumerate(lengths):
        mask = blocks.select(torch.rand(1, n, G, blocks.num_selection(n, l_sel)), l_sel, n_sel)
        chosen.append(mask)
        for t, g in itertools.product(range(n), range(G)):
            found = mask[0, t, g].nonzero()[:, 0]
            picks[ends[i] + t, g, : len(found)] = found
    for at in rows.ranges:
        entries, items = listed(picks, rows, at, l_sel, selection.n_blocks, 16)
        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setattr(selection_schedule, "tile", lambda *_: Tile(64, 64, 4, stages, gluon=True))
            monkeypatch.setattr(
                selection_schedule.selection_forward, "selected_forward", None
            )  # what serves is Gluon's
            monkeypatch.setattr(
                q, "new_empty", lambda *size, dtype=q.dtype: torch.full(size, -math.inf, dtype=dtype), raising=False
            )
            made = selection_schedule.Items(items, items)
            out, lse = selection_schedule.selected_forward(q, k, v, entries, made, None, rows, at, selection, scale)
        shape = at.tokens, G, selection.parts, H // G
        out, lse = out.view(*shape, d_v).double(), lse.view(shape).double() * math.log(2)
        sums = lse.logsumexp(2)
        weight = (lse - sums[:, :, None]).exp()[..., None]
        merged = torch.where(weight > 0, out * weight, 0.0).sum(2).flatten(1, 2)
        for i in range(len(lengths)):
            mine = slice(max(at.first, ends[i]), min(at.end, ends[i + 1]))
            if mine.start >= mine.stop:
                continue
            exact = (x[None, ends[i] : ends[i + 1]].double() for x in (q, k, v))
            wanted = reference.selected(*exact, chosen[i], l_sel=l_sel, n_sel=n_sel, scale=scale)[0]
            of_range, of_sequence = (slice(mine.start - x, mine.stop - x) for x in (at.first, ends[i]))
            tolerance = 2**-10 * float(v.abs().max())
            torch.testing.assert_close(merged[of_range], wanted[of_sequence], rtol=2**-9, atol=tolerance)


@pytest.mark.parametrize(
    ("lengths", "H", "G", "d_k", "d_v", "l_sel", "stages", "ranges"),
    [
        ([200], 16, 1, 64, 64, 64, 3, False),
        ([150, 150], 16, 2, 128, 64, 64, 2, False),
        ([300, 9, 80], 32, 1, 64, 128, 64, 3, False),
        ([300], 16, 1, 64, 64, 128, 2, False),
        ([300], 16, 2, 64, 64, 96, 2, False),
        ([300, 80], 64, 1, 64, 64, 64, 3, True),
    ],
    ids=str,
)
def test_the_selected_branch(
    seeds: list[int], lengths: list[int], H: int, G: int, d_k: int, d_v: int, l_sel: int, stages: int, ranges: bool
) -> None:
    assert_attends_to_picks(lengths, H, G, d_k, d_v, l_sel, stages, ranges=ranges)


def test_groups_that_unions_serve_have_no_parts(seeds: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = torch.randn(64, 32, 64).half(), torch.randn(64, 2, 64).half(), torch.randn(64, 2, 64).half()
    rows = sequences.batch(1, 64, 32, 16, 64, 1, torch.device("cpu"))
    selection = selection_schedule.Selection.of(64, 64, 1, q, 64)
    entries, items = listed(torch.zeros(64, 2, 1), rows, rows.ranges[0], 64, 1, 16)
    none = torch.empty(0)
    unions = selection_schedule.Unions(2, 1, none, none, torch.tensor([1, 0], dtype=torch.int32))
    monkeypatch.setattr(selection_schedule, "tile", lambda *_: Tile(64, 64, 4, 2, gluon=True))
    monkeypatch.setattr(
        q, "new_empty", lambda *size, dtype=q.dtype: torch.full(size, math.nan, dtype=dtype), raising=False
    )
    made = selection_schedule.Items(items, items)
    out, lse = selection_schedule.selected_forward(q, k, v, entries, made, unions, rows, rows.ranges[0], selection, 0.2)
    for found in (out.view(64, 2, -1), lse.view(64, 2, -1)):
        assert found[:, 0].isnan().all()
        assert not found[:, 1].isnan().any()


def test_the_plain_kernel_serves_what_the_overlapped_one_does_not() -> None:
    tile, (q, k, v) = Tile(128, 64, 4, 3, gluon=True), (torch.zeros(64, n, 32).half() for n in (4, 2, 2))
    assert branches.can_use_gluon(tile, 2, q, k, v)
    assert not branches.can_use_gluon(tile._replace(gluon=False), 2, q, k, v)
    assert not branches.can_use_gluon(tile, 2, q, k[:0], v[:0])  # nothing to describe
    assert not branches.can_use_gluon(tile, 256, q, k, v)  # more heads than rows
    assert not branches.can_use_gluon(tile, 2, q.float(), k.float(), v.float())
    assert not branches.can_use_gluon(tile, 2, q[..., :20], k[..., :20], v)  # 20 columns would be padded
    assert not branches.can_use_gluon(tile, 2, q, k, torch.zeros(64, 2, 48).half())  # values in two parts


def without(module: ModuleType, line: int, folder: Path) -> ModuleType:
    """Return a module of kernels without a line of it."""
    lines = Path(str(module.__file__)).read_text(encoding="utf-8").splitlines()
    lines[line] = re.sub(r"\S.*", "pass", lines[line])
    path = folder / "changed.py"
    path.write_text("\n".join(lines), encoding="utf-8")
    spec = importlib.util.spec_from_file_location("changed", path)
    assert spec is not None
    assert spec.loader is not None
    changed = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(changed)
    return changed


def synchronizations(module: ModuleType) -> list[int]:
    """Return the lines at which kernels wait, arrive and fence."""
    text = Path(str(module.__file__)).read_text(encoding="utf-8")
    return [i for i, line in enumerate(text.splitlines()) if SYNCHRONIZES.match(line)]


def attends() -> None:
    assert_attends([200], 8, 2, 48, 32, branches.compression(8, 4), 16, 2)


def finds_blocks() -> None:
    assert_finds_blocks([1000], 8, 1, 48, (8, 4, 16), 2)


def attends_to_picks() -> None:
    assert_attends_to_picks([300], 16, 1, 64, 64, 64, 2)


@pytest.mark.parametrize(
    ("module", "line", "works"),
    [
        (module, line, works)
        for module, works in (
            (strided_overlapped, attends),
            (importance_overlapped, finds_blocks),
            (selection_forward_tma, attends_to_picks),
        )
        for line in synchronizations(module)
    ],
    ids=lambda x: getattr(x, "__name__", str(x)).rpartition(".")[-1],
)
def test_every_synchronization_is_needed(
    seeds: list[int],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    module: ModuleType,
    line: int,
    works: Callable[[], None],
) -> None:
    """A kernel without it reads early, overwrites or waits for ever, in one of some orders."""
    for user in (branches, block_schedule, selection_schedule):
        monkeypatch.setattr(user, module.__name__.rpartition(".")[-1], without(module, line, tmp_path), raising=False)

    def run_in_many_orders() -> None:
        for _ in range(20):
            seeds[0] += 1000
            works()

    with pytest.raises((simulated.Hazard, AssertionError)):
        run_in_many_orders()
