"""Native Sparse Attention (arXiv 2502.11089): a transformer, its kernels, its training and its tracers.

Names are resolved on first use, so that ``import nsa.trace`` costs nothing else.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nsa.config import Config as Config
    from nsa.config import ConfigError as ConfigError
    from nsa.config import load_config as load_config
    from nsa.kernels.compression import compress as compress
    from nsa.kernels.dispatch import explain as explain
    from nsa.kernels.dispatch import nsa_attention as nsa_attention
    from nsa.kernels.dispatch import reference_attention as reference_attention
    from nsa.model.attention import NSAAttention as NSAAttention
    from nsa.model.decoding import KVCache as KVCache
    from nsa.model.transformer import NSATransformer as NSATransformer
    from nsa.model.transformer import build_model as build_model
    from nsa.sizes import Sizes as Sizes

_WHERE = {
    "nsa.config": ("Config", "ConfigError", "load_config"),
    "nsa.kernels.compression": ("compress",),
    "nsa.kernels.dispatch": ("explain", "nsa_attention", "reference_attention"),
    "nsa.model.attention": ("NSAAttention",),
    "nsa.model.decoding": ("KVCache",),
    "nsa.model.transformer": ("NSATransformer", "build_model"),
    "nsa.sizes": ("Sizes",),
}
__all__ = sorted(name for names in _WHERE.values() for name in names)


def __getattr__(name: str) -> Any:
    for module, names in _WHERE.items():
        if name in names:
            return getattr(import_module(module), name)
    raise AttributeError(f"module 'nsa' has no attribute {name!r}")
