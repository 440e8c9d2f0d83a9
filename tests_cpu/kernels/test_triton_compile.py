"""Every Triton kernel compiles for an A100 and an H100 where there is none, fits them, and needs what it needed before."""

import json
import random
import re
from pathlib import Path

import pytest
import torch

from nsa import explain
from nsa.sizes import Sizes
from tests_cpu.kernels.compiled import (
    CAPABILITIES,
    PROBLEMS,
    TABLE,
    Compiled,
    Launch,
    Problem,
    compile_all,
    compile_for,
    record_launches,
)

triton = pytest.importorskip("triton", minversion="3.6")

SHARED = {80: 163 << 10, 90: 227 << 10}  # bytes that a block may have
SPILLED = 400  # bytes per thread. The fastest tiles of dk and dv measured on an H100 spill about 300, outside of their inner loops
CHANGED = 0.1  # of registers and shared memory: a larger change must be reviewed
KERNELS = {
    "strided_forward of the blocks", "strided_forward of the window", "block_importance", "select_blocks", "count_picks",
    "scan_counts", "place_entries", "selected_forward", "merge_parts", "gates_backward", "strided_dq of the blocks",
    "strided_dkv of the blocks", "sum_segments", "strided_dq of the window", "strided_dkv of the window", "cut_lists",
    "selected_backward", "sum_items", "merge_dq",
    "rotate", "scan_keys", "pick_blocks", "read_blocks", "sum_parts",
}  # fmt: skip
WGMMA = {
    "strided_forward", "block_importance", "selected_forward",
    "strided_dq", "strided_dkv", "selected_backward",
}  # fmt: skip
SAMPLE = {("125m", 80)}
CASES = [
    pytest.param(name, capability, marks=() if (name, capability) in SAMPLE else pytest.mark.slow)
    for name in PROBLEMS
    for capability in CAPABILITIES
]


@pytest.mark.parametrize(("name", "capability"), CASES)
def test_kernels_fit_and_need_what_they_needed(name: str, capability: int) -> None:
    found = compile_all(PROBLEMS[name], capability)
    assert set(found) == KERNELS
    known = json.loads(TABLE.read_text()).get(triton.__version__, {}).get(f"{name}, sm_{capability}", {})
    for kernel, code in found.items():
        assert code.shared <= SHARED[capability], code
        assert code.spilled <= SPILLED, code
        if capability == 90 and name in ("paper", "125m") and kernel.partition(" of ")[0] in WGMMA:
            assert code.wgmma > 0, code
        if kernel in known:
            assert_unchanged(code, known[kernel])


def assert_unchanged(code: Compiled, known: dict[str, int]) -> None:
    """Assert that needs are within `CHANGED`. After a review, python -m tests_cpu.kernels.compiled writes the table again."""
    for need in ("registers", "shared"):
        now, before = getattr(code, need), known[need]
        assert abs(now - before) <= CHANGED * max(before, 32), f"{code.name}: {need} {before} before, {now} now"
    assert code.spilled <= known["spilled"] * (1 + CHANGED) + 16, (
        f"{code.name}: spilled {known['spilled']} before, {code.spilled} now"
    )


@pytest.mark.parametrize(("S", "G"), [(2048, 2), (65536, 2), (65536, 4)])
def test_a_step_has_few_launches(monkeypatch: pytest.MonkeyPatch, S: int, G: int) -> None:
    """The launches of a forward, its backward, a token decoded and a tensor rotated: the 125M model's heads.

    Queries are one range at any of these lengths.
    """
    found = record_launches(monkeypatch, Problem(S, 12, G, 64, 64, torch.bfloat16), "sm_90")
    assert list(map(len, found)) == [9, 10, 4, 1]


def test_the_selected_branch_compiles_for_one_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """A length of 1 is a constant to Triton's compiler, which its interpreter does not show."""
    forward, backward, *_ = record_launches(monkeypatch, Problem(1, 4, 1, 64, 64, torch.bfloat16))
    for launch in (*forward, *backward):
        if launch.name.startswith("selected"):
            compile_for(launch, 80)


