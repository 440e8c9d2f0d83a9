"""Which sequences a call has, and the ranges of queries it goes through: what kernels need of a batch or a pack, as numbers and
tables.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch

from nsa.kernels import blocks

CHUNK = 64  # queries whose picks are sorted together
SHORT, SHORT_CHUNK = 8192, 32  # up to so many tokens, more and smaller programs
PARTS = 3 << 30  # bytes of parts of the selected branch that exist at once; more queries go in several ranges


@dataclass(frozen=True, kw_only=True, slots=True)
class Range:
    """Queries that the selected branch works on at once: tokens first ... end - 1 of all, lo ... hi - 1 of a batch's sequences.

    Of a pack, ``table`` (rows.py has its columns) has which of each sequence, and hi - lo is the most of any. ``chunks`` are a
    sequence's at most, ``all_chunks`` those of all sequences; ``rooms`` are the selection blocks of all, and one more each.
    """

    first: int
    end: int
    lo: int
    hi: int
    count: int
    chunks: int
    all_chunks: int
    rooms: int
    table: torch.Tensor | None = None

    @property
    def tokens(self) -> int:
        return self.end - self.first


@dataclass(frozen=True, kw_only=True, slots=True)
class Sequences:
    """``count`` sequences of at most ``longest`` tokens and ``most_keys`` compressed keys, ``tokens`` in all."""

    count: int
    longest: int
    most_keys: int
    tokens: int
    chunk: int
    ranges: tuple[Range, ...]
    table: torch.Tensor | None = None  # of a pack, for what needs no ranges
    positions: torch.Tensor | None = None  # of a pack: int32 [tokens], a token's place in its sequence

    @property
    def is_packed(self) -> bool:
        return self.table is not None


def _step(bytes_of_parts: int) -> int:
    return max(CHUNK, PARTS // max(1, bytes_of_parts) // CHUNK * CHUNK)


def ranges_of(tokens: int, bytes_of_parts: int) -> list[tuple[int, int]]:
    """Return runs of tokens whose parts, ``bytes_of_parts`` per token, fit `PARTS`."""
    step = _step(bytes_of_parts)
    return [(at, min(at + step, tokens)) for at in range(0, tokens, step)]


def most_groups(tokens: int, count: int, bytes_of_parts: int) -> int:
    """Return a bound on the pairs (range, sequence); by arithmetic alone, as ``tokens`` may be a symbol of a traced graph."""
    return count + -(-tokens // _step(bytes_of_parts)) - 1


def batch(
    count: int, S: int, l: int, d: int, l_sel: int, bytes_of_parts: int, device: torch.device
) -> Sequences:  # fmt: skip
    """Return ``count`` sequences of S tokens each."""
    runs = ranges_of(count * S, bytes_of_parts)
    if count > 1 and len(runs) > 1:
        return pack(range(0, count * S + 1, S), l, d, l_sel, bytes_of_parts, device)
    chunk, rooms = SHORT_CHUNK if S <= SHORT else CHUNK, count * (blocks.num_selection(S, l_sel) + 1)
    cut = [(a, b, -(-(b - a) // chunk)) for a, b in (runs if count == 1 else [(0, S)])]  # of each sequence
    ranges = [
        Range(first=count * a, end=count * b, lo=a, hi=b, count=count, chunks=n, all_chunks=count * n, rooms=rooms)
        for a, b, n in cut
    ]
    return Sequences(
        count=count,
        longest=S,
        most_keys=blocks.num_compressed(S, l, d),
        tokens=count * S,
        chunk=chunk,
        ranges=tuple(ranges),
    )


def pack(
    ends: Sequence[int], l: int, d: int, l_sel: int, bytes_of_parts: int, device: torch.device
) -> Sequences:  # fmt: skip
    """Return sequences one behind the other, from ``ends[i]`` to ``ends[i + 1]``; empty ones are skipped."""
    found, written = _pack(tuple(ends), l, d, l_sel, tuple(ranges_of(ends[-1], bytes_of_parts)), device)
    # Another stream waits for the copy. A capture need not: torch synchronizes before it begins.
    if written is not None and not torch.cuda.is_current_stream_capturing():
        stream = torch.cuda.current_stream(device)
        stream.wait_event(written)
        for tensor in (found.table, found.positions):
            if tensor is not None:
                tensor.record_stream(stream)
    return found


# All layers of a step need the same tables; and a captured step, which must not read what the host holds, finds those of
# its warm-up.
@functools.lru_cache(maxsize=8)
def _pack(
    ends: tuple[int, ...], l: int, d: int, l_sel: int, runs: tuple[tuple[int, int], ...], device: torch.device
) -> tuple[Sequences, torch.cuda.Event | None]:
    """Return sequences, and on a GPU the event after which their tables are written."""
    spans = [(a, b - a) for a, b in pairwise(ends) if b > a]
    tokens, longest = ends[-1], max(length for _, length in spans)
    chunk = SHORT_CHUNK if longest <= SHORT else CHUNK
    keys = [blocks.num_compressed(length, l, d) for _, length in spans]
    key_starts = [0, *accumulate(keys)]
    rows = [[a, n, key_starts[i], keys[i], 0, n, 0, 0] for i, (a, n) in enumerate(spans)]
    at, found = len(rows), []
    for first, end in runs:
        chunks, rooms = [0], 0
        for i, (a, n) in enumerate(spans):
            lo, hi = max(0, first - a), min(n, end - a)
            if lo < hi:
                rows.append([a, n, key_starts[i], keys[i], lo, hi, chunks[-1], rooms])
                rooms += blocks.num_selection(n, l_sel) + 1
                chunks.append(chunks[-1] + -(-(hi - lo) // chunk))
        found.append((first, end, at, len(rows), chunks[-1], rooms))
        at = len(rows)
    table = _on_device(rows, device)
    ranges = []
    for first, end, a, b, all_chunks, rooms in found:
        most = max(row[5] - row[4] for row in rows[a:b])
        ranges.append(
            Range(
                first=first,
                end=end,
                lo=0,
                hi=most,
                count=b - a,
                chunks=-(-most // chunk),
                all_chunks=all_chunks,
                rooms=rooms,
                table=table[a:b],
            )
        )
    owners = torch.arange(len(spans), dtype=torch.int32, device=device)
    owners = torch.repeat_interleave(owners, table[: len(spans), 1], output_size=tokens)
    positions = torch.arange(tokens, dtype=torch.int32, device=device) - table[:, 0].index_select(0, owners)
    written = torch.cuda.Event() if device.type == "cuda" else None
    if written is not None:
        written.record(torch.cuda.current_stream(device))
    made = Sequences(
        count=len(spans), longest=longest, most_keys=max(keys), tokens=tokens, chunk=chunk, ranges=tuple(ranges),
        table=table[: len(spans)], positions=positions,
    )  # fmt: skip
    return made, written


def _on_device(rows: list[list[int]], device: torch.device) -> torch.Tensor:
    table = torch.tensor(rows, dtype=torch.int32, device="cpu")
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table.to(device)
