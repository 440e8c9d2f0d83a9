"""docs/hugging_face.md: its code runs, and the model does what others do. `nox -s hugging_face` installs transformers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

PAGE = Path(__file__).resolve().parents[2] / "docs" / "hugging_face.md"
SIZES = {"l": 8, "d": 4, "l_sel": 16, "n_sel": 4, "w": 16}
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # transformers' own


@pytest.fixture(scope="module")
def page() -> dict[str, Any]:
    """The names that the page's code defines."""
    pytest.importorskip("transformers", minversion="5")
    found = re.search(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)
    assert found is not None
    names: dict[str, Any] = {"__name__": "hugging_face"}
    exec(compile(found[1], str(PAGE), "exec"), names)
    return names


@pytest.fixture
def model(page: dict[str, Any]) -> torch.nn.Module:
    torch.manual_seed(0)
    model: torch.nn.Module = page["llama"](page["config"], **SIZES)
    return model


def generate(page: dict[str, Any], model: Any, tokens: torch.Tensor, *, cached: bool, **options: Any) -> torch.Tensor:
    given = {"cache": page["NSACache"](model.config)} if cached else {"use_cache": False}
    with torch.no_grad():
        found: torch.Tensor = model.eval().generate(
            tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=30, do_sample=False, pad_token_id=0,
            eos_token_id=None, **given, **options,
        )  # fmt: skip
    return found


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
def test_generation_with_a_cache_is_that_without(page: dict[str, Any], model: Any, options: dict[str, Any]) -> None:
    """Beams reorder the cache."""
    model.double()
    tokens = torch.randint(0, 256, (2, 40))
    cached = generate(page, model, tokens, cached=True, **options)
    assert cached.shape == (2, 70)
    assert torch.equal(cached, generate(page, model, tokens, cached=False, **options))
    assert len(cached[0, 40:].unique()) > 3, "a model that repeats one token would hide a wrong cache"


def test_each_parameter_learns_with_and_without_gradient_checkpointing(page: dict[str, Any], model: Any) -> None:
    tokens = torch.randint(0, 256, (2, 60))
    gradients = []
    for checkpointed in (False, True):
        if checkpointed:
            model.gradient_checkpointing_enable()
        model.train().zero_grad()
        model(tokens, labels=tokens, use_cache=False).loss.backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=0, atol=1e-6)
        assert gradient.abs().sum() > 0, name


def test_what_is_saved_is_loaded(page: dict[str, Any], model: Any, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    model.save_pretrained(tmp_path)
    other = page["llama"](page["config"], **SIZES)
    other.load_state_dict(load_file(tmp_path / "model.safetensors"))
    tokens = torch.randint(0, 256, (1, 50))
    with torch.no_grad():
        assert torch.equal(other.eval()(tokens).logits, model.eval()(tokens).logits)


def test_padding_before_a_token_is_refused_and_behind_it_is_not_seen(model: Any) -> None:
    tokens = torch.randint(0, 256, (2, 50))
    mask = torch.ones_like(tokens)
    mask[1, 40:] = 0
    with torch.no_grad():
        padded = model.eval()(tokens, attention_mask=mask).logits
        alone = model(tokens[1:, :40]).logits
        torch.testing.assert_close(padded[1:, :40], alone, rtol=0, atol=1e-5)
        with pytest.raises(ValueError, match="attention_mask has padding before a token"):
            model(tokens, attention_mask=mask.flip(1))
