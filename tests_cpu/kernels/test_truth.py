"""The cpu backend's branches against float64 by the equations: forward, every gradient, fresh random shapes and numbers."""

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nsa import Sizes, nsa_attention, reference_attention
from nsa.kernels import blocks, ops, reference
from nsa.kernels.backends import BACKENDS
from nsa.kernels.cpu import selected as cpu_selected
from nsa.kernels.cpu import strided
from nsa.kernels.cpu import tiles as cpu_tiles
from tests_cpu.kernels.agreement import Inputs, assert_agreement, leaves, sizes_of_inputs

# The largest error allowed of an output of size about 1, and of a gradient, which sums over many.
TOLERANCE = {
    torch.float64: (1e-12, 1e-10),
    torch.float32: (2e-6, 3e-5),
    torch.float16: (4e-3, 6e-2),
    torch.bfloat16: (3e-2, 5e-1),
}

examples = settings(max_examples=25, deadline=None, database=None, suppress_health_check=list(HealthCheck))


@st.composite
def shapes(draw: st.DrawFn) -> dict[str, Any]:
    """Draw sizes that fit each other."""
    d = draw(st.sampled_from([1, 2, 4, 8]))
    G = draw(st.sampled_from([1, 2, 3]))
    return {
        "S": draw(st.integers(1, 230)), "B": draw(st.sampled_from([1, 2])), "G": G, "H": G * draw(st.sampled_from([1, 2, 5])),
        "Dk": draw(st.sampled_from([4, 8, 24])), "Dv": draw(st.sampled_from([4, 16])), "d": d,
        "l": d * draw(st.integers(1, 4)), "l_sel": d * draw(st.integers(1, 6)), "n_sel": draw(st.integers(3, 6)),
        "w": draw(st.integers(1, 250)), "dtype": draw(st.sampled_from(list(TOLERANCE))), "seed": draw(st.integers(0, 1 << 30)),
    }  # fmt: skip


def compare(found: torch.Tensor, wanted: torch.Tensor, inputs: Inputs, exact: Inputs) -> None:
    """Compare output and gradients, with the tolerance of their dtype."""
    forward, backward = TOLERANCE[found.dtype]
    assert_agreement(found, wanted, inputs, exact, forward, backward, relative=backward)


def in_small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make tiles, chunks and lists so small that a short sequence has several of each, as a long one has."""
    for module, name, value in (
        (cpu_tiles, "SCORES_AT_ONCE", 600), (cpu_tiles, "FEWEST", 3), (cpu_tiles, "MOST", 7), (cpu_tiles, "STEP", 2),
        (cpu_selected, "SHORT", 0), (strided, "STEP", 2),
        (cpu_selected, "QUERIES_AT_ONCE", 100),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, value)


@pytest.mark.parametrize("pieces", ["small", pytest.param("as shipped", marks=pytest.mark.slow)])
@examples
@given(z=shapes())
def test_each_branch(z: dict[str, Any], pieces: str) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        if pieces == "small":
            in_small_pieces(monkeypatch)
        check_each_branch(z)


def check_each_branch(z: dict[str, Any]) -> None:
    torch.manual_seed(z["seed"])
    B, S, H, G, Dk, Dv = (z[name] for name in ("B", "S", "H", "G", "Dk", "Dv"))
    scale, n_cmp = Dk**-0.5, blocks.num_compressed(z["S"], z["l"], z["d"])
    (q, k, v), exact = leaves(z["dtype"], (B, S, H, Dk), (B, S, G, Dk), (B, S, G, Dv))
    inputs = [q, k, v]
    compare(
        ops.sliding(q, k, v, z["w"], scale, "cpu")[0], reference.sliding(*exact, w=z["w"], scale=scale), inputs, exact
    )
    chosen = blocks.select(torch.rand(B, S, G, blocks.num_selection(S, z["l_sel"])), z["l_sel"], z["n_sel"])
    found = ops.selected(q, k, v, chosen, z["l_sel"], z["n_sel"], scale, "cpu")[0]
    wanted = reference.selected(*exact, chosen, l_sel=z["l_sel"], n_sel=z["n_sel"], scale=scale)
    compare(found, wanted, inputs, exact)
    inputs, exact = leaves(z["dtype"], (B, S, H, Dk), (B, n_cmp, G, Dk), (B, n_cmp, G, Dv))
    found, _, importance = ops.compressed(*inputs, z["l"], z["d"], z["l_sel"], scale, "cpu")
    wanted, expected = reference.compressed(*exact, l=z["l"], d=z["d"], l_sel=z["l_sel"], scale=scale)
    compare(found, wanted, inputs, exact)
    # Half types are multiplied in float32 here: the selection is as exact.
    tolerance = (1e-12 if z["dtype"] == torch.float64 else 1e-5) * (H // G) * (z["l"] // z["d"])
    torch.testing.assert_close(importance.double(), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("pieces", ["small", pytest.param("as shipped", marks=pytest.mark.slow)])
@examples
@given(z=shapes(), data=st.data())
def test_the_whole_of_a_pack(z: dict[str, Any], data: st.DataObject, pieces: str) -> None:
    """A pack gives what each of its sequences gives alone, an empty one too. In float64, no rounding changes the selection."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        if pieces == "small":
            in_small_pieces(monkeypatch)
        check_the_whole_of_a_pack(z, data)


