"""The three branches against loops over positions and heads that are written from the equations, in float64."""

import importlib.util
import math
import sys
import types
from typing import Any

import pytest
import torch

from nsa import NSAAttention, Sizes, explain, nsa_attention
from nsa.kernels import blocks, flash, reference
from nsa.kernels.dispatch import counters
from nsa.model.attention import Rotary
from tests_cpu.kernels.agreement import Inputs, assert_agreement, leaves, sizes_of_inputs

SHAPE = Sizes(8, 4, 16, 4, 24)


def make_inputs(S: int, B: int = 2) -> Inputs:
    torch.manual_seed(S)
    return leaves(torch.float64, *sizes_of_inputs(B, S, 4, 2, 8, 6, blocks.num_compressed(S, *SHAPE[:2])))[1]


def by_loops(inputs: Inputs, l: int, d: int, l_sel: int, n_sel: int, w: int) -> torch.Tensor:
    """Compute equations 5 and 7 to 11 of arXiv 2502.11089 with a loop over everything; 0-based."""
    q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, gates = inputs
    B, S, H, Dk = q.shape
    G = k_sel.shape[2]
    out = torch.zeros(B, S, H, v_sel.shape[3], dtype=torch.float64)
    for b in range(B):
        for t in range(S):
            for g in range(G):
                heads = range(g * (H // G), (g + 1) * (H // G))
                importance = [0.0] * (t // l_sel + 1)
                for head in heads:
                    visible = [i for i in range(k_cmp.shape[1]) if i * d + l - 1 <= t]
                    if visible:
                        p = torch.softmax(k_cmp[b, visible, g] @ q[b, t, head] / math.sqrt(Dk), 0)
                        out[b, t, head] += gates[b, t, head, 0] * (p @ v_cmp[b, visible, g])
                        for i, weight in zip(visible, p.tolist(), strict=True):
                            for j in range(len(importance)):
                                shared = {i + n for n in range(l // d)} & {
                                    j * (l_sel // d) + m for m in range(l_sel // d)
                                }
                                importance[j] += weight * len(shared)
                forced = [j for j in range(len(importance)) if j == 0 or j >= t // l_sel - 1]
                rest = sorted((j for j in range(len(importance)) if j not in forced), key=lambda j: (-importance[j], j))
                chosen = (forced + rest)[:n_sel]
                tokens = [s for s in range(t + 1) if s // l_sel in chosen]
                window = [s for s in range(t + 1) if s > t - w]
                for head in heads:
                    for which, keys, k, v in ((1, tokens, k_sel, v_sel), (2, window, k_win, v_win)):
                        p = torch.softmax(k[b, keys, g] @ q[b, t, head] / math.sqrt(Dk), 0)
                        out[b, t, head] += gates[b, t, head, which] * (p @ v[b, keys, g])
    return out


@pytest.mark.parametrize("backend", ["reference", "sdpa", "cpu"])
@pytest.mark.parametrize("S", [1, 7, 8, 33, 100])
def test_forward_and_gradients_equal_the_equations(S: int, backend: str) -> None:
    inputs = make_inputs(S, B=1)
    expected = by_loops(inputs, *SHAPE)
    actual = nsa_attention(*inputs, sizes=SHAPE, backend=backend)
    assert_agreement(actual, expected, inputs, inputs, 1e-12, 1e-12)


def test_flash_is_called_as_the_equations_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    """flash-attn's own window convention is written out: keys from i - left to i + right, on [B, S, H, D]."""

    def flash_attn_func(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        softmax_scale: float,
        causal: bool,
        window_size: tuple[int, int],
    ) -> torch.Tensor:
        assert causal
        i = torch.arange(q.shape[1])
        back = i[:, None] - i[None, :]
        seen = (back <= window_size[0]) & (back >= -window_size[1])
        h = q.shape[2] // k.shape[2]
        q, k, v = (
            q.transpose(1, 2),
            k.transpose(1, 2).repeat_interleave(h, 1),
            v.transpose(1, 2).repeat_interleave(h, 1),
        )
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=softmax_scale).transpose(
            1, 2
        )

    monkeypatch.setitem(sys.modules, "flash_attn", types.SimpleNamespace(flash_attn_func=flash_attn_func))
    monkeypatch.setattr(flash, "is_there", lambda: True)
    q, k, v = make_inputs(90)[0], *make_inputs(90)[5:7]
    found = flash.sliding(q, k, v, w=24, scale=0.3)
    torch.testing.assert_close(found, reference.sliding(q, k, v, w=24, scale=0.3), rtol=0, atol=1e-12)


def test_torch_takes_the_place_of_flash_attn() -> None:
    """This holds on a machine without flash-attn; the explanation of the choice reports it."""
    assert importlib.util.find_spec("flash_attn") is None
    q, k, v = make_inputs(90)[0], *make_inputs(90)[5:7]
    found = flash.sliding(q, k, v, w=24, scale=0.3)
    torch.testing.assert_close(found, reference.sliding(q, k, v, w=24, scale=0.3), rtol=0, atol=1e-12)
    gpu = torch.device("cuda")
    name, why = explain("flash", torch.bfloat16, gpu, 192, 128)
    assert name == "flash"
    assert why == "asked for; flash-attn is not installed, so the window is torch's own fused attention"
    with pytest.raises(ValueError, match=r"backend='flash': flash-attn takes float16 and bfloat16, not torch.float32"):
        explain("flash", torch.float32, gpu)


def test_the_automatic_choice_is_explained_and_counted() -> None:
    choice = ("cpu", "our tiles serve torch.float32 on cpu")
    assert explain("auto", torch.float32, torch.device("cpu")) == choice
    assert explain("auto", torch.float64, torch.device("cpu"))[0] == "reference"
    before = counters["auto", *choice]
    nsa_attention(*(x.float() for x in make_inputs(40)), sizes=SHAPE)
    assert counters["auto", *choice] == before + 1


def test_a_sequence_far_into_a_pack_equals_it_alone() -> None:
    layer = NSAAttention(16, 2, 1, 8, **SHAPE._asdict())
    with torch.no_grad():
        for name, weight in layer.named_parameters():
            weight *= 4 if name.startswith(("w_", "k_")) else 1  # scores that depend on the positions
        x = torch.randn(1, 4040, 16, generator=torch.Generator().manual_seed(0))
        packed, alone = layer(x, cu_seqlens=[0, 4000, 4040])[:, 4000:], layer(x[:, 4000:])
    # Only the sizes of products differ: a few roundings of values of size 1. An angle of position 4000 has an error of 1e-4.
    torch.testing.assert_close(packed, alone, rtol=0, atol=4e-6)


def test_rotation_in_float64_has_angles_in_float64() -> None:
    x = torch.randn(1, 3, 1, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    t = torch.tensor([0, 7, 10_000])
    angles = t[:, None] * 10_000.0 ** (-torch.arange(0, 8, 2, dtype=torch.float64) / 8)
    wanted = torch.view_as_real(
        torch.complex(*x.chunk(2, -1)) * torch.polar(torch.ones_like(angles), angles)[None, :, None]
    )
    found = Rotary(8, 10_000.0)(x, t)
    # A rounding of an angle of 10,000 is 1e-12.
    torch.testing.assert_close(torch.stack(found.chunk(2, -1), -1), wanted, rtol=0, atol=1e-11)


def make_module(**options: Any) -> NSAAttention:
    torch.manual_seed(0)
    return NSAAttention(32, 4, 2, 8, **SHAPE._asdict(), **options).double()


@pytest.mark.parametrize("compression", ["mean", "mlp"])
def test_a_changed_token_moves_no_earlier_output(compression: str) -> None:
    module = make_module(compression=compression)
    x = torch.randn(1, 90, 32, dtype=torch.float64)
    changed = x.clone()
    changed[:, 57] += 1
    before, after = module(x), module(changed)
    torch.testing.assert_close(after[:, :57], before[:, :57], rtol=0, atol=1e-13)
    assert (after[:, 57] - before[:, 57]).abs().max() > 1e-6


@pytest.mark.parametrize("branch", ["cmp", "sel", "win"])
def test_a_forced_branch_gives_every_parameter_a_gradient(branch: Any) -> None:
    module = make_module(force_branch=branch, compression="mlp")
    module(torch.randn(2, 70, 32, dtype=torch.float64)).square().sum().backward()
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None, name
        trained = name.startswith(
            ("w_q", "out", f"k_{branch}", f"v_{branch}", *(["compress"] if branch == "cmp" else []))
        )
        assert (parameter.grad.abs().max() > 0) == trained, name


@pytest.mark.parametrize("backend", ["auto", "reference", "sdpa"])
def test_shapes_on_the_meta_device(backend: str) -> None:
    with torch.device("meta"):
        layer = NSAAttention(32, 4, 2, 8, **Sizes(8, 4, 16, 4, 16)._asdict(), backend=backend)
        assert layer(torch.randn(1, 40, 32)).shape == (1, 40, 32)
