"""The selected branch on a CPU: causal while every block is chosen; from there on, of each block the queries that chose it.

See `nsa.kernels.cpu.tiles`. A query and a whole block that it chose are an *entry*. Entries lie block by block, as a block's are
one product with its keys, and each makes a part of its query's output: these are weighted and summed query by query
(FlashAttention, arXiv 2205.14135, section 3.1); those of its gradient are added in turn. A query's own block, of which it sees but
a part, makes one part more. A block's own gradient comes from its entries alone: no atomics, the same bits every time.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from nsa.kernels.blocks import selected_visible
from nsa.kernels.cpu import tiles as cpu_tiles
from nsa.kernels.cpu.strided import window_tiles
from nsa.kernels.cpu.tiles import (
    Backward,
    Forward,
    Rooms,
    Tensors3,
    Tile,
    Work,
    each,
    exponentials,
    minus_infinity,
    queries_of_tile,
    row_sums,
    run_backward,
    run_forward,
    some_groups,
)

QUERIES_AT_ONCE = 1024  # whose parts are kept until they are summed, in the forward
SHORT = 256  # tokens; up to there products under a mask cost less than the calls that lists would


@dataclass(frozen=True, slots=True)
class Chunk:
    """The entries of queries first ... end - 1 of one group, and where their parts lie.

    query int64 [n]: whose an entry is, counted from ``first``; starts: the first entry of each block, and n. Part i < n is that of
    entry i, part n + t that of query t's own block; parts int64 [queries, m] are a query's, filled up with one of no query.
    """

    b: int
    g: int
    first: int
    end: int
    query: torch.Tensor
    starts: list[int]
    parts: torch.Tensor

    @property
    def n_parts(self) -> int:
        return len(self.query) + self.end - self.first + 1

    def steps(self, at_once: int) -> Iterator[tuple[int, int, list[int], list[int]]]:
        """Yield runs of at most ``at_once`` entries: (first, length, blocks, how many entries each of these has in the run)."""
        block = 0
        for start in range(0, len(self.query), at_once):
            end = min(start + at_once, len(self.query))
            found, sizes = [], []
            while self.starts[block] < end:
                inside = min(self.starts[block + 1], end) - max(self.starts[block], start)
                if inside > 0:
                    found.append(block)
                    sizes.append(inside)
                if self.starts[block + 1] > end:
                    break
                block += 1
            yield start, end - start, found, sizes

    def own_blocks(self, l_sel: int) -> Iterator[tuple[int, int, int]]:
        """Yield (first token, tokens, length of a sequence): whole blocks, then what is left."""
        tokens = self.end - self.first
        whole = tokens // l_sel * l_sel
        if whole:
            yield self.first, whole, l_sel
        if whole < tokens:
            yield self.first + whole, tokens - whole, tokens - whole

    def sequences(self, z: Work, first: int, tokens: int, length: int, **parts: torch.Tensor) -> Work:
        """Tokens of the group as a batch of sequences; ``parts``, of the chunk's queries, take what they write, by its name."""
        h, group = z.q.shape[3], self.b * z.q.shape[1] + self.g

        def others(x: torch.Tensor) -> torch.Tensor:
            heads = h if x.dim() == 2 else 1
            return x[group].narrow(0, first * heads, tokens * heads).unflatten(0, (-1, length * heads))

        found = each(z, lambda x: x[self.b, self.g].narrow(0, first, tokens).unflatten(0, (-1, 1, length)), others)
        there = {name: x.narrow(0, first - self.first, tokens) for name, x in parts.items()}
        return replace(found, **{name: x.view_as(getattr(found, name)) for name, x in there.items()})


def covered(chosen: torch.Tensor, l_sel: int) -> int:
    """Return the number of leading tokens, whole blocks of them or all, whose every earlier block is chosen."""
    S = chosen.shape[1]
    own = torch.arange(S, device=chosen.device) // l_sel
    missing = (chosen.sum(-1) != own[None, :, None] + 1).any(2).any(0).nonzero()
    return S if not len(missing) else int(missing[0]) // l_sel * l_sel


