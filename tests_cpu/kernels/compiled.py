"""Compile the Triton kernels for a GPU that is not there, as `nsa.kernels.triton` launches them; report what they need.

python -m tests_cpu.kernels.compiled     # writes the table that the tests compare with, for the Triton that is installed
"""

import itertools
import json
import re
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

TYPES = {
    torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.int8: "*i8", torch.int32: "*i32",
    torch.int64: "*i64", torch.bool: "*i1",
}  # fmt: skip


@dataclass(frozen=True)
class Launch:
    """A recorded launch: the kernel, its arguments by name, and its settings."""

    kernel: Any
    arguments: dict[str, Any]
    options: dict[str, int]

    @property
    def name(self) -> str:
        """The kernel's name, with the branch where several use it."""
        windowed = self.arguments.get("WINDOWED")
        branch = "" if windowed is None else " of the window" if windowed else " of the blocks"
        return f"{self.kernel.__name__}{branch}"


@dataclass(frozen=True)
class Compiled:
    """Bytes of shared memory, registers and spilled bytes per thread, and products by wgmma (Hopper's) and mma.sync."""

    name: str
    shared: int
    registers: int
    spilled: int
    wgmma: int
    mma: int


@dataclass(frozen=True)
class Problem:
    """The sizes and the dtype of a call."""

    S: int
    H: int
    G: int
    d_k: int
    d_v: int
    dtype: torch.dtype
    l_sel: int = 64

    def tensor(self, *shape: int) -> torch.Tensor:
        """Return a tensor without memory (device meta)."""
        return torch.empty(*shape, dtype=self.dtype, device="meta")


def record_launches(monkeypatch: pytest.MonkeyPatch, problem: Problem, on: str = "") -> list[list[Launch]]:
    """Return what would be launched on a GPU: by a whole forward, its backward, a token that follows, and a rotation of q.

    Tiles are those of the GPU ``on``, such as 'sm_90'.
    """
    from nsa.kernels import blocks
    from nsa.kernels.triton import block_schedule, branches, decoding, rotary, selection_schedule, tiles, whole
    from nsa.sizes import Sizes

    found: list[Launch] = []

    def note(kernel: Any, grid: tuple[int, ...], like: torch.Tensor, *arguments: Any, **settings: Any) -> None:
        options = {name: settings.pop(name) for name in ("num_warps", "num_stages", "maxnreg") if name in settings}
        named = {**dict(zip(kernel.arg_names, arguments, strict=False)), **settings}
        assert len(arguments) + len(settings) == len(kernel.arg_names)
        assert set(named) == set(kernel.arg_names)
        if 0 in grid:  # not run
            return
        assert all(0 < n < 2**31 for n in grid[:1])
        assert all(0 < n < 2**16 for n in grid[1:])
        found.append(Launch(kernel, named, options))

    for module in (branches, block_schedule, decoding, rotary, selection_schedule):
        monkeypatch.setattr(module, "launch", note)
    for module in (selection_schedule, tiles):
        monkeypatch.setattr(module, "capability", lambda device: on)
    p, n = problem, blocks.num_compressed(problem.S, 32, 16)
    q = p.tensor(1, p.S, p.H, p.d_k)
    pairs = [(p.tensor(1, m, p.G, p.d_k), p.tensor(1, m, p.G, p.d_v)) for m in (n, p.S, p.S)]
    gates, sizes = p.tensor(1, p.S, p.H, 3), Sizes(32, 16, p.l_sel, 16, 512)
    out, kept = whole.forward(q, *pairs, gates, None, sizes, 0.1)
    of_forward = len(found)
    whole.backward(torch.empty_like(out), q, *pairs, gates, kept, None, sizes, 0.1)
    of_training = len(found)
    decoding.attend(q[:, :1], *pairs, gates[:, :1], p.S - 1, *sizes, 0.1)
    of_token = len(found)
    rotary.rotated(q, q[:1, :, :1], q[:1, :, :1], backward=False)
    ends = (0, of_forward, of_training, of_token, len(found))
    return [found[first:end] for first, end in itertools.pairwise(ends)]


