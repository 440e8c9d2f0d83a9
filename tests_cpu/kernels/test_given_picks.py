"""The selected branch over blocks that a caller picked, against float64 by the equations: every backend honours any mask."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import nsa
from nsa import Sizes
from nsa.kernels import blocks, reference
from tests_cpu.kernels.given_masks import masks
from tests_cpu.kernels.test_truth import TOLERANCE, compare, in_small_pieces, leaves

examples = settings(max_examples=25, deadline=None, database=None, suppress_health_check=list(HealthCheck))


@pytest.mark.parametrize("kind", ["some", "few, and none", "the first alone", "later ones, too"])
@pytest.mark.parametrize("backend", ["reference", "sdpa", "cpu"])
@pytest.mark.parametrize("S", [40, 300])  # the cpu backend has another way from 257 tokens on
def test_a_mask_is_honoured(S: int, backend: str, kind: str) -> None:
    inputs, exact = leaves(torch.float32, (2, S, 4, 16), (2, S, 2, 16), (2, S, 2, 8))
    chosen = masks(2, S, 2, 32)[kind]
    wanted = reference.selected(*exact, chosen, l_sel=32, n_sel=3, scale=0.25)
    found = nsa.selected_attention(*inputs, chosen, select_block=32, backend=backend)
    compare(found, wanted, inputs, exact)


@examples
@given(
    z=st.fixed_dictionaries({
        "S": st.integers(1, 120), "G": st.integers(1, 2), "h": st.integers(1, 3), "l_sel": st.integers(1, 40),
        "n": st.integers(0, 5), "dtype": st.sampled_from(list(TOLERANCE)), "seed": st.integers(0, 1 << 30),
    }),
)  # fmt: skip
def test_numbers_are_the_mask_that_they_name(z: dict[str, Any]) -> None:
    """Also twice the same, below zero, after a query's own block, and more than there are."""
    torch.manual_seed(z["seed"])
    S, G, l_sel = z["S"], z["G"], z["l_sel"]
    n_blocks = blocks.num_selection(S, l_sel)
    inputs, exact = leaves(z["dtype"], (1, S, G * z["h"], 8), (1, S, G, 8), (1, S, G, 4))
    picks = torch.randint(-2, n_blocks + 3, (1, S, G, z["n"]))
    chosen = torch.stack([(picks == j).any(-1) for j in range(n_blocks)], -1)
    with pytest.MonkeyPatch.context() as monkeypatch:
        in_small_pieces(monkeypatch)
        found = nsa.selected_attention(*inputs, picks, select_block=l_sel, scale=0.3, backend="cpu")
        compare(found, reference.selected(*exact, chosen, l_sel=l_sel, n_sel=1, scale=0.3), inputs, exact)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int32])
def test_picks_of_narrow_numbers_among_more_blocks_than_these_hold(dtype: torch.dtype) -> None:
    q, k, v = torch.randn(1, 300, 2, 8), torch.randn(1, 300, 1, 8), torch.randn(1, 300, 1, 8)
    picks = torch.randint(0, 128, (1, 300, 1, 3))
    wanted = nsa.selected_attention(q, k, v, picks, select_block=1)
    assert torch.equal(nsa.selected_attention(q, k, v, picks.to(dtype), select_block=1), wanted)


def test_the_selection_of_the_layer_gives_its_branch() -> None:
    """The three public parts, compression, selection and given picks, are what `nsa_attention` does with the gate of one branch."""
    S, sizes = 150, Sizes(8, 4, 16, 4, 16)
    q, k, v = torch.randn(2, S, 4, 16), torch.randn(2, S, 2, 16), torch.randn(2, S, 2, 8)
    k_cmp, v_cmp = (nsa.compress(x, compress_block=8, compress_stride=4) for x in (k, v))
    gates = torch.tensor([0.0, 1.0, 0.0]).expand(2, S, 4, 3)
    whole = nsa.nsa_attention(q, k_cmp, v_cmp, k, v, k, v, gates, sizes=sizes)
    _, importance = reference.compressed(q, k_cmp, v_cmp, l=8, d=4, l_sel=16, scale=0.25)
    chosen = blocks.select(importance, 16, 4)
    torch.testing.assert_close(nsa.selected_attention(q, k, v, chosen, select_block=16), whole, rtol=0, atol=1e-5)


def test_compression_is_the_mean_of_each_block_and_of_one_sequence() -> None:
    x = torch.randn(1, 50, 2, 3, dtype=torch.float64)
    ends = [0, 5, 5, 31, 50]
    firsts = [f for a, b in pairwise(ends) for f in range(a, b - 8 + 1, 4)]
    packed = torch.stack([x[:, f : f + 8].mean(1) for f in firsts], 1)
    torch.testing.assert_close(nsa.compress(x, compress_block=8, compress_stride=4, cu_seqlens=ends), packed)
    one = torch.stack([x[:, f : f + 8].mean(1) for f in range(0, 43, 4)], 1)
    torch.testing.assert_close(nsa.compress(x, compress_block=8, compress_stride=4), one)
    assert nsa.compress(x[:, :7], compress_block=8, compress_stride=4).shape == (1, 0, 2, 3)


@pytest.mark.parametrize(
    ("picks", "message"),
    [
        (
            torch.zeros(1, 20, 2, dtype=torch.int64),
            r"picks has shape \(1, 20, 2\): must be \(1, 20, 2\) and the picks of each",
        ),
        (torch.zeros(1, 20, 2, 3), r"picks is torch\.float32: must be whole numbers of blocks, or bool"),
        (torch.zeros(1, 20, 2, 4, dtype=torch.bool), r"picks is a mask of 4 blocks: S=20 has 3 of select_block=8"),
    ],
)
def test_picks_that_do_not_fit_are_named(picks: torch.Tensor, message: str) -> None:
    q, k = torch.randn(1, 20, 4, 8), torch.randn(1, 20, 2, 8)
    with pytest.raises(ValueError, match=message):
        nsa.selected_attention(q, k, k, picks, select_block=8)


# docs/kernels.md has this table: the first output that a NaN in a later key of a branch changes, and the token of that key.
REACHES = {
    "reference": {"k_sel": 40, "k_win": 40, "k_cmp": 55},
    "sdpa": {"k_sel": 0, "k_win": 32, "k_cmp": 55},
    "cpu": {"k_sel": 0, "k_win": 0, "k_cmp": 7},
}


@pytest.mark.parametrize("backend", ["reference", "sdpa", "cpu"])
def test_what_a_nan_in_a_later_key_reaches(backend: str) -> None:
    sizes = Sizes(8, 4, 16, 4, 16)
    S = 70
    names = ("q", "k_cmp", "v_cmp", "k_sel", "v_sel", "k_win", "v_win")
    lengths = (S, 16, 16, S, S, S, S)
    given = {n: torch.randn(1, length, 4 if n == "q" else 2, 16) for n, length in zip(names, lengths, strict=True)}
    given["gates"] = torch.rand(1, S, 4, 3)
    plain = nsa.nsa_attention(**given, sizes=sizes, backend=backend)
    reached = {}
    for name, at in (("k_sel", 40), ("k_win", 40), ("k_cmp", 12)):  # block 12 ends at token 55
        harmed = {n: x.clone() for n, x in given.items()}
        harmed[name][:, at] = float("nan")
        changed = (nsa.nsa_attention(**harmed, sizes=sizes, backend=backend) != plain).flatten(2).any(-1)[0]
        reached[name] = int(changed.nonzero()[0])
    assert reached == REACHES[backend]
