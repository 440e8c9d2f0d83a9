"""Native Sparse Attention (arXiv 2502.11089): a transformer, its kernels, its training and its tracers.

Names are resolved on first use, so that ``import nsa.trace`` costs nothing else.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nsa.config import Config, ConfigError, load_config
    from nsa.kernels.compression import compress
    from nsa.kernels.dispatch import explain, nsa_attention, reference_attention
    from nsa.model.attention import NSAAttention
    from nsa.model.decoding import KVCache
    from nsa.model.transformer import NSATransformer, build_model
    from nsa.sizes import Sizes

_WHERE = {
    "Config": "nsa.config",
    "ConfigError": "nsa.config",
    "load_config": "nsa.config",
    "KVCache": "nsa.model.decoding",
    "NSAAttention": "nsa.model.attention",
    "NSATransformer": "nsa.model.transformer",
    "Sizes": "nsa.sizes",
    "build_model": "nsa.model.transformer",
    "compress": "nsa.kernels.compression",
    "nsa_attention": "nsa.kernels.dispatch",
    "explain": "nsa.kernels.dispatch",
    "reference_attention": "nsa.kernels.dispatch",
}

__all__ = [
    "Config",
    "ConfigError",
    "KVCache",
    "NSAAttention",
    "NSATransformer",
    "Sizes",
    "build_model",
    "compress",
    "explain",
    "load_config",
    "nsa_attention",
    "reference_attention",
]


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        return getattr(import_module(_WHERE[name]), name)
    raise AttributeError(f"module 'nsa' has no attribute {name!r}")
