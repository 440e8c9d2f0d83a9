"""New tokens against a cache: our kernels beside torch's fused attention over the whole cache, in one run.

python benchmarks/decode.py --json benchmarks/results/decode_cpu.json          # on a CPU
python benchmarks/decode.py --json benchmarks/results/decode_gpu.json          # on a GPU

Figures are milliseconds of one layer's attention, without its projections, for 1, 4 and 16 new tokens: medians, on a GPU of
CUDA graph replays. Shapes are those of attention_gpu.py; on a CPU only the 125M model's, in float32, with one thread. Dense is
scaled_dot_product_attention, with the causal mask where there are several new tokens.
"""

from typing import Any

import torch
import torch.nn.functional as F
from attention_gpu import DEVICE, OTHER_SIZES, SHAPES, SIZES, Call, captured, timed
from figures import keep, parser_of

from nsa.kernels import blocks
from nsa.model.decoding import attend_gated

DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
LENGTHS = (8192, 16384, 32768, 65536) if DEVICE == "cuda" else (2048, 8192, 16384)


def calls(shape: tuple[int, int, int, int], S: int, T: int) -> dict[str, Call]:
    """Return a call by contender: T tokens that follow S - T others."""
    H, G, d_k, d_v = shape
    n, w, scale = blocks.num_compressed(S, SIZES.compress_block, SIZES.compress_stride), SIZES.window, d_k**-0.5

    def tensor(*size: int) -> torch.Tensor:
        return torch.randn(size, device=DEVICE, dtype=DTYPE)

    def pair(m: int) -> tuple[torch.Tensor, torch.Tensor]:
        return tensor(1, m, G, d_k), tensor(1, m, G, d_v)

    q, cmp, sel, win = tensor(1, T, H, d_k), pair(n), pair(S), pair(min(S, w - 1 + T))
    gates = tensor(1, T, H, 3).sigmoid()
    mask = None if T == 1 else torch.ones(T, S, dtype=torch.bool, device=DEVICE).tril(S - T)

    def ours() -> Any:
        return attend_gated(q, cmp, sel, win, gates, S - T, SIZES, scale=scale, backend="auto")

    def dense() -> Any:
        k, v = (x.transpose(1, 2) for x in sel)
        return F.scaled_dot_product_attention(q.transpose(1, 2), k, v, attn_mask=mask, scale=scale, enable_gqa=True)

    return {"nsa": ours, "dense": dense}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    of_paper = {name: shape for name, shape in SHAPES.items() if name not in OTHER_SIZES}
    shapes = of_paper if DEVICE == "cuda" else {"125m": (12, 2, 64, 64)}
    found: dict[str, Any] = {}
    with torch.inference_mode():
        for name, shape in shapes.items():
            for S in arguments.lengths:
                for T in (1, 4, 16):
                    made = calls(shape, S, T)
                    if DEVICE == "cuda":
                        made = {contender: captured(call) for contender, call in made.items()}
                    ms = timed(made, arguments.rounds)
                    found.setdefault(name, {}).setdefault(str(S), {})[str(T)] = {
                        **ms,
                        "times_dense": ms["dense"] / ms["nsa"],
                    }
                    print(name, S, T, found[name][str(S)][str(T)], flush=True)
    keep({"ms": found, "sizes": SIZES._asdict(), "dtype": str(DTYPE)}, arguments.json)


if __name__ == "__main__":
    main()
