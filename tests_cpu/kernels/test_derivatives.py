"""Forward mode, `torch.func` and second derivatives through our operators: the right values, or an error with a way out."""

from __future__ import annotations

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
NO_FORWARD_MODE = r"no forward-mode derivative .*: use backend='reference'"
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


def make_inputs(S: int = 50, B: int = 1) -> list[torch.Tensor]:
    """Return the arguments of `nsa_attention`, in float64, in which rounding changes no selection."""
    n = blocks.num_compressed(S, *SIZES[:2])
    keys = (torch.randn(B, m, 2, width, dtype=torch.float64) for m in (n, S, S) for width in (8, 6))
    return [torch.randn(B, S, 4, 8, dtype=torch.float64), *keys, torch.rand(B, S, 4, 3, dtype=torch.float64)]


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
        with pytest.raises(NotImplementedError, match=NO_FORWARD_MODE):
            apply(lambda x, i=i: OPERATORS[name](*arguments[:i], x, *arguments[i + 1 :]), arguments[i])


@FORWARD_MODES
@pytest.mark.parametrize("i", range(8))
def test_forward_mode_is_the_reference_s_alone(i: int, apply: Apply) -> None:
    inputs = make_inputs()

    def of(backend: str) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda x: nsa_attention(*inputs[:i], x, *inputs[i + 1 :], sizes=SIZES, backend=backend)

    with pytest.raises(NotImplementedError, match=NO_FORWARD_MODE):
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


@pytest.mark.parametrize("branch", [None, "cmp", "sel", "win"])
def test_func_grad_of_the_layer_s_parameters(branch: Any) -> None:
    """Also of each sample by itself, and each of several calls has its own gradients."""
    layer = NSAAttention(32, 4, 2, 8, **SIZES._asdict(), force_branch=branch).double()
    x = torch.randn(2, 50, 32, dtype=torch.float64)
    parameters = {name: p.detach() for name, p in layer.named_parameters()}

    def of(parameters: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return func.functional_call(layer, parameters, (x,)).sin().sum()

    found = {}
    for backend in ("reference", "cpu"):
        layer.backend = backend
        found[backend] = func.grad(of)(parameters, x)
    for name, wanted in found["reference"].items():
        torch.testing.assert_close(found["cpu"][name], wanted, rtol=0, atol=1e-10, msg=name)


TRANSFORMS: dict[str, Callable[[Callable[..., torch.Tensor], list[torch.Tensor]], Any]] = {
    "grad": lambda f, x: func.grad(f, argnums=tuple(range(8)))(*x),
    "vjp": lambda f, x: func.vjp(f, *x)[1](torch.tensor(2.0, dtype=torch.float64)),
    "vmap": lambda f, x: func.vmap(f)(*(torch.stack([one, -one]) for one in x)),
    "vmap of grad": lambda f, x: func.vmap(func.grad(f, argnums=(0, 4)))(*(torch.stack([one, one / 2]) for one in x)),
    "grad of vmap": lambda f, x: func.grad(lambda q: func.vmap(f)(q, *(one[None] for one in x[1:])).sum())(x[0][None]),
    "jacrev": lambda f, x: func.jacrev(lambda s: torch.stack([f(s * x[0], *x[1:]), f(x[0], s * x[1], *x[2:])]))(
        torch.tensor(0.7, dtype=torch.float64)
    ),
    "grad that another one passes by": lambda f, x: func.grad(lambda s: (func.grad(f)(*x) * s).sum())(x[0]),
}  # fmt: skip


@one_by_one
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_give_what_the_equations_give(name: str) -> None:
    inputs = make_inputs()
    found, wanted = (TRANSFORMS[name](loss(backend), inputs) for backend in ("cpu", "reference"))
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-10)


SECOND = {
    "grad of grad": lambda f, q: func.grad(lambda q: func.grad(f)(q).sum())(q),
    "vjp of grad": lambda f, q: func.vjp(func.grad(f), q)[1](q),
    "jacrev of grad": lambda f, q: func.jacrev(lambda s: func.grad(f)(s * q).sum())(torch.ones(())),
    "double backward": lambda f, q: torch.autograd.grad(
        torch.autograd.grad(f(x := q.clone().requires_grad_()), x, create_graph=True)[0].sum(), x
    ),
}  # fmt: skip
FORWARD_OVER_REVERSE = {
    "jvp of grad": lambda f, q: func.jvp(func.grad(f), (q,), (q,))[1],
    "hessian": lambda f, q: func.hessian(lambda s: f(s * q))(torch.ones((), dtype=q.dtype)),
    "grad of jvp": lambda f, q: func.grad(lambda q: func.jvp(f, (q,), (q,))[1])(q),
}


@one_by_one
@pytest.mark.parametrize("name", [*SECOND, *FORWARD_OVER_REVERSE])
def test_second_derivatives_are_refused_with_a_way_out(name: str) -> None:
    inputs = make_inputs()

    def of(backend: str) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda q: loss(backend)(q, *inputs[1:])

    if name in SECOND:
        with pytest.raises(RuntimeError, match="no second derivative: use backend='reference'"):
            SECOND[name](of("cpu"), inputs[0])
    else:
        with pytest.raises(NotImplementedError, match=NO_FORWARD_MODE):
            FORWARD_OVER_REVERSE[name](of("cpu"), inputs[0])
    assert (SECOND | FORWARD_OVER_REVERSE)[name](of("reference"), inputs[0]) is not None


def test_the_reference_s_second_derivatives() -> None:
    inputs = [x.requires_grad_() for x in make_inputs(20)]
    assert torch.autograd.gradgradcheck(
        lambda *x: reference_attention(*x, sizes=SIZES)[:, ::7, 0], inputs, fast_mode=True
    )
