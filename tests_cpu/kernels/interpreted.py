"""Checks of the Triton kernels in Triton's interpreter: a process of its own, as TRITON_INTERPRET is read at their import.

TRITON_INTERPRET=1 python -m tests_cpu.kernels.interpreted SEED NAME...
"""

import random as numbers
import sys
import warnings
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import torch

from nsa import KVCache, NSAAttention, nsa_attention
from nsa.kernels import blocks, ops, reference
from nsa.kernels.triton import block_schedule, branches, selection_schedule, sequences, single
from nsa.kernels.triton import decoding as on_gpu
from nsa.kernels.triton.operators import rotate
from nsa.kernels.triton.tiles import Tile
from nsa.model.attention import Rotary
from nsa.sizes import Sizes
from tests_cpu.kernels.agreement import SCALE, assert_agreement, leaves, sizes_of_inputs
from tests_cpu.kernels.agreement import large_scores as half_inputs

CHECKS: dict[str, Callable[[], None]] = {}


def check(function: Callable[[], None]) -> Callable[[], None]:
    """Register a check, which a test selects by name."""
    CHECKS[function.__name__] = function
    return function


@check
def window() -> None:
    """Check odd lengths, a batch, Dk unlike Dv, a w that is not a tile's size; float32 and float16."""
    for S, H, G, w, dtype, tolerance in ((77, 4, 2, 24, torch.float32, 1e-5), (40, 3, 1, 100, torch.float16, 1e-2)):
        inputs, exact = leaves(dtype, (2, S, H, 24), (2, S, G, 24), (2, S, G, 12))
        found, wanted = ops.sliding(*inputs, w, 0.3, "triton")[0], reference.sliding(*exact, w=w, scale=0.3)
        assert_agreement(found, wanted, inputs, exact, tolerance, 10 * tolerance)


@check
def compression() -> None:
    """Check output, gradients, importance; the first tokens see no block. Head dims have two parts, blocks many or few strides."""
    for S, H, G, l, d, l_sel, d_k, d_v in (
        (90, 4, 2, 8, 4, 16, 48, 8),
        (50, 6, 1, 16, 8, 8, 16, 48),
        (70, 2, 1, 4, 1, 32, 16, 16),
    ):
        n = blocks.num_compressed(S, l, d)
        inputs, exact = leaves(torch.float32, (1, S, H, d_k), (1, n, G, d_k), (1, n, G, d_v))
        found, _, importance = ops.compressed(*inputs, l, d, l_sel, 0.15, "triton")
        wanted, expected = reference.compressed(*exact, l=l, d=d, l_sel=l_sel, scale=0.15)
        assert_agreement(found, wanted, inputs, exact, 1e-5, 1e-4)
        # A query does not use what is behind its own block: the kernel writes nothing there.
        own = torch.arange(S)[:, None, None] // l_sel >= torch.arange(expected.shape[-1])
        torch.testing.assert_close(importance.double() * own, expected * own, rtol=0, atol=1e-5)
        assert torch.equal(found[:, : l - 1], torch.zeros_like(found[:, : l - 1]))


@check
def segments() -> None:
    """Check dk and dv by segments of queries, added in order."""
    branches.LEAST_SEGMENT = 16
    compression()