def test_tile_sizes_are_those_that_were_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from nsa.kernels.triton import tiles

    table = tmp_path / "tiles.json"
    table.write_text(
        '{"sm_90": {"sliding_dq 192/128 2": [32, 64, 8, 3, 1, true], "sliding_dq 192/128 2 short": [16, 16, 4, 1]}}'
    )
    monkeypatch.setattr(tiles, "MEASURED", table)
    known = tiles.measured.__wrapped__("sm_90")
    monkeypatch.setattr(tiles, "measured", lambda on: known if on == "sm_90" else {})
    choose = tiles._tile.__wrapped__
    assert choose("sliding_dq", 192, 128, 2, False, "sm_90") == tiles.Tile(32, 64, 8, 3, 1, True)
    assert choose("sliding_dq", 192, 128, 2, True, "sm_90") == tiles.Tile(16, 16, 4, 1)
    # The nearest that was measured.
    assert choose("sliding_dq", 160, 128, 2, False, "sm_90") == tiles.Tile(32, 64, 8, 3, 1, True)
    assert choose("sliding_dq", 192, 128, 2, False, "sm_80") == tiles.fitting("sliding_dq", 192, 128, 2)


def test_head_dims_are_two_powers_of_two() -> None:
    from nsa.kernels.triton.tiles import widths

    parts = {
        8: (16, 0),
        16: (16, 0),
        24: (32, 0),
        48: (32, 16),
        64: (64, 0),
        96: (64, 32),
        192: (128, 64),
        240: (256, 0),
    }
    assert {d: (widths(d).d0, widths(d).d1) for d in parts} == parts
    assert [d for d in parts if widths(d).is_exact] == [16, 48, 64, 96, 192]


def test_memory_of_parts_is_bounded() -> None:
    """The paper's shape at 64k: inputs, everything kept, gradients and the largest range's parts are below 16 GB."""
    from nsa.kernels.triton import selection_schedule, sequences, whole

    S, H, G, d_k, d_v = 65536, 64, 4, 192, 128
    q = torch.empty(1, S, H, d_k, dtype=torch.bfloat16, device="meta")
    v = torch.empty(1, S, G, d_v, dtype=torch.bfloat16, device="meta")
    sizes = Sizes(32, 16, 64, 16, 512)
    kept = whole.empty_kept(q, v, None, sizes)
    keys = 2 * (2 * S + S // 16) * G * (d_k + d_v)
    selection = selection_schedule.Selection.of(S, 64, 16, q, d_v)
    seqs = whole.sequences_of(q, G, d_v, None, sizes)
    items = max(at.tokens for at in seqs.ranges) * G * 16 // selection_schedule.BACKWARD_PIECE + G * (
        selection.n_blocks + 1
    )
    parts = max(at.tokens for at in seqs.ranges) * selection_schedule.parts_bytes(
        q[0], d_v, selection
    ) + items * 64 * 4 * (d_k + d_v)
    outputs = 2 * S * H * d_v * 2  # the output and its gradient
    total = 2 * (q.nbytes + keys) + outputs + sum(x.nbytes for x in kept) + parts + S * G * (d_k + d_v) * 4
    assert total < 16e9
    assert len(seqs.ranges) > 1
    assert sum(at.tokens for at in seqs.ranges) == S
    assert sequences.most_groups(S, 1, selection_schedule.parts_bytes(q[0], d_v, selection)) == len(seqs.ranges)


@pytest.mark.parametrize(
    ("version", "reason"),
    [
        ("3.2.0", "the Triton kernels need Triton 3.6, and 3.2.0 is installed"),
        ("3.7.1+git12ab", ""),  # of torch's nightlies, under another distribution's name
        ("main", "triton cannot be imported (ValueError"),
    ],
)
def test_the_module_triton_is_asked_for_its_version(monkeypatch: pytest.MonkeyPatch, version: str, reason: str) -> None:
    from nsa.kernels.triton import support

    monkeypatch.setattr(triton, "__version__", version)
    found = support.why_no_triton.__wrapped__()
    assert found.startswith(reason)
    assert bool(found) == bool(reason)


