"""Every Triton kernel, in its production shapes, compiles for an A100 and an H100 without one, and fits them."""

from __future__ import annotations

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
