"""NSA in a Hugging Face Llama: `NSALlamaConfig`, `NSALlamaForCausalLM`, and the layers of its cache.

Needs transformers from 5.24 on. What Hugging Face offers and NSA has not raises ValueError in one of the two functions that begin
with ``refuse``; nothing is dropped.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from transformers import AttentionInterface, AttentionMaskInterface, AutoConfig, AutoModelForCausalLM, LlamaConfig
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.models.llama.modeling_llama import LlamaForCausalLM, LlamaModel

from nsa.model.attention import NSAAttention
from nsa.model.decoding import KVCache
from nsa.sizes import Sizes

SPARE = 256  # tokens that speculative decoding can take back
# Further arguments of `forward`.
UNDERSTOOD = {
    "output_hidden_states",
    "return_dict",
    "num_items_in_batch",
    "max_length_q",
    "max_length_k",
    "cu_seq_lens_k",
}


@strict
class NSALlamaConfig(LlamaConfig):
    """A Llama's configuration with the sizes of `nsa.Sizes`, ``compression`` ('mean' or 'mlp') and the backend of the attention."""

    model_type = "nsa_llama"
    base_model_tp_plan = None

    compress_block: int = 32
    compress_stride: int = 16
    select_block: int = 64
    n_select: int = 16
    window: int = 512
    compression: str = "mean"
    gate_hidden: int | None = None
    backend: str = "auto"
    layer_types: list[str] | None = None

    def __post_init__(self, **others: Any) -> None:
        self.layer_types = [NSACacheLayer._layer_type] * self.num_hidden_layers
        super().__post_init__(**others)

    def validate_layer_type(self) -> None:
        """No-op: Hugging Face's list of types of layers has none of other packages."""


def _refusing(name: str) -> Callable[..., Any]:
    """Return a method that raises ValueError: NSA has three branches of keys and values, which stay on their device."""

    def refuse(self: Any, *_: Any, **__: Any) -> Any:
        raise ValueError(
            f"{name}: a cache of NSA has no keys and values that Hugging Face can read; the layer fills it"
        )

    return refuse


