"""The mean cross-entropy of a linear layer's logits, by chunks of rows: the logits of a batch are never all in memory."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

LOGITS_BYTES = 256 << 20  # of float32 logits at once


def linear_cross_entropy(
    x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, logits_bytes: int = LOGITS_BYTES
) -> torch.Tensor:
    """Return the mean over all rows of -log softmax(x @ weight.T)[target], in nats: a scalar of float32, or of float64.

    x [..., D], weight [V, D], targets int64 [...], each in 0 ... V - 1. Where the logits take more than ``logits_bytes``, chunks of
    rows make theirs one after another, with their gradients at once, so that the backward needs no logits. Then the result
    has no second derivative.
    """
    rows = max(1, logits_bytes // (4 * weight.shape[0]))
    x, targets = x.flatten(0, -2), targets.flatten()
    if x.shape[0] <= rows:
        logits = F.linear(x, weight)
        return F.cross_entropy(logits if logits.dtype == torch.float64 else logits.float(), targets)
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    loss: torch.Tensor = _ByChunks.apply(x, weight, targets, rows)
    return loss


class _ByChunks(torch.autograd.Function):
    """The loss and, where any is needed, its gradients: softmax less the target, times weight and times x."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, rows: int) -> torch.Tensor:
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        narrow, loss = weight.to(x.dtype), x.new_zeros((), dtype=dtype)
        needs_gradients = any(ctx.needs_input_grad)
        if needs_gradients:
            grad_x, grad_weight = torch.empty_like(x), torch.zeros_like(weight, dtype=dtype)
        for start in range(0, x.shape[0], rows):
            part = slice(start, start + rows)
            logits, target = F.linear(x[part], narrow).to(dtype), targets[part, None]
            lse = logits.logsumexp(-1, keepdim=True)
            loss += (lse - logits.gather(-1, target)).sum()
            if needs_gradients:
                grad = logits.sub_(lse).exp_().scatter_add_(-1, target, torch.full_like(lse, -1.0))
                grad = grad.div_(x.shape[0]).to(x.dtype)
                grad_x[part] = grad @ narrow
                grad_weight += grad.T @ x[part]
        if needs_gradients:
            ctx.save_for_backward(grad_x, grad_weight.to(weight.dtype))
        return loss / x.shape[0]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad_x, grad_weight = ctx.saved_tensors
        return grad_x * grad, grad_weight * grad, None, None
