"""Names of parameters and modules as the user knows them."""

from __future__ import annotations


def plain_name(name: str) -> str:
    """A parameter's or module's name without the prefixes that DDP, FSDP and checkpoint wrappers add."""
    for wrapper in ("module.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod."):
        name = name.replace(wrapper, "")
    return name