def check_the_whole_of_a_pack(z: dict[str, Any], data: st.DataObject) -> None:
    torch.manual_seed(z["seed"])
    lengths = data.draw(st.lists(st.integers(0, 70), min_size=1, max_size=3).filter(any))
    S, H, G = sum(lengths), z["H"], z["G"]
    n_cmp = sum(blocks.num_compressed(n, z["l"], z["d"]) for n in lengths)
    inputs, exact = leaves(torch.float64, *sizes_of_inputs(1, S, H, G, z["Dk"], z["Dv"], n_cmp))
    sizes = Sizes(z["l"], z["d"], z["l_sel"], z["n_sel"], z["w"])
    ends = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    found = nsa_attention(*inputs, sizes=sizes, cu_seqlens=ends, backend="cpu")
    compare(found, reference_attention(*exact, sizes=sizes, cu_seqlens=ends), inputs, exact)


@examples
@given(z=shapes())
def test_the_whole_in_every_dtype(z: dict[str, Any]) -> None:
    """So many blocks are selected that rounding cannot change which."""
    torch.manual_seed(z["seed"])
    B, S, H, G = z["B"], z["S"], z["H"], z["G"]
    n_cmp = blocks.num_compressed(S, z["l"], z["d"])
    inputs, exact = leaves(z["dtype"], *sizes_of_inputs(B, S, H, G, z["Dk"], z["Dv"], n_cmp))
    with torch.no_grad():
        exact[-1].copy_(inputs[-1].sigmoid_())  # outputs of size 1, as the tolerances require
    sizes = Sizes(z["l"], z["d"], z["l_sel"], 3 + S // z["l_sel"], z["w"])
    compare(nsa_attention(*inputs, sizes=sizes, backend="cpu"), reference_attention(*exact, sizes=sizes), inputs, exact)


SERVING = [n for n, row in BACKENDS.items() if not row.why_not(torch.float32, torch.device("cpu"), 16, 16)]


@pytest.mark.parametrize("backend", SERVING)
def test_every_backend_that_serves_a_cpu(backend: str) -> None:
    sizes = Sizes(8, 4, 16, 3, 20)
    shapes = sizes_of_inputs(2, 70, 4, 2, 16, 16, blocks.num_compressed(70, *sizes[:2]))
    exact = [torch.rand(shape, dtype=torch.float64).requires_grad_() for shape in shapes]
    inputs = [x.detach().float().requires_grad_() for x in exact]
    compare(
        nsa_attention(*inputs, sizes=sizes, backend=backend), reference_attention(*exact, sizes=sizes), inputs, exact
    )


@pytest.mark.parametrize(("backend", "is_fused"), [("sdpa", True), ("math", False)])
def test_math_takes_no_fused_kernel_forward_or_backward(backend: str, is_fused: bool) -> None:
    """A window of all tokens is plain causal attention, for which torch has a flash kernel on a CPU as on a GPU."""
    q, k, v = (torch.rand(1, 64, heads, 16).requires_grad_() for heads in (4, 2, 2))
    with torch.profiler.profile() as profile:
        BACKENDS[backend].branches.sliding(q, k, v, w=64, scale=0.25).sum().backward()
    fused = {event.key for event in profile.key_averages() if "flash" in event.key or "efficient" in event.key}
    assert bool(fused) is is_fused, fused
    assert any("_scaled_dot_product_attention_math" in event.key for event in profile.key_averages()) is not is_fused


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_errors_are_those_of_dense_attention(dtype: torch.dtype) -> None:
    """Against float64 on the same numbers, errors are at most three times those of torch's own causal attention."""
    (q, k, v), exact = leaves(dtype, (1, 600, 4, 32), (1, 600, 2, 32), (1, 600, 2, 32))
    dense = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(1, 2), *(x.transpose(1, 2).repeat_interleave(2, 1) for x in (k, v)), is_causal=True
    ).transpose(1, 2)
    scale = 32**-0.5
    its_error = (dense.double() - reference.sliding(*exact, w=600, scale=scale)).abs().max()
    chosen = blocks.select(torch.rand(1, 600, 2, 38), 16, 8)
    for found, wanted in (
        (ops.sliding(q, k, v, 100, scale, "cpu")[0], reference.sliding(*exact, w=100, scale=scale)),
        (
            ops.selected(q, k, v, chosen, 16, 8, scale, "cpu")[0],
            reference.selected(*exact, chosen, l_sel=16, n_sel=8, scale=scale),
        ),
    ):
        assert (found.double() - wanted).abs().max() <= 3 * its_error


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("what", ["equal", "huge", "zero"])
@pytest.mark.parametrize("S", [1, 3, 200])
def test_no_nan_for_finite_inputs(what: str, dtype: torch.dtype, S: int) -> None:
    n = blocks.num_compressed(S, 8, 4)
    inputs, _ = leaves(dtype, *sizes_of_inputs(1, S, 4, 2, 16, 16, n))
    with torch.no_grad():
        for x in inputs[:2] + inputs[3:4] + inputs[5:6]:
            x.fill_(1) if what == "equal" else x.mul_(100 if what == "huge" else 0)  # logits of 1e4 * sqrt(16)
    out = nsa_attention(*inputs, sizes=Sizes(8, 4, 16, 4, 24))
    assert torch.isfinite(out).all()
    for gradient in torch.autograd.grad(out.float().square().sum(), inputs, allow_unused=True, materialize_grads=True):
        assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("backend", ["auto", "reference", "sdpa", "math", "cpu"])
