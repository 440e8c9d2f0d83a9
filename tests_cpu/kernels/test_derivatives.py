"""Forward mode, `torch.func` and second derivatives through our operators: the right values, or an error with a way out."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import func
from torch._ops import OpOverload
from torch.autograd import forward_ad

from nsa import KVCache, NSAAttention, Sizes, nsa_attention, reference_attention
from nsa.kernels import blocks, ops
from nsa.kernels.triton import operators
from tests_cpu.kernels.agreement import leaves, sizes_of_inputs

# torch's own, as it imports what forward mode needs.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")

SIZES = Sizes(8, 4, 16, 3, 20)
OPERATORS = {
    op._schema.name.partition("::")[2]: op
    for module in (ops, operators)
    for op in vars(module).values()
    if isinstance(op, OpOverload)
}
WITHOUT_DERIVATIVE = {"select", "selection_mask"}  # they return no floating-point numbers
NOT_BY_OURS = r"no forward-mode derivative and none by torch\.func: use backend='reference'"
one_by_one = pytest.mark.filterwarnings("ignore:There is a performance drop")  # torch's, of vmap

Apply = Callable[[Callable[[torch.Tensor], Any], torch.Tensor], Any]


def by_jvp(function: Callable[[torch.Tensor], Any], x: torch.Tensor) -> Any:
    return func.jvp(function, (x,), (torch.ones_like(x),))[1]


def by_dual(function: Callable[[torch.Tensor], Any], x: torch.Tensor) -> Any:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(function(forward_ad.make_dual(x, torch.ones_like(x)))).tangent


def by_dual_without_gradients(function: Callable[[torch.Tensor], Any], x: torch.Tensor) -> Any:
    with torch.no_grad():
        return by_dual(function, x)


FORWARD_MODES = pytest.mark.parametrize("apply", [by_jvp, by_dual, by_dual_without_gradients])


def make_inputs(S: int = 50) -> list[torch.Tensor]:
    """Return the arguments of `nsa_attention`, in float64, in which rounding changes no selection."""
    sizes = sizes_of_inputs(1, S, 4, 2, 8, 6, blocks.num_compressed(S, *SIZES[:2]))
    return [x.detach() for x in leaves(torch.float64, *sizes)[1]]


def loss(backend: str) -> Callable[..., torch.Tensor]:
    return lambda *inputs: nsa_attention(*inputs, sizes=SIZES, backend=backend).sin().sum()


@FORWARD_MODES
@pytest.mark.parametrize("name", sorted(OPERATORS.keys() - WITHOUT_DERIVATIVE))
def test_every_operator_refuses_a_tangent_of_every_argument(name: str, apply: Apply) -> None:
    """The refusal comes before the kernel runs: it needs no GPU, and no arguments that fit each other."""
    some = {
        "Tensor": torch.ones(1, 1, 1, 1),
        "int": 1,
        "float": 1.0,
        "str": "cpu",
        "bool": False,
        "Optional[Tensor]": None,
    }
    arguments = [some[str(a.type)] for a in OPERATORS[name]._schema.arguments]
    tensors = [i for i, a in enumerate(arguments) if isinstance(a, torch.Tensor)]
    assert tensors
    for i in tensors:
        with pytest.raises(NotImplementedError, match=NOT_BY_OURS):
            apply(lambda x, i=i: OPERATORS[name](*arguments[:i], x, *arguments[i + 1 :]), arguments[i])


@FORWARD_MODES
@pytest.mark.parametrize("i", range(8))
def test_forward_mode_is_the_reference_s_alone(i: int, apply: Apply) -> None:
    inputs = make_inputs()

    def of(backend: str) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda x: nsa_attention(*inputs[:i], x, *inputs[i + 1 :], sizes=SIZES, backend=backend)

    with pytest.raises(NotImplementedError, match=NOT_BY_OURS):
        apply(of("cpu"), inputs[i])
    weight = torch.randn(1, 50, 4, 6, dtype=torch.float64)
    (gradient,) = torch.autograd.grad((of("reference")(x := inputs[i].clone().requires_grad_()) * weight).sum(), x)
    tangent = apply(of("reference"), inputs[i])
    torch.testing.assert_close((tangent * weight).sum(), gradient.sum(), rtol=0, atol=1e-10)


@FORWARD_MODES
@pytest.mark.parametrize("tokens", [1, 30])
def test_a_cache_refuses_tangents(tokens: int, apply: Apply) -> None:
    layer, cache = NSAAttention(32, 4, 2, 8, **SIZES._asdict(), backend="reference"), KVCache()
    x = torch.randn(1, 40 + tokens, 32)
    with torch.no_grad():
        layer(x[:, :40], cache)
        with pytest.raises(RuntimeError, match="a KVCache keeps no tangents: call the layer without a cache"):
            apply(lambda new: layer(new, cache), x[:, 40:])
        assert cache.length == 40
        torch.testing.assert_close(layer(x[:, 40:], cache), layer(x)[:, 40:], rtol=0, atol=2e-5)


TRANSFORMS: dict[str, Callable[[Callable[..., torch.Tensor], list[torch.Tensor]], Any]] = {
    "grad": lambda f, x: func.grad(f, argnums=tuple(range(8)))(*x),
    "vjp": lambda f, x: func.vjp(f, *x)[1](torch.tensor(2.0, dtype=torch.float64)),
    "vmap of grad": lambda f, x: func.vmap(func.grad(f, argnums=(0, 4)))(*(torch.stack([one, one / 2]) for one in x)),
    "grad of vmap": lambda f, x: func.grad(lambda q: func.vmap(f)(q, *(one[None] for one in x[1:])).sum())(x[0][None]),
    "jvp of grad": lambda f, x: func.jvp(lambda q: func.grad(f)(q, *x[1:]), (x[0],), (x[0],))[1],
}


@one_by_one
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_that_differentiate_are_the_reference_s_alone(name: str) -> None:
    inputs = make_inputs()
    with pytest.raises(NotImplementedError, match=NOT_BY_OURS):
        TRANSFORMS[name](loss("cpu"), inputs)
    assert TRANSFORMS[name](loss("reference"), inputs) is not None


@one_by_one
def test_vmap_runs_the_operator_once_per_entry() -> None:
    inputs = [torch.stack([one, -one]) for one in make_inputs()]
    found, wanted = (func.vmap(loss(backend))(*inputs) for backend in ("cpu", "reference"))
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-10)


def test_a_second_derivative_is_the_reference_s_alone() -> None:
    inputs = [x.requires_grad_() for x in make_inputs(20)]
    (gradient,) = torch.autograd.grad(loss("cpu")(*inputs), inputs[0], create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative: use backend='reference'"):
        gradient.sum().backward()
    assert torch.autograd.gradgradcheck(
        lambda *x: reference_attention(*x, sizes=SIZES)[:, ::7, 0], inputs, fast_mode=True
    )
