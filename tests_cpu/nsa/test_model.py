"""The model's parameters, by name and number; recomputation changes no gradient."""

from pathlib import Path

import pytest
import torch

from nsa import KVCache, build_model, load_config
from nsa.config import Config, ModelConfig

CONFIGS = Path(__file__).resolve().parents[2] / "configs"


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda p: p.stem)
def test_identity(path: Path) -> None:
    with torch.device("meta"):
        model = build_model(load_config(path))
    names = [name for name, _ in model.named_parameters()]
    assert len(names) == 195
    assert names[192] == "blocks.11.mlp.fc2.weight"
    assert [n for n in names if n.startswith("blocks.4.attn.gate")]
    assert len([n for n in names if n.startswith("blocks.4.")]) == 16


def test_production_has_125_million_parameters() -> None:
    with torch.device("meta"):
        model = build_model(load_config(CONFIGS / "m7c_125m_2xa100_production.yaml"))
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(125e6, rel=0.01)


def gradients(**overrides: object) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = build_model(load_config(CONFIGS / "tiny_cpu.yaml", **overrides))
    tokens = torch.arange(100).reshape(1, 100) * 7 % 256
    logits = model(tokens)
    assert logits.shape == (1, 100, 256)
    logits.float().logsumexp(-1).mean().backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("gc_range", ["0:12", "0:6", "6:12"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_gives_the_same_gradients(gc_range: str, reentrant: bool) -> None:
    plain = gradients(gradient_checkpointing=False)
    recomputed = gradients(gradient_checkpointing=True, gc_range=gc_range, gc_reentrant=reentrant)
    assert len(plain) == len(recomputed) == 195
    for a, b in zip(plain, recomputed, strict=True):
        assert torch.equal(a, b)


def test_only_the_named_layers_recompute() -> None:
    model = build_model(load_config(CONFIGS / "tiny_cpu.yaml", gc_range="2:5"))
    runs = dict.fromkeys(range(12), 0)
    for index, block in enumerate(model.get_submodule("blocks").children()):
        block.register_forward_pre_hook(lambda module, args, i=index: runs.__setitem__(i, runs[i] + 1))
    model(torch.zeros(1, 64, dtype=torch.long)).sum().backward()
    assert runs == {i: 2 if 2 <= i < 5 else 1 for i in range(12)}


@torch.no_grad()
def test_the_cache_changes_no_token() -> None:
    """The likeliest tokens, one by one with the cache, are those of the whole text read again each time."""
    torch.manual_seed(3)
    model = build_model(
        Config(model=ModelConfig(n_layers=2, vocab_size=50, dim=32, n_heads=4, n_kv_heads=2, head_dim=8, v_head_dim=8))
    ).eval()
    whole = tokens = torch.randint(0, 50, (1, 21))
    caches = [KVCache(), KVCache()]
    for _ in range(30):
        token = model(tokens, caches)[:, -1:].argmax(-1)
        assert torch.equal(model(whole)[:, -1:].argmax(-1), token)
        whole, tokens = torch.cat((whole, token), 1), token