@pytest.mark.parametrize(("B", "S"), [(1, 0), (0, 40)])
def test_nothing_to_attend_gives_gradients_of_zeros(backend: str, B: int, S: int) -> None:
    n = blocks.num_compressed(S, 8, 4)
    inputs, _ = leaves(torch.float32, *sizes_of_inputs(B, S, 4, 2, 16, 8, n))
    out = nsa_attention(*inputs, sizes=Sizes(8, 4, 16, 4, 24), backend=backend)
    assert out.shape == (B, S, 4, 8)
    out.sum().backward()
    assert [x.grad is not None and not x.grad.any() for x in inputs] == [True] * 8


@pytest.mark.parametrize("backend", ["reference", "sdpa", "cpu"])
def test_half_types_select_what_float64_selects(backend: str) -> None:
    """Scores and probabilities are float32 everywhere, under autocast too."""
    torch.manual_seed(0)
    n = blocks.num_compressed(1000, 32, 16)
    (q, k, v), exact = leaves(torch.bfloat16, (1, 1000, 4, 32), (1, n, 2, 32), (1, n, 2, 32))
    with torch.autocast("cpu", torch.bfloat16):
        found = BACKENDS[backend].branches.compressed(q, k, v, l=32, d=16, l_sel=64, scale=0.2)[1]
    wanted = reference.compressed(*exact, l=32, d=16, l_sel=64, scale=0.2)[1]
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=1e-5)
