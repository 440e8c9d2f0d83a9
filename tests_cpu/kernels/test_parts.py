"""The compression alone, and how far a NaN reaches."""

from itertools import pairwise

import pytest
import torch

import nsa
from nsa import Sizes


def test_compression_is_the_mean_of_each_block_and_of_one_sequence() -> None:
    x = torch.randn(1, 50, 2, 3, dtype=torch.float64)
    ends = [0, 5, 5, 31, 50]
    firsts = [f for a, b in pairwise(ends) for f in range(a, b - 8 + 1, 4)]
    packed = torch.stack([x[:, f : f + 8].mean(1) for f in firsts], 1)
    torch.testing.assert_close(nsa.compress(x, compress_block=8, compress_stride=4, cu_seqlens=ends), packed)
    one = torch.stack([x[:, f : f + 8].mean(1) for f in range(0, 43, 4)], 1)
    torch.testing.assert_close(nsa.compress(x, compress_block=8, compress_stride=4), one)
    assert nsa.compress(x[:, :7], compress_block=8, compress_stride=4).shape == (1, 0, 2, 3)


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
