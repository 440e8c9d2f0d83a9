"""Arguments of the layer and of the function that do not fit: one line that names the argument, or what was meant is done."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nsa import KVCache, NSAAttention, nsa_attention

SIZES: dict[str, Any] = {"l": 8, "d": 4, "l_sel": 16, "n_sel": 4, "w": 16}
ENDS = [0, 11, 11, 40]


def layer() -> NSAAttention:
    return NSAAttention(32, 4, 2, 8, 8, **SIZES)


def tensors() -> list[torch.Tensor]:
    cmp, sel = torch.randn(1, 9, 2, 8), torch.randn(1, 40, 2, 8)
    return [torch.randn(1, 40, 4, 8), cmp, cmp, sel, sel, sel, sel, torch.rand(1, 40, 4, 3)]


@pytest.mark.parametrize("kind", [list, tuple, torch.tensor])
def test_offsets_of_a_pack_as_a_list(kind: Any) -> None:
    module, x = layer(), torch.randn(1, 40, 32)
    wanted = torch.cat([module(x[:, a:b]) for a, b in ((0, 11), (11, 40))], 1)
    torch.testing.assert_close(module(x, cu_seqlens=kind(ENDS)), wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (torch.tensor([ENDS]), r"shape \(1, 4\), torch\.int64"),
        (torch.tensor([0, 10.7, 40]), r"shape \(3,\), torch\.float32"),
        ([0, 10.7, 40], r"\[0, 10\.7, 40\]"),
        (40, "40"),
    ],
)
def test_offsets_that_are_none(given: Any, found: str) -> None:
    message = rf"cu_seqlens must be one row of whole numbers, as in \[0, 20, 40\]; got {found}"
    with pytest.raises(ValueError, match=message):
        layer()(torch.randn(1, 40, 32), cu_seqlens=given)


@pytest.mark.parametrize(("name", "value"), [("w", None), ("l", "8"), ("l", 8.0), ("d", True), ("n_sel", None)])
def test_a_size_that_is_no_whole_number(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"^{name}={value!r}: must be a whole number$"):
        nsa_attention(*tensors(), **{**SIZES, name: value})
    with pytest.raises(ValueError, match=rf"^{name}={value!r}: must be a whole number$"):
        NSAAttention(32, 4, 2, 8, 8, **{**SIZES, name: value})


@pytest.mark.parametrize(
    ("index", "change", "message"),
    [
        (0, lambda x: x[0, 0], r"q has shape \(4, 8\): must have 4 dimensions, \[batch, tokens, heads, width\]"),
        (5, lambda x: None, "k_win is NoneType: must be a tensor"),
        (7, lambda x: x[0, 0], r"gates has shape \(4, 3\): must have 4 dimensions, \[batch, tokens, heads, 3\]"),
    ],
)
def test_a_tensor_of_other_dimensions(index: int, change: Any, message: str) -> None:
    given = tensors()
    given[index] = change(given[index])
    with pytest.raises(ValueError, match=message):
        nsa_attention(*given, **SIZES)


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("rope_theta", 0.0, "must be a finite number above 0"),
        ("rope_theta", float("nan"), "must be a finite number above 0"),
        ("gate_hidden", -1, "must be at least 1, or None"),
    ],
)
def test_a_layer_that_would_compute_nothing_of_use(name: str, value: Any, says: str) -> None:
    with pytest.raises(ValueError, match=f"{name}={value}: {says}"):
        NSAAttention(32, 4, 2, 8, 8, **SIZES, **{name: value})


def test_hidden_states_of_other_dimensions() -> None:
    for x in (torch.randn(40, 32), torch.randn(1, 40, 31)):
        with pytest.raises(ValueError, match=rf"x has shape \({x.shape[0]}, .*\): must be \[batch, tokens, 32\]"):
            layer()(x)


def test_a_mask_in_the_place_of_the_cache() -> None:
    with pytest.raises(ValueError, match=r"cache is Tensor: must be a nsa\.KVCache; a padding mask is attention_mask="):
        layer()(torch.randn(1, 40, 32), torch.ones(1, 40))  # type: ignore[arg-type]


def test_padding_behind_changes_nothing_and_other_padding_is_refused() -> None:
    module, x = layer(), torch.randn(2, 40, 32)
    mask = torch.ones(2, 40, dtype=torch.long)
    mask[1, 30:] = 0
    padded = module(x, attention_mask=mask)
    torch.testing.assert_close(padded[1:, :30], module(x[1:, :30]), rtol=0, atol=1e-5)
    for wrong in (mask.flip(1), torch.tensor([1, 0, 1]).repeat(2, 14)[:, :40]):
        with pytest.raises(ValueError, match=r"attention_mask has padding before a token, .*padding_side='right'"):
            module(x, attention_mask=wrong)
    with pytest.raises(ValueError, match=r"attention_mask has shape \(2, 1, 40, 40\): must be \(2, 40\)"):
        module(x, attention_mask=torch.zeros(2, 1, 40, 40))


def test_a_mask_with_a_cache_is_of_all_its_tokens() -> None:
    module, x = layer(), torch.randn(1, 40, 32)
    with torch.no_grad():
        cache = KVCache()
        module(x[:, :30], cache, attention_mask=torch.ones(1, 30))
        module(x[:, 30:35], cache, attention_mask=torch.ones(1, 35))
        padded = torch.ones(1, 40)
        padded[:, 33] = 0
        with pytest.raises(ValueError, match="attention_mask has padding before a token"):
            module(x[:, 35:], cache, attention_mask=padded)
