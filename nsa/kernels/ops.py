"""The branches as operators of torch: opaque to torch.compile, and each one node in the autograd graph.

An operator takes the name of its backend, so that a graph shows what it was traced with. Every operator has a fake kernel (shapes
and dtypes alone) and a backward, which is an operator too (`derivatives`). The log-sum-exp and the importance have no gradient.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

from nsa.kernels import blocks
from nsa.kernels.cpu import selected as cpu_selected
from nsa.kernels.cpu import strided
from nsa.kernels.cpu import whole as cpu_whole
from nsa.kernels.cpu.whole import Pair
from nsa.kernels.derivatives import operator, refuse, register
from nsa.sizes import Sizes


def plainly(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return an operator's body, without the caller's autocast: what is computed in float32 shall stay so, in the backward too."""

    @functools.wraps(function)
    def run(*arguments: Any) -> Any:
        with blocks.without_autocast(arguments[0].device):
            return function(*arguments)

    return run


def like(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return room for tensors of these shapes."""
    return tuple(t.new_empty(t.shape) for t in tensors)


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


def tensors(*names: str) -> str:
    """Return arguments of a schema."""
    return ", ".join(f"Tensor {name}" for name in names)


def returns(count: int) -> str:
    """Return the results of a schema."""
    return f"({', '.join(['Tensor'] * count)})"


# --- one branch alone -------------------------------------------------------------------------------------------------


def _of_backend(function: str) -> Callable[..., Any]:
    """Return a body that calls a function of the backend, which its last argument names."""

    @plainly
    def run(*arguments: Any) -> Any:
        *given, backend = arguments
        if backend == "cpu":
            module: Any = cpu_selected if function.startswith("selected") else strided
        else:
            from nsa.kernels.triton import single as module
        return tuple(x.contiguous() for x in getattr(module, function)(*given))

    return run


def _attention_fake(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any) -> tuple[torch.Tensor, ...]:
    return q.new_empty(*q.shape[:3], v.shape[-1]), q.new_empty(q.shape[:3], dtype=blocks.wide(q.dtype))


def _compressed_fake(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, l: int, d: int, l_sel: int, *_: Any) -> Any:
    shape = q.shape[0], q.shape[1], k.shape[2], blocks.num_selection(q.shape[1], l_sel)
    return *_attention_fake(q, k, v), q.new_empty(shape, dtype=blocks.wide(q.dtype))


def _branch(name: str, inputs: tuple[str, ...], numbers: str, count: int, fake: Callable[..., Any]) -> Any:
    """Define the operator of a branch and its backward: q, k, v and other ``inputs``, ``numbers``, and ``count`` results.

    Output [B, S, H, Dv] and log-sum-exp [B, S, H] are the first, which the backward is given behind q, k and v.
    """
    n = len(inputs)
    forward = operator(
        name, f"({tensors(*inputs)}, {numbers}, str backend) -> {returns(count)}", _of_backend(f"{name}_forward"), fake
    )
    given_back = tensors("grad", "q", "k", "v", "out", "lse", *inputs[3:])
    backward = operator(
        f"{name}_backward", f"({given_back}, {numbers}, str backend) -> {returns(3)}",
        _of_backend(f"{name}_backward"), lambda grad, q, k, v, *_: like(q, k, v),
    )  # fmt: skip

    def setup(ctx: Any, given: Any, found: Any) -> None:
        alone_has_a_gradient(ctx, *found[1:])
        ctx.save_for_backward(*given[:3], *found[:2], *given[3:n])
        ctx.numbers = given[n:]

    @of_the_first
    def differentiate(ctx: Any, grad: torch.Tensor) -> Any:
        saved = ctx.saved_tensors
        others = len(ctx.needs_input_grad) - 3
        return *backward(grad.to(saved[0].dtype), *saved, *ctx.numbers), *(None for _ in range(others))

    register(forward, differentiate, setup)
    register(backward, refuse)
    return forward


# Importance is [B, S, G, Ns].
compressed = _branch(
    "compressed", ("q", "k", "v"), "SymInt l, SymInt d, SymInt l_sel, float scale", 3, _compressed_fake
)
# chosen: bool [B, S, G, Ns], as `blocks.select` makes it.
selected = _branch("selected", ("q", "k", "v", "chosen"), "SymInt l_sel, SymInt n_sel, float scale", 2, _attention_fake)
# The last w tokens, the query's own included.
sliding = _branch("sliding", ("q", "k", "v"), "SymInt w, float scale", 2, _attention_fake)


SELECTED_AT_ONCE = 1024  # queries


def _select(importance: torch.Tensor, l_sel: int, n_sel: int, backend: str) -> torch.Tensor:
    if backend != "triton":
        # Some queries at a time: what a sort makes is six times as large as the selection.
        runs = [slice(at, at + SELECTED_AT_ONCE) for at in range(0, importance.shape[1], SELECTED_AT_ONCE)]
        return torch.cat([blocks.select(importance[:, run], l_sel, n_sel, run.start) for run in runs], 1)
    from nsa.kernels.triton import single

    return single.select_blocks(importance, l_sel, n_sel)


# `blocks.select`, on ``triton`` in one kernel, without sorting: bool [B, S, G, Ns] from importance of that shape. An operator on
# every backend, so that selective checkpointing can keep what it returns.
select = operator(
    "select", "(Tensor importance, SymInt l_sel, SymInt n_sel, str backend) -> Tensor", plainly(_select),
    lambda importance, *_: importance.new_empty(importance.shape, dtype=torch.bool),
)  # fmt: skip


# --- the whole, on a CPU ----------------------------------------------------------------------------------------------

INPUTS = ("gates", "q", "k_cmp", "v_cmp", "k_sel", "v_sel", "k_win", "v_win")
FOUND = ("o_cmp", "o_sel", "o_win", "lse_cmp", "lse_sel", "lse_win", "chosen")
KEPT = ("o_sel", "lse_cmp", "lse_sel", "lse_win", "chosen")
SIZES = "SymInt l, SymInt d, SymInt l_sel, SymInt w, float scale"


@plainly
def _backward_of_whole(grad: torch.Tensor, gates: torch.Tensor, q: torch.Tensor, *others: Any) -> Any:
    cmp, sel, win, o_sel, lse, rest = others[0:2], others[2:4], others[4:6], others[6], others[7:10], others[10:]
    found: Any = cpu_whole.backward(grad, gates, q, cmp, sel, win, o_sel, lse, *rest)
    return tuple(x.contiguous() for x in found)


def _keep_whole(ctx: Any, inputs: Any, output: Any) -> None:
    tensors, ctx.sizes = dict(zip((*INPUTS, *FOUND), inputs, strict=False)), inputs[15:]
    ctx.save_for_backward(*(tensors[name] for name in (*INPUTS, *KEPT)))


def _differentiate_whole(ctx: Any, grad: torch.Tensor) -> Any:
    return *whole_backward(grad, *ctx.saved_tensors, *ctx.sizes), *(None for _ in range(12))


# Eq. 5 from the branches' outputs, gates [B, S, H, 3]; its gradients are those of gates, q and all keys and values. One backward
# for the three branches: what is between gates and branches is never kept, and q's gradient is summed in place.
whole = operator(
    "whole", f"({tensors(*INPUTS, *FOUND)}, {SIZES}) -> Tensor",
    plainly(lambda gates, *others: cpu_whole.gated_sum(gates, others[7:10])),
    lambda gates, q, k_cmp, v_cmp, *_: q.new_empty(*q.shape[:3], v_cmp.shape[-1]),
)  # fmt: skip
whole_backward = operator(
    "whole_backward", f"({tensors('grad', *INPUTS, *KEPT)}, {SIZES}) -> {returns(8)}", _backward_of_whole,
    lambda grad, *others: like(*others[:8]),
)  # fmt: skip
register(whole, _differentiate_whole, _keep_whole)
register(whole_backward, refuse)


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
        out, _, importance = compressed(q, k, v, l, d, l_sel, scale, self.backend)
        return out, importance

    def selected(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, chosen: torch.Tensor, *, l_sel: int, n_sel: int, scale: float
    ) -> torch.Tensor:  # fmt: skip
        """As `reference.selected`."""
        return selected(q, k, v, chosen, l_sel, min(n_sel, chosen.shape[3]), scale, self.backend)[0]

    def select(self, importance: torch.Tensor, l_sel: int, n_sel: int) -> torch.Tensor:
        """As `blocks.select`."""
        return select(importance, l_sel, min(n_sel, importance.shape[3]), self.backend)

    def sliding(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, w: int, scale: float) -> torch.Tensor:
        """As `reference.sliding`."""
        return sliding(q, k, v, min(w, q.shape[1]), scale, self.backend)[0]
