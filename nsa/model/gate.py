"""The gate: a sigmoid MLP on the layer's input, one value a head and branch (paper, Eq. 5)."""

import torch
import torch.nn.functional as F
from torch import nn

from nsa.sizes import BRANCHES


class Gate(nn.Module):
    """x [..., dim] -> gates [..., H, 3] in (0, 1), in the order cmp, sel, win; H of as many outputs as fc2 has."""

    def __init__(self, dim: int, n_heads: int, hidden: int, *, stop_gradient: bool = False) -> None:
        super().__init__()
        self.stop_gradient = stop_gradient
        self.fc1 = nn.Linear(dim, hidden)
        self.fc2 = nn.Linear(hidden, n_heads * len(BRANCHES))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gates = torch.sigmoid(self.fc2(F.silu(self.fc1(x))))
        if self.stop_gradient:
            # The branches keep training; the gate's own parameters get zero gradients, not none.
            gates = gates.detach() + gates * 0
        return gates.unflatten(-1, (gates.shape[-1] // len(BRANCHES), len(BRANCHES)))
