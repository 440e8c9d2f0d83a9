"""Compiles the Triton kernels for a GPU that is not there, as `nsa.kernels.triton_ops` launches them; says what they need."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from typing import Any

import pytest
import torch

TYPES = {
    torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.int8: "*i8", torch.int32: "*i32",
    torch.int64: "*i64", torch.bool: "*i1",
}  # fmt: skip


@dataclass(frozen=True)
class Launch:
    """A kernel as it was to be launched: its arguments by name, and its settings."""

    kernel: Any
    arguments: dict[str, Any]
    options: dict[str, int]

    @property
    def name(self) -> str:
        return str(self.kernel.__name__)


@dataclass(frozen=True)
class Compiled:
    """Bytes of shared memory, and registers and spilled bytes a thread."""

    name: str
    shared: int
    registers: int
    spilled: int


def record_launches(
    monkeypatch: pytest.MonkeyPatch, S: int, H: int, G: int, d_k: int, d_v: int, dtype: torch.dtype
) -> list[Launch]:
    """What a forward and backward of all branches would launch, asked with tensors that have no memory; each kernel once."""
    from nsa.kernels import blocks, triton_ops

    found: dict[str, Launch] = {}

    def note(kernel: Any, grid: tuple[int, ...], like: torch.Tensor, *arguments: Any, **settings: Any) -> None:
        options = {name: settings.pop(name) for name in ("num_warps", "num_stages") if name in settings}
        named = {**dict(zip(kernel.arg_names, arguments, strict=False)), **settings}
        assert list(named) == list(kernel.arg_names) or set(named) == set(kernel.arg_names)
        assert all(0 < n < 2**31 for n in grid[:1])
        assert all(0 < n < 2**16 for n in grid[1:])
        width = f"{kernel.__name__}{named.get('PD', named.get('PADDED', ''))}"
        found.setdefault(width, Launch(kernel, named, options))

    monkeypatch.setattr(triton_ops, "_launch", note)

    def tensor(*shape: int) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    n_cmp = blocks.num_compressed(S, 32, 16)
    q, do = tensor(1, S, H, d_k), tensor(1, S, H, d_v)
    k, v, k_cmp, v_cmp = tensor(1, S, G, d_k), tensor(1, S, G, d_v), tensor(1, n_cmp, G, d_k), tensor(1, n_cmp, G, d_v)
    out, lse = triton_ops.sliding_forward(q, k, v, 512, 0.1)
    triton_ops.sliding_backward(do, q, k, v, out, lse, 512, 0.1)
    window = list(found.values())
    found.clear()
    out, lse, importance = triton_ops.compressed_forward(q, k_cmp, v_cmp, 32, 16, 64, 0.1)
    triton_ops.compressed_backward(do, q, k_cmp, v_cmp, out, lse, 32, 16, 0.1)
    chosen = triton_ops.select(importance, 64, 16)
    for form in (triton_ops.by_query, triton_ops.by_block):
        out, lse = form(q, k, v, chosen, 64, 16, 0.1)
    triton_ops.selected_backward(do, q, k, v, out, lse, chosen, 64, 16, 0.1)
    gates = tensor(1, S, H, 3)
    triton_ops.gated_sum_backward(triton_ops.gated_sum(do, do, do, gates), do, do, do, gates)
    return [*window, *found.values()]


def compile_for(launch: Launch, capability: int) -> Compiled:
    """Compile for sm_``capability``; Triton's own assembler says what the code needs."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    constants = {p.name for p in launch.kernel.params if p.is_constexpr}
    signature = {}
    for name, value in launch.arguments.items():
        if name in constants:
            signature[name] = "constexpr"
        elif isinstance(value, torch.Tensor):
            signature[name] = TYPES[value.dtype]
        else:
            signature[name] = "fp32" if isinstance(value, float) else "i32"
    places = {name: (launch.kernel.arg_names.index(name),) for name in signature}
    aligned = {places[n]: [["tt.divisibility", 16]] for n, t in signature.items() if t.startswith("*")}
    source = ASTSource(
        launch.kernel, {n: signature[n] for n in launch.kernel.arg_names},
        {places[n]: launch.arguments[n] for n in constants}, aligned,
    )  # fmt: skip
    options = {"enable_fp_fusion": True, **launch.options}
    code = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    used = ptxas(code.asm["ptx"], capability)
    return Compiled(launch.name, code.metadata.shared, *used)


def ptxas(ptx: str, capability: int) -> tuple[int, int]:
    """Registers and spilled bytes a thread."""
    from triton.backends.nvidia.compiler import get_ptxas

    assembler = get_ptxas(capability).path
    arch = "sm_90a" if capability == 90 else f"sm_{capability}"
    done = subprocess.run(
        [assembler, "-v", f"--gpu-name={arch}", "/dev/stdin", "-o", "/dev/null"],
        input=ptx, text=True, capture_output=True, check=True,
    )  # fmt: skip
    registers = int(re.findall(r"Used (\d+) registers", done.stderr)[-1])
    spilled = sum(int(n) for n in re.findall(r"(\d+) bytes spill stores", done.stderr))
    return registers, spilled