def _chunks(chosen: torch.Tensor, first: int, l_sel: int) -> Iterator[Chunk]:
    B, S, G, n_blocks = chosen.shape
    step = max(1, QUERIES_AT_ONCE // l_sel) * l_sel
    j = torch.arange(n_blocks, device=chosen.device)[:, None]
    for at in range(first, S, step):
        end = min(at + step, S)
        earlier = j < torch.arange(at, end, device=chosen.device) // l_sel
        for b in range(B):
            for g in range(G):
                picks = chosen[b, at:end, g].t() & earlier  # [Ns, queries]
                starts = [0, *picks.sum(1).cumsum(0).tolist()]
                there = torch.cat((picks, torch.ones_like(picks[:1])))  # and each query's own block
                number = (there.flatten().cumsum(0) - 1).view_as(there).t()
                counts = there.sum(0)
                parts = number.new_full((end - at, int(counts.max())), starts[-1] + end - at)
                parts[torch.arange(parts.shape[1], device=parts.device) < counts[:, None]] = number[there.t()]
                yield Chunk(b, g, at, end, picks.nonzero()[:, 1], starts, parts)


def _summed(parts: torch.Tensor, numbers: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Sum each query's parts: [queries, h, D]. parts [n_parts, h, D], numbers [queries, m], weights [queries, m, h]."""
    h, D = parts.shape[1:]
    by_head = numbers[:, None] * h + torch.arange(h, device=numbers.device)[None, :, None]
    by_row = weights.transpose(1, 2).flatten(0, 1)
    found = F.embedding_bag(by_head.flatten(0, 1), parts.view(-1, D), mode="sum", per_sample_weights=by_row)
    return found.view(-1, h, D)


def _group(z: Work, chunk: Chunk) -> Work:
    """Return what the chunk's queries have, [queries, h, D], the group's keys [N, D], and its queries' rows [queries*h]; views."""
    h, n, group = z.q.shape[3], chunk.end - chunk.first, chunk.b * z.q.shape[1] + chunk.g

    def others(x: torch.Tensor) -> torch.Tensor:
        return x[group].narrow(0, chunk.first * h, n * h) if x.dim() == 2 else x[group]

    return each(z, lambda x: x[chunk.b, chunk.g].narrow(0, chunk.first, n), others)


def _rows(name: str, x: torch.Tensor, numbers: torch.Tensor, rooms: Rooms) -> torch.Tensor:
    """Return [n*h, D]: what queries have, [queries, h, D], of those with these numbers."""
    return torch.index_select(x, 0, numbers, out=rooms(name, len(numbers), *x.shape[1:])).flatten(0, 1)


def _forward(z: Forward, chunk: Chunk, l_sel: int, rooms: Rooms) -> None:
    h, here = z.q.shape[3], _group(z, chunk)
    out = rooms("parts", chunk.n_parts, h, z.v.shape[2])
    top, total = (rooms(name, chunk.n_parts, h) for name in ("top", "total"))
    out[-1], top[-1], total[-1] = 0, float("-inf"), 1
    of_own = {name: x[len(chunk.query) : -1] for name, x in (("out", out), ("top", top), ("total", total))}
    for first, tokens, length in chunk.own_blocks(l_sel):
        own = chunk.sequences(z, first, tokens, length, **of_own)
        run_forward(own, window_tiles(length, length, own.q), rooms)
    # Parts are weighted with their sums, and a tile has divided by them.
    of_own["out"].mul_(of_own["total"].unsqueeze(-1))
    q = rooms("chunk of q", *here.q.shape).copy_(here.q)
    keys, values = here.k.mT.split(l_sel, 1), here.v.split(l_sel)
    for start, n, found, sizes in chunk.steps(max(1, cpu_tiles.SCORES_AT_ONCE // (h * l_sel))):
        rows = _rows("rows of q", q, chunk.query.narrow(0, start, n), rooms)
        p, sizes = rooms("scores", n * h, l_sel), [size * h for size in sizes]
        of_block = p.split(sizes)
        for j, some, x in zip(found, rows.split(sizes), of_block, strict=True):
            torch.mm(some, keys[j], out=x)
        exponentials(p, *(x.narrow(0, start, n).view(-1) for x in (top, total)))
        for j, x, some in zip(found, of_block, out.narrow(0, start, n).view(n * h, -1).split(sizes), strict=True):
            torch.mm(x, values[j], out=some)
    each_top = top[chunk.parts]  # [queries, m, h]
    highest = each_top.amax(1)
    weights = each_top.sub_(highest.unsqueeze(1)).exp2_()
    sums = (weights * total[chunk.parts]).sum(1)
    here.out.copy_(_summed(out, chunk.parts, weights.div_(sums.unsqueeze(1))))
    here.top.copy_(highest.flatten())
    here.total.copy_(sums.flatten())


def _backward(z: Backward, chunk: Chunk, l_sel: int, rooms: Rooms) -> None:
    h, here = z.q.shape[3], _group(z, chunk)
    dq = rooms("dq", *here.q.shape)
    for first, tokens, length in chunk.own_blocks(l_sel):
        own = replace(chunk.sequences(z, first, tokens, length, dq=dq), add=False)
        run_backward(own, window_tiles(length, length, own.q), rooms)
    q, grad = (rooms(f"chunk of {name}", *x.shape).copy_(x) for name, x in (("q", here.q), ("grad", here.grad)))
    if here.gate is not None:
        grad.mul_(here.gate)
    less_lse, less_delta = (x.neg().view(-1, h) for x in (here.lse, here.delta))
    keys, values = (x.mT.split(l_sel, 1) for x in (here.k, here.v))
    plain_keys, dk, dv = (x.split(l_sel) for x in (here.plain_k, here.dk, here.dv))
    for start, n, found, sizes in chunk.steps(max(1, cpu_tiles.SCORES_AT_ONCE // (2 * h * l_sel))):  # p and ds
        query, sizes = chunk.query.narrow(0, start, n), [size * h for size in sizes]
        rows, do = _rows("rows of q", q, query, rooms), _rows("rows of grad", grad, query, rooms)
        p, ds = (rooms(name, n * h, l_sel) for name in ("scores", "ds"))
        p.copy_(less_lse[query].view(-1, 1))  # added to by the products: a pass less than subtracting
        ds.copy_(less_delta[query].view(-1, 1))
        of_block = list(zip(found, *(x.split(sizes) for x in (rows, do, p, ds)), strict=True))
        for j, a, da, x, dx in of_block:
            x.addmm_(a, keys[j])
            dx.addmm_(da, values[j])
        ds.mul_(p.exp2_())
        part = rooms("part", n * h, dq.shape[2])
        for (j, a, da, x, dx), some in zip(of_block, part.split(sizes), strict=True):
            dv[j].addmm_(x.t(), da)
            dk[j].addmm_(dx.t(), a)
            torch.mm(dx, plain_keys[j], out=some)
        dq.index_add_(0, query, part.view(n, *dq.shape[1:]))
    z.put(here.dq, dq)


def _masked(z: Work, chosen: torch.Tensor, l_sel: int) -> Iterator[tuple[Work, Tile]]:
    """Parts of ``z``, whose groups see different keys, and their tiles: all keys up to the last query's, under a mask."""
    S, h = z.q.shape[2:4]
    step = queries_of_tile(h, S)
    by_group = chosen.transpose(1, 2).flatten(0, 1).unsqueeze(2)  # [B*G, S, 1, Ns]
    for part, groups in some_groups(z, cpu_tiles.SCORES_AT_ONCE // (step * h * S)):
        for at, end in ((at, min(at + step, S)) for at in range(0, S, step)):
            visible = selected_visible(by_group[groups], l_sel, at, end).transpose(1, 2)  # [groups, queries, 1, end]
            yield part, Tile(at, end - at, 0, end, ((0, end, minus_infinity(~visible, z.q)),))


def selected_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, chosen: torch.Tensor, l_sel: int, n_sel: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention over the chosen blocks' tokens. chosen bool [B, S, G, Ns], as `blocks.select` makes it.

    Output [B, S, H, Dv] and log-sum-exp [B, S, H].
    """
    z, rooms = Forward.of(q, k, v, scale), Rooms(q)
    if q.shape[1] <= SHORT:
        for part, tile in _masked(z, chosen, l_sel):
            tile.forward(part, rooms)
        return z.results()
    first = covered(chosen, l_sel)
    run_forward(z, window_tiles(first, first, z.q), rooms)  # a window of all tokens is causal
    for chunk in _chunks(chosen, first, l_sel):
        _forward(z, chunk, l_sel, rooms)
    return z.results()


def selected_backward(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
    chosen: torch.Tensor, l_sel: int, n_sel: int, scale: float,
) -> Tensors3:  # fmt: skip
    """Gradients of q, k and v; the selection has none."""
    dq = torch.empty_like(q)
    z = Backward.of(grad, q, k, v, lse, row_sums(grad, out), scale, dq)
    selected_gradients(z, chosen, l_sel)
    return dq, *z.of_keys_and_values(k, v, scale)


def selected_gradients(z: Backward, chosen: torch.Tensor, l_sel: int) -> None:
    """Write those of q, k and v."""
    rooms = Rooms(z.q)
    if z.q.shape[2] <= SHORT:
        for part, tile in _masked(z, chosen, l_sel):
            tile.backward(part, rooms)
        return
    first = covered(chosen, l_sel)
    run_backward(z, window_tiles(first, first, z.q), rooms)
    for chunk in _chunks(chosen, first, l_sel):
        _backward(z, chunk, l_sel, rooms)