@check
def selection() -> None:
    """Check that the blocks are those of sorting, with ties: all-equal scores, and scores in steps.

    Where scores are NaN, as many blocks are selected.
    """
    for importance in (torch.rand(2, 50, 2, 4), torch.zeros(1, 90, 1, 6), torch.randint(0, 3, (1, 90, 1, 6)).float()):
        for n_sel in (3, 5):
            assert torch.equal(single.select_blocks(importance, 16, n_sel), blocks.select(importance, 16, n_sel))
    found = single.select_blocks(torch.full((1, 90, 1, 6), float("nan")), 16, 4)
    assert found.sum(-1).flatten().tolist() == [min(4, t // 16 + 1) for t in range(90)]


@check
def lists() -> None:
    """Check each block's queries: ascending, in items of at most a piece; of a batch and of a pack, in several ranges."""
    sequences.PARTS = 64
    for ends in ([0, 140], [0, 37, 40, 131]):
        l_sel, n_sel, G, piece = 8, 4, 2, 5
        longest = max(b - a for a, b in pairwise(ends))
        selection = selection_schedule.Selection(l_sel, n_sel, blocks.num_selection(longest, l_sel))
        seqs = sequences.pack(ends, 8, 4, l_sel, 1, torch.device("cpu"))
        if ends == [0, 140]:
            seqs = sequences.batch(1, 140, 8, 4, l_sel, 1, torch.device("cpu"))
        assert len(seqs.ranges) > 1
        picks = torch.empty(ends[-1], G, n_sel, dtype=torch.int32)
        for at in seqs.ranges:
            importance = torch.rand(at.tokens, G, selection.n_blocks)
            block_schedule.select_blocks(importance, picks, seqs, at, selection)
            starts = [a for a, z in pairwise(ends) if max(a, at.first) < min(z, at.end)]
            entries = picks.new_full((at.tokens * G * n_sel,), -7)
            totals = picks.new_empty(at.count * G * selection.n_blocks)
            forward = selection_schedule.make_lists(picks, entries, totals, seqs, at, selection, piece)
            for items in (forward, selection_schedule.cut_lists(picks, totals, seqs, at, selection, 3)):
                found = [
                    (int(group), int(j), [divmod(int(e), n_sel) for e in entries[a:b]])
                    for group, j, a, b in items.items.tolist()
                    if group >= 0
                ]
                seen: dict[tuple[int, int], list[int]] = {}
                for group, j, some in found:
                    assert 0 < len(some) <= (piece if items is forward else 3)
                    seen.setdefault((group, j), []).extend(t for t, _ in some)
                    assert all(int(picks[starts[group // G] + t, group % G, slot]) == j for t, slot in some)
                assert all(times == sorted(set(times)) for times in seen.values())
                assert sum(map(len, seen.values())) == int((picks[at.first : at.end] >= 0).sum())


@check
def selected() -> None:
    """Check attention by block, where items are shorter than lists; blocks that are not powers of two; places of 64 bits."""
    _selected((45, 2, 1, 24, 3, 48))
    selection_schedule._is_wide = lambda *_: True
    _selected((45, 2, 1, 24, 3, 48))


@check
def selected_blocks() -> None:
    """Check blocks of more keys than a program reads at once; groups."""
    _selected((70, 6, 2, 8, 4, 8), (170, 2, 1, 72, 3, 8), (290, 2, 1, 128, 2, 16))


@check
def selected_on_hopper() -> None:
    """Check the loops that Hopper has: scores an iteration ahead, dq transposed; items of one tile of rows and of several."""
    selection_schedule._has_wgmma = lambda q: True
    _selected((45, 2, 1, 24, 3, 48), (70, 6, 2, 8, 4, 8), (170, 2, 1, 72, 3, 8))
    _selected((90, 6, 2, 24, 3, 8), piece=40)


def _selected(*cases: tuple[int, int, int, int, int, int], piece: int = 7) -> None:
    selection_schedule.BACKWARD_PIECE = single.BACKWARD_PIECE = piece
    for S, H, G, l_sel, n_sel, d_v in cases:
        inputs, exact = leaves(torch.float32, (1, S, H, 16), (1, S, G, 16), (1, S, G, d_v))
        chosen = blocks.select(torch.rand(1, S, G, blocks.num_selection(S, l_sel)), l_sel, n_sel)
        # Some queries have fewer picks than they may have.
        chosen[:, S // 2 : S // 2 + 5, :, 1:] = False
        found = ops.selected(*inputs, chosen, l_sel, min(n_sel, chosen.shape[3]), 0.3, "triton")[0]
        wanted = reference.selected(*exact, chosen, l_sel=l_sel, n_sel=n_sel, scale=0.3)
        assert_agreement(found, wanted, inputs, exact, 1e-5, 1e-4)


def _whole(
    lengths: list[int], B: int, H: int, G: int, d_k: int, d_v: int, dtype: torch.dtype, scale: float, *, twice: bool = False,
    sizes: Sizes,
) -> None:  # fmt: skip
    """Check `nsa_attention` as a user calls it, a pack where there are several lengths; if ``twice``, the same bits both times."""
    S = sum(lengths)
    n = sum(blocks.num_compressed(s, *sizes[:2]) for s in lengths)
    inputs, exact = leaves(dtype, *sizes_of_inputs(B, S, H, G, d_k, d_v, n))
    with torch.no_grad():
        for gates in (inputs[-1], exact[-1]):
            gates[0, S // 2] = 0
    ends = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()]) if len(lengths) > 1 else None
    wanted = nsa_attention(*exact, sizes=sizes, cu_seqlens=ends, scale=scale, backend="reference")
    found = nsa_attention(*inputs, sizes=sizes, cu_seqlens=ends, scale=scale, backend="triton")
    again = nsa_attention(*inputs, sizes=sizes, cu_seqlens=ends, scale=scale, backend="triton") if twice else None
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    assert_agreement(found, wanted, inputs, exact, tolerance, 10 * tolerance, again=again)


@check
def whole() -> None:
    """Check a pack with an empty sequence, twice."""
    _whole([5, 0, 34], 1, 4, 2, 16, 16, torch.float32, 0.25, twice=True, sizes=Sizes(8, 4, 16, 3, 12))


@check
def wholes() -> None:
    """Check a batch; float16; more picks than blocks."""
    _whole([50], 2, 3, 1, 48, 16, torch.float32, 0.1, sizes=Sizes(8, 8, 16, 3, 100))
    _whole([60], 1, 4, 1, 16, 16, torch.float16, 0.25, sizes=Sizes(8, 4, 16, 9, 20))


@check
def one_tile() -> None:
    """Check the loop over keys without masks, by TMA, on tiles so small that most need no mask, of a pack."""
    branches.tile = block_schedule.tile = selection_schedule.tile = lambda *_: Tile(16, 16, 4, 1, 2, True)
    _whole([50, 40], 1, 2, 1, 32, 16, torch.float32, 0.2, sizes=Sizes(8, 4, 16, 3, 36))


@check
def tiles() -> None:
    """Check as `one_tile` does, by pointers too, tiles of several sizes, of a sequence and of a pack."""
    for lengths, sizes, d_k, d_v in (
        ([150], Tile(16, 16, 4, 1, 2, False), 32, 48),
        ([150], Tile(32, 16, 4, 1, 2, True), 48, 32),
        ([90, 70], Tile(16, 32, 4, 1, 2, True), 32, 16),
    ):
        branches.tile = block_schedule.tile = selection_schedule.tile = lambda *_, tile=sizes: tile
        _whole(lengths, 1, 2, 1, d_k, d_v, torch.float32, 0.2, sizes=Sizes(8, 4, 16, 3, 70))


@check
def ranges() -> None:
    """Check queries in several ranges, which add to dk and dv of blocks before them: a sequence, a batch, a pack."""
    sequences.PARTS = 1
    _whole([150], 1, 2, 1, 16, 16, torch.float32, 0.25, twice=True, sizes=Sizes(8, 4, 16, 4, 12))
    _whole([70], 2, 2, 1, 16, 16, torch.float32, 0.25, sizes=Sizes(8, 4, 16, 3, 12))
    _whole([50, 3, 60], 1, 2, 1, 16, 16, torch.float32, 0.25, sizes=Sizes(8, 4, 16, 3, 12))


@check
def groups() -> None:
    """Check groups of 1 head and of 64, head dims up to 256."""
    _whole([36], 1, 2, 2, 16, 16, torch.float32, 0.25, sizes=Sizes(8, 4, 16, 3, 12))
    _whole([36], 1, 64, 1, 16, 16, torch.float32, 0.25, sizes=Sizes(8, 4, 16, 3, 12))
    _whole([36], 1, 2, 1, 256, 240, torch.float32, 0.06, sizes=Sizes(8, 4, 16, 3, 12))


@check
def rotary() -> None:
    """Check the rotation of heads and its gradients: slices of a wider tensor, a batch, widths that are not powers of two."""
    for B, N, heads, D in ((2, 37, 3, 24), (1, 5, 2, 64), (2, 1, 1, 2)):
        turn = Rotary(D, 10000.0)
        (f_wide,), (wide,) = leaves(torch.float32, (B, N, 2 * heads * D))
        table = turn.table(torch.arange(7, 7 + N), torch.float64)
        x = wide[..., heads * D :].unflatten(-1, (heads, D))
        f_x = f_wide[..., heads * D :].unflatten(-1, (heads, D))
        found = rotate(f_x, *(one.float() for one in table), False)
        assert_agreement(found, turn.turn(x, table), [f_wide], [wide], 1e-6, 1e-5)


@check
def decoding() -> None:
    """Check one new token and several, in the layer: several tiles per program, a cache shorter than a compressed block, heads
    whose scores are added in turn, more parts than are merged at once.
    """
    for programs, scores, start, T, H, G, d_k, d_v, n_sel in (
        (512, 8192, 130, 1, 6, 2, 16, 48, 4),
        (1, 8192, 300, 4, 4, 2, 48, 16, 4),
        (512, 8192, 5, 3, 20, 1, 16, 16, 4),
        (512, 32, 130, 2, 5, 1, 16, 16, 70),
    ):
        on_gpu.PROGRAMS, on_gpu.MOST_SCORES = programs, scores
        layer = NSAAttention(32, H, G, d_k, v_head_dim=d_v, **Sizes(8, 4, 16, n_sel, 70)._asdict())
        x = torch.randn(2, start + T, 32)
        found, selections = [], []
        layer.selection_listener = selections.append
        for backend in ("reference", "triton"):
            cache = KVCache()
            with torch.no_grad():
                layer.backend = "reference"  # the prompt, by the equations
                layer(x[:, :start], cache)
                layer.backend = backend
                found.append((layer(x[:, start:], cache), selections[-1]))
        torch.testing.assert_close(found[1][0], found[0][0], rtol=0, atol=2e-5)
        assert torch.equal(found[1][1], found[0][1])


@check
def large_scores() -> None:
    """Check float16 with q k^T beyond its range: a prompt, and new tokens against a cache."""
    S, start = 40, 37
    sizes, inputs, wanted = half_inputs(S, torch.float16)
    q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, gates = inputs
    seen = slice(start - (sizes.window - 1), S)
    window, new = (k_win[:, seen], v_win[:, seen]), slice(start, S)
    with np.errstate(over="ignore"):  # the exponential of a later key's score, which is masked
        found = nsa_attention(*inputs, sizes=sizes, scale=SCALE, backend="triton")
        cached, _ = on_gpu.attend(
            q[:, new], (k_cmp, v_cmp), (k_sel, v_sel), window, gates[:, new], start, *sizes, SCALE
        )
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=4e-3)
    torch.testing.assert_close(cached.double(), wanted[:, new], rtol=0, atol=4e-3)


@check
def any_shape() -> None:
    """Check sizes that each run draws at random."""
    d, G = numbers.choice((1, 2, 4, 8)), numbers.choice((1, 2, 3))
    l, l_sel = d * numbers.randint(1, 4), d * numbers.randint(1, 24)
    sizes = Sizes(l, d, l_sel, numbers.randint(3, 6), numbers.randint(1, 120))
    lengths = [numbers.randint(1, 60) for _ in range(numbers.choice((1, 2, 3)))]
    B = 1 if len(lengths) > 1 else numbers.choice((1, 2))
    H, d_k, d_v = G * numbers.choice((1, 2, 5)), numbers.choice((8, 16, 24, 48)), numbers.choice((8, 16, 48))
    print(lengths, B, H, G, d_k, d_v, sizes, file=sys.stderr)
    _whole(lengths, B, H, G, d_k, d_v, torch.float32, d_k**-0.5, sizes=sizes)


if __name__ == "__main__":
    # Memory that nothing wrote is NaN, so that a read of it shows.
    torch.use_deterministic_algorithms(True, warn_only=True)
    warnings.filterwarnings("ignore", ".*deterministic")
    warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated")  # torch's own, of its forward mode
    torch.manual_seed(int(sys.argv[1]))
    numbers.seed(int(sys.argv[1]))
    for name in sys.argv[2:]:
        CHECKS[name]()
        print("held", name)
