"""Makes golden_fla.pt: what fla's reference functions (flash-linear-attention, MIT) give for fresh random inputs.

    pip install flash-linear-attention fla-core einops && python tests_cpu/kernels/golden.py

They follow the paper where the compressed blocks are means, do not overlap and are as long as the selected ones (l = d = l'), and
all branches share K and V. Each of their branches is recorded by itself, with the gradients of q, k and v; test_golden.py
compares ours. Run by hand, as CI does not install the package.
"""

from __future__ import annotations

from pathlib import Path

import torch

GOLDEN = Path(__file__).parent / "golden_fla.pt"
S, H, G, WIDTH, BLOCK, CHOSEN = 56, 8, 2, 4, 8, 4


def main() -> None:
    """Ask fla, and write what it says."""
    from fla.ops.nsa.naive import naive_nsa_compression, naive_nsa_selection, naive_nsa_topk

    torch.manual_seed(20261122)
    q, k, v = (torch.randn(1, S, heads, WIDTH) for heads in (H, G, G))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    scale = WIDTH**-0.5
    k_cmp, v_cmp = (x.unflatten(1, (-1, BLOCK)).mean(2) for x in (k, v))
    found = {"q": q, "k": k, "v": v}
    out, _ = naive_nsa_compression(q, k_cmp, v_cmp, BLOCK, scale)
    indices = naive_nsa_topk(q.detach(), k_cmp.detach(), CHOSEN, BLOCK, scale)
    for name, result in (("cmp", out), ("sel", naive_nsa_selection(q, k, v, indices, BLOCK, scale))):
        weight = torch.randn_like(result)
        gradients = torch.autograd.grad(result, leaves, weight, retain_graph=True)
        found |= {f"{name}.out": result, f"{name}.weight": weight}
        found |= {f"{name}.grad_{x}": g for x, g in zip("qkv", gradients, strict=True)}
    found["indices"] = indices
    torch.save({name: tensor.detach().contiguous() for name, tensor in found.items()}, GOLDEN)


if __name__ == "__main__":
    main()
