"""The three branches and their gates as one on a CPU: Eq. 5 of the paper, and one backward for everything.

What gates and branches have between them is made tile by tile: a branch's share of the gradient is grad * gate, and delta, the row
sum of that share and the branch's output, is the gate times the gate's own gradient. A tile of the window or the compressed branch
sees all keys of its queries, and makes delta of its scores: their outputs are not kept. The branches add to one gradient of q.
"""

from collections.abc import Callable
from typing import Any

import torch

from nsa.kernels.cpu.selected import selected_gradients
from nsa.kernels.cpu.strided import compressed_gradients, sliding_gradients
from nsa.kernels.cpu.tiles import Backward, Tensors3, in_runs, row_sums

Pair = tuple[torch.Tensor, torch.Tensor]


def gated_sum(gates: torch.Tensor, outputs: Tensors3) -> torch.Tensor:
    """Return [B, S, H, Dv] from gates [B, S, H, 3] and three of that shape, some tokens at a time, so that they stay in the
    cache.
    """
    found = torch.empty_like(outputs[0])
    for run in in_runs(found):
        total = found[:, run].zero_()
        for gate, out in zip(gates[:, run].split(1, -1), outputs, strict=True):
            total.addcmul_(gate, out[:, run])
    return found


def backward(
    grad: torch.Tensor, gates: torch.Tensor, q: torch.Tensor, cmp: Pair, sel: Pair, win: Pair, o_sel: torch.Tensor,
    lse: Tensors3, chosen: torch.Tensor, l: int, d: int, l_sel: int, w: int, scale: float,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """Gradients of gates, q, and keys and values in the order of the arguments."""
    gate_sel, dq = row_sums(grad, o_sel), torch.empty_like(q)

    def run(
        branch: int,
        keys: Pair,
        gradients: Callable[..., None],
        *sizes: Any,
        delta: torch.Tensor | None = None,
        add: bool = True,
    ) -> Tensors3:
        z = Backward.of(grad, q, *keys, lse[branch], delta, scale, dq, gate=gates[..., branch, None], add=add)
        gradients(z, *sizes)
        return z.of_gate(), *z.of_keys_and_values(*keys, scale)

    # The window first: it writes every query's gradient, to which the others add.
    gate_win, *of_win = run(2, win, sliding_gradients, w, add=False)
    gate_cmp, *of_cmp = run(0, cmp, compressed_gradients, l, d)
    _, *of_sel = run(1, sel, selected_gradients, chosen, l_sel, delta=gate_sel * gates[..., 1])
    return torch.stack((gate_cmp, gate_sel, gate_win), -1).to(gates.dtype), dq, *of_cmp, *of_sel, *of_win
