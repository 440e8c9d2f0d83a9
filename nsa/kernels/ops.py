"""The branches as operators of torch.library: opaque to torch.compile, and each one node in the autograd graph.

An operator takes the name of its backend, so that a graph shows what it was traced with. Every operator has a fake kernel (shapes
and dtypes alone) and a backward, which is an operator too (`derivatives` registers it). The log-sum-exp and the importance have no
gradient.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

import torch

from nsa.kernels import blocks, derivatives
from nsa.kernels.cpu import selected as cpu_selected
from nsa.kernels.cpu import strided
from nsa.kernels.cpu import whole as cpu_whole
from nsa.kernels.cpu.tiles import Tensors3
from nsa.kernels.cpu.whole import Pair
from nsa.sizes import Sizes


def plainly(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return an operator's body, without the caller's autocast: what is computed in float32 shall stay so, in the backward too."""

    @functools.wraps(function)
    def run(*arguments: Any) -> Any:
        with blocks.without_autocast(arguments[0].device):
            return function(*arguments)

    return run


def _module(backend: str, branch: str) -> Any:
    if backend == "cpu":
        return cpu_selected if branch == "selected" else strided
    from nsa.kernels.triton import single

    return single


def _like(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(t.new_empty(t.shape) for t in tensors)


def _contiguous(*tensors: torch.Tensor) -> Any:
    return tuple(t.contiguous() for t in tensors)


def _backward_fake(grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *others: Any) -> Any:
    """Return what a branch's backward returns."""
    return _like(q, k, v)


def _output(q: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return q.new_empty(*q.shape[:3], v.shape[-1])


# --- compressed -------------------------------------------------------------------------------------------------------


@torch.library.custom_op("nsa::compressed", mutates_args=())
@plainly
def compressed(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, l: int, d: int, l_sel: int, scale: float, backend: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Output [B, S, H, Dv], log-sum-exp [B, S, H] and importance [B, S, G, Ns]."""
    return _contiguous(*_module(backend, "compressed").compressed_forward(q, k, v, l, d, l_sel, scale))


@compressed.register_fake
def _(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, l: int, d: int, l_sel: int, scale: float, backend: str
) -> Tensors3:
    dtype = blocks.wide(q.dtype)
    n_blocks = blocks.num_selection(q.shape[1], l_sel)
    importance = q.new_empty(q.shape[0], q.shape[1], k.shape[2], n_blocks, dtype=dtype)
    return _output(q, v), q.new_empty(q.shape[:3], dtype=dtype), importance


@torch.library.custom_op("nsa::compressed_backward", mutates_args=())
@plainly
def compressed_backward(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
    l: int, d: int, scale: float, backend: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Gradients of q, k and v."""
    return _contiguous(*_module(backend, "compressed").compressed_backward(grad, q, k, v, out, lse, l, d, scale))


def alone_has_a_gradient(ctx: Any, *others: torch.Tensor) -> None:
    """The first output, that is, and not ``others``; autograd would fill gradients of zeros for them, of their size."""
    ctx.mark_non_differentiable(*others)
    ctx.set_materialize_grads(False)


def of_the_first(backward: Callable[[Any, torch.Tensor], Any]) -> Callable[..., Any]:
    """``backward``, given the gradient of the first output alone; without one nothing has any."""

    @functools.wraps(backward)
    def run(ctx: Any, grad: torch.Tensor | None, *_: Any) -> Any:
        return tuple(None for _ in ctx.needs_input_grad) if grad is None else backward(ctx, grad)

    return run


def _compressed_setup(ctx: Any, inputs: Any, output: Any) -> None:
    q, k, v, ctx.l, ctx.d, _, ctx.scale, ctx.backend = inputs
    out, lse, importance = output
    alone_has_a_gradient(ctx, lse, importance)
    ctx.save_for_backward(q, k, v, out, lse)


@of_the_first
def _compressed_backward(ctx: Any, grad: torch.Tensor) -> Any:
    q, k, v, out, lse = ctx.saved_tensors
    grads = compressed_backward(grad.to(q.dtype), q, k, v, out, lse, ctx.l, ctx.d, ctx.scale, ctx.backend)
    return *grads, None, None, None, None, None


derivatives.register(compressed, _compressed_backward, _compressed_setup)


# --- select -----------------------------------------------------------------------------------------------------------


@torch.library.custom_op("nsa::select", mutates_args=())
@plainly
def select(importance: torch.Tensor, l_sel: int, n_sel: int, backend: str) -> torch.Tensor:
    """Return `blocks.select`, on ``triton`` in one kernel, without sorting: bool [B, S, G, Ns] from importance of that shape.

    An operator on every backend, so that selective checkpointing can keep what it returns.
    """
    if backend != "triton":
        return blocks.select(importance, l_sel, n_sel)
    from nsa.kernels.triton import single

    return single.select_blocks(importance, l_sel, n_sel)


@select.register_fake
def _(importance: torch.Tensor, l_sel: int, n_sel: int, backend: str) -> torch.Tensor:
    return importance.new_empty(importance.shape, dtype=torch.bool)


# --- selected ---------------------------------------------------------------------------------------------------------


@torch.library.custom_op("nsa::selected", mutates_args=())
@plainly
def selected(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, chosen: torch.Tensor, l_sel: int, n_sel: int, scale: float,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Output [B, S, H, Dv] and log-sum-exp [B, S, H]; chosen bool [B, S, G, Ns], as `blocks.select` makes it."""
    return _contiguous(*_module(backend, "selected").selected_forward(q, k, v, chosen, l_sel, n_sel, scale))


@torch.library.custom_op("nsa::selected_backward", mutates_args=())
@plainly
def selected_backward(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
    chosen: torch.Tensor, l_sel: int, n_sel: int, scale: float, backend: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Gradients of q, k and v."""
    return _contiguous(
        *_module(backend, "selected").selected_backward(grad, q, k, v, out, lse, chosen, l_sel, n_sel, scale)
    )


def _selected_setup(ctx: Any, inputs: Any, output: Any) -> None:
    q, k, v, chosen, ctx.l_sel, ctx.n_sel, ctx.scale, ctx.backend = inputs
    alone_has_a_gradient(ctx, output[1])
    ctx.save_for_backward(q, k, v, chosen, *output)


@of_the_first
def _selected_backward(ctx: Any, grad: torch.Tensor) -> Any:
    q, k, v, chosen, out, lse = ctx.saved_tensors
    grads = selected_backward(grad.to(q.dtype), q, k, v, out, lse, chosen, ctx.l_sel, ctx.n_sel, ctx.scale, ctx.backend)
    return *grads, None, None, None, None, None


derivatives.register(selected, _selected_backward, _selected_setup)


# --- sliding ----------------------------------------------------------------------------------------------------------


@torch.library.custom_op("nsa::sliding", mutates_args=())
@plainly
def sliding(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, w: int, scale: float, backend: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [B, S, H, Dv] and log-sum-exp [B, S, H] of the last w tokens, the query's own included."""
    return _contiguous(*_module(backend, "sliding").sliding_forward(q, k, v, w, scale))


@selected.register_fake
@sliding.register_fake
def _(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *others: Any) -> Pair:
    return _output(q, v), q.new_empty(q.shape[:3], dtype=blocks.wide(q.dtype))


@torch.library.custom_op("nsa::sliding_backward", mutates_args=())
@plainly
def sliding_backward(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
    w: int, scale: float, backend: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Gradients of q, k and v."""
    return _contiguous(*_module(backend, "sliding").sliding_backward(grad, q, k, v, out, lse, w, scale))


def _sliding_setup(ctx: Any, inputs: Any, output: Any) -> None:
    q, k, v, ctx.w, ctx.scale, ctx.backend = inputs
    alone_has_a_gradient(ctx, output[1])
    ctx.save_for_backward(q, k, v, *output)


@of_the_first
def _sliding_backward(ctx: Any, grad: torch.Tensor) -> Any:
    q, k, v, out, lse = ctx.saved_tensors
    grads = sliding_backward(grad.to(q.dtype), q, k, v, out, lse, ctx.w, ctx.scale, ctx.backend)
    return *grads, None, None, None


derivatives.register(sliding, _sliding_backward, _sliding_setup)


# --- the whole, on a CPU ----------------------------------------------------------------------------------------------


@torch.library.custom_op("nsa::whole", mutates_args=())
@plainly
def whole(
    gates: torch.Tensor, q: torch.Tensor, k_cmp: torch.Tensor, v_cmp: torch.Tensor, k_sel: torch.Tensor,
    v_sel: torch.Tensor, k_win: torch.Tensor, v_win: torch.Tensor, o_cmp: torch.Tensor, o_sel: torch.Tensor,
    o_win: torch.Tensor, lse_cmp: torch.Tensor, lse_sel: torch.Tensor, lse_win: torch.Tensor, chosen: torch.Tensor,
    l: int, d: int, l_sel: int, w: int, scale: float,
) -> torch.Tensor:  # fmt: skip
    """Eq. 5 from the branches' outputs, gates [B, S, H, 3]; its gradients are those of gates, q and all keys and values.

    One backward for the three branches: what is between gates and branches is never kept, and q's gradient is summed in place.
    """
    return cast(torch.Tensor, cpu_whole.gated_sum(gates, (o_cmp, o_sel, o_win)))


@whole.register_fake
def _(gates: torch.Tensor, q: torch.Tensor, *others: Any) -> torch.Tensor:
    return _output(q, others[1])


@torch.library.custom_op("nsa::whole_backward", mutates_args=())
@plainly
def whole_backward(
    grad: torch.Tensor, gates: torch.Tensor, q: torch.Tensor, k_cmp: torch.Tensor, v_cmp: torch.Tensor,
    k_sel: torch.Tensor, v_sel: torch.Tensor, k_win: torch.Tensor, v_win: torch.Tensor, o_cmp: torch.Tensor,
    o_sel: torch.Tensor, o_win: torch.Tensor, lse_cmp: torch.Tensor, lse_sel: torch.Tensor, lse_win: torch.Tensor,
    chosen: torch.Tensor, l: int, d: int, l_sel: int, w: int, scale: float,
) -> tuple[
    torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor
]:  # fmt: skip
    """Gradients of gates, q, and keys and values of the three branches."""
    keys = (k_cmp, v_cmp), (k_sel, v_sel), (k_win, v_win)
    outputs, lse = (o_cmp, o_sel, o_win), (lse_cmp, lse_sel, lse_win)
    return _contiguous(*cpu_whole.backward(grad, gates, q, *keys, outputs, lse, chosen, l, d, l_sel, w, scale))


@whole_backward.register_fake
def _(grad: torch.Tensor, *others: Any) -> Any:
    return _like(*others[:8])


def _whole_setup(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs[:15])
    ctx.sizes = inputs[15:]


def _whole_backward(ctx: Any, grad: torch.Tensor) -> Any:
    return *whole_backward(grad, *ctx.saved_tensors, *ctx.sizes), *(None for _ in range(12))


derivatives.register(whole, _whole_backward, _whole_setup)


# --- every backward ---------------------------------------------------------------------------------------------------


for _backward in (compressed_backward, selected_backward, sliding_backward):
    _backward.register_fake(_backward_fake)
for _backward in (compressed_backward, selected_backward, sliding_backward, whole_backward):
    derivatives.register(_backward, derivatives.refuse)


def attend_on_cpu(
    q: torch.Tensor, cmp: Pair, sel: Pair, win: Pair, gates: torch.Tensor, sizes: Sizes, scale: float
) -> Pair:  # fmt: skip
    """Return `dispatch.attend` by the cpu backend: the three branches forward, one after another, and their backward in one."""
    l, d, l_sel, n_sel, w = sizes
    n_sel, w = min(n_sel, blocks.num_selection(q.shape[1], l_sel)), min(w, q.shape[1])
    with torch.no_grad():  # `whole` has the gradients
        o_cmp, lse_cmp, importance = compressed(q, *cmp, l, d, l_sel, scale, "cpu")
        chosen = select(importance, l_sel, n_sel, "cpu")
        o_sel, lse_sel = selected(q, *sel, chosen, l_sel, n_sel, scale, "cpu")
        o_win, lse_win = sliding(q, *win, w, scale, "cpu")
    outputs = o_cmp, o_sel, o_win, lse_cmp, lse_sel, lse_win, chosen
    return whole(gates, q, *cmp, *sel, *win, *outputs, l, d, l_sel, w, scale), chosen


class Operators:
    """One backend's branches, called as `nsa.kernels.reference`'s are."""

    def __init__(self, backend: str) -> None:
        self.backend = backend

    def compressed(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, l: int, d: int, l_sel: int, scale: float
    ) -> Pair:
        """As `reference.compressed`."""
        q, scale = self._scores(q, scale)
        out, _, importance = compressed(q, k, v, l, d, l_sel, scale, self.backend)
        return out, importance

    def selected(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, chosen: torch.Tensor, *, l_sel: int, n_sel: int, scale: float
    ) -> torch.Tensor:  # fmt: skip
        """As `reference.selected`."""
        q, scale = self._scores(q, scale)
        return selected(q, k, v, chosen, l_sel, min(n_sel, chosen.shape[3]), scale, self.backend)[0]

    def select(self, importance: torch.Tensor, l_sel: int, n_sel: int) -> torch.Tensor:
        """As `blocks.select`."""
        return select(importance, l_sel, min(n_sel, importance.shape[3]), self.backend)

    def sliding(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, w: int, scale: float) -> torch.Tensor:
        """As `reference.sliding`."""
        q, scale = self._scores(q, scale)
        return sliding(q, k, v, min(w, q.shape[1]), scale, self.backend)[0]

    def _scores(self, q: torch.Tensor, scale: float) -> tuple[torch.Tensor, float]:
        return (q, scale) if self.backend == "cpu" else positive_scale(q, scale)


def positive_scale(q: torch.Tensor, scale: float) -> tuple[torch.Tensor, float]:
    """Return the same scores by a scale above zero: Triton's kernels and torch's causal ones mask scores before they scale them."""
    if scale < 0:
        return -q, -scale
    return q, scale or 1e-30
