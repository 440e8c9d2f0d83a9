"""nsa.hugging_face: what `generate` and `forward` do equals generation without a cache, or is refused. `nox -s hugging_face`."""

import inspect
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.24")

from nsa.hugging_face import NSACacheLayer, NSALlamaConfig, NSALlamaForCausalLM  # noqa: E402

PAGE = Path(__file__).resolve().parents[2] / "docs" / "hugging_face.md"
SIZES = {"compress_block": 8, "compress_stride": 4, "select_block": 16, "n_select": 4, "window": 16}
LLAMA: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # transformers' own


@pytest.fixture
def model() -> Any:
    torch.manual_seed(0)
    return NSALlamaForCausalLM(NSALlamaConfig(**LLAMA, **SIZES)).double().eval()


def tokens(batch: int, length: int) -> torch.Tensor:
    return torch.randint(1, 256, (batch, length), generator=torch.Generator().manual_seed(1))


def generated(model: Any, prompt: torch.Tensor, **options: Any) -> torch.Tensor:
    torch.manual_seed(3)
    fixed: dict[str, Any] = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 30, "do_sample": False}
    with torch.no_grad():
        found: torch.Tensor = model.generate(prompt, **{**fixed, **options})
    return found


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_beams": 3},
        {"do_sample": True, "num_return_sequences": 2},
        {"prefill_chunk_size": 16},
        {"cache": None},
        {"prompt_lookup_num_tokens": 5},
    ],
    ids=["plain", "beams", "samples", "prefill in chunks", "own cache", "speculative"],
)
def test_generation_equals_that_without_a_cache(model: Any, options: dict[str, Any]) -> None:
    prompt = tokens(2, 40)
    if "prompt_lookup_num_tokens" in options:
        prompt = prompt[:1].repeat(1, 2)  # repeats itself, so that candidates are found and rejected
    if "cache" in options:
        options = {"cache": transformers.DynamicCache(config=model.config)}
    without = {
        name: value for name, value in options.items() if name in ("num_beams", "do_sample", "num_return_sequences")
    }
    wanted = generated(model, prompt, **without, use_cache=False)
    assert torch.equal(generated(model, prompt, **options), wanted)
    assert len(wanted[0, prompt.shape[1] :].unique()) > 3, "a model that repeats one token would hide a wrong cache"


def test_a_cache_is_fed_each_token_once(model: Any) -> None:
    fed: list[int] = []
    model.model.layers[0].self_attn.register_forward_pre_hook(
        lambda _, __, given: fed.append(given["hidden_states"].shape[1]), with_kwargs=True
    )
    generated(model, tokens(1, 40), max_new_tokens=5)
    assert fed == [40, 1, 1, 1, 1]


def test_positions_that_begin_again_are_packed_sequences(model: Any) -> None:
    x, ends = tokens(1, 90), [0, 50, 90]
    positions = torch.cat([torch.arange(b - a) for a, b in pairwise(ends)])[None]
    with torch.no_grad():
        packed = model(x, position_ids=positions, use_cache=False).logits
        by_lengths = model(x, cu_seq_lens_q=torch.tensor(ends), use_cache=False).logits
        alone = torch.cat([model(x[:, a:b]).logits for a, b in pairwise(ends)], 1)
    torch.testing.assert_close(packed, alone, rtol=0, atol=1e-10)
    torch.testing.assert_close(by_lengths, alone, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"position_ids": torch.arange(100, 150)[None]}, "position_ids: must be 0 to 49"),
        ({"position_ids": torch.arange(50).flip(0)[None]}, "position_ids: must be 0 to 49"),
        ({"attention_mask": (torch.arange(50) > 9).long()[None]}, "attention_mask has padding before a token"),
        ({"cache": transformers.DynamicCache()}, "cache is DynamicCache without NSA's layers"),
        ({"output_attentions": True}, "output_attentions: NSA has no use for it"),
        ({"seq_idx": torch.zeros(1, 50)}, "seq_idx: NSA has no use for it"),
    ],
)
def test_arguments_that_would_be_dropped_are_refused(model: Any, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)), torch.no_grad():
        model(tokens(1, 50), **given)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}, "rope_parameters="),
        ({"attention_dropout": 0.1}, "attention_dropout="),
        ({"attention_bias": True}, "attention_bias="),
        ({"attn_implementation": "flash_attention_2"}, "attn_implementation='flash_attention_2'"),
    ],
)
def test_a_configuration_of_which_a_part_would_be_dropped_is_refused(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=re.escape(named)):
        NSALlamaForCausalLM(NSALlamaConfig(**LLAMA, **SIZES, **fields))


