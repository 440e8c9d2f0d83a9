"""Every Triton kernel, in its production shapes, compiles for an A100 and an H100 without one, and fits them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests_cpu.kernels.compiled import compile_for, record_launches

pytest.importorskip("triton")

SHARED = {80: 163 << 10, 90: 227 << 10}  # bytes a block may have
SPILLED = 64  # bytes a thread; beyond, a kernel pays for it in every step of its loop
SHAPES = {"paper": (65536, 64, 4, 192, 128, torch.bfloat16), "125m": (65536, 12, 2, 64, 64, torch.bfloat16)}
SHAPES["125m in fp32"] = (*SHAPES["125m"][:-1], torch.float32)
SHAPES["head dim 128"] = (8192, 32, 8, 128, 128, torch.float16)


@pytest.mark.parametrize("capability", SHARED)
@pytest.mark.parametrize("shape", SHAPES)
def test_kernels_fit(monkeypatch: pytest.MonkeyPatch, shape: str, capability: int) -> None:
    launches = record_launches(monkeypatch, *SHAPES[shape])
    monkeypatch.undo()
    assert {launch.name for launch in launches} == {
        "strided_forward", "strided_dq", "strided_dkv", "block_importance", "row_dot", "select_blocks", "list_picks",
        "list_queries", "selected_by_query", "selected_by_block", "merge_parts", "selected_dq", "selected_dkv", "sum_segments",
        "gated_sum", "gated_sum_backward",
    }  # fmt: skip
    for launch in launches:
        code = compile_for(launch, capability)
        assert code.shared <= SHARED[capability], code
        assert code.spilled <= SPILLED, code


def test_tile_sizes_are_those_that_were_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from nsa.kernels import triton_ops

    table = tmp_path / "tiles.json"
    table.write_text('{"sm_90": {"dq 192/128 2": [32, 64, 8, 3]}}')
    monkeypatch.setattr(triton_ops, "MEASURED", table)
    found = triton_ops.measured.__wrapped__("sm_90")
    assert found == {triton_ops.tile_name("dq", 192, 128, 2): triton_ops.Tiles(32, 64, 8, 3)}
    assert triton_ops.measured.__wrapped__("sm_80") == {}


def test_more_programs_than_a_gpu_numbers_are_refused() -> None:
    from nsa.kernels import triton_ops

    q = torch.empty(35_000, 1, 2, 16, device="meta")
    with pytest.raises(ValueError, match="batch times heads, 35000 x 2: a GPU numbers 65535 of them; split the batch"):
        triton_ops.sliding_forward(q, q, q, 8, 0.1)