class NSACacheLayer(CacheLayerMixin):
    """A KVCache as a layer of Hugging Face's `DynamicCache`, which makes one for each layer of a model of `NSALlamaConfig`."""

    _layer_type = "nsa"
    is_compileable = False
    is_croppable = True
    is_sliding = False
    supports_early_init = False

    def __init__(self, **_: Any) -> None:
        super().__init__()
        self.kv = KVCache()

    lazy_initialization, update = _refusing("lazy_initialization"), _refusing("update")
    offload, prefetch = _refusing("offload"), _refusing("prefetch")

    def get_seq_length(self) -> int:
        """Return the number of tokens seen."""
        return self.kv.length

    def get_max_length(self) -> int:
        """Return -1: it grows."""
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return how many tokens a mask has, and 0."""
        return self.kv.length + query_length, 0

    def reset(self) -> None:
        """Forget every token."""
        self.kv = KVCache(spare=self.kv.spare)

    def activate_past_recording(self) -> None:
        """Keep what `crop` needs to take back tokens that come from now on."""
        self.kv.spare = max(self.kv.spare, SPARE)

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last ``-tokens_to_remove`` tokens. ValueError for more than are kept."""
        if tokens_to_remove > 0:
            raise ValueError(f"crop({tokens_to_remove}): give a number below zero, of the tokens to take back")
        self.kv.crop(self.kv.length + tokens_to_remove)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Make sequence i the former ``beam_idx[i]``."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence."""
        if self.kv.length:
            self.kv.reorder(torch.arange(self.kv.batch, device=self.kv.device).repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep these sequences, in this order."""
        if self.kv.length:
            self.kv.reorder(indices.to(self.kv.device))


class NSALlamaAttention(NSAAttention):
    """In the place of LlamaAttention. The model checks its arguments."""

    def __init__(self, config: NSALlamaConfig, layer_idx: int) -> None:
        sizes = {name: getattr(config, name) for name in Sizes._fields}
        super().__init__(
            config.hidden_size, config.num_attention_heads, config.num_key_value_heads, config.head_dim, **sizes,
            compression=config.compression, gate_hidden=config.gate_hidden, backend=config.backend,
            rope_theta=config.rope_parameters["rope_theta"],
        )  # fmt: skip
        self.layer_idx = layer_idx

    def forward(  # type: ignore[override]
        self, hidden_states: torch.Tensor, cache: Cache | None = None, cu_seqlens: list[int] | None = None, **_: Any
    ) -> tuple[torch.Tensor, None]:
        """Return the output [B, S, dim], and None for the attention's weights."""
        kv = None if cache is None else cache.layers[self.layer_idx].kv
        return super().forward(hidden_states, kv, cu_seqlens), None


class NSALlamaModel(LlamaModel):
    """A Llama with NSA in each layer. Its `forward` raises ValueError for arguments that NSA would drop."""

    config_class = NSALlamaConfig

    def __init__(self, config: NSALlamaConfig) -> None:
        refuse_config(config)
        config._attn_implementation = "nsa"
        super().__init__(config)
        for index, layer in enumerate(self.layers):
            layer.self_attn = NSALlamaAttention(config, index)

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        **others: Any,
    ) -> Any:
        """As LlamaModel's. Positions that begin again in a batch of one are packed sequences, of which none sees another."""
        given = input_ids if input_ids is not None else inputs_embeds
        if given is None:
            raise ValueError("give input_ids or inputs_embeds")
        cu_seqlens = refuse_arguments(given.shape[0], given.shape[1], attention_mask, position_ids, cache, others)
        if use_cache is None and cache is None and torch.is_grad_enabled():
            use_cache = False  # a cache keeps no gradients
        return super().forward(
            input_ids=input_ids, cache=cache, inputs_embeds=inputs_embeds, use_cache=use_cache, cu_seqlens=cu_seqlens,
            **others,
        )  # fmt: skip


class NSALlamaForCausalLM(LlamaForCausalLM):
    """A Llama with NSA that generates: `generate`, `save_pretrained` and `from_pretrained` as Llama's."""

    config_class = NSALlamaConfig

    def __init__(self, config: NSALlamaConfig) -> None:
        refuse_config(config)
        config._attn_implementation = "nsa"
        super(LlamaForCausalLM, self).__init__(config)  # not Llama's, which makes a dense model
        self.model, self.vocab_size = NSALlamaModel(config), config.vocab_size
        self.lm_head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def _prepare_cache_for_generation(self, generation_config: Any, *others: Any, **more: Any) -> Any:
        kind = generation_config.cache_implementation
        if kind not in (None, "dynamic"):
            raise ValueError(f"cache_implementation={kind!r}: NSA has a dynamic cache alone; unset it")
        return super()._prepare_cache_for_generation(generation_config, *others, **more)

    @classmethod
    def from_llama(cls, dense: LlamaForCausalLM, **sizes: Any) -> NSALlamaForCausalLM:
        """Return a model with the weights of a dense Llama. Each branch begins with its projections; the gate is new.

        ``sizes``: fields of `NSALlamaConfig`. The model has to be trained on before it is of use.
        """
        fields = {
            name: value for name, value in dense.config.to_dict().items() if name not in ("model_type", "layer_types")
        }
        model = cls(NSALlamaConfig(**{**fields, **sizes})).to(dense.dtype)
        state = dense.state_dict()
        starts = {
            "w_q": "q_proj",
            "out": "o_proj",
            **{f"{x}_{b}": f"{x}_proj" for x in "kv" for b in ("cmp", "sel", "win")},
        }
        for index, name in itertools.product(range(model.config.num_hidden_layers), starts):
            prefix = f"model.layers.{index}.self_attn"
            state[f"{prefix}.{name}.weight"] = state[f"{prefix}.{starts[name]}.weight"]
        known = model.state_dict().keys()
        model.load_state_dict({name: x for name, x in state.items() if name in known}, strict=False)
        return model


