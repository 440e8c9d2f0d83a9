"""Checks of the kernels in Gluon against float64: what is launched runs on the simulated machine where a test has set it up."""

from __future__ import annotations

import itertools
import math

import launches
import pytest
import torch
from launches import Ring

from nsa.kernels import blocks, reference
from nsa.kernels.triton import branches, selection_schedule, sequences


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


def rows_and_keys(lengths: list[int], places: branches.Places) -> tuple[sequences.Sequences, list[slice], list[slice]]:
    """Return the sequences of a batch, or of a pack where lengths differ, with the tokens and the keys of each."""
    l, d = (places.offset + 1, places.stride) if not places.is_window else (8, 4)
    ends = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    if len(set(lengths)) > 1:
        rows = sequences.pack(ends, l, d, 16, 1 << 20, torch.device("cpu"))
    else:
        rows = sequences.batch(len(lengths), lengths[0], l, d, 16, 1 << 20, torch.device("cpu"))
    keys = [n if places.is_window else max(0, (n - l) // d + 1) for n in lengths]
    of_keys = [slice(sum(keys[:i]), sum(keys[: i + 1])) for i in range(len(keys))]
    return rows, list(itertools.starmap(slice, itertools.pairwise(ends))), of_keys


def assert_attends(
    lengths: list[int], H: int, G: int, d_k: int, d_v: int, places: branches.Places, bn: int, stages: int
) -> None:
    """Compare output and log-sum-exp of a batch or a pack."""
    rows, of_tokens, of_keys = rows_and_keys(lengths, places)
    tokens, keys = sum(lengths), of_keys[-1].stop
    q, k, v = torch.randn(tokens, H, d_k).half(), torch.randn(keys, G, d_k).half(), torch.randn(keys, G, d_v).half()
    out, lse = torch.full((tokens, H, d_v), math.nan).half(), torch.full((tokens, H), math.nan)
    launches.strided_forward(q, k, v, rows, places, 0.2, out, lse, Ring(bn, stages))
    for mine, seen in zip(of_tokens, of_keys, strict=True):
        wanted, sums = attended(q[mine], k[seen], v[seen], places, 0.2)
        # A probability is rounded to 11 bits, and so is the output; sums are exact to float32's 24 bits.
        torch.testing.assert_close(out[mine].double(), wanted, rtol=2**-10, atol=2**-11 * float(v.abs().max()))
        torch.testing.assert_close(lse[mine].double(), sums, rtol=1e-5, atol=1e-5)


def backward_of(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grad: torch.Tensor, places: branches.Places, scale: float
) -> tuple[branches.Rows, list[torch.Tensor], list[torch.Tensor]]:
    """Return what the backward needs of the rows of one sequence, the gradients of q, k and v in float64, and of each the root of
    the sum of its squared terms, by which its rounding errors spread.
    """
    G, h = k.shape[1], q.shape[1] // k.shape[1]
    out, sums = attended(q, k, v, places, scale)
    q, grad, out = (x.double().unflatten(1, (G, h)) for x in (q, grad, out))
    k, v = k.double(), v.double()
    t, n = torch.arange(len(q))[:, None], torch.arange(len(k))[None]
    seen = (n * places.stride + places.offset <= t) & (t - n < places.window)
    lse, delta = torch.where(sums == -math.inf, math.inf, sums * branches.LOG2E), (out * grad).sum(-1)
    scores = torch.einsum("tghd,ngd->tghn", q, k) * scale
    p = torch.where(seen[:, None, None], (scores - lse.unflatten(1, (G, h))[..., None] / branches.LOG2E).exp(), 0.0)
    ds = scale * p * (torch.einsum("tghd,ngd->tghn", grad, v) - delta[..., None])
    gradients, spreads = (
        [
            torch.einsum("tghn,ngd->tghd", f(ds), f(k)).flatten(1, 2),
            torch.einsum("tghn,tghd->ngd", f(ds), f(q)),
            torch.einsum("tghn,tghd->ngd", f(p), f(grad)),
        ]
        for f in (torch.clone, torch.square)
    )
    return branches.Rows(lse.float(), delta.flatten(1).float()), gradients, [x.sqrt() for x in spreads]


def assert_gives_gradients(
    of: str, lengths: list[int], H: int, G: int, d_k: int, d_v: int, places: branches.Places, bn: int, stages: int, *,
    add: bool = False,
) -> None:  # fmt: skip
    """Compare the gradient ``of`` q ('dq'), or those of k and v ('dkv'), by a random gradient of the output."""
    rows, of_tokens, of_keys = rows_and_keys(lengths, places)
    tokens, keys, scale = sum(lengths), of_keys[-1].stop, 0.2
    q, k, v = torch.randn(tokens, H, d_k).half(), torch.randn(keys, G, d_k).half(), torch.randn(keys, G, d_v).half()
    grad = torch.randn(tokens, H, d_v).half()
    found = [torch.randn_like(q) if add else torch.full_like(q, math.nan), torch.empty(0), torch.empty(0)]
    before = found[0].double() if add else 0.0
    parts = [
        backward_of(q[mine], k[seen], v[seen], grad[mine], places, scale)
        for mine, seen in zip(of_tokens, of_keys, strict=True)
    ]
    of_rows = branches.Rows(torch.cat([part[0].lse for part in parts]), torch.cat([part[0].delta for part in parts]))
    if of == "dq":
        launches.strided_dq(grad, q, k, v, of_rows, found[0], rows, places, scale, Ring(bn, stages), add=add)
    else:
        found[1:] = launches.strided_dkv(grad, q, k, v, of_rows, rows, places, scale, Ring(bn, stages))
    for i in [0] if of == "dq" else [1, 2]:
        wanted, spread = (torch.cat([part[j][i] for part in parts]) for j in (1, 2))
        wanted = wanted + before if i == 0 else wanted
        # Terms have a factor that is rounded to 11 bits, at random; the result is rounded, a few halves below its normal numbers.
        excess = (found[i].double() - wanted).abs() - (2**-9 * spread + 2**-10 * wanted.abs() + 1e-5)
        assert not (excess > 0).any(), f"{excess.max()} more than rounding explains"
        assert not found[i].isnan().any()


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
    for at in rows.ranges:
        part = found[at.first : at.end]
        launches.block_importance(q, k, sums, rows, at, places, selection, l, 0.2, part, Ring(64, stages))
    for i, expected in enumerate(wanted):
        part = found[ends[i] : ends[i + 1]]
        torch.testing.assert_close(part[..., : expected.shape[-1]].double(), expected, rtol=2**-9, atol=1e-4 * H / G)
        assert not part[..., expected.shape[-1] :].any()


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
    lengths: list[int],
    H: int,
    G: int,
    d_k: int,
    d_v: int,
    l_sel: int,
    stages: int,
    *,
    ranges: bool = False,
    nan: bool = False,
) -> None:
    """Merge the parts of a batch's queries, or of a pack's where lengths differ, and compare output and log-sum-exp.

    With ``nan``, the values of the last sequence are NaN, and only those before it are compared.
    """
    ends, n_sel, scale = [sum(lengths[:i]) for i in range(len(lengths) + 1)], 4, 0.2
    parts = 1 << 40 if ranges else 1
    if len(set(lengths)) > 1:
        rows = sequences.pack(ends, 32, 16, l_sel, parts, torch.device("cpu"))
    else:
        rows = sequences.batch(len(lengths), lengths[0], 32, 16, l_sel, parts, torch.device("cpu"))
    q, k, v = (torch.randn(ends[-1], *size).half() for size in ((H, d_k), (G, d_k), (G, d_v)))
    if nan:
        v[ends[-2] :] = math.nan
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
        entries, items = listed(picks, rows, at, l_sel, selection.n_blocks, 64)
        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setattr(
                q, "new_empty", lambda *size, dtype=q.dtype: torch.full(size, -math.inf, dtype=dtype), raising=False
            )
            made = selection_schedule.Items(items, items)
            out, lse = launches.selected_forward(q, k, v, entries, made, rows, at, selection, scale, Ring(64, stages))
        shape = at.tokens, G, selection.parts, H // G
        out, lse = out.view(*shape, d_v).double(), lse.view(shape).double() * math.log(2)
        sums = lse.logsumexp(2)
        weight = (lse - sums[:, :, None]).exp()[..., None]
        # What has not been written has a weight of 0, and is infinite.
        merged = torch.where(out == -math.inf, 0.0, out * weight).sum(2).flatten(1, 2)
        for i in range(len(lengths)):
            mine = slice(max(at.first, ends[i]), min(at.end, ends[i + 1]))
            if mine.start >= mine.stop or (nan and i == len(lengths) - 1):
                continue
            exact = (x[None, ends[i] : ends[i + 1]].double() for x in (q, k, v))
            wanted = reference.selected(*exact, chosen[i], l_sel=l_sel, n_sel=n_sel, scale=scale)[0]
            of_range, of_sequence = (slice(mine.start - x, mine.stop - x) for x in (at.first, ends[i]))
            tolerance = 2**-10 * float(v[: ends[-1 - nan]].abs().max())
            torch.testing.assert_close(merged[of_range], wanted[of_sequence], rtol=2**-9, atol=tolerance)
