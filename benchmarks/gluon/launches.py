"""Launches of the kernels in Gluon in place of the plain ones: measured on a GPU, compiled for sm_90 where there is none.

    python benchmarks/gluon/launches.py [--tokens 65536] [--json FILE]

It makes a whole forward at the paper's shape, with plain kernels and with each Gluon kernel in its place. README.md has what each
can serve.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton
from importance_overlapped import KEYS, importance_overlapped
from selection_forward_tma import WIDTH, selected_forward_tma
from strided_overlapped import CONSUMERS, ROWS, strided_overlapped

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

from ahead import compiling  # noqa: E402
from figures import keep, parser_of  # noqa: E402

from nsa.kernels import blocks  # noqa: E402
from nsa.kernels.triton import block_schedule, branches, selection_schedule, whole  # noqa: E402
from nsa.kernels.triton.block_schedule import steps_of  # noqa: E402
from nsa.kernels.triton.branches import Pair, Places, sequence_arguments  # noqa: E402
from nsa.kernels.triton.launch import LOG2E, launch  # noqa: E402
from nsa.kernels.triton.selection_schedule import Items, Selection  # noqa: E402
from nsa.kernels.triton.sequences import Range, Sequences  # noqa: E402
from nsa.kernels.triton.tiles import widths  # noqa: E402
from nsa.sizes import Sizes  # noqa: E402

ROWS_OF_PROGRAM = CONSUMERS.value * ROWS.value
COPIED = WIDTH.value  # columns of a copy of rows by TMA


class Ring(NamedTuple):
    """Keys of a tile, and tiles under way."""

    bn: int
    stages: int


RING = Ring(64, 3)


def even_stages(ring: Ring) -> int:
    """Return the stages of a ring in which each of two consumers takes every second tile."""
    return max(2, ring.stages // 2 * 2)


def descriptors(x: torch.Tensor, rows: int) -> Pair:
    """Return descriptors of both parts of x [N, G, D], ``rows`` at a time."""
    part = widths(x.shape[-1])
    return descriptor(x.flatten(1), rows, part.d0), descriptor(x.flatten(1), rows, part.d1 or part.d0)


def descriptor(matrix: torch.Tensor, rows: int, columns: int) -> Any:
    """Return a descriptor of blocks [rows, columns] of a matrix, with their layout in shared memory."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    kind = gl.bfloat16 if matrix.dtype == torch.bfloat16 else gl.float16
    layout = gl.NVMMASharedLayout.get_default_for([rows, columns], kind)
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [rows, columns], layout)


