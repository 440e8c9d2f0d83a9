"""Attention in tiles on a CPU, forward and backward: the scores of some queries and the keys that they see stay in a core's cache.

As in FlashAttention (arXiv 2205.14135), a tile's scores are one product, made into probabilities in place, and the backward makes
them again from the log-sum-exp: nothing of S x S is kept. The heads of a group are rows of the same product, as they share keys.
Scores are to base 2, as torch's `exp2` takes a third of its `exp`'s time, and float32 for the half types. A tile copies its queries
and writes its outputs where the caller wants them: another tensor of that size costs more in fresh pages than in copying. Every
sum is taken in one order: the same bits each time.

Shapes: B batch, S queries, N keys, H query heads, G KV groups, h = H/G, D head dim; q [B, S, H, Dk], k [B, N, G, Dk],
v [B, N, G, Dv]. The log-sum-exp is [B, S, H], float32, or float64 for float64.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Self, TypeVar

import torch

from nsa.kernels.blocks import wide

SCORES_AT_ONCE = 3 << 16  # of float32: about what the second-level cache of a core holds
FEWEST, MOST = 16, 64  # queries of a tile: few make a slow product, many see keys that are hidden from most of them
STEP = 16  # a window's tiles except for the last have queries and keys in multiples of it, as products are faster so

LOG2_E = math.log2(math.e)

Tensors3 = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


# --- what a forward and a backward work on ----------------------------------------------------------------------------


def of_queries(x: torch.Tensor, G: int) -> torch.Tensor:
    """Return [B, S, H, D] -> [B, G, S, h, D], a view."""
    return x.unflatten(2, (G, x.shape[2] // G)).transpose(1, 2)


def of_keys(x: torch.Tensor) -> torch.Tensor:
    """Return [B, N, G, D] -> [B*G, N, D], a copy in what is summed in."""
    copy = x.new_empty(x.shape[0] * x.shape[2], x.shape[1], x.shape[3], dtype=wide(x.dtype))
    return copy.copy_(x.transpose(1, 2).flatten(0, 1))


def of_keys_undone(x: torch.Tensor, B: int) -> torch.Tensor:
    """Return [B*G, N, D] -> [B, N, G, D]."""
    return x.unflatten(0, (B, -1)).transpose(1, 2)


def of_rows(x: torch.Tensor, G: int) -> torch.Tensor:
    """Return [B, S, H] -> [B*G, S*h], a number for each row of the scores."""
    return x.unflatten(2, (G, -1)).transpose(1, 2).flatten(2, 3).flatten(0, 1)


def of_rows_undone(x: torch.Tensor, B: int, S: int) -> torch.Tensor:
    """Return [B*G, S*h] -> [B, S, H]."""
    return x.unflatten(1, (S, -1)).unflatten(0, (B, -1)).transpose(1, 2).flatten(2, 3)


@dataclass(frozen=True, slots=True)
class Forward:
    """What a forward reads and writes.

    Of queries: q [B, G, S, h, Dk] as it was given, out [B, G, S, h, Dv] as it is returned. Of keys: k [B*G, N, Dk], times the
    scale, to base 2, and v [B*G, N, Dv]. Of rows: top and total [B*G, S*h], the largest score and the sum of 2**(score - top).
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    top: torch.Tensor
    total: torch.Tensor

    @classmethod
    def of(cls, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> Self:
        """From what an operator is given; what is written is not initialised."""
        B, S, H, _ = q.shape
        G = k.shape[2]
        out, keys = q.new_empty(B, S, H, v.shape[-1]), of_keys(k).mul_(scale * LOG2_E)
        rows = keys.new_empty(2, B * G, S * H // G)
        return cls(of_queries(q, G), keys, of_keys(v), of_queries(out, G), rows[0], rows[1])

    def results(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what an operator returns: the output, and the log-sum-exp to base e."""
        lse = (self.top + self.total.log2()).div_(LOG2_E)
        return self.out.transpose(1, 2).flatten(2, 3), of_rows_undone(lse, self.q.shape[0], self.q.shape[2])


def in_runs(x: torch.Tensor) -> Iterator[slice]:
    """Yield the tokens of ``x`` [B, S, ...], a few at a time: what is made of them stays in the cache."""
    return (slice(at, at + MOST) for at in range(0, x.shape[1], MOST))


def row_sums(grad: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Return the sums of grad * out, both [B, S, H, D]: [B, S, H], in what is summed in."""
    found = grad.new_empty(grad.shape[:3], dtype=wide(grad.dtype))
    for run in in_runs(grad):
        torch.sum(grad[:, run].to(found.dtype) * out[:, run], -1, out=found[:, run])
    return found


@dataclass(frozen=True, slots=True)
class Backward:
    """What a backward reads and writes.

    Of queries: q, grad, and gate [B, G, S, h, 1], which the gradient is times, or None; dq, which is added to where ``add`` is set
    so. Of keys: k and v as in `Forward`, plain_k, k times the scale alone, and dk and dv, which are added to. Of rows: the
    log-sum-exp to base 2, and delta, the sum of grad * gate * out: given; or, where each tile ``sees_all`` keys of its queries,
    written, without the gate, as the gradient of the gate. Then the output need not be kept.
    """

    q: torch.Tensor
    k: torch.Tensor
    plain_k: torch.Tensor
    v: torch.Tensor
    grad: torch.Tensor
    gate: torch.Tensor | None
    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor
    lse: torch.Tensor
    delta: torch.Tensor
    add: bool
    sees_all: bool

    @classmethod
    def of(
        cls, grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lse: torch.Tensor,
        delta: torch.Tensor | None, scale: float, dq: torch.Tensor, gate: torch.Tensor | None = None, add: bool = False,
    ) -> Self:  # fmt: skip
        """From what an operator is given; lse and delta [B, S, H], gate [B, S, H, 1], dq of q's shape."""
        G, plain_k, values, rows = k.shape[2], of_keys(k).mul_(scale), of_keys(v), of_rows(lse, k.shape[2])
        return cls(
            of_queries(q, G), plain_k * LOG2_E, plain_k, values, of_queries(grad, G),
            None if gate is None else of_queries(gate, G), of_queries(dq, G), torch.zeros_like(plain_k),
            torch.zeros_like(values), rows * LOG2_E, torch.zeros_like(rows) if delta is None else of_rows(delta, G), add,
            delta is None,
        )  # fmt: skip

    def of_keys_and_values(self, k: torch.Tensor, v: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the gradients of k and v."""
        dk, dv = (of_keys_undone(x, k.shape[0]) for x in (self.dk.mul_(scale), self.dv))
        return dk.to(k.dtype).contiguous(), dv.to(v.dtype).contiguous()

    def of_gate(self) -> torch.Tensor:
        """Return the gradient of the gate [B, S, H], where tiles see all."""
        return of_rows_undone(self.delta, self.q.shape[0], self.q.shape[2])

    def put(self, there: torch.Tensor, found: torch.Tensor) -> None:
        """Write to ``there``, a part of dq, or add to it."""
        if self.add:
            there.add_(found)
        else:
            there.copy_(found)


Work = TypeVar("Work", Forward, Backward)


def each(
    z: Work, of_queries: Callable[[torch.Tensor], torch.Tensor], of_others: Callable[[torch.Tensor], torch.Tensor]
) -> Work:
    """Every tensor of ``z`` through a function: what is of queries has five dimensions."""
    found = {f.name: x for f in fields(z) if isinstance(x := getattr(z, f.name), torch.Tensor)}
    return replace(z, **{name: (of_queries if x.dim() == 5 else of_others)(x) for name, x in found.items()})


def some_groups(z: Work, at_once: int) -> Iterator[tuple[Work, slice]]:
    """Yield ``z`` in parts of about ``at_once`` groups, all of some of the batch or some of one, and which of B*G these are;
    views.
    """
    B, G = z.q.shape[:2]
    if at_once >= B * G:
        yield z, slice(0, B * G)
        return
    batch, groups = max(1, at_once // G), min(max(1, at_once), G)
    for b in range(0, B, batch):
        for g in range(0, G, groups):
            some = slice(b * G + g, (min(b + batch, B) - 1) * G + min(g + groups, G))
            yield each(z, lambda x: x[b : b + batch, g : g + groups], lambda x: x[some]), some  # noqa: B023


class Rooms:
    """Memory that one tile after another uses, by name and shape."""

    def __init__(self, like: torch.Tensor) -> None:
        self.dtype, self.device = wide(like.dtype), like.device
        self.memory: dict[str, torch.Tensor] = {}
        self.views: dict[tuple[str | int, ...], torch.Tensor] = {}

    def __call__(self, name: str, *shape: int) -> torch.Tensor:
        """Of this shape, not initialised."""
        found = self.views.get((name, *shape))
        if found is None:
            size = math.prod(shape)
            if name not in self.memory or self.memory[name].numel() < size:
                self.memory[name] = torch.empty(size, dtype=self.dtype, device=self.device)
                self.views = {key: view for key, view in self.views.items() if key[0] != name}
            found = self.views[name, *shape] = self.memory[name][:size].view(shape)
        return found


# --- a tile: some queries, and the keys that any of them sees ----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Tile:
    """Queries at ... at + n - 1 and keys first ... first + keys - 1.

    ``hidden`` are ranges of these keys, (start, length), and what is added to their scores, 0 or -inf: [n, 1, length], or by group
    [b*g, n, 1, length]. Every query sees a key.
    """

    at: int
    n: int
    first: int
    keys: int
    hidden: tuple[tuple[int, int, torch.Tensor], ...]

    def rows(self, name: str, x: torch.Tensor, rooms: Rooms, times: torch.Tensor | None = None) -> torch.Tensor:
        """Of what queries have, [b, g, S, h, D]: [b*g, n*h, D], a copy; ``times`` [b, g, S, h, 1]."""
        part = x.narrow(2, self.at, self.n)
        b, g, n, h, D = part.shape
        copy = rooms(name, b, g, n, h, D).copy_(part)
        if times is not None:
            copy.mul_(times.narrow(2, self.at, self.n))
        return copy.view(b * g, n * h, D)

    def seen(self, x: torch.Tensor) -> torch.Tensor:
        """Of what keys have, [b*g, N, D]: [b*g, keys, D], a view."""
        return x.narrow(1, self.first, self.keys)

    def numbers(self, x: torch.Tensor, h: int) -> torch.Tensor:
        """Of what rows have, [b*g, S*h]: [b*g, n*h], a view."""
        return x.narrow(1, self.at * h, self.n * h)

    def scores(self, q: torch.Tensor, k: torch.Tensor, rooms: Rooms, less: torch.Tensor | None = None) -> torch.Tensor:
        """Return [b*g, n*h, keys], -inf where hidden, from rows of q; ``less`` [b*g, n*h] is taken from a row's."""
        scores = rooms("scores", *q.shape[:2], self.keys)
        if less is None:
            torch.bmm(q, self.seen(k).mT, out=scores)
        else:  # added to by the product: one pass less
            scores.copy_(less.neg().unsqueeze(2)).baddbmm_(q, self.seen(k).mT)
        for start, length, mask in self.hidden:
            scores.unflatten(1, (self.n, -1)).narrow(3, start, length).add_(mask)
        return scores

    def forward(self, z: Forward, rooms: Rooms) -> tuple[torch.Tensor, torch.Tensor]:
        """Write its queries' out, top and total. Returns what is proportional to probabilities [b*g, n*h, keys], and its sums."""
        h = z.q.shape[3]
        p = self.scores(self.rows("q", z.q, rooms), z.k, rooms)
        total = exponentials(p, self.numbers(z.top, h), self.numbers(z.total, h))
        v, there = self.seen(z.v), z.out.narrow(2, self.at, self.n)
        out = torch.bmm(p, v, out=rooms("out", *p.shape[:2], v.shape[2]))
        torch.div(out.view(there.shape), total.view(*there.shape[:4], 1), out=there)
        return p, total

    def backward(self, z: Backward, rooms: Rooms) -> None:
        """Write its queries' dq, and add to dk and dv what comes from it."""
        h, there = z.q.shape[3], z.dq.narrow(2, self.at, self.n)
        q, do = self.rows("q", z.q, rooms), self.rows("grad", z.grad, rooms, None if z.sees_all else z.gate)
        p = self.scores(q, z.k, rooms, self.numbers(z.lse, h)).exp2_()
        ds, delta = torch.bmm(do, self.seen(z.v).mT, out=rooms("ds", *p.shape)), self.numbers(z.delta, h)
        if z.sees_all:
            torch.sum(ds.mul_(p), -1, out=delta)
            ds.addcmul_(p, delta.unsqueeze(2), value=-1)
        else:
            ds.sub_(delta.unsqueeze(2)).mul_(p)
        gate = z.gate.narrow(2, self.at, self.n) if z.sees_all and z.gate is not None else None
        if gate is not None:  # times rows of q and of grad, which are fewer numbers than scores
            q.view(there.shape).mul_(gate)
            do.view(*there.shape[:4], -1).mul_(gate)
        self.seen(z.dv).baddbmm_(p.mT, do)
        self.seen(z.dk).baddbmm_(ds.mT, q)
        dq = torch.bmm(ds, self.seen(z.plain_k), out=rooms("out", *q.shape)).view(there.shape)
        z.put(there, dq if gate is None else dq.mul_(gate))


def minus_infinity(hidden: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return what `Tile.hidden` has, in what ``like`` is summed in, from bool: adding it takes a quarter of the time of filling
    in.
    """
    return torch.zeros(hidden.shape, dtype=wide(like.dtype), device=like.device).masked_fill_(hidden, float("-inf"))


def exponentials(scores: torch.Tensor, top: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """Take ``scores`` [..., rows, keys] to 2**(score - top), in place, and return the sums of these, [..., rows, 1].

    Written are top, the largest score, and total, the sums; both [..., rows].
    """
    torch.amax(scores, -1, out=top)
    return torch.sum(scores.sub_(top.unsqueeze(-1)).exp2_(), -1, out=total).unsqueeze(-1)


def run_forward(
    z: Forward, tiles: Sequence[Tile], rooms: Rooms,
    report: Callable[[slice, Tile, torch.Tensor, torch.Tensor], None] = lambda *_: None,
) -> None:  # fmt: skip
    """Every tile for every group; after each, ``report`` gets the groups, the tile and what its forward returned."""
    for part, groups in some_groups(z, _groups_at_once(z, tiles)):
        for tile in tiles:
            report(groups, tile, *tile.forward(part, rooms))


def run_backward(z: Backward, tiles: Sequence[Tile], rooms: Rooms) -> None:
    """Every tile for every group."""
    for part, _ in some_groups(z, _groups_at_once(z, tiles)):
        for tile in tiles:
            tile.backward(part, rooms)


def _groups_at_once(z: Forward | Backward, tiles: Sequence[Tile]) -> int:
    return SCORES_AT_ONCE // max((t.n * t.keys * z.q.shape[3] for t in tiles), default=1)


def queries_of_tile(h: int, keys: int) -> int:
    """Return how many, of h heads a group, when the first of them sees this many keys."""
    return min(max(SCORES_AT_ONCE // (h * (keys + MOST)) // STEP * STEP, FEWEST), MOST)
