"""Decoding with a cache equals the full forward: to 1e-10 in float64, 2e-5 in float32."""

import re

import pytest
import torch

from nsa import KVCache, NSAAttention, build_model, load_config, nsa_attention
from nsa.kernels.backends import BACKENDS
from nsa.model import decoding
from nsa.sizes import KV, Sizes
from tests_cpu.kernels.agreement import SCALE, large_scores

SIZES = Sizes(8, 4, 16, 4, 24)
SERVING = [n for n, row in BACKENDS.items() if not row.why_not(torch.float16, torch.device("cpu"), 32, 16)]


@pytest.mark.parametrize("compression", ["mean", "mlp"])
@pytest.mark.parametrize("steps", [[1] * 90, [70, *[1] * 20], [5, 45, 3, 37], [90]])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 2e-5)])
def test_a_layer(steps: list[int], compression: str, dtype: torch.dtype, tolerance: float) -> None:
    if dtype == torch.float32:  # where two blocks' importance differs by less than its rounding, either may be chosen
        torch.manual_seed(0)
    module = NSAAttention(32, 4, 2, 8, v_head_dim=6, **SIZES._asdict(), compression=compression).to(dtype)
    x = torch.randn(2, 90, 32, dtype=dtype)
    cache = KVCache()
    with torch.no_grad():
        expected = module(x)
        found = [module(part, cache) for part in x.split(steps, 1)]
    assert cache.length == 90
    torch.testing.assert_close(torch.cat(found, 1), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("compression", ["mean", "mlp"])
def test_tokens_are_taken_back(compression: str) -> None:
    """As in speculative decoding: seven tokens are proposed, some are kept, at every position in a block."""
    module = NSAAttention(32, 4, 2, 8, v_head_dim=6, **SIZES._asdict(), compression=compression).double()
    x, wrong = torch.randn(2, 90, 32, dtype=torch.float64), torch.randn(2, 7, 32, dtype=torch.float64)
    cache, at, found = KVCache(spare=7), 0, []
    with torch.no_grad():
        for step in range(200):
            if at == 90:
                break
            new = x[:, at : at + 1 + step % 7]
            found.append(module(new, cache))
            at += new.shape[1]
            module(wrong[:, : 1 + step % 5], cache)
            cache.crop(at + step % 2)
            cache.crop(at)
        expected = module(x)
    torch.testing.assert_close(torch.cat(found, 1), expected, rtol=0, atol=1e-10)
    assert cache.length == 90


def test_no_more_is_taken_back_than_the_cache_keeps() -> None:
    module = NSAAttention(32, 4, 2, 8, **SIZES._asdict())
    cache = KVCache(spare=3)
    with torch.no_grad():
        module(torch.randn(1, 40, 32), cache)
    cache.crop(38)
    for length, reason in (
        (36, r"the last 1 tokens can be taken back; for more, KVCache\(spare=2\)"),
        (41, "give 0 to 38"),
    ):
        with pytest.raises(ValueError, match=rf"crop\({length}\): .*{reason}"):
            cache.crop(length)
    with pytest.raises(ValueError, match="spare=-1: must be 0 or a number of tokens"):
        KVCache(spare=-1)


def test_sequences_are_reordered_repeated_and_left_out() -> None:
    module = NSAAttention(32, 4, 2, 8, **SIZES._asdict()).double()
    x, index = torch.randn(3, 60, 32, dtype=torch.float64), torch.tensor([2, 0, 0, 2])
    cache = KVCache()
    with torch.no_grad():
        module(x[:, :41], cache)
        cache.reorder(index)
        found = module(x[index, 41:], cache)
        torch.testing.assert_close(found, module(x[index])[:, 41:], rtol=0, atol=1e-10)
    with pytest.raises(ValueError, match=r"index: must be int32 or int64 of one dimension, got torch.int16 \[1\]"):
        cache.reorder(torch.zeros(1, dtype=torch.int16))


def test_another_batch_than_the_caches_is_refused() -> None:
    module, cache, x = NSAAttention(32, 4, 2, 8, **SIZES._asdict()), KVCache(), torch.randn(3, 50, 32)
    with torch.no_grad():
        module(x[:2, :40], cache)
        for batch in (1, 3):
            with pytest.raises(ValueError, match=rf"x has batch {batch}: the cache has 2 sequences; cache\.reorder"):
                module(x[:batch, 40:], cache)
        found = module(x[:2, 40:], cache)
        torch.testing.assert_close(found, module(x[:2])[:, 40:], rtol=0, atol=2e-5)


def test_caches_that_no_call_has_filled_alike_are_refused() -> None:
    model = build_model(load_config("configs/tiny_cpu.yaml")).eval()
    tokens = torch.zeros(1, 20, dtype=torch.int64)
    caches = [KVCache() for _ in model.blocks]
    with torch.no_grad():
        with pytest.raises(ValueError, match="caches has the same KVCache twice: each layer needs its own"):
            model(tokens, [caches[0]] * len(caches))
        model(tokens, caches)
        caches[3] = KVCache()
        with pytest.raises(ValueError, match="caches: some have seen more tokens than others"):
            model(tokens, caches)


def test_gradients_are_refused() -> None:
    module = NSAAttention(32, 4, 2, 8, **SIZES._asdict())
    with pytest.raises(RuntimeError, match=r"a KVCache keeps no gradients: decode under torch\.no_grad"):
        module(torch.randn(1, 4, 32), KVCache())


def test_prefill_in_inference_mode_and_decode_under_no_grad() -> None:
    module = NSAAttention(32, 4, 2, 8, **SIZES._asdict()).double()
    x = torch.randn(1, 60, 32, dtype=torch.float64)
    cache = KVCache()
    with torch.inference_mode():
        first = module(x[:, :50], cache)
    with torch.no_grad():
        found = torch.cat([first, *(module(part, cache) for part in x[:, 50:].split(1, 1))], 1)
        torch.testing.assert_close(found, module(x), rtol=0, atol=1e-10)


@pytest.mark.parametrize("backend", SERVING)
def test_a_prompt_s_scores_beyond_float16(backend: str) -> None:
    sizes, inputs, wanted = large_scores(90, torch.float16)
    found = nsa_attention(*inputs, sizes=sizes, scale=SCALE, backend=backend)
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=4e-3)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, 4e-3), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("tokens", [1, 16, decoding.QUERIES + 5])
@pytest.mark.parametrize("under_autocast", [False, True])
def test_new_tokens_scores_beyond_float16(
    tokens: int, dtype: torch.dtype, tolerance: float, under_autocast: bool
) -> None:
    """In one part and in two: q k^T is larger than float16's largest number before it is scaled."""
    S = 50 + tokens
    sizes, inputs, wanted = large_scores(S, dtype)
    q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, gates = inputs
    win = KV(k_win, v_win).between(50 - (sizes.window - 1), S)
    with torch.no_grad(), torch.autocast("cpu", dtype, enabled=under_autocast):
        found = decoding.attend_gated(
            q[:, 50:], KV(k_cmp, v_cmp), KV(k_sel, v_sel), win, gates[:, 50:], 50, sizes, scale=SCALE, backend="auto"
        )
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), wanted[:, 50:], rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({"window": 32}, "window=24 (here 32)"),
        ({"compress_block": 16}, "compress_block=8 (here 16)"),
        ({"head_dim": 4}, "head_dim=8 (here 4)"),
        ({"n_kv_heads": 1}, "n_kv_heads=2 (here 1)"),
    ],
)
def test_a_cache_serves_the_layer_that_filled_it(other: dict[str, int], named: str) -> None:
    shape = {"n_kv_heads": 2, "head_dim": 8, "v_head_dim": 8, **SIZES._asdict()}
    first, second = NSAAttention(32, 4, **shape), NSAAttention(32, 4, **{**shape, **other})
    cache, x = KVCache(), torch.randn(1, 60, 32)
    with torch.no_grad():
        first(x[:, :50], cache)
        with pytest.raises(ValueError, match=re.escape(f"cache: is of a layer with {named}")):
            second(x[:, 50:], cache)
        torch.testing.assert_close(first(x[:, 50:], cache), first(x)[:, 50:], rtol=0, atol=1e-5)