def strided_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sequences: Sequences, places: Places, scale: float, out: torch.Tensor,
    lse: torch.Tensor, ring: Ring = RING,
) -> None:  # fmt: skip
    """Write what `branches.strided_forward` writes."""
    G, h, part = k.shape[1], q.shape[1] // k.shape[1], widths(q.shape[-1])
    launch(
        strided_overlapped, (triton.cdiv(sequences.longest, ROWS_OF_PROGRAM // h) * sequences.count * G,), q,
        q, *descriptors(k, ring.bn), descriptors(v, ring.bn)[0], out, lse, *sequence_arguments(sequences, q, k), places.window,
        scale * LOG2E, STRIDE=places.stride, OFFSET=places.offset, h=h, D0=part.d0, D1=part.d1, DV=v.shape[-1], BN=ring.bn,
        STAGES=ring.stages, WINDOWED=places.is_window, PACKED=sequences.is_packed, num_warps=4,
    )  # fmt: skip


def block_importance(
    q: torch.Tensor, k: torch.Tensor, d_v: int, lse: torch.Tensor, sequences: Sequences, at: Range, places: Places,
    selection: Selection, l: int, scale: float, out: torch.Tensor, ring: Ring = RING,
) -> None:  # fmt: skip
    """Write what `block_schedule.block_importance` writes."""
    G, h, part = k.shape[1], q.shape[1] // k.shape[1], widths(q.shape[-1])
    table, longest, most_keys, H, _, _ = sequence_arguments(sequences, q, k)
    table, a, r = table if at.table is None else at.table, l // places.stride, selection.l_sel // places.stride
    per_program = ROWS_OF_PROGRAM // h
    launch(
        importance_overlapped, (triton.cdiv(at.hi - at.lo, per_program) * at.count * G,), q, q,
        *descriptors(k, KEYS.value), lse, out, table, longest, most_keys, H, G, at.count * G, at.lo, at.hi, at.first,
        selection.n_blocks, scale * LOG2E, STRIDE=places.stride, OFFSET=places.offset, A=a, R=r, h=h, D0=part.d0, D1=part.d1,
        STEP=steps_of(KEYS.value, a, r).blocks, STAGES=even_stages(ring), NQ=max(8, triton.next_power_of_2(per_program)),
        PACKED=at.table is not None, num_warps=4,
    )  # fmt: skip


def selected_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, entries: torch.Tensor, items: Items, sequences: Sequences, at: Range,
    selection: Selection, scale: float, ring: Ring = RING,
) -> Pair:  # fmt: skip
    """Return what `selection_schedule.selected_forward` returns."""
    H, G = q.shape[1], k.shape[1]
    parts = q.new_empty(at.tokens * H * selection.parts, v.shape[-1])
    lse = q.new_empty(at.tokens * H * selection.parts, dtype=torch.float32)
    launch(
        selected_forward_tma, (len(items.items), selection.sub_blocks), q,
        descriptor(q.view(-1, q.shape[-1]), H // G, COPIED), k, v, entries, items.items, parts, lse,
        q if at.table is None else at.table, sequences.longest, H, G, at.first, scale * LOG2E, **selection.settings(), h=H // G,
        DK=q.shape[-1], DV=v.shape[-1], STAGES=even_stages(ring), PACKED=at.table is not None, num_warps=4,
    )  # fmt: skip
    return parts, lse


# By file: the module and the function that launches the plain kernel, and what launches Gluon's.
IN_PLACE: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "strided_overlapped": (branches, "strided_forward", strided_forward),
    "importance_overlapped": (block_schedule, "block_importance", block_importance),
    "selection_forward_tma": (selection_schedule, "selected_forward", selected_forward),
}
H, G, D_K, D_V = 64, 4, 192, 128


def forward_of(tokens: int, device: str) -> Callable[[], Any]:
    """Return a whole forward at the paper's shape, on random tensors of a device."""
    sizes = Sizes(32, 16, 64, 16, 512)

    def tensor(length: int, *size: int) -> torch.Tensor:
        return torch.randn(1, length, *size, device=device, dtype=torch.bfloat16)

    q, n = tensor(tokens, H, D_K), blocks.num_compressed(tokens, *sizes[:2])
    pairs = [(tensor(m, G, D_K), tensor(m, G, D_V)) for m in (n, tokens, tokens)]
    gates = tensor(tokens, H, 3).sigmoid()
    return lambda: whole.forward(q, *pairs, gates, None, sizes, D_K**-0.5)


@contextmanager
def replaced(name: str) -> Iterator[None]:
    """Launch a Gluon kernel in place of the plain one; '' launches plain kernels alone."""
    if not name:
        yield
        return
    module, function, by = IN_PLACE[name]
    with mock.patch.object(module, function, by):
        yield


def compiled(tokens: int) -> dict[str, Any]:
    """Compile each Gluon kernel for sm_90; return bytes of shared memory, and registers and spilled bytes of a thread."""
    from tests_cpu.kernels.compiled import Launch, code_of, ptxas

    found: dict[str, Any] = {}

    def compile_it(kernel: Any, grid: tuple[int, ...], like: torch.Tensor, *arguments: Any, **settings: Any) -> None:
        options = {"num_warps": settings.pop("num_warps")}
        code = code_of(
            Launch(kernel, {**dict(zip(kernel.arg_names, arguments, strict=False)), **settings}, options), 90
        )
        registers, spilled = ptxas(code.asm["ptx"], 90)
        found[kernel.__name__] = {"shared": code.metadata.shared, "registers": registers, "spilled": spilled}

    with compiling("sm_90", lambda kernel: False), mock.patch.dict(globals(), launch=compile_it):
        for name in IN_PLACE:
            with replaced(name):
                forward_of(tokens, "meta")()
    return found


def main() -> None:
    """Measure or compile, print, keep."""
    parser = parser_of(__doc__)
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        keep({"compiled": compiled(arguments.tokens)}, arguments.json)
        return
    from attention_gpu import timed

    forward = forward_of(arguments.tokens, "cuda")
    ms: dict[str, float] = {}
    for name in ("", *IN_PLACE):
        with replaced(name):
            ms |= timed({name or "plain": forward}, arguments.rounds)
    keep({"tokens": arguments.tokens, "forward_ms": ms}, arguments.json)


if __name__ == "__main__":
    main()
