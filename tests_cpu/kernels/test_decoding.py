"""Decoding with a cache equals the full forward: to 1e-10 in float64, 2e-5 in float32."""

from __future__ import annotations

import pytest
import torch

from nsa import KVCache, NSAAttention, build_model, load_config

SIZES = {"l": 8, "d": 4, "l_sel": 16, "n_sel": 4, "w": 24}


@pytest.mark.parametrize("compression", ["mean", "mlp"])
@pytest.mark.parametrize("steps", [[1] * 90, [70, *[1] * 20], [5, 45, 3, 37], [90]])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 2e-5)])
def test_a_layer(steps: list[int], compression: str, dtype: torch.dtype, tolerance: float) -> None:
    if dtype == torch.float32:  # where two blocks' importance differs by less than its rounding, either may be chosen
        torch.manual_seed(0)
    module = NSAAttention(32, 4, 2, 8, 6, **SIZES, compression=compression).to(dtype)
    x = torch.randn(2, 90, 32, dtype=dtype)
    cache = KVCache()
    with torch.no_grad():
        expected = module(x)
        found = [module(part, cache) for part in x.split(steps, 1)]
    assert cache.length == 90
    torch.testing.assert_close(torch.cat(found, 1), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("branch", ["cmp", "sel", "win"])
def test_a_forced_branch(branch: str) -> None:
    module = NSAAttention(32, 4, 2, 8, 8, **SIZES, force_branch=branch).double()  # type: ignore[arg-type]
    x = torch.randn(1, 80, 32, dtype=torch.float64)
    cache = KVCache()
    with torch.no_grad():
        found = torch.cat([module(part, cache) for part in x.split(1, 1)], 1)
        torch.testing.assert_close(found, module(x), rtol=0, atol=1e-10)


def test_the_model() -> None:
    config = load_config("configs/tiny_cpu.yaml")
    model = build_model(config).double().eval()
    tokens = torch.randint(0, config.model.vocab_size, (1, 70))
    caches = [KVCache() for _ in range(config.model.n_layers)]
    with torch.no_grad():
        found = torch.cat([model(part, caches) for part in (tokens[:, :60], *tokens[:, 60:].split(1, 1))], 1)
        torch.testing.assert_close(found, model(tokens), rtol=0, atol=1e-9)


def test_a_call_that_fails_leaves_the_caches_as_they_were() -> None:
    """The call fails in the second layer, when the first has taken the tokens into its cache."""
    config = load_config("configs/tiny_cpu.yaml")
    model = build_model(config).double().eval()
    tokens = torch.randint(0, config.model.vocab_size, (1, 70))
    caches = [KVCache() for _ in range(config.model.n_layers)]

    def fail(*_: object) -> None:
        raise MemoryError

    with torch.no_grad():
        model(tokens[:, :60], caches)
        hook = model.blocks[1].attn.out.register_forward_pre_hook(fail)
        with pytest.raises(MemoryError):
            model(tokens[:, 60:], caches)
        hook.remove()
        assert [cache.length for cache in caches] == [60] * len(caches)
        found = model(tokens[:, 60:], caches)
        torch.testing.assert_close(found, model(tokens)[:, 60:], rtol=0, atol=1e-9)


def test_gradients_are_refused() -> None:
    module = NSAAttention(32, 4, 2, 8, 8, **SIZES)
    with pytest.raises(RuntimeError, match=r"a KVCache keeps no gradients: decode under torch\.no_grad"):
        module(torch.randn(1, 4, 32), KVCache())


def test_prefill_in_inference_mode_and_decode_under_no_grad() -> None:
    module = NSAAttention(32, 4, 2, 8, 8, **SIZES).double()
    x = torch.randn(1, 60, 32, dtype=torch.float64)
    cache = KVCache()
    with torch.inference_mode():
        first = module(x[:, :50], cache)
    with torch.no_grad():
        found = torch.cat([first, *(module(part, cache) for part in x[:, 50:].split(1, 1))], 1)
        torch.testing.assert_close(found, module(x), rtol=0, atol=1e-10)
