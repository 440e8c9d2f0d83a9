"""The transformer: embedding, pre-norm blocks of attention and MLP, final norm, head."""

import contextlib
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from nsa.config import Config, ModelConfig
from nsa.model.activation_checkpoint import CheckpointRange, run_block
from nsa.model.attention import DenseAttention, NSAAttention
from nsa.model.decoding import KVCache


class RMSNorm(nn.Module):
    """Root mean square norm (arXiv 1910.07467), computed in float32."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., dim], the same shape back; under autocast in its dtype, as every product that reads it would cast it."""
        y = F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)
        return y.to(torch.get_autocast_dtype(x.device.type)) if torch.is_autocast_enabled(x.device.type) else y


class MLP(nn.Module):
    """SwiGLU (arXiv 2002.05202; gate and value in one fc1). x [B, S, dim] -> [B, S, dim]."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, 2 * hidden, bias=False)
        self.fc2 = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, value = self.fc1(x).chunk(2, dim=-1)
        return self.fc2(F.silu(gate) * value)


class Block(nn.Module):
    """One layer: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, m: ModelConfig) -> None:
        super().__init__()
        self.norm1 = RMSNorm(m.dim, m.norm_eps)
        self.attn = NSAAttention.from_config(m) if m.attention == "nsa" else DenseAttention(m)
        self.norm2 = RMSNorm(m.dim, m.norm_eps)
        self.mlp = MLP(m.dim, m.mlp_hidden)

    def forward(self, x: torch.Tensor, cache: KVCache | None = None) -> torch.Tensor:
        # Only what is there is handed on: DenseAttention, for example, has neither.
        x = x + (self.attn(self.norm1(x)) if cache is None else self.attn(self.norm1(x), cache))
        return x + self.mlp(self.norm2(x))


class Head(nn.Linear):
    """The last linear layer: x [B, S, dim] -> logits [B, S, V]; given targets int64 [B, S], their mean cross-entropy in nats."""

    def forward(self, x: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        logits = super().forward(x)
        if targets is None:
            return logits
        logits = logits if logits.dtype == torch.float64 else logits.float()
        return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


class NSATransformer(nn.Module):
    """Decoder-only language model: tokens int64 [B, S] -> logits [B, S, V]; given the targets, their loss."""

    def __init__(self, m: ModelConfig, checkpoint: CheckpointRange | None = None) -> None:
        super().__init__()
        self.checkpoint = checkpoint
        self.embed = nn.Embedding(m.vocab_size, m.dim)
        self.blocks = nn.ModuleList(Block(m) for _ in range(m.n_layers))
        self.norm = RMSNorm(m.dim, m.norm_eps)
        self.head = Head(m.dim, m.vocab_size, bias=False)
        self.apply(self._initialise)
        residual_std = 0.02 / (2 * m.n_layers) ** 0.5
        for block in self.blocks:
            nn.init.normal_(block.attn.out.weight, std=residual_std)
            nn.init.normal_(block.mlp.fc2.weight, std=residual_std)

    @staticmethod
    def _initialise(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(
        self, tokens: torch.Tensor, caches: Sequence[KVCache] | None = None, targets: torch.Tensor | None = None
    ) -> torch.Tensor:
        """With ``caches``, one per layer, tokens are those after what the caches have seen; for inference.

        With ``targets`` (int64 [B, S]) return their mean cross-entropy in nats, float32 [].
        """
        x = self.embed(tokens)
        if caches is not None:
            if not all(isinstance(block.attn, NSAAttention) for block in self.blocks):
                raise ValueError("caches: only attention='nsa' decodes with a KVCache")
            if len(caches) != len(self.blocks):
                raise ValueError(f"caches has {len(caches)} entries: must have {len(self.blocks)}, one a layer")
            if len(set(map(id, caches))) < len(caches):
                raise ValueError(
                    "caches has the same KVCache twice: each layer needs its own, as in [KVCache() for _ in model.blocks]"
                )
            if len({cache.length for cache in caches}) > 1:
                raise ValueError(
                    "caches: some have seen more tokens than others, as after a call that failed; make new ones"
                )
            for block, cache in zip(self.blocks, caches, strict=True):
                x = block(x, cache)
            return self.head(self.norm(x), targets)
        recompute = self.checkpoint if self.training and torch.is_grad_enabled() else None
        for index, block in enumerate(self.blocks):
            if recompute is not None and index in recompute:
                x = run_block(block, x, recompute=recompute)
            else:
                x = block(x)
        return self.head(self.norm(x), targets)


def build_model(config: Config, device: torch.device | None = None) -> nn.Module:
    """Return the model of ``config`` in float32, its layers recomputing as the configuration requests.

    tokens int64 [B, S] -> logits [B, S, V]. The production configuration has exactly 195 parameter tensors. ``device``: where its
    parameters are made and drawn, the CPU by default; a GPU draws other numbers from the same seed, and 125M of them in no time.
    """
    with contextlib.nullcontext() if device is None else device:
        return NSATransformer(config.model, CheckpointRange.from_config(config))
