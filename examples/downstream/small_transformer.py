"""A vanilla transformer, as small as it can be, and a training step that synchronises a counter."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


class SmallTransformer(nn.Module):
    """tokens int64 [B, S] -> logits [B, S, vocab]."""

    def __init__(self, vocab: int = 64, dim: int = 32, layers: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(dim, heads, 4 * dim, dropout=0.0, batch_first=True) for _ in range(layers)
        )
        self.head = nn.Linear(dim, vocab)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        return self.head(x)


def train_step(model: nn.Module, tokens: torch.Tensor) -> float:
    """One step of SGD; returns the loss in nats."""
    logits = model(tokens[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad
    return loss.item()


def count_long_documents(lengths: torch.Tensor, limit: int) -> int:
    """How many documents of all ranks are longer than ``limit``. Has a bug that a test on one process cannot see."""
    count = (lengths > limit).sum()
    if count == 0:
        return 0  # this rank has none, so it leaves; the others wait for it in all_reduce
    dist.all_reduce(count)
    return int(count)