@pytest.mark.parametrize("kind", ["static", "offloaded"])
def test_another_kind_of_cache_is_refused(model: Any, kind: str) -> None:
    with pytest.raises(ValueError, match="NSA has a dynamic cache alone"):
        generated(model, tokens(1, 40), cache_implementation=kind)


def test_every_public_method_of_a_layer_of_a_cache_is_defined() -> None:
    """One that is inherited would act on keys and values that are not there."""
    replaced = transformers.cache_utils.DynamicLayer
    public = {
        name for name in dir(replaced) if not name.startswith("_") and callable(inspect.getattr_static(replaced, name))
    }
    public |= {"activate_past_recording"}
    assert public - vars(NSACacheLayer).keys() == set()


def test_what_a_cache_takes_back_and_repeats(model: Any) -> None:
    x = tokens(2, 60)
    with torch.no_grad():
        cache = transformers.DynamicCache(config=model.config)
        cache.activate_past_recording()
        model(x[:1, :50], cache=cache)
        cache.batch_repeat_interleave(2)
        cache.crop(-10)
        found = model(x[:, 40:].clone(), cache=cache).logits
        wanted = model(torch.cat([x[:1, :40].expand(2, -1), x[:, 40:]], 1)).logits[:, 40:]
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-10)
        cache.reset()
        torch.testing.assert_close(model(x, cache=cache).logits, model(x).logits, rtol=0, atol=1e-10)


def test_each_parameter_learns_with_and_without_gradient_checkpointing(model: Any) -> None:
    x, gradients = tokens(2, 60), []
    for checkpointed in (False, True):
        if checkpointed:
            model.gradient_checkpointing_enable()
        model.train().zero_grad()
        model(x, labels=x).loss.backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=0, atol=1e-10)
        assert gradient.abs().sum() > 0, name


@pytest.mark.parametrize("kind", [NSALlamaForCausalLM, transformers.AutoModelForCausalLM])
def test_what_is_saved_is_loaded(model: Any, tmp_path: Path, kind: Any) -> None:
    model.save_pretrained(tmp_path)
    other = kind.from_pretrained(tmp_path, dtype=torch.float64)
    x = tokens(1, 50)
    with torch.no_grad():
        assert torch.equal(other.eval()(x).logits, model(x).logits)


def test_the_window_of_all_tokens_with_a_dense_llamas_weights_is_that_llama() -> None:
    torch.manual_seed(0)
    dense = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA)).double().eval()
    model = NSALlamaForCausalLM.from_llama(dense, **{**SIZES, "window": 100}).eval()
    for layer in model.model.layers:
        layer.self_attn.force_branch = "win"
    x = tokens(1, 60)
    with torch.no_grad():
        torch.testing.assert_close(model(x).logits, dense(x).logits, rtol=0, atol=1e-6)


def test_padding_behind_a_sequence_is_not_seen(model: Any) -> None:
    x, mask = tokens(2, 50), torch.ones(2, 50, dtype=torch.long)
    mask[1, 40:] = 0
    with torch.no_grad():
        torch.testing.assert_close(
            model(x, attention_mask=mask).logits[1:, :40], model(x[1:, :40]).logits, rtol=0, atol=1e-10
        )


def test_the_page_runs() -> None:
    for code in re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S):
        exec(compile(code, str(PAGE), "exec"), {"__name__": "hugging_face"})