def compile_for(launch: Launch, capability: int) -> Compiled:
    """Compile for sm_``capability``; Triton's own assembler reports what the code needs."""
    code = code_of(launch, capability)
    ptx = code.asm["ptx"]
    return Compiled(
        launch.name, code.metadata.shared, *ptxas(ptx, capability), ptx.count("wgmma.mma_async"), ptx.count("mma.sync")
    )


def code_of(launch: Launch, capability: int) -> Any:
    """Return Triton's CompiledKernel for sm_``capability``."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    is_gluon = launch.kernel.is_gluon()
    names, signature, constants, attributes = launch.kernel.arg_names, {}, {}, {}
    for index, parameter in enumerate(launch.kernel.params):
        value = launch.arguments[parameter.name]
        is_any = parameter.do_not_specialize
        if parameter.is_constexpr or value is True or (isinstance(value, int) and value == 1 and not is_any):
            signature[parameter.name], constants[(index,)] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name], attributes[(index,)] = TYPES[value.dtype], [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[parameter.name] = "fp32"
        elif isinstance(value, int):
            signature[parameter.name] = "i32"
            if value % 16 == 0 and not is_any:
                attributes[(index,)] = [["tt.divisibility", 16]]
        else:
            layout = f",{value.layout!r}" if is_gluon else ""
            signature[parameter.name] = f"tensordesc<{TYPES[value.base.dtype][1:]}{list(value.block_shape)}{layout}>"
    kind = GluonASTSource if is_gluon else ASTSource
    source = kind(launch.kernel, {name: signature[name] for name in names}, constants, attributes)
    options = {"enable_fp_fusion": True, **launch.options}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def ptxas(ptx: str, capability: int) -> tuple[int, int]:
    """Return registers and spilled bytes per thread."""
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


# --- the table --------------------------------------------------------------------------------------------------------

PROBLEMS = {
    "paper": Problem(65536, 64, 4, 192, 128, torch.bfloat16),
    "paper, 8192 tokens": Problem(8192, 64, 4, 192, 128, torch.bfloat16),
    "125m": Problem(65536, 12, 2, 64, 64, torch.bfloat16),
    "125m in float32": Problem(65536, 12, 2, 64, 64, torch.float32),
    "head dim 128": Problem(8192, 32, 8, 128, 128, torch.float16),
    "head dim 256": Problem(8192, 16, 2, 256, 256, torch.bfloat16),
    "one head per group": Problem(8192, 8, 8, 64, 64, torch.bfloat16),
    "64 heads per group": Problem(8192, 64, 1, 128, 128, torch.bfloat16),
    "blocks of 128": Problem(65536, 64, 4, 128, 128, torch.bfloat16, l_sel=128),
}
CAPABILITIES = (80, 90)
TABLE = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "kernels_compiled.json"


def compile_all(problem: Problem, capability: int) -> dict[str, Compiled]:
    """Compile every kernel of `record_launches`, with the tiles that a GPU of that capability gets."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        launched = record_launches(monkeypatch, problem, f"sm_{capability}")
    launches = {launch.name: launch for some in reversed(launched) for launch in some}
    return {name: compile_for(launch, capability) for name, launch in launches.items()}


def main() -> None:
    """Compile everything, and keep the figures under this Triton's version; those of other versions stay."""
    import triton

    table = json.loads(TABLE.read_text(encoding="utf-8")) if TABLE.exists() else {}
    found = table[triton.__version__] = {}
    for name, problem in PROBLEMS.items():
        for capability in CAPABILITIES:
            codes = compile_all(problem, capability)
            found[f"{name}, sm_{capability}"] = {
                kernel: {k: v for k, v in asdict(code).items() if k != "name"} for kernel, code in codes.items()
            }
            print(f"{name}, sm_{capability}", flush=True)
    lines = [f" {json.dumps(version)}: {_by_problem(problems)}" for version, problems in sorted(table.items())]
    TABLE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def _by_problem(problems: dict[str, dict[str, Any]]) -> str:
    """Return JSON with a line per kernel, to be read and compared."""
    return "{\n" + ",\n".join(
        f"  {json.dumps(name)}: {{\n" + ",\n".join(f"   {json.dumps(k)}: {json.dumps(v)}" for k, v in kernels.items()) + "\n  }"
        for name, kernels in problems.items()
    ) + "\n }"  # fmt: skip


if __name__ == "__main__":
    main()
