"""Arguments of the layer and of the function that do not fit: one line that names the argument, or what was meant is done."""

from typing import Any

import pytest
import torch

from nsa import NSAAttention, Sizes, nsa_attention

SIZES = Sizes(8, 4, 16, 4, 16)
ENDS = [0, 11, 11, 40]
NAMES = ("q", "k_cmp", "v_cmp", "k_sel", "v_sel", "k_win", "v_win", "gates")
OFFSETS = r"cu_seqlens must be one row of whole numbers, as in \[0, 20, 40\]; got "


def layer() -> NSAAttention:
    return NSAAttention(32, 4, 2, 8, **SIZES._asdict())


def tensors() -> list[torch.Tensor]:
    cmp, sel = torch.randn(1, 9, 2, 8), torch.randn(1, 40, 2, 8)
    return [torch.randn(1, 40, 4, 8), cmp, cmp, sel, sel, sel, sel, torch.rand(1, 40, 4, 3)]


@pytest.mark.parametrize("kind", [list, tuple, torch.tensor])
def test_offsets_of_a_pack_as_a_list(kind: Any) -> None:
    module, x = layer(), torch.randn(1, 40, 32)
    wanted = torch.cat([module(x[:, a:b]) for a, b in ((0, 11), (11, 40))], 1)
    torch.testing.assert_close(module(x, cu_seqlens=kind(ENDS)), wanted, rtol=0, atol=1e-5)


# The argument that is wrong, its value or how it is changed, and the message.
FUNCTION: list[tuple[str, Any, str]] = [
    ("compress_block", 6, r"compress_block=6: must be a multiple of compress_stride=4"),
    ("compress_block", -4, r"compress_block=-4: must be at least 1"),
    ("compress_block", "8", r"^compress_block='8': must be a whole number$"),
    ("compress_block", 8.0, r"^compress_block=8\.0: must be a whole number$"),
    ("compress_stride", 0, r"compress_stride=0: must be at least 1"),
    ("compress_stride", True, r"^compress_stride=True: must be a whole number$"),
    ("select_block", 18, r"select_block=18: must be a multiple of compress_stride=4"),
    ("n_select", 2, r"n_select=2: must be at least 3"),
    ("window", 0, r"window=0: must be at least 1"),
    ("window", None, r"^window=None: must be a whole number$"),
    ("scale", -0.5, r"^scale=-0\.5: must be above 0$"),
    ("backend", "cuda", r"backend='cuda': must be one of auto, reference, sdpa, math, cpu, triton, flash"),
    ("backend", "flash", r"backend='flash': .*on cpu; use backend='auto'"),
    ("backend", "triton", r"backend='triton': .*on cpu; use backend='auto'"),
    ("cu_seqlens", torch.tensor([0, 30, 20, 40]), r"cu_seqlens=.*must start at 0, never fall, and end at S=40"),
    ("cu_seqlens", torch.tensor([ENDS]), OFFSETS + r"shape \(1, 4\), torch\.int64"),
    ("cu_seqlens", torch.tensor([0, 10.7, 40]), OFFSETS + r"shape \(3,\), torch\.float32"),
    ("cu_seqlens", [0, 10.7, 40], OFFSETS + r"\[0, 10\.7, 40\]"),
    ("cu_seqlens", 40, OFFSETS + "40"),
    ("q", lambda x: x[0], r"q has shape \(40, 4, 8\): must have 4 dimensions, \[batch, tokens, heads, width\]"),
    ("q", lambda x: x.long(), r"q is torch\.int64: must be a floating point dtype"),
    ("q", lambda x: x[:, :, :3], r"q has 3 heads: must be a multiple of the 2 KV heads"),
    (
        "k_cmp",
        lambda x: x[:, :-1],
        r"k_cmp has 8 blocks: S=40, compress_block=8, compress_stride=4 make another number|v_cmp has shape",
    ),
    ("k_sel", lambda x: x[:, :-1], r"k_sel has shape \(1, 39, 2, 8\): must be \(1, 40, 2, 8\)"),
    ("v_sel", lambda x: x.double(), r"v_sel is torch\.float64: must be torch\.float32, as q is"),
    ("k_win", lambda x: x.to("meta"), r"k_win is on meta: must be on cpu, as q is"),
    ("k_win", lambda x: None, "k_win is NoneType: must be a tensor"),
    ("gates", lambda x: x[..., :2], r"gates has shape \(1, 40, 4, 2\): must be \(1, 40, 4, 3\)"),
    ("gates", lambda x: x[0, 0], r"gates has shape \(4, 3\): must have 4 dimensions, \[batch, tokens, heads, 3\]"),
]
LAYER: list[tuple[str, Any, str]] = [
    ("n_heads", 3, "must be a multiple of n_kv_heads=2"),
    ("head_dim", 7, "must be even"),
    ("n_kv_heads", 0, "must be at least 1"),
    ("v_head_dim", 0, "must be at least 1"),
    ("window", 0, "must be at least 1"),
    ("compression", "max", "must be mean or mlp"),
    ("force_branch", "dense", "must be cmp, sel, win or None"),
    ("rope_theta", 0.0, "must be a finite number above 0"),
    ("rope_theta", float("nan"), "must be a finite number above 0"),
    ("gate_hidden", -1, "must be at least 1"),
]


@pytest.mark.parametrize(("name", "value", "message"), FUNCTION)
def test_the_function_names_what_does_not_fit(name: str, value: Any, message: str) -> None:
    given: dict[str, Any] = dict(zip(NAMES, tensors(), strict=True))
    sizes = SIZES._replace(**{name: value}) if name in SIZES._fields else SIZES
    if name not in SIZES._fields:
        given[name] = value(given[name]) if callable(value) else value
    with pytest.raises(ValueError, match=message):
        nsa_attention(**given, sizes=sizes)


@pytest.mark.parametrize(("name", "value", "says"), LAYER)
def test_the_layer_names_what_does_not_fit(name: str, value: Any, says: str) -> None:
    sizes: dict[str, Any] = {"dim": 32, "n_heads": 4, "n_kv_heads": 2, "head_dim": 8, **SIZES._asdict()}
    with pytest.raises(ValueError, match=f"{name}={value!r}: {says}"):
        NSAAttention(**{**sizes, name: value})


def test_hidden_states_of_other_dimensions() -> None:
    for x in (torch.randn(40, 32), torch.randn(1, 40, 31)):
        with pytest.raises(ValueError, match=rf"x has shape \({x.shape[0]}, .*\): must be \[batch, tokens, 32\]"):
            layer()(x)


def test_a_mask_in_the_place_of_the_cache() -> None:
    with pytest.raises(ValueError, match=r"cache is Tensor: must be a nsa\.KVCache"):
        layer()(torch.randn(1, 40, 32), torch.ones(1, 40))  # type: ignore[arg-type]