@pytest.mark.parametrize(
    ("device", "hip", "cuda", "reason"),
    [
        ("xpu", None, None, "need an NVIDIA GPU, and the tensors are on xpu"),
        ("meta", None, None, "need an NVIDIA GPU, and the tensors are on meta"),
        ("cuda", "6.4", None, "this torch is built for AMD's (ROCm)"),
        ("cuda", None, None, "this torch is built without CUDA"),
    ],
)
def test_another_device_is_served_by_torch(
    monkeypatch: pytest.MonkeyPatch, device: str, hip: str | None, cuda: str | None, reason: str
) -> None:
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    name, why = explain("auto", torch.bfloat16, torch.device(device))
    assert (name, reason in why) == ("sdpa", True)
    with pytest.raises(ValueError, match=re.escape(reason)):
        explain("triton", torch.bfloat16, torch.device(device))


def variant(launch: Launch) -> tuple[object, ...]:
    """Return what a compiled kernel is kept by: constants, dtypes, and of whole numbers whether they are 1, or multiples of 16."""

    def kind(name: str, value: object, *, is_any: bool, is_constant: bool) -> object:
        if is_constant or isinstance(value, bool | float):
            return value if is_constant else type(value)
        if isinstance(value, int):
            return "any" if is_any else value if value == 1 else value % 16 == 0
        return getattr(value, "dtype", type(value))

    found = [
        kind(p.name, launch.arguments[p.name], is_any=p.do_not_specialize, is_constant=p.is_constexpr)
        for p in launch.kernel.params
    ]
    return launch.name, *found, *launch.options.items()


def test_few_variants_for_any_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is compiled for seconds, on each rank while the others wait."""
    variants = set()
    for S in random.Random(0).sample(range(512, 4097), 50):
        with monkeypatch.context() as patch:
            forward, backward, *_ = record_launches(patch, Problem(S, 12, 2, 64, 64, torch.bfloat16), "sm_90")
        variants |= {variant(launch) for launch in (*forward, *backward)}
    assert len(variants) <= 25


@pytest.mark.parametrize(
    ("S", "H", "G", "l_sel", "n_sel", "said"),
    [
        (1 << 20, 4, 1, 16, 16, "1048576 tokens are 65536 blocks of select_block=16"),
        (1 << 21, 64, 16, 128, 16, "2097152 tokens of 16 groups and head dim 128"),
        (1 << 20, 4, 1, 64, 1025, "n_select=1025 of 16384 blocks"),
        (4096, 512, 2, 64, 16, "256 heads per group"),
    ],
)
def test_what_the_kernels_cannot_count_is_refused(S: int, H: int, G: int, l_sel: int, n_sel: int, said: str) -> None:
    from nsa.kernels.triton import whole

    with pytest.raises(ValueError, match=said):
        whole.check_limits(S, H, G, 128, 64, Sizes(32, 16, l_sel, n_sel))


def test_a_pack_of_one_long_document_and_many_short_ones_has_room_for_its_own_blocks() -> None:
    """The room for a document's items follows from its own length, not from the longest document's."""
    from nsa.kernels.triton import selection_schedule, sequences

    ends = [0, 8192, *range(8192 + 64, 8192 + 64 * 257, 64)]
    seqs = sequences.pack(ends, 32, 16, 64, 1, torch.device("cpu"))
    selection = selection_schedule.Selection(64, 16, 128)
    (at,) = seqs.ranges
    assert at.rooms == 128 + 1 + 256 * 2
    assert at.table[:, 7].tolist() == [0, *range(129, 129 + 2 * 256, 2)]
    picks = torch.empty(seqs.tokens, 2, 16, dtype=torch.int32)
    room = selection_schedule._room(picks, at, selection, 256)
    assert len(room.items) == seqs.tokens * 2 * 16 // 256 + 2 * at.rooms


def test_more_programs_than_a_gpu_numbers_are_refused() -> None:
    from nsa.kernels.triton.launch import launch

    with pytest.raises(
        ValueError, match=r"7 tokens: the grid \(2, 70000\) has more programs than the 65535 that a GPU numbers"
    ):
        launch(None, (2, 70000), torch.empty(7, 1))