def refuse_config(config: Any) -> None:
    """Raise ValueError for a configuration of which NSA would drop a part."""
    rope, asked = config.rope_parameters or {}, config._attn_implementation
    found = {
        "rope_parameters": rope.get("rope_type", "default") != "default"
        or rope.get("partial_rotary_factor", 1.0) != 1.0,
        "attention_dropout": bool(config.attention_dropout),
        "attention_bias": config.attention_bias,
        "attn_implementation": asked not in (None, "nsa"),
    }
    for name, is_refused in found.items():
        if is_refused:
            value = asked if name == "attn_implementation" else getattr(config, name)
            raise ValueError(f"{name}={value!r}: NSA has no such attention; set its default")


def refuse_padding(attention_mask: torch.Tensor, batch: int, tokens: int) -> None:
    """Raise ValueError for a mask [B, S] with padding before a token: it would be attended to, compressed and selected.

    Padding behind the last token is seen by no token before it.
    """
    if tuple(attention_mask.shape) != (batch, tokens):
        raise ValueError(
            f"attention_mask has shape {tuple(attention_mask.shape)}: must be {(batch, tokens)}, [batch, tokens]"
        )
    is_token = attention_mask.bool()
    if bool((is_token[:, 1:] & ~is_token[:, :-1]).any()):
        raise ValueError(
            "attention_mask has padding before a token, which would be attended to: pad at the end (padding_side='right'), "
            "or pack the sequences with cu_seqlens"
        )


def refuse_arguments(
    batch: int,
    tokens: int,
    mask: torch.Tensor | None,
    positions: torch.Tensor | None,
    cache: Any,
    others: dict[str, Any],
) -> list[int] | None:
    """Return the ends of packed sequences, None without; others [batch, tokens] are read on the host, once for all layers.

    Raises ValueError for what NSA would drop: a foreign cache, padding before a token, positions that are not those of the tokens,
    and arguments that it does not know.
    """
    lengths = others.pop("cu_seq_lens_q", None)
    unknown = sorted(
        name for name, value in others.items() if name not in UNDERSTOOD and value is not None and value is not False
    )
    if unknown:
        raise ValueError(f"{unknown[0]}: NSA has no use for it, and would drop what it means; remove it")
    layers = getattr(cache, "layers", [])
    if cache is not None and not (layers and all(isinstance(layer, NSACacheLayer) for layer in layers)):
        raise ValueError(
            f"cache is {type(cache).__name__} without NSA's layers: give DynamicCache(config=model.config), or none"
        )
    seen = 0 if cache is None else cache.get_seq_length()
    if mask is not None:
        refuse_padding(mask, batch, seen + tokens)
    if positions is None:
        return None if lengths is None else [int(end) for end in lengths]
    rows = positions.expand(batch, -1).tolist()
    wanted = list(range(seen, seen + tokens))
    real = [tokens] * batch if mask is None else [n - seen for n in mask.bool().sum(-1).tolist()]
    if all(row[:n] == wanted[:n] for row, n in zip(rows, real, strict=True)):
        return None
    starts = [i for i, position in enumerate(rows[0]) if position == 0]
    ends = [*starts, tokens]
    is_pack = (
        batch == 1
        and not seen
        and ends[0] == 0
        and rows[0] == [p for a, b in itertools.pairwise(ends) for p in range(b - a)]
    )
    if not is_pack or mask is not None:
        raise ValueError(
            f"position_ids: must be {seen} to {seen + tokens - 1} in each row; or, in a batch of one without "
            "mask and cache, begin at 0 in each packed sequence"
        )
    return ends


def _no_mask(*_: Any, **__: Any) -> None:
    """Return None: a layer of NSA is given no mask."""


# A new name, so that no mask of pairs of tokens is made.
AttentionInterface.register("nsa", _no_mask)
AttentionMaskInterface.register("nsa", _no_mask)
AutoConfig.register(NSALlamaConfig.model_type, NSALlamaConfig)
AutoModelForCausalLM.register(NSALlamaConfig, NSALlamaForCausalLM)
