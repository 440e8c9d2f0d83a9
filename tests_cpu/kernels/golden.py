"""Record what peers compute for fresh random inputs, with the gradients of q, k and v; test_golden.py compares ours.

    pip install flash-linear-attention fla-core einops && python tests_cpu/kernels/golden.py fla
    pip install native-sparse-attention-pytorch && python tests_cpu/kernels/golden.py lucidrains

Each branch is recorded by itself. fla's reference functions (flash-linear-attention, MIT) follow the paper where the blocks are
means, do not overlap and are as long as the selected ones (l = d = l'), and all branches share K and V. In lucidrains' package
(MIT) the window follows it, and its size counts the tokens before the query's own; docs/kernels.md describes where the rest
differs. Run this by hand, as CI does not install the packages.
"""

import sys
from pathlib import Path

import torch

FOLDER = Path(__file__).parent
S, H, G, WIDTH, BLOCK, CHOSEN = 56, 8, 2, 4, 8, 4


WINDOW = 16  # tokens, the query's own included


def inputs() -> dict[str, torch.Tensor]:
    """Return q, k and v [1, S, H or G, WIDTH], which require gradients."""
    torch.manual_seed(20261122)
    return {
        name: torch.randn(1, S, heads, WIDTH).requires_grad_() for name, heads in zip("qkv", (H, G, G), strict=True)
    }


def with_gradients(name: str, result: torch.Tensor, leaves: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a branch's output, the weight of its backward, and the gradients, by name."""
    weight = torch.randn_like(result)
    gradients = torch.autograd.grad(result, list(leaves.values()), weight, retain_graph=True)
    found = {f"{name}.out": result, f"{name}.weight": weight}
    return found | {f"{name}.grad_{x}": g for x, g in zip(leaves, gradients, strict=True)}


def fla() -> dict[str, torch.Tensor]:
    """Return fla's compressed branch, its selection, and its selected branch."""
    from fla.ops.nsa.naive import naive_nsa_compression, naive_nsa_selection, naive_nsa_topk

    leaves = inputs()
    q, k, v = leaves.values()
    scale = WIDTH**-0.5
    k_cmp, v_cmp = (x.unflatten(1, (-1, BLOCK)).mean(2) for x in (k, v))
    out, _ = naive_nsa_compression(q, k_cmp, v_cmp, BLOCK, scale)
    indices = naive_nsa_topk(q.detach(), k_cmp.detach(), CHOSEN, BLOCK, scale)
    found = leaves | with_gradients("cmp", out, leaves) | {"indices": indices}
    return found | with_gradients("sel", naive_nsa_selection(q, k, v, indices, BLOCK, scale), leaves)


def lucidrains() -> dict[str, torch.Tensor]:
    """Return the window of lucidrains' package."""
    from native_sparse_attention_pytorch import SparseAttention

    module = SparseAttention(
        dim=WIDTH * H, dim_head=WIDTH, heads=H, kv_heads=G, causal=True, sliding_window_size=WINDOW - 1,
        compress_block_size=BLOCK, compress_block_sliding_stride=BLOCK, selection_block_size=BLOCK, num_selected_blocks=CHOSEN,
    )  # fmt: skip
    leaves = inputs()
    q, k, v = (x.transpose(1, 2) for x in leaves.values())
    out = module.sliding_window(q, *(x.repeat_interleave(H // G, 1) for x in (k, v))).transpose(1, 2)
    return leaves | with_gradients("win", out, leaves)


def main() -> None:
    peer = {"fla": fla, "lucidrains": lucidrains}[sys.argv[1]]
    torch.save(
        {name: tensor.detach().contiguous() for name, tensor in peer().items()}, FOLDER / f"golden_{peer.__name__}.pt"
    )


if __name__ == "__main__":
    main()
